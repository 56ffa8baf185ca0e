"""The paper's analyses, and four of ours: each runs on the models of a seed and makes a table and a figure."""

"""The paper's analyses, and three of ours: each runs on the models of a seed and makes a table and a figure."""

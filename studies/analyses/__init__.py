"""The paper's analyses, and a few of our own: each runs on the models of a seed, and gives a table and a figure."""

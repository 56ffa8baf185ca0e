"""Evaluation of any model, `he.evaluate`: one pass over each set, one value per sample, every number from these."""

"""The model: an `Ensemble` of M members, two-tower models, and their cost."""

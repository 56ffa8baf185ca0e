"""The model: an `Ensemble` of M members, two-tower models, and what they cost."""

"""What Hydra Ensembles are compared with, one file a method."""

"""One training loop for classifiers and text towers."""

"""Zero-shot studies of dual encoders."""

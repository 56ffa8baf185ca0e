"""An attack on the library: damaged files, bad inputs, kills. `PYTHONPATH=tests python -m attack` runs all of it."""

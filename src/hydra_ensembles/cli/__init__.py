"""The command line, `hydra-ensembles`: one file per command."""

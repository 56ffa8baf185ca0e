"""The command line, `hydra-ensembles`: one file a command."""

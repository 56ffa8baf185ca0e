"""`python -m hydra_ensembles`: the command line."""

if __name__ == "__main__":
    import hydra_ensembles_cli

    hydra_ensembles_cli.main()

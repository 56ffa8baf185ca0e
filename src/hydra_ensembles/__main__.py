"""`python -m hydra_ensembles`: the command line."""

from .cli.main import main

if __name__ == "__main__":
    main()

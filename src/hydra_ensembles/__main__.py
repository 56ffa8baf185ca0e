"""`python -m hydra_ensembles`: the command line."""

from .cli.entry import main

if __name__ == "__main__":
    main()

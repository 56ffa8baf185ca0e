"""The entry point of the command line."""

import typer

from . import compare, report


def make_app() -> typer.Typer:
    """The command line with all its commands."""
    app = typer.Typer(
        help="Uncertainty from one pretrained transformer: build, evaluate and compare Hydra Ensembles.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_root)
    app.command(epilog=compare.EXAMPLES)(compare.compare)
    app.command(epilog=report.EXAMPLES)(report.report)
    return app


def _root() -> None:
    """Uncertainty from one pretrained transformer: build, evaluate and compare Hydra Ensembles."""


def main() -> None:
    """Run the command line."""
    make_app()()


if __name__ == "__main__":
    main()

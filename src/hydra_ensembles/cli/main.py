"""The entry point of the command line."""

import logging
import warnings
from typing import Annotated

import typer

from .._utils import __version__
from . import bench, build, compare, demo, evaluate, info, predict, report

HELP = "Uncertainty from one pretrained transformer: build, evaluate, compare and use Hydra Ensembles."
EXAMPLES = """\b
Examples:
  hydra-ensembles demo
  hydra-ensembles build timm:vit_base_patch16_224 --id val/ --ood other/ --prune 24 --output run
  hydra-ensembles predict run photo.jpg
  hydra-ensembles COMMAND --help
"""


def make_app() -> typer.Typer:
    """The command line with all its commands."""
    app = typer.Typer(
        help=HELP,
        epilog=EXAMPLES,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["--help", "-h"]},
    )
    app.callback(epilog=EXAMPLES)(_root)
    for module, command, summary in (
        (demo, demo.demo, "See the whole method on an embedded model, offline."),
        (build, build.build, "Make a Hydra Ensemble from one trained model."),
        (evaluate, evaluate.evaluate, "Measure a model on its task and on OOD data."),
        (compare, compare.compare, "Show saved evaluations side by side in one table."),
        (report, report.report, "Write saved evaluations as one HTML page."),
        (predict, predict.predict, "Label images or texts, or abstain."),
        (bench, bench.bench, "Measure what a model costs, beside baselines."),
        (info, info.info, "Show what is in a model, with a map of its heads."),
    ):
        app.command(short_help=summary, epilog=module.EXAMPLES)(command)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"hydra-ensembles {__version__}")
        raise typer.Exit


def _root(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Uncertainty from one pretrained transformer: build, evaluate, compare and use Hydra Ensembles."""


def main() -> None:
    """Run the command line."""
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its retries; what fails is said once, by us
    make_app()()


if __name__ == "__main__":
    main()

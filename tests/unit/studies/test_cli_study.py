"""`hydra-ensembles study`: options and errors."""

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from studies.__main__ import EXAMPLES, study
from studies.recipe import STUDIES


@pytest.fixture
def app() -> typer.Typer:
    app = typer.Typer()
    app.command(epilog=EXAMPLES)(study)
    return app


def test_unknown_studies_and_stages_are_one_line(app: typer.Typer, tmp_path: Path) -> None:
    runner = CliRunner()
    result = runner.invoke(app, ["imagenet"])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: no study 'imagenet'")
    result = runner.invoke(app, [STUDIES[0], "--stages", "dream", "--output", str(tmp_path)])
    assert result.exit_code == 2
    assert "stages ['dream'] do not exist" in result.stderr
    result = runner.invoke(app, [STUDIES[0], "--seeds", "0;1", "--output", str(tmp_path)])
    assert result.exit_code == 2
    assert "--seeds takes whole numbers" in result.stderr


def test_collecting_an_unfinished_run_says_what_is_missing(app: typer.Typer, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [STUDIES[0], "--collect", "--output", str(tmp_path)])
    assert result.exit_code == 2
    assert "run the stage `choose` first" in result.stderr

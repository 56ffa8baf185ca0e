"""The command line as a whole: help, settings, exit codes."""

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from cli_cases import fail, run, succeed
from hydra_ensembles.cli.common import named_columns, read_settings, split_name
from hydra_ensembles.cli.main import app, report_failure
from hydra_ensembles.errors import ConfigError, DataError
from hydra_ensembles.serve.rows import sources
from hydra_ensembles.training.recipe import Recipe
from processes import environment

COMMANDS = [command.callback.__name__ for command in app.registered_commands if command.callback]


def test_every_command_helps_on_one_screen_with_an_example() -> None:
    listed = succeed("--help")
    for name in COMMANDS:
        assert f"\n  {name} " in listed
        help = succeed(name, "--help")
        assert "Example:\n    hydra-ensembles " in help
        assert len(help.splitlines()) <= 64, name


def test_help_loads_no_torch_and_a_command_imports_inside() -> None:
    code = (
        "import sys\nsys.argv = ['x', '--help']\nfrom hydra_ensembles.cli.main import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "assert not {'torch', 'numpy', 'rich', 'yaml'} & sys.modules.keys(), sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=environment(), stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (DataError("two\nlines"), 2, "error: two lines"),
        (OSError("no disk"), 2, "error: no disk"),
        (torch.OutOfMemoryError("16 GiB"), 2, "error: not enough memory"),
        (KeyError("x"), 1, "internal error"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_each_failure_has_its_exit_code_and_one_line(error, code, says, capsys, monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["x", "build", "my model"])
    if isinstance(error, KeyboardInterrupt):
        error.add_note("finished work is kept in run")
    assert report_failure(error, debug=False) == code
    said = capsys.readouterr().err
    assert said.startswith(says)
    assert len(said.splitlines()) == 1
    if code == 130:
        assert "hydra-ensembles build 'my model'" in said


def test_a_wrong_option_and_a_missing_model_are_told_in_a_line(tmp_path: Path) -> None:
    assert run("predict", "--colour", "x").exit_code == 2
    assert "does not exist" in fail("info", "no-such")
    fail("info", tmp_path)  # an empty folder


@dataclass(frozen=True)
class Some:
    model: str
    share: float = 0.5
    recipe: Recipe | None = None
    names: tuple[str, ...] = ()
    columns: dict[str, str] = field(default_factory=dict)


def test_the_file_then_options_then_single_settings(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("model: m\nshare: 1e-1\nrecipe: sst2\nnames: [a, b]\n")
    (some,) = read_settings(
        [Some], file, {"share": None, "names": []}, ["recipe.epochs=2", "recipe.learning_rate=1e-5"]
    )
    assert (some.model, some.share, some.names) == ("m", 0.1, ("a", "b"))
    assert (some.recipe.epochs, some.recipe.steps, some.recipe.learning_rate) == (2, None, 1e-5)
    (other,) = read_settings([Some], file, {"share": 0.3, "model": Path("x")}, ["recipe=null"])
    assert (other.share, other.model, other.recipe) == (0.3, "x", None)


@pytest.mark.parametrize(
    ("text", "changes", "token"),
    [
        ("model: m\nshares: 1\n", [], "did you mean share"),
        ("share: 0.5\n", [], "model"),
        ("model: m\n", ["share=[1, 2]"], "share"),
        ("model: m\n", ["recipe=no-such"], "no-such"),
    ],
)
def test_settings_that_do_not_exist_or_cannot_be(tmp_path: Path, text: str, changes: list[str], token: str) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=token):
        read_settings([Some], file, {}, changes)


def test_columns_names_and_places_of_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert named_columns(["text=review", "label=a=b"]) == {"text": "review", "label": "a=b"}
    with pytest.raises(ConfigError, match="colour"):
        sources(tmp_path, "image", named_columns(["colour=x"]))
    monkeypatch.chdir(tmp_path)
    Path("a=b").mkdir()
    assert split_name("a=b") == ("a=b", "a=b")  # a path may contain "="
    assert split_name("cars=data/") == ("cars", "data/")

"""Common to all commands: options from settings, files of settings, exit codes, and one-line errors."""

import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from typer.testing import CliRunner

import hydra_ensembles as he
import hydra_ensembles_cli
from cli_cases import fail, run, succeed
from hydra_ensembles.cli.build import BuildSources
from hydra_ensembles.cli.command import read_settings, report_failure
from hydra_ensembles.cli.evaluations import EvaluateSettings
from hydra_ensembles.cli.main import TABLE, commands, table
from hydra_ensembles.cli.predict_info import named_columns
from hydra_ensembles.errors import ConfigError, ConversionError

_LISTED = "demo calibrate fuse build search evaluate compare report atlas predict score serve export bench info"
COMMANDS = _LISTED.split()
KINDS = {"sources": BuildSources, "hydra": he.HydraConfig}


def settings(file: Path | None = None, *changes: str, **options: object) -> he.HydraConfig:
    """The config of a build from a file, `--set` and options."""
    given = {"model": "m", "output": "x", "prune": 1, **options}
    given = {name: value for name, value in given.items() if file is None or f"{name}: ''" not in file.read_text()}
    return read_settings(KINDS, {"quiet": False, **given}, file, changes)["hydra"]


def test_every_command_is_listed_and_helps_with_examples():
    out = succeed("--help")
    assert [one.__name__ for one in commands()] == COMMANDS
    for name in COMMANDS:
        assert f"\n  {name} " in out
        assert f"\n    hydra-ensembles {name} " in succeed(name, "-h").split("Examples:")[1]
    assert succeed("--version") == f"hydra-ensembles {he.__version__}\n"


def test_the_table_behind_help_and_completion_is_that_of_the_commands():
    assert TABLE.read_text() == table(), "make commands writes it anew"
    assert '"help": ""' not in table()  # every option is described
    asked = []
    app = hydra_ensembles_cli.make_app(hydra_ensembles_cli.read_table(), lambda *command: asked.append(command))
    for words in ([], ["-h"], ["--version"], ["bulid"], ["info", "x", "-x"], *([name, "-h"] for name in COMMANDS)):
        CliRunner().invoke(app, words)
    assert not asked
    assert CliRunner().invoke(app, ["predict", "m", "--text", "--help", "-f", "csv"]).exit_code == 0
    ((first, one),) = asked  # a text that looks like an option does not ask for help
    assert (first, one["text"], one["format"]) == ("predict", ["--help"], "csv")


def test_help_version_and_completion_load_no_torch():
    """In a new process, as called by a shell."""
    lines = [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS), ["build", "--membrs", "3"]]
    code = (
        "import os, sys, hydra_ensembles_cli\n"
        f"for words in {lines!r}:\n"
        "    sys.argv = ['hydra-ensembles', *words]\n"
        "    try: hydra_ensembles_cli.main()\n"
        "    except SystemExit as end: assert bool(end.code) == ('--membrs' in words), words\n"
        "os.environ |= {'_HYDRA_ENSEMBLES_COMPLETE': 'complete_bash', 'COMP_CWORD': '3'}\n"
        "os.environ['COMP_WORDS'] = 'hydra-ensembles build --strategy '\n"
        "try: hydra_ensembles_cli.main()\n"
        "except SystemExit: print({'torch', 'numpy', 'hydra_ensembles'} & set(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("\ncircuit\ntaylor\nsampled\nrandom\nbranches\nset()\n")
    assert "No such option: --membrs (Possible options: --members)\n" in done.stderr  # only similar options


def test_the_file_then_options_then_single_settings(tmp_path):
    file = tmp_path / "build.yaml"
    file.write_text("members: 5\nseed: 3\nrecipe: {learning_rate: 1e-4, steps: 3, train_groups: [mlp]}\n")
    found = settings(file, "recipe.epochs=2", "recipe.steps=null", "seed=7", members=4)
    assert (found.members, found.seed) == (4, 7)
    assert found.recipe == he.Recipe(learning_rate=1e-4, epochs=2, train_groups=("mlp",))  # 1e-4 is a number
    assert settings(recipe="none").recipe is None
    changed = settings(None, "recipe.learning_rate=0.1", "recipe.steps=900", recipe="cifar100-classifier")
    assert changed.recipe == he.Recipe.preset("cifar100-classifier", steps=900, grid=(), learning_rate=0.1)


def test_texts_are_taken_literally_and_the_choice_none_is_none():
    given = {"model": "m", "output": "x", "columns": ["label=stars #raw", "text=No"]}
    found = read_settings(KINDS, given, None, ("train=2024", "id=null", "prune=1"))["sources"]
    assert (found.columns, found.train, found.id) == ({"label": "stars #raw", "text": "No"}, "2024", None)
    assert named_columns(["label=stars #raw"]).label == "stars #raw"
    given = {"model": "m", "id": "x", "name": "a name"}
    for unset in ("name=", "name=null"):  # a text that may be None
        assert read_settings({"settings": EvaluateSettings}, given, None, (unset,))["settings"].name is None
    assert settings(familiarity="none").familiarity is None
    assert settings(None, "familiarity=none").familiarity is None


def test_settings_of_a_command_are_named_without_their_class():
    line = ["m", "--id", "x", "-o", "y"]
    assert fail("calibrate", *line, "--share", 1.5).startswith("error: share must be")
    assert fail("build", *line, "--set", "members=x").startswith("error: members must be")
    assert fail("build", *line, "--set", "limit=x").startswith("error: limit must be")
    assert fail("serve", "m", "--set", "timeout=x").startswith("error: timeout must be")


@pytest.mark.parametrize(
    ("text", "changes", "says"),
    [
        ("menbers: 3", (), "did you mean members"),
        ("model: a\noutput: run\nmodel: b", (), "'model' occurs twice"),
        ("recipe: {preset: sst2, epoch: 3}", (), "epoch"),
        ("", ("depth=3",), "no setting 'depth'"),
        ("", ("recipe.steps=3",), "learning_rate"),
        ("model: ''", (), "model is empty"),
        *((f"members: {wrong}", (), f"'{wrong}' is no decimal number") for wrong in ("010", "1:30")),
    ],
)
def test_settings_that_do_not_exist_or_cannot_be(tmp_path, text, changes, says):
    file = tmp_path / "build.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        settings(file, *changes)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (KeyError("lost"), 1, "internal error, please report it: KeyError: 'lost'; --debug shows where\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (ConversionError("what \nwhy\nwhat works"), 2, "error: what\nwhy\nwhat works\n"),  # refusals keep their lines
        (torch.OutOfMemoryError("full"), 2, "error: not enough memory (full)"),
    ],
)
def test_each_failure_has_its_exit_code_and_one_line(monkeypatch, error, code, says):
    monkeypatch.setattr("hydra_ensembles.cli.predict_info.load_model", Mock(side_effect=error))
    result = run("info", "anything")
    assert result.exit_code == code
    assert result.stderr.startswith(says)
    assert "Traceback (most recent call last)" in run("info", "anything", "--debug").stderr
    assert report_failure(SystemExit(3), debug=False) is None


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path, monkeypatch):
    """`hydra-ensembles predict ... | head -1`: the pipe is closed before everything is written."""
    with (tmp_path / "pipe").open("w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert report_failure(BrokenPipeError(), debug=False) == 0
        pipe.write("what is still in the buffer goes nowhere")
    assert (tmp_path / "pipe").read_text() == ""

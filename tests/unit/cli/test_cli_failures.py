"""How commands end: exit codes, one line, tracebacks only on request."""

import subprocess
import sys

import pytest
import torch

import hydra_ensembles
from cli_cases import run, succeed
from hydra_ensembles.cli.errors import report_failure
from hydra_ensembles.cli.main import make_app
from hydra_ensembles.errors import DataError

COMMANDS = ["demo", "build", "evaluate", "compare", "report", "predict", "bench", "info", "study"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_helps_with_examples(command):
    out = succeed(command, "--help")
    assert f"hydra-ensembles {command} " in out.split("Examples:")[1]
    assert "--debug" in out
    assert out == succeed(command, "-h")


def test_every_command_is_listed():
    out = succeed("--help")
    registered = [one.callback.__name__ for one in make_app().registered_commands if one.callback]
    assert registered == COMMANDS
    for name in registered:
        assert f"\n  {name} " in out


def test_version():
    assert succeed("--version") == f"hydra-ensembles {hydra_ensembles.__version__}\n"


def test_wrong_arguments_are_exit_code_2():
    for arguments, says in (
        (["bulid"], "No such command 'bulid'. Did you mean 'build'?"),
        (["info"], "Missing argument 'MODEL'"),
        (["info", "x", "--jsn"], "No such option"),
        (["build", "x", "--prune", "many"], "Invalid value for '--prune'"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2
        assert says in result.stderr
        assert "Traceback" not in result.stderr


@pytest.mark.parametrize("arguments", [["--debug", "info", "nowhere"], ["info", "nowhere", "--debug"]])
def test_debug_shows_the_traceback_and_the_line(arguments):
    result = run(*arguments)
    assert result.exit_code == 2
    assert "Traceback (most recent call last)" in result.stderr
    assert result.stderr.strip().splitlines()[-1].startswith("error: no model 'nowhere'")


def test_a_mistake_of_ours_is_exit_code_1(monkeypatch):
    def broken(settings: object) -> None:
        raise KeyError("lost")

    monkeypatch.setattr("hydra_ensembles.cli.models.load_model", broken)
    result = run("info", "anything")
    assert result.exit_code == 1
    assert result.stderr == "internal error, please report it: KeyError: 'lost'; --debug shows where\n"
    assert "in broken" in run("info", "anything", "--debug").stderr


def test_an_interrupt_is_exit_code_130(monkeypatch):
    def interrupted(settings: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hydra_ensembles.cli.models.load_model", interrupted)
    result = run("info", "anything")
    assert result.exit_code == 130
    assert result.stderr == "interrupted\n"


def test_what_each_failure_says(capsys):
    cases = [
        (DataError("two\nlines"), 2, "error: two lines"),
        (
            DataError(
                'HydraConfig.taylor_scope is odd: use strategy="random", give id= and columns=Columns(label=...)'
            ),
            2,
            "error: --taylor-scope is odd: use --strategy random, give --id and --column label=NAME",
        ),
        (DataError("a--odd_name.csv is not here"), 2, "error: a--odd_name.csv is not here"),
        (DataError("runs/seed=3,batch_size=64/m is empty"), 2, "error: runs/seed=3,batch_size=64/m is empty"),
        (DataError("Recipe.yaml is no recipe"), 2, "error: Recipe.yaml is no recipe"),
        (DataError("Recipe.steps must be whole"), 2, "error: --recipe-option steps must be whole"),
        (DataError("give seed=3 or batch_size=64."), 2, "error: give --seed 3 or --batch-size 64."),
        (PermissionError(13, "Permission denied", "x"), 2, "error: [Errno 13] Permission denied: 'x'"),
        (torch.OutOfMemoryError("full"), 2, "lower --batch-size"),
        (MemoryError(), 2, "not enough memory"),
        (SystemExit(3), None, ""),
    ]
    for error, code, says in cases:
        assert report_failure(error, debug=False) == code
        assert says in capsys.readouterr().err


def test_a_reader_that_has_seen_enough_is_no_error(run_folder, world):
    """`hydra-ensembles predict ... | head -1`: the pipe is closed before everything is written."""
    command = [sys.executable, "-m", "hydra_ensembles", "predict", str(run_folder), str(world / "dots"), "-f", "csv"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait() == 0
    assert errors == ""


def test_the_package_runs_as_a_module():
    result = subprocess.run([sys.executable, "-m", "hydra_ensembles", "--version"], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("hydra-ensembles ")

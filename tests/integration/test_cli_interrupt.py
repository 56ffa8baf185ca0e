"""Ctrl-C in a build, in a process of its own, and going on afterwards."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import cli_cases as cases

SCRIPT = Path(__file__).with_name("interrupted_cli.py")


def flags(folder: Path, output: str) -> list[str]:
    model = cases.vit_flags(folder / "mine.safetensors")
    sets = ["--id", str(folder / "val"), "--ood", str(folder / "stripes")]
    return ["build", *model, *sets, "--prune", "4", "--quiet", "--output", str(folder / output)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model and data, and a build without a break."""
    place = tmp_path_factory.mktemp("interrupted")
    cases.save_vit(place / "mine.safetensors")
    cases.save_images(place / "val", 16, seed=1)
    cases.save_stripes(place / "stripes", 24, seed=3)
    cases.succeed(*flags(place, "whole"))
    return place


def resume_as_told(folder: Path, output: str, line: str) -> None:
    """Give the command that the message names; the result must have the bits of the build without a break."""
    assert line.startswith("interrupted: finished stages are kept in ")
    assert not (folder / output / "ensemble").exists()
    (advice,) = re.findall(r"hydra-ensembles (build --config \S+)", line)
    cases.succeed(*advice.split(), "--quiet")
    for name in ("model.safetensors", "config.json"):
        whole, resumed = (folder / run / "ensemble" / name for run in ("whole", output))
        assert whole.read_bytes() == resumed.read_bytes()


def test_a_build_goes_on_after_a_signal_and_ends_with_the_same_bits(folder: Path) -> None:
    command = [sys.executable, str(SCRIPT), "rankings/acc.json", *flags(folder, "signalled")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 130, result.stderr
    assert "Traceback" not in result.stderr
    resume_as_told(folder, "signalled", result.stderr.strip().splitlines()[-1])


@pytest.mark.parametrize("moment", ["heads.json", "members/1/config.json"])
def test_other_moments(folder: Path, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    output, original = f"at-{moment.replace('/', '-')}", os.replace

    def replace(source: Any, target: Any, **options: Any) -> None:
        if str(target).endswith(moment):
            raise KeyboardInterrupt
        original(source, target, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", replace)
        result = cases.run(*flags(folder, output))
    assert result.exit_code == 130
    resume_as_told(folder, output, result.stderr.strip())


def test_before_anything_is_finished(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object, **settings: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hydra_ensembles.cli.build_run.build_ensemble", interrupted)
    result = cases.run(*flags(folder, "nothing"))
    assert result.exit_code == 130
    assert "nothing was finished yet; to start over: hydra-ensembles build --config" in result.stderr
    assert (folder / "nothing" / "config.yaml").exists()

"""Every example runs as its own documentation says, offline, and prints what it promises."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
EXPECTED = {  # what each one prints, and the folder it leaves a model in
    "abstain.py": (
        r"share asked for .*\n(?: .*%.*\n){4}test +\{.*\nAnnualCrop +\{.*\nFashionMNIST +\{",
        "hydra-abstain",
    ),
    "choose_members.py": (r"members +pruned +accuracy.*\n +1 +0 +\d+\.\d%.* 1\.00x +1\.00x\n(?: .*%.*\n){4}", None),
    "hf_bert.py": (r"positive .* accept .*wonderful\nnegative .* accept .*stale\n", "hydra-bert/model"),
    "timm_vit.py": (r"heads kept(?:.*\n)+(?:.*(?:accept|abstain).*\n){5}of 32 pictures .* from \d+", "hydra-vit/model"),
    "zero_shot.py": (r"at most \d\.\de-0[5-9]\n(?:.* -> .*epistemic.*\n){5}saved to", "hydra-zero-shot"),
}
FASTER = {"choose_members.py": ["--members", "1", "3", "--images", "32"], "abstain.py": ["--images", "48"]}


def run(folder: Path, name: str, *options: str) -> str:
    """Run an example in an empty folder; warnings and the network are forbidden."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    command = [sys.executable, str(EXAMPLES / name), *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", EXPECTED)
def test_example(tmp_path: Path, name: str) -> None:
    printed = run(tmp_path, name, *FASTER.get(name, []))
    pattern, model = EXPECTED[name]
    assert re.search(pattern, printed), printed
    if model is not None:
        assert (tmp_path / model / "model.safetensors").exists()


def test_every_example_is_run() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} - {"train_demo_backbone.py"} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_examples_are_short_and_explain_themselves(name: str) -> None:
    text = (EXAMPLES / name).read_text()
    assert len(text.splitlines()) < 120
    assert f"python examples/{name}" in text.split('"""')[1]
    assert "argparse.ArgumentParser(description=__doc__" in text  # so that --help shows it

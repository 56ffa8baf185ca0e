"""The examples of docs/cli.md, run one after the other as a reader would."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch

import cli_cases as cases

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "cli.md"
ELSEWHERE = ("demo", "serve", "export")  # tested elsewhere
VIT = ("timm:vit_small_patch16_224", "timm:test_vit")  # a small model in place of the documented one
FASTER = {  # without progress bars, and with the method fastest for small models
    "build": ["--quiet"],
    "evaluate": ["--quiet"],
    "score": ["--quiet"],
    "search": ["--quiet"],
    "bench": ["--repeats", "1"],
}


def commands() -> list[list[str]]:
    blocks = re.findall(r"```bash\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    lines = [shlex.split(line) for block in blocks for line in block.splitlines() if line.strip()]
    assert all(line[0] == "hydra-ensembles" for line in lines)
    return [line[1:] for line in lines]


def adapted(command: list[str]) -> list[str]:
    """The command for the small model."""
    more = FASTER.get(command[0], [])
    if VIT[0] in command:
        command = [VIT[1] if part == VIT[0] else part for part in command]
        more = [f"--option={name}={value}" for name, value in cases.VIT_OPTIONS.items()]
    if command[:1] == ["build"] and "--ood" in command:
        more = [*more, "--limit", "14"]
    return [
        place for part in command for place in (sorted(map(str, Path().glob(part))) if "*" in part else [part])
    ] + more


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import timm

    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("my-vit", "seed-1", "seed-2")):
        model = cases.small_vit()
        with torch.no_grad():
            model.head.weight.add_(0.01 * number)
        settings = {"num_classes": 3, "label_names": list(cases.COLOURS)}
        timm.models.save_for_hf(model, name, model_config=settings, model_args=cases.VIT_OPTIONS)
    cases.save_vit(tmp_path / "mine.safetensors")
    cases.save_bert(tmp_path / "my-bert")
    cases.save_images(tmp_path / "val", 20, seed=1)
    cases.save_images(tmp_path / "test", 4, seed=2)
    for name, seed in (("other", 3), ("cars", 4), ("digits", 5)):
        cases.save_stripes(tmp_path / name, 14, seed)
    shutil.copy(tmp_path / "cars" / "0.png", tmp_path / "photo.jpg")
    cases.save_reviews(tmp_path / "reviews-val.csv", 160, seed=5)
    cases.save_reviews(tmp_path / "reviews-test.jsonl", 20, seed=6)
    (tmp_path / "reviews.txt").write_text("a good film\na bad film\n")
    (tmp_path / "candidates.yaml").write_text("[{shared_layers: 2, strategy: random, prune: 1}]")
    return tmp_path


@pytest.mark.ci
def test_the_examples_run(folder: Path) -> None:
    for command in commands():
        if command[0] not in ELSEWHERE:
            cases.succeed(*adapted(command))
    assert (folder / "report.html").stat().st_size > 10_000
    assert len((folder / "predictions.jsonl").read_text().splitlines()) == 12


def test_every_command_has_an_example() -> None:
    from hydra_ensembles.cli.main import app

    named = {one.name or one.callback.__name__ for one in app.registered_commands if one.callback}
    assert named <= {command[0] for command in commands()}

"""The command line, given wrong paths, wrong names and wrong values wherever it takes one: it ends with a clear error.

That is exit status 2 and a message; an internal error, a traceback, or silence is a defect.
"""

import os
import pickle
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from cli_cases import run as run_command
from cli_cases import save_images, save_reviews, save_stripes
from hydra_ensembles.errors import ConfigError

from .counting import Row, count
from .expected import drawn
from .jobs import evaluation
from .small import hydra

CASES = 600

Case = tuple[str, str]  # a command with a place, and what is put there


def run(cases: int, seed: int) -> list[Row]:
    """One row."""
    return [count("commands", check, drawn(all_cases(), cases, seed))]


def check(case: Case) -> str:
    """Run a command with a wrong value in its place, written `?`."""
    command, wrong = case
    world = _world()
    words = [wrong if word == "?" else word.replace("{}", str(world)) for word in command.split()]
    words = [word.replace("@", f"{world}/bad/") if word.startswith("@") else word for word in words]
    with tempfile.TemporaryDirectory() as place:  # what is written goes there
        before = os.getcwd()
        os.chdir(place)
        try:
            result = run_command(*words, input="")
        finally:
            os.chdir(before)
    said = " ".join(result.output.split())
    if result.exit_code == 2 and "internal error" not in said and said:
        raise ConfigError(said)
    if result.exit_code == 0:
        return "same" if command in MAY_WORK else "other"
    raise AssertionError(f"exit status {result.exit_code}: {said[-300:]} {result.exception!r}")


@cache
def all_cases() -> list[Case]:
    """Every wrong value in every place for one of its kind."""
    tables = ((PATHS, (*WRONG_PATHS, os.devnull)), (OUTPUTS, WRONG_PATHS), (VALUES, WRONG_VALUES))
    return [(command, wrong) for commands, values in tables for command in commands for wrong in values]


PATHS = (
    "info ?",
    "info timm:test_vit --weights ?",
    "predict ? {}/val/red/0.png",
    "predict {}/model ?",
    "predict {}/texts ?",
    "evaluate ? --id {}/val --output out -q",
    "evaluate {}/model --id ? --output out -q",
    "evaluate {}/model --id {}/val --ood ? --output out -q",
    "evaluate {}/model --id {}/val --shift fog=? --output out -q",
    "evaluate {}/texts --id ? --output out -q",
    "evaluate {}/model --suite ? --output out -q",
    "build ? --id {}/val --ood {}/stripes --prune 2 --output out -q",
    "build {}/single --id ? --ood {}/stripes --prune 2 --output out -q",
    "build {}/single --id {}/val --ood ? --prune 2 --output out -q",
    "build {}/single --id {}/val --strategy taylor --train ? --prune 3 --output out -q",
    "build --config ?",
    "evaluate --config ?",
    "compare ?",
    "compare {}/evaluation.json ?",
    "report ?",
    "bench ?",
)
OUTPUTS = (
    "compare {}/evaluation.json --output ?",
    "report {}/evaluation.json --output ?",
    "predict {}/model {}/val/red/0.png --output ?",
    "evaluate {}/model --id {}/val -q --output ?",
)
MAY_WORK = OUTPUTS
WRONG_PATHS = (
    "nowhere",
    "nowhere/at/all.json",
    "@empty",
    "@empty.json",
    "@text.json",
    "@broken.json",
    "@list.json",
    "@deep.json",
    "@binary",
    "@binary.csv",
    "@binary.png",
    "@pickle.bin",
    "@pickle.safetensors",
    "@loop",
    "@dangling",
    "@pipe",
    "@closed/../broken.yaml",
    "timm:",
    "timm:nonsense",
    "hub:",
    "hub:a/b/c",
    "suite:",
    "suite:nonsense:test",
    "near:",
    "=",
    "x" * 5000,
    "half\ud800",
)
VALUES = (
    "info {}/model --device ?",
    "predict {}/model {}/val/red/0.png --threshold ?",
    "predict {}/model {}/val/red/0.png --batch-size ?",
    "predict {}/model {}/val/red/0.png --format ?",
    "predict {}/model {}/val/red/0.png --column ?",
    "evaluate {}/model --id {}/val -q --output out --score ?",
    "evaluate {}/model --id {}/val -q --output out --convention ?",
    "evaluate {}/model --id {}/val -q --output out --bootstrap ?",
    "evaluate {}/model --id {}/val -q --output out --batch-size ?",
    "evaluate {}/model --id {}/val -q --output out --workers ?",
    "evaluate {}/model --id {}/val -q --output out --set ?",
    "build {}/single --id {}/val --strategy random --output out -q --prune ?",
    "build {}/single --id {}/val --strategy random --prune 2 --output out -q --members ?",
    "build {}/single --id {}/val --prune 2 --output out -q --strategy ?",
    "build {}/single --id {}/val --strategy random --prune 2 --output out -q --recipe ?",
    "build {}/single --id {}/val --strategy random --prune 2 --output out -q --seed ?",
    "build {}/single --id {}/val --strategy random --prune 2 --output out -q --stem ?",
    "build {}/single --id {}/val --strategy random --prune 2 --output out -q --set ?",
    "bench {}/model --batch ? --repeats 1",
    "bench {}/model --batch 1 --baseline ? --repeats 1",
    "report {}/evaluation.json --focus ? --output out.html",
    "compare {}/evaluation.json --format ?",
)
WRONG_VALUES = (
    *("nonsense", "-1", "1.5", "nan", "1e400", "99999999999999999999999", "[]", "{a: 1}", "a=b=c"),
    *("!!python/object:os.system", "half\ud800"),
)


@cache
def _world() -> Path:
    """A folder with models, data and an evaluation, and one with what is none."""
    world = Path(tempfile.mkdtemp(prefix="attack-"))
    hydra().save_pretrained(world / "model")
    hydra().member(0).save_pretrained(world / "single")
    hydra("text").save_pretrained(world / "texts")
    save_images(world / "val", 4, seed=1)
    save_stripes(world / "stripes", 6, seed=2)
    save_reviews(world / "val.csv", 8, seed=3)
    evaluation().save(world / "evaluation.json")
    bad = world / "bad"
    (bad / "empty").mkdir(parents=True)
    (bad / "closed").mkdir()
    contents: dict[str, Any] = {
        "empty.json": b"",
        "text.json": b"a text",
        "broken.json": b'{"format": "hydra',
        "broken.yaml": b"a: [1\nb: {",
        "list.json": b"[1, 2, 3]",
        "deep.json": b"[" * 100_000,
        "binary": bytes(range(256)) * 8,
        "binary.csv": bytes(range(256)) * 8,
        "binary.png": b"\x89PNG\r\n\x1a\n" + bytes(range(256)),
        "pickle.bin": pickle.dumps({"weights": [1, 2]}),
        "pickle.safetensors": pickle.dumps({"weights": [1, 2]}),
    }
    for name, content in contents.items():
        (bad / name).write_bytes(content)
    (bad / "loop").symlink_to(bad / "loop")
    (bad / "dangling").symlink_to(bad / "nowhere")
    os.mkfifo(bad / "pipe")
    return world

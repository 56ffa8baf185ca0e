"""The command line with wrong paths, names and values in every place: it must end with a clear error.

That is exit status 2 with a message; internal errors, tracebacks and silence are defects. The same holds on full
disks, in read-only folders and where files vanish while they are read; Ctrl-C ends with 130.
"""

import contextlib
import os
import pickle
import resource
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import NoReturn

from cli_cases import COLOURS, save_images, save_reviews, save_stripes
from cli_cases import run as run_command
from hydra_ensembles import files
from hydra_ensembles.errors import ConfigError

from .children import confine, forked, watch
from .counting import Row, count
from .expected import drawn
from .jobs import evaluation, given
from .small import hydra

CASES = 1000

Case = tuple[str, str]  # a command with `?`, and the value for it; or a command, and how it is disturbed


def run(cases: int, seed: int) -> list[Row]:
    """One row for wrong values, and one for disturbed commands."""
    disturbed = [(command, how) for command in DISTURBED for how in HOW]
    few = max(1, round(len(disturbed) * min(1.0, cases / CASES)))
    return [
        count("commands", check, drawn(all_cases(), cases, seed)),
        count("commands, disturbed", check_disturbed, drawn(disturbed, few, seed)),
    ]


def check(case: Case) -> str:
    """Run a command with a wrong value in place of `?`."""
    command, wrong = case
    world = _world()
    words = [wrong if word == "?" else word.replace("{}", str(world)) for word in command.split()]
    words = [word.replace("@", f"{world}/bad/") if word.startswith("@") else word for word in words]
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):  # output is written there
        code, said = _ended(words)
    if code == 0:
        return "same" if command in MAY_WORK else "other"
    return _require_clear(code, said)


def check_disturbed(case: Case) -> str:
    """Run a valid command on a full disk, in a read-only folder, while files vanish, or until Ctrl-C."""
    command, how = case
    _require_works(command)
    with tempfile.TemporaryDirectory() as outside:
        world, place = Path(outside) / "world", Path(outside) / "place"
        shutil.copytree(_world(), world, ignore=shutil.ignore_patterns("bad"))
        place.mkdir()
        words = command.replace("{}", str(world)).split()

        def work() -> tuple[int, str]:
            os.chdir(place)
            _disturb(how, place)
            return _ended(words)

        ending = forked(work)
        code, said = given(ending)
    if code == 130 and how.startswith("Ctrl-C") and "interrupted" in said:
        raise ConfigError(said)
    return "same" if code == 0 else _require_clear(code, said)


@cache
def _require_works(command: str) -> None:
    """Check that the command works undisturbed: if refused for another reason, it would test nothing."""
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
        code, said = _ended(command.replace("{}", str(_world())).split())
    assert code == 0, f"does not even work undisturbed: {said}"


def _disturb(how: str, place: Path) -> None:
    """Disturb a command; changes the process, so call it in a child."""
    what, _, number = how.rpartition(" ")
    if what == "full disk":
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(number), resource.RLIM_INFINITY))
    elif what == "read-only":
        place.chmod(0o555)
        confine()
    elif what == "Ctrl-C":

        def stop(reached: int, name: str) -> None:
            if reached == int(number):
                raise KeyboardInterrupt

        watch(stop)
    else:
        plain, read = files.plain_file, []

        def vanishing(path: Path) -> Path:
            read.append(path)
            if len(read) == int(number):
                path.unlink(missing_ok=True)
            return plain(path)

        files.plain_file = vanishing


def _ended(words: list[str]) -> tuple[int, str]:
    """The exit status of a command and its output."""
    result = run_command(*words, input="")
    said = " ".join(result.output.split())
    return result.exit_code, said if result.exit_code in (0, 2, 130) else f"{said[-300:]} {result.exception!r}"


def _require_clear(code: int, said: str) -> NoReturn:
    if code == 2 and "internal error" not in said and said:
        raise ConfigError(said)
    raise AssertionError(f"exit status {code}: {said}")


@cache
def all_cases() -> list[Case]:
    """Every wrong value in every place of its kind."""
    tables = ((PATHS, (*WRONG_PATHS, os.devnull)), (OUTPUTS, WRONG_PATHS), (VALUES, WRONG_VALUES))
    return [(command, wrong) for commands, values in tables for command in commands for wrong in values]


DISTURBED = (
    "build {}/single --id {}/val --strategy random --prune 2 --shared-layers 0 --output out -q",
    "evaluate {}/model --id {}/val --ood {}/stripes -q --keep-logits --output out",
    "report {}/evaluation.json --output out.html",
    "compare {}/evaluation.json --format csv --output out.csv",
    "bench {}/model --batch 1 --repeats 1 --output out.json",
)
HOW = (
    *("full disk 0", "full disk 100", "full disk 3000", "full disk 20000", "read-only 0"),
    *(f"Ctrl-C {number}" for number in (0, 1, 2, 5, 9, 20)),
    *(f"vanished {number}" for number in (1, 2, 3, 5)),
)


PATHS = (
    "info ?",
    "info timm:test_vit --weights ?",
    "predict {}/model ?",
    "predict {}/texts ?",
    "evaluate ? --id {}/val --output out -q",
    "evaluate {}/model --id ? --output out -q",
    "evaluate {}/model --id {}/val --ood ? --output out -q",
    "evaluate {}/model --suite ? --output out -q",
    "build ? --id {}/val --ood {}/stripes --prune 2 --shared-layers 0 --output out -q",
    "build {}/single --id {}/val --ood ? --prune 2 --shared-layers 0 --output out -q",
    "build --config ?",
    "evaluate --config ?",
    "compare ?",
    "report ?",
    "bench ?",
)
OUTPUTS = (
    "compare {}/evaluation.json --output ?",
    "report {}/evaluation.json --output ?",
    "predict {}/model {}/val/red/0.png --output ?",
    "evaluate {}/model --id {}/val -q --output ?",
)
MAY_WORK = (
    *OUTPUTS,
    "predict {}/texts ?",  # any file's lines are texts
    "predict {}/model {}/val/red/0.png --threshold ?",
    "predict {}/model {}/val/red/0.png --batch-size ?",
)
WRONG_PATHS = (
    *("nowhere", "nowhere/at/all.json", "@empty", "@empty.json", "@text.json", "@broken.json", "@list.json"),
    *("@deep.json", "@binary", "@binary.csv", "@binary.png", "@pickle.bin", "@pickle.safetensors"),
    *("@loop", "@dangling"),
    *["@pipe", "@pipe.csv", "@pipe.json", "@pipe.png", "@pipe.safetensors", "@pipe.txt", "@closed/../broken.yaml"],
    *["timm:", "timm:nonsense", "hub:", "hub:a/b/c", "suite:", "suite:nonsense:test", "near:", "="],
    *("x" * 5000, "half\ud800"),
)
_PREDICT, _EVALUATE = "predict {}/model {}/val/red/0.png", "evaluate {}/model --id {}/val -q --output out"
_BUILD = "build {}/single --id {}/val --strategy random --prune 2 --shared-layers 0 --output out -q"
VALUES = (
    "info {}/model --device ?",
    *(f"{_PREDICT} --{option} ?" for option in ("threshold", "batch-size", "format", "column")),
    *(f"{_EVALUATE} --{name} ?" for name in ("score", "convention", "bootstrap", "batch-size", "workers", "set")),
    "build {}/single --id {}/val --strategy random --output out -q --prune ?",
    f"{_BUILD} --members ?",
    "build {}/single --id {}/val --prune 2 --shared-layers 0 --output out -q --strategy ?",
    *(f"{_BUILD} --{option} ?" for option in ("recipe", "seed", "stem", "set")),
    "bench {}/model --batch ? --repeats 1",
    "report {}/evaluation.json --focus ? --output out.html",
    "compare {}/evaluation.json --format ?",
)
WRONG_VALUES = (
    *("nonsense", "-1", "1.5", "nan", "1e400", "99999999999999999999999", "[]", "{a: 1}", "a=b=c"),
    *("!!python/object:os.system", "half\ud800"),
)


@cache
def _world() -> Path:
    """A folder with models, data and an evaluation, and a subfolder of invalid files."""
    world = Path(tempfile.mkdtemp(prefix="attack-"))
    coloured = hydra().with_metadata(labels=COLOURS)
    coloured.save_pretrained(world / "model")
    coloured.member(0).save_pretrained(world / "single")
    hydra("text").save_pretrained(world / "texts")
    save_images(world / "val", 4, seed=1)
    save_stripes(world / "stripes", 6, seed=2)
    save_reviews(world / "val.csv", 8, seed=3)
    evaluation().save(world / "evaluation.json")
    bad = world / "bad"
    (bad / "empty").mkdir(parents=True)
    (bad / "closed").mkdir()
    contents: dict[str, bytes] = {
        "empty.json": b"",
        "text.json": b"a text",
        "broken.json": b'{"format": "hydra',
        "broken.yaml": b"a: [1\nb: {",
        "list.json": b"[1, 2, 3]",
        "deep.json": b"[" * 100_000,
        **dict.fromkeys(("binary", "binary.csv"), bytes(range(256)) * 8),
        "binary.png": b"\x89PNG\r\n\x1a\n" + bytes(range(256)),
        **dict.fromkeys(("pickle.bin", "pickle.safetensors"), pickle.dumps({"weights": [1, 2]})),
    }
    for name, content in contents.items():
        (bad / name).write_bytes(content)
    (bad / "loop").symlink_to(bad / "loop")
    (bad / "dangling").symlink_to(bad / "nowhere")
    for suffix in ("", ".csv", ".json", ".png", ".safetensors", ".txt"):
        os.mkfifo(bad / f"pipe{suffix}")
    return world

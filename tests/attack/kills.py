"""Kills at any write or step of every long job; what can be read is whole, and the same bits come in the end."""

import functools
import json
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from safetensors.torch import load as read_tensors

import hydra_ensembles as he
from hydra_ensembles.store import Store
from hydra_ensembles.training.loop import Learner

from .counting import Row, count, digest
from .small import batches, dual, hydra, model, recipe, shuffled

CASES = 120
KILLED = 9

Case = tuple[str, float, float | None]  # a job, and its kills as fractions of its points; the second is optional


# --- jobs: each resumes in its folder and returns a digest of its result ----------------------------------------


def _circuit(folder: Path, method: Any) -> str:
    own, foreign = batches("image", 12, 4, seed=2), batches("image", 8, 4, seed=3, shift=1.5)
    ranking = he.extract_circuit(model(), own, foreign, budget=4, method=method, output=folder, progress=False)
    return digest(ranking.heads, ranking.scores)


def _finetune(folder: Path, kind: str = "image") -> str:
    how = recipe(learning_rate=None, grid=(0.05, 0.1), steps=4, evaluate_every=2)
    more: dict[str, Any] = {"output": folder, "progress": False, "checkpoint_every": 1}
    return digest(he.finetune(model(kind), shuffled(kind), how, batches(kind, 8, 4, seed=2), **more))


def _build(folder: Path, **settings: Any) -> str:
    usual = {"prune": 3, "shared_layers": 1, "members": 2, "recipe": recipe(steps=3, evaluate_every=2)}
    sets: dict[str, Any] = {"train": shuffled("image", 16), "id": shuffled("image", 24, seed=2)}
    sets["ood"] = batches("image", 8, 4, seed=3, shift=1.5)
    config = he.HydraConfig(**{**usual, **settings})
    return digest(he.build(model(), config, **sets, output=folder, progress=False))


def _evaluate(folder: Path) -> str:
    groups = {"near": {"other": batches("image", 12, 4, 2, 1.5)}}
    found = he.evaluate(hydra(), batches("image", 16, 4), groups, output=folder / "work", progress=False)
    found.save(folder / "hydra.json")
    return digest(he.Evaluation.load(folder / "hydra.json").numbers())


def _saved(folder: Path, make: Callable[[], Any]) -> str:
    make().save_pretrained(folder / "model")
    return digest(he.load(folder / "model").state_dict())


JOBS: dict[str, Callable[[Path], str]] = {
    "circuit, exact": functools.partial(_circuit, method="exact"),
    "circuit, naive": functools.partial(_circuit, method="naive"),
    "finetune": _finetune,
    "finetune, texts": functools.partial(_finetune, kind="text"),
    "build, circuits": functools.partial(_build, strategy="sampled", pool=5),
    "build, members together": functools.partial(_build, strategy="random", training="together"),
    "evaluate": _evaluate,
    "save": functools.partial(_saved, make=hydra),
    "save, two towers": functools.partial(_saved, make=dual),
}


# --- children, and the points of their work ---------------------------------------------------------------------


def forked(work: Callable[[], Any]) -> tuple[str, Any]:
    """Run `work` in a forked copy of this process: how it ended, and its result or error."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            ending = ("given", work())
        except BaseException:
            ending = ("raised", " ".join(traceback.format_exc().splitlines()[-3:]))
        with os.fdopen(writing, "wb") as pipe:
            pickle.dump(ending, pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        content = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    found: tuple[str, Any] = ("killed", None) if status == KILLED else pickle.loads(content)
    return found


def watch(act: Callable[[int], None]) -> None:
    """Call `act` with a number before and after every write and step from now on; call it in a child."""
    reached = 0

    def point() -> None:
        nonlocal reached
        act(reached)
        reached += 1

    def around(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        @functools.wraps(function)
        def watched(*given: Any, **named: Any) -> Any:
            point()
            result = function(*given, **named)
            point()
            return result

        setattr(owner, name, watched)

    for owner, names in ((os, ("replace", "rename", "unlink", "mkdir", "fsync")), (Store, ("step",))):
        for name in names:
            around(owner, name)
    around(Learner, "update")


@cache
def undisturbed(name: str) -> tuple[str, int]:
    """The result of a job, and the number of its points."""

    def walk() -> tuple[str, int]:
        last = [0]
        watch(lambda number: last.__setitem__(0, number + 1))
        return JOBS[name](folder), last[0]

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "work"
        folder.mkdir()
        how, found = forked(walk)
        again = forked(lambda: JOBS[name](folder))
    assert how == "given", found
    assert again == ("given", found[0]), f"{name} gives another result when it is run again: {again}"
    result: tuple[str, int] = found
    return result


def run(cases: int, seed: int) -> list[Row]:
    """One row per job; every other case is killed again while it resumes."""
    rows, random = [], Random(seed)
    for name in JOBS:
        places = [random.random() for _ in range(max(1, cases // len(JOBS)))]
        drawn = [(name, place, random.random() if index % 2 else None) for index, place in enumerate(places)]
        rows.append(count(f"killed: {name}", check, drawn))
    return rows


def check(case: Case) -> str:
    """Kill, perhaps twice, check the folder, resume, and compare with an undisturbed run."""
    name, *places = case
    expected, points = undisturbed(name)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "work"
        folder.mkdir()
        for number in (int(one * points) for one in places if one is not None):

            def interrupted(number: int = number) -> str:
                watch(lambda reached: os._exit(KILLED) if reached == number else None)
                return JOBS[name](folder)

            how, said = forked(interrupted)
            assert how in ("killed", "given"), said
            require_whole(folder)
        how, found = forked(lambda: JOBS[name](folder))
        assert how == "given", f"after a kill: {found}"
        if name.startswith("save"):  # it leaves alone what may be the save of another process, for an hour
            for path in folder.rglob(".*.tmp"):
                os.utime(path, (0, 0))
            JOBS[name](folder)
        # a file that is saved by itself has no store around it that clears up what a kill left
        left = [path for path in folder.rglob(".*.tmp") if not path.name.startswith(".hydra.")]
        assert not left, f"temporary files are left over: {left}"
    return "same" if found == expected else "other"


def require_whole(folder: Path) -> None:
    """Every file under its final name is complete; unfinished files have hidden names."""
    for path in folder.rglob("*"):
        if not path.is_file() or any(part.startswith(".") for part in path.relative_to(folder).parts):
            continue
        if path.suffix == ".json":
            json.loads(path.read_bytes())
        elif path.suffix == ".safetensors":
            read_tensors(path.read_bytes())

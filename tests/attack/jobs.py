"""Every kind of work that writes files: how to run it in a folder, and how to check that nothing was mixed."""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

from safetensors.torch import load as read_tensors

import hydra_ensembles as he

from . import small
from .children import Ending, forked, watch
from .expected import digest
from .small import Shuffled, batches, dual, hydra, model, pairs, recipe


@dataclass(frozen=True)
class Job:
    """One kind of work.

    Attributes:
        run: Runs it in a folder, resuming an earlier run; returns a digest of the result.
        prepare: Creates the initial content of the folder.
        state: The folder's content after a kill as a digest, one of `states`, or a `HydraError`; None where there is
            nothing to read before the work is finished.
    """

    run: Callable[[Path], str]
    prepare: Callable[[Path], Any] = lambda folder: None
    state: Callable[[Path], str] | None = None


# --- circuits and training ---------------------------------------------------------------------------------


def ranked(output: Path | None, kind: str = "image", **settings: Any) -> he.HeadRanking:
    own, foreign = batches(kind, 12, 4, seed=2), batches(kind, 8, 4, seed=3, shift=1.5)
    return he.extract_circuit(model(kind), own, foreign, output=output, progress=False, **settings)


def _circuit(folder: Path, method: Any, kind: str = "image") -> str:
    ranking = ranked(folder / "circuit", kind, budget=4, method=method)
    ranking.save(folder / "ranking.json")
    return _evidence(he.HeadRanking.load(folder / "ranking.json"))


def _evidence(ranking: he.HeadRanking) -> str:
    """The content of a ranking, without the amount of work, which depends on interruptions."""
    return digest(ranking.heads, ranking.scores, {**ranking.provenance, "model_forwards": 0})


def _joint_circuit(folder: Path) -> str:
    own, foreign = batches("image", 8, 4, seed=2), batches("image", 8, 4, seed=3, shift=1.5)
    names = {"class_names": small.LABELS, "progress": False}
    return _evidence(he.extract_circuit(dual(), own, foreign, budget=3, output=folder / "circuit", **names))


def finetune(folder: Path, recipe: he.Recipe, train: Any, kind: str = "image") -> he.Ensemble:
    held_out = batches(kind, 8, 4, seed=2)
    return he.finetune(model(kind), train, recipe, held_out, output=folder, progress=False, checkpoint_every=1)


def _finetune(folder: Path, kind: str = "image") -> str:
    how = recipe(learning_rate=None, grid=(0.05, 0.1), steps=4, evaluate_every=2)
    return digest(finetune(folder, how, Shuffled(kind), kind))


def _tune_text(folder: Path) -> str:
    how = recipe(steps=4, optimizer="adamw", learning_rate=0.01)
    data: dict[str, Any] = {"validation": pairs(8, 4, seed=2), "progress": False}
    return digest(he.tune_text(dual(), pairs(), how, output=folder, checkpoint_every=1, **data))


def build(folder: Path, recipe: he.Recipe, train: Any, kind: str = "image", **settings: Any) -> he.Ensemble:
    config = he.HydraConfig(**{"prune": 3, "shared_layers": 0, "members": 2, "recipe": recipe, **settings})
    own, foreign = Shuffled(kind, 24, seed=2), batches(kind, 8, 4, seed=3, shift=1.5)
    return he.build(model(kind), config, train=train, id=own, ood=foreign, output=folder, progress=False)


def _build(folder: Path, kind: str = "image", **settings: Any) -> str:
    return digest(build(folder, recipe(steps=3, evaluate_every=2), Shuffled(kind, 16), kind, **settings))


SAMPLED = {"strategy": "sampled", "pool": 5, "method": "exact", "shared_layers": 1}
TAYLOR = {"strategy": "taylor", "calibration_batches": 2}


# --- saving ------------------------------------------------------------------------------------------------


def _saved(folder: Path, make: Callable[[], he.Ensemble | he.DualEncoder]) -> str:
    make().save_pretrained(folder)
    return _loaded(folder)


def _loaded(folder: Path) -> str:
    return digest(he.load(folder))


def _other_hydra() -> he.Ensemble:
    """Another model of the same shape with other labels, to detect mixtures."""
    changed = he.Ensemble.from_state(
        hydra().config, {n: t + 1 for n, t in hydra().state_dict().items()}, hydra().metadata
    )
    return changed.with_metadata(labels=("one", "two", "three"))


# --- evaluations and reports -------------------------------------------------------------------------------


@cache
def evaluation(seed: int = 1, name: str = "Hydra") -> he.Evaluation:
    own, foreign = batches("image", 16, 4, seed), {"near": {"other": batches("image", 12, 4, seed + 1, 1.5)}}
    kept: dict[str, Any] = {"name": name, "keep_logits": True, "progress": False}
    return he.evaluate(hydra(), own, foreign, **kept)


def _evaluate(folder: Path, seed: int = 1) -> str:
    evaluation(seed).save(folder / "hydra.json")
    return _read_evaluation(folder)


def _read_evaluation(folder: Path) -> str:
    found = he.Evaluation.load(folder / "hydra.json")
    return digest(found.numbers(), found.logits)


def _report(folder: Path) -> str:
    he.write_report([evaluation(1, "A"), evaluation(1, "B")], folder / "report.html")
    return digest((folder / "report.html").read_text())


for library in ("matplotlib.figure", "matplotlib.backends.backend_svg"):
    import_module(library)  # here, so that no fork happens in the middle of it

JOBS: dict[str, Job] = {
    "circuit, exact": Job(partial(_circuit, method="exact")),
    "circuit of texts, naive": Job(partial(_circuit, method="naive", kind="text")),
    "circuit of two towers": Job(_joint_circuit),
    "finetune": Job(_finetune),
    "finetune, texts": Job(partial(_finetune, kind="text")),
    "tune_text": Job(_tune_text),
    "build, circuits": Job(partial(_build, **SAMPLED)),
    "build, Taylor": Job(partial(_build, kind="text", **TAYLOR)),
    "build, members together": Job(partial(_build, **SAMPLED, training="together")),
    "build, branches": Job(partial(_build, kind="text", strategy="branches", prune=0, training="apart")),
    "save": Job(partial(_saved, make=_other_hydra), lambda folder: hydra().save_pretrained(folder), _loaded),
    "save, for the first time": Job(partial(_saved, make=partial(hydra, "text")), state=_loaded),
    "save, two towers": Job(partial(_saved, make=dual), lambda folder: dual(seed=5).save_pretrained(folder), _loaded),
    "save, zero-shot": Job(partial(_saved, make=lambda: he.zero_shot(dual(), small.NAMES)), state=_loaded),
    "evaluate": Job(_evaluate, lambda folder: _evaluate(folder, seed=4), _read_evaluation),
    "report": Job(_report),
}


# --- a job in its own folder -------------------------------------------------------------------------------


@contextmanager
def folder_of(job: Job) -> Iterator[Path]:
    """A prepared folder for the job, always of the same name (models are named after it)."""
    outside = Path(tempfile.mkdtemp(prefix="attack-"))
    try:
        outside.chmod(0o755)
        folder = outside / "work"
        folder.mkdir()
        prepared = forked(lambda: job.prepare(folder))
        assert prepared.how == "given", prepared
        yield folder
    finally:
        shutil.rmtree(outside, ignore_errors=True)


@dataclass(frozen=True)
class Undisturbed:
    """An undisturbed job: its result, points, files, and the states before and after."""

    result: str
    points: tuple[str, ...]
    files: tuple[str, ...]
    states: tuple[str, ...]


@cache
def undisturbed(name: str) -> Undisturbed:
    """Run a job twice, the first time recording its points."""
    job = JOBS[name]
    with folder_of(job) as folder:
        before = forked(lambda: None if job.state is None else job.state(folder))

        def walk() -> tuple[str, tuple[str, ...]]:
            points: list[str] = []
            watch(lambda number, point: points.append(point))
            return job.run(folder), tuple(points)

        ended = given(forked(walk))
        files = files_in(folder)
        after = forked(lambda: None if job.state is None else job.state(folder))
        again = given(forked(lambda: job.run(folder)))
    assert again == ended[0], f"{name} gives another result when it is run again"
    return Undisturbed(ended[0], ended[1], files, tuple(str(e.value) for e in (before, after) if e.how == "given"))


def given(ending: Ending) -> Any:
    """The result of a child; any other ending is a defect."""
    if ending.how != "given":
        raise AssertionError(f"{ending.how}: {ending.value}")
    return ending.value


def end_of(ending: Ending, name: str, folder: Path, where: str) -> str:
    """The outcome of a disturbed job: the usual result, or another; anything else is a defect."""
    usual = undisturbed(name)
    if ending.how != "given":
        raise AssertionError(f"{where}: {ending.how}: {ending.value}")
    if ending.value != usual.result:
        return "other"
    left = sorted(set(files_in(folder)) ^ set(usual.files))
    if left:
        raise AssertionError(f"{where}: files are left over or missing: {left[:5]}")
    return "same"


def files_in(folder: Path) -> tuple[str, ...]:
    """All files and folders, including hidden ones."""
    return tuple(sorted(str(path.relative_to(folder)) for path in folder.rglob("*")))


def require_known_state(job: Job, folder: Path, states: tuple[str, ...]) -> None:
    """What can be read after a disturbance is the old or the new content, never a mixture."""
    if job.state is not None:
        ending = forked(partial(job.state, folder))
        if ending.how != "refused" and given(ending) not in states:
            raise AssertionError("a mixture of two can be read")


def require_whole(folder: Path) -> None:
    """Every file under its final name is complete; unfinished files have hidden names."""
    for path in folder.rglob("*"):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if hidden or not path.is_file():
            continue
        content = path.read_bytes()
        if path.suffix in (".json", ".journal"):
            json.loads(content)
        elif path.suffix == ".safetensors":
            read_tensors(content)
        elif path.suffix == ".html":
            assert content.rstrip().endswith(b"</html>"), f"{path.name} is cut off"

"""`evaluate`: run a model over an in-distribution set, OOD sets and shifted sets, and measure everything."""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

import torch

from .._distributed import rank_and_world
from .._utils import require_device
from ..batches import Batches
from ..data.batching import Batches as OwnBatches
from ..data.batching import Preprocess
from ..data.dataset import Dataset
from ..errors import ConfigError, DataError
from ..metrics.inputs import Convention
from ..model.ensemble import Ensemble
from ..model.metadata import Calibration, Metadata
from ..optimize.optimized import OptimizedEnsemble
from ..prediction import ScoreName
from ..preprocessing import ImagePreprocessing, TextPreprocessing
from .core import check_settings, evaluate_logits
from .evaluation import Evaluation
from .measure import read_groups
from .provenance import describe_model, provenance_of
from .running import Pass, Runner, running

Data = Batches | Dataset[Any]


def evaluate(
    ensemble: Ensemble | OptimizedEnsemble[Ensemble] | Callable[[Any], Any],
    id_data: Data,
    ood: Mapping[str, Any] | None = None,
    shift: Mapping[str, Data] | None = None,
    *,
    name: str | None = None,
    id_name: str | None = None,
    score: ScoreName = "msp",
    scores: Sequence[ScoreName] = (),
    convention: Convention = "torch-uncertainty",
    calibration: Calibration | None = None,
    preprocess: Preprocess | None = None,
    batch_size: int = 64,
    num_workers: int = 0,
    device: str | torch.device | None = None,
    bootstrap: int = 0,
    gallery: int = 0,
    keep_logits: bool = False,
    progress: bool = True,
) -> Evaluation:
    """Measure a model: accuracy, calibration, diversity, OOD detection, selective risk. One pass over each set.

    Under `torchrun` or `accelerate` (an initialised `torch.distributed`) the processes share the batches, every
    one of them gets the whole result, and the numbers are those of a single process. Give every process the plain
    loader, in the same order; with NCCL each must have chosen its GPU before (`torch.cuda.set_device`).

    Args:
        ensemble: An `Ensemble`, as it is or prepared by `optimize`; or anything that is called with the inputs of a
            batch and answers with member logits `[M, B, C]` (`[B, C]` counts as one member; an object with `.logits`
            is looked into).
        id_data: Labelled in-distribution set: batches, as a `DataLoader` gives them, or a data set of
            `hydra_ensembles.data`, which is put in batches with the model's preprocessing.
        ood: OOD sets, `{"near": {name: data}, "far": {...}}` as `Suite.load` gives them, or flat, `{name: data}`,
            which gives the mean over all sets only. A group `"apart"` is reported, but in no mean. Labels of
            OOD sets are not read.
        shift: `{name: data}` of labelled sets under distribution shift, such as corruptions.
        name: What tables call the model.
        id_name: Name of the in-distribution set; that of a data set is known.
        score: Score that detects OOD samples, of the mean over members.
        scores: Further scores to report.
        convention: How AUPR and FPR95 are defined; see `hydra_ensembles.metrics.ood`.
        calibration: Temperature and threshold to apply; an ensemble brings its own.
        preprocess: Turns a list of raw items into inputs; an ensemble brings its own.
        batch_size: For data sets that are not in batches.
        num_workers: Worker processes for such data sets.
        device: Where to run; a model is moved there and back, one prepared by `optimize` cannot be. None: where it is.
        bootstrap: Number of resamples for confidence intervals; 0 for none.
        gallery: How many of the inputs it was most and least sure about to keep, for the report; 0 for none.
            They become part of the saved evaluation.
        keep_logits: Whether the result keeps the member logits, to be saved beside it.
        progress: Whether to show progress bars.

    Raises:
        DataError: A set is empty, has one class, holds NaN, does not fit the model, or is given twice (as ID and as OOD
            set, or as two OOD sets, as far as that shows without reading them); the message names it.
        ConfigError: A setting is not known.
    """
    check_settings(score, scores, convention, bootstrap)
    if gallery < 0:
        raise ConfigError(f"gallery={gallery} is not a number of inputs; use 0 for none, or 6")
    groups = read_groups(ood)
    calibration, preprocess, preprocessing = _own_settings(ensemble, calibration, preprocess)
    temperature = None if calibration is None else torch.tensor(calibration.temperature).squeeze()
    passes: dict[tuple[str, str], Pass] = {}
    id_name = id_name or _set_name(id_data)
    _require_different(
        [
            (f"the in-distribution set {id_name!r}", id_data),
            *((f"OOD set {key!r}", data) for sets in groups.values() for key, data in sets.items()),
        ],
        preprocess,
    )
    with running(ensemble, require_device(device)) as (place, dtype):
        runner = Runner(
            model=ensemble,
            device=place,
            dtype=dtype,
            preprocess=preprocess,
            batch_size=batch_size,
            num_workers=num_workers,
            keep=gallery,
            score=score,
            temperature=temperature,
            progress=progress,
        )
        in_distribution = runner.run(id_data, id_name, labelled=True)
        for sets in groups.values():
            for key, data in sets.items():
                passes["ood", key] = runner.run(data, key, labelled=False)
        for key, data in (shift or {}).items():
            passes["shift", key] = runner.run(data, key, labelled=True)
    members, _, classes = in_distribution.logits.shape
    shown = [(id_name, in_distribution), *((key, one) for (part, key), one in passes.items() if part == "ood")]
    return evaluate_logits(
        in_distribution.logits,
        in_distribution.labels,
        {group: {key: passes["ood", key].logits for key in sets} for group, sets in groups.items()},
        {
            key: (one.logits, one.labels)
            for (part, key), one in passes.items()
            if part == "shift" and one.labels is not None
        },
        name=name or "model",
        id_name=id_name,
        score=score,
        scores=scores,
        convention=convention,
        calibration=calibration,
        bootstrap=bootstrap,
        keep_logits=keep_logits,
        model=describe_model(ensemble, members, classes, calibration),
        provenance=provenance_of(place, in_distribution.dtype, rank_and_world()[1]),
        gallery=[item for key, one in shown for item in one.extremes.items(key, preprocessing)],
    )


def _own_settings(
    model: object, calibration: Calibration | None, preprocess: Preprocess | None
) -> tuple[Calibration | None, Preprocess | None, ImagePreprocessing | TextPreprocessing | None]:
    """Calibration and preprocessing, the model's own where none are given; and the latter again, to undo it."""
    if isinstance(model, Ensemble | OptimizedEnsemble) and not model.num_classes:
        raise ConfigError("this ensemble has no classifier to evaluate; convert the model with num_labels=")
    remembered = getattr(model, "metadata", None)
    if isinstance(remembered, Metadata):
        calibration = calibration or remembered.calibration
        preprocess = preprocess or remembered.preprocessing
        return calibration, preprocess, remembered.preprocessing
    known = preprocess if isinstance(preprocess, ImagePreprocessing | TextPreprocessing) else None
    return calibration, preprocess, known


def _require_different(sets: Sequence[tuple[str, object]], preprocess: Preprocess | None) -> None:
    for (first, one), (second, other) in combinations(sets, 2):
        if _are_same(one, other, preprocess):
            raise DataError(
                f"{second} has the same samples as {first}; OOD detection tells different data apart: give each set "
                "data of its own, or leave it out"
            )


def _are_same(one: object, other: object, preprocess: Preprocess | None) -> bool:
    """Whether two sets are surely the same. Loaders that are not ours may choose and change what they read."""
    (mine, my_way), (theirs, their_way) = (
        (data.dataset, data.preprocess) if isinstance(data, OwnBatches) else (data, preprocess) for data in (one, other)
    )
    if isinstance(mine, Dataset) and isinstance(theirs, Dataset):
        return my_way == their_way and mine.same_items(theirs)
    return one is other


def _set_name(data: object) -> str:
    """The name a data set gives itself, also inside a loader."""
    for candidate in (data, getattr(data, "dataset", None)):
        if isinstance(candidate, Dataset):
            return candidate.name
    return "id"

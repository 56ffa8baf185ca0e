"""One pass over each set, every metric."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, combinations
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn
from tqdm import tqdm

from .._distributed import check_unsharded, gather, rank_and_world
from .._utils import evaluation_mode, require_device
from ..batches import Batches, Inputs, iterate, move, require_labels
from ..data.batching import Batches as OwnBatches
from ..data.batching import Preprocess
from ..data.batching import batches as make_batches
from ..data.dataset import Dataset
from ..errors import ConfigError, DataError
from ..metrics.bootstrap import Interval, OodMetric, bootstrap_metric, bootstrap_ood
from ..metrics.calibration import (
    accuracy,
    adaptive_ece_of_confidence,
    brier,
    brier_per_sample,
    ece_of_confidence,
    nll_of_log_probs,
    top_label,
)
from ..metrics.diversity import disagreement, mutual_information
from ..metrics.inputs import Convention, check_convention, check_finite, check_same_length, where
from ..metrics.ood import aupr, auroc, fpr95
from ..metrics.selective import aurc, risk_at_coverage
from ..model.ensemble import Ensemble
from ..model.metadata import Calibration, Metadata
from ..optimize.runner import OptimizedEnsemble
from ..prediction import Prediction, ScoreName, Temperature, ood_score, scale_logits
from ..preprocessing import ImagePreprocessing, TextPreprocessing
from .evaluation import (
    COVERAGES,
    Classification,
    Detection,
    Evaluation,
    Extremes,
    GalleryItem,
    LabelledLogits,
    MemberLogits,
    ModelInfo,
    OodGroup,
    OodSet,
    Provenance,
    Selective,
    describe_model,
    make_figures,
    provenance_of,
)

MemberModel = Callable[[Any], Any]


@dataclass(frozen=True, eq=False)
class Pass:
    """What a pass over one set brought.

    Attributes:
        logits: `[M, B, C]`, at least float32.
        labels: `[B]`; empty where they were not asked for.
        extremes: The most and least certain inputs.
        dtype: Number format in which the model answered.
    """

    logits: Tensor
    labels: Tensor
    extremes: Extremes
    dtype: str


@dataclass(frozen=True)
class Runner:
    """How a model is run over sets.

    Attributes:
        model: Gives member logits `[M, B, C]`, or `[B, C]` for one member.
        device: Where inputs go; None leaves them where they are.
        dtype: Floating type of the inputs; None leaves it.
        preprocess: Turns items of a data set into inputs, for sets that are not in batches yet.
        batch_size: For such sets.
        num_workers: For such sets.
        keep: How many inputs of each set to keep for the gallery, at either end.
        score: Orders the gallery.
        temperature: Divides the logits for it.
        progress: Whether to show progress bars.
    """

    model: MemberModel
    device: torch.device | None
    dtype: torch.dtype | None
    preprocess: Preprocess | None
    batch_size: int
    num_workers: int
    keep: int
    score: ScoreName
    temperature: Temperature | None
    progress: bool

    def run(self, data: Batches | Dataset[Any], name: str, labelled: bool) -> Pass:
        """Run the model over one set; several processes share its batches.

        Raises:
            DataError: The set is empty, its labels do not fit, or the model's answers cannot be used.
        """
        check_unsharded(data, name)
        rank, world = rank_and_world()
        extremes = Extremes(self.keep)
        pieces: list[tuple[int, Tensor, Tensor | None, str]] = []
        error: Exception | None = None
        try:
            first = 0
            for index, (inputs, targets) in enumerate(self._read(self._batches(data, name), name, labelled)):
                if index % world == rank:
                    logits, dtype = self._answer(inputs, name, index)
                    kept = require_labels(targets, logits.shape[2], f"set {name!r}", index).cpu() if labelled else None
                    self._show(extremes, first, inputs, logits, kept)
                    pieces.append((index, logits, kept, dtype))
                first += _length(inputs)
        except Exception as problem:
            error = problem
        pieces = sorted(chain.from_iterable(gather(pieces, error)), key=lambda piece: piece[0])
        if world > 1:
            found, extremes = gather(extremes), Extremes(self.keep)
            for other in found:
                extremes.merge(other)
        logits = _join([piece[1] for piece in pieces], name)
        labels = [piece[2] for piece in pieces if piece[2] is not None]
        return Pass(logits, torch.cat(labels) if labels else torch.empty(0).long(), extremes, pieces[0][3])

    def _batches(self, data: Batches | Dataset[Any], name: str) -> Batches:
        if not isinstance(data, Dataset):
            return data
        if self.preprocess is None:
            raise ConfigError(
                f"set {name!r} is a data set of raw items, and this model has no saved preprocessing; "
                "pass preprocess=, or give batches (a DataLoader)"
            )
        return make_batches(data, self.preprocess, self.batch_size, num_workers=self.num_workers)

    def _read(self, batches: Batches, name: str, labelled: bool) -> Iterator[tuple[Inputs, Tensor | None]]:
        """The batches, under a progress bar."""
        try:
            total = len(batches) if isinstance(batches, Sized) else None
        except TypeError:  # a loader of a stream has a length only in name
            total = None
        silent = not self.progress or rank_and_world()[0] > 0
        pairs = iterate(batches, f"set {name!r}", labelled)
        return iter(tqdm(pairs, name, total, leave=False, disable=silent, unit="batch"))

    def _answer(self, inputs: Inputs, name: str, index: int) -> tuple[Tensor, str]:
        """Checked member logits `[M, B, C]` of one batch, and the dtype they came in."""
        if self.device is not None:
            inputs = move(inputs, self.device, self.dtype)
        answer = self.model(inputs)
        answer = getattr(answer, "logits", answer)
        if not isinstance(answer, Tensor) or answer.ndim not in (2, 3) or not answer.is_floating_point():
            got = f"{answer.dtype} {list(answer.shape)}" if isinstance(answer, Tensor) else type(answer).__name__
            raise DataError(f"{where(name)}the model must answer with logits [M, B, C] or [B, C], got {got}")
        logits = answer.detach()
        logits = logits.unsqueeze(0) if logits.ndim == 2 else logits  # [B, C] -> [1, B, C]
        size = _length(inputs)
        if logits.shape[1] != size or logits.shape[2] < 2:
            raise DataError(
                f"{where(name)}the model answered batch {index} of {size} inputs with logits {list(answer.shape)}; "
                "expected [M, B, C] (members, inputs, at least two classes)"
            )
        logits = logits.to("cpu", torch.float64 if logits.dtype == torch.float64 else torch.float32)
        check_finite(logits, f"member logits [M, B, C] of batch {index}", name)
        return logits, str(answer.dtype).removeprefix("torch.")

    def _show(self, extremes: Extremes, first: int, inputs: Inputs, logits: Tensor, labels: Tensor | None) -> None:
        if self.keep:
            scores = ood_score(logits, self.score, self.temperature)
            probs = scale_logits(logits, self.temperature).softmax(dim=-1).mean(dim=0)  # [M, B, C] -> [B, C]
            confidence, predicted = probs.max(dim=-1)
            extremes.update(first, inputs, scores, confidence, predicted, labels)


@contextmanager
def running(model: object, device: torch.device | None) -> Iterator[tuple[torch.device | None, torch.dtype | None]]:
    """Evaluation mode, no gradients and the asked-for device, all put back at the end.

    Yields:
        Where inputs go and their floating type; None for "as they are".
    """
    if isinstance(model, OptimizedEnsemble):
        _require_its_device(model, device)
        with torch.no_grad():
            yield model.device, model.dtype
        return
    if not isinstance(model, nn.Module):
        with torch.no_grad():
            yield device, None
        return
    parameter = next((p for p in model.parameters() if p.is_floating_point()), None)
    home = None if parameter is None else parameter.device
    moved = device is not None and home is not None and device != home
    try:
        if moved:
            model.to(device)
        with evaluation_mode(model), torch.no_grad():
            yield device or home, None if parameter is None else parameter.dtype
    finally:
        if moved:
            model.to(home)


def _require_its_device(model: OptimizedEnsemble[Any], device: torch.device | None) -> None:
    own = model.device
    if device is not None and (device.type != own.type or device.index not in (None, own.index)):
        raise ConfigError(
            f"this optimized ensemble runs on {own} and cannot be moved to {device}; leave device out, or move the "
            "ensemble and call optimize again"
        )


def _length(inputs: Inputs) -> int:
    return len(inputs) if isinstance(inputs, Tensor) else len(next(iter(inputs.values())))


def _join(pieces: list[Tensor], name: str) -> Tensor:
    shapes = {(piece.shape[0], piece.shape[2]) for piece in pieces}
    if len(shapes) > 1:
        raise DataError(
            f"{where(name)}the model changes its mind between batches: (members, classes) were {sorted(shapes)}"
        )
    return torch.cat(pieces, dim=1)


MEANS: tuple[Literal["near", "far", "all"], ...] = ("near", "far", "all")


def read_groups(ood: Mapping[str, Any] | None) -> dict[OodGroup, dict[str, Any]]:
    """OOD sets by group and name, from a nested or a flat mapping; `{}` for None.

    Raises:
        DataError: Groups and sets are mixed, a group is not known, or a name occurs twice.
    """
    if not ood:
        return {}
    nested = [isinstance(value, Mapping) for value in ood.values()]
    if not any(nested):
        return {"ungrouped": dict(ood)}
    known = get_args(OodGroup)
    if not all(nested) or not set(ood) <= set(known):
        raise DataError(
            f"ood has the keys {list(ood)}; give groups of sets, with keys among {list(known)}, or a flat mapping "
            "from set names to data"
        )
    names = [name for sets in ood.values() for name in sets]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(f"OOD sets {twice} occur in more than one group; give each set one name in one group")
    return {cast(OodGroup, group): dict(sets) for group, sets in ood.items() if sets}


def mean_sets(groups: Mapping[str, OodGroup]) -> dict[str, list[str]]:
    """Which sets each mean is over: near, far, and all of them; a mean over no set is left out."""
    chosen = {
        "near": [name for name, group in groups.items() if group == "near"],
        "far": [name for name, group in groups.items() if group == "far"],
        "all": [name for name, group in groups.items() if group != "apart"],
    }
    return {mean: chosen[mean] for mean in MEANS if chosen[mean]}


def predict(
    logits: Tensor, calibration: Calibration, score: ScoreName, name: str, like: tuple[int, int] | None = None
) -> Prediction:
    """Prediction for one set, calibrated.

    Args:
        logits: `[M, B, C]`, or `[B, C]` for one member.
        calibration: Its temperature is applied; its threshold too.
        score: Score to use where the calibration has no threshold.
        name: Name of the set, for error messages.
        like: Members and classes of the in-distribution set, which this one must share.

    Raises:
        DataError: The set is empty, holds NaN, or does not fit.
    """
    if not isinstance(logits, Tensor) or logits.ndim not in (2, 3) or not logits.is_floating_point():
        got = f"{logits.dtype} {list(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
        raise DataError(f"{where(name)}member logits must be floating point [M, B, C] or [B, C], got {got}")
    logits = (logits.unsqueeze(0) if logits.ndim == 2 else logits).detach().cpu()  # [B, C] -> [1, B, C]
    members, samples, classes = logits.shape
    if samples == 0:
        raise DataError(f"{where(name)}there are no samples; check how the set was loaded")
    if members == 0 or classes < 2:
        raise DataError(
            f"{where(name)}member logits have shape {list(logits.shape)}; at least one member and two classes are "
            "needed: with one class there is nothing to decide"
        )
    if like is not None and (members, classes) != like:
        raise DataError(
            f"{where(name)}it has logits of {members} members over {classes} classes, and the in-distribution set of "
            f"{like[0]} over {like[1]}; both must come from the same model"
        )
    check_finite(logits, "member logits [M, B, C]", name)
    temperature = calibration.temperature
    return Prediction.from_logits(
        logits,
        temperature=temperature if len(temperature) > 1 else temperature[0],
        threshold=calibration.threshold,
        score=score if calibration.threshold is None else calibration.score,
    )


def check_labels(labels: Tensor, prediction: Prediction, name: str) -> Tensor:
    """Labels `[B]` as int64 on the CPU, one a sample, of at least two classes.

    Raises:
        DataError: They do not fit.
    """
    labels = torch.as_tensor(labels).detach().cpu()
    if labels.ndim != 1 or labels.is_floating_point() or labels.dtype == torch.bool:
        raise DataError(f"{where(name)}labels must be whole numbers [B], got {labels.dtype} {list(labels.shape)}")
    check_same_length({"samples": len(prediction), "labels": len(labels)}, name)
    lowest, highest = int(labels.min()), int(labels.max())
    if lowest < 0 or highest >= prediction.classes:
        raise DataError(
            f"{where(name)}labels run from {lowest} to {highest}, but the model has {prediction.classes} classes "
            f"(0 to {prediction.classes - 1}); check that model and set have the same classes"
        )
    if lowest == highest:
        raise DataError(
            f"{where(name)}all {len(labels)} labels are {lowest}; accuracy and calibration need at least two "
            "classes: check that sorted data were not cut, or shuffle before taking a part"
        )
    return labels.long()


def classification(prediction: Prediction, labels: Tensor, score: ScoreName, name: str) -> Classification:
    """Accuracy, calibration, diversity and selective risk on a labelled set."""
    probs, members = prediction.probs, prediction.member_probs
    confidence, correct = top_label(probs, labels, name=name)
    scores, wrong = prediction.score(score), ~correct
    log_probs = prediction.log_probs
    if not bool(torch.isfinite(log_probs).all()):  # float32 overflows between logits of 1e38 and -1e38
        log_probs = Prediction.from_logits(prediction.member_logits.double()).log_probs
    return Classification(
        samples=len(prediction),
        accuracy=accuracy(probs, labels, name=name),
        brier=brier(probs, labels, name=name),
        nll=nll_of_log_probs(log_probs, labels, name=name),
        ece=ece_of_confidence(confidence, correct, name=name),
        aece=adaptive_ece_of_confidence(confidence, correct, name=name),
        mutual_information=mutual_information(members, name=name),
        disagreement=disagreement(members, name=name),
        aurc=aurc(scores, wrong, name=name),
        risk_at_coverage={
            f"{coverage:.2f}": risk_at_coverage(scores, wrong, coverage, name=name) for coverage in COVERAGES
        },
    )


def detection(id_scores: Tensor, ood_scores: Tensor, convention: Convention, name: str) -> Detection:
    """AUROC, FPR95 and AUPR of one score."""
    return Detection(
        auroc=auroc(id_scores, ood_scores, convention, name=name),
        fpr95=fpr95(id_scores, ood_scores, convention, name=name),
        aupr=aupr(id_scores, ood_scores, convention, name=name),
    )


def ood_set(
    group: OodGroup,
    id_prediction: Prediction,
    prediction: Prediction,
    scores: Sequence[ScoreName],
    convention: Convention,
    name: str,
) -> OodSet:
    """Everything measured on one OOD set."""
    accept = prediction.accept
    return OodSet(
        group=group,
        samples=len(prediction),
        detection={
            score: detection(id_prediction.score(score), prediction.score(score), convention, name) for score in scores
        },
        mutual_information=mutual_information(prediction.member_probs, name=name),
        disagreement=disagreement(prediction.member_probs, name=name),
        abstained=None if accept is None else int((~accept).sum()) / len(accept),
    )


def detection_means(ood: Mapping[str, OodSet], scores: Sequence[ScoreName]) -> dict[str, dict[str, Detection]]:
    """Unweighted means over the near, the far and all sets, for each score."""
    means: dict[str, dict[str, Detection]] = {}
    for mean, names in mean_sets({name: result.group for name, result in ood.items()}).items():
        means[mean] = {}
        for score in scores:
            found = [ood[name].detection[score] for name in names]
            means[mean][score] = Detection(
                auroc=sum(one.auroc for one in found) / len(found),
                fpr95=sum(one.fpr95 for one in found) / len(found),
                aupr=sum(one.aupr for one in found) / len(found),
            )
    return means


def selective(prediction: Prediction, labels: Tensor) -> Selective | None:
    """What the calibrated threshold does on a labelled set; None without a threshold."""
    accept = prediction.accept
    if accept is None or prediction.threshold is None:
        return None
    accepted = int(accept.sum())
    wrong = int((prediction.label != labels)[accept].sum())
    return Selective(
        score=prediction.score_name,
        threshold=prediction.threshold,
        accepted=accepted / len(accept),
        risk=wrong / accepted if accepted else None,
    )


def bootstrap_intervals(
    prediction: Prediction,
    labels: Tensor,
    id_scores: Tensor,
    ood_scores: Mapping[str, Tensor],
    means: Mapping[str, Sequence[str]],
    convention: Convention,
    resamples: int,
    id_name: str = "id",
) -> dict[str, Interval]:
    """95 % intervals under the names of `Evaluation.numbers`.

    Args:
        prediction: For the in-distribution set.
        labels: `[B]`.
        id_scores: `[B]`, higher = more uncertain.
        ood_scores: Scores of each OOD set.
        means: Names of the sets each mean is over.
        convention: How AUPR and FPR95 are defined.
        resamples: Number of resamples.
        id_name: Name of the in-distribution set, for error messages.
    """
    confidence, correct = top_label(prediction.probs, labels, name=id_name)
    nll = -prediction.log_probs.gather(1, labels.unsqueeze(1)).squeeze(1)  # [B, C] -> [B]

    def interval_of_mean(values: Tensor) -> Interval:
        return bootstrap_metric(_mean, [values.double()], resamples=resamples, name=id_name)

    found = {
        "accuracy": interval_of_mean(correct),
        "brier": interval_of_mean(brier_per_sample(prediction.probs, labels, name=id_name)),
        "nll": interval_of_mean(nll),
        "ece": bootstrap_metric(ece_of_confidence, [confidence, correct], resamples=resamples, name=id_name),
        "aece": bootstrap_metric(adaptive_ece_of_confidence, [confidence, correct], resamples=resamples, name=id_name),
        "mutual_information": interval_of_mean(prediction.epistemic),
        "disagreement": interval_of_mean(prediction.disagreement),
        "aurc": bootstrap_metric(aurc, [id_scores, ~correct], resamples=resamples, name=id_name),
    }
    sets = {f"ood.{name}": [scores] for name, scores in ood_scores.items()}
    sets |= {mean: [ood_scores[name] for name in names] for mean, names in means.items()}
    for key, scores in sets.items():
        for metric in get_args(OodMetric):
            found[f"{key}.{metric}"] = bootstrap_ood(
                metric, id_scores, scores, convention=convention, resamples=resamples, name=key
            )
    return found


def _mean(values: Tensor) -> float:
    return float(values.mean())


def evaluate_logits(
    id_logits: Tensor,
    labels: Tensor,
    ood: Mapping[str, Any] | None = None,
    shift: Mapping[str, tuple[Tensor, Tensor]] | None = None,
    *,
    name: str = "model",
    id_name: str = "id",
    score: ScoreName = "msp",
    scores: Sequence[ScoreName] = (),
    convention: Convention = "torch-uncertainty",
    calibration: Calibration | None = None,
    bootstrap: int = 0,
    keep_logits: bool = False,
    model: ModelInfo | None = None,
    provenance: Provenance | None = None,
    gallery: Sequence[GalleryItem] = (),
) -> Evaluation:
    """Every metric from member logits `[M, B, C]` (or `[B, C]` for one member), on the CPU.

    Args:
        id_logits: Of the in-distribution set, before any temperature.
        labels: Its labels, `[B]`.
        ood: Member logits of the OOD sets: `{"near": {name: logits}, "far": {...}}`, or flat, `{name: logits}`,
            which gives the mean over all sets only. A group `"apart"` is reported, but in no mean.
        shift: `{name: (logits, labels)}` of sets under distribution shift.
        name: What tables call the model.
        id_name: Name of the in-distribution set.
        score: Score that detects OOD samples.
        scores: Further scores to report.
        convention: How AUPR and FPR95 are defined.
        calibration: Temperature, and threshold for the selective numbers.
        bootstrap: Number of resamples for confidence intervals; 0 for none.
        keep_logits: Whether the result keeps the logits.
        model: What made the logits, where more is known than their shape.
        provenance: Where they were made; this machine, if not given.
        gallery: Inputs to show in the report.

    Raises:
        DataError: A set is empty, has one class, holds NaN, or does not fit the others; the message names it.
        ConfigError: A setting is not known.
    """
    wanted = check_settings(score, scores, convention, bootstrap)
    calibration = calibration or Calibration()
    groups = read_groups(ood)

    prediction = predict(id_logits, calibration, score, id_name)
    id_labels = check_labels(labels, prediction, id_name)
    id_scores = prediction.score(score)
    like = (prediction.members, prediction.classes)

    answers, results = {}, {}
    for group, sets in groups.items():
        for key, logits in sets.items():
            answers[key] = predict(logits, calibration, score, key, like)
            results[key] = ood_set(group, prediction, answers[key], wanted, convention, key)
    ood_scores = {key: answer.score(score) for key, answer in answers.items()}

    shift_results, shift_logits = {}, {}
    for key, (logits, set_labels) in (shift or {}).items():
        answer = predict(logits, calibration, score, key, like)
        shift_logits[key] = LabelledLogits(logits, check_labels(set_labels, answer, key))
        shift_results[key] = classification(answer, shift_logits[key].labels, score, key)

    by_group = {str(group): sets for group, sets in groups.items()}
    means = mean_sets({key: result.group for key, result in results.items()})
    return Evaluation(
        name=name,
        id_name=id_name,
        score=score,
        convention=convention,
        id=classification(prediction, id_labels, score, id_name),
        ood=results,
        means=detection_means(results, wanted),
        shift=shift_results,
        selective=selective(prediction, id_labels),
        model=model or ModelInfo("callable", *like, calibration=calibration),
        provenance=provenance or provenance_of(None, str(id_logits.dtype).removeprefix("torch.")),
        figures=make_figures(
            prediction, id_labels, id_scores, {key: (answers[key], ood_scores[key]) for key in answers}
        ),
        intervals=(
            bootstrap_intervals(
                prediction, id_labels, id_scores, ood_scores, means, convention, bootstrap, id_name=id_name
            )
            if bootstrap
            else {}
        ),
        gallery=tuple(gallery),
        logits=MemberLogits(LabelledLogits(id_logits, id_labels), by_group, shift_logits) if keep_logits else None,
    )


def evaluate_stored(logits: MemberLogits, **settings: Any) -> Evaluation:
    """Make an evaluation again from stored member logits; `settings` are those of `evaluate_logits`."""
    shift = {name: (labelled.logits, labelled.labels) for name, labelled in logits.shift.items()}
    return evaluate_logits(logits.id.logits, logits.id.labels, logits.ood, shift, **settings)


def check_settings(
    score: ScoreName, scores: Sequence[ScoreName], convention: Convention, bootstrap: int
) -> tuple[ScoreName, ...]:
    """Refuse unknown settings before anything is computed; all scores asked for, each once.

    Raises:
        ConfigError: A setting is not known.
    """
    check_convention(convention)
    if isinstance(scores, str):
        raise ConfigError(f"scores={scores!r} is a string; give a sequence of score names, such as ({scores!r},)")
    known = get_args(ScoreName)
    unknown = [name for name in (score, *scores) if name not in known]
    if unknown:
        raise ConfigError(f"scores {unknown} are not known; choose from {', '.join(known)}")
    if bootstrap < 0:
        raise ConfigError(f"bootstrap={bootstrap} is not a number of resamples; use 0 for none (1000 is the custom)")
    return tuple(dict.fromkeys((score, *scores)))


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

"""Familiarity: how far the features of an input are from those of data the model knows.

Fitting reads the data once and holds their features in memory (3 kB a sample and member, for features of 768). The
statistics are stored with the ensemble, and every prediction has their scores.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ._utils import warn, without_autocast
from .batches import Batches, Inputs, a_few, first_epoch, in_model_order, iterate, require_labels, size_of
from .digest import row_digests
from .errors import ConfigError, TooFewSamplesError
from .metrics.conformal import Reference
from .metrics.distance import BY_CLASS, FAMILIARITY_NAMES, FamiliarityName, prepared
from .metrics.probabilities import at_least_float32, check_finite
from .model.dual_encoder import require_ensemble
from .model.ensemble import Ensemble
from .model.layers import dropping
from .model.metadata import Familiarity, FamiliaritySettings
from .settings import Rate, require

FEW_PER_CLASS = 20  # samples per class below which the covariance is shrunk more
SHRINKAGE, SHRINKAGE_OF_FEW = 0.01, 0.1  # added to each eigenvalue, as a share of their mean
MAX_HELD_OUT = 4096  # maximum number of samples held out for p-values
STORED = 10_000  # maximum number of features, drawn at random, that `knn` compares with
KEPT_ROWS = 64  # samples by whose digests the data of a fit are recognised
_NULL = 1e-10  # eigenvalues below this share of the largest are directions without variance
_AT_ONCE = 8192  # samples converted to float64 at a time


class Answered(NamedTuple):
    """A model's outputs for some samples, on the CPU."""

    features: Tensor  # [M, B, d]
    logits: Tensor  # [M, B, C]
    labels: Tensor  # [B]
    digests: Tensor  # [B], int64, of the samples

    def pick(self, rows: Tensor) -> "Answered":
        """Select samples by index or by mask."""
        return Answered(self.features[:, rows], self.logits[:, rows], self.labels[rows], self.digests[rows])


@without_autocast()
def fit_familiarity(
    ensemble: Ensemble,
    id_batches: Batches,
    score: FamiliarityName | Sequence[FamiliarityName] = "mahalanobis",
    *,
    held_out: float = 0.2,
    seed: int = 0,
) -> Ensemble:
    """Fit how familiar inputs are, `p.score("mahalanobis")` and `p.familiarity`; returns a copy of the ensemble.

    A random share of the samples is held out: the statistics do not use it, and p-values come from it.
    If the samples trained the model, they look more familiar than new ones, so p-values of new inputs are too low:
    `calibrate` sets a threshold on other data, and p-values then come from those. Scores fitted here before are
    replaced; that of `baselines.vilu` stays, after the new ones. Features are in the
    precision of the model, whatever autocast is active.

    Args:
        ensemble: Any classifier: for images, for texts, zero-shot. It is not changed.
        id_batches: In-distribution batches, labelled for scores that use classes; may be training data. Read once.
        score: One score, or several, of which the first decides; see `hydra_ensembles.metrics.distance`.
        held_out: Share to hold out, at most 4,096 samples; 0 for none.
        seed: Seed for drawing what is held out and what is stored, and for the order of a loader that shuffles.

    Raises:
        TooFewSamplesError: A class has no samples, or there are too few for a covariance.
        DataError: Features are not finite.

    Examples:
        >>> many = [(torch.randn(140, 3, 64, 64), torch.arange(140) % 7)]
        >>> known = he.fit_familiarity(base, many, "knn")
        >>> answer = known.predict(torch.cat([many[0][0][:1], 9 * torch.randn(1, 3, 64, 64)]))
        >>> bool(answer.score("knn")[1] > answer.score("knn")[0])  # noise of another kind is further off
        True
    """
    weights = require_ensemble(getattr(ensemble, "_orig_mod", ensemble), "fit_familiarity", classifies=True)
    names: tuple[FamiliarityName, ...] = (score,) if isinstance(score, str) else tuple(score)
    if not names or len(set(names)) < len(names) or not set(names) <= set(FAMILIARITY_NAMES):
        raise ConfigError(f"score={score!r} cannot be fitted; give some of {', '.join(FAMILIARITY_NAMES)}, each once")
    require("held_out", held_out, Rate)
    by_class = not set(names).isdisjoint(BY_CLASS)
    samples = read_answers(ensemble, id_batches, "id_batches", by_class, seed, logits=False)
    missing = np.setdiff1d(np.arange(weights.num_classes), samples.labels)
    if by_class and len(missing):
        known = weights.metadata.labels
        told = a_few([known[one] if known else str(one) for one in missing])
        raise TooFewSamplesError(f"classes {told} have no samples; give some of each, or use 'knn', which ignores them")
    draws = np.random.default_rng(seed)
    held = np.flatnonzero(draws.random(len(samples.labels)) < held_out)
    if len(held) > MAX_HELD_OUT:
        held = draws.permutation(held)[:MAX_HELD_OUT]
    fits = torch.ones(len(samples.labels), dtype=torch.bool).index_fill(0, torch.from_numpy(held), False)
    fitted, others = samples.pick(fits), samples.pick(~fits)
    familiarity = fit_on(ensemble, fitted, names, draws)
    if len(others.labels):
        scores = familiarity.scores(others.features, others.logits)[0].mean(dim=0)
        familiarity = Familiarity(replace(familiarity.settings, reference=Reference.of(scores)), familiarity.state)
    line = f"familiarity ({', '.join(names)}) fitted on {familiarity.settings.samples} samples"
    return _refitted(weights, with_earlier(familiarity, weights.metadata.familiarity), line)


def with_score(ensemble: Ensemble, familiarity: Familiarity, line: str) -> Ensemble:
    """A copy of an ensemble with one more fitted score, which decides from now on; one of the same name is replaced."""
    return _refitted(ensemble, with_earlier(familiarity, ensemble.metadata.familiarity, replaced=()), line)


def _refitted(ensemble: Ensemble, familiarity: Familiarity, line: str) -> Ensemble:
    """A copy with the new familiarity, and without a calibration that used another."""
    metadata = ensemble.metadata
    changes: dict[str, Any] = {"familiarity": familiarity, "history": (*metadata.history, line)}
    if metadata.familiarity is not None and metadata.familiarity.settings.threshold is not None:
        warn("the calibration belongs to the earlier familiarity and is dropped: calibrate again")
        changes |= {"calibration": None, "metrics": {}}
    return copied_with(ensemble, **changes)


def copied_with(ensemble: Ensemble, **changes: Any) -> Ensemble:
    """A copy with its own weights, so that it does not change when the original is trained; of a cascade the stages."""
    if ensemble.front is not ensemble:
        return ensemble.with_metadata(**changes)
    metadata = replace(ensemble.metadata, **changes)
    return Ensemble.from_state(ensemble.config, ensemble.state_dict(), metadata, ensemble.frozen)


def with_earlier(
    familiarity: Familiarity, earlier: Familiarity | None, replaced: Sequence[str] = FAMILIARITY_NAMES
) -> Familiarity:
    """New scores, the first of which decides, followed by earlier ones with other names that are not in `replaced`."""
    if earlier is None:
        return familiarity
    old, new = earlier.settings, familiarity.settings
    others = tuple(score for score in old.scores if score not in (*new.scores, *replaced))
    state = {key: tensor for key, tensor in earlier.state.items() if key.rpartition(".")[0] in others}
    together = replace(new, scores=(*new.scores, *others))
    return Familiarity(together, {**familiarity.state, **state})


def read_answers(
    ensemble: Ensemble, batches: Batches, name: str, labelled: bool = True, seed: int = 0, logits: bool = True
) -> Answered:
    """A model's outputs for all samples: labels are zeros if not `labelled`; logits, which may be many, are optional.

    A loader that shuffles does so by `seed`.
    """
    parts = list[Answered]()
    if labelled:
        batches = in_model_order(batches, name, ensemble)
    with dropping(False), torch.no_grad(), first_epoch(batches, seed):
        for index, inputs, targets in iterate(batches, name, labelled, ensemble.raw):
            features, found = ensemble.features_and_logits(ensemble.prepare(inputs))
            check_finite(features, f"features of batch {index} of {name}")
            labels = torch.zeros(features.shape[1], dtype=torch.long)
            if labelled:
                labels = require_labels(targets, ensemble.num_classes, name, index).cpu()
            kept = at_least_float32(found if logits else found[..., :0]).cpu()
            parts.append(Answered(features.float().cpu(), kept, labels, sample_digests(inputs)))
    every, wanted, *rest = zip(*parts, strict=True)
    return Answered(torch.cat(every, dim=1), torch.cat(wanted, dim=1), *map(torch.cat, rest))


def sample_digests(inputs: Inputs) -> Tensor:
    """A digest of each sample, `[B]` of int64: equal for equal samples."""
    joined = torch.frombuffer(bytearray(b"".join(row_digests(inputs))), dtype=torch.int64)
    return joined.view(size_of(inputs), -1)[:, 0]  # the first 8 bytes of each


def some_rows(digests: Tensor) -> tuple[str, ...]:
    """Digests of some evenly spaced samples, by which later calls recognise the data of a fit."""
    places = torch.linspace(0, len(digests) - 1, min(len(digests), KEPT_ROWS)).long()
    return tuple(map(str, digests[places].tolist()))


def recognised(kept: Sequence[str], digests: Tensor) -> int:
    """How many of the samples kept by `some_rows` are among these."""
    return len(set(kept).intersection(map(str, digests.tolist())))


# --- fitting -------------------------------------------------------------------------------------------------------


def fit_on(
    ensemble: Ensemble,
    samples: Answered,
    scores: Sequence[FamiliarityName],
    draws: np.random.Generator,
) -> Familiarity:
    """The statistics of every score, in float32."""
    count, width = samples.features.shape[1:]
    if not width:
        raise TooFewSamplesError("a function, which comes first, has no features")
    if not count:
        raise TooFewSamplesError("there are no samples to fit familiarity on; give more, or hold out fewer")
    classes, kept = ensemble.num_classes, samples
    if count < 2 * classes and not set(scores).isdisjoint(BY_CLASS):
        raise TooFewSamplesError(f"{count} samples of {classes} classes are too few; give two of each, or use 'knn'")
    if count > STORED:
        kept = samples.pick(torch.from_numpy(np.sort(draws.permutation(count)[:STORED])))
    state = dict[str, Tensor]()
    for name in scores:
        if name == "knn":
            tensors = {"bank": prepared(name, kept.features.double())}  # [M, N, d]
        else:
            tensors = _mahalanobis(name, samples, classes)
        state |= {f"{name}.{key}": tensor.float().contiguous() for key, tensor in tensors.items()}
    return Familiarity(FamiliaritySettings(tuple(scores), count, rows=some_rows(samples.digests)), state)


def _mahalanobis(name: FamiliarityName, samples: Answered, classes: int) -> dict[str, Tensor]:
    """Overall mean, whitening of the within-class covariance, and whitened class means, per member, in float64.

    A class without samples has the mean of another: nothing is near to it.
    """
    members, count, width = samples.features.shape
    shrinkage = SHRINKAGE_OF_FEW if count < FEW_PER_CLASS * classes else SHRINKAGE
    counts = samples.labels.bincount(minlength=classes).double()  # [C]
    known = torch.where(counts > 0, torch.arange(classes), counts.argmax())  # [C]
    sums = torch.zeros(members, classes, width, dtype=torch.float64)
    within, total = torch.zeros(2, members, width, width, dtype=torch.float64)
    parts = list(zip(samples.features.split(_AT_ONCE, dim=1), samples.labels.split(_AT_ONCE), strict=True))
    for some, labels in parts:
        sums.index_add_(1, labels, prepared(name, some.double()))
    mean, means = sums.sum(dim=1) / count, (sums / counts[:, None])[:, known]  # [M, d], [M, C, d]
    for some, labels in parts:
        x = prepared(name, some.double())  # [M, B, d]
        near, far = x - means[:, labels], x - mean[:, None]
        within += near.mT @ near
        total += far.mT @ far
    whiten = _whitening(within / count, shrinkage)
    statistics = {"mean": mean, "whiten": whiten, "classes": (means - mean[:, None]) @ whiten}
    return statistics | ({"background": _whitening(total / count, shrinkage)} if name.startswith("relative") else {})


def _whitening(covariance: Tensor, shrinkage: float) -> Tensor:
    """Whitening matrices for covariances `[M, d, d]`; directions without variance are dropped."""
    values, directions = torch.linalg.eigh(covariance)
    mean, largest = values.mean(dim=-1, keepdim=True), values.amax(dim=-1, keepdim=True)  # [M, 1]
    if not bool((largest > 0).all()):
        raise TooFewSamplesError("all samples of a class have the same features; give samples that vary")
    values = values.clamp(min=0.0) + shrinkage * mean
    scale = torch.where(values > _NULL * largest, values, torch.inf).rsqrt()  # [M, d]
    return directions * scale[:, None]

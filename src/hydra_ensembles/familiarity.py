"""Familiarity: how far the features of an input are from those of data the model knows.

Fitting reads the data once. It keeps sums in float64 and a bounded sample of the features, so memory does not grow with
the data, except for 8 bytes per sample, used to count copies. The statistics are stored with the ensemble, and every
prediction has their scores.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ._utils import warn, without_autocast
from .arguments import NotNegative, Rate, Seed, Whole, checked
from .batches import Batches, Inputs, first_epoch, iterate, require_labels
from .classes import a_few, in_model_order
from .errors import ConfigError, DataError, TooFewSamplesError
from .metrics.conformal import Reference
from .metrics.distance import BY_CLASS, FAMILIARITY_NAMES, FamiliarityName, is_normalised, is_relative
from .metrics.inputs import check_finite
from .model.dropout import dropping
from .model.ensemble import Ensemble
from .model.kinds import require_ensemble
from .model.metadata import Familiarity, FamiliaritySettings, Metadata
from .overlap import Keys, marks_of, reused_of, sample_keys, warn_of_copies, with_smallest_hashes

FEW_PER_CLASS = 20  # samples per class below which the covariance is shrunk more
RARE = 10  # samples below which a class mean is so rough that inputs of the class look unfamiliar
SHRINKAGE, SHRINKAGE_OF_FEW = 0.01, 0.1  # added to each eigenvalue, as a share of their mean
MAX_HELD_OUT = 4096  # maximum number of samples held out for p-values
PER_THRESHOLD = ("validation/sure_share", "validation/familiar_share")  # metrics of each of the two thresholds alone
OF_ACCEPTED = ("validation/accepted_share", "validation/risk_of_accepted")  # metrics of all thresholds together
_SETTINGS = {  # of single scores
    "knn": ("stored", "neighbours"),
    "vim": ("principal",),
    "vilu": ("hidden", "projected", "embedding"),
    "neglabel": ("words", "embedding"),
}
_NULL = 1e-10  # eigenvalues below this share of the largest are directions without variance


class Answered(NamedTuple):
    """A model's outputs for some samples: features `[M, B, d]`, logits `[M, B, C]`, labels `[B]`; all on the CPU."""

    features: Tensor
    logits: Tensor
    labels: Tensor

    def pick(self, rows: Tensor) -> "Answered":
        """Select samples by index or by mask."""
        return Answered(self.features[:, rows], self.logits[:, rows], self.labels[rows])

    @classmethod
    def join(cls, parts: Sequence["Answered"]) -> "Answered":
        """Concatenate along the samples."""
        features, logits, labels = zip(*parts, strict=True)
        return cls(torch.cat(features, dim=1), torch.cat(logits, dim=1), torch.cat(labels))


@checked
@without_autocast()
def fit_familiarity(
    ensemble: Ensemble,
    id_batches: Batches,
    score: FamiliarityName | Sequence[FamiliarityName] = "mahalanobis",
    *,
    held_out: Rate = 0.2,
    shrinkage: NotNegative | None = None,
    neighbours: Whole | None = None,
    principal: Whole | None = None,
    stored: Whole = 10_000,
    seed: Seed = 0,
) -> Ensemble:
    """Fit how familiar inputs are, `p.score("mahalanobis")` and `p.familiarity`; returns a copy of the ensemble.

    A random share of the samples is held out: the statistics do not use it, and p-values come from it.
    If the samples trained the model, they look more familiar than new ones, so p-values of new inputs are too low:
    `calibrate` sets a threshold on other data, and p-values then come from those. Scores fitted here before are
    replaced; those of `baselines.vilu` and `baselines.neg_label` stay, after the new ones. Features are in the
    precision of the model, whatever autocast is active. Digests of 1,024 of the samples are stored, as by
    `calibrate`, which refuses to set a threshold on data most of which fitted this, and warns of fewer; `evaluate`
    warns of any.

    Args:
        ensemble: Any classifier: for images, for texts, zero-shot. It is not changed.
        id_batches: In-distribution batches, labelled for scores that use classes; may be training data. Read once.
        score: One score, or several, of which the first decides; see `hydra_ensembles.metrics.distance`.
        held_out: Share to hold out, at most 4,096 samples; 0 for none.
        shrinkage: What is added to every eigenvalue of a covariance, as a share of their mean; None takes 0.01, or
            0.1 if there are fewer than 20 samples per class.
        neighbours: For `knn`, which neighbour counts; None takes one in 50 of those stored, at most 50.
        principal: For `vim`, directions of the principal subspace; None takes two thirds.
        stored: Maximum number of features to keep, drawn at random, for `knn` to compare with and to weigh `vim`.
        seed: Seed for drawing what is held out and what is stored, and for the order of a loader that shuffles.

    Raises:
        TooFewSamplesError: A class has no samples, or there are too few for a covariance.
        DataError: Features are not finite.

    Examples:
        >>> import torch, hydra_ensembles as he
        >>> from hydra_ensembles.data import batches, subset
        >>> from hydra_ensembles.demo import load_backbone, load_sample
        >>> base, sample = load_backbone(), load_sample()
        >>> familiar = batches(subset(sample.circuit_id, 56, seed=0), base.metadata.preprocessing, 28)
        >>> known = he.fit_familiarity(base, familiar, "knn")
        >>> answer = known.predict([image for image, _ in (sample.test[0], sample.far["FashionMNIST"][0])])
        >>> bool(answer.score("knn")[1] > answer.score("knn")[0])  # clothes are further off than fields
        True
    """
    weights = require_ensemble(getattr(ensemble, "_orig_mod", ensemble), "fit_familiarity", classifies=True)
    before = weights.metadata
    names = (score,) if isinstance(score, str) else tuple(score)
    draws = np.random.default_rng(seed)
    fitting = Fitting(ensemble, names, draws, shrinkage, neighbours, principal, stored)
    waiting = Reservoir(MAX_HELD_OUT, draws)
    known_by = list[Keys]()
    for inputs, samples in answers(ensemble, id_batches, "id_batches", fitting.labelled, seed):
        drawn = torch.from_numpy(draws.random(len(samples.labels)) < held_out)
        known_by.append(sample_keys(inputs))
        fitting.add(samples.pick(~drawn))
        fitting.mark(known_by[-1][~drawn.numpy()])
        fitting.add(waiting.offer(samples.pick(drawn)))
    held = waiting.samples()
    borrowed = fitting.missing()  # classes whose only samples were held out
    for label in borrowed:
        first = (held.labels == label).nonzero()[:1, 0]
        fitting.add(held.pick(first))
        held = held.pick(torch.isin(torch.arange(len(held.labels)), first, invert=True))
    familiarity = fitting.finish()
    keys = np.concatenate(known_by)
    why = "held-out samples that were also fitted look more familiar than new data, whose p-values are then too low"
    warn_of_copies("id_batches", len(keys), len(np.unique(keys)), why)
    if len(held.labels):
        held = fitting.replace_borrowed(held, len(borrowed))
        scores = familiarity.scores(held.features, held.logits)[0].mean(dim=0)
        familiarity = Familiarity(replace(familiarity.settings, reference=Reference.of(scores)), familiarity.state)
    line = f"familiarity ({', '.join(names)}) fitted on {familiarity.settings.samples} samples"
    metadata = _refitted(before, with_earlier(familiarity, before.familiarity), line)
    return Ensemble.from_state(weights.config, weights.whole_state(), metadata, weights.frozen)


def with_score(ensemble: Ensemble, familiarity: Familiarity, line: str) -> Ensemble:
    """A copy of an ensemble with one more fitted score, which decides from now on; one of the same name is replaced."""
    before = ensemble.metadata
    metadata = _refitted(before, with_earlier(familiarity, before.familiarity, replaced=()), line)
    return Ensemble.from_state(ensemble.config, ensemble.whole_state(), metadata, ensemble.frozen)


def _refitted(metadata: Metadata, familiarity: Familiarity, line: str) -> Metadata:
    """Metadata with the new familiarity, and without the shares accepted by the threshold of an earlier score."""
    earlier, metrics = metadata.familiarity, metadata.metrics
    if earlier is not None and earlier.settings.threshold is not None:
        metrics = {name: value for name, value in metrics.items() if name not in (*PER_THRESHOLD, *OF_ACCEPTED)}
        warn("the threshold of familiarity is dropped, so no input is called unfamiliar: calibrate again")
    return replace(metadata, familiarity=familiarity, metrics=metrics, history=(*metadata.history, line))


def with_earlier(
    familiarity: Familiarity, earlier: Familiarity | None, replaced: Sequence[str] = FAMILIARITY_NAMES
) -> Familiarity:
    """New scores, the first of which decides, followed by earlier ones with other names that are not in `replaced`."""
    if earlier is None:
        return familiarity
    old, new = earlier.settings, familiarity.settings
    others = tuple(score for score in old.scores if score not in (*new.scores, *replaced))
    state = {key: tensor for key, tensor in earlier.state.items() if key.rpartition(".")[0] in others}
    carried = {name: getattr(old, name) for score in others for name in _SETTINGS.get(score, ())}
    return Familiarity(replace(new, scores=(*new.scores, *others), **carried), {**familiarity.state, **state})


def answers(
    ensemble: Ensemble, batches: Batches, name: str, labelled: bool, seed: int = 0
) -> Iterator[tuple[Inputs, Answered]]:
    """Yield every batch unchanged, with the model's outputs for it; labels are zeros if not `labelled`.

    A loader that shuffles does so by `seed`. With several processes, each reads all batches.
    """
    if labelled:
        batches = in_model_order(batches, name, ensemble)
    with dropping(False), torch.no_grad(), first_epoch(batches, seed):
        for index, inputs, targets in iterate(batches, name, labelled):
            features, logits = ensemble.features_and_logits(ensemble.prepare(inputs))
            check_finite(features, f"features of batch {index}", name)
            labels = torch.zeros(features.shape[1], dtype=torch.long)
            if labelled:
                labels = require_labels(targets, ensemble.num_classes, name, index).cpu()
            yield inputs, Answered(features.float().cpu(), logits.float().cpu(), labels)


def require_fresh(familiarity: Familiarity, keys: Keys) -> float:
    """Refuse data most of which fitted the statistics, and warn of fewer; returns their share."""
    reused = reused_of(keys, familiarity.settings.fitted_set)
    told = f"{reused} of the validation samples were used to fit the familiarity of this ensemble"
    if reused.mostly:
        raise DataError(f"{told}, so they do not show how familiar new ones look; calibrate on other data")
    if reused.share:
        warn(f"{told}: its threshold accepts fewer new inputs than it promises; calibrate on other data")
    return reused.share


# --- gathering -----------------------------------------------------------------------------------------------------


class Reservoir:
    """A uniform random sample of bounded size from all samples offered, however many (reservoir sampling)."""

    def __init__(self, most: int, draws: np.random.Generator) -> None:
        self.most, self.draws, self.offered = most, draws, 0
        self.parts: list[Answered] = []  # one element once full

    def offer(self, samples: Answered) -> Answered:
        """Keep some of these samples; returns, in order, those not kept and those that were replaced."""
        before = self.offered
        count = len(samples.labels)
        self.offered += count
        free = min(max(self.most - before, 0), count)
        if free or not self.parts:
            self.parts.append(samples.pick(torch.arange(free)))
        if free == count:
            return samples.pick(torch.arange(0))
        kept = self.samples()
        drawn = self.draws.integers(np.arange(before + free, before + count) + 1)  # uniform over all so far
        sample_in: dict[int, int] = {}  # by slot that changes hands, the new sample now in it
        leaving: list[int] = []  # new samples by index; the old content of the k-th slot in `sample_in` is `count + k`
        for sample, slot in enumerate(drawn.tolist(), free):
            if slot < self.most:
                leaving.append(sample_in.get(slot, count + len(sample_in)))
                sample_in[slot] = sample
            else:
                leaving.append(sample)
        slots = torch.tensor(list(sample_in), dtype=torch.long)
        new = torch.tensor(list(sample_in.values()), dtype=torch.long)
        returned = Answered.join([samples, kept.pick(slots)]).pick(torch.tensor(leaving))
        kept.features[:, slots] = samples.features[:, new]
        kept.logits[:, slots] = samples.logits[:, new]
        kept.labels[slots] = samples.labels[new]
        return returned

    def samples(self) -> Answered:
        """All samples kept; some must have been offered."""
        self.parts = [Answered.join(self.parts)] if len(self.parts) > 1 else self.parts
        return self.parts[0]


class Sums:
    """Counts `[C]`, sums `[M, C, d]` and sums of products `[M, d, d]` of features, shifted by the mean of the first."""

    def __init__(self, features: Tensor, classes: int, labelled: bool) -> None:
        members, _, width = features.shape
        self.shift = features.mean(dim=1)  # [M, d]; without it features far from zero would lose digits
        self.count = torch.zeros(classes if labelled else 1, dtype=torch.float64)
        self.sums = torch.zeros(members, len(self.count), width, dtype=torch.float64)
        self.products = torch.zeros(members, width, width, dtype=torch.float64)

    def add(self, features: Tensor, labels: Tensor) -> None:
        """Add features `[M, B, d]` in float64."""
        centred = features - self.shift[:, None]
        self.count += torch.bincount(labels, minlength=len(self.count))
        self.sums.index_add_(1, labels, centred)
        self.products += centred.mT @ centred

    @property
    def mean(self) -> Tensor:
        """`[M, d]`, relative to the shift."""
        return self.sums.sum(dim=1) / self.count.sum()


@dataclass(eq=False)
class Fitting:
    """Statistics while they are being fitted; see `fit_familiarity` for what is fitted and how."""

    ensemble: Ensemble
    scores: tuple[FamiliarityName, ...]
    draws: np.random.Generator
    shrinkage: float | None = None
    neighbours: int | None = None
    principal: int | None = None
    stored: int = 10_000

    def __post_init__(self) -> None:
        if not self.scores or len(set(self.scores)) < len(self.scores):
            raise ConfigError(f"score={list(self.scores)} cannot be fitted; give one or more, each once")
        self.labelled = any(name in BY_CLASS for name in self.scores)
        self.sums: dict[bool, Sums] = {}  # keyed by whether features are normalised
        self.samples = self.width = 0
        self.peaks = torch.zeros(self.ensemble.num_members, dtype=torch.float64)
        self.kept = Reservoir(self.stored, self.draws)
        self.marks: Keys = np.empty(0, dtype=np.int64)

    def add(self, samples: Answered) -> None:
        """Add a model's outputs for some samples."""
        if not len(samples.labels):
            return
        self.samples = self.samples + len(samples.labels)
        self.width = samples.features.shape[2]
        self.peaks += samples.logits.double().amax(dim=-1).sum(dim=1)
        for normalised in {is_normalised(name) for name in self.scores if name != "knn"}:
            features = samples.features.double()  # [M, B, d]
            features = F.normalize(features, dim=-1) if normalised else features
            if normalised not in self.sums:
                self.sums[normalised] = Sums(features, self.ensemble.num_classes, self.labelled)
            self.sums[normalised].add(features, samples.labels if self.labelled else torch.zeros_like(samples.labels))
        if {"knn", "vim"} & set(self.scores):
            self.kept.offer(samples)

    def mark(self, keys: Keys) -> None:
        """Remember digests of some of the samples that were added."""
        self.marks = with_smallest_hashes(np.concatenate([self.marks, keys]))

    @property
    def counts(self) -> Tensor:
        """Samples of each class `[C]`; needs labels and at least one sample."""
        return next(iter(self.sums.values())).count

    def missing(self) -> list[int]:
        """Classes without a sample, if labels are used."""
        if not self.labelled or not self.sums:
            return []
        return (self.counts == 0).nonzero()[:, 0].tolist()

    def _named(self, classes: Sequence[int]) -> str:
        names = self.ensemble.metadata.labels
        return a_few([names[one] if names else str(one) for one in classes])

    def replace_borrowed(self, held_out: Answered, borrowed: int) -> Answered:
        """Held-out samples, with samples of the rarest classes repeated, one for each sample that was lent to the fit.

        Otherwise rare classes would be rarer here than among new samples, and fewer of those accepted than promised.
        """
        if not borrowed:
            return held_out
        fitted_by = self.counts[held_out.labels]
        rarest = (fitted_by == fitted_by.min()).nonzero()[:, 0]
        again = rarest[torch.arange(borrowed) % len(rarest)]
        return held_out.pick(torch.cat([torch.arange(len(fitted_by)), again]))

    def finish(self) -> Familiarity:
        """The statistics, in float32."""
        if not self.samples:
            raise TooFewSamplesError("there are no samples to fit familiarity on; give more, or hold out fewer")
        shrinkage = self._shrinkage()
        state = dict[str, Tensor]()
        settings: dict[str, Any] = {"marks": marks_of(self.marks)}
        for name in self.scores:
            if name == "knn":
                bank = F.normalize(self.kept.samples().features.double(), dim=-1)  # [M, N, d]
                most = bank.shape[1]
                chosen = self.neighbours or min(50, max(1, most // 50))
                if chosen > most:
                    raise ConfigError(f"neighbours is {chosen}, but {most} features are stored; lower it")
                settings |= {"stored": most, "neighbours": chosen}
                tensors = {"bank": bank}
            elif name == "vim":
                tensors = self._vim(self.kept.samples())
                settings["principal"] = tensors["origin"].shape[1] - tensors["residual"].shape[2]
            else:
                tensors = _mahalanobis(self.sums[is_normalised(name)], shrinkage, is_relative(name))
            state |= {f"{name}.{key}": tensor.float().contiguous() for key, tensor in tensors.items()}
        fitted = FamiliaritySettings(self.scores, self.width, self.samples, **settings)
        return Familiarity(fitted, state)

    def _shrinkage(self) -> float:
        """How much to shrink covariances; raises if the samples are too few for any covariance, and warns if few."""
        if not self.labelled:
            return 0.0
        missing = self.missing()
        classes = len(self.counts)
        other = "or use the score 'knn', which ignores classes"
        if missing:
            raise TooFewSamplesError(f"classes {self._named(missing)} have no samples; give some of each, {other}")
        if self.samples < 2 * classes:
            raise TooFewSamplesError(
                f"{self.samples} samples of {classes} classes are too few; give two of each, {other}"
            )
        if self.shrinkage == 0.0 and self.samples - classes < self.width:
            raise TooFewSamplesError(
                f"{self.samples} samples of {classes} classes do not determine all {self.width} directions of the "
                f"features; give {self.width + classes} or more, or leave out shrinkage=0"
            )
        few = self.samples < FEW_PER_CLASS * classes
        if few and self.shrinkage is None:
            warn(
                f"few samples per class: {self.samples / classes:.3g} on average, {int(self.counts.min())} in the "
                f"rarest; below {FEW_PER_CLASS} the covariance is shrunk by {SHRINKAGE_OF_FEW}, and distances are rough"
            )
        elif rare := (self.counts < RARE).nonzero()[:, 0].tolist():
            warn(
                f"classes {self._named(rare)} have fewer than {RARE} samples here, so their inputs look less familiar "
                "than they are; give more"
            )
        if self.shrinkage is not None:
            return self.shrinkage
        return SHRINKAGE_OF_FEW if few else SHRINKAGE

    def _vim(self, kept: Answered) -> dict[str, Tensor]:
        """Origin, directions outside the principal subspace, and weight of the residual against the energy."""
        sums = self.sums[False]
        width = kept.features.shape[2]
        principal = self.principal or max(2 * width // 3, 1)
        if principal >= width:
            raise ConfigError(f"principal is {principal}, but features have {width} directions; it must be smaller")
        if self.samples <= width:  # otherwise directions without samples would dominate
            raise TooFewSamplesError(f"vim needs over {width} samples, got {self.samples}; give more, or use 'knn'")
        mean, origin = sums.mean, self._origin()  # [M, d] each
        if origin is None:
            origin = mean + sums.shift
        offset = origin - sums.shift
        crossed = mean[:, :, None] * offset[:, None]
        moment = sums.products / self.samples - crossed - crossed.mT + offset[:, :, None] * offset[:, None]
        directions = torch.linalg.eigh(moment).eigenvectors  # [M, d, d], by ascending eigenvalue
        residual = directions[:, :, : width - principal]
        lengths = ((kept.features.double() - origin[:, None]) @ residual).norm(dim=-1).mean(dim=1)  # [M]
        peaks = self.peaks / self.samples
        if not bool((peaks > 0).all()) or not bool((lengths > 0).all()):
            raise DataError(
                f"vim needs largest logits, {peaks.tolist()} on average, and lengths outside the principal subspace, "
                f"{lengths.tolist()}, above 0; use another score"
            )
        return {"origin": origin, "residual": residual, "weight": peaks / lengths}

    def _origin(self) -> Tensor | None:
        """The point where a plain linear classifier gives zero for every class, `[M, d]`; None for other readouts."""
        readout = self.ensemble.readout
        if readout.classifier is None or readout.hidden is not None or readout.distillation_classifier is not None:
            return None
        weight = readout.classifier.weight.detach().double().cpu()
        bias = readout.classifier.bias
        if bias is None:
            return torch.zeros(self.ensemble.num_members, weight.shape[2], dtype=torch.float64)
        origin = -torch.linalg.pinv(weight) @ bias.detach().double().cpu()[..., None]  # [G, d, 1]
        return origin[..., 0].expand(self.ensemble.num_members, -1)


def _mahalanobis(sums: Sums, shrinkage: float, relative: bool) -> dict[str, Tensor]:
    """Overall mean, whitening of the within-class covariance, and whitened class means, per member."""
    samples = sums.count.sum()
    mean = sums.mean  # [M, d]
    means = sums.sums / sums.count[:, None]  # [M, C, d]
    within = (sums.products - (means * sums.count[:, None]).mT @ means) / samples  # [M, d, d]
    whiten = _whitening(within, shrinkage)
    statistics = {"mean": mean + sums.shift, "whiten": whiten, "classes": (means - mean[:, None]) @ whiten}
    if relative:
        total = sums.products / samples - mean[:, :, None] * mean[:, None]
        statistics["background"] = _whitening(total, shrinkage)
    return statistics


def _whitening(covariance: Tensor, shrinkage: float) -> Tensor:
    """Whitening matrices for covariances `[M, d, d]`; directions without variance are dropped."""
    values, directions = torch.linalg.eigh(covariance)
    mean, largest = values.mean(dim=-1, keepdim=True), values.amax(dim=-1, keepdim=True)  # [M, 1]
    if not bool((largest > 0).all()):
        raise TooFewSamplesError("all samples of a class have the same features; give samples that vary")
    values = values.clamp(min=0.0) + shrinkage * mean
    scale = torch.where(values > _NULL * largest, values, torch.inf).rsqrt()  # [M, d]
    return directions * scale[:, None]

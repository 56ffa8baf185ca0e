"""Calibration on held-out data: a temperature, and when an answer is accepted, with a promise about it.

`calibrate` reads the held-out rows once. Some of them fit (temperature, familiarity), the others certify: the rule by
which answers are accepted is set on rows that fitted nothing. Why what it promises holds: `docs/promise.md`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from ._utils import STEP, mixed, warn, without_autocast
from .batches import Batches, a_few, read_batch, require_batches, size_of
from .errors import ConfigError, DataError, TooFewSamplesError
from .familiarity import (
    Answered,
    copied_with,
    fit_on,
    read_answers,
    recognised,
    sample_digests,
    some_rows,
    with_earlier,
)
from .metrics.conformal import Bins, Reference, rank_for, samples_for
from .metrics.distance import FamiliarityChoice
from .metrics.ood import aurc
from .metrics.probabilities import at_least_float32, class_logits, log_mean_probs, mean
from .model.dual_encoder import require_classifier
from .model.ensemble import Ensemble, weights_of
from .model.layers import dropping
from .model.metadata import Calibration, Familiarity
from .prediction import NEVER, ScoreName, Threshold, reaches, require_members_for
from .promise import Promise, certify, one_of_each
from .settings import InnerShare, PositiveShare, Rate, require

Risk = float | Sequence[float] | Mapping[str, float | Sequence[float]]
Asked = Mapping[int | None, tuple[float, ...]]  # risks to promise, by the number of a label, or (None) for all labels
COLDEST, HOTTEST = 0.05, 20.0  # range of temperatures searched
REUSED = 3  # samples recognised from an earlier fit above which chance is no explanation
_PRIOR = 0.5  # prior standard deviation of the log-temperature; its mean is 0
_PRECISION, _AT_BOUND = 1e-10, 1e-3  # of log-temperatures: accuracy of the optimum, distance that is "at a bound"
_MIN_GAIN = 1e-6  # a smaller gain is rounding error, and the temperature stays 1
_MIN_RATIO = 4.0  # twice the log-likelihood ratio above which an improvement is hardly chance


@without_autocast()
def calibrate(
    ensemble: Ensemble,
    held_out: Batches,
    *,
    risk: Risk | None = None,
    confidence: float | None = 0.95,
    share: float | None = None,
    unfamiliar: float = 0.05,
    familiarity: FamiliarityChoice | None = "auto",
    train: Batches | None = None,
    groups: Sequence[Any] | None = None,
    score: ScoreName = "msp",
) -> Ensemble:
    """Decide when answers are accepted, with a promise about it, from held-out labelled batches; returns a copy.

    With `risk=0.01`, at most 1 % of the accepted answers on new inputs like these are wrong (`model.promise`). With
    `share=0.95`, which is the default, at least that share of inputs like these is accepted, and nothing is said of
    errors. There are two reasons to decline, and both are within the promise: the input is *unfamiliar* (a feature
    score, see `fit_familiarity`), or the model is *unsure*.

    Half of the rows, drawn by their digests, fit a temperature and the familiarity; the others certify. Rows by which
    the model was chosen (`search`, `cascade`) do not certify. `predict` applies all of it, and it is saved with the
    model. It belongs to these weights and to this precision: `ensemble.bfloat16()` first if it will run so.

    Args:
        ensemble: It is not changed.
        held_out: Labelled batches of the kind of inputs to come, on which nothing was trained or chosen.
        risk: The largest share of wrong answers among those accepted. A list certifies several, each by itself; the
            first is in force, and `model.at(risk=...)` changes that. A mapping such as `{"benign": 0.002}` bounds the
            share among accepted answers with each label, all together with `confidence`; answers with other labels
            are declined, or accepted without a promise if their risk is 1. A label may have a list, too.
        confidence: Probability with which the promise holds, over the draw of the held-out rows. None promises only on
            average over such draws, which takes far fewer rows.
        share: The share to accept, instead of `risk`.
        unfamiliar: With `risk`, at most this share of inputs like these is declined as unfamiliar.
        familiarity: Score for how familiar an input is. `"auto"` takes what was fitted, else `mahalanobis` if there
            are enough samples (if not, a warning and the history say so); None declines nothing as unfamiliar.
        train: Other labelled batches for the fits, such as training data: then all held-out rows certify.
        groups: Group of each row, in the order of the batches, such as the document of a page: one row of each group
            certifies, and the promise is for a random row of a random group.
        score: What sureness is measured by: `msp` by the confidence, others by minus the score.

    A model with several right labels an input is calibrated for each label by itself, on labels `[B, C]` of 0 and 1:
    `risk` bounds the share of wrong answers, yes or no, among those accepted about a label, and all its promises hold
    together with `confidence`. It has no familiarity.

    Raises:
        TooFewSamplesError: The rows are too few for this promise; the message says what they can promise.

    Examples:
        >>> safe = he.calibrate(base, batches, share=0.9, familiarity=None)
        >>> safe.predict(torch.randn(3, 3, 64, 64)).accept.shape
        torch.Size([3])
    """
    weights = getattr(ensemble, "_orig_mod", ensemble)  # if compiled
    require_members_for(score, ensemble.num_members)
    if risk is not None and share is not None:
        raise ConfigError("risk and share are two promises; give one of them")
    several = isinstance(weights, Ensemble) and weights.outputs == "labels"  # right ones of an input
    if several and familiarity not in ("auto", None):
        raise ConfigError("familiarity is not measured where inputs have several right labels; leave it out")
    if several:
        familiarity = None
    else:
        require_classifier(weights, "calibrate")
    metadata, labels = weights.metadata, weights.class_names
    asked = None if risk is None else _asked(risk, labels, several)
    confidence = None if confidence is None else require("confidence", confidence, InnerShare)

    read = _read_labels if several else read_answers
    samples = read(ensemble, held_out, "held_out")
    others = None if train is None else read(ensemble, train, "train")
    left_out = np.isin(samples.digests, [int(one) for one in metadata.chosen])
    left_out |= False if others is None else np.isin(samples.digests, others.digests)
    fit, certifies = divided(samples.digests, left_out, groups, share=0.5 if others is None else 1.0)
    fits = samples.pick(torch.from_numpy(fit)) if others is None else others
    held = samples.pick(torch.from_numpy(certifies))
    given = f"of {len(samples.labels)} held-out rows {len(held.labels)} certify"
    given += f" ({int(left_out.sum())} left out: they chose or fitted)" if left_out.any() else ""
    if not len(held.labels) or not len(fits.labels):
        raise TooFewSamplesError(f"{given}, and {len(fits.labels)} fit; give rows that neither chose nor fitted")
    fitted, why = _familiarity(ensemble, fits, held, familiarity)
    if several:
        fits, held = _questions(fits), _questions(held)
    plain = Calibration(fit_temperature(fits.logits, fits.labels), score=score)
    answers, before = plain.prediction(held.logits), plain.prediction(fits.logits)
    strange = None if fitted is None or familiarity is None else _first(fitted, held)
    right = answers.label == held.labels
    about = torch.arange(len(labels)).repeat(len(held.digests)) if several else answers.label
    try:
        found = rule(
            answers.certainty, strange, about, right, labels, each=several,
            risk=asked, confidence=confidence, share=0.95 if share is None else share, unfamiliar=unfamiliar,
        )  # fmt: skip
    except TooFewSamplesError as error:
        raise TooFewSamplesError(f"{error} ({given}; with train= all can)") from error

    if fitted is not None:
        reference = fitted.settings.reference if strange is None else Reference.of(strange)
        fitted = Familiarity(replace(fitted.settings, threshold=found.unfamiliar, reference=reference), fitted.state)
    watched = {} if several else {"confidence": Bins.of(before.score(), answers.score())}
    watched |= {} if fitted is None or strange is None else {"familiarity": Bins.of(_first(fitted, fits), strange)}
    calibration = replace(
        plain, threshold=found.threshold, promises=found.promises, share=share or (0.95 if risk is None else None),
        reference=Reference.of(answers.score()), watched=watched, weights=weights_of(weights),
        rows=some_rows(held.digests),
    )  # fmt: skip
    accept = torch.from_numpy(found.accepts(answers.certainty, strange, about))
    notes = [] if several else _notes(samples, answers.label[accept], held.labels, labels, asked)
    notes += [f"no input is ever called unfamiliar: {why}"] if why else []
    if notes:
        warn("; ".join(notes))
    metrics = {
        "validation/accuracy": mean(right),
        "validation/nll_uncalibrated": F.nll_loss(Calibration().prediction(held.logits).log_probs, held.labels).item(),
        "validation/nll": F.nll_loss(answers.log_probs, held.labels).item(),
        "validation/accepted_share": mean(accept),
        "validation/risk_of_accepted": mean(~right[accept]) if bool(accept.any()) else 0.0,
        "validation/aurc": aurc(-answers.certainty, ~right),
    }
    line = f"calibrated: {given}; temperature {plain.temperature:.4g}; {mean(accept):.2%} accepted"
    line += "".join(f"; {one}" for one in found.promises)
    line += "; of several risks each is certified by itself" if len(found.promises) > len(calibration.in_force) else ""
    return copied_with(
        weights,
        calibration=calibration,
        familiarity=fitted,
        metrics={**metadata.metrics, **metrics},
        history=(*metadata.history, f"{line}; {why}" if why else line),
    )


def _read_labels(model: Ensemble, batches: Batches, name: str) -> Answered:
    """What `read_answers` returns for a model with several right labels: log-odds, labels of 0 and 1 `[n, C]`."""
    require_batches(batches, name)
    parts = list[tuple[Tensor, Tensor, Tensor]]()
    for index, batch in enumerate(batches):
        inputs, _ = read_batch(batch, name, index, labelled=False)
        given = batch.get("labels") if isinstance(batch, Mapping) else batch[1] if len(batch) == 2 else None
        truth = torch.empty(0) if given is None else torch.as_tensor(given, device="cpu")
        wanted = (size_of(inputs), model.num_classes)
        if truth.shape != wanted or not bool(((truth == 0) | (truth == 1)).all()):
            told = f"must be {list(wanted)} of 0 and 1, one for each label"
            raise DataError(f"labels in batch {index} of {name} {told}; got {list(truth.shape)}")
        with dropping(False), torch.no_grad():
            logits = at_least_float32(model(model.prepare(inputs))).cpu()
        parts.append((logits.transpose(0, 1), truth.long(), sample_digests(inputs)))
    if not parts:
        raise DataError(f"{name} has no samples; check the loader, or that it was not consumed before")
    logits, labels, digests = map(torch.cat, zip(*parts, strict=True))
    logits = logits.transpose(0, 1)  # [n, M, C] -> [M, n, C]
    return Answered(logits[..., :0], logits, labels, digests)


def _questions(rows: Answered) -> Answered:
    """The questions whether a label applies, row by row, `[M, n·C, 2]`, as those of a classifier with no and yes."""
    return rows._replace(logits=class_logits(rows.logits.flatten(1)[..., None]), labels=rows.labels.flatten())


# --- which rows certify ----------------------------------------------------------------------------------------------


def drawn(digests: Tensor) -> NDArray[np.float64]:
    """A number in [0, 1) for each row, `[n]`, that depends on its digest and on how often that occurred before.

    So the same rows always fall alike, whatever their order, and rows that occur twice fall apart like any others.
    """
    values, place, counts = np.unique(digests.numpy(), return_inverse=True, return_counts=True)
    order = np.argsort(place, kind="stable")
    before = np.empty(len(place), np.uint64)
    before[order] = np.arange(len(place)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.asarray(mixed(values[place].view(np.uint64) + (before + np.uint64(1)) * STEP) / 2.0**64)


def divided(
    digests: Tensor, left_out: NDArray[np.bool_], groups: Sequence[Any] | None = None, share: float = 0.5
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which rows fit, and which certify: a share of them, drawn by their digests, but none that is left out.

    A group stays together, and one row of it, drawn at random, certifies.
    """
    rows = len(digests)
    group, chosen = np.arange(rows), np.arange(rows)
    if groups is not None:
        chosen = one_of_each(groups, rows, seed=0)
        group = np.unique(np.asarray(groups), return_inverse=True)[1]
    least = np.full(int(group.max()) + 1, np.inf)
    np.minimum.at(least, group, np.where(left_out, -1.0, drawn(digests)))  # rows that are left out come first
    fits = np.argsort(np.argsort(least, kind="stable")) < math.floor((1 - share) * len(least))
    certifies = np.zeros(rows, bool)
    certifies[chosen] = (~fits & (least >= 0))[group[chosen]]
    return fits[group], certifies


# --- the rule --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """When an answer is accepted, and what is promised of it."""

    threshold: Threshold
    unfamiliar: float | None  # the largest accepted feature score
    promises: tuple[Promise, ...] = ()

    def accepts(self, certainty: Tensor, unfamiliarity: Tensor | None, label: Tensor) -> NDArray[np.bool_]:
        """Whether answers are accepted, `[n]`, compared as `Prediction` does."""
        sure = reaches(self.threshold, certainty, label)
        if unfamiliarity is not None and self.unfamiliar is not None:
            sure = sure & (unfamiliarity <= self.unfamiliar)
        return sure.cpu().numpy()


def rule(
    certainty: Tensor,
    unfamiliarity: Tensor | None,
    label: Tensor,
    correct: Tensor,
    labels: Sequence[str],
    *,
    risk: Asked | None = None,
    confidence: float | None = 0.95,
    share: float = 0.95,
    unfamiliar: float = 0.05,
    each: bool = False,
) -> Rule:
    """When answers are accepted, from rows that fitted nothing: a pure function of arrays `[n]`.

    Args:
        certainty: Higher for surer answers.
        unfamiliarity: Higher for stranger inputs; None declines nothing as unfamiliar.
        label: The answers.
        correct: Whether they are right.
        labels: Names of the classes.
        risk: What to promise of errors, by label or (None) for all; None promises the share.
        confidence: As for `calibrate`.
        share: As for `calibrate`.
        unfamiliar: As for `calibrate`.
        each: Whether the share is to be accepted of the answers with each label.
    """
    if risk is None:
        require("share", share, PositiveShare)
        if not each:
            return Rule(*_of_share(certainty, unfamiliarity, share))
        return Rule(tuple(_of_share(certainty[label == one], None, share)[0] for one in range(len(labels))), None)
    limit = None
    if unfamiliarity is not None:  # what is at or above the score of a rank is declined: given it, the rest is i.i.d.
        ordered = unfamiliarity.sort().values
        rank = rank_for(1.0 - require("unfamiliar", unfamiliar, Rate), len(ordered))
        if rank < len(ordered):
            limit = below(ordered[rank])
            kept = unfamiliarity <= limit
            certainty, label, correct = certainty[kept], label[kept], correct[kept]
    bounded = [index for index, risks in risk.items() if risks != (1.0,)]
    level = confidence and 1 - (1 - confidence) / len(bounded)
    found = dict[int | None, list[Promise]]()
    for index in bounded:
        name = None if index is None else labels[index]
        mine = slice(None) if index is None else label == index
        sure, right = certainty[mine], correct[mine]
        if name is not None and not len(sure):
            raise TooFewSamplesError(f"no row that certifies is answered {name!r}; give more rows")
        try:
            points = [certify(sure, right, one, level=level) for one in risk[index]]
        except TooFewSamplesError as error:
            raise TooFewSamplesError(f"{error}" if name is None else f"answers {name!r}: {error}") from error
        found[index] = [replace(one, confidence=confidence, label=name) for one in points]
    promises = tuple(one for points in found.values() for one in points)
    if None in risk:
        return Rule(promises[0].threshold, limit, promises)
    first = {index: points[0].threshold for index, points in found.items()}
    others = {index: -NEVER if index in risk else NEVER for index in range(len(labels))}
    return Rule(tuple(first.get(index, other) for index, other in others.items()), limit, promises)


def _of_share(certainty: Tensor, unfamiliarity: Tensor | None, share: float) -> tuple[float, float | None]:
    """Limits that accept at least a share of rows like these by both reasons together: each allows the same rank.

    The rank is one more than the least at which both together accept ⌈share · (n + 1)⌉ of the rows: conformal, since
    with a new row among them they would accept as many at this rank.
    """
    scores = [-certainty] if unfamiliarity is None else [-certainty, unfamiliarity]
    ordered = [one.sort().values for one in scores]
    rows = len(certainty)
    ranks = torch.stack([torch.searchsorted(known, one) for known, one in zip(ordered, scores, strict=True)])
    wanted = rank_for(share, rows)
    rank = rows + 1 if wanted > rows else int(ranks.amax(dim=0).sort().values[wanted - 1]) + 1  # from 1
    rank += len(scores) > 1
    if rank > rows:
        if share < 1:
            few = f"promising a share of {share:.4g} takes {samples_for(share)} rows and more, {rows} certify"
            warn(f"{few}: every input is accepted; calibrate on more, or accept a smaller share")
        return -NEVER, None if unfamiliarity is None else NEVER
    return -ordered[0][rank - 1].item(), None if unfamiliarity is None else ordered[1][rank - 1].item()


def below(value: Tensor) -> float:
    """The next smaller number in the dtype of a value."""
    return float(torch.nextafter(value, value.new_tensor(-math.inf)))


def _asked(risk: Risk, labels: Sequence[str], each: bool = False) -> Asked:
    """The risks as they were given, with the numbers of labels; `each` label has those that are given for all."""
    if isinstance(risk, Mapping):
        names: dict[Any, int] = {index: index for index in range(len(labels))}
        names |= {name: index for index, name in enumerate(labels)}
        if not risk or (unknown := [name for name in risk if name not in names]):
            raise ConfigError(f"risk names {unknown if risk else 'no label'}; give some of {a_few(labels)}")
        read: dict[int | None, tuple[float, ...]] = {
            names[name]: tuple(require(f"risk[{name!r}]", one, PositiveShare) for one in _several(given))
            for name, given in risk.items()
        }
        if set(read.values()) == {(1.0,)}:
            raise ConfigError("risk bounds no label: give one a risk below 1, or share=")
        return read
    points = tuple(require("risk", one, InnerShare) for one in _several(risk))
    return dict.fromkeys(range(len(labels)) if each else [None], points)


def _several(risk: Any) -> Sequence[float]:
    if risk in ([], ()):
        raise ConfigError("risk is an empty list; give one share or several")
    return risk if isinstance(risk, list | tuple) else [risk]


def _notes(samples: Answered, accepted: Tensor, held: Tensor, labels: Sequence[str], asked: Asked | None) -> list[str]:
    """What a user should know of the rows."""
    counts = samples.labels.bincount(minlength=len(labels))
    missing = (counts == 0).nonzero()[:, 0].tolist()
    seen, kept = (one.bincount(minlength=len(labels)) for one in (held, accepted))
    named = range(len(labels)) if asked is None or None in asked else asked
    never = [one for one in range(len(labels)) if seen[one] and not kept[one] and one in named]
    repeated = len(samples.digests) - len(samples.digests.unique())
    notes = []
    if missing:
        notes.append(f"held_out has no samples of {a_few([labels[one] for one in missing])}: nothing is known of them")
    if never:
        notes.append(f"no answer {a_few([labels[one] for one in never])} is accepted")
    if repeated:
        notes.append(f"{repeated} rows of held_out occur before; are they copies?")
    return notes


# --- fits ------------------------------------------------------------------------------------------------------------


def _first(familiarity: Familiarity, samples: Answered) -> Tensor:
    """The first feature score, `[n]`, as in `Prediction`."""
    return familiarity.scores(samples.features, samples.logits)[0].mean(dim=0)


def _familiarity(
    ensemble: Ensemble, fits: Answered, held: Answered, choice: FamiliarityChoice | None
) -> tuple[Familiarity | None, str]:
    """Familiarity without a threshold, and why there is none.

    Earlier statistics are kept if they are the ones asked for, unless an earlier `calibrate` fitted them.
    """
    earlier = ensemble.metadata.familiarity
    if choice is None:  # an earlier threshold belongs to another calibration
        return None if earlier is None else Familiarity(replace(earlier.settings, threshold=None), earlier.state), ""
    if earlier is not None and choice in ("auto", earlier.settings.scores[0]) and not earlier.settings.own:
        reused = recognised(earlier.settings.rows, held.digests)
        if reused >= REUSED:
            told = f"{reused} of {len(earlier.settings.rows)} samples known to have fitted the familiarity certify"
            raise DataError(f"{told}; calibrate on other data, or without fit_familiarity before")
        return earlier, ""
    score = earlier.settings.scores[0] if choice == "auto" and earlier is not None else choice
    try:
        names = ("mahalanobis" if score == "auto" else score,)
        found = fit_on(ensemble, fits, names, np.random.default_rng(0))  # type: ignore[arg-type]
    except TooFewSamplesError as problem:
        if choice != "auto" or earlier is not None:
            raise
        return None, f"familiarity is not fitted ({problem})"
    return with_earlier(Familiarity(replace(found.settings, own=True), found.state), earlier), ""


def fit_temperature(member_logits: Tensor, labels: Tensor) -> float:
    """The likeliest temperature of the members' mean probabilities, in float64; 1 unless another helps.

    It divides the logarithm of the mean probabilities (so no label changes). It is the one between 0.05 and 20 that
    minimises NLL + (ln T)² / (2 · 0.5² · n) over the n samples: the negative log-likelihood under a prior by which its
    logarithm is normal, with mean 0 and standard deviation 0.5. So it stays near 1 if there are few samples or hardly
    any mistakes. A warning is given if it ends at a bound, or if no temperature makes the answers likelier than a
    guess: the labels may be numbered differently.

    Args:
        member_logits: `[M, n, C]`.
        labels: `[n]`.
    """
    means = log_mean_probs(member_logits.detach().double())  # [n, C], the logarithm of the mean probabilities
    samples, guess = len(labels), math.log(means.shape[1])
    prior = 1 / (_PRIOR**2 * samples)  # its weight against the NLL, which is a mean over the samples
    log = _log_temperature(means, labels, prior)
    before, after = F.nll_loss(means, labels).item(), F.nll_loss((means / math.exp(log)).log_softmax(1), labels).item()
    if before - after - prior / 2 * log**2 <= _MIN_GAIN:
        log, after = 0.0, before
    found = math.exp(log)
    at_bound = {bound: abs(log - math.log(bound)) < _AT_BOUND for bound in (COLDEST, HOTTEST)}
    if any(at_bound.values()) or (before > guess and 2 * samples * (guess - after) < _MIN_RATIO):
        why = "do data and model number the classes alike, and are the inputs prepared as the model knows them?"
        if at_bound[COLDEST]:
            why = "the answers are right far more often than their probabilities say: are they unscaled logits?"
        told = f"NLL {after:.3f} over {samples} samples, {guess:.3f} for a guess"
        warn(f"at no temperature do the answers fit the labels ({told}, at temperature {found:.4g}): {why}")
    return found


def _log_temperature(log_probs: Tensor, labels: Tensor, prior: float) -> float:
    """The log-temperature that minimises NLL plus prior: a root of the derivative, or the bound it lies beyond.

    In the inverse temperature the NLL is convex, so that the derivative changes its sign once.
    """
    from scipy.optimize import brentq

    right = log_probs.gather(1, labels[:, None])[:, 0]

    def slope(log: float) -> float:
        expected = ((log_probs * math.exp(-log)).softmax(dim=1) * log_probs).sum(dim=1)  # [n], of the log-probability
        return prior * log - (expected - right).mean().item() * math.exp(-log)

    low, high = math.log(COLDEST), math.log(HOTTEST)
    if slope(low) >= 0 or slope(high) <= 0:
        return low if slope(low) >= 0 else high
    return float(brentq(slope, low, high, xtol=_PRECISION))

"""Calibration on held-out data: a temperature, and thresholds that say when to abstain and why."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import cast

import numpy as np
import torch
from torch import Tensor

from ._utils import warn, without_autocast
from .arguments import PositiveShare, checked
from .batches import Batches, warn_if_cut
from .classes import a_few
from .errors import DataError, TooFewSamplesError
from .familiarity import PER_THRESHOLD, Answered, Fitting, answers, require_fresh, with_earlier
from .metrics.conformal import Reference, conformal_threshold, samples_for
from .metrics.distance import BY_CLASS, FamiliarityChoice, FamiliarityName
from .metrics.inputs import check_labels, mean, warn_of_probabilities
from .metrics.ood import aurc
from .metrics.probabilities import log_mean_exp, log_mean_probs
from .model.ensemble import Ensemble
from .model.kinds import require_ensemble
from .model.metadata import ACCEPTS_ALL, Calibration, Familiarity
from .overlap import Keys, about, marks_of, reused_of, sample_keys, warn_of_copies
from .prediction import ScoreName, require_members_for, scale_logits

COLDEST, HOTTEST = 0.05, 20.0  # range of temperatures searched
_PRIOR = 0.5  # prior standard deviation of the log-temperature; its mean is 0
_GRID = 24
_PRECISION, _AT_BOUND = 1e-6, 1e-3  # of log-temperatures: accuracy of the optimum, distance that is "at a bound"
_MIN_GAIN = 1e-6  # a smaller gain is rounding error, and the temperature stays 1
_MIN_RATIO = 4.0  # twice the log-likelihood ratio above which an improvement is hardly chance
_CHANCE = 0.001  # warn of a class declined so often that chance explains it with less than this probability
_FEW = 10  # samples of a class below which its answers may be chance
_STEPS = 50  # maximum number of Newton steps; fewer than ten are usual
_ROWS = 8192  # samples converted to float64 at a time
_AT_ONCE = 2**17  # logits per chunk of log-softmax: fits into the cache of a core
_LOG_ZERO = -800.0  # log-probability that underflows to 0 in float64
_TOO_UNSURE = "the answers are right far more often than their probabilities say; check that they are unscaled logits"
_WRONG_LABELS = "the labels do not match the answers; check that data and model number the classes in the same way"
_NO_BETTER = (
    "data and model may number the classes differently, the inputs may not be prepared as the model knows them, or it "
    "knows little of such data; check in this order"
)


@dataclass(frozen=True)
class CalibrationFit:
    """A calibration (temperature and threshold), and its effect on the samples it was fitted on."""

    calibration: Calibration
    samples: int
    accuracy: float  # like the NLLs, of the mean probabilities
    nll_before: float
    nll_after: float
    accepted: float  # share of samples that the threshold accepts
    risk: float  # share of wrong answers among accepted samples
    aurc: float  # area under the risk-coverage curve of the score


@checked
@without_autocast()
def calibrate(
    ensemble: Ensemble,
    validation: Batches,
    *,
    share: PositiveShare = 0.95,
    score: ScoreName = "msp",
    per_member: bool = False,
    temperature: bool = True,
    familiarity: FamiliarityChoice | None = "auto",
) -> Ensemble:
    """Fit a temperature and the thresholds for abstaining, on held-out labelled ID batches; returns a copy.

    There are two reasons to abstain, each with a threshold that accepts at least `share` of inputs like these: the
    model is *unsure* (`score`), or the input is *unfamiliar* (a feature score, see `fit_familiarity`). Both together
    accept at least 2 · share - 1; the share of these samples that they accepted is in the metrics and the history.

    `predict` applies all of it, and it is saved with the model, replacing an earlier calibration. The numbers of the
    fit are added to its metrics under `validation/`. It belongs to these weights: once they are edited in place, or
    trained, it is dropped with a warning. Edits through `.data` and steps of fused optimizers are noticed only when
    the model is next saved, copied, evaluated, optimized or exported. The fit uses the precision of the model,
    whatever autocast is active: if it will run in half precision, convert it first: `ensemble.bfloat16()`. Forward
    hooks added later that change its outputs are not noticed.

    Digests of 1,024 of the samples, drawn evenly, are stored with it (`Calibration.marks`), and `evaluate` warns if it
    is given them: numbers on data that set the thresholds are too good. If a share f of these samples is in a set,
    none of the 1,024 is in it, and nothing is noticed, with probability (1 - f)^1024: 0.004 % for a hundredth, 36 % for
    a thousandth. In the same way, samples that fitted the familiarity are recognised: if more than half of the given
    samples did (a part of the training data, say), by three digests or more, they are refused; fewer give a warning.

    Args:
        ensemble: It is not changed.
        validation: Held-out labelled in-distribution batches that nothing was fitted on. If there are several
            processes, give all batches to each.
        share: As for `fit_calibration`, like `score`, `per_member` and `temperature`.
        score: Score for how unsure an answer is.
        per_member: Whether each member gets its own temperature.
        temperature: Whether to fit a temperature at all.
        familiarity: Score for how familiar an input is. If it is not fitted yet, a random half of the samples fits it,
            and the other half sets its threshold; the same batches, or the same shuffling loader, give the same
            halves. `"auto"` takes what was fitted, else `mahalanobis` if there are enough samples (if not, the history
            says so); None sets no such threshold.

    Raises:
        DataError: More than half of the samples fitted the familiarity: they do not show how familiar new ones look.
        ConfigError: A loader that is split between processes.

    Examples:
        >>> import torch, hydra_ensembles as he
        >>> from hydra_ensembles.demo import load_backbone
        >>> base = load_backbone()  # a small vision transformer: one member, 6 layers of 6 heads, 7 classes
        >>> batches = [(torch.randn(7, 3, 64, 64), torch.arange(7)) for _ in range(2)]  # or a DataLoader
        >>> calibrated = he.calibrate(base, batches, share=0.9, familiarity=None)
        >>> calibrated.predict(torch.randn(3, 3, 64, 64)).accept.shape
        torch.Size([3])
    """
    weights = require_ensemble(getattr(ensemble, "_orig_mod", ensemble), "calibrate", classifies=True)  # if compiled
    require_members_for(score, ensemble.num_members)
    metadata = weights.metadata
    parts, known_by = list[Answered](), list[Keys]()
    for inputs, answered in answers(ensemble, validation, "validation", labelled=True):
        parts.append(answered if familiarity is not None else answered._replace(features=answered.features[..., :0]))
        known_by.append(sample_keys(inputs))
    samples = Answered.join(parts)
    keys = np.concatenate(known_by)
    warn_if_cut(validation, "validation", len(keys))
    warn_of_copies("validation", len(keys), len(np.unique(keys)), "thresholds promise their share only for such data")
    fit = fit_calibration(
        samples.logits, samples.labels, share=share, score=score, per_member=per_member, temperature=temperature
    )
    answered_as = fit.calibration.prediction(samples.logits).label
    warn_of_exchanged_classes(answered_as, samples.labels, metadata.labels, "validation")
    degrees = ", ".join(f"{value:.4g}" for value in fit.calibration.temperature)
    line = f"calibrated on {fit.samples} samples, {fit.accuracy:.2%} of them right: temperature {degrees}"
    line += f"; {score} threshold accepts {fit.accepted:.2%}"
    metrics = {
        "validation/accuracy": fit.accuracy,
        "validation/nll_uncalibrated": fit.nll_before,
        "validation/nll": fit.nll_after,
        "validation/accepted_share": fit.accepted,
        "validation/risk_of_accepted": fit.risk,
        "validation/aurc": fit.aurc,
    }
    familiar, both, words = _familiar_part(ensemble, metadata.familiarity, samples, keys, fit, familiarity, share)
    other_metrics = {name: value for name, value in metadata.metrics.items() if name not in PER_THRESHOLD}
    metadata = replace(
        metadata,
        calibration=replace(fit.calibration, marks=marks_of(keys), logit_marks=()),
        familiarity=familiar,
        metrics={**other_metrics, **metrics, **both},
        history=(*metadata.history, line + words),
    )
    # A copy of the weights: the calibrated model must not change if the original is masked or trained.
    return Ensemble.from_state(weights.config, weights.whole_state(), metadata, weights.frozen)


def _familiar_part(
    ensemble: Ensemble,
    earlier: Familiarity | None,
    samples: Answered,
    keys: Keys,
    fit: CalibrationFit,
    choice: FamiliarityChoice | None,
    share: float,
) -> tuple[Familiarity | None, dict[str, float], str]:
    """The familiarity with its threshold, its metrics, and a phrase for the history.

    Earlier statistics are kept if they are the ones asked for; otherwise one half of the samples fits them and the
    other half sets the threshold. They are also refitted if half of these samples fitted them before: a threshold set
    on all samples would be too low. "auto" skips familiarity, with a warning, if nothing is fitted and samples are few.
    """
    if choice is None:  # an earlier threshold belongs to another calibration
        bare = None if earlier is None else Familiarity(replace(earlier.settings, threshold=None), earlier.state)
        return bare, {}, ""
    name: FamiliarityName = "mahalanobis" if choice == "auto" else choice
    fitted = None
    if earlier is not None and choice in ("auto", earlier.settings.scores[0]):
        name = cast(FamiliarityName, earlier.settings.scores[0])
        fitted = None if earlier.settings.halved and reused_of(keys, earlier.settings.fitted_set).share else earlier
    try:
        if fitted is not None:
            reused = require_fresh(fitted, keys)
            familiarity, held_out = fitted, samples
        else:
            reused = 0.0
            familiarity, held_out = _fitted_on_a_half(ensemble, samples, keys, name, share)
            familiarity = with_earlier(familiarity, earlier)
        familiarity, both = _with_threshold(familiarity, held_out, fit.calibration, share, ensemble.metadata.labels)
    except TooFewSamplesError as problem:
        if choice != "auto" or earlier is not None:
            raise
        warn(f"familiarity is not fitted, so no input is ever called unfamiliar: {problem}")
        return earlier, {}, f"; familiarity is not fitted: {problem}"
    threshold = f", {familiarity.settings.scores[0]} threshold {both['validation/familiar_share']:.2%}"
    accepted = f"{both['validation/accepted_share']:.2%} of the {len(held_out.labels)}"
    which = f", {about(reused)} of which fitted it" if reused else " that did not fit it"
    return familiarity, both, f"{threshold}; both accept {accepted}{which}"


def _fitted_on_a_half(
    ensemble: Ensemble, samples: Answered, keys: Keys, score: FamiliarityName, share: float
) -> tuple[Familiarity, Answered]:
    """Fit familiarity on a random half of the samples; also returns the other half, which can set its threshold.

    Samples with the same key are copies and stay together: a copy of a fitted sample looks more familiar than new data.
    """
    draws = np.random.default_rng(0)
    labels = samples.labels.numpy()
    drawn = draws.random(len(labels)) < 0.5
    classes, first = np.unique(labels, return_index=True)
    borrowed = ~np.isin(classes, labels[drawn]) & (score in BY_CLASS)  # by chance a rare class may be only in one half
    drawn[first[borrowed]] = True
    _, first_copy, copies = np.unique(keys, return_index=True, return_inverse=True)
    fits = torch.from_numpy(drawn[first_copy[copies]])
    held_out = samples.pick(~fits)
    if len(held_out.labels) < max(samples_for(share), 1):
        few = f"{len(held_out.labels)} of {len(labels)} samples, those not used to fit it, are too few"
        needed = f"to promise a share of {share:.4g} takes {samples_for(share)}"
        raise TooFewSamplesError(f"{few}: {needed}, or statistics fitted before (fit_familiarity)")
    fitting = Fitting(ensemble, (score,), draws)
    for rows in fits.nonzero()[:, 0].split(_ROWS):
        fitting.add(samples.pick(rows))
    fitting.mark(keys[fits.numpy()])
    familiarity = fitting.finish()
    held_out = fitting.replace_borrowed(held_out, int(borrowed.sum()))
    return Familiarity(replace(familiarity.settings, halved=True), familiarity.state), held_out


def _with_threshold(
    familiarity: Familiarity, held_out: Answered, calibration: Calibration, share: float, names: Sequence[str]
) -> tuple[Familiarity, dict[str, float]]:
    """Set the threshold on samples that did not fit the familiarity; also returns the shares both thresholds accept."""
    scores = familiarity.scores(held_out.features, held_out.logits)  # [S, M, n]
    deciding = scores[0].mean(dim=0)
    settings = replace(familiarity.settings, threshold=threshold_for(deciding, share), accepted_share=share)
    familiarity = Familiarity(replace(settings, reference=Reference.of(deciding)), familiarity.state)
    decided = calibration.prediction(held_out.logits, unfamiliarity=familiarity.about(scores))
    passed = cast(dict[str, Tensor], decided.passed())  # both thresholds exist
    sure, familiar = passed["unsure"], passed["unfamiliar"]
    accept = sure & familiar
    warn_of_declined_classes(accept, held_out.labels, names)
    wrong = decided.label != held_out.labels
    return familiarity, {
        "validation/sure_share": mean(sure),
        "validation/familiar_share": mean(familiar),
        "validation/accepted_share": mean(accept),
        "validation/risk_of_accepted": mean(wrong[accept]) if bool(accept.any()) else 0.0,
    }


def warn_of_declined_classes(accept: Tensor, labels: Tensor, names: Sequence[str]) -> None:
    """Warn of classes declined mostly, and significantly more often than average: the promise is for all together."""
    counts, taken, share = Counter(labels.tolist()), Counter(labels[accept].tolist()), mean(accept)
    told = []
    for number, count in sorted(counts.items()):
        kept = taken[number] / count
        if kept < min(share, 0.5):
            unlike = (1 - kept) * math.log((1 - kept) / (1 - share)) + (kept * math.log(kept / share) if kept else 0.0)
            if math.exp(-count * unlike) * len(counts) < _CHANCE:  # Chernoff bound on accepting so few
                told.append(f"{_called(number, names)} ({count - taken[number]} of {count})")
    if told:
        warn(
            f"most samples of {a_few(told)} are declined, but only {1 - share:.2%} of all samples: thresholds promise "
            "a share of all inputs, not of each class. Give more samples of such a class, or accept a larger share"
        )


def warn_of_exchanged_classes(answers: Tensor, labels: Tensor, names: Sequence[str], data: str) -> None:
    """Warn of classes answered mostly as another one that is itself answered as another: so exchanged labels look.

    A class that is merely hard is mistaken for one that the model knows.
    """
    counts, pairs = Counter(labels.tolist()), Counter(zip(labels.tolist(), answers.tolist(), strict=True))
    mostly = {label: answer for (label, answer), n in pairs.items() if 3 * n > 2 * max(counts[label], _FEW)}
    exchanged = [(label, answer) for label, answer in sorted(mostly.items()) if mostly.get(answer, answer) != answer]
    told = [f"{_called(label, names)} as {_called(answer, names)}" for label, answer in exchanged if label != answer]
    if told:
        warn(f"most samples of some classes of {data} are answered as another: {a_few(told)}; {_WRONG_LABELS}")


def _called(number: int, names: Sequence[str]) -> str:
    return names[number] if names else f"class {number}"


@checked
def fit_calibration(
    member_logits: Tensor,
    labels: Tensor | Sequence[int],
    *,
    share: PositiveShare = 0.95,
    score: ScoreName = "msp",
    per_member: bool = False,
    temperature: bool = True,
) -> CalibrationFit:
    """Fit temperature and threshold to member logits from any source.

    The temperature divides the logarithm of the members' mean probabilities (so no label changes). It is the one
    between 0.05 and 20 that minimises NLL + (ln T)² / (2 · 0.5² · n) over the n samples: the negative log-likelihood
    under a prior by which its logarithm is normal, with mean 0 and standard deviation 0.5. So it stays near 1 if there
    are few samples or hardly any mistakes; with hundreds of mistakes the prior hardly matters. It is 1 unless another
    helps. A warning is given if it ends at a bound, or if no temperature makes the answers likelier than a guess:
    the labels may be numbered differently. Scores are not calibrated, and do not depend on it.

    The threshold is the ⌈share · (n + 1)⌉-th smallest of the n scores: an input like the samples is accepted with
    probability `share` or more, for any n. If n is too small to decline any, everything is accepted, with a warning.
    Digests of 1,024 of the samples' logits are kept (`Calibration.logit_marks`), and `evaluate_logits` warns of them.

    Args:
        member_logits: `[M, B, C]` of held-out in-distribution samples, at least two.
        labels: `[B]`.
        share: Share of inputs like these to accept, in (0, 1].
        score: Uncertainty score that the threshold applies to.
        per_member: Whether each member gets its own temperature before the mean, each under the prior; labels may
            change.
        temperature: Whether to fit a temperature at all.

    Examples:
        >>> import torch, hydra_ensembles as he
        >>> logits, labels = torch.randn(3, 100, 5), torch.arange(100) % 5  # [members, samples, classes]
        >>> fit = he.fit_calibration(logits, labels, share=0.9)
        >>> fit.samples, fit.accepted >= 0.9
        (100, True)
    """
    member_logits = scale_logits(member_logits).detach()
    require_members_for(score, len(member_logits))
    warn_of_probabilities(member_logits)
    samples, classes = member_logits.shape[1:]
    if samples < 2:
        raise DataError(f"calibration needs at least two samples (better hundreds), got {samples}")
    labels = check_labels(labels, samples, classes, None).to(member_logits.device)
    if bool((labels == labels[0]).all()):
        warn(
            f"all {samples} labels are {int(labels[0])}: temperature and threshold describe this class only; shuffle "
            "sorted data first"
        )
    ones = torch.zeros(len(member_logits), dtype=torch.float64, device="cpu")  # logarithms of temperatures
    nll_before = nll_after = _nll(_label_log_probs(member_logits, labels, ones)[0])
    temperatures: tuple[float, ...] = (1.0,)
    if temperature:
        temperatures, nll_after = _fit_temperature(member_logits, labels, per_member, nll_before)
    fitted = Calibration(temperatures, score=score, accepted_share=share, calibrates="probs")
    prediction = fitted.prediction(member_logits)
    scores = prediction.score()
    wrong = prediction.label != labels
    threshold = threshold_for(scores, share)
    accept = scores <= threshold
    marks = marks_of(sample_keys(member_logits.transpose(0, 1)))  # [M, B, C] -> [B, M, C]
    return CalibrationFit(
        calibration=replace(fitted, threshold=threshold, reference=Reference.of(scores), logit_marks=marks),
        samples=len(labels),
        accuracy=mean(~wrong),
        nll_before=nll_before,
        nll_after=nll_after,
        accepted=int(accept.sum()) / len(accept),
        risk=int(wrong[accept].sum()) / int(accept.sum()),
        aurc=aurc(scores, wrong),
    )


def threshold_for(scores: Tensor, share: float) -> float:
    """The conformal threshold of scores `[n]`; accepts everything if there are too few scores."""
    threshold = conformal_threshold(scores, share)
    if threshold < math.inf:
        return threshold
    if share < 1.0:
        few = f"promising a share of {share:.4g} takes {samples_for(share)} samples, but there are {len(scores)}"
        warn(f"{few}: every input is accepted; calibrate on more, or accept a smaller share")
    return ACCEPTS_ALL


def _fit_temperature(
    member_logits: Tensor, labels: Tensor, per_member: bool, nll_before: float
) -> tuple[tuple[float, ...], float]:
    """The likeliest temperature (or one per member) under the prior, and its NLL; 1 unless another one is better."""
    if not per_member:
        means = [log_mean_probs(rows.double()) for rows in member_logits.split(_ROWS, dim=1)]
        member_logits = torch.cat(means)[None]  # log of the mean probabilities, treated as one member: [1, n, C]
    logs, lowest = _minimise(member_logits, labels)
    if nll_before - lowest <= _MIN_GAIN:
        logs = torch.zeros_like(logs)
    temperatures = logs.exp().tolist()
    fitted = _nll(_label_log_probs(member_logits, labels, logs)[0])
    nll_after = min(fitted, nll_before)  # equal at temperature 1, up to rounding
    _warn_of_doubtful_fit(temperatures, nll_before, nll_after, *member_logits.shape[1:])
    return tuple(temperatures), nll_after


def _warn_of_doubtful_fit(
    temperatures: Sequence[float], nll_before: float, nll_after: float, samples: int, classes: int
) -> None:
    """Warn of temperatures at a bound, or else of answers that at no temperature are likelier than a guess."""
    at_bound = False
    for member, found in enumerate(temperatures):
        for bound, cause in ((COLDEST, _TOO_UNSURE), (HOTTEST, _NO_BETTER)):
            if abs(math.log(found / bound)) < _AT_BOUND:
                which = f"the temperature {found:.4g}{f' of member {member}' if len(temperatures) > 1 else ''}"
                warn(f"{which} stopped at the bound {bound:g}: {cause}")
                at_bound = True
    guess = math.log(classes)
    if not at_bound and nll_before > guess and 2 * samples * (guess - nll_after) < _MIN_RATIO:
        likelihood = f"NLL {nll_after:.3f} over {samples} samples, against {guess:.3f} for equally likely classes"
        warn(f"at no temperature are the answers likelier than a guess ({likelihood}): {_NO_BETTER}")


def _minimise(member_logits: Tensor, labels: Tensor) -> tuple[Tensor, float]:
    """Log-temperatures `[M]` that minimise NLL plus prior, and their cost.

    Start from the best point of a grid, first with one temperature for all members and then one member at a time, and
    refine it with Newton's method. The grid is needed because the NLL of a mean over members may have several minima.
    """
    members, samples = member_logits.shape[:2]
    prior = 1 / (_PRIOR**2 * samples)  # its weight against the NLL, which is a mean over the samples
    low, high = math.log(COLDEST), math.log(HOTTEST)

    def cost(label_log_probs: Tensor, logs: Tensor) -> float:
        return _nll(label_log_probs) + prior / 2 * float(logs.square().sum())

    grid = torch.linspace(low, high, _GRID, dtype=torch.float64, device="cpu")  # [G]
    table = torch.cat([_label_log_probs(member_logits, labels, point.expand(members)) for point in grid])  # [G, M, n]
    lowest, best = min((cost(table[index], grid[index].expand(members)), index) for index in range(_GRID))
    places = [best] * members  # in the grid
    improves = members > 1
    while improves:
        improves = False
        for member, index in product(range(members), range(_GRID)):
            others = [*places[:member], index, *places[member + 1 :]]
            value = cost(table[others, range(members)], grid[others])
            if value < lowest:
                places, lowest, improves = others, value, True
    logs = grid[places]
    for _ in range(_STEPS):
        gradient, hessian = _derivatives(member_logits, labels, logs, prior)
        inside = ((logs > low) | (gradient < 0)) & ((logs < high) | (gradient > 0))  # [M], not stopped by a bound
        free = inside & hessian.isfinite().all()
        step = torch.zeros_like(logs)
        curvatures, directions = torch.linalg.eigh(hessian[free][:, free])
        step[free] = -directions @ ((directions.T @ gradient[free]) / curvatures.abs().clamp(min=1e-12))
        step = step.clamp(grid[0] - grid[1], grid[1] - grid[0])
        value = math.inf
        while not value < lowest:  # halve the step until the cost falls
            if not float(step.abs().max()) > _PRECISION:
                return logs, lowest
            new = (logs + step).clamp(low, high)
            value = cost(_label_log_probs(member_logits, labels, new)[0], new)
            step = step / 2
        logs, lowest = new, value
    return logs, lowest


def _derivatives(member_logits: Tensor, labels: Tensor, logs: Tensor, prior: float) -> tuple[Tensor, Tensor]:
    """Gradient `[M]` and Hessian `[M, M]` of NLL plus prior with respect to the log-temperatures `[M]`."""
    log_probs, first, second = _label_log_probs(member_logits, labels, logs, derivatives=True)  # [M, n] each
    shares = log_probs.softmax(dim=0)  # of each member in the probability of the label
    pulls = shares * first
    gradient = prior * logs - pulls.mean(dim=1).cpu()
    hessian = (pulls @ pulls.T / len(labels)).cpu()
    hessian.diagonal().add_(prior - (shares * (second + first.square())).mean(dim=1).cpu())
    return gradient, hessian


def _nll(label_log_probs: Tensor) -> float:
    """NLL of the mean probabilities, from the members' log-probabilities `[M, B]` of the labels."""
    return -log_mean_exp(label_log_probs).mean().item()


def _label_log_probs(member_logits: Tensor, labels: Tensor, logs: Tensor, derivatives: bool = False) -> Tensor:
    """Log-probability of each label under each member's logits `[M, n, C]`, in float64: `[1, M, n]`.

    The logits are divided by the temperatures, given as logarithms `[M]`. With `derivatives`, also the first and second
    derivatives with respect to these logarithms: `[3, M, n]`.
    """
    degrees, pieces = logs.exp().to(member_logits.device)[:, None, None], []
    size = max(1, _AT_ONCE // member_logits[:, 0].numel())
    for rows, targets in zip(member_logits.split(size, dim=1), labels.split(size), strict=True):
        log_probs = (rows.double() / degrees).log_softmax(-1)  # [M, some, C]
        found = [log_probs.gather(2, targets.expand(len(rows), -1)[..., None])[..., 0]]  # [M, some]
        if derivatives:
            log_probs = log_probs.clamp(min=_LOG_ZERO)
            weighed = log_probs.exp() * log_probs
            mean, square = weighed.sum(-1), (weighed * log_probs).sum(-1)
            found += [mean - found[0], found[0] - mean - (square - mean.square())]
        pieces.append(torch.stack(found))
    return torch.cat(pieces, dim=2)

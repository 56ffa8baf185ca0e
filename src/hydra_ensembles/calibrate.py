"""Calibration on held-out data: a temperature, and thresholds that say when to abstain and why."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ._utils import warn, without_autocast
from .batches import Batches, a_few, warn_if_cut
from .digest import digest
from .errors import DataError, TooFewSamplesError
from .familiarity import PER_THRESHOLD, Answered, copied_with, fit_on, read_answers, recognised, some_rows, with_earlier
from .metrics.conformal import Bins, Reference, conformal_threshold, samples_for
from .metrics.distance import FamiliarityChoice
from .metrics.ood import aurc
from .metrics.probabilities import check_labels, log_mean_probs, mean
from .model.dual_encoder import require_classifier
from .model.ensemble import Ensemble, weights_of
from .model.metadata import ACCEPTS_ALL, Calibration, Familiarity
from .prediction import ScoreName, own_logits, require_members_for
from .settings import PositiveShare, require

COLDEST, HOTTEST = 0.05, 20.0  # range of temperatures searched
REUSED = 3  # samples recognised from an earlier fit above which chance is no explanation
_PRIOR = 0.5  # prior standard deviation of the log-temperature; its mean is 0
_PRECISION, _AT_BOUND = 1e-8, 1e-3  # of log-temperatures: accuracy of the optimum, distance that is "at a bound"
_MIN_GAIN = 1e-6  # a smaller gain is rounding error, and the temperature stays 1
_MIN_RATIO = 4.0  # twice the log-likelihood ratio above which an improvement is hardly chance


@without_autocast()
def calibrate(
    ensemble: Ensemble,
    validation: Batches,
    *,
    share: float = 0.95,
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
    fit are added to its metrics under `validation/`. It belongs to these weights, of which it keeps a digest: after
    editing them, calibrate again. The fit uses the precision of the model, whatever autocast is active: if it will
    run in half precision, convert it first: `ensemble.bfloat16()`.

    Args:
        ensemble: It is not changed.
        validation: Held-out labelled in-distribution batches that nothing was fitted on.
        share: As for `fit_calibration`, like `score`, `per_member` and `temperature`.
        score: Score for how unsure an answer is.
        per_member: Whether each member gets its own temperature.
        temperature: Whether to fit a temperature at all.
        familiarity: Score for how familiar an input is. If it is not fitted yet, a random half of the samples fits it,
            and the other half sets its threshold; the same batches, or the same shuffling loader, give the same
            halves. `"auto"` takes what was fitted, else `mahalanobis` if there are enough samples (if not, a warning
            and the history say so); None sets no such threshold.

    Raises:
        DataError: Most of the samples fitted the familiarity: they do not show how familiar new ones look.

    Examples:
        >>> calibrated = he.calibrate(base, batches, share=0.9, familiarity=None)
        >>> calibrated.predict(torch.randn(3, 3, 64, 64)).accept.shape
        torch.Size([3])
    """
    weights = require_classifier(getattr(ensemble, "_orig_mod", ensemble), "calibrate")  # if compiled
    require_members_for(score, ensemble.num_members)
    samples = read_answers(ensemble, validation, "validation")
    warn_if_cut(validation, "validation", len(samples.labels))
    settings: dict[str, Any] = {"share": share, "score": score, "per_member": per_member, "temperature": temperature}
    calibration = fit_calibration(samples.logits, samples.labels, **settings)
    metrics = _measured(calibration, samples.logits, samples.labels)
    metadata = weights.metadata
    degrees = ", ".join(f"{value:.4g}" for value in calibration.temperature)
    line = f"calibrated on {len(samples.labels)} samples, {metrics['validation/accuracy']:.2%} of them right: "
    line += f"temperature {degrees}; {score} threshold accepts {metrics['validation/accepted_share']:.2%}"
    missing = (samples.labels.bincount(minlength=weights.num_classes) == 0).nonzero()[:, 0].tolist()
    notes = []
    if missing:
        names = [metadata.labels[one] if metadata.labels else str(one) for one in missing]
        notes = [f"validation has no samples of {a_few(names)}: nothing is promised for them"]
    familiar, both, words = _with_familiarity(ensemble, samples, calibration, familiarity, share)
    if "validation/familiar_share" not in both and familiarity is not None:
        notes.append(f"no input is ever called unfamiliar: {words}")
    if notes:
        warn("; ".join(notes))
    calibration = replace(calibration, weights=weights_of(weights), watched=_watched(samples, calibration, familiar))
    calibration = replace(calibration, identity=digest([calibration, familiar and familiar.settings])[:12])
    others = {name: value for name, value in metadata.metrics.items() if name not in PER_THRESHOLD}
    return copied_with(
        weights,
        calibration=replace(calibration, rows=some_rows(samples.digests)),
        familiarity=familiar,
        metrics={**others, **metrics, **both},
        history=(*metadata.history, f"{line}; {words}" if words else line),
    )


def _with_familiarity(
    ensemble: Ensemble, samples: Answered, calibration: Calibration, choice: FamiliarityChoice | None, share: float
) -> tuple[Familiarity | None, dict[str, float], str]:
    """The familiarity with its threshold, metrics of both thresholds, and a phrase for the history.

    Earlier statistics are kept if they are the ones asked for, unless half of the samples of an earlier `calibrate`
    fitted them; otherwise one half of these samples fits them and the other half sets the threshold.
    """
    earlier = ensemble.metadata.familiarity
    if choice is None:  # an earlier threshold belongs to another calibration
        bare = None if earlier is None else Familiarity(replace(earlier.settings, threshold=None), earlier.state)
        return bare, {}, ""
    name = choice
    if earlier is not None and choice in ("auto", earlier.settings.scores[0]):
        name = earlier.settings.scores[0]  # type: ignore[assignment]
    held_out, who = samples, ""
    if earlier is not None and name == earlier.settings.scores[0] and not earlier.settings.halved:
        familiarity = earlier
        kept = earlier.settings.rows
        reused = recognised(kept, samples.digests)
        if reused >= REUSED:
            told = f"{reused} of {len(kept)} samples known to have fitted the familiarity of this ensemble are given"
            if 2 * reused > len(kept):
                raise DataError(f"{told}, which do not show how familiar new ones look; calibrate on other data")
            warn(f"{told}: its threshold accepts fewer new inputs than it promises; calibrate on other data")
    else:
        draws = np.random.default_rng(0)
        fits = torch.from_numpy(draws.random(len(samples.labels)) < 0.5)  # as `_half`
        try:
            if (left := int((~fits).sum())) < max(samples_for(share), 1):
                raise TooFewSamplesError(
                    f"{left} of {len(fits)} samples, those not used to fit it, are too few to promise a share of "
                    f"{share:.4g}: that takes {samples_for(share)}, or statistics fitted before (fit_familiarity)"
                )
            score = "mahalanobis" if name == "auto" else name
            familiarity, held_out = fit_on(ensemble, samples, fits, (score,), draws)
        except TooFewSamplesError as problem:
            if choice != "auto" or earlier is not None:
                raise
            return None, {}, f"familiarity is not fitted ({problem})"
        familiarity = Familiarity(replace(familiarity.settings, halved=True), familiarity.state)
        familiarity, who = with_earlier(familiarity, earlier), " that did not fit it"
    scores = familiarity.scores(held_out.features, held_out.logits)  # [S, M, n]
    deciding = scores[0].mean(dim=0)
    settings = replace(familiarity.settings, threshold=threshold_for(deciding, share), accepted_share=share)
    familiarity = Familiarity(replace(settings, reference=Reference.of(deciding)), familiarity.state)
    decided = calibration.prediction(held_out.logits, unfamiliarity=familiarity.about(scores))
    sure, familiar = (one for one in decided.passed().values() if one is not None)
    accept, wrong = sure & familiar, decided.label != held_out.labels
    metrics = {
        "validation/sure_share": mean(sure),
        "validation/familiar_share": mean(familiar),
        "validation/accepted_share": mean(accept),
        "validation/risk_of_accepted": mean(wrong[accept]) if bool(accept.any()) else 0.0,
    }
    words = f"{familiarity.settings.scores[0]} threshold {metrics['validation/familiar_share']:.2%}; both accept "
    return familiarity, metrics, f"{words}{mean(accept):.2%} of the {len(held_out.labels)}{who}"


def _watched(samples: Answered, calibration: Calibration, familiarity: Familiarity | None) -> dict[str, Bins]:
    """How scores of held-out samples are spread: edges from the half that may have fitted, counts of the other."""
    fits = _half(samples)
    scores = {"confidence": calibration.prediction(samples.logits).score()}
    if familiarity is not None:
        scores["familiarity"] = familiarity.scores(samples.features, samples.logits)[0].mean(dim=0)  # [S, M, n] -> [n]
    return {name: Bins.of(one[fits], one[~fits]) for name, one in scores.items()} if 0 < fits.sum() < len(fits) else {}


def _half(samples: Answered) -> Tensor:
    """A random half, `[n]` of bool, the same for the same samples."""
    return torch.from_numpy(np.random.default_rng(0).random(len(samples.labels)) < 0.5)


def fit_calibration(
    member_logits: Tensor,
    labels: Tensor | Sequence[int],
    *,
    share: float = 0.95,
    score: ScoreName = "msp",
    per_member: bool = False,
    temperature: bool = True,
) -> Calibration:
    """Fit temperature and threshold to member logits from any source, in float64 on the CPU.

    The temperature divides the logarithm of the members' mean probabilities (so no label changes). It is the one
    between 0.05 and 20 that minimises NLL + (ln T)² / (2 · 0.5² · n) over the n samples: the negative log-likelihood
    under a prior by which its logarithm is normal, with mean 0 and standard deviation 0.5. So it stays near 1 if there
    are few samples or hardly any mistakes; with hundreds of mistakes the prior hardly matters. It is 1 unless another
    helps. A warning is given if it ends at a bound, or if no temperature makes the answers likelier than a guess:
    the labels may be numbered differently. Scores are not calibrated, and do not depend on it.

    The threshold is the ⌈share · (n + 1)⌉-th smallest of the n scores: an input like the samples is accepted with
    probability `share` or more, for any n. If n is too small to decline any, everything is accepted, with a warning.

    Args:
        member_logits: `[M, B, C]` of held-out in-distribution samples, at least two.
        labels: `[B]`.
        share: Share of inputs like these to accept, in (0, 1].
        score: Uncertainty score that the threshold applies to.
        per_member: Whether each member gets its own temperature before the mean, each under the prior; labels may
            change.
        temperature: Whether to fit a temperature at all.
    """
    require("share", share, PositiveShare)
    member_logits = own_logits(member_logits.detach().cpu())
    require_members_for(score, len(member_logits))
    samples, classes = member_logits.shape[1:]
    if samples < 2:
        raise DataError(f"calibration needs at least two samples (better hundreds), got {samples}")
    labels = check_labels(labels, samples, classes, None).cpu()
    degrees = _temperatures(member_logits, labels, per_member and len(member_logits) > 1) if temperature else (1.0,)
    fitted = Calibration(degrees, score=score, accepted_share=share)
    scores = fitted.prediction(member_logits).score()
    return replace(fitted, threshold=threshold_for(scores, share), reference=Reference.of(scores))


def _measured(calibration: Calibration, member_logits: Tensor, labels: Tensor) -> dict[str, float]:
    """What a calibration does on the samples that it was fitted on."""
    prediction, plain = calibration.prediction(member_logits.double()), Calibration().prediction(member_logits.double())
    scores, wrong = calibration.prediction(member_logits).score(), prediction.label != labels
    accept = scores <= (ACCEPTS_ALL if calibration.threshold is None else calibration.threshold)
    return {
        "validation/accuracy": mean(~wrong),
        "validation/nll_uncalibrated": F.nll_loss(plain.log_probs, labels).item(),
        "validation/nll": F.nll_loss(prediction.log_probs, labels).item(),
        "validation/accepted_share": mean(accept),
        "validation/risk_of_accepted": mean(wrong[accept]),
        "validation/aurc": aurc(scores, wrong),
    }


def threshold_for(scores: Tensor, share: float) -> float:
    """The conformal threshold of scores `[n]`; accepts everything if there are too few scores."""
    threshold = conformal_threshold(scores, share)
    if threshold < math.inf:
        return threshold
    if share < 1.0:
        few = f"promising a share of {share:.4g} takes {samples_for(share)} samples, but there are {len(scores)}"
        warn(f"{few}: every input is accepted; calibrate on more, or accept a smaller share")
    return ACCEPTS_ALL


def _temperatures(member_logits: Tensor, labels: Tensor, per_member: bool) -> tuple[float, ...]:
    """The likeliest temperature (or one per member) under the prior; 1 unless another helps."""
    means = log_mean_probs(member_logits.double())  # [n, C], the logarithm of the mean probabilities
    samples, guess = len(labels), math.log(means.shape[1])
    prior = 1 / (_PRIOR**2 * samples)  # its weight against the NLL, which is a mean over the samples
    logs = torch.tensor([_one_temperature(means, labels, prior)], dtype=torch.float64)
    if per_member:
        logs = _one_each(member_logits, labels, logs.repeat(len(member_logits)), prior)
    before = F.nll_loss(means, labels).item()
    after = _nll(member_logits.double() if per_member else means[None], labels, logs).item()
    if before - after - prior / 2 * logs.square().sum().item() <= _MIN_GAIN:
        logs, after = torch.zeros_like(logs), before
    degrees = tuple(logs.exp().tolist())
    at_bound = {bound: any(abs(math.log(one / bound)) < _AT_BOUND for one in degrees) for bound in (COLDEST, HOTTEST)}
    if any(at_bound.values()) or (before > guess and 2 * samples * (guess - after) < _MIN_RATIO):
        why = "do data and model number the classes alike, and are the inputs prepared as the model knows them?"
        if at_bound[COLDEST]:
            why = "the answers are right far more often than their probabilities say: are they unscaled logits?"
        told = f"NLL {after:.3f} over {samples} samples, {guess:.3f} for a guess"
        found = ", ".join(f"{value:.4g}" for value in degrees)
        warn(f"at no temperature do the answers fit the labels ({told}, at temperature {found}): {why}")
    return degrees


def _one_temperature(log_probs: Tensor, labels: Tensor, prior: float) -> float:
    """The log-temperature that minimises NLL plus prior: a root of the derivative, by Newton's method in a bracket.

    In the inverse temperature the NLL is convex, so that the derivative changes its sign once.
    """
    low, high, log = math.log(COLDEST), math.log(HOTTEST), 0.0
    right = log_probs.gather(1, labels[:, None])[:, 0]
    while high - low > _PRECISION:
        probs = (log_probs * math.exp(-log)).softmax(dim=1)
        first = (probs * log_probs).sum(dim=1)  # [n], expected log-probability
        spread = (probs * log_probs.square()).sum(dim=1) - first.square()
        pull = (first - right).mean().item() * math.exp(-log)  # of the NLL, towards lower temperatures
        slope, bend = prior * log - pull, prior + pull + spread.mean().item() * math.exp(-2 * log)
        low, high = (low, log) if slope > 0 else (log, high)
        step = log - slope / bend if bend > 0 else math.inf
        if abs(step - log) < _PRECISION:
            return min(max(step, low), high)
        log = step if low < step < high else (low + high) / 2
    return log


def _one_each(member_logits: Tensor, labels: Tensor, start: Tensor, prior: float) -> Tensor:
    """Log-temperatures `[M]` that minimise NLL plus prior together, from the best common one."""
    logs = start.clone().requires_grad_()
    until = {"max_iter": 200, "tolerance_grad": 1e-10, "tolerance_change": 1e-14}
    search = torch.optim.LBFGS([logs], line_search_fn="strong_wolfe", **until)  # type: ignore[arg-type]
    logits = member_logits.double()

    def cost() -> Tensor:
        search.zero_grad()
        within = logs.clamp(math.log(COLDEST), math.log(HOTTEST))
        value = _nll(logits, labels, within) + prior / 2 * logs.square().sum()
        value.backward()
        return value

    with torch.enable_grad():
        search.step(cost)
    return logs.detach().clamp(math.log(COLDEST), math.log(HOTTEST))


def _nll(member_logits: Tensor, labels: Tensor, logs: Tensor) -> Tensor:
    """NLL of the mean probabilities of members `[M, n, C]`, divided by temperatures given as logarithms `[M]`."""
    return F.nll_loss(log_mean_probs(member_logits / logs.exp()[:, None, None]), labels)


def fit_temperature(member_logits: Tensor, labels: Tensor) -> tuple[float, ...]:
    """The likeliest temperature under the prior, for member logits `[M, B, C]` and labels `[B]`."""
    return _temperatures(member_logits, labels, False)

"""Every number and every curve of an evaluation, from member logits that have been checked."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import cast, get_args

import numpy as np
import torch
from torch import Tensor

from ..calibrate import warn_of_declined_classes, warn_of_exchanged_classes
from ..errors import ConfigError, DataError
from ..metrics.bootstrap import Interval, paired
from ..metrics.inputs import Convention, mean, where
from ..metrics.ood import OodMetric, detection, flagged, of_counts, risk_curve, roc_curve, weighted_aurc
from ..metrics.probabilities import (
    adaptive_ece_of_confidence,
    at_labels,
    ece_of_confidence,
    reliability_bins,
    squared_errors,
    weighted_adaptive_ece,
    weighted_ece,
    weighted_mean,
)
from ..model.metadata import Calibration, Familiarity
from ..prediction import AnyScore, Prediction, ScoreName
from .evaluation import (
    MEANS,
    Classification,
    Curve,
    Detection,
    Evaluation,
    Figures,
    GalleryItem,
    ModelInfo,
    OodGroup,
    OodSet,
    Provenance,
    Reliability,
    Selective,
)
from .logits import MemberLogits

COVERAGES = (0.8, 0.9, 0.95)  # shares of answered inputs at which the remaining risk is reported
POINTS = 160  # maximum number of points of a stored curve
HISTOGRAM_BINS = 30


@dataclass(frozen=True)
class Measure:
    """The settings that `evaluate` and `evaluate_logits` share, as described there."""

    name: str
    id_name: str
    score: AnyScore
    scores: Sequence[AnyScore]
    convention: Convention
    calibration: Calibration
    bootstrap: int
    keep_logits: bool
    familiarity: Familiarity | None = None  # of an ensemble with fitted feature scores

    def __post_init__(self) -> None:
        fitted = self._fitted
        choices = (*get_args(ScoreName), *fitted)
        unknown = [name for name in (self.score, *self.scores) if name not in choices]
        if unknown:
            fit = "" if fitted else "; fit_familiarity adds scores of the features"
            raise ConfigError(f"scores {unknown} are not known; choose from {', '.join(choices)}{fit}")

    @property
    def _fitted(self) -> tuple[AnyScore, ...]:
        """Fitted feature scores of the ensemble, which are always reported."""
        return () if self.familiarity is None else self.familiarity.settings.scores

    def predict(self, logits: Tensor, unfamiliarity: Tensor | None = None) -> Prediction:
        """A prediction from finite logits `[M, B, C]`; only a temperature below one can make them infinite."""
        calibration, fitted = self.calibration, self.familiarity
        if calibration.threshold is None and self.score in get_args(ScoreName):
            calibration = replace(calibration, score=cast(ScoreName, self.score), reference=None)
        about = None if fitted is None or unfamiliarity is None else fitted.about(unfamiliarity)
        return calibration.prediction(logits, check_finite=min(calibration.temperature) < 1, unfamiliarity=about)

    def evaluation(
        self,
        logits: MemberLogits,
        model: ModelInfo | None,
        provenance: Provenance,
        gallery: Iterable[GalleryItem] = (),
        unfamiliarity: Mapping[str, Tensor | None] = MappingProxyType({}),
    ) -> Evaluation:
        """Everything that `evaluate` reports; `unfamiliarity` has feature scores `[S, M, B]`, keyed as in `samples`."""
        prediction = self.predict(logits.id.logits, unfamiliarity.get(self.id_name))
        labels = logits.id.labels
        answers: dict[str, Prediction] = {}
        ood: dict[str, OodSet] = {}
        scores = tuple(dict.fromkeys((self.score, *self.scores, *self._fitted)))
        id_scores = {score: prediction.score(score) for score in scores}
        for group, sets in logits.ood.items():
            for key, ood_logits in sets.items():
                answer = self.predict(ood_logits, unfamiliarity.get(f"ood.{key}"))
                answers[key] = answer
                accepted = {"abstained": answer.accept, **answer.passed()}
                declined = {share: None if rows is None else mean(~rows) for share, rows in accepted.items()}
                ood[key] = OodSet(
                    group=cast(OodGroup, group),
                    samples=len(answer),
                    detection={score: self._detection(id_scores[score], answer.score(score)) for score in scores},
                    mutual_information=mean(answer.epistemic),
                    disagreement=mean(answer.disagreement),
                    **declined,
                )
        names = () if model is None else model.class_names
        warn_of_exchanged_classes(prediction.label, labels, names, self.id_name)
        if prediction.accept is not None:
            warn_of_declined_classes(prediction.accept, labels, names)
        members = {name: [key for key in ood if ood[key].group in groups] for name, groups in MEANS.items()}
        averaged = {name: keys for name, keys in members.items() if keys}  # the sets behind each mean
        means: dict[str, dict[str, Detection]] = {
            name: {score: _mean([ood[key].detection[score] for key in keys]) for score in scores}
            for name, keys in averaged.items()
        }
        return Evaluation(
            name=self.name,
            id_name=self.id_name,
            score=self.score,
            convention=self.convention,
            id=self._classification(prediction, labels, self.id_name),
            ood=ood,
            means=means,
            shift={
                key: self._classification(self.predict(shifted, unfamiliarity.get(f"shift.{key}")), targets, key)
                for key, (shifted, targets) in logits.shift.items()
            },
            selective=_selective(prediction, labels),
            model=model
            or ModelInfo("callable", prediction.members, prediction.classes, calibration=self.calibration.brief),
            provenance=provenance,
            figures=self._figures(prediction, labels, answers, averaged.get("all", ())),
            intervals=self._intervals(prediction, labels, answers, averaged) if self.bootstrap else {},
            gallery=tuple(gallery),
            logits=logits if self.keep_logits else None,
        )

    def _classification(self, prediction: Prediction, labels: Tensor, name: str) -> Classification:
        """Accuracy, calibration, diversity and selective risk on a labelled set."""
        if bool((labels == labels[0]).all()):
            same = f"{where(name)}all {len(labels)} labels are {int(labels[0])}"
            raise DataError(f"{same}; accuracy and calibration need two classes: shuffle sorted data first")
        correct = prediction.label == labels
        curve = risk_curve(prediction.score(self.score), ~correct)
        return Classification(
            samples=len(prediction),
            **{key: mean(values) for key, values in _per_sample(prediction, labels).items()},
            ece=ece_of_confidence(prediction.confidence, correct),
            aece=adaptive_ece_of_confidence(prediction.confidence, correct),
            aurc=curve.area,
            risk_at_coverage={f"{coverage:.2f}": curve.at(coverage) for coverage in COVERAGES},
            commonest=int(labels.bincount().max()) / len(labels),
        )

    def _detection(self, id_scores: Tensor, ood_scores: Tensor) -> Detection:
        fp, tp, _ = flagged(id_scores, ood_scores)
        return Detection(**{key: of_counts(key, fp, tp, self.convention).item() for key in get_args(OodMetric)})

    def _intervals(
        self, prediction: Prediction, labels: Tensor, answers: Mapping[str, Prediction], averaged: dict[str, list[str]]
    ) -> dict[str, Interval]:
        """95 % intervals under the names of `Evaluation.numbers`; `averaged` names the sets behind each mean."""
        id_scores = prediction.score(self.score)
        ood_scores = {name: answer.score(self.score) for name, answer in answers.items()}
        correct = prediction.label == labels
        interval = partial(paired, resamples=self.bootstrap)
        intervals = {key: interval(weighted_mean, [values]) for key, values in _per_sample(prediction, labels).items()}
        right = [prediction.confidence, correct]
        intervals |= {
            "ece": interval(weighted_ece, right, mirrored=True),
            "aece": interval(weighted_adaptive_ece, right, mirrored=True),
            "aurc": interval(weighted_aurc, [id_scores, ~correct]),
        }
        groups = {f"ood.{name}": [scores] for name, scores in ood_scores.items()}
        groups |= {group: [ood_scores[name] for name in names] for group, names in averaged.items()}
        for key, scores in groups.items():
            parts = [id_scores, *scores]
            sets = torch.cat([torch.full((len(part),), number) for number, part in enumerate(parts)])
            for metric in get_args(OodMetric):
                measured = detection(metric, self.convention)
                intervals[f"{key}.{metric}"] = interval(measured, [torch.cat(parts), sets], strata=sets)
        return intervals

    def _figures(
        self, prediction: Prediction, labels: Tensor, answers: Mapping[str, Prediction], averaged: Sequence[str]
    ) -> Figures:
        """Every curve of the report; `answers` are for the OOD sets, of which `averaged` are in the means."""
        correct = prediction.label == labels
        id_scores = prediction.score(self.score)
        ood_scores = {name: answer.score(self.score) for name, answer in answers.items()}
        bins = reliability_bins(prediction.confidence, correct)
        risk = risk_curve(id_scores, ~correct)
        rocs = {name: roc_curve(id_scores, scores) for name, scores in ood_scores.items()}
        everything = torch.cat([id_scores, *ood_scores.values()]).double().numpy()
        low, high = np.quantile(everything, (0.001, 0.999))  # scores outside count in the end bins
        if high - low <= 1e-12 * abs(high):  # equal up to rounding
            low, high = low - 0.5, high + 0.5
        edges = np.linspace(low, high, HISTOGRAM_BINS + 1)

        def histogram(scores: Tensor) -> tuple[int, ...]:
            return tuple(np.histogram(scores.double().numpy().clip(edges[0], edges[-1]), edges)[0].tolist())

        ood_agreement = [_agreement(answers[name]) for name in averaged]
        return Figures(
            reliability=Reliability(tuple(bins.count.tolist()), _by_bin(bins.confidence), _by_bin(bins.accuracy)),
            risk_coverage=_thin(risk.coverage, risk.risk),
            score_edges=tuple(edges.tolist()),  # not rounded: edges of nearly equal scores would coincide
            id_scores=histogram(id_scores),
            ood_scores={name: histogram(scores) for name, scores in ood_scores.items()},
            roc={name: _thin(fpr, tpr) for name, (fpr, tpr, _) in rocs.items()},
            agreement_id=tuple(map(_rounded, _agreement(prediction))),
            agreement_ood=tuple(map(_rounded, torch.stack(ood_agreement).mean(dim=0))) if ood_agreement else None,
        )


def _per_sample(prediction: Prediction, labels: Tensor) -> dict[str, Tensor]:
    """Per-sample values `[B]` whose means are the numbers of a labelled set."""
    nll = -at_labels(prediction.log_probs, labels)
    if not bool(torch.isfinite(nll).all()):  # float32 overflows between logits of 1e38 and -1e38
        nll = -at_labels(replace(prediction, member_logits=prediction.member_logits.double()).log_probs, labels)
    return {
        "accuracy": prediction.label == labels,
        "brier": squared_errors(prediction.probs, labels),
        "nll": nll,
        "mutual_information": prediction.epistemic,
        "disagreement": prediction.disagreement,
    }


def _mean(detections: Sequence[Detection]) -> Detection:
    """Unweighted mean over sets."""
    return Detection(**{key: sum(getattr(x, key) for x in detections) / len(detections) for key in get_args(OodMetric)})


def _selective(prediction: Prediction, labels: Tensor) -> Selective | None:
    """Effect of calibrated thresholds on a labelled set; None without any."""
    if (accept := prediction.accept) is None:
        return None
    wrong = (prediction.label != labels)[accept]
    unfamiliarity = prediction.unfamiliarity
    passed = {reason: None if accepted is None else mean(accepted) for reason, accepted in prediction.passed().items()}
    return Selective(
        score=prediction.score_name,
        threshold=prediction.threshold,
        accepted=mean(accept),
        risk=mean(wrong) if len(wrong) else None,
        sure=passed["unsure"],
        familiarity=None if unfamiliarity is None or unfamiliarity.threshold is None else unfamiliarity.score_names[0],
        familiarity_threshold=None if unfamiliarity is None else unfamiliarity.threshold,
        familiar=passed["unfamiliar"],
    )


def _agreement(prediction: Prediction) -> Tensor:
    votes = prediction.member_probs.argmax(dim=-1)  # [M, B]
    return torch.stack([(votes == vote).double().mean(dim=1) for vote in votes])  # [M, M]


def _thin(x: Tensor, y: Tensor) -> Curve:
    """Keep at most `POINTS` points, evenly spaced along the curve, including the first and the last."""
    if len(x) > POINTS:
        length = torch.cat([x.new_zeros(1), (x.diff().abs() + y.diff().abs()).cumsum(dim=0)])
        positions = torch.linspace(0, float(length[-1]), POINTS, dtype=torch.float64, device="cpu")
        chosen = torch.searchsorted(length, positions).unique()
        x, y = x[chosen], y[chosen]
    return Curve(_rounded(x), _rounded(y))


def _by_bin(values: Tensor) -> tuple[float | None, ...]:
    """Rounded values; None for an empty bin, which has NaN."""
    return tuple(None if math.isnan(value) else value for value in _rounded(values))


def _rounded(values: Tensor | np.ndarray) -> tuple[float, ...]:
    return tuple(float(f"{value:.5g}") for value in values.tolist())

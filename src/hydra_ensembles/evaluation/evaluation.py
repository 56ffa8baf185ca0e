"""The results of an evaluation: what a model answered to every sample, and every number that follows from it.

An evaluation stores columns: one value per sample and quantity. Numbers, their intervals, the differences of two models
and the figures of a report are all computed from them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError
from torch import Tensor

from ..digest import digest
from ..errors import DataError
from ..files import expanded, read_object, write_json
from ..metrics.bootstrap import Interval, Statistic, paired
from ..metrics.ood import OodMetric, detection, flagged, of_counts, risk_coverage, weighted_aurc
from ..metrics.probabilities import (
    Convention,
    at_labels,
    mean,
    of_all,
    squared_errors,
    weighted_adaptive_ece,
    weighted_ece,
    weighted_mean,
)
from ..model.metadata import Calibration
from ..prediction import AnyScore, Prediction
from ..promise import Curve, Promise, exact_interval, percent
from ..settings import from_plain, to_plain
from ..store import TENSORS

FORMAT = "hydra_ensembles evaluation 4"
OodGroup = Literal["near", "far", "apart", "ungrouped"]
MEANS = {"near": ("near",), "far": ("far",), "all": ("near", "far", "ungrouped")}  # groups that each mean averages
PROMISED = (0.01, 0.02, 0.05)  # risks under which methods are compared by the share they may answer
COVERAGES = (0.8, 0.9, 0.95)  # shares of answered inputs at which the remaining risk is reported
UNNAMED = "model"  # default name of an evaluation
_MEASURED = ("accuracy", "brier", "nll", "mutual_information", "disagreement")  # means of columns
_DECLINED = {"abstained": ("sure", "familiar"), "unsure": ("sure",), "unfamiliar": ("familiar",)}


@dataclass(frozen=True, eq=False)
class Answers:
    """What a model answered to one set.

    Attributes:
        group: `id`, `shift`, or the group of an OOD set: `near`, `far`, `apart` (in no mean), `ungrouped` (in the mean
            over all sets only).
        digest: Digest of the inputs as the model received them, in any order.
        columns: `predicted`, `confidence`, `mutual_information`, `disagreement` and `score:NAME` of each sample `[B]`;
            with thresholds whether it is `sure` and `familiar`; of a cascade whether a later stage answered, `asked`;
            and of labelled sets `label`, `accuracy` (whether it is right), `nll` and `brier`.
    """

    group: Literal["id", "shift"] | OodGroup
    digest: str
    columns: Mapping[str, Tensor] = field(default_factory=dict, repr=False)

    def __getitem__(self, name: str) -> Tensor:
        return self.columns[name]

    def __len__(self) -> int:
        return len(self["predicted"])

    def declined(self, why: str = "abstained") -> Tensor | None:
        """Whether each sample is declined, for any reason, or as `unsure` or `unfamiliar`; None without a threshold."""
        passed = [self[name] for name in _DECLINED[why] if name in self.columns]
        return ~torch.stack(passed).all(dim=0) if passed else None


def columns_of(prediction: Prediction, scores: tuple[AnyScore, ...], labels: Tensor | None) -> dict[str, Tensor]:
    """The columns of `Answers` for the samples of a prediction."""
    passed = prediction.passed()
    if prediction.forced is not None:  # by a cascade: over its limit, or of a stage that failed
        kept = prediction.forced == 0
        passed["unsure"] = kept if passed["unsure"] is None else kept & passed["unsure"]
    columns = {
        "predicted": prediction.label,
        "confidence": prediction.confidence,
        "mutual_information": prediction.epistemic,
        "disagreement": prediction.disagreement,
        **{f"score:{name}": prediction.score(name) for name in scores},
        **{name: one for name, one in zip(("sure", "familiar"), passed.values(), strict=True) if one is not None},
    }
    if prediction.stage is not None:
        columns["asked"] = prediction.stage > 0
    if labels is not None:
        columns |= {"label": labels, "accuracy": prediction.label == labels}
        columns |= {"nll": -at_labels(prediction.log_probs, labels), "brier": squared_errors(prediction.probs, labels)}
    return columns


@dataclass(frozen=True)
class Kept:
    """What became of a promise on one set; `accepted` of its `rows` were answered, `errors` of these wrongly."""

    promise: Promise
    rows: int
    accepted: int
    errors: int

    @property
    def share(self) -> float:
        """The share that is accepted."""
        return self.accepted / self.rows

    @property
    def rate(self) -> float:
        """The share of wrong answers among those accepted."""
        return self.errors / max(1, self.accepted)

    @property
    def interval(self) -> tuple[float, float]:
        """The exact 95 % interval of that share."""
        return exact_interval(self.errors, self.accepted) if self.accepted else (0.0, 1.0)

    @property
    def verdict(self) -> Literal["kept", "broken", "not decided"]:
        """Whether the interval lies below the promised risk, or above it."""
        low, high = self.interval
        return "kept" if high <= self.promise.risk else "broken" if low > self.promise.risk else "not decided"

    def __str__(self) -> str:
        low, high = self.interval
        told = f"{percent(round(self.rate, 4))} of {self.accepted:,} accepted are wrong ({low:.2%} to {high:.2%})"
        return f"at most {percent(self.promise.risk)} promised, {told}: {self.verdict}"


@dataclass(frozen=True)
class ModelInfo:
    """Description of the evaluated model, where known."""

    kind: Literal["image", "text", "callable"]  # `callable`: not an `Ensemble`
    members: int
    classes: int
    class_names: tuple[str, ...] = field(default=(), repr=False)  # in the order of the logits
    parameters: int | None = None
    multiply_adds: int | None = None
    heads: str = ""  # kept per layer, as the paper writes it: `12`, or `8x3` for three members of eight each
    source: str = ""
    history: tuple[str, ...] = field(default=(), repr=False)
    calibration: Calibration | None = field(default=None, repr=False)


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Every metric of one model on one suite. Printed as a list of the main numbers; `numbers` has everything.

    Attributes:
        score: The score that detects OOD samples and orders the risk-coverage curve.
        sets: What was answered to each set: the in-distribution set under its name, `ood.NAME` and `shift.NAME`.
        provenance: Hardware, dtype and versions of libraries. No time: the same run gives the same file.

    Examples:
        >>> found = he.evaluate(base, batches, {"noise": [(torch.rand(7, 3, 64, 64),)]}, progress=False)
        >>> found.save("base.json")
        >>> again = he.Evaluation.load("base.json")
        >>> again.numbers() == found.numbers(), again.samples
        (True, {'id': 24, 'ood.noise': 7})
    """

    name: str
    id_name: str
    score: AnyScore
    convention: Convention
    sets: Mapping[str, Answers] = field(repr=False)
    model: ModelInfo
    provenance: Mapping[str, str] = field(repr=False)

    def __str__(self) -> str:
        numbers = self.numbers()
        wanted = ["accuracy", "nll", "ece", "aurc", "near.auroc", "far.auroc", "all.auroc", "selective.accepted"]
        lines = [f"{name:<20}{numbers[name]:.4f}" for name in wanted if name in numbers]
        lines += [f"{f'promise, {name}':<20}{kept}" for name, all_kept in self.promises.items() for kept in all_kept]
        return "\n".join([f"{self.name} on {self.id_name} ({self.samples[self.id_name]:,} samples)", *lines])

    @property
    def samples(self) -> dict[str, int]:
        """Number of samples of every set."""
        return {name: len(answers) for name, answers in self.sets.items()}

    @property
    def foreign(self) -> dict[str, Answers]:
        """The OOD sets, as `ood.NAME`."""
        return {name: one for name, one in self.sets.items() if one.group in get_args(OodGroup)}

    @property
    def scores(self) -> tuple[AnyScore, ...]:
        """Every score that was reported."""
        names = self.sets[self.id_name].columns
        return tuple(name.removeprefix("score:") for name in names if name.startswith("score:"))  # type: ignore[misc]

    @cached_property
    def promises(self) -> dict[str, list[Kept]]:
        """What became of the promise in force, or of that of each label, on every labelled set by name.

        `mixed` is the in-distribution set together with all OOD sets, of which every accepted answer is wrong.
        """
        in_force = () if self.model.calibration is None else self.model.calibration.in_force
        inside = self.sets[self.id_name]
        if not in_force or inside.declined() is None:
            return {}
        foreign = list(self.foreign.values())
        found = {name: [one] for name, one in self.sets.items() if one.group in ("id", "shift")}
        found |= {"mixed": [inside, *foreign]} if foreign else {}
        names = self.model.class_names
        return {name: [_kept(promise, sets, names) for promise in in_force] for name, sets in found.items()}

    def answerable(self, risk: float, level: float = 0.95) -> float:
        """The share of the in-distribution set that may be answered under a promise which this set certifies.

        It is by confidence, after what is unfamiliar has been declined; 0 if nothing can be promised. Methods are
        compared by it: a higher share at the same risk.
        """
        inside = self.sets[self.id_name]
        rows = inside["familiar"] if "familiar" in inside.columns else torch.ones_like(inside["accuracy"])
        sure, wrong = inside["confidence"][rows].cpu().numpy(), ~inside["accuracy"][rows].cpu().numpy()
        return Curve.of(sure, wrong).most(risk, level) / len(inside) if len(sure) else 0.0

    def numbers(self) -> dict[str, float]:
        """Every number under one flat name: `accuracy`, `near.auroc`, `ood.cifar100.fpr95`, `shift.fog.ece`.

        Detection results of another score than the evaluation's own are prefixed with its name: `energy:near.auroc`.
        Declined shares are `far.abstained`, and by reason `far.unsure` and `far.unfamiliar`; `selective.accepted`,
        `.sure` and `.familiar` are shares of the in-distribution set that pass all thresholds or that one, and
        `selective.risk` is the share of wrong answers among those accepted. `near`, `far`, `all` and `shift.accuracy`
        are unweighted means over sets.
        """
        return dict(self._numbers)

    @cached_property
    def _numbers(self) -> dict[str, float]:
        inside, found = self.sets[self.id_name], dict[str, float]()
        for name, one in self.sets.items():
            labelled = self._classified(one) if "accuracy" in one.columns else {}
            asked = {"asked": mean(one["asked"])} if "asked" in one.columns else {}
            start = "" if name == self.id_name else f"{name}."
            found |= {start + key: value for key, value in {**labelled, **asked}.items()}
        if shifted := [found[f"{name}.accuracy"] for name, one in self.sets.items() if one.group == "shift"]:
            found["shift.accuracy"] = sum(shifted) / len(shifted)
        foreign = {name: (one.group, self._detected(one)) for name, one in self.foreign.items()}
        sets = {
            name: [numbers for group, numbers in foreign.values() if group in among] for name, among in MEANS.items()
        }
        for name, each in {**sets, **{name: [numbers] for name, (_, numbers) in foreign.items()}}.items():
            for form in each[0] if each else ():
                found[form.format(name)] = sum(numbers[form] for numbers in each) / len(each)
        if (declined := inside.declined()) is not None:
            passed = {
                "accepted": ~declined,
                **{key: inside[key] for key in ("sure", "familiar") if key in inside.columns},
            }
            found |= {f"selective.{key}": mean(rows) for key, rows in passed.items()}
            if not bool(declined.all()):
                found["selective.risk"] = mean(~inside["accuracy"][~declined])
        for name, kept in ((name, kept) for name, each in self.promises.items() for kept in each):
            start = "promise" if name == self.id_name else f"{name}.promise"
            start += f".{kept.promise.label}" if kept.promise.label is not None else ""
            found |= {f"{start}.accepted": kept.share, f"{start}.errors": kept.rate}
        return found | {f"answerable@{risk}": self.answerable(risk) for risk in PROMISED}

    def _classified(self, answers: Answers) -> dict[str, float]:
        """How well a labelled set is classified, and how well its confidence is calibrated."""
        confidence, right = answers["confidence"], answers["accuracy"]
        curve = risk_coverage(answers[f"score:{self.score}"], ~right)
        return {
            **{name: mean(answers[name]) for name in _MEASURED},
            "ece": of_all(weighted_ece, confidence, right),
            "aece": of_all(weighted_adaptive_ece, confidence, right),
            "aurc": curve.area,
            "augrc": curve.generalized_area,
            **{f"risk@{coverage:.2f}": curve.at(coverage) for coverage in COVERAGES},
        }

    def _detected(self, answers: Answers) -> dict[str, float]:
        """How well each score tells an OOD set (positive class), and what is declined; `{}` is where its name goes."""
        found = {f"{{}}.{name}": mean(answers[name]) for name in ("mutual_information", "disagreement")}
        shares = {why: answers.declined(why) for why in _DECLINED}
        found |= {f"{{}}.{why}": mean(rows) for why, rows in shares.items() if rows is not None}
        for score in self.scores:
            fp, tp = flagged(self.sets[self.id_name][f"score:{score}"], answers[f"score:{score}"])
            form = "{}." if score == self.score else f"{score}:{{}}."
            found |= {form + key: of_counts(key, fp, tp, self.convention).item() for key in get_args(OodMetric)}
        return found

    def interval(self, name: str, minus: "Evaluation | None" = None, resamples: int = 1000) -> Interval | None:
        """Bootstrap interval of a number, or of its paired difference to that of another model on the same samples.

        None for a number that is no statistic of samples, or if the two have other sets or other labels.
        """
        ours = self._statistic(name)
        if ours is None or minus is None:
            return None if ours is None else paired(**ours, resamples=resamples)
        theirs, first, second = minus._statistic(name), self.sets[self.id_name], minus.sets[minus.id_name]
        alike = self.score == minus.score and torch.equal(first["label"], second["label"])
        if theirs is None or not alike or len(theirs["columns"][0]) != len(ours["columns"][0]):
            return None
        ours["mirrored"] = False  # a difference of calibration errors may have either sign
        return paired(**ours, minus=theirs["columns"], resamples=resamples)

    def _statistic(self, name: str) -> dict[str, Any] | None:
        """How to compute a number from columns, as arguments of `paired`; None if it is no statistic of samples."""
        group, _, key = name.rpartition(".")
        answers = self.sets.get(group or self.id_name)
        if key in (*_MEASURED, "asked") and answers is not None and key in answers.columns:
            return {"statistic": weighted_mean, "columns": [answers[key]]}
        if name == "selective.accepted" and (declined := self.sets[self.id_name].declined()) is not None:
            return {"statistic": weighted_mean, "columns": [~declined]}
        if key in ("ece", "aece") and answers is not None:
            statistic = weighted_ece if key == "ece" else weighted_adaptive_ece
            return {"statistic": statistic, "columns": [answers["confidence"], answers["accuracy"]], "mirrored": True}
        if key == "aurc" and answers is not None:
            return {"statistic": weighted_aurc, "columns": [answers[f"score:{self.score}"], ~answers["accuracy"]]}
        among = MEANS.get(group, ())
        members = [one for set_name, one in self.foreign.items() if set_name == group or one.group in among]
        if members and key in get_args(OodMetric):
            parts = [one[f"score:{self.score}"] for one in (self.sets[self.id_name], *members)]
            return _by_set(detection(key, self.convention), parts)  # type: ignore[arg-type]
        shares = [one.declined(key) for one in members] if key in _DECLINED else []
        present = [share for share in shares if share is not None]
        return _by_set(_mean_over_sets, present) if present and len(present) == len(members) else None

    def save(self, path: str | Path) -> None:
        """Write a JSON file with every number, and the columns to a `.safetensors` file beside it."""
        file = expanded(path)
        tensors = {f"{name}\n{key}": column for name, one in self.sets.items() for key, column in one.columns.items()}
        TENSORS.write(file.with_suffix(".safetensors"), tensors)
        sets = {name: replace(one, columns={}) for name, one in self.sets.items()}
        about = {"format": FORMAT, "numbers": self.numbers(), "samples": self.samples, "columns": digest(tensors)}
        write_json(file, {**about, **to_plain(replace(self, sets=sets))})

    @classmethod
    def load(cls, path: str | Path) -> "Evaluation":
        """Read what `save` wrote.

        Raises:
            DataError: A file is missing, is no evaluation, was changed, or belongs to another one.
            ConfigError: A field has the wrong type or value.
        """
        file = expanded(path)
        plain = read_object(file)
        if plain.pop("format", None) != FORMAT:
            raise DataError(f"{file} is no evaluation of this version of the library; evaluate again")
        beside = file.with_suffix(".safetensors")
        try:
            tensors = TENSORS.read(beside)
        except (OSError, ValueError, SafetensorError) as error:
            raise DataError(f"{beside} cannot be read: {error}; it belongs to {file.name}: evaluate again") from error
        if plain.pop("columns", None) != digest(tensors):
            raise DataError(f"{beside} was changed, or belongs to another evaluation than {file}; evaluate again")
        columns: dict[str, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            name, _, column = key.partition("\n")
            columns.setdefault(name, {})[column] = tensor
        kept = {key: value for key, value in plain.items() if key not in ("numbers", "samples")}
        found = from_plain(cls, kept, str(file))
        sets = {name: replace(one, columns=columns[name]) for name, one in found.sets.items()}
        return replace(found, sets=sets)


def _kept(promise: Promise, sets: Sequence[Answers], names: Sequence[str]) -> Kept:
    """Count what a promise is about in some sets; answers to rows without labels are all wrong."""
    rows = accepted = errors = 0
    for one in sets:
        declined = one.declined()
        takes = torch.ones_like(one["predicted"], dtype=torch.bool) if declined is None else ~declined
        if promise.label is not None:
            index = names.index(promise.label) if promise.label in names else int(promise.label)
            takes = takes & (one["predicted"] == index)
        wrong = takes & ~one["accuracy"] if "accuracy" in one.columns else takes
        rows, accepted, errors = rows + len(takes), accepted + int(takes.sum()), errors + int(wrong.sum())
    return Kept(promise, rows, accepted, errors)


def _by_set(statistic: Statistic, parts: list[Tensor]) -> dict[str, Any]:
    """Arguments of `paired` for a column of several sets, each a stratum."""
    sets = torch.cat([torch.full((len(part),), number) for number, part in enumerate(parts)])
    return {"statistic": statistic, "columns": [torch.cat(parts), sets], "strata": sets}


def _mean_over_sets(weights: Tensor, values: Tensor, sets: Tensor) -> Tensor:
    """Unweighted mean over the sets of the mean of each: `[R, B]`, `[B]`, `[B]` to `[R]`."""
    rows = [sets == number for number in range(int(sets.max()) + 1)]
    return torch.stack([weighted_mean(weights[:, row], values[row]) for row in rows]).mean(dim=0)

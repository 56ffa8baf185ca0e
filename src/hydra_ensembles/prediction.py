"""What an ensemble says about a batch: probabilities, a label, and how sure it is and why.

Everything here is a pure function of member logits `[M, B, C]`, wherever they come from. Half precision is
raised to float32; float64 stays float64.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal, SupportsIndex, get_args

import torch
from torch import Tensor

from .errors import ConfigError, DataError
from .metrics.diversity import disagreement_per_sample, entropy_parts, variation_ratio_per_sample

ScoreName = Literal["msp", "entropy", "mutual_information", "max_logit", "energy"]
Temperature = float | Sequence[float] | Tensor

# Axis of the samples in the fields that have a member axis; every other tensor has its samples on axis 0.
_MEMBER_FIELDS = ("member_logits", "member_probs")


@dataclass(frozen=True, eq=False, repr=False)
class Prediction:
    """The answer of M members for B samples over C classes. Make one with `from_logits`.

    Entropies are in nats, and `entropy = aleatoric + epistemic`. Indexing picks samples, also by a mask:
    `prediction[prediction.accept]`.

    Attributes:
        member_logits: `[M, B, C]`, already divided by the temperature.
        member_probs: `[M, B, C]`, the softmax of `member_logits`.
        probs: `[B, C]`, the mean over members.
        label: `[B]`, the most probable class.
        confidence: `[B]`, its probability.
        entropy: `[B]`, total uncertainty: the entropy of `probs`.
        aleatoric: `[B]`, the mean entropy of the members.
        epistemic: `[B]`, the mutual information of label and member.
        disagreement: `[B]`, share of member pairs with different labels; zero for one member.
        variation_ratio: `[B]`, share of members with another label than the ensemble.
        accept: `[B]` of bool, True where the score is at most the threshold; None where none is known.
        threshold: The largest score that is still accepted, or None.
        score_name: The score the threshold is for, and the one `score()` gives by default.
        class_names: C names, or None.
    """

    member_logits: Tensor
    member_probs: Tensor
    probs: Tensor
    label: Tensor
    confidence: Tensor
    entropy: Tensor
    aleatoric: Tensor
    epistemic: Tensor
    disagreement: Tensor
    variation_ratio: Tensor
    accept: Tensor | None
    threshold: float | None
    score_name: ScoreName
    class_names: tuple[str, ...] | None

    @classmethod
    def from_logits(
        cls,
        member_logits: Tensor,
        temperature: Temperature | None = None,
        threshold: float | None = None,
        score: ScoreName = "msp",
        class_names: Sequence[str] | None = None,
    ) -> "Prediction":
        """Derive everything from member logits.

        Args:
            member_logits: `[M, B, C]`, finite, floating point, at least one member and two classes.
            temperature: Divides the logits before softmax and mean: one number, or one per member.
            threshold: Samples whose score is above it are not accepted.
            score: Name of the score that the threshold is for.
            class_names: One name per class.
        """
        _check_score_name(score)
        if threshold is not None and math.isnan(threshold):
            raise ConfigError("threshold is NaN; give a number, or None to accept or refuse nothing")
        member_logits = scale_logits(member_logits, temperature)
        if class_names is not None and len(class_names) != member_logits.shape[-1]:
            raise DataError(
                f"got {len(class_names)} class names for {member_logits.shape[-1]} classes; give one per class"
            )
        member_probs = member_logits.softmax(dim=-1)
        probs = member_probs.mean(dim=0)  # [M, B, C] -> [B, C]
        confidence, label = probs.max(dim=-1)
        parts = entropy_parts(member_probs)
        prediction = cls(
            member_logits=member_logits,
            member_probs=member_probs,
            probs=probs,
            label=label,
            confidence=confidence,
            entropy=parts.total,
            aleatoric=parts.aleatoric,
            epistemic=parts.epistemic,
            disagreement=disagreement_per_sample(member_probs),
            variation_ratio=variation_ratio_per_sample(member_probs),
            accept=None,
            threshold=threshold,
            score_name=score,
            class_names=None if class_names is None else tuple(class_names),
        )
        if threshold is None:
            return prediction
        return dataclasses.replace(prediction, accept=prediction.score() <= threshold)

    @classmethod
    def concat(cls, predictions: Sequence["Prediction"]) -> "Prediction":
        """Join predictions for consecutive batches into one."""
        if not predictions:
            raise DataError("got no predictions to join; give at least one")
        first = predictions[0]
        for index, other in enumerate(predictions):
            for what in ("members", "classes", "threshold", "score_name", "class_names"):
                ours, theirs = getattr(first, what), getattr(other, what)
                if ours != theirs:
                    raise DataError(
                        f"prediction {index} has {what} = {theirs!r} and prediction 0 has {ours!r}; "
                        "only predictions of one ensemble with the same settings can be joined"
                    )
        tensors: dict[str, Any] = {
            field: torch.cat([getattr(p, field) for p in predictions], dim=_sample_axis(field))
            for field in first._tensor_fields()
        }
        return dataclasses.replace(first, **tensors)

    @property
    def members(self) -> int:
        """Number of members M."""
        return self.member_logits.shape[0]

    @property
    def classes(self) -> int:
        """Number of classes C."""
        return self.member_logits.shape[2]

    @property
    def log_probs(self) -> Tensor:
        """Logarithm of `probs`, `[B, C]`, finite also where a probability underflows to zero."""
        return self.member_logits.log_softmax(dim=-1).logsumexp(dim=0) - math.log(self.members)

    def score(self, name: ScoreName | None = None) -> Tensor:
        """How much each sample looks out of distribution, `[B]`; see `ood_score` for the names."""
        name = self.score_name if name is None else name
        _check_score_name(name)
        if name == "msp":
            return _all_but_the_largest(self.probs)
        if name == "entropy":
            return self.entropy
        if name == "mutual_information":
            return self.epistemic
        return _logit_score(self.member_logits, name)

    def names(self) -> list[str]:
        """Name of the predicted class of each sample."""
        if self.class_names is None:
            raise DataError(
                "the class names are not known; give them to the model, convert(model, labels=[...]), or to "
                "Prediction.from_logits as class_names="
            )
        return [self.class_names[index] for index in self.label.tolist()]

    def to(self, device: torch.device | str) -> "Prediction":
        """The same prediction on another device."""
        return self._map(lambda tensor, axis: tensor.to(device))

    def __len__(self) -> int:
        return self.member_logits.shape[1]

    def __getitem__(self, index: SupportsIndex | slice | Sequence[int] | Tensor) -> "Prediction":
        if index is None:
            raise DataError(
                "a prediction cannot be indexed by None; `accept` is None while no threshold is known: calibrate the "
                "ensemble first"
            )
        if isinstance(index, Integral) or (isinstance(index, Tensor) and index.ndim == 0):
            position = int(index)
            if not -len(self) <= position < len(self):
                raise IndexError(f"sample {position} of a prediction for {len(self)} samples")
            index = slice(position, position + 1 if position != -1 else None)  # the sample axis stays
        rows = index if isinstance(index, slice | Tensor) else torch.as_tensor(index)
        if isinstance(rows, Tensor) and rows.numel() == 0:
            rows = rows.long()  # an empty list comes without a dtype
        return self._map(lambda tensor, axis: tensor[:, rows] if axis else tensor[rows])

    def __repr__(self) -> str:
        settings = f"score={self.score_name!r}, threshold={self.threshold}"
        return f"Prediction({len(self)} samples, {self.members} members, {self.classes} classes, {settings})"

    def _tensor_fields(self) -> list[str]:
        fields = (field.name for field in dataclasses.fields(self))
        return [name for name in fields if isinstance(getattr(self, name), Tensor)]

    def _map(self, change: Callable[[Tensor, int], Tensor]) -> "Prediction":
        tensors: dict[str, Any] = {
            name: change(getattr(self, name), _sample_axis(name)) for name in self._tensor_fields()
        }
        return dataclasses.replace(self, **tensors)


def ood_score(member_logits: Tensor, name: ScoreName = "msp", temperature: Temperature | None = None) -> Tensor:
    """Score of each sample from member logits `[M, B, C]`, higher = more uncertain: `[B]`.

    * `msp`: one minus the largest mean probability.
    * `entropy`: entropy of the mean probabilities.
    * `mutual_information`: the part of it that comes from members differing.
    * `max_logit`: minus the largest logit, of the logits averaged over members.
    * `energy`: minus the log-sum-exp of the logits averaged over members.
    """
    _check_score_name(name)
    member_logits = scale_logits(member_logits, temperature)
    if name in ("max_logit", "energy"):
        return _logit_score(member_logits, name)
    member_probs = member_logits.softmax(dim=-1)
    if name == "msp":
        return _all_but_the_largest(member_probs.mean(dim=0))
    parts = entropy_parts(member_probs)
    return parts.total if name == "entropy" else parts.epistemic


def _all_but_the_largest(probs: Tensor) -> Tensor:
    """One minus the largest of the probabilities `[B, C]`, as the sum of the others.

    The difference itself would be zero for all samples that a model is nearly certain of, and their order lost.
    """
    return probs.scatter(-1, probs.argmax(dim=-1, keepdim=True), 0.0).sum(dim=-1)


def scale_logits(member_logits: Tensor, temperature: Temperature | None = None) -> Tensor:
    """Check member logits `[M, B, C]`, raise them to at least float32, and divide by the temperature."""
    if member_logits.ndim != 3:
        raise DataError(
            f"member logits must have shape [M, B, C] (members, samples, classes), but have "
            f"{list(member_logits.shape)}; add a member axis with .unsqueeze(0) for a single model"
        )
    members, _, classes = member_logits.shape
    if members < 1 or classes < 2:
        raise DataError(f"got {members} members and {classes} classes; at least 1 member and 2 classes are needed")
    if not member_logits.is_floating_point():
        raise DataError(f"member logits must be floating point, but have dtype {member_logits.dtype}")
    _check_finite(member_logits, "member logits", "look for overflow in the model, or run it in float32")
    if member_logits.dtype in (torch.float16, torch.bfloat16):
        member_logits = member_logits.float()
    if temperature is None:
        return member_logits
    divisor = torch.as_tensor(temperature, dtype=member_logits.dtype, device=member_logits.device)
    if divisor.ndim > 1 or (divisor.ndim == 1 and len(divisor) != members):
        raise ConfigError(
            f"temperature has shape {list(divisor.shape)} for {members} members; give one number, or one per member"
        )
    if not bool((torch.isfinite(divisor) & (divisor > 0)).all()):
        raise ConfigError(f"temperature={divisor.tolist()} must be positive and finite; 1 changes nothing")
    scaled = member_logits / divisor.reshape(-1, 1, 1)  # [1 or M, 1, 1]
    _check_finite(scaled, "member logits divided by the temperature", "use a larger temperature")
    return scaled


def _logit_score(member_logits: Tensor, name: ScoreName) -> Tensor:
    mean_logits = member_logits.mean(dim=0)  # [M, B, C] -> [B, C]
    return -(mean_logits.amax(dim=-1) if name == "max_logit" else mean_logits.logsumexp(dim=-1))


def _check_finite(logits: Tensor, what: str, advice: str) -> None:
    finite = torch.isfinite(logits)
    if bool(finite.all()):
        return
    bad = (~finite).nonzero()
    member, sample, class_index = (int(index) for index in bad[0])
    raise DataError(
        f"{len(bad)} of {logits.numel()} {what} are NaN or infinite, the first at member {member}, sample {sample}, "
        f"class {class_index} (value {logits[member, sample, class_index].item()}); {advice}"
    )


def _check_score_name(name: str) -> None:
    if name not in get_args(ScoreName):
        raise ConfigError(f"score {name!r} is not known; choose one of {', '.join(get_args(ScoreName))}")


def _sample_axis(field: str) -> int:
    return 1 if field in _MEMBER_FIELDS else 0

"""Selective prediction: the risk that remains when the most uncertain samples are given back.

Ours rather than a library's: torchmetrics and scikit-learn have no risk-coverage curve. The numbers are those
of torch-uncertainty. Scores are higher the more uncertain the model is; samples with equal scores are answered
in the order of the data.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ConfigError, DataError
from .inputs import check_finite, check_same_length, check_scores, where


@dataclass(frozen=True, eq=False)
class RiskCoverage:
    """A risk-coverage curve in float64 on the CPU: the k most certain samples, for k from 1 to B.

    Attributes:
        coverage: `[B]` share of samples answered.
        risk: `[B]` mean error among them.
    """

    coverage: Tensor
    risk: Tensor

    @property
    def area(self) -> float:
        """Area under the curve by trapezoids, divided by the width it spans; of one sample, its risk."""
        if len(self.risk) == 1:
            return self.risk.item()
        return torch.trapezoid(self.risk, self.coverage).item() / (1 - 1 / len(self.risk))

    def at(self, coverage: float) -> float:
        """Mean error when at least this share of the samples is answered, the most certain ones."""
        if not 0 < coverage <= 1:
            raise ConfigError(f"coverage={coverage} is not a share of the samples; use a number in (0, 1]")
        answered = math.ceil(round(len(self.risk) * coverage, 9))  # 100 * 0.07 is 7 samples, not 8
        return self.risk[max(answered, 1) - 1].item()


def risk_coverage(scores: Tensor, errors: Tensor, *, name: str | None = None) -> RiskCoverage:
    """Risk at every coverage.

    Args:
        scores: `[B]` uncertainty, higher = more uncertain.
        errors: `[B]` whether (bool) or how much (any real dtype) each answer is wrong.
        name: Name of the set, for error messages.
    """
    scores = check_scores(scores, "scores", name)
    if errors.ndim != 1:
        raise DataError(f"{where(name)}errors must be a vector [B], but have shape {list(errors.shape)}")
    check_same_length({"scores": len(scores), "errors": len(errors)}, name)
    check_finite(errors, "errors", name)
    return risk_curve(scores, errors)


def aurc(scores: Tensor, errors: Tensor, *, name: str | None = None) -> float:
    """Area under the risk-coverage curve, as `RiskCoverage.area` defines it."""
    return risk_coverage(scores, errors, name=name).area


def risk_at_coverage(scores: Tensor, errors: Tensor, coverage: float = 0.8, *, name: str | None = None) -> float:
    """Mean error when at least this share of the samples is answered, the most certain ones."""
    return risk_coverage(scores, errors, name=name).at(coverage)


def risk_curve(scores: Tensor, errors: Tensor) -> RiskCoverage:
    """`risk_coverage` of values known to be good."""
    ordered = errors.detach().cpu().double()[scores.cpu().sort(stable=True).indices]
    answered = torch.arange(1, len(ordered) + 1, dtype=torch.float64)
    return RiskCoverage(coverage=answered / len(ordered), risk=ordered.cumsum(dim=0) / answered)

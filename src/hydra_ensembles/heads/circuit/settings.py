"""What a circuit extraction is asked to do, checked before any work starts."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from ...config import EnsembleConfig
from ...errors import ConfigError, HeadError
from ..head import Head
from ..mask import existing_heads, head_rows

Score = Literal["acc", "ood", "avg"]
Method = Literal["naive", "exact", "screened"]


@dataclass(frozen=True)
class CircuitSettings:
    """Everything that decides which heads are chosen, given a model and data.

    Attributes:
        score: What to keep high while heads are removed.
        method: How the best head of a step is found.
        budget: Heads to remove.
        layers: Layers whose heads are candidates, ascending.
        removed: Heads that are off from the start.
        dtype: Precision of the evaluation.
        screen_size: Heads that `"screened"` measures at a step, at most.
        audit_steps: Steps at which the choice is checked against the method's reference.
    """

    score: Score
    method: Method
    budget: int
    layers: tuple[int, ...]
    removed: tuple[Head, ...]
    dtype: torch.dtype
    screen_size: int
    audit_steps: int

    def __post_init__(self) -> None:
        """Check each value by itself."""
        for name, value, accepted in (("score", self.score, Score), ("method", self.method, Method)):
            if value not in get_args(accepted):
                raise ConfigError(f"{name} must be one of {list(get_args(accepted))}, got {value!r}")
        if not self.dtype.is_floating_point:
            raise ConfigError(f"dtype must be a floating-point type such as torch.float32, got {self.dtype}")
        if self.screen_size < 1:
            raise ConfigError(f"screen_size must be at least 1, got {self.screen_size}")
        if self.audit_steps < 0:
            raise ConfigError(f"audit_steps must not be negative, got {self.audit_steps}")

    def candidates(self, config: EnsembleConfig) -> list[Head]:
        """Heads that may be removed, first layer first; an error where the budget asks for more."""
        for head in self.removed:
            head_rows(config, head)  # raises for a head that does not exist or was pruned
        off = set(self.removed)
        candidates = [head for head in existing_heads(config, self.layers) if head not in off]
        if isinstance(self.budget, bool) or not 1 <= self.budget <= len(candidates):
            raise HeadError(
                f"budget is {self.budget}; with these layers and removed heads there are {len(candidates)} heads "
                "to choose from, so it must lie between 1 and that number"
            )
        return candidates

    def audited(self) -> frozenset[int]:
        """Numbers of the greedy steps that are audited, spread evenly from the first on."""
        count = min(self.audit_steps, self.budget)
        return frozenset(index * self.budget // count for index in range(count))

    def identity(self) -> dict[str, object]:
        """The settings a journal must agree on to be continued.

        A larger budget continues a finished run, because the removal order of a smaller one is its
        beginning; unless steps are audited, because which ones depends on it.
        """
        settings: dict[str, object] = {
            "score": self.score,
            "method": self.method,
            "layers": list(self.layers),
            "removed": [str(head) for head in self.removed],
            "dtype": str(self.dtype),
            "audit_steps": self.audit_steps,
        }
        if self.method == "screened":
            settings["screen_size"] = self.screen_size
        if self.audit_steps:
            settings["budget"] = self.budget
        return settings

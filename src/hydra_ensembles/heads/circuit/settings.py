"""What a circuit extraction is asked to do, checked before any work starts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from ...errors import ConfigError
from ...model.config import EnsembleConfig, require_whole
from ..head import Head, require_budget
from ..mask import TOWER, existing_heads

Score = Literal["acc", "ood", "avg"]
Method = Literal["naive", "exact", "screened"]


@dataclass(frozen=True)
class CircuitSettings:
    """Everything that decides which heads are chosen, given a model and data.

    Attributes:
        score: What to keep high while heads are removed.
        method: How the best head of a step is found.
        budget: Heads to remove.
        layers: Layers whose heads are candidates, ascending; None for all layers of both towers.
        removed: Heads that are off from the start.
        dtype: Precision of the evaluation.
        screen_size: Heads that `"screened"` measures at a step, at most; None for a third of the candidates.
        audit_steps: Steps at which the choice is checked against the method's reference.
        towers: Towers whose heads are candidates.
        prompts: What tells the classes of a dual encoder apart from others; None for an ensemble.
    """

    score: Score
    method: Method
    budget: int
    layers: tuple[int, ...] | None
    removed: tuple[Head, ...]
    dtype: torch.dtype
    screen_size: int | None
    audit_steps: int
    towers: tuple[str, ...] = (TOWER,)
    prompts: str | None = None

    def __post_init__(self) -> None:
        """Check each value by itself."""
        for name, value, accepted in (("score", self.score, Score), ("method", self.method, Method)):
            if value not in get_args(accepted):
                raise ConfigError(f"{name} must be one of {list(get_args(accepted))}, got {value!r}")
        if not self.dtype.is_floating_point:
            raise ConfigError(f"dtype must be a floating-point type such as torch.float32, got {self.dtype}")
        if self.screen_size is not None:
            require_whole("screen_size", self.screen_size, 1)
        if self.method == "screened" and "text" in {*self.towers, *(head.tower for head in self.removed)}:
            raise ConfigError(
                'method="screened" is for one tower; heads of the text tower are cheap to measure: use method="exact", '
                'or towers=("image",)'
            )
        require_whole("audit_steps", self.audit_steps, 0)

    def candidates(self, configs: Mapping[str, EnsembleConfig]) -> list[Head]:
        """Heads that may be removed, first layer first; an error where the budget asks for more."""
        off = set(self.removed)
        existing = (head for name in self.towers for head in existing_heads(configs[name], self.layers, tower=name))
        candidates = [head for head in existing if head not in off]
        require_budget(self.budget, len(candidates))
        return candidates

    def screened(self, candidates: int) -> int:
        """How many of that many candidates `"screened"` measures at a step, at most."""
        return -(-candidates // 3) if self.screen_size is None else self.screen_size

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
            "layers": None if self.layers is None else list(self.layers),
            "removed": [str(head) for head in self.removed],
            "dtype": str(self.dtype),
            "audit_steps": self.audit_steps,
        }
        if self.prompts is not None:
            settings |= {"towers": list(self.towers), "prompts": self.prompts}
        if self.method == "screened":
            settings["screen_size"] = self.screen_size
        if self.audit_steps:
            settings["budget"] = self.budget
        return settings

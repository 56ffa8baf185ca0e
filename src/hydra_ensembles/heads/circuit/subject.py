"""What a circuit is extracted from: one classifier, or a dual encoder with the names of its classes."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import get_args

import torch

from ...errors import ConfigError, HeadError
from ...model.clip import DualEncoder, Templates, Tower, checked_names, checked_templates, require_model, zero_shot
from ...model.config import EnsembleConfig
from ...model.ensemble import Ensemble
from ..head import Head
from ..mask import TOWER, checked_layers, head_rows
from .texts import Texts, read_texts


@dataclass(frozen=True, eq=False)
class Subject:
    """A model whose heads are to be ranked.

    Attributes:
        whole: What was given.
        classifier: What answers the samples: the ensemble itself, or the image tower with its class embeddings.
        towers: Names of the towers whose heads are candidates.
        names: Class names of a dual encoder; None for an ensemble.
        templates: The sentences they stand in.
    """

    whole: Ensemble | DualEncoder
    classifier: Ensemble
    towers: tuple[str, ...]
    names: tuple[str, ...] | None
    templates: tuple[str, ...]

    @property
    def configs(self) -> dict[str, EnsembleConfig]:
        """The transformers a head may lie in, by tower."""
        if isinstance(self.whole, DualEncoder):
            return {"image": self.classifier.config, "text": self.whole.text.config}
        return {TOWER: self.classifier.config}

    @property
    def prompts(self) -> str | None:
        """A short name for the classes and their prompts that changes when they do; None for an ensemble."""
        if self.names is None:
            return None
        return hashlib.sha256(json.dumps([self.names, self.templates]).encode()).hexdigest()

    def layers(self, layers: Iterable[int] | None) -> tuple[int, ...] | None:
        """The layers whose heads are candidates; None for all layers of several towers."""
        if len(self.towers) > 1:
            if layers is not None:
                raise ConfigError(
                    "layers are numbered within one tower, but heads of both are candidates; leave `layers` out, or "
                    'choose one tower with towers=("image",)'
                )
            return None
        return checked_layers(self.configs[self.towers[0]], layers)

    def require_heads(self, heads: Sequence[Head]) -> None:
        """Refuse heads that do not exist or were pruned."""
        for head in heads:
            if head.tower not in self.configs:
                raise HeadError(f"head {head} lies in tower {head.tower!r}; there are {list(self.configs)}")
            head_rows(self.configs[head.tower], head, tower=head.tower)

    def texts(self, removed: Sequence[Head], dtype: torch.dtype, device: torch.device) -> Texts | None:
        """The text tower and its prompts, where any of its heads may be switched off."""
        if self.names is None or not isinstance(self.whole, DualEncoder):
            return None
        if "text" not in self.towers and all(head.tower != "text" for head in removed):
            return None
        return read_texts(self.whole, self.names, self.templates, dtype, device)


def subject_of(
    model: Ensemble | DualEncoder,
    class_names: Sequence[str] | None,
    templates: Templates,
    towers: Sequence[Tower],
) -> Subject:
    """Check what was given and put it together."""
    require_model(model, "extract_circuit")
    if model.num_members != 1:
        raise ConfigError(
            f"a circuit is extracted from one model, got an ensemble of {model.num_members} members; take one of "
            "them with ensemble.member(i)"
        )
    if isinstance(model, DualEncoder):
        if class_names is None:
            raise ConfigError("a dual encoder answers for classes by their names; give class_names")
        chosen = tuple(towers)
        if not chosen or len(set(chosen)) < len(chosen) or set(chosen) - set(get_args(Tower)):
            raise ConfigError(f"towers must be some of {list(get_args(Tower))}, each once, got {list(chosen)}")
        names, sentences = checked_names(class_names), checked_templates(templates)
        classifier = zero_shot(model, names, sentences, keep_text=False)
        return Subject(model, classifier, tuple(sorted(chosen)), names, sentences)
    if class_names is not None:
        raise ConfigError("class_names are for dual encoders; an ensemble has its classes already")
    if model.num_classes < 2:
        raise ConfigError(
            f"a circuit needs answers to score, but this ensemble has {model.num_classes} classes; convert the "
            "model with num_labels= and train its classifier first"
        )
    return Subject(model, model, (TOWER,), None, ())


def of_tower(heads: Sequence[Head], text: bool) -> list[Head]:
    """The heads of the text tower, or of the other one."""
    return [head for head in heads if (head.tower == "text") == text]


def plain(heads: Sequence[Head]) -> list[Head]:
    """Heads as the ensemble that holds their tower calls them."""
    return [Head(head.layer, head.head) for head in heads]

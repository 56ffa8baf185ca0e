"""The files of a checkpoint and what is in them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
TOKENIZER = "tokenizer.json"
CARD = "README.md"
FILE_NAMES = (CONFIG, WEIGHTS, TOKENIZER, CARD)  # no other file is ever written, downloaded or read

FORMAT_VERSION: Literal[1] = 1


@dataclass(frozen=True)
class Contents:
    """A model as plain data, ready to be written.

    Attributes:
        kind: Which class of model this is; loading asks for the same kind.
        model: Its configuration as JSON data.
        metadata: What it remembers beside its weights, as JSON data.
        tensors: Its parameters by canonical name.
        card: Text of the model card.
        tokenizer: Content of `tokenizer.json`; None when there is none.
    """

    kind: str
    model: Mapping[str, Any]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    card: str
    tokenizer: str | None = None


@dataclass(frozen=True)
class Record:
    """The fields of `config.json`.

    `files` holds the SHA-256 of every other file that loading reads, so that a mixture of two saves, a
    truncated download or a changed file is noticed before anything is built from it.
    """

    format: Literal["hydra_ensembles"]
    format_version: Literal[1]
    library_version: str
    kind: str
    model: Mapping[str, Any]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)

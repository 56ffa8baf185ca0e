"""Classifiers of transformers, from a folder or the hub, with their tokenizer or image processor."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .._utils import require
from ..convert.convert import convert
from ..errors import CheckpointError, ConversionError
from ..model.ensemble import Ensemble

CLASSIFIERS = ("ForImageClassification", "ForImageClassificationWithTeacher", "ForSequenceClassification")


def hub_config(name: str) -> dict[str, Any]:
    """The `config.json` of a model on the hub.

    Raises:
        CheckpointError: It is not there, or cannot be reached.
    """
    hub = require("huggingface_hub", extra="transformers")
    try:
        content = json.loads(Path(hub.hf_hub_download(name, "config.json")).read_text(encoding="utf-8"))
    except Exception as error:  # the hub client raises whatever its HTTP library does
        raise CheckpointError(
            f"there is no folder {name!r} here, and the hub did not give such a model ({_first_line(error)}); check "
            "the name (owner/name) and the connection, or give a folder"
        ) from error
    return content if isinstance(content, dict) else {}


def load_transformers(source: str, config: dict[str, Any]) -> Ensemble:
    """Load and convert a classifier.

    Args:
        source: Folder, or id on the hub.
        config: Its `config.json`.

    Raises:
        HydraError: It is no classifier, cannot be read, or its architecture is not supported.
    """
    transformers = require("transformers", extra="transformers")
    names = [str(name) for name in config.get("architectures") or ()]
    chosen = next((name for name in names if name.endswith(CLASSIFIERS)), None)
    if chosen is None or not hasattr(transformers, chosen):
        raise ConversionError(
            f"{source} is a {' or '.join(names) or config.get('model_type', 'model of an unknown kind')}, which has no "
            "trained classifier; give a model for image or sequence classification"
        )
    text = chosen.endswith("ForSequenceClassification")
    try:
        with _no_progress_bar(transformers):
            model = getattr(transformers, chosen).from_pretrained(source).eval()
    except Exception as error:  # the library raises whatever it meets
        raise CheckpointError(f"transformers could not load {source}: {_first_line(error)}") from error
    processor = _processor(transformers.AutoTokenizer if text else transformers.AutoImageProcessor, source)
    converted: Ensemble = convert(model, processor=processor)
    return converted


@contextmanager
def _no_progress_bar(transformers: Any) -> Iterator[None]:
    """Loading a local file takes no time worth a bar."""
    logging = transformers.utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _processor(factory: Any, source: str) -> Any:
    """The tokenizer or image processor beside a model; None where there is none."""
    try:
        found = factory.from_pretrained(source)
    except (OSError, ValueError):
        return None
    if hasattr(found, "get_vocab") and found.get_vocab().keys() <= set(found.all_special_tokens):
        return None  # without files, transformers makes a tokenizer that knows no word
    return found


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no further details'}"

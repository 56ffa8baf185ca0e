"""An ensemble's configuration and metadata as the plain data of a checkpoint, and back."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..config import EnsembleConfig, TextStemConfig
from ..errors import CheckpointError, ConfigError
from ..metadata import Metadata
from ..model_card import model_card
from ..preprocessing import TextPreprocessing
from ..schema import from_plain, to_plain
from .contents import CONFIG, Contents
from .reading import Stored

ENSEMBLE = "ensemble"  # the kind of an ensemble's checkpoint


def ensemble_contents(name: str, config: EnsembleConfig, metadata: Metadata, state: Mapping[str, Tensor]) -> Contents:
    """Everything that `save_pretrained` writes; `name` is how the model card calls the model."""
    check_fits(config, metadata)
    plain, tokenizer = metadata_to_plain(metadata)
    return Contents(
        kind=ENSEMBLE,
        model=to_plain(config),
        metadata=plain,
        tensors=state,
        card=model_card(name, config, metadata, state),
        tokenizer=tokenizer,
    )


def read_ensemble(stored: Stored) -> tuple[EnsembleConfig, Metadata]:
    """Configuration and metadata of a stored ensemble."""
    config = stored.read(EnsembleConfig, stored.record.model, "config.model", complete=True)
    metadata = read_metadata(stored, stored.record.metadata, "config.metadata")
    try:
        check_fits(config, metadata)
    except CheckpointError as error:
        raise CheckpointError(f"{stored.folder / CONFIG}: {error}") from error
    return config, metadata


def metadata_to_plain(metadata: Metadata) -> tuple[dict[str, Any], str | None]:
    """Metadata as JSON data, and the text of its tokenizer, which goes into a file of its own."""
    plain = to_plain(metadata)
    try:
        from_plain(Metadata, plain, "metadata")
    except ConfigError as error:
        raise CheckpointError(f"the model cannot be saved: {error}; replace it with with_metadata") from error
    tokenizer = plain["preprocessing"].pop("tokenizer", "") if plain["preprocessing"] else ""
    return plain, tokenizer or None


def read_metadata(stored: Stored, data: Any, path: str) -> Metadata:
    """Metadata from its part of `config.json`, with the tokenizer put back."""
    preprocessing = data.get("preprocessing") if isinstance(data, Mapping) else None
    if isinstance(preprocessing, Mapping) and "tokenizer" in preprocessing:
        raise CheckpointError(
            f"{stored.folder / CONFIG}: {path}.preprocessing has the unknown field 'tokenizer'; "
            "a tokenizer is a file of its own"
        )
    metadata = stored.read(Metadata, data, path)
    tokenizer = stored.tokenizer()
    if tokenizer is None:
        return metadata
    if not isinstance(metadata.preprocessing, TextPreprocessing):
        raise CheckpointError(f"{stored.folder / CONFIG} lists a tokenizer, but {path}.preprocessing is not for text")
    return replace(metadata, preprocessing=replace(metadata.preprocessing, tokenizer=tokenizer))


def check_fits(config: EnsembleConfig, metadata: Metadata) -> None:
    """Refuse metadata that belongs to another model: labels, temperatures, kind of preprocessing."""
    classes, labels = config.readout.num_classes, len(metadata.labels)
    if classes and labels not in (0, classes):
        raise CheckpointError(f"there are {labels} labels for {classes} classes; give one label per class, or none")
    temperatures = 1 if metadata.calibration is None else len(metadata.calibration.temperature)
    if temperatures not in (1, config.members):
        raise CheckpointError(
            f"there are {temperatures} temperatures for {config.members} members; give one, or one per member"
        )
    text = isinstance(config.stem, TextStemConfig)
    if metadata.preprocessing is not None and isinstance(metadata.preprocessing, TextPreprocessing) != text:
        raise CheckpointError(
            f"preprocessing is {type(metadata.preprocessing).__name__} for a model of {'text' if text else 'images'}"
        )

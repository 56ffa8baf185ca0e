"""An ensemble's configuration and metadata as the plain data of a checkpoint, and back."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..config import EnsembleConfig, TextStemConfig
from ..dual_config import output_width
from ..errors import CheckpointError, ConfigError
from ..metadata import Metadata
from ..model_card import model_card
from ..preprocessing import TextPreprocessing
from ..schema import from_plain, to_plain
from ..text_side import TextSettings, TextSide
from .contents import CONFIG, Contents
from .reading import Stored

ENSEMBLE = "ensemble"  # the kind of an ensemble's checkpoint


TEXT_SIDE = "text_side"  # name of the text side in the metadata, and prefix of its tensors


def ensemble_contents(name: str, config: EnsembleConfig, metadata: Metadata, state: Mapping[str, Tensor]) -> Contents:
    """Everything that `save_pretrained` writes; `name` is how the model card calls the model."""
    check_fits(config, metadata)
    plain, tokenizer = metadata_to_plain(metadata)
    texts = metadata.text_side
    if texts is not None:
        plain[TEXT_SIDE] = to_plain(texts.settings)
        tokenizer = plain[TEXT_SIDE]["preprocessing"].pop("tokenizer")
    stored = {} if texts is None else {f"{TEXT_SIDE}.{key}": tensor for key, tensor in texts.state.items()}
    return Contents(
        kind=ENSEMBLE,
        model=to_plain(config),
        metadata=plain,
        tensors={**state, **stored},
        card=model_card(name, config, metadata, state),
        tokenizer=tokenizer,
    )


def read_ensemble(stored: Stored) -> tuple[EnsembleConfig, Metadata, TextSettings | None]:
    """Configuration and metadata of a stored ensemble, and the settings of its text side where it kept one."""
    config = stored.read(EnsembleConfig, stored.record.model, "config.model", complete=True)
    data = dict(stored.record.metadata)
    texts = _read_text_settings(stored, data.pop(TEXT_SIDE)) if TEXT_SIDE in data else None
    metadata = read_metadata(stored, data, "config.metadata", own_tokenizer=texts is None)
    try:
        check_fits(config, metadata)
        _check_text_side(config, texts)
    except CheckpointError as error:
        raise CheckpointError(f"{stored.folder / CONFIG}: {error}") from error
    return config, metadata, texts


def with_text_side(
    tensors: Mapping[str, Tensor], metadata: Metadata, texts: TextSettings | None
) -> tuple[dict[str, Tensor], Metadata]:
    """The tensors of an ensemble alone, and its metadata with those of the text side, which stays on the CPU."""
    prefix = f"{TEXT_SIDE}."
    own = {name: tensor for name, tensor in tensors.items() if not name.startswith(prefix)}
    if texts is None:
        return own, metadata
    kept = {
        name.removeprefix(prefix): tensor.to("cpu", copy=True)
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
    return own, replace(metadata, text_side=TextSide(texts, kept))


def metadata_to_plain(metadata: Metadata) -> tuple[dict[str, Any], str | None]:
    """Metadata as JSON data without the text side, and the text of its tokenizer, which is a file of its own."""
    plain = to_plain(replace(metadata, text_side=None))
    try:
        from_plain(Metadata, plain, "metadata")
    except ConfigError as error:
        raise CheckpointError(f"the model cannot be saved: {error}; replace it with with_metadata") from error
    tokenizer = plain["preprocessing"].pop("tokenizer", "") if plain["preprocessing"] else ""
    return plain, tokenizer or None


def read_metadata(stored: Stored, data: Any, path: str, own_tokenizer: bool = True) -> Metadata:
    """Metadata from its part of `config.json`; with `own_tokenizer`, a stored tokenizer is put back into it."""
    _refuse_tokenizer(stored, data, path)
    if isinstance(data, Mapping) and TEXT_SIDE in data:
        raise CheckpointError(f"{stored.folder / CONFIG}: {path} has the unknown field {TEXT_SIDE!r}")
    metadata = stored.read(Metadata, data, path)
    tokenizer = stored.tokenizer() if own_tokenizer else None
    if tokenizer is None:
        return metadata
    if not isinstance(metadata.preprocessing, TextPreprocessing):
        raise CheckpointError(f"{stored.folder / CONFIG} lists a tokenizer, but {path}.preprocessing is not for text")
    return replace(metadata, preprocessing=replace(metadata.preprocessing, tokenizer=tokenizer))


def _read_text_settings(stored: Stored, data: Any) -> TextSettings:
    """The settings of a text side, with the tokenizer put back."""
    path = f"config.metadata.{TEXT_SIDE}"
    _refuse_tokenizer(stored, data, path)
    tokenizer = stored.tokenizer()
    if tokenizer is None:
        raise CheckpointError(f"{stored.folder / CONFIG}: {path} needs a tokenizer, but no file of one is listed")
    if isinstance(data, Mapping) and isinstance(data.get("preprocessing"), Mapping):
        data = {**data, "preprocessing": {**data["preprocessing"], "tokenizer": tokenizer}}
    return stored.read(TextSettings, data, path, complete=True)


def _refuse_tokenizer(stored: Stored, data: Any, path: str) -> None:
    preprocessing = data.get("preprocessing") if isinstance(data, Mapping) else None
    if isinstance(preprocessing, Mapping) and "tokenizer" in preprocessing:
        raise CheckpointError(
            f"{stored.folder / CONFIG}: {path}.preprocessing has the unknown field 'tokenizer'; "
            "a tokenizer is a file of its own"
        )


def _check_text_side(config: EnsembleConfig, texts: TextSettings | None) -> None:
    """Refuse a text side made for another number of members, or for what does not compare with class embeddings."""
    if texts is None:
        return
    if config.readout.cosine is None:
        raise CheckpointError("there is a text side, but the ensemble does not classify by class embeddings")
    if texts.members not in (1, config.members):
        raise CheckpointError(f"the text side has {texts.members} members, the ensemble {config.members}")
    ends, expected = output_width(texts.tower), config.readout.cosine.width
    if texts.projection is not None:
        ends = texts.projection.outputs
    if expected not in (None, ends):
        raise CheckpointError(f"the text side ends in an embedding of width {ends}, the images in one of {expected}")


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

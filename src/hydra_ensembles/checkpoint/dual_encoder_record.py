"""A dual encoder's configuration and metadata as the plain data of a checkpoint, and back."""

from collections.abc import Mapping

from torch import Tensor

from ..dual_config import DualEncoderConfig
from ..dual_model_card import dual_model_card
from ..errors import CheckpointError
from ..metadata import Metadata
from ..schema import to_plain
from .contents import CONFIG, Contents
from .ensemble_record import check_fits, metadata_to_plain, read_metadata
from .reading import Stored

DUAL_ENCODER = "dual_encoder"  # the kind of a dual encoder's checkpoint
_TOWERS = {"image", "text"}


def dual_encoder_contents(
    name: str, config: DualEncoderConfig, image: Metadata, text: Metadata, state: Mapping[str, Tensor]
) -> Contents:
    """Everything that `save_pretrained` writes; `name` is how the model card calls the model."""
    check_fits(config.image, image)
    check_fits(config.text, text)
    plain_text, tokenizer = metadata_to_plain(text)
    return Contents(
        kind=DUAL_ENCODER,
        model=to_plain(config),
        metadata={"image": metadata_to_plain(image)[0], "text": plain_text},
        tensors=state,
        card=dual_model_card(name, config, image, text, state),
        tokenizer=tokenizer,
    )


def read_dual_encoder(stored: Stored) -> tuple[DualEncoderConfig, Metadata, Metadata]:
    """Configuration, metadata of the image tower and metadata of the text tower of a stored dual encoder."""
    config = stored.read(DualEncoderConfig, stored.record.model, "config.model")
    data = stored.record.metadata
    if data.keys() != _TOWERS:
        raise CheckpointError(
            f"{stored.folder / CONFIG}: config.metadata has the fields {sorted(data)}, expected {sorted(_TOWERS)}"
        )
    image = stored.read(Metadata, data["image"], "config.metadata.image")
    text = read_metadata(stored, data["text"], "config.metadata.text")
    for tower, tower_config, metadata in (("image", config.image, image), ("text", config.text, text)):
        try:
            check_fits(tower_config, metadata)
        except CheckpointError as error:
            raise CheckpointError(f"{stored.folder / CONFIG}: {tower} tower: {error}") from error
    return config, image, text

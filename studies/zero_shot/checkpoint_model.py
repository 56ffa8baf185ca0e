"""A user's own dual encoder for the zero-shot study: the paper's checkpoint, any CLIP, or a saved `DualEncoder`."""

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from hydra_ensembles._utils import require
from hydra_ensembles.convert.convert import convert
from hydra_ensembles.data.dataset import ImageDataset
from hydra_ensembles.errors import CheckpointError, ConfigError, HydraError
from hydra_ensembles.model.clip import DualEncoder

from ..seed_folder import SeedFolder
from ..splits import Samples
from .sources import PreparedImages

OPEN_CLIP = "open_clip:"
PAPER_CHECKPOINT = "open_clip:ViT-B-32/laion2b_s34b_b79k"
DESCRIPTION = "The model is {name}, as it was published; nothing of it was trained here. Seeds change nothing in it."


class CheckpointModel:
    """A dual encoder that is there already; see `load_dual` for what `source` may be."""

    trains_text = False

    def __init__(self, source: str = PAPER_CHECKPOINT) -> None:
        self.source = source
        self.name = Path(source).name if Path(source).expanduser().is_dir() else source
        self.description = DESCRIPTION.format(name=self.name)

    def dual(self, seed: int, folder: SeedFolder, device: torch.device) -> DualEncoder:
        """The same model for every seed."""
        return self._model.to(device)

    def tuned(self, member: DualEncoder, name: str, seed: int, folder: SeedFolder) -> DualEncoder:
        """Refuse: there are no pairs to train on."""
        raise ConfigError(
            f"the text side of {self.name} cannot be trained here, because there are no pairs of images and texts; use "
            "tune_text on pairs of your own"
        )

    def samples(self, images: ImageDataset, device: torch.device) -> Samples:
        """Images by the model's own preprocessing, batch by batch."""
        return PreparedImages(images, self._model.to(device).image)

    @cached_property
    def _model(self) -> DualEncoder:
        return load_dual(self.source)


def load_dual(source: str) -> DualEncoder:
    """Load a dual encoder with its image preprocessing and its tokenizer.

    Args:
        source: `open_clip:NAME/WEIGHTS`, with a tag of open_clip or a file for the weights; a folder that
            `DualEncoder.save_pretrained` or transformers wrote; or the id of a CLIP of transformers on the hub.

    Raises:
        HydraError: There is no such model, it is no dual encoder, or it cannot read raw images and texts.
    """
    folder = Path(source).expanduser()
    if source.startswith(OPEN_CLIP):
        dual = _from_open_clip(source.removeprefix(OPEN_CLIP))
    elif folder.is_dir() and _config(folder).get("format") == "hydra_ensembles":
        dual = DualEncoder.from_pretrained(folder)
    else:
        dual = _from_transformers(str(folder) if folder.is_dir() else source)
    for name, tower in (("image", dual.image), ("text", dual.text)):
        if tower.metadata.preprocessing is None:
            raise CheckpointError(
                f"{source} does not say how {name}s become inputs; convert the model yourself with processor=, save it "
                "with save_pretrained, and give that folder"
            )
    return dual.eval()


def _from_open_clip(name: str) -> DualEncoder:
    architecture, _, weights = name.partition("/")
    if not weights:
        raise ConfigError(
            f"{OPEN_CLIP}{name} does not say which weights; write open_clip:NAME/WEIGHTS, such as {PAPER_CHECKPOINT}"
        )
    library = require("open_clip", extra="open_clip")
    try:
        model = library.create_model_from_pretrained(architecture, weights, return_transform=False)
    except Exception as error:  # the library raises whatever it, the hub client or the HTTP library meets
        raise CheckpointError(f"open_clip could not make {name}: {_first_line(error)}") from error
    return _converted(model.eval(), None, f"{OPEN_CLIP}{name}")


def _from_transformers(source: str) -> DualEncoder:
    library = require("transformers", extra="transformers")
    try:
        model = library.CLIPModel.from_pretrained(source).eval()
        processors = [kind.from_pretrained(source) for kind in (library.AutoTokenizer, library.AutoImageProcessor)]
    except Exception as error:  # likewise
        raise CheckpointError(
            f"{source} is neither a folder of a saved dual encoder nor a CLIP that transformers can load with its "
            f"tokenizer and image processor: {_first_line(error)}. For open_clip write open_clip:NAME/WEIGHTS"
        ) from error
    return _converted(model, processors, source)


def _converted(model: Any, processor: Any, source: str) -> DualEncoder:
    try:
        dual = convert(model, processor=processor)
    except HydraError as error:
        raise CheckpointError(f"{source} cannot be converted: {error}") from error
    if not isinstance(dual, DualEncoder):
        raise CheckpointError(f"{source} is a {type(model).__name__}, not a dual encoder")
    return dual


def _config(folder: Path) -> dict[str, Any]:
    """The `config.json` of a folder; empty where there is none that can be read."""
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no further details'}"

"""The dual encoder of the study, before training: DINOv2 ViT-S/14 beside MiniLM-L6, with projections between them."""

from dataclasses import replace

import torch

from hydra_ensembles._utils import derive_seed
from hydra_ensembles.convert.convert import convert
from hydra_ensembles.errors import ConfigError
from hydra_ensembles.model.clip import DualEncoder
from hydra_ensembles.model.config import ReadoutConfig, output_width
from hydra_ensembles.model.ensemble import Ensemble
from hydra_ensembles.model.stem_readout import Projections, linear
from hydra_ensembles.preprocessing import ImagePreprocessing

from ..image_samples import MEAN, STD
from ..store import Store

CAPTION_TOKENS = 32


def untrained_dual(store: Store, input_size: int, seed: int) -> DualEncoder:
    """Both pretrained towers, and projections that still have to be trained; all that the seed decides is these.

    Args:
        store: Where the weights lie.
        input_size: Side of the images, a multiple of 14.
        seed: Of the image projection.
    """
    image: Ensemble = convert(store.dinov2(input_size), processor=squashed(input_size))
    text: Ensemble = convert(store.minilm(), processor=store.tokenizer(CAPTION_TOKENS))
    return dual_of(image, mean_pooled(text), seed)


def dual_of(image: Ensemble, text: Ensemble, seed: int) -> DualEncoder:
    """Two towers in the text tower's space: its projection starts as the identity, that of images is drawn."""
    width, inputs = output_width(text.config), output_width(image.config)
    generator = torch.Generator().manual_seed(derive_seed(seed, "image projection"))
    drawn = torch.randn(1, width, inputs, generator=generator) * inputs**-0.5
    projections = Projections(linear(drawn), linear(torch.eye(width)[None]))
    return DualEncoder(image, text, projections).eval()


def mean_pooled(text: Ensemble) -> Ensemble:
    """A text encoder that answers with the mean of its tokens, padding left out, as sentence-transformers pools."""
    if text.kind != "text" or text.num_classes:
        raise ConfigError(f"expected a text encoder without classifier, got {text!r}")
    config = replace(text.config, readout=ReadoutConfig(pool="mean", norm="none"))
    state = {name: tensor for name, tensor in text.state_dict().items() if not name.startswith("readout.hidden")}
    return Ensemble.from_state(config, state, text.metadata)


def squashed(size: int) -> ImagePreprocessing:
    """Whole images at `size` by `size`, as the studies read them."""
    return ImagePreprocessing((size, size), MEAN, STD, resize_mode="squash")

"""Preprocessing is the training's: read from the library by name."""

from typing import Any

import numpy as np
import pytest
import torch
from convert_cases import vit
from PIL import Image

import hydra_ensembles as he


@pytest.mark.parametrize(
    ("model", "weights"), [("vit_b_16", "IMAGENET1K_V1"), ("vit_h_14", "IMAGENET1K_SWAG_LINEAR_V1")]
)
def test_of_torchvision_it_is_that_of_the_weights_of_this_shape(model: str, weights: str) -> None:
    import torchvision

    transforms = torchvision.models.get_model_weights(model)[weights].transforms()
    with torch.device("meta"):
        built = torchvision.models.get_model(model, image_size=transforms.crop_size[0])
    assumed, exact = (he.convert(built, processor=one).metadata for one in (None, transforms))
    assert assumed.preprocessing == exact.preprocessing
    assert "assumed" in assumed.preprocessing_from


@pytest.mark.parametrize(
    ("changes", "channels", "mean", "told"),
    [
        ({"crop_mode": "border"}, 3, None, "not read"),
        ({"crop_mode": "squash", "interpolation": "bilinear"}, 3, (0.5,) * 3, "pretrained_cfg"),
        ({"mean": None, "std": None, "interpolation": None}, 3, (0.485, 0.456, 0.406), "assumed"),
        ({}, 1, None, ""),
    ],
)
def test_of_timm_it_is_what_is_said_or_unknown(changes: dict[str, Any], channels: int, mean: Any, told: str) -> None:
    model = vit(in_chans=channels)
    model.pretrained_cfg = {**model.pretrained_cfg, **changes}
    found = he.convert(model).metadata
    assert (found.preprocessing and found.preprocessing.mean) == mean
    assert told in found.preprocessing_from


@pytest.mark.parametrize("crop", ["center", "squash"])
def test_of_timm_it_gives_the_pixels_of_timm_for_images_that_are_not_square(crop: str) -> None:
    import timm.data

    model = vit(img_size=(48, 32))
    model.pretrained_cfg |= {"input_size": (3, 48, 32), "interpolation": "bicubic", "crop_mode": crop}
    theirs = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    ours = he.convert(model).metadata.preprocessing
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (70, 111, 3), dtype=np.uint8))
    for image in (picture, picture.transpose(Image.Transpose.ROTATE_90)):
        assert torch.allclose(ours(image)[0], theirs(image), atol=1e-6)

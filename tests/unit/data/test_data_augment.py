import numpy as np
import pytest
import torch
from PIL import Image
from stand_ins import picture

from hydra_ensembles.data.batching import RandAugment, TrainTransform
from hydra_ensembles.errors import ConfigError
from hydra_ensembles.preprocessing import ImagePreprocessing

PLAIN = TrainTransform(
    size=(8, 8),
    crop_scale=(1.0, 1.0),
    flip_probability=0.0,
    rand_augment=None,
    mean=(0.5, 0.5, 0.5),
    std=(0.25, 0.5, 1.0),
)


def test_defaults_are_the_papers() -> None:
    transform = TrainTransform()
    assert transform.size == (224, 224)
    assert transform.crop_scale == (0.08, 1.0)
    assert transform.flip_probability == 0.5
    assert transform.rand_augment == RandAugment(operations=2, magnitude=12)
    assert transform.mean == (0.485, 0.456, 0.406)


def test_without_randomness_only_normalisation_remains() -> None:
    image = picture(1)
    expected = (torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255 - 0.5) / torch.tensor([0.25, 0.5, 1.0]).view(
        3, 1, 1
    )
    torch.testing.assert_close(PLAIN(image), expected[None])
    torch.testing.assert_close(PLAIN([image, image])[1], expected)


def test_flip_mirrors_left_and_right() -> None:
    flipped = TrainTransform(size=(8, 8), crop_scale=(1.0, 1.0), flip_probability=1.0, rand_augment=None)
    straight = TrainTransform(size=(8, 8), crop_scale=(1.0, 1.0), flip_probability=0.0, rand_augment=None)
    torch.testing.assert_close(flipped(picture(2)), straight(picture(2)).flip(-1))


def test_each_image_has_its_own_draws_and_a_seed_repeats_them() -> None:
    images = [picture(3, size=32)] * 6
    torch.manual_seed(0)
    first = TrainTransform(size=(16, 16))(images)
    assert first.shape == (6, 3, 16, 16)
    assert len({tuple(row.flatten().tolist()) for row in first}) == 6
    torch.manual_seed(0)
    assert torch.equal(first, TrainTransform(size=(16, 16))(images))


def test_crops_keep_to_their_scale() -> None:
    """On a left-to-right ramp, the range of values that a crop shows is its share of the width."""
    ramp = Image.fromarray(np.tile(np.arange(256, dtype=np.uint8), (256, 1))).convert("RGB")
    transform = TrainTransform(
        size=(32, 32), crop_scale=(0.25, 0.25), flip_probability=0, rand_augment=None, mean=(0, 0, 0), std=(1, 1, 1)
    )
    torch.manual_seed(0)
    crops = transform([ramp] * 20)
    widths = crops[:, 0].amax(dim=(1, 2)) - crops[:, 0].amin(dim=(1, 2))
    # A quarter of the area with an aspect ratio within 3/4..4/3 is 0.43..0.58 of the width.
    assert widths.min() > 0.38
    assert widths.max() < 0.62


def test_greyscale_and_matching() -> None:
    transform = TrainTransform.matching(ImagePreprocessing(size=(12, 10)), rand_augment=None)
    assert transform(picture(0, mode="L")).shape == (1, 3, 12, 10)
    assert transform.rand_augment is None
    assert transform.std == (0.229, 0.224, 0.225)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": (0, 8)}, "size must be"),
        ({"crop_scale": (0.0, 1.0)}, "crop_scale must be"),
        ({"crop_scale": (0.9, 0.5)}, "crop_scale must be"),
        ({"flip_probability": 1.5}, "flip_probability must be"),
        ({"std": (1.0, 0.0, 1.0)}, "std positive"),
        ({"interpolation": "lanczos"}, "interpolation must be"),
    ],
)
def test_settings_check_themselves(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainTransform(**settings)


def test_rand_augment_checks_itself() -> None:
    with pytest.raises(ConfigError, match=r"magnitude of 0\.\.30, got operations=2, magnitude=31"):
        RandAugment(magnitude=31)

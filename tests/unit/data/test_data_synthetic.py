"""OOD data made from ID data: the same shapes, corrupted in every way, deterministically."""

import pytest
import torch
from torch import Tensor

import hydra_ensembles as he
from hydra_ensembles.data.synthetic import IMAGE_DISTORTIONS, blur

CLS, SEP, PAD = 1, 2, 0


def pictures(count: int = 20, size: tuple[int, int] = (18, 14), dtype: torch.dtype = torch.float32) -> Tensor:
    """Coloured waves, not noise."""
    generator = torch.Generator().manual_seed(0)
    rows, columns = torch.linspace(0, 6, size[0])[:, None], torch.linspace(0, 4, size[1])
    phases = torch.rand(count, 3, 1, 1, generator=generator) * 6
    waves = torch.sin(rows + phases) + torch.cos(2 * columns + phases) + phases
    return (waves * 20 if dtype == torch.uint8 else waves).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_images_keep_their_shape_and_lose_their_sense(dtype: torch.dtype) -> None:
    images = pictures(dtype=dtype)
    made = he.data.synthetic_ood([(images[:7], torch.zeros(7)), {"pixel_values": images[7:], "name": ["a"] * 13}])
    assert made[1][0].keys() == {"pixel_values"}
    new = torch.cat([made[0][0], made[1][0]["pixel_values"]])
    assert (new.shape, new.dtype) == (images.shape, dtype)
    assert new.double().isfinite().all()
    changed = (new.double() - images.double()).flatten(1).abs().mean(1) / images.double().std()
    assert changed.min() > 0.05
    again = he.data.synthetic_ood([images])[0][0]  # batch boundaries do not matter
    assert torch.equal(again, new)
    assert not torch.equal(he.data.synthetic_ood([images], seed=1)[0][0], new)


def test_each_way_does_what_it_says() -> None:
    (image,) = pictures(1, (16, 16), torch.float64)
    shuffled, turned, blurred, noisy = (spoil(image, torch.Generator().manual_seed(3)) for spoil in IMAGE_DISTORTIONS)
    assert torch.equal(shuffled.flatten().sort().values, image.flatten().sort().values)
    assert torch.allclose(torch.fft.rfft2(turned).abs(), torch.fft.rfft2(image).abs(), atol=1e-9)
    assert torch.allclose(blurred.mean((1, 2)), image.mean((1, 2)))
    fine = torch.randn(image.shape, generator=torch.Generator().manual_seed(4), dtype=image.dtype)
    assert (blur(fine, torch.Generator()).std((1, 2)) < 0.3).all()
    assert ((noisy - image).std((1, 2)) / image.std((1, 2)) - 2).abs().max() < 0.5


def texts(count: int = 12, length: int = 9) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(5, 15, (count, length), generator=generator)
    lengths = torch.randint(6, length + 1, (count, 1), generator=generator)
    lengths[0] = length
    places = torch.arange(length)[None]
    ids[:, 0] = CLS
    ids = torch.where(places == lengths - 1, SEP, ids).masked_fill(places >= lengths, PAD)
    return {"input_ids": ids, "attention_mask": (places < lengths).long()}


def test_texts_keep_special_tokens_and_padding() -> None:
    batch = texts()
    ids, mask = batch["input_ids"], batch["attention_mask"].bool()
    ((made,),) = he.data.synthetic_ood([(batch, torch.zeros(12))])
    new = made["input_ids"]
    assert (new.shape, new.dtype) == (ids.shape, ids.dtype)
    assert torch.equal(made["attention_mask"], batch["attention_mask"])
    special = (ids == CLS) | (ids == SEP) | ~mask
    assert torch.equal(new[special], ids[special])
    assert not torch.isin(new[~special], torch.tensor([CLS, SEP, PAD])).any()
    for row in range(12):
        before, after = (one[row][~special[row]] for one in (ids, new))
        assert not torch.equal(before, after)
        if row % 2 == 0:
            assert before.sort().values.tolist() == after.sort().values.tolist()
        else:
            assert (before == after).any()

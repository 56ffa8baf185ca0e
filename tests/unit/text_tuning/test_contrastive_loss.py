import math

import pytest
import torch
from torch.nn import functional as F

from hydra_ensembles.training.text import LARGEST_SCALE, contrastive_loss, retrieval

SCALE = torch.tensor([math.log(1 / 0.07)])


def embeddings(count: int = 6, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    images, texts = (F.normalize(torch.randn(count, 5, generator=generator), dim=-1) for _ in range(2))
    return images, texts


@pytest.mark.parametrize("labels", [None, torch.tensor([3, 0, 7, 1, 2, 9])])
def test_pairs_that_stand_alone_have_the_loss_of_clip(labels):
    images, texts = embeddings()
    logits = SCALE.exp() * images @ texts.T
    target = torch.arange(6)
    expected = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
    torch.testing.assert_close(contrastive_loss(images, texts, SCALE, labels), expected)


def test_the_loss_is_that_of_open_clip():
    loss = pytest.importorskip("open_clip.loss")
    images, texts = embeddings()
    expected = loss.ClipLoss()(images, texts, SCALE.exp())
    torch.testing.assert_close(contrastive_loss(images, texts, SCALE), expected)


def test_positives_of_a_row_share_its_target_evenly():
    images, texts = embeddings(4)
    labels = torch.tensor([0, 1, 0, 0])
    log_probs = (SCALE.exp() * images @ texts.T).log_softmax(1)
    backward = (SCALE.exp() * texts @ images.T).log_softmax(1)
    rows = [[0, 2, 3], [1], [0, 2, 3], [0, 2, 3]]
    one, other = (
        -sum(part[row, columns].mean() for row, columns in enumerate(rows)) / 4 for part in (log_probs, backward)
    )
    torch.testing.assert_close(contrastive_loss(images, texts, SCALE, labels), (one + other) / 2)


def test_more_alike_pairs_of_a_class_lower_the_loss():
    images, _ = embeddings(4)
    labels = torch.tensor([0, 1, 0, 1])
    centres = F.normalize(torch.stack([images[labels == label].mean(0) for label in (0, 1)]), dim=-1)
    assert contrastive_loss(images, centres[labels], SCALE, labels) < contrastive_loss(
        images, centres[1 - labels], SCALE, labels
    )


def test_the_largest_scale_is_a_hundred():
    assert math.exp(LARGEST_SCALE) == pytest.approx(100.0, rel=1e-15)


def test_retrieval_finds_texts_of_the_same_class():
    images, texts = embeddings(5)
    labels = torch.tensor([0, 1, 0, 2, 1])
    probs = (SCALE.exp() * images @ texts.T).double().softmax(1)
    same = labels[:, None] == labels[None]
    accuracy, nll = retrieval(images, texts, SCALE, labels)
    assert accuracy == pytest.approx(same.gather(1, probs.argmax(1, keepdim=True)).double().mean().item())
    assert nll == pytest.approx(-(probs * same).sum(1).log().mean().item())
    alone, _ = retrieval(images, images, SCALE, None)
    assert alone == 1.0

"""Standalone experiments run on a tiny shape; what they depend on is checked against plain computation."""

import pytest
import torch
from torch.nn import functional as F

from architectures_clip import DUAL_CASES, DualCase
from studies import tower_scores
from zero_shot_models import NAMES as CLASSES
from zero_shot_models import TEMPLATES, dual_of

CASES = [case for case in DUAL_CASES if case.name in ("transformers-gelu", "open_clip-no-text-projection")]
SIZES = [5, 1, 5]  # unequal, so that the mean of batch means would differ


@pytest.mark.parametrize("case", CASES, ids=str)
def test_scores_of_both_towers_against_plain_autograd(case: DualCase, monkeypatch: pytest.MonkeyPatch) -> None:
    dual = dual_of(case).double()
    generator = torch.Generator().manual_seed(4)
    images = torch.randn(sum(SIZES), 3, 32, 32, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, len(CLASSES), (sum(SIZES),), generator=generator)
    batches = list(zip(images.split(SIZES), labels.split(SIZES), strict=True))
    monkeypatch.setattr(tower_scores, "PROMPTS_AT_ONCE", 2 * len(TEMPLATES))  # classes in several chunks
    scores = tower_scores.taylor_scores(dual, CLASSES, batches, TEMPLATES)
    texts = [dual.encode_text([one.replace("{label}", name) for name in CLASSES])[0] for one in TEMPLATES]
    classes = F.normalize(torch.stack(texts).mean(0), dim=-1)[None]
    F.cross_entropy(dual.logits(dual.encode_image(images), classes)[0], labels).backward()
    for name, tower in (("image", dual.image), ("text", dual.text)):
        weights = [block.attention.qkv for block in tower.encoder.layers]  # [H, 3, d_k, d]
        expected = torch.stack([(one.detach() * one.grad).abs().mean((1, 2, 3)) for one in weights])
        assert expected.min() > 0
        torch.testing.assert_close(scores[name], expected, rtol=1e-9, atol=0)

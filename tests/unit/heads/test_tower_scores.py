"""The Taylor scores of both towers that `benchmarks/tower_scores.py` computes and draws."""

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from architectures_clip import DUAL_CASES, DualCase
from zero_shot_models import NAMES, TEMPLATES, dual_of

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import tower_scores  # noqa: E402
import tower_scores_figure  # noqa: E402

sys.path.remove(str(BENCHMARKS))

CASES = [case for case in DUAL_CASES if case.name in ("transformers-gelu", "open_clip-no-text-projection")]
SIZES = [5, 1, 5]  # unequal, so that a mean of batch means would be another number


@pytest.mark.parametrize("case", CASES, ids=str)
def test_both_towers_against_plain_autograd(case: DualCase, monkeypatch: pytest.MonkeyPatch) -> None:
    dual = dual_of(case).double()
    generator = torch.Generator().manual_seed(4)
    images = torch.randn(sum(SIZES), 3, 32, 32, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, len(NAMES), (sum(SIZES),), generator=generator)
    batches = list(zip(images.split(SIZES), labels.split(SIZES), strict=True))
    monkeypatch.setattr(tower_scores, "PROMPTS_AT_ONCE", 2 * len(TEMPLATES))  # the classes in several parts
    scores = tower_scores.taylor_scores(dual, NAMES, batches, TEMPLATES)

    texts = [dual.encode_text([one.replace("{label}", name) for name in NAMES])[0] for one in TEMPLATES]
    classes = F.normalize(torch.stack(texts).mean(0), dim=-1)[None]
    F.cross_entropy(dual.logits(dual.encode_image(images), classes)[0], labels).backward()
    for name, tower in (("image", dual.image), ("text", dual.text)):
        expected = torch.stack([sensitivity(block.attention.qkv) for block in tower.encoder.layers])  # type: ignore
        assert expected.min() > 0
        torch.testing.assert_close(scores[name], expected, rtol=1e-9, atol=0)


def sensitivity(weight: Tensor) -> Tensor:
    """Mean of |W · dL/dW| of each head, `[H, 3, d_k, d]` to `[H]`."""
    assert weight.grad is not None
    return (weight.detach() * weight.grad).abs().mean((1, 2, 3))


def test_the_figure_and_the_table() -> None:
    pytest.importorskip("matplotlib")
    nan = float("nan")
    towers = {
        "image": {"layers": 4, "heads": 2, "scores": [[mean, nan] for mean in (1e-6, 2e-6, 3e-6, 4e-6)]},
        "text": {"layers": 2, "heads": 2, "scores": [[2e-6, nan], [1e-6, nan]]},
    }
    facts = {"model": "m", "images": 2000, "data": "d", "classes": 7, "hardware": "h", "versions": {"torch": "t"}}
    assert "image tower, 4 layers of 2 heads" in tower_scores_figure.drawing({"towers": towers})
    assert "at 1 of 2 places" in tower_scores_figure.rendered({"towers": towers, **facts})

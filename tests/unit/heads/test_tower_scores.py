"""Taylor scores of both towers: the image tower's are those of `taylor`, the text tower's those of plain autograd."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import hydra_ensembles as he
from architectures_clip import DUAL_CASES, DualCase
from hydra_ensembles.circuit.tower_scores import taylor_scores
from hydra_ensembles.errors import ConfigError, DataError
from zero_shot_models import NAMES, TEMPLATES, dual_of

CASES = {case.name: case for case in DUAL_CASES}
CASE = CASES["transformers-gelu"]
NOTED = [CASE, CASES["open_clip-nonscalar"], CASES["open_clip-no-text-projection"]]


def labelled(count: int = 11) -> list[tuple[Tensor, Tensor]]:
    """Batches of unequal size, in which a mean of batch means is another number."""
    generator = torch.Generator().manual_seed(4)
    images = torch.randn(count, 3, 32, 32, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, len(NAMES), (count,), generator=generator)
    return list(zip(images.split([5, 1, count - 6]), labels.split([5, 1, count - 6]), strict=True))


def double(case: DualCase = CASE) -> he.DualEncoder:
    return dual_of(case).double()


def slow_scores(dual: he.DualEncoder, templates: tuple[str, ...], tower: str) -> Tensor:
    """One backward pass from the loss of all samples, through both towers as they are; then a loop over heads."""
    images, labels = (torch.cat(part) for part in zip(*labelled(), strict=True))
    texts = [dual.encode_text([one.replace("{label}", name) for name in NAMES])[0] for one in templates]
    classes = F.normalize(torch.stack(texts).mean(0), dim=-1)[None]
    F.cross_entropy(dual.logits(dual.encode_image(images), classes)[0], labels).backward()
    ensemble: he.Ensemble = getattr(dual, tower)
    table = torch.zeros(ensemble.num_layers, ensemble.num_heads, dtype=torch.float64)
    for layer, block in enumerate(ensemble.encoder.layers):
        weight = block.attention.qkv  # type: ignore[union-attr]
        for head in range(ensemble.num_heads):
            parts = [(weight[head, part] * weight.grad[head, part]).abs().mean() for part in range(3)]
            table[layer, head] = sum(parts) / 3
    return table


@pytest.mark.parametrize("case", NOTED, ids=str)
@pytest.mark.parametrize("templates", [TEMPLATES[:1], TEMPLATES])
def test_both_towers_against_plain_autograd(case: DualCase, templates: tuple[str, ...]) -> None:
    scores = taylor_scores(double(case), NAMES, labelled(), templates)
    for tower in ("image", "text"):
        expected = slow_scores(double(case), templates, tower)
        assert expected.min() > 0
        torch.testing.assert_close(scores[tower], expected, rtol=1e-9, atol=0)  # type: ignore[literal-required]


def test_the_image_tower_has_the_scores_that_rank_its_heads() -> None:
    dual = double()
    scores = taylor_scores(dual, NAMES, labelled(), TEMPLATES)["image"]
    ranking = he.taylor(he.zero_shot(dual, NAMES, TEMPLATES), labelled(), budget=1, scope="global")
    assert len(ranking.heads) == scores.numel()
    assert [float(scores[head.layer, head.head]) for head in ranking.heads] == pytest.approx(ranking.scores, rel=1e-12)


def test_few_classes_at_a_time_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = taylor_scores(double(), NAMES, labelled(), TEMPLATES)["text"]
    monkeypatch.setattr("hydra_ensembles.circuit.tower_scores._PROMPTS_AT_ONCE", 1)
    torch.testing.assert_close(taylor_scores(double(), NAMES, labelled(), TEMPLATES)["text"], whole, rtol=1e-9, atol=0)


def test_pruned_heads_have_no_score_and_the_others_that_of_the_smaller_model() -> None:
    dual = double()
    layer = [he.Head(1, head, "text") for head in range(dual.text.num_heads)]  # a layer without any head
    pruned = he.prune(dual, [he.Head(0, 2, "image"), *layer])
    scores = taylor_scores(pruned, NAMES, labelled())
    assert scores["image"].isnan().nonzero().tolist() == [[0, 2]]
    assert scores["text"].isnan().nonzero().tolist() == [[1, head.head] for head in layer]
    with he.masked(dual, [he.Head(0, 2, "image"), *layer]):
        masked = taylor_scores(dual, NAMES, labelled())
    for tower, table in masked.items():
        left = ~scores[tower].isnan()
        torch.testing.assert_close(scores[tower][left], table[left], rtol=1e-9, atol=0)


def test_the_dual_encoder_is_left_alone() -> None:
    dual = dual_of(CASE).train()
    before = {name: tensor.clone() for name, tensor in dual.state_dict().items()}
    batches = [(images.float(), labels) for images, labels in labelled()]
    with torch.inference_mode():
        scores = taylor_scores(dual, NAMES, batches)
    assert {tower: tuple(table.shape) for tower, table in scores.items()} == {"image": (2, 4), "text": (2, 4)}
    assert all(torch.equal(tensor, before[name]) for name, tensor in dual.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in dual.parameters())
    assert dual.training


def test_what_is_refused() -> None:
    dual = dual_of(CASE)
    with pytest.raises(ConfigError, match="towers of a DualEncoder, got a Ensemble"):
        taylor_scores(he.zero_shot(dual, NAMES), NAMES, labelled())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="2 members"):
        taylor_scores(he.DualEncoder.stack([dual, dual]), NAMES, labelled())
    with pytest.raises(DataError, match="no samples"):
        taylor_scores(dual, NAMES, [])
    images, labels = labelled()[0]
    with pytest.raises(DataError, match="loss of nan"):
        taylor_scores(dual, NAMES, [(images.float() * torch.nan, labels)])

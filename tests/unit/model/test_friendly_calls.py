"""Models called as users of transformers call them: by the names of tokenizers and processors, and with raw inputs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import hydra_ensembles as he
from architectures import images, timm_model
from architectures_clip import texts, transformers_clip
from architectures_transformers import TEXT, token_batch, transformers_model
from hydra_ensembles.errors import DataError

SEEDED = torch.Generator().manual_seed(0)


def text_model() -> he.Ensemble:
    return he.convert(transformers_model("BertForSequenceClassification", "BertConfig", TEXT))


def image_model() -> he.Ensemble:
    processor = he.ImagePreprocessing(size=(32, 32))
    return he.convert(timm_model("vit_tiny_patch16_224"), processor=processor)


@pytest.mark.parametrize("kind", ["text", "image"])
def test_batches_by_their_names(kind: str) -> None:
    model = text_model() if kind == "text" else image_model()
    batch: dict[str, Any] = token_batch(0, segments=True) if kind == "text" else images(32, 32)
    fast = model.optimize()
    with torch.no_grad():
        assert torch.equal(model(**batch), model(batch))
        assert torch.equal(model.features(**batch), model.features(batch))
    assert torch.equal(model.predict(**batch).probs, model.predict(batch).probs)
    assert torch.equal(fast(**batch), fast(batch))
    assert torch.equal(fast.predict(**batch).probs, fast.predict(batch).probs)
    dropping = he.mc_dropout(model, 0.1, 2)
    assert torch.equal(dropping.predict(**batch).probs, dropping.predict(batch).probs)
    main, *_ = batch.values()
    assert torch.equal(model.predict(main, **dict(list(batch.items())[1:])).probs, model.predict(batch).probs)


def test_both_inputs_of_a_dual_encoder_by_their_names() -> None:
    dual = he.convert(transformers_clip({}, {}))
    pixels, tokens = images(32, 32), texts(59, 1, mask=True)
    with torch.no_grad():
        assert torch.equal(dual(**pixels, **tokens), dual(pixels, tokens))
        assert torch.equal(dual(pixels, **tokens), dual(pixels, tokens))
        assert torch.equal(dual.encode_image(**pixels), dual.encode_image(pixels))
        assert torch.equal(dual.encode_text(**tokens), dual.encode_text(tokens))


@pytest.mark.parametrize(
    ("call", "token"),
    [
        (lambda model, ids: model.predict(ids, input_ids=ids), "twice"),
        (lambda model, ids: model.predict(input_ids=ids, attention_masks=ids), "attention_masks"),
        (lambda model, ids: model.predict(attention_mask=ids), "input_ids"),
        (lambda model, ids: model.predict(), "got"),
        (lambda model, ids: model("a text"), "preprocessing"),
    ],
)
def test_names_that_are_wrong_are_said(call: Any, token: str) -> None:
    with pytest.raises(DataError, match=token):
        call(text_model(), token_batch(0, segments=False)["input_ids"])


def test_a_saved_model_is_loaded_and_called_with_pictures(tmp_path: Path) -> None:
    picture = Image.fromarray(torch.randint(256, (40, 36, 3), dtype=torch.uint8, generator=SEEDED).numpy())
    image_model().save_pretrained(tmp_path / "vit")
    he.convert(transformers_clip({}, {})).save_pretrained(tmp_path / "clip")
    loaded = he.load(tmp_path / "vit")
    with torch.no_grad():
        for given in (picture, [picture, picture]):
            assert torch.equal(loaded(given), loaded(loaded.prepare(given)))
            assert torch.equal(loaded.optimize()(given), loaded.optimize()(loaded.prepare(given)))
    assert isinstance(he.load(tmp_path / "clip"), he.DualEncoder)
    with pytest.raises(he.HydraError, match=r"he\.load"):
        he.Ensemble.from_pretrained(tmp_path / "clip")

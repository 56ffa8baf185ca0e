"""What of CLIP is refused, and where the preprocessing of its towers comes from."""

from typing import Any

import pytest
import torch
from torch import nn

import hydra_ensembles as he
from architectures_clip import open_clip_from_timm, open_clip_model, transformers_clip
from hydra_ensembles.errors import ConversionError
from hydra_ensembles.preprocessing import ImagePreprocessing

# --- refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: open_clip_model({"patch_dropout": 0.5}), "drops patches"),
        (lambda: open_clip_model({"attentional_pool": True}), "pools by attention"),
        (lambda: open_clip_model({"pool_type": "none"}), "pool_type is 'none'"),
        (lambda: open_clip_model({"scale_heads": True}), "attention is scaled"),
        (lambda: open_clip_model({"scale_fc": True}), "norm of its own"),
        (lambda: open_clip_model({"layers": (1, 1, 1, 1)}), "the image tower is a .*ModifiedResNet"),
        (lambda: open_clip_model(text={"embed_cls": True}, custom=True), "class token is appended"),
        (lambda: open_clip_model(text={"pool_type": "none"}), "pool_type is 'none'"),
        (lambda: open_clip_model(text={"output_tokens": True}, custom=True), "output_tokens"),
        (lambda: open_clip_model(text={"scaled_cosine_attn": True}), "attention is scaled"),
        (lambda: open_clip_from_timm("vit_base_patch16_224", "token", "mlp"), r"head is made of \['mlp'\]"),
        (lambda: transformers_clip({"hidden_act": "tanh"}, {}), "activation 'tanh' is not supported"),
    ],
)
def test_what_cannot_be_represented_is_refused(build: Any, message: str) -> None:
    with pytest.raises(ConversionError, match=message):
        he.convert(build())


def test_unknown_parameters_are_refused() -> None:
    for custom in (False, True):
        model = open_clip_model(custom=custom)
        model.register_parameter("adapter", nn.Parameter(torch.zeros(3)))
        with pytest.raises(ConversionError, match=r"no canonical place: \['adapter'\]"):
            he.convert(model)


def test_mixed_dtypes_are_refused() -> None:
    model = open_clip_model()
    model.visual.ln_post.to(torch.bfloat16)  # type: ignore[union-attr]
    with pytest.raises(ConversionError, match=r"different types.*model\.float\(\)"):
        he.convert(model)


def test_a_dual_encoder_takes_no_labels() -> None:
    with pytest.raises(ConversionError, match="has no classifier"):
        he.convert(open_clip_model(), num_labels=3)
    with pytest.raises(ConversionError, match="has no classifier"):
        he.convert(open_clip_model(), labels=["a"])


def test_an_unknown_text_tower_is_named() -> None:
    model = open_clip_model(custom=True)
    model.text = nn.Linear(2, 2)
    with pytest.raises(ConversionError, match=r"the text tower is a .*Linear.*supported are"):
        he.convert(model)


# --- preprocessing ---------------------------------------------------------------------------------------


def test_image_preprocessing_is_open_clips_own() -> None:
    model = open_clip_model()
    plain = he.convert(model).image.metadata.preprocessing
    assert (plain.size, plain.interpolation, plain.resize_mode) == ((32, 32), "bicubic", "shortest")
    assert plain.mean[0] == pytest.approx(0.48145466)
    settings = {
        "size": 32,
        "mean": (0.5,) * 3,
        "std": (0.25,) * 3,
        "interpolation": "bilinear",
        "resize_mode": "squash",
    }
    model.visual.preprocess_cfg = settings  # type: ignore[union-attr,assignment]
    read = he.convert(model).image.metadata.preprocessing
    expected = ImagePreprocessing((32, 32), (0.5,) * 3, (0.25,) * 3, interpolation="bilinear", resize_mode="squash")
    assert read == expected
    model.visual.preprocess_cfg = {**settings, "resize_mode": "longest"}  # type: ignore[union-attr,assignment]
    assert he.convert(model).image.metadata.preprocessing is None


def test_processors_find_their_tower() -> None:
    model = open_clip_model()
    image = ImagePreprocessing((32, 32), crop_fraction=0.5)
    dual = he.convert(model, processor=[image])
    assert dual.image.metadata.preprocessing == image
    assert dual.text.metadata.preprocessing is None
    assert dual.image.metadata.source == "open_clip CLIP (open_clip.model.CLIP)"
    assert dual.text.metadata.history == ("converted from open_clip CLIP",)


def test_every_tensor_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tower is built around its weights one time, and stands apart from the model it came from."""
    model, built = open_clip_model(), []
    from_state = he.Ensemble.from_state
    monkeypatch.setattr(he.Ensemble, "from_state", lambda *given: built.append(given[0]) or from_state(*given))
    dual = he.convert(model)
    assert len(built) == 2
    theirs = {parameter.data_ptr() for parameter in model.parameters()}
    assert not theirs & {parameter.data_ptr() for parameter in dual.parameters()}
    assert all(parameter.is_contiguous() for parameter in dual.parameters())

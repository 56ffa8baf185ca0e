"""SigLIP and SigLIP 2 of transformers: classifier, both towers alone, and the dual encoder with its sigmoid's bias."""

from typing import Any

from torch import Tensor

from ..model.config import EnsembleConfig, ReadoutConfig, TextStemConfig, all_heads
from .clip import HF_LAYERS, DualArchitecture
from .core import (
    POOLING,
    Architecture,
    Inputs,
    Weights,
    activation_of,
    attention,
    below,
    either,
    number_of_classes,
    refuse,
    run,
)
from .transformers import metadata_of_classifier, patch_stem, read_classes, read_encoder

_MODULE = "transformers.models.siglip.modeling_siglip.Siglip"
_IMAGE, _TEXT = "transformers SigLIP image tower", "transformers SigLIP text tower"


_IMAGE_TOWER: Weights = {
    "stem.patch": "embeddings.patch_embedding.weight",
    "stem.patch_bias": "embeddings.patch_embedding.bias",
    "stem.position": "embeddings.position_embedding.weight",
    **HF_LAYERS,
    "readout.norm": "post_layernorm",
    "readout.map.query_token": "head.probe",
    **attention("head.attention.out_proj", "head.attention.in_proj_*", place=POOLING),
    "readout.map.norm": "head.layernorm",
    "readout.map.up": "head.mlp.fc1",
    "readout.map.down": "head.mlp.fc2",
}
_TEXT_TOWER: Weights = {
    "stem.words": "embeddings.token_embedding.weight",
    "stem.positions": "embeddings.position_embedding.weight",
    **HF_LAYERS,
    "readout.norm": "final_layer_norm",
    "readout.classifier": "head",
}


def _image_config(model: Any, num_labels: int | None) -> EnsembleConfig:
    found = getattr(model.config, "vision_config", model.config)
    stem = patch_stem(found, "bicubic", class_token=False, position_prefix=0)
    encoder = read_encoder(found, _IMAGE, attention_dropout=float(found.attention_dropout))
    if hasattr(model, "classifier"):  # which reads the mean patch: the attention that pools takes no part
        classes, bias = read_classes(model, model.classifier, num_labels, _IMAGE)
        mean = ReadoutConfig(pool="mean", num_classes=classes, norm_eps=encoder.norm_eps, bias=bias)
        return EnsembleConfig(stem, encoder, mean, all_heads(encoder))
    if not getattr(found, "vision_use_head", True):
        raise refuse(_IMAGE, "it has no attention that pools an image (vision_use_head), so it gives no features")
    readout = ReadoutConfig(
        pool="map",
        num_classes=number_of_classes(0, num_labels, _IMAGE),
        norm_eps=encoder.norm_eps,
        map_heads=encoder.heads,
        map_mlp_width=encoder.mlp_width,
        map_activation=activation_of(found.hidden_act, _IMAGE),
    )
    return EnsembleConfig(stem, encoder, readout, all_heads(encoder))


def _text_config(model: Any, num_labels: int | None) -> EnsembleConfig:
    """The text tower reads the token at the last place, which is padding in all but the longest texts."""
    model = getattr(model, "text_model", model)  # releases of transformers 5 differ, here and in their classes
    found, embeddings = model.config, model.embeddings
    stem = TextStemConfig(
        vocabulary=embeddings.token_embedding.num_embeddings,
        positions=embeddings.position_embedding.num_embeddings,
        embedding_width=int(found.hidden_size),
        norm=False,
    )
    encoder = read_encoder(found, _TEXT, attention_dropout=float(found.attention_dropout))
    classes = number_of_classes(model.head.out_features, num_labels, _TEXT)
    bias = model.head.bias is not None
    readout = ReadoutConfig(pool="final", num_classes=classes, norm_eps=encoder.norm_eps, bias=bias)
    return EnsembleConfig(stem, encoder, readout, all_heads(encoder))


def _answer(model: Any, inputs: Inputs, fresh: bool) -> Tensor:
    output = run(model, **inputs)
    return output.logits if hasattr(output, "logits") else output.pooler_output


_IMAGES = Architecture(
    name=_IMAGE,
    classes=(f"{_MODULE}VisionModel", f"{_MODULE}VisionTransformer"),
    config=_image_config,
    weights=either(_IMAGE_TOWER, below("vision_model.", _IMAGE_TOWER)),
    answer=_answer,
)
_CLASSIFIER = Architecture(
    name="transformers SigLIP classifier",
    classes=(f"{_MODULE}ForImageClassification",),
    config=_image_config,
    weights={**below("vision_model.", _IMAGE_TOWER), "readout.classifier": "classifier"},
    ignored=("vision_model.head.",),
    metadata=metadata_of_classifier,
    answer=_answer,
)
_TEXTS = Architecture(
    name=_TEXT,
    classes=(f"{_MODULE}TextModel", f"{_MODULE}TextTransformer"),
    config=_text_config,
    weights=either(_TEXT_TOWER, below("text_model.", _TEXT_TOWER)),
    answer=_answer,
    masks=False,
)

ARCHITECTURES: tuple[Architecture, ...] = (_IMAGES, _CLASSIFIER, _TEXTS)
DUAL_ARCHITECTURES: tuple[DualArchitecture, ...] = (
    DualArchitecture(
        name="transformers SigLIP",
        classes=(f"{_MODULE}Model",),
        image=(("vision_model", _IMAGES),),
        text=(("text_model", _TEXTS),),
    ),
)

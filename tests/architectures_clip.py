"""Small random CLIP models of transformers and open_clip, whole and as single towers."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from architectures import BLOCKS, ArchitectureCase, Inputs, images, perturbed
from architectures_transformers import text_case, transformers_model, vision_case

CONTEXT = 12
VOCABULARY = 60
END = 59  # also the highest id, so that both ways of finding the end of a text agree


@dataclass(frozen=True)
class DualCase:
    """One dual encoder of one library.

    Attributes:
        name: Shown in the test's name.
        build: Returns a small random model in eval mode, no parameter left at zero or one.
        texts: A batch of padded token ids; with a mask where the library takes one.
        image_features: Returns the original's image features, before normalisation.
        text_features: Returns the original's text features, before normalisation.
        logits: The original's logits per image.
        other_sizes: Further image sizes that the library itself accepts.
    """

    name: str
    build: Callable[[], nn.Module]
    texts: Callable[[], Inputs]
    image_features: Callable[[Any, Tensor], Tensor]
    text_features: Callable[[Any, Inputs], Tensor]
    logits: Callable[[Any, Tensor, Inputs], Tensor]
    other_sizes: tuple[tuple[int, int], ...] = ()

    def __str__(self) -> str:
        return self.name

    @staticmethod
    def pixels(height: int = 32, width: int = 32) -> Tensor:
        return images(height, width)["pixel_values"]


def texts(end: int, pad: int, mask: bool) -> Inputs:
    """Four texts of different lengths, each with its end token, then padding."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(5, END - 4, (4, CONTEXT), generator=generator)
    ends = torch.tensor([CONTEXT - 1, 6, 3, 1])
    positions = torch.arange(CONTEXT)[None]
    ids = ids.masked_fill(positions == ends[:, None], end).masked_fill(positions > ends[:, None], pad)
    inputs = {"input_ids": ids}
    if mask:
        inputs["attention_mask"] = (positions <= ends[:, None]).long()
    return inputs


# --- transformers ----------------------------------------------------------------------------------------

_COMMON: dict[str, Any] = {**BLOCKS, "projection_dim": 24}
_IMAGE = {**_COMMON, "hidden_size": 48, "intermediate_size": 80, "image_size": 32, "patch_size": 8}
_WORDS = {"vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT}
_ENDS = {"eos_token_id": END, "bos_token_id": END - 1, "pad_token_id": 1}
_TEXT = {**_COMMON, **_WORDS, **_ENDS, "hidden_size": 32, "intermediate_size": 72}


def transformers_clip(image: dict[str, Any], text: dict[str, Any], **settings: Any) -> nn.Module:
    towers = {"text_config": {**_TEXT, **text}, "vision_config": {**_IMAGE, **image}}
    return transformers_model("CLIPModel", {**towers, "projection_dim": 24, **settings})


def _transformers_case(
    label: str, build: Callable[[], nn.Module], *, end: int = END, pad: int = 1, mask: bool = True
) -> DualCase:
    resized = {"interpolate_pos_encoding": True}
    return DualCase(
        name=f"transformers-{label}",
        build=build,
        texts=lambda: texts(end, pad, mask),
        image_features=lambda model, pixels: model.get_image_features(pixels, **resized).pooler_output,
        text_features=lambda model, inputs: model.get_text_features(**inputs).pooler_output,
        logits=lambda model, pixels, inputs: model(pixel_values=pixels, **resized, **inputs).logits_per_image,
        other_sizes=((48, 48), (24, 40), (16, 64)),
    )


_SIGLIP_BLOCKS = {**BLOCKS, "hidden_size": 32, "intermediate_size": 72, "hidden_act": "gelu_pytorch_tanh"}
SIGLIP_TEXT: dict[str, Any] = {**_SIGLIP_BLOCKS, **_WORDS, **_ENDS, "projection_size": 32}
SIGLIP_IMAGE: dict[str, Any] = {**_SIGLIP_BLOCKS, "image_size": 32, "patch_size": 8}


def transformers_metaclip() -> nn.Module:
    towers = {"text_config": _TEXT, "vision_config": _IMAGE}
    return transformers_model("MetaClip2Model", {**towers, "projection_dim": 24})


def transformers_siglip() -> nn.Module:
    towers = {"text_config": SIGLIP_TEXT, "vision_config": SIGLIP_IMAGE}
    return transformers_model("SiglipModel", towers)


# --- open_clip -------------------------------------------------------------------------------------------

_OPEN_IMAGE: dict[str, Any] = {"layers": 2, "width": 48, "head_width": 12, "patch_size": 8, "image_size": 32}
_OPEN_WORDS: dict[str, Any] = {"context_length": CONTEXT, "vocab_size": VOCABULARY}
_OPEN_TEXT = {**_OPEN_WORDS, "width": 32, "heads": 4, "layers": 2}


def open_clip_model(
    image: dict[str, Any] | None = None, text: dict[str, Any] | None = None, custom: bool = False, **settings: Any
) -> nn.Module:
    with warnings.catch_warnings(action="ignore"):
        from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg, CustomTextCLIP

    torch.manual_seed(0)
    kind = CustomTextCLIP if custom else CLIP
    vision = CLIPVisionCfg(**{**_OPEN_IMAGE, **(image or {})})
    return perturbed(kind(24, vision, CLIPTextCfg(**{**_OPEN_TEXT, **(text or {})}), **settings))


def open_clip_from_timm(name: str, pool: str, projection: str, heads: int = 4, **settings: Any) -> nn.Module:
    """A model whose image tower is a small timm model; open_clip builds it by name, so its size is set here."""
    import timm

    create = timm.create_model
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": heads}

    def small(model: str, **arguments: Any) -> nn.Module:
        return create(model, **{**sizes, **arguments})

    image = {"timm_model_name": name, "timm_pool": pool, "timm_proj": projection, "image_size": 32, **settings}
    timm.create_model = small
    try:
        with warnings.catch_warnings(action="ignore"):
            return open_clip_model(image, custom=True, init_logit_bias=-10.0)
    finally:
        timm.create_model = create


def _open_clip_case(
    label: str, build: Callable[[], nn.Module], *, end: int = END, sizes: tuple[tuple[int, int], ...] = ()
) -> DualCase:
    return DualCase(
        name=f"open_clip-{label}",
        build=build,
        texts=lambda: texts(end, 0, mask=False),
        image_features=lambda model, pixels: model.encode_image(pixels),
        text_features=lambda model, inputs: model.encode_text(inputs["input_ids"]),
        logits=lambda model, pixels, inputs: model.get_logits(pixels, inputs["input_ids"])[0],
        other_sizes=sizes,
    )


_SIGLIP_KINDS = {"norm_kwargs": {"eps": 1e-6}, "act_kwargs": {"approximate": "tanh"}}
_SIGLIP_TEXT = {**_SIGLIP_KINDS, "no_causal_mask": True, "pool_type": "last", "proj_bias": True}
DUAL_CASES: list[DualCase] = [
    _transformers_case("quickgelu", lambda: transformers_clip({}, {})),
    _transformers_case("gelu", lambda: transformers_clip({"hidden_act": "gelu"}, {"hidden_act": "gelu"})),
    _transformers_case("legacy-end", lambda: transformers_clip({"layer_norm_eps": 1e-3}, {"eos_token_id": 2})),
    _transformers_case("end-not-highest", lambda: transformers_clip({}, {"eos_token_id": 4}), end=4),
    _transformers_case("padded-with-end", lambda: transformers_clip({}, {"pad_token_id": END}), pad=END),
    _transformers_case("no-mask", lambda: transformers_clip({"num_channels": 3}, {}), mask=False),
    _transformers_case("same-widths", lambda: transformers_clip({"hidden_size": 32}, {"num_hidden_layers": 3})),
    _transformers_case("siglip", transformers_siglip),
    _transformers_case("metaclip", transformers_metaclip),
    _open_clip_case("plain", open_clip_model),
    _open_clip_case("quickgelu", lambda: open_clip_model(quick_gelu=True)),
    _open_clip_case("mean", lambda: open_clip_model({"pool_type": "avg", "no_ln_pre": True})),
    _open_clip_case("norm-after-pool", lambda: open_clip_model({"pool_type": "avg", "final_ln_after_pool": True})),
    _open_clip_case("layer-scale", lambda: open_clip_model({"ls_init_value": 0.3}, {"ls_init_value": 0.2})),
    _open_clip_case("qk-norm", lambda: open_clip_model({"qk_norm": True}, {"qk_norm": True})),
    _open_clip_case("end-token", lambda: open_clip_model(text={"pool_type": "eos", "eos_id": 4}), end=4),
    _open_clip_case("first-token", lambda: open_clip_model(text={"pool_type": "first", "no_causal_mask": True})),
    _open_clip_case("nonscalar", lambda: open_clip_model(nonscalar_logit_scale=True, init_logit_bias=-3.0)),
    _open_clip_case("sincos", lambda: open_clip_model({"pos_embed_type": "sin_cos_2d"})),
    _open_clip_case("oblong", lambda: open_clip_model({"image_size": (32, 32), "patch_size": (8, 16)})),
    _open_clip_case("custom", lambda: open_clip_model(text={"layers": 3}, custom=True, init_logit_bias=-3.0)),
    _open_clip_case("custom-siglip-text", lambda: open_clip_model(text=_SIGLIP_TEXT, custom=True)),
    _open_clip_case(
        "no-text-projection", lambda: open_clip_model(text={"width": 24, "proj_type": "none"}, custom=True)
    ),
    _open_clip_case("timm-linear", lambda: open_clip_from_timm("vit_base_patch16_224", "token", "linear")),
    _open_clip_case(
        "timm-linear-bias",
        lambda: open_clip_from_timm("vit_base_patch16_clip_224", "avg", "linear", timm_proj_bias=True, timm_drop=0.1),
    ),
    _open_clip_case("timm-own-head", lambda: open_clip_from_timm("vit_base_patch16_224", "token", "")),
    _open_clip_case("timm-siglip", lambda: open_clip_from_timm("vit_base_patch16_siglip_224", "map", "none")),
]


# --- single towers ---------------------------------------------------------------------------------------


_WHOLE = {"text_config": _TEXT, "vision_config": _IMAGE, "num_labels": 5}
SIGLIP_CLASSIFIER = {"text_config": SIGLIP_TEXT, "vision_config": SIGLIP_IMAGE, "num_labels": 5}
_POOLED = "pooler_output"
_ENDED = partial(texts, END, 1, mask=True)
TOWER_CASES: list[ArchitectureCase] = [
    vision_case("clip-image", "CLIPVisionModel", _IMAGE, _POOLED),
    vision_case("clip-image-projected", "CLIPVisionModelWithProjection", _IMAGE, "image_embeds"),
    # the classifier does not pass on the request to resample positions
    vision_case("clip-image-classifier", "CLIPForImageClassification", _WHOLE, resize=False, sizes=()),
    text_case("clip-text", "CLIPTextModel", _TEXT, _POOLED, _ENDED),
    text_case("clip-text-projected", "CLIPTextModelWithProjection", _TEXT, "text_embeds", _ENDED),
    text_case("clip-siglip-text", "SiglipTextModel", SIGLIP_TEXT, _POOLED, _ENDED),
    ArchitectureCase("open_clip-image", lambda: open_clip_model().visual),  # type: ignore[arg-type,return-value]
    ArchitectureCase(
        name="open_clip-text",
        build=lambda: open_clip_model(custom=True).text,  # type: ignore[return-value]
        inputs=lambda: texts(END, 0, mask=False),
        kind="text",
    ),
]
_META_TEXT = {**_TEXT, "eos_token_id": 2}  # as in the released checkpoints
_SIGLIP = "SiglipForImageClassification"
TOWER_VARIANTS: list[ArchitectureCase] = [  # variants of architectures in the cases above
    vision_case("clip-meta-image", "MetaClip2VisionModel", _IMAGE, _POOLED),
    text_case(*("clip-meta-text", "MetaClip2TextModel", _META_TEXT, _POOLED), inputs=partial(texts, 2, 1, mask=True)),
    vision_case("clip-siglip-image", "SiglipVisionModel", SIGLIP_IMAGE, _POOLED),
    vision_case("clip-siglip-classifier", _SIGLIP, SIGLIP_CLASSIFIER, resize=False, sizes=()),
]

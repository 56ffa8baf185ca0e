"""Small random models of every supported architecture, for the tests that run once per architecture."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

Module = TypeVar("Module", bound=nn.Module)
Inputs = dict[str, Tensor]
BLOCKS = {"num_hidden_layers": 2, "num_attention_heads": 4}  # transformers' names


def images(height: int = 32, width: int = 32, batch: int = 3, seed: int = 1) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    return {"pixel_values": torch.randn(batch, 3, height, width, generator=generator)}


@dataclass(frozen=True, eq=False)
class ArchitectureCase:
    """One architecture of one library.

    Attributes:
        name: Shown in the test's name.
        build: Returns a small random model in eval mode, dropout 0, no parameter left at zero or one.
        inputs: A batch, under the names transformers uses (`pixel_values`, or `input_ids` with masks).
        logits: Returns the original model's logits.
        kind: Image or text.
        convert_kwargs: Arguments of `convert` besides the model.
        other_inputs: Batches of other image sizes that the library itself accepts.
        one_layer: Whether the original reuses one layer (ALBERT): its gradient is the sum of the copies' gradients.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Inputs] = images
    logits: Callable[[nn.Module, Inputs], Tensor] = lambda model, inputs: model(next(iter(inputs.values())))
    kind: Literal["image", "text"] = "image"
    convert_kwargs: Mapping[str, Any] = field(default_factory=dict)
    other_inputs: tuple[Callable[[], Inputs], ...] = ()
    one_layer: bool = False

    def __str__(self) -> str:
        return self.name


def perturbed(model: Module, seed: int = 0, noise: float = 0.05) -> Module:
    """Add noise to every parameter, so that a lost bias or LayerScale changes the output."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * noise)
    return model.eval()


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest expected value."""
    return ((actual - expected).abs().max() / expected.abs().max()).item()


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-5) -> bool:
    return relative_error(actual, expected) <= tolerance


def timm_model(name: str, **settings: Any) -> nn.Module:
    import timm

    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4, "num_classes": 5}
    with warnings.catch_warnings(action="ignore"):
        return perturbed(timm.create_model(name, **{**sizes, **settings}))


def _timm_case(label: str, name: str, other: tuple[tuple[int, int], ...] = (), **settings: Any) -> ArchitectureCase:
    size = settings.get("img_size", 32)
    return ArchitectureCase(
        name=f"timm-{label}",
        build=lambda: timm_model(name, **settings),
        inputs=partial(images, size, size),
        other_inputs=tuple(partial(images, *one) for one in other),
    )


def torchvision_model(**changes: Any) -> nn.Module:
    import torchvision

    torch.manual_seed(0)
    return perturbed(torchvision.models.VisionTransformer(32, 8, 2, 4, 32, 64, num_classes=5, **changes))


_DINO = {"img_size": 28, "patch_size": 7}
VISION_CASES: list[ArchitectureCase] = [
    _timm_case("vit", "vit_base_patch16_224"),
    _timm_case("vit-dynamic", "vit_base_patch16_224", ((48, 32), (24, 40)), dynamic_img_size=True),
    _timm_case("augreg-qknorm-avg", "vit_base_patch16_224", qk_norm=True, global_pool="avg", init_values=0.1),
    _timm_case("deit3", "deit3_base_patch16_224"),
    _timm_case("deit-distilled", "deit_base_distilled_patch16_224", ((40, 40),), dynamic_img_size=True),
    _timm_case("dinov2", "vit_small_patch14_dinov2", ((42, 28),), dynamic_img_size=True, **_DINO),
    _timm_case("dinov2-registers", "vit_small_patch14_reg4_dinov2", **_DINO),
    _timm_case("dinov2-swiglu", "vit_giant_patch14_dinov2", **_DINO),
    _timm_case("clip", "vit_base_patch16_clip_224"),
    _timm_case("clip-quickgelu", "vit_base_patch16_clip_quickgelu_224"),
    _timm_case("siglip", "vit_base_patch16_siglip_224"),
    _timm_case("siglip-gap", "vit_base_patch16_siglip_gap_224"),
    _timm_case("eva", "eva_giant_patch14_224", init_values=0.1),
    _timm_case("eva02", "eva02_base_patch14_224", ((48, 32), (24, 40)), dynamic_img_size=True),
    _timm_case("dinov3", "vit_small_patch16_dinov3", ((48, 32), (24, 40)), qkv_bias=True, init_values=0.1),
    _timm_case("pe-core", "vit_pe_core_tiny_patch16_384", attn_pool_num_heads=2, qk_norm=True),
    ArchitectureCase("torchvision-vit", torchvision_model),
]
VISION_VARIANTS: list[ArchitectureCase] = [  # variants of architectures in the cases above
    _timm_case("prefix-pooled", "vit_base_patch16_224", global_pool="avg", reg_tokens=2, pool_include_prefix=True),
    _timm_case("eva02-packed", "eva02_tiny_patch14_224"),
    _timm_case("eva02-no-positions", "eva02_base_patch14_224", use_abs_pos_emb=False, use_rot_pos_emb=False),
]

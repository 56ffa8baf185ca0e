"""Models with rotary positions: what is read of them, and what is refused."""

from typing import Any

import pytest
import torch

import hydra_ensembles as he
from architectures import VISION_CASES, ArchitectureCase, timm_model
from hydra_ensembles.errors import ConversionError

EVA02, DINOV3 = "eva02_base_patch14_224", "vit_small_patch16_dinov3"
DOUBLE = [case for case in VISION_CASES if case.name in ("timm-eva02", "timm-dinov3")]


@pytest.mark.parametrize("case", DOUBLE, ids=str)
def test_models_of_double_precision_are_read_too(case: ArchitectureCase) -> None:
    assert he.convert(case.build().double()).dtype is torch.float64


@pytest.mark.parametrize(
    ("name", "settings", "token"),
    [
        (EVA02, {"scale_attn_inner": True}, "spans all heads"),
        (EVA02, {"use_post_norm": True}, "EvaBlockPostNorm"),
        (EVA02, {"rope_type": "mixed"}, "RotaryEmbeddingMixed"),
        (EVA02, {"rope_rotate_half": True}, "in different ways"),
        (EVA02, {"use_abs_pos_emb": False, "use_rot_pos_emb": False}, "no position embedding"),
        (DINOV3, {"rope_grid_offset": 0.5}, "RotaryEmbeddingDinoV3"),
        (DINOV3, {"attn_only_layer_scale": True}, "LayerScale"),
        (DINOV3, {"attn_type": "rope", "qkv_fused": False, "num_kv_heads": 2}, "num_kv_heads"),
    ],
)
def test_variants_of_eva_that_do_not_fit_are_refused(name: str, settings: dict[str, Any], token: str) -> None:
    with pytest.raises(ConversionError, match=token):
        he.convert(timm_model(name, **settings))

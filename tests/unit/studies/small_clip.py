"""Small random CLIP models, saved as files that their libraries read."""

import json
import warnings
from pathlib import Path
from typing import Any

import torch

from architectures import perturbed

with warnings.catch_warnings(action="ignore"):  # from libraries that open_clip imports
    import open_clip

SMALL = "small-clip"
IMAGE_SIZE = 32


def small_open_clip(folder: Path) -> tuple[str, Any]:
    """The name of a model that open_clip can create with weights, and the model."""
    config = {
        "embed_dim": 16,
        "vision_cfg": {"image_size": IMAGE_SIZE, "layers": 2, "width": 24, "head_width": 6, "patch_size": 8},
        "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 16, "heads": 4, "layers": 2},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{SMALL}.json").write_text(json.dumps(config))
    open_clip.add_model_config(folder / f"{SMALL}.json")
    torch.manual_seed(0)
    model = perturbed(open_clip.create_model(SMALL))
    weights = folder / "weights.pt"
    torch.save(model.state_dict(), weights)
    return f"open_clip:{SMALL}/{weights}", model.eval()

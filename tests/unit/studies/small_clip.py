"""Small random CLIPs, as files that their libraries read."""

import json
import warnings
from pathlib import Path
from typing import Any

import torch

from architectures import perturbed
from architectures_clip import CONTEXT, END, transformers_clip
from zero_shot_models import word_tokenizer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of libraries that open_clip imports
    import open_clip

SMALL = "small-clip"
IMAGE_SIZE = 32


def small_open_clip(folder: Path) -> tuple[str, Any]:
    """The name of a model that open_clip can make, weights included, and the model itself."""
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


def small_transformers_clip(folder: Path) -> Any:
    """A CLIP with tokenizer and image processor, as `save_pretrained` leaves them."""
    import tokenizers
    import transformers

    model = transformers_clip({}, {})
    model.save_pretrained(folder)  # type: ignore[operator]
    tokenizer = tokenizers.Tokenizer.from_str(word_tokenizer(END, 1).tokenizer)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[UNK]", eos_token="[END]", model_max_length=CONTEXT
    )
    fast.save_pretrained(folder)
    size = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    transformers.CLIPImageProcessor(size={"shortest_edge": IMAGE_SIZE}, crop_size=size).save_pretrained(folder)
    return model

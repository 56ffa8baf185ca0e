"""A CLIP model of open_clip or transformers as a dual encoder with several members.

    python examples/clip_dual_encoder.py                                        # offline: a small CLIP, random weights
    python examples/clip_dual_encoder.py --model ViT-B-32 --pretrained laion2b_s34b_b79k --image cat.jpg

What works today: converting both towers with unchanged embeddings, pruning and fusing towers, one forward pass for all
members, and `Prediction` on their image-text logits. What does not yet: choosing the heads of a dual encoder by
circuits or Taylor scores. Here each member loses heads drawn at random: this shows the mechanics, not a tuned ensemble,
and with random weights the answers mean nothing.
"""

import argparse
import random
from pathlib import Path
from typing import Any

import open_clip
import torch
from PIL import Image

import hydra_ensembles as he


# --8<-- [start:members]
def with_members(dual: he.DualEncoder, members: int, prune: int, seed: int = 0) -> he.DualEncoder:
    """The same dual encoder with several image towers, each without some heads, fused into one; texts are shared."""
    draw = random.Random(seed)
    image = dual.image
    heads = [he.Head(layer, head) for layer in range(image.num_layers) for head in range(image.num_heads)]
    towers = [he.prune(image, draw.sample(heads, prune)) for _ in range(members)]
    return he.DualEncoder(he.fuse(towers), dual.text, dual.projections, dual.logit_scale, dual.logit_bias).eval()


# --8<-- [end:members]


def small_clip() -> Any:
    """A CLIP of open_clip with random weights, small enough for any machine."""
    torch.manual_seed(0)
    image = {"layers": 4, "width": 64, "head_width": 16, "patch_size": 16, "image_size": 64}
    text = {"context_length": 77, "vocab_size": 49408, "width": 64, "heads": 4, "layers": 4}
    return open_clip.CLIP(embed_dim=64, vision_cfg=image, text_cfg=text).eval()


def largest_difference(model: Any, dual: he.DualEncoder, images: torch.Tensor, texts: torch.Tensor) -> float:
    """How far the converted embeddings are from the original's."""
    with torch.no_grad():
        pairs = (
            (model.encode_image(images, normalize=True), dual.encode_image(images)[0]),
            (model.encode_text(texts, normalize=True), dual.encode_text(texts)[0]),
        )
    return max(float((ours - theirs).abs().max()) for theirs, ours in pairs)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="name of an open_clip model; default: a small random one")
    parser.add_argument("--pretrained", help="which weights of that model")
    parser.add_argument("--image", type=Path, help="a picture; default: two made here")
    parser.add_argument("--labels", nargs="+", default=["a red square", "a blue square", "a photo of a cat"])
    parser.add_argument("--members", type=int, default=3)
    parser.add_argument("--prune", type=int, default=4, help="heads each image tower loses")
    parser.add_argument("--output", type=Path, default=Path("hydra-clip"), help="folder for the saved model")
    options = parser.parse_args()
    if options.model is None:
        model, tokenizer = small_clip(), open_clip.SimpleTokenizer()
    else:
        model = open_clip.create_model(options.model, pretrained=options.pretrained).eval()
        tokenizer = open_clip.get_tokenizer(options.model)
    colours = ("red", "blue")
    pictures = [Image.open(options.image)] if options.image else [Image.new("RGB", (64, 64), name) for name in colours]

    # --8<-- [start:convert]
    dual = he.convert(model, processor=tokenizer)  # both towers, the projections, the preprocessing of both inputs
    # --8<-- [end:convert]
    difference = largest_difference(model, dual, dual.image.prepare(pictures), tokenizer(options.labels))
    print(f"embeddings differ from open_clip's by at most {difference:.1e}")

    hydra = with_members(dual, options.members, options.prune)
    with torch.no_grad():
        logits = hydra(pictures, options.labels)  # [M, images, texts]
    p = he.Prediction.from_logits(logits, class_names=options.labels)
    for row, name in enumerate(p.names()):
        print(f"image {row}: {name}  confidence {p.confidence[row]:.2f}  epistemic {p.epistemic[row]:.4f}")

    hydra.save_pretrained(options.output)
    same = he.DualEncoder.from_pretrained(options.output)  # needs neither open_clip nor its tokenizer
    with torch.no_grad():
        equal = torch.equal(same(pictures, options.labels), logits)
    print(f"saved to {options.output}; the loaded model gives the same logits: {equal}")


if __name__ == "__main__":
    main()

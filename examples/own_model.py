"""A vision transformer that you wrote yourself, and that knows when to abstain.

    python examples/own_model.py      # offline: trains the model below on embedded images, in seconds

This library only needs to know where the parts of a model are: a table of names, `OUTSIDE` and `INSIDE` its blocks.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hydra_ensembles as he
from hydra_ensembles import data
from hydra_ensembles.demo.run import load_sample


# start: model
class Block(nn.Module):
    """Attention and MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.ln1, self.ln2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [B, T, d] to tokens."""
        q, k, v = self.qkv(self.ln1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln2(x))


class ViT(nn.Module):
    """A ViT as in many tutorials."""

    def __init__(self, classes: int, size: int = 32, patch: int = 8, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.patchify = nn.Conv2d(3, width, patch, patch)
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        self.pos = nn.Parameter(0.02 * torch.randn(1, 1 + (size // patch) ** 2, width))
        self.blocks = nn.Sequential(*(Block(width, heads=4) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Images [B, 3, H, W] to logits [B, C]."""
        x = self.patchify(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], dim=1) + self.pos
        return self.head(self.norm(self.blocks(x))[:, 0])


# end: model
# start: ensemble
OUTSIDE = {"patch": "patchify", "class_token": "cls", "position": "pos", "norm": "norm", "classifier": "head"}
INSIDE = {"norm1": "ln1", "qkv": "qkv", "out": "proj", "norm2": "ln2", "up": "mlp.0", "down": "mlp.2"}
BLOCKS = {part: "blocks.{i}." + name for part, name in INSIDE.items()}  # {i} is the number of the block
PROCESSOR = he.ImagePreprocessing(size=(32, 32), mean=(0.5,) * 3, std=(0.5,) * 3)  # as the model was trained


def make_ensemble(model: nn.Module, images: data.ImageDataset, output: Path) -> he.Ensemble:
    """From your own model and held-out labelled images to a calibrated ensemble of one member."""
    declaration = he.Declaration(names=OUTSIDE | BLOCKS, heads=4)
    base = he.convert(model, declaration=declaration, processor=PROCESSOR, labels=images.class_names)
    hydra = he.calibrate(base, data.batches(images, PROCESSOR, batch_size=16))
    hydra.save_pretrained(output / "model")
    return hydra


# end: ensemble


def train(model: nn.Module, images: Tensor, labels: Tensor, steps: int) -> nn.Module:
    """Plain training; yours may differ."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for rows in (torch.randint(len(labels), (32,)) for _ in range(steps)):
        optimizer.zero_grad()
        F.cross_entropy(model(images[rows]), labels[rows]).backward()
        optimizer.step()
    return model.eval()


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="steps of training")
    parser.add_argument("--output", type=Path, default=Path("hydra-own"), help="folder for the model")
    options = parser.parse_args()
    torch.manual_seed(0)
    seen, held_out = load_sample()["train"], load_sample()["test"]
    pixels = PROCESSOR([seen[index][0] for index in range(len(seen))])
    model = train(ViT(len(seen.class_names)), pixels, torch.tensor(seen.labels), options.steps)
    hydra = make_ensemble(model, held_out, options.output)
    p = hydra.predict([held_out[index][0] for index in range(3)])
    for row, name in enumerate(p.names()):
        print(f"{name:20} confidence {p.confidence[row]:.2f}  (is: {held_out.class_names[held_out.labels[row]]})")
    print(f"{hydra.describe()}\nsaved to {options.output / 'model'}")


if __name__ == "__main__":
    main()

"""A promise for a network without attention: a ResNet of torchvision, through its confidences alone.

    python examples/any_network.py                        # trains it on the embedded images first
    python examples/any_network.py --risk 0.1 --epochs 30

Familiarity and cascades of arrays are made the same way: whatever the rule is, it gives every answer one number.
"""

import argparse
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

import hydra_ensembles as he
from hydra_ensembles import data
from hydra_ensembles.demo.run import load_backbone, load_sample


# start: certify
def promised(network: nn.Module, held_out: tuple[Tensor, Tensor], risk: float) -> he.Promise:
    """What may be promised of a network's answers, from inputs and labels on which nothing was trained."""
    inputs, labels = held_out
    with torch.inference_mode():
        confidence, label = network.eval()(inputs).softmax(dim=-1).max(dim=-1)
    return he.certify(confidence, label == labels, risk=risk)  # accept what has this promise's threshold or more


# end: certify


def trained(inputs: Tensor, labels: Tensor, epochs: int) -> nn.Module:
    """A small ResNet, from scratch."""
    torch.manual_seed(0)
    network = torchvision.models.resnet18(num_classes=int(labels.max()) + 1)
    steps = epochs * -(-len(labels) // 32)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for _ in range(epochs):
        for rows in torch.randperm(len(labels)).split(32):
            flipped = inputs[rows].flip(3) if torch.rand(()) < 0.5 else inputs[rows]
            nn.functional.cross_entropy(network(flipped), labels[rows]).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return network


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--risk", type=float, default=0.2, help="share of accepted answers that may be wrong")
    parser.add_argument("--epochs", type=int, default=12)
    options = parser.parse_args()
    preprocess: Any = load_backbone().metadata.preprocessing

    def read(name: str) -> tuple[Tensor, Tensor]:
        inputs, labels = next(iter(data.batches(load_sample()[name], preprocess, batch_size=1000)))
        return nn.functional.interpolate(inputs, size=32, mode="area"), labels

    network = trained(*read("train"), options.epochs)
    promise = promised(network, read("calibration"), options.risk)
    inputs, labels = read("test")
    with torch.inference_mode():
        confidence, label = network.eval()(inputs).softmax(dim=-1).max(dim=-1)
    accept = confidence >= promise.threshold
    print(promise)
    wrong = (label != labels)[accept].double().mean()
    print(f"test: {accept.double().mean():.0%} accepted, {wrong:.1%} of them wrong")


if __name__ == "__main__":
    main()

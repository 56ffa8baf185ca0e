"""The paper's questions about heads, for your own model: do rankings agree, are they stable, what do heads separate.

    python examples/analyse_heads.py                          # the embedded model and images, a minute of one core
    python examples/analyse_heads.py --model my-model --prune 12

Put your own images where `drawn` reads the embedded ones. How many heads and members to choose: see
examples/choose_members.py.
"""

import argparse
from pathlib import Path
from typing import Any

import torch

import hydra_ensembles as he
from hydra_ensembles import data, heads, metrics
from hydra_ensembles.demo.run import load_backbone, load_sample


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a saved ensemble with one member, for these images")
    parser.add_argument("--prune", type=int, default=6, help="heads to remove")
    parser.add_argument("--images", type=int, default=32, help="ID and OOD images to rank; four times as many to judge")
    given = parser.parse_args()
    model: Any = he.load(given.model) if given.model else load_backbone()
    sample, prune = load_sample(), given.prune

    def drawn(name: str, draw: int, count: int = given.images) -> list[Any]:
        """Batches of a set; each draw has different images."""
        some = data.subset(sample[name], min(count, len(sample[name])), seed=draw)
        return list(data.batches(some, model.metadata.preprocessing, batch_size=16))

    # start: ask
    sides = [(drawn("circuit_id", draw), drawn("circuit_ood", draw)) for draw in (0, 1)]
    circuits = [he.extract_circuit(model, *side, score="avg", budget=prune) for side in sides]
    taylor = he.taylor(model, sides[0][0], budget=prune, scope="global")
    chance = prune / (model.num_layers * model.num_heads)
    print(f"heads in common, chance gives {chance:.0%}")  # B.2.2
    print(f"  a circuit and Taylor scores       {heads.overlap(circuits[0], taylor, prune):.0%}")
    print(f"  over layers, Jensen–Shannon       {heads.jensen_shannon(circuits[0], taylor, prune):.3f}")
    print(f"  circuits of two draws of images   {heads.overlap(*circuits, prune):.0%}")

    known, foreign = drawn("test", 0, 4 * given.images), drawn("AnnualCrop", 0, 4 * given.images)
    labels = torch.cat([y for _, y in known])
    pruned = he.prune(model, circuits[0].first(prune))
    for name, one in {"whole": model, f"without {prune} heads": pruned}.items():  # Tables 4 and 6
        inside, outside = (he.Prediction.concat([one.predict(x) for x, _ in side]) for side in (known, foreign))
        right, auroc = metrics.accuracy(inside.probs, labels), metrics.auroc(inside.score(), outside.score())
        print(f"{name:16} accuracy {right:.1%}   AUROC {auroc:.1%}")
    # end: ask


if __name__ == "__main__":
    main()

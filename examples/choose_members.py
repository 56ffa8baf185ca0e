"""How many members, and how many heads to prune: a table of quality and cost, made on held-out data.

    python examples/choose_members.py                                  # the embedded model and images
    python examples/choose_members.py --members 1 3 5 --prune 6 9 12 --images 128 --ranking circuit

All rows use one ranking: members lose heads drawn from its start. Accuracy and NLL are on held-out ID images, AUROC is
for telling them from images of a class the model was not trained on; cost is multiply-adds (and stored parameters)
relative to the single model. None of the images here are those that results are reported on.
"""

import argparse
from typing import Any

import torch

import hydra_ensembles as he
from hydra_ensembles import data, metrics
from hydra_ensembles.demo.run import load_backbone, load_sample
from hydra_ensembles.heads.ranking import sampled_members


# start: candidates
def candidate(base: he.Ensemble, ranking: he.HeadRanking, members: int, prune: int, seed: int = 0) -> he.Ensemble:
    """Members that lose heads drawn from the 100/48 · `prune` that matter least; a single one loses the first."""
    pool = min(round(prune * 100 / 48), len(ranking))
    chosen = [ranking.first(prune)] if members == 1 else sampled_members(ranking, prune, pool, members, seed)
    return he.fuse([he.prune(base, heads) for heads in chosen])


def measure(ensemble: he.Ensemble, known: Any, unknown: Any) -> dict[str, float]:
    """Quality on held-out data: batches of ID images with labels, and of OOD images."""
    seen, odd = (
        he.Prediction.concat([ensemble.predict(inputs) for inputs, _ in batches]) for batches in (known, unknown)
    )
    labels = torch.cat([labels for _, labels in known])
    return {
        "accuracy": metrics.accuracy(seen.probs, labels),
        "nll": metrics.nll(seen.probs, labels),
        "auroc": metrics.auroc(seen.score(), odd.score()),
    }


# end: candidates


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, nargs="+", default=[1, 3, 5])
    parser.add_argument("--prune", type=int, nargs="+", default=[6, 12], help="heads each member loses")
    parser.add_argument("--images", type=int, default=48, help="ID images and OOD images, to rank and to measure")
    parser.add_argument("--ranking", choices=["taylor", "circuit"], default="taylor", help="circuits take longer")
    parser.add_argument("--seed", type=int, default=0, help="draws images and members")
    options = parser.parse_args()
    base, sample = load_backbone(), load_sample()
    preprocess: Any = base.metadata.preprocessing

    def batches(name: str, part: int) -> list[Any]:
        """One half of a set: 0 ranks heads, 1 measures."""
        half = data.split(sample[name], 0.5, seed=options.seed)[part]
        return list(data.batches(data.subset(half, options.images, seed=options.seed), preprocess, batch_size=16))

    budget = min(round(max(options.prune) * 100 / 48), base.num_layers * base.num_heads)
    if options.ranking == "circuit":
        ranking = he.extract_circuit(base, batches("circuit_id", 0), batches("circuit_ood", 0), budget=budget)
    else:
        ranking = he.taylor(base, batches("circuit_id", 0), budget=budget, scope="global")
    known, unknown = batches("circuit_id", 1), batches("circuit_ood", 1)

    single = base.describe()
    print("members  pruned  accuracy    NLL  AUROC   cost  parameters")
    for prune in (0, *options.prune):
        for members in options.members if prune else [1]:
            ensemble = candidate(base, ranking, members, prune, options.seed) if prune else base
            quality, counts = measure(ensemble, known, unknown), ensemble.describe()
            cost = counts.multiply_adds / single.multiply_adds, counts.parameters / single.parameters
            print(
                f"{members:7}  {prune:6}  {quality['accuracy']:8.1%} {quality['nll']:6.3f} {quality['auroc']:6.1%} "
                f"{cost[0]:5.2f}x {cost[1]:10.2f}x"
            )
    print(f"{options.images} ID and as many OOD images: differences of a few points are chance; use more to decide.")


if __name__ == "__main__":
    main()

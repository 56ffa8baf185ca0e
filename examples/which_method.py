"""The cheap ensembles that fused members are compared with, side by side on one model.

    python examples/which_method.py                       # the embedded model and images; some minutes on a CPU
    python examples/which_method.py --steps 100 --images 1000

So few updates show that everything runs and what it costs, not which method is best: for that, train each as long as
it needs, choose its settings on held-out data, and report on other data.
"""

import argparse
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

import hydra_ensembles as he
from hydra_ensembles import baselines, data
from hydra_ensembles.demo.run import load_backbone, load_sample


# start: methods
def methods(model: he.Ensemble, train: DataLoader[Any], recipe: he.Recipe) -> Iterator[tuple[str, he.Ensemble]]:
    """One ensemble for each method; each is saved, calibrated, optimized and evaluated like any other."""
    yield "single", model
    yield "deep", baselines.deep_ensemble(model, train, recipe, members=3)
    yield "lora", baselines.lora_ensemble(model, train, recipe, baselines.LoRA(rank=4, alpha=8.0))
    yield "batch", baselines.batch_ensemble(model, train, recipe, baselines.BatchEnsemble(last_layers=2))
    yield "mimo", baselines.mimo(model, train, recipe, baselines.MIMO(members=2, rho=0.9, batch_repeat=1))
    yield "oba", baselines.oba(model, train, recipe, baselines.OBA(keep=0.891, steps=2, batches=2))
    yield "laplace", baselines.laplace(model, train, baselines.Laplace(members=20))


# end: methods


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="updates of each training")
    parser.add_argument("--images", type=int, default=128, help="images of each set")
    options = parser.parse_args()
    base, sample = load_backbone(), load_sample()

    def batches(name: str, shuffle: bool = False) -> Any:
        chosen = data.subset(sample[name], min(options.images, len(sample[name])), seed=0)
        preprocess: Any = base.metadata.preprocessing
        return data.batches(chosen, preprocess, batch_size=16, shuffle=shuffle)

    recipe = he.Recipe(optimizer="sgd", learning_rate=1e-3, steps=options.steps, schedule="constant")
    whole = base.describe()
    print("method   members  accuracy      NLL  near AUROC  parameters  work")
    for name, ensemble in methods(base, batches("train", shuffle=True), recipe):
        near = {"near": {"AnnualCrop": batches("AnnualCrop")}}
        found = he.evaluate(ensemble, batches("test"), ood=near, progress=False).numbers()
        cost = ensemble.describe()
        print(
            f"{name:8} {ensemble.num_members:7}  {found['accuracy']:8.1%}  {found['nll']:7.3f}  "
            f"{found['near.auroc']:10.1%}  {cost.parameters / whole.parameters:9.2f}x  "
            f"{cost.multiply_adds / whole.multiply_adds:.2f}x"
        )


if __name__ == "__main__":
    main()

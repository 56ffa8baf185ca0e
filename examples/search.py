"""Find the best ensemble for a price: build candidates, evaluate them on held-out images, and choose one.

    python examples/search.py                                   # the embedded model and images, minutes on a CPU
    python examples/search.py --cost 2 --steps 60 --output my-search

A second call with the same settings loads the finished search, and a stopped one resumes. The images are those that
the demo's settings were chosen on: 256 for training, 192 to rank heads, calibrate and evaluate, and 128 of a class
that the model does not know. They are few: with your own data expect clearer differences.
"""

import argparse
from pathlib import Path
from typing import Any

import hydra_ensembles as he
from hydra_ensembles import data
from hydra_ensembles.demo.run import load_backbone, load_sample


# start: search
def best_ensemble(model: Any, sets: dict[str, Any], options: argparse.Namespace) -> he.SearchResult:
    """Search trunks of several depths: heads pruned without training, and members trained together, pruned or not."""
    recipe = he.Recipe(learning_rate=2e-5, classifier_rate=20, steps=options.steps, warmup=0.1, clip_norm=1.0)
    candidates = [
        {"shared_layers": depth, **kind}
        for depth in options.depths
        for kind in (
            {"strategy": "circuit"},
            {"strategy": "circuit", "training": "together"},
            {"strategy": "branches", "training": "together"},
        )
    ]
    return he.search(
        model,
        **sets,  # train, id, ood
        cost=options.cost,
        candidates=candidates,  # leave out for the default ones
        recipe=recipe,
        batch_size=8,  # of the measured time
        familiarity="knn",  # for 64 images; from 20 per class, leave it out: mahalanobis
        output=options.output,
    )


# end: search


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cost", type=float, default=1.5, help="highest price, as a multiple of the model's")
    parser.add_argument("--depths", type=int, nargs="+", default=[5, 4], help="layers, of 6, that all members share")
    parser.add_argument("--steps", type=int, default=30, help="updates of a training")
    parser.add_argument("--images", type=int, default=256, help="images of each set, at most")
    parser.add_argument("--output", type=Path, default=Path("hydra-search"), help="folder of the search")
    options = parser.parse_args()
    backbone, sample = load_backbone(), load_sample()
    preprocess: Any = backbone.metadata.preprocessing

    def batches(name: str, **how: Any) -> Any:
        return data.batches(
            data.subset(sample[name], min(options.images, len(sample[name])), seed=0), preprocess, batch_size=32, **how
        )

    sets = {"train": batches("calibration", shuffle=True), "id": batches("circuit_id"), "ood": batches("circuit_ood")}
    found = best_ensemble(backbone, sets, options)
    print(found.table())
    print(f"chosen: {found.choice}, saved to {options.output / 'ensemble'}")


if __name__ == "__main__":
    main()

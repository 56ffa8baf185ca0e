"""What the heads of an ensemble do: a map of them, with the images whose predictions each one changes.

python examples/head_atlas.py                            # three members made from the embedded model, in minutes
python examples/head_atlas.py --model hydra-demo/model   # the ensemble that `hydra-ensembles demo` saves
"""

import argparse
from pathlib import Path
from typing import Any

import hydra_ensembles as he
from hydra_ensembles.data import batches, subset
from hydra_ensembles.demo.embedded import load_backbone, load_sample
from hydra_ensembles.heads.members import sampled_members


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a saved ensemble for these images")
    parser.add_argument("--images", type=int, default=140, help="test images; of each OOD set half as many")
    parser.add_argument("--layers", type=int, nargs="*", help="only the heads of these layers")
    parser.add_argument(
        "--output", type=Path, default=Path("head-atlas.html"), help="the page, with numbers next to it"
    )
    given = parser.parse_args()
    sample = load_sample()

    # start: atlas
    ensemble = he.load(given.model) if given.model else three_members()
    test = subset(sample.test, given.images, seed=0, stratified=True)
    others = {**sample.near, **sample.far}
    ood = {name: subset(data, min(len(data), given.images // 2), seed=0) for name, data in others.items()}
    atlas = he.atlas(ensemble, test, ood, name="the demo", layers=given.layers)
    atlas.save(given.output.with_suffix(".json"))
    he.write_atlas(given.output, atlas)
    # end: atlas

    dearest = sorted(atlas.heads, key=lambda head: -atlas.cost(head)["log_likelihood"])[:5]
    print("most needed heads      likelihood  accuracy  OOD AUROC   kept by")
    for head in dearest:
        cost = atlas.cost(head)
        numbers = f"{-cost['log_likelihood']:+.4f}  {-cost['accuracy']:+8.1%}  {-cost['auroc']:+9.1%}"
        print(f"layer {head.layer}, head {head.head}      {numbers}   {'all' if head.shared else list(head.members)}")
    print(f"wrote {given.output}")


def three_members() -> he.Ensemble:
    """Three members of the embedded model, each without some of the heads that matter least; not trained."""
    base, sample = load_backbone(), load_sample().circuit_id
    preprocess: Any = base.metadata.preprocessing
    ranking = he.taylor(base, batches(subset(sample, 64, seed=0), preprocess, 16), budget=18)
    members = sampled_members(ranking, prune=9, pool=18, members=3)
    return he.fuse([he.prune(base, heads) for heads in members])


if __name__ == "__main__":
    main()

"""When to answer and when to abstain: thresholds, what they cost, and a service that uses one.

    python examples/abstain.py                            # the embedded model and images
    python examples/abstain.py --share 0.9 --output service-model

The thresholds are set only on held-out in-distribution images: each accepts a given share of them. The table then shows
their effect on test images and on OOD images, which were not used to set them.
"""

import argparse
from pathlib import Path
from typing import Any

import torch

import hydra_ensembles as he
from hydra_ensembles import data
from hydra_ensembles.demo.run import load_backbone, load_sample
from hydra_ensembles.heads.ranking import sampled_members


# start: service
def answer(ensemble: he.Ensemble, picture: Any) -> dict[str, Any]:
    """What a service would send back for one picture."""
    p = ensemble.predict(picture)
    if p.accept is None:
        raise RuntimeError("this model has no threshold; run he.calibrate(ensemble, held_out_batches) and save it")
    if p.reason[0] == "unfamiliar":
        return {"label": None, "why": "unlike the images this model knows", "familiarity": p.familiarity[0].item()}
    if p.reason[0] == "unsure":
        return {"label": None, "why": f"confidence {p.confidence[0]:.2f} is below {p.threshold:.2f}"}
    return {"label": p.names()[0], "confidence": round(p.confidence[0].item(), 3)}


# end: service


# start: thresholds
def table(hydra: he.Ensemble, held_out: Any, test: Any, others: dict[str, Any], shares: list[float]) -> None:
    """Print what a model accepts that is calibrated on batches with each share."""
    print("share asked for  accepted: test " + "".join(f"{name:>15}" for name in others) + "  errors accepted")
    for share in shares:
        safe = he.calibrate(hydra, held_out, share=share)
        known, *odd = (
            he.Prediction.concat([safe.predict(inputs) for inputs, _ in batches])
            for batches in (test, *others.values())
        )
        taken: list[Any] = [p.accept for p in (known, *odd)]  # [B] of bool each
        wrong = known.label != torch.cat([labels for _, labels in test])
        print(f"{share:15.0%}  {taken[0].double().mean():14.1%}", end="")
        print(
            "".join(f"{one.double().mean():15.1%}" for one in taken[1:]) + f"  {wrong[taken[0]].double().mean():15.1%}"
        )


# end: thresholds


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=0.95, help="share of held-out ID images to accept")
    parser.add_argument("--images", type=int, default=96, help="test images of each set; twice as many calibrate")
    parser.add_argument("--output", type=Path, default=Path("hydra-abstain"), help="folder for the saved model")
    options = parser.parse_args()
    base, sample = load_backbone(), load_sample()

    def batches(name: str) -> Any:
        wanted = options.images * (2 if name == "calibration" else 1)
        chosen = data.subset(sample[name], min(wanted, len(sample[name])), seed=0)
        preprocess: Any = base.metadata.preprocessing
        return list(data.batches(chosen, preprocess, batch_size=16))

    ranking = he.taylor(base, batches("circuit_id"), budget=18, scope="global")
    members = sampled_members(ranking, prune=9, pool=18, members=3)
    hydra = he.fuse([he.prune(base, heads) for heads in members])

    held_out, others = batches("calibration"), {name: batches(name) for name in ("AnnualCrop", "FashionMNIST")}
    table(hydra, held_out, batches("test"), others, shares=[0.95, 0.9, 0.8])

    he.calibrate(hydra, held_out, share=options.share).save_pretrained(options.output)
    service = he.Ensemble.from_pretrained(options.output)  # temperature and thresholds come with it
    for name in ("test", "AnnualCrop", "FashionMNIST"):
        print(f"{name:13} {answer(service, sample[name][0][0])}")


if __name__ == "__main__":
    main()

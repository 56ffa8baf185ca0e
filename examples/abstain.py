"""When to answer and when to abstain: thresholds, what they cost, and a service that uses one.

    python examples/abstain.py                            # the embedded model and images
    python examples/abstain.py --share 0.9 --output service-model

The threshold is set only on held-out in-distribution images: it accepts a given share of them. The table then shows
its effect on test images and on OOD images, which were not used to set it.
"""

import argparse
from pathlib import Path
from typing import Any

import torch

import hydra_ensembles as he
from hydra_ensembles import data
from hydra_ensembles.calibrate import fit_calibration
from hydra_ensembles.demo.embedded import load_backbone, load_sample
from hydra_ensembles.heads.members import sampled_members


# start: service
def answer(ensemble: he.Ensemble, picture: Any) -> dict[str, Any]:
    """What a service would send back for one picture."""
    p = ensemble.predict(picture)
    if p.accept is None:
        raise RuntimeError("this model has no threshold; run he.calibrate(ensemble, held_out_batches) and save it")
    if p.reason[0] == "unfamiliar":
        return {"label": None, "why": "unlike the images this model knows", "familiarity": p.familiarity[0].item()}
    if p.reason[0] == "unsure":
        return {"label": None, "why": f"uncertainty {p.score()[0]:.2f} is above {p.threshold:.2f}"}
    return {"label": p.names()[0], "confidence": round(p.confidence[0].item(), 3)}


# end: service


# start: thresholds
def table(calibration: tuple[Any, Any], test: tuple[Any, Any], others: dict[str, Any], shares: list[float]) -> None:
    """Print what each threshold accepts; `calibration` and `test` are member logits with labels."""
    print(
        "share asked for  threshold  accepted: test " + "".join(f"{name:>15}" for name in others) + "  errors accepted"
    )
    for share in shares:
        fitted = fit_calibration(*calibration, share=share)
        known, *odd = (fitted.prediction(logits) for logits in (test[0], *others.values()))
        taken: list[Any] = [p.accept for p in (known, *odd)]  # [B] of bool each
        wrong = (known.label != test[1])[taken[0]].double().mean()
        print(f"{share:15.0%}  {fitted.threshold:9.3f}  {taken[0].double().mean():14.1%}", end="")
        print("".join(f"{one.double().mean():15.1%}" for one in taken[1:]) + f"  {wrong:15.1%}")


# end: thresholds


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=0.95, help="share of held-out ID images to accept")
    parser.add_argument("--images", type=int, default=96, help="test images of each set; twice as many calibrate")
    parser.add_argument("--output", type=Path, default=Path("hydra-abstain"), help="folder for the saved model")
    options = parser.parse_args()
    base, sample = load_backbone(), load_sample().sets

    def batches(name: str) -> Any:
        wanted = options.images * (2 if name == "calibration" else 1)
        chosen = data.subset(sample[name], min(wanted, len(sample[name])), seed=0)
        preprocess: Any = base.metadata.preprocessing
        return list(data.batches(chosen, preprocess, batch_size=16))

    ranking = he.taylor(base, batches("circuit_id"), budget=18, scope="global")
    members = sampled_members(ranking, prune=9, pool=18, members=3)
    hydra = he.fuse([he.prune(base, heads) for heads in members])

    def logits(name: str) -> tuple[Any, Any]:
        pairs = batches(name)
        with torch.no_grad():
            member_logits = torch.cat([hydra(inputs) for inputs, _ in pairs], dim=1)  # [M, B, C]
        return member_logits, torch.cat([labels for _, labels in pairs])

    others = {name: logits(name)[0] for name in ("AnnualCrop", "FashionMNIST")}
    table(logits("calibration"), logits("test"), others, shares=[0.99, 0.95, 0.9, 0.8])

    he.calibrate(hydra, batches("calibration"), share=options.share).save_pretrained(options.output)
    service = he.Ensemble.from_pretrained(options.output)  # temperature and threshold come with it
    for name in ("test", "AnnualCrop", "FashionMNIST"):
        print(f"{name:13} {answer(service, sample[name][0][0])}")


if __name__ == "__main__":
    main()

"""How many heads the embedded demo prunes: chosen on validation images that are in none of its sets.

    python benchmarks/demo_choice.py --shared FOLDER

Ranks heads as the demo does, prunes 9, 10 and 12 of them, and measures on the EuroSAT validation images of the seven
classes, and images of PermanentCrop, that the sample of the demo does not hold. The choice is the number of heads
with the highest mean of accuracy and AUROC (by maximum softmax probability) of Hydra (Circ). No test set is read.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

import hydra_ensembles as he
from hydra_ensembles import data
from hydra_ensembles.circuit.scores import Score
from hydra_ensembles.demo.embedded import SAMPLE, load_backbone, load_sample
from hydra_ensembles.demo.run import SCORES, DemoSettings, prepare_data, sizes
from hydra_ensembles.heads.members import circuit_members

PRUNED = (9, 10, 12)
CIRCUITS: tuple[Score, ...] = ("avg", "acc", "ood")
FOREIGN = "PermanentCrop"
LEFT_OUT = ("AnnualCrop", FOREIGN, "River")


def held_out(shared: Path) -> tuple[Any, Any]:
    """Validation images outside the sample: of the seven classes, and as many of PermanentCrop."""
    with np.load(SAMPLE) as stored:
        origins = [(stored[f"{name}/splits"], stored[f"{name}/rows"]) for name in load_sample().sets]
    taken = {pair for one in origins for pair in zip(*(column.tolist() for column in one), strict=True)}

    def free(dataset: Any, split: str) -> Any:
        keep = [index for index, row in enumerate(dataset.rows.tolist()) if (split, row) not in taken]
        return dataset.select(np.array(keep))

    folder = shared / "data" / "images" / "eurosat"
    known = data.without_classes(data.load(folder, split="validation"), LEFT_OUT, relabel=True)
    inside = free(known, "eurosat/validation")
    outside = free(data.only_classes(data.load(folder, split="train"), [FOREIGN]), "eurosat/train")
    return inside, data.subset(outside, len(inside), seed=0)


def main() -> None:
    """Read the command line, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=Path("results/demo_choice.json"))
    options = parser.parse_args()
    inside, outside = held_out(options.shared)
    settings = DemoSettings(prune=max(PRUNED))
    backbone = load_backbone()
    prepared = prepare_data(load_sample(), backbone, settings)
    layers = range(settings.shared_layers, backbone.num_layers)
    circuits: dict[str, he.HeadRanking] = {
        score: he.extract_circuit(
            backbone,
            prepared["circuit_id"],
            prepared["circuit_ood"],
            score=score,
            budget=max(PRUNED),
            method=settings.method,
            layers=layers,
        )
        for score in CIRCUITS
    }

    def measured(model: he.Ensemble, name: str) -> dict[str, float]:
        scores = SCORES[: model.num_members]
        found = he.evaluate(model, inside, {"near": {FOREIGN: outside}}, name=name, scores=scores).numbers()
        keys = ("accuracy", "ece", "near.auroc", "near.fpr95", *(f"{score}:near.auroc" for score in scores))
        return {key: found[key] for key in keys}

    rows: list[dict[str, Any]] = [{"method": "Single", "pruned": 0, **measured(backbone, "Single")}]
    for pruned in PRUNED:
        try:
            members = circuit_members(circuits, pruned, 3)
        except he.HydraError as error:  # two circuits agree on their first heads
            rows.append({"method": "Hydra (Circ)", "pruned": pruned, "failed": str(error)})
            continue
        circ = he.fuse([he.prune(backbone, heads) for heads in members])
        rows.append({"method": "Hydra (Circ)", "pruned": pruned, **measured(circ, f"circuit {pruned}")})
    measured_rows = [row for row in rows if row["pruned"] and "failed" not in row]
    best = max(measured_rows, key=lambda row: row["accuracy"] + row["near.auroc"])
    facts = {
        "command": "python benchmarks/demo_choice.py --shared FOLDER",
        "criterion": "mean of accuracy and near.auroc (maximum softmax probability) of Hydra (Circ)",
        "chosen": best["pruned"],
        "samples": {"id": len(inside), "ood": len(outside), "ranking": sizes(prepared)["circuit_id"]},
        "method": settings.method,
        "shared_layers": settings.shared_layers,
        "seed": settings.seed,
        "versions": {"hydra_ensembles": he.__version__},
        "rows": rows,
    }
    options.output.write_text(json.dumps(facts, indent=1) + "\n")
    print(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()

"""How many heads the embedded demo prunes, chosen on validation images that are in none of its sets; and its table.

    python benchmarks/demo.py --shared FOLDER

Ranks heads as the demo does, prunes 9, 10 and 12 of them, and measures on the EuroSAT validation images of the seven
classes, and images of PermanentCrop, that the sample of the demo does not hold. The choice is the number of heads
with the highest mean of accuracy and AUROC (by maximum softmax probability) of Hydra (Circ). No test set is read.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, load, store, table, versions

import hydra_ensembles as he
from hydra_ensembles import data
from hydra_ensembles.demo.embedded import SAMPLE, load_backbone, load_sample
from hydra_ensembles.demo.run import COLUMNS, SCORES, DemoSettings, prepare_data, sizes
from hydra_ensembles.heads.members import circuit_members
from hydra_ensembles.report.compare import Column

PRUNED = (9, 10, 12)
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


def choose(shared: Path) -> dict[str, Any]:
    """Measure every number of heads."""
    inside, outside = held_out(shared)
    settings, backbone = DemoSettings(prune=max(PRUNED)), load_backbone()
    prepared = prepare_data(load_sample(), backbone, settings)
    ranking: dict[str, Any] = {"budget": max(PRUNED), "method": settings.method}
    ranking["layers"] = range(settings.shared_layers, backbone.num_layers)
    sets = prepared["circuit_id"], prepared["circuit_ood"]
    scores: tuple[Any, ...] = ("avg", "acc", "ood")
    circuits = {score: he.extract_circuit(backbone, *sets, score=score, **ranking) for score in scores}

    def measured(model: he.Ensemble, name: str) -> dict[str, float]:
        beside = SCORES[: model.num_members]
        found = he.evaluate(model, inside, {"near": {FOREIGN: outside}}, name=name, scores=beside).numbers()
        keys = ("accuracy", "ece", "near.auroc", "near.fpr95", *(f"{score}:near.auroc" for score in beside))
        return {key: found[key] for key in keys}

    rows: list[dict[str, Any]] = [{"method": "Single", "pruned": 0, **measured(backbone, "Single")}]
    for pruned in PRUNED:
        row: dict[str, Any] = {"method": "Hydra (Circ)", "pruned": pruned}
        try:
            members = circuit_members(circuits, pruned, 3)
            row |= measured(he.fuse([he.prune(backbone, heads) for heads in members]), f"circuit {pruned}")
        except he.HydraError as error:  # two circuits agree on their first heads
            row["failed"] = str(error)
        rows.append(row)
    able = [row for row in rows[1:] if "failed" not in row]
    return {
        "command": "python benchmarks/demo.py --shared FOLDER",
        "criterion": "mean of accuracy and near.auroc (maximum softmax probability) of Hydra (Circ)",
        "chosen": max(able, key=lambda row: row["accuracy"] + row["near.auroc"])["pruned"],
        "samples": {"id": len(inside), "ood": len(outside), "ranking": sizes(prepared)["circuit_id"]},
        "method": settings.method,
        "shared_layers": settings.shared_layers,
        "seed": settings.seed,
        "versions": versions(),
        "rows": rows,
    }


def demo_table() -> str:
    """The table of the README: all methods of one run of the demo; the best number of each column is bold."""
    found = load("demo.json")
    costs = {cost["name"]: cost for cost in found["measured"]["costs"]}
    columns = []  # of each column, the cells from top to bottom
    for column in COLUMNS:
        places = [(one["numbers"], costs[name], one) for name, one in found["methods"].items()]
        values = [next((place[column.key] for place in some if column.key in place), None) for some in places]
        best = _best(column, [value for value in values if value is not None])
        texts = ["–" if value is None else column.write(value) for value in values]
        columns.append([f"**{text}**" if text == best else text for text in texts])
    names = [name.replace("*", "\\*") for name in found["methods"]]
    header = ["method", *(column.long_heading for column in COLUMNS)]
    settings, samples = found["settings"], found["samples"]
    about = (
        f"{samples['test']} test images of seven EuroSAT classes; near-OOD: {samples['AnnualCrop']} AnnualCrop and "
        f"{samples['River']} River, two classes the model does not know; far-OOD: {samples['FashionMNIST']} "
        f"Fashion-MNIST. Circuits: {settings['method']}, {samples['circuit_id']} ID and "
        f"{samples['circuit_ood']} OOD validation images, {settings['prune']} of 36 heads pruned per member, none "
        f"in the first {settings['shared_layers']} of 6 layers, which the members share; no fine-tuning. "
        "OOD score: maximum softmax probability (*by MI*: mutual information). \\* Stored logits of "
        "three models trained from different seeds; its time is that of a stack of three models. Time: a batch of "
        f"{settings['latency_batch']} on {found['hardware']}, against Single. From `results/demo.json`."
    )
    return "\n".join([*table(header, zip(names, *columns, strict=True)), "", about])


def _best(column: Column, values: list[float]) -> str | None:
    """How the best number is written; None where all are written alike."""
    if len({column.write(value) for value in values}) < 2:
        return None
    return column.write(max(values) if column.better == "higher" else min(values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, required=True, help="folder with data/images/eurosat")
    parser.add_argument("--output", type=Path, default=RESULTS / "demo_choice.json")
    options = parser.parse_args()
    store(options.output, choose(options.shared))


if __name__ == "__main__":
    main()

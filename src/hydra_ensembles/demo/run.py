"""The demo from start to end: build a Hydra Ensemble from the embedded backbone, compare it, write everything down."""

import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..calibrate import calibrate, fit_calibration
from ..circuit.scores import Method
from ..data.batching import batches
from ..data.dataset import ImageDataset, subset
from ..errors import ConfigError
from ..evaluation.evaluate import evaluate, evaluate_logits
from ..evaluation.evaluation import Evaluation, describe_model
from ..model.cost import Cost, measure_costs
from ..model.ensemble import Ensemble
from ..pipeline.chain import build
from ..pipeline.run_folder import RunFolder
from ..pipeline.settings import HydraConfig
from ..prediction import ScoreName
from ..report.compare import Column, Comparison, compare, save_costs
from ..report.html import write_report
from ..schema import to_plain
from .embedded import FAR, ID_NAME, NEAR, DemoSample, load_backbone, load_deep_logits, load_sample

SINGLE, TAYLOR, CIRC_AVG = "Single", "Taylor", "CircAvg"
HYDRA_TAYLOR, HYDRA_CIRC, DEEP = "Hydra (Taylor)", "Hydra (Circ)", "Deep Ensemble*"
METHODS = (SINGLE, TAYLOR, CIRC_AVG, HYDRA_TAYLOR, HYDRA_CIRC, DEEP)

SCORES: tuple[ScoreName, ...] = ("entropy", "mutual_information")  # a single model has only the first

COLUMNS = (
    Column("accuracy", "Acc %", better="higher", digits=1, scale=100),
    Column("ece", "ECE", better="lower", digits=3),
    Column("near.auroc", "AUROC", "Near-OOD", "higher", digits=1, scale=100),
    Column("near.fpr95", "FPR95", "Near-OOD", "lower", digits=1, scale=100),
    Column("mutual_information:near.auroc", "by MI", "Near-OOD", "higher", digits=1, scale=100),
    Column("far.auroc", "AUROC", "Far-OOD", "higher", digits=1, scale=100),
    Column("parameters", "Params M", better="lower", scale=1e-6),
    Column("latency_ratio", "Time", better="lower", suffix="×"),
)
"""What the demo's table shows."""

FORMAT = "hydra_ensembles demo 1"
TAYLOR_BATCH = 8  # images a batch for Taylor rankings: small, so that each ranking draws another half of them

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class DemoSettings:
    """How the demo is run: few settings, chosen on validation images only.

    Attributes:
        seed: Draws the images to rank heads on, and the batches of each Taylor ranking.
        prune: Heads each member loses, of 36; the choice is in `results/demo_choice.json`.
        shared_layers: The first so many of 6 layers stay whole and are common to all members, so they run once.
        method: How circuits are extracted.
        circuit_images: ID images, and as many OOD images, to rank heads on; fewer if `limit` is lower.
        limit: Use at most so many images of every set; None for all.
        batch_size: Images a batch while ranking and evaluating.
        bootstrap: Resamples behind the confidence intervals.
        latency_batch: Images in the batch whose time is measured.
        latency_repeats: How often it is.
    """

    seed: int = 0
    prune: int = 9
    shared_layers: int = 2
    method: Method = "exact"
    circuit_images: int = 128
    limit: int | None = None
    batch_size: int = 32
    bootstrap: int = 200
    latency_batch: int = 16
    latency_repeats: int = 7

    def __post_init__(self) -> None:
        """Check what a user can change."""
        least = {"seed": 0, "prune": 1, "circuit_images": 16, "batch_size": 1, "latency_batch": 1, "latency_repeats": 1}
        for name, smallest in (least if self.limit is None else {**least, "limit": 16}).items():
            if getattr(self, name) < smallest:
                raise ConfigError(f"DemoSettings.{name} must be at least {smallest}, got {getattr(self, name)}")

    @property
    def ranking_images(self) -> int:
        """ID images, and as many OOD images, that heads are ranked on."""
        return self.circuit_images if self.limit is None else min(self.circuit_images, self.limit)

    @property
    def builds(self) -> dict[str, HydraConfig]:
        """Three members by circuits (for both goals, accuracy, OOD detection), and three by Taylor rankings."""
        common = HydraConfig(self.prune, shared_layers=self.shared_layers, calibrate=False, seed=self.seed)
        half = max(1, -(-self.ranking_images // TAYLOR_BATCH) // 2)
        return {
            "circuit": replace(common, strategy="circuit", method=self.method, ties="order"),
            "taylor": replace(common, strategy="taylor", taylor_scope="global", calibration_batches=half),
        }


def run_demo(
    output: str | Path = "hydra-demo",
    settings: DemoSettings | None = None,
    *,
    progress: bool = True,
    announce: Callable[[str], object] = print,
) -> Comparison:
    """Make a Hydra Ensemble out of the embedded backbone and hold it against five other methods. No network.

    Interrupted, it goes on where it stopped when it is called again with the same settings. Called again after it
    has finished, it does everything anew, with the same numbers. A folder that holds something else is refused.

    Args:
        output: Folder for `report.html`, the fused ensemble in `model`, saved evaluations with the cost of each method
            in `evaluations`, and every number in `results.json`.
        settings: How to run it.
        progress: Whether to show progress bars.
        announce: Called with a line at the start of each step.

    Returns:
        The table of all methods.
    """
    settings = settings or DemoSettings()
    identity = {"format": FORMAT, "settings": to_plain(settings), "builds": to_plain(settings.builds)}
    run = RunFolder(output, identity, what="a demo")
    with run.working():
        return _run(run, Path(output).expanduser(), settings, progress, announce)


def _run(
    run: RunFolder, folder: Path, settings: DemoSettings, progress: bool, announce: Callable[[str], object]
) -> Comparison:
    """All steps of the demo."""
    started, images, backbone = time.perf_counter(), settings.ranking_images, load_backbone()
    data = prepare_data(load_sample(), backbone, settings)

    def built(name: str, id: Sequence[Batch]) -> tuple[Ensemble, Ensemble]:
        """An ensemble, and its first member by itself."""
        config, place = settings.builds[name], folder / "work" / name
        ood = data["circuit_ood"] if config.extracts_circuits else None
        fused = build(backbone, config, id=id, ood=ood, validation=data["calibration"], output=place, progress=progress)
        return fused, Ensemble.from_pretrained(place / "members" / "0")

    announce(
        f"Extracting circuits ({settings.method}, {images} ID + {images} OOD images): which {settings.prune} of 36 "
        "heads can each of three members do without?"
    )
    hydra_circ, circ_avg = built("circuit", data["circuit_id"])
    announce("Ranking heads by Taylor scores, for comparison")
    hydra_taylor, taylor = built("taylor", data["taylor_id"])
    announce("Evaluating on EuroSAT, on unknown land use (near-OOD) and on clothes (far-OOD)")
    # Without a temperature: of the 256 calibration images a model gets about five wrong, too few to fit one to; it
    # would make the confidences so extreme that they no longer rank OOD images.
    found = (backbone, taylor, circ_avg, hydra_taylor, hydra_circ)
    models = {
        name: calibrate(model, data["calibration"], temperature=False, familiarity=None)
        for name, model in zip(METHODS, found, strict=False)
    }
    logits = {name: stored[:, : settings.limit] for name, stored in load_deep_logits().items()}
    models[DEEP] = _deep_ensemble(backbone, logits["calibration"], data["calibration"])
    evaluations = _evaluations(models, data, logits, settings, progress)
    announce("Measuring the time of a batch")
    inputs = torch.cat([inputs for inputs, _ in data["test"]])[: settings.latency_batch]
    costs = measure_costs(models, inputs, repeats=settings.latency_repeats, warmup=1)

    models[HYDRA_CIRC].save_pretrained(folder / "model")
    for name, evaluation in evaluations.items():
        evaluation.save(folder / "evaluations" / f"{'_'.join(re.findall(r'[a-z]+', name.lower()))}.json")
    save_costs(folder / "evaluations" / "costs.json", costs)
    about: dict[str, Any] = {"title": "Hydra Ensembles: the embedded demo", "focus": HYDRA_CIRC, "baseline": SINGLE}
    write_report(folder / "report.html", evaluations, costs=costs, **about)
    measured = {"seconds": round(time.perf_counter() - started, 1), "costs": [asdict(cost) for cost in costs]}
    run.write("results", {**_results(models, evaluations, settings, data), "measured": measured})
    shutil.rmtree(folder / "work")  # only an interrupted demo needs it
    return _table(evaluations, costs, settings)


def prepare_data(sample: DemoSample, backbone: Ensemble, settings: DemoSettings) -> dict[str, list[Batch]]:
    """Every set as batches of tensors, decoded once; of the circuit sets as many images as the settings say.

    `taylor_id` are the images of `circuit_id` in smaller batches.
    """
    preprocessing: Any = backbone.metadata.preprocessing

    def read(images: ImageDataset, size: int = settings.batch_size) -> list[Batch]:
        return [(inputs, labels) for inputs, labels in batches(images, preprocessing, size)]  # type: ignore[misc]

    circuit_id = subset(sample.circuit_id, settings.ranking_images, settings.seed, stratified=True)
    circuit_ood = subset(sample.circuit_ood, settings.ranking_images, settings.seed)
    others = {name: images for name, images in sample.sets.items() if not name.startswith("circuit")}
    return {
        "circuit_id": read(circuit_id),
        "taylor_id": read(circuit_id, TAYLOR_BATCH),
        "circuit_ood": read(circuit_ood),
        **{name: read(images.select(range(len(images))[: settings.limit])) for name, images in others.items()},
    }


def _deep_ensemble(backbone: Ensemble, logits: Tensor, calibration: Sequence[Batch]) -> Ensemble:
    """A stack of the size of three backbones that share nothing, calibrated on their stored logits `[3, N, 7]`."""
    fit = fit_calibration(logits, torch.cat([labels for _, labels in calibration]), temperature=False)
    history = ("stored logits of three backbones trained from different seeds",)
    return Ensemble.stack([backbone] * len(logits)).with_metadata(calibration=fit.calibration, history=history)


def _evaluations(
    models: Mapping[str, Ensemble],
    data: Mapping[str, list[Batch]],
    deep: Mapping[str, Tensor],
    settings: DemoSettings,
    progress: bool,
) -> dict[str, Evaluation]:
    """Of every method; that of the deep ensemble from its stored logits."""

    def groups(sets: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        return {group: {name: sets[name] for name in names} for group, names in (("near", NEAR), ("far", FAR))}

    found: dict[str, Evaluation] = {}
    for name, model in models.items():
        common: dict[str, Any] = {"name": name, "id_name": ID_NAME, "keep_logits": True}
        common |= {"scores": SCORES[: model.num_members], "bootstrap": settings.bootstrap}
        if name == DEEP:
            labels, calibration = torch.cat([labels for _, labels in data["test"]]), model.metadata.calibration
            common["model"] = describe_model(model, model.num_members, model.num_classes, calibration)
            common |= {"calibration": calibration, "provenance": found[SINGLE].provenance}
            found[name] = evaluate_logits(deep["test"], labels, groups(deep), **common)
        else:
            shown = 4 if name == HYDRA_CIRC else 0
            found[name] = evaluate(model, data["test"], groups(data), gallery=shown, progress=progress, **common)
    return found


def _table(evaluations: Mapping[str, Evaluation], costs: tuple[Cost, ...], settings: DemoSettings) -> Comparison:
    """All methods side by side, with what a reader must know to judge them."""
    shown, images = compare(evaluations, costs, COLUMNS), settings.ranking_images
    notes = (
        *shown.notes,
        f"Circuits: {settings.method}, on {images} ID + {images} OOD validation images (PermanentCrop); "
        f"{settings.prune} of 36 heads pruned per member, none in the {settings.shared_layers} layers that all members "
        'share; no fine-tuning, no temperature. AUROC and FPR95 by maximum softmax probability; "by MI": by mutual '
        "information between members, which a single model does not have.",
        f"{DEEP}: stored logits of three backbones trained from different seeds; its time is that of a stack of three "
        f"models. Time: a batch of {settings.latency_batch} images, against Single.",
    )
    return replace(shown, notes=notes)


def _results(
    models: Mapping[str, Ensemble],
    evaluations: Mapping[str, Evaluation],
    settings: DemoSettings,
    data: Mapping[str, Sequence[Batch]],
) -> dict[str, Any]:
    """Every number of a run that does not differ from run to run, as plain data."""
    first = evaluations[SINGLE]
    samples = {name: sum(len(labels) for _, labels in found) for name, found in data.items() if name != "taylor_id"}
    return {
        "settings": to_plain(settings),
        "versions": dict(first.provenance.versions),
        "hardware": first.provenance.hardware,
        "samples": samples,
        "score": first.score,
        "convention": first.convention,
        "methods": {
            name: {
                "members": models[name].num_members,
                "heads_kept": [[len(layer) for layer in member] for member in models[name].heads],
                "parameters": found.model.parameters,
                "multiply_adds": found.model.multiply_adds,
                "threshold": None if found.selective is None else found.selective.threshold,
                "history": list(models[name].metadata.history),
                "numbers": found.numbers(),
                "intervals": {key: [one.low, one.high] for key, one in found.intervals.items()},
            }
            for name, found in evaluations.items()
        },
    }

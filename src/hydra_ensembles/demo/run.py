"""The demo from start to end: build a Hydra Ensemble from the embedded backbone, compare it, write everything down."""

import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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

SCORES: tuple[ScoreName, ...] = ("entropy", "mutual_information")
"""Scores reported beside the maximum softmax probability; a single model has no mutual information."""

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
            "circuit": replace(common, strategy="circuit", method=self.method),
            "taylor": replace(common, strategy="taylor", taylor_scope="global", calibration_batches=half),
        }


@dataclass(frozen=True)
class DemoResult:
    """What a demo found, and where it wrote it.

    Attributes:
        comparison: The table.
        output: The folder; saved evaluations, and the cost of each method, are in its folder `evaluations`.
        report: The HTML report.
        model: The fused ensemble, for `Ensemble.from_pretrained`.
        results: Every number, as JSON.
    """

    comparison: Comparison
    output: Path
    report: Path
    model: Path
    results: Path


def run_demo(
    output: str | Path = "hydra-demo",
    settings: DemoSettings | None = None,
    *,
    progress: bool = True,
    announce: Callable[[str], None] | None = None,
) -> DemoResult:
    """Make a Hydra Ensemble out of the embedded backbone and hold it against five other methods. No network.

    Interrupted, it goes on where it stopped when it is called again with the same settings. Called again after it
    has finished, it does everything anew, with the same numbers.

    Args:
        output: Folder for the report, the fused model, the evaluations and all numbers.
        settings: How to run it.
        progress: Whether to show progress bars.
        announce: Called with a line at the start of each step.

    Raises:
        CheckpointError: The folder holds something else.
    """
    settings = settings or DemoSettings()
    folder, started = Path(output).expanduser(), time.perf_counter()
    identity = {"format": FORMAT, "settings": to_plain(settings), "builds": to_plain(settings.builds)}
    run, seconds = RunFolder(folder, identity, what="a demo"), {}
    backbone = load_backbone()
    data = prepare_data(load_sample(), backbone, settings)

    @contextmanager
    def step(name: str, line: str) -> Iterator[None]:
        if announce is not None:
            announce(line)
        start = time.perf_counter()
        yield
        seconds[name] = round(time.perf_counter() - start, 1)

    def built(name: str, id: Sequence[Batch]) -> tuple[Ensemble, Ensemble]:
        """An ensemble, and its first member by itself."""
        config, place = settings.builds[name], folder / "work" / name
        ood = data["circuit_ood"] if config.extracts_circuits else None
        fused = build(backbone, config, id=id, ood=ood, validation=data["calibration"], output=place, progress=progress)
        return fused, Ensemble.from_pretrained(place / "members" / "0")

    images = settings.ranking_images
    with step(
        "circuits",
        f"Extracting circuits ({settings.method}, {images} ID + {images} OOD images): which {settings.prune} of 36 "
        "heads can each of three members do without?",
    ):
        hydra_circ, circ_avg = built("circuit", data["circuit_id"])
    with step("taylor", "Ranking heads by Taylor scores, for comparison"):
        hydra_taylor, taylor = built("taylor", data["taylor_id"])
    with step("evaluation", "Evaluating on EuroSAT, on unknown land use (near-OOD) and on clothes (far-OOD)"):
        found = (backbone, taylor, circ_avg, hydra_taylor, hydra_circ)
        # Without a temperature: of the 256 calibration images a model gets about five wrong, too few to fit one to; it
        # would make the confidences so extreme that they no longer rank OOD images.
        ready = [calibrate(model, data["calibration"], temperature=False) for model in found]
        logits = {name: stored[:, : settings.limit] for name, stored in load_deep_logits().items()}
        ready.append(_deep_ensemble(backbone, logits["calibration"], data["calibration"]))
        models = dict(zip(METHODS, ready, strict=True))
        evaluations = _evaluations(models, data, logits, settings, progress)
    with step("latency", "Measuring the time of a batch"):
        inputs = torch.cat([images for images, _ in data["test"]])[: settings.latency_batch]
        costs = measure_costs(models, inputs, repeats=settings.latency_repeats, warmup=1)

    model, report = folder / "model", folder / "report.html"
    models[HYDRA_CIRC].save_pretrained(model)
    for name, evaluation in evaluations.items():
        evaluation.save(folder / "evaluations" / f"{'_'.join(re.findall(r'[a-z]+', name.lower()))}.json")
    save_costs(folder / "evaluations" / "costs.json", costs)
    about: dict[str, Any] = {"title": "Hydra Ensembles: the embedded demo", "focus": HYDRA_CIRC, "baseline": SINGLE}
    write_report(report, evaluations, costs=costs, **about)
    seconds["all"] = round(time.perf_counter() - started, 1)
    run.write("results", _results(models, evaluations, costs, settings, sizes(data), seconds))
    shutil.rmtree(folder / "work")  # only an interrupted demo needs it
    return DemoResult(_table(evaluations, costs, settings), folder, report, model, folder / "results.json")


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


def sizes(data: Mapping[str, Sequence[Batch]]) -> dict[str, int]:
    """Images of each set that the demo reads."""
    counted = {name: sum(len(labels) for _, labels in found) for name, found in data.items()}
    return {name: count for name, count in counted.items() if name != "taylor_id"}


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
    """Of every method; a member is read off its ensemble, in which, without fine-tuning, it answers alike."""

    def groups(sets: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        return {group: {name: sets[name] for name in names} for group, names in (("near", NEAR), ("far", FAR))}

    def common(name: str) -> dict[str, Any]:
        measured = {"scores": SCORES[: models[name].num_members], "bootstrap": settings.bootstrap}
        return {"name": name, "id_name": ID_NAME, "keep_logits": True, **measured}

    def from_logits(name: str, like: Evaluation, id_logits: Tensor, ood: Mapping[str, Any]) -> Evaluation:
        assert like.logits is not None  # kept by `common`
        model, calibration = models[name], models[name].metadata.calibration
        described = describe_model(model, model.num_members, model.num_classes, calibration)
        more: dict[str, Any] = {"model": described, "calibration": calibration, "provenance": like.provenance}
        return evaluate_logits(id_logits, like.logits.id.labels, ood, **more, **common(name))

    found: dict[str, Evaluation] = {}
    for name in (SINGLE, HYDRA_TAYLOR, HYDRA_CIRC):
        shown = 4 if name == HYDRA_CIRC else 0
        found[name] = evaluate(
            models[name], data["test"], groups(data), gallery=shown, progress=progress, **common(name)
        )
    for name, fused in ((TAYLOR, found[HYDRA_TAYLOR]), (CIRC_AVG, found[HYDRA_CIRC])):
        assert fused.logits is not None
        ood = {group: {key: one[:1] for key, one in sets.items()} for group, sets in fused.logits.ood.items()}
        found[name] = from_logits(name, fused, fused.logits.id.logits[:1], ood)
    found[DEEP] = from_logits(DEEP, found[HYDRA_CIRC], deep["test"], groups(deep))
    return {name: found[name] for name in METHODS}


def _table(evaluations: Mapping[str, Evaluation], costs: tuple[Cost, ...], settings: DemoSettings) -> Comparison:
    """All methods side by side, with what a reader must know to judge them."""
    shown, images = compare(evaluations, costs, COLUMNS), settings.ranking_images
    notes = (
        *shown.notes,
        f"Circuits: {settings.method}, on {images} ID + {images} OOD validation images (PermanentCrop); "
        f"{settings.prune} of 36 heads pruned per member, none in the {settings.shared_layers} layers that all members "
        "share; no fine-tuning, no temperature.",
        'AUROC and FPR95 by maximum softmax probability; "by MI": the same AUROC by mutual information between '
        "members, which a single model does not have.",
        f"{DEEP}: stored logits of three backbones trained from different seeds; its time is that of a stack of three "
        f"models. Time: a batch of {settings.latency_batch} images, against Single.",
    )
    return replace(shown, notes=notes)


def _results(
    models: Mapping[str, Ensemble],
    evaluations: Mapping[str, Evaluation],
    costs: tuple[Cost, ...],
    settings: DemoSettings,
    samples: Mapping[str, int],
    seconds: Mapping[str, float],
) -> dict[str, Any]:
    """Every number of a run as plain data; what differs from run to run is under `measured` alone."""
    first = evaluations[SINGLE]
    return {
        "settings": to_plain(settings),
        "versions": dict(first.provenance.versions),
        "hardware": first.provenance.hardware,
        "samples": dict(samples),
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
        "measured": {"seconds": dict(seconds), "costs": [asdict(cost) for cost in costs]},
    }

"""The demo from start to end: build a Hydra Ensemble from the embedded backbone, compare it, write everything down."""

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
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
        common: dict[str, Any] = {
            "prune": self.prune,
            "shared_layers": self.shared_layers,
            "calibrate": False,
            "seed": self.seed,
        }
        half = max(1, -(-self.ranking_images // TAYLOR_BATCH) // 2)
        return {
            "circuit": HydraConfig(strategy="circuit", method=self.method, **common),
            "taylor": HydraConfig(strategy="taylor", taylor_scope="global", calibration_batches=half, **common),
        }


@dataclass(frozen=True)
class DemoResult:
    """What a demo found, and where it wrote it.

    Attributes:
        comparison: The table.
        evaluations: Of each method.
        costs: Parameters and time of each method.
        output: The folder.
        report: The HTML report.
        model: The fused ensemble, for `Ensemble.from_pretrained`.
        results: Every number, as JSON.
    """

    comparison: Comparison
    evaluations: dict[str, Evaluation]
    costs: tuple[Cost, ...]
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

    def built(name: str, id: Sequence[Batch]) -> Ensemble:
        config = settings.builds[name]
        ood = data["circuit_ood"] if config.extracts_circuits else None
        place = folder / "work" / name
        return build(backbone, config, id=id, ood=ood, validation=data["calibration"], output=place, progress=progress)

    models: dict[str, Ensemble] = {SINGLE: backbone}
    images = settings.ranking_images
    with step(
        "circuits",
        f"Extracting circuits ({settings.method}, {images} ID + {images} OOD images): which {settings.prune} of 36 "
        "heads can each of three members do without?",
    ):
        models[HYDRA_CIRC] = built("circuit", data["circuit_id"])
    with step("taylor", "Ranking heads by Taylor scores, for comparison"):
        models[HYDRA_TAYLOR] = built("taylor", data["taylor_id"])
    with step("evaluation", "Evaluating on EuroSAT, on unknown land use (near-OOD) and on clothes (far-OOD)"):
        for name, first in ((TAYLOR, "taylor"), (CIRC_AVG, "circuit")):
            models[name] = Ensemble.from_pretrained(folder / "work" / first / "members" / "0")
        models = {name: calibrated(model, data["calibration"]) for name, model in models.items()}
        evaluations = _evaluations(models, data, settings, progress)
        models[DEEP], evaluations[DEEP] = _deep_ensemble(backbone, data, evaluations[HYDRA_CIRC], settings)
    models = {name: models[name] for name in METHODS}  # in the order of the table
    evaluations = {name: evaluations[name] for name in METHODS}
    with step("latency", "Measuring the time of a batch"):
        inputs = torch.cat([images for images, _ in data["test"]])[: settings.latency_batch]
        costs = measure_costs(models, inputs, repeats=settings.latency_repeats, warmup=1)

    model, report = folder / "model", folder / "report.html"
    models[HYDRA_CIRC].save_pretrained(model)
    for name, evaluation in evaluations.items():
        words = "".join(character if character.isalnum() else " " for character in name.lower()).split()
        evaluation.save(folder / "evaluations" / f"{'_'.join(words)}.json")
    save_costs(folder / "evaluations" / "costs.json", costs)
    write_report(
        report,
        evaluations,
        ensemble=models[HYDRA_CIRC],
        costs=costs,
        title="Hydra Ensembles: the embedded demo",
        focus=HYDRA_CIRC,
        baseline=SINGLE,
    )
    seconds["all"] = round(time.perf_counter() - started, 1)
    run.write("results", _results(models, evaluations, costs, settings, sizes(data), seconds))
    shutil.rmtree(folder / "work")  # only an interrupted demo needs it
    comparison = _table(evaluations, costs, settings)
    return DemoResult(comparison, evaluations, costs, folder, report, model, folder / "results.json")


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


def calibrated(model: Ensemble, validation: Sequence[Batch]) -> Ensemble:
    """The model with a threshold for abstaining, and without a temperature.

    Of the 256 calibration images a model gets about five wrong, which is too little to fit a temperature to: it
    would make the confidences so extreme that they no longer rank OOD images.
    """
    return calibrate(model, validation, temperature=False)


def _groups(sets: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The OOD sets among sets by name, in their groups."""
    return {group: {name: sets[name] for name in names} for group, names in (("near", NEAR), ("far", FAR))}


def _evaluations(
    models: Mapping[str, Ensemble], data: Mapping[str, list[Batch]], settings: DemoSettings, progress: bool
) -> dict[str, Evaluation]:
    """Of every model; single members are read off their ensemble, in which, without fine-tuning, they answer alike."""
    found: dict[str, Evaluation] = {}
    for name in (SINGLE, HYDRA_TAYLOR, HYDRA_CIRC):
        found[name] = evaluate(
            models[name],
            data["test"],
            _groups(data),
            name=name,
            id_name=ID_NAME,
            scores=SCORES[: models[name].num_members],
            bootstrap=settings.bootstrap,
            gallery=4 if name == HYDRA_CIRC else 0,
            keep_logits=True,
            progress=progress,
        )
    for name, fused in ((TAYLOR, HYDRA_TAYLOR), (CIRC_AVG, HYDRA_CIRC)):
        logits = found[fused].logits
        assert logits is not None  # kept above
        ood = {group: {key: one[:1] for key, one in sets.items()} for group, sets in logits.ood.items()}
        found[name] = _from_logits(name, models[name], logits.id.logits[:1], ood, found[fused], settings)
    return found


def _deep_ensemble(
    backbone: Ensemble, data: Mapping[str, list[Batch]], like: Evaluation, settings: DemoSettings
) -> tuple[Ensemble, Evaluation]:
    """Three backbones that share nothing: a stack of the same size to measure, and stored logits."""
    logits = {name: stored[:, : settings.limit] for name, stored in load_deep_logits().items()}
    labels = torch.cat([labels for _, labels in data["calibration"]])
    fit = fit_calibration(logits["calibration"], labels, temperature=False)
    stack = Ensemble.stack([backbone] * logits["test"].shape[0]).with_metadata(
        calibration=fit.calibration, history=("stored logits of three backbones trained from different seeds",)
    )
    return stack, _from_logits(DEEP, stack, logits["test"], _groups(logits), like, settings)


def _from_logits(
    name: str,
    model: Ensemble,
    id_logits: Tensor,
    ood: Mapping[str, Mapping[str, Tensor]],
    like: Evaluation,
    settings: DemoSettings,
) -> Evaluation:
    """The evaluation of logits on the images that another evaluation saw."""
    assert like.logits is not None  # kept by `_evaluations`
    calibration = model.metadata.calibration
    return evaluate_logits(
        id_logits,
        like.logits.id.labels,
        ood,
        name=name,
        id_name=ID_NAME,
        scores=SCORES[: model.num_members],
        calibration=calibration,
        bootstrap=settings.bootstrap,
        keep_logits=True,
        model=describe_model(model, model.num_members, model.num_classes, calibration),
        provenance=like.provenance,
    )


def _table(evaluations: Mapping[str, Evaluation], costs: tuple[Cost, ...], settings: DemoSettings) -> Comparison:
    """All methods side by side, with what a reader must know to judge them."""
    shown = compare(evaluations, costs, COLUMNS)
    notes = (
        *shown.notes,
        f"Circuits: {settings.method}, on {settings.ranking_images} ID + {settings.ranking_images} OOD validation "
        f"images (PermanentCrop); {settings.prune} of 36 heads pruned per member, none in the {settings.shared_layers} "
        "layers that all members share; no fine-tuning, no temperature.",
        'AUROC and FPR95 by maximum softmax probability; "by MI": the same AUROC by mutual information between '
        "members, which a single model does not have.",
        f"{DEEP}: stored logits of three backbones trained from different seeds; its time is that of a stack of three "
        f"models. Time: a batch of {settings.latency_batch} images, against Single.",
    )
    return Comparison(shown.columns, shown.rows, notes)


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

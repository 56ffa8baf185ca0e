"""The demo from start to end: build pruned branches of the embedded backbone, compare them, write the results."""

import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from ..arguments import END, Checked, InnerShare, Range, Whole
from ..baselines.building_blocks import joined
from ..calibrate import calibrate, fit_calibration
from ..data.batching import BatchLoader, batches
from ..data.dataset import subset
from ..evaluation.evaluate import _described, evaluate
from ..evaluation.evaluation import Evaluation
from ..familiarity import fit_familiarity
from ..files import expanded
from ..model.config import Sharing
from ..model.cost import measure_costs
from ..model.ensemble import Ensemble
from ..pipeline.build import build
from ..pipeline.settings import HydraConfig, Strategy
from ..prediction import Prediction
from ..report.compare import save_costs
from ..report.html import write_report
from ..run_folder import RunFolder
from ..schema import to_plain
from ..training.recipe import Recipe
from .embedded import FAR, ID_NAME, NEAR, DemoSample, load_answers, load_backbone, load_sample
from .gains import BRANCHES, DEEP, FAMILIAR, SINGLE, Answers, AnswersBySet, Gains, gains

METHODS = (SINGLE, BRANCHES, DEEP)
FORMAT = "hydra_ensembles demo 2"
TRAIN_BATCH = 64
OOD_GROUPS = {"near": NEAR, "far": FAR}
SEEN = ("calibration", "test", *NEAR, *FAR)  # the sets behind the numbers

ImageBatch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class DemoSettings(Checked):
    """How the demo is run: few settings, chosen on images that it does not report on (`results/demo_choice.json`).

    Attributes:
        seed: Seed for drawing the training images and their order, and the members.
        strategy: How the members' heads are chosen.
        prune: Heads each member loses, of 36; 0 for none.
        whole: Whether the last member keeps all heads.
        shared_layers: Number of first layers, of 6, that all members share, so that they run once; not trained.
        epochs: Passes over the training images, for all members together.
        learning_rate: Learning rate, at its peak.
        new_classifiers: Whether each member starts with a new classifier, or with that of the backbone.
        classifier_rate: Learning rate of the classifiers, as a multiple of the others'.
        share: Share of familiar images that the thresholds promise to accept.
        draws: Random splits into halves behind every number and interval.
        limit: Maximum number of images of every set; None for all.
        batch_size: Images per batch in ranking and evaluation.
        latency_batch: Batch size for measuring latency.
        latency_repeats: How often latency is measured.
    """

    seed: int = 0
    strategy: Strategy = "sampled"
    prune: int = 2
    whole: bool = False
    shared_layers: int = 4
    epochs: int = 4
    learning_rate: float = 1e-4
    new_classifiers: bool = True
    classifier_rate: float = 20.0
    share: InnerShare = 0.9
    draws: Annotated[int, Range(2, END - 1)] = 20
    limit: Annotated[int, Range(28, END - 1)] | None = None
    batch_size: Whole = 32
    latency_batch: Whole = 16
    latency_repeats: Whole = 7

    def __post_init__(self) -> None:
        """Check the settings; constructing those of the build checks the rest."""
        super().__post_init__()
        _ = self.build

    @property
    def build(self) -> HydraConfig:
        """Settings of the build: three members that train together above a frozen trunk."""
        recipe = Recipe(
            learning_rate=self.learning_rate,
            classifier_rate=self.classifier_rate,
            epochs=self.epochs,
            warmup=0.1,
            weight_decay=0.01,
            clip_norm=1.0,
            dropout=0.0,
            last_blocks=6 - self.shared_layers,
            reinit_classifier="random" if self.new_classifiers else None,
            seed=self.seed,
            batch_size=TRAIN_BATCH,
        )
        return HydraConfig(
            prune=self.prune or None,
            strategy=self.strategy,
            method="exact",
            ties="order",
            whole=self.whole,
            shared_layers=self.shared_layers,
            training="together",
            recipe=recipe,
            familiarity="mahalanobis",
            accepted_share=(1.0 + self.share) / 2,
            seed=self.seed,
        )


def run_demo(
    output: str | Path = "hydra-demo",
    settings: DemoSettings | None = None,
    *,
    progress: bool = True,
    announce: Callable[[str], object] = print,
) -> Gains:
    """Make pruned branches of the embedded backbone; compare them with that model and a Deep Ensemble. No network.

    An interrupted run resumes when called again with the same settings; a finished one is repeated, with the same
    numbers. A folder with other contents raises an error.

    Args:
        output: Folder for `report.html`, the fused ensemble in `model`, saved evaluations with the cost of each method
            in `evaluations`, and every number in `results.json`.
        settings: How to run it.
        progress: Whether to show progress bars.
        announce: Called with a line at the start of each step.

    Returns:
        What each method catches, and at what price; `.table` shows it.
    """
    settings = settings or DemoSettings()
    identity = {"format": FORMAT, "settings": to_plain(settings), "build": to_plain(settings.build)}
    run = RunFolder(output, identity, what="a demo")
    folder = expanded(output)
    with run.working():
        started = time.perf_counter()
        backbone = load_backbone()
        sample = load_sample()
        data = prepare_data(sample, backbone, settings)
        train = training_batches(sample, backbone, settings)
        announce(
            f"Building three members above {settings.shared_layers} shared layers of 6, trained together on "
            f"{len(train.dataset)} images for {settings.epochs} epochs"
        )
        models = build_models(backbone, data, train, settings, folder / "work", progress)
        announce("Evaluating on EuroSAT, unknown land use (near) and clothes (far)")
        stored = load_answers()
        answers: dict[str, list[AnswersBySet]] = {}  # of every model of a method; the first one runs here
        for name, model in models.items():
            answers[name] = [answers_of(model, data), *(_limited(sets, settings.limit) for sets in stored[name])]
        deep = {name: Answers.stacked([sets[name] for sets in answers[SINGLE]]) for name in SEEN}
        answers[DEEP] = [deep]
        models[DEEP] = _deep_ensemble(backbone, deep["calibration"], data["calibration"], settings.build.accepted_share)
        labels = torch.cat([labels for name in ("calibration", "test") for _, labels in data[name]])
        base_cost = backbone.describe().multiply_adds
        prices = {name: model.describe().multiply_adds / base_cost for name, model in models.items()}
        reported = {name: [_reported(sets) for sets in parts] for name, parts in answers.items()}
        result = gains(reported, labels, OOD_GROUPS, prices, share=settings.share, draws=settings.draws)
        evaluations = _evaluations(models, data, deep, progress)
        announce("Measuring the time of a batch")
        inputs = torch.cat([inputs for inputs, _ in data["test"]])[: settings.latency_batch]
        costs = measure_costs(models, inputs, repeats=settings.latency_repeats, warmup=1)

        models[BRANCHES].save_pretrained(folder / "model")
        for name, evaluation in evaluations.items():
            evaluation.save(folder / "evaluations" / f"{'_'.join(re.findall(r'[a-z]+', name.lower()))}.json")
        save_costs(folder / "evaluations" / "costs.json", costs)
        about: dict[str, Any] = {"title": "Hydra Ensembles: the embedded demo", "focus": BRANCHES, "baseline": SINGLE}
        write_report(evaluations, folder / "report.html", costs=costs, **about)
        measured = {"seconds": round(time.perf_counter() - started, 1), "costs": [asdict(cost) for cost in costs]}
        run.write("results", {**_results(models, evaluations, settings, data, result), "measured": measured})
        shutil.rmtree(folder / "work")  # only an interrupted demo needs it
        return result


def prepare_data(sample: DemoSample, backbone: Ensemble, settings: DemoSettings) -> dict[str, list[ImageBatch]]:
    """Every set except `train` as batches of tensors, decoded once."""
    preprocessing: Any = backbone.metadata.preprocessing
    limited = {name: data.select(range(len(data))[: settings.limit]) for name, data in sample.sets.items()}
    if settings.limit is not None:  # fitted statistics need all classes
        limited["circuit_id"] = subset(sample.circuit_id, settings.limit, settings.seed, stratified=True)
    return {
        name: [(inputs, labels) for inputs, labels in batches(raw, preprocessing, settings.batch_size)]  # type: ignore[misc]
        for name, raw in limited.items()
        if name != "train"
    }


def training_batches(sample: DemoSample, backbone: Ensemble, settings: DemoSettings) -> BatchLoader:
    """Training images, randomly rotated and mirrored: satellite images have no preferred orientation."""
    preprocessing: Any = backbone.metadata.preprocessing
    count = len(sample.train) if settings.limit is None else min(settings.limit, len(sample.train))
    chosen = subset(sample.train, count, settings.seed, stratified=True)

    def turned(images: list[Any]) -> Tensor:
        pixels: Tensor = preprocessing(images)  # [B, 3, h, w]
        turns, mirrored = torch.randint(4, (len(pixels),)).tolist(), torch.randint(2, (len(pixels),)).tolist()
        once = (torch.rot90(image, turn, (1, 2)) for image, turn in zip(pixels, turns, strict=True))
        return torch.stack([image.flip(2) if mirror else image for image, mirror in zip(once, mirrored, strict=True)])

    return BatchLoader(chosen, turned, min(TRAIN_BATCH, count), shuffle=True, seed=settings.seed, drop_last=True)


def build_models(
    backbone: Ensemble,
    data: Mapping[str, list[ImageBatch]],
    train: BatchLoader,
    settings: DemoSettings,
    output: Path | None = None,
    progress: bool = True,
) -> dict[str, Ensemble]:
    """The backbone and the branches built from it, both with familiarity fitted and thresholds set the same way."""
    config = settings.build
    ranking = data["circuit_id"]
    sets: dict[str, Any] = {"id": ranking, "ood": data["circuit_ood"], "validation": data["calibration"]}
    hydra = build(backbone, config, train=train, **sets, output=output, progress=progress)
    familiar = fit_familiarity(backbone, ranking, held_out=0.0, seed=settings.seed)
    return {SINGLE: calibrate(familiar, data["calibration"], share=config.accepted_share), BRANCHES: hydra}


def answers_of(model: Ensemble, data: Mapping[str, Sequence[ImageBatch]]) -> dict[str, Answers]:
    """Answers of a model with fitted familiarity to the sets behind the numbers."""
    said = {name: Prediction.concat([model.predict(inputs) for inputs, _ in data[name]]) for name in SEEN}
    return {name: Answers(answer.member_logits, answer.score("mahalanobis")) for name, answer in said.items()}


def _reported(sets: AnswersBySet) -> dict[str, Answers]:
    """The labelled sets joined into one, which every draw splits into halves, and the OOD sets."""
    familiar = Answers.joined([sets["calibration"], sets["test"]])
    return {FAMILIAR: familiar, **{name: sets[name] for names in OOD_GROUPS.values() for name in names}}


def _limited(sets: AnswersBySet, limit: int | None) -> dict[str, Answers]:
    return {name: Answers(answers.logits[:, :limit], answers.unfamiliar[:limit]) for name, answers in sets.items()}


def _deep_ensemble(backbone: Ensemble, answers: Answers, calibration: Sequence[ImageBatch], share: float) -> Ensemble:
    """A stack as large as separate backbones, for its cost; calibrated on their stored answers to accept `share`."""
    fitted = fit_calibration(answers.logits, torch.cat([labels for _, labels in calibration]), share=share)
    history = ("stored answers of backbones trained from different seeds",)
    stack = joined([backbone] * len(answers.logits), Sharing())  # equal on purpose: `Ensemble.stack` would warn
    return stack.with_metadata(calibration=fitted, history=history)


def _evaluations(
    models: Mapping[str, Ensemble], data: Mapping[str, list[ImageBatch]], deep: AnswersBySet, progress: bool
) -> dict[str, Evaluation]:
    """Evaluations of every method for the report; that of the Deep Ensemble is computed from its models' answers."""

    def groups(sets: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        return {group: {name: sets[name] for name in names} for group, names in OOD_GROUPS.items()}

    evaluations: dict[str, Evaluation] = {}
    for name, model in models.items():
        common: dict[str, Any] = {"name": name, "id_name": ID_NAME, "keep_logits": True}
        if name == DEEP:
            labels = torch.cat([labels for _, labels in data["test"]])
            calibration = model.metadata.calibration
            stored = torch.cat([deep[key].logits for key in SEEN], dim=1)
            rows = dict(zip(SEEN, torch.arange(stored.shape[1]).split([deep[key].size for key in SEEN]), strict=True))
            outside = {group: {key: [rows[key]] for key in keys} for group, keys in OOD_GROUPS.items()}
            common |= {"calibration": calibration, "progress": False}
            found = evaluate(partial(torch.index_select, stored, 1), [(rows["test"], labels)], outside, **common)
            about = _described(model, model.num_members, model.num_classes)
            evaluations[name] = replace(found, model=replace(about, calibration=found.model.calibration))
        else:
            common |= {"scores": ("mahalanobis",)}
            evaluations[name] = evaluate(model, data["test"], groups(data), progress=progress, **common)
    return evaluations


def _results(
    models: Mapping[str, Ensemble],
    evaluations: Mapping[str, Evaluation],
    settings: DemoSettings,
    data: Mapping[str, Sequence[ImageBatch]],
    result: Gains,
) -> dict[str, Any]:
    """Every reproducible number of a run, as plain data."""
    first = evaluations[SINGLE]
    return {
        "settings": to_plain(settings),
        "versions": dict(first.provenance.versions),
        "hardware": first.provenance.hardware,
        "samples": {name: sum(len(labels) for _, labels in some) for name, some in data.items()},
        "gains": to_plain(result),
        "methods": {
            name: {
                "members": models[name].num_members,
                "heads_kept": [[len(layer) for layer in member] for member in models[name].heads],
                "parameters": evaluation.model.parameters,
                "multiply_adds": evaluation.model.multiply_adds,
                "history": list(models[name].metadata.history),
                "numbers": evaluation.numbers(),
            }
            for name, evaluation in evaluations.items()
        },
    }

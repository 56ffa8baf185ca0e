"""The six methods of the demo's table, each as a model and its evaluation."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..calibrate import calibrate, fit_calibration
from ..data.batching import batches
from ..data.dataset import ImageDataset, subset
from ..evaluation.evaluate import evaluate, evaluate_logits
from ..evaluation.evaluation import Evaluation, describe_model
from ..model.cost import Cost, measure_costs
from ..model.ensemble import Ensemble
from ..pipeline.chain import build
from ..pipeline.settings import HydraConfig
from ..prediction import ScoreName
from .embedded import ID_NAME, DemoSample, load_deep_logits
from .settings import DemoSettings

SINGLE, TAYLOR, CIRC_AVG = "Single", "Taylor", "CircAvg"
HYDRA_TAYLOR, HYDRA_CIRC, DEEP = "Hydra (Taylor)", "Hydra (Circ)", "Deep Ensemble*"
METHODS = (SINGLE, TAYLOR, CIRC_AVG, HYDRA_TAYLOR, HYDRA_CIRC, DEEP)

SCORES: tuple[ScoreName, ...] = ("entropy", "mutual_information")
"""Scores reported beside the maximum softmax probability; a single model has no mutual information."""

Batch = tuple[Tensor, Tensor]
Announce = Callable[[str], None]


@dataclass(frozen=True)
class DemoData:
    """The sample as batches of tensors, decoded once."""

    circuit_id: list[Batch]
    taylor_id: list[Batch]
    circuit_ood: list[Batch]
    calibration: list[Batch]
    test: list[Batch]
    ood: Mapping[str, Mapping[str, list[Batch]]]

    @classmethod
    def prepare(cls, sample: DemoSample, backbone: Ensemble, settings: DemoSettings) -> "DemoData":
        """Decode and preprocess all images; of the circuit sets as many as the settings say, drawn by the seed."""
        count, size = settings.ranking_images, settings.batch_size
        circuit_id = subset(sample.circuit_id, count, settings.seed, stratified=True)
        circuit_ood = subset(sample.circuit_ood, count, settings.seed)

        def limited(images: ImageDataset) -> list[Batch]:
            return _batches(images.select(range(len(images))[: settings.limit]), backbone, size)

        return cls(
            circuit_id=_batches(circuit_id, backbone, size),
            taylor_id=_batches(circuit_id, backbone, settings.taylor_batch_size),
            circuit_ood=_batches(circuit_ood, backbone, size),
            calibration=limited(sample.calibration),
            test=limited(sample.test),
            ood={
                group: {name: limited(images) for name, images in sets.items()}
                for group, sets in (("near", sample.near), ("far", sample.far))
            },
        )

    def samples(self) -> dict[str, int]:
        """Images of each set that the demo reads."""
        sets = {name: getattr(self, name) for name in ("circuit_id", "circuit_ood", "calibration", "test")}
        sets |= {name: found for one in self.ood.values() for name, found in one.items()}
        return {name: sum(len(labels) for _, labels in found) for name, found in sets.items()}


@dataclass(frozen=True)
class Row:
    """One method: the model (for the Deep Ensemble a stand-in of the same shape) and what it scored."""

    model: Ensemble
    evaluation: Evaluation


class Methods:
    """Makes the methods one after another; builds that were interrupted go on where they stopped.

    Attributes:
        seconds: Time of each step.
    """

    def __init__(
        self, backbone: Ensemble, data: DemoData, settings: DemoSettings, work: Path, progress: bool, announce: Announce
    ) -> None:
        self.backbone, self.data, self.settings = backbone, data, settings
        self.work, self.progress, self.announce = work, progress, announce
        self.seconds: dict[str, float] = {}

    def rows(self) -> dict[str, Row]:
        """All methods, in the order of the table."""
        settings = self.settings
        with self._step(
            "circuits",
            f"Extracting circuits ({settings.method}, {settings.ranking_images} ID + {settings.ranking_images} OOD "
            f"images): which {settings.prune} of 36 heads can each of three members do without?",
        ):
            circuit = self._calibrated(self._build("circuit", settings.circuit_build, self.data.circuit_id))
        with self._step("taylor", "Ranking heads by Taylor scores, for comparison"):
            taylor = self._calibrated(self._build("taylor", settings.taylor_build, self.data.taylor_id))
        with self._step("evaluation", "Evaluating on EuroSAT, on unknown land use (near-OOD) and on clothes (far-OOD)"):
            single = self._calibrated(self.backbone)
            rows = {SINGLE: Row(single, self._evaluated(single, SINGLE))}
            fused = {
                name: self._evaluated(model, name) for name, model in ((HYDRA_TAYLOR, taylor), (HYDRA_CIRC, circuit))
            }
            rows[TAYLOR] = self._first_member(TAYLOR, "taylor", fused[HYDRA_TAYLOR])
            rows[CIRC_AVG] = self._first_member(CIRC_AVG, "circuit", fused[HYDRA_CIRC])
            rows[HYDRA_TAYLOR] = Row(taylor, fused[HYDRA_TAYLOR])
            rows[HYDRA_CIRC] = Row(circuit, fused[HYDRA_CIRC])
            rows[DEEP] = self._deep_ensemble(fused[HYDRA_CIRC])
        return rows

    def costs(self, rows: Mapping[str, Row]) -> tuple[Cost, ...]:
        """Parameters and measured time of every method, all taking turns on one batch."""
        settings = self.settings
        inputs = torch.cat([images for images, _ in self.data.test])[: settings.latency_batch]
        with self._step("latency", "Measuring the time of a batch"):
            models = {name: row.model for name, row in rows.items()}
            return measure_costs(models, inputs, repeats=settings.latency_repeats, warmup=1)

    @contextmanager
    def _step(self, name: str, line: str) -> Iterator[None]:
        self.announce(line)
        start = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - start, 1)

    def _build(self, name: str, config: HydraConfig, id: Sequence[Batch]) -> Ensemble:
        data = self.data
        return build(
            self.backbone,
            config,
            id=id,
            ood=data.circuit_ood if config.extracts_circuits else None,
            validation=data.calibration,
            output=self.work / name,
            progress=self.progress,
        )

    def _calibrated(self, model: Ensemble) -> Ensemble:
        return calibrated(model, self.data.calibration)

    def _evaluated(self, model: Ensemble, name: str) -> Evaluation:
        return evaluate(
            model,
            self.data.test,
            self.data.ood,
            name=name,
            id_name=ID_NAME,
            scores=SCORES[: model.num_members],
            bootstrap=self.settings.bootstrap,
            gallery=4 if name == HYDRA_CIRC else 0,
            keep_logits=True,
            progress=self.progress,
        )

    def _first_member(self, name: str, build_name: str, fused: Evaluation) -> Row:
        """The first member by itself; without fine-tuning its logits are those it has in the fused ensemble."""
        member = self._calibrated(Ensemble.from_pretrained(self.work / build_name / "members" / "0"))
        logits = fused.logits
        assert logits is not None
        ood = {group: {key: one[:1] for key, one in sets.items()} for group, sets in logits.ood.items()}
        return Row(member, self._from_logits(name, member, logits.id.logits[:1], logits.id.labels, ood, fused))

    def _deep_ensemble(self, like: Evaluation) -> Row:
        """Three backbones that share nothing: stored logits, and a stack of the same size to measure."""
        logits = {name: stored[:, : self.settings.limit] for name, stored in load_deep_logits().items()}
        labels = torch.cat([labels for _, labels in self.data.calibration])
        fit = fit_calibration(logits["calibration"], labels, temperature=False)
        stack = Ensemble.stack([self.backbone] * logits["test"].shape[0]).with_metadata(
            calibration=fit.calibration, history=("stored logits of three backbones trained from different seeds",)
        )
        assert like.logits is not None
        ood = {group: {key: logits[key] for key in sets} for group, sets in self.data.ood.items()}
        return Row(stack, self._from_logits(DEEP, stack, logits["test"], like.logits.id.labels, ood, like))

    def _from_logits(
        self, name: str, model: Ensemble, id_logits: Tensor, labels: Tensor, ood: Mapping[str, Any], like: Evaluation
    ) -> Evaluation:
        calibration = model.metadata.calibration
        return evaluate_logits(
            id_logits,
            labels,
            ood,
            name=name,
            id_name=ID_NAME,
            scores=SCORES[: model.num_members],
            calibration=calibration,
            bootstrap=self.settings.bootstrap,
            keep_logits=True,
            model=describe_model(model, model.num_members, model.num_classes, calibration),
            provenance=like.provenance,
        )


def calibrated(model: Ensemble, validation: Sequence[Batch]) -> Ensemble:
    """The model with a threshold for abstaining, and without a temperature.

    Of the 256 calibration images a model gets about five wrong, which is too little to fit a temperature to: it
    would make the confidences so extreme that they no longer rank OOD images.
    """
    return calibrate(model, validation, temperature=False)


def _batches(images: ImageDataset, backbone: Ensemble, size: int) -> list[Batch]:
    """All images of a set as tensors, with the backbone's preprocessing."""
    preprocessing: Any = backbone.metadata.preprocessing
    return [(inputs, labels) for inputs, labels in batches(images, preprocessing, size)]  # type: ignore[misc]

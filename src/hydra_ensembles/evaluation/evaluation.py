"""`Evaluation`: everything one model was measured on, as a value that can be saved, loaded and compared."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from .._utils import write_atomically
from ..errors import DataError
from ..metrics.bootstrap import Interval
from ..metrics.inputs import Convention
from ..prediction import ScoreName
from ..schema import from_plain, to_plain
from .figures import Figures
from .gallery import GalleryItem
from .logits import MemberLogits
from .results import Classification, Detection, ModelInfo, OodSet, Provenance, Selective

FORMAT = "hydra_ensembles.evaluation"
VERSION = 1


@dataclass(frozen=True)
class Evaluation:
    """Every metric of one model on one suite.

    Attributes:
        name: What tables call the model.
        id_name: Name of the in-distribution set.
        score: The score that detects OOD samples and orders the risk-coverage curve.
        convention: How AUPR and FPR95 are defined.
        id: Results on the in-distribution set.
        ood: Results on each OOD set.
        means: Unweighted means of the detection results: `near`, `far`, `all`, as far as there are such sets;
            for each score.
        shift: Results on labelled sets under distribution shift.
        selective: What the calibrated threshold does; None without one.
        model: What was evaluated.
        provenance: Where.
        figures: Curves for the report.
        intervals: Bootstrap intervals, under the names of `numbers`; empty unless asked for.
        gallery: The inputs the model was most and least sure about; empty unless asked for.
        logits: The member logits; None unless asked for. They are saved as a file of their own.
    """

    name: str
    id_name: str
    score: ScoreName
    convention: Convention
    id: Classification
    ood: Mapping[str, OodSet]
    means: Mapping[str, Mapping[str, Detection]]
    shift: Mapping[str, Classification]
    selective: Selective | None
    model: ModelInfo
    provenance: Provenance
    figures: Figures
    intervals: Mapping[str, Interval] = field(default_factory=dict)
    gallery: tuple[GalleryItem, ...] = ()
    logits: MemberLogits | None = field(default=None, compare=False, repr=False)

    @property
    def samples(self) -> dict[str, int]:
        """Number of samples of every set, by its name in `numbers`."""
        counts = {self.id_name: self.id.samples}
        counts |= {f"ood.{name}": result.samples for name, result in self.ood.items()}
        return counts | {f"shift.{name}": result.samples for name, result in self.shift.items()}

    def numbers(self) -> dict[str, float]:
        """Every number under one flat name: `accuracy`, `near.auroc`, `ood.cifar100.fpr95`, `shift.fog.ece`.

        Detection results of a score other than the evaluation's own have its name in front: `energy:near.auroc`.
        """
        found = dict(self.id.numbers())
        for group, by_score in self.means.items():
            for score, detection in by_score.items():
                found |= {f"{self._prefix(score)}{group}.{key}": value for key, value in asdict(detection).items()}
        for name, result in self.ood.items():
            for score, detection in result.detection.items():
                found |= {f"{self._prefix(score)}ood.{name}.{key}": value for key, value in asdict(detection).items()}
            found[f"ood.{name}.mutual_information"] = result.mutual_information
            found[f"ood.{name}.disagreement"] = result.disagreement
            if result.abstained is not None:
                found[f"ood.{name}.abstained"] = result.abstained
        counted = [result for result in self.ood.values() if result.group != "apart"]
        for key in ("mutual_information", "disagreement"):
            if counted:
                found[f"all.{key}"] = sum(getattr(result, key) for result in counted) / len(counted)
        for name, shifted in self.shift.items():
            found |= {f"shift.{name}.{key}": value for key, value in shifted.numbers()}
        if self.selective is not None:
            found["selective.accepted"] = self.selective.accepted
            if self.selective.risk is not None:
                found["selective.risk"] = self.selective.risk
        return found

    def _prefix(self, score: str) -> str:
        return "" if score == self.score else f"{score}:"

    def renamed(self, name: str) -> "Evaluation":
        """The same evaluation under another name."""
        return replace(self, name=name)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, without the member logits."""
        parts = {item.name: to_plain(getattr(self, item.name)) for item in fields(self) if item.name != "logits"}
        return {"format": FORMAT, "version": VERSION, **parts}

    @classmethod
    def from_dict(cls, data: Any, path: str = "evaluation") -> "Evaluation":
        """Build an evaluation from what `to_dict` gave, checked field by field.

        Raises:
            DataError: It is not an evaluation, or one of a newer version.
            ConfigError: A field does not hold what it should.
        """
        if not isinstance(data, Mapping) or data.get("format") != FORMAT:
            raise DataError(f'{path} is not a saved evaluation: it lacks "format": "{FORMAT}"')
        if data.get("version") != VERSION:
            raise DataError(
                f"{path} has version {data.get('version')!r} and this library reads {VERSION}; "
                "evaluate again, or install the version that wrote it"
            )
        parts = {key: value for key, value in data.items() if key not in ("format", "version")}
        return from_plain(cls, parts, path)

    def save(self, path: str | Path) -> None:
        """Write a JSON file, and beside it `<name>.logits.safetensors` where member logits were kept.

        The JSON file is written last, so that it never lies there without its logits. An evaluation without logits
        leaves alone those beside the file: it may have been read without them.
        """
        path = Path(path)
        text = json.dumps(self.to_dict(), indent=1, allow_nan=False, ensure_ascii=False)
        if self.logits is not None:
            self.logits.save(logits_path(path))
        write_atomically(path, text.encode())

    @classmethod
    def load(cls, path: str | Path, *, with_logits: bool = False) -> "Evaluation":
        """Read a JSON file that `save` wrote.

        Args:
            path: The JSON file.
            with_logits: Also read the member logits beside it.

        Raises:
            DataError: The file is missing or not an evaluation.
        """
        path = Path(path)
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(f"{path} cannot be read as a saved evaluation: {error}") from error
        evaluation = cls.from_dict(data, str(path))
        return replace(evaluation, logits=MemberLogits.load(logits_path(path))) if with_logits else evaluation


def logits_path(path: Path) -> Path:
    """Where the member logits of the evaluation at `path` lie."""
    return path.with_name(f"{path.stem}.logits.safetensors")

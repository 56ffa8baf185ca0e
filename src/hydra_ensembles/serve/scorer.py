"""The function from raw rows to columns of answers: `score` maps it over an archive, other engines over what they have.

Its two halves run in different processes: `Reading` decodes and holds no weights, the model sees whole batches.
"""

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from .._utils import __version__, library
from ..errors import ConfigError, DataError
from ..model.dual_encoder import load, require_classifier
from ..model.ensemble import Answering
from ..optimize.freeze import Plan
from ..optimize.runner import PLANS, USUAL_SHAPES, seconds_of
from .batcher import Batching, Runner, stacked
from .protocol import REASON_WORDS, Arrays, output_fields
from .rows import Item, Reader, Row

INPUT, CLASS, ERROR, NOTE = "input", "class_name", "error", "note"  # columns beside the outputs of the model
KEPT = "kept_"  # prefix of a kept column whose name an answer already has
WINDOW = 8  # batches of texts that are read at a time: those of similar length share a batch


@dataclass(frozen=True)
class ReadItems:
    """Items as batches for the model, each with the places of its rows, and the columns that are known without it."""

    columns: Mapping[str, list[str | None]]
    batches: Sequence[tuple[list[int], Any]]


@dataclass(frozen=True)
class Reading:
    """From items to batches."""

    reader: Reader
    batching: Batching
    kept: Mapping[str, str]  # columns of tables by their names in the output

    @property
    def window(self) -> int:
        """Items to read at a time."""
        return self.batching.sizes[-1] * (1 if self.reader.kind == "image" else WINDOW)

    def __getitem__(self, asked: tuple[Any, Sequence[Item]]) -> tuple[Any, ReadItems]:
        """Items that have been read, with the mark they came with; a `DataLoader` calls it in its processes."""
        mark, items = asked
        rows = [Row(error=DataError(item.error)) if item.error else self.reader.read(item.content) for item in items]
        columns: dict[str, list[str | None]] = {INPUT: [_clean(item.name) for item in items]}
        for name, column in self.kept.items():
            columns[name] = [_as_text(item.kept.get(column)) for item in items]
        columns[ERROR] = [_clean(str(row.error)) if row.error else "" for row in rows]
        columns[NOTE] = [_clean("; ".join(row.notes)) for row in rows]
        return mark, ReadItems(columns, list(self.batching.batches(rows)))


class Scorer:
    """A model as a function from rows to columns of answers, in its fastest plan; a broken row does not raise.

    Examples:
        >>> from hydra_ensembles.serve import Scorer
        >>> scorer = Scorer("safe")  # once in every process
        >>> columns = scorer(["photos/1.jpg", "photos/2.jpg"])
        >>> columns["label"], columns["accept"], columns["error"]
    """

    def __init__(
        self,
        model: Any,
        *,
        keep: Sequence[str] = (),
        wide: bool = False,
        batch_size: int = 64,
        precision: Literal["float32", "bfloat16", "float16"] | None = None,
        plan: Plan | None = None,
    ) -> None:
        """Prepare a classifier, or load it from a folder or hub id.

        Args:
            model: The classifier. A folder is loaded onto the first GPU, if there is one.
            keep: Columns of tables to copy.
            wide: Whether `probs` and `member_logits`, which are long, are among the answers.
            batch_size: Samples per pass.
            precision: Floating type to compute in; None for that of the model.
            plan: How it runs, if that was measured before: answers of one plan are equal to the last bit.
        """
        if isinstance(model, str | Path):
            model = load(model, device="cuda" if torch.cuda.is_available() else "cpu")
        require_classifier(model, "score")
        every = output_fields(model)
        self.fields = [field for field in every if wide or not field.shape]
        self.labels = model.metadata.labels
        self.kept = kept_names(keep, [field.name for field in every])
        reader = Reader(model)
        reader.require_preprocessing()
        dtype: torch.dtype | None = None if precision is None else getattr(torch, precision)
        self.plan: Plan = _fastest(model, reader, batch_size, dtype) if plan is None else plan
        least = batch_size if model.device.type == "cpu" else max(1, batch_size // 4)
        shapes = max(3 * len(reader.examples()), USUAL_SHAPES)
        run: Any = model.optimize(plans=[self.plan], dtype=dtype, shapes=shapes)
        self._runner = Runner(run, batch_size, least)
        self.reading = Reading(Reader(run), self._runner.batching, self.kept)

    def __call__(self, rows: Sequence[Any]) -> Arrays:
        """The columns of images (paths, contents of files, pictures) or of texts (strings, or pairs of them)."""
        size, found = self.reading.window, list[Arrays]()
        for start in range(0, len(rows), size):
            _, read = self.reading[None, [Item("", row) for row in rows[start : start + size]]]
            found.append(self.answered(read))
        if not found:
            raise DataError("got no rows; give at least one")
        return {name: np.concatenate([part[name] for part in found]) for name in found[0] if name != INPUT}

    def answered(self, read: ReadItems) -> Arrays:
        """The columns of items that have been read; a row without an answer has NaN, the label -1, and no accept."""
        rows, errors = len(read.columns[INPUT]), list(read.columns[ERROR])
        blanks = {"bool": False, "int64": -1}
        found = {one.name: np.full((rows, *one.shape), blanks.get(one.dtype, np.nan), one.dtype) for one in self.fields}
        for places, inputs in read.batches:
            arrays, finite = self._runner.run(inputs, len(places))
            good = np.array(places)[finite]
            for name, column in found.items():
                column[good] = arrays[name][finite]
            for place in np.array(places)[~finite].tolist():
                errors[place] = str(self._runner.overflown)
        texts = {name: np.array(column, object) for name, column in {**read.columns, ERROR: errors}.items()}
        if self.labels:
            texts[CLASS] = np.array(["" if index < 0 else self.labels[index] for index in found["label"]], object)
        last = (CLASS, ERROR, NOTE)
        first = {name: column for name, column in texts.items() if name not in last}
        return {**first, **found, **{name: texts[name] for name in last if name in texts}}

    def about(self) -> dict[str, Any]:
        """Everything a reader of the columns needs to know."""
        fields = [{"name": field.name, "meaning": field.meaning} for field in self.fields]
        about = {"made_by": f"hydra_ensembles {__version__}", "outputs": fields, "labels": list(self.labels)}
        return {**about, "reasons": list(REASON_WORDS), "kept": self.kept, "plan": self.plan}


def kept_names(keep: Sequence[str], outputs: Iterable[str]) -> dict[str, str]:
    """Columns of tables to copy, by their names among answers."""
    taken = {INPUT, CLASS, ERROR, NOTE, *outputs}
    kept = {f"{KEPT}{name}" if name in taken else name: name for name in keep}
    if len(kept) < len(set(keep)):
        raise ConfigError(f"two columns of keep={list(keep)} would get one name; leave out one or rename it")
    return kept


def parquet(parts: Sequence[Arrays], facts: Mapping[bytes, bytes]) -> bytes:
    """Columns as the bytes of a Parquet file, with facts in its footer; several numbers per row are one list."""
    arrow, arrays = library("pyarrow", extra="data"), {}
    for name in parts[0]:
        array = np.concatenate([part[name] for part in parts])
        text = array.dtype.kind in "OU"
        values = arrow.array(array.tolist(), arrow.string()) if text else arrow.array(array.reshape(-1))
        for size in reversed(array.shape[1:]):
            values = arrow.FixedSizeListArray.from_arrays(values, size)
        arrays[name] = values
    sink = io.BytesIO()
    table = arrow.table(arrays).replace_schema_metadata(dict(facts))
    library("pyarrow.parquet", extra="data").write_table(table, sink)
    return sink.getvalue()


def _fastest(model: Answering, reader: Reader, batch_size: int, dtype: torch.dtype | None) -> Plan:
    """The plan that is fastest for a full batch of usual rows."""
    examples = reader.examples()
    single = model.front is model and model.num_members == 1
    if single or not examples:  # texts of any length, unpadded: one at a time
        return PLANS[0]
    batch = stacked([examples[len(examples) // 2]] * batch_size)
    runs: Any = {plan: model.optimize(plans=[plan], dtype=dtype).warm_up for plan in PLANS}  # type: ignore[attr-defined]
    seconds = seconds_of(runs, (batch,), model.device)
    return min(seconds, key=lambda plan: seconds[plan])


def _clean(text: str) -> str:
    """Text that can be written as UTF-8."""
    return text.encode("utf-8", "replace").decode()


def _as_text(value: Any) -> str | None:
    """A kept cell as text: numbers as they are written, lists and structures as JSON."""
    if value is None:
        return None
    return _clean(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))

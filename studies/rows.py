"""The rows of a study: what each method said of each sample of each set, in one Parquet file that any reader opens.

The file has a line a sample. `set` is `TASK|SET`: the test set of a task has its name, so `cifar100|cifar100` is the
test set of CIFAR-100, `cifar100|held-out` what calibrated and `cifar100|svhn` an OOD set of it; corrupted images are
`TASK|CORRUPTION SEVERITY`. All other columns are `METHOD|SEED|COLUMN`: `correct`, `doubt` (one minus the largest
probability), `calibrated_doubt`, `nll` and `calibrated_nll` (minus the log-probability of the label), `brier`,
`mahalanobis`, `entropy`, and so on; `label` and `prediction` in what a run makes. Numbers are float16. The sets by task
and group are in the file's metadata.

A run keeps all it made in its own folder. What the repository stores are the rows of the methods that users compare, at
most five seeds, the test sets whole and at most 1,000 samples of each OOD set (`published`).
"""

import io
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from hydra_ensembles.errors import DataError
from hydra_ensembles.files import write_atomically

Array = npt.NDArray[Any]
SINGLE = "Single"  # the method with the model a user has
HELD_OUT = "held-out"  # the samples that calibrate, beside the test set: `TASK|held-out`
COMPARED = (
    *(SINGLE, "Laplace (last layer)", "MC Dropout", "Soup", "Deep Ensembles", "Hydra", "Hydra, distilled"),
    *("Hydra (Taylor)", "Hydra (Circ)", "BayesVLM", "LoRA-single", "LoRA-Ensemble", "Label words"),
)
STORED = ("correct", "doubt", "calibrated_doubt", "calibrated_nll", "nll", "mahalanobis", "entropy")
MOST_SEEDS, MOST_OUTSIDE = 5, 1000
FORMAT = "hydra_ensembles.rows 1"
ABOUT = b"study"  # key of the file's metadata

Columns = Mapping[str, Array]  # by `SET|COLUMN`


class Rows:
    """The rows of a study: `about` has its name and, by task, its OOD sets by group and other facts."""

    def __init__(self, about: Mapping[str, Any], sets: Sequence[str], columns: Mapping[str, Any]) -> None:
        self.about = about
        self.sets, self._columns = np.asarray(sets), columns

    @classmethod
    def read(cls, path: Path) -> "Rows":
        """Read a file.

        Raises:
            DataError: There is no such file, or it is not one of rows.
        """
        try:
            table = pq.read_table(path, use_threads=False)
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{path} has no rows that can be read: {error}") from error
        about = json.loads((table.schema.metadata or {}).get(ABOUT, b"{}"))
        if about.get("format") != FORMAT:
            raise DataError(f"{path} is of the format {about.get('format')!r}; this version reads {FORMAT!r}")
        columns = {name: table[name] for name in table.column_names if name != "set"}
        return cls(about, table["set"].combine_chunks().cast(pa.string()).to_numpy(zero_copy_only=False), columns)

    @cached_property
    def places(self) -> dict[str, Array]:
        """The lines of every set."""
        names, numbers = np.unique(self.sets, return_inverse=True)
        order = np.argsort(numbers, kind="stable")
        parts = np.split(order, np.cumsum(np.bincount(numbers))[:-1])
        return {str(name): part for name, part in zip(names, parts, strict=True)}

    @cached_property
    def runs(self) -> dict[str, list[int]]:
        """Seeds by method, in the file's order."""
        seeds: dict[str, list[int]] = {}
        for name in self._columns:
            method, _, rest = name.partition("|")
            if rest and (seed := int(rest.partition("|")[0])) not in seeds.setdefault(method, []):
                seeds[method].append(seed)
        return seeds

    def columns(self, method: str, seed: int) -> dict[str, Array]:
        """The columns of a method's seed as `SET|COLUMN`; a set has only those that it was stored with."""
        found: dict[str, Array] = {}
        start = f"{method}|{seed}|"
        for name in (name for name in self._columns if name.startswith(start)):
            column = self._columns[name].combine_chunks()
            there = column.is_valid().to_numpy(zero_copy_only=False)
            values = column.fill_null(False if column.type == pa.bool_() else 0).to_numpy(zero_copy_only=False)
            for place, lines in self.places.items():
                if len(lines) and there[lines[0]]:
                    found[f"{place}|{name.removeprefix(start)}"] = values[lines]
        return found


def write_rows(path: Path, about: Mapping[str, Any], by_run: Mapping[tuple[str, int], Columns]) -> None:
    """Write the rows of methods and seeds, `SET|COLUMN` each, all on the same samples; the sets in the first's order.

    Labels, `TASK|SET|label`, are written once, as the column `label`.
    """
    first = next(iter(by_run.values()))
    sizes = {key.rpartition("|")[0]: len(values) for key, values in first.items()}
    names = [name for name, size in sizes.items() for _ in range(size)]
    table: dict[str, pa.Array] = {"set": pa.array(names, pa.string()).dictionary_encode()}
    for (method, seed), columns in by_run.items():
        for name in dict.fromkeys(key.rpartition("|")[2] for key in columns):
            parts = []
            for place, size in sizes.items():
                values = columns.get(f"{place}|{name}")
                if values is not None and len(values) != size:
                    raise DataError(f"{method}, seed {seed}: {place} has {len(values)} samples, not {size}")
                kind = _kind(name)
                parts.append(pa.nulls(size, kind) if values is None else pa.array(_stored(values, kind), kind))
            table["label" if name == "label" else f"{method}|{seed}|{name}"] = pa.concat_arrays(parts)
    content = io.BytesIO()
    joined = pa.table(table).replace_schema_metadata({ABOUT: json.dumps({"format": FORMAT, **about}).encode()})
    pq.write_table(
        joined,
        content,
        compression="zstd",
        compression_level=19,
        use_dictionary=["set"],
        use_byte_stream_split=[field.name for field in joined.schema if field.type == pa.float16()],
        write_statistics=False,
        row_group_size=max(1, len(names)),
        data_page_size=1 << 24,
    )
    write_atomically(path, content.getvalue())


def _kind(name: str) -> pa.DataType:
    """The type in which a column is stored."""
    return {"correct": pa.bool_(), "label": pa.int32(), "prediction": pa.int32()}.get(name, pa.float16())


def _stored(values: Array, kind: pa.DataType) -> Array:
    if kind == pa.float16():
        return np.clip(values.astype(np.float64), -60000, 60000).astype(np.float16)
    return values.astype(bool if kind == pa.bool_() else np.int32)


def published(rows: Rows) -> dict[tuple[str, int], dict[str, Array]]:
    """What the repository stores of a run: compared methods, five seeds, and a fixed draw of each OOD set."""
    taken: dict[tuple[str, int], dict[str, Array]] = {}
    for method in (method for method in COMPARED if method in rows.runs):
        for seed in rows.runs[method][:MOST_SEEDS]:
            columns = rows.columns(method, seed)
            said = [int(values.max()) for key, values in columns.items() if key.endswith("|prediction")]
            twice = "entropy" if max(said, default=2) < 2 else ""  # of two classes it says what the doubt says
            taken[method, seed] = {
                key: values[drawn(key.rpartition("|")[0], len(values))]
                for key, values in columns.items()
                if key.rpartition("|")[2] in STORED and key.rpartition("|")[2] != twice
            }
    return taken


def drawn(place: str, size: int) -> Array:
    """The samples of a set that are stored: all of a test set and of what calibrates, at most 1,000 of any other."""
    task, _, name = place.partition("|")
    if name in (task, HELD_OUT) or size <= MOST_OUTSIDE:
        return np.arange(size)
    return np.sort(np.random.default_rng(0).permutation(size)[:MOST_OUTSIDE])

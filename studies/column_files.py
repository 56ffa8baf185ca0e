"""Column files: the per-sample outputs of a study's models, as Parquet that any reader opens.

A file has one row per column: its `name` (`row|set|column`, or `set|column` for a file of one row) and its values as a
list under their type, `float16`, `bool`, `float64` or `string`; the row's other lists are null. For size, names are
sorted so that similar columns are adjacent, the two bytes of a float16 are stored separately (the upper ones repeat,
the lower ones are noise), and all values of a type share one page, so that compression finds repeats across columns.
"""

import io
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hydra_ensembles.errors import DataError
from hydra_ensembles.files import write_atomically

from .measures import Array

NAME = "name"
TYPES = {"float16": pa.float16(), "bool": pa.bool_(), "float64": pa.float64(), "string": pa.string()}
ONE_PAGE = 1 << 30  # bytes; larger than any file


def read_columns(path: Path) -> dict[str, Array]:
    """Read all columns of a file, with their types and in the file's order; empty if the file does not exist.

    Raises:
        DataError: The file is damaged, or is not a column file.
    """
    if not path.exists():
        return {}
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            table = file.read(use_threads=False)  # also called in forked processes
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read ({error}); if it is damaged, copy it anew from its source") from error
    if table.schema.names != [NAME, *TYPES]:
        raise DataError(f"{path} has {table.schema.names}; a file of columns has {[NAME, *TYPES]}")
    names = table[NAME].to_pylist()
    columns: dict[str, Array] = {}
    for kind in TYPES:
        lists = table[kind].combine_chunks()
        values = np.array(lists.values.to_numpy(zero_copy_only=False))  # a copy: Arrow's arrays are read-only
        ends = lists.offsets.to_numpy()
        for line in np.flatnonzero(lists.is_valid().to_numpy(zero_copy_only=False)):
            column = values[ends[line] : ends[line + 1]]
            columns[names[line]] = column.astype(str) if kind == "string" else column
    return {name: columns[name] for name in names}


def write_columns(path: Path, columns: Mapping[str, Array]) -> None:
    """Write columns `[N]` atomically; the same columns give the same bytes, whatever their order.

    Raises:
        DataError: A column has an unsupported type, or is not one-dimensional.
    """
    names = sorted(columns, key=lambda name: name.split("|")[::-1])
    kinds = [_kind(path, name, columns[name]) for name in names]
    table = {NAME: pa.array(names, pa.string())}
    for kind, element in TYPES.items():
        of_kind = [columns[name] for name, its in zip(names, kinds, strict=True) if its == kind]
        values = pa.array(np.concatenate(of_kind) if of_kind else [], element)
        sizes = [len(columns[name]) if its == kind else 0 for name, its in zip(names, kinds, strict=True)]
        ends = pa.array(np.cumsum([0, *sizes]), pa.int32())
        table[kind] = pa.ListArray.from_arrays(ends, values, mask=pa.array([its != kind for its in kinds], pa.bool_()))
    content = io.BytesIO()
    pq.write_table(
        pa.table(table),
        content,
        compression="brotli",
        compression_level=11,
        use_dictionary=False,
        use_byte_stream_split=["float16.list.element"],
        write_statistics=False,
        write_page_checksum=True,
        store_schema=False,
        data_page_size=ONE_PAGE,
        row_group_size=max(1, len(names)),
    )
    write_atomically(path, content.getvalue())


def _kind(path: Path, name: str, column: Array) -> str:
    """The type of a column as stored in files; raises if unsupported."""
    kind = "string" if column.dtype.kind == "U" else column.dtype.name
    if kind not in TYPES or column.ndim != 1:
        raise DataError(
            f"{name!r} for {path} is {column.dtype.name} of shape {list(column.shape)}; a column is one list of "
            f"{', '.join(TYPES)}"
        )
    return kind

"""Scoring of archives: a table of answers for every shard of every file, in a folder that can be resumed.

A shard is a range of a source file. Its name says which file, in which state, and which range; that it exists means
that it is finished, and the last one of a file says so in its name. So a resume lists the folder and opens no file that
is done. A file that was added or changed since then is scored; the others are not scored again.
"""

import io
import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from .._utils import __version__, library
from ..digest import digest
from ..errors import ConfigError, DataError, HydraError
from ..files import expanded, write_atomically, write_json
from ..model.dual_encoder import require_classifier
from ..model.ensemble import Answering
from ..monitor import Monitor
from ..optimize.freeze import Plan
from ..optimize.runner import PLANS, seconds_of
from ..store import Store
from .batcher import Runner, stacked
from .protocol import REASON_WORDS, Answer, Array, Arrays, output_fields
from .rows import Item, Reader, Row, Source, cores, sources

ROWS, END, ABOUT = "rows", "_end", "about.json"
CALIBRATION = b"hydra_ensembles calibration"  # in the metadata of a file of answers
INPUT, CLASS, ERROR, NOTE = "input", "class_name", "error", "note"  # columns beside the outputs of the model
KEPT = "kept_"  # prefix of a kept column whose name an answer already has


@dataclass(frozen=True)
class Scored:
    """Result of an archive: its rows, those without an answer, shards, and tests of a monitor that alarmed."""

    rows: int
    unreadable: int
    shards: int
    alarms: tuple[str, ...] = ()


def score(
    model: Any,
    source: str | Path,
    output: str | Path,
    *,
    columns: Mapping[str, str] | None = None,
    keep: Sequence[str] = (),
    wide: bool = False,
    batch_size: int = 64,
    shard_rows: int = 4096,
    progress: bool = True,
) -> Scored:
    """Score all images or texts of an archive into a folder of Parquet shards.

    Every item has one row in `rows/*.parquet`: `input`, its place in the archive; the outputs of the model; `error`,
    empty or why it has no answer; `note`, why it is probably not what was meant. A shard appears whole or not at all,
    so after any interruption, even a kill, the same call goes on. A folder of another model or setting is refused.
    Of a calibrated model a `Monitor` watches all shards in their order; `monitor.json` says what it saw, by shard.

    Args:
        model: A classifier.
        source: A file or a folder, as `rows.sources` takes it.
        output: Folder, made if it does not exist.
        columns: Names of the columns `image`, `text`, `text_pair` of tables, if they are others.
        keep: Columns of tables to copy; one with the name of an answer, such as `label`, becomes `kept_label`.
        wide: Whether `probs` and `member_logits`, which are long, are among the answers.
        batch_size: Samples per pass.
        shard_rows: Rows per shard.
        progress: Whether to show a bar.
    """
    path = expanded(output)
    require_classifier(model, "score")
    table, reader = _Table(model, keep, wide), Reader(model)
    found = sources(source, model.kind, columns, keep, images=shard_rows, without=path)
    settings = {"columns": dict(columns or {}), "keep": list(keep), "wide": wide, "rows": shard_rows}
    with Store(path, {"model": _identity(model), **settings}, "scores") as store:
        folder = path / ROWS
        folder.mkdir(exist_ok=True)
        keys, done = [_key(one) for one in found], _shards(folder)
        prefixes = {prefix for prefix, _ in keys}
        for prefix, state in done.keys() - set(keys):  # of a file that has changed since
            for file in done[prefix, state].values() if prefix in prefixes else ():
                file.unlink()
        write_json(path / ABOUT, table.about())
        # one plan for all shards: which is faster may change from run to run, and with it the last bits of the answers
        plan = store.step("plan", lambda: _fastest(model, reader, batch_size))
        runner = Runner(model.optimize(plans=[plan]), batch_size)
        with ThreadPoolExecutor(cores()) as pool, tqdm(unit=" rows", disable=not progress) as bar:

            def answered(items: Iterator[Item]) -> bytes:
                return table.parquet(_answered(items, reader, runner, pool, bar.update))

            for one, key in zip(found, keys, strict=True):
                _write_missing(folder, one, key, done.get(key, {}), shard_rows, answered)
    parquet, kept = library("pyarrow.parquet", extra="data"), _shards(folder)
    shards = [file for (prefix, _), files in kept.items() if prefix in prefixes for file in files.values()]
    errors = [parquet.read_table(file, columns=[ERROR])[ERROR].to_pylist() for file in shards]
    alarms = _watched(model, sorted(shards), path)
    return Scored(sum(map(len, errors)), sum(error != "" for part in errors for error in part), len(shards), alarms)


def _watched(model: Answering, shards: Sequence[Path], folder: Path) -> tuple[str, ...]:
    """Whether inputs are those of calibration, over all shards; writes what was seen after each of them."""
    if not calibration_of(model):
        return ()
    monitor, lines = Monitor(model), []
    for shard in shards:
        scores, _ = read_answers(shard, monitor)
        monitor.update_scores(scores)
        lines.append({"shard": shard.name, "rows": monitor.rows, "why": list(monitor.why), **monitor.wealth})
    write_json(folder / "monitor.json", {**monitor.summary(), "shards": lines})
    return monitor.why


def calibration_of(model: Answering) -> str:
    """The identity of the calibration by which answers can be watched; empty if there is none."""
    calibration = model.metadata.calibration
    return calibration.identity if calibration is not None and calibration.watched else ""


def read_answers(
    file: Path, monitor: Monitor, right: str | None = None, labels: Sequence[str] = ()
) -> tuple[dict[str, Array], tuple[Array, Array, Array] | None]:
    """What a monitor reads of a file of answers: scores; with a column `right`, also labels given, right, accepted."""
    table = library("pyarrow.parquet", extra="data").read_table(file)
    made = (table.schema.metadata or {}).get(CALIBRATION, b"").decode()
    if made != monitor.identity:
        raise DataError(f"{file} has answers of calibration {made or 'unknown'}, not of {monitor.identity}")
    answered = table.filter(library("pyarrow.compute", extra="data").equal(table[ERROR], ""))
    found = {name: answered[column].to_numpy() for name, column in monitor.columns.items()}
    if right is None:
        return found, None
    if right not in table.column_names:
        raise DataError(f"{file} has no column {right!r}; it has {', '.join(table.column_names)}")
    places = {str(label): place for place, label in enumerate(labels)}
    places |= {str(place): place for place in range(len(labels))} if not set(places) & {"0"} else {}
    truths = [-1 if one in (None, "", "-1") else places.get(str(one)) for one in answered[right].to_pylist()]
    if None in truths:
        raise DataError(f"{file}: {answered[right][truths.index(None)]} in column {right!r} is no class of the model")
    return found, (answered["label"].to_numpy(), np.array(truths, dtype=np.int64), answered["accept"].to_numpy(False))


def _fastest(model: Any, reader: Reader, batch_size: int) -> Plan:
    """The plan that is fastest for a full batch of usual rows."""
    examples = reader.examples()
    if not examples or (
        model.front is model and model.num_members == 1
    ):  # texts of any length, unpadded: one at a time
        return PLANS[0]
    batch = stacked([examples[len(examples) // 2]] * batch_size)
    seconds = seconds_of({plan: model.optimize(plans=[plan]).warm_up for plan in PLANS}, (batch,), model.device)
    return min(seconds, key=lambda plan: seconds[plan])


def _identity(model: Answering) -> str:
    """Everything that answers depend on."""
    metadata, fitted = model.metadata, model.metadata.familiarity
    familiarity = None if fitted is None else [fitted.settings, dict(fitted.state)]
    about = [metadata.preprocessing, metadata.calibration, list(metadata.labels), familiarity]
    return digest([model.config, model, about])


# --- shards ----------------------------------------------------------------------------------------------------------


def _shards(folder: Path) -> dict[tuple[str, str], dict[int, Path]]:
    """The finished shards by number, for every source and state of it, as their names say."""
    found: dict[tuple[str, str], dict[int, Path]] = {}
    for file in sorted(folder.glob("*.parquet")):
        readable, exact, number, state, *_ = file.stem.split("_")
        found.setdefault((f"{readable}_{exact}", state), {})[int(number)] = file
    return found


def _key(source: Source) -> tuple[str, str]:
    """The path of a source, readable and exact, and what its files are like now."""
    facts = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in source.files]
    prefix = f"{re.sub(r'[^A-Za-z0-9.-]+', '-', source.name)[-60:]}_{digest(source.name)[:8]}"
    return prefix, digest([source.part, facts])[:8]


def _write_missing(
    folder: Path,
    source: Source,
    key: tuple[str, str],
    done: Mapping[int, Path],
    rows: int,
    answered: Callable[[Iterator[Item]], bytes],
) -> None:
    """Write every shard of a source that is not there yet; what is whole is not opened."""
    if done and done[max(done)].stem.endswith(END) and len(done) == max(done) - source.part + 1:
        return
    (prefix, state), items = key, iter(source)
    number, first = source.part, next(items, None)
    while first is not None:
        part = chain([first], islice(items, rows - 1))
        content = None if number in done else answered(part)
        deque(part, 0)  # skip what is done
        first = next(items, None)
        if content is not None:
            write_atomically(folder / f"{prefix}_{number:05d}_{state}{END if first is None else ''}.parquet", content)
        number += 1


Part = tuple[list[Item], list[Row], list[Answer | HydraError]]


def _answered(
    items: Iterable[Item], reader: Reader, runner: Runner, pool: Executor, tick: Callable[[int], Any]
) -> Iterator[Part]:
    """Items with their rows and answers, in order; threads read some batches ahead of the model."""
    size = runner.sizes[-1] * (1 if reader.kind == "image" else 8)  # texts of equal length make full batches

    def read(item: Item) -> Row:
        return Row(error=DataError(item.error)) if item.error else reader.read(item.content)

    def batches() -> Iterator[list[tuple[Item, Future[Row]]]]:
        remaining = iter(items)
        while batch := [(item, pool.submit(read, item)) for item in islice(remaining, size)]:
            yield batch

    coming = batches()
    ahead = deque(islice(coming, 2))
    while ahead:
        batch = ahead.popleft()
        rows = [row.result() for _, row in batch]
        ahead.extend(islice(coming, 1))
        yield [item for item, _ in batch], rows, runner.answers(rows)
        tick(len(batch))


# --- columns ---------------------------------------------------------------------------------------------------------


class _Table:
    """The columns of the answers of a model."""

    def __init__(self, model: Answering, keep: Sequence[str], wide: bool) -> None:
        every = output_fields(model)
        self.fields = [field for field in every if wide or not field.shape]
        self.labels, self.calibration = model.metadata.labels, calibration_of(model)
        taken = {INPUT, CLASS, ERROR, NOTE, *(field.name for field in every)}
        self.kept = {f"{KEPT}{name}" if name in taken else name: name for name in keep}
        if len(self.kept) < len(set(keep)):
            raise ConfigError(f"two columns of keep={list(keep)} would get one name; leave out one or rename it")

    def columns(self, items: Sequence[Item], rows: Sequence[Row], answers: Sequence[Answer | HydraError]) -> Arrays:
        """The columns of some rows; without an answer numbers are NaN, the label is -1, and it is not accepted."""
        found: Arrays = {INPUT: _texts(item.name for item in items)}
        for name, column in self.kept.items():
            found[name] = _texts(_as_text(item.kept.get(column)) for item in items)
        for field in self.fields:
            blank = np.full(field.shape, {"bool": False, "int64": -1}.get(field.dtype, np.nan), field.dtype)
            given = [answer[field.name] if isinstance(answer, dict) else blank for answer in answers]
            found[field.name] = np.stack(given).astype(field.dtype)
        if self.labels:
            found[CLASS] = _texts("" if index < 0 else self.labels[index] for index in found["label"])
        found[ERROR] = _texts(str(answer) if isinstance(answer, HydraError) else "" for answer in answers)
        found[NOTE] = _texts("; ".join(row.notes) for row in rows)
        return found

    def parquet(self, parts: Iterable[Part]) -> bytes:
        """Rows as the bytes of a Parquet file; several numbers per row become a fixed-size list."""
        arrow, found, arrays = library("pyarrow", extra="data"), [self.columns(*part) for part in parts], {}
        for name in found[0]:
            array = np.concatenate([part[name] for part in found])
            text = array.dtype.kind in "OU"
            values = arrow.array(array.tolist(), arrow.string()) if text else arrow.array(array.reshape(-1))
            for size in reversed(array.shape[1:]):
                values = arrow.FixedSizeListArray.from_arrays(values, size)
            arrays[name] = values
        sink = io.BytesIO()
        table = arrow.table(arrays).replace_schema_metadata({CALIBRATION: self.calibration})
        library("pyarrow.parquet", extra="data").write_table(table, sink)
        return sink.getvalue()

    def about(self) -> dict[str, Any]:
        """Everything a reader of the shards needs to know."""
        fields = [{"name": field.name, "meaning": field.meaning} for field in self.fields]
        about = {"made_by": f"hydra_ensembles {__version__}", "outputs": fields, "labels": list(self.labels)}
        return {**about, "reasons": list(REASON_WORDS), "kept": self.kept}


def _texts(values: Iterable[str | None]) -> np.ndarray[Any, Any]:
    return np.array([None if value is None else value.encode("utf-8", "replace").decode() for value in values], object)


def _as_text(value: Any) -> str | None:
    """A kept cell as text: numbers as they are written, lists and structures as JSON."""
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)

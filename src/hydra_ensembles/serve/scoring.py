"""Scoring of archives: a table of answers for every shard of every file, in a folder that can be resumed.

A shard is a range of a source file. Its name says which file, in which state, and which range; that it exists means
that it is finished, and the last one of a file says so in its name. So a resume lists the folder and opens no file that
is done. A file that was added or changed since then is scored; the others are not scored again.

The rows of all missing shards are one stream: processes decode ahead of the model, a thread writes behind it. On a
cluster each worker has such a stream, of some shards at a time.
"""

import copy
import json
import os
import re
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, islice
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from .._utils import library
from ..digest import digest
from ..errors import CheckpointError, DataError, StorageError
from ..files import write_atomically
from ..model.dual_encoder import require_classifier
from ..model.ensemble import Answering
from ..monitor import Monitor
from ..settings import short
from ..store import IDENTITY, Store
from .protocol import REASON_WORDS, Array, Arrays, output_fields
from .rows import Item, Source, cores, file_system, is_local, sources
from .scorer import ERROR, Reading, ReadItems, Scorer, kept_names, parquet

ROWS, END, ABOUT, MONITOR, SUMMARY = "rows", "_end", "about.json", "monitor.json", "summary.json"
CALIBRATION, MODEL, RANGE = (f"hydra_ensembles {name}".encode() for name in ("calibration", "model", "rows"))  # footer
AT_ONCE = 8  # shards of one file that a worker of a cluster gets at a time
SHOWN = 5  # most frequent errors in a summary


@dataclass(frozen=True)
class Scored:
    """Result of an archive; print it.

    Attributes:
        rows: Rows of the archive.
        unreadable: Those without an answer.
        shards: Files of answers.
        accepted: Answers that are accepted; None if the model has no threshold.
        reasons: How many were declined for each reason.
        errors: The most frequent reasons why there is no answer, digits left out, and how many rows each has.
        promise: What is promised of the accepted answers.
        alarms: Tests of the monitor that alarmed.
        watched: Whether there was a monitor.
    """

    rows: int
    unreadable: int
    shards: int
    accepted: int | None = None
    reasons: Mapping[str, int] = field(default_factory=dict)
    errors: Mapping[str, int] = field(default_factory=dict)
    promise: Sequence[str] = ()
    alarms: Sequence[str] = ()
    watched: bool = False

    def __str__(self) -> str:
        lines, answered = [f"{self.rows:,} rows in {self.shards:,} files"], self.rows - self.unreadable
        if self.accepted is not None:
            why = ", ".join(f"{number:,} {reason}" for reason, number in self.reasons.items())
            share = f"accepted {self.accepted / max(answered, 1):.1%} of {answered:,} answers"
            lines.append(f"{share}; declined: {why or 0}")
        lines += [f"promised: {one}" for one in self.promise]
        if self.watched:
            changed = f"alarm, {', '.join(self.alarms)} changed" if self.alarms else "inputs are as in calibration"
            lines.append(f"monitor: {changed}")
        if self.unreadable:
            lines.append(f"{self.unreadable:,} have no answer: column `error` says why")
            lines += [f"  {number:,} {error}" for error, number in self.errors.items()]
        return "\n".join(lines)


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
    precision: Literal["float32", "bfloat16", "float16"] | None = None,
    workers: int | None = None,
    ray: str | None = None,
    progress: bool = True,
) -> Scored:
    """Score all images or texts of an archive into a folder of Parquet shards.

    Every item has one row in `rows/*.parquet`: `input`, its place in the archive; the outputs of the model; `error`,
    empty or why it has no answer; `note`, why it is probably not what was meant. A shard appears whole or not at all,
    so after any interruption, even a kill, the same call goes on. A folder of another model or setting is refused.
    Of a calibrated model a `Monitor` watches all shards in their order; `monitor.json` says what it saw, by shard, and
    `summary.json` has what is returned.

    Args:
        model: A classifier.
        source: A file, a folder, a pattern or a URL, as `rows.sources` takes it.
        output: Folder, made if it does not exist; or the URL of a place in an object store, used by one call at a time.
        columns: Names of the columns `image`, `text`, `text_pair` of tables, if they are others.
        keep: Columns of tables to copy; one with the name of an answer, such as `label`, becomes `kept_label`.
        wide: Whether `probs` and `member_logits`, which are long, are among the answers.
        batch_size: Samples per pass.
        shard_rows: Rows per shard.
        precision: Floating type to compute in; None for that of the model.
        workers: Processes that decode, 0 for none, beside each model; None for as many as there are cores (on Ray: on
            a GPU those that each has of the cluster's; none on a CPU, where a model takes one core).
        ray: Address of a Ray cluster that does the work, `"auto"` for the one that runs here, `"local"` for a new one.
            Its machines must reach `source` and `output` by the same names.
        progress: Whether to show a bar.
    """
    require_classifier(model, "score")
    kept_names(keep, [one.name for one in output_fields(model)])
    files, path = file_system(output)
    found = sources(source, model.kind, columns, keep, images=shard_rows, without=output)
    how: dict[str, Any] = {"keep": list(keep), "wide": wide, "precision": precision}
    settings = {"columns": dict(columns or {}), "rows": shard_rows, **how}
    identity = _identity(model)
    with _opened(files, path, {"model": identity, **settings}) as folder:
        about = folder.read_json(ABOUT) or {}
        # one plan for all shards: which is faster may change from run to run, and with it the last bits of the answers
        how |= {"batch_size": batch_size, "plan": about.get("plan")}
        keys, done = [_key(one) for one in found], folder.shards()
        prefixes = {prefix for prefix, _ in keys}
        for prefix, state in done.keys() - set(keys):  # of a file that has changed since
            for name in done[prefix, state].values() if prefix in prefixes else ():
                folder.remove(name)
        work = [Work(one, key, shard_rows, set(done.get(key, {})), {
            CALIBRATION: calibration_of(model).encode(), MODEL: identity.encode()
        }) for one, key in zip(found, keys, strict=True) if not _is_done(one, done.get(key, {}))]  # fmt: skip
        with tqdm(unit=" rows", disable=not progress) as bar:
            if work and ray is not None:
                _on_ray(ray, model, how, work, folder, workers, bar)
            elif work:
                scorer = Scorer(model, **how)
                folder.write_json(ABOUT, scorer.about())
                _write(scorer, work, folder, cores() if workers is None else workers, bar)
        kept = folder.shards()
        shards = [name for (prefix, _), names in kept.items() if prefix in prefixes for name in names.values()]
        return _summary(model, folder, sorted(shards), identity)


def _identity(model: Answering) -> str:
    """Everything that answers depend on."""
    metadata, fitted = model.metadata, model.metadata.familiarity
    familiarity = None if fitted is None else [fitted.settings, dict(fitted.state)]
    about = [metadata.preprocessing, metadata.calibration, list(metadata.labels), familiarity]
    return digest([model.config, model, about])


# --- where answers are -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Folder:
    """A folder here, or a place in an object store; what is written is whole or not there."""

    files: Any  # of fsspec
    path: str

    def write(self, name: str, content: bytes) -> None:
        """Write a file at once."""
        if is_local(self.files):
            write_atomically(Path(self.path) / name, content)
            return
        try:
            self.files.pipe_file(f"{self.path}/{name}", content)
        except Exception as error:  # of any library behind a URL
            told = "what is finished is kept: check the address, the rights and the space there, and run this again"
            raise StorageError(f"{self.path}/{name} cannot be written ({error}); {told}") from error

    def write_json(self, name: str, value: Any) -> None:
        """Write plain data."""
        self.write(name, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())

    def read_json(self, name: str) -> Any:
        """Read plain data; None if there is no such file."""
        path = f"{self.path}/{name}"
        return json.loads(self.files.cat_file(path)) if self.files.exists(path) else None

    def shards(self) -> dict[tuple[str, str], dict[int, str]]:
        """The finished shards by number, for every source and state of it, as their names say."""
        found: dict[tuple[str, str], dict[int, str]] = {}
        self.files.invalidate_cache()
        listed = self.files.ls(f"{self.path}/{ROWS}", detail=False) if self.files.exists(f"{self.path}/{ROWS}") else ()
        for file in sorted(map(PurePosixPath, listed)):
            if file.suffix == ".parquet":
                readable, exact, number, state, *_ = file.stem.split("_")
                found.setdefault((f"{readable}_{exact}", state), {})[int(number)] = f"{ROWS}/{file.name}"
        return found

    def remove(self, name: str) -> None:
        """Remove a file."""
        self.files.rm_file(f"{self.path}/{name}")

    def clear(self) -> None:
        """Remove what a killed worker had begun to write."""
        for leftover in Path(self.path, ROWS).glob(".*.tmp") if is_local(self.files) else ():
            leftover.unlink(missing_ok=True)


@contextmanager
def _opened(files: Any, path: str, identity: Mapping[str, Any]) -> Iterator[Folder]:
    """The folder of these answers, locked if it is here; one of other answers is refused."""
    folder = Folder(files, path)
    if is_local(files):
        with Store(path, identity, "scores"):
            yield folder
        return
    try:
        known = folder.read_json(IDENTITY)
    except Exception as error:  # of any library behind a URL
        raise StorageError(f"{path} cannot be reached: {error}; check the URL and the network") from error
    if known is None:
        folder.write_json(IDENTITY, identity)
    for name in identity if known is not None else ():
        if known.get(name) != identity[name]:
            was = f"{name} was {short(known.get(name))} and is {short(identity[name])}"
            raise CheckpointError(f"{path} holds scores of another run ({was}); give another place")
    yield folder


def _key(source: Source) -> tuple[str, str]:
    """The path of a source, readable and exact, and what its files are like now."""
    readable = re.sub(r"[^A-Za-z0-9.-]+", "-", source.name)[-60:].lstrip(".-")  # readers skip hidden files
    prefix = f"{readable or 'all'}_{digest(source.name)[:8]}"
    return prefix, source.state


def _is_done(source: Source, done: Mapping[int, str]) -> bool:
    """Whether all shards of a source are there."""
    return bool(done) and done[max(done)].endswith(f"{END}.parquet") and len(done) == max(done) - source.part + 1


# --- the stream ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """Missing shards of a source.

    Attributes:
        source: What to read.
        key: As in the names of its shards.
        rows: Of a shard.
        done: Numbers of shards that are there.
        facts: For the footers.
        first: Number of the first shard to look at, None for the first of all, and `stop`, of the one after the last.
    """

    source: Source
    key: tuple[str, str]
    rows: int
    done: Collection[int]
    facts: Mapping[bytes, bytes]
    first: int | None = None
    stop: int | None = None

    def windows(self, size: int) -> Iterator[tuple["Shard | None", list[Item]]]:
        """The rows of every missing shard, so many at a time; its last ones come with the shard."""
        number = self.source.part if self.first is None else self.first
        while number in self.done:
            number += 1
        items = self.source.items((number - self.source.part) * self.rows)
        head = next(items, None)
        while head is not None and (self.stop is None or number < self.stop):
            part = chain([head], islice(items, self.rows - 1))
            if number in self.done:
                deque(part, 0)
                head = next(items, None)
            else:
                window, count = list(islice(part, size)), 0
                while window:
                    count += len(window)
                    after = list(islice(part, size))
                    if not after:
                        head = next(items, None)
                    yield None if after else self._shard(number, count, head is None), window
                    window = after
            number += 1

    def _shard(self, number: int, count: int, is_last: bool) -> "Shard":
        (prefix, state), first = self.key, number * self.rows
        facts = {**self.facts, RANGE: f"{self.source.name} {first} {first + count}".encode()}
        return Shard(f"{ROWS}/{prefix}_{number:05d}_{state}{END if is_last else ''}.parquet", facts)


@dataclass(frozen=True)
class Shard:
    """A file of answers: its name, and what its footer says."""

    name: str
    facts: Mapping[bytes, bytes]


Window = tuple[Shard | None, list[Item]]


def _write(scorer: Scorer, work: Sequence[Work], folder: Folder, workers: int, bar: Any = None) -> int:
    """Write all missing shards; returns the rows."""
    rows, parts, pending = 0, list[Arrays](), list[Future[None]]()
    with ThreadPoolExecutor(1) as writer:

        def written(shard: Shard, parts: Sequence[Arrays]) -> None:
            folder.write(shard.name, parquet(parts, shard.facts))

        for shard, read in _read_ahead(scorer.reading, work, workers, bar):
            parts.append(scorer.answered(read))
            count = len(parts[-1][ERROR])
            rows += count
            if bar is not None:
                bar.update(count)
            if shard is not None:
                for one in pending:
                    one.result()
                pending, parts = [writer.submit(written, shard, parts)], []
        for one in pending:
            one.result()
    return rows


def _read_ahead(
    reading: Reading, work: Sequence[Work], workers: int, bar: Any
) -> Iterator[tuple[Shard | None, ReadItems]]:
    """All windows, read by processes that are at most two windows ahead each."""
    windows = _windows(work, reading.window, bar)
    if not workers:
        yield from map(reading.__getitem__, windows)
        return
    loader: Any = DataLoader(
        reading,  # type: ignore[arg-type]
        sampler=windows,
        batch_size=None,
        num_workers=workers,
        collate_fn=_as_it_is,
        worker_init_fn=_start,
        generator=torch.Generator(),  # the caller's is not touched
    )
    try:
        yield from loader
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        told = f"a process that reads has died ({error}); finished shards are kept"
        raise StorageError(f"{told}: run this again, with more memory in /dev/shm or with workers=0") from error


def _as_it_is(read: Any) -> Any:
    return read


def _start(_: int) -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # a worker has one core


def _windows(work: Sequence[Work], size: int, bar: Any) -> Iterator[Window]:
    """The windows of all shards; the bar learns about how many rows will come."""
    waiting, bytes_, counted = sum(one.source.size for one in work), 0, 0
    for one in work:
        if bar is not None:
            bytes_, counted = bytes_ + one.source.size, counted + max(one.source.count() - len(one.done) * one.rows, 0)
            bar.total = round(counted * waiting / bytes_) if counted and bytes_ else None
        yield from one.windows(size)


# --- what was seen ---------------------------------------------------------------------------------------------------


def _summary(model: Answering, folder: Folder, shards: Sequence[str], identity: str) -> Scored:
    """Read what the shards say; of a calibrated model, a monitor sees all of them in their order."""
    monitor, lines = Monitor(model) if calibration_of(model) else None, []
    watched = () if monitor is None else monitor.columns.values()
    errors, reasons, rows, answered, accepted = Counter[str](), Counter[int](), 0, 0, None
    for shard in shards:
        with library("pyarrow.parquet", extra="data").ParquetFile(
            f"{folder.path}/{shard}", filesystem=folder.files
        ) as file:
            if (file.schema_arrow.metadata or {}).get(MODEL, b"").decode() != identity:
                raise CheckpointError(
                    f"{folder.path}/{shard} has answers of another model; remove it, and run this again"
                )
            names = {ERROR, "accept", "reason", *watched} & set(file.schema_arrow.names)
            table = file.read(columns=sorted(names))
        rows += len(table)
        good = table.filter(library("pyarrow.compute", extra="data").equal(table[ERROR], ""))
        answered += len(good)
        if len(good) < len(table):
            errors.update(re.sub(r"\d+", "#", error) for error in table[ERROR].to_pylist() if error)
        if "accept" in names:
            accepted = (accepted or 0) + int(good["accept"].to_numpy(False).sum())
            reasons.update(good["reason"].to_numpy().tolist())
        if monitor is not None:
            monitor.update_scores({name: good[column].to_numpy() for name, column in monitor.columns.items()})
            lines.append(
                {"shard": PurePosixPath(shard).name, "rows": monitor.rows, "why": list(monitor.why), **monitor.wealth}
            )
    if monitor is not None:
        folder.write_json(MONITOR, {**monitor.summary(), "shards": lines})
    calibration = model.metadata.calibration
    found = Scored(
        rows,
        rows - answered,
        len(shards),
        accepted,
        {REASON_WORDS[code]: number for code, number in sorted(reasons.items()) if code},
        dict(errors.most_common(SHOWN)),
        () if calibration is None else tuple(map(str, calibration.in_force)),
        () if monitor is None else monitor.why,
        monitor is not None,
    )
    folder.write_json(SUMMARY, asdict(found))
    return found


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


# --- on a cluster ----------------------------------------------------------------------------------------------------


def _on_ray(
    address: str,
    model: Any,
    how: Mapping[str, Any],
    work: Sequence[Work],
    folder: Folder,
    workers: int | None,
    bar: Any,
) -> None:
    """Write all missing shards by Ray Data: `map_batches` over one actor for every GPU, or every core, of a cluster."""
    ray = library("ray", extra="ray")
    data = library("ray.data", extra="ray")
    if not ray.is_initialized():
        ray.init(None if address == "local" else address, log_to_driver=False)
    data.DataContext.get_current().enable_progress_bars = False
    here = ray.cluster_resources()
    gpus, cpus = int(here.get("GPU", 0)), int(here.get("CPU", 1))
    most = gpus or cpus
    decoders = (max(cpus // gpus - 1, 0) if gpus else 0) if workers is None else workers
    needs: dict[str, Any] = {"num_cpus": 1 + decoders, "num_gpus": 1 if gpus else 0}
    model = ray.put(model if model.device.type == "cpu" else copy.deepcopy(model).to("cpu"))
    if how["plan"] is None:
        about = ray.get(ray.remote(**needs)(_about).remote(model, how))
        folder.write_json(ABOUT, about)
        how = {**how, "plan": about["plan"]}
    tasks = [part for one in work for part in _split(one)]
    given = {"model": model, "how": how, "tasks": ray.put(tasks), "folder": folder, "workers": decoders}
    rows = data.from_items([{"task": index} for index in range(len(tasks))], override_num_blocks=min(len(tasks), 1000))
    actors = data.ActorPoolStrategy(min_size=1, max_size=max(min(most, len(tasks)), 1))
    found = rows.map_batches(_Worker, fn_constructor_kwargs=given, batch_size=1, compute=actors, **needs)
    for finished, batch in enumerate(found.iter_batches(batch_size=1), 1):
        bar.update(int(batch["rows"].sum()))
        bar.total = bar.n * len(tasks) // finished
    folder.clear()


def _split(work: Work) -> list[Work]:
    """Some shards at a time, of a source whose rows can be read from any on."""
    if not work.source.seeks:
        return [work]
    last = work.source.part - (-work.source.count() // work.rows)
    starts = range(work.source.part, max(last, 1), AT_ONCE)
    parts = [replace(work, first=start, stop=start + AT_ONCE) for start in starts]
    return [one for one in parts if set(range(one.first or 0, min(one.stop or 0, last))) - set(work.done)]


def _placed(model: Any) -> Any:
    return model.to("cuda") if torch.cuda.is_available() else model


def _about(model: Any, how: Mapping[str, Any]) -> dict[str, Any]:
    return Scorer(_placed(model), **how).about()


class _Worker:
    """A model on a worker of a cluster. What is done twice, because a worker was lost, is written twice alike."""

    def __init__(self, model: Any, how: Mapping[str, Any], tasks: Any, folder: Folder, workers: int) -> None:
        get = library("ray", extra="ray").get
        self._scorer, self._tasks = Scorer(_placed(get(model)), **how), get(tasks)
        self._folder, self._workers = folder, workers

    def __call__(self, batch: dict[str, Array]) -> dict[str, Array]:
        work = [self._tasks[index] for index in batch["task"].tolist()]
        return {"rows": np.array([_write(self._scorer, work, self._folder, self._workers)])}

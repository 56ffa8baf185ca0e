"""Archives scored: raw batches to columns of answers under any engine, and a folder of shards that outlives a kill."""

import copy
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from .._utils import __version__, require, require_device
from ..arguments import checked, require_whole
from ..batches import READ, tensors_digest
from ..data.dataset import decode_image, read_image
from ..data.loading import Columns
from ..errors import ConfigError, DataError, HydraError
from ..files import digest_of, write_atomically
from ..heads.ranking import model_fingerprint
from ..model.ensemble import Ensemble
from ..pipeline.run_folder import RESULT, RunFolder
from ..preprocessing import to_rgb
from ..schema import to_plain
from .archives import Archive, Item
from .outputs import REASON_WORDS, Field, columns, output_fields

Arrays = dict[str, np.ndarray[Any, Any]]

SHARD, UNREADABLE, SUMMARY = "rows/part-{:05d}.parquet", "unreadable/part-{:05d}.jsonl", "summary"
INPUT, CLASS, ERROR = "input", "class_name", "error"  # columns beside those of `outputs`


@dataclass(frozen=True)
class Prepared:
    """A batch ready for the model: inputs of the rows that could be read, where these are, and what the others say."""

    inputs: Any  # as `Ensemble.predict` takes it, or None where no row is left
    rows: list[int]
    errors: list[str]  # of every row; empty for those that are fine
    kept: Arrays


class Scorer:
    """A saved ensemble as a function of batches: `Scorer(path)(batch) -> columns`.

    A batch is a mapping of columns: `image` (encoded bytes, `{bytes, path}`, PIL images, `uint8` arrays `[H, W, 3]`, or
    paths), `text` (and `text_pair`), or inputs that are preprocessed already (`pixel_values`, `input_ids` …). The
    answer has a row for each of them, with the outputs of `serve.outputs`, the name of the class, and `error`: empty,
    or why a row could not be read; its numbers are NaN, its label is -1, and it is not accepted.

    It can be pickled, and each process loads the model when it is first called: give it to Ray Data
    (`map_batches(Scorer, fn_constructor_args=(path,), concurrency=2)`) or to `datasets.map(scorer, batched=True)`.

    Args:
        model: Folder of a saved ensemble or of a build, a hub id, or an ensemble.
        device: `auto` takes a GPU if there is one.
        dtype: Another precision than the saved one, such as `"bfloat16"`.
        columns: Names of the columns that are read.
        keep: Columns that come along; the others do not.
        wide: Whether `probs` and `member_logits`, which are long, are among the answers.
        workers: Threads that decode images.
    """

    @checked
    def __init__(
        self,
        model: str | Path | Ensemble,
        *,
        device: str = "auto",
        dtype: str | None = None,
        columns: Columns | None = None,
        keep: Sequence[str] = (),
        wide: bool = False,
        workers: int = 4,
    ) -> None:
        if dtype is not None and dtype not in ("float32", "float16", "bfloat16", "float64"):
            raise ConfigError(f"dtype={dtype!r} is not known; choose float32, bfloat16, float16 or float64")
        self.model, self.device, self.dtype, self.wide = model, device, dtype, wide
        self.columns, self.keep, self.workers = columns or Columns(), tuple(keep), require_whole("workers", workers, 1)
        self._loaded: Ensemble | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loaded": None}

    @property
    def ensemble(self) -> Ensemble:
        """The model, loaded when it is first asked for."""
        if self._loaded is None:
            place = "cuda" if torch.cuda.is_available() else "cpu"
            device = require_device(place if self.device == "auto" else self.device)
            dtype: torch.dtype | None = None if self.dtype is None else getattr(torch, self.dtype)
            if isinstance(self.model, Ensemble):
                fits = self.model.device == device and self.model.dtype == (dtype or self.model.dtype)
                self._loaded = self.model if fits else copy.deepcopy(self.model).to(device, dtype)
            else:
                folder = Path(self.model).expanduser()
                finished = folder / RESULT / "config.json"
                source = folder / RESULT if finished.is_file() else self.model
                self._loaded = Ensemble.from_pretrained(source, device=device, dtype=dtype)
            output_fields(self._loaded)  # refuses what has no classifier
        return self._loaded

    @property
    def fields(self) -> tuple[Field, ...]:
        """The outputs among the answers."""
        return tuple(one for one in output_fields(self.ensemble) if self.wide or not one.shape)

    def __call__(self, batch: Mapping[str, Any]) -> Arrays:
        """The answers to a batch, a row for each of its own."""
        return self.answer(self.prepare(batch))

    def prepare(self, batch: Mapping[str, Any]) -> Prepared:
        """Decode and preprocess a batch, on the CPU: while one is prepared the model may answer the last."""
        missing = [name for name in self.keep if name not in batch]
        if missing:
            raise DataError(f"the batch has no columns {missing} to keep; it has {sorted(batch)}")
        kept = {name: np.asarray(batch[name]) for name in self.keep}
        names, raw = READ[self.ensemble.kind], getattr(self.columns, self.ensemble.kind)
        if names[0] in batch:
            given = {name: _tensor(batch[name]) for name in names if name in batch}
            count = len(given[names[0]])
            return Prepared(given, list(range(count)), [""] * count, kept)
        if raw not in batch:
            raise DataError(f"the batch has no column {raw!r} or {names[0]!r}; it has {sorted(batch)}")
        if self.ensemble.metadata.preprocessing is None:
            raise DataError(f"the model has no saved preprocessing; give batches with {names[0]!r}")
        inputs, rows, errors = self._images(list(batch[raw])) if self.ensemble.kind == "image" else self._texts(batch)
        return Prepared(inputs, rows, errors, kept)

    def answer(self, prepared: Prepared) -> Arrays:
        """The columns of a prepared batch."""
        errors, count, rows = list(prepared.errors), len(prepared.errors), prepared.rows
        found: Arrays = {}
        if rows:
            prediction = self.ensemble.predict(prepared.inputs, check_finite=False)
            found = columns(prediction)
            finite = np.isfinite(found["member_logits"]).all(axis=(1, 2))  # [B]
            for row in np.asarray(rows)[~finite].tolist():
                errors[row] = "the model's answer is not finite; look for overflow, or run it in float32"
        bad = np.array([bool(error) for error in errors], dtype=bool)
        answers: Arrays = dict(prepared.kept)
        for one in self.fields:
            whole = np.full((count, *one.shape), {"bool": False, "int64": -1}.get(one.dtype, np.nan), one.dtype)
            if rows:
                whole[rows] = found[one.name]
                whole[bad] = {"bool": False, "int64": -1}.get(one.dtype, np.nan)
            answers[one.name] = whole
        labels = self.ensemble.metadata.labels
        if labels:
            answers[CLASS] = np.array(["" if one < 0 else labels[one] for one in answers["label"].tolist()], dtype=str)
        answers[ERROR] = np.array(errors, dtype=str)
        return answers

    def _images(self, items: list[Any]) -> tuple[Tensor | None, list[int], list[str]]:
        preprocess: Any = self.ensemble.metadata.preprocessing

        def one(item: Any) -> Tensor | str:
            try:
                return preprocess([_image(item)])  # [1, channels, H, W]
            except (HydraError, _pillow().DecompressionBombError) as error:
                return str(error)

        if self.workers > 1 and len(items) > 1:
            with ThreadPoolExecutor(self.workers) as pool:
                made = list(pool.map(one, items))
        else:
            made = list(map(one, items))
        errors = [one if isinstance(one, str) else "" for one in made]
        tensors = [one for one in made if isinstance(one, Tensor)]
        rows = [row for row, one in enumerate(made) if isinstance(one, Tensor)]
        return torch.cat(tensors) if tensors else None, rows, errors

    def _texts(self, batch: Mapping[str, Any]) -> tuple[Any, list[int], list[str]]:
        preprocess: Any = self.ensemble.metadata.preprocessing
        texts: list[Any] = [_plain(one) for one in batch[self.columns.text]]
        if self.columns.text_pair in batch:
            pairs = map(_plain, batch[self.columns.text_pair])
            texts = [(one, other) if isinstance(other, str) else one for one, other in zip(texts, pairs, strict=True)]
        errors = [""] * len(texts)
        try:
            return preprocess(texts), list(range(len(texts))), errors
        except DataError:  # one of them: which?
            for row, text in enumerate(texts):
                try:
                    preprocess([text])
                except DataError as error:
                    errors[row] = str(error)
        rows = [row for row, error in enumerate(errors) if not error]
        return preprocess([texts[row] for row in rows]) if rows else None, rows, errors


def _pillow() -> Any:
    return require("PIL.Image", extra="data")


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, np.str_) else value


def _tensor(values: Any) -> Tensor:
    """A column of equal rows as one tensor, however an engine stores it."""
    array = values if isinstance(values, Tensor | np.ndarray) else np.asarray(values)
    if isinstance(array, np.ndarray) and array.dtype == object:
        array = np.stack([np.asarray(one) for one in array])
    return torch.as_tensor(np.ascontiguousarray(array) if isinstance(array, np.ndarray) else array)


def _image(item: Any) -> Any:
    """A PIL image of what a column holds; a `DataError` where it holds none."""
    if isinstance(item, Mapping):
        item = item.get("path") if item.get("bytes") is None else item["bytes"]
    if isinstance(item, bytes):
        return decode_image(item, "it")
    if isinstance(item, str | Path):
        return read_image(Path(item))
    if isinstance(item, np.ndarray) and item.dtype == np.uint8 and item.ndim in (2, 3):
        return to_rgb(_pillow().fromarray(item))
    if isinstance(item, _pillow().Image):
        return to_rgb(item)
    raise DataError(f"it is a {type(item).__name__}; an image is bytes, a path, a PIL image or an array of uint8")


# --- archives -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scored:
    """What came of an archive: rows with an answer, items that could not be read, files of other kinds, shards."""

    rows: int
    unreadable: int
    ignored: int
    shards: int


@checked
def score_archive(
    scorer: Scorer,
    source: str | Path,
    output: str | Path,
    *,
    batch_size: int = 64,
    shard_rows: int = 4096,
    progress: bool = True,
) -> Scored:
    """Score all images or texts of an archive into a folder of Parquet shards.

    Every readable item has exactly one row in `rows/part-*.parquet`, with the outputs of `scorer` and `input`, its
    place in the archive; the others have a line in `unreadable/`, with the reason. A shard appears whole or not at all,
    and `run.json` has its digest: whatever ends the work, also a kill, the same call goes on where it ended, and the
    shards are those of a run without a break. Another model, archive or setting is refused.

    Args:
        scorer: With the model, the columns to read and those of tables to keep.
        source: As `Archive` takes it.
        output: Folder, made if it does not exist.
        batch_size: Samples a pass.
        shard_rows: Items a shard.
        progress: Whether to show a bar, with the rate.
    """
    batch_size, shard_rows = (
        require_whole(name, value, 1) for name, value in (("batch_size", batch_size), ("shard_rows", shard_rows))
    )
    place, ensemble = Path(output).expanduser(), scorer.ensemble
    archive = Archive(source, ensemble.kind, scorer.columns, scorer.keep, place)
    identity = {"archive": archive.identity(), "model": _identity(ensemble), "shard_rows": shard_rows}
    identity |= {"columns": to_plain(scorer.columns), "keep": list(scorer.keep), "wide": scorer.wide}
    folder = RunFolder(place, identity, what="scores")
    with folder.working():
        items, number = iter(archive), 0
        folder.write("about", _about(scorer))
        with tqdm(total=archive.count(), unit=" items", disable=not progress) as bar:
            while (first := next(items, None)) is not None:
                part, there = chain((first,), islice(items, shard_rows - 1)), folder.has(SHARD.format(number))

                def make(part: Iterable[Item] = part) -> tuple[Any, bytes]:
                    return _scored(scorer, part, batch_size, bar.update)

                def write(file: Path, made: tuple[Any, bytes], number: int = number) -> None:
                    beside = place / UNREADABLE.format(number)  # before the shard: once that is there, both are
                    if made[1]:
                        write_atomically(beside, made[1])
                    else:
                        beside.unlink(missing_ok=True)
                    write_atomically(file, made[0])

                folder.product(SHARD.format(number), make, _unread, write)  # refused where it was changed
                if there:
                    skipped = sum(1 for _ in part)
                    if progress:
                        bar.initial += skipped  # which has no part in the rate
                    bar.update(skipped)
                number += 1
        return Scored(**folder.json(SUMMARY, lambda: _summary(place, number, archive.ignored)))


def _unread(_: Path) -> Any:
    return None


def _identity(ensemble: Ensemble) -> dict[str, Any]:
    """What answers depend on."""
    metadata, known = ensemble.metadata, ensemble.metadata.familiarity
    familiarity = None if known is None else [repr(known.settings), tensors_digest(known.state)]
    about = [repr(metadata.preprocessing), repr(metadata.calibration), list(metadata.labels), familiarity]
    tokenizer = getattr(metadata.preprocessing, "tokenizer", "")
    return {"weights": model_fingerprint(ensemble), "metadata": digest_of([*about, tokenizer])}


def _about(scorer: Scorer) -> dict[str, Any]:
    """What a reader of the shards has to know."""
    fields = [{"name": one.name, "meaning": one.meaning} for one in scorer.fields]
    labels = list(scorer.ensemble.metadata.labels)
    return {"made_by": f"hydra_ensembles {__version__}", "outputs": fields, "labels": labels, "reasons": REASON_WORDS}


def _scored(scorer: Scorer, items: Iterable[Item], batch_size: int, seen: Callable[[int], Any]) -> tuple[bytes, bytes]:
    """A shard as the bytes of a Parquet file, and as lines of JSON what could not be read."""
    parts: list[Arrays] = []
    unreadable: list[dict[str, str]] = []

    def ready() -> Iterator[tuple[list[Item], Prepared | None]]:
        remaining = iter(items)
        while batch := list(islice(remaining, batch_size)):
            good = [item for item in batch if not item.error]
            yield batch, scorer.prepare(_columns(scorer, good)) if good else None

    for batch, prepared in _ahead(ready()):
        errors = np.array([item.error for item in batch], dtype=object)
        if prepared is not None:
            found, readable = scorer.answer(prepared), errors == ""
            said = errors[readable] = found.pop(ERROR)
            names = np.array([item.name for item in batch], dtype=object)[readable]
            parts.append({name: array[said == ""] for name, array in {INPUT: names, **found}.items()})
        pairs = zip(batch, errors.tolist(), strict=True)
        unreadable += ({INPUT: item.name, "reason": str(error)} for item, error in pairs if error)
        seen(len(batch))
    if not parts:  # nothing could be read: a shard without rows, with the same columns
        empty = scorer.answer(Prepared(None, [], [], {name: np.empty(0, dtype=object) for name in scorer.keep}))
        del empty[ERROR]
        parts.append({INPUT: np.empty(0, dtype=object), **empty})
    lines = "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in unreadable)
    return _parquet(parts), lines.encode("utf-8", "replace")


def _columns(scorer: Scorer, items: Sequence[Item]) -> dict[str, Any]:
    """Items of an archive as a batch."""
    kept = {name: np.array([item.kept.get(name) for item in items], dtype=object) for name in scorer.keep}
    if scorer.ensemble.kind == "image":
        return {**kept, scorer.columns.image: [item.content for item in items]}
    texts = [item.content if isinstance(item.content, tuple) else (item.content, None) for item in items]
    pairs = [other for _, other in texts]
    batch = {**kept, scorer.columns.text: [text for text, _ in texts]}
    return batch if all(one is None for one in pairs) else {**batch, scorer.columns.text_pair: pairs}


def _ahead(batches: Iterator[Any]) -> Iterator[Any]:
    """The same, each computed in a thread while its predecessor is worked on."""
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(next, batches, None)
        while (batch := coming.result()) is not None:
            coming = thread.submit(next, batches, None)
            yield batch


def _parquet(parts: Sequence[Arrays]) -> bytes:
    """Columns as the bytes of a Parquet file; what has several numbers a row is a list of that length."""
    arrow, made = require("pyarrow", extra="data"), {}
    for name in parts[0]:
        array = np.concatenate([part[name] for part in parts])
        if array.dtype.kind in "OU":
            made[name] = arrow.array(array.tolist(), arrow.string())
            continue
        values = arrow.array(array.reshape(-1))
        for size in reversed(array.shape[1:]):
            values = arrow.FixedSizeListArray.from_arrays(values, size)
        made[name] = values
    sink = io.BytesIO()
    require("pyarrow.parquet", extra="data").write_table(arrow.table(made), sink)
    return sink.getvalue()


def _summary(place: Path, shards: int, ignored: int) -> dict[str, int]:
    parquet = require("pyarrow.parquet", extra="data")
    rows = sum(parquet.read_metadata(place / SHARD.format(number)).num_rows for number in range(shards))
    files = [place / UNREADABLE.format(number) for number in range(shards)]
    lost = sum(file.read_bytes().count(b"\n") for file in files if file.exists())
    return {"rows": rows, "unreadable": lost, "ignored": ignored, "shards": shards}

"""Scoring of archives: raw batches to columns of answers in any engine; a folder of shards that can resume."""

import copy
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from .._utils import __version__, collect_warnings, require, require_device, require_same_run
from ..arguments import Whole, checked
from ..batches import READ
from ..checkpoint import CONFIG, locate
from ..data.dataset import decode_image, read_image
from ..data.loading import Columns
from ..errors import CheckpointError, ConfigError, DataError, HydraError, StorageError
from ..files import checksum, digest_of, expanded, read_object, write_atomically
from ..fingerprints import model_fingerprint, tensors_digest
from ..model.ensemble import Ensemble
from ..preprocessing import to_rgb
from ..run_folder import RunFolder
from ..schema import to_plain
from .archives import Archive, Item, text_in
from .outputs import REASON_WORDS, Arrays, Field, as_array, as_tensor, columns, count_rows, output_fields
from .service import FORMATS, MAX_ASPECT, SHORTEST

SHARD, UNREADABLE, SUMMARY = "rows/part-{:05d}.parquet", "unreadable/part-{:05d}.jsonl", "summary"
ABOUT = "about"  # file that documents the shards
INPUT, CLASS, ERROR, NOTE = "input", "class_name", "error", "note"  # columns in addition to those of `outputs`
KEPT = "kept_"  # prefix of a kept column whose name an answer already has


@dataclass(frozen=True)
class ReadyBatch:
    """A batch ready for the model: inputs of the readable rows, errors of the others."""

    parts: list[tuple[Any, list[int]]]  # inputs for `Ensemble.predict`, with their row numbers
    errors: list[str]  # one per row; empty if the row is readable
    notes: list[str]  # one per row; says why a readable row is probably not what was meant
    kept: Arrays


class Scorer:
    """A saved ensemble as a function of batches: `Scorer(path)(batch) -> columns`.

    A batch is a mapping of columns: `image` (encoded bytes, `{bytes, path}`, PIL images, `uint8` arrays `[H, W, 3]`, or
    paths), `text` (and `text_pair`), or inputs that are preprocessed already (`pixel_values`, `input_ids` …). The
    answer has a row for each of them, with the outputs of `serve.outputs`, the name of the class, and `error`: empty,
    or why a row could not be read; then its numbers are NaN, its label is -1, and it is not accepted. `note` is empty,
    or says why a row is probably not what you meant: a text that was cut, a photograph stored sideways.

    It can be pickled, and each process loads the model at its first call: give it to Ray Data
    (`map_batches(Scorer, fn_constructor_args=(path,), concurrency=2)`) or to `datasets.map(scorer, batched=True)`. Its
    pickle depends on the content of the folder, so that `datasets` does not take another model's answers from its
    cache; a model that was saved again in between is refused.

    Args:
        model: Folder of a saved ensemble or of a build, a hub id, or an ensemble.
        device: `auto` takes a GPU if there is one.
        dtype: Another precision than the saved one, such as `"bfloat16"`.
        columns: Names of the columns to read; a pair with another name than `text_pair` must exist.
        keep: Columns to copy to the output. One with the name of an answer, such as `label`, becomes `kept_label`.
        wide: Whether `probs` and `member_logits`, which are long, are among the answers.
        workers: Threads that decode images.
    """

    @checked
    def __init__(
        self,
        model: str | Path | Ensemble,
        *,
        device: str = "auto",
        dtype: Literal["float32", "float16", "bfloat16", "float64"] | None = None,
        columns: Columns | None = None,
        keep: Sequence[str] = (),
        wide: bool = False,
        workers: Whole = 4,
    ) -> None:
        self.model, self.device, self.dtype, self.wide = model, device, dtype, wide
        self.columns = columns or Columns()
        self.keep = tuple(keep)
        self.workers = workers
        self._loaded: Ensemble | None = None
        self._digest = ""  # of the saved model, once pickled or loaded

    def __getstate__(self) -> dict[str, Any]:
        if not self._digest:
            with suppress(HydraError):  # the model may exist only where this is unpickled
                self._digest = self._saved()[1]
        return {**self.__dict__, "_loaded": None}

    def _saved(self) -> tuple[Path, str]:
        """The folder of the model and the digest of its files; both empty for a model in memory, which is pickled."""
        if isinstance(self.model, Ensemble):
            return Path(), ""
        folder = locate(self.model)
        return folder, checksum(folder / CONFIG) if (folder / CONFIG).is_file() else ""

    @property
    def ensemble(self) -> Ensemble:
        """The model, loaded on first access."""
        if self._loaded is None:
            automatic = "cuda" if torch.cuda.is_available() else "cpu"
            device = require_device(automatic if self.device == "auto" else self.device)
            dtype: torch.dtype | None = None if self.dtype is None else getattr(torch, self.dtype)
            if isinstance(self.model, Ensemble):
                fits = self.model.device == device and self.model.dtype == (dtype or self.model.dtype)
                self._loaded = self.model if fits else copy.deepcopy(self.model).to(device, dtype)
            else:
                source, digest = self._saved()
                if self._digest not in ("", digest):
                    raise CheckpointError(f"{self.model} has changed since it was first loaded; make a new Scorer")
                self._digest = digest
                self._loaded = Ensemble.from_pretrained(source, device=device, dtype=dtype)
            output_fields(self._loaded)  # raises if there is no classifier
        return self._loaded

    @property
    def fields(self) -> tuple[Field, ...]:
        """The outputs that answers contain."""
        return tuple(field for field in output_fields(self.ensemble) if self.wide or not field.shape)

    @property
    def kept(self) -> dict[str, str]:
        """Names of the kept columns in the answers, each with its name in the batch."""
        taken = {INPUT, CLASS, ERROR, NOTE, *(field.name for field in output_fields(self.ensemble))}
        by_name = {f"{KEPT}{name}" if name in taken else name: name for name in self.keep}
        if len(by_name) < len(set(self.keep)):
            raise ConfigError(f"two columns of keep={list(self.keep)} would get one name; leave out one or rename it")
        return by_name

    def __call__(self, batch: Mapping[str, Any]) -> Arrays:
        """Answers to a batch, one row for each of its rows."""
        return self.answer(self.prepare(batch))

    def prepare(self, batch: Mapping[str, Any]) -> ReadyBatch:
        """Decode and preprocess a batch on the CPU; meanwhile the model can answer the previous one."""
        if not hasattr(batch, "keys"):
            raise DataError(f"a batch is a mapping of columns ({{name: list of rows}}), got a {type(batch).__name__}")
        missing = [name for name in self.keep if name not in batch]
        if missing:
            raise DataError(f"the batch has no columns {missing} to keep; it has {sorted(batch)}")
        names = READ[self.ensemble.kind]
        raw = self.columns.needed(self.ensemble.kind)
        pair = [self.columns.text_pair] if self.ensemble.kind == "text" else []
        given = {name: batch[name] for name in (*names, *raw, *pair) if name in batch}
        given |= {name: batch[column] for name, column in self.kept.items()}
        lengths = {name: count_rows(name, column) for name, column in given.items()}
        if len(set(lengths.values())) > 1:
            raise DataError(f"columns of the batch have different lengths, {lengths}; give one value for each row")
        kept = {name: as_array(given[name]) for name in self.kept}
        if names[0] in batch:
            inputs = {name: as_tensor(name, batch[name]) for name in names if name in batch}
            count = len(inputs[names[0]])
            return ReadyBatch([(inputs, list(range(count)))], [""] * count, [""] * count, kept)
        absent = [name for name in raw if name not in batch]
        if absent:
            raise DataError(f"the batch has no column {absent[0]!r} or {names[0]!r}; it has {sorted(batch)}")
        both = [name for name in (self.columns.text, *pair) if name in batch]
        if len(both) < 2:  # images, or texts alone
            return self.ready(list(batch[raw[0]]), kept)
        found = [text_in(both, cells) for cells in zip(*(batch[name] for name in both), strict=True)]
        return self.ready([text for text, _ in found], kept, [problem for _, problem in found])

    def ready(self, items: list[Any], kept: Arrays, errors: Sequence[str] = ()) -> ReadyBatch:
        """Images, or texts and pairs, decoded and preprocessed; those with an error are left out."""
        kind, known = self.ensemble.kind, list(errors) or [""] * len(items)
        if self.ensemble.metadata.preprocessing is None:
            raise DataError(f"the model has no saved preprocessing; give batches with {READ[kind][0]!r}")
        return self._images(items, kept, known) if kind == "image" else self._texts(items, kept, known)

    def answer(self, prepared: ReadyBatch) -> Arrays:
        """The columns of a prepared batch."""
        errors, notes = list(prepared.errors), list(prepared.notes)
        fields = self.fields
        answers = dict(prepared.kept)
        for field in fields:
            blank = {"bool": False, "int64": -1}.get(field.dtype, np.nan)
            answers[field.name] = np.full((len(errors), *field.shape), blank, field.dtype)
        for inputs, rows in prepared.parts:
            if not rows:
                continue
            with collect_warnings() as remarks:
                outputs = columns(self.ensemble.predict(inputs, check_finite=False))
            if remarks and self.ensemble.kind == "text":  # notes on images: see `_images`
                for row in rows:
                    notes[row] = "; ".join(filter(None, [notes[row], *remarks]))
            finite = np.isfinite(outputs["member_logits"]).all(axis=(1, 2))  # [B]
            answered = np.asarray(rows)[finite]
            for field in fields:
                answers[field.name][answered] = outputs[field.name][finite]
            for row in np.asarray(rows)[~finite].tolist():
                errors[row] = "the model's answer is not finite; look for overflow, or run it in float32"
        labels = self.ensemble.metadata.labels
        if labels:
            answers[CLASS] = np.array(["" if i < 0 else labels[i] for i in answers["label"].tolist()], dtype=str)
        answers[ERROR], answers[NOTE] = np.array(errors, dtype=str), np.array(notes, dtype=str)
        return answers

    def _images(self, items: list[Any], kept: Arrays, errors: list[str]) -> ReadyBatch:
        preprocess: Any = self.ensemble.metadata.preprocessing
        _pillow()  # a missing Pillow should fail once, not per image

        def decode(item: Any, error: str) -> tuple[Tensor | None, str, str]:
            """The image `[1, channels, H, W]` or None; why it cannot be read; notes on it."""
            if error:
                return None, error, ""
            with collect_warnings() as notes:
                try:
                    return preprocess([_image(item)]), "", "; ".join(notes)
                except StorageError:  # the disk failed: a rerun may be able to read the image
                    raise
                except HydraError as refused:
                    return None, str(refused), ""
                except Exception as broken:  # broken data can raise anything in a decoder
                    cause = " ".join(str(broken).split()) or type(broken).__name__
                    return None, f"it cannot be read as an image: {cause}", ""

        with ThreadPoolExecutor(self.workers) as pool:
            decoded = list(pool.map(decode, items, errors))
        images = {row: image for row, (image, _, _) in enumerate(decoded) if image is not None}
        parts = [(torch.cat(list(images.values())), list(images))] if images else []
        return ReadyBatch(parts, [error for _, error, _ in decoded], [note for _, _, note in decoded], kept)

    def _texts(self, texts: list[Any], kept: Arrays, errors: list[str]) -> ReadyBatch:
        """Texts of similar length form a part; if the model has no padding mask, only texts of equal length do."""
        preprocess: Any = self.ensemble.metadata.preprocessing
        notes = [""] * len(texts)
        padded = preprocess.attention_mask or preprocess.pad_to_max
        whole = preprocess.pad_to_max or not padded  # texts that are encoded together have one length

        def encode(rows: list[int]) -> dict[str, Tensor]:
            encoded, remarks = preprocess.encode([texts[row] for row in rows])
            for index, remark in remarks.items():
                notes[rows[index]] = f"the text {remark}"
            return cast(dict[str, Tensor], encoded)

        every = [row for row, error in enumerate(errors) if not error]
        if padded and every:
            with suppress(DataError):  # some text is invalid: find it below
                return ReadyBatch(_by_length(encode(every), every, whole), errors, notes, kept)
        groups: dict[int, list[int]] = {}  # rows to encode together, by number of tokens
        for row in every:
            try:
                tokens = encode([row])["input_ids"].shape[1]
                groups.setdefault(0 if padded else tokens, []).append(row)  # padding makes them all alike
            except DataError as error:
                errors[row] = str(error)
        parts = [part for rows in groups.values() for part in _by_length(encode(rows), rows, whole)]
        return ReadyBatch(parts, errors, notes, kept)


def _by_length(encoded: dict[str, Tensor], rows: list[int], whole: bool) -> list[tuple[Any, list[int]]]:
    """Split encoded texts by length, unless `whole`: padding costs as much as text, and one text may be long."""
    if whole:
        return [(encoded, rows)]
    lengths = encoded["attention_mask"].sum(dim=1)  # [B]
    powers = (lengths.clamp(min=SHORTEST) - 1).double().log2().floor()  # up to 16 tokens, 32, 64, …
    parts = []
    for power in powers.unique():
        group = (powers == power).nonzero()[:, 0]  # [some]
        longest = max(int(lengths[group].max()), 1)
        inputs = {name: ids[group, :longest] for name, ids in encoded.items()}
        parts.append((inputs, [rows[index] for index in group.tolist()]))
    return parts


def _pillow() -> Any:
    return require("PIL.Image", extra="data")


def _image(item: Any) -> Any:
    """Convert a cell to a PIL image; raise `DataError` if it is not an image, or too narrow."""
    if isinstance(item, Mapping):
        item = item.get("path") if item.get("bytes") is None else item["bytes"]
    if isinstance(item, bytes):
        image = decode_image(item, "it", FORMATS)
    elif isinstance(item, str | Path):
        image = read_image(Path(item), formats=FORMATS)
    elif isinstance(item, np.ndarray) and item.dtype == np.uint8 and item.ndim in (2, 3):
        image = to_rgb(_pillow().fromarray(item))
    elif isinstance(item, _pillow().Image):
        image = to_rgb(item)
    else:
        raise DataError(f"it is a {type(item).__name__}; an image is bytes, a path, a PIL image or an array of uint8")
    if max(image.size) > MAX_ASPECT * min(image.size):
        raise DataError(f"it has {image.width} x {image.height} pixels; no side may be {MAX_ASPECT} times the other")
    return image


# --- archives -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scored:
    """Result of an archive: rows with an answer, unreadable items, files of other kinds, shards."""

    rows: int
    unreadable: int
    ignored: int
    shards: int
    noted: int = 0  # rows whose `note` is not empty


@checked
def score_archive(
    scorer: Scorer,
    source: str | Path,
    output: str | Path,
    *,
    batch_size: Whole = 64,
    shard_rows: Whole = 4096,
    progress: bool = True,
) -> Scored:
    """Score all images or texts of an archive into a folder of Parquet shards.

    Every readable item has exactly one row in `rows/part-*.parquet`, with the outputs of `scorer` and `input`, its
    place in the archive; the others have a line in `unreadable/`, with the reason. A shard appears whole or not at all,
    and `run.json` has its digest: after any interruption, even a kill, the same call resumes, and the shards are those
    of an uninterrupted run. An output folder of another model, archive or setting is refused, and so is an unfinished
    one of another version of this library.

    Args:
        scorer: With the model, the columns to read and those of tables to keep.
        source: As `Archive` takes it.
        output: Folder, made if it does not exist.
        batch_size: Samples per pass.
        shard_rows: Items per shard.
        progress: Whether to show a bar, with the rate.
    """
    path = expanded(output)
    ensemble = scorer.ensemble
    archive = Archive(source, ensemble.kind, scorer.columns, scorer.keep, path)
    identity = {"archive": archive.identity(), "model": _identity(ensemble), "shard_rows": shard_rows}
    identity |= {"columns": to_plain(scorer.columns), "keep": list(scorer.kept), "wide": scorer.wide}
    folder = RunFolder(path, identity, what="scores")
    with folder.working():
        items = iter(archive)
        shards = 0
        about = _about(scorer)
        _require_same_answers(folder, about)
        if not folder.has(f"{SUMMARY}.json"):
            folder.write(ABOUT, about)
        with tqdm(total=archive.count(), unit=" items", disable=not progress) as bar:
            while (item := next(items, None)) is not None:
                part = chain((item,), islice(items, shard_rows - 1))
                name = SHARD.format(shards)
                finished = folder.has(name)
                make = partial(_scored, scorer, part, batch_size, bar.update)
                write = partial(_write_shard, path / UNREADABLE.format(shards))
                folder.product(name, make, lambda _: (b"", b""), write)  # raises if it was modified
                if finished:
                    names = [item.name for item in part]
                    _require_same_items(path / name, names)
                    if progress:
                        bar.initial += len(names)  # finished rows do not count for the rate
                    bar.update(len(names))
                shards += 1
        return Scored(**folder.json(SUMMARY, partial(_summary, path, shards, archive.ignored)))


def _write_shard(unreadable: Path, file: Path, shard: tuple[bytes, bytes]) -> None:
    """Write what `_scored` returns; the Parquet file comes last: once it exists, the shard is complete."""
    rows, lines = shard
    if lines:
        write_atomically(unreadable, lines)
    else:
        unreadable.unlink(missing_ok=True)
    write_atomically(file, rows)


def _require_same_items(shard: Path, names: Sequence[str]) -> None:
    """Raise if the archive no longer yields the items of a finished shard: rows would be lost or duplicated."""
    rows = require("pyarrow.parquet", extra="data").read_table(shard, columns=[INPUT])[INPUT].to_pylist()
    moved = set(rows).difference(names)
    if moved:
        raise CheckpointError(f"{shard} has {min(moved)!r}, which is now elsewhere in the archive; give a new folder")


def _require_same_answers(folder: RunFolder, about: Mapping[str, Any]) -> None:
    """Raise if another version of this library began these shards: all rows must have the same meaning."""
    file = cast(Path, folder.place(f"{ABOUT}.json"))
    begun = any((file.parent / SHARD).parent.glob("*.parquet"))
    if begun and not folder.has(f"{SUMMARY}.json"):  # a finished run stays as it is
        require_same_run(read_object(file) if file.exists() else {}, about, file.parent, "scores")


def _identity(ensemble: Ensemble) -> dict[str, Any]:
    """Everything that answers depend on."""
    metadata, fitted = ensemble.metadata, ensemble.metadata.familiarity
    familiarity = None if fitted is None else [to_plain(fitted.settings), tensors_digest(fitted.state)]
    about = [to_plain(metadata.preprocessing), to_plain(metadata.calibration), list(metadata.labels), familiarity]
    return {"weights": model_fingerprint(ensemble), "metadata": digest_of(about)}


def _about(scorer: Scorer) -> dict[str, Any]:
    """Everything a reader of the shards needs to know."""
    fields = [{"name": field.name, "meaning": field.meaning} for field in scorer.fields]
    labels = list(scorer.ensemble.metadata.labels)
    beside = [INPUT, *([CLASS] if labels else []), NOTE]
    about = {"made_by": f"hydra_ensembles {__version__}", "outputs": fields, "labels": labels}
    return {**about, "reasons": list(REASON_WORDS), "kept": scorer.kept, "beside": beside}


def _scored(scorer: Scorer, items: Iterable[Item], batch_size: int, tick: Callable[[int], Any]) -> tuple[bytes, bytes]:
    """A shard: the bytes of its Parquet file, and JSON lines of the items that could not be read."""
    parts: list[Arrays] = []
    unreadable: list[dict[str, str]] = []

    def ready() -> Iterator[tuple[list[Item], ReadyBatch]]:
        remaining = iter(items)
        while batch := list(islice(remaining, batch_size)):
            texts = {name: [item.kept.get(column) for item in batch] for name, column in scorer.kept.items()}
            kept = {name: np.array(column, dtype=object) for name, column in texts.items()}
            yield batch, scorer.ready([item.content for item in batch], kept, [item.error for item in batch])

    for batch, prepared in _prefetch(ready()):
        answers = {INPUT: as_array([item.name for item in batch]), **scorer.answer(prepared)}
        errors = answers.pop(ERROR)
        parts.append({name: array[errors == ""] for name, array in answers.items()})
        pairs = zip(batch, errors.tolist(), strict=True)
        unreadable += ({INPUT: item.name, "reason": error} for item, error in pairs if error)
        tick(len(batch))
    lines = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in unreadable)
    return _parquet(parts), lines.encode("utf-8", "replace")


def _prefetch(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield the same batches, each prepared in a thread while the previous one is processed."""
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(next, batches, None)
        while (batch := coming.result()) is not None:
            coming = thread.submit(next, batches, None)
            yield batch


def _parquet(parts: Sequence[Arrays]) -> bytes:
    """Columns as the bytes of a Parquet file; several numbers per row become a fixed-size list."""
    arrow = require("pyarrow", extra="data")
    arrays = {}
    for name in parts[0]:
        array = np.concatenate([part[name] for part in parts])
        text = array.dtype.kind in "OU"
        values = arrow.array(array.tolist(), arrow.string()) if text else arrow.array(array.reshape(-1))
        for size in reversed(array.shape[1:]):
            values = arrow.FixedSizeListArray.from_arrays(values, size)
        arrays[name] = values
    sink = io.BytesIO()
    require("pyarrow.parquet", extra="data").write_table(arrow.table(arrays), sink)
    return sink.getvalue()


def _summary(folder: Path, shards: int, ignored: int) -> dict[str, int]:
    parquet, compute = require("pyarrow.parquet", extra="data"), require("pyarrow.compute", extra="data")
    tables = [folder / SHARD.format(number) for number in range(shards)]
    rows = sum(parquet.read_metadata(file).num_rows for file in tables)
    has_note = (compute.not_equal(parquet.read_table(file, columns=[NOTE])[NOTE], "") for file in tables)
    files = [folder / UNREADABLE.format(number) for number in range(shards)]
    unreadable = sum(file.read_bytes().count(b"\n") for file in files if file.exists())
    counts = {"rows": rows, "unreadable": unreadable, "ignored": ignored, "shards": shards}
    return {**counts, "noted": sum(compute.sum(flags).as_py() or 0 for flags in has_note)}

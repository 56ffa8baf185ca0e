"""Run a model over a set: member logits, labels, and the inputs it was most and least sure about.

Answers to batches can survive an interruption (`AnswerStore`): they are written periodically, and read when the same
evaluation is run again.
"""

import base64
import io
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from operator import itemgetter
from pathlib import Path
from time import monotonic
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from .._distributed import current_ranks
from .._utils import __version__, require
from ..baselines.building_blocks import View
from ..batches import Batches, Inputs, changed, iterate, length_of, move, require_labels, size_of, warn_if_cut
from ..errors import ConfigError, DataError
from ..fingerprints import model_fingerprint, tensors_digest
from ..metrics.inputs import at_least_float32, check_finite, warn_of_probabilities, where
from ..model.dropout import evaluating
from ..model.ensemble import Ensemble
from ..model.inputs import model_call
from ..model.metadata import Calibration
from ..optimize.runner import OptimizedEnsemble
from ..overlap import Keys, sample_keys
from ..preprocessing import ImagePreprocessing, TextPreprocessing
from ..run_folder import IDENTITY, RunFolder
from .evaluation import GalleryItem, ModelInfo, Provenance, Shelf
from .logits import LabelledLogits
from .measure import Measure

THUMBNAIL = 96  # longest side of an embedded image, in pixels
TEXT_LENGTH = 280  # maximum number of characters of an embedded text
WRITE_EVERY = 30.0  # seconds between writes; an interruption writes the rest
PART = "answers-{}"


class Pass(NamedTuple):
    """Results of a pass over one set, or over one batch of it."""

    answers: LabelledLogits  # labels are empty if none were requested
    keys: Keys  # of the samples
    gallery: list[GalleryItem]
    dtype: torch.dtype  # of the model's answers
    unfamiliarity: Tensor | None = None  # feature scores [S, M, B] if the ensemble has any


class AnswerStore:
    """Answers of one ensemble, stored in a run folder by the content of the batches; use it as a context manager.

    Raises for a folder of another model or of other `settings` (what else the answers depend on). With no folder,
    nothing is kept. `what` names the work in messages: `"an atlas"`.
    """

    def __init__(self, folder: str | Path | None, model: object, settings: Mapping[str, Any], what: str) -> None:
        self._run = RunFolder(None, {})  # keeps nothing
        self._stored: dict[str, dict[str, Tensor]] = {}
        self._new: dict[str, dict[str, Tensor]] = {}
        self._parts = 0
        self._written = monotonic()
        self._open = ExitStack()
        if folder is None:
            return
        if not isinstance(model, Ensemble) or current_ranks().size > 1:
            got = f"a {type(model).__name__} in {current_ranks().size}"
            raise ConfigError(f"output needs an Ensemble in one process, got {got}; leave output out")
        fitted = model.metadata.familiarity
        statistics = None if fitted is None else tensors_digest(fitted.state)
        identity = {"weights": model_fingerprint(model), "familiarity": statistics, **settings}
        if fitted is not None and fitted.settings.neighbours:  # not part of the state tensors
            identity["neighbours"] = fitted.settings.neighbours
        if torch.is_autocast_enabled(model.device.type):
            identity["autocast"] = str(torch.get_autocast_dtype(model.device.type))
        self._run = RunFolder(folder, identity, what=what)

    def __enter__(self) -> "AnswerStore":
        self._open.enter_context(self._run.working())
        while self._run.has(f"{PART.format(self._parts)}.safetensors"):
            part = self._run.tensors(PART.format(self._parts), dict)  # it exists, and is read
            self._parts += 1
            for path, tensor in part.items():
                key, _, name = path.partition("/")
                self._stored.setdefault(key, {})[name] = tensor
        return self

    def __exit__(self, *raised: Any) -> None:
        try:
            self._write()
        finally:
            self._open.__exit__(*raised)
            folder = self._run.path
            if folder is not None and not self._parts:  # nothing was written: free the folder for other work
                (folder / IDENTITY).unlink(missing_ok=True)
                if not any(folder.iterdir()):
                    folder.rmdir()

    def key(self, inputs: Inputs, keys: Keys, labels: Tensor | None = None) -> str:
        """Digest of a batch: the keys of its samples and all integer tensors, which the keys may leave out."""
        if self._run.path is None:
            return ""
        tensors = {"inputs": inputs} if isinstance(inputs, Tensor) else dict(sorted(inputs.items()))
        exact = {name: tensor for name, tensor in tensors.items() if not tensor.is_floating_point()}  # masks, segments
        exact |= {} if labels is None else {"labels": labels}
        return tensors_digest({"keys": torch.from_numpy(keys), **exact})

    def get(self, key: str) -> dict[str, Tensor] | None:
        """Return the stored answers to a batch, or None."""
        return self._stored.get(key)

    def put(self, key: str, answers: Mapping[str, Tensor]) -> None:
        """Store the answers to a batch."""
        if self._run.path is not None:
            self._new[key] = dict(answers)
            if monotonic() - self._written >= WRITE_EVERY:
                self._write()

    def _write(self) -> None:
        if self._new:
            new = {f"{key}/{name}": tensor for key, batch in self._new.items() for name, tensor in batch.items()}
            self._run.tensors(PART.format(self._parts), lambda: new)
            self._parts += 1
            self._new = {}
        self._written = monotonic()


@dataclass(frozen=True)
class Runner:
    """Runs a model over sets."""

    model: Callable[[Any], Any]
    device: torch.device | None  # device of the inputs; None leaves them where they are
    dtype: torch.dtype | None  # floating dtype of the inputs; None leaves it
    measure: Measure  # makes predictions, for the gallery
    keep: int  # how many inputs of each set to keep for the gallery, at either end
    preprocessing: object  # of the inputs; undone in the gallery if it is one of ours
    progress: bool
    kept: AnswerStore  # answers from before an interruption

    def run(self, batches: Batches, name: str, labelled: bool, like: Tensor | None = None) -> Pass:
        """Run the model over one set; several processes share its batches.

        `like` has the member logits of another set. Raises a `DataError` for an empty set, invalid labels, or numbers
        of members or classes that differ from `like`. A set already split between the processes also raises.
        """
        ranks = current_ranks()
        pieces: list[tuple[int, Pass]] = []  # this process's batches: number in the set, results
        gallery: list[GalleryItem] = []
        seen, beginning, error = 0, b"", None
        try:
            pairs = iterate(batches, f"set {name!r}", labelled)
            quiet = not self.progress or ranks.rank > 0
            total = length_of(batches)
            with tqdm(desc=name, total=total, leave=False, disable=quiet, unit="batch") as bar:
                for index, inputs, targets in pairs:
                    beginning = beginning or sample_keys(inputs).tobytes()
                    if index % ranks.size == ranks.rank:
                        piece = self._run_batch(inputs, targets, name, index, labelled)
                        pieces.append((index, piece))
                        if self.keep:
                            gallery = self._with_batch(gallery, name, seen, inputs, piece, labelled)
                    seen += size_of(inputs)
                    bar.update(index + 1 - bar.n)
        except Exception as problem:
            error = problem  # `gather` raises it in all processes
        parts = [piece for _, piece in sorted(chain.from_iterable(ranks.gather(pieces, error)), key=itemgetter(0))]
        warn_if_cut(batches, f"set {name!r}", seen)
        ranks.require_same_data((beginning, seen), f"samples in set {name!r}")
        gallery = top_of_shelves(chain.from_iterable(ranks.gather(gallery)), self.keep)
        for part in parts:
            require_like(part.answers.logits, parts[0].answers.logits if like is None else like, name)
        logits = torch.cat([part.answers.logits for part in parts], dim=1)  # [M, B, C]
        labels = torch.cat([part.answers.labels for part in parts])
        warn_of_probabilities(logits, name)
        keys = np.concatenate([part.keys for part in parts])
        scores = [part.unfamiliarity for part in parts if part.unfamiliarity is not None]
        unfamiliarity = torch.cat(scores, dim=2) if scores else None  # [S, M, B]
        return Pass(LabelledLogits(logits, labels), keys, gallery, parts[0].dtype, unfamiliarity)

    def _run_batch(self, inputs: Inputs, targets: Tensor | None, name: str, index: int, labelled: bool) -> Pass:
        """Results of one batch, without a gallery; the answer was stored before an interruption or is computed now."""
        keys = sample_keys(inputs)
        digest = self.kept.key(inputs, keys)
        stored = self.kept.get(digest)
        if stored is None:
            stored = self._answer(inputs, name, index)
            self.kept.put(digest, stored)
        logits = stored["logits"]
        labels = torch.empty(0, dtype=torch.long)
        if labelled:
            labels = require_labels(targets, logits.shape[2], f"set {name!r}", index).cpu()
        return Pass(LabelledLogits(logits, labels), keys, [], stored["dtype"].dtype, stored.get("scores"))

    def _answer(self, inputs: Inputs, name: str, index: int) -> dict[str, Tensor]:
        """Member logits `[M, B, C]` of one batch, an empty tensor in the model's dtype, feature scores `[S, M, B]`."""
        answer: Any
        scores: dict[str, Tensor] = {}
        if isinstance(self.model, Ensemble | OptimizedEnsemble | View):
            try:
                prepared = self.model.prepare(inputs)
            except DataError as problem:
                raise DataError(f"{where(name)}batch {index}: {problem}") from problem
            if self.measure.familiarity is not None and not isinstance(self.model, View):
                answer, by_features = self.model.answers(prepared)
                scores = {} if by_features is None else {"scores": by_features.cpu()}
            else:
                answer = self.model(prepared)
        else:
            moved = inputs if self.device is None else move(inputs, self.device, self.dtype)
            answer = model_call(self.model, moved)()
        answer = getattr(answer, "logits", answer)
        logits = member_logits(answer, name, f" of batch {index}")
        if logits.shape[1] != size_of(inputs):
            raise DataError(
                f"{where(name)}the model answered batch {index} of {size_of(inputs)} inputs with logits "
                f"{list(answer.shape)}; expected [M, B, C] (members, inputs, classes)"
            )
        return {"logits": logits, "dtype": torch.empty(0, dtype=answer.dtype), **scores}

    def _with_batch(
        self, gallery: list[GalleryItem], name: str, first: int, inputs: Inputs, piece: Pass, labelled: bool
    ) -> list[GalleryItem]:
        """The gallery of a set after one more batch, whose first sample has position `first` in the set."""
        logits, labels = piece.answers
        prediction = self.measure.predict(logits, piece.unfamiliarity)
        scores = prediction.score(self.measure.score)
        predicted = prediction.label
        order = scores.sort(stable=True).indices
        shelves: dict[Shelf, Tensor] = {"sure": order, "unsure": scores.sort(stable=True, descending=True).indices}
        if labelled:
            shelves["wrong"] = order[predicted[order] != labels[order]]
        new = []
        for shelf, rows in shelves.items():
            for row in rows[: self.keep].tolist():
                score, sure = float(scores[row]), float(prediction.confidence[row])
                label = int(labels[row]) if labelled else None
                new.append(GalleryItem(name, shelf, first + row, "text", "", score, sure, int(predicted[row]), label))
        kept = top_of_shelves([*gallery, *new], self.keep)
        for position, item in enumerate(kept):
            if item.index >= first:  # new, and it stays: only now is its content needed
                kind, content = readable_input(changed(inputs, itemgetter(item.index - first)), self.preprocessing)
                kept[position] = replace(item, kind=kind, content=content)
        return kept


def member_logits(answer: Any, name: str, of: str = "", like: Tensor | None = None) -> Tensor:
    """Check member logits `[M, B, C]` of a model or a caller, and move them to the CPU in at least float32.

    They must be finite and have the members and classes of `like`. An evaluation checks its logits only here.
    """
    shape = list(answer.shape) if isinstance(answer, Tensor) else []
    if len(shape) not in (2, 3) or 0 in shape or shape[-1] < 2 or not answer.is_floating_point():
        got = f"{answer.dtype} {shape}" if isinstance(answer, Tensor) else type(answer).__name__
        expected = "floating point [M, B, C] or [B, C], with one sample and two classes or more"
        raise DataError(f"{where(name)}member logits{of} must be {expected}, got {got}")
    logits = at_least_float32(answer.detach().cpu())
    logits = logits.unsqueeze(0) if logits.ndim == 2 else logits  # [B, C] -> [1, B, C]
    check_finite(logits, f"member logits [M, B, C]{of}", name)
    if like is not None:
        require_like(logits, like, name)
    return logits


def require_like(logits: Tensor, like: Tensor, name: str) -> None:
    """Raise if the numbers of members or classes differ from those of `like`."""
    (members, _, classes), (expected, _, like_classes) = logits.shape, like.shape
    if (members, classes) != (expected, like_classes):
        raise DataError(
            f"{where(name)}logits of {members} members over {classes} classes, but before of {expected} over "
            f"{like_classes}; all must come from one model"
        )


@contextmanager
def running(model: object, device: torch.device | None) -> Iterator[tuple[torch.device | None, torch.dtype | None]]:
    """Evaluation mode, no gradients, on the requested device; yields device and floating dtype of the inputs."""
    dtype = None
    with ExitStack() as restoring:
        restoring.enter_context(torch.no_grad())
        if isinstance(model, OptimizedEnsemble):
            home = model.device
            if device is not None and (device.type != home.type or device.index not in (None, home.index)):
                raise ConfigError(f"this ensemble was optimized for {home}, not for {device}; leave device out")
            device, dtype = home, model.dtype
        elif isinstance(model, nn.Module):
            parameter = next((p for p in model.parameters() if p.is_floating_point()), None)
            if parameter is not None:
                home, dtype = parameter.device, parameter.dtype
                if device not in (None, home):
                    restoring.callback(model.to, home)
                    model.to(device)
                device = device or home
            restoring.enter_context(evaluating(model))
        yield device, dtype


def top_of_shelves(items: Iterable[GalleryItem], keep: int) -> list[GalleryItem]:
    """The first `keep` items of each shelf; ties go to the earlier input."""
    ordered = sorted(items, key=lambda item: (-item.score if item.shelf == "unsure" else item.score, item.index))
    shelves = ([item for item in ordered if item.shelf == shelf] for shelf in get_args(Shelf))
    return [item for shelf in shelves for item in shelf[:keep]]


def readable_input(row: Inputs, preprocessing: object) -> tuple[Literal["image", "text"], str]:
    """One input in readable form: an image as a `data:` URI, or text."""
    tensor = row if isinstance(row, Tensor) else row.get("pixel_values", row.get("input_ids"))
    if tensor is None:
        return "text", f"inputs: {', '.join(sorted(row))}"
    if tensor.ndim == 3:
        return "image", image_uri(tensor, preprocessing if isinstance(preprocessing, ImagePreprocessing) else None)
    mask = None if isinstance(row, Tensor) else row.get("attention_mask")
    ids = (tensor if mask is None else tensor[mask.bool()]).tolist()
    text = f"token ids {' '.join(str(token) for token in ids)}"
    if isinstance(preprocessing, TextPreprocessing) and preprocessing.tokenizer:
        tokenizer = require("tokenizers", extra="text").Tokenizer.from_str(preprocessing.tokenizer)
        text = str(tokenizer.decode(ids, skip_special_tokens=True))
    return "text", text if len(text) <= TEXT_LENGTH else text[: TEXT_LENGTH - 1] + "…"


def image_uri(pixels: Tensor, preprocessing: ImagePreprocessing | None = None) -> str:
    """A thumbnail as a `data:` URI, from pixels `[channels, H, W]` as the model saw them.

    Normalisation is undone; if it is unknown, the values are stretched to the full range.
    """
    pixels = pixels.detach().cpu().float()[: 3 if len(pixels) >= 3 else 1]
    if preprocessing is not None:
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (preprocessing.mean, preprocessing.std))
        pixels = pixels * std + mean
    else:
        low, high = float(pixels.min()), float(pixels.max())
        pixels = (pixels - low) / ((high - low) or 1.0)
    levels = (pixels.clamp(0, 1) * 255).round().byte().expand(3, -1, -1).permute(1, 2, 0)  # [H, W, 3]
    image = require("PIL.Image", extra="data").fromarray(levels.numpy())
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=82)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


def describe_model(model: object, members: int, classes: int, calibration: Calibration | None) -> ModelInfo:
    """Describe a model: all fields for an ensemble, only name and number of parameters for others."""
    info = ModelInfo("callable", members, classes, calibration=None if calibration is None else calibration.brief)
    if isinstance(model, Ensemble | OptimizedEnsemble):
        metadata = model.metadata
        info = replace(info, kind=model.kind, class_names=metadata.labels, **vars(model.describe()))
        return replace(info, source=metadata.source, history=metadata.history)
    if isinstance(model, nn.Module):
        counted = sum(parameter.numel() for parameter in model.parameters())
        return replace(info, parameters=counted, source=type(model).__qualname__)
    return replace(info, source=str(getattr(model, "__name__", type(model).__qualname__)))


def provenance_of(device: torch.device | None, dtype: torch.dtype, processes: int = 1) -> Provenance:
    """The libraries and the device of this run."""
    libraries = {"torch": str(torch.__version__), "numpy": np.__version__}
    versions = {"hydra_ensembles": __version__, "python": platform.python_version(), **libraries}
    hardware = f"CPU, {platform.machine()}, {os.cpu_count()} cores"
    if device is not None and device.type != "cpu":
        hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return Provenance(versions, hardware, str(dtype).removeprefix("torch."), processes)

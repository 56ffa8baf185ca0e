"""A model ready to serve: its settings; raw inputs to rows, within limits; rows to answers.

A row is one preprocessed sample. Rows of the same shape share a batch, so texts are padded to a few lengths, and a
batch is run in pieces of a few sizes: for these shapes plans are measured, compiled and recorded before the first
request.
"""

import base64
import copy
import io
import math
import os
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import parse_qsl

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .._utils import collect_warnings, require
from ..arguments import Checked, Range
from ..batches import READ
from ..data.dataset import decode_image
from ..errors import ConfigError, DataError, HydraError, RequestError
from ..model.dropout import dropping
from ..model.ensemble import Ensemble
from ..model.metadata import Calibration
from ..optimize.runner import USUAL_SHAPES, OptimizedEnsemble
from ..preprocessing import ImagePreprocessing, TextPreprocessing
from ..schema import short
from .outputs import REASON_WORDS, columns, input_fields, output_fields

if TYPE_CHECKING:
    from fastapi import Request

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")  # not EPS and its like: decoding them starts programs
MAX_ASPECT = 100  # maximum ratio of the sides: preprocessing scales the shorter one up to the input size
MAX_SCANS = 100  # in a progressive JPEG: each costs few bytes but a full pass; about ten is normal
SCAN_MARKER = b"\xff\xda\0"  # start of a scan, rare in other data
MAX_PIXEL = 1e4  # larger than any preprocessed pixel
SHOWN = 5  # number of most probable classes in a JSON answer
PLURALS = {"image": "images", "text": "texts"}  # a form may repeat a name
SHORTEST = 16  # minimum number of tokens that texts are padded to
NEAREST = "nearest"  # extra key of an answer, if requested: the nearest class, or -1

API_KEY = "HYDRA_API_KEY"
"""Environment variable with the key that clients must send; a command line would be visible to all local users."""

ServedPrecision = Literal["float32", "bfloat16", "float16"]
Answer = dict[str, Any]
"""Every output of `output_fields` for one sample, as a NumPy array or scalar."""


@dataclass(frozen=True)
class ServeSettings(Checked):
    """How a model is served.

    Attributes:
        host: Address to listen on; 0.0.0.0 for every interface.
        port: Port to listen on, 0 for any free one.
        uds: Unix socket to listen on instead, which only this user can open.
        name: What clients call the model.
        api_key: Key that clients must send (better set HYDRA_API_KEY in the environment).
        max_batch: Maximum number of samples that the model sees at once.
        max_wait: Milliseconds that a sample waits for others to fill a batch.
        max_queue: Maximum number of samples, and of requests, accepted at once; further ones are told to retry (503).
        timeout: Seconds after which a request fails (504).
        workers: Threads that run the model; several GPUs are used in turn.
        max_body: Maximum size of a request, in megabytes.
        max_pixels: Maximum size of the images of a request, in megapixels.
        max_characters: Maximum length of a text, in characters.
        precision: Floating type to compute in; that of the model if not given.
        compile: Compile the model for the batch sizes it will see.
        warm_up: Run every batch size once before the first request.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Range(0, 65_535)] = 8000
    uds: str | None = None
    name: str = "model"
    api_key: str | None = field(default=None, repr=False)
    max_batch: Annotated[int, Range(1, 4096)] = 16
    max_wait: Annotated[float, Range(0, below=60_001)] = 5.0
    max_queue: Annotated[int, Range(1, 1_000_000)] = 256
    timeout: Annotated[float, Range(0.001, below=86_401)] = 30.0
    workers: Annotated[int, Range(1, 64)] = 1
    max_body: Annotated[float, Range(0.001, below=4097)] = 16.0
    max_pixels: Annotated[float, Range(0.001, below=1001)] = 50.0
    max_characters: Annotated[int, Range(1, 100_000_000)] = 100_000
    precision: ServedPrecision | None = None
    compile: bool = False
    warm_up: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_queue < self.max_batch:
            raise ConfigError(f"max_queue is {self.max_queue}, less than max_batch, {self.max_batch}; raise it")
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,100}", self.name):
            raise ConfigError(f"name is {self.name!r}; it is part of URLs: use only letters, digits, _ . and -")
        key = self.key
        if key is not None and (len(key) < 8 or not key.isascii() or not key.isprintable() or key != key.strip()):
            raise ConfigError("the API key is shorter than 8 characters, or has some that HTTP headers cannot hold")

    @property
    def key(self) -> str | None:
        """The key that clients must send, from the settings or the environment; None if none is required."""
        return self.api_key if self.api_key is not None else os.environ.get(API_KEY)

    @property
    def dtype(self) -> torch.dtype | None:
        """Floating type to compute in, if it is not the model's."""
        return None if self.precision is None else getattr(torch, self.precision)


@dataclass(frozen=True, eq=False)
class Sample:
    """One preprocessed sample, without the batch axis; on the CPU."""

    inputs: Mapping[str, Tensor]
    nearest: bool = False  # whether to find the nearest class, which takes a second pass
    notes: Sequence[str] = ()  # remarks for the client: a truncated text, an image stored sideways

    @cached_property
    def shape(self) -> Hashable:
        """Rows of equal shape may share a batch."""
        return tuple((name, tuple(tensor.shape)) for name, tensor in self.inputs.items())


class Service:
    """An ensemble behind a server."""

    def __init__(self, ensemble: Ensemble, settings: ServeSettings) -> None:
        """Take a classifier; its weights are not read before `workers` builds the plans."""
        self.ensemble, self.settings, self.kind = ensemble, settings, ensemble.kind
        self.inputs = input_fields(ensemble)
        self.outputs = output_fields(ensemble)
        # class names, or class indices if it has none
        self.labels = ensemble.metadata.labels or tuple(map(str, range(ensemble.num_classes)))
        self.preprocessing = ensemble.metadata.preprocessing
        size = getattr(self.preprocessing, "size", None) or self.inputs[0].shape[1:]
        self.image_size = tuple(map(int, size)) if self.kind == "image" else None  # that plans are warm for
        calibration = ensemble.metadata.calibration or Calibration()
        self._temperature = np.array(calibration.temperature)[:, None]  # [1 or M, 1]
        self._main = READ[self.kind][0]
        self._masked = any(field.name == "attention_mask" for field in self.inputs)

    # --- inputs ------------------------------------------------------------------------------------------------------

    def images(self, contents: Sequence[bytes], nearest: bool = False) -> list[Sample]:
        """Rows from encoded images; their sizes are read from the headers before anything is decoded."""
        if not isinstance(self.preprocessing, ImagePreprocessing):
            raise RequestError(self._wrong_kind("images"))
        self._require_few(len(contents))
        self._require_small(contents)
        rows = []
        for index, content in enumerate(contents):
            try:
                with collect_warnings() as notes:
                    pixels = self.preprocessing([decode_image(content, f"image {index}", FORMATS)])[0]  # [C, H, W]
            except HydraError:
                raise
            except Exception as error:  # broken data can raise anything in a decoder
                raise RequestError(f"image {index} ({len(content)} bytes) is broken", 415) from error
            rows.append(Sample({self._main: pixels.to(self.ensemble.dtype)}, nearest, notes))
        return rows

    def texts(self, texts: Sequence[str | tuple[str, str]], nearest: bool = False) -> list[Sample]:
        """Rows from texts, or pairs of texts; each is tokenised separately."""
        if not isinstance(self.preprocessing, TextPreprocessing):
            raise RequestError(self._wrong_kind("texts"))
        self._require_few(len(texts))
        most = self.settings.max_characters
        for index, text in enumerate(texts):
            count = sum(map(len, (text,) if isinstance(text, str) else text))
            if count > most:
                raise RequestError(f"text {index} has {count} characters; at most {most} are accepted", 413)
        rows = []
        for index, text in enumerate(texts):
            try:
                with collect_warnings() as notes:
                    encoded = self.preprocessing([text])
            except DataError as error:
                raise DataError(f"text {index}: {error}") from error
            rows += [replace(row, notes=notes) for row in self.tensors(encoded, nearest)]
        return rows

    def tensors(self, inputs: Mapping[str, Tensor], nearest: bool = False) -> list[Sample]:
        """Rows from preprocessed inputs, `[B, …]` each; raises if they do not fit the model."""
        with collect_warnings() as notes:
            main, mask, segments = self.ensemble.unpack(inputs)
        self._require_few(len(main))
        size = self.image_size
        if size is not None and tuple(main.shape[2:]) != size:
            raise RequestError(f"images are {list(main.shape[2:])}; this server takes {list(size)}, height and width")
        if main.is_floating_point() and not bool(main.isfinite().all()):
            raise RequestError(f"{self._main} has values that are NaN or infinite")
        if self.kind == "image":
            return [Sample({self._main: image}, nearest, notes) for image in main.to(self.ensemble.dtype)]
        if self._masked:
            mask = torch.ones_like(main) if mask is None else mask
            segments = torch.zeros_like(main) if segments is None and len(self.inputs) > 2 else segments
        given = {name: x for name, x in zip(READ["text"], (main, mask, segments), strict=True) if x is not None}
        if self._masked:
            tokens = main.shape[1]
            length = next((size for size in self.lengths() if size >= tokens), tokens)  # one with a warm plan
            fill = {self._main: getattr(self.preprocessing, "pad_id", 0)}
            given = {name: F.pad(x.long(), (0, length - tokens), value=fill.get(name, 0)) for name, x in given.items()}
        return [Sample({name: x[row] for name, x in given.items()}, nearest, notes) for row in range(len(main))]

    def _wrong_kind(self, received: str) -> str:
        if self.preprocessing is None:
            missing = "image processor" if self.kind == "image" else "tokenizer"
            return f"got {received}, but this model was saved without its {missing}; give {self._main} to /v2/models"
        return f"got {received}, but this model reads {self.kind}s"

    def _require_few(self, count: int) -> None:
        most = self.settings.max_queue
        if count > most:
            raise RequestError(f"got {count} samples in one request; at most {most} are accepted", 413)

    def _require_small(self, contents: Sequence[bytes]) -> None:
        """Check images by their headers before decoding: a few bytes may decode to gigabytes of pixels."""
        pillow = require("PIL.Image", extra="data")
        pixels_left = int(self.settings.max_pixels * 1e6)
        advice = f"at most {pixels_left} pixels are accepted in a request"
        for index, content in enumerate(contents):
            try:
                with pillow.open(io.BytesIO(content), formats=FORMATS) as image:
                    width, height = image.size
                    passes = content.count(SCAN_MARKER) if image.format in ("JPEG", "MPO") else 1
            except (pillow.DecompressionBombError, pillow.DecompressionBombWarning) as error:
                raise RequestError(f"image {index} is too large; {advice}", 413) from error
            except Exception as error:  # a broken header can raise anything in Pillow
                problem = f"({len(content)} bytes) is not one of {', '.join(FORMATS)}, or is broken"
                raise RequestError(f"image {index} {problem}", 415) from error
            pixels_left -= width * height
            if pixels_left < 0 or max(width, height) > MAX_ASPECT * min(width, height):
                advice = f"{advice}, and no side may be {MAX_ASPECT} times the other"
                raise RequestError(f"image {index} has {width} x {height} pixels; {advice}", 413)
            if passes > MAX_SCANS:
                raise RequestError(f"image {index} is a JPEG of over {MAX_SCANS} passes; store it in fewer", 413)

    def lengths(self) -> list[int]:
        """Lengths that texts are padded to; empty for models without a padding mask."""
        most: int = self.ensemble.config.stem.max_tokens
        most = min(most, getattr(self.preprocessing, "max_length", most))
        if getattr(self.preprocessing, "pad_to_max", False):
            return [most]
        return _doubling(SHORTEST, most) if self._masked else []

    # --- answers -----------------------------------------------------------------------------------------------------

    def sizes(self) -> list[int]:
        """Sizes of the pieces that batches are run in: powers of two, and the largest."""
        return _doubling(1, self.settings.max_batch)

    def workers(self) -> list[Callable[[list[Sample]], list[Answer]]]:
        """One function per model thread, which answers rows; warmed up unless the settings disable it.

        Threads on the same device share weights. On CUDA, workers take the GPUs in turn.
        """
        warm: dict[torch.device, _Worker] = {}
        shapes = max(len(self.sizes()) * len(self.examples()), USUAL_SHAPES)
        workers: list[Callable[[list[Sample]], list[Answer]]] = []
        for index in range(self.settings.workers):
            device = self.ensemble.device
            if device.type == "cuda":
                device = torch.device("cuda", ((device.index or 0) + index) % torch.cuda.device_count())
            if device not in warm:
                model = self.ensemble if device == self.ensemble.device else copy.deepcopy(self.ensemble).to(device)
                plan = OptimizedEnsemble(model, dtype=self.settings.dtype, compile=self.settings.compile, shapes=shapes)
                if self.settings.warm_up:
                    for size, row in product(self.sizes(), self.examples()):
                        plan.predict(_stacked([row] * size), check_finite=False)
                warm[device] = _Worker(plan, model, self.sizes())
            workers.append(warm[device].answer)
        return workers

    def examples(self) -> list[Sample]:
        """A blank row of every shape that is known in advance."""
        if self.image_size is not None:
            return [Sample({self._main: torch.zeros(self.inputs[0].shape[0], *self.image_size)})]
        return [self.tensors({self._main: torch.zeros(1, length, dtype=torch.long)})[0] for length in self.lengths()]

    def plain(self, answer: Answer, notes: Sequence[str] = ()) -> dict[str, Any]:
        """An answer and any notes as JSON data, with class names for indices; members have the temperature, too."""
        labels, probs = self.labels, answer["probs"]
        logits = answer["member_logits"].astype(np.float64) / self._temperature  # [M, C]
        members = np.exp(logits - logits.max(axis=-1, keepdims=True))
        members /= members.sum(axis=-1, keepdims=True)
        numbers = {
            field.name: finite(answer[field.name])
            for field in self.outputs
            if not field.shape and field.name not in ("label", "accept", "reason")
        }
        content = {
            "label": labels[int(answer["label"])],
            "index": int(answer["label"]),
            "accept": bool(answer["accept"]) if "accept" in answer else None,
            "reason": (REASON_WORDS[int(answer["reason"])] or None) if "reason" in answer else None,
            **numbers,
            "top": [
                {"label": labels[index], "probability": finite(probs[index])}
                for index in np.argsort(-probs, kind="stable")[:SHOWN].tolist()
            ],
            "members": [{"label": labels[int(p.argmax())], "probability": finite(p.max())} for p in members],
        }
        if NEAREST in answer:
            content[NEAREST] = None if answer[NEAREST] < 0 else labels[answer[NEAREST]]
        return {**content, "notes": list(notes)} if notes else content


@dataclass(frozen=True)
class _Worker:
    """Runs rows on the warm plan of one device; threads may share it."""

    plan: OptimizedEnsemble
    model: Ensemble  # has the features, which plans do not return
    sizes: Sequence[int]  # of the pieces, ascending from 1

    def answer(self, rows: list[Sample]) -> list[Answer]:
        """One answer per row, in order."""
        groups: dict[Hashable, list[int]] = {}
        for index, row in enumerate(rows):
            groups.setdefault(row.shape, []).append(index)
        answers: dict[int, Answer] = {}
        with collect_warnings():  # `tensors` did so for the client; a warning would put values into the log
            for indices in groups.values():
                while indices:
                    size = max(size for size in self.sizes if size <= len(indices))
                    piece = indices[:size]
                    indices = indices[size:]
                    answers |= dict(zip(piece, self._piece([rows[index] for index in piece]), strict=True))
        return [answers[index] for index in range(len(rows))]

    def _piece(self, rows: list[Sample]) -> list[Answer]:
        arrays = columns(self.plan.predict(_stacked(rows), check_finite=False))
        if not np.isfinite(arrays["member_logits"]).all():
            raise self._no_number(rows)
        answers: list[Answer] = [{name: column[index] for name, column in arrays.items()} for index in range(len(rows))]
        asked = [index for index, row in enumerate(rows) if row.nearest]
        if asked:
            for index, label in zip(asked, self._nearest([rows[index] for index in asked]), strict=True):
                answers[index][NEAREST] = label
        return answers

    def _no_number(self, rows: list[Sample]) -> HydraError:
        """The error for logits that are not finite: the client's if pixels are absurdly large, else the server's."""
        mains = [next(iter(row.inputs.values())) for row in rows]  # pixels or tokens
        if mains[0].is_floating_point() and max(float(main.abs().max()) for main in mains) > MAX_PIXEL:
            return DataError("the model gives NaN or infinity for this input, whose values are too large for an image")
        kind = str(self.plan.dtype).removeprefix("torch.")
        return RequestError(f"the model gives NaN or infinity for this input; it is served in {kind}", 500)

    @torch.inference_mode()
    def _nearest(self, rows: list[Sample]) -> list[int]:
        """The class whose mean is nearest to the features of each row; -1 without class means."""
        familiarity = self.model.metadata.familiarity
        with dropping(False):
            features, _ = self.model.features_and_logits(self.model.prepare(_stacked(rows)))
        classes = None if familiarity is None else familiarity.nearest_class(features)
        return [-1] * len(rows) if classes is None else [int(label) for label in classes.tolist()]


def _doubling(first: int, last: int) -> list[int]:
    """Numbers that double, up to and with the last."""
    numbers = [first << power for power in range(last.bit_length())]
    return [*(number for number in numbers if number < last), last]


def _stacked(rows: Sequence[Sample]) -> Tensor | dict[str, Tensor]:
    """Stack rows of one shape into a batch, `[B, …]`."""
    batch = {name: torch.stack([row.inputs[name] for row in rows]) for name in rows[0].inputs}
    return next(iter(batch.values())) if len(batch) == 1 else batch


def finite(value: Any) -> float | None:
    """A float for JSON; None for NaN and infinity, which JSON lacks."""
    return float(value) if math.isfinite(value) else None


def read_named(body: Mapping[str, Any]) -> tuple[list[bytes], list[str | tuple[str, str]]]:
    """The images and texts of a JSON object or a form: one under `image` or `text`, several under the plural."""
    unknown = body.keys() - {"image", "images", "text", "texts"}
    if unknown:
        raise RequestError(f"there is no field {short(sorted(unknown)[0])}; there are image, images, text and texts")
    if isinstance(body.get("text"), list):  # one pair, or several texts?
        raise RequestError('text is a list; write texts: ["one", "two"], for a pair [["first", "second"]]')
    values: dict[str, list[Any]] = {}
    for name in ("image", "text"):
        several = body.get(f"{name}s", [])
        if not isinstance(several, list):
            raise RequestError(f"{name}s must be a list")
        values[name] = [*([body[name]] if name in body else []), *several]
    return [image_of(value) for value in values["image"]], [text_of(value) for value in values["text"]]


async def form_parts(request: "Request", most: int) -> list[tuple[str, str | bytes]]:
    """The parts of a form by name; text is decoded as Latin-1 to keep its bytes: Starlette would guess the encoding."""
    from starlette.datastructures import Headers
    from starlette.formparsers import MultiPartParser

    class Parser(MultiPartParser):
        ended = False
        spool_max_size = max_file_size = 0  # keep all parts in memory, never on disk; max_file_size: older Starlette

        def on_headers_finished(self) -> None:
            part = self._current_part  # older clients send non-ASCII file names this way; a part without one is no file
            part.content_disposition = (part.content_disposition or b"").replace(b"filename*=", b"filename=")
            super().on_headers_finished()

        def on_end(self) -> None:
            self.ended = True

    headers = Headers({"content-type": f"{request.headers['content-type']}; charset=latin-1"})
    parser = Parser(headers, request.stream(), max_files=most, max_fields=most)
    form = await parser.parse()
    parts = [(name, one if isinstance(one, str) else await one.read()) for name, one in form.multi_items()]
    await form.close()
    if not parser.ended:  # otherwise a truncated last part would be missing from the answers
        raise RequestError("the form is cut off: it does not end with its boundary")
    return parts


def read_form(
    form: bytes | Sequence[tuple[str, str | bytes]], most: int
) -> tuple[list[bytes], list[str | tuple[str, str]]]:
    """The images and texts of a form, URL-encoded or multipart, with at most `most` fields.

    Text of parts arrives as Latin-1, which keeps its bytes, and is decoded here; files are images, whatever their name.
    """
    if isinstance(form, bytes):
        try:
            form = parse_qsl(form.decode("latin-1"), keep_blank_values=True, encoding="latin-1", max_num_fields=most)
        except ValueError as error:
            raise RequestError(f"the form has more than {most} fields", 413) from error
    fields: dict[str, list[Any]] = {}
    for name, value in form:
        if isinstance(value, str):
            fields.setdefault(PLURALS.get(name, name), []).append(_decoded(value.encode("latin-1")))
        else:
            fields.setdefault("images", []).append(value)
    return read_named(fields)


def _decoded(content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:  # a guessed encoding would change the text
        raise RequestError("a text is not in UTF-8") from error


def image_of(value: Any) -> bytes:
    """The bytes of an image file; decoded if it is base64, as in JSON, which no image file is by itself."""
    try:
        text = value.decode("ascii") if isinstance(value, bytes) else value
        return base64.b64decode(text.partition(",")[2] if text.startswith("data:") else text, validate=True)
    except (AttributeError, ValueError) as error:  # not a string, or not base64
        if isinstance(value, bytes):
            return value
        raise RequestError("an image that is not bytes must be a base64 string on one line") from error


def text_of(value: Any) -> str | tuple[str, str]:
    """A text or a pair of texts from JSON, or a text from its bytes."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return _decoded(value)
    if isinstance(value, list) and len(value) == 2 and all(isinstance(part, str) for part in value):
        return value[0], value[1]
    raise RequestError("a text in JSON must be a string, or a list of two")

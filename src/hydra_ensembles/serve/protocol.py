"""Answers as named arrays, and what travels over HTTP: the Open Inference Protocol, version 2, and plain JSON.

A request of the protocol is JSON. If the header `Inference-Header-Content-Length` gives its length, the tensors with a
`binary_data_size` follow it in order, little-endian. The request also selects the format of each output.

`prediction.OUTPUTS` lists the parts of a prediction; here each becomes a field with a shape and a dtype. The sample is
the first axis of every input and output, also of member logits (`[B, M, C]`): the arrays are columns of a table, and
batches that a server can split and join.
"""

import base64
import heapq
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import RequestError
from ..model.ensemble import Answering as Model
from ..model.ensemble import Ensemble
from ..model.metadata import Calibration
from ..prediction import OUTPUTS, REASONS, Prediction
from ..settings import short
from .rows import Field, Reader

HEADER = "Inference-Header-Content-Length"
DATATYPES = {"BOOL": "bool", "UINT8": "uint8"}
DATATYPES |= {f"INT{bits}": f"int{bits}" for bits in (8, 16, 32, 64)}
DATATYPES |= {f"FP{bits}": f"float{bits}" for bits in (16, 32, 64)}
NAMES = {dtype: name for name, dtype in DATATYPES.items()}
SHOWN = 5  # number of most probable classes in a JSON answer

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]  # by output name
Answer = dict[str, Any]
"""Every output of `output_fields` for one sample, as a NumPy array or scalar."""
REASON_WORDS = tuple(reason or "" for reason in REASONS)
"""Words for the codes of the output `reason`; empty where the sample is accepted."""
AskedField = tuple[Field, bool]  # an output, and whether to send it as binary
Raw = bytes | str | tuple[str, str]  # the content of an image file, a text, or a pair of texts


# --- outputs -------------------------------------------------------------------------------------------------------


def output_fields(ensemble: Any) -> tuple[Field, ...]:
    """Outputs of this classifier; p-values, familiarity and verdict only if they were fitted."""
    familiarity, members = ensemble.metadata.familiarity, ensemble.num_members
    dtype = torch.float64 if ensemble.dtype == torch.float64 else torch.float32
    shape = 0 if familiarity is None else len(familiarity.settings.scores), members, 1  # [S, M, 1]
    scores = None if familiarity is None else torch.zeros(shape, dtype=dtype)
    blank = ensemble.prediction(torch.zeros(members, 1, ensemble.num_classes, dtype=dtype), scores)
    blank = replace(blank, **{name: torch.zeros(1, dtype=torch.long) for name in ensemble.per_row})
    return tuple(
        Field(name, array.shape[1:], str(array.dtype), OUTPUTS[name].meaning if name in OUTPUTS else
              f"How unlike familiar data the features are, by {name}; higher = less familiar.")
        for name, array in columns(blank).items()
    )  # fmt: skip


def named_tensors(prediction: Prediction) -> dict[str, Tensor]:
    """The outputs of a prediction by name, on its device, without synchronisation."""
    outputs = {name: output.read(prediction) for name, output in OUTPUTS.items()}
    unfamiliarity = prediction.unfamiliarity
    fitted = {} if unfamiliarity is None else {name: unfamiliarity.score(name) for name in unfamiliarity.score_names}
    return {name: tensor for name, tensor in (*outputs.items(), *fitted.items()) if tensor is not None}


def columns(prediction: Prediction) -> Arrays:
    """The outputs of a prediction by name, as arrays whose first axis is the sample."""
    return {name: tensor.cpu().numpy() for name, tensor in named_tensors(prediction).items()}


class Answering(nn.Module):
    """An ensemble that returns named outputs: calibration, familiarity and verdict are inside the module.

    It takes the inputs of `input_fields` as keywords. Unlike `predict` it does no preprocessing and no check for NaN
    logits, so it is one graph without breaks for compilers and exporters.
    """

    def __init__(self, ensemble: Ensemble) -> None:
        super().__init__()
        self.ensemble = ensemble

    def forward(
        self,
        pixel_values: Tensor | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """The named outputs, each `[B, …]`; give the inputs that `input_fields` lists."""
        main = input_ids if pixel_values is None else pixel_values
        logits, unfamiliarity = self.ensemble.answers(main, attention_mask, token_type_ids)
        outputs = named_tensors(self.ensemble.prediction(logits, unfamiliarity, check_finite=False))
        return outputs | {"score": outputs["score"].clone()}  # exported outputs must not share a tensor


@dataclass(frozen=True, eq=False)
class Served:
    """What clients see of a model: its name, what it reads, what it answers. Its weights are not read."""

    ensemble: Model
    name: str

    @cached_property
    def reader(self) -> Reader:
        """Turns raw rows into inputs."""
        return Reader(self.ensemble)

    @cached_property
    def outputs(self) -> tuple[Field, ...]:
        """What an answer holds."""
        return output_fields(self.ensemble)

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """Class names, or class indices if it has none."""
        return self.ensemble.class_names

    @cached_property
    def calibration(self) -> Calibration:
        """The calibration of the model, or one that changes nothing."""
        return self.ensemble.metadata.calibration or Calibration()

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What clients want to know of the model, as JSON data."""
        limit, fitted, unfamiliar = self.calibration.threshold, self.ensemble.metadata.familiarity, None
        if fitted is not None and fitted.settings.threshold is not None and fitted.settings.reference is not None:
            highest = torch.tensor([fitted.settings.threshold], dtype=torch.float64)
            unfamiliar = float(fitted.settings.reference.p_values(highest))
        by_confidence = isinstance(limit, float) and self.calibration.score == "msp" and limit > 0
        return {
            "name": self.name,
            "kind": self.ensemble.kind,
            "raw": self.reader.preprocessing is not None,
            "labels": list(self.labels),
            "reasons": list(REASON_WORDS),
            "members": self.ensemble.num_members,
            "outputs": {output.name: output.meaning for output in self.outputs},
            "promise": [str(promise) for promise in self.calibration.promises],
            "unsure_below": limit if by_confidence else None,
            "unfamiliar_share": unfamiliar,
        }

    def plain(self, answer: Answer, notes: Sequence[str] = ()) -> dict[str, Any]:
        """An answer and any notes as JSON data, with class names for indices; members have the temperature, too."""
        labels, probs = self.labels, answer["probs"]
        logits = answer["member_logits"].astype(np.float64) / self.calibration.temperature  # [M, C]
        members = np.exp(logits - logits.max(axis=-1, keepdims=True))
        members /= members.sum(axis=-1, keepdims=True)
        numbers = {
            field.name: int(answer[field.name]) if field.dtype == "int64" else finite(answer[field.name])
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
                for index in heapq.nlargest(SHOWN, range(len(labels)), probs.tolist().__getitem__)
            ],
            "members": [{"label": labels[int(p.argmax())], "probability": finite(p.max())} for p in members],
        }
        return {**content, "notes": list(notes)} if notes else content


def finite(value: Any) -> float | None:
    """A float for JSON; None for NaN and infinity, which JSON lacks."""
    return float(value) if math.isfinite(value) else None


# --- plain requests --------------------------------------------------------------------------------------------------


def request_of(body: bytes) -> dict[str, Any]:
    """Parse a JSON object, or raise `RequestError`."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError("the body is not valid JSON") from error
    if not isinstance(content, dict):
        raise RequestError(f"the body is JSON of the type {type(content).__name__}; give an object with named fields")
    return content


def read_named(body: Mapping[str, Any]) -> list[Raw]:
    """The images and texts of a JSON object: one under `image` or `text`, several under the plural."""
    if unknown := body.keys() - {"image", "images", "text", "texts"}:
        raise RequestError(f"there is no field {short(min(unknown))}; there are image, images, text and texts")
    raws = list[Raw]()
    for name, read in (("image", image_of), ("text", text_of)):
        several, one = body.get(f"{name}s", []), body.get(name)
        if not isinstance(several, list) or isinstance(one, list):  # under the singular: one pair, or several texts?
            raise RequestError(f'write {name}s: ["one", "two"], for a pair of texts [["first", "second"]]')
        raws += [read(value) for value in ([] if one is None else [one]) + several]
    return raws


def image_of(value: Any) -> bytes:
    """The bytes of an image file from JSON."""
    try:
        return base64.b64decode(value.partition(",")[2] if value.startswith("data:") else value, validate=True)
    except (AttributeError, ValueError) as error:  # not a string, or not base64
        raise RequestError("an image in JSON must be a base64 string on one line") from error


def text_of(value: Any) -> str | tuple[str, str]:
    """A text or a pair of texts from JSON."""
    if isinstance(value, list) and len(value) == 2 and all(isinstance(part, str) for part in value):
        return value[0], value[1]
    if not isinstance(value, str):
        raise RequestError("a text in JSON must be a string, or a list of two")
    return value


# --- requests of the protocol ----------------------------------------------------------------------------------------


def read_request(body: bytes, header: str | None) -> tuple[dict[str, Any], Arrays]:
    """The JSON of a request and its inputs by name."""
    length = len(body) if header is None else int(header) if header.isdecimal() and len(header) < 18 else 0
    request, rest = request_of(body[:length]), memoryview(body)[length:]
    inputs = request.get("inputs")
    if not isinstance(inputs, list) or not inputs or not all(isinstance(entry, dict) for entry in inputs):
        raise RequestError("a request needs 'inputs', a list of tensors with name, shape, datatype and data")
    tensors: Arrays = {}
    for entry in inputs:
        try:
            size = _parameters(entry).get("binary_data_size")
            content = entry.get("data") if size is None else rest[:size]
            rest = rest if size is None else rest[size:]
            tensors[entry["name"]] = _tensor(entry["datatype"], tuple(entry["shape"]), content)
        except (ValueError, TypeError, KeyError, OverflowError, AttributeError) as error:
            what = f"{short(entry.get('datatype'))} of the shape {short(entry.get('shape'))}"
            raise RequestError(f"the data of input {short(entry.get('name'))} are not {what}: {error}") from error
    return request, tensors


def _parameters(of: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = of.get("parameters")
    return parameters if isinstance(parameters, dict) else {}


def _tensor(datatype: str, shape: tuple[int, ...], content: Any) -> Array:
    """A tensor from its list in JSON or from its bytes; raises whatever NumPy does if they do not fit."""
    binary = isinstance(content, memoryview)
    if not shape or min(shape) < 1 or not (binary or isinstance(content, list)):
        raise ValueError("give a shape, samples first, and a list or binary data")
    dtype = np.dtype(DATATYPES[datatype]).newbyteorder("<")
    array: Array = np.frombuffer(content, dtype) if binary else np.array(content, dtype)
    return array.reshape(shape)


# --- responses -------------------------------------------------------------------------------------------------------


def write_answer(
    request: Mapping[str, Any],
    served: Served,
    outputs: Iterable[AskedField],
    answers: Sequence[Answer],
) -> tuple[bytes, dict[str, str]]:
    """Body and headers of a response; NaN and infinity are null in JSON."""
    tensors, buffers = list[dict[str, Any]](), list[bytes]()
    for field, binary in outputs:
        array = np.stack([answer[field.name] for answer in answers])  # [B, …]
        tensor: dict[str, Any] = {"name": field.name, "datatype": NAMES[field.dtype], "shape": list(array.shape)}
        if binary:
            content = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()
            tensor["parameters"] = {"binary_data_size": len(content)}
            buffers.append(content)
        else:
            all_finite = array.dtype.kind != "f" or np.isfinite(array).all()
            tensor["data"] = array.reshape(-1).tolist() if all_finite else [finite(value) for value in array.flat]
        tensors.append(tensor)
    body: dict[str, Any] = {"model_name": served.name, "model_version": "1", "outputs": tensors}
    if isinstance(request.get("id"), str):
        body["id"] = request["id"]
    head = json.dumps(body, allow_nan=False).encode()
    if not buffers:
        return head, {"Content-Type": "application/json"}
    return head + b"".join(buffers), {"Content-Type": "application/octet-stream", HEADER: str(len(head))}


def asked_outputs(request: Mapping[str, Any], served: Served) -> list[AskedField]:
    """The outputs that a request names, or all if it names none; unknown names raise `RequestError`."""
    fields = {field.name: field for field in served.outputs}
    names = tuple(fields)  # a tuple, as the requested name may be unhashable
    usual = bool(_parameters(request).get("binary_data_output"))
    asked = request.get("outputs") or [{"name": name} for name in names]
    if not isinstance(asked, list) or not all(isinstance(item, dict) and item.get("name") in names for item in asked):
        raise RequestError(f"outputs must be a list of objects, each with a name among {', '.join(fields)}")
    return [(fields[item["name"]], bool(_parameters(item).get("binary_data", usual))) for item in asked]


def model_metadata(served: Served) -> dict[str, Any]:
    """Model metadata: inputs and outputs, and everything else under `parameters`."""
    reader = served.reader
    inputs, outputs = (
        [{"name": one.name, "datatype": NAMES.get(one.dtype, "FP32"), "shape": [-1, *one.shape]} for one in fields]
        for fields in (reader.inputs, served.outputs)
    )
    if reader.image_size is not None:
        inputs[0] |= {"datatype": "FP32", "shape": [-1, reader.inputs[0].shape[0], *reader.image_size]}
    about = {"name": served.name, "versions": ["1"], "platform": "hydra_ensembles", "parameters": served.facts}
    return {**about, "inputs": inputs, "outputs": outputs}


# --- descriptions for OpenAPI ----------------------------------------------------------------------------------------

_FILE, _FILES = {"type": "string", "format": "binary"}, {"type": "array", "items": {"type": "string"}}
_FORM = {"file": {"type": "array", "items": _FILE}, "text": _FILES}
_JSON = {"image": {"type": "string", "description": "base64"}, "images": _FILES, "text": {"type": "string"}}
SAMPLES = {
    "content": {
        "multipart/form-data": {"schema": {"type": "object", "properties": _FORM}},
        "application/json": {"schema": {"type": "object", "properties": {**_JSON, "texts": _FILES}}},
        "image/*": {"schema": _FILE},
    }
}
"""The body that `/v1/predict` takes."""


def schemas(models: Iterable[Served]) -> tuple[Any, Any, Any]:
    """The bodies of answers, of those in the protocol, and of refusals; what a model answers depends on its fits."""
    from pydantic import Field, create_model  # comes with FastAPI

    fields = [field for one in models for field in one.outputs if field.name not in ("label", "accept", "reason")]
    optional: Any = {
        field.name: (float | None, Field(None, description=field.meaning)) for field in fields if not field.shape
    }
    share: Any = create_model("Share", label=(str, ...), probability=(float | None, ...))
    lists: Any = {"top": (list[share], ...), "members": (list[share], ...), "notes": (list[str], [])}
    verdict: Any = {"accept": (bool | None, ...), "reason": (Literal["unsure", "unfamiliar", "alarm"] | None, ...)}
    one: Any = create_model("Prediction", label=(str, ...), index=(int, ...), **verdict, **optional, **lists)
    tensor: Any = create_model(
        "Tensor", name=(str, ...), datatype=(str, ...), shape=(list[int], ...), data=(list[Any], [])
    )
    return (
        create_model("Answers", model=(str, ...), predictions=(list[one], ...)),
        create_model("Inferred", model_name=(str, ...), model_version=(str, ...), outputs=(list[tensor], ...)),
        create_model("Refusal", error=(str, ...)),
    )

"""Export of ensembles to ONNX: trace, write, run, compare with the original, then store."""

import copy
import json
import logging
import os
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from .._utils import __version__, library, without_autocast
from ..errors import ConfigError, ConversionError
from ..files import expanded, write_json, writing
from ..model.config import PatchStemConfig
from ..model.dual_encoder import require_ensemble
from ..model.ensemble import Ensemble
from ..model.layers import dropping
from ..preprocessing import TextPreprocessing
from ..settings import to_plain
from .protocol import REASON_WORDS, Answering, Arrays, output_fields
from .rows import Field, input_fields

Named = Mapping[str, Tensor]

TOLERANCE = 5e-5  # how much answers may differ, as a part of 1 + the largest number of a row
DISTANCES = 100  # factor on the tolerance for feature distances: squares, expanded into larger terms that cancel
RANKED, RANKS = ("p_value", "familiarity"), 0.1  # they jump at held-out scores
DECIDED, TIES = ("label", "accept", "reason", "disagreement", "confidence"), 2  # rows that may flip, being near a tie
TRACED = (5, 7)  # samples and, for texts, tokens of the traced batch
COMPARED = ((1, 9), (7, 33), (32, 64))
DATA, TOKENIZER, ABOUT = ".data", ".tokenizer.json", ".json"  # suffixes of files next to it; DATA: weights above 2 GB


@without_autocast()
def export(
    ensemble: Ensemble, path: str | Path, format: Literal["onnx"] = "onnx", *, tolerance: float = TOLERANCE
) -> Path:
    """Write an ensemble, with calibration, familiarity and verdict, as an ONNX file that runs without this library.

    The file takes preprocessed inputs (`pixel_values`; `input_ids` and what belongs to it) and returns the outputs of
    `serve.outputs` by name. Batches may have any number of samples, and texts any number of tokens; images have the
    size of the model. Next to it are `NAME.json` (inputs, outputs, class names, preprocessing), for texts
    `NAME.tokenizer.json`, and above 2 GB the weights, `NAME.data`.

    Before the file is stored it is run by ONNX Runtime on the CPU and compared with the ensemble, on random inputs of
    several sizes. If answers differ, nothing is written.

    Args:
        ensemble: A classifier in float32; a zero-shot one, too.
        path: The file, `NAME.onnx`; an earlier one is replaced.
        format: Only ONNX so far.
        tolerance: How much answers may differ, as a part of 1 + the largest number of a row. Feature distances may
            differ 100 times as much.

    Examples:
        >>> import onnxruntime, timm, torch, hydra_ensembles as he
        >>> model = timm.create_model("test_vit", img_size=32, depth=1, num_classes=3).eval()
        >>> path = he.export(he.convert(model), "model.onnx")
        >>> pixels = torch.randn(2, 3, 32, 32).numpy()
        >>> onnxruntime.InferenceSession(path).run(["label"], {"pixel_values": pixels})[0].shape
        (2,)
    """
    path, ensemble = expanded(path), require_ensemble(ensemble, "export", classifies=True)
    if format != "onnx" or path.suffix.lower() != ".onnx":
        raise ConfigError(f"{path} as {format} cannot be written; files are ONNX: name it with the suffix .onnx")
    for name in ("onnx", "onnxscript", "onnxruntime"):
        library(name, extra="onnx")
    if ensemble.dtype != torch.float32:
        raise ConfigError(f"the ensemble is {ensemble.dtype}; ONNX Runtime runs float32 here: use ensemble.float()")
    model = ensemble if ensemble.device.type == "cpu" else copy.deepcopy(ensemble).cpu()
    answering, inputs, outputs = Answering(model), input_fields(model), output_fields(model)
    with torch.no_grad(), dropping(False), _staged(path) as file:
        batches = [_random(model, inputs, *size) for size in COMPARED]
        expected = [(batch, _arrays(answering(**batch))) for batch in batches]  # first: caches familiarity
        about = _about(model, inputs, outputs)
        with _quiet():
            _write(_traced(answering, _random(model, inputs, *TRACED), inputs, model), file, inputs, outputs, about)
            run = _runner(file)
            for batch, wanted in expected:
                _compare(run(batch), wanted, model, tolerance)
        preprocessing = model.metadata.preprocessing
        if isinstance(preprocessing, TextPreprocessing) and preprocessing.tokenizer:
            file.with_name(f"{file.name}{TOKENIZER}").write_text(preprocessing.tokenizer, encoding="utf-8")
        write_json(file.with_name(f"{file.name}{ABOUT}"), about)
    return path


@contextmanager
def _staged(path: Path) -> Iterator[Path]:
    """A temporary place for a file and its companions; if the block succeeds, all are moved to their final place."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        staging = path.parent / f".{path.name}.{secrets.token_hex(4)}.tmp"
        staging.mkdir()
        try:
            yield staging / path.name
            for suffix in ("", DATA, TOKENIZER, ABOUT):  # of a former model: no file may stand beside those of another
                path.with_name(f"{path.name}{suffix}").unlink(missing_ok=True)
            for file in sorted(staging.iterdir(), key=lambda file: file.name == path.name):  # the model file last
                os.replace(file, path.parent / file.name)
        finally:
            shutil.rmtree(staging, ignore_errors=True)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence exporters' warnings and logs, which concern their own code; report a failure in one line."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    except (ConversionError, OSError):
        raise
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConversionError(f"torch {torch.__version__} cannot export this ensemble: {reason}") from error
    finally:
        logging.disable(logging.NOTSET)


# --- inputs and answers ---------------------------------------------------------------------------------------------


def _random(ensemble: Ensemble, inputs: Sequence[Field], samples: int, tokens: int) -> dict[str, Tensor]:
    """Random inputs by name; texts with padding."""
    generator = torch.Generator().manual_seed(samples)
    stem = ensemble.config.stem
    if isinstance(stem, PatchStemConfig):
        return {inputs[0].name: torch.randn(samples, *inputs[0].shape, generator=generator)}
    tokens = min(tokens, stem.max_tokens)
    lengths = torch.randint(1, tokens + 1, (samples, 1), generator=generator)
    tensors = {
        "input_ids": torch.randint(0, stem.vocabulary, (samples, tokens), generator=generator),
        "attention_mask": (torch.arange(tokens)[None] < lengths).long(),
        "token_type_ids": torch.randint(0, max(stem.segments, 1), (samples, tokens), generator=generator),
    }
    return {field.name: tensors[field.name] for field in inputs}


def _arrays(outputs: Named) -> Arrays:
    return {name: tensor.numpy() for name, tensor in outputs.items()}


def _compare(actual: Arrays, expected: Arrays, ensemble: Ensemble, allowed: float) -> None:
    """Raise `ConversionError` if an output differs by more than is allowed."""
    familiarity = ensemble.metadata.familiarity
    distances = () if familiarity is None else familiarity.settings.scores
    for name, values in expected.items():
        if actual[name].shape != values.shape:
            raise ConversionError(f"{name} of the file is {actual[name].shape}, expected {values.shape}")
        difference = np.abs(actual[name].astype(np.float64) - values.astype(np.float64))
        # rounding errors of a small logit scale with the largest value of its row
        size = np.abs(values.astype(np.float64)).max(axis=tuple(range(1, values.ndim)), keepdims=True, initial=0.0)
        limit = allowed * (DISTANCES if name in distances else 1) * (1 + size)
        near = (difference <= (RANKS if name in RANKED else limit)).reshape(len(values), -1).all(axis=1)  # not for NaN
        if np.count_nonzero(~near) > (TIES if name in DECIDED else 0):
            raise ConversionError(
                f"the file answers differently: {name} differs by {np.max(difference):.3g} in {len(values)} "
                f"rows; nothing was written. If that is good enough, give a tolerance larger than {allowed}"
            )


# --- ONNX -----------------------------------------------------------------------------------------------------------


def _traced(answering: Answering, example: Named, inputs: Sequence[Field], ensemble: Ensemble) -> Any:
    """Export the module for any batch size, and for any number of tokens up to the model's maximum."""
    axes = {0: torch.export.Dim("batch", min=1)}
    if ensemble.kind == "text":
        axes[1] = torch.export.Dim("tokens", min=1, max=ensemble.config.stem.max_tokens)
    shapes = {field.name: axes for field in inputs}
    return torch.export.export(answering, (), dict(example), dynamic_shapes=shapes, strict=False)


def _write(
    program: Any, file: Path, inputs: Sequence[Field], outputs: Sequence[Field], about: Mapping[str, Any]
) -> None:
    names: dict[str, Any] = {"input_names": [f.name for f in inputs], "output_names": [f.name for f in outputs]}
    shapes = {field.name: dict(enumerate(("batch", "tokens")[: 1 + field.shape.count(-1)])) for field in inputs}
    exported = torch.onnx.export(
        program, dynamo=True, verbose=False, dynamic_shapes=shapes, custom_translation_table=_translations(), **names
    )
    assert exported is not None
    exported.model.metadata_props.update({key: json.dumps(value, ensure_ascii=False) for key, value in about.items()})
    exported.save(file)


def _translations() -> dict[Any, Any]:
    """Operators that the ONNX exporter does not know, or translates wrongly."""
    op = library("onnxscript", extra="onnx").opset20

    def entropy(x):  # type: ignore[no-untyped-def]  # -x log x, and 0 at 0
        one = op.CastLike(op.Constant(value_float=1.0), x)
        return op.Neg(op.Mul(x, op.Log(op.Where(op.Greater(x, op.Sub(one, one)), x, one))))

    def below(ordered, values):  # type: ignore[no-untyped-def]  # for each value: how many of the ordered are smaller
        last = op.Constant(value_ints=[-1])
        counted = op.Cast(op.Not(op.GreaterOrEqual(ordered, op.Unsqueeze(values, last))), to=7)  # int64
        return op.ReduceSum(counted, last, keepdims=0)

    aten = torch.ops.aten
    return {aten.special_entr.default: entropy, aten.searchsorted.Tensor: below}


def _runner(file: Path) -> Callable[[Named], Arrays]:
    runtime = library("onnxruntime", extra="onnx")
    options = runtime.SessionOptions()
    options.log_severity_level = 3  # errors
    session = runtime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return lambda inputs: dict(zip(names, session.run(None, _arrays(inputs)), strict=True))


def _about(ensemble: Ensemble, inputs: Sequence[Field], outputs: Sequence[Field]) -> dict[str, Any]:
    """Everything needed to run the file."""

    def listed(fields: Sequence[Field]) -> list[dict[str, Any]]:
        shapes = (["batch", *("tokens" if size == -1 else size for size in field.shape)] for field in fields)
        return [{**to_plain(field), "shape": shape} for field, shape in zip(fields, shapes, strict=True)]

    preprocessing = to_plain(ensemble.metadata.preprocessing)
    if preprocessing is not None:
        preprocessing.pop("tokenizer", None)  # has its own file
    return {
        "format": "onnx",
        "made_by": f"hydra_ensembles {__version__}, torch {torch.__version__}",
        "inputs": listed(inputs),
        "outputs": listed(outputs),
        "labels": list(ensemble.metadata.labels),
        "reasons": list(REASON_WORDS),
        "preprocessing": preprocessing,
    }

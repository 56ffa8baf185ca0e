"""The proof of a conversion: the original and the converted model answer the same fixed inputs alike.

The inputs are an image of the model's size and, if the original takes it, a larger one; or two texts, one padded. They
are varied, but few: what a model does only with others (a special token id, texts longer than these, pixels of
another range), only in training, or only on another device is not compared. Nor is what a classifier of zeros hides.
"""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from .._utils import evaluation_mode, torch_seeded
from ..errors import ConversionError
from ..model.config import EnsembleConfig, TextStemConfig
from ..model.ensemble import Ensemble
from ..model.layers import GroupedLinear
from ..model.metadata import Metadata
from ..preprocessing import TextPreprocessing
from .core import WAYS, Found, NamedTensors

_TOKENS, _MOST = 64, 256
_HALF = {torch.float16, torch.bfloat16}
_ROUNDED = 2e-2
_ALLOWED = 1e-4  # of the largest output: covers sums in another order, and float32 angles of rotary positions


Answers = list[tuple[NamedTensors, Tensor]]  # inputs, and what the original answers


@dataclass(frozen=True)
class Original:
    """A model that is converted, whose answers are the proof."""

    found: Found  # not changed
    config: EnsembleConfig
    metadata: Metadata
    fresh: bool = False  # whether the classifier is new: then features are compared

    @property
    def like(self) -> Tensor:
        """One of its parameters, for device and dtype."""
        first: Tensor = next(self.found.model.parameters())
        return first

    def answers(self) -> Answers:
        """All inputs with the answers: logits `[B, C]`, or features `[B, d]` if the classifier is new."""
        found: Answers = []
        with _answering(self):
            for inputs in _inputs(self):
                try:
                    batch = {name: tensor.clone() for name, tensor in inputs.items()}
                    answer = self.found.architecture.answer(self.found.model, batch, self.fresh)
                    assert answer.shape[0] == len(next(iter(inputs.values()))), "it does not answer every sample"
                except Exception as error:  # a user's model may raise anything
                    if found:
                        break  # it takes only images of its own size
                    told = f"for a random batch {_shapes(inputs)} the model itself cannot answer"
                    why = f"({type(error).__name__}: {error}); repair it, or convert with probe=False"
                    raise ConversionError(f"{told} {why}") from error
                found.append((inputs, answer))
        return found


class _InFloat32(TorchFunctionMode):
    """Compute with half-precision weights in float32, one operation at a time: no model is copied for it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.__name__ in _VIEWS:
            return func(*args, **kwargs)
        if func is F.embedding:
            return _wide(func(*args, **kwargs))
        biased = any(isinstance(one, Tensor) for one in args[2:])
        if func is F.linear and len(args) > 1 and not biased and args[1].numel() > _LARGE:  # words of a language model
            rows = args[1].split(max(1, _LARGE // args[1].shape[1]))
            return torch.cat([F.linear(_wide(args[0]), _wide(some)) for some in rows], dim=-1)
        return func(*_wide(args), **_wide(kwargs))


def _wide(given: Any) -> Any:
    """The same arguments in float32, where they are in half precision."""
    if isinstance(given, Tensor):
        return given.float() if given.dtype in _HALF else given
    if isinstance(given, torch.dtype):
        return torch.float32 if given in _HALF else given
    if isinstance(given, dict):
        return {name: _wide(value) for name, value in given.items()}
    return type(given)(map(_wide, given)) if type(given) in (list, tuple) else given


_LARGE = 1 << 23
_VIEWS = {"__get__", "__getitem__", "size", "dim", "numel", "t", "transpose", "unflatten", "flatten", "view"}


def require_same_answers(
    original: Original, answers: Answers, ensemble: Ensemble, projection: GroupedLinear | None = None
) -> None:
    """Raise if the conversion changes an answer; a tower of a dual encoder has a projection of its features.

    Models in half precision are compared in float32, so that no difference is mistaken for rounding.
    """
    half, rounds = ensemble.dtype in _HALF, original.found.architecture.rounds
    allowed = _ROUNDED if half and rounds else _ALLOWED
    tf32 = torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32  # ten bits, as float16
    if tf32 and ensemble.device.type == "cuda":
        allowed = max(allowed, _ROUNDED)
    with _answering(original):
        for inputs, expected in answers:
            found = ensemble.features(inputs)[0] if original.fresh else ensemble(inputs)[0]
            if original.fresh and ensemble.config.readout.pool == "distilled":
                found = found.unflatten(1, (2, -1)).mean(1)  # of two tokens
            apart = _difference(found if projection is None else projection(found[None])[0], expected)
            if not apart <= allowed:  # also if it is NaN
                known = original.found.architecture.classes
                said = "its class and configuration say" if known else "the declaration says"
                what = "features" if original.fresh else "answers"
                raise ConversionError(
                    f"the {what} of the converted model differ by {apart:.2g} of their size ({allowed:g} is allowed) "
                    f"on a random batch {_shapes(inputs)}: the model does not compute what {said}. {WAYS}"
                )


@contextmanager
def _answering(original: Original) -> Iterator[None]:
    """Set evaluation mode and a seed, disable gradients, autocast and compilation; all is restored afterwards.

    Warnings of the model itself are suppressed: they are not about the conversion. What `accelerate` put in place of
    `forward`, which computes in half precision, is put aside.
    """
    like, model = original.like, original.found.model
    compiled = "torch._dynamo" in sys.modules  # else nothing is compiled, and importing it takes seconds
    mixed = vars(model).pop("forward", None) if "_original_forward" in vars(model) else None
    try:
        with (
            warnings.catch_warnings(action="ignore"),
            torch.compiler.set_stance("force_eager") if compiled else nullcontext(),
            torch.no_grad(),
            torch.autocast(like.device.type, enabled=False),
            torch_seeded(0, like.device),
            evaluation_mode(model),
            _InFloat32() if like.dtype in _HALF else nullcontext(),
        ):
            yield
    finally:
        if mixed is not None:
            vars(model)["forward"] = mixed


# --- the inputs ----------------------------------------------------------------------------------------------


def _inputs(original: Original) -> Iterator[NamedTensors]:
    """Yield the batches; the same in every process. Two samples show whether a user's own model mixes them."""
    stem, like = original.config.stem, original.like
    generator = torch.Generator("cpu").manual_seed(0)
    if isinstance(stem, TextStemConfig):
        yield {name: tensor.to(like.device) for name, tensor in _texts(original, stem, generator).items()}
        return
    (height, width), (high, wide) = stem.image_size, stem.patch_size
    count = 1 if original.found.architecture.classes else 2
    for samples, *size in ((count, height, width), (1, height + high, width + 2 * wide)):
        images = torch.randn((samples, stem.channels, *size), generator=generator, device="cpu", dtype=torch.float32)
        yield {"pixel_values": images.to(like)}


def _texts(original: Original, stem: TextStemConfig, generator: torch.Generator) -> dict[str, Tensor]:
    """Return token ids `[B, T]`, a mask if the model takes one, and segments if there are several.

    CLIP's texts (of the others, only decoders lack a norm after the embedding) fill the context and have an end-of-text
    token. Windows of thousands of tokens are not filled.
    """
    config, architecture = original.config, original.found.architecture
    decoder = config.readout.pool == "last" and config.encoder.causal
    clip = not stem.norm and bool(architecture.classes) and not decoder
    tokens = stem.max_tokens if clip else min(stem.max_tokens, _TOKENS + 2 * (config.encoder.window or 0), _MOST)
    ids = torch.randint(stem.vocabulary, (2, tokens), generator=generator, device="cpu")
    if not architecture.masks:
        return {"input_ids": ids}
    pad = _padding(original, stem)
    end = stem.vocabulary - 1 if config.readout.eot_token is None else config.readout.eot_token
    ordinary = next((word for word in range(stem.vocabulary) if word not in (pad, end)), pad)
    ids = ids.masked_fill((ids == pad) | (ids == end), ordinary)
    positions = torch.arange(tokens, device="cpu")[None]  # [1, T]
    ends = torch.tensor([tokens - 1, tokens // 2], device="cpu")[:, None]  # [B, 1], the last token
    ids = ids.masked_fill(positions > ends, pad)
    if clip:
        return {"input_ids": ids.masked_fill(positions == ends, end)}
    inputs = {"input_ids": ids, "attention_mask": (positions <= ends).long()}
    if stem.segments > 1:
        inputs["token_type_ids"] = ((positions > ends // 2) & (positions <= ends)).long()
    return inputs


def _padding(original: Original, stem: TextStemConfig) -> int:
    """Return the padding id according to the readout, position table or tokenizer; 0 if none of them says."""
    texts, decoder = original.metadata.preprocessing, original.config.readout.pad_token
    if decoder is not None:
        return decoder
    if stem.positions_after is not None:
        return stem.positions_after
    return texts.pad_id if isinstance(texts, TextPreprocessing) else 0


def _shapes(inputs: NamedTensors) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in inputs.items()}


# --- the differences -----------------------------------------------------------------------------------------


def _difference(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest expected value; infinity if the shapes differ."""
    if actual.shape != expected.shape:
        return float("inf")
    expected = expected.double()
    scale, apart = expected.abs().max().item(), (actual.double() - expected).abs().max().item()
    return apart / scale if scale else apart

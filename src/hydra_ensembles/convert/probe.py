"""The final check: comparing the outputs of the original and the converted model on the same random batch."""

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .._utils import evaluation_mode, torch_seeded
from ..errors import ConversionError
from ..model.config import PatchStemConfig, TextStemConfig
from ..model.ensemble import Ensemble
from ..model.layers import GroupedLinear
from ..preprocessing import TextPreprocessing
from .altered import has_foreign_forward
from .core import Architecture, NamedTensors, block_name

_TEXTS, _TOKENS = 2, 32
_FEW_TOKENS = 16  # tokens of an image for the first, cheap comparison: class token, registers, some patches
_RESAMPLED_TOLERANCE = 1e-5  # tolerance for resampled positions, which are computed in float32 for any dtype
_ANGLE_TOLERANCE = 32  # tolerance for another model's rounding of rotary angles, in units of the effect of ours
# Tolerances relative to the largest output: covers the effect of summing in another order.
_TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


class NoAnswerError(ConversionError):
    """The original cannot be run, so outputs cannot be compared."""


class OtherSizeError(ConversionError):
    """The outputs agree on images of the model's own size, but differ on larger ones."""


@dataclass(frozen=True)
class ModelPair:
    """An original model and the converted one, to compare their outputs."""

    architecture: Architecture
    model: nn.Module  # not changed
    ensemble: Ensemble
    fresh: bool = False  # whether the classifier is new: then features are compared
    projection: GroupedLinear | None = None  # of a dual encoder's tower, applied to its features

    @property
    def own(self) -> bool:
        """Whether this is a user's own model, about which only its outputs are known."""
        return not self.architecture.classes

    @property
    def zero_classifier(self) -> bool:
        """Whether all classifier weights are zero, so that comparing logits proves nothing."""
        classifier = self.ensemble.readout.classifier
        return classifier is not None and not classifier.weight.any()

    def in_float32(self) -> "ModelPair":
        """Return copies of both in float32.

        Raises:
            NoAnswerError: The original cannot be copied, or memory is insufficient.
        """
        parts = {"model": self.model, "ensemble": self.ensemble, "projection": self.projection}
        try:
            copies: dict[str, Any] = {name: deepcopy(part).float() for name, part in parts.items() if part is not None}
        except Exception as error:  # a user's model may raise anything
            raise NoAnswerError(f"{self.architecture.name}: {error}") from error
        return replace(self, **copies)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Set evaluation mode and a seed, disable gradients, autocast and compilation; all is restored afterwards.

        Warnings of the model itself are suppressed: they are not about the conversion.
        """
        device = self.ensemble.device
        compiled = "torch._dynamo" in sys.modules  # else nothing is compiled, and importing it takes seconds
        with (
            warnings.catch_warnings(action="ignore"),
            torch.compiler.set_stance("force_eager") if compiled else nullcontext(),
            torch.no_grad(),
            torch.autocast(device.type, enabled=False),
            torch_seeded(0, device),
            evaluation_mode(self.model),
        ):
            yield

    def original(self, inputs: NamedTensors) -> Tensor:
        """Run the original: logits `[B, C]`, or features `[B, d]` if the classifier is new."""
        told = f"{self.architecture.name}: for a random batch {_shapes(inputs)} the model itself"
        try:
            batch = {name: tensor.clone() for name, tensor in inputs.items()}
            answer = self.architecture.answer(self.model, batch, self.fresh)
        except Exception as error:  # a user's model may raise anything
            why = f"cannot answer ({type(error).__name__}: {error})"
            raise NoAnswerError(f"{told} {why}; repair it, or convert with probe=False") from error
        samples, shape = len(next(iter(inputs.values()))), list(answer.shape)
        if self.own and (answer.dim() != 2 or len(answer) != samples):
            raise NoAnswerError(f"{told} returns {shape}, not [{samples}, classes]; say with answer= where logits are")
        if not answer.isfinite().all():
            raise ConversionError(f"{told} returns NaN or infinite numbers in {answer.dtype}; try model.float()")
        return answer

    def converted(self, inputs: NamedTensors) -> Tensor:
        """Run the converted model; the output is as in `original`."""
        ensemble = self.ensemble
        if not self.fresh:
            return ensemble(inputs)[0] if self.projection is None else self.projection(ensemble(inputs))[0]
        features = ensemble.features(inputs)[0]  # [B, d]; [B, 2, d] with a distillation token
        return features.mean(1) if ensemble.config.readout.pool == "distilled" else features

    def allowed(self, inputs: NamedTensors) -> float:
        """Return the relative tolerance for the outputs of a batch.

        In float64, only rotary angles may be rounded to float32 in either model, each in its own order of operations:
        the effect of rounding ours is measured.
        """
        dtype, rotary = self.ensemble.dtype, self.ensemble.encoder.rotary
        rounded = torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32  # ten bits, as float16
        if dtype is torch.float32 and self.ensemble.device.type == "cuda" and rounded:
            dtype = torch.float16
        allowed = _TOLERANCES.get(dtype, _TOLERANCES[torch.bfloat16])
        if dtype is not torch.float64 or rotary is None:
            return allowed
        rounded_angles = self.converted(inputs)
        rotary.precision = torch.float64
        try:
            return max(allowed, _ANGLE_TOLERANCE * difference(self.converted(inputs), rounded_angles))
        finally:
            rotary.precision = torch.float32

    def batches(self) -> Iterator[NamedTensors]:
        """Yield one image of the model's size, or two texts of different length; the same in every process.

        For a user's own model more is checked. Its output for a sample must not depend on the rest of the batch: two
        images follow, or one text of maximum length. Its computation may depend on the range of pixel values (some
        models rescale bytes themselves): images in [0, 1] and in [0, 255] follow.
        """
        stem = self.ensemble.config.stem
        samples = self.samples()
        if isinstance(stem, PatchStemConfig):
            images = samples["pixel_values"]
            yield {"pixel_values": images[:1]}
            if self.own:
                yield samples
                yield from ({"pixel_values": images[:1].sigmoid() * top} for top in (1.0, 255.0))
            return
        yield samples
        if self.own:
            pad = (*self.paddings(), 0)[0]
            ids = _random_ids(stem, 1, stem.max_tokens)
            ids = ids.masked_fill(ids == pad, (pad + 1) % stem.vocabulary).to(self.ensemble.device)
            yield {**{name: torch.ones_like(ids) for name in samples}, "input_ids": ids}

    def samples(self) -> NamedTensors:
        """Return two images of the model's size, or two texts; the second is padded if the model takes a mask."""
        stem = self.ensemble.config.stem
        if isinstance(stem, PatchStemConfig):
            return _images(self.ensemble, stem.image_size, 2)
        texts = {"input_ids": _random_ids(stem, _TEXTS, min(stem.max_tokens, _TOKENS))}
        texts = self._text_inputs(stem) if self.architecture.masks else texts
        return {name: tensor.to(self.ensemble.device) for name, tensor in texts.items()}

    def _text_inputs(self, stem: TextStemConfig) -> dict[str, Tensor]:
        """Return token ids `[B, T]`, a mask if the family takes one, and segments if there are several.

        CLIP's texts (no other family lacks a norm after the embedding) fill the context and have an end-of-text token.
        """
        config, clip = self.ensemble.config, not stem.norm and not self.own
        tokens = stem.max_tokens if clip else min(stem.max_tokens, _TOKENS + 2 * (config.encoder.window or 0))
        known = (stem.positions_after, *(self.paddings() if self.own else ()))
        pad = next((one for one in known if one is not None), 0)
        eot = stem.vocabulary - 1 if config.readout.eot_token is None else config.readout.eot_token
        ids = _random_ids(stem, _TEXTS, tokens)
        ordinary = next((word for word in range(stem.vocabulary) if word not in (pad, eot)), pad)
        ids = ids.masked_fill((ids == pad) | (ids == eot), ordinary)
        positions = torch.arange(tokens, device="cpu")[None]  # [1, T]
        ends = torch.tensor([tokens - 1, tokens // 2], device="cpu")[:, None]  # [B, 1], the last token
        ids = ids.masked_fill(positions > ends, pad)
        if clip:
            return {"input_ids": ids.masked_fill(positions == ends, eot)}
        inputs = {"input_ids": ids, "attention_mask": (positions <= ends).long()}
        if stem.segments > 1:
            inputs["token_type_ids"] = ((positions > ends // 2) & (positions <= ends)).long()
        return inputs

    def paddings(self) -> list[int]:
        """Return padding ids according to the preprocessing and the word embeddings, most likely first."""
        texts, rows = self.ensemble.metadata.preprocessing, self.ensemble.config.stem.vocabulary  # type: ignore[union-attr]
        tables = [emb for emb in self.model.modules() if isinstance(emb, nn.Embedding) and emb.num_embeddings == rows]
        pad_ids = [texts.pad_id] if isinstance(texts, TextPreprocessing) else []
        return [*pad_ids, *(table.padding_idx for table in tables if table.padding_idx is not None)]


def require_same_answers(both: ModelPair, *, locate: bool = True) -> None:
    """Raise if the conversion changes an output, and name the first layer where the models differ.

    Models in half precision are first compared in float32, if they run in it, so that no difference is mistaken for
    rounding. `locate=False` skips the search for that layer.
    """
    architecture, model, ensemble = both.architecture, both.model, both.ensemble
    if not both.own and ensemble.dtype in (torch.float16, torch.bfloat16):
        with suppress(NoAnswerError):
            require_same_answers(both.in_float32(), locate=locate)
    by_tokens = both.zero_classifier and not both.own  # logits prove nothing
    # Known classes treat all tokens alike, so few suffice; but rotary angles are computed for all tokens.
    few_suffice = not both.own and ensemble.kind == "image" and ensemble.config.encoder.rotary is None and not by_tokens
    few_suffice = few_suffice and not has_foreign_forward(model)
    with both.answering():
        for inputs in both.batches():
            allowed = both.allowed(inputs)
            if few_suffice and _agree_on_few_tokens(both, inputs, allowed):
                continue
            apart = difference(both.converted(inputs), both.original(inputs))
            differ = not apart <= allowed  # also if it is NaN
            where = _first_difference(both, inputs, allowed) if by_tokens or (locate and differ) else ""
            if where or differ:
                last = block_name(architecture, model, ensemble.num_layers - 1)
                place = where or (f"after {last}, where tokens are pooled and classified" if locate else "somewhere")
                raise _difference_error(both, inputs, apart, allowed, place)
        if both.own and isinstance(ensemble.config.stem, PatchStemConfig):
            _require_other_size(both)


def _difference_error(
    both: ModelPair, inputs: NamedTensors, apart: float, allowed: float, where: str
) -> ConversionError:
    by = f" by {apart:.2g} of their size" if apart else ", in tokens before the classifier,"
    source = "the declaration says" if both.own else "its class and its configuration say"
    return ConversionError(
        f"{both.architecture.name}: the {'features' if both.fresh else 'answers'} of the converted model differ from "
        f"those of the original{by} on a random batch {_shapes(inputs)} ({allowed:g} is allowed): the model does not "
        f"compute what {source}. The two first differ {where}; mend it there, or convert with probe=False"
    )


def _require_other_size(both: ModelPair) -> None:
    """Also compare larger images, for which positions are resampled, if the original takes them."""
    stem: Any = both.ensemble.config.stem
    size = tuple(patch * (side + (side + 1) // 2) for patch, side in zip(stem.patch_size, stem.grid, strict=True))
    inputs = _images(both.ensemble, size, 1)
    try:
        expected = both.original(inputs)
    except ConversionError:
        return  # it takes only its own size
    apart = difference(both.converted(inputs), expected)
    if not apart <= max(both.allowed(inputs), _RESAMPLED_TOLERANCE):
        raise OtherSizeError(
            f"{both.architecture.name}: the answers agree on images of {stem.image_size}, but differ by {apart:.2g} of "
            f"their size on images of {size[0]}x{size[1]}, for which positions are resized by "
            f"resample={stem.resample!r}; set another one, or an answer= that refuses other sizes"
        )


# --- the batch -----------------------------------------------------------------------------------------------


def _images(ensemble: Ensemble, size: tuple[int, ...], count: int) -> NamedTensors:
    """Random images `[count, channels, H, W]`."""
    shape = (count, ensemble.config.stem.channels, *size)  # type: ignore[union-attr]
    generator = torch.Generator("cpu").manual_seed(0)
    return {"pixel_values": torch.randn(shape, generator=generator, device="cpu").to(ensemble.device, ensemble.dtype)}


def _random_ids(stem: TextStemConfig, texts: int, tokens: int) -> Tensor:
    """Random token ids `[texts, tokens]`."""
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.randint(stem.vocabulary, (texts, tokens), generator=generator, device="cpu")


# --- the answers ---------------------------------------------------------------------------------------------


def _shapes(inputs: NamedTensors) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in inputs.items()}


def difference(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest expected value; infinity if the shapes differ."""
    if actual.shape != expected.shape:
        return float("inf")
    expected = expected.double()
    scale, apart = expected.abs().max().item(), (actual.double() - expected).abs().max().item()
    return apart / scale if scale else apart


def _agree_on_few_tokens(both: ModelPair, inputs: NamedTensors, allowed: float) -> bool:
    """Whether both models embed an image alike, and their outputs agree if the blocks see only its first tokens.

    This runs every layer at a tenth of the cost. If it returns False (also if a model raises), all tokens are compared.
    """
    first_block = both.model.get_submodule(block_name(both.architecture, both.model, 0))
    with _few_tokens(first_block) as theirs, _few_tokens(both.ensemble.encoder.layers[0]) as ours:
        try:
            expected, actual = both.original(inputs), both.converted(inputs)
        except Exception:  # a model may raise anything, for example on the number of tokens
            return False
    if len(theirs) != 1 or len(ours) != 1:
        return False
    embedded = (tokens[0].reshape(-1, tokens[0].shape[-1]) for tokens in (ours, theirs))  # [T, d] each
    return difference(*embedded) <= allowed and difference(actual, expected) <= allowed


@contextmanager
def _few_tokens(block: nn.Module) -> Iterator[list[Tensor]]:
    """Truncate the input of the first block, and so of all blocks, to the first tokens; yields the full inputs."""
    entered: list[Tensor] = []

    def cut(_: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        x = arguments[0] if arguments else keywords["hidden_states"]
        entered.append(x)
        axis = next((axis for axis, size in enumerate(x.shape[:-1]) if size > 1), 0)  # one image: [1, T, d], [T, 1, d]
        fewer = x.narrow(axis, 0, min(_FEW_TOKENS, x.shape[axis]))
        return ((fewer, *arguments[1:]), keywords) if arguments else (arguments, {**keywords, "hidden_states": fewer})

    with block.register_forward_pre_hook(cut, with_kwargs=True):
        yield entered


# --- where the models differ ---------------------------------------------------------------------------------


def _first_difference(both: ModelPair, inputs: NamedTensors, allowed: float) -> str:
    """Describe the first place where the activations of both models differ; an empty string if all blocks agree."""
    if both.own:
        together, main = both.original(inputs), next(iter(inputs))
        alone = [both.original({name: x[at : at + 1] for name, x in inputs.items()}) for at in range(len(together))]
        if difference(torch.cat(alone), together) > allowed:
            return (
                "in the original itself, which answers these samples differently one by one: look for a norm over the "
                "batch, swapped axes of batch and tokens, or F.dropout without training=self.training; to convert it "
                f"anyway, answer=lambda model, batch: torch.cat([model(one) for one in batch[{main!r}].split(1)])"
            )
    architecture, model, ensemble = both.architecture, both.model, both.ensemble
    names = [block_name(architecture, model, layer) for layer in range(ensemble.num_layers)]
    theirs = _their_tokens(both, [model.get_submodule(name) for name in names], inputs)
    if not theirs and both.own:
        return f"somewhere: {names[0] or 'a block'} is not called as a module, so it cannot be observed"
    mask = inputs.get("attention_mask")
    ours = _our_tokens(ensemble, inputs)
    as_layer = " as layer {}" if len(set(names)) < len(names) else ""  # of a block that several layers share
    places = [f"before {names[0]}, where the input is embedded"]
    places += [f"in {name}{as_layer.format(layer)}" for layer, name in enumerate(names)]
    for place, mine, their in zip(places, ours, theirs, strict=False):
        if their.shape != mine.shape and their.dim() == mine.dim():
            their = their.transpose(0, 1)  # [T, B, d] -> [B, T, d]
        if mask is not None and their.shape == mine.shape:
            mine, their = mine[mask.bool()], their[mask.bool()]  # without padding
        if difference(mine, their) > allowed:
            return place
    return places[len(theirs)] if len(theirs) < len(ours) else ""


def _our_tokens(ensemble: Ensemble, inputs: NamedTensors) -> list[Tensor]:
    """Return the input of the first block and the output of each block, `[B, T, d]`."""
    x, context = ensemble.embed(*ensemble.unpack(dict(inputs), None, None))
    tokens = [x[0]]
    for block in ensemble.encoder.layers:
        x = block(x, context)
        tokens.append(x[0])
    return tokens


def _their_tokens(both: ModelPair, blocks: Sequence[nn.Module], inputs: NamedTensors) -> list[Tensor]:
    """Return the same for the original, assuming that its blocks run in this order."""
    tokens: list[Tensor] = []
    blocks = list(dict.fromkeys(blocks))  # a block shared by several layers is hooked once

    def keep(x: Any) -> None:
        if isinstance(x, Tensor):
            tokens.append(x.to_padded_tensor(0.0) if x.is_nested else x)

    def before(_: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if not tokens:
            keep(next((value for value in (*arguments, *keywords.values()) if isinstance(value, Tensor)), None))

    def after(_: Any, arguments: Any, output: Any) -> None:
        keep(output[0] if isinstance(output, tuple) else output)

    with ExitStack() as hooks:
        hooks.enter_context(blocks[0].register_forward_pre_hook(before, with_kwargs=True))
        for block in blocks:
            hooks.enter_context(block.register_forward_hook(after))
        both.architecture.answer(both.model, inputs, both.fresh)
    return tokens

"""What is asked of a model of one's own beside random batches: every id, padding before texts or untold, dropout."""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from .._utils import warn
from ..classes import some
from ..errors import ConversionError
from ..model.config import TextStemConfig
from .core import Architecture, NamedTensors, Source
from .probe import Both, difference

_TOKENS, _AT_ONCE = 128, 2048  # of the texts that have every id once: tokens of one, and of those of one batch
_NEAR = 8  # tokens of a text in which one id is tried


class OwnIdError(ConversionError):
    """The answers agree, but for texts with a token that the model does not take for one."""


# --- ids ------------------------------------------------------------------------------------------------------------


class Asked:
    """How a model is called, with an eye on what it asks of token ids beside the rows of its embedding, and of values.

    Answers on random texts prove all that embedded tokens go through. What a model does with ids besides is seen here:
    comparisons with an id tell some ids from others, of which one of each kind has to be tried; what else is done with
    them tells nothing, and every id has to be. Where its Python code reads a number that comes of the inputs, it may go
    another way than with random ones: `places` has the lines.
    """

    def __init__(self, architecture: Architecture) -> None:
        self.answer = architecture.answer
        self.words = architecture.weights.get("stem.words")
        self.questions: list[Callable[[Tensor], Tensor]] = []
        self.unknown = False
        self.places: list[str] = []

    def __call__(self, model: nn.Module, inputs: NamedTensors, fresh: bool) -> Tensor:
        """What the model answers."""
        ids = inputs.get("input_ids")
        if ids is None:
            with _Watch(self, inputs["pixel_values"]):
                return self.answer(model, inputs, fresh)
        names = self.words.names if isinstance(self.words, Source) else ()
        table = model.state_dict()[names[0]] if names else torch.empty(0)
        marked = ids.as_subclass(_Ids)
        marked.watched = self
        with _Watch(self, marked, ids, table):
            return self.answer(model, {**inputs, "input_ids": marked}, fresh)

    def told_apart(self, ids: Tensor) -> Tensor:
        """Of these ids `[V]` one of each kind that the model tells from others; all of them where that is not known."""
        if self.unknown:
            return ids
        answers = [torch.zeros_like(ids), *(question(ids).flatten().long() for question in self.questions)]
        one_of_each = dict(zip(map(tuple, torch.stack(answers, dim=1).tolist()), ids.tolist(), strict=True))
        return ids.new_tensor(list(one_of_each.values()))


class _Ids(Tensor):
    """Token ids that tell when they become a list, which no operation shows."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    watched: Asked

    def tolist(self) -> Any:
        self.watched.unknown = True
        return super().tolist()


# Operations on ids: those that leave values as they are (a view of one element, or one to be read elsewhere, may be
# looked at by Python), those that look at the shape alone, and those that ask the same of every id.
_MOVES = (
    *("view", "_unsafe_view", "slice", "transpose", "t", "permute", "expand", "clone", "unsqueeze", "squeeze", "cat"),
    *("copy_", "constant_pad_nd", "lift_fresh", "alias", "_to_copy"),
)
_SHAPES = (
    *("zeros_like", "ones_like", "full_like", "empty_like", "rand_like"),
    *("new_zeros", "new_ones", "new_full", "new_empty"),
)
_QUESTIONS = ("eq", "ne", "lt", "le", "gt", "ge", "isin", "logical_not", "_to_copy")
_LOOKUPS = ("embedding", "index", "index_select")
_READS = ("_local_scalar_dense", "equal", "is_nonzero")  # those that give Python a number
_TORCH = Path(torch.__file__).parent
_BETWEEN = ("_tensor.py", "_ops.py", "utils/_python_dispatch.py", "_compile.py", "_dynamo/eval_frame.py")
_THIN = {__file__, *(str(_TORCH / name) for name in _BETWEEN)}  # whoever asks stands above them, in any release


class _Watch(TorchDispatchMode):
    """Follows inputs, and ids for themselves, through a pass, whoever calls operations: modules, functions, scripts."""

    def __init__(self, asked: Asked, inputs: Tensor, ids: Tensor | None = None, table: Tensor | None = None) -> None:
        super().__init__()
        self.asked = asked
        self.table = torch.empty(0) if table is None else table
        self.followed = [] if ids is None else [ids]  # kept, so that their memory is no other's
        self.derived = WeakTensorKeyDictionary()
        self.derived[inputs] = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = _tensors((args, kwargs))
        if any(tensor in self.derived for tensor in inputs):
            self.derived.update(dict.fromkeys(_tensors(result), True))
            place = _asker() if func.overloadpacket.__name__ in _READS else None
            if place is not None and place not in self.asked.places:
                self.asked.places.append(place)
        ids = [tensor for tensor in inputs if any(_same_memory(tensor, other) for other in self.followed)]
        if ids:
            self._look(func.overloadpacket.__name__, partial(func, **(kwargs or {})), args, ids, result)
        return result

    def _look(self, name: str, func: Callable[..., Any], args: Any, ids: Sequence[Tensor], result: Any) -> None:
        results = _tensors(result)
        if name in _SHAPES or (name in _LOOKUPS and _same_memory(args[0], self.table) and len(ids) == 1):
            return
        if name in _MOVES and all(tensor.dtype in (torch.int32, torch.int64) for tensor in results):
            self.followed += results
            return
        others = [tensor for tensor in _tensors(args) if tensor is not ids[0]]
        one_for_all = name == "isin" or all(tensor.numel() == 1 for tensor in others)
        if name in _QUESTIONS and len(ids) == 1 and one_for_all and results[0].dtype is torch.bool:
            fixed = [None if arg is ids[0] else arg.clone() if isinstance(arg, Tensor) else arg for arg in args]
            if name != "isin" or fixed[0] is None:
                self.asked.questions.append(lambda new: func(*(new if arg is None else arg for arg in fixed)))
                return
        self.asked.unknown = True


def _asker() -> str | None:
    """The line that asks for a number right now; None where it is one of torch, whose layers do so for speed alone."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename in _THIN:
        frame = frame.f_back
    file = Path(frame.f_code.co_filename)
    return None if file.is_relative_to(_TORCH) else f"{file.name}:{frame.f_lineno}"


def _tensors(arguments: Any) -> list[Tensor]:
    """All tensors among the arguments, or the results, of an operation."""
    return [argument for argument in tree_leaves(arguments) if isinstance(argument, Tensor)]


def _same_memory(tensor: Tensor, other: Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.is_nested or not tensor.numel() or not other.numel():
        return False
    return tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def warn_of_branches(both: Both, asked: Asked) -> None:
    """Say where a model looks at numbers while it runs: another way that it may go with other numbers is not proved."""
    if asked.places:
        warn(
            f"{both.architecture.name}: its code reads numbers that come of the inputs, {', '.join(asked.places[:3])}; "
            "answers were compared the way that random inputs go. If others may go another way (an early exit, a scale "
            "that depends on the image), the converted model does not follow them"
        )


def require_every_id(both: Both, asked: Asked) -> None:
    """Refuse a text model that takes an id for something else than a token, and name the id.

    Such a model finds padding, or an end, by an id that no random batch has. To be called for models whose answers
    agree otherwise, with what was `asked` of ids meanwhile.
    """
    stem = both.ensemble.config.stem
    if not isinstance(stem, TextStemConfig):
        return
    batch = both.samples()
    text = batch["input_ids"][0]  # [T], without padding and known to agree
    ids = torch.randperm(stem.vocabulary, generator=torch.Generator("cpu").manual_seed(0), device="cpu").to(text)
    if both.architecture.masks:  # which says what is padding
        padding = torch.tensor(both.paddings()[:1] or [0]).to(text)
        ids = torch.cat([ids[~torch.isin(ids, padding)], text[:1]])

    def inputs_of(texts: Tensor) -> NamedTensors:
        return {**{name: torch.ones_like(texts) for name in batch}, "input_ids": texts}

    def differ(texts: Tensor) -> Tensor:
        """Which texts are answered otherwise, `[B]`."""
        expected = both.original(inputs_of(texts))
        apart = (both.converted(inputs_of(texts)) - expected).abs().amax(1)
        return ~(apart <= allowed * expected.abs().max())

    def odd(ids: Tensor) -> list[int]:
        """Which ids are answered otherwise in a short text each: in the middle and at the end, or at the beginning."""
        short_texts = text[:_NEAR].repeat(2, len(ids), 1)  # [2, V, 8]
        short_texts[0, :, short_texts.shape[2] // 2] = short_texts[0, :, -1] = short_texts[1, :, 0] = ids
        differing = differ(short_texts.flatten(0, 1)).unflatten(0, (2, -1)).any(0)
        return ids[differing].tolist()

    with both.answering():
        allowed = both.allowed(inputs_of(text[None]))
        suspects, which = asked.told_apart(ids), ""
        if len(suspects) == 1:
            return  # it tells none from others
        if len(suspects) == len(ids):  # of all, those of the first text that is answered otherwise
            tokens = min(stem.max_tokens, _TOKENS)
            texts = torch.cat([ids, text.repeat(tokens)[: -len(ids) % tokens]]).reshape(-1, tokens)  # [B, T]
            parts = texts.split(max(1, _AT_ONCE // tokens))
            suspects = next((part[apart][0] for part in parts if (apart := differ(part)).any()), ids[:0])
            which = f"some of the ids {suspects[:8].tolist()}" if len(suspects) else ""
        odd_ids = [token for part in suspects.split(_TOKENS) if len(part) for token in odd(part)]
    which = f"the id {odd_ids[0]}" if odd_ids else which
    if which:
        unmasked = "" if both.architecture.masks else "say masked=True in the declaration, and "
        raise OwnIdError(
            f"{both.architecture.name}: the answers differ on texts with {which}, which the model does not take for a "
            f"token as all others, but for padding, as it seems: {unmasked}give the tokenizer as processor=, or the id "
            "as padding_idx of the embedding, so that it is known for padding, or let an attention_mask alone decide"
        )


# --- padding before texts, and padding that it is not told of -------------------------------------------------------


def warn_of_padding(both: Both) -> None:
    """Say where a text model agrees with the converted one only on texts that are padded behind, and as it is told.

    One that counts positions from the first token, or looks for the last at the number of tokens, answers otherwise
    with padding before texts. One that looks for padding itself where it is told of none does so without a mask or
    segments, where the converted one takes every id for a token.
    """
    if not isinstance(both.ensemble.config.stem, TextStemConfig):
        return
    batch = both.samples()
    name = both.architecture.name

    def differs(inputs: NamedTensors, unanswered: bool) -> bool:
        try:
            expected = both.original(inputs)
        except ConversionError:
            return unanswered
        return not difference(both.converted(inputs), expected) <= both.allowed(inputs)

    with both.answering():
        padded_before = False
        if both.architecture.masks:
            places = torch.arange(batch["input_ids"].shape[1], device=both.ensemble.device)[None]  # [1, T]
            shift = (batch["attention_mask"] == 0).sum(1, keepdim=True)  # [B, 1]
            moved = {key: tensor.gather(1, (places - shift) % places.shape[1]) for key, tensor in batch.items()}
            padded_before = differs(moved, unanswered=True)  # where the converted one answers
        masks = [key for key in batch if key != "input_ids"]
        left_out = {mask: {key: tensor for key, tensor in batch.items() if key != mask} for mask in masks}
        needed = [mask for mask, inputs in left_out.items() if differs(inputs, unanswered=False)]  # it says so itself
    if padded_before:
        warn(
            f"{name}: the answers agree on texts with padding behind them, but not on texts with padding before them, "
            "where the model counts tokens in a way of its own: pad on the right (padding_side='right')"
        )
    if needed:
        warn(
            f"{name}: without {' and '.join(needed)} the model answers otherwise than the converted one, which takes "
            "every id for a token, of the first segment: always give what the tokenizer gives"
        )


# --- dropout --------------------------------------------------------------------------------------------------------


def warn_of_dropout(both: Both) -> None:
    """Say which modules drop at random in training where the converted model, whose answers agree, does not.

    Rates are read off layers of `torch.nn` alone: what other modules stand for, their names do not say.
    """
    encoder = both.ensemble.config.encoder
    read = {encoder.activation_dropout, encoder.projection_dropout, encoder.output_dropout}
    layers = [one for one in both.model.modules() if isinstance(one, nn.TransformerEncoderLayer)]
    known = {part for layer in layers for part in layer.children() if getattr(part, "p", None) in read}
    dropping = {name: one for name, one in both.model.named_modules() if isinstance(one, _DropoutNd) and one.p > 0}
    unread = [name for name, module in dropping.items() if module not in known]
    if unread:
        warn(
            f"{both.architecture.name}: in training the model drops at random in {some(unread)}, and the converted "
            "one does not: if it is to be trained, say dropout= in the declaration or in the recipe"
        )

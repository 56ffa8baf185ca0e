"""Further tests of your own models: special ids, padding on the left or without a mask, dropout."""

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from .._utils import warn
from ..classes import some
from ..errors import ConversionError
from ..model.config import TextStemConfig
from .core import NamedTensors
from .probe import Both, difference

_ENDS, _TOKENS = 512, 128  # ids at either end of a vocabulary that are tried, and tokens of the texts that have them
_NEAR = 8  # tokens of a text in which one id is tried


class OwnIdError(ConversionError):
    """The answers agree, but for texts with a token that the model does not take for one."""


# --- ids ------------------------------------------------------------------------------------------------------------


def require_special_ids(both: Both) -> None:
    """Refuse a text model that takes an id for something else than a token, and name the id.

    Such a model finds padding, or an end, by an id that random batches hardly have. Vocabularies have such ids first or
    last: these are tried, and those that are known for padding. To be called for models whose answers agree otherwise.
    """
    stem = both.ensemble.config.stem
    if not isinstance(stem, TextStemConfig):
        return
    batch = both.samples()
    text = batch["input_ids"][0]  # [T], without padding and known to agree
    every, paddings = range(stem.vocabulary), both.paddings()
    likely = {*every[:_ENDS], *every[-_ENDS:], *paddings}
    if both.architecture.masks:  # which says what is padding
        likely.discard((paddings or [0])[0])
    ids = text.new_tensor(sorted(likely))

    def differ(texts: Tensor) -> Tensor:
        """Which texts are answered otherwise, `[B]`."""
        inputs = {**{name: torch.ones_like(texts) for name in batch}, "input_ids": texts}
        expected = both.original(inputs)
        apart = (both.converted(inputs) - expected).abs().amax(1)
        return ~(apart <= both.allowed(inputs) * expected.abs().max())

    with both.answering():
        tokens = min(stem.max_tokens, _TOKENS)
        texts = torch.cat([ids, text.repeat(tokens)[: -len(ids) % tokens]]).reshape(-1, tokens)  # [B, T]
        suspects = texts[differ(texts)].flatten()
        if not len(suspects):
            return
        short_texts = text[:_NEAR].repeat(2, len(suspects), 1)  # each in the middle and at the end, or first
        short_texts[0, :, short_texts.shape[2] // 2] = short_texts[0, :, -1] = short_texts[1, :, 0] = suspects
        differing = differ(short_texts.flatten(0, 1)).unflatten(0, (2, -1)).any(0)
        odd = suspects[differing].tolist()
    which = f"the id {odd[0]}" if odd else f"some of the ids {suspects[:8].tolist()}"
    unmasked = "" if both.architecture.masks else "say masked=True in the declaration, and "
    raise OwnIdError(
        f"{both.architecture.name}: the answers differ on texts with {which}, which the model does not treat as a "
        f"token like all others, but probably as padding: {unmasked}give the tokenizer as processor=, or the id "
        "as padding_idx of the embedding, so that it is known as padding, or let only an attention_mask decide"
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
            f"{name}: the answers agree on texts that are padded on the right, but not on the left, where the model "
            "counts tokens differently: pad on the right (padding_side='right')"
        )
    if needed:
        warn(
            f"{name}: without {' and '.join(needed)} the model answers differently from the converted one, which takes "
            "every id as a token of the first segment: always give all that the tokenizer returns"
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
            f"{both.architecture.name}: in training the model has dropout in {some(unread)}, and the converted one "
            "does not: if you train it, set dropout= in the declaration or in the recipe"
        )

"""Further checks of users' own models: special ids, padding on the left or without a mask, dropout."""

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from .._utils import warn
from ..classes import a_few
from ..errors import ConversionError
from ..model.config import TextStemConfig
from .core import NamedTensors
from .probe import ModelPair, difference

_ENDS, _TOKENS = 512, 128  # ids tried at either end of the vocabulary, and tokens per text with them
_TEST_TOKENS = 8  # tokens of a text that tests a single id


class OwnIdError(ConversionError):
    """The outputs agree, except for texts with an id that the model does not treat as an ordinary token."""


# --- ids ------------------------------------------------------------------------------------------------------------


def require_special_ids(both: ModelPair) -> None:
    """Raise if a text model gives an id a special meaning, and name the id.

    Such a model detects padding, or the end of a text, by an id that random batches rarely contain. Such ids are mostly
    the first or last of a vocabulary: these are tried, and known padding ids. Assumes that outputs agree otherwise.
    """
    stem = both.ensemble.config.stem
    if not isinstance(stem, TextStemConfig):
        return
    batch = both.samples()
    text = batch["input_ids"][0]  # [T], without padding; outputs are known to agree
    every, paddings = range(stem.vocabulary), both.paddings()
    likely = {*every[:_ENDS], *every[-_ENDS:], *paddings}
    if both.architecture.masks:  # the mask marks padding
        likely.discard((paddings or [0])[0])
    ids = text.new_tensor(sorted(likely))

    def differ(texts: Tensor) -> Tensor:
        """Whether the outputs differ for each text, `[B]`."""
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
        inside, first = text[:_TEST_TOKENS].repeat(2, len(suspects), 1)  # [B, T] each
        inside[:, inside.shape[1] // 2] = inside[:, -1] = suspects
        first[:, 0] = suspects
        odd = suspects[differ(torch.cat([inside, first])).unflatten(0, (2, -1)).any(0)].tolist()
    which = f"the id {odd[0]}" if odd else f"some of the ids {suspects[:8].tolist()}"
    unmasked = "" if both.architecture.masks else "say masked=True in the declaration, and "
    raise OwnIdError(
        f"{both.architecture.name}: the answers differ on texts with {which}, which is no ordinary token to the model. "
        f"If it is padding, {unmasked}give the tokenizer as processor=, or the id as padding_idx of the embedding"
    )


# --- padding on the left, and padding without a mask ----------------------------------------------------------------


def warn_of_padding(both: ModelPair) -> None:
    """Warn if a text model agrees with the converted one only with padding on the right, or only with all masks given.

    With padding on the left, outputs differ if the model counts positions from the first token, or locates the last
    token by the number of tokens. Without a mask or segments, outputs differ if the model then detects padding by
    itself: the converted one treats every id as a token.
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
            padded_before = differs(moved, unanswered=True)  # the converted model does run
        needed = []
        for mask in (key for key in batch if key != "input_ids"):
            others = {key: tensor for key, tensor in batch.items() if key != mask}
            if differs(others, unanswered=False):  # an error of the model itself suffices
                needed.append(mask)
    if padded_before:
        warn(f"{name}: the answers agree only on texts padded on the right; pad there (padding_side='right')")
    if needed:
        told = f"without {' and '.join(needed)} the model answers differently from the converted one"
        warn(f"{name}: {told}; always give everything that the tokenizer returns")


# --- dropout --------------------------------------------------------------------------------------------------------


def warn_of_dropout(both: ModelPair) -> None:
    """Warn of dropout modules that have no counterpart in the converted model.

    Rates are read only from layers of `torch.nn`: where other modules apply dropout is not known.
    """
    encoder = both.ensemble.config.encoder
    read = {encoder.activation_dropout, encoder.projection_dropout, encoder.output_dropout}
    layers = [one for one in both.model.modules() if isinstance(one, nn.TransformerEncoderLayer)]
    known = {part for layer in layers for part in layer.children() if getattr(part, "p", None) in read}
    dropping = {name: one for name, one in both.model.named_modules() if isinstance(one, _DropoutNd) and one.p > 0}
    unread = [name for name, module in dropping.items() if module not in known]
    if unread:
        told = f"in training the model has dropout in {a_few(unread)}, but the converted one does not"
        warn(f"{both.architecture.name}: {told}: to train it, set dropout= in the declaration or in the recipe")

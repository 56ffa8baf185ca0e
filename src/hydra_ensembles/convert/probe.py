"""The last line of defence: the original and the converted model answer the same random batch."""

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .._utils import evaluation_mode, torch_seeded
from ..errors import ConversionError
from ..model.config import EnsembleConfig, PatchStemConfig, TextStemConfig
from ..model.ensemble import Ensemble
from ..model.layers import GroupedLinear
from ..preprocessing import TextPreprocessing
from .core import Architecture, Inputs, block_name

_TEXTS, _TOKENS = 2, 32
_FEW = 16  # tokens of an image that the blocks are first compared on: class token, registers, some patches
_FITTED = 1e-5  # positions are fitted to another size in float32, whatever the type
_ID_TOKENS, _AT_ONCE = 128, 2048  # of the texts that have every id once: tokens of one, and of those of one batch
_NEAR = 8  # tokens of a text in which one id is tried
_ANGLES = 32  # how many times further than by the rounding of our angles answers may lie apart by that of others
# How far answers may lie apart, in parts of the largest of them: what the same sum in another order makes of them.
_ALLOWED = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


class NoAnswerError(ConversionError):
    """The original cannot answer, so that nothing can be compared with it."""


class OtherSizeError(ConversionError):
    """The answers agree on images of the model's own size, and differ on larger ones."""


class OwnIdError(ConversionError):
    """The answers agree, but for texts with a token that the model does not take for one."""


def require_same_answers(
    architecture: Architecture,
    model: nn.Module,
    ensemble: Ensemble,
    fresh: bool = False,
    projection: GroupedLinear | None = None,
) -> None:
    """Refuse a conversion that changes an answer, and name the first layer where the two models part.

    Args:
        architecture: The declaration of the model.
        model: The original; afterwards it is as it was.
        ensemble: What it was converted into.
        fresh: Whether the classifier is a new one: then features are compared.
        projection: Of a tower of a dual encoder, applied to its features.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        return  # without values there are no answers
    original = partial(_answer, architecture, model, fresh=fresh)
    converted = partial(_converted, ensemble, fresh=fresh, projection=projection)
    with _as_it_answers(model, ensemble.device):
        for inputs in _batches(architecture, model, ensemble):
            allowed = _allowed(ensemble, converted, inputs)
            first = model.get_submodule(block_name(architecture, model, 0)), ensemble.encoder.layers[0]
            # Of a library's class it is known that all tokens are treated alike; rotations are those of all tokens.
            few = architecture.classes and ensemble.kind == "image" and ensemble.config.encoder.rotary is None
            if few and _alike_on_few_tokens(first, (partial(original, inputs), partial(converted, inputs)), allowed):
                continue
            difference = _difference(converted(inputs), original(inputs))
            if not difference <= allowed:
                place = _first_difference(architecture, model, ensemble, inputs, fresh, allowed)
                raise _apart(architecture, "features" if fresh else "answers", inputs, difference, allowed, place)
        if not architecture.classes and isinstance(ensemble.config.stem, PatchStemConfig):
            _require_other_size(architecture.name, original, converted, ensemble)


def require_every_id(architecture: Architecture, model: nn.Module, ensemble: Ensemble, fresh: bool = False) -> None:
    """Refuse a text model of the user's own that takes an id for something else than a token, and name the id.

    Such a model finds padding, or an end, by an id that no random batch has: texts here have every id once. To be
    called for models whose answers agree otherwise.
    """
    stem = ensemble.config.stem
    if not isinstance(stem, TextStemConfig):
        return
    batch = next(_batches(architecture, model, ensemble))
    known = batch["input_ids"][0]  # [T], without padding and known to agree
    padding = torch.tensor(_paddings(model, ensemble)[:1] or [0])
    ids = torch.randperm(stem.vocabulary, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    if architecture.masks:  # which says what is padding
        ids = torch.cat([ids[~torch.isin(ids, padding)], known[:1].cpu()])
    tokens = min(stem.max_tokens, _ID_TOKENS)
    missing = -len(ids) % tokens
    texts = torch.cat([ids, known.cpu().repeat(tokens)[:missing]]).reshape(-1, tokens).to(ensemble.device)  # [B, T]

    converted = partial(_converted, ensemble, fresh=fresh)

    def told(texts: Tensor) -> Inputs:
        return {**{name: torch.ones_like(texts) for name in batch}, "input_ids": texts}

    def differ(texts: Tensor) -> Tensor:
        """Which texts are answered otherwise, `[B]`."""
        expected = _answer(architecture, model, told(texts), fresh)
        apart = (converted(told(texts)) - expected).abs().flatten(1).amax(1)
        return ~(apart <= allowed * expected.abs().max())

    with _as_it_answers(model, ensemble.device):
        allowed = _allowed(ensemble, converted, told(texts[:1]))
        for some in texts.split(max(1, _AT_ONCE // tokens)):
            apart = differ(some)
            if not apart.any():
                continue
            suspects = some[apart][0]  # [T]
            near = known[:_NEAR].repeat(tokens, 1)  # [T, 8]: one id in each text, in the middle and at its end
            near[:, near.shape[1] // 2] = near[:, -1] = suspects
            alone = suspects[differ(near)].tolist()
            raise _of_own_ids(architecture, alone, suspects.tolist())


def _of_own_ids(architecture: Architecture, alone: Sequence[int], suspects: Sequence[int]) -> OwnIdError:
    which = f"the id {alone[0]}" if alone else f"some of the ids {', '.join(map(str, suspects[:8]))}, …"
    way = (
        "say masked=True in the declaration and give the tokenizer as processor=, or the id as padding_idx of the "
        "embedding, or let forward take an attention_mask"
    )
    if architecture.masks:
        way = (
            "give the tokenizer as processor=, or the id as padding_idx of the embedding, so that it is known for "
            "padding, or let attention_mask alone decide"
        )
    return OwnIdError(
        f"{architecture.name}: the answers differ on texts with {which}, which the model does not take for a token as "
        f"all others, but for padding, as it seems: {way}"
    )


def same_when_padded_left(architecture: Architecture, model: nn.Module, ensemble: Ensemble, fresh: bool) -> bool:
    """Whether a text model of the user's own that is told of padding agrees on texts with padding before them, too.

    Where it counts positions from the first token, or looks for the last at the number of tokens, it does not.
    """
    if not isinstance(ensemble.config.stem, TextStemConfig) or not architecture.masks:
        return True
    found = dict(next(_batches(architecture, model, ensemble)))
    places = torch.arange(found["input_ids"].shape[1], device=ensemble.device)[None]  # [1, T]
    shift = (found["attention_mask"] == 0).sum(1, keepdim=True)  # [B, 1]
    inputs = {name: one.gather(1, (places - shift) % places.shape[1]) for name, one in found.items()}  # padding first
    with _as_it_answers(model, ensemble.device):
        try:
            expected = _answer(architecture, model, inputs, fresh)
        except ConversionError:
            return False  # it cannot answer, where the converted one can
        converted = partial(_converted, ensemble, fresh=fresh)
        return _difference(converted(inputs), expected) <= _allowed(ensemble, converted, inputs)


def _apart(
    architecture: Architecture, what: str, inputs: Inputs, difference: float, allowed: float, place: str
) -> ConversionError:
    shapes, said, remedy = _shapes(inputs), "the declaration says", "look for the difference"
    if architecture.classes:
        said, remedy = "its class and its configuration say", "undo what was changed"
    return ConversionError(
        f"{architecture.name}: the {what} of the converted model differ from those of the original by "
        f"{difference:.2g} of their size on a random batch {shapes} ({allowed:g} is allowed): the model computes "
        f"something else than {said}. The two part first {place}; {remedy} there, or convert with probe=False if the "
        "difference is meant"
    )


def _require_other_size(
    name: str,
    original: Callable[[Inputs], Tensor],
    converted: Callable[[Inputs], Tensor],
    ensemble: Ensemble,
) -> None:
    """Compare larger images too, for which positions are fitted, where the original takes any."""
    stem: Any = ensemble.config.stem
    size = tuple(patch * (side + (side + 1) // 2) for patch, side in zip(stem.patch_size, stem.grid, strict=True))
    inputs = _images(ensemble, size)
    try:
        expected = original(inputs)
    except ConversionError:
        return  # it has one size
    difference = _difference(converted(inputs), expected)
    if not difference <= max(_allowed(ensemble, converted, inputs), _FITTED):
        raise OtherSizeError(
            f"{name}: the answers agree on images of {stem.image_size[0]}x{stem.image_size[1]}, but differ by "
            f"{difference:.2g} of their size on images of {size[0]}x{size[1]}, for which positions are fitted by "
            f"resample={stem.resample!r}: give another one in the declaration, or an answer= that refuses other sizes"
        )


# --- the batch -----------------------------------------------------------------------------------------------


def _batches(architecture: Architecture, model: nn.Module, ensemble: Ensemble) -> Iterator[Inputs]:
    """One image of the size of the model, or two texts of different length; the same in every process.

    Of a model of the user's own nothing is known but its answers: a text of the greatest length follows.
    """
    generator, stem = torch.Generator("cpu").manual_seed(0), ensemble.config.stem
    if isinstance(stem, PatchStemConfig):
        yield _images(ensemble, stem.image_size)
        return
    own = not architecture.classes
    padding = _paddings(model, ensemble) if own else []
    if architecture.masks:  # only CLIP has texts without a norm, where it is no model of the user's
        found = _texts(stem, ensemble.config, generator, padding, clip=not stem.norm and not own)
    else:
        found = _whole_texts(stem, generator, padding)
    yield {name: tensor.to(ensemble.device) for name, tensor in found.items()}
    if own and stem.max_tokens > found["input_ids"].shape[1]:
        ids = torch.randint(stem.vocabulary, (1, stem.max_tokens), generator=generator, device="cpu")
        pad = (*padding, 0)[0]
        ids = ids.masked_fill(ids == pad, (pad + 1) % stem.vocabulary)
        longest = {name: torch.ones_like(ids) for name in found}
        yield {name: tensor.to(ensemble.device) for name, tensor in {**longest, "input_ids": ids}.items()}


def _images(ensemble: Ensemble, size: tuple[int, ...]) -> Inputs:
    """One random image `[1, channels, H, W]`."""
    shape, generator = (1, ensemble.config.stem.channels, *size), torch.Generator("cpu").manual_seed(0)  # type: ignore[union-attr]
    return {"pixel_values": torch.randn(shape, generator=generator, device="cpu").to(ensemble.device, ensemble.dtype)}


def _paddings(model: nn.Module, ensemble: Ensemble) -> list[int]:
    """What the preprocessing and the embeddings of words in a model take for padding, the likeliest first."""
    texts, vocabulary = ensemble.metadata.preprocessing, ensemble.config.stem.vocabulary  # type: ignore[union-attr]
    tables = [one for one in model.modules() if isinstance(one, nn.Embedding) and one.num_embeddings == vocabulary]
    found = [texts.pad_id] if isinstance(texts, TextPreprocessing) else []
    return [*found, *(one.padding_idx for one in tables if one.padding_idx is not None)]


def _whole_texts(stem: TextStemConfig, generator: torch.Generator, padding: Sequence[int]) -> Inputs:
    """Token ids `[B, T]` of any value: a model that is told of no padding must take every token for one.

    Those that a model may take for padding all the same are among them: the known ones, the first and the last.
    """
    shape = _TEXTS, min(stem.max_tokens, _TOKENS)
    ids = torch.randint(stem.vocabulary, shape, generator=generator, device="cpu")
    suspects = [one for one in dict.fromkeys((*padding, 0, 1, 2, 3, stem.vocabulary - 1)) if one < stem.vocabulary]
    suspects = suspects[: shape[1]]
    ids[0, -len(suspects) :] = torch.tensor(suspects[::-1])  # the likeliest is the last token
    ids[1, -1] = 0
    return {"input_ids": ids}


def _texts(
    stem: TextStemConfig, config: EnsembleConfig, generator: torch.Generator, padding: Sequence[int], clip: bool
) -> Inputs:
    """Token ids `[B, T]`; a mask where the family has one, segments where there are several.

    Texts of CLIP fill the whole context, and end with a token that is looked for.
    """
    tokens = stem.max_tokens if clip else min(stem.max_tokens, _TOKENS + 2 * (config.encoder.window or 0))
    pad = stem.positions_after if stem.positions_after is not None else (*padding, 0)[0]
    end = config.readout.eot_token
    last = stem.vocabulary - 1 if end is None else end
    ids = torch.randint(stem.vocabulary, (_TEXTS, tokens), generator=generator, device="cpu")
    ordinary = next(one for one in range(stem.vocabulary) if one not in (pad, last)) if stem.vocabulary > 2 else pad
    ids = ids.masked_fill((ids == pad) | (ids == last), ordinary)
    positions = torch.arange(tokens, device="cpu")[None]  # [1, T]
    ends = torch.tensor([tokens - 1, tokens // 2], device="cpu")[:, None]  # [B, 1]
    ids = ids.masked_fill(positions > ends, pad)
    if clip:
        return {"input_ids": ids.masked_fill(positions == ends, last)}
    found = {"input_ids": ids, "attention_mask": (positions <= ends).long()}
    if stem.segments > 1:
        found["token_type_ids"] = ((positions > ends // 2) & (positions <= ends)).long()
    return found


# --- the answers ---------------------------------------------------------------------------------------------


@contextmanager
def _as_it_answers(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Evaluation mode, no gradients, no autocast, nothing compiled; generators and flags are as before afterwards.

    What the model itself warns of is for whoever runs it, not for a comparison.
    """
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        compiled = "torch._dynamo" in sys.modules  # only then something can be compiled, and loading it takes seconds
        stack.enter_context(torch.compiler.set_stance("force_eager") if compiled else nullcontext())
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast(device.type, enabled=False))
        stack.enter_context(torch_seeded(0, device))
        stack.enter_context(evaluation_mode(model))
        yield


def _answer(architecture: Architecture, model: nn.Module, inputs: Inputs, fresh: bool) -> Tensor:
    shapes = _shapes(inputs)
    try:
        answer = architecture.answer(model, {name: tensor.clone() for name, tensor in inputs.items()}, fresh)
    except Exception as error:  # whatever somebody's model may raise
        raise NoAnswerError(
            f"{architecture.name}: the model itself cannot answer a random batch {shapes}, so the converted one cannot "
            f"be compared with it ({type(error).__name__}: {error}); repair it, or convert with probe=False"
        ) from error
    if not answer.isfinite().all():
        raise ConversionError(
            f"{architecture.name}: the model answers a random batch {shapes} with numbers that are NaN or infinite; "
            f"its weights are broken, or {answer.dtype} is too small for them: try model.float()"
        )
    return answer


def _converted(ensemble: Ensemble, inputs: Inputs, fresh: bool, projection: GroupedLinear | None = None) -> Tensor:
    """What the converted model answers, as `_answer` has it."""
    if not fresh:
        return ensemble(inputs)[0] if projection is None else projection(ensemble(inputs))[0]
    features = ensemble.features(inputs)[0]  # [B, d]; of class and distillation token [B, 2, d]
    return features.mean(1) if ensemble.config.readout.pool == "distilled" else features


def _shapes(inputs: Inputs) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in inputs.items()}


def _allowed(ensemble: Ensemble, converted: Callable[[Inputs], Tensor], inputs: Inputs) -> float:
    """How far the answers to a batch may lie apart.

    In float64, rotary positions are the one thing that may be rounded to float32 in either model, each in its own order
    of operations: what that does to the answers is measured.
    """
    dtype, rotary = ensemble.dtype, ensemble.encoder.rotary
    rounded = torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32  # ten bits, as float16
    if dtype is torch.float32 and ensemble.device.type == "cuda" and rounded:
        dtype = torch.float16
    allowed = _ALLOWED.get(dtype, _ALLOWED[torch.bfloat16])
    if dtype is not torch.float64 or rotary is None:
        return allowed
    rounded_angles = converted(inputs)
    rotary.precision = torch.float64
    try:
        return max(allowed, _ANGLES * _difference(converted(inputs), rounded_angles))
    finally:
        rotary.precision = torch.float32


def _difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference, in parts of the largest number; infinite where the shapes differ."""
    if found.shape != expected.shape:
        return float("inf")
    found, expected = found.double(), expected.double()
    scale = expected.abs().max().item()
    difference = (found - expected).abs().max().item()
    return difference / scale if scale else difference


def _alike_on_few_tokens(
    first: tuple[nn.Module, nn.Module], answers: Sequence[Callable[[], Tensor]], allowed: float
) -> bool:
    """Whether both embed an image alike, and answer alike when their blocks see its first tokens alone.

    This runs every layer at a tenth of the work. Where it says no, or a model does not permit it, all tokens decide.
    """
    with _few_tokens(first[0]) as theirs, _few_tokens(first[1]) as ours:
        try:
            expected, found = (answer() for answer in answers)
        except Exception:  # whatever somebody's model may raise: it counts its tokens
            return False
    if len(theirs) != 1 or len(ours) != 1:
        return False
    embedded = (tokens[0].reshape(-1, tokens[0].shape[-1]) for tokens in (ours, theirs))  # [T, d] each
    return _difference(*embedded) <= allowed and _difference(found, expected) <= allowed


@contextmanager
def _few_tokens(first: nn.Module) -> Iterator[list[Tensor]]:
    """Let the first block, and so all after it, see the first tokens alone; gives what would have entered it."""
    entered: list[Tensor] = []

    def cut(_: Any, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        x = given[0] if given else named["hidden_states"]
        entered.append(x)
        axis = next((axis for axis, size in enumerate(x.shape[:-1]) if size > 1), 0)  # one image: [1, T, d], [T, 1, d]
        fewer = x.narrow(axis, 0, min(_FEW, x.shape[axis]))
        return ((fewer, *given[1:]), named) if given else (given, {**named, "hidden_states": fewer})

    handle = first.register_forward_pre_hook(cut, with_kwargs=True)
    try:
        yield entered
    finally:
        handle.remove()


# --- where they part -----------------------------------------------------------------------------------------


def _first_difference(
    architecture: Architecture, model: nn.Module, ensemble: Ensemble, inputs: Inputs, fresh: bool, allowed: float
) -> str:
    """The first place where the activations of both models differ, in words."""
    names = [block_name(architecture, model, layer) for layer in range(ensemble.num_layers)]
    theirs = _their_tokens(architecture, model, [model.get_submodule(name) for name in names], inputs, fresh)
    if not theirs and not architecture.classes:
        return f"somewhere: {names[0] or 'a block'} is not called as a module, so that nothing is seen of it"
    mask = inputs.get("attention_mask")
    ours = _our_tokens(ensemble, inputs)
    for index, (mine, their) in enumerate(zip(ours, theirs, strict=False)):
        if their.shape != mine.shape and their.dim() == mine.dim():
            their = their.transpose(0, 1)  # [T, B, d] -> [B, T, d]
        if mask is not None and their.shape == mine.shape:
            mine, their = mine[mask.bool()], their[mask.bool()]  # what is at padding does not matter
        if _difference(mine, their) > allowed:
            shared = f" as layer {index - 1}" if len(set(names)) < len(names) else ""
            return f"in {names[index - 1]}{shared}" if index else f"before {names[0]}, where the input is embedded"
    if len(theirs) < len(ours):
        return f"in {names[len(theirs) - 1]}" if theirs else f"before {names[0]}"
    return f"after {names[-1]}, where tokens are pooled and classified"


def _our_tokens(ensemble: Ensemble, inputs: Inputs) -> list[Tensor]:
    """What enters the first block, and what leaves each of them, `[B, T, d]`."""
    x, context = ensemble.embed(*ensemble.unpack(dict(inputs), None, None))
    tokens = [x[0]]
    for block in ensemble.encoder.layers:
        x = block(x, context)
        tokens.append(x[0])
    return tokens


def _their_tokens(
    architecture: Architecture, model: nn.Module, blocks: Sequence[nn.Module], inputs: Inputs, fresh: bool
) -> list[Tensor]:
    """The same of the original, as far as its blocks are run in this order."""
    tokens: list[Tensor] = []
    blocks = list(dict.fromkeys(blocks))  # a block that serves as several layers is there once

    def before(_: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        found = next((one for one in (*given, *named.values()) if isinstance(one, Tensor)), None)
        if not tokens and found is not None:
            tokens.append(found.to_padded_tensor(0.0) if found.is_nested else found)

    def after(_: Any, given: Any, output: Any) -> None:
        found = output[0] if isinstance(output, tuple) else output
        if isinstance(found, Tensor):
            tokens.append(found.to_padded_tensor(0.0) if found.is_nested else found)

    handles = [blocks[0].register_forward_pre_hook(before, with_kwargs=True)]
    handles += [block.register_forward_hook(after) for block in blocks]
    try:
        architecture.answer(model, inputs, fresh)
    finally:
        for handle in handles:
            handle.remove()
    return tokens

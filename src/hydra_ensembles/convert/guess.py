"""Checking declarations by comparing outputs, and inferring them from a model's modules."""

import copy
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import permutations, product
from typing import Any, get_args

from torch import nn
from torch.nn.parameter import is_lazy

from ..errors import ConversionError, HydraError
from ..model.config import Activation, HiddenActivation, Pool, Resample
from ..model.ensemble import Ensemble
from ..model.metadata import Metadata
from .core import ACTIVATIONS, translate
from .declared import Declaration, Part, Place, unknown_arguments
from .own import OwnIdError, require_special_ids
from .probe import ModelPair, NoAnswerError, OtherSizeError, require_same_answers
from .reading import read_declaration, with_size

_NORMS = (nn.LayerNorm, nn.RMSNorm)


def infer_declaration(
    model: nn.Module, num_labels: int | None, size: tuple[int, int] | None = None
) -> Declaration | None:
    """Infer the declaration of a plain classifier around blocks of `torch.nn`; None if no candidate's outputs agree.

    `size` is that of the images, if known.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        return None  # without values, outputs cannot be compared
    trial = _Trial(model, num_labels)
    for declaration in (with_size(candidate, model, size) for candidate in _candidates(model)):
        try:
            trial.require_agreement(declaration, locate=False)
        except OtherSizeError as error:
            variants = (replace(declaration, resample=way) for way in get_args(Resample))
            agreeing = next(filter(trial.agrees, variants), None)
            if agreeing is None:
                raise ConversionError(f"{error}; begin with names={dict(declaration.names)}") from error
            return agreeing
        except OwnIdError as error:
            raise OwnIdError(f"{error}; begin with names={dict(declaration.names)}") from error
        except HydraError:
            continue
        return declaration
    return None


def suggest_declaration(model: nn.Module) -> str:
    """Suggest how to begin a declaration if blocks were found but no candidate agrees; else an empty string."""
    candidate = next(_candidates(model), None)
    found = candidate or _frame(model)
    if found is None:
        return ""
    unknown = [] if candidate is None else unknown_arguments(candidate, model)
    but = f", but its forward takes {', '.join(unknown)} too: say with answer= how it is called" if unknown else ""
    return f"\nIts parts were found{but}; begin with names={dict(found.names)}."


def require_proof(declaration: Declaration, model: nn.Module, num_labels: int | None, metadata: Metadata) -> None:
    """Raise if the outputs differ under a declaration, and name a setting with which they agree, if there is one."""
    trial = _Trial(model, num_labels, metadata)
    try:
        trial.require_agreement(declaration)
    except (NoAnswerError, OwnIdError):
        raise
    except ConversionError as error:
        other_size, ways = isinstance(error, OtherSizeError), ({"resample": way} for way in get_args(Resample))
        for change in ways if other_size else _changes(declaration, model):
            if all(getattr(declaration, name) == value for name, value in change.items()):
                continue  # already tried
            if trial.agrees(replace(declaration, **change)):
                settings = ", ".join(f"{name}={value!r}" for name, value in change.items())
                raise ConversionError(f"{error}; they agree with {settings}") from error
        raise


class _Trial:
    """A model on which declarations are tried.

    Outputs are compared in float64 if the model runs in it: a wrong activation or epsilon is then not lost in rounding.
    """

    def __init__(self, model: nn.Module, num_labels: int | None, metadata: Metadata | None = None) -> None:
        self.copies, self.num_labels, self.metadata = [model], num_labels, metadata
        with suppress(Exception):  # a user's model may raise anything
            self.copies.insert(0, copy.deepcopy(model).double())

    def require_agreement(self, declaration: Declaration, *, locate: bool = True) -> None:
        """Raise if outputs differ under a declaration, for the first copy that can be run."""
        for model in self.copies:
            architecture = read_declaration(declaration, model)
            config = architecture.config(model, self.num_labels)
            state, fresh, _ = translate(architecture, model, config, may_be_fresh=self.num_labels is not None)
            both = ModelPair(architecture, model, Ensemble.from_state(config, state, self.metadata), fresh)
            try:
                require_same_answers(both, locate=locate)
                require_special_ids(both)
                return
            except NoAnswerError:
                if model is self.copies[-1]:
                    raise

    def agrees(self, declaration: Declaration) -> bool:
        try:
            self.require_agreement(declaration, locate=False)
        except HydraError:
            return False
        return True


def _changes(declaration: Declaration, model: nn.Module) -> Iterator[dict[str, Any]]:
    """Yield other values of the settings that users most often get wrong, one at a time."""
    architecture = read_declaration(declaration, model)
    config = architecture.config(model, None)
    inner_width = config.encoder.heads * config.encoder.head_dim
    text = config.kind == "text"
    yield {"norm_first": not config.encoder.norm_first}
    yield from ({"activation": activation} for activation in get_args(Activation))
    usual = {"pool_prefix": False} if declaration.pool_prefix else {}
    yield from ({**usual, **pool, "norm_after_pool": after} for pool in _pools(text, True) for after in (False, True))
    yield from ({"head_layout": " ".join(order)} for order in permutations(("qkv", "h", "d")))
    yield from ({"heads": heads} for heads in range(1, min(inner_width, 64) + 1) if inner_width % heads == 0)
    yield from ({"attention_scale": scale} for scale in (config.encoder.width**-0.5, 1.0, None))
    yield {"embedding_scale": math.sqrt(config.encoder.width)} if text else {"patch_order": "hwc"}
    yield {"rotary_pairs": "neighbours" if declaration.rotary_pairs == "halves" else "halves"}


# --- candidates ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Frame:
    """The blocks of a model: names of their parts, the path of the blocks, their width, and settings to try."""

    names: dict[Part, Place]
    path: str
    width: int
    settings: tuple[dict[str, Any], ...] = ({},)


def _candidates(model: nn.Module) -> Iterator[Declaration]:
    frame = _frame(model)
    if frame is None:
        return
    for names, settings in product(_outer_parts(model, frame), frame.settings):
        text = "words" in names
        pools = _pools(text, "class_token" in names)
        scales = (1.0, math.sqrt(frame.width)) if text else (1.0,)
        hidden = get_args(HiddenActivation) if "pooler" in names else ("tanh",)
        for pool, after, scale, activation in product(pools, (False, True), scales, hidden):
            if after and pool["pool"] in ("cls", "last"):
                continue  # for a single token, norm and pooling commute
            choice = {**pool, "norm_after_pool": after, "embedding_scale": scale, "pooler_activation": activation}
            yield Declaration({**frame.names, **names}, **choice, **settings)


def _pools(text: bool, class_token: bool) -> list[dict[str, Any]]:
    """Return the pooling settings to try."""
    of_images: tuple[Pool, ...] = ("cls", "mean", "cls_mean") if class_token else ("mean",)
    pools: tuple[Pool, ...] = ("mean", "cls", "last") if text else of_images
    settings: list[dict[str, Any]] = [{"pool": pool} for pool in pools]
    return settings if text or not class_token else [*settings, {"pool": "mean", "pool_prefix": True}]


def _frame(model: nn.Module) -> _Frame | None:
    """Find the blocks; None if they are not unique."""
    modules = dict(model.named_modules())
    if any(is_lazy(parameter) for parameter in model.parameters()):
        return None
    encoders = [name for name, module in modules.items() if isinstance(module, nn.TransformerEncoder)]
    if len(encoders) == 1:
        layers: Any = modules[encoders[0]].layers
        return _Frame({"encoder": encoders[0]}, encoders[0], layers[0].linear1.in_features) if len(layers) else None
    stacks = [(name, list(part)) for name, part in modules.items() if isinstance(part, nn.ModuleList | nn.Sequential)]
    blocks = [(name, parts) for name, parts in stacks if parts and all(map(_has_attention, parts))]
    if encoders or len(blocks) != 1:
        return None
    path, (block, *_) = blocks[0]
    if isinstance(block, nn.TransformerEncoderLayer):
        return _Frame({"block": f"{path}.{{i}}"}, path, block.linear1.in_features)
    return _frame_of_parts(path, block)


def _frame_of_parts(path: str, block: nn.Module) -> _Frame | None:
    """The parts of blocks around an `nn.MultiheadAttention`; None unless there are two norms and two linear layers."""
    in_block = {name: part for name, part in block.named_modules() if name}
    attention = next(name for name, part in in_block.items() if isinstance(part, nn.MultiheadAttention))
    linears = [name for name, part in in_block.items() if type(part) is nn.Linear and not name.startswith(attention)]
    norms = [name for name, module in in_block.items() if isinstance(module, _NORMS)]
    if len(linears) != 2 or len(norms) != 2:
        return None
    classes = {type(module).__name__ for module in in_block.values()}
    activations = [name for name, names in ACTIVATIONS.items() if not classes.isdisjoint(names)]
    settings = product((True, False), activations[:1] or ("gelu", "relu"))
    leaves = zip(("attention", "norm1", "norm2", "up", "down"), (attention, *norms, *linears), strict=True)
    names: Any = {part: f"{path}.{{i}}.{leaf}" for part, leaf in leaves}
    width: Any = in_block[linears[0]].in_features
    return _Frame(names, path, width, tuple({"norm_first": first, "activation": name} for first, name in settings))


def _has_attention(block: nn.Module) -> bool:
    attentions = sum(isinstance(part, nn.MultiheadAttention) for part in block.modules())
    return isinstance(block, nn.TransformerEncoderLayer) or attentions == 1


def _outer_parts(model: nn.Module, frame: _Frame) -> Iterator[dict[Part, Place]]:
    """Yield every possible assignment of the modules and tensors outside the blocks to parts."""
    outside = {name: module for name, module in model.named_modules() if not f"{name}.".startswith(f"{frame.path}.")}

    def of(*kinds: type[nn.Module]) -> list[str]:
        return [name for name, module in outside.items() if type(module) in kinds]

    images, tables, linears, norms = of(nn.Conv2d), of(nn.Embedding), of(nn.Linear), of(*_NORMS)
    prefixes = (*(f"{name}." for name in (*images, *tables, *linears, *norms)), f"{frame.path}.")
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    loose = {name: x for name, x in tensors.items() if not name.startswith(prefixes) and x.is_floating_point()}
    if not linears or len(linears) > 2 or len(images) > 1 or len(norms) > 2:
        return
    tokens = [name for name, x in loose.items() if x.numel() == frame.width]
    positions = [name for name, x in loose.items() if x.numel() > frame.width and x.shape[-1] == frame.width]
    if len(tokens) > 1 or len(tokens) + len(positions) < len(loose):
        return
    names: dict[Part, Place] = {"classifier": linears[-1], **({"pooler": linears[0]} if len(linears) == 2 else {})}
    if tokens:
        names["class_token"] = tokens[0]
    if images:
        names["patch"] = images[0]
        if len(positions) + len(tables) == 1 and len(norms) < 2:
            yield {**names, "position": (positions + tables)[0], **({"norm": norms[0]} if norms else {})}
        return
    if len(tables) + len(positions) != 2:
        return
    norm_parts: tuple[Part, ...] = ("embedding_norm", "norm")
    for (words, position), parts in product(permutations([*tables, *positions]), permutations(norm_parts, len(norms))):
        if words in tables:  # positions may also be a plain tensor
            yield {**names, "words": words, "position": position, **dict(zip(parts, norms, strict=True))}

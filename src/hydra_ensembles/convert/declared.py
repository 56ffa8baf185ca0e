"""Declarations of your own architectures: where parts are, settings that tensors do not show, how to call a model.

A declaration becomes a table like those of the libraries, with the same helpers; the rest is read from the model.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..errors import ConfigError, ConversionError
from ..model.config import (
    Activation,
    EnsembleConfig,
    HiddenActivation,
    NormKind,
    Pool,
    ReadoutConfig,
    Resample,
    RotaryConfig,
)
from . import core
from .core import Architecture, Found, NamedTensors, Source, concatenated, pair, perhaps_meant, refuse

Place = str | tuple[str, ...]
_BLOCK = "encoder.layers.{i}"
_CANONICAL: dict[str, str] = {  # part → canonical parameter; * for "weight" and "bias", else "_bias" is appended
    "patch": "stem.patch",
    "class_token": "stem.class_token",
    "registers": "stem.register_tokens",
    "words": "stem.words",
    "segments": "stem.segments",
    "embedding_norm": "stem.norm.*",
    "embedding_projection": "stem.project.*",
    "norm1": f"{_BLOCK}.norm1.*",
    "qkv": f"{_BLOCK}.attention.qkv",
    "query_norm": f"{_BLOCK}.attention.query_norm.*",
    "key_norm": f"{_BLOCK}.attention.key_norm.*",
    "out": f"{_BLOCK}.attention.out",
    "scale1": f"{_BLOCK}.attention.scale",
    "norm2": f"{_BLOCK}.norm2.*",
    "up": f"{_BLOCK}.mlp.up.*",
    "down": f"{_BLOCK}.mlp.down.*",
    "scale2": f"{_BLOCK}.mlp.scale",
    "norm": "readout.norm.*",
    "pooler": "readout.hidden.*",
    "classifier": "readout.classifier.*",
}
_PARTS = (*_CANONICAL, "attention", "block", "gate", "encoder", "position")
_MASKS = ("src_key_padding_mask", "key_padding_mask", "padding_mask")  # true at padding, as in `torch.nn`


@dataclass(frozen=True)
class Declaration:
    """Where the parts of a transformer classifier are in your own module, and what its tensors do not show.

    Sizes, biases, the number of layers, and for parts from `torch.nn` also norms, are read from the model.

    Attributes:
        names: Part → where it is in the model: the path of a module or tensor, with `{i}` for the number of the
            block, or a tuple of three paths for separate queries, keys and values. docs/how-to/own_model.md lists the
            parts; `encoder`, `block` and `attention` stand for all parts of a module from `torch.nn`.
        heads: Attention heads of a block; not needed for modules from `torch.nn`, as are `norm_first` (default True),
            `activation` (default `"gelu"`) and the epsilon of the norms.
        head_layout: How the rows of `qkv` are ordered, outermost first: `"qkv h d"` (all queries, all keys, all values)
            or any other order of the three.
        attention_scale: What scores are multiplied by, if not by one over the square root of the head width.
        pool: What is classified: the first token (`"cls"`), the mean of the patches or tokens (`"mean"`; `pool_prefix`:
            with class token and registers), both (`"cls_mean"`), or the last token (`"last"`).
        norm_after_pool: Whether `norm` comes after the pooling instead of before.
        norm_kind: `"layer"` or `"rms"`, for norms that are not from `torch.nn`; `norm_eps` is then needed, too.
        image_size: Height and width of the images, or one number for both; by default that of the preprocessing.
        patch_order: How a linear layer flattens a patch: `"chw"` or `"hwc"`.
        embedding_scale: What word embeddings are multiplied by (often the square root of the width).
        rotary: Base of rotary positions (usually 10000), if queries and keys are rotated; for images, whose rows and
            columns are counted in several ways, a `RotaryConfig`.
        rotary_pairs: Which numbers of a head rotate together: those of its two `"halves"`, or `"neighbours"`.
        max_tokens: Longest text, if there is no `position`, or the model accepts fewer tokens than it has positions.
        dropout: Rate after embedding, attention and MLP in training; read from layers and attention of `torch.nn`.
        ignored: Prefixes of names of tensors that do not affect the answer.
        answer: How the model is called: the model and a batch (`pixel_values`, or `input_ids` with `attention_mask`, 1
            at tokens, and `token_type_ids`) in, logits `[B, C]` out. By default the model is called with the images
            or token ids, and with mask and segments if its `forward` has arguments of these names. A text model
            without any mask attends to padding, and so does the converted model.

    Examples:
        >>> import torch, hydra_ensembles as he
        >>> from torch import nn
        >>> class Mine(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.patchify, self.head = nn.Conv2d(3, 32, 8, 8), nn.Linear(32, 5)
        ...         self.pos = nn.Parameter(torch.randn(1, 16, 32))
        ...         layer = nn.TransformerEncoderLayer(32, 4, 64, activation="gelu", batch_first=True)
        ...         self.encoder = nn.TransformerEncoder(layer, 2)
        ...     def forward(self, images):
        ...         x = self.patchify(images).flatten(2).transpose(1, 2) + self.pos
        ...         return self.head(self.encoder(x).mean(dim=1))
        >>> names = {"patch": "patchify", "position": "pos", "encoder": "encoder", "classifier": "head"}
        >>> declaration = he.Declaration(names, pool="mean", image_size=32)
        >>> he.convert(Mine().eval(), declaration=declaration)(torch.randn(2, 3, 32, 32)).shape
        torch.Size([1, 2, 5])
    """

    names: Mapping[str, Place]
    heads: int | None = None
    head_layout: str = "qkv h d"
    attention_scale: float | None = None
    norm_first: bool | None = None
    activation: Activation | None = None
    pool: Pool = "cls"
    pool_prefix: bool = field(default=False, kw_only=True)
    norm_after_pool: bool = False
    norm_kind: NormKind = "layer"
    norm_eps: float | None = None
    pooler_activation: HiddenActivation = "tanh"
    image_size: int | tuple[int, int] | None = None
    resample: Resample = "bicubic_antialias"
    patch_order: Literal["chw", "hwc"] = "chw"
    embedding_scale: float = 1.0
    rotary: float | RotaryConfig | None = None
    rotary_pairs: Literal["halves", "neighbours"] = "halves"
    max_tokens: int | None = None
    dropout: float | None = None
    ignored: tuple[str, ...] = ()
    answer: Callable[[Any, Mapping[str, Tensor]], Tensor] | None = None

    def __post_init__(self) -> None:
        for part in self.names:
            if part not in _PARTS:
                meant = perhaps_meant(str(part), _PARTS)
                raise ConfigError(f"names has no part {part!r}{meant}; there are {', '.join(_PARTS)}")
        if ("patch" in self.names) == ("words" in self.names):
            raise ConfigError("names must have either patch (a model for images) or words (a model for text)")


def paths(place: Place) -> tuple[str, ...]:
    """Return the paths of a place."""
    return (place,) if isinstance(place, str) else place


# --- how a model is called -----------------------------------------------------------------------------------


def _is_masked(declaration: Declaration, model: nn.Module) -> bool:
    """Whether a text model knows which tokens are padding."""
    arguments = inspect.signature(model.forward).parameters
    if declaration.answer is not None or {"attention_mask", *_MASKS} & arguments.keys():
        return True
    unknown = [name for name in arguments if "mask" in name]
    if unknown and "words" in declaration.names:
        raise ConversionError(
            f"forward takes {unknown[0]}, which may say what is padding; say how it is called: answer="
        )
    return False


def _called(declaration: Declaration, model: nn.Module, inputs: NamedTensors) -> Tensor:
    """Call a model as the declaration says, or by the arguments of its `forward`, and return its logits."""
    if declaration.answer is not None:
        return declaration.answer(model, inputs)
    arguments, (main, *extra) = inspect.signature(model.forward).parameters, inputs.items()
    keywords = {name: tensor for name, tensor in extra if name in arguments}
    padding = next((name for name in _MASKS if name in arguments), None)
    if padding is not None and "attention_mask" in inputs:
        keywords[padding] = inputs["attention_mask"] == 0
    output: Any = model(main[1], **keywords)
    logits: Tensor = output["logits"] if isinstance(output, Mapping) else getattr(output, "logits", output)
    return logits


# --- from a declaration to a table ---------------------------------------------------------------------------

_SETTLED = ("qkv", "out", "up", "down", "patch", "classifier")  # whether these have biases is a setting


def read_declaration(declaration: Declaration, model: nn.Module, size: tuple[int, int] | None) -> Architecture:
    """Turn a declaration into a table for this model; `size` is that of its images, if the declaration has none."""
    declaration, rates = _spelled_out(declaration, model)
    if declaration.image_size is None:
        declaration = replace(declaration, image_size=size)
    for part in ("norm1", "qkv", "out", "norm2", "up", "down"):
        if part not in declaration.names:
            raise ConversionError(f"names does not say where {part} is")
    tensors = {**dict(model.named_buffers()), **model.state_dict()}
    numbers = tuple(name for name, tensor in tensors.items() if not tensor.is_floating_point())
    return Architecture(
        name=type(model).__name__,
        classes=(),
        config=partial(_config, declaration, rates),
        weights=dict(_table(declaration, tensors)),
        ignored=(*declaration.ignored, *numbers),
        answer=lambda model, inputs, fresh: _called(declaration, model, inputs),
        masks=_is_masked(declaration, model),
    )


def _spelled_out(declaration: Declaration, model: nn.Module) -> tuple[Declaration, dict[str, float]]:
    """Replace `encoder`, `block` and `attention` by the names of their parts; read settings and dropout from them."""
    names, settings, rates = dict(declaration.names), dict[str, Any](), dict[str, float]()
    modules: dict[str, Any] = dict(model.named_modules())

    def module(part: str, place: Any, kind: type[nn.Module]) -> Any:
        found = modules.get(path := place.replace("{i}", "0"))
        if not isinstance(found, kind):
            raise ConversionError(f"{part} {path} must be an nn.{kind.__name__}, but is a {type(found).__name__}")
        return found

    if (encoder := names.pop("encoder", None)) is not None:
        if module("encoder", encoder, nn.TransformerEncoder).norm is not None:
            names.setdefault("norm", f"{encoder}.norm")
        names["block"] = f"{encoder}.layers.{{i}}"
    if (block := names.pop("block", None)) is not None:
        layer = module("block", block, nn.TransformerEncoderLayer)
        parts = {"attention": "self_attn", "norm1": "norm1", "norm2": "norm2", "up": "linear1", "down": "linear2"}
        names |= {part: f"{block}.{path}" for part, path in parts.items()}
        settings = {"norm_first": bool(layer.norm_first), "activation": core.activation_of(layer.activation)}
        dropouts = {"activation": layer.dropout, "projection": layer.dropout1, "output": layer.dropout2}
        rates = {f"{site}_dropout": core.dropout_rate(dropout) for site, dropout in dropouts.items()}
    if (attention := names.pop("attention", None)) is not None:
        whole = module("attention", attention, nn.MultiheadAttention)
        names |= {"qkv": f"{attention}.in_proj_weight", "out": f"{attention}.out_proj"}
        settings["heads"], rates["attention_dropout"] = int(whole.num_heads), float(whole.dropout)
    if declaration.dropout is not None:
        rates |= dict.fromkeys(("projection_dropout", "output_dropout"), declaration.dropout)
    unsaid = {name: value for name, value in settings.items() if getattr(declaration, name) is None}
    return replace(declaration, names=names, **unsaid), rates


def _table(declaration: Declaration, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Source]]:
    """Yield canonical names and their sources; a bias that the model does not have is zero."""
    names = declaration.names
    order: core.Order = partial(_order, declaration)

    def weight_of(part: str, path: str) -> str:
        """Return the name of the tensor that a path denotes: a tensor itself, or the weight of a module."""
        found = next((name for name in (path, f"{path}.weight") if name.replace("{i}", "0") in tensors), None)
        if found is None:
            near = perhaps_meant(path.replace("{i}", "0"), tensors)
            raise ConversionError(f"{part} is said to be {path}, which the model does not have{near}")
        return found

    def bias_of(weight: str) -> str | None:
        head, ending, _ = weight.rpartition("weight")
        return f"{head}bias" if ending and f"{head}bias".replace("{i}", "0") in tensors else None

    def rotated(read: Sequence[Tensor], shape: torch.Size) -> Tensor:
        return read[0][..., order(shape[-1])].reshape(shape)

    readers: dict[str, Callable[[Sequence[Tensor], torch.Size], Tensor]] = {
        "patch": partial(_patches, declaration.patch_order),
        "out": core.out_by_head("").read,
        "position": _first_rows,
        "words": lambda read, shape: (read[0] * declaration.embedding_scale).reshape(shape),
        **dict.fromkeys(("query_norm", "key_norm"), rotated),
    }
    for part, place in names.items():
        name = _CANONICAL.get(part, "stem.positions" if "words" in names else "stem.position")
        weight, bias = name.replace("*", "weight"), name.replace("*", "bias") if "*" in name else f"{name}_bias"
        if part == "gate":
            continue
        gated = [weight_of("gate", str(names["gate"]))] if part == "up" and "gate" in names else []
        found = [*gated, *(weight_of(part, path) for path in paths(place))]
        biases = [bias_of(path) for path in found]
        if part == "qkv":
            read = partial(_heads, declaration, order)
            yield weight, Source(tuple(found), read)
            if any(biases):
                yield bias, Source(tuple(bias or path for bias, path in zip(biases, found, strict=True)), read)
            continue
        yield weight, Source(tuple(found), readers.get(part, concatenated().read))
        if None not in biases:
            vector = rotated if part in ("query_norm", "key_norm") else concatenated().read
            yield bias, Source(tuple(map(str, biases)), vector)
        elif part not in _SETTLED:
            yield bias, Source(tuple(found), lambda read, shape: read[0].new_zeros(shape))


def _heads(declaration: Declaration, order: core.Order, read: Sequence[Tensor], shape: torch.Size) -> Tensor:
    """Return query, key and value of every head, `[H, 3, d_k, …]`, from rows in the declared order."""
    if len(shape) == 3:  # of biases, which may be those of some only
        read = [x if x.dim() == 1 else x.new_zeros(len(x)) for x in read]
    heads = core.qkv_by_head(order=order, layout=declaration.head_layout).read(read, shape)
    if declaration.attention_scale is None:
        return heads
    factor = declaration.attention_scale * shape[2] ** 0.5  # folded into the queries
    return torch.cat([heads[:, :1] * factor, heads[:, 1:]], dim=1)


def _order(declaration: Declaration, head_dim: int) -> list[int]:
    """Return the order in which to read query and key rows, so that rotated pairs are the halves of a head."""
    if declaration.rotary is None or declaration.rotary_pairs == "halves":
        return [*range(head_dim)]
    return [*range(0, head_dim, 2), *range(1, head_dim, 2)]


def _patches(order: str, read: Sequence[Tensor], shape: torch.Size) -> Tensor:
    _, width, channels, height, wide = shape
    if read[0].dim() == 2 and order == "hwc":
        return read[0].reshape(width, height, wide, channels).permute(0, 3, 1, 2)
    return read[0].reshape(shape)


def _first_rows(read: Sequence[Tensor], shape: torch.Size) -> Tensor:
    """Return the first rows of a table, as many as the shape needs, ignoring axes of length one."""
    if read[0].shape[-1:] != shape[-1:]:
        raise RuntimeError(f"shape {list(read[0].shape)} is not [..., {shape[-1]}]")
    return read[0].reshape(-1, shape[-1])[: shape[-2]].reshape(shape)


# --- the configuration ---------------------------------------------------------------------------------------


def _config(declared: Declaration, rates: Mapping[str, float], found: Found, num_labels: int | None) -> EnsembleConfig:
    """Build the canonical configuration from the declaration and the shapes of the tensors."""
    if declared.heads is None:
        raise ConversionError("heads is None; give the number of attention heads of a block")
    rotary = RotaryConfig(declared.rotary) if isinstance(declared.rotary, int | float) else declared.rotary
    kind, eps = _norm(declared, found, "norm1")
    encoder = found.encoder(
        declared.heads,
        activation=declared.activation or "gelu",
        norm=kind,
        norm_eps=eps,
        norm_first=declared.norm_first is not False,
        rotary=rotary,
        **rates,
    )
    embedded: dict[str, Any] = {"dropout": declared.dropout or 0.0}
    if "embedding_norm" in declared.names:
        embedded["norm_kind"], embedded["norm_eps"] = _norm(declared, found, "embedding_norm")
    rows = found.rows("stem.positions")
    if "words" in declared.names:
        most = declared.max_tokens or rows
        if not most or (rows and most > rows):
            raise ConversionError(f"max_tokens is {most}, with {rows} positions; give max_tokens=, at most as many")
        stem: Any = found.text_stem(positions=most, learned_positions=bool(rows), **embedded)
    else:
        patch = found.parts("stem.patch")[0]
        side = None if patch.dim() == 4 else _square_patch(patch.shape[1])
        stem = found.patch_stem(pair(declared.image_size or 0), side, resample=declared.resample, **embedded)
    readout = ReadoutConfig(
        pool=declared.pool,
        pool_prefix=declared.pool_prefix,
        norm="none" if "norm" not in declared.names else "pooled" if declared.norm_after_pool else "tokens",
        norm_eps=_norm(declared, found, "norm" if "norm" in declared.names else "norm1")[1],
        hidden=declared.pooler_activation if "pooler" in declared.names else None,
        **found.classifier(num_labels),
    )
    return EnsembleConfig(stem, encoder, readout)


def _norm(declared: Declaration, found: Found, part: str) -> tuple[NormKind, float]:
    """Return the kind and epsilon of a norm; those of the first block stand for all."""
    module = dict(found.model.named_modules()).get(str(declared.names[part]).replace("{i}", "0"))
    kind = "rms" if isinstance(module, nn.RMSNorm) else declared.norm_kind
    eps = getattr(module, "eps", declared.norm_eps)
    if eps is None and kind == "layer":
        raise ConversionError(f"the eps of {part} is not known; give norm_eps=")
    return kind, torch.finfo(found.parts("encoder.layers.0.norm1.weight")[0].dtype).eps if eps is None else float(eps)


def _square_patch(numbers: int) -> tuple[int, int]:
    """Return the patch size of a linear layer on patches of 3 channels, or 1."""
    for channels in (3, 1):
        side = math.isqrt(numbers // channels)
        if channels * side**2 == numbers:
            return side, side
    raise refuse(f"a patch of {numbers} numbers is not a square with 1 or 3 channels")

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
    EncoderConfig,
    EnsembleConfig,
    HiddenActivation,
    NormKind,
    PatchStemConfig,
    Pool,
    ReadoutConfig,
    Resample,
    RotaryConfig,
    TextStemConfig,
)
from . import core
from .core import Architecture, NamedTensors, Source, concatenated, pair, perhaps_meant, refuse

Place = str | tuple[str, ...] | Tensor
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
_PARTS = {**_CANONICAL, **dict.fromkeys(("attention", "block", "gate"), _BLOCK), "encoder": "", "position": ""}
_MASKS = ("src_key_padding_mask", "key_padding_mask", "padding_mask")  # true at padding, as in `torch.nn`


@dataclass(frozen=True)
class Declaration:
    """Where the parts of a transformer classifier are in your own module, and what its tensors do not show.

    Sizes, biases, the number of layers, and for parts from `torch.nn` also norms, are read from the model.

    Attributes:
        names: Part → where it is in the model: the path of a module or tensor, with `{i}` for the number of the
            block. A part that the model computes instead of storing (sinusoidal positions) may be given as a tensor.
            Image models: `patch` (a convolution, or a linear layer on flattened patches), `class_token`,
            `registers`, `position`. Text models: `words`, `position`, `segments`, `embedding_norm`,
            `embedding_projection`. Blocks: `norm1`, `qkv` (one path for all three, or a tuple of three), `out`,
            `norm2`, `up`, `down`, and if present `query_norm`, `key_norm`, `scale1`, `scale2` (LayerScale) and
            `gate` (GLU); instead of `qkv` and `out`, `attention` names an `nn.MultiheadAttention`; instead of a whole
            block, `block` names an `nn.TransformerEncoderLayer`; instead of all of them, `encoder` names an
            `nn.TransformerEncoder`. After the blocks: `norm`, `pooler`, `classifier`.
        heads: Attention heads of a block; not needed for modules from `torch.nn`.
        head_layout: How the rows of `qkv` are ordered, outermost first: `"qkv h d"` (all queries, all keys, all values)
            or any other order of the three; without `qkv` if there are three tensors.
        attention_scale: What scores are multiplied by, if not by one over the square root of the head width.
        norm_first: Pre-norm (True, usual for images) or post-norm; read from a `block` or `encoder`.
        activation: Activation of the MLP, by default `"gelu"`; read from a `block` or `encoder`.
        pool: What is classified: the first token (`"cls"`), the mean of the patches or tokens (`"mean"`), both
            (`"cls_mean"`), or the last token (`"last"`).
        pool_prefix: Whether the mean includes class token and registers.
        norm_after_pool: Whether `norm` comes after the pooling instead of before.
        norm_kind: `"layer"` or `"rms"`, for norms that are not from `torch.nn`.
        norm_eps: Epsilon of the norms of a block, if these are not from `torch.nn`.
        pooler_activation: Activation after `pooler`.
        image_size: Height and width of the images, or one number for both; by default that of the preprocessing.
        resample: How positions are resampled for images of other sizes, as in `F.interpolate`.
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
            or token ids, and with mask and segments if its `forward` has arguments of these names.
        masked: Whether a text model knows which tokens are padding; by default yes if `answer` is given or its
            `forward` takes a mask. If not, it attends to padding, and so does the converted model.

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
    masked: bool | None = None

    def __post_init__(self) -> None:
        for part, place in self.names.items():
            if part not in _PARTS:
                meant = perhaps_meant(str(part), _PARTS)
                raise ConfigError(f"names has no part {part!r}{meant}; there are {', '.join(_PARTS)}")
            for path in paths(place):
                if ("{i}" in path) != ("{i}" in _PARTS[part]):
                    needs = "needs {i} for the number of the block" if "{i}" in _PARTS[part] else "exists once: no {i}"
                    raise ConfigError(f"names[{part!r}] is {path!r}, but this part {needs}")
        if ("patch" in self.names) == ("words" in self.names):
            raise ConfigError("names must have either patch (a model for images) or words (a model for text)")
        if sorted(self.head_layout.replace("qkv", "").split()) != ["d", "h"]:
            raise ConfigError(f"head_layout is {self.head_layout!r}; order qkv, h and d, as in 'qkv h d'")


def paths(place: Place) -> tuple[str, ...]:
    """Return the paths of a place; none for a tensor."""
    return () if isinstance(place, Tensor) else (place,) if isinstance(place, str) else place


# --- how a model is called -----------------------------------------------------------------------------------


def _arguments(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(type(model).forward).parameters
    except (TypeError, ValueError):  # compiled code has none
        return {}


def _is_masked(declaration: Declaration, model: nn.Module) -> bool:
    """Whether a text model knows which tokens are padding."""
    if declaration.masked is not None:
        return declaration.masked
    arguments = _arguments(model)
    if declaration.answer is not None or any(name in arguments for name in ("attention_mask", *_MASKS)):
        return True
    unknown = [name for name in arguments if "mask" in name]
    if unknown and "words" in declaration.names:
        advice = "say with answer= how the model is called, or masked=False if it never sees padding"
        raise ConversionError(f"forward takes {unknown[0]}, which may say what is padding; {advice}")
    return False


def _called(declaration: Declaration, model: nn.Module, inputs: NamedTensors) -> Tensor:
    """Call a model as the declaration says, or by the arguments of its `forward`, and return its logits."""
    if declaration.answer is not None:
        output: Any = declaration.answer(model, inputs)
    else:
        arguments, (main, *extra) = _arguments(model), inputs.items()
        keywords = {name: tensor for name, tensor in extra if name in arguments}
        padding = next((name for name in _MASKS if name in arguments), None)
        if padding is not None and "attention_mask" in inputs:
            keywords[padding] = inputs["attention_mask"] == 0
        output = core.run(model, main[1], **keywords)
        output = output["logits"] if isinstance(output, Mapping) else getattr(output, "logits", output)
    if not isinstance(output, Tensor):
        raise TypeError(f"it returns a {type(output).__name__}; say with answer= where its logits [B, C] are")
    return output


# --- from a declaration to a table ---------------------------------------------------------------------------

_MATRICES = ("patch", "words", "out", "up", "down", "classifier")


def read_declaration(declaration: Declaration, model: nn.Module, size: tuple[int, int] | None) -> Architecture:
    """Turn a declaration into a table for this model; `size` is that of its images, if the declaration has none."""
    if declaration.image_size is None:
        declaration = replace(declaration, image_size=size)
    reader = _Reader(declaration, model)
    return Architecture(
        name=type(model).__name__,
        classes=(),
        config=reader.config,
        weights=dict(reader.table()),
        ignored=(*declaration.ignored, *(name for name, x in reader.tensors.items() if not x.is_floating_point())),
        answer=lambda model, inputs, fresh: _called(declaration, model, inputs),
        masks=_is_masked(declaration, model),
    )


class _Reader:
    """A declaration beside a model: where every tensor is, and the configuration that follows from their shapes."""

    def __init__(self, declaration: Declaration, model: nn.Module) -> None:
        self.modules: dict[str, Any] = dict(model.named_modules())
        stored = {**dict(model.named_buffers()), **model.state_dict()}
        self.tensors: dict[str, Tensor] = {name: tensor.detach() for name, tensor in stored.items()}
        self.rates: dict[str, float] = {}
        self.declared = self._spelled_out(declaration)
        self.names = self.declared.names
        for part in ("norm1", "qkv", "out", "norm2", "up", "down"):
            if part not in self.names:
                raise ConversionError(f"names does not say where {part} is")
        for part, place in self.names.items():
            for path in paths(place):
                if self._weight(path).replace("{i}", "0") not in self.tensors:
                    near = perhaps_meant(path.replace("{i}", "0"), [*self.tensors, *self.modules])
                    raise ConversionError(f"{part} is said to be {path}, which the model does not have{near}")
        self.layers, norm1 = 0, self._weight(str(self.names["norm1"]))
        while norm1.replace("{i}", str(self.layers)) in self.tensors:
            self.layers += 1

    def _spelled_out(self, declaration: Declaration) -> Declaration:
        """Replace `encoder`, `block` and `attention` by the names of their parts, and read settings from them."""
        names, settings = dict(declaration.names), dict[str, Any]()
        if (encoder := names.pop("encoder", None)) is not None:
            module = self._module("encoder", encoder, nn.TransformerEncoder)
            names["block"] = f"{encoder}.layers.{{i}}"
            if module.norm is not None:
                names.setdefault("norm", f"{encoder}.norm")
        if (block := names.pop("block", None)) is not None:
            layer = self._module("block", block, nn.TransformerEncoderLayer)
            parts = {"attention": "self_attn", "norm1": "norm1", "norm2": "norm2", "up": "linear1", "down": "linear2"}
            names |= {part: f"{block}.{path}" for part, path in parts.items()}
            settings = {"norm_first": bool(layer.norm_first), "activation": core.activation_of(layer.activation)}
            rates = {"activation": "dropout", "projection": "dropout1", "output": "dropout2"}
            self.rates = {f"{site}_dropout": core.dropout_rate(getattr(layer, part)) for site, part in rates.items()}
        if (attention := names.pop("attention", None)) is not None:
            module = self._module("attention", attention, nn.MultiheadAttention)
            names |= {"qkv": f"{attention}.in_proj_weight", "out": f"{attention}.out_proj"}
            settings["heads"] = int(module.num_heads)
            self.rates["attention_dropout"] = float(module.dropout)
        if declaration.dropout is not None:
            self.rates |= dict.fromkeys(("projection_dropout", "output_dropout"), declaration.dropout)
        unsaid = {name: value for name, value in settings.items() if getattr(declaration, name) is None}
        return replace(declaration, names=names, **unsaid)

    def _module(self, part: str, place: Place, kind: type[nn.Module]) -> Any:
        path = str(place).replace("{i}", "0")
        module = self.modules.get(path)
        if not isinstance(module, kind):
            raise ConversionError(f"{part} {path} must be an nn.{kind.__name__}, but is a {type(module).__name__}")
        return module

    def _weight(self, path: str) -> str:
        """Return the name of the tensor that a path denotes: a tensor itself, or the weight of a module."""
        return path if path.replace("{i}", "0") in self.tensors else f"{path}.weight"

    def _bias(self, path: str) -> str | None:
        """Return the name of the bias next to the weight of a path; None if there is none."""
        head, weight, _ = self._weight(path).rpartition("weight")
        return f"{head}bias" if weight and f"{head}bias".replace("{i}", "0") in self.tensors else None

    def _has_bias(self, *parts: str) -> bool:
        return any(self._bias(path) is not None for part in parts for path in paths(self.names.get(part, ())))

    def _tensor(self, part: str) -> Tensor:
        """Return the weights of a part in the first block; an empty matrix if the declaration has no such part."""
        place = self.names.get(part, ())
        if isinstance(place, Tensor):
            return place
        tensors = [self.tensors[self._weight(path).replace("{i}", "0")] for path in paths(place)]
        tensor = torch.cat(tensors) if tensors else torch.empty(0, 1)
        if part in _MATRICES and tensor.dim() < 2:
            raise ConversionError(f"{part} is a tensor {list(tensor.shape)}, but a matrix is expected")
        return tensor

    def _rows(self, part: str) -> int:
        """Return the number of rows in a table of embeddings; 0 if there is none."""
        return self._tensor(part).numel() // self._tensor(part).shape[-1]

    # --- where the canonical parameters come from ------------------------------------------------------------

    def table(self) -> Iterator[tuple[str, Source]]:
        """Yield canonical names and their sources; a bias that the model does not have is zero."""
        positions = "stem.positions" if "words" in self.names else "stem.position"
        readers = {
            "patch": self._patches,
            "out": core.out_by_head("").read,
            "position": _first_rows,
            "words": lambda tensors, shape: (tensors[0] * self.declared.embedding_scale).reshape(shape),
            **dict.fromkeys(("query_norm", "key_norm"), self._rotated),
        }
        for part, place in self.names.items():
            name = _CANONICAL.get(part, positions)
            weight, bias = name.replace("*", "weight"), name.replace("*", "bias") if "*" in name else f"{name}_bias"
            if isinstance(place, Tensor):  # computed by the model, which does not store it
                yield weight, Source((), partial(_first_rows, given=place.to(self._tensor("norm1"))))
            elif part == "qkv":
                yield weight, Source(tuple(self._weight(path) for path in paths(place)), self._heads)
                found = tuple(self._bias(path) or self._weight(path) for path in paths(place))
                yield bias, Source(found, self._heads_of_vectors)
            elif part != "gate":
                parts: tuple[str, ...] = ("gate", "up") if part == "up" and "gate" in self.names else (part,)
                places = [str(self.names[one]) for one in parts]
                weights, biases = tuple(map(self._weight, places)), [self._bias(path) for path in places]
                yield weight, Source(weights, readers.get(part, concatenated().read))
                if None in biases:
                    yield bias, Source(weights, lambda tensors, shape: tensors[0].new_zeros(shape))
                else:
                    vector = self._rotated if part in ("query_norm", "key_norm") else concatenated().read
                    yield bias, Source(tuple(map(str, biases)), vector)

    def _rotated(self, tensors: Sequence[Tensor], shape: torch.Size) -> Tensor:
        return tensors[0][..., self._order(shape[-1])].reshape(shape)

    def _patches(self, tensors: Sequence[Tensor], shape: torch.Size) -> Tensor:
        _, width, channels, height, wide = shape
        if tensors[0].dim() == 2 and self.declared.patch_order == "hwc":
            return tensors[0].reshape(width, height, wide, channels).permute(0, 3, 1, 2)
        return tensors[0].reshape(shape)

    def _heads(self, tensors: Sequence[Tensor], shape: torch.Size) -> Tensor:
        """Return query, key and value of every head, `[H, 3, d_k, …]`, from rows in the declared order."""
        heads = core.qkv_by_head(order=self._order, layout=self.declared.head_layout).read(tensors, shape)
        if self.declared.attention_scale is None:
            return heads
        factor = self.declared.attention_scale * shape[2] ** 0.5  # folded into the queries
        return torch.cat([heads[:, :1] * factor, heads[:, 1:]], dim=1)

    def _heads_of_vectors(self, tensors: Sequence[Tensor], shape: torch.Size) -> Tensor:
        return self._heads([x if x.dim() == 1 else x.new_zeros(len(x)) for x in tensors], shape)

    def _order(self, head_dim: int) -> list[int]:
        """Return the order in which to read query and key rows, so that rotated pairs are the halves of a head."""
        if self.declared.rotary is None or self.declared.rotary_pairs == "halves":
            return [*range(head_dim)]
        return [*range(0, head_dim, 2), *range(1, head_dim, 2)]

    # --- the configuration -----------------------------------------------------------------------------------

    def config(self, model: nn.Module, num_labels: int | None) -> EnsembleConfig:
        """Build the canonical configuration from the declaration and the shapes of the tensors."""
        declared, (down, up, out) = self.declared, (self._tensor(part) for part in ("down", "up", "out"))
        heads, rotary = declared.heads, declared.rotary
        if heads is None or heads < 1 or out.shape[-1] % heads:
            raise ConversionError(f"heads is {heads}; give the number that divides the {out.shape[-1]} columns of out")
        kind, eps = self._norm("norm1")
        encoder = EncoderConfig(
            width=self._tensor("norm1").numel(),
            layers=self.layers,
            heads=heads,
            head_dim=out.shape[1] // heads,
            mlp_width=down.shape[1],
            activation=declared.activation or "gelu",
            gated=up.shape[0] * (2 if "gate" in self.names else 1) == 2 * down.shape[1],
            norm=kind,
            norm_eps=eps,
            norm_first=declared.norm_first is not False,
            qk_norm="query_norm" in self.names,
            qkv_bias=self._has_bias("qkv"),
            out_bias=self._has_bias("out"),
            mlp_bias=self._has_bias("up", "down"),
            layer_scale="scale1" in self.names,
            rotary=RotaryConfig(rotary) if isinstance(rotary, int | float) else rotary,
            **self.rates,  # type: ignore[arg-type]
        )
        stem = self._text_stem() if "words" in self.names else self._patch_stem()
        return EnsembleConfig(stem, encoder, self._readout(num_labels), encoder.all_heads())

    def _norm(self, part: str) -> tuple[NormKind, float]:
        """Return the kind and epsilon of a norm; those of the first block stand for all."""
        module = self.modules.get(str(self.names[part]).replace("{i}", "0"))
        kind = "rms" if isinstance(module, nn.RMSNorm) else self.declared.norm_kind
        eps = getattr(module, "eps", self.declared.norm_eps)
        if eps is None and kind == "layer":
            raise ConversionError(f"the eps of {part} is not known; give norm_eps=")
        return kind, torch.finfo(self._tensor(part).dtype).eps if eps is None else float(eps)

    def _embedded(self) -> dict[str, Any]:
        """Return the settings that image and text stems share."""
        kind, eps = self._norm("embedding_norm") if "embedding_norm" in self.names else ("layer", 1e-6)
        settings = {"norm": "embedding_norm" in self.names, "norm_kind": kind, "norm_eps": eps}
        return {**settings, "learned_positions": "position" in self.names, "dropout": self.declared.dropout or 0.0}

    def _text_stem(self) -> TextStemConfig:
        words, rows = self._tensor("words"), self._rows("position")
        most = self.declared.max_tokens or rows
        if not most or (rows and most > rows):
            raise ConversionError(f"max_tokens is {most}, with {rows} positions; give max_tokens=, at most as many")
        projects, segments = "embedding_projection" in self.names, self._rows("segments")
        return TextStemConfig(*(words.shape[0], most, words.shape[1], segments), project=projects, **self._embedded())

    def _patch_stem(self) -> PatchStemConfig:
        patch, registers, rows = self._tensor("patch"), self._rows("registers"), self._rows("position")
        prefix = registers + ("class_token" in self.names)
        size = (int(patch.shape[2]), int(patch.shape[3])) if patch.dim() == 4 else self._square_patch(patch.shape[1])
        height, width = pair(self.declared.image_size or 0)
        grid = height // size[0], width // size[1]
        spare = rows - grid[0] * grid[1]
        if not all(grid) or (spare < 0 and rows):
            raise ConversionError(f"{rows} positions do not fit {grid[0]}x{grid[1]} patches; give image_size=")
        return PatchStemConfig(
            patch_size=size,
            grid=grid,
            channels=patch[0].numel() // (size[0] * size[1]),
            patch_bias=self._has_bias("patch"),
            class_token="class_token" in self.names,
            registers=registers,
            position_prefix=max(0, min(spare, prefix)),
            resample=self.declared.resample,
            **self._embedded(),
        )

    def _square_patch(self, numbers: int) -> tuple[int, int]:
        """Return the patch size of a linear layer on patches of 3 channels, or 1."""
        for channels in (3, 1):
            side = math.isqrt(numbers // channels)
            if channels * side**2 == numbers:
                return side, side
        raise refuse(f"a patch of {numbers} numbers is not a square with 1 or 3 channels")

    def _readout(self, num_labels: int | None) -> ReadoutConfig:
        _, eps = self._norm("norm" if "norm" in self.names else "norm1")
        return ReadoutConfig(
            pool=self.declared.pool,
            pool_prefix=self.declared.pool_prefix,
            num_classes=core.number_of_classes(len(self._tensor("classifier")), num_labels),
            norm="none" if "norm" not in self.names else "pooled" if self.declared.norm_after_pool else "tokens",
            norm_eps=eps,
            hidden=self.declared.pooler_activation if "pooler" in self.names else None,
            bias="classifier" not in self.names or self._has_bias("classifier"),
        )


def _first_rows(tensors: Sequence[Tensor], shape: torch.Size, given: Tensor | None = None) -> Tensor:
    """Return the first rows of a table, as many as the shape needs, ignoring axes of length one."""
    table = tensors[0] if given is None else given
    if table.shape[-1:] != shape[-1:]:
        raise RuntimeError(f"shape {list(table.shape)} is not [..., {shape[-1]}]")
    return table.reshape(-1, shape[-1])[: shape[-2]].reshape(shape)

"""Matching a declaration with a live model: where every tensor is, what does not fit, and the architecture."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConversionError
from ..model.config import (
    EncoderConfig,
    EnsembleConfig,
    NormKind,
    PatchStemConfig,
    ReadoutConfig,
    RotaryConfig,
    TextStemConfig,
)
from .core import (
    Architecture,
    Source,
    activation_of,
    as_stored,
    concatenated,
    dropout_rate,
    number_of_classes,
    out_by_head,
    pair,
    perhaps_meant,
    qkv_by_head,
    refuse,
    require_all_used,
)
from .declared import IN_BLOCK, Declaration, Part, Place, called, is_masked, paths, unknown_arguments
from .refusals import prefix_errors

_NEEDED: tuple[Part, ...] = ("position", "norm1", "qkv", "out", "norm2", "up", "down")
_MATRICES: tuple[Part, ...] = ("patch", "words", "position", "out", "up", "down", "classifier")
_ADVICE = "correct the table of names; docs/how-to/own_model.md has every part"
_BLOCK = "encoder.layers.{i}"
_WITH_BIAS = {  # linear layers and norms
    "embedding_projection": "stem.project",
    "up": f"{_BLOCK}.mlp.up",
    "down": f"{_BLOCK}.mlp.down",
    "pooler": "readout.hidden",
    "classifier": "readout.classifier",
    "embedding_norm": "stem.norm",
    "norm1": f"{_BLOCK}.norm1",
    "query_norm": f"{_BLOCK}.attention.query_norm",
    "key_norm": f"{_BLOCK}.attention.key_norm",
    "norm2": f"{_BLOCK}.norm2",
    "norm": "readout.norm",
}
_TENSORS = {
    "class_token": "stem.class_token",
    "registers": "stem.register_tokens",
    "segments": "stem.segments",
    "scale1": f"{_BLOCK}.attention.scale",
    "scale2": f"{_BLOCK}.mlp.scale",
}


def read_declaration(declaration: Declaration, model: nn.Module) -> Architecture:
    """Turn a user's declaration into an `Architecture` for this model, like those of the libraries.

    Raises:
        ConversionError: Lists all names that the model does not have, missing parts, and tensors that are not used.
            Shapes that do not fit are reported later, by `translate`.
    """
    with prefix_errors(type(model).__name__):
        return _Reading(declaration, model).architecture()


class _Reading:
    """A declaration matched with a model: where every tensor is, what does not fit, and the resulting architecture."""

    def __init__(self, declaration: Declaration, model: nn.Module) -> None:
        self.model = model
        stored = {**dict(model.named_buffers()), **model.state_dict()}
        self.foreign: dict[str, Tensor] = {name: tensor.detach() for name, tensor in stored.items()}
        self.rates: dict[str, float] = {}
        self.declared = self._spelled_out(declaration)
        self.names: dict[Part, Place] = dict(self.declared.names)
        self.layers = 0
        while "norm1" in self.names and self.tensor("norm1", self.layers) is not None:
            self.layers += 1

    def architecture(self) -> Architecture:
        """Build the `Architecture`; raise if the declaration does not fit the model."""
        weights = dict(self._weights())
        names = [name for source in weights.values() for name in source.names]
        used = {name.replace("{i}", str(i)) for name in names for i in range(self.layers)}
        ignored = (*self.declared.ignored, *(name for name, x in self.foreign.items() if not x.is_floating_point()))
        unused = [name for name in self.model.state_dict() if name not in used and not name.startswith(ignored)]
        require_all_used(list(self._unmatched(unused)), unused, _ADVICE)
        return Architecture(
            name=type(self.model).__name__,
            classes=(),
            config=self.config,
            weights=weights,
            ignored=ignored,
            answer=lambda model, inputs, fresh: called(self.declared, model, inputs),
            masks=is_masked(self.declared, self.model),
            advice=_ADVICE,
        )

    # --- where tensors are -----------------------------------------------------------------------------------

    def _spelled_out(self, declaration: Declaration) -> Declaration:
        """Replace `encoder`, `block` and `attention` by the names of their parts, and read settings from them."""
        names = dict(declaration.names)
        settings = dict[str, Any]()
        if (encoder := names.pop("encoder", None)) is not None:
            module = self._module("encoder", encoder, nn.TransformerEncoder)
            names["block"] = f"{encoder}.layers.{{i}}"
            if module.norm is not None:
                names.setdefault("norm", f"{encoder}.norm")
        if (block := names.pop("block", None)) is not None:
            layer = self._module("block", block, nn.TransformerEncoderLayer)
            parts = {"attention": "self_attn", "norm1": "norm1", "norm2": "norm2", "up": "linear1", "down": "linear2"}
            names |= {part: f"{block}.{path}" for part, path in parts.items()}  # type: ignore[misc]
            settings["norm_first"] = bool(layer.norm_first)
            settings["activation"] = activation_of(layer.activation)
            rates = {"activation": "dropout", "projection": "dropout1", "output": "dropout2"}
            self.rates = {f"{site}_dropout": dropout_rate(getattr(layer, part)) for site, part in rates.items()}
        if (attention := names.pop("attention", None)) is not None:
            module = self._module("attention", attention, nn.MultiheadAttention)
            if module.bias_k is not None or module.add_zero_attn:
                raise refuse(f"{attention} adds keys of its own")
            names |= {"qkv": f"{attention}.in_proj_weight", "out": f"{attention}.out_proj"}
            settings["heads"] = int(module.num_heads)
            self.rates["attention_dropout"] = float(module.dropout)
        if declaration.dropout is not None:
            self.rates |= dict.fromkeys(("projection_dropout", "output_dropout"), declaration.dropout)
        unsaid = {name: value for name, value in settings.items() if getattr(declaration, name) is None}
        return replace(declaration, names=names, **unsaid)

    def _module(self, part: Part, place: Place, kind: type[nn.Module]) -> Any:
        path = str(place).replace("{i}", "0")
        modules = dict(self.model.named_modules())
        if not isinstance(modules.get(path), kind):
            missing = f"does not exist{perhaps_meant(path, modules)}"
            actual = f"is a {type(modules[path]).__name__}" if path in modules else missing
            alike = [name.replace(".0", ".{i}") for name, module in modules.items() if isinstance(module, kind)]
            found = f"{actual}; there are {alike[:4] or 'none'}"
            raise ConversionError(f"{part} {path} must be an nn.{kind.__name__}, but {found}")
        return modules[path]

    def _weight(self, path: str, layer: int = 0) -> str | None:
        """Return the name of the tensor that a path denotes: a tensor itself, or the weight of a module."""
        name = path.replace("{i}", str(layer))
        return next((f"{path}{end}" for end in ("", ".weight") if f"{name}{end}" in self.foreign), None)

    def _bias(self, path: str) -> str | None:
        """Return the name of the bias next to the weight of a path; None if there is none."""
        weight = self._weight(path) or ""
        bias = f"{weight.removesuffix('weight')}bias" if weight.endswith("weight") else ""
        return bias if bias.replace("{i}", "0") in self.foreign else None

    def tensor(self, part: Part, layer: int = 0) -> Tensor | None:
        """Return the weights of a part, three (as for `qkv`) concatenated; None if it is missing."""
        place = self.names.get(part)
        if place is None or isinstance(place, Tensor):
            return place
        names = [self._weight(path, layer) for path in paths(place)]
        tensors = [self.foreign[name.replace("{i}", str(layer))] for name in names if name is not None]
        return torch.cat(tensors) if len(tensors) == len(names) else None

    # --- what does not fit -----------------------------------------------------------------------------------

    def _unmatched(self, unused: Sequence[str]) -> Iterator[str]:
        near = [name for path in unused for name in (path, path.rpartition(".")[0])]
        for part, place in self.names.items():
            for path in paths(place):
                for layer in range(max(1, self.layers) if part in IN_BLOCK else 1):
                    if self._weight(path, layer) is None:
                        name = path.replace("{i}", str(layer))
                        yield f"{part} is said to be {name}, which the model does not have{perhaps_meant(name, near)}"
                        break
        for part in _NEEDED:
            if part not in self.names and not (part == "position" and self.declared.rotary is not None):
                yield f"names does not say where {part} is{perhaps_meant(part, near)}"
        if self.declared.attention_scale is not None and "query_norm" in self.names:
            yield "attention_scale is given, but a norm of queries would undo it"
        unknown = unknown_arguments(self.declared, self.model)
        if unknown:
            hint = "" if "patch" in self.names else ", or masked=False if it never sees padding"
            yield f"forward takes {', '.join(unknown)} too: say with answer= how the model is called{hint}"
        for part in _MATRICES:
            tensor = self.tensor(part)
            if tensor is not None and tensor.dim() < 2:
                yield f"{part} is a tensor {list(tensor.shape)}, but a matrix is expected"
        heads, out = self.declared.heads, self.tensor("out")
        if heads is None:
            yield "the number of heads is not known: give heads="
        elif out is not None and (heads < 1 or out.shape[-1] % heads):
            yield f"heads is {heads}, but the {out.shape[-1]} columns of out cannot be divided among them"

    # --- sources of the canonical parameters -----------------------------------------------------------------

    def _weights(self) -> Iterator[tuple[str, Source]]:
        """Yield (canonical parameter, source) for every part that is declared and that the model has."""
        scale = self.declared.embedding_scale
        positions = f"stem.position{'s' if 'words' in self.names else ''}"
        for part, place in self.names.items():
            if isinstance(place, Tensor):
                yield _TENSORS.get(part, positions), self._from_tensor(place)
                continue
            weights = [self._weight(path) for path in paths(place)]
            names = [name for name in weights if name is not None]
            if len(names) < len(weights):
                continue
            if part in _WITH_BIAS:
                yield from self._with_bias(part, str(place), names[0])
            elif part in _TENSORS:
                yield _TENSORS[part], as_stored(names[0])
            elif part == "words":
                yield "stem.words", Source((names[0],), lambda tensors, shape: (tensors[0] * scale).reshape(shape))
            elif part == "position":
                yield positions, Source((names[0],), _first_rows)
            elif part == "qkv":
                yield f"{_BLOCK}.attention.qkv", Source(tuple(names), self._heads)
                biases = [self._bias(path) for path in paths(place)]
                if any(biases):
                    yield f"{_BLOCK}.attention.qkv_bias", self._biases(names, biases)
            elif part in ("patch", "out"):
                patch = part == "patch"
                canonical = "stem.patch" if patch else f"{_BLOCK}.attention.out"
                yield canonical, Source((names[0],), self._patches) if patch else out_by_head(names[0])
                bias = self._bias(str(place))
                if bias is not None:
                    yield f"{canonical}_bias", as_stored(bias)

    def _with_bias(self, part: Part, path: str, weight: str) -> Iterator[tuple[str, Source]]:
        """Yield weight and bias of a linear layer or a norm; a bias that the model does not have is zero."""
        bias, gate = self._bias(path), self.names.get("gate") if part == "up" else None
        gates = (self._weight(gate), self._bias(gate)) if isinstance(gate, str) else (None, None)

        def stored(name: str, gate_name: str | None) -> Source:
            if part in ("query_norm", "key_norm"):
                return Source((name,), lambda tensors, shape: tensors[0][..., self._order(shape[-1])].reshape(shape))
            return as_stored(name) if gate_name is None else concatenated(gate_name, name)

        yield f"{_WITH_BIAS[part]}.weight", stored(weight, gates[0])
        zeros = Source((weight,), lambda tensors, shape: tensors[0].new_zeros(shape))
        yield f"{_WITH_BIAS[part]}.bias", zeros if bias is None else stored(bias, gates[1])

    def _from_tensor(self, tensor: Tensor) -> Source:
        return Source((), lambda tensors, shape: _first_rows([tensor.to(self._needed("norm1"))], shape))

    def _patches(self, tensors: Sequence[Tensor], shape: torch.Size) -> Tensor:
        _, width, channels, height, wide = shape
        if tensors[0].dim() == 2 and self.declared.patch_order == "hwc":
            return tensors[0].reshape(width, height, wide, channels).permute(0, 3, 1, 2)
        return tensors[0].reshape(shape)

    def _heads(self, tensors: Sequence[Tensor], shape: torch.Size) -> Tensor:
        """Return query, key and value of every head, `[H, 3, d_k, …]`, from rows in the declared order."""
        heads = qkv_by_head(order=self._order, layout=self.declared.head_layout).read(tensors, shape)
        if self.declared.attention_scale is None:
            return heads
        factor = self.declared.attention_scale * shape[2] ** 0.5  # folded into the queries
        return torch.cat([heads[:, :1] * factor, heads[:, 1:]], dim=1)

    def _order(self, head_dim: int) -> list[int]:
        """Return the order in which to read query and key rows, so that rotated pairs are the halves of a head."""
        if self.declared.rotary is None or self.declared.rotary_pairs == "halves":
            return [*range(head_dim)]
        return [*range(0, head_dim, 2), *range(1, head_dim, 2)]

    def _biases(self, weights: Sequence[str], biases: Sequence[str | None]) -> Source:
        """Return the source of the query, key and value biases; a missing one is zero."""
        names = tuple(bias or weight for bias, weight in zip(biases, weights, strict=True))

        def read(tensors: Sequence[Tensor], shape: torch.Size) -> Tensor:
            rows = [x if bias else x.new_zeros(len(x)) for x, bias in zip(tensors, biases, strict=True)]
            return self._heads(rows, shape)

        return Source(names, read)

    # --- the configuration -----------------------------------------------------------------------------------

    def config(self, model: nn.Module, num_labels: int | None) -> EnsembleConfig:
        """Build the canonical configuration from the declaration and the shapes of the tensors."""
        heads, down, up, out = self.declared.heads or 1, *(self._needed(part) for part in ("down", "up", "out"))
        rows = up.shape[0] * (2 if "gate" in self.names else 1)
        rotary = self.declared.rotary
        kind, eps = self._norm(("norm1", "norm2", "query_norm", "key_norm"))
        encoder = EncoderConfig(
            width=self._needed("norm1").numel(),
            layers=self.layers,
            heads=heads,
            head_dim=out.shape[1] // heads,
            mlp_width=down.shape[1],
            activation=self.declared.activation or "gelu",
            gated=rows == 2 * down.shape[1],
            norm=kind,
            norm_eps=eps,
            norm_first=self.declared.norm_first is not False,
            qk_norm="query_norm" in self.names,
            qkv_bias=any(self._bias(path) is not None for path in paths(self.names["qkv"])),
            out_bias=self._bias(str(self.names["out"])) is not None,
            mlp_bias=any(self._bias(str(self.names[part])) is not None for part in ("up", "down")),
            layer_scale="scale1" in self.names,
            rotary=RotaryConfig(rotary) if isinstance(rotary, int | float) else rotary,
            **self.rates,  # type: ignore[arg-type]
        )
        stem = self._text_stem() if "words" in self.names else self._patch_stem()
        return EnsembleConfig(stem, encoder, self._readout(num_labels), encoder.all_heads())

    def _needed(self, part: Part) -> Tensor:
        tensor = self.tensor(part)
        assert tensor is not None, part  # checked by `architecture`
        return tensor

    def _norm(self, parts: Sequence[Part]) -> tuple[NormKind, float]:
        """Return the kind and epsilon that the norms of these parts share; raise if they differ."""
        modules = dict(self.model.named_modules())
        kinds, epsilons = set[NormKind](), set[float]()
        for part in (name for name in parts if name in self.names):
            for layer in range(self.layers):
                module: Any = modules.get(str(self.names[part]).replace("{i}", str(layer)))
                kinds.add("rms" if isinstance(module, nn.RMSNorm) else self.declared.norm_kind)
                eps = getattr(module, "eps", self.declared.norm_eps)
                if isinstance(module, nn.RMSNorm) and eps is None:
                    eps = torch.finfo(self._needed(part).dtype).eps
                epsilons |= set() if eps is None else {float(eps)}
        if len(epsilons) != 1 or len(kinds) != 1:
            problem = f"are of the kinds {sorted(kinds)}, with eps {sorted(epsilons)}; give norm_eps= if there is none"
            raise ConversionError(f"the norms {', '.join(parts)} must agree, but {problem}")
        return kinds.pop(), epsilons.pop()

    def _text_stem(self) -> TextStemConfig:
        words, position, segments = self._needed("words"), self.tensor("position"), self.tensor("segments")
        most = None if position is None else position.numel() // position.shape[-1]
        rows = self.declared.max_tokens or most
        if rows is None:
            raise ConversionError("the length of texts is not known; give max_tokens=")
        if most is not None and rows > most:
            raise ConversionError(f"max_tokens is {rows}, but there are {most} positions; lower it")
        return TextStemConfig(
            vocabulary=words.shape[0],
            positions=rows,
            embedding_width=words.shape[1],
            segments=0 if segments is None else segments.shape[0],
            project="embedding_projection" in self.names,
            **self._embedded(),
        )

    def _patch_stem(self) -> PatchStemConfig:
        patch = self._needed("patch")
        (rows, prefix), size = self._rows(), self._patch_size(patch)
        grid = self._square_grid(rows, prefix) if self.declared.image_size is None else self._known_grid(size)
        spare = rows - grid[0] * grid[1]
        if spare < 0 and self.tensor("position") is not None:
            raise ConversionError(f"{rows} positions are too few for {grid[0]}x{grid[1]} patches")
        return PatchStemConfig(
            patch_size=size,
            grid=grid,
            channels=patch[0].numel() // (size[0] * size[1]),
            patch_bias=self._bias(str(self.names["patch"])) is not None,
            class_token="class_token" in self.names,
            registers=prefix - int("class_token" in self.names),
            position_prefix=max(0, min(spare, prefix)),
            resample=self.declared.resample,
            **self._embedded(),
        )

    def _square_grid(self, rows: int, prefix: int) -> tuple[int, int]:
        """Return the square of patches that the positions are for, with as many tokens before it as possible."""
        if self.tensor("position") is None:
            raise ConversionError("the size of images is not known; give image_size=")
        for patches in range(rows - min(prefix, rows - 1), rows + 1):
            if math.isqrt(patches) ** 2 == patches:
                return math.isqrt(patches), math.isqrt(patches)
        problem = f"{rows} positions are no square of patches with up to {prefix} tokens before it"
        raise ConversionError(f"{problem}; give image_size=(height, width)")

    def _known_grid(self, patch: tuple[int, int]) -> tuple[int, int]:
        """Return the grid of patches of a declared image size."""
        (height, width), (high, wide) = pair(self.declared.image_size), patch
        if height % high or width % wide:
            raise ConversionError(f"image_size is {(height, width)}; give a multiple of the patches of {patch}")
        return height // high, width // wide

    def _embedded(self) -> dict[str, Any]:
        """Return the settings that image and text stems share."""
        common = {"learned_positions": "position" in self.names, "dropout": self.declared.dropout or 0.0}
        if "embedding_norm" not in self.names:
            return {**common, "norm": False}
        kind, eps = self._norm(("embedding_norm",))
        return {**common, "norm": True, "norm_kind": kind, "norm_eps": eps}

    def _rows(self) -> tuple[int, int]:
        """Return the number of positions, and of tokens before the patches."""
        position, registers = self.tensor("position"), self.tensor("registers")
        count = 0 if registers is None else registers.numel() // registers.shape[-1]
        return 0 if position is None else position.numel() // position.shape[-1], count + ("class_token" in self.names)

    def takes(self, size: tuple[int, int]) -> bool:
        """Whether the number of positions fits images of this size."""
        patch, (rows, prefix) = self.tensor("patch"), self._rows()
        if patch is None or patch.dim() not in (2, 4):
            return False
        height, width = self._patch_size(patch)
        spare = rows - size[0] // height * (size[1] // width)
        return "position" not in self.names or 0 <= spare <= prefix

    def _patch_size(self, patch: Tensor) -> tuple[int, int]:
        """Return the patch size: the kernel of a convolution; for a linear layer a square with 3 channels, or 1."""
        if patch.dim() == 4:
            return int(patch.shape[2]), int(patch.shape[3])
        numbers = patch.shape[1]
        sides = [math.isqrt(numbers // channels) for channels in (3, 1) if numbers % channels == 0]
        side = next((side for side in sides if numbers in (3 * side**2, side**2)), None)
        if side is None:
            raise refuse(f"a patch of {numbers} numbers is not a square with 1 or 3 channels")
        return side, side

    def _readout(self, num_labels: int | None) -> ReadoutConfig:
        classifier = self.tensor("classifier")
        classes = number_of_classes(0 if classifier is None else len(classifier), num_labels)
        kind, eps = self._norm(("norm",)) if "norm" in self.names else (None, 1e-6)
        blocks = self._norm(("norm1",))[0]
        if kind not in (None, blocks):
            raise refuse(f"norm is of the kind {kind!r}, but those of the blocks are of {blocks!r}")
        return ReadoutConfig(
            pool=self.declared.pool,
            pool_prefix=self.declared.pool_prefix,
            num_classes=classes,
            norm="none" if "norm" not in self.names else "pooled" if self.declared.norm_after_pool else "tokens",
            norm_eps=eps,
            hidden=self.declared.pooler_activation if "pooler" in self.names else None,
            bias=classifier is None or self._bias(str(self.names["classifier"])) is not None,
        )


def _first_rows(tensors: Sequence[Tensor], shape: torch.Size) -> Tensor:
    """Return the first rows of a table, as many as the shape needs, ignoring axes of length one."""
    if tensors[0].shape[-1:] != shape[-1:]:
        raise RuntimeError(f"shape {list(tensors[0].shape)} is not [..., {shape[-1]}]")
    return tensors[0].reshape(-1, shape[-1])[: shape[-2]].reshape(shape)


def with_size(declaration: Declaration, model: nn.Module, size: tuple[int, int] | None) -> Declaration:
    """Set the image size of a declaration that has none, if the number of positions fits."""
    if size is None or declaration.image_size is not None or "patch" not in declaration.names:
        return declaration
    return replace(declaration, image_size=size) if _Reading(declaration, model).takes(size) else declaration

"""Tables of other libraries' architectures, and the translation of weights by them."""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError, ConversionError
from ..model.config import Activation, EncoderConfig, EnsembleConfig, NormKind, PatchStemConfig, TextStemConfig
from ..model.ensemble import shapes_of
from ..model.metadata import Metadata
from ..settings import nearest

# What someone can do whose model cannot be converted.
WAYS = (
    "Three ways on: say where its parts are (he.Declaration, docs/how-to/own_model.md), take a model that "
    "docs/models.md lists, or keep yours and calibrate its own outputs"
)

# --- tables --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """Where to find a canonical tensor in a foreign state dict, and how it is laid out there."""

    names: tuple[str, ...]  # foreign tensors it is built from, with `{i}` for the layer
    read: Callable[[Sequence[Tensor], torch.Size], Tensor]  # (tensors in the order of `names`, shape) -> tensor


NamedTensors = Mapping[str, Tensor]  # `pixel_values`, or `input_ids` with `attention_mask` and `token_type_ids`
Entry = str | Source
Entries = Entry | tuple[Entry, ...]
Weights = Mapping[str, Entries]


def as_stored(name: str) -> Source:
    """The same tensor; axes of length one may be added or removed."""
    return Source((name,), lambda tensors, shape: _reshaped(tensors[0], shape))


def transposed(name: str) -> Source:
    """A matrix stored as `[in, out]`."""
    return Source((name,), lambda tensors, shape: _reshaped(tensors[0].t(), shape))


def concatenated(*names: str) -> Source:
    """Several tensors, concatenated along their first axis."""
    return Source(names, lambda tensors, shape: _reshaped(torch.cat(list(tensors)), shape))


Order = Callable[[int], list[int]]  # head width -> the order in which the rows of a head are read
POOLING = "readout.map.attention."  # place of attention pooling, instead of the attention of the blocks


def attention(out: str, *qkv: str, order: Order | None = None, place: str = "encoder.layers.{i}.attention.") -> Weights:
    """Declare the attention of a layer, stored in the layout of `torch.nn.Linear`.

    In `out`, `[d, H·d_k]`, a head is a block of columns; `qkv` are three tensors, each with its heads in order, or
    fewer that are stacked to `[3·H·d_k, d]` (`*` stands for "weight" and "bias"). `order` is that of the query and key
    rows of a head, if pairs that rotate together are not its halves.
    """
    weights, biases = (tuple(name.replace("*", leaf) for name in qkv) for leaf in ("weight", "bias"))
    return {
        f"{place}qkv": qkv_by_head(*weights, order=order),
        f"{place}qkv_bias": qkv_by_head(*biases, order=order),
        f"{place}out": out_by_head(f"{out}.weight"),
        f"{place}out_bias": f"{out}.bias",
    }


def block(projections: Sequence[str], norms: tuple[str, str], mlp: tuple[Entries, Entries]) -> Weights:
    """Declare a block: the arguments of `attention`, both norms, and the first and last layer of the MLP."""
    layer = "encoder.layers.{i}."
    parts: Weights = dict(zip(("norm1", "norm2", "mlp.up", "mlp.down"), (*norms, *mlp), strict=True))
    return {**attention(*projections), **{layer + part: entry for part, entry in parts.items()}}


def out_by_head(name: str) -> Source:
    """The output projection `[d, H·d_k]`, split by head into `[H, d_k, d]`."""
    return Source((name,), lambda tensors, shape: tensors[0].t().reshape(shape))


def qkv_by_head(*names: str, order: Order | None = None, layout: str = "qkv h d") -> Source:
    """Queries, keys and values of all heads, or biases of queries and values only, in one tensor or several.

    `layout` is the order of the rows, outermost axis first; with several tensors, or a layout without `qkv`, the `qkv`
    axis is outermost.
    """

    def read(tensors: Sequence[Tensor], shape: torch.Size) -> Tensor:
        sizes = {"h": shape[0], "qkv": shape[1], "d": shape[2]}
        axes = layout.split()
        if len(tensors) > 1 or "qkv" not in axes:
            axes = ["qkv", *(axis for axis in axes if axis != "qkv")]
        rows = torch.cat(list(tensors)).unflatten(0, [sizes[axis] for axis in axes])
        heads = rows.movedim([axes.index(axis) for axis in sizes], (0, 1, 2))  # [H, P, d_k, …]
        if order is None:
            return heads
        return torch.cat([heads[:, :-1, order(shape[2])], heads[:, -1:]], dim=1)  # values are not rotated

    return Source(names, read)


def _reshaped(tensor: Tensor, shape: torch.Size) -> Tensor:
    if [n for n in tensor.shape if n != 1] != [n for n in shape if n != 1]:
        raise RuntimeError(f"shape {list(tensor.shape)} is not {list(shape)}")
    return tensor.reshape(shape)


@dataclass(frozen=True)
class Architecture:
    """The table of one foreign architecture.

    `weights` maps a canonical parameter name or prefix to a foreign name, prefix or `Source`; of a tuple, the first
    that the foreign model has. `config` gives the canonical configuration of a live model: sizes follow from the
    tensors that were `Found`, only what these do not show is read from the model; its second argument is the number of
    classes of a new classifier. `answer` returns the logits `[B, C]` of the live model, or its pooled features if the
    classifier is new (third argument True).
    """

    name: str  # library and model, as users call it
    classes: tuple[str, ...]  # qualified names of the foreign classes it covers; none for a user's own declaration
    config: Callable[["Found", int | None], EnsembleConfig]
    weights: Weights
    ignored: tuple[str, ...] = ()  # prefixes of foreign tensors that do not affect the logits
    metadata: Callable[[nn.Module], Metadata] = lambda model: Metadata()  # read from the live model
    answer: Callable[[nn.Module, NamedTensors, bool], Tensor] = lambda model, inputs, fresh: model(*inputs.values())
    masks: bool = True  # whether a text model gets an attention mask
    variant: Callable[[nn.Module], Weights] = lambda model: {}  # overrides of `weights` for this model
    rounds: bool = False  # whether weights are computed with, and so rounded again in half precision


@dataclass(frozen=True)
class DualArchitecture:
    """A foreign dual encoder: its classes, and for each tower its path, or a table if its parts are the model's own."""

    name: str
    classes: tuple[str, ...]
    image: str | Architecture
    text: str | Architecture


def below(prefix: str, weights: Weights) -> Weights:
    """The same declaration for a model stored under `prefix`."""

    def moved(entry: Entry) -> Entry:
        if isinstance(entry, str):
            return prefix + entry
        return replace(entry, names=tuple(prefix + name for name in entry.names))

    return {name: tuple(moved(alternative) for alternative in _alternatives(entry)) for name, entry in weights.items()}


def either(*declarations: Weights) -> Weights:
    """Declare the same tensors under several names, of which a model uses one."""
    return {name: tuple(entry for w in declarations for entry in _alternatives(w[name])) for name in declarations[0]}


def _alternatives(entry: Entries) -> tuple[Entry, ...]:
    return entry if isinstance(entry, tuple) else (entry,)


def qualified_name(model: object) -> str:
    """Module and class name of an object's type, as in declarations."""
    return f"{type(model).__module__}.{type(model).__qualname__}"


# --- a model seen through its table -----------------------------------------------------------------------------


class Found:
    """A live model through its table: where each canonical parameter is, and the sizes that follow from the shapes."""

    def __init__(self, architecture: Architecture, model: nn.Module) -> None:
        self.architecture = architecture
        self.model: Any = model
        self.weights = {**architecture.weights, **architecture.variant(model)}
        stored = {**dict(model.named_buffers()), **model.state_dict()}
        self.tensors: dict[str, Tensor | Callable[[], Tensor]]  # or what reads one from a file, when it is needed
        self.tensors = {name: tensor.detach() for name, tensor in stored.items()}

    def source(self, name: str) -> Source | None:
        """Return the declared source of a canonical parameter: its own entry, or that of its longest prefix."""
        parts = name.split(".")
        layer = parts[2] if parts[0] == "encoder" else ""
        head = ".".join(["encoder", "layers", "{i}", *parts[3:]]) if layer else name
        tail = ""
        while head not in self.weights:
            head, _, leaf = head.rpartition(".")
            tail = f".{leaf}{tail}"
            if not head:
                return None
        entries = [
            as_stored(entry + tail) if isinstance(entry, str) else entry for entry in _alternatives(self.weights[head])
        ]
        sources = [replace(entry, names=tuple(path.replace("{i}", layer) for path in entry.names)) for entry in entries]
        return next((source for source in sources if self.tensors.keys() >= set(source.names)), sources[0])

    def parts(self, name: str) -> list[Tensor]:
        """Return the foreign tensors of a canonical parameter; none if the model does not have it."""
        source = self.source(name)
        names = () if source is None else source.names
        return [self.tensor(path) for path in names] if self.tensors.keys() >= set(names) else []

    def tensor(self, path: str) -> Tensor:
        """Return a foreign tensor."""
        tensor = self.tensors[path]
        return tensor if isinstance(tensor, Tensor) else tensor()

    @torch.inference_mode(False)  # even there, the result is trainable
    @torch.no_grad()
    def read(self, name: str, shape: torch.Size) -> Tensor:
        """Return a canonical parameter: contiguous, and with memory of its own."""
        source = self.source(name)
        assert source is not None
        tensors = [self.tensor(path) for path in source.names]
        result = source.read(tensors, shape).reshape(shape)
        theirs = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        shared = result.is_inference() or result.untyped_storage().data_ptr() in theirs
        return result.clone(memory_format=torch.contiguous_format) if shared else result.contiguous()

    def release(self) -> None:
        """Empty the parameters of the model, which can no longer run, so that only `tensors` still hold weights."""
        for parameter in self.model.parameters():
            parameter.data = parameter.new_empty(0)

    def has(self, name: str) -> bool:
        """Whether the model has a canonical parameter."""
        return bool(self.count(name))

    def count(self, name: str) -> int:
        """Return how many numbers a canonical parameter has; 0 if the model does not have it."""
        return sum(tensor.numel() for tensor in self.parts(name))

    def rows(self, name: str) -> int:
        """Return the number of rows of a table of embeddings; 0 if there is none."""
        return sum(tensor.numel() // tensor.shape[-1] for tensor in self.parts(name))

    def norm(self, name: str) -> tuple[NormKind, float]:
        """Return the kind and epsilon of a norm."""
        source = self.source(f"{name}.weight")
        assert source is not None
        norm = self.model.get_submodule(source.names[0].rpartition(".")[0])
        if not type(norm).__name__.startswith("LayerNorm"):
            return "rms", float(norm.eps)
        return "layer" if norm.bias is not None else "layer_no_bias", float(norm.eps)

    def encoder(self, heads: int, **settings: Any) -> EncoderConfig:
        """Read the blocks; `settings` are what the tensors of the first one do not show."""
        block = "encoder.layers.0."
        out, down = (self.parts(block + part) for part in ("attention.out", "mlp.down.weight"))
        if not out or not down:
            raise ConversionError(f"there is no first block with the parameters of its table. {WAYS}")
        width, inside, mlp_width = len(out[0]), out[0].shape[-1], down[0].shape[-1]
        if heads < 1 or inside % heads:
            raise ConversionError(f"heads is {heads}; give the number that divides the {inside} columns of out")
        if "norm" not in settings:
            settings["norm"], settings["norm_eps"] = self.norm(f"{block}norm2")
        if "layers" not in settings:
            settings["layers"] = next(i for i in count() if not self.has(f"encoder.layers.{i}.norm2.weight"))
        has: Callable[[str], bool] = lambda part: self.has(block + part)  # noqa: E731
        return EncoderConfig(
            width=width,
            heads=heads,
            head_dim=inside // heads,
            mlp_width=mlp_width,
            gated=self.count(f"{block}mlp.up.weight") == 2 * width * mlp_width,
            qk_norm=has("attention.query_norm.weight"),
            qkv_bias=has("attention.qkv_bias"),
            key_bias=self.count(f"{block}attention.qkv_bias") != 2 * inside,
            out_bias=has("attention.out_bias"),
            mlp_bias=has("mlp.down.bias"),
            up_bias=has("mlp.up.bias") or not has("mlp.down.bias"),
            mlp_norm=has("mlp.norm.weight"),
            layer_scale=has("attention.scale"),
            **settings,
        )

    def patch_stem(
        self, image_size: tuple[int, int], patch_size: tuple[int, int] | None = None, **settings: Any
    ) -> PatchStemConfig:
        """Read the stem of an image model; `settings` are what the tensors do not show."""
        shape = self.parts("stem.patch")[0].shape  # [d, channels, height, width]
        patch = patch_size or (shape[2], shape[3])
        grid = image_size[0] // patch[0], image_size[1] // patch[1]
        positions = self.rows("stem.position")
        if not all(grid) or 0 < positions < grid[0] * grid[1]:
            raise ConversionError(f"{positions} positions do not fit {grid[0]}x{grid[1]} patches; give image_size=")
        return PatchStemConfig(
            patch_size=patch,
            grid=grid,
            channels=shape[1:].numel() // (patch[0] * patch[1]),
            patch_bias=self.has("stem.patch_bias"),
            class_token=self.has("stem.class_token"),
            distillation_token=self.has("stem.distillation_token"),
            registers=self.rows("stem.register_tokens"),
            position_prefix=max(0, positions - grid[0] * grid[1]),
            learned_positions=bool(positions),
            **{**self._embedding_norm(), **settings},
        )

    def text_stem(self, **settings: Any) -> TextStemConfig:
        """Read the stem of a text model; its `positions` are a setting if they are not learned."""
        words = self.parts("stem.words")[0]
        sizes = {
            "vocabulary": len(words),
            "embedding_width": words.shape[1],
            "segments": self.rows("stem.segments"),
            "project": self.has("stem.project.weight"),
            "learned_positions": self.has("stem.positions"),
            "positions": self.rows("stem.positions"),
        }
        return TextStemConfig(**{**sizes, **self._embedding_norm(), **settings})

    def _embedding_norm(self) -> dict[str, Any]:
        if not self.has("stem.norm.weight"):
            return {"norm": False}
        kind, eps = self.norm("stem.norm")
        return {"norm": True, "norm_kind": kind, "norm_eps": eps}

    def classifier(self, num_labels: int | None, features: int | None = None) -> dict[str, Any]:
        """Return the settings of a readout that follow from a linear classifier, or from the new one to be added.

        `features` is their number, by default that of the columns of the classifier's matrix.
        """
        weight = self.parts("readout.classifier.weight")
        classes = weight[0].numel() // (features or weight[0].shape[-1]) if weight else 0
        bias = not classes or self.has("readout.classifier.bias")
        if classes == 1 and num_labels is None:
            return {"num_classes": 2, "bias": bias, "outputs": "odds"}
        return {"num_classes": number_of_classes(classes, num_labels), "bias": bias}


# --- translation -------------------------------------------------------------------------------------------

# Parameters that may be missing if the user requested a new classifier.
_MAY_BE_FRESH = ("readout.hidden", "readout.classifier", "readout.distillation_classifier")
_SHOWN = 8  # maximum number of problems in an error message
_DTYPES = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
MERGE = "Merge adapters first: give the peft model (PeftModel.from_pretrained), or merge_and_unload() of it"


def translate(
    found: Found, config: EnsembleConfig, may_be_fresh: bool = False, owned: bool = False
) -> tuple[dict[str, Tensor], list[str]]:
    """Return the canonical state dict, and the names of frozen parameters.

    A parameter is frozen if it does not require gradients in the model while others do. No tensor shares memory with
    the model, whose own ones are dropped after their last use if they are `owned`. A new classifier is drawn with a
    fixed seed. Every canonical parameter must be found, and every foreign tensor must be used or be declared as
    ignored: anything in a model that this library does not know is an error, never a silent difference.
    """
    model = found.model
    trains = {name: parameter.requires_grad for name, parameter in model.named_parameters(remove_duplicate=False)}
    like, generator = next(model.parameters()), torch.Generator("cpu").manual_seed(0)
    state: dict[str, Tensor] = {}
    dtypes = set[torch.dtype]()
    frozen: list[str] = []
    missing: dict[str, str] = {}  # foreign name → canonical parameter that needs it
    misfits: list[str] = []
    shapes = shapes_of(config)
    sources = {name: found.source(name) for name in shapes}
    uses = Counter(path for source in sources.values() if source is not None for path in source.names)
    used = set(uses)
    for name, shape in shapes.items():
        source = sources[name]
        absent = {name} if source is None else set(source.names) - found.tensors.keys()
        if absent and may_be_fresh and name.startswith(_MAY_BE_FRESH):
            drawn = torch.zeros(shape, device="cpu", dtype=torch.float32)
            if not name.endswith("bias"):
                nn.init.trunc_normal_(drawn, std=0.02, generator=generator)
            state[name] = drawn.to(like)
        elif absent or source is None:
            missing |= dict.fromkeys(absent, name)
        else:
            if any(trains.values()) and not any(trains.get(path, True) for path in source.names):
                frozen.append(name)
            try:
                state[name] = found.read(name, shape)
            except (RuntimeError, IndexError) as error:
                misfits.append(f"{list(source.names)} cannot become the canonical {name} {list(shape)}: {error}")
            dtypes.update(found.tensor(path).dtype for path in source.names)  # some are joined
            uses.subtract(source.names)
            for path in source.names if owned else ():
                if not uses[path]:
                    found.tensors.pop(path, None)
    ignored = found.architecture.ignored
    unused = [name for name in model.state_dict() if name not in used and not name.startswith(ignored)]
    problems = [f"no tensor {path} for {name}{perhaps_meant(path, unused)}" for path, name in missing.items()] + misfits
    require_all_used(problems, unused)
    dtypes |= {tensor.dtype for tensor in state.values()}
    if len(dtypes) > 1 or not dtypes <= _DTYPES:
        types = sorted(map(str, dtypes))
        raise ConversionError(f"the parameters are {types}; give one type for all, not quantised: model.float()")
    return state, frozen


def require_all_used(problems: Sequence[str], unused: Sequence[str]) -> None:
    """Raise if a model does not fit its table, and list the problems and the tensors that are left over at once."""
    by_pattern = {re.sub(r"\d+", "#", name): name for name in sorted(unused, reverse=True)}  # numbers apart
    left = f"the model has parameters that have no canonical place: {sorted(by_pattern.values())[:_SHOWN]}"
    faults = [*problems[:_SHOWN], *([left] if unused else [])]
    if faults:
        raise ConversionError(f"{'; '.join(faults)}. {MERGE if any('lora_' in name for name in unused) else WAYS}")


def perhaps_meant(name: str, known: Collection[str]) -> str:
    """Return ` (did you mean …?)` with the most similar known name, or an empty string if none is similar."""
    similar = nearest(name, known)
    return f" (did you mean {similar[0]}?)" if similar else ""


# --- helpers that tables share -------------------------------------------------------------------------------

# Names of modules and functions, and names in the configurations of transformers.
ACTIVATIONS: dict[Activation, tuple[str, ...]] = {
    "gelu": ("GELU", "GELUActivation", "gelu", "gelu_python"),
    "gelu_tanh": (
        *("GELUTanh", "PytorchGELUTanh", "GELUTanhActivation", "NewGELUActivation", "FastGELUActivation"),
        *("gelu_accurate", "gelu_fast", "gelu_new", "gelu_python_tanh", "gelu_pytorch_tanh"),
    ),
    "quick_gelu": ("QuickGELU", "QuickGELUActivation", "quick_gelu"),
    "relu": ("ReLU", "relu"),
    "silu": ("SiLU", "SiLUActivation", "silu", "swish"),
}


def refuse(variant: str, way: str = WAYS) -> ConversionError:
    """Return the error for a variant that the canonical encoder cannot represent without changing predictions."""
    return ConversionError(f"{variant}, which an ensemble here cannot compute. {way}")


@contextmanager
def prefix_errors(name: str) -> Iterator[None]:
    """Prefix errors raised inside with the name of the architecture, so that callees need not know it.

    A part or setting that the table does not know is one too: the model was changed, or is of another release.
    """
    try:
        yield
    except (ConversionError, ConfigError) as error:
        raise ConversionError(f"{name}: {error}") from error.__cause__
    except (AttributeError, LookupError) as error:
        raise ConversionError(f"{name}: its table does not fit: {error!r}. {WAYS}") from error


def activation_of(module: Any) -> Activation:
    """Return the activation that a module or function computes, or that a string names."""
    name = module if isinstance(module, str) else getattr(module, "__name__", type(module).__name__)
    if name == "GELU" and getattr(module, "approximate", "none") == "tanh":
        return "gelu_tanh"
    for activation, names in ACTIVATIONS.items():
        if name in names:
            return activation
    raise refuse(f"it has the activation {name!r}, not one of {list(ACTIVATIONS)}")


def dropout_rate(module: Any) -> float:
    """Rate of a dropout (or drop-path) module; 0 for one of another kind, such as an identity."""
    return float(getattr(module, "p", None) or getattr(module, "drop_prob", None) or 0.0)


def pair(size: Any) -> tuple[int, int]:
    """Height and width from a number or a pair."""
    return (int(size), int(size)) if isinstance(size, int) else (int(size[0]), int(size[1]))


def number_of_classes(classes: int, num_labels: int | None) -> int:
    """Return the number of classes: the model's own, or `num_labels` if it has no classifier."""
    if num_labels is not None and num_labels < 2:
        raise ConversionError(f"num_labels must be at least 2, got {num_labels}")
    if classes and num_labels not in (None, classes):
        raise ConversionError(
            f"the model already has {classes} classes, but num_labels={num_labels} was given; leave it out, or remove "
            "the classifier first (timm: model.reset_classifier(0); transformers: give model.base_model)"
        )
    return classes or num_labels or 0

"""How any library's model becomes an Ensemble: declarations, translation, the probe that compares."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..errors import ConversionError
from ..model.config import Activation, EnsembleConfig
from ..model.ensemble import Ensemble
from ..model.metadata import Metadata


class Source(Protocol):
    """Where a canonical tensor lies in a foreign state dict, and how it is laid out there."""

    @property
    def names(self) -> tuple[str, ...]:
        """Foreign names it is made from, with `{i}` for the layer."""

    def read(self, tensors: tuple[Tensor, ...], shape: torch.Size) -> Tensor:
        """The canonical tensor of `shape`, from the foreign tensors in the order of `names`."""


@dataclass(frozen=True)
class Copy:
    """The same tensor; axes of length one may come or go."""

    name: str

    @property
    def names(self) -> tuple[str, ...]:
        """The one foreign name."""
        return (self.name,)

    def read(self, tensors: tuple[Tensor, ...], shape: torch.Size) -> Tensor:
        """Add or drop axes of length one."""
        (tensor,) = tensors
        if [n for n in tensor.shape if n != 1] != [n for n in shape if n != 1]:
            raise ConversionError(f"{self.name} has shape {list(tensor.shape)}, expected {list(shape)}")
        return tensor.reshape(shape)


@dataclass(frozen=True)
class Transposed:
    """A matrix stored as `[in, out]`."""

    name: str

    @property
    def names(self) -> tuple[str, ...]:
        """The one foreign name."""
        return (self.name,)

    def read(self, tensors: tuple[Tensor, ...], shape: torch.Size) -> Tensor:
        """Swap the two axes."""
        return Copy(self.name).read((tensors[0].t(),), shape)


@dataclass(frozen=True)
class FusedQKV:
    """Query, key and value in one tensor, each block holding its heads in order: `[3·H·d_k, d]` or `[3·H·d_k]`."""

    name: str

    @property
    def names(self) -> tuple[str, ...]:
        """The one foreign name."""
        return (self.name,)

    def read(self, tensors: tuple[Tensor, ...], shape: torch.Size) -> Tensor:
        """Put a head's query, key and value side by side: `[H, 3, d_k, …]`."""
        heads, three, head_dim = shape[:3]
        blocks = tensors[0].reshape(three, heads, head_dim, *shape[3:])
        return blocks.transpose(0, 1).reshape(shape)


@dataclass(frozen=True)
class SplitQKV:
    """Query, key and value in three tensors, each holding its heads in order."""

    query: str
    key: str
    value: str

    @property
    def names(self) -> tuple[str, ...]:
        """The three foreign names."""
        return self.query, self.key, self.value

    def read(self, tensors: tuple[Tensor, ...], shape: torch.Size) -> Tensor:
        """Put a head's query, key and value side by side: `[H, 3, d_k, …]`."""
        heads, _, *rest = shape
        return torch.stack([part.reshape(heads, *rest) for part in tensors], dim=1)


@dataclass(frozen=True)
class OutProjection:
    """The output projection `[d, H·d_k]`, a head being a block of columns."""

    name: str

    @property
    def names(self) -> tuple[str, ...]:
        """The one foreign name."""
        return (self.name,)

    def read(self, tensors: tuple[Tensor, ...], shape: torch.Size) -> Tensor:
        """Give each head its own matrix: `[H, d_k, d]`."""
        return tensors[0].t().reshape(shape)


@dataclass(frozen=True)
class Joined:
    """Several tensors put one after another along their first non-trivial axis."""

    parts: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The foreign names, in order."""
        return self.parts

    def read(self, tensors: tuple[Tensor, ...], shape: torch.Size) -> Tensor:
        """Concatenate along axis 0 of the parts, leading axes of length one dropped."""
        trailing = len(shape) - 1
        rows = [tensor.reshape(-1, *tensor.shape[tensor.dim() - trailing + 1 :]) for tensor in tensors]
        return torch.cat(rows).reshape(shape)


Entry = str | Source
Weights = Mapping[str, Entry | tuple[Entry, ...]]


@dataclass(frozen=True)
class Architecture:
    """One foreign architecture, declared.

    Attributes:
        name: Library and model, as users know it.
        classes: Qualified names of the foreign classes it covers.
        config: Reads the canonical configuration off a live model (`num_labels` asks for a fresh classifier
            of that size on a model without one); refuses what has no canonical form.
        weights: Canonical parameter name or prefix → foreign name, prefix, or `Source`; of several, in a
            tuple, the first that the foreign model has.
        ignored: Prefixes of foreign tensors that take no part in the logits.
        fresh: Canonical prefixes that keep their initial values when the foreign model lacks them, because
            the user asked for a new classifier.
        metadata: Labels and preprocessing the live model knows about itself.
    """

    name: str
    classes: tuple[str, ...]
    config: Callable[[nn.Module, int | None], EnsembleConfig]
    weights: Weights
    ignored: tuple[str, ...] = ()
    fresh: tuple[str, ...] = ("readout.classifier", "readout.distillation_classifier")
    metadata: Callable[[nn.Module], Metadata] = field(default=lambda model: Metadata())


def qualified_name(model: object) -> str:
    """Module and class name of an object, as declarations write it."""
    return f"{type(model).__module__}.{type(model).__qualname__}"


# These attach hooks that move tensors between devices, collect outputs or switch gradients on.
_HARMLESS_HOOKS = ("accelerate.", "transformers.", "torch.nn.parallel.", "timm.models._features")
# These wrap a forward to compile it, to move tensors or to choose the precision.
_HARMLESS_WRAPPERS = ("accelerate.", "torch.")


def require_unaltered(wrapped: nn.Module, model: nn.Module, architecture: str) -> None:
    """Refuse a model whose predictions a hook or a replaced forward may change.

    Args:
        wrapped: The model as it was given, perhaps inside `torch.compile` or data parallelism.
        model: The model inside.
        architecture: Its name, for the message.
    """
    for name, module in wrapped.named_modules():
        for hook in _forward_hooks(module):
            if not _origin(hook).startswith(_HARMLESS_HOOKS):
                raise ConversionError(
                    f"{architecture}: {_place(name, module)} has the forward hook {_origin(hook)}."
                    f"{getattr(hook, '__qualname__', type(hook).__name__)}, which a converted model would not run; "
                    "remove it first with the remove() of the handle that registering it returned"
                )
    for name, module in model.named_modules():
        forward = vars(module).get("forward")
        if forward is not None and not _is_forward_of_class(forward, module):
            raise ConversionError(
                f"{architecture}: the forward of {_place(name, module)} was replaced on the object, and a converted "
                "model would compute what its class does; delete the attribute first (del module.forward)"
            )


def _forward_hooks(module: nn.Module) -> Iterator[Any]:
    yield from module._forward_pre_hooks.values()
    yield from module._forward_hooks.values()


def _is_forward_of_class(forward: Any, module: nn.Module) -> bool:
    """Whether a forward on the object is the one of its class, perhaps in the wrappers of known libraries."""
    original = type(module).forward
    while forward is not None:
        if getattr(forward, "__func__", forward) is original:
            return True
        if not _origin(forward).startswith(_HARMLESS_WRAPPERS):
            return False
        inner = getattr(forward, "_torchdynamo_orig_callable", None)
        forward = inner or getattr(forward, "__wrapped__", None)
    return False


def _origin(function: Callable[..., Any]) -> str:
    """The module a function was written in; `functools.wraps` cannot disguise it."""
    if isinstance(function, partial):
        return _origin(function.func)
    if isinstance(function, MethodType):
        return _origin(function.__func__)
    namespace = getattr(function, "__globals__", None)
    return str(type(function).__module__ if namespace is None else namespace["__name__"])


def _place(name: str, module: nn.Module) -> str:
    return f"{name or 'the model'} ({type(module).__name__})"


def translate(
    architecture: Architecture, model: nn.Module, config: EnsembleConfig, metadata: Metadata, fresh: bool
) -> Ensemble:
    """Build the canonical ensemble and fill each parameter from the place its declaration names.

    Every canonical parameter must be found, and every foreign tensor must be used or be declared as ignored:
    whatever a model has that this library does not know is an error, never a silent difference.
    """
    with torch.device("meta"):
        shapes = {name: parameter.shape for name, parameter in Ensemble(config).named_parameters()}
    foreign = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    used: set[str] = set()
    state: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        source = _source_of(architecture.weights, name, foreign)
        if source is None or not foreign.keys() >= set(source.names):
            if fresh and name.startswith(architecture.fresh):
                state[name] = _fresh(name, shape, foreign)
                continue
            missing = name if source is None else sorted(set(source.names) - foreign.keys())
            raise ConversionError(
                f"{architecture.name}: no tensor {missing} for the canonical parameter {name}; "
                "this variant of the architecture is not supported"
            )
        used.update(source.names)
        for part in source.names:
            require_finite(foreign[part], part, architecture.name)
        state[name] = source.read(tuple(foreign[part] for part in source.names), shape)
    left = sorted(name for name in foreign.keys() - used if not name.startswith(architecture.ignored))
    if left:
        raise ConversionError(
            f"{architecture.name}: the model has parameters that have no canonical place: {left[:8]}"
            f"{' …' if len(left) > 8 else ''}; this variant of the architecture is not supported"
        )
    return Ensemble.from_state(config, state, metadata)


def require_finite(tensor: Tensor, name: str, architecture: str) -> None:
    """Refuse values that no trained model has and that would turn every prediction into NaN."""
    if not tensor.is_meta and not tensor.isfinite().all():
        broken = int((~tensor.isfinite()).sum())
        raise ConversionError(
            f"{architecture}: {broken} of the {tensor.numel()} values of {name} are NaN or infinite; load weights of "
            "a training that did not diverge, and in a type whose range holds them"
        )


def _source_of(weights: Weights, name: str, foreign: Mapping[str, Tensor]) -> Source | None:
    """The declared source of a canonical parameter: its own entry, or that of the longest prefix.

    Where an entry gives alternatives, the first one that exists in the foreign model counts.
    """
    parts = name.split(".")
    layer = parts[2] if parts[0] == "encoder" else None
    pattern = name if layer is None else ".".join(["encoder", "layers", "{i}", *parts[3:]])
    head, tail = pattern, ""
    while head:
        entry = weights.get(head)
        if entry is not None:
            entries = entry if isinstance(entry, tuple) else (entry,)
            sources = [Copy(one + tail) if isinstance(one, str) else one for one in entries]
            sources = [source if layer is None else _at_layer(source, layer) for source in sources]
            return next((source for source in sources if foreign.keys() >= set(source.names)), sources[0])
        head, _, leaf = head.rpartition(".")
        tail = f".{leaf}{tail}"
    return None


def _at_layer(source: Source, layer: str) -> Source:
    """The source with `{i}` replaced by a layer index, in every name it holds."""

    def fill(value: object) -> object:
        if isinstance(value, str):
            return value.replace("{i}", layer)
        return tuple(fill(item) for item in value) if isinstance(value, tuple) else value

    fields = {name: fill(value) for name, value in vars(source).items()}
    return type(source)(**fields)


def _fresh(name: str, shape: torch.Size, foreign: Mapping[str, Tensor]) -> Tensor:
    """Initial values of a new classifier, in the dtype and on the device of the model."""
    like = next(iter(foreign.values()))
    tensor = torch.zeros(shape, dtype=like.dtype, device=like.device)
    return tensor if name.endswith("bias") else nn.init.trunc_normal_(tensor, std=0.02)


_ACTIVATIONS: dict[str, Activation] = {
    "GELU": "gelu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "GELUTanhActivation": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
    "QuickGELU": "quick_gelu",
    "QuickGELUActivation": "quick_gelu",
    "ReLU": "relu",
    "SiLU": "silu",
    "SiLUActivation": "silu",
}


def activation_of(module: Any, architecture: str) -> Activation:
    """Name of the activation a module or function computes."""
    name = module.__name__ if hasattr(module, "__name__") else type(module).__name__
    if name == "GELU" and getattr(module, "approximate", "none") == "tanh":
        return "gelu_tanh"
    if name not in _ACTIVATIONS:
        raise ConversionError(
            f"{architecture}: the activation {name} is not supported; supported are {sorted(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def dropout_rate(module: Any) -> float:
    """Rate of a dropout (or drop-path) module; 0 for an identity."""
    for attribute in ("p", "drop_prob"):
        rate = getattr(module, attribute, None)
        if rate is not None:
            return float(rate)
    return 0.0


def is_identity(module: Any) -> bool:
    """Whether a module does nothing."""
    return module is None or isinstance(module, nn.Identity)


def pair(size: Any) -> tuple[int, int]:
    """Height and width from a number or a pair."""
    return (int(size), int(size)) if isinstance(size, int) else (int(size[0]), int(size[1]))


def refuse(architecture: str, what: str) -> ConversionError:
    """The error for a variant that has no canonical form."""
    return ConversionError(f"{architecture}: {what}, which this library cannot represent without changing predictions")


def linear_or_none(module: Any, architecture: str) -> nn.Linear | None:
    """The classifier, or None where the model was built without one; anything but a linear layer is refused."""
    if module is None or isinstance(module, nn.Identity):
        return None
    if not isinstance(module, nn.Linear):
        raise refuse(architecture, f"the classifier is a {type(module).__name__}, not a linear layer")
    return module


def classes_or_fresh(found: int, num_labels: int | None, architecture: str) -> int:
    """Number of classes: the model's own, or `num_labels` when it has no classifier."""
    if num_labels is not None and num_labels < 2:
        raise ConversionError(f"num_labels must be at least 2, got {num_labels}")
    if found == 1:
        raise ConversionError(
            f"{architecture}: the classifier has one output (regression, or one probability by a sigmoid); "
            "the probabilities here are a softmax, which needs at least two"
        )
    if found and num_labels is not None and num_labels != found:
        raise ConversionError(
            f"{architecture}: the model already classifies {found} classes, num_labels={num_labels} was asked for; "
            "remove its classifier first (timm: model.reset_classifier(0)), or leave num_labels out"
        )
    return found or num_labels or 0

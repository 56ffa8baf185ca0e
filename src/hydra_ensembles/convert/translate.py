"""Carrying the parameters of a foreign model over, with nothing lost and nothing made up."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..errors import ConversionError
from ..model.config import EnsembleConfig
from ..model.ensemble import Ensemble
from ..model.metadata import Metadata
from .declaration import Architecture, Copy, Source, Weights


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

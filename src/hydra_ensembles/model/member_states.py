"""Split and join members: configurations and states, without a model."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from .._utils import warn
from ..errors import ConfigError
from .config import EnsembleConfig, Group, KeptHeads
from .layers import to_heads

Layers = tuple[tuple[int, ...], ...]  # [layer] -> original head indices

GROUP_AXIS = ("attention.key_value", "attention.key_value_bias")
UPDATES = ("_left", "_right")  # endings of members' updates of a shared weight
HEAD_AXIS = ("attention.qkv", "attention.qkv_bias", "attention.query", "attention.query_bias", "attention.out")


def place_of(parameter: str) -> tuple[Group, int | None]:
    """Group and layer (None outside the encoder) of a parameter, by its name."""
    parts = parameter.split(".")
    if parts[0] == "encoder":  # encoder.layers.LAYER.PART.…
        groups: dict[str, Group] = {"attention": "attention", "mlp": "mlp"}
        return groups.get(parts[3], "norms"), int(parts[2])
    if parts[0] == "readout":
        return ("norms" if parts[1] == "norm" else "readout"), None
    return "stem", None


def rows_of(config: EnsembleConfig, parameter: str, heads: Layers) -> tuple[int, ...] | None:
    """What the rows of a parameter are for one copy that keeps these heads, by layer: heads, or groups of heads.

    None if its first axis holds copies.
    """
    if not parameter.endswith(HEAD_AXIS + GROUP_AXIS):
        return None
    layer = place_of(parameter)[1]
    kept = heads[config.encoder.layers if layer is None else layer]
    if not parameter.endswith("attention.out"):
        kept = config.encoder.projected(kept)
    if not parameter.endswith(GROUP_AXIS):
        return kept
    each = config.encoder.heads // (config.encoder.kv_heads or config.encoder.heads)
    return tuple(sorted({head // each for head in kept}))


def copies_of(config: EnsembleConfig, parameter: str) -> int:
    """How many times a parameter is stored: once, or once per member."""
    if parameter.endswith(UPDATES):
        return config.members
    if parameter.startswith("readout.map.attention."):
        return config.attention_copies(config.encoder.layers)
    return config.copies(*place_of(parameter))


def member_config(config: EnsembleConfig, member: int) -> EnsembleConfig:
    """The configuration of one member alone."""
    return EnsembleConfig(config.stem, config.encoder, config.readout, (config.heads[member],))


def member_state(config: EnsembleConfig, state: Mapping[str, Tensor], member: int) -> dict[str, Tensor]:
    """One member's parameters, shaped as in an ensemble with one member: views, unless it has updates of them."""
    single: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name.endswith(UPDATES):
            continue
        rows = rows_of(config, name, config.heads[member])
        if copies_of(config, name) == 1:
            single[name] = tensor
        elif rows is not None:
            start = sum(len(rows_of(config, name, heads) or ()) for heads in config.heads[:member])
            single[name] = tensor[start : start + len(rows)]
        else:
            single[name] = tensor[member : member + 1]
    for name in (name for name in state if name.endswith(UPDATES[0])):
        base = name.removesuffix(UPDATES[0])
        left, right = state[name][member].float(), state[base + UPDATES[1]][member].float()
        single[base] = (single[base] + left @ right).to(single[base].dtype)
    return single


def ungrouped(config: EnsembleConfig, state: Mapping[str, Tensor]) -> tuple[EnsembleConfig, dict[str, Tensor]]:
    """The same single model with a key and value for every head, `attention.qkv` instead of two projections."""
    if config.encoder.kv_heads is None:
        return config, dict(state)
    own = dict[str, Tensor]()
    for name, tensor in state.items():
        if name.endswith(GROUP_AXIS):
            shares = config.encoder.shares(config.encoder.projected(config.heads[0][place_of(name)[1] or 0]))
            query = state[name.replace("key_value", "query")]
            parts = query, to_heads(tensor, 0, shares) if shares else tensor
            own[name.replace("key_value", "qkv")] = torch.cat(parts, dim=1)
        elif "attention.key_norm." in name and config.encoder.joint_qk_norm:
            shares = config.encoder.shares(tuple(range(config.encoder.heads)))
            own[name] = to_heads(tensor.unflatten(1, (len(shares), -1)), 1, shares).flatten(1)
        elif not name.endswith(("attention.query", "attention.query_bias")):
            own[name] = tensor
    return replace(config, encoder=replace(config.encoder, kv_heads=None)), own


def join_states(config: EnsembleConfig, states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Join the parameters of members; those that are stored once are taken from the first member."""
    return {
        name: tensor if copies_of(config, name) == 1 else torch.cat([state[name] for state in states])
        for name, tensor in states[0].items()
    }


def common_layers(heads: KeptHeads, differing: Sequence[str], layers: int) -> int:
    """Number of first blocks in which members do not differ, neither in heads nor in these parameters."""
    apart = [layer for layer, kept in enumerate(zip(*heads, strict=True)) if len(set(kept)) > 1]
    places = (place_of(name)[1] for name in differing)
    apart += [layer for layer in places if layer is not None]
    return min([*apart, layers])


def differing_names(states: Sequence[Mapping[str, Tensor]]) -> list[str]:
    """Names of the parameters that are not bitwise equal in all states, on any device."""

    def differs(tensor: Tensor, other: Tensor) -> bool:
        return tensor.shape != other.shape or not torch.equal(tensor, other.to(tensor.device))

    return [name for name, tensor in states[0].items() if any(differs(tensor, state[name]) for state in states[1:])]


def warn_if_equal(states: Sequence[Mapping[str, Tensor]], heads: KeptHeads, which: str) -> None:
    """Warn if two members are bitwise equal, given their states and heads; `which` says which members these are."""
    for i, j in combinations(range(len(states)), 2):
        if heads[i] == heads[j] and not differing_names([states[i], states[j]]):
            warn(f"members {i} and {j} {which} are equal: they will never disagree")
            return


def member_index(index: object, members: int) -> int:
    """A member's index, counted from 0; negative ones count from the end."""
    if isinstance(index, bool) or not isinstance(index, Integral) or not -members <= int(index) < members:
        raise ConfigError(f"member {index!r} does not exist: there are {members}, counted from 0")
    return int(index) % members


def listed(members: Any, caller: str) -> list[Any]:
    """Members from any iterable, at least one; a single model is refused, though some are iterable."""
    models = [] if isinstance(members, nn.Module | str | Mapping) else list(members)
    if not models:
        raise ConfigError(f"{caller} takes a list of at least one member: give [model, ...]")
    return models


def require_same_dtype_and_device(states: Sequence[Mapping[str, Tensor]]) -> None:
    """Refuse members whose parameters differ in dtype or device from the first member's, naming one."""
    for index, state in enumerate(states):
        for name, first in states[0].items():
            other = state.get(name, first)
            if (first.dtype, first.device) != (other.dtype, other.device):
                mine, theirs = f"{first.dtype} on {first.device}", f"{other.dtype} on {other.device}"
                raise ConfigError(f"{name} is {mine} in member 0, {theirs} in member {index}; use member.to(...)")


def require_same_architecture(configs: Sequence[EnsembleConfig]) -> None:
    """Refuse members with different architectures, naming the first fields that differ."""
    for index, config in enumerate(configs):
        if differences := configs[0].differences(config):
            some = "; ".join(differences[:5])
            raise ConfigError(f"members 0 and {index} are not copies of one model: they differ in {some}")

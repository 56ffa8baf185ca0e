"""Several members into one ensemble that runs them in a single forward pass."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from .config import EnsembleConfig, Group, Sharing
from .ensemble import Ensemble
from .errors import ConfigError
from .member_states import join_states, member_state, place_of, require_same_architecture
from .metadata import common_metadata

Fusion = Literal["mean", "separate"]
StemFusion = Literal["shared", "mean", "separate"]
State = Mapping[str, Tensor]


def fuse(
    members: Sequence[Ensemble],
    stem: StemFusion = "shared",
    mlp: Fusion = "mean",
    norms: Fusion = "separate",
    readout: Fusion = "separate",
) -> Ensemble:
    """One ensemble out of copies of one model that were pruned, and maybe fine-tuned, in different ways.

    Attention stays per member, with each member's own heads. Layers at the start in which all members are
    equal are stored once and run once (the *trunk*), whatever the other settings.

    Args:
        members: At least one ensemble; one with several members contributes all of them.
        stem: `"shared"` stores one stem and needs the members' stems to be equal; `"mean"` averages them;
            `"separate"` keeps one each.
        mlp: `"mean"` averages weights and biases of the MLPs over the members, `"separate"` keeps them.
        norms: The same for all norms of the encoder, the final one included.
        readout: The same for pooler and classifier.

    Raises:
        ConfigError: Members of different architectures, or unequal stems with `stem="shared"`.
    """
    if not members:
        raise ConfigError("fuse needs at least one member, got none")
    for name, value in {"stem": stem, "mlp": mlp, "norms": norms, "readout": readout}.items():
        accepted = ("shared", "mean", "separate") if name == "stem" else ("mean", "separate")
        if value not in accepted:
            raise ConfigError(f"{name} must be one of {list(accepted)}, got {value!r}")
    require_same_architecture([member.config for member in members])
    singles = [(one, index) for one in members for index in range(one.num_members)]
    states: list[State] = [member_state(one.config, one.state_dict(), index) for one, index in singles]
    heads = tuple(one.heads[index] for one, index in singles)
    first = members[0].config
    if stem == "shared":
        _require_equal_stems(states)
    config = EnsembleConfig(
        first.stem,
        first.encoder,
        first.readout,
        heads,
        sharing=Sharing(stem=stem != "separate", mlp=mlp == "mean", norms=norms == "mean", readout=readout == "mean")
        if len(singles) > 1
        else Sharing(),
        trunk=common_layers(heads, states) if len(singles) > 1 else 0,
    )
    averaged: set[Group] = set()
    for group, how in (("stem", stem), ("mlp", mlp), ("norms", norms), ("readout", readout)):
        if how == "mean":
            averaged.add(group)  # type: ignore[arg-type]
    joined = join_states(config, states)
    joined.update(_averages(config, states, averaged))
    line = (
        f"fused {len(singles)} members: stem {stem}, mlp {mlp}, norms {norms}, readout {readout}, "
        f"trunk of {config.trunk} layers"
    )
    metadata = common_metadata([member.metadata for member in members])
    return Ensemble.from_state(config, joined, replace(metadata, history=(*metadata.history, line)))


def common_layers(heads: Sequence[Sequence[Sequence[int]]], states: Sequence[State]) -> int:
    """How many layers at the start are equal in all members: same heads and same parameters."""
    unequal = {
        layer
        for name, tensor in states[0].items()
        if (layer := place_of(name)[1]) is not None
        and any(tensor.shape != state[name].shape or not torch.equal(tensor, state[name]) for state in states[1:])
    }
    layers = len(heads[0])
    unequal |= {layer for layer in range(layers) if any(member[layer] != heads[0][layer] for member in heads[1:])}
    return min(unequal, default=layers)


def _averages(config: EnsembleConfig, states: Sequence[State], groups: set[Group]) -> dict[str, Tensor]:
    """Arithmetic means over the members of all parameters in `groups`, layers of the trunk left out."""
    means: dict[str, Tensor] = {}
    for name, tensor in states[0].items():
        group, layer = place_of(name)
        in_trunk = layer is not None and layer < config.trunk
        if group in groups and not in_trunk:
            total = torch.stack([state[name].double() for state in states])  # [M, 1, …]
            means[name] = total.mean(0).to(tensor.dtype)
    return means


def _require_equal_stems(states: Sequence[State]) -> None:
    for name, tensor in states[0].items():
        if place_of(name)[0] != "stem":
            continue
        for index, state in enumerate(states[1:], start=1):
            if not torch.equal(tensor, state[name]):
                gap = (tensor.double() - state[name].double()).abs().max().item()
                raise ConfigError(
                    f"members 0 and {index} differ in {name} (by up to {gap:.3g}), so one stem cannot serve both; "
                    'fuse with stem="mean" or stem="separate", or fine-tune without the stem'
                )

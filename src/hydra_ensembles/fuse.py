"""Several members into one ensemble that runs them in a single forward pass."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, cast

import torch
from torch import Tensor

from .errors import ConfigError
from .heads.masking import Model
from .model.clip import DualEncoder, require_model
from .model.config import EnsembleConfig, Group, Sharing
from .model.ensemble import Ensemble
from .model.layers import GroupedLinear
from .model.members import (
    common_layers,
    join_states,
    listed,
    member_state,
    place_of,
    require_same_architecture,
    require_same_dtype_and_device,
)
from .model.metadata import common_metadata, member_metadata, same_tensors
from .model.stem_readout import Projections, linear

Fusion = Literal["mean", "separate"]
StemFusion = Literal["shared", "mean", "separate"]
State = Mapping[str, Tensor]


def fuse(
    members: Iterable[Model],
    stem: StemFusion = "shared",
    mlp: Fusion = "mean",
    norms: Fusion = "separate",
    readout: Fusion = "separate",
) -> Model:
    """One model out of copies of one model that were pruned, and maybe fine-tuned, in different ways.

    Attention stays per member, with each member's own heads. Layers at the start in which all members are
    equal are stored once and run once (the *trunk*), whatever the other settings.

    Of dual encoders both towers are fused, each with these settings; a tower that is the same in all members is
    stored once. Projections and logit scales go with the readout, and are stored once where they are equal.

    Args:
        members: At least one ensemble, or one dual encoder; one with several members contributes all of them.
        stem: `"shared"` stores one stem and needs the members' stems to be equal; `"mean"` averages them;
            `"separate"` keeps one each.
        mlp: `"mean"` averages weights and biases of the MLPs over the members, `"separate"` keeps them.
        norms: The same for all norms of the encoder, the final one included.
        readout: The same for pooler and classifier.

    Raises:
        ConfigError: Members of different architectures, dtypes, devices or class names, or unequal stems with
            `stem="shared"`.
    """
    given: list[Ensemble | DualEncoder] = [*listed(members, "fuse")]
    for member in given:
        require_model(member, "fuse")
    for name, value in {"stem": stem, "mlp": mlp, "norms": norms, "readout": readout}.items():
        accepted = ("shared", "mean", "separate") if name == "stem" else ("mean", "separate")
        if value not in accepted:
            raise ConfigError(f"{name} must be one of {list(accepted)}, got {value!r}")
    duals = [member for member in given if isinstance(member, DualEncoder)]
    ensembles = [member for member in given if isinstance(member, Ensemble)]
    if duals and ensembles:
        kinds = sorted({type(member).__name__ for member in given})
        raise ConfigError(f"fuse takes ensembles or dual encoders, got {kinds}; fuse members of one kind")
    fused: Ensemble | DualEncoder
    if duals:
        fused = _fuse_dual_encoders(duals, stem, mlp, norms, readout)
    else:
        fused = _fuse_ensembles(ensembles, stem, mlp, norms, readout)
    return cast(Model, fused)


def _fuse_dual_encoders(
    members: Sequence[DualEncoder], stem: StemFusion, mlp: Fusion, norms: Fusion, readout: Fusion
) -> DualEncoder:
    singles = [one.member(index) for one in members for index in range(one.num_members)]
    if len({one.logit_bias is None for one in singles}) > 1:
        raise ConfigError("some members have a logit bias and some have none; all must, or none")
    require_same_dtype_and_device([one.state_dict() for one in singles])

    def tower(towers: Sequence[Ensemble], alone: bool) -> Ensemble:
        """One tower of all members; `alone` says whether the other tower keeps the members apart."""
        first = towers[0]
        same = all(
            first.config == other.config and same_tensors(first.state_dict(), other.state_dict())
            for other in towers[1:]
        )
        return first if same and not alone else _fuse_ensembles(towers, stem, mlp, norms, readout)

    text = tower([one.text for one in singles], alone=False)
    image = tower([one.image for one in singles], alone=text.num_members == 1)
    stacked = Projections.stack([one.projections for one in singles])
    projections = Projections(*(_fuse_projections(one, readout) for one in (stacked.image, stacked.text)))
    scale = _once(torch.cat([one.logit_scale for one in singles]), readout)
    biases: list[Tensor] = [one.logit_bias for one in singles if one.logit_bias is not None]
    bias = _once(torch.cat(biases), readout) if biases else None
    copies = max(len(scale), 1 if bias is None else len(bias))
    scale, bias = scale.expand(copies), None if bias is None else bias.expand(copies)
    return DualEncoder(image, text, projections, scale, bias).eval()


def _fuse_projections(stacked: GroupedLinear | None, how: Fusion) -> GroupedLinear | None:
    """The projections of all members, stored once where they are equal or averaged."""
    if stacked is None:
        return None
    weight, bias = _once(stacked.weight, how), None if stacked.bias is None else _once(stacked.bias, how)
    copies = max(len(weight), 1 if bias is None else len(bias))
    return linear(weight.expand(copies, -1, -1), None if bias is None else bias.expand(copies, -1))


def _once(copies: Tensor, how: Fusion) -> Tensor:
    """Copies `[M, …]` as they are stored: one where they are equal, or averaged; else all."""
    first = copies[:1].detach()
    if bool((copies == first).all()):
        return first
    return copies.detach().double().mean(0, keepdim=True).to(copies.dtype) if how == "mean" else copies.detach()


def _fuse_ensembles(
    members: Sequence[Ensemble], stem: StemFusion, mlp: Fusion, norms: Fusion, readout: Fusion
) -> Ensemble:
    require_same_architecture([member.config for member in members])
    singles = [(one, index) for one in members for index in range(one.num_members)]
    states: list[State] = [member_state(one.config, one.state_dict(), index) for one, index in singles]
    require_same_dtype_and_device(states)
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
    metadata = common_metadata([member_metadata(one.metadata, index, one.num_members) for one, index in singles])
    return Ensemble.from_state(config, joined, replace(metadata, history=(*metadata.history, line)))


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

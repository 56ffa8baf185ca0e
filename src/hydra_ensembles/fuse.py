"""Merge several models into one: members that run in a single forward pass, or one model with their mean weights."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, SupportsIndex

import torch
from torch import Tensor, nn

from ._utils import warn, with_float64
from .convert.adapted import Adapted, Factors, read_adapters
from .convert.convert import convert_if_needed
from .errors import ConfigError
from .model.config import GROUPS, KeptHeads, LowRank, Sharing
from .model.dual_encoder import DualEncoder, require_ensemble, require_model, require_single
from .model.ensemble import Ensemble, shapes_of, singles
from .model.layers import GroupedLinear, linear
from .model.member_states import (
    UPDATES,
    common_layers,
    copies_of,
    differing_names,
    join_states,
    listed,
    member_config,
    place_of,
    require_same_dtype_and_device,
    warn_if_equal,
)
from .model.stem_readout import Projections, projection_config
from .settings import Count, Rate, require

Fusion = Literal["mean", "separate"]
StemFusion = Literal["shared", "mean", "separate"]
FusionByGroup = Mapping[str, StemFusion]  # by parameter group
# least cosine of weights in a layer: 0.9 or more for fine-tunings of one model, about 0 for unrelated models
MIN_COSINE = 0.5


def fuse(
    members: Iterable[Ensemble | DualEncoder | nn.Module] | nn.Module | str | Path,
    stem: StemFusion = "shared",
    mlp: Fusion = "mean",
    norms: Fusion = "separate",
    readout: Fusion = "separate",
    trunk: int | None = None,
    average: float = 0,
    adapters: Sequence[str | Path | nn.Module] | None = None,
    **options: Any,
) -> Any:
    """Fuse fine-tunings, or differently pruned copies, of one model into one ensemble that runs in one forward pass.

    Attention stays per member, with each member's own heads. First layers in which all members are equal (the *trunk*)
    are stored once and run once, whatever the other settings. For dual encoders both towers are fused; a tower,
    projection or logit scale that is the same in all members is stored once; projections and scales that differ are
    treated like the readout. A `HydraWarning` is given for averaged weights without a common start.
    Members may have been trained with different dropout, which changes no answer; the result has that of the first.

    Args:
        members: At least one ensemble, dual encoder, or model that `convert` takes, all of one kind; one with several
            members contributes all of them.
        stem: `"shared"` stores one stem and needs the members' stems to be equal; `"mean"` averages them;
            `"separate"` keeps one each, unless they are equal and a trunk follows.
        mlp: `"mean"` averages weights and biases of the MLPs over the members, `"separate"` keeps them.
        norms: The same for all norms of the encoder, including the final one.
        readout: The same for pooler and classifier. An attention that pools the tokens is averaged if all members
            keep the same heads of it.
        trunk: Maximum number of equal first layers to store once; None for all. Needed for members that are equal
            now and will differ after training.
        average: Average the stem and the first layers of the members, and store them once. An `int` is a number of
            layers, 10 of 12; a `float` below 1 a share of them, rounded: 0.8 is 10 of 12, too. A share that rounds to
            no layer, or to all, is refused. With `mlp="separate"`, for several fine-tunings of one model, this
            keeps most of the gain of an ensemble, at little more than the price of one model.
        adapters: Adapters of peft, as folders or loaded; `members` is then the model that they are for, as `convert`
            takes it. There is a member for each adapter. What no adapter changes is
            stored once, and the layers before the first change run once; the other settings do not apply.
        options: With `adapters`, those of `convert`.

    Examples:
        >>> hydra = he.fuse([he.prune(base, [(5, head)]) for head in range(3)])
        >>> hydra.num_members, hydra.config.trunk  # five layers are the same in all members and run once
        (3, 5)
    """
    if adapters is not None:
        prefix = options.pop("prefix", None)
        hydra = _fuse_adapters(read_adapters(members, listed(adapters, "fuse"), **options))
        return hydra if prefix is None else hydra.with_prefix(prefix)
    if options:
        raise ConfigError(f"fuse has no settings {sorted(options)}; those of convert go with adapters=")
    models: list[Ensemble | DualEncoder] = [convert_if_needed(model) for model in listed(members, "fuse")]
    for member in models:
        require_model(member, "fuse")
    how: dict[str, StemFusion] = {"stem": require("stem", stem, StemFusion)}
    for group, fusion in (("mlp", mlp), ("norms", norms), ("readout", readout)):
        how[group] = require(group, fusion, Fusion)
    trunk, average = require("trunk", trunk, Count | None), require("average", average, Count | Rate)
    duals = [member for member in models if isinstance(member, DualEncoder)]
    ensembles = [member for member in models if isinstance(member, Ensemble)]
    if duals and ensembles:
        raise ConfigError("fuse takes members of one kind, not a DualEncoder and an Ensemble")
    if duals and average:
        raise ConfigError(f"average (got {average}) is for classifiers; dual encoders keep their layers per member")
    if duals:
        return _fuse_dual_encoders(duals, how, trunk)
    return _fuse_ensembles(ensembles, how, trunk, _whole_layers(average, ensembles[0].num_layers), trunk is None)


def _whole_layers(average: float, layers: int) -> int:
    """Number of layers to average: an integer is that number, a fraction a share of `layers`."""
    if isinstance(average, SupportsIndex):
        return int(average)
    count = round(average * layers)
    if average and count in (0, layers):
        some = "all" if count else "none"
        raise ConfigError(f"average {average} of {layers} layers rounds to {some}; give a number of layers")
    return count


def stack(members: Iterable[Ensemble | nn.Module]) -> Ensemble:
    """`Ensemble.stack`: all members in one ensemble that shares nothing."""
    models = listed(members, "Ensemble.stack")
    ensembles = [require_ensemble(convert_if_needed(model), "Ensemble.stack") for model in models]
    states, heads, metadata = singles(ensembles)
    warn_if_equal(states, heads, "given to Ensemble.stack")
    config = replace(member_config(ensembles[0].config, 0), heads=heads)
    return Ensemble.from_state(config, join_states(config, states), metadata)


def soup(models: Iterable[nn.Module]) -> Ensemble:
    """Average the weights of several fine-tunings of one model: one model, at the price of one.

    The mean makes no sense for models without a common start; a `HydraWarning` says so. They may have been trained
    with different dropout, as in `fuse`. Calibrate the result (`calibrate`): it may be far too unsure of its answers.

    Examples:
        >>> recipe = he.Recipe(learning_rate=1e-4, steps=1)
        >>> tuned = [he.finetune(base, batches, recipe, index=index, progress=False) for index in range(2)]
        >>> he.soup(tuned).num_members
        1
    """
    ensembles: list[Ensemble] = [convert_if_needed(model) for model in listed(models, "soup")]
    for ensemble in ensembles:
        require_single(ensemble, "soup", classifies=False)
    states, heads, metadata = singles(ensembles)
    if len(set(heads)) > 1:
        raise ConfigError("soup averages models with the same heads; these lost different ones: use fuse instead")
    _warn_of_unrelated(states, states[0])
    mean = {name: _mean([state[name] for state in states]) for name in states[0]}
    return Ensemble.from_state(ensembles[0].config, mean, metadata.after(f"mean weights of {len(states)} models"))


def _fuse_ensembles(
    members: Sequence[Ensemble], how: FusionByGroup, limit: int | None, average: int = 0, warns: bool = False
) -> Ensemble:
    own_states, heads, metadata = singles(members)
    if warns:
        warn_if_equal(own_states, heads, "given to fuse")
    states = own_states
    if average:
        states = _with_mean_trunk(states, heads, average, members[0].num_layers)
    differing = differing_names(states)
    stem = next((name for name in differing if place_of(name)[0] == "stem"), None)
    if how["stem"] == "shared" and stem is not None:
        advice = "give average 0.8 with mlp 'separate', or stem 'mean' or 'separate'"
        raise ConfigError(f"the members differ in {stem}, so one stem cannot serve all; {advice}")
    config = replace(member_config(members[0].config, 0), heads=heads)
    if len(states) > 1:
        shared = {group: fusion != "separate" for group, fusion in how.items()}
        common = common_layers(heads, differing, config.encoder.layers)
        trunk = common if limit is None else min(common, limit)
        shared["stem"] |= stem is None and trunk > 0  # otherwise the trunk would run once per member
        config = replace(config, sharing=Sharing(**shared), trunk=trunk)
    joined = join_states(config, states)
    _warn_of_unrelated(own_states, [name for name in joined if copies_of(config, name) == 1])
    for name in joined:
        group, layer = place_of(name)
        in_trunk = layer is not None and layer < config.trunk
        if how.get(group) == "mean" and not in_trunk and copies_of(config, name) == 1:
            joined[name] = _mean([state[name] for state in states])
    settings = ", ".join(f"{group} {fusion}" for group, fusion in how.items())
    line = f"fused {len(states)} members: {settings}, trunk of {config.trunk} layers"
    return Ensemble.from_state(config, joined, metadata.after(line))


def _fuse_adapters(adapted: Adapted) -> Ensemble:
    """An ensemble with a member for each adapter of one model, which shares what none of them changes.

    What plain LoRAs add to attention or MLP stays in factors beside the shared weights, where these are fewer numbers.
    """
    config, state, members = adapted.base.config, adapted.base.state_dict(), len(adapted.changes)
    changed = {name for changes in adapted.changes for name in changes}
    states = [{name: changes.get(name, state[name]) for name in changed} for changes in adapted.changes]
    line, updates = f"fused {members} adapters", dict[str, list[Factors | None]]()
    if members > 1:
        differing, heads = differing_names(states), config.heads * members
        trunk = common_layers(heads, differing, config.encoder.layers)
        apart = {place_of(name)[0] for name in differing}
        for group in sorted(apart & {"attention", "mlp"}):
            top = [name for name in state if place_of(name)[0] == group and (place_of(name)[1] or 0) >= trunk]
            found = _factors_of([name for name in differing if place_of(name)[0] == group], adapted)
            numbers = [part.numel() for pairs in found.values() for pair in pairs if pair for part in pair]
            if found and sum(numbers) < (members - 1) * sum(state[name].numel() for name in top):
                updates |= found
                apart.discard(group)
        sharing = Sharing(**{group: group not in apart for group in GROUPS})
        config = replace(config, heads=heads, sharing=sharing, trunk=trunk, updates=_ranks(updates))
        line += f", trunk of {trunk} layers" + ", what they add in factors" * bool(updates)
    joined = dict[str, Tensor]()
    for name, shape in shapes_of(config).items():
        if name.endswith(UPDATES):
            joined[name] = _stacked(
                updates.get(name.rpartition("_")[0], []), shape, name.endswith(UPDATES[1]), adapted.base
            )
        elif name in updates or (name not in changed and copies_of(config, name) == 1):
            joined[name] = state[name]
        else:
            own = [one.get(name, state[name]) for one in states]
            joined[name] = own[0] if copies_of(config, name) == 1 else torch.cat(own)
    return Ensemble.from_state(config, joined, adapted.base.metadata.after(line), copies=False)


def _factors_of(names: Sequence[str], adapted: Adapted) -> dict[str, list[Factors | None]]:
    """What each adapter adds to these parameters, None for nothing; empty if that has no factors somewhere."""
    found = {name: [factors.get(name) for factors in adapted.factors] for name in names}
    for name, pairs in found.items():
        if any(pair is None and name in changes for pair, changes in zip(pairs, adapted.changes, strict=True)):
            return {}
    return found


def _ranks(updates: Mapping[str, Sequence[Factors | None]]) -> LowRank:
    """The largest rank of each map in any layer."""
    ranks = dict.fromkeys(("inputs", "out", "up", "down"), 0)
    for name, pairs in updates.items():
        leaf = name.removesuffix(".weight").rpartition(".")[2]
        part = leaf if leaf in ranks else "inputs"
        ranks[part] = max(ranks[part], *(pair[0].shape[-1] for pair in pairs if pair is not None))
    return LowRank(**ranks)


def _stacked(pairs: Sequence[Factors | None], shape: torch.Size, right: bool, like: Ensemble) -> Tensor:
    """The left or right factors of all members, `[M, …, r]` or `[M, r, …]`, padded with zeros to one rank."""
    stacked = torch.zeros(shape, dtype=like.dtype, device=like.device)
    for member, pair in enumerate(pairs):
        if pair is not None:
            one = pair[int(right)]
            if right:
                stacked[member, : len(one)] = one
            else:
                stacked[member, ..., : one.shape[-1]] = one
    return stacked


def _with_mean_trunk(
    states: Sequence[Mapping[str, Tensor]], heads: KeptHeads, layers: int, most: int
) -> list[dict[str, Tensor]]:
    """States whose stem and first `layers` (of `most`) layers are replaced by the mean over all."""
    if layers > most:
        raise ConfigError(f"average is {layers}, but the members have {most} layers")
    parted = [layer for layer in range(layers) if len({kept[layer] for kept in heads}) > 1]
    if parted:
        raise ConfigError(f"members lost different heads in layer {parted[0]}, which average {layers} would merge")
    averaged = [dict(state) for state in states]
    for name in states[0]:
        group, layer = place_of(name)
        if group == "stem" or (layer is not None and layer < layers):
            mean = _mean([state[name] for state in states])
            for state in averaged:
                state[name] = mean
    return averaged


def _fuse_dual_encoders(members: Sequence[DualEncoder], how: FusionByGroup, trunk: int | None) -> DualEncoder:
    encoders = [model.member(index) for model in members for index in range(model.num_members)]
    require_same_dtype_and_device([encoder.state_dict() for encoder in encoders])

    def tower(towers: Sequence[Ensemble], alone: bool) -> Ensemble:
        """Fuse one tower of all members; `alone` means that the other tower has a single member."""
        states = [ensemble.state_dict() for ensemble in towers]
        first, *others = (ensemble.config.undropped for ensemble in towers)
        same = all(other == first for other in others) and not differing_names(states)
        return towers[0] if same and not alone else _fuse_ensembles(towers, how, trunk)

    def projection(maps: Sequence[GroupedLinear | None]) -> GroupedLinear | None:
        present = [layer for layer in maps if layer is not None]
        if len({projection_config(layer) for layer in maps}) > 1:
            raise ConfigError("the members' projections have different shapes; give copies of one model")
        return linear(*_stored_weights([(layer.weight, layer.bias) for layer in present], how)) if present else None

    text = tower([encoder.text for encoder in encoders], alone=False)
    image = tower([encoder.image for encoder in encoders], alone=text.num_members == 1)
    image_map = projection([encoder.projections.image for encoder in encoders])
    text_map = projection([encoder.projections.text for encoder in encoders])
    scales = _stored_weights([(encoder.logit_scale, encoder.logit_bias) for encoder in encoders], how)
    return DualEncoder(image, text, Projections(image_map, text_map), *scales).eval()


def _stored_weights(
    members: Sequence[tuple[Tensor, Tensor | None]], how: FusionByGroup
) -> tuple[Tensor, Tensor | None]:
    """Weight and bias as stored: one copy if all members are equal or averaged, else `[M, …]`."""
    biases = [bias for _, bias in members if bias is not None]
    tensors = [torch.cat([weight for weight, _ in members]), *([torch.cat(biases)] if biases else [])]
    if all(bool((tensor == tensor[:1]).all()) for tensor in tensors):
        tensors = [tensor[:1] for tensor in tensors]
    elif how["readout"] == "mean":
        tensors = [_mean(tensor.split(1)) for tensor in tensors]
    return tensors[0], tensors[1] if biases else None


def _warn_of_unrelated(states: Sequence[Mapping[str, Tensor]], stored_once: Iterable[str]) -> None:
    """Warn if weights are averaged over members that do not share a common start.

    The units of such models do not correspond, so their mean is meaningless. Readouts are not checked: those of one
    task may be new in every member, and classifiers on similar features can be averaged.
    """
    layers: dict[int | None, list[str]] = {}
    for name in stored_once:
        group, layer = place_of(name)
        if group in ("stem", "attention", "mlp") and not name.endswith("bias"):
            layers.setdefault(layer, []).append(name)
    cosines = [
        (_cosine([(states[0][name], state[name]) for name in names]), layer, index)
        for layer, names in layers.items()
        for index, state in enumerate(states[1:], start=1)
    ]
    least, layer, index = min(cosines, key=lambda entry: entry[0], default=(1.0, None, 0))
    if least < MIN_COSINE:
        where = "the stem" if layer is None else f"layer {layer}"
        warn(
            f"the weights of members 0 and {index} that are averaged in {where} have a cosine of {least:.2f}, but "
            "fine-tunings of one model 0.9 or more: averaging others makes no sense; keep them apart (Ensemble.stack)"
        )


def _cosine(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Cosine between all first tensors, as one vector, and all second ones; 1 if a vector is zero."""
    products = torch.zeros(3, dtype=torch.float64, device="cpu")
    for tensor, other in pairs:
        if not torch.equal(tensor, other):
            first, second = tensor.float().flatten(), other.float().flatten()
            products += torch.stack([first @ second, first @ first, second @ second]).cpu().double()
    inner, *squares = products.tolist()
    return inner / math.sqrt(squares[0] * squares[1]) if all(squares) else 1.0


def _mean(tensors: Sequence[Tensor]) -> Tensor:
    """The mean in float64, on the CPU where the device has none."""
    stacked = torch.stack(list(tensors))
    wide = stacked.to(with_float64(stacked.device)).double().mean(0)
    return wide.to(stacked.dtype).to(stacked.device)

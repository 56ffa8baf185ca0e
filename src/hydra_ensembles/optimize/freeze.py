"""Freeze an ensemble: equal copies merged, constants folded into the weights, layers laid out for one plan."""

import copy
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import is_dataclass
from itertools import chain
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..model.ensemble import Ensemble
from ..model.layers import (
    MLP,
    Attention,
    Block,
    Context,
    GroupedLinear,
    GroupedNorm,
    Read,
    head_ranges,
    into_heads,
    out_of_heads,
    select_queries,
    to_heads,
)
from ..model.member_states import GROUP_AXIS, HEAD_AXIS
from ..model.rotary import FrozenRotary
from ..model.stem_readout import MapPool, PatchStem

Plan = Literal["batched", "loop"]
"""How to run what is per member: in one batched product, padded to the widest member, or one member after another. The
result is the same."""

Parts = tuple[Tensor, ...]  # the requested ones of query, key and value, each [R, T, H, d_k]


@torch.no_grad()
def frozen(ensemble: Ensemble, dtype: torch.dtype) -> Ensemble:
    """A copy of an ensemble rewritten for inference; it runs with the plan `"loop"` until `with_plan` changes it."""
    result = simplified(ensemble)
    pooling = result.readout.map
    few_are_read = pooling is not None or result.readout.reads_few  # after the last attention
    layers: list[Block | MapPool] = [*blocks(result), *([] if pooling is None else [pooling])]
    for layer, inputs in zip(layers, attention_inputs(result), strict=True):
        one_input = inputs == 1 or len(layer.attention.sizes) == 1
        reads_few = few_are_read and layer is layers[-1]
        replace_part(layer, "attention", FrozenAttention(layer.attention, one_input, reads_few))
    if (rotary := result.encoder.rotary) is not None:
        size = result.stem.config.grid if isinstance(result.stem, PatchStem) else (result.stem.config.max_tokens,)
        replace_part(result.encoder, "rotary", FrozenRotary(rotary, size, next(result.parameters())))
    if isinstance(result.stem, PatchStem):
        replace_part(result, "stem", FrozenPatchStem(result.stem))
    return result.to(dtype)


@torch.no_grad()
def with_plan(ensemble: Ensemble, plan: Plan) -> Ensemble:
    """A frozen ensemble that runs with this plan and shares the weights; `"batched"` may pad some of them."""
    result = _twin(ensemble, share=True)
    for module in result.modules():
        if isinstance(module, FrozenAttention):
            module.use_plan(plan)
        elif isinstance(module, GroupedLinear):
            module.one_by_one = plan == "loop"
    return result


def has_copies(ensemble: Ensemble) -> bool:
    """Whether heads or MLPs are per member; where none are, all plans run the same code."""
    layers = [*ensemble.encoder.modules(), *(() if ensemble.readout.map is None else ensemble.readout.map.modules())]
    attentions = (layer for layer in layers if isinstance(layer, FrozenAttention))
    linears = (layer for layer in layers if isinstance(layer, GroupedLinear))
    return any(len(one.sizes) > 1 for one in attentions) or any(len(one.weight) > 1 for one in linears)


# --- rewriting weights: equal copies merged, constants folded in -------------------------------------------


@torch.no_grad()
def simplified(ensemble: Ensemble) -> Ensemble:
    """A copy, with the model's own modules, in which equal copies are merged and constants folded into the weights.

    Half-precision weights are returned in float32, so that folding loses no digits; the caller converts them.
    """
    result = _twin(ensemble, share=False).eval()
    _merge_equal_copies(result)
    if result.dtype in (torch.bfloat16, torch.float16):
        result.to(torch.float32)
    for block in blocks(result):
        if block.attention.shares is None and (biases := block.attention.biases()) is not None:
            block.attention.qkv_bias = fixed(biases)
        if block.norm_first:
            _fold_norms(block)
        _fold_scales(block.attention, block.mlp)
        _fold_biases(block.attention)
    if (pooling := result.readout.map) is not None:
        _fold_biases(pooling.attention)
    _compute_common_heads_once(result)
    return result


def _twin(ensemble: Ensemble, share: bool) -> Ensemble:
    """The same modules around the same tensors, or around copies of them; settings and metadata are shared.

    Hooks are removed: they would only run in modules that are not rewritten, and may not be copyable.
    """
    tensors = (*ensemble.parameters(), *ensemble.buffers()) if share else ()
    twins: dict[int, object] = {id(part): part for part in (ensemble.metadata, *tensors)}
    for name, part in (item for module in ensemble.modules() for item in vars(module).items()):
        if "_hooks" in name:  # of every kind
            twins[id(part)] = OrderedDict()
        elif is_dataclass(part):
            twins[id(part)] = part
    return copy.deepcopy(ensemble, twins).requires_grad_(False)


def blocks(ensemble: Ensemble) -> list[Block]:
    """The blocks of the encoder."""
    return [cast(Block, block) for block in ensemble.encoder.layers]


def branching_layer(ensemble: Ensemble) -> int:
    """The first layer in which activations differ between members; the number of layers if there is none."""
    inputs = attention_inputs(ensemble)
    branches = (index for index, block in enumerate(blocks(ensemble)) if max(inputs[index], _copies(block)) > 1)
    return next(branches, ensemble.num_layers)


def attention_inputs(ensemble: Ensemble) -> list[int]:
    """How many different inputs each attention has, including one that pools: 1, or one per member."""
    members = next(ensemble.stem.parameters()).shape[0]
    counts = []
    for block in blocks(ensemble):
        if block.norm_first and isinstance(block.norm1, GroupedNorm):
            members = max(members, block.norm1.weight.shape[0])
        counts.append(members)
        members = max(members, _copies(block))
    readout = ensemble.readout
    if readout.map is not None:
        norms = len(readout.norm.weight) if readout.norm is not None and readout.config.norm == "tokens" else 1
        counts.append(max(members, norms, len(readout.map.query_token)))
    return counts


def _copies(block: Block) -> int:
    """The largest number of copies of any parameter in a block."""
    small = [parameter.shape[0] for name, parameter in block.named_parameters() if name not in HEAD_AXIS + GROUP_AXIS]
    return max([len(block.attention.sizes), *small])


def _merge_equal_copies(ensemble: Ensemble) -> None:
    """Keep one copy of every parameter that is equal in all members, so that members branch as late as possible."""
    _merge(*((module, name) for module in ensemble.stem.modules() for name in module._parameters))
    for module in [*ensemble.encoder.modules(), *ensemble.readout.modules()]:
        if isinstance(module, Attention):
            _merge_attention(module)
        else:
            _merge(*((module, name) for name in module._parameters))


def _merge(*places: tuple[nn.Module, str]) -> None:
    """Store these parameters once if all copies of all of them are equal."""
    present = [(module, name, getattr(module, name)) for module, name in places if getattr(module, name) is not None]
    if all(_equal_copies(parameter) for _, _, parameter in present):
        for module, name, parameter in present:
            setattr(module, name, fixed(parameter[:1].clone()))


def _merge_attention(attention: Attention) -> None:
    """Store the whole sublayer once if all copies are equal; else those parameters that can be stored once."""
    _merge((attention, "scale"))
    _merge((attention, "out_bias"))
    if len(attention.sizes) == 1 or not attention.even:
        return
    of_heads = {
        name: one for name, one in attention.named_parameters() if f"attention.{name}" in HEAD_AXIS + GROUP_AXIS
    }
    count = len(attention.sizes)
    copies = [tensor.unflatten(0, (count, -1)) for tensor in of_heads.values() if len(tensor)]
    small = [parameter for name, parameter in attention.named_parameters() if name not in of_heads]
    if all(_equal_copies(tensor) for tensor in [*copies, *small]):
        attention.sizes = attention.sizes[:1]
        attention.joint = None if attention.joint is None else attention.joint[:1]
        attention.shares = None if attention.shares is None else attention.shares[:1]
        for name, tensor in of_heads.items():
            setattr(attention, name, fixed(tensor[: len(tensor) // count].clone()))


def _equal_copies(parameter: Tensor) -> bool:
    return all(torch.equal(parameter[0], other) for other in parameter[1:])


def _compute_common_heads_once(ensemble: Ensemble) -> None:
    """In the last layer where members have the same input, keep one of each set of equal heads, to compute it once."""
    layer = branching_layer(ensemble)
    if layer == len(blocks(ensemble)) or attention_inputs(ensemble)[layer] > 1:
        return
    attention = blocks(ensemble)[layer].attention
    normed = attention.query_norm is not None and attention.query_norm.weight.shape[0] > 1
    if (
        normed
        or attention.joint is not None
        or attention.shares is not None
        or len(attention.sizes) == 1
        or not len(attention.out)
    ):
        return
    rows = attention.qkv.flatten(1)
    if attention.qkv_bias is not None:
        rows = torch.cat([rows, attention.qkv_bias.flatten(1)], dim=1)
    alike: list[int] = []  # for each head the first equal one; one with NaN equals only itself
    for index, head in enumerate(rows):
        alike.append(next((first for first in range(index) if torch.equal(rows[first], head)), index))
    firsts = sorted(set(alike))
    if len(firsts) < len(rows):
        attention.qkv = fixed(attention.qkv[firsts])
        attention.qkv_bias = None if attention.qkv_bias is None else fixed(attention.qkv_bias[firsts])
        attention.distinct = torch.tensor([firsts.index(first) for first in alike], device=rows.device)


def _fold_norms(block: Block) -> None:
    """Fold norms that are per member into the projections after them, if these are per member, too."""
    norm, attention = block.norm1, block.attention
    own = isinstance(norm, GroupedNorm) and block.parallel != 1  # the MLP does not read the same norm
    if own and isinstance(norm, GroupedNorm) and 1 < norm.weight.shape[0] == len(attention.sizes):
        for name, rows in attention.inputs.items():
            owner, weight = _member_of_each(rows, norm.weight.device), getattr(attention, name)
            if norm.bias is not None:
                constant = torch.einsum("kpid,kd->kpi", weight, norm.bias[owner])  # contribution of β, [K, P, d_k]
                setattr(attention, f"{name}_bias", _added(constant, getattr(attention, f"{name}_bias")))
            setattr(attention, name, fixed(weight * norm.weight[owner][:, None, None, :]))
        replace_part(block, "norm1", _without_weights(norm))
    norm, up = block.norm2, block.mlp.up
    if isinstance(norm, GroupedNorm) and 1 < norm.weight.shape[0] == up.weight.shape[0]:
        if norm.bias is not None:
            up.bias = _added(torch.einsum("god,gd->go", up.weight, norm.bias), up.bias)  # [M, hidden]
        up.weight = fixed(up.weight * norm.weight[:, None, :])
        replace_part(block, "norm2", _without_weights(norm))


def _without_weights(norm: GroupedNorm) -> nn.Module:
    """A norm without weights, the same for every member, after these were folded."""
    kind = nn.RMSNorm if norm.kind == "rms" else nn.LayerNorm
    return kind(norm.weight.shape[1], norm.eps, elementwise_affine=False)


def _fold_scales(attention: Attention, mlp: MLP) -> None:
    """Fold LayerScale into the output projection before it."""
    if (scale := attention.scale) is not None:  # [1 or G, d]
        of_heads = (
            scale if scale.shape[0] == 1 else scale[_member_of_each(attention.sizes, scale.device)]
        )  # [1 or K, d]
        attention.out = fixed(attention.out * of_heads[:, None, :])
        attention.out_bias = None if attention.out_bias is None else fixed(attention.out_bias * scale)
        attention.scale = None
    if (scale := mlp.scale) is not None and scale.shape[0] in (1, mlp.down.weight.shape[0]):
        mlp.down.weight = fixed(mlp.down.weight * scale[:, :, None])
        mlp.down.bias = None if mlp.down.bias is None else fixed(mlp.down.bias * scale)
        mlp.scale = None


def _fold_biases(attention: Attention) -> None:
    """Fold the value bias into the output bias, and drop the key bias where softmax cancels it."""
    *_, name = attention.inputs
    bias = getattr(attention, f"{name}_bias")  # [K or L, P, d_k], value last, key before it
    if bias is None or not sum(attention.sizes) or attention.joint is not None:
        return
    values = bias[:, -1] if attention.shares is None else to_heads(bias[:, -1], 0, tuple(chain(*attention.shares)))
    through_heads = torch.einsum("ki,kid->kd", values, attention.out)  # [K, d]
    constant = through_heads.new_zeros(len(attention.sizes), through_heads.shape[1])
    constant.index_add_(0, _member_of_each(attention.sizes, bias.device), through_heads)  # [G, d]
    attention.out_bias = _added(constant, attention.out_bias)
    remaining = bias.clone()
    remaining[:, -1 if sees_key_bias(attention) else -2 :] = 0
    setattr(attention, f"{name}_bias", fixed(remaining))


def _member_of_each(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """The copy that each head, or group, belongs to, of so many in each copy."""
    counts = torch.tensor(sizes, device=device)
    return torch.repeat_interleave(torch.arange(len(sizes), device=device), counts)


def _added(constant: Tensor, old: Tensor | None) -> nn.Parameter:
    return fixed(constant if old is None else old + constant)


def replace_part(module: nn.Module, name: str, part: nn.Module) -> None:
    """Replace a submodule by one of a class that the module does not declare."""
    setattr(module, name, part)


# --- layers of a frozen ensemble: attention and patch stem, for each plan ------------------------------------------


class FrozenAttention(Attention):
    """Computes the same as an `Attention` with folded biases, with one of the plans and weights laid out for it.

    If all heads have the same input (`one_input`), or there is one copy of them, a plain product is enough.
    """

    def __init__(self, source: Attention, one_input: bool, reads_few: bool) -> None:
        nn.Module.__init__(self)  # uses the source's weights under other names
        self.sizes, self.shares, self.causal, self.one_input = source.sizes, source.shares, source.causal, one_input
        self.joint, self.counts = source.joint, source.counts
        self.window, self.turn, self.dropout = source.window, source.turn, 0.0
        self.factor, self.softcap = source.factor, source.softcap
        self.plan: Plan = "loop"
        self.query_norm, self.key_norm = source.query_norm, source.key_norm
        biased = {0, 1} if sees_key_bias(source) else {0}  # of query, key, value; the rest is folded
        biased |= set() if source.joint is None else {2}
        split = ((0,), (1, 2)) if reads_few else ((0, 1, 2),)  # contiguous parts when split
        if source.shares is None:
            self.into = nn.ModuleList(IntoHeads(source.qkv, source.qkv_bias, parts, biased) for parts in split)
        else:
            query = IntoHeads(source.query, source.query_bias, (0,), {0})
            key_value = IntoHeads(
                source.key_value, source.key_value_bias, (0, 1), {part - 1 for part in biased} & {0, 1}
            )
            self.into = nn.ModuleList((query, key_value))
        self.out, self.out_bias = source.out, source.out_bias
        self.register_buffer("distinct", source.distinct, persistent=False)

    def use_plan(self, plan: Plan) -> None:
        """Set how members with their own inputs are run; `"batched"` pads them to the widest member."""
        self.plan = plan if self.joint is None or self.even else "loop"  # heads normalised together are not padded
        if self.plan == "batched" and not self.one_input and not self.even:
            if self.shares is not None:  # groups of different sizes: each head with its own key and value
                cast(IntoHeads, self.into[1]).repeat(tuple(chain(*self.shares)))
                self.shares = None
            for projection in self.into:
                cast(IntoHeads, projection).pad(self.sizes)
            self.out = _padded_heads(self.out, self.sizes)
            self.sizes = (max(self.sizes),) * len(self.sizes)

    def forward(self, x: Tensor, context: Context, read: Read = None) -> Tensor:
        """Attend within `[N, B, T, d]` like `Attention`, to `[max(N, G), B, T', d]`."""
        if not sum(self.sizes):
            return self._with_bias(x.new_zeros(*select_queries(x, read).shape[:3], self.out.shape[2]))
        if self.one_input:
            return self._all_at_once(x, context, read)
        if self.plan == "loop":
            return self._one_after_another(x, context, read)
        copies = len(self.sizes)
        parts = self._parts(x, select_queries(x, read), lambda into, tokens, rows: into.batched(tokens, copies))
        z = self.heads_mixed(parts, context, read, copies)  # [M·B, T', h, d_k]
        return self._with_bias(out_of_heads(z, self.out, copies))

    def _all_at_once(self, x: Tensor, context: Context, read: Read) -> Tensor:
        """All heads in one product."""
        parts = self._parts(x.flatten(0, 1), select_queries(x, read).flatten(0, 1), IntoHeads.plain, None)
        z = self.heads_mixed(parts, context, read, x.shape[0])  # [N·B, T', H, d_k]
        if len(self.sizes) == 1:
            return self._out_of_copy(0, z).unflatten(0, (x.shape[0], -1))  # [N, B, T', d]
        return self._out_of_members(z if self.distinct is None else z.index_select(2, self.distinct))

    def _one_after_another(self, x: Tensor, context: Context, read: Read) -> Tensor:
        """One member after another, from the input of the sublayer to its output."""
        results = []
        asking = select_queries(x, read)
        for member, size in enumerate(self.sizes):
            if not size:  # no heads
                z = x.new_zeros(*asking.shape[1:3], 0, self.out.shape[1])
            else:
                parts = self._parts(x[member], asking[member], IntoHeads.plain, member)
                z = self.heads_mixed(parts, context, read, 1, member)  # [B, T', h, d_k]
            results.append(self._out_of_copy(member, z))
        return torch.stack(results)  # [M, B, T', d]

    def _parts(
        self, x: Tensor, asking: Tensor, product: "Callable[[IntoHeads, Tensor, slice], Parts]", copy: int | None = None
    ) -> Parts:
        """Query, key and value, each `[R, T, H, d_k]`, of all heads or of a copy's; the query only for `asking`."""
        projections = [cast(IntoHeads, projection) for projection in self.into]
        first, *_, last = (*self.inputs.values(),) * 2
        rows = [slice(None) if copy is None else slice(*head_ranges(sizes)[copy]) for sizes in (first, last)]
        if len(projections) == 1:
            return product(projections[0], x, rows[0])
        return product(projections[0], asking, rows[0]) + product(projections[1], x, rows[1])

    def _out_of_members(self, z: Tensor) -> Tensor:
        """Output projections of concatenated heads, `[B, T', K, d_k]` to `[M, B, T', d]`."""
        copies = len(self.sizes)
        if self.plan == "loop" or not self.even:
            parts = enumerate(z.split(self.sizes, dim=2))
            return torch.stack([self._out_of_copy(copy, part) for copy, part in parts])
        rows = z.flatten(0, 1).unflatten(1, (copies, -1)).flatten(2).transpose(0, 1)  # [M, B·T', h·d_k]
        y = torch.bmm(rows, self.out.reshape(copies, -1, self.out.shape[2]))
        return self._with_bias(y.unflatten(1, z.shape[:2]))

    def _out_of_copy(self, copy: int, z: Tensor) -> Tensor:
        """Output projection of one copy's heads, `[R, T', h, d_k]` to `[R, T', d]`, with its bias."""
        start, stop = head_ranges(self.sizes)[copy]
        weight = self.out[start:stop].flatten(0, 1)  # [h·d_k, d]
        bias = None
        if self.out_bias is not None:
            bias = self.out_bias[min(copy, self.out_bias.shape[0] - 1)]
        return F.linear(z.flatten(2).flatten(0, 1), weight.t(), bias).unflatten(0, z.shape[:2])

    def _with_bias(self, y: Tensor) -> Tensor:
        """Add each member's bias to `[M, B, T', d]`."""
        return y if self.out_bias is None else y + self.out_bias[:, None, None]


class IntoHeads(nn.Module):
    """Projection to some of query, key and value for all heads: weights `[K, P, d_k, d]`.

    A plain product adds its bias for free. In a batched product the bias needs another pass over the result, so it is
    only added to the parts (`biased`) in which it is not zero.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, parts: tuple[int, ...], biased: set[int]) -> None:
        super().__init__()
        self.weight = fixed(weight if len(parts) == weight.shape[1] else weight[:, list(parts)])
        self.biased = tuple(index for index, part in enumerate(parts) if bias is not None and part in biased)
        self.bias = fixed(bias[:, list(parts)].contiguous()) if bias is not None and self.biased else None

    def plain(self, x: Tensor, rows: slice) -> Parts:
        """Some heads on a common input `[R, T, d]`: one plain product."""
        weight = self.weight[rows]  # [H, P, d_k, d]
        bias = None if self.bias is None else self.bias[rows].flatten()
        y = F.linear(x.flatten(0, 1), weight.flatten(0, 2), bias)  # two axes: one product instead of R
        return y.reshape(*x.shape[:2], *weight.shape[:3]).unbind(3)

    def batched(self, x: Tensor, members: int) -> Parts:
        """Each member's part of `[M, B, T, d]` with its own K / M heads; the result has members on the batch axis."""
        parts = into_heads(x, self.weight, None, members).unbind(3)  # each [M·B, T, h, d_k]
        if self.bias is None:
            return parts
        bias = self.bias.unflatten(0, (members, -1))[:, None, None]  # [M, 1, 1, h, P, d_k]
        return tuple(
            (part.unflatten(0, (members, -1)) + bias[..., index, :]).flatten(0, 1) if index in self.biased else part
            for index, part in enumerate(parts)
        )

    def repeat(self, shares: tuple[int, ...]) -> None:
        """Give every head what its group shares."""
        self.weight = fixed(to_heads(self.weight, 0, shares))
        self.bias = None if self.bias is None else fixed(to_heads(self.bias, 0, shares))

    def pad(self, sizes: tuple[int, ...]) -> None:
        """Pad every member with zero heads to as many as the widest has."""
        self.weight = _padded_heads(self.weight, sizes)
        self.bias = None if self.bias is None else _padded_heads(self.bias, sizes)


def _padded_heads(tensor: Tensor, sizes: tuple[int, ...]) -> nn.Parameter:
    """A tensor `[K, …]` with each member's heads padded with zeros to as many as the widest has."""
    widest = max(sizes)
    parts = [torch.cat([part, part.new_zeros(widest - len(part), *part.shape[1:])]) for part in tensor.split(sizes)]
    return fixed(torch.cat(parts))


class FrozenPatchStem(nn.Module):
    """A patch stem for images of the size its position embedding was trained for; others use the original stem."""

    prefix: Tensor | None  # [G, P, d], prefix tokens with positions added

    def __init__(self, source: PatchStem) -> None:
        super().__init__()
        self.source, self.config = source, source.config
        self.register_buffer("prefix", source.prefix(source.position), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Embed images `[B, channels, H, W]` as `[G, B, T, d]`."""
        config, source = self.config, self.source
        if images.shape[1:] != (config.channels, *config.image_size):
            return source(images)
        (rows, columns), (height, width) = config.grid, config.patch_size
        copies = source.patch.shape[0]
        patches = images.reshape(-1, config.channels, rows, height, columns, width).permute(0, 2, 4, 1, 3, 5)
        bias = None if source.patch_bias is None else source.patch_bias.flatten()
        x = F.linear(patches.flatten(3).flatten(1, 2), source.patch.flatten(2).flatten(0, 1), bias)  # [B, h·w, G·d]
        x = x.unflatten(2, (copies, -1)).permute(2, 0, 1, 3)  # [G, B, h·w, d]
        if source.position is not None:
            x = x + source.position[:, None, config.position_prefix :]
        if self.prefix is not None:
            x = torch.cat([self.prefix[:, None].expand(-1, x.shape[1], -1, -1), x], dim=2)
        return x if source.norm is None else source.norm(x)


def sees_key_bias(attention: Attention) -> bool:
    """Whether the key bias matters: with a norm, or with a rotation, which changes it at every position."""
    return attention.key_norm is not None or attention.turn is not None


def fixed(tensor: Tensor) -> nn.Parameter:
    """A parameter that is not trainable."""
    return nn.Parameter(tensor, requires_grad=False)

"""A frozen ensemble: its weights rewritten for inference, and laid out for one plan to run it by."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeVar, cast

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
    asked_by,
    attend,
    head_ranges,
    into_heads,
    out_of_heads,
    read_tokens,
)
from ..model.rotary import FrozenRotary, turned
from ..model.states import HEAD_AXIS
from ..model.stem_readout import MapPool, PatchStem

Plan = Literal["batched", "loop", "grouped"]
"""How members with inputs of their own are run: in one batched product, for which they are padded to the widest; one
after another; or in one grouped product whatever their sizes. The result is the same."""

Module = TypeVar("Module", bound=nn.Module)
Parts = tuple[Tensor, ...]  # those of query, key and value that were asked for, each [R, T, H, d_k]


@torch.no_grad()
def frozen(ensemble: Ensemble, dtype: torch.dtype) -> Ensemble:
    """A copy of an ensemble rewritten for inference; it runs by the plan `"loop"` until `with_plan` says otherwise."""
    result = simplified(ensemble)
    last = len(blocks(result)) - 1
    reads_few = result.readout.tokens_read() is not None
    inputs = attention_inputs(result)
    for index, block in enumerate(blocks(result)):
        one_input = inputs[index] == 1 or len(block.attention.sizes) == 1
        replace_part(block, "attention", FrozenAttention(block.attention, one_input, reads_few and index == last))
    if (pooling := result.readout.map) is not None:
        one_input = inputs[-1] == 1 or len(pooling.attention.sizes) == 1
        replace_part(pooling, "attention", FrozenAttention(pooling.attention, one_input, reads_few=True))
    if (rotary := result.encoder.rotary) is not None:
        size = result.stem.config.grid if isinstance(result.stem, PatchStem) else (result.stem.config.max_tokens,)
        replace_part(result.encoder, "rotary", FrozenRotary(rotary, size, next(result.parameters())))
    if isinstance(result.stem, PatchStem):
        replace_part(result, "stem", FrozenPatchStem(result.stem))
    return result.to(dtype)


@torch.no_grad()
def with_plan(ensemble: Ensemble, plan: Plan) -> Ensemble:
    """A frozen ensemble that runs by this plan, around the same weights; `"batched"` may pad some of them."""
    result = _twin(ensemble, {}, share=True)
    for module in result.modules():
        if isinstance(module, FrozenAttention):
            module.use_plan(plan)
        elif isinstance(module, GroupedLinear):
            module.one_by_one = plan == "loop"
    return result


class FrozenAttention(nn.Module):
    """Computes what an `Attention` with folded biases computes, by one of the plans.

    Attributes:
        one_input: Whether all heads see one input, or there is one copy of them: then a plain product with all of
            them does, whatever the plan.
        into: Input projections: one with query, key and value; or, where few tokens ask, one with the query and one
            with key and value, each contiguous.
        head_ends: `[M]` of int32, where each member's heads end on the axis of all heads; for the plan `"grouped"`.
    """

    distinct: Tensor | None
    head_ends: Tensor | None

    def __init__(self, source: Attention, one_input: bool, reads_few: bool) -> None:
        super().__init__()
        self.sizes, self.causal, self.one_input = source.sizes, source.causal, one_input
        self.window, self.turn = source.window, source.turn
        self.plan: Plan = "loop"
        self.query_norm, self.key_norm = source.query_norm, source.key_norm
        biased = {0, 1} if _sees_key_bias(source) else {0}  # of query, key, value; the rest is folded away
        parts = ((0,), (1, 2)) if reads_few else ((0, 1, 2),)
        self.into = nn.ModuleList(IntoHeads(source.qkv, source.qkv_bias, one, biased) for one in parts)
        self.out, self.out_bias = source.out, source.out_bias
        self.register_buffer("distinct", source.distinct, persistent=False)
        self.register_buffer("head_ends", None, persistent=False)

    def use_plan(self, plan: Plan) -> None:
        """Choose how members with inputs of their own are run; `"batched"` pads them to the widest member."""
        self.plan = plan
        if plan == "grouped":
            ends = [stop for _, stop in head_ranges(self.sizes)]
            self.head_ends = torch.tensor(ends, dtype=torch.int32, device=self.out.device)
        if plan == "batched" and not self.one_input and len(set(self.sizes)) > 1:
            for projection in self.into:
                cast(IntoHeads, projection).pad(self.sizes)
            self.out = _padded_heads(self.out, self.sizes)
            self.sizes = (max(self.sizes),) * len(self.sizes)

    def forward(self, x: Tensor, context: Context, read: Read = None) -> Tensor:
        """Attend within `[N, B, T, d]` as `Attention` does, to `[max(N, G), B, T', d]`."""
        if not sum(self.sizes):
            return self._with_bias(x.new_zeros(*x.shape[:2], read_tokens(x.shape[2], read), self.out.shape[2]))
        if self.one_input:
            return self._all_at_once(x, context, read)
        if self.plan == "loop":
            return self._one_after_another(x, context, read)
        copies, ends = len(self.sizes), self.head_ends
        if ends is not None:
            parts = self._parts(x, asked_by(x, read), lambda into, one: into.grouped(one, ends))
            return self._out_of_members(self._attend(parts, context, read, 1))
        parts = self._parts(x, asked_by(x, read), lambda into, one: into.batched(one, copies))
        z = self._attend(parts, context, read, copies)  # [M·B, T', h, d_k]
        return self._with_bias(out_of_heads(z, self.out, copies))

    def _all_at_once(self, x: Tensor, context: Context, read: Read) -> Tensor:
        """One product with all heads."""
        parts = self._parts(x.flatten(0, 1), asked_by(x, read).flatten(0, 1), IntoHeads.plain)
        z = self._attend(parts, context, read, x.shape[0])  # [N·B, T', H, d_k]
        if len(self.sizes) == 1:
            return self._out_of_copy(0, z).unflatten(0, (x.shape[0], -1))  # [N, B, T', d]
        return self._out_of_members(z if self.distinct is None else z.index_select(2, self.distinct))

    def _one_after_another(self, x: Tensor, context: Context, read: Read) -> Tensor:
        """Member by member, from the input of the sublayer to its output."""
        results, asking = [], asked_by(x, read)
        for member, (start, stop) in enumerate(head_ranges(self.sizes)):
            if start == stop:  # nothing to attend with
                z = x.new_zeros(x.shape[1], read_tokens(x.shape[2], read), 0, self.out.shape[1])
            else:
                parts = self._parts(x[member], asking[member], partial(IntoHeads.plain, start=start, stop=stop))
                z = self._attend(parts, context, read, 1, member)  # [B, T', h, d_k]
            results.append(self._out_of_copy(member, z))
        return torch.stack(results)  # [M, B, T', d]

    def _parts(self, x: Tensor, asking: Tensor, product: "Callable[[IntoHeads, Tensor], Parts]") -> Parts:
        """Query, key and value, each `[R, T, H, d_k]`, the query for the tokens that ask alone."""
        projections = [cast(IntoHeads, one) for one in self.into]
        if len(projections) == 1:
            return product(projections[0], x)
        return product(projections[0], asking) + product(projections[1], x)

    def _attend(self, parts: Parts, context: Context, read: Read, repeats: int, member: int | None = None) -> Tensor:
        """Attention of query, key and value, of all heads or those of one member, to `[R, T', H, d_k]`."""
        q, k, v = parts
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm.of_heads(q, self.sizes, member), self.key_norm.of_heads(k, self.sizes, member)
        if self.turn is not None:
            places = read if isinstance(read, slice) else None
            q, k = turned(q, context.turns[self.turn], places), turned(k, context.turns[self.turn])
        mask = context.seen(self.window is not None, read)
        return attend(q, k, v, mask, repeats, self.causal)

    def _out_of_members(self, z: Tensor) -> Tensor:
        """Output projections of heads side by side, `[B, T', K, d_k]` to `[M, B, T', d]`."""
        copies = len(self.sizes)
        if self.head_ends is not None:
            ends = self.head_ends * self.out.shape[1]
            rows = z.flatten(2).flatten(0, 1)  # [B·T', K·d_k]
            y = F.grouped_mm(rows, self.out.flatten(0, 1), offs=ends)  # [M, B·T', d]
        elif self.plan == "batched" and len(set(self.sizes)) == 1:
            rows = z.flatten(0, 1).unflatten(1, (copies, -1)).flatten(2).transpose(0, 1)  # [M, B·T', h·d_k]
            y = torch.bmm(rows, self.out.reshape(copies, -1, self.out.shape[2]))
        else:
            parts = enumerate(z.split(self.sizes, dim=2))
            return torch.stack([self._out_of_copy(copy, part) for copy, part in parts])
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
        """`[M, B, T', d]` with each member's bias."""
        return y if self.out_bias is None else y + self.out_bias[:, None, None]


class IntoHeads(nn.Module):
    """Some of query, key and value of all heads: weights `[K, P, d_k, d]`.

    A plain product takes its bias along for free. In a batched or grouped product the bias is a pass of its own
    over the result, so it is added only to the parts (`biased`) in which it is not zero.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, parts: tuple[int, ...], biased: set[int]) -> None:
        super().__init__()
        self.weight = fixed(weight if len(parts) == weight.shape[1] else weight[:, list(parts)])
        self.biased = tuple(place for place, part in enumerate(parts) if bias is not None and part in biased)
        self.bias = fixed(bias[:, list(parts)].contiguous()) if bias is not None and self.biased else None

    def plain(self, x: Tensor, start: int = 0, stop: int | None = None) -> Parts:
        """All heads, or `start:stop` of them, on `[R, T, d]` that each of them sees: one plain product."""
        weight = self.weight[start:stop]  # [H, P, d_k, d]
        bias = None if self.bias is None else self.bias[start:stop].flatten()
        y = F.linear(x.flatten(0, 1), weight.flatten(0, 2), bias)  # two axes: one product, not one for each of R
        return y.reshape(*x.shape[:2], *weight.shape[:3]).unbind(3)

    def batched(self, x: Tensor, members: int) -> Parts:
        """`[M, B, T, d]`, each member's part by its own K / M heads, members on the batch axis of the result."""
        parts = into_heads(x, self.weight, None, members).unbind(3)  # each [M·B, T, h, d_k]
        if self.bias is None:
            return parts
        bias = self.bias.unflatten(0, (members, -1))[:, None, None]  # [M, 1, 1, h, P, d_k]
        return tuple(
            (part.unflatten(0, (members, -1)) + bias[..., place, :]).flatten(0, 1) if place in self.biased else part
            for place, part in enumerate(parts)
        )

    def grouped(self, x: Tensor, head_ends: Tensor) -> Parts:
        """`[M, B, T, d]`, each member's part by its own heads, all heads side by side in the result."""
        heads, count, head_dim, width = self.weight.shape
        columns = self.weight.reshape(-1, width).t()  # [d, K·P·d_k]
        y = F.grouped_mm(x.flatten(1, 2).contiguous(), columns, offs=head_ends * (count * head_dim))  # [B·T, K·P·d_k]
        parts = y.reshape(x.shape[1], x.shape[2], heads, count, head_dim).unbind(3)  # each [B, T, K, d_k]
        if self.bias is None:
            return parts
        return tuple(part + self.bias[:, place] if place in self.biased else part for place, part in enumerate(parts))

    def pad(self, sizes: tuple[int, ...]) -> None:
        """Give every member as many heads as the widest; the new ones are zero."""
        self.weight = _padded_heads(self.weight, sizes)
        self.bias = None if self.bias is None else _padded_heads(self.bias, sizes)


def _padded_heads(tensor: Tensor, sizes: tuple[int, ...]) -> nn.Parameter:
    """A tensor `[K, …]` with zeros put after each member's heads, up to as many as the widest has."""
    widest = max(sizes)
    parts = [torch.cat([part, part.new_zeros(widest - len(part), *part.shape[1:])]) for part in tensor.split(sizes)]
    return fixed(torch.cat(parts))


class FrozenPatchStem(nn.Module):
    """A patch stem for images of the size its position embedding was made for; others go the usual way."""

    prefix: Tensor | None  # [G, P, d], the prefix tokens with their positions

    def __init__(self, source: PatchStem) -> None:
        super().__init__()
        self.source, self.config = source, source.config
        self.register_buffer("prefix", source.prefix(source.position), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Embed images `[B, channels, H, W]` as `[G, B, T, d]`."""
        config, source = self.config, self.source
        if images.dim() != 4 or images.shape[1:] != (config.channels, *config.image_size):
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


# --- rewriting the weights: equal copies merged, constants folded in --------------------------------------


@torch.no_grad()
def simplified(ensemble: Ensemble) -> Ensemble:
    """A copy with the model's own modules in which equal copies are merged and constants folded into the weights.

    Weights of half precision come back in float32, where folding does not lose digits; the caller converts.
    """
    result = _twin(ensemble, {}, share=False).eval()
    _merge_equal_copies(result)
    if result.dtype in (torch.bfloat16, torch.float16):
        result.to(torch.float32)
    for block in blocks(result):
        if (biases := block.attention.biases) is not None:
            block.attention.qkv_bias = fixed(biases)
        if block.norm_first:
            _fold_norms(block)
        _fold_scales(block.attention, block.mlp)
        _fold_biases(block.attention)
    if (pooling := result.readout.map) is not None:
        _fold_biases(pooling.attention)
    _compute_common_heads_once(result)
    return result


def _twin(module: Module, known: dict[int, Any], share: bool) -> Module:
    """The same modules around the same tensors, or around copies of them; settings and metadata are shared.

    `copy.deepcopy` would copy those too, and spend most of its time on the dictionaries of hooks.
    """

    def made(part: nn.Module | Tensor) -> nn.Module | Tensor:
        if isinstance(part, nn.Module):
            return _twin(part, known, share)
        if share:
            return part
        return fixed(part.detach().clone()) if isinstance(part, nn.Parameter) else part.clone()

    def once(part: nn.Module | Tensor | None) -> Any:  # what stands in two places stays one
        if part is not None and id(part) not in known:
            known[id(part)] = made(part)
        return known.get(id(part))

    result = copy.copy(module)
    for name, value in vars(result).items():
        if isinstance(value, dict):
            inner = name in ("_modules", "_parameters", "_buffers")
            vars(result)[name] = {key: once(part) for key, part in value.items()} if inner else value.copy()
    return result


def blocks(ensemble: Ensemble) -> list[Block]:
    """The blocks of the encoder."""
    return [cast(Block, block) for block in ensemble.encoder.layers]


def branching_layer(ensemble: Ensemble) -> int:
    """The first layer in which activations differ between members; the number of layers if none does."""
    inputs = attention_inputs(ensemble)
    branches = (index for index, block in enumerate(blocks(ensemble)) if max(inputs[index], _copies(block)) > 1)
    return next(branches, ensemble.num_layers)


def attention_inputs(ensemble: Ensemble) -> list[int]:
    """How many different inputs the attention of each layer sees, one that pools among them: 1, or one per member."""
    members = next(ensemble.stem.parameters()).shape[0]
    counts = []
    for block in blocks(ensemble):
        if block.norm_first and isinstance(block.norm1, GroupedNorm):
            members = max(members, block.norm1.weight.shape[0])
        counts.append(members)
        members = max(members, _copies(block))
    readout = ensemble.readout
    if readout.map is not None:
        normed = readout.norm is not None and readout.config.norm == "tokens"
        norms = len(readout.norm.weight) if readout.norm is not None and normed else 1
        counts.append(max(members, norms, len(readout.map.query_token)))
    return counts


def _copies(block: Block) -> int:
    """The most copies of anything in a block."""
    small = [parameter.shape[0] for name, parameter in block.named_parameters() if name not in HEAD_AXIS]
    return max([len(block.attention.sizes), *small])


def _merge_equal_copies(ensemble: Ensemble) -> None:
    """Keep one copy of every parameter that is equal in all members, in place; they then branch as late as possible."""
    _merge(*((module, name) for module in ensemble.stem.modules() for name in module._parameters))
    for module in [*ensemble.encoder.modules(), *ensemble.readout.modules()]:
        if isinstance(module, GroupedLinear | GroupedNorm):
            _merge((module, "weight"), (module, "bias"))
        elif isinstance(module, MapPool):
            _merge((module, "query_token"))
            _merge_attention(module.attention)
        elif isinstance(module, Block):
            _merge((module.mlp, "scale"))
            _merge_attention(module.attention)


def _merge(*places: tuple[nn.Module, str]) -> None:
    """Store these parameters once where all copies of all of them are equal."""
    found = [(module, name, getattr(module, name)) for module, name in places if getattr(module, name) is not None]
    if all(_equal_copies(parameter) for _, _, parameter in found):
        for module, name, parameter in found:
            setattr(module, name, fixed(parameter[:1].clone()))


def _merge_attention(attention: Attention) -> None:
    """Store the whole sublayer once where all copies are equal; else what can be stored once by itself."""
    _merge((attention, "scale"))
    _merge((attention, "out_bias"))
    if len(attention.sizes) == 1 or not attention.even:
        return
    own = {name: parameter for name, parameter in attention.named_parameters() if f"attention.{name}" in HEAD_AXIS}
    copies = [tensor.unflatten(0, (len(attention.sizes), -1)) for tensor in own.values() if len(tensor)]
    small = [parameter for name, parameter in attention.named_parameters() if name not in own]
    if all(_equal_copies(tensor) for tensor in [*copies, *small]):
        attention.sizes = attention.sizes[:1]
        for name, tensor in own.items():
            setattr(attention, name, fixed(tensor[: attention.sizes[0]].clone()))


def _equal_copies(parameter: Tensor) -> bool:
    return all(torch.equal(parameter[0], other) for other in parameter[1:])


def _compute_common_heads_once(ensemble: Ensemble) -> None:
    """Where members see the same input for the last time, keep one of each set of equal heads, to be computed once."""
    layer = branching_layer(ensemble)
    if layer == len(blocks(ensemble)) or attention_inputs(ensemble)[layer] > 1:
        return
    attention = blocks(ensemble)[layer].attention
    normed = attention.query_norm is not None and attention.query_norm.weight.shape[0] > 1
    if normed or len(attention.sizes) == 1 or not len(attention.out):
        return
    rows = attention.qkv.flatten(1)
    if attention.qkv_bias is not None:
        rows = torch.cat([rows, attention.qkv_bias.flatten(1)], dim=1)
    alike = [  # a row that holds no numbers is equal to none but itself
        next(other for other, row in enumerate(rows) if other == at or torch.equal(row, one))
        for at, one in enumerate(rows)
    ]
    firsts = sorted(set(alike))
    if len(firsts) < len(rows):
        attention.qkv = fixed(attention.qkv[firsts])
        attention.qkv_bias = None if attention.qkv_bias is None else fixed(attention.qkv_bias[firsts])
        attention.distinct = torch.tensor([firsts.index(one) for one in alike], device=rows.device)


def _fold_norms(block: Block) -> None:
    """Norms that members have of their own go into the projections after them, where members have these too."""
    norm, attention = block.norm1, block.attention
    if isinstance(norm, GroupedNorm) and 1 < norm.weight.shape[0] == len(attention.sizes):
        owner = _member_of_each_head(attention)
        if norm.bias is not None:
            constant = torch.einsum("kpid,kd->kpi", attention.qkv, norm.bias[owner])  # what β becomes, [K, 3, d_k]
            attention.qkv_bias = _added(constant, attention.qkv_bias)
        attention.qkv = fixed(attention.qkv * norm.weight[owner][:, None, None, :])
        replace_part(block, "norm1", _without_weights(norm))
    norm, up = block.norm2, block.mlp.up
    if 1 < norm.weight.shape[0] == up.weight.shape[0]:
        if norm.bias is not None:
            up.bias = _added(torch.einsum("god,gd->go", up.weight, norm.bias), up.bias)  # [M, hidden]
        up.weight = fixed(up.weight * norm.weight[:, None, :])
        replace_part(block, "norm2", _without_weights(norm))


def _without_weights(norm: GroupedNorm) -> nn.Module:
    """What is left of a norm whose weights are folded: the same for every member."""
    kind = nn.RMSNorm if norm.kind == "rms" else nn.LayerNorm
    return kind(norm.weight.shape[1], norm.eps, elementwise_affine=False)


def _fold_scales(attention: Attention, mlp: MLP) -> None:
    """LayerScale goes into the output projection before it."""
    if (scale := attention.scale) is not None:  # [1 or G, d]
        of_heads = scale if scale.shape[0] == 1 else scale[_member_of_each_head(attention)]  # [1 or K, d]
        attention.out = fixed(attention.out * of_heads[:, None, :])
        attention.out_bias = None if attention.out_bias is None else fixed(attention.out_bias * scale)
        attention.scale = None
    if (scale := mlp.scale) is not None and scale.shape[0] in (1, mlp.down.weight.shape[0]):
        mlp.down.weight = fixed(mlp.down.weight * scale[:, :, None])
        mlp.down.bias = None if mlp.down.bias is None else fixed(mlp.down.bias * scale)
        mlp.scale = None


def _fold_biases(attention: Attention) -> None:
    """The bias of the value becomes one of the output, that of the key is dropped where softmax does not see it."""
    bias = attention.qkv_bias  # [K, 3, d_k]
    if bias is None or not sum(attention.sizes):
        return
    through_heads = torch.einsum("ki,kid->kd", bias[:, 2], attention.out)  # [K, d]
    constant = through_heads.new_zeros(len(attention.sizes), through_heads.shape[1])
    constant.index_add_(0, _member_of_each_head(attention), through_heads)  # [G, d]
    attention.out_bias = _added(constant, attention.out_bias)
    kept = bias.clone()
    kept[:, 2 if _sees_key_bias(attention) else 1 :] = 0
    attention.qkv_bias = fixed(kept)


def _sees_key_bias(attention: Attention) -> bool:
    """Whether the bias of the key matters: a norm sees it, a rotation makes it another one at every place."""
    return attention.key_norm is not None or attention.turn is not None


def _member_of_each_head(attention: Attention) -> Tensor:
    """`[K]`: which copy each head belongs to."""
    sizes = torch.tensor(attention.sizes, device=attention.out.device)
    return torch.repeat_interleave(torch.arange(len(attention.sizes), device=sizes.device), sizes)


def _added(constant: Tensor, old: Tensor | None) -> nn.Parameter:
    return fixed(constant if old is None else old + constant)


def fixed(tensor: Tensor) -> nn.Parameter:
    """A parameter that is not trained."""
    return nn.Parameter(tensor, requires_grad=False)


def replace_part(module: nn.Module, name: str, part: nn.Module) -> None:
    """Put another part in the place of one, of a class that the module does not declare."""
    setattr(module, name, part)

"""The encoder: the forward pass of all members, from embedded tokens to features, to be read from the top.

Activations are `[N, B, T, d]`, where N is 1 while members are identical and M once they differ. Parameters are stored
in G copies: one shared by all members, or one per member. The heads of all copies are concatenated on one axis of
length K; members may keep different numbers of them.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import accumulate, chain
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from .._utils import evaluation_mode
from .config import Activation, EncoderConfig, EnsembleConfig, HiddenActivation, LowRank, NormKind
from .rotary import Rotary, Rotation, rotate

Past = dict[tuple[int, int | None], tuple[Tensor, Tensor]]
"""Keys and values `[N, P, L, d_k]` of the P tokens of a prefix, by layer and copy (None: of all copies)."""


class Context(NamedTuple):
    """What attention knows about tokens besides their values."""

    key_mask: Tensor | None = None  # [B, T], True where a token may be attended to; None if all may
    turns: tuple[Rotation, ...] = ()  # rotations by token position, one for each rotary base
    near: Tensor | None = None  # [T, T], True within the window of local attention; None without one, or if it covers T
    local: Tensor | None = None  # mask of local attention with padding removed: [T, T] or [B, T, T]
    packed: bool = False  # padding comes last, where causal attention does not see it: no mask is needed for it
    last: Tensor | None = None  # [B], position of the only token that the readout takes, if that depends on the text
    before: Past | None = None  # keys and values of the tokens in front of every text
    kept: Past | None = None  # where to keep those of these tokens

    def with_mask(self, key_mask: Tensor | None) -> "Context":
        """The context for samples with this key mask.

        A token always attends to itself, even padding that is far from all tokens, so that its attention is not NaN.
        """
        if key_mask is None or self.near is None or self.packed:
            return self._replace(key_mask=key_mask, local=self.near)
        itself = torch.eye(self.near.shape[0], dtype=torch.bool, device=key_mask.device)
        return self._replace(key_mask=key_mask, local=(key_mask[:, None] & self.near) | itself)

    def take(self, rows: Tensor | slice) -> "Context":
        """The context for some samples."""
        context = self if self.last is None else self._replace(last=self.last[rows])
        return context if self.key_mask is None else context.with_mask(self.key_mask[rows])

    def seen(self, local: bool, read: "Read") -> Tensor | None:
        """Mask of visible keys: `[B, 1, T]`, or for local attention `[T', T]` or `[B, T', T]`; None if all are."""
        if not local or self.local is None:
            return None if self.key_mask is None or self.packed else self.key_mask[:, None]
        if isinstance(read, Places):
            samples = torch.arange(read.at.shape[0], device=read.at.device)
            return (self.local[read.at] if self.local.dim() == 2 else self.local[samples, read.at])[:, None]
        return self.local[..., read, :] if isinstance(read, slice) else self.local


class Places(NamedTuple):
    """One token of each sample, by its position `[B]`."""

    at: Tensor


_THREAD = threading.local()  # `gates`: set by `gating` in this thread; `rule`: by `dropping`; absent if never set


@contextmanager
def gating(gates: Mapping[nn.Module, Tensor]) -> Iterator[None]:
    """In this thread, multiply the outputs of heads by gates `[K]`, one mapping from attention to gate for all calls.

    No weight is changed and other threads are not affected; what was computed inside can be differentiated outside.
    Gates of nested blocks are multiplied, and blocks may end in any order.
    """
    _THREAD.gates = (*getattr(_THREAD, "gates", ()), gates)
    try:
        yield
    finally:
        _THREAD.gates = tuple(others for others in _THREAD.gates if others is not gates)


@contextmanager
def dropping(rule: bool | torch.Generator) -> Iterator[None]:
    """Override dropout in this thread alone, without changing flags: off (False), or drawn from a generator."""
    before = getattr(_THREAD, "rule", None)
    _THREAD.rule = rule
    try:
        yield
    finally:
        _THREAD.rule = before


def drops(module: nn.Module) -> bool | torch.Generator:
    """Whether a layer drops: as set by `dropping`, else its training mode; a generator if one is to be used."""
    rule: bool | torch.Generator | None = getattr(_THREAD, "rule", None)
    return module.training if rule is None else rule


class OurModel(nn.Module):
    """A model of this library: it has members, a device and a dtype, and all its layers follow `dropping`."""

    num_members: int

    def _per_member(self, x: Tensor) -> Tensor:
        return x.expand(self.num_members, *x.shape[1:])  # [N, B, …] -> [M, B, …]

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the parameters."""
        return next(self.parameters()).dtype

    def to(self, *where: Any, memory_format: torch.memory_format | None = None, **more: Any) -> Self:
        """Like `nn.Module.to`, but ignores `memory_format`, which is meant for images: weights have other axes."""
        return super().to(*where, **more)


@contextmanager
def evaluating(*models: object) -> Iterator[None]:
    """Run in evaluation mode: our models in this thread only, without flag changes; other modules by their flags."""
    foreign = [model for model in models if isinstance(model, nn.Module) and not isinstance(model, OurModel)]
    with dropping(False), evaluation_mode(*foreign):
        yield


Read = slice | Places | Tensor | None
"""Which tokens are queries: all, those at some positions, or other tokens `[N, B, T', d]` that are not keys."""


class Encoder(nn.Module):
    """All blocks, first to last. Layers that all members share run once."""

    def __init__(self, config: EnsembleConfig) -> None:
        super().__init__()
        self.window, self.packed = config.encoder.window, config.packed
        self.rotary = None if config.encoder.rotary is None else Rotary(config)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.encoder.layers))

    def context(self, key_mask: Tensor | None, size: tuple[int, ...], like: Tensor, start: int = 0) -> Context:
        """The attention context of texts with `(tokens,)`, or of images with `(rows, columns)` patches.

        `start` is the number of tokens in front of every text.
        """
        near, last = None, start + like.shape[2]  # exported code serves any length
        if self.window is not None and (torch.compiler.is_exporting() or last > self.window + 1):
            positions = torch.arange(last, device=like.device)
            near = (positions[start:, None] - positions).abs() <= self.window  # [T, start + T]
        turns = () if self.rotary is None else self.rotary(size, like, start)
        return Context(None, turns, near, packed=self.packed).with_mask(key_mask)

    def forward(
        self, x: Tensor, context: Context, read: Read = None, start: int = 0, stop: int | None = None
    ) -> Tensor:
        """Map embedded tokens `[N, B, T, d]` (N = 1 when the stem is shared) to `[N', B, T', d]`.

        The last block only computes the positions that the readout uses, `read`. With `start` or `stop`, only these
        blocks run, from the tokens before them.
        """
        last = len(self.layers) - 1
        for index in range(start, last + 1 if stop is None else stop):
            x = self.layers[index](x, context, read if index == last else None)
        return x


class Block(nn.Module):
    """Pre-norm (`x + f(norm(x))`) or post-norm (`norm(x + f(x))`) block for all members; others by `EncoderConfig`."""

    def __init__(self, config: EnsembleConfig, layer: int) -> None:
        super().__init__()
        encoder = config.encoder
        self.norm_first = encoder.norm_first
        self.drop_path = encoder.drop_path[layer] if encoder.drop_path else 0.0
        norms, copies = config.copies("norms", layer), config.copies("attention", layer)
        self.parallel = encoder.parallel
        norm = partial(GroupedNorm, norms, encoder.width, encoder.norm_eps, encoder.norm)
        before, after = not encoder.norm_after, encoder.sandwich or encoder.norm_after
        self.norm1: nn.Module = norm() if before and (layer or encoder.first_norm) else nn.Identity()
        self.attention = Attention(encoder, tuple(config.heads[m][layer] for m in range(copies)), layer)
        self.attention.add_updates(config.members, config.ranks(layer))
        self.norm2: nn.Module = norm() if before and encoder.parallel != 1 else nn.Identity()
        self.post_norm1, self.post_norm2 = (norm() if after else None for _ in range(2))
        self.mlp = MLP(encoder, config.copies("mlp", layer))
        self.mlp.up.add_update(config.members, config.ranks(layer).up)
        self.mlp.down.add_update(config.members, config.ranks(layer).down)

    def forward(self, x: Tensor, context: Context, read: Read = None) -> Tensor:
        """Map `[N, B, T, d]` to `[N', B, T', d]`; with `read`, only these positions are computed."""
        attended = self.attention(self.attention_input(x), context, read)
        return self.finish(select_queries(x, read), attended)

    def attention_input(self, x: Tensor) -> Tensor:
        """The input of the attention sublayer."""
        return self.norm1(x) if self.norm_first else x

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Everything after the attention sublayer: its residual, and the MLP with its residual."""
        if self.post_norm1 is not None:
            attended = self.post_norm1(attended)
        if self.parallel:
            normed = self.norm1(x) if self.parallel == 1 else self.norm2(x)
            return x + self._drop(attended) + self._drop(self._after_mlp(normed))
        x = x + self._drop(attended)
        if self.norm_first:
            return x + self._drop(self._after_mlp(self.norm2(x)))
        x = self.norm1(x)
        return self.norm2(x + self._drop(self.mlp(x)))

    def _after_mlp(self, normed: Tensor) -> Tensor:
        y: Tensor = self.mlp(normed)
        return y if self.post_norm2 is None else self.post_norm2(y)

    def _drop(self, branch: Tensor) -> Tensor:
        """Stochastic depth: drop the branch for some samples (of each member), and scale up the others."""
        if self.drop_path == 0.0 or (rule := drops(self)) is False:
            return branch
        keep = 1.0 - self.drop_path
        shape = (*branch.shape[:2], 1, 1)
        drawn = torch.empty(shape, dtype=torch.float32, device=branch.device)
        kept = drawn.uniform_(generator=None if rule is True else rule) < keep
        return branch * (kept.to(branch.dtype) / keep)


class Attention(nn.Module):
    """The attention sublayer for G copies (1 if shared by all members, else one per member).

    `qkv` holds query, key and value of each head. In grouped attention `query` has one row for each head, and
    `key_value` one for each group of successive heads that share them: L rows in all.

    If members with the same input have heads in common, `qkv` may store each distinct head once; `distinct` then maps
    each of the K heads to its row.
    """

    distinct: Tensor | None  # [K]
    qkv: Tensor  # [K, 3, d_k, d]; only if not grouped
    query: Tensor  # [K, 1, d_k, d], and the next one [L, 2, d_k, d]: only if grouped
    key_value: Tensor
    qkv_bias: Tensor | None
    query_bias: Tensor | None
    key_value_bias: Tensor | None
    out_left: Tensor  # [M, K, d_k, r], and the next one [M, r, d]: only with an update of the output projection
    out_right: Tensor

    def __init__(self, config: EncoderConfig, heads: tuple[tuple[int, ...], ...], layer: int = 0) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        self.sizes = sizes = tuple(map(len, heads))  # heads of each copy; K is their sum
        grouped = config.kv_heads is not None
        self.shares = tuple(map(config.shares, heads)) if grouped else None  # of each copy: heads of each group
        self.joint = heads if config.joint_qk_norm else None  # all heads are projected, and after their norm these used
        local = bool(config.local) and config.local[layer]
        self.window = config.window if local else None  # how far a token sees to each side; None for no limit
        rotary = config.rotary  # `turn`: index of this layer's rotation in the context
        self.turn = None if rotary is None else int(self.window is not None and rotary.local_base is not None)
        if config.rotated and not config.rotated[layer]:
            self.turn = None
        copies = len(sizes)
        total = sum(sizes)
        width = config.width
        head_dim = config.head_dim
        parts = {"query": 1, "key_value": 2} if grouped else {"qkv": 3}
        for name, rows in self.inputs.items():
            setattr(self, name, empty(sum(rows), parts[name], head_dim, width))
            biases = 2 if name == "qkv" and not config.key_bias else parts[name]
            setattr(self, f"{name}_bias", empty(sum(rows), biases, head_dim) if config.qkv_bias else None)
        self.query_norm, self.key_norm = (
            GroupedNorm(copies, head_dim * (heads if config.joint_qk_norm else 1), config.norm_eps, config.norm)
            if config.qk_norm
            else None
            for heads in (config.heads, config.kv_heads or config.heads)
        )
        self.out = empty(total, head_dim, width)  # each head's part of the output projection
        self.out_bias = empty(copies, width) if config.out_bias else None  # also applies if no head is left
        self.scale = empty(copies, width) if config.layer_scale else None
        self.out_dropout = Dropout(config.projection_dropout)
        self.one_by_one = False  # run members with own inputs one by one instead of in one batched product
        self.updates: tuple[str, ...] = ()  # of the projections that members update
        self.branches = 1  # inputs that differ because of updates: the number of members, if there are any
        self.folded: tuple[int, ...] = ()  # of query 0, key 1, value 2: whose bias is zero, folded into other weights
        self.register_buffer("distinct", None, persistent=False)

    def add_updates(self, members: int, ranks: LowRank) -> None:
        """Give each member updates of these ranks: weights are then larger by `left @ right`, member by member."""
        if ranks.inputs:
            self.updates, self.branches = tuple(self.inputs), members
        for name in self.updates:
            *rows, width = getattr(self, name).shape  # [K, P, d_k]
            setattr(self, f"{name}_left", empty(members, *rows, ranks.inputs))
            setattr(self, f"{name}_right", empty(members, ranks.inputs, width))
        if ranks.out:
            self.updates += ("out",)
            self.out_left = empty(members, *self.out.shape[:2], ranks.out)
            self.out_right = empty(members, ranks.out, self.out.shape[2])

    @property
    def even(self) -> bool:
        """Whether all copies have the same number of heads, in equal groups, so that one batched product suffices."""
        return len(set(self.joint or self.shares or self.sizes)) == 1

    @property
    def inputs(self) -> dict[str, tuple[int, ...]]:
        """The input projections by name, with the number of rows of each copy."""
        names = ("qkv",) if self.shares is None else ("query", "key_value")
        if self.joint is not None:
            counts = zip(names, (self.config.heads, self.config.kv_heads or self.config.heads), strict=False)
            return {name: tuple(count * bool(kept) for kept in self.joint) for name, count in counts}
        rows = self.sizes, self.sizes if self.shares is None else tuple(map(len, self.shares))
        return dict(zip(names, rows, strict=False))

    def biases(self, name: str = "qkv") -> Tensor | None:
        """The bias `[K or L, P, d_k]` of an input projection, with zeros for keys without one; None without biases."""
        bias: Tensor | None = getattr(self, f"{name}_bias")
        if bias is None or name != "qkv" or bias.shape[1] == 3:
            return bias
        return torch.stack([bias[:, 0], torch.zeros_like(bias[:, 0]), bias[:, 1]], dim=1)

    def forward(self, x: Tensor, context: Context, read: Read = None) -> Tensor:
        """Attend within normalised activations `[N, B, T, d]`; `read` selects the queries.

        Returns:
            `[max(N, G), B, T', d]`, LayerScale and dropout applied, residual not added.
        """
        if 1 < len(self.sizes) == x.shape[0] and (self.one_by_one or not self.even):
            asking = read.split(1) if isinstance(read, Tensor) else [read] * len(x)
            alone = [self._out_of_copy(i, self.mix(x[i : i + 1], context, asking[i], i)) for i in range(len(x))]
            y = torch.stack(alone)
        else:
            y = self.project(self.mix(x, context, read), max(len(x), self.branches))
        if self.scale is not None:
            y = y * self.scale[:, None, None, :]
        return self.out_dropout(y)

    def mix(self, x: Tensor, context: Context, read: Read = None, copy: int | None = None) -> Tensor:
        """Outputs of the individual heads, before the output projection: of all, or those of one copy on its input.

        Returns:
            `[B, T', K, d_k]`, all heads of all members concatenated; but `[N·B, T', heads, d_k]` if members run in one
            batch, or share one copy while their inputs differ.
        """
        z = self._attend(x, context, read, copy)
        z = z if self.distinct is None else z.index_select(2, self.distinct)
        for gates in getattr(_THREAD, "gates", ()):
            if self in gates:
                z = self._gated(z, gates[self] if copy is None else gates[self].split(self.sizes)[copy])
        return z

    def _gated(self, z: Tensor, gate: Tensor) -> Tensor:
        """Head outputs from `mix`, each multiplied by its number in the gate `[K]`."""
        gate = gate.to(z)
        if z.shape[2] == len(gate):  # [B, T', K, d_k]
            return z * gate[:, None]
        copies = len(self.sizes)  # [M·B, T', K / M, d_k]
        return (z.unflatten(0, (copies, -1)) * gate.view(copies, 1, 1, -1, 1)).flatten(0, 1)

    def project(self, z: Tensor, members: int) -> Tensor:
        """Output projection of head outputs from `mix`, for an input with `members` on its first axis."""
        copies = len(self.sizes)
        if copies == 1:
            y = self._out_of_copy(0, z).unflatten(0, (members, -1))  # [N, B, T', d]
            if "out" not in self.updates:
                return y
            rows = z.flatten(2).unflatten(0, (members, -1))  # [N, B, T', h·d_k]
            return y + updated(rows, self.out_right.mT, self.out_left.flatten(1, 2).mT)
        if not sum(self.sizes):
            z = z[: len(z) // members]
        if not self.even or not sum(self.sizes) or (self.one_by_one and members == 1):
            return torch.stack([self._out_of_copy(copy, part) for copy, part in enumerate(z.split(self.sizes, dim=2))])
        if members > 1:
            rows = z.flatten(2).unflatten(0, (copies, -1)).flatten(1, 2)  # [M, B·T', h·d_k]
        else:
            rows = z.flatten(0, 1).unflatten(1, (copies, -1)).flatten(2).transpose(0, 1)
        y = torch.bmm(rows, self.out.unflatten(0, (copies, -1)).flatten(1, 2)).unflatten(1, (-1, z.shape[1]))
        return y if self.out_bias is None else y + self.out_bias[:, None, None, :]

    def _out_of_copy(self, copy: int, z: Tensor) -> Tensor:
        """Output projection of one copy's heads, `[R, T', h, d_k]` to `[R, T', d]`, with its bias."""
        weight = self.out[slice(*head_ranges(self.sizes)[copy])].flatten(0, 1)  # [h·d_k, d]
        bias = None if self.out_bias is None else self.out_bias[min(copy, len(self.out_bias) - 1)]
        if not self.sizes[copy]:  # ONNX Runtime reads no empty products
            nothing = z.new_zeros(*z.shape[:2], self.out.shape[2])
            return nothing if bias is None else nothing + bias
        return F.linear(z.flatten(2).flatten(0, 1), weight.t(), bias).unflatten(0, z.shape[:2])

    def _attend(self, x: Tensor, context: Context, read: Read, copy: int | None) -> Tensor:
        """Attention of all heads, or of one copy's heads, on its part of the input."""
        asking = select_queries(x, read)
        if not (sum(self.sizes) if copy is None else self.sizes[copy]):  # no head is left
            return x.new_zeros(x.shape[0] * x.shape[1], asking.shape[2], 0, self.out.shape[1])
        if self.shares is None and read is None:
            q, k, v = self._into_heads(x, "qkv", copy)  # [R, T, H, d_k] each
        elif self.shares is None:
            (q,) = self._into_heads(asking, "qkv", copy, slice(0, 1))
            k, v = self._into_heads(x, "qkv", copy, slice(1, 3))
        else:
            (q,) = self._into_heads(asking, "query", copy)
            k, v = self._into_heads(x, "key_value", copy)  # [R, T, L, d_k] each
        repeats = max(len(x), self.branches)
        shares, (heads, *_, groups) = None, (*self.inputs.values(),) * 2
        joined = copy is None and q.shape[2] == sum(heads)  # all copies concatenated
        if self.shares is not None:
            shares = tuple(chain(*self.shares)) if joined else self.shares[copy or 0]
            shares = None if set(shares) == {1} else shares
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm.of_heads(q, heads, copy), self.key_norm.of_heads(k, groups, copy)
        if self.joint is not None:
            used = [(start, kept) for (start, _), kept in zip(head_ranges(heads), self.joint, strict=True)]
            used = used if joined else [(0, self.joint[copy or 0])]
            each = self.config.heads // (self.config.kv_heads or self.config.heads)
            of_keys = [sorted({start // each + head // each for head in kept}) for start, kept in used]
            q = chosen(q, [start + head for start, kept in used for head in kept])
            k, v = chosen(k, [*chain(*of_keys)]), chosen(v, [*chain(*of_keys)])
        if self.turn is not None:
            turn = own = context.turns[self.turn]
            if isinstance(read, slice):
                own = turn[0][read], turn[1][read]
            elif isinstance(read, Places):
                at = read.at.repeat(repeats)  # [R]
                own = turn[0][at][:, None], turn[1][at][:, None]  # [R, 1, 1, d_k] each
            q, k = rotate(q, own), rotate(k, turn)
        if context.kept is not None:
            context.kept[self.layer, copy] = k, v
        start = 0
        if context.before is not None:  # [N, P, L, d_k] each, the same for all rows of a member
            front = [one.repeat_interleave(x.shape[1], 0) for one in context.before[self.layer, copy]]
            start, k, v = front[0].shape[1], torch.cat([front[0], k], dim=1), torch.cat([front[1], v], dim=1)
        mask, causal = context.seen(self.window is not None, read), self.config.causal
        if causal and isinstance(read, Places):
            earlier = torch.arange(k.shape[1], device=k.device) <= read.at[:, None, None] + start  # [B, 1, start + T]
            mask, causal = earlier if mask is None else mask & earlier, False
        rule = self.config.attention_dropout > 0.0 and drops(self)
        return attend(q, k, v, mask, repeats, causal, shares, self.config, rule, start)

    def _into_heads(self, x: Tensor, name: str, copy: int | None, parts: slice = slice(None)) -> Sequence[Tensor]:
        """Some of query, key and value `[R, T, H, d_k]` of `[N, B, T, d]`, of the heads of all copies or of one.

        A plain product adds its bias for free; a batched one in another pass, where it is not zero.
        """
        rows = slice(None) if copy is None else slice(*head_ranges(self.inputs[name])[copy])
        weight, biases = getattr(self, name)[rows, parts], self.biases(name)  # [H, P, d_k, d], [K, 3, d_k]
        bias = None if biases is None else biases[rows, parts]
        (repeats, batch, tokens, width), members = x.shape, len(self.sizes)
        if members == 1 or repeats == 1:  # all these heads have the same input: a single product
            y = F.linear(x.flatten(0, 2), weight.flatten(0, 2), None if bias is None else bias.flatten())
            if name in self.updates:
                left, right = getattr(self, f"{name}_left")[:, :, parts], getattr(self, f"{name}_right")
                y = y.unflatten(0, (repeats, -1)) + updated(x.flatten(1, 2), left.flatten(1, 3), right)  # [M, B·T, …]
            return y.reshape(-1, tokens, *weight.shape[:3]).unbind(3)
        y = torch.bmm(x.flatten(1, 2), weight.reshape(members, -1, width).transpose(1, 2))  # [M, B·T, h·P·d_k]
        found = [*y.reshape(repeats * batch, tokens, len(weight) // members, *weight.shape[1:3]).unbind(3)]
        first = 1 if name == "key_value" else parts.start or 0  # 0 is the query, 1 the key, 2 the value
        for index, part in enumerate(found):
            if bias is not None and first + index not in self.folded:
                own = bias[:, index].unflatten(0, (members, -1))[:, None, None]  # [M, 1, 1, h, d_k]
                found[index] = (part.unflatten(0, (members, -1)) + own).flatten(0, 1)
        return found


def updated(x: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """What updates of a low rank, `[M, out, r]` and `[M, r, in]`, add to a map of `[N, …, in]`: `[M, …, out]`."""
    rows = x.flatten(1, -2).expand(len(left), -1, -1)  # [M, B·T, in]
    return torch.bmm(torch.bmm(rows, right.mT), left.mT).unflatten(1, x.shape[1:-1])


def chosen(x: Tensor, heads: Sequence[int]) -> Tensor:
    """Some heads of `[R, T, H, d_k]`."""
    return x if len(heads) == x.shape[2] else torch.stack([x[:, :, head] for head in heads], dim=2)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    repeats: int,
    causal: bool,
    shares: tuple[int, ...] | None,
    config: EncoderConfig,
    rule: bool | torch.Generator,
    start: int = 0,
) -> Tensor:
    """Attention of every head: the only place where it is computed and where a backend is chosen.

    Query `[R, T', H, d_k]`, key and value `[R, T, H, d_k]` give `[R, T', H, d_k]`, where R = repeats · B. The mask,
    from `Context.seen`, is True for visible keys, and `rule` is from `drops`, for dropout of attention weights. In
    grouped attention, `shares` says how many successive heads use each key and value. The first `start` keys are those
    of a prefix.
    """
    factor, softcap, dropout = config.attention_scale, config.softcap, config.attention_dropout
    written_out = softcap is not None or isinstance(rule, torch.Generator)  # the kernels take neither
    if mask is not None and mask.dim() == 3:
        mask = (mask.repeat(repeats, 1, 1) if repeats > 1 else mask)[:, None]  # [R, 1, 1 or T', T]
    if causal and (mask is not None or written_out or start):
        earlier = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).tril(start)
        mask = earlier if mask is None else mask & earlier
    group, by_kernel = 1, False
    if shares is not None and len(set(shares)) == 1 and not written_out:  # kernels take groups of one size
        group, by_kernel = (1, True) if mask is None else (shares[0], False)  # and on a GPU only without a mask
    elif shares is not None:
        k, v = to_heads(k, 2, shares), to_heads(v, 2, shares)
    if written_out:
        weights = q.transpose(1, 2) @ k.permute(0, 2, 3, 1) * (q.shape[3] ** -0.5 if factor is None else factor)
        if softcap is not None:
            weights = softcap * torch.tanh(weights / softcap)  # [R, H, T', T]
        least = torch.finfo(weights.dtype).min  # not -inf: left padding sees no key, and must not become NaN
        weights = (weights if mask is None else weights.masked_fill(~mask, least)).softmax(-1)
        if isinstance(rule, torch.Generator):
            weights = dropped(weights, dropout, rule)
        weights = F.dropout(weights, dropout) if rule is True else weights
        return (weights @ v.transpose(1, 2)).transpose(1, 2)
    tokens = q.shape[1]
    if group > 1:  # the queries of a group stand one after another, [R, g·T', H / g, d_k]
        q = q.unflatten(2, (-1, group)).permute(0, 3, 1, 2, 4).flatten(1, 2)
        if mask is not None and mask.shape[-2] > 1:
            mask = mask.repeat(*(1,) * (mask.dim() - 2), group, 1)
    with _right_gradients(q, k, v):
        z = F.scaled_dot_product_attention(
            q.transpose(1, 2),  # [R, H, T', d_k], or [R, H / g, g·T', d_k]
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            dropout_p=dropout if rule else 0.0,
            is_causal=causal and mask is None,
            scale=factor,
            enable_gqa=by_kernel,
        )
    z = z.transpose(1, 2)
    return z if group == 1 else z.unflatten(1, (group, tokens)).permute(0, 2, 3, 1, 4).flatten(2, 3)


def to_heads(groups: Tensor, axis: int, shares: tuple[int, ...]) -> Tensor:
    """What groups of successive heads share, for each head: entry i of an axis repeated `shares[i]` times."""
    if len(set(shares)) == 1:
        return groups.repeat_interleave(shares[0], dim=axis)
    parts = [part.repeat_interleave(share, dim=axis) for part, share in zip(groups.split(1, axis), shares, strict=True)]
    return torch.cat(parts, dim=axis)


_DIFFERENTIABLE = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def _right_gradients(*inputs: Tensor) -> AbstractContextManager[None]:
    """Exclude cuDNN if a backward pass may follow on a GPU: for some layouts and masks its gradients are wrong."""
    if not (inputs[0].is_cuda and torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)):
        return nullcontext()
    if torch.compiler.is_compiling():  # the flags cannot be read while tracing
        return sdpa_kernel(_DIFFERENTIABLE)
    cuda = torch.backends.cuda
    flags = cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()
    return sdpa_kernel([backend for backend, on in zip(_DIFFERENTIABLE, flags, strict=True) if on] or [SDPBackend.MATH])


def head_ranges(sizes: tuple[int, ...]) -> list[tuple[int, int]]:
    """Index range (end exclusive) of the heads of each copy."""
    ends = list(accumulate(sizes))
    return list(zip([0, *ends[:-1]], ends, strict=True))


def select_queries(x: Tensor, read: Read) -> Tensor:
    """The queries `[N, B, T', d]`, where `x` has all keys."""
    if isinstance(read, Tensor):
        return read
    if isinstance(read, Places):
        return x[:, torch.arange(x.shape[1], device=x.device), read.at][:, :, None]
    return x if read is None else x[:, :, read]


class MLP(nn.Module):
    """Two linear layers, perhaps with a norm before the second; if gated (SwiGLU), the first gives gate and value."""

    def __init__(self, config: EncoderConfig, copies: int) -> None:
        super().__init__()
        self.gated = config.gated
        self.activation = ACTIVATIONS[config.activation]
        hidden = config.mlp_width * (2 if config.gated else 1)
        self.up = GroupedLinear(copies, config.width, hidden, config.mlp_bias and config.up_bias)
        self.norm = GroupedNorm(copies, config.mlp_width, config.norm_eps, config.norm) if config.mlp_norm else None
        self.down = GroupedLinear(copies, config.mlp_width, config.width, config.mlp_bias)
        self.scale = empty(copies, config.width) if config.layer_scale else None
        self.activation_dropout = Dropout(config.activation_dropout)
        self.output_dropout = Dropout(config.output_dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[N, B, T, d]` to `[max(N, G), B, T, d]`; LayerScale and dropout applied, residual not added."""
        hidden = self.up(x)  # [N, B, T, hidden]
        if self.gated:
            gate, value = hidden.chunk(2, dim=-1)
            hidden = self.activation(gate) * value
        else:
            hidden = self.activation(hidden)
        hidden = self.activation_dropout(hidden)
        y = self.down(hidden if self.norm is None else self.norm(hidden))
        if self.scale is not None:
            y = y * self.scale[:, None, None, :]
        return self.output_dropout(y)


class GroupedLinear(nn.Module):
    """`y = x Wᵀ + b` with weights `[G, out, in]`: shared by all members (G = 1) or one per member (G = M)."""

    weight_left: Tensor | None  # [M, out, r], and the next one [M, r, in]: of members that add to a shared map
    weight_right: Tensor | None

    def __init__(self, copies: int, inputs: int, outputs: int, bias: bool = True) -> None:
        super().__init__()
        self.one_by_one = False  # run the copies one by one instead of in one batched product
        self.weight = empty(copies, outputs, inputs)
        self.bias = empty(copies, outputs) if bias else None
        self.weight_left = self.weight_right = None

    def add_update(self, members: int, rank: int) -> None:
        """Give each member an update of this rank: the weight is then larger by `left @ right`, member by member."""
        if rank:
            _, outputs, inputs = self.weight.shape
            self.weight_left, self.weight_right = empty(members, outputs, rank), empty(members, rank, inputs)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[N, …, in]` to `[max(N, G), …, out]`; N and G are equal, or one of them is 1."""
        weight, bias = self.weight, self.bias
        if weight.shape[0] == 1:
            y = F.linear(x, weight[0], None if bias is None else bias[0])
            if self.weight_left is None or self.weight_right is None:
                return y
            return y + updated(x, self.weight_left, self.weight_right)
        members, _, inputs = weight.shape
        if self.one_by_one:
            tokens = x.expand(members, *x.shape[1:])
            biases = [None] * members if bias is None else list(bias)
            return torch.stack([F.linear(*copy) for copy in zip(tokens, weight, biases, strict=True)])
        rows = x.flatten(1, -2).expand(members, -1, inputs)  # [N, B·T, in] -> [M, B·T, in]
        y = torch.bmm(rows, weight.transpose(1, 2))  # [M, B·T, out]
        if bias is not None:
            y = y + bias[:, None, :]
        return y.unflatten(1, x.shape[1:-1])  # [M, B, T, out]

    def member(self, index: int) -> "GroupedLinear":
        """A copy of the map that one member uses."""
        copy = [min(index, len(self.weight) - 1)]  # the only one if shared by all
        return linear(self.weight[copy], None if self.bias is None else self.bias[copy])


def linear(weight: Tensor, bias: Tensor | None = None) -> GroupedLinear:
    """A map with copies of the given weights, `[G, out, in]` and `[G, out]`."""
    copies, outputs, inputs = weight.shape
    with torch.device("meta"):
        projection = GroupedLinear(copies, inputs, outputs, bias is not None)
    projection.weight = nn.Parameter(weight.detach().clone(memory_format=torch.contiguous_format))
    if bias is not None:
        projection.bias = nn.Parameter(bias.detach().clone(memory_format=torch.contiguous_format))
    return projection


class GroupedNorm(nn.Module):
    """LayerNorm, with or without a bias, or RMSNorm over the last axis, with one set of weights or one per member."""

    def __init__(self, copies: int, width: int, eps: float, kind: NormKind = "layer") -> None:
        super().__init__()
        self.eps = eps
        self.kind = kind
        self.weight = empty(copies, width)
        self.bias = empty(copies, width) if kind == "layer" else None

    @property
    def factor(self) -> Tensor:
        """What normalised activations are multiplied by, `[G, d]`; one plus small weights in float32, to keep them."""
        if self.kind != "rms_plus_one":
            return self.weight
        return self.weight.to(torch.promote_types(self.weight.dtype, torch.float32)) + 1

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `[N, …, d]`; the result has max(N, G) as first axis."""
        if self.weight.shape[0] == 1:
            return self.of_copy(0, x)
        shape = (x.shape[-1],)
        axes = (self.weight.shape[0],) + (1,) * (x.dim() - 2) + shape
        factor = self.factor.view(axes)  # [M, 1, …, d]
        if self.kind.startswith("rms"):
            return (F.rms_norm(x.to(factor.dtype), shape, None, self.eps) * factor).to(x.dtype)
        normed = F.layer_norm(x, shape, None, None, self.eps)
        return normed * factor if self.bias is None else torch.addcmul(self.bias.view(axes), normed, factor)

    def of_copy(self, copy: int, x: Tensor) -> Tensor:
        """Normalise the last axis of `x` with the weights of one copy."""
        shape, factor = (x.shape[-1],), self.factor[copy]
        if self.kind == "rms" and x.dtype.itemsize == 2:  # rounded before the weights, as by most decoders
            return F.rms_norm(x, shape, None, self.eps) * factor
        if self.kind.startswith("rms"):
            return F.rms_norm(x.to(factor.dtype), shape, factor, self.eps).to(x.dtype)
        return F.layer_norm(x, shape, factor, None if self.bias is None else self.bias[copy], self.eps)

    def of_heads(self, x: Tensor, sizes: tuple[int, ...], copy: int | None = None) -> Tensor:
        """Normalise each head of `[R, T, H, d_k]` with its copy's weights: all with those of `copy`, or by `sizes`.

        Weights for several heads normalise those of a copy together.
        """
        copies, joint = self.weight.shape[0], self.weight.shape[1] > x.shape[3]
        if copy is None and x.shape[2] == sum(sizes) and len(sizes) > 1 and (joint or copies > 1):  # copies in a row
            parts = enumerate(x.split(sizes, dim=2))
            return torch.cat([self.of_heads(heads, sizes, index) for index, heads in parts if sizes[index]], dim=2)
        heads = x.flatten(2) if joint else x
        if copies == 1 or copy is not None:
            heads = self.of_copy(0 if copies == 1 else copy or 0, heads)
        else:  # copies on the batch axis
            heads = self(heads.unflatten(0, (copies, -1))).flatten(0, 1)
        return heads.unflatten(2, x.shape[2:]) if joint else heads


# --- small parts -------------------------------------------------------------------------------------------


class Dropout(nn.Dropout):
    """Dropout that follows `dropping`."""

    def forward(self, x: Tensor) -> Tensor:
        """Zero some of the activations and scale the others up."""
        rule = self.p > 0.0 and drops(self)
        if isinstance(rule, torch.Generator):
            return dropped(x, self.p, rule)
        return F.dropout(x, self.p) if rule else x


def dropped(x: Tensor, p: float, generator: torch.Generator) -> Tensor:
    """`F.dropout` with random numbers from a given generator."""
    return x * torch.empty_like(x).bernoulli_(1.0 - p, generator=generator).div_(1.0 - p)


def empty(*shape: int) -> nn.Parameter:
    """A parameter without values, to be set by loading or by `Ensemble.reset_parameters`."""
    return nn.Parameter(torch.empty(*shape))


def quick_gelu(x: Tensor) -> Tensor:
    """The sigmoid approximation of GELU that OpenAI's CLIP was trained with."""
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[Activation | HiddenActivation, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": quick_gelu,
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
}

"""Small hand-written models, as users write them, with the declarations that convert them."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hydra_ensembles as he
from architectures import ArchitectureCase, perturbed
from architectures_transformers import token_batch

WIDTH, HEADS, CLASSES = 32, 4, 5

# --- models as users write them -----------------------------------------------------------------------------


class EncoderViT(nn.Module):
    """A ViT built on `nn.TransformerEncoder`."""

    def __init__(
        self, norm_first: bool = True, activation: str = "gelu", batch_first: bool = True, mean: bool = False
    ) -> None:
        super().__init__()
        self.mean = mean
        self.patchify = nn.Conv2d(3, WIDTH, 8, 8)
        self.cls = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.pos = nn.Parameter(torch.zeros(1, 17, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 64, 0.1, activation, norm_first=norm_first, batch_first=batch_first
        )
        norm = nn.LayerNorm(WIDTH) if norm_first else None
        self.encoder = nn.TransformerEncoder(layer, 2, norm, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.batch_first = batch_first

    def tokens(self, images: Tensor) -> Tensor:
        x = self.patchify(images).flatten(2).transpose(1, 2)
        return torch.cat([self.cls.expand(len(x), -1, -1), x], dim=1) + self.pos

    def forward(self, images: Tensor) -> Tensor:
        x = self.tokens(images)
        x = self.encoder(x) if self.batch_first else self.encoder(x.transpose(0, 1)).transpose(0, 1)
        return self.head(x.mean(1) if self.mean else x[:, 0])  # the mean includes the class token


class EncoderText(nn.Module):
    """As in PyTorch's tutorial: scaled embeddings, sinusoids in a buffer, sequence first, a mask true at padding."""

    pe: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(60, WIDTH)
        angles = torch.arange(24)[:, None] / 100 ** (torch.arange(0, WIDTH, 2) / WIDTH)
        self.register_buffer("pe", torch.stack([angles.sin(), angles.cos()], dim=2).reshape(24, 1, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.classify = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor, src_key_padding_mask: Tensor | None = None) -> Tensor:
        x = self.embedding(ids).transpose(0, 1) * math.sqrt(WIDTH) + self.pe[: ids.shape[1]]
        x = self.encoder(x, src_key_padding_mask=src_key_padding_mask)[: ids.shape[1]]
        return self.classify(x[0])


class MultiheadBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.ln1(x + self.attention(x, x, x)[0])
        return self.ln2(x + self.mlp(x))


class MultiheadViT(nn.Module):
    """Post-norm, ReLU, no class token: classifies the mean of the patches."""

    def __init__(self) -> None:
        super().__init__()
        self.patchify, self.position = nn.Conv2d(3, WIDTH, 8, 8), nn.Embedding(16, WIDTH)
        self.blocks = nn.Sequential(MultiheadBlock(), MultiheadBlock())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patchify(images).flatten(2).transpose(1, 2) + self.position.weight
        return self.head(self.norm(self.blocks(x).mean(1)))


class OwnBlock(nn.Module):
    """A hand-written block; queries, keys and values of a head are stored together."""

    def __init__(self) -> None:
        super().__init__()
        self.to_qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.after_attention, self.after_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    def activated(self, x: Tensor) -> Tensor:
        return F.relu(x)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.to_qkv(x).unflatten(2, (HEADS, 3, -1)).permute(3, 0, 2, 1, 4)
        x = self.after_attention(x + self.project(self.mixed(q, k, v).transpose(1, 2).flatten(2)))
        return self.after_mlp(x + self.narrow(self.activated(self.wide(x))))


class OwnViT(nn.Module):
    """A hand-written post-norm ReLU ViT that cuts patches with `unfold`."""

    def __init__(self, block: Callable[[], nn.Module] = OwnBlock) -> None:
        super().__init__()
        self.embed, self.place = nn.Linear(3 * 8 * 8, WIDTH), nn.Parameter(torch.zeros(16, WIDTH))
        self.token = nn.Parameter(torch.zeros(WIDTH))
        self.layers = nn.ModuleList([block(), block()])
        self.out = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(F.unfold(images, 8, stride=8).transpose(1, 2)) + self.place
        x = torch.cat([self.token.expand(len(x), 1, -1), x], dim=1)
        for layer in self.layers:
            x = layer(x)
        return self.out(x[:, 0])


class OwnBert(nn.Module):
    """A hand-written BERT with all of BERT's parts under different names."""

    def __init__(self) -> None:
        super().__init__()
        self.word, self.where = nn.Embedding(60, WIDTH), nn.Embedding(24, WIDTH)
        self.which, self.first_norm = nn.Embedding(2, WIDTH), nn.LayerNorm(WIDTH, eps=1e-12)
        self.layers = nn.ModuleList(nn.ModuleDict() for _ in range(2))
        for layer in self.layers:
            layer.update({name: nn.Linear(WIDTH, WIDTH) for name in ("query", "key", "value", "mix")})
            layer.update({"norm_a": nn.LayerNorm(WIDTH), "norm_b": nn.LayerNorm(WIDTH)})
            layer.update({"grow": nn.Linear(WIDTH, 64), "shrink": nn.Linear(64, WIDTH)})
        self.pool, self.classify = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> dict[str, Tensor]:
        positions = torch.arange(input_ids.shape[1])
        x = self.first_norm(self.word(input_ids) + self.where(positions) + self.which(token_type_ids))
        for layer in self.layers:
            q, k, v = (
                layer[name](x).unflatten(2, (HEADS, -1)).transpose(1, 2)  # type: ignore[index]
                for name in ("query", "key", "value")
            )
            mixed = F.scaled_dot_product_attention(q, k, v, attention_mask.bool()[:, None, None])
            x = layer["norm_a"](x + layer["mix"](mixed.transpose(1, 2).flatten(2)))  # type: ignore[index]
            x = layer["norm_b"](x + layer["shrink"](F.gelu(layer["grow"](x))))  # type: ignore[index]
        return {"logits": self.classify(torch.tanh(self.pool(x[:, 0])))}


class RopeBlock(nn.Module):
    """Pre-RMSNorm, rotary positions, SwiGLU, no biases."""

    def __init__(self, neighbours: bool, normed: bool) -> None:
        super().__init__()
        self.precise, self.activation = False, F.silu  # whether angles are float64
        if normed:
            self.qn, self.kn = (nn.RMSNorm(WIDTH // HEADS, eps=1e-6) for _ in range(2))
        self.neighbours, self.n1, self.n2 = neighbours, nn.RMSNorm(WIDTH, eps=1e-6), nn.RMSNorm(WIDTH, eps=1e-6)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.w1, self.w3 = nn.Linear(WIDTH, 48, bias=False), nn.Linear(WIDTH, 48, bias=False)
        self.w2 = nn.Linear(48, WIDTH, bias=False)

    def rotated(self, x: Tensor) -> Tensor:
        pairs, kind = x.shape[-1] // 2, torch.float64 if self.precise else torch.float32
        angles = torch.arange(x.shape[2], dtype=kind)[:, None] / 10000 ** (torch.arange(pairs, dtype=kind) / pairs)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        x1, x2 = (x[..., ::2], x[..., 1::2]) if self.neighbours else x.chunk(2, dim=-1)
        turned = x1 * cos - x2 * sin, x2 * cos + x1 * sin
        return torch.stack(turned, dim=-1).flatten(-2) if self.neighbours else torch.cat(turned, dim=-1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.n1(x)
        q, k, v = (part(y).unflatten(2, (HEADS, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        if hasattr(self, "qn"):
            q, k = self.qn(q), self.kn(k)
        y = F.scaled_dot_product_attention(self.rotated(q), self.rotated(k), v, mask[:, None, None])
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = self.n2(x)
        return x + self.w2(self.activation(self.w1(y)) * self.w3(y))


class RopeBert(nn.Module):
    """A BERT in today's style; classifies the mean of the tokens."""

    def __init__(self, neighbours: bool = False, normed: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(60, WIDTH)
        self.layers = nn.ModuleList(RopeBlock(neighbours, normed) for _ in range(2))
        self.last_norm, self.head = nn.RMSNorm(WIDTH, eps=1e-6), nn.Linear(WIDTH, CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x, mask = self.words(input_ids), attention_mask.bool()
        for layer in self.layers:
            x = layer(x, mask)
        x = self.last_norm(x) * mask[:, :, None]
        return self.head(x.sum(1) / mask.sum(1, keepdim=True))


# --- their declarations --------------------------------------------------------------------------------------

ENCODER_VIT = he.Declaration(
    names={"patch": "patchify", "class_token": "cls", "position": "pos", "encoder": "encoder", "classifier": "head"},
    image_size=32,
)
ENCODER_TEXT = he.Declaration(
    names={"words": "embedding", "position": "pe", "encoder": "encoder", "classifier": "classify"},
    embedding_scale=math.sqrt(WIDTH),
)


def in_layers(**parts: str) -> dict[str, Any]:
    """Names of parts in each of the `layers`; a part with several names gets a tuple."""
    paths = {part: tuple(f"layers.{{i}}.{name}" for name in names.split()) for part, names in parts.items()}
    return {part: found[0] if len(found) == 1 else found for part, found in paths.items()}


_VIT_BLOCK = {"out": "project", "norm1": "after_attention", "up": "wide", "down": "narrow", "norm2": "after_mlp"}
_BERT_BLOCK = {"out": "mix", "norm1": "norm_a", "up": "grow", "down": "shrink", "norm2": "norm_b"}
_BERT_STEM = {"words": "word", "position": "where", "segments": "which", "embedding_norm": "first_norm"}
_ROPE_BLOCK = {"norm1": "n1", "qkv": "q k v", "out": "o", "norm2": "n2", "gate": "w1", "up": "w3", "down": "w2"}
OWN_VIT = he.Declaration(
    names={"patch": "embed", "class_token": "token", "position": "place"}
    | in_layers(qkv="to_qkv", **_VIT_BLOCK)
    | {"classifier": "out"},
    heads=HEADS,
    head_layout="h qkv d",
    norm_first=False,
    activation="relu",
    image_size=32,
)
OWN_BERT = he.Declaration(
    names=_BERT_STEM | in_layers(qkv="query key value", **_BERT_BLOCK) | {"pooler": "pool", "classifier": "classify"},
    heads=HEADS,
    norm_first=False,
)
ROPE_BERT = he.Declaration(
    names={"words": "words"} | in_layers(**_ROPE_BLOCK) | {"norm": "last_norm", "classifier": "head"},
    heads=HEADS,
    activation="silu",
    pool="mean",
    rotary=10000,
    max_tokens=24,
)


def own(kind: Callable[..., nn.Module], **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    return perturbed(kind(**settings))


CASES: list[ArchitectureCase] = [
    ArchitectureCase("own-vit", lambda: own(OwnViT), convert_kwargs={"declaration": OWN_VIT}),
    ArchitectureCase(
        name="own-rope-bert",
        build=lambda: own(RopeBert),
        inputs=lambda: token_batch(pad=0, segments=False),
        logits=lambda model, inputs: model(**inputs),
        kind="text",
        convert_kwargs={"declaration": ROPE_BERT},
    ),
]

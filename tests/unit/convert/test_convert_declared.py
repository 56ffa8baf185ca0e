"""Models that nobody but their author knows: converted by a table of names, or by none, and refused in words."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hydra_ensembles as he
from architectures import perturbed
from hydra_ensembles.errors import ConversionError

WIDTH, HEADS, CLASSES = 32, 4, 5

# --- models as people write them -----------------------------------------------------------------------------


class EncoderViT(nn.Module):
    """Around an `nn.TransformerEncoder`."""

    def __init__(self, norm_first: bool = True, activation: str = "gelu", batch_first: bool = True) -> None:
        super().__init__()
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

    def forward(self, images: Tensor) -> Tensor:
        x = self.patchify(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], dim=1) + self.pos
        x = self.encoder(x) if self.batch_first else self.encoder(x.transpose(0, 1)).transpose(0, 1)
        return self.head(x[:, 0])


class EncoderText(nn.Module):
    """As PyTorch's tutorial has it: scaled words, sinusoids in a buffer, sequence first, a mask true at padding."""

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
    """Post-norm, ReLU, no class token: the mean of the patches is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.patchify, self.position = nn.Conv2d(3, WIDTH, 8, 8), nn.Embedding(16, WIDTH)
        self.blocks = nn.Sequential(MultiheadBlock(), MultiheadBlock())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patchify(images).flatten(2).transpose(1, 2) + self.position.weight
        return self.head(self.norm(self.blocks(x).mean(1)))


class OwnBlock(nn.Module):
    """Everything by hand; queries, keys and values of a head lie together."""

    def __init__(self) -> None:
        super().__init__()
        self.to_qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.after_attention, self.after_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.to_qkv(x).unflatten(2, (HEADS, 3, -1)).permute(3, 0, 2, 1, 4)
        x = self.after_attention(x + self.project(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))
        return self.after_mlp(x + self.narrow(F.relu(self.wide(x))))


class OwnViT(nn.Module):
    """A post-norm ReLU ViT written by hand, patches cut out by `unfold`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Linear(3 * 8 * 8, WIDTH), nn.Parameter(torch.zeros(16, WIDTH))
        self.token = nn.Parameter(torch.zeros(WIDTH))
        self.layers = nn.ModuleList([OwnBlock(), OwnBlock()])
        self.out = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(F.unfold(images, 8, stride=8).transpose(1, 2)) + self.place
        x = torch.cat([self.token.expand(len(x), 1, -1), x], dim=1)
        for layer in self.layers:
            x = layer(x)
        return self.out(x[:, 0])


class OwnBert(nn.Module):
    """Written by hand, with everything BERT has and names of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.word, self.where = nn.Embedding(60, WIDTH), nn.Embedding(24, WIDTH)
        self.which, self.first_norm = nn.Embedding(2, WIDTH), nn.LayerNorm(WIDTH, eps=1e-12)
        names = ("query", "key", "value", "mix")
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    **{name: nn.Linear(WIDTH, WIDTH) for name in names},
                    **{name: nn.LayerNorm(WIDTH) for name in ("norm_a", "norm_b")},
                    "grow": nn.Linear(WIDTH, 64),
                    "shrink": nn.Linear(64, WIDTH),
                }
            )
            for _ in range(2)
        )
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


class RopeBert(nn.Module):
    """As people write them now: rotary positions, RMSNorm before, SwiGLU, no bias; the mean of the tokens is read."""

    def __init__(self, neighbours: bool = False) -> None:
        super().__init__()
        self.words, self.neighbours = nn.Embedding(60, WIDTH), neighbours
        self.layers = nn.ModuleList(nn.ModuleDict(self.parts()) for _ in range(2))
        self.last_norm, self.head = nn.RMSNorm(WIDTH, eps=1e-6), nn.Linear(WIDTH, CLASSES)

    @staticmethod
    def parts() -> dict[str, nn.Module]:
        sizes = {
            "q": (32, 32),
            "k": (32, 32),
            "v": (32, 32),
            "o": (32, 32),
            "w1": (32, 48),
            "w3": (32, 48),
            "w2": (48, 32),
        }
        linears = {name: nn.Linear(*size, bias=False) for name, size in sizes.items()}
        return {**linears, "n1": nn.RMSNorm(WIDTH, eps=1e-6), "n2": nn.RMSNorm(WIDTH, eps=1e-6)}

    def rotated(self, x: Tensor) -> Tensor:
        pairs = x.shape[-1] // 2
        angles = torch.arange(x.shape[2])[:, None] / 10000 ** (torch.arange(pairs) / pairs)
        x1, x2 = (x[..., ::2], x[..., 1::2]) if self.neighbours else x.chunk(2, dim=-1)
        turned = x1 * angles.cos() - x2 * angles.sin(), x2 * angles.cos() + x1 * angles.sin()
        return torch.stack(turned, dim=-1).flatten(-2) if self.neighbours else torch.cat(turned, dim=-1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x, mask = self.words(input_ids), attention_mask.bool()
        for layer in self.layers:
            part: Any = layer
            y = part["n1"](x)
            q, k, v = (part[name](y).unflatten(2, (HEADS, -1)).transpose(1, 2) for name in "qkv")
            y = F.scaled_dot_product_attention(self.rotated(q), self.rotated(k), v, mask[:, None, None])
            x = x + part["o"](y.transpose(1, 2).flatten(2))
            y = part["n2"](x)
            x = x + part["w2"](F.silu(part["w1"](y)) * part["w3"](y))
        x = self.last_norm(x) * mask[:, :, None]
        return self.head(x.sum(1) / mask.sum(1, keepdim=True))


# --- their declarations --------------------------------------------------------------------------------------

ENCODER_VIT = he.Declaration(
    names={"patch": "patchify", "class_token": "cls", "position": "pos", "encoder": "encoder", "classifier": "head"}
)
ENCODER_TEXT = he.Declaration(
    names={"words": "embedding", "position": "pe", "encoder": "encoder", "classifier": "classify"},
    embedding_scale=math.sqrt(WIDTH),
)
OWN_VIT = he.Declaration(
    names={
        "patch": "embed",
        "class_token": "token",
        "position": "place",
        "qkv": "layers.{i}.to_qkv",
        "out": "layers.{i}.project",
        "norm1": "layers.{i}.after_attention",
        "up": "layers.{i}.wide",
        "down": "layers.{i}.narrow",
        "norm2": "layers.{i}.after_mlp",
        "classifier": "out",
    },
    heads=HEADS,
    head_layout="h qkv d",
    norm_first=False,
    activation="relu",
)
OWN_BERT = he.Declaration(
    names={
        "words": "word",
        "position": "where",
        "segments": "which",
        "embedding_norm": "first_norm",
        "qkv": ("layers.{i}.query", "layers.{i}.key", "layers.{i}.value"),
        "out": "layers.{i}.mix",
        "norm1": "layers.{i}.norm_a",
        "up": "layers.{i}.grow",
        "down": "layers.{i}.shrink",
        "norm2": "layers.{i}.norm_b",
        "pooler": "pool",
        "classifier": "classify",
    },
    heads=HEADS,
    norm_first=False,
)

ROPE_BERT = he.Declaration(
    names={
        "words": "words",
        "norm1": "layers.{i}.n1",
        "qkv": ("layers.{i}.q", "layers.{i}.k", "layers.{i}.v"),
        "out": "layers.{i}.o",
        "norm2": "layers.{i}.n2",
        "gate": "layers.{i}.w1",
        "up": "layers.{i}.w3",
        "down": "layers.{i}.w2",
        "norm": "last_norm",
        "classifier": "head",
    },
    heads=HEADS,
    activation="silu",
    pool="mean",
    rotary=10000,
    max_tokens=24,
)


def own(kind: Callable[..., nn.Module], **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    return perturbed(kind(**settings))


IMAGES = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))
IDS = torch.randint(1, 60, (3, 11), generator=torch.Generator().manual_seed(2))
MASK = torch.arange(11)[None] < torch.tensor([11, 7, 3])[:, None]
TEXTS = {"input_ids": IDS * MASK, "attention_mask": MASK.long()}
BERT_TEXTS = {**TEXTS, "token_type_ids": (torch.arange(11)[None] > 4).long() * MASK}

CASES: dict[str, tuple[Callable[[], nn.Module], he.Declaration | None, Any]] = {
    "encoder": (lambda: own(EncoderViT), ENCODER_VIT, IMAGES),
    "encoder-found": (lambda: own(EncoderViT), None, IMAGES),
    "encoder-post-relu-found": (lambda: own(EncoderViT, norm_first=False, activation="relu"), None, IMAGES),
    "encoder-sequence-first": (lambda: own(EncoderViT, batch_first=False), ENCODER_VIT, IMAGES),
    "encoder-sequence-first-found": (lambda: own(EncoderViT, batch_first=False), None, IMAGES),
    "text": (lambda: own(EncoderText), ENCODER_TEXT, TEXTS),
    "text-found": (lambda: own(EncoderText), None, TEXTS),
    "multihead-found": (lambda: own(MultiheadViT), None, IMAGES),
    "vit": (lambda: own(OwnViT), OWN_VIT, IMAGES),
    "bert": (lambda: own(OwnBert), OWN_BERT, BERT_TEXTS),
    "rope-bert": (lambda: own(RopeBert), ROPE_BERT, TEXTS),
}


@pytest.mark.parametrize("name", CASES)
def test_answers_and_gradients_are_those_of_the_original(name: str) -> None:
    build, declaration, inputs = CASES[name]
    model = build()
    ensemble = he.convert(model, declaration=declaration)
    if isinstance(inputs, Tensor):
        expected = model(inputs)
    elif name.endswith("bert"):
        answer = model(**inputs)
        expected = answer if isinstance(answer, Tensor) else answer["logits"]
    else:
        expected = model(inputs["input_ids"], src_key_padding_mask=inputs["attention_mask"] == 0)
    found = ensemble(inputs)
    torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-5)
    found[0].square().sum().backward()
    expected.square().sum().backward()
    theirs = sum(float(one.grad.square().sum()) for one in model.parameters() if one.grad is not None)
    ours = sum(float(one.grad.square().sum()) for one in ensemble.parameters() if one.grad is not None)
    if not name.startswith("text"):  # there a scale lies in the word embeddings, and with it in their gradient
        assert math.isclose(ours, theirs, rel_tol=1e-4)


@pytest.mark.parametrize("name", ["encoder-found", "vit", "bert", "rope-bert"])
def test_what_is_done_to_library_models_is_done_to_them(name: str, tmp_path: Any) -> None:
    build, declaration, inputs = CASES[name]
    base = he.convert(build(), declaration=declaration)
    heads = [he.Head(0, 1), he.Head(1, 2)]
    pruned = he.prune(base, heads)
    with he.masked(base, heads), torch.no_grad():
        torch.testing.assert_close(pruned(inputs), base(inputs), rtol=0, atol=1e-5)
    hydra = he.fuse([base, pruned])
    hydra.save_pretrained(tmp_path)
    assert torch.equal(he.Ensemble.from_pretrained(tmp_path)(inputs), hydra(inputs))


# --- what the checker says -----------------------------------------------------------------------------------


def but(declaration: he.Declaration, settings: dict[str, Any] | None = None, **names: Any) -> he.Declaration:
    """The same declaration, with some names changed or (None) left out, and other settings."""
    changed: Any = {part: place for part, place in {**declaration.names, **names}.items() if place is not None}
    kept = {name: value for name, value in vars(declaration).items() if name != "names"}
    return he.Declaration(changed, **{**kept, **(settings or {})})


def test_all_that_does_not_fit_is_said_at_once_with_the_nearest_name() -> None:
    wrong = but(OWN_VIT, None, qkv="layers.{i}.qkv", down="layers.{i}.wide", class_token=None, norm2="layers.{i}.norm")
    with pytest.raises(ConversionError) as caught:
        he.convert(own(OwnViT), declaration=wrong)
    text = str(caught.value)
    for token in ("layers.0.qkv", "did you mean layers.0.to_qkv", "layers.0.norm,", "down is [64, 32]", "'token'"):
        assert token in text, text


@pytest.mark.parametrize(
    ("settings", "agrees"),
    [
        ({"heads": 8}, "heads=4"),
        ({"head_layout": "qkv h d"}, "'h qkv d'"),
        ({"norm_first": True}, "norm_first=False"),
        ({"activation": None}, "'relu'"),
        ({"pool": "mean"}, "'cls'"),
    ],
)
def test_a_wrong_setting_is_found_out_and_the_right_one_named(settings: dict[str, Any], agrees: str) -> None:
    with pytest.raises(ConversionError, match=f"agree with .*{agrees}"):
        he.convert(own(OwnViT), declaration=but(OWN_VIT, settings))


@pytest.mark.parametrize(
    ("make", "token"),
    [
        (lambda: he.Declaration({"ptach": "embed"}), "did you mean patch"),  # type: ignore[dict-item]
        (lambda: he.Declaration({"norm": "norm"}), "patch"),
        (lambda: but(OWN_VIT, None, qkv="layers.0.to_qkv"), "{i}"),
        (lambda: but(OWN_VIT, None, qkv=("a.{i}", "b.{i}")), "2 paths"),
        (lambda: but(OWN_VIT, {"head_layout": "h d k"}), "head_layout"),
        (lambda: but(OWN_VIT, {"activation": "tanh"}), "activation"),
        (lambda: he.Declaration(["embed"]), "names"),  # type: ignore[arg-type]
    ],
)
def test_a_declaration_checks_itself(make: Callable[[], Any], token: str) -> None:
    with pytest.raises(he.HydraError, match=token):
        make()


@pytest.mark.parametrize(
    ("declaration", "token"),
    [
        (but(OWN_VIT, {"heads": None}), "heads="),
        (but(OWN_VIT, {"heads": 5}), "5"),
        (but(OWN_VIT, {"image_size": (64, 64)}), "too few"),
        (but(ENCODER_VIT, None, encoder="patchify"), "nn.TransformerEncoder"),
        (but(OWN_VIT, None, position=None), "position"),
        (but(ROPE_BERT, {"max_tokens": None}), "max_tokens="),
    ],
)
def test_what_a_model_cannot_be_is_said(declaration: he.Declaration, token: str) -> None:
    kind = RopeBert if "words" in declaration.names else EncoderViT if "encoder" in declaration.names else OwnViT
    with pytest.raises(ConversionError, match=token):
        he.convert(own(kind), declaration=declaration)


class NearlyGelu(OwnBlock):
    """GELU by its approximation."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.to_qkv(x).unflatten(2, (HEADS, 3, -1)).permute(3, 0, 2, 1, 4)
        x = self.after_attention(x + self.project(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))
        return self.after_mlp(x + self.narrow(F.gelu(self.wide(x), approximate="tanh")))


def test_what_is_nearly_right_is_found_out_in_float64() -> None:
    model: Any = own(OwnViT)
    for layer in model.layers:
        layer.__class__ = NearlyGelu
        layer.narrow.weight.data.mul_(0.05)  # so that the answers differ by less than float32 may
    nearly = but(OWN_VIT, {"activation": "gelu"})
    close = he.convert(model, declaration=nearly, probe=False)(IMAGES)[0]
    assert (close - model(IMAGES)).abs().max() < 1e-4 * close.abs().max()
    with pytest.raises(ConversionError, match="agree with activation='gelu_tanh'"):
        he.convert(model, declaration=nearly)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model.encoder, "layers", nn.ModuleList()),
        lambda model: model.to("meta"),
        lambda model: setattr(model, "head", nn.LazyLinear(5)),
        lambda model: setattr(model, "cls", nn.Parameter(torch.zeros(3, WIDTH))),
    ],
)
def test_what_cannot_be_found_is_refused(change: Callable[[Any], Any]) -> None:
    model = own(EncoderViT)
    change(model)
    with pytest.raises(ConversionError, match="not a supported architecture"):
        he.convert(model)


class OtherViT(EncoderViT):
    """The same modules, used in another way."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images.flip(-1))


class SilentMask(EncoderText):
    """Finds the padding itself, and tells nobody."""

    def forward(self, ids: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(ids, ids == 0)


def test_what_answers_otherwise_than_its_modules_say_is_refused() -> None:
    with pytest.raises(ConversionError, match="OtherViT is not a supported"):
        he.convert(own(OtherViT))
    with pytest.raises(ConversionError, match="differ"):
        he.convert(own(OtherViT), declaration=ENCODER_VIT)
    with pytest.raises(ConversionError, match="differ"):  # padding would be attended to
        he.convert(own(SilentMask), declaration=ENCODER_TEXT)


def test_how_a_model_is_called_can_be_said() -> None:
    model = own(SilentMask)
    answer = but(ENCODER_TEXT, {"answer": lambda model, batch: model(batch["input_ids"])})
    found = he.convert(model, declaration=answer)(TEXTS)[0]
    torch.testing.assert_close(found, model(TEXTS["input_ids"]), rtol=0, atol=1e-5)


def test_numbers_that_rotate_together_may_be_neighbours() -> None:
    model = own(RopeBert, neighbours=True)
    found = he.convert(model, declaration=but(ROPE_BERT, {"rotary_pairs": "neighbours"}))(TEXTS)[0]
    torch.testing.assert_close(found, model(**TEXTS), rtol=0, atol=1e-5)
    with pytest.raises(ConversionError, match="agree with rotary_pairs='neighbours'"):
        he.convert(model, declaration=ROPE_BERT)


def test_positions_that_are_computed_are_given_as_a_tensor() -> None:
    model = own(EncoderText)
    table = model.pe
    del model.pe
    model.pe = table  # type: ignore[assignment]
    found = he.convert(model, declaration=but(ENCODER_TEXT, None, position=table))(TEXTS)[0]
    expected = model(TEXTS["input_ids"], src_key_padding_mask=~MASK)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)

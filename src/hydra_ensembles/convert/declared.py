"""Architectures of one's own, declared: where their parts lie, what tensors do not tell, how a model is called."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from torch import Tensor, nn

from ..arguments import checked
from ..errors import ConfigError
from ..model.config import Activation, HiddenActivation, NormKind, Pool, Resample, RotaryConfig
from .core import NamedTensors, perhaps_meant, run

_OfImages = Literal["patch", "class_token", "registers", "position"]
_OfTexts = Literal["words", "segments", "embedding_norm", "embedding_projection"]
_OfAttention = Literal["attention", "norm1", "qkv", "query_norm", "key_norm", "out", "scale1"]
_OfBlock = Literal["block", _OfAttention, "norm2", "gate", "up", "down", "scale2"]
Part = Literal[_OfImages, _OfTexts, "encoder", _OfBlock, "norm", "pooler", "classifier"]
PARTS: tuple[Part, ...] = get_args(Part)
IN_BLOCK: tuple[Part, ...] = get_args(_OfBlock)
Place = str | tuple[str, ...] | Tensor
MASKS = ("attention_mask", "token_type_ids")  # as tokenizers name them
PADDING = ("src_key_padding_mask", "key_padding_mask", "padding_mask")  # true at padding, as `torch.nn` has it
# What a model may be given besides its input, and what no tokenizer gives.
_UNTOLD = ("labels", "label", "targets", "target", "position_ids", "inputs_embeds", "head_mask")
_FLAGS = ("return_", "output_", "use_")


@dataclass(frozen=True)
class Declaration:
    """Where the parts of a transformer classifier lie in a module of your own, and what its tensors do not tell.

    Sizes, biases, the number of layers, and for parts of `torch.nn` also norms, are read off the model.

    Attributes:
        names: Part → where it lies in the model: the path of a module or tensor, with `{i}` for the number of the
            block. A part that the model computes instead of storing (sinusoidal positions) may be given as a tensor.
            Of an image model: `patch` (a convolution, or a linear layer on flattened patches), `class_token`,
            `registers`, `position`. Of a text model: `words`, `position`, `segments`, `embedding_norm`,
            `embedding_projection`. Of a block: `norm1`, `qkv` (one path for all three, or a tuple of three), `out`,
            `norm2`, `up`, `down`, where there are any `query_norm`, `key_norm`, `scale1`, `scale2` (LayerScale) and
            `gate` (GLU); in place of `qkv` and `out`, `attention` names an `nn.MultiheadAttention`; in place of a whole
            block, `block` names an `nn.TransformerEncoderLayer`; in place of all of them, `encoder` names an
            `nn.TransformerEncoder`. Behind them: `norm`, `pooler`, `classifier`.
        heads: Attention heads of a block; not needed for modules of `torch.nn`.
        head_layout: How the rows of `qkv` are ordered, outermost first: `"qkv h d"` (all queries, then all keys, then
            all values) or any other order of the three; without `qkv` where there are three tensors.
        attention_scale: What scores are multiplied by, where it is not one over the root of the width of a head.
        norm_first: Pre-norm (True, usual for images) or post-norm; of a `block` or `encoder` it is read.
        activation: Of the MLP, `"gelu"` if not said; of a `block` or `encoder` it is read.
        pool: What is classified: the first token (`"cls"`), the mean of the patches or tokens (`"mean"`), both
            (`"cls_mean"`), or the last token (`"last"`).
        pool_prefix: Whether the mean takes in class token and registers, too.
        norm_after_pool: Whether `norm` comes after the pooling, not before.
        norm_kind: `"layer"` or `"rms"`, for norms that are not of `torch.nn`.
        norm_eps: Of the norms of a block, where these are not of `torch.nn`.
        pooler_activation: Behind `pooler`.
        image_size: Height and width of the images, or one number for both; if not said, that of the preprocessing, if
            there are as many positions, else a square, with a warning.
        resample: How positions are fitted to images of other sizes, as `F.interpolate` has it.
        patch_order: How a linear layer flattens a patch: `"chw"` or `"hwc"`.
        embedding_scale: What word embeddings are multiplied by (often the root of the width).
        rotary: Base of rotary positions (usually 10000), where queries and keys are rotated; for images, whose rows and
            columns are counted in several ways, a `RotaryConfig`.
        rotary_pairs: Which numbers of a head rotate together: those of its two `"halves"`, or `"neighbours"`.
        max_tokens: Longest text, where no `position` says so, or the model takes fewer than it has positions.
        dropout: Rate behind embedding, attention and MLP while training. If not said, rates are read off layers and
            attention of `torch.nn`; a warning names other modules that drop.
        ignored: Beginnings of names of tensors that take no part in the answer.
        answer: How the model is called: the model and a batch (`pixel_values`, or `input_ids` with `attention_mask`, 1
            at tokens, and `token_type_ids`) in, logits `[B, C]` out. If not said, the model is called with the images
            or token ids, and with mask and segments where its `forward` has arguments of these names.
        masked: Whether a text model knows which tokens are padding; if not said, it does where `answer` is given or
            its `forward` is told. One that does not attends to padding, and so does what it is converted into.

    Examples:
        >>> import torch, hydra_ensembles as he
        >>> from torch import nn
        >>> class Mine(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.patchify, self.head = nn.Conv2d(3, 32, 8, 8), nn.Linear(32, 5)
        ...         self.pos = nn.Parameter(torch.randn(1, 16, 32))
        ...         layer = nn.TransformerEncoderLayer(32, 4, 64, activation="gelu", batch_first=True)
        ...         self.encoder = nn.TransformerEncoder(layer, 2)
        ...     def forward(self, images):
        ...         x = self.patchify(images).flatten(2).transpose(1, 2) + self.pos
        ...         return self.head(self.encoder(x).mean(dim=1))
        >>> names = {"patch": "patchify", "position": "pos", "encoder": "encoder", "classifier": "head"}
        >>> declaration = he.Declaration(names, pool="mean", image_size=32)
        >>> he.convert(Mine().eval(), declaration=declaration)(torch.randn(2, 3, 32, 32)).shape
        torch.Size([1, 2, 5])
    """

    names: Mapping[Part, Place]
    heads: int | None = None
    head_layout: str = "qkv h d"
    attention_scale: float | None = None
    norm_first: bool | None = None
    activation: Activation | None = None
    pool: Pool = "cls"
    pool_prefix: bool = field(default=False, kw_only=True)
    norm_after_pool: bool = False
    norm_kind: NormKind = "layer"
    norm_eps: float | None = None
    pooler_activation: HiddenActivation = "tanh"
    image_size: int | tuple[int, int] | None = None
    resample: Resample = "bicubic_antialias"
    patch_order: Literal["chw", "hwc"] = "chw"
    embedding_scale: float = 1.0
    rotary: float | RotaryConfig | None = None
    rotary_pairs: Literal["halves", "neighbours"] = "halves"
    max_tokens: int | None = None
    dropout: float | None = None
    ignored: tuple[str, ...] = ()
    answer: Callable[[Any, Mapping[str, Tensor]], Tensor] | None = None
    masked: bool | None = None

    def __post_init__(self) -> None:
        for part, place in self.names.items():
            if part not in PARTS:
                raise ConfigError(
                    f"names has no part {part!r}{perhaps_meant(str(part), PARTS)}; there are {', '.join(PARTS)}"
                )
            if isinstance(place, tuple) and (part != "qkv" or len(place) != 3):
                raise ConfigError(f"names[{part!r}] has {len(place)} paths; give one, and for qkv one or three")
            for path in paths(place):
                if ("{i}" in path) != (part in IN_BLOCK):
                    needs = "needs {i} for the number of the block" if part in IN_BLOCK else "is there once: no {i}"
                    raise ConfigError(f"names[{part!r}] is {path!r}, and this part {needs}")
        if ("patch" in self.names) == ("words" in self.names):
            raise ConfigError("names must have either patch (a model for images) or words (a model for text)")
        if sorted(self.head_layout.replace("qkv", "").split()) != ["d", "h"]:
            raise ConfigError(f"head_layout is {self.head_layout!r}; give qkv, h and d in some order, as 'qkv h d'")


Declaration.__init__ = checked(Declaration.__init__)  # type: ignore[method-assign]


def paths(place: Place) -> tuple[str, ...]:
    """The paths that a place consists of; none of a tensor."""
    return () if isinstance(place, Tensor) else (place,) if isinstance(place, str) else place


# --- how a model is called -------------------------------------------------------------------------------------------


def _arguments(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(type(model).forward).parameters
    except (TypeError, ValueError):  # compiled code has none
        return {}


def is_masked(declaration: Declaration, model: nn.Module) -> bool:
    """Whether a text model knows which tokens are padding."""
    if declaration.masked is not None:
        return declaration.masked
    return declaration.answer is not None or any(name in _arguments(model) for name in ("attention_mask", *PADDING))


def unknown_arguments(declaration: Declaration, model: nn.Module) -> list[str]:
    """Arguments of `forward` that may be tensors, are left out, and may yet change the answer: nobody knows."""
    if declaration.answer is not None or declaration.masked is False:
        return []
    return [
        name
        for name, parameter in list(_arguments(model).items())[2:]  # behind the model and its input
        if parameter.default is None
        and (parameter.annotation is parameter.empty or "Tensor" in str(parameter.annotation))
        and name not in (*MASKS, *PADDING, *_UNTOLD)
        and not name.startswith(_FLAGS)
    ]


def called(declaration: Declaration, model: nn.Module, inputs: NamedTensors) -> Tensor:
    """What a model answers, called as the declaration says or as its `forward` is written."""
    if declaration.answer is not None:
        answer: Any = declaration.answer(model, inputs)
        if not isinstance(answer, Tensor):
            raise TypeError(f"answer= gives a {type(answer).__name__}, where logits [B, C] are expected")
        return answer
    arguments, (main, *beside) = _arguments(model), inputs.items()
    keywords = {name: tensor for name, tensor in beside if name in arguments}
    padding = next((name for name in PADDING if name in arguments), None)
    if padding is not None and "attention_mask" in inputs:
        keywords[padding] = inputs["attention_mask"] == 0
    output = run(model, main[1], **keywords)
    if isinstance(output, Mapping):
        output = output["logits"]
    output = getattr(output, "logits", output)
    if not isinstance(output, Tensor):
        raise TypeError(f"it gives a {type(output).__name__}; say with answer= where its logits are")
    return output

"""Declarations of your own architectures: where parts are, settings that tensors do not show, how to call a model."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from torch import Tensor, nn

from ..arguments import checked
from ..errors import ConfigError
from ..model.config import Activation, HiddenActivation, NormKind, Pool, Resample, RotaryConfig
from .core import NamedTensors, perhaps_meant, run

_ImagePart = Literal["patch", "class_token", "registers", "position"]
_TextPart = Literal["words", "segments", "embedding_norm", "embedding_projection"]
_AttentionPart = Literal["attention", "norm1", "qkv", "query_norm", "key_norm", "out", "scale1"]
_BlockPart = Literal["block", _AttentionPart, "norm2", "gate", "up", "down", "scale2"]
Part = Literal[_ImagePart, _TextPart, "encoder", _BlockPart, "norm", "pooler", "classifier"]
PARTS: tuple[Part, ...] = get_args(Part)
IN_BLOCK: tuple[Part, ...] = get_args(_BlockPart)
Place = str | tuple[str, ...] | Tensor
MASKS = ("attention_mask", "token_type_ids")  # names that tokenizers use
PADDING = ("src_key_padding_mask", "key_padding_mask", "padding_mask")  # true at padding, as in `torch.nn`
# Optional arguments of `forward` that no tokenizer provides; leaving them out is safe.
_OMITTED = ("labels", "label", "targets", "target", "position_ids", "inputs_embeds", "head_mask")
_FLAGS = ("return_", "output_", "use_")


@dataclass(frozen=True)
class Declaration:
    """Where the parts of a transformer classifier are in your own module, and what its tensors do not show.

    Sizes, biases, the number of layers, and for parts from `torch.nn` also norms, are read from the model.

    Attributes:
        names: Part → where it is in the model: the path of a module or tensor, with `{i}` for the number of the
            block. A part that the model computes instead of storing (sinusoidal positions) may be given as a tensor.
            Image models: `patch` (a convolution, or a linear layer on flattened patches), `class_token`,
            `registers`, `position`. Text models: `words`, `position`, `segments`, `embedding_norm`,
            `embedding_projection`. Blocks: `norm1`, `qkv` (one path for all three, or a tuple of three), `out`,
            `norm2`, `up`, `down`, and if present `query_norm`, `key_norm`, `scale1`, `scale2` (LayerScale) and
            `gate` (GLU); instead of `qkv` and `out`, `attention` names an `nn.MultiheadAttention`; instead of a whole
            block, `block` names an `nn.TransformerEncoderLayer`; instead of all of them, `encoder` names an
            `nn.TransformerEncoder`. After the blocks: `norm`, `pooler`, `classifier`.
        heads: Attention heads of a block; not needed for modules from `torch.nn`.
        head_layout: How the rows of `qkv` are ordered, outermost first: `"qkv h d"` (all queries, then all keys, then
            all values) or any other order of the three; without `qkv` if there are three tensors.
        attention_scale: What scores are multiplied by, if not by one over the square root of the head width.
        norm_first: Pre-norm (True, usual for images) or post-norm; read from a `block` or `encoder`.
        activation: Activation of the MLP, by default `"gelu"`; read from a `block` or `encoder`.
        pool: What is classified: the first token (`"cls"`), the mean of the patches or tokens (`"mean"`), both
            (`"cls_mean"`), or the last token (`"last"`).
        pool_prefix: Whether the mean includes class token and registers.
        norm_after_pool: Whether `norm` comes after the pooling instead of before.
        norm_kind: `"layer"` or `"rms"`, for norms that are not from `torch.nn`.
        norm_eps: Epsilon of the norms of a block, if these are not from `torch.nn`.
        pooler_activation: Activation after `pooler`.
        image_size: Height and width of the images, or one number for both; by default that of the preprocessing if
            the number of positions agrees, else a square, with a warning.
        resample: How positions are resampled for images of other sizes, as in `F.interpolate`.
        patch_order: How a linear layer flattens a patch: `"chw"` or `"hwc"`.
        embedding_scale: What word embeddings are multiplied by (often the square root of the width).
        rotary: Base of rotary positions (usually 10000), if queries and keys are rotated; for images, whose rows and
            columns are counted in several ways, a `RotaryConfig`.
        rotary_pairs: Which numbers of a head rotate together: those of its two `"halves"`, or `"neighbours"`.
        max_tokens: Longest text, if there is no `position`, or the model accepts fewer tokens than it has positions.
        dropout: Rate after embedding, attention and MLP in training. By default rates are read from layers and
            attention from `torch.nn`; a warning names other modules with dropout.
        ignored: Prefixes of names of tensors that do not affect the answer.
        answer: How the model is called: the model and a batch (`pixel_values`, or `input_ids` with `attention_mask`, 1
            at tokens, and `token_type_ids`) in, logits `[B, C]` out. By default the model is called with the images
            or token ids, and with mask and segments if its `forward` has arguments of these names.
        masked: Whether a text model knows which tokens are padding; by default yes if `answer` is given or its
            `forward` takes a mask. If not, it attends to padding, and so does the converted model.

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
                meant = perhaps_meant(str(part), PARTS)
                raise ConfigError(f"names has no part {part!r}{meant}; there are {', '.join(PARTS)}")
            if isinstance(place, tuple) and (part != "qkv" or len(place) != 3):
                raise ConfigError(f"names[{part!r}] has {len(place)} paths; give one, or for qkv one or three")
            for path in paths(place):
                if ("{i}" in path) != (part in IN_BLOCK):
                    needs = "needs {i} for the number of the block" if part in IN_BLOCK else "exists once: no {i}"
                    raise ConfigError(f"names[{part!r}] is {path!r}, but this part {needs}")
        if ("patch" in self.names) == ("words" in self.names):
            raise ConfigError("names must have either patch (a model for images) or words (a model for text)")
        if sorted(self.head_layout.replace("qkv", "").split()) != ["d", "h"]:
            raise ConfigError(f"head_layout is {self.head_layout!r}; order qkv, h and d, as in 'qkv h d'")


Declaration.__init__ = checked(Declaration.__init__)  # type: ignore[method-assign]


def paths(place: Place) -> tuple[str, ...]:
    """Return the paths of a place; none for a tensor."""
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
    """Return arguments of `forward` that may be tensors, are not passed, and might change the output."""
    if declaration.answer is not None or declaration.masked is False:
        return []
    return [
        name
        for name, parameter in list(_arguments(model).items())[2:]  # after the model and its input
        if parameter.default is None
        and (parameter.annotation is parameter.empty or "Tensor" in str(parameter.annotation))
        and name not in (*MASKS, *PADDING, *_OMITTED)
        and not name.startswith(_FLAGS)
    ]


def called(declaration: Declaration, model: nn.Module, inputs: NamedTensors) -> Tensor:
    """Call a model as the declaration says, or by the arguments of its `forward`, and return its logits."""
    if declaration.answer is not None:
        answer: Any = declaration.answer(model, inputs)
        if not isinstance(answer, Tensor):
            raise TypeError(f"answer= returns a {type(answer).__name__}, but logits [B, C] are expected")
        return answer
    arguments, (main, *extra) = _arguments(model), inputs.items()
    keywords = {name: tensor for name, tensor in extra if name in arguments}
    padding = next((name for name in PADDING if name in arguments), None)
    if padding is not None and "attention_mask" in inputs:
        keywords[padding] = inputs["attention_mask"] == 0
    output = run(model, main[1], **keywords)
    if isinstance(output, Mapping):
        output = output["logits"]
    output = getattr(output, "logits", output)
    if not isinstance(output, Tensor):
        raise TypeError(f"it returns a {type(output).__name__}; say with answer= where its logits are")
    return output

"""Two towers with a common embedding, the zero-shot classifiers made of them, and checks for models of either kind."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .._utils import unwrapped, without_autocast
from ..batches import READ
from ..checkpoint import Contents, Saved, load_checkpoint, placed
from ..errors import ConfigError, DataError
from ..model_card import dual_model_card
from ..preprocessing import TextPreprocessing
from ..settings import from_plain, short, to_plain
from . import LATER
from .config import CosineConfig, DualEncoderConfig, EnsembleConfig, Sharing, output_width
from .ensemble import Answering, Ensemble, build_with_state, copied, stored_metadata
from .layers import GroupedLinear, OurModel, dropping
from .member_states import copies_of, member_index, place_of, rows_of
from .metadata import Metadata, invalid_names
from .stem_readout import Projections, compose, projection_config

CASCADE = "cascade"  # kind of a saved cascade, whose class is in a higher layer
INITIAL_SCALE = math.log(1 / 0.07)  # initial value in CLIP's training


class DualEncoder(OurModel, Saved):
    """An image tower and a text tower whose features are projected into one embedding (CLIP).

    The towers have the same number of members, or one of them has a single member for all. The logit of an image and
    a text is the cosine of their embeddings times `exp(logit_scale)`, plus `logit_bias` if there is one.

    Examples:
        >>> images, texts = torch.randn(2, 3, 32, 32), ["a photo of a cat", "a photo of a dog", "a red bus"]
        >>> dual(images, texts).shape  # a logit for each image and text, of every member
        torch.Size([1, 2, 3])
        >>> dual.encode_text(texts).shape == (1, 3, dual.embedding_width)
        True
    """

    _kind = "dual_encoder"

    def __init__(
        self,
        image: Ensemble,
        text: Ensemble,
        projections: Projections | None = None,
        logit_scale: float | Tensor = INITIAL_SCALE,
        logit_bias: float | Tensor | None = None,
    ) -> None:
        """Put two towers together; they become part of the dual encoder, nothing is copied.

        Without projections the features are the embedding. `logit_scale` is the logarithm of the scale, one number or
        one per member, as many as `logit_bias` has.
        """
        super().__init__()
        self.image, self.text = image, text
        self.projections = Projections() if projections is None else projections
        self.logit_scale = _numbers(logit_scale, image)  # [1] or [M]
        self.logit_bias = None if logit_bias is None else _numbers(logit_bias, image)
        maps = projection_config(self.projections.image), projection_config(self.projections.text)
        scales = self.logit_scale.numel(), self.logit_bias is not None
        self.config = DualEncoderConfig(image.config, text.config, *maps, *scales)
        self.num_members, self.embedding_width = self.config.members, self.config.embedding_of("image")

    def forward(self, images: Any = None, texts: Any = None, **named: Any) -> Tensor:
        """Logits per image, `[M, B_image, B_text]`; arguments as in `encode_image` and `encode_text`.

        Both may come as keywords, as processors name them: `dual(**processor(text=..., images=...))`.
        """
        return self.logits(self.encode_image(images, **named), self.encode_text(texts, **named))

    def encode_image(self, inputs: Any = None, normalize: bool = True, **named: Any) -> Tensor:
        """Embed images as `[M, B, e]`, scaled to length one if asked to.

        They are given as to `Ensemble.forward`; keywords for the other tower are ignored.
        """
        return self._per_member(embed(self.image, self.projections.image, inputs, normalize, **named))

    def encode_text(self, inputs: Any = None, normalize: bool = True, **named: Any) -> Tensor:
        """Embed texts as `[M, B, e]`, as `encode_image` does images."""
        return self._per_member(embed(self.text, self.projections.text, inputs, normalize, **named))

    def logits(self, image_embeddings: Tensor, text_embeddings: Tensor) -> Tensor:
        """Scaled similarities `[M, B_image, B_text]` of normalised embeddings `[M or 1, B, e]`."""
        similarity = image_embeddings @ text_embeddings.transpose(1, 2)
        logits = similarity * self.logit_scale.exp()[:, None, None]
        return logits if self.logit_bias is None else logits + self.logit_bias[:, None, None]

    def member(self, index: int) -> "DualEncoder":
        """A copy of one member as a separate dual encoder."""
        index = member_index(index, self.num_members)
        image, text = (tower.member(min(index, tower.num_members - 1)) for tower in (self.image, self.text))
        copy = min(index, self.config.scale_copies - 1)
        bias = None if self.logit_bias is None else self.logit_bias[copy]
        return DualEncoder(image, text, self.projections.member(index), self.logit_scale[copy], bias).eval()

    @classmethod
    def from_state(
        cls, config: DualEncoderConfig, state: Mapping[str, Tensor], image: Metadata, text: Metadata
    ) -> "DualEncoder":
        """Build a dual encoder around copies of the given tensors, keeping their dtype and device."""
        return build_with_state(lambda: cls._empty(config, image, text), copied(state))

    @classmethod
    def _empty(cls, config: DualEncoderConfig, image: Metadata, text: Metadata) -> "DualEncoder":
        maps = (config.image_projection, config.image), (config.text_projection, config.text)
        linears = (
            None if one is None else GroupedLinear(one.copies, output_width(tower), one.outputs, one.bias)
            for one, tower in maps
        )
        scale = torch.zeros(config.scale_copies)
        towers = (Ensemble(config.image, image), Ensemble(config.text, text))
        return cls(*towers, Projections(*linears), scale, scale if config.logit_bias else None)

    def _contents(self, name: str) -> Contents:
        metadata = {"image": stored_metadata(self.image.metadata)[0], "text": stored_metadata(self.text.metadata)[0]}
        return Contents(self._kind, to_plain(self.config), metadata, self.state_dict(), dual_model_card(name, self))

    @classmethod
    def _restored(
        cls, contents: Contents, device: str | torch.device | None, dtype: torch.dtype | None
    ) -> "DualEncoder":
        config = from_plain(DualEncoderConfig, contents.model, "config.model")
        image, text = (
            from_plain(Metadata, contents.metadata[name], f"config.metadata.{name}") for name in ("image", "text")
        )
        state = placed(contents.tensors, device, dtype)
        return build_with_state(lambda: cls._empty(config, image, text), state)

    def __repr__(self) -> str:
        sizes = f"members={self.num_members}, embedding={self.embedding_width}"
        return f"DualEncoder({sizes}, image={self.image!r}, text={self.text!r})"


def embed(
    tower: Ensemble, projection: GroupedLinear | None, inputs: Any, normalize: bool = True, **named: Any
) -> Tensor:
    """Embeddings `[G, B, e]` of a tower's inputs; G is 1 if neither tower nor projection has several members."""
    foreign = READ["text" if tower.kind == "image" else "image"]  # a processor returns inputs of both towers together
    named = {name: value for name, value in named.items() if name not in foreign}
    if isinstance(inputs, Mapping):
        kept = {name: value for name, value in inputs.items() if name not in foreign}
        inputs = kept if len(kept) < len(inputs) else inputs
    elif isinstance(inputs, tuple):
        inputs = list(inputs)
    x = tower(inputs, **named)  # [M or 1, B, d]
    if projection is not None:
        x = projection(x)
    return F.normalize(x, dim=-1) if normalize else x


def _numbers(values: float | Tensor, like: Ensemble) -> nn.Parameter:
    """A parameter `[1]` or `[M]` with a copy of the given numbers; plain numbers go to the towers' device and dtype."""
    tensor = values if isinstance(values, Tensor) else torch.tensor(values, dtype=like.dtype, device=like.device)
    return nn.Parameter(tensor.detach().clone().reshape(-1))


# --- models of either kind


def load(
    source: str | Path,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    stages: Mapping[str, Callable[..., Any]] | None = None,
    **hub: Any,
) -> Ensemble | Any:
    """Load a saved model: an `Ensemble`, a `DualEncoder` or a cascade, ready to answer tensors, texts and pictures.

    `source` is a folder of `save_pretrained` or of a build, or a name on the hub, `owner/name` or `hub:owner/name`;
    `device` and `dtype` replace the CPU and the type in the file. `stages` are the functions among the stages of a
    cascade, by name, and `hub` is for `huggingface_hub.snapshot_download` (`revision`, `token`).

    Examples:
        >>> base.save_pretrained("my-model")
        >>> again = he.load("my-model")  # a folder, or "hub:owner/name"
        >>> images = torch.randn(2, 3, 64, 64)
        >>> torch.equal(again(images), base(images))
        True
    """
    kinds: dict[str, Any] = {kind._kind: kind for kind in (Ensemble, DualEncoder)}
    contents = load_checkpoint(source, [*kinds, CASCADE], **hub)
    if contents.kind == CASCADE:
        cascades: Any = LATER[CASCADE]()
        return cascades._restored(contents, device, dtype, stages)
    return kinds[contents.kind]._restored(contents, device, dtype)


def require_model(model: object, caller: str, *kinds: type) -> Any:
    """Return the model, or raise if it is of none of these kinds (default: ours); `caller` is the function's name."""
    kinds = kinds or (Ensemble, DualEncoder)
    if isinstance(model, kinds):
        return model
    advice = "give what he.convert(model) returns" if Ensemble in kinds else "convert a CLIP model"
    if isinstance(model, DualEncoder):
        advice = "make a classifier of it first: he.zero_shot(model, class_names)"
    elif isinstance(model, Answering) and model.front is not model:
        advice = "give one of its stages"
    elif isinstance(model, nn.Module) and isinstance(unwrapped(model), kinds):
        advice = "give the model inside it (model.module, or model._orig_mod)"
    takes = " or ".join(kind.__name__ for kind in kinds)
    raise ConfigError(f"{caller} takes {takes}, got {type(model).__name__}; {advice}")


def require_ensemble(model: object, caller: str, classifies: bool = False) -> Ensemble:
    """Return the model, or raise if it is not an `Ensemble` or, with `classifies`, has no classes."""
    ensemble: Ensemble = require_model(model, caller, Ensemble)
    if classifies and not ensemble.num_classes:
        raise ConfigError(f"{caller} takes a classifier, this ensemble has none; convert the model with num_labels=")
    if classifies:
        require_one_right(ensemble, caller)
    return ensemble


def require_one_right(model: Answering, caller: str) -> None:
    """Refuse a model whose inputs may have several right labels."""
    if model.outputs == "labels":
        there = "for several right labels there are predict, calibrate, optimize, prune and fuse"
        raise ConfigError(f"{caller} takes a classifier whose inputs have one right class; {there}")


def require_classifier(model: object, caller: str) -> Any:
    """Return what answers with classes, an ensemble or a cascade; raises for anything else."""
    if isinstance(model, Answering) and model.num_classes:
        require_one_right(model, caller)
        return model
    return require_ensemble(model, caller, classifies=True)


def require_single(model: object, caller: str, classifies: bool = True) -> None:
    """Refuse anything but an `Ensemble` with one member that, with `classifies`, has classes."""
    members = require_ensemble(model, caller, classifies).num_members
    if members != 1:
        raise ConfigError(f"{caller} takes a single model, got {members} members; give ensemble.member(i)")


# --- zero-shot classifiers

Templates = str | Sequence[str]

LABEL = "{label}"
DEFAULT_TEMPLATES: Templates = ("A photo of a {label}.",)
_PROMPTS_AT_ONCE = 256


def checked_names(class_names: Sequence[str]) -> tuple[str, ...]:
    """Class names, checked: at least two, all different."""
    names = tuple(class_names)
    if len(names) < 2 or any(invalid_names(names)):
        raise DataError(f"class_names needs two names or more, none blank or twice, got {short(names)}")
    return names


def checked_templates(templates: Templates) -> tuple[str, ...]:
    """Templates, checked: at least one, each with a placeholder; CLIP's `{}` becomes `{label}`."""
    given = (templates,) if isinstance(templates, str) else tuple(templates)
    sentences = tuple(one if LABEL in one else one.replace("{}", LABEL) for one in given)
    if not sentences or len(set(sentences)) < len(sentences) or any(LABEL not in one for one in sentences):
        raise DataError(f"templates needs sentences with {LABEL}, each once, got {short(given)}")
    return sentences


def prompts_of(names: Sequence[str], templates: Sequence[str]) -> list[str]:
    """Every class in every template, grouped by class."""
    return [template.replace(LABEL, name) for name in names for template in templates]


@torch.no_grad()
def class_embeddings(
    tower: Ensemble, projection: GroupedLinear | None, names: Sequence[str], templates: Sequence[str]
) -> Tensor:
    """Normalised embeddings `[G, C, e]`; G is 1, or the number of members that differ in tower or projection."""
    prompts = prompts_of(names, templates)
    with dropping(False):
        batches = (prompts[start : start + _PROMPTS_AT_ONCE] for start in range(0, len(prompts), _PROMPTS_AT_ONCE))
        embedded = torch.cat([embed(tower, projection, batch, normalize=True) for batch in batches], dim=1)
    return average_templates(embedded, len(templates))


def average_templates(embedded: Tensor, templates: int) -> Tensor:
    """One normalised embedding per class, `[G, C, e]`, from those of its prompts, `[G, C·templates, e]`."""
    return embedded if templates == 1 else F.normalize(embedded.unflatten(1, (-1, templates)).mean(2), dim=-1)


_CLASSIFIER, _PROJECTION, _CLASSES = "readout.classifier.", "readout.projection.", "readout.class_embeddings."


@without_autocast()
def zero_shot(dual: DualEncoder, class_names: Sequence[str], templates: Templates = DEFAULT_TEMPLATES) -> Ensemble:
    """Make an image classifier from a dual encoder and the names of its classes; nothing is trained.

    Each member's text tower embeds the names once, here; the result is an ensemble like any other. Keep the
    dual encoder, pruned or fused as you like, to make classifiers of other classes.

    `class_names` are in the order of the logits, `templates` sentences with `{label}` (or `{}`) in place of the name.
    With several, the embeddings of a class are averaged: each is scaled to length one, and so is their mean.

    Examples:
        >>> classifier = he.zero_shot(dual, ["cat", "dog", "red bus"], "a photo of the {label}")
        >>> classifier.predict(torch.randn(2, 3, 32, 32)).class_names
        ('cat', 'dog', 'red bus')
    """
    require_model(dual, "zero_shot", DualEncoder)
    names = checked_names(class_names)
    sentences = checked_templates(templates)
    classes = _class_state(dual, names, sentences)
    projection = compose(dual.image.readout.classifier, dual.projections.image)
    config = _config(dual, projection, classes)
    state = {name: tensor for name, tensor in dual.image.state_dict().items() if not name.startswith(_CLASSIFIER)}
    if projection is not None:
        state |= {_PROJECTION + name: tensor.to(dual.dtype) for name, tensor in projection.state_dict().items()}
    state |= {name: tensor.to(dual.device, dual.dtype) for name, tensor in classes.items()}
    for name, tensor in list(state.items()):  # in the readout, one copy for all becomes one per member
        if place_of(name)[0] == "readout":
            by_heads = rows_of(config, name, config.heads[0]) is not None
            copies = copies_of(dual.image.config, name) if by_heads else len(tensor)
            state[name] = tensor.repeat(copies_of(config, name) // copies, *[1] * (tensor.dim() - 1))
    images, texts = dual.image.metadata.history, dual.text.metadata.history
    history = (*images, *(f"text tower: {line}" for line in texts if line not in images))
    line = f"zero-shot classifier of {len(names)} classes, {len(sentences)} templates"
    metadata = replace(dual.image.metadata, history=history).after(line, labels=names)
    return Ensemble.from_state(config, state, metadata)


def _class_state(dual: DualEncoder, names: Sequence[str], templates: Sequence[str]) -> dict[str, Tensor]:
    """Weights of the readout: class embeddings times the logit scale `[G, C, e]`, and a bias per class `[G, C]`."""
    if not isinstance(dual.text.metadata.preprocessing, TextPreprocessing):
        raise DataError("the text tower has no tokenizer; convert the model with processor=")
    ids = dual.text.unpack(prompts_of(names, templates))[0].unflatten(0, (len(names), -1))  # [C, templates, T]
    if len(ids.flatten(1).unique(dim=0)) < len(names):
        raise DataError("some classes have the same tokens; use words that the tokenizer knows, and shorter templates")
    classes = class_embeddings(dual.text, dual.projections.text, names, templates)
    dtype = torch.promote_types(classes.dtype, torch.float32)  # the scale is large: half precision would round it
    weight = classes * dual.logit_scale.detach().to(dtype).exp()[:, None, None]
    if dual.logit_bias is None:
        return {_CLASSES + "weight": weight}
    bias = dual.logit_bias.detach().to(dtype)[:, None]
    return {_CLASSES + "weight": weight, _CLASSES + "bias": bias.expand(weight.shape[:2])}


def _config(dual: DualEncoder, projection: GroupedLinear | None, classes: Mapping[str, Tensor]) -> EnsembleConfig:
    """The image tower's configuration with as many members as the dual encoder has, and its new readout."""
    image = dual.image.config
    shape = projection_config(projection)
    weight = classes[_CLASSES + "weight"]
    cosine = CosineConfig() if shape is None else CosineConfig(shape.outputs, shape.bias)
    readout = replace(image.readout, num_classes=weight.shape[1], bias=_CLASSES + "bias" in classes, cosine=cosine)
    if dual.num_members == 1:
        return replace(image, readout=readout)
    once = max(weight.shape[0], image.copies("readout"), 1 if shape is None else shape.copies) == 1
    if image.members == dual.num_members:
        return replace(image, readout=readout, sharing=replace(image.sharing, readout=once))
    all_but_readout = Sharing(stem=True, attention=True, mlp=True, norms=True, readout=once)
    heads = image.heads * dual.num_members
    return replace(image, readout=readout, heads=heads, sharing=all_but_readout, trunk=0)

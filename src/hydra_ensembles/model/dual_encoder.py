"""Two towers that meet in one embedding, and zero-shot classifiers made of them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .._utils import own_precision
from ..arguments import checked
from ..batches import READ
from ..checkpoint import Stored, load_checkpoint
from ..errors import ConfigError, DataError
from ..preprocessing import TextPreprocessing
from .config import CosineConfig, DualEncoderConfig, EnsembleConfig, Sharing, output_width
from .contents import DUAL_ENCODER, ENSEMBLE, Contents, dual_encoder_contents, read_dual_encoder
from .cost import Description
from .dropping import OurModel, dropping
from .ensemble import Ensemble, Saved, built_around, copied
from .given import require_values
from .layers import GroupedLinear
from .metadata import PROJECTION, TOWER, Metadata, TextSettings, TextSide, odd_names, text_state
from .states import copies_of, head_axis, member_index, place_of
from .stem_readout import Projections, compose, linear, projection_config, projection_from

Tower = Literal["image", "text"]

INITIAL_SCALE = math.log(1 / 0.07)  # where CLIP's training starts


class DualEncoder(Saved, OurModel):
    """An image tower and a text tower whose features are projected into one embedding (CLIP).

    The towers have the same number of members, or one of them has a single member that serves all. The logit of an
    image and a text is the cosine of their embeddings times `exp(logit_scale)`, plus `logit_bias` where there is one.

    Attributes:
        config: What it is made of.
        num_members: Number of members, M.
        embedding_width: Width of the common embedding, e.

    Examples:
        `dual` is a CLIP of transformers or open_clip, made one of ours by `convert(model, processor=...)`:

        >>> import torch
        >>> images, texts = torch.randn(2, 3, 32, 32), ["a photo of a cat", "a photo of a dog", "a red bus"]
        >>> dual(images, texts).shape  # a logit for each image and text, of every member
        torch.Size([1, 2, 3])
        >>> dual.encode_text(texts).shape == (1, 3, dual.embedding_width)
        True
    """

    _kind = DUAL_ENCODER

    def __init__(
        self,
        image: Ensemble,
        text: Ensemble,
        projections: Projections | None = None,
        logit_scale: float | Tensor = INITIAL_SCALE,
        logit_bias: float | Tensor | None = None,
    ) -> None:
        """Put two towers together; they become part of the dual encoder, nothing is copied.

        Args:
            image: The tower for images.
            text: The tower for texts.
            projections: Linear maps into the embedding; None where the features are the embedding.
            logit_scale: Logarithm of the scale, one number or one per member.
            logit_bias: Added to the scaled cosines, as many numbers as `logit_scale`; None for no bias.
        """
        super().__init__()
        self.image, self.text = image, text
        self.projections = Projections() if projections is None else projections
        self.logit_scale = _numbers(logit_scale, image)  # [1] or [M]
        self.logit_bias = None if logit_bias is None else _numbers(logit_bias, image)
        if self.logit_bias is not None and self.logit_bias.shape != self.logit_scale.shape:
            counts = f"logit_scale has {self.logit_scale.numel()} numbers and logit_bias {self.logit_bias.numel()}"
            raise ConfigError(f"{counts}; give as many")
        for tower, projection in ((image, self.projections.image), (text, self.projections.text)):
            takes = None if projection is None else projection.weight.shape[2]
            gives = output_width(tower.config)
            if takes not in (None, gives):
                problem = f"a projection takes features of width {takes}"
                raise ConfigError(f"{problem}, the {tower.kind} tower before it gives {gives}")
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
        """Embed images as `[M, B, e]`.

        Args:
            inputs: Images `[B, 3, H, W]`, a mapping with `pixel_values`, or PIL images, which go through the
                saved preprocessing.
            normalize: Scale each embedding to length one.
            named: The same as keywords; those that the other tower reads are left to it.
        """
        return self._per_member(embed(self.image, self.projections.image, inputs, normalize, **named))

    def encode_text(self, inputs: Any = None, normalize: bool = True, **named: Any) -> Tensor:
        """Embed texts as `[M, B, e]`.

        Args:
            inputs: Token ids `[B, T]`, a mapping with `input_ids` and perhaps `attention_mask`, or strings,
                which go through the saved tokenizer.
            normalize: Scale each embedding to length one.
            named: As in `encode_image`.
        """
        return self._per_member(embed(self.text, self.projections.text, inputs, normalize, **named))

    def _per_member(self, x: Tensor) -> Tensor:
        return x.expand(self.num_members, *x.shape[1:])  # [M or 1, B, e] -> [M, B, e]

    def logits(self, image_embeddings: Tensor, text_embeddings: Tensor) -> Tensor:
        """Scaled similarities `[M, B_image, B_text]` of normalised embeddings `[M or 1, B, e]`."""
        similarity = image_embeddings @ text_embeddings.transpose(1, 2)
        logits = similarity * self.logit_scale.exp()[:, None, None]
        return logits if self.logit_bias is None else logits + self.logit_bias[:, None, None]

    def member(self, index: int) -> "DualEncoder":
        """A copy of one member as a dual encoder of its own."""
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
        return built_around(lambda: cls._empty(config, image, text), copied(state))

    @classmethod
    def _empty(cls, config: DualEncoderConfig, image: Metadata, text: Metadata) -> "DualEncoder":
        maps = (config.image_projection, config.image), (config.text_projection, config.text)
        projections = Projections(*(projection_from(projection, output_width(tower)) for projection, tower in maps))
        scale = torch.zeros(config.scale_copies)
        towers = (Ensemble(config.image, image), Ensemble(config.text, text))
        return cls(*towers, projections, scale, scale if config.logit_bias else None)

    def _contents(self, name: str) -> Contents:
        image, text = self.image.kept_metadata("saved"), self.text.kept_metadata("saved")
        return dual_encoder_contents(name, self.config, image, text, self.state_dict())

    @classmethod
    def _restored(cls, stored: Stored, device: str | torch.device | None, dtype: torch.dtype | None) -> "DualEncoder":
        config, image, text = stored.read(read_dual_encoder)
        layers = config.image.encoder.layers + config.text.encoder.layers
        state = stored.tensors(lambda: cls._empty(config, image, text).state_dict(), device, dtype, at_least=layers)
        return cls.from_state(config, state, image, text)

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return self.image.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the parameters."""
        return self.image.dtype

    def describe_towers(self) -> dict[Tower, Description]:
        """Parameters, multiply-adds and heads kept of each tower; print them."""
        return {"image": self.image.describe(), "text": self.text.describe()}

    def __repr__(self) -> str:
        sizes = f"members={self.num_members}, embedding={self.embedding_width}"
        return f"DualEncoder({sizes}, image={self.image!r}, text={self.text!r})"


@checked
def load(
    source: str | Path,
    *,
    revision: str | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    token: str | None = None,
) -> Ensemble | Any:
    """The saved model in a folder or on the hub, ready to answer: an `Ensemble` or a `DualEncoder`.

    `he.load("my-hydra").predict(inputs)` gives answers and `he.load("my-hydra")(inputs)` member logits, of tensors, and
    of texts and pictures where the preprocessing was saved. To type checkers it is an `Ensemble`, unless `isinstance`
    says otherwise; `DualEncoder.from_pretrained` reads the other kind alone.

    Args:
        source: The folder that `save_pretrained` wrote, or a name on the hub, `owner/name` or `hub:owner/name`.
        revision: Branch, tag or commit of the hub.
        device: Where the weights go; None is the CPU.
        dtype: Floating type of the weights; None is that of the file.
        token: For private models of the hub.

    Raises:
        CheckpointError: There is no such model, or its files are damaged or do not fit together.

    Examples:
        >>> import torch, hydra_ensembles as he
        >>> from hydra_ensembles.demo import load_backbone
        >>> base = load_backbone()  # a small vision transformer: one member, 6 layers of 6 heads, 7 classes
        >>> base.save_pretrained("my-model")
        >>> again = he.load("my-model")  # a folder, or "hub:owner/name"
        >>> images = torch.randn(2, 3, 64, 64)
        >>> torch.equal(again(images), base(images))
        True
    """
    kinds: dict[str, Any] = {ENSEMBLE: Ensemble, DUAL_ENCODER: DualEncoder}

    def restored(stored: Stored) -> Any:
        return kinds[stored.record.kind]._restored(stored, device, dtype)

    return load_checkpoint(source, kinds, restored, revision=revision, token=token)


def embed(
    tower: Ensemble, projection: GroupedLinear | None, inputs: Any, normalize: bool = True, **named: Any
) -> Tensor:
    """Embeddings `[G, B, e]` of what a tower takes; G is 1 where neither tower nor projection has members."""
    foreign = READ["text" if tower.kind == "image" else "image"]  # a processor gives the inputs of both towers in one
    named = {name: value for name, value in named.items() if name not in foreign}
    if isinstance(inputs, Mapping):
        inputs = {name: value for name, value in inputs.items() if name not in foreign}
    elif inputs is not None and not isinstance(inputs, Tensor):
        inputs = tower.prepare(list(inputs) if isinstance(inputs, tuple) else inputs)
    x = tower(inputs, **named)  # [M or 1, B, d]
    if projection is not None:
        x = projection(x)
    return F.normalize(x, dim=-1) if normalize else x


def _numbers(values: float | Tensor, like: Ensemble) -> nn.Parameter:
    """A parameter `[1]` or `[M]` with a copy of the given numbers; plain ones go where the towers are."""
    tensor = values if isinstance(values, Tensor) else torch.tensor(values, dtype=like.dtype, device=like.device)
    return nn.Parameter(tensor.detach().clone().reshape(-1))


def require_ensemble(model: object, caller: str, classifies: bool = False) -> Ensemble:
    """The model, refused where it is not an `Ensemble` with weights, or, where it has to classify, has no classes.

    `caller` is the function that takes one.
    """
    if not isinstance(model, Ensemble):
        raise ConfigError(f"{caller} takes an Ensemble, got {_with_advice(model)}")
    require_values(next(model.parameters(), None))
    if classifies and not model.num_classes:
        raise ConfigError(f"{caller} takes a classifier, this ensemble has none; convert the model with num_labels=")
    return model


def require_single(model: object, caller: str, classifies: bool = True) -> None:
    """Refuse what is not an `Ensemble` with one member, or, where it has to classify, has no classes."""
    members = require_ensemble(model, caller, classifies).num_members
    if members != 1:
        raise ConfigError(f"{caller} takes a single model, got {members} members; give ensemble.member(i)")


def require_model(model: object, caller: str) -> None:
    """Refuse what is neither an `Ensemble` nor a `DualEncoder`."""
    if not isinstance(model, Ensemble | DualEncoder):
        raise ConfigError(f"{caller} takes an Ensemble or a DualEncoder, got {_with_advice(model)}")


def _with_advice(model: object) -> str:
    """The type of something that was given, and what to do about it."""
    advice = "give what he.convert(model) returns"
    if isinstance(model, DualEncoder):
        advice = "make a classifier of it first: he.zero_shot(model, class_names)"
    elif isinstance(model, str | Path):
        advice = f"load it first: he.load({str(model)!r})"
    return f"{type(model).__name__}; {advice}"


# --- class names and their embeddings --------------------------------------------------------------------

Templates = str | Sequence[str]

LABEL = "{label}"
DEFAULT_TEMPLATES: Templates = ("A photo of a {label}.",)
_PROMPTS_AT_ONCE = 256


def text_side_of(ensemble: Ensemble) -> TextSide:
    """The text towers that a zero-shot ensemble has kept, to embed other words."""
    side = ensemble.metadata.text_side
    if side is None:
        raise ConfigError("this ensemble kept no text towers; make it again with zero_shot(..., keep_text=True)")
    return side


def checked_names(class_names: Sequence[str]) -> tuple[str, ...]:
    """Class names, at least two and all different."""
    names = tuple(class_names)
    blank, twice = odd_names(names)
    if blank is not None:
        raise DataError(f"class_names[{blank}] is {names[blank]!r}; every class needs a name")
    if len(names) < 2 or twice:
        raise DataError(f"class_names has {len(names)} names, twice {twice[:5]}; give at least two, all different")
    return names


def checked_templates(templates: Templates) -> tuple[str, ...]:
    """Templates, at least one; each has a place for the name."""
    sentences = (templates,) if isinstance(templates, str) else tuple(templates)
    if not sentences:
        raise DataError("templates is empty; give at least one sentence such as 'A photo of a {label}.'")
    for index, sentence in enumerate(sentences):
        if not isinstance(sentence, str) or LABEL not in sentence:
            raise DataError(f"templates[{index}] is {sentence!r}; it must have {LABEL} where the class name goes")
    if len(set(sentences)) < len(sentences):
        raise DataError("templates lists a sentence twice; leave it out")
    return sentences


def prompts_of(names: Sequence[str], templates: Sequence[str]) -> list[str]:
    """Every class in every template, one class after another."""
    return [template.replace(LABEL, name) for name in names for template in templates]


@torch.no_grad()
def class_embeddings(
    tower: Ensemble, projection: GroupedLinear | None, names: Sequence[str], templates: Sequence[str]
) -> Tensor:
    """Embeddings `[G, C, e]` of length one; G is 1, or the number of members that differ in tower or projection."""
    prompts = prompts_of(names, templates)
    with dropping(False):
        batches = (prompts[start : start + _PROMPTS_AT_ONCE] for start in range(0, len(prompts), _PROMPTS_AT_ONCE))
        embedded = torch.cat([embed(tower, projection, batch, normalize=True) for batch in batches], dim=1)
    return average_templates(embedded, len(templates))


def require_distinct(tower: Ensemble, names: Sequence[str], templates: Sequence[str]) -> None:
    """Refuse class names that become the same tokens, naming two: no member can tell them apart."""
    ids = tower.unpack(tower.prepare(prompts_of(names, templates)))[0]  # [C·templates, T]
    by_tokens: dict[bytes, str] = {}
    for name, tokens in zip(names, ids.cpu().unflatten(0, (len(names), -1)), strict=True):
        earlier = by_tokens.setdefault(tokens.numpy().tobytes(), name)
        if earlier != name:
            raise DataError(
                f"the classes {earlier!r} and {name!r} are the same tokens: the tokenizer does not know the words in "
                "which they differ, or cuts them off; use words it knows, and templates that are short enough"
            )


def average_templates(embedded: Tensor, templates: int) -> Tensor:
    """One embedding per class, `[G, C, e]`, out of those of its prompts, `[G, C·templates, e]`, of length one."""
    return embedded if templates == 1 else F.normalize(embedded.unflatten(1, (-1, templates)).mean(2), dim=-1)


# --- zero-shot classifiers -------------------------------------------------------------------------------

_CLASSIFIER, _PROJECTION, _CLASSES = "readout.classifier.", "readout.projection.", "readout.class_embeddings."


@checked
@own_precision()
def zero_shot(
    dual: DualEncoder, class_names: Sequence[str], templates: Templates = DEFAULT_TEMPLATES, keep_text: bool = True
) -> Ensemble:
    """An image classifier out of a dual encoder and the names of its classes; nothing is trained.

    Each member's text tower embeds the names once, here; the result is an ensemble like any other.

    Args:
        dual: One member or several; it is not changed. Its text tower must have a tokenizer.
        class_names: One per class, in the order of the logits.
        templates: Sentences with `{label}` where the name goes. With several, the embeddings of a class are
            averaged: each scaled to length one, and their mean again.
        keep_text: Keep text towers and tokenizer, also in `save_pretrained`, so that `retarget` can set other
            classes. They stay on the CPU and take no part in inference.

    Raises:
        HydraError: Names or templates that are missing, empty or listed twice, classes that become the same tokens, a
            dual encoder without tokenizer, or an image tower that has no single feature vector.

    Examples:
        `dual` is a CLIP of transformers or open_clip, made one of ours by `convert(model, processor=...)`:

        >>> import torch, hydra_ensembles as he
        >>> classifier = he.zero_shot(dual, ["cat", "dog", "red bus"], "a photo of the {label}")
        >>> classifier.predict(torch.randn(2, 3, 32, 32)).class_names
        ('cat', 'dog', 'red bus')
    """
    if not isinstance(dual, DualEncoder):
        raise ConfigError(f"zero_shot takes a DualEncoder, got {type(dual).__name__}; convert a CLIP model")
    if dual.image.readout.config.cosine is not None:
        raise ConfigError("the image tower must end in one feature vector, not in class embeddings; convert it again")
    require_values(dual.logit_scale)
    names = checked_names(class_names)
    sentences = checked_templates(templates)
    side = _text_side(dual, sentences)
    classes = _class_state(side, names, dual.device)
    projection = compose(dual.image.readout.classifier, dual.projections.image)
    config = _config(dual, projection, classes)
    state = {name: tensor for name, tensor in dual.image.state_dict().items() if not name.startswith(_CLASSIFIER)}
    if projection is not None:
        state |= {_PROJECTION + name: tensor.to(dual.dtype) for name, tensor in projection.state_dict().items()}
    state |= {name: tensor.to(dual.device, dual.dtype) for name, tensor in classes.items()}
    for name in [name for name in state if place_of(name)[0] == "readout"]:
        by_heads = head_axis(config, name) is not None
        copies = copies_of(dual.image.config, name) if by_heads else len(state[name])
        times = copies_of(config, name) // copies
        state[name] = state[name].repeat(times, *[1] * (state[name].dim() - 1))
    images, texts = dual.image.metadata.history, dual.text.metadata.history
    history = (*images, *(f"text tower: {line}" for line in texts if line not in images))
    weights = {name: tensor.detach().to("cpu", copy=True) for name, tensor in side.state.items() if keep_text}
    text_side = TextSide(side.settings, weights) if keep_text else None
    line = f"zero-shot classifier of {len(names)} classes, {len(sentences)} templates"
    metadata = replace(dual.image.metadata, history=history).after(line, labels=names, text_side=text_side)
    return Ensemble.from_state(config, state, metadata)


@checked
@own_precision()
def retarget(ensemble: Ensemble, class_names: Sequence[str], templates: Templates | None = None) -> Ensemble:
    """The same zero-shot ensemble for other classes, by the text towers it kept; the calibration does not carry over.

    Args:
        ensemble: Made by `zero_shot` with `keep_text`, perhaps pruned, fused, saved and loaded since.
        class_names: The new classes.
        templates: The new templates; None for those it was made with.

    Examples:
        `dual` is a CLIP of transformers or open_clip, made one of ours by `convert(model, processor=...)`:

        >>> import hydra_ensembles as he
        >>> classifier = he.zero_shot(dual, ["cat", "dog"])
        >>> he.retarget(classifier, ["house", "boat", "green tree"]).num_classes
        3
    """
    side = text_side_of(require_ensemble(ensemble, "retarget"))
    names = checked_names(class_names)
    sentences = side.settings.templates if templates is None else checked_templates(templates)
    side = TextSide(replace(side.settings, templates=sentences), side.state)
    classes = _class_state(side, names, ensemble.device)
    copies = ensemble.config.copies("readout")
    if copies < len(classes[_CLASSES + "weight"]):  # fused with readout="mean"
        classes = {name: tensor.mean(0, keepdim=True) for name, tensor in classes.items()}
    state = {name: tensor for name, tensor in ensemble.state_dict().items() if not name.startswith(_CLASSES)}
    for name, tensor in classes.items():
        state[name] = tensor.to(ensemble.device, ensemble.dtype).expand(copies, *tensor.shape[1:])
    readout = replace(ensemble.config.readout, num_classes=len(names), bias=_CLASSES + "bias" in classes)
    line = f"re-targeted to {len(names)} classes, {len(sentences)} templates"
    metadata = ensemble.metadata.after(line, labels=names, text_side=side)
    return Ensemble.from_state(replace(ensemble.config, readout=readout), state, metadata)


def text_tower(side: TextSide, device: torch.device) -> tuple[Ensemble, GroupedLinear | None]:
    """The tower and the projection of a text side, on a device."""
    settings, parts = side.settings, (side.part(TOWER), side.part(PROJECTION))
    weights, maps = ({name: tensor.to(device) for name, tensor in part.items()} for part in parts)
    tower = built_around(lambda: Ensemble(settings.tower, Metadata(preprocessing=settings.preprocessing)), weights)
    return tower, linear(maps["weight"], maps.get("bias")) if maps else None


def _class_state(side: TextSide, names: Sequence[str], device: torch.device) -> dict[str, Tensor]:
    """The readout's weights: class embeddings times the logit scale `[G, C, e]`, and a bias for each class `[G, C]`."""
    settings, (tower, projection) = side.settings, text_tower(side, device)
    require_distinct(tower, names, settings.templates)
    classes = class_embeddings(tower, projection, names, settings.templates)
    dtype = torch.promote_types(classes.dtype, torch.float32)  # the scale is large: half precision would round it
    weight = classes * torch.tensor(settings.logit_scale, dtype=dtype, device=device).exp()[:, None, None]
    if settings.logit_bias is None:
        return {_CLASSES + "weight": weight}
    bias = torch.tensor(settings.logit_bias, dtype=dtype, device=device)[:, None]
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


def _text_side(dual: DualEncoder, templates: tuple[str, ...]) -> TextSide:
    """The text side of a dual encoder, around its own weights."""
    preprocessing, projection = dual.text.metadata.preprocessing, dual.projections.text
    if not isinstance(preprocessing, TextPreprocessing):
        raise DataError("the text tower has no tokenizer; convert the model with processor=")
    scale = tuple(dual.logit_scale.double().tolist())
    bias = None if dual.logit_bias is None else tuple(dual.logit_bias.double().tolist())
    settings = TextSettings(dual.text.config, projection_config(projection), scale, bias, templates, preprocessing)
    return TextSide(settings, text_state(dual.text.state_dict(), {} if projection is None else projection.state_dict()))

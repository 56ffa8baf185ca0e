"""Zero-shot classifiers: an image tower, and class names that the text tower embeds once."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from .._utils import without_autocast
from ..errors import ConfigError, DataError
from ..preprocessing import TextPreprocessing
from ..settings import short
from .config import CosineConfig, EnsembleConfig, Sharing
from .dropout import dropping
from .dual_encoder import DualEncoder, embed
from .ensemble import Ensemble
from .kinds import require_ensemble, require_model
from .layers import GroupedLinear
from .member_states import copies_of, head_axis, place_of
from .metadata import Metadata, TextSide, invalid_names
from .stem_readout import compose, projection_config

Templates = str | Sequence[str]

LABEL = "{label}"
DEFAULT_TEMPLATES: Templates = ("A photo of a {label}.",)
_PROMPTS_AT_ONCE = 256


def text_side_of(ensemble: Ensemble) -> TextSide:
    """The text towers kept by a zero-shot ensemble, for embedding other words."""
    side = ensemble.metadata.text_side
    if side is None:
        raise ConfigError("this ensemble kept no text towers; make it again with zero_shot(..., keep_text=True)")
    return side


def checked_names(class_names: Sequence[str]) -> tuple[str, ...]:
    """Class names, checked: at least two, all different."""
    names = tuple(class_names)
    blank, twice = invalid_names(names)
    if len(names) < 2 or blank is not None or twice:
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


# --- zero-shot classifiers -------------------------------------------------------------------------------

_CLASSIFIER, _PROJECTION, _CLASSES = "readout.classifier.", "readout.projection.", "readout.class_embeddings."


@without_autocast()
def zero_shot(
    dual: DualEncoder, class_names: Sequence[str], templates: Templates = DEFAULT_TEMPLATES, keep_text: bool = True
) -> Ensemble:
    """Make an image classifier from a dual encoder and the names of its classes; nothing is trained.

    Each member's text tower embeds the names once, here; the result is an ensemble like any other.

    Args:
        dual: One member or several. Its text tower must have a tokenizer.
        class_names: In the order of the logits.
        templates: Sentences with `{label}` (or `{}`) in place of the name. With several, the embeddings of a class are
            averaged: each is scaled to length one, and so is their mean.
        keep_text: Keep text towers and tokenizer on the CPU, also in files, so that `retarget` can set other classes.

    Examples:
        >>> classifier = he.zero_shot(dual, ["cat", "dog", "red bus"], "a photo of the {label}")
        >>> classifier.predict(torch.randn(2, 3, 32, 32)).class_names
        ('cat', 'dog', 'red bus')
    """
    require_model(dual, "zero_shot", DualEncoder)
    if dual.image.readout.config.cosine is not None:
        raise ConfigError("the image tower must end in one feature vector, not in class embeddings; convert it again")
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
    for name, tensor in list(state.items()):  # in the readout, one copy for all becomes one per member
        if place_of(name)[0] == "readout":
            by_heads = head_axis(config, name) is not None
            copies = copies_of(dual.image.config, name) if by_heads else len(tensor)
            state[name] = tensor.repeat(copies_of(config, name) // copies, *[1] * (tensor.dim() - 1))
    images, texts = dual.image.metadata.history, dual.text.metadata.history
    history = (*images, *(f"text tower: {line}" for line in texts if line not in images))
    line = f"zero-shot classifier of {len(names)} classes, {len(sentences)} templates"
    kept = _kept(side) if keep_text else None
    metadata = replace(dual.image.metadata, history=history).after(line, labels=names, text_side=kept)
    return Ensemble.from_state(config, state, metadata)


@without_autocast()
def retarget(ensemble: Ensemble, class_names: Sequence[str], templates: Templates | None = None) -> Ensemble:
    """The same zero-shot ensemble for other classes, from the text towers it kept, without its calibration.

    It may have been pruned, fused, saved and loaded since. `templates` are those of before unless given.

    Examples:
        >>> classifier = he.zero_shot(dual, ["cat", "dog"])
        >>> he.retarget(classifier, ["house", "boat", "green tree"]).num_classes
        3
    """
    side = text_side_of(require_ensemble(ensemble, "retarget"))
    names = checked_names(class_names)
    sentences = side.templates if templates is None else checked_templates(templates)
    side = replace(side, templates=sentences)
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


def _kept(side: TextSide) -> TextSide:
    """A copy of a text side on the CPU, with what its tower needs to read texts."""
    known = Metadata(preprocessing=side.tower.metadata.preprocessing)
    tower = Ensemble.from_state(side.tower.config, side.tower.whole_state(), known).cpu()
    return replace(side, tower=tower, projection=None if side.projection is None else deepcopy(side.projection).cpu())


def _class_state(side: TextSide, names: Sequence[str], device: torch.device) -> dict[str, Tensor]:
    """Weights of the readout: class embeddings times the logit scale `[G, C, e]`, and a bias per class `[G, C]`."""
    side = side.on(device)
    ids = side.tower.unpack(prompts_of(names, side.templates))[0].unflatten(0, (len(names), -1))  # [C, templates, T]
    if len(ids.flatten(1).unique(dim=0)) < len(names):
        raise DataError("some classes have the same tokens; use words that the tokenizer knows, and shorter templates")
    classes = class_embeddings(side.tower, side.projection, names, side.templates)
    dtype = torch.promote_types(classes.dtype, torch.float32)  # the scale is large: half precision would round it
    weight = classes * torch.tensor(side.logit_scale, dtype=dtype, device=device).exp()[:, None, None]
    if side.logit_bias is None:
        return {_CLASSES + "weight": weight}
    bias = torch.tensor(side.logit_bias, dtype=dtype, device=device)[:, None]
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
    if not isinstance(dual.text.metadata.preprocessing, TextPreprocessing):
        raise DataError("the text tower has no tokenizer; convert the model with processor=")
    scale = tuple(dual.logit_scale.tolist())
    bias = None if dual.logit_bias is None else tuple(dual.logit_bias.tolist())
    return TextSide(dual.text, dual.projections.text, scale, bias, templates)

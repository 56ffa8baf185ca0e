"""Classifiers without training: an image tower, and classes that are known by their names."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .config import CosineConfig, EnsembleConfig, Sharing
from .dual_encoder import DualEncoder
from .encoder.grouped import GroupedLinear
from .ensemble import Ensemble
from .errors import ConfigError, DataError
from .given_models import require_ensemble
from .member_states import place_of
from .metadata import Metadata
from .projections import compose, linear, projection_config
from .prompts import (
    DEFAULT_TEMPLATES,
    Templates,
    checked_names,
    checked_templates,
    class_embeddings,
    require_distinct,
)
from .text_side import PROJECTION, TOWER, TextSettings, TextSide, named

_CLASSIFIER, _PROJECTION, _CLASSES = "readout.classifier.", "readout.projection.", "readout.class_embeddings."


def zero_shot(
    dual: DualEncoder,
    class_names: Sequence[str],
    templates: Templates = DEFAULT_TEMPLATES,
    keep_text: bool = True,
) -> Ensemble:
    """An image classifier out of a dual encoder and the names of its classes; nothing is trained.

    Each member's text tower embeds the names once, here. What is left to do for an image is one pass over the image
    tower and the cosines with the class embeddings, times the logit scale. The result is an ensemble like any other.

    Args:
        dual: One member or several; it is not changed. Its text tower must have a tokenizer.
        class_names: One per class, in the order of the logits.
        templates: Sentences with `{label}` where the name goes. With several, the embeddings of a class are
            averaged: each scaled to length one, and their mean again.
        keep_text: Keep text towers and tokenizer, also in `save_pretrained`, so that `retarget` can set other
            classes. They stay on the CPU and take no part in inference.

    Raises:
        HydraError: Names or templates that are missing, empty or listed twice, classes that get the same embedding, a
            dual encoder without tokenizer, or an image tower that has no single feature vector.
    """
    if not isinstance(dual, DualEncoder):
        raise ConfigError(
            f"zero_shot takes a DualEncoder, got a {type(dual).__name__}; convert a CLIP model, or use retarget to "
            "give a zero-shot ensemble other classes"
        )
    names, sentences = checked_names(class_names), checked_templates(templates)
    classes = class_embeddings(dual.text, dual.projections.text, names, sentences)  # [1 or M, C, e]
    require_distinct(classes, names)
    weight, bias = _scaled(classes, dual.logit_scale, dual.logit_bias)
    projection = _image_projection(dual)
    config = _config(dual, projection, len(names), bias is not None, len(weight))
    state = {name: tensor for name, tensor in dual.image.state_dict().items() if not name.startswith(_CLASSIFIER)}
    if projection is not None:
        state |= {_PROJECTION + name: tensor.to(dual.dtype) for name, tensor in projection.state_dict().items()}
    state |= _class_state(weight, bias, dual.image)
    copies = config.copies("readout")
    of_readout = (name for name in state if place_of(name)[0] == "readout")
    state |= {name: state[name].expand(copies, *state[name].shape[1:]) for name in of_readout}
    line = f"zero-shot classifier of {len(names)} classes, {len(sentences)} templates"
    metadata = replace(
        dual.image.metadata,
        labels=names,
        calibration=None,
        metrics={},
        history=(*_history(dual), line),
        text_side=_text_side(dual, sentences) if keep_text else None,
    )
    return Ensemble.from_state(config, state, metadata)


def retarget(ensemble: Ensemble, class_names: Sequence[str], templates: Templates | None = None) -> Ensemble:
    """The same zero-shot ensemble for other classes, by the text towers it kept.

    Needs no other library than the one for the tokenizer. The calibration does not carry over.

    Args:
        ensemble: Made by `zero_shot` with `keep_text`, perhaps pruned, fused, saved and loaded since.
        class_names: The new classes.
        templates: The new templates; None for those it was made with.
    """
    require_ensemble(ensemble, "retarget")
    side = ensemble.metadata.text_side
    if side is None:
        raise ConfigError(
            "this ensemble kept no text towers, so it cannot embed other class names; make it again with "
            "zero_shot(dual, class_names, keep_text=True)"
        )
    settings = side.settings
    names = checked_names(class_names)
    sentences = settings.templates if templates is None else checked_templates(templates)
    tower, projection = _text_tower(side, ensemble.device)
    classes = class_embeddings(tower, projection, names, sentences)
    require_distinct(classes, names)
    scale, *more = (
        None if numbers is None else torch.tensor(numbers, dtype=classes.dtype, device=classes.device)
        for numbers in (settings.logit_scale, settings.logit_bias)
    )
    assert scale is not None
    weight, bias = _scaled(classes, scale, more[0])
    copies = ensemble.config.copies("readout")
    if copies < len(weight):  # fused with readout="mean"
        weight, bias = weight.mean(0, keepdim=True), None if bias is None else bias.mean(0, keepdim=True)
    readout = replace(ensemble.config.readout, num_classes=len(names), bias=bias is not None)
    state = {name: tensor for name, tensor in ensemble.state_dict().items() if not name.startswith(_CLASSES)}
    new = _class_state(weight, bias, ensemble)
    state |= {name: tensor.expand(copies, *tensor.shape[1:]) for name, tensor in new.items()}
    metadata = replace(
        ensemble.metadata,
        labels=names,
        calibration=None,
        metrics={},
        history=(*ensemble.metadata.history, f"re-targeted to {len(names)} classes, {len(sentences)} templates"),
        text_side=TextSide(replace(settings, templates=sentences), side.state),
    )
    return Ensemble.from_state(replace(ensemble.config, readout=readout), state, metadata)


def _scaled(classes: Tensor, scale: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Class embeddings `[G, C, e]` times the logit scale, and the bias of every class `[G, C]`, or None."""
    weight = classes * scale.detach().exp()[:, None, None]
    if bias is None:
        return weight, None
    return weight, bias.detach()[:, None].expand(len(weight), weight.shape[1])


def _class_state(weight: Tensor, bias: Tensor | None, like: Ensemble) -> Mapping[str, Tensor]:
    state = {_CLASSES + "weight": weight.to(like.device, like.dtype)}
    if bias is not None:
        state[_CLASSES + "bias"] = bias.to(like.device, like.dtype)
    return state


def _image_projection(dual: DualEncoder) -> GroupedLinear | None:
    """The one linear map from pooled features to the embedding; a tower's own classifier counts as part of it."""
    readout, outer = dual.image.readout, dual.projections.image
    if readout.config.cosine is not None or readout.config.pool == "distilled":
        raise ConfigError(
            f"the image tower must end in one feature vector; this one has the readout {readout.config}. Use the image "
            "tower of a dual encoder as it was converted"
        )
    return compose(readout.classifier, outer)


def _config(
    dual: DualEncoder, projection: GroupedLinear | None, classes: int, bias: bool, copies: int
) -> EnsembleConfig:
    """The image tower's configuration with as many members as the dual encoder has, and its new readout."""
    image, members = dual.image.config, dual.num_members
    shape = projection_config(projection)
    cosine = CosineConfig() if shape is None else CosineConfig(shape.outputs, shape.bias)
    readout = replace(image.readout, num_classes=classes, bias=bias, cosine=cosine)
    once = max(copies, image.copies("readout"), 1 if shape is None else shape.copies) == 1
    if members == 1:
        return replace(image, readout=readout)
    if image.members == members:
        return replace(image, readout=readout, sharing=replace(image.sharing, readout=once))
    all_but_readout = Sharing(stem=True, attention=True, mlp=True, norms=True, readout=once)
    return replace(image, readout=readout, heads=image.heads * members, sharing=all_but_readout, trunk=0)


def _history(dual: DualEncoder) -> tuple[str, ...]:
    """What was done to the image tower, then what was done to the text tower alone."""
    images, texts = dual.image.metadata.history, dual.text.metadata.history
    return (*images, *(f"text tower: {line}" for line in texts if line not in images))


def _text_side(dual: DualEncoder, templates: tuple[str, ...]) -> TextSide:
    preprocessing = dual.text.metadata.preprocessing
    if preprocessing is None or preprocessing.kind != "text":
        raise DataError("the text tower has no tokenizer to keep; convert the model with processor=")
    projection = dual.projections.text
    weights = named(dual.text.state_dict(), {} if projection is None else projection.state_dict())
    settings = TextSettings(
        tower=dual.text.config,
        projection=projection_config(projection),
        logit_scale=tuple(dual.logit_scale.detach().double().tolist()),
        logit_bias=None if dual.logit_bias is None else tuple(dual.logit_bias.detach().double().tolist()),
        templates=templates,
        preprocessing=preprocessing,  # type: ignore[arg-type]
    )
    return TextSide(settings, {name: tensor.detach().to("cpu", copy=True) for name, tensor in weights.items()})


def _text_tower(side: TextSide, device: torch.device) -> tuple[Ensemble, GroupedLinear | None]:
    """The tower and the projection of a text side, as modules."""
    settings = side.settings
    weights = {name: tensor.to(device) for name, tensor in side.part(TOWER).items()}
    tower = Ensemble.from_state(settings.tower, weights, Metadata(preprocessing=settings.preprocessing))
    projection = {name: tensor.to(device) for name, tensor in side.part(PROJECTION).items()}
    return tower, linear(projection["weight"], projection.get("bias")) if projection else None

"""Taylor scores of the heads of both towers of a dual encoder, to look at.

They make no ranking: the two towers answer with scores of different size, so that comparing heads across towers
compares the towers (Figure 7 of the paper). `taylor` ranks the image tower alone, `extract_circuit` both together.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..batches import Batches
from ..errors import ConfigError
from ..heads.masking import attention_of
from ..heads.taylor import CalibrationBatches, gradients_of_mean_loss, layer_scores
from ..model.clip import DEFAULT_TEMPLATES, DualEncoder, Templates, Tower, checked_names, checked_templates, zero_shot
from ..model.config import EnsembleConfig
from ..model.ensemble import Ensemble
from .cache import Texts, read_texts

_PROMPTS_AT_ONCE = 256


def taylor_scores(
    dual: DualEncoder, class_names: Sequence[str], batches: Batches, templates: Templates = DEFAULT_TEMPLATES
) -> dict[Tower, Tensor]:
    """Score every head of both towers by the formula of `taylor`.

    The loss is the mean cross-entropy of the zero-shot logits over all samples. It reaches the image tower through
    the image embeddings, and the text tower through the class embeddings.

    Args:
        dual: One member; it is not changed. Its text tower must have a tokenizer.
        class_names: One per class, in the order of the labels.
        batches: Calibration data, `(images, labels)` or mappings with `labels`; read once.
        templates: Sentences with `{label}` where the name goes.

    Returns:
        For each tower a tensor `[L, H]` on the CPU; NaN for a head that was pruned.

    Raises:
        HydraError: More than one member, wrong names or templates, no data, wrong labels, a loss or a gradient that
            is not finite.
    """
    if not isinstance(dual, DualEncoder):
        raise ConfigError(
            f"taylor_scores compares the towers of a DualEncoder, got a {type(dual).__name__}; for one transformer use "
            "taylor"
        )
    if dual.num_members != 1:
        raise ConfigError(
            f"taylor_scores looks at one model, got a dual encoder of {dual.num_members} members; take one of them "
            "with dual.member(i)"
        )
    names, sentences = checked_names(class_names), checked_templates(templates)
    with torch.inference_mode(False):
        classifier = zero_shot(dual, names, sentences, keep_text=False)
        classes = classifier.readout.class_embeddings
        assert classes is not None
        data = CalibrationBatches(batches, None, 0, len(names), keep=False)
        weights = _input_projections(classifier)
        *of_image, of_classes = gradients_of_mean_loss(classifier, data, [*weights.values(), classes.weight])
        texts = read_texts(dual, names, sentences, dual.text.dtype, dual.text.device)
        of_text = _through_the_text_tower(texts, of_classes[0])
    return {
        "image": _table(classifier.config, weights, of_image, "image"),
        "text": _table(texts.tower.config, _input_projections(texts.tower), of_text, "text"),
    }


def _through_the_text_tower(texts: Texts, of_classes: Tensor) -> list[Tensor]:
    """Gradients for the text tower's input projections, given that for the scaled class embeddings, `[C, e]`.

    A class depends on its own prompts alone, so a few classes at a time give the same as all of them at once.
    """
    weights = list(_input_projections(texts.tower).values())
    for weight in weights:
        weight.requires_grad_(True)
    totals = [torch.zeros_like(weight, dtype=of_classes.dtype, requires_grad=False) for weight in weights]
    group = texts.prompts.groups[0]
    at_once = max(_PROMPTS_AT_ONCE // texts.templates, 1)  # classes
    for start in range(0, len(of_classes), at_once):
        rows = slice(start * texts.templates, (start + at_once) * texts.templates)
        mask, segments = (None if part is None else part[rows] for part in (group.attention_mask, group.token_type_ids))
        with torch.enable_grad():
            classes = texts.classes(texts.tower(group.inputs[rows], mask, segments)[0])
            arriving = of_classes[start : start + at_once].to(classes.device, classes.dtype)
            parts = torch.autograd.grad(classes, weights, arriving)
        for total, part in zip(totals, parts, strict=True):
            total += part
    return totals


def _input_projections(tower: Ensemble) -> dict[int, Tensor]:
    """Query, key and value projections by layer, of layers that have a head left."""
    return {layer: attention_of(tower, layer).qkv for layer in range(tower.num_layers) if tower.heads[0][layer]}


def _table(config: EnsembleConfig, weights: dict[int, Tensor], gradients: Sequence[Tensor], tower: Tower) -> Tensor:
    """Scores by layer and original index of the head, `[L, H]`."""
    table = torch.full((config.encoder.layers, config.encoder.heads), torch.nan, dtype=torch.float64)
    for (layer, weight), gradient in zip(weights.items(), gradients, strict=True):
        kept = list(config.heads[0][layer])
        table[layer, kept] = layer_scores(weight, gradient, f"layer {layer} of the {tower} tower")
    return table

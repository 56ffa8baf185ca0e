"""Taylor scores of the heads of both towers of a dual encoder (Figure 7 of the paper)."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hydra_ensembles as he
from hydra_ensembles.batches import Batches
from hydra_ensembles.heads.masking import attention_of
from hydra_ensembles.heads.taylor import CalibrationBatches, gradients_of_mean_loss, layer_scores
from hydra_ensembles.model.zero_shot import DEFAULT_TEMPLATES, average_templates, prompts_of

from .samples import Prepared, SampleBatches
from .sets import DataFolder, label_names, suite
from .weights import load_dual

PROMPTS_AT_ONCE = 256


def towers(source: str, folder: Path, device: torch.device) -> Iterator[Sequence[Any]]:
    """Taylor scores of the heads of both towers of a dual encoder, on TinyImageNet's validation images."""
    dual = load_dual(source).to(device)
    validation: Any = suite("zero-shot").validation
    images = DataFolder(folder).images(validation)
    batches = SampleBatches(Prepared(images, dual.image.prepare), 100)
    yield "tower", "layer", "head", "score"
    for tower, scores in taylor_scores(dual, label_names("tinyimagenet", images.class_names), batches).items():
        for layer, of_layer in enumerate(scores.tolist()):
            yield from ([tower, layer, head, score] for head, score in enumerate(of_layer))


def taylor_scores(
    dual: he.DualEncoder, names: Sequence[str], batches: Batches, templates: Sequence[str] = tuple(DEFAULT_TEMPLATES)
) -> dict[str, Tensor]:
    """Scores `[L, H]` of every head of both towers by the formula of `taylor`; NaN for a pruned head.

    The loss is the mean cross-entropy of the zero-shot logits. It reaches the image tower through the image embeddings,
    and the text tower through the class embeddings. Not for ranking: the towers' scores differ in scale.
    """
    classifier = he.zero_shot(dual, names, templates, keep_text=False)
    classes = classifier.readout.class_embeddings
    assert classes is not None
    weights = _input_projections(classifier)
    calibration = CalibrationBatches(batches, None, 0, len(names))
    *of_image, of_classes = gradients_of_mean_loss(classifier, calibration, [*weights.values(), classes.weight])
    of_text = _text_gradients(dual, names, templates, of_classes[0])
    return {"image": _by_layer(classifier, of_image), "text": _by_layer(dual.text, of_text)}


def _text_gradients(
    dual: he.DualEncoder, names: Sequence[str], templates: Sequence[str], of_classes: Tensor
) -> list[Tensor]:
    """Gradients of the text tower's input projections, given that of the scaled class embeddings, `[C, e]`.

    A class depends only on its own prompts, so processing a few classes at a time gives the same result.
    """
    weights = list(_input_projections(dual.text).values())
    totals = [torch.zeros_like(weight, dtype=of_classes.dtype, requires_grad=False) for weight in weights]
    at_once = max(PROMPTS_AT_ONCE // len(templates), 1)  # classes
    for start in range(0, len(names), at_once):
        embedded = dual.encode_text(prompts_of(names[start : start + at_once], templates))  # [1, prompts, e]
        classes = average_templates(embedded, len(templates))[0] * dual.logit_scale.detach().exp()  # [classes, e]
        parts = torch.autograd.grad(classes, weights, of_classes[start : start + at_once].to(classes))
        totals = [total + part for total, part in zip(totals, parts, strict=True)]
    return totals


def _input_projections(tower: he.Ensemble) -> dict[int, Tensor]:
    """Query, key and value projections by layer, of layers that have a head left."""
    return {layer: attention_of(tower, layer).qkv for layer in range(tower.num_layers) if tower.heads[0][layer]}


def _by_layer(tower: he.Ensemble, gradients: Sequence[Tensor]) -> Tensor:
    """Scores by layer and original index of the head, `[L, H]`."""
    scores = torch.full((tower.num_layers, tower.num_heads), torch.nan, dtype=torch.float64)
    for (layer, weight), gradient in zip(_input_projections(tower).items(), gradients, strict=True):
        scores[layer, list(tower.heads[0][layer])] = layer_scores(weight, gradient)
    return scores

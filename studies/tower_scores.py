"""Taylor scores of the heads of both towers of a dual encoder (Figure 7 of the paper): file, figure and table.

    python -m studies.tower_scores --model runs/studies/zero-shot/seed-0/models/dual --data shared --name DINOv2+MiniLM

`--model` is a folder of a saved `DualEncoder`, such as the zero-shot study writes, or a checkpoint as
`studies.weights.load_dual` reads it. `--data` holds `data/images/tinyimagenet`, whose validation images
give the loss.
"""

import argparse
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hydra_ensembles as he
from hydra_ensembles.batches import Batches
from hydra_ensembles.data.dataset import subset
from hydra_ensembles.heads.masking import attention_of
from hydra_ensembles.heads.taylor import CalibrationBatches, gradients_of_mean_loss, layer_scores
from hydra_ensembles.model.zero_shot import DEFAULT_TEMPLATES, average_templates, prompts_of

from .results import FIGURES, RESULTS, hardware, load, markdown, pyplot, save_figure, store, versions
from .samples import Prepared, SampleBatches
from .sets import DataFolder, label_names, suite
from .weights import load_dual

RESULT = "zero_shot_tower_scores.json"
COLOURS = {"image": "#2166ac", "text": "#d6904a"}
TINYIMAGENET = "tinyimagenet"
PROMPTS_AT_ONCE = 256


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


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Load the model, score its heads, and return the result with its settings."""
    dual = load_dual(options.model).to(options.device)
    validation: Any = suite("zero-shot").validation
    images = DataFolder(options.data).images(validation)
    if options.images is not None:
        images = subset(images, options.images, 0, stratified=True)
    batches = SampleBatches(Prepared(images, dual.image.prepare), 100)
    scores = taylor_scores(dual, label_names(TINYIMAGENET, images.class_names), batches)
    towers: dict[str, Any] = {}
    for name, tower in (("image", dual.image), ("text", dual.text)):
        sizes = {"layers": tower.num_layers, "heads": tower.num_heads, "width": tower.config.encoder.width}
        towers[name] = {**sizes, "scores": scores[name].tolist()}
    return {
        "benchmark": "tower_scores",
        "model": options.name or Path(options.model).name,
        "towers": towers,
        "data": f"{TINYIMAGENET} validation",
        "images": len(images),
        "classes": len(images.class_names),
        "templates": list(DEFAULT_TEMPLATES),
        "dtype": str(dual.dtype).removeprefix("torch."),
        "seed": 0,  # for drawing the images
        "versions": versions(),
        "hardware": hardware(options.device),
    }


def draw(result: dict[str, Any]) -> Any:
    """One point per head, by layer and head, and a bar for the mean of each layer; depth is relative."""
    figure, axes = pyplot().subplots(figsize=(8, 3.4))
    for name, tower in result["towers"].items():
        layers = tower["layers"]
        heads = tower["heads"]
        colour = COLOURS[name]
        for layer, scores in enumerate(tower["scores"]):
            label = "_" if layer else f"{name} tower, {layers} layers of {heads} heads"
            depths = [(layer + (head + 0.5) / heads) / layers for head in range(heads)]
            axes.plot(depths, scores, ".", color=colour, label=label, markersize=4)
            axes.hlines(_mean(scores), layer / layers, (layer + 1) / layers, color=colour, linewidth=1.5)
    axes.set_yscale("log")
    axes.set(xlabel="depth: layer, and within it head", ylabel="mean of |W · dL/dW|", xlim=(0, 1))
    axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    return figure


def tower_table(result: dict[str, Any]) -> str:
    """Scores of both towers, and where those of the image tower are higher."""
    rows = []
    for name, tower in result["towers"].items():
        scores = [score for layer in tower["scores"] for score in layer if not math.isnan(score)]
        ends = (_mean(tower["scores"][0]), _mean(tower["scores"][-1]))
        numbers = (min(scores), statistics.median(scores), max(scores), *ends)
        rows.append((name, f"{tower['layers']} × {tower['heads']}", *(f"{number:.2e}" for number in numbers)))
    header = ("tower", "layers × heads", "smallest", "median", "largest", "mean of the first layer",
              "mean of the last layer")  # fmt: skip
    image, text = ([_mean(layer) for layer in result["towers"][name]["scores"]] for name in ("image", "text"))
    count = min(len(image), len(text))  # compare at each layer of the tower with fewer layers
    depths = [(index + 0.5) / count for index in range(count)]
    higher = [image[int(depth * len(image))] > text[int(depth * len(text))] for depth in depths]
    lower = [str(index + 1) for index, is_higher in enumerate(higher) if not is_higher]
    where = f"not at {', '.join(lower)}, counted from the input" if lower else "everywhere"
    compared = (
        f"At the same depth, the mean of a layer is higher in the image tower at {sum(higher)} of {count} places "
        f"({where}); in the paper's CLIP it is in all layers but the first three."
    )
    about = (
        f"{result['model']}; cross-entropy of the zero-shot logits on {result['images']:,} images ({result['data']}, "
        f"{result['classes']} classes), {result['hardware']}, torch {result['versions']['torch']}. From "
        f"`results/{RESULT}`."
    )
    return markdown(header, rows, f"{compared}\n\n{about}", "ll")


def _mean(scores: list[float]) -> float:
    """The mean over existing heads; NaN for a layer without heads."""
    present = [score for score in scores if not math.isnan(score)]
    return statistics.fmean(present) if present else math.nan


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or checkpoint of a dual encoder")
    parser.add_argument("--name", help="of the model, for the tables; default: its folder's")
    parser.add_argument("--data", type=Path, required=True, help="folder with data/images/tinyimagenet")
    parser.add_argument("--images", type=int, help="default: all validation images")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=RESULTS / RESULT)
    options = parser.parse_args(arguments)
    store(options.output, run(options))
    if options.output == RESULTS / RESULT:
        save_figure(draw(load(RESULT)), FIGURES / "tower_scores.svg")


if __name__ == "__main__":
    main()

"""Taylor scores of the heads of both towers of a dual encoder (Figure 7 of the paper), as a JSON file.

    python benchmarks/tower_scores.py --model runs/studies/zero-shot/seed-0/dual --data shared
    python benchmarks/tower_scores_figure.py

`--model` is a folder of a saved `DualEncoder`, such as the zero-shot study writes, or a checkpoint as
`studies/zero_shot/checkpoint_model.py` reads it. `--data` holds `data/images/tinyimagenet`, whose validation images
give the loss.
"""

import argparse
import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hydra_ensembles as he
from hydra_ensembles.batches import Batches
from hydra_ensembles.data.dataset import ImageDataset, subset
from hydra_ensembles.data.suites import suite
from hydra_ensembles.heads.masking import attention_of
from hydra_ensembles.heads.taylor import CalibrationBatches, gradients_of_mean_loss, layer_scores
from hydra_ensembles.model.clip import DEFAULT_TEMPLATES, average_templates, prompts_of
from studies.store import Store
from studies.zero_shot.checkpoint_model import load_dual
from studies.zero_shot.label_names import label_names
from studies.zero_shot.sources import PreparedImages

RESULTS = Path(__file__).resolve().parents[1] / "results" / "zero_shot_tower_scores.json"
TINYIMAGENET = "tinyimagenet"
PROMPTS_AT_ONCE = 256


def taylor_scores(
    dual: he.DualEncoder, names: Sequence[str], batches: Batches, templates: Sequence[str] = tuple(DEFAULT_TEMPLATES)
) -> dict[str, Tensor]:
    """Scores `[L, H]` of every head of both towers by the formula of `taylor`; NaN for a head that was pruned.

    The loss is the mean cross-entropy of the zero-shot logits. It reaches the image tower through the image embeddings,
    and the text tower through the class embeddings. To look at, not to rank by: the towers' scores differ in size.
    """
    classifier = he.zero_shot(dual, names, templates, keep_text=False)
    classes = classifier.readout.class_embeddings
    assert classes is not None
    weights = _input_projections(classifier)
    data = CalibrationBatches(batches, None, 0, len(names))
    *of_image, of_classes = gradients_of_mean_loss(classifier, data, [*weights.values(), classes.weight])
    of_text = _text_gradients(dual, names, templates, of_classes[0])
    return {"image": _table(classifier, of_image), "text": _table(dual.text, of_text)}


def _text_gradients(
    dual: he.DualEncoder, names: Sequence[str], templates: Sequence[str], of_classes: Tensor
) -> list[Tensor]:
    """Gradients for the text tower's input projections, given that for the scaled class embeddings, `[C, e]`.

    A class depends on its own prompts alone, so a few classes at a time give the same as all of them at once.
    """
    weights = list(_input_projections(dual.text).values())
    totals = [torch.zeros_like(weight, dtype=of_classes.dtype, requires_grad=False) for weight in weights]
    at_once = max(PROMPTS_AT_ONCE // len(templates), 1)  # classes
    for start in range(0, len(names), at_once):
        embedded = dual.encode_text(prompts_of(names[start : start + at_once], templates))  # [1, prompts, e]
        classes = average_templates(embedded, len(templates))[0] * dual.logit_scale.detach().exp()  # [classes, e]
        for total, part in zip(
            totals, torch.autograd.grad(classes, weights, of_classes[start : start + at_once].to(classes)), strict=True
        ):
            total += part
    return totals


def _input_projections(tower: he.Ensemble) -> dict[int, Tensor]:
    """Query, key and value projections by layer, of layers that have a head left."""
    return {layer: attention_of(tower, layer).qkv for layer in range(tower.num_layers) if tower.heads[0][layer]}


def _table(tower: he.Ensemble, gradients: Sequence[Tensor]) -> Tensor:
    """Scores by layer and original index of the head, `[L, H]`."""
    table = torch.full((tower.num_layers, tower.num_heads), torch.nan, dtype=torch.float64)
    for (layer, weight), gradient in zip(_input_projections(tower).items(), gradients, strict=True):
        table[layer, list(tower.heads[0][layer])] = layer_scores(weight, gradient, f"layer {layer}")
    return table


def validation_images(folder: Path, images: int | None, seed: int) -> ImageDataset:
    """So many of TinyImageNet's validation images, every class alike; None for all."""
    reference = suite("zero-shot").validation
    assert reference is not None
    data = Store(folder).load(reference)
    assert isinstance(data, ImageDataset)
    return data if images is None else subset(data, images, seed, stratified=True)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Load, score, and say with what."""
    dual = load_dual(options.model).to(options.device)
    data = validation_images(options.data, options.images, options.seed)
    batches = PreparedImages(data, dual.image).evaluation(options.batch_size)
    scores = taylor_scores(dual, label_names(TINYIMAGENET, data.class_names), batches)
    towers = {"image": dual.image, "text": dual.text}
    on_gpu = torch.device(options.device).type == "cuda"
    return {
        "benchmark": "tower_scores",
        "model": options.name or Path(options.model).name,
        "towers": {
            name: {
                "layers": tower.num_layers,
                "heads": tower.num_heads,
                "width": tower.config.encoder.width,
                "scores": scores[name].tolist(),
            }
            for name, tower in towers.items()
        },
        "data": f"{TINYIMAGENET} validation",
        "images": len(data),
        "classes": len(data.class_names),
        "templates": list(DEFAULT_TEMPLATES),
        "dtype": str(dual.dtype).removeprefix("torch."),
        "seed": options.seed,
        "versions": {"torch": str(torch.__version__), "hydra_ensembles": he.__version__},
        "hardware": torch.cuda.get_device_name() if on_gpu else f"CPU {platform.machine()}",
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or checkpoint of a dual encoder")
    parser.add_argument("--data", type=Path, required=True, help="folder with data/images/tinyimagenet")
    parser.add_argument("--name", help="what the results call the model; default: the last part of --model")
    parser.add_argument("--images", type=int, help="default: all validation images")
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0, help="draws the images")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    result = run(options)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()

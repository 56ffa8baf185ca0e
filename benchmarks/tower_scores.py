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

import hydra_ensembles as he
from hydra_ensembles.circuit.tower_scores import taylor_scores
from hydra_ensembles.data.dataset import ImageDataset, subset
from hydra_ensembles.data.suites import suite
from hydra_ensembles.model.clip import DEFAULT_TEMPLATES
from studies.store import Store
from studies.zero_shot.checkpoint_model import load_dual
from studies.zero_shot.label_names import label_names
from studies.zero_shot.sources import PreparedImages

RESULTS = Path(__file__).resolve().parents[1] / "results" / "zero_shot_tower_scores.json"
TINYIMAGENET = "tinyimagenet"


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
                "scores": scores[name].tolist(),  # type: ignore[index]
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

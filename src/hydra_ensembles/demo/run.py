"""The whole way in minutes, offline: members of one model made and trained, judged beside it, saved and reported.

The model and the images are in the package.
"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..calibrate import calibrate
from ..data.dataset import BatchLoader, ImageDataset, Rows, batches, decode_image
from ..evaluation.evaluate import evaluate
from ..familiarity import fit_familiarity
from ..model.cost import measure_costs
from ..model.ensemble import Ensemble
from ..pipeline.build import build
from ..pipeline.settings import HydraConfig
from ..report.compare import Comparison, compare, save_costs
from ..report.html import write_report
from ..store import Store
from ..training.recipe import Recipe

_HERE = Path(__file__).parent
BACKBONE = _HERE / "backbone"
SAMPLE = _HERE / "sample.npz"

ID_NAME = "EuroSAT (7 classes)"
NEAR = ("AnnualCrop", "River")
FAR = ("FashionMNIST",)

SINGLE, HYDRA = "Single", "Hydra"
SHARE = 0.95  # of familiar images that each of the two thresholds accepts
BATCH, TRAIN_BATCH = 32, 64
SHARED = 4  # first layers, of 6, that all members share, so that they run once
EPOCHS = 10


def load_backbone() -> Ensemble:
    """The embedded vision transformer (6 layers of 6 heads, 64×64 images, 7 EuroSAT classes); float16 on disk.

    Examples:
        >>> from hydra_ensembles.demo import load_backbone
        >>> load_backbone().num_members
        1
    """
    return Ensemble.from_pretrained(BACKBONE, dtype=torch.float32)


def load_sample() -> dict[str, ImageDataset]:
    """The embedded images by set; the sets are disjoint, and the backbone was trained only on `train`.

    Labelled EuroSAT images of the backbone's seven classes are in `train`, to train members on, `circuit_id`, to rank
    heads and to fit familiarity on, `calibration`, and `test`, to report results on. `circuit_ood` are images of
    PermanentCrop, a class the backbone does not know, to rank heads on. OOD test sets are `AnnualCrop` and `River`, of
    the same satellites, and `FashionMNIST`. The data card next to them says where all come from.

    Examples:
        >>> from hydra_ensembles.demo import load_sample
        >>> sample = load_sample()
        >>> len(sample["test"]), sample["test"].class_names[0]
        (420, 'Forest')
    """
    return read_images(SAMPLE)


def read_images(path: Path) -> dict[str, ImageDataset]:
    """The sets in an `.npz` file of images, by name; an image is decoded when it is read.

    The file has `class_names`, and for each set `NAME/files` (the concatenated bytes of the source's image files),
    `NAME/ends` (the end of each file), `NAME/labels` (-1 for an image of none of the classes), `NAME/splits` and
    `NAME/rows` (split and row in the source, so that anyone who has the source can check the selection).
    """
    with np.load(path, allow_pickle=False) as file:
        stored = dict(file)
    class_names = stored.pop("class_names").tolist()
    sets: dict[str, ImageDataset] = {}
    for name in dict.fromkeys(key.rpartition("/")[0] for key in stored):
        content, ends = stored[f"{name}/files"].tobytes(), stored[f"{name}/ends"].tolist()
        files = [content[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        rows = Rows(len(files), partial(_image, files, name))
        sets[name] = ImageDataset(rows, stored[f"{name}/labels"], class_names, name)
    return sets


def _image(files: list[bytes], name: str, row: int) -> Any:
    return decode_image(files[row], f"image {row} of {name}")


def run_demo(
    output: str | Path = "hydra-demo", *, seed: int = 0, epochs: int = EPOCHS, progress: bool = True
) -> Comparison:
    """Make three members of the embedded backbone and compare them with it. No network.

    An interrupted run resumes when called again; a folder with other contents is refused.

    Args:
        output: Folder for `report.html`, the ensemble in `model`, and saved evaluations and costs in `evaluations`.
        seed: Seed for drawing heads, training images and their order.
        epochs: Passes over the training images.
        progress: Whether to show progress bars.

    Returns:
        Both models side by side.
    """
    backbone, sample = load_backbone(), load_sample()
    prepare: Any = backbone.metadata.preprocessing
    sets: dict[str, Any] = {name: list(batches(images, prepare, BATCH)) for name, images in sample.items()}
    with Store(output, {"seed": seed, "epochs": epochs}, "a demo") as run:
        assert run.folder is not None
        single = fit_familiarity(backbone, sets["circuit_id"], held_out=0.0, seed=seed)
        single = calibrate(single, sets["calibration"], share=SHARE)
        hydra = build(
            backbone,
            demo_config(seed, epochs),
            train=training_batches(sample, backbone, seed),
            id=sets["circuit_id"],
            ood=sets["circuit_ood"],
            validation=sets["calibration"],
            output=run.path("run"),
            progress=progress,
        )
        models = {SINGLE: single, HYDRA: hydra}
        groups = {"near": {name: sets[name] for name in NEAR}, "far": {name: sets[name] for name in FAR}}
        about: dict[str, Any] = {"id_name": ID_NAME, "progress": progress}
        evaluations = [evaluate(model, sets["test"], groups, name=name, **about) for name, model in models.items()]
        costs = measure_costs(models, sets["test"][0][0], repeats=7, warmup=1)
        hydra.save_pretrained(run.folder / "model")
        for evaluation in evaluations:
            evaluation.save(run.folder / "evaluations" / f"{evaluation.name.lower()}.json")
        save_costs(run.folder / "evaluations" / "costs.json", costs)
        write_report(evaluations, run.folder / "report.html", costs=costs, title="Hydra Ensembles: the embedded demo")
        return compare(evaluations, costs)


def demo_config(seed: int, epochs: int) -> HydraConfig:
    """Three members that lose two heads each and train together above a frozen trunk, from new classifiers."""
    recipe = Recipe(
        learning_rate=1e-4,
        classifier_rate=20.0,
        epochs=epochs,
        warmup=0.1,
        weight_decay=0.01,
        clip_norm=1.0,
        dropout=0.0,
        last_blocks=6 - SHARED,
        reinit_classifier="random",
        seed=seed,
    )
    return HydraConfig(
        prune=2,
        strategy="sampled",
        ties="order",
        shared_layers=SHARED,
        training="together",
        recipe=recipe,
        familiarity="mahalanobis",
        accepted_share=SHARE,
        seed=seed,
    )


def training_batches(sample: dict[str, ImageDataset], backbone: Ensemble, seed: int) -> BatchLoader:
    """Training images, randomly rotated and mirrored: satellite images have no preferred orientation."""
    preprocessing: Any = backbone.metadata.preprocessing

    def turned(images: list[Any]) -> Tensor:
        pixels: Tensor = preprocessing(images)  # [B, 3, h, w]
        turns, mirrored = torch.randint(4, (len(pixels),)).tolist(), torch.randint(2, (len(pixels),)).tolist()
        once = (torch.rot90(image, turn, (1, 2)) for image, turn in zip(pixels, turns, strict=True))
        return torch.stack([image.flip(2) if mirror else image for image, mirror in zip(once, mirrored, strict=True)])

    return BatchLoader(sample["train"], turned, TRAIN_BATCH, shuffle=True, seed=seed, drop_last=True)

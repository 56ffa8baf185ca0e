"""The demo's embedded data: a trained backbone, and images."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..data.dataset import ImageDataset, Rows, decode_image
from ..model.ensemble import Ensemble

_HERE = Path(__file__).parent
BACKBONE = _HERE / "backbone"
SAMPLE = _HERE / "sample.npz"

ID_NAME = "EuroSAT (7 classes)"
NEAR = ("AnnualCrop", "River")
FAR = ("FashionMNIST",)


@dataclass(frozen=True)
class DemoSample:
    """The images of the demo; the sets are disjoint, and the backbones were trained only on `train`.

    Attributes:
        train: Labelled EuroSAT images of seven classes that the backbone was trained on, to train members on.
        circuit_id: Labelled EuroSAT images of the backbone's seven classes, to rank heads and to fit familiarity on.
        circuit_ood: Images of PermanentCrop, a class the backbone does not know, to rank heads on.
        calibration: Labelled images to choose thresholds on.
        test: Labelled images to report results on.
        near: OOD test sets from the same satellites: classes the backbone does not know.
        far: OOD test set of another kind of image.
    """

    train: ImageDataset
    circuit_id: ImageDataset
    circuit_ood: ImageDataset
    calibration: ImageDataset
    test: ImageDataset
    near: Mapping[str, ImageDataset]
    far: Mapping[str, ImageDataset]

    @property
    def sets(self) -> dict[str, ImageDataset]:
        """All sets by their names in the file."""
        fields = {name: getattr(self, name) for name in ("train", "circuit_id", "circuit_ood", "calibration", "test")}
        return {**fields, **self.near, **self.far}


def load_backbone() -> Ensemble:
    """The embedded vision transformer (6 layers of 6 heads, 64×64 images, 7 EuroSAT classes); float16 on disk.

    Examples:
        >>> from hydra_ensembles.demo import load_backbone
        >>> load_backbone().num_members
        1
    """
    return Ensemble.from_pretrained(BACKBONE, dtype=torch.float32)


def load_sample() -> DemoSample:
    """The embedded images; the data card next to them says where they come from and what they are for.

    Examples:
        >>> from hydra_ensembles.demo import load_sample
        >>> sample = load_sample()
        >>> len(sample.test), sorted(sample.near), sample.test.class_names[0]
        (420, ['AnnualCrop', 'River'], 'Forest')
    """
    sets = read_images(SAMPLE)
    near, far = ({name: sets.pop(name) for name in names} for names in (NEAR, FAR))
    return DemoSample(**sets, near=near, far=far)


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

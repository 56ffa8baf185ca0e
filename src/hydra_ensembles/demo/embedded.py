"""What lies inside the package: a trained backbone, images for it, and what two more such backbones say of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ..data.dataset import ImageDataset
from ..errors import CheckpointError
from ..model.ensemble import Ensemble
from .packed_images import read_packed

_HERE = Path(__file__).parent
BACKBONE = _HERE / "backbone"
SAMPLE = _HERE / "sample.safetensors"
DEEP_LOGITS = _HERE / "deep_logits.safetensors"

ID_NAME = "EuroSAT (7 classes)"


@dataclass(frozen=True)
class DemoSample:
    """The images of the demo; no image is in two of the sets, and none was trained on.

    Attributes:
        circuit_id: Labelled EuroSAT images of the backbone's seven classes, to rank heads on.
        circuit_ood: Images of PermanentCrop, a class the backbone does not know, to rank heads on.
        calibration: Labelled images to choose thresholds on.
        test: Labelled images to report results on.
        near: OOD test sets from the same satellites: classes the backbone does not know.
        far: OOD test set of another kind of image.
    """

    circuit_id: ImageDataset
    circuit_ood: ImageDataset
    calibration: ImageDataset
    test: ImageDataset
    near: Mapping[str, ImageDataset]
    far: Mapping[str, ImageDataset]

    @property
    def sets(self) -> dict[str, ImageDataset]:
        """All sets by the names they have in the file."""
        own = {name: getattr(self, name) for name in ("circuit_id", "circuit_ood", "calibration", "test")}
        return {**own, **self.near, **self.far}


def load_backbone(dtype: torch.dtype = torch.float32) -> Ensemble:
    """The embedded vision transformer (6 layers of 6 heads, 64×64 images, 7 EuroSAT classes), one member.

    Args:
        dtype: What to compute in; the weights are stored in half precision.
    """
    return Ensemble.from_pretrained(BACKBONE, dtype=dtype)


def load_sample() -> DemoSample:
    """The embedded images; see the data card beside them for where they come from and what they are for."""
    sets = {name: packed.dataset() for name, packed in read_packed(SAMPLE).items()}
    return DemoSample(
        circuit_id=sets["circuit_id"],
        circuit_ood=sets["circuit_ood"],
        calibration=sets["calibration"],
        test=sets["test"],
        near={name: sets[name] for name in ("AnnualCrop", "River")},
        far={"FashionMNIST": sets["FashionMNIST"]},
    )


def load_deep_logits() -> dict[str, Tensor]:
    """Logits `[3, N, 7]` of three backbones, trained alike from different seeds, on every set of the sample.

    The first is the embedded backbone; the weights of the other two are not in the package.
    """
    try:
        return {name: logits.float() for name, logits in load_file(DEEP_LOGITS).items()}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{DEEP_LOGITS} cannot be read: {error}; install the package again") from error

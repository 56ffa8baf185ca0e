"""Running units over samples: member logits on half B, kept in the run folder."""

import torch
from torch import Tensor, nn

from hydra_ensembles.batches import move, read_batch
from hydra_ensembles.errors import DataError

from .seed_models import SeedModels
from .splits import Samples

BATCH = {"image": 512, "text": 256}


@torch.no_grad()
def member_logits(model: nn.Module, samples: Samples, kind: str, device: torch.device) -> Tensor:
    """Member logits `[M, N, C]` in float32 on the CPU; on a GPU computed in half precision."""
    pieces = []
    for batch in samples.evaluation(BATCH[kind]):
        inputs, _ = read_batch(batch)
        with torch.autocast(device.type, dtype=torch.float16, enabled=device.type == "cuda"):
            pieces.append(model(move(inputs, device, torch.float32)).float())
    logits = torch.cat(pieces, dim=1).cpu()
    if not bool(logits.isfinite().all()):
        raise DataError("a model answered with logits that are not finite; its training diverged: lower the rate")
    return logits


def choice_logits(models: SeedModels, unit: str) -> tuple[Tensor, Tensor]:
    """Member logits of a unit on half B: ID and OOD."""

    def make() -> dict[str, object]:
        model = models.model(unit)
        parts = {"id": models.data.choose_id, "ood": models.data.choose_ood}
        return {
            name: member_logits(model, samples, models.recipe.kind, models.device).numpy()
            for name, samples in parts.items()
        }

    found = models.folder.arrays(f"half-b/{unit}", make)  # type: ignore[arg-type]
    return torch.from_numpy(found["id"]), torch.from_numpy(found["ood"])


def joined(models: SeedModels, units: tuple[str, ...]) -> tuple[Tensor, Tensor]:
    """Member logits of several units as one ensemble on half B: ID and OOD."""
    parts = [choice_logits(models, unit) for unit in units]
    return torch.cat([one for one, _ in parts]), torch.cat([one for _, one in parts])

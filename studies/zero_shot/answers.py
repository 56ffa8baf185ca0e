"""Logits of dual encoders for any list of names, image embeddings computed once for all of them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hydra_ensembles.batches import move, read_batch
from hydra_ensembles.errors import DataError
from hydra_ensembles.model.clip import DualEncoder, Templates, checked_templates, class_embeddings

from ..splits import Samples

BATCH = 512


@torch.no_grad()
def image_embeddings(dual: DualEncoder, samples: Samples) -> Tensor:
    """Embeddings `[M, N, e]` of length one in float32; on a GPU computed in half precision."""
    pieces = []
    device = dual.device
    for batch in samples.evaluation(BATCH):
        inputs, _ = read_batch(batch)
        with torch.autocast(device.type, dtype=torch.float16, enabled=device.type == "cuda"):
            embedded = dual.encode_image(move(inputs, device, torch.float32), normalize=False)
        pieces.append(torch.nn.functional.normalize(embedded.float(), dim=-1))
    found = torch.cat(pieces, dim=1)
    if not bool(found.isfinite().all()):
        raise DataError("the image tower answered with numbers that are not finite; its projection's training diverged")
    return found


@torch.no_grad()
def text_embeddings(dual: DualEncoder, names: Sequence[str], templates: Templates) -> Tensor:
    """Class embeddings `[1 or M, C, e]` of length one in float32."""
    return class_embeddings(dual.text, dual.projections.text, names, checked_templates(templates)).float()


@torch.no_grad()
def logits_of(dual: DualEncoder, images: Tensor, texts: Tensor) -> Tensor:
    """Member logits `[M, N, C]` on the CPU, of embeddings."""
    return dual.logits(images, texts).float().cpu()


def mean_logits(member_logits: Tensor) -> Tensor:
    """One member `[1, N, C]` that answers with the mean probabilities of several, `[M, N, C]`."""
    return member_logits.double().softmax(-1).mean(0, keepdim=True).log().float()

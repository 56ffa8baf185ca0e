"""The text tower of a dual encoder and its prompts: where the class embeddings come from."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...errors import ConfigError
from ...model.clip import DualEncoder, average_templates, prompts_of
from ...model.ensemble import Ensemble
from ...model.stem_readout import compose
from .samples import SampleGroup, Samples
from .working_model import working_copy


@dataclass(frozen=True, eq=False)
class Texts:
    """What class embeddings are made of.

    Attributes:
        tower: A private copy of the text tower; it answers with embeddings, its projection being its classifier.
        prompts: Every class in every template, one class after another, as samples without labels.
        templates: Prompts of each class.
        scale: `[1]`, what cosines are multiplied with.
    """

    tower: Ensemble
    prompts: Samples
    templates: int
    scale: Tensor

    def classes(self, embeddings: Tensor) -> Tensor:
        """Scaled class embeddings `[…, C, e]` out of those of all prompts, `[…, P, e]`."""
        embedded = F.normalize(embeddings.reshape(-1, *embeddings.shape[-2:]), dim=-1)
        averaged = average_templates(embedded, self.templates)  # [K, C, e]
        return (averaged * self.scale).reshape(*embeddings.shape[:-2], *averaged.shape[1:])


def read_texts(
    dual: DualEncoder, names: Sequence[str], templates: Sequence[str], dtype: torch.dtype, device: torch.device
) -> Texts:
    """A copy of the text tower in another dtype and place, and the prompts beside it."""
    tower = working_copy(_embedding_tower(dual), dtype, device)
    prepared = dual.text.prepare(prompts_of(names, templates))
    ids, mask, segments = (None if part is None else part.to(device) for part in dual.text.unpack(prepared, None, None))
    assert ids is not None
    count = len(ids)
    group = SampleGroup(np.arange(count), ids, mask, segments)
    prompts = Samples(
        groups=(group,),
        labels=torch.full((count,), -1, device=device),
        id_count=0,
        ood_count=count,
        group_of=np.zeros(count, np.int64),
        row_of=np.arange(count),
        origin=np.zeros((count, 2), np.int64),
        fingerprint="",
    )
    return Texts(tower, prompts, len(templates), dual.logit_scale.detach().to(device, dtype).exp())


def use_classes(classifier: Ensemble, classes: Tensor) -> None:
    """Give a zero-shot classifier other class embeddings, `[C, e]`."""
    embeddings = classifier.readout.class_embeddings
    assert embeddings is not None
    embeddings.weight = nn.Parameter(classes[None], requires_grad=False)


def _embedding_tower(dual: DualEncoder) -> Ensemble:
    """The text tower with its projection as classifier."""
    tower = dual.text
    if tower.config.readout.cosine is not None:
        raise ConfigError("the text tower classifies by class embeddings; use the text tower as it was converted")
    projection = compose(tower.readout.classifier, dual.projections.text)
    if projection is None:
        return tower
    readout = replace(tower.config.readout, num_classes=projection.weight.shape[1], bias=projection.bias is not None)
    prefix = "readout.classifier."
    state = {name: tensor for name, tensor in tower.state_dict().items() if not name.startswith(prefix)}
    state |= {prefix + name: tensor for name, tensor in projection.state_dict().items()}
    return Ensemble.from_state(replace(tower.config, readout=readout), state)

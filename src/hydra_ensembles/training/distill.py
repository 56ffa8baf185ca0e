"""Members of a fused ensemble learn, without labels, the probabilities of the models they came from."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor

from ..batches import Batches, Inputs, changed, read_batch, size_of
from ..digest import digest
from ..errors import ConfigError
from ..model.dual_encoder import require_ensemble
from ..model.ensemble import Ensemble
from .finetune import EnsembleLearner, LabelledBatch, train_classifier, trained_metadata
from .loop import Job, TrainOptions, trains
from .recipe import Recipe, trainable_state

RECIPE = Recipe(learning_rate=2e-5, epochs=2, train_groups=("attention", "mlp", "norms", "readout"))


class DistillLearner(EnsembleLearner):
    """Trains what is above the trunk; each member's targets are the probabilities of its own model."""

    by_nll: ClassVar[bool] = True

    def __init__(
        self, start: Ensemble, models: Sequence[Ensemble], recipe: Recipe, device: torch.device, index: int = 0
    ) -> None:
        super().__init__(start, recipe, device, index)
        different = {id(one): one for one in models}  # the members of a pruned model have one teacher
        states = {key: (one.config, trainable_state(one, device)) for key, one in different.items()}
        self.teachers = {key: Ensemble.from_state(*state) for key, state in states.items()}
        self.order = [*map(id, models)]
        for teacher in self.teachers.values():
            self.compiled(teacher)

    def read(self, raw: Any, index: int) -> LabelledBatch:
        """Inputs, and a place for labels: they are not looked at."""
        inputs, _ = read_batch(raw, "batches", index, labelled=False)
        return inputs, torch.empty(size_of(inputs), dtype=torch.long)

    def training_batch(self, inputs: Inputs, labels: Tensor) -> tuple[Inputs, Tensor]:
        """Inputs, images of about every second batch mixed with one another, and the models' probabilities of them."""
        prepared = self.prepared(inputs)
        if torch.rand(()) < 0.5:
            share = 0.5 + 0.5 * torch.rand(()).item()
            prepared = changed(prepared, lambda x: share * x + (1 - share) * x.flip(0) if x.is_floating_point() else x)
        with torch.no_grad(), self.autocast():
            logits = {key: teacher(prepared)[0] for key, teacher in self.teachers.items()}  # of each [B, C]
        return prepared, torch.stack([logits[key] for key in self.order]).float().softmax(-1)  # [M, B, C]


@trains
def distill(
    hydra: Ensemble,
    models: Sequence[Ensemble],
    batches: Batches,
    recipe: Recipe | None = None,
    validation: Batches | None = None,
    **run: Unpack[TrainOptions],
) -> Ensemble:
    """Teach each member of a fused ensemble the probabilities of the model it came from; a new ensemble is returned.

    Fusing changes members, by averaging their first layers or pruning their heads. What is above the common layers
    learns to answer like the models did; these layers and the stem stay bit for bit. It needs no labels: `batches` may
    be bare inputs, of any source, best augmented at random (`data.TrainTransform`). About every second batch of images
    is mixed with itself in reverse.

    Args:
        hydra: From `he.fuse(models)`, members in the same order.
        models: The fine-tunings it was fused from.
        batches: Inputs that can be read repeatedly.
        recipe: How to train; None for two epochs of AdamW at 2e-5, falling by a cosine.
        validation: Labelled batches; with some, the weights with the lowest NLL on them are kept.
        run: `output`, `progress`, `device` and `checkpoint_every`, as for `finetune`.

    Examples:
        >>> models = [base, base.with_metadata()]
        >>> recipe = he.Recipe(learning_rate=1e-5, steps=2)
        >>> taught = he.distill(he.Ensemble.stack(models), models, batches, recipe, progress=False)
        >>> taught.metadata.history[-1].startswith("distilled")
        True
    """
    require_ensemble(hydra, "distill", classifies=True)
    if len(models) != hydra.num_members or any(one.num_members > 1 for one in models):
        counts = [one.num_members for one in models]
        raise ConfigError(f"{hydra.num_members} members learn from as many single models; got {len(models)}: {counts}")
    for model in models:
        known = model.metadata.labels and hydra.metadata.labels
        if model.num_classes != hydra.num_classes or (known and model.metadata.labels != hydra.metadata.labels):
            raise ConfigError("the classes of a model are not those of the ensemble, in the same order")
    above = hydra.num_layers - hydra.config.trunk
    chosen = recipe or RECIPE
    chosen = replace(chosen, last_blocks=min(chosen.last_blocks or above, above))
    teachers = [digest([str(one.config), one]) for one in models]
    job = Job(chosen, batches, validation, settings={"teachers": teachers}, **run)
    result = train_classifier(partial(DistillLearner, hydra, models, chosen), hydra, job)
    line = f"distilled {result.described(chosen)}"
    return Ensemble.from_state(hydra.config, result.state_like(hydra), trained_metadata(hydra, batches, result, line))

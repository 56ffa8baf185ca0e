"""BatchEnsemble: members share their weights and differ in the scales of every input and output."""

from dataclasses import dataclass
from typing import Annotated, Unpack

import torch
from torch import Tensor, nn

from .._utils import derive_seed
from ..batches import Batches
from ..model.config import Sharing
from ..model.dual_encoder import require_single
from ..model.ensemble import Ensemble
from ..model.member_states import copies_of
from ..settings import END, Checked, NotNegative, Positive, Range, Whole
from ..training.finetune import CLASSIFIERS, Parametrised, train_parametrised
from ..training.loop import Job, TrainOptions, trains
from ..training.recipe import Recipe
from .building_blocks import joined, warn_equal


@dataclass(frozen=True)
class BatchEnsemble(Checked):
    """How members of a BatchEnsemble are scaled.

    A linear map of member m is `y = ((x ∘ r_m) Wᵀ) ∘ s_m + b_m`; query, key and value are one map. Scales far from one
    destroy a pretrained model: keep `deviation` small, or scale few layers, as the published vision transformers do
    (`last_layers=3, deviation=0.5`).

    Attributes:
        members: Number of members.
        last_layers: Scale only this many last layers, and the classifier; those before run once for all members. None
            scales all layers.
        deviation: Scales are drawn from N(1, deviation).
        rate: Learning rate of the scales, as a multiple of that of the weights. Scales never decay.
    """

    members: Annotated[int, Range(2, END - 1)] = 3
    last_layers: Whole | None = None
    deviation: NotNegative = 0.1
    rate: Positive = 1.0


@trains
def batch_ensemble(
    model: Ensemble,
    train: Batches,
    recipe: Recipe,
    settings: BatchEnsemble = BatchEnsemble(),  # noqa: B008 (frozen)
    validation: Batches | None = None,
    **run: Unpack[TrainOptions],
) -> Ensemble:
    """Make members from one model by separate scales on shared weights; both train, every batch for all members.

    At the end the scales are multiplied into the weights: the result is as large as M copies of the layers above the
    trunk, with the ordinary forward pass. The loss is the sum over members, as for `finetune`; published code uses
    their mean, so with SGD its learning rates are M times too high here. The groups of the recipe say which weights and
    biases are trained; scales always are.
    """
    require_single(model, "batch_ensemble")
    trunk = 0 if settings.last_layers is None else model.num_layers - settings.last_layers
    sharing = Sharing(stem=True, norms=True, readout=model.config.readout.cosine is not None)
    start = joined([model] * settings.members, sharing, trunk)
    job = Job(recipe, train, validation, settings=settings, **run)
    seed = derive_seed(recipe.seed, "scales")
    line = f"BatchEnsemble, scales from N(1, {settings.deviation:g}) above a trunk of {trunk}"
    parts = f"scales, {', '.join(recipe.train_groups)}"
    return warn_equal(train_parametrised(lambda copy: Scaled(copy, settings, recipe, seed), start, job, line, parts))


class Scaled(Parametrised):
    """An ensemble whose members scale the `shared` weights by their own `inputs` (r) and `outputs` (s).

    The per-member parameters of the ensemble are computed from these: linear maps are scaled, everything else is a
    copy of the shared value. Only biases are trained per member. Parameter names have `/` in place of dots.
    """

    def __init__(self, ensemble: Ensemble, settings: BatchEnsemble, recipe: Recipe, seed: int) -> None:
        super().__init__(ensemble)
        self.shared, self.inputs, self.outputs = nn.ParameterDict(), nn.ParameterDict(), nn.ParameterDict()
        generator = torch.Generator().manual_seed(seed)
        members = ensemble.num_members

        def scales(*shape: int) -> nn.Parameter:
            values = 1.0 + settings.deviation * torch.randn(members, *shape, generator=generator)
            return nn.Parameter(values.to(ensemble.device, ensemble.dtype))

        for name, parameter in ensemble.named_parameters():
            if copies_of(ensemble.config, name) == 1 or name.endswith("bias"):
                continue
            key = name.replace(".", "/")
            weight = parameter[: len(parameter) // members].detach().clone()
            self.shared[key] = nn.Parameter(weight, requires_grad=parameter.requires_grad)
            parameter.requires_grad_(False)
            if name.startswith(CLASSIFIERS):
                self.rates[f"shared.{key}"] = recipe.classifier_rate
            if name.endswith(("attention.qkv", "attention.query", "attention.key_value")):  # [h, 3, d_k, d]
                self.inputs[key], self.outputs[key] = scales(1, 1, 1, weight.shape[3]), scales(*weight.shape[:3], 1)
            elif name.endswith("attention.out"):  # [h, d_k, d]
                self.inputs[key], self.outputs[key] = scales(*weight.shape[:2], 1), scales(1, 1, weight.shape[2])
            elif name.endswith(".weight") and weight.dim() == 3:  # [1, out, in]
                self.inputs[key], self.outputs[key] = scales(1, 1, weight.shape[2]), scales(1, weight.shape[1], 1)
        scaled = [f"{part}.{key}" for part in ("inputs", "outputs") for key in getattr(self, part)]
        self.rates |= dict.fromkeys(scaled, settings.rate)
        self.spared = frozenset([*scaled, *(f"shared.{key}" for key in self.shared if "norm" in key)])

    def computed(self) -> dict[str, Tensor]:
        """The per-member parameters: members concatenated along the first axis."""
        stored: dict[str, Tensor] = {}
        for key, weight in self.shared.items():
            scaled = key in self.inputs
            many = weight[None] * self.inputs[key] * self.outputs[key] if scaled else weight[None]  # [M or 1, …]
            stored[key.replace("/", ".")] = many.expand(self.num_members, *weight.shape).flatten(0, 1)
        return stored

"""BatchEnsemble: members share their weights and differ in the scales of every input and output."""

from dataclasses import dataclass
from typing import Annotated, Literal, Unpack

import torch
from torch import Tensor, nn

from .._utils import derive_seed
from ..batches import Batches
from ..errors import ConfigError
from ..model.config import Sharing
from ..model.ensemble import Ensemble
from ..model.kinds import require_single
from ..model.member_states import copies_of, place_of
from ..settings import END, Checked, NotNegative, Positive, Range, Whole
from ..training.finetune import CLASSIFIERS, Parametrised, train_parametrised
from ..training.loop import TrainOptions, trains
from ..training.recipe import Recipe
from .building_blocks import job_of, joined, warn_equal


@dataclass(frozen=True)
class BatchEnsemble(Checked):
    """How members of a BatchEnsemble are scaled.

    A linear map of member m is `y = ((x ∘ r_m) Wᵀ) ∘ s_m + b_m`; query, key and value are one map. Scales far from one
    destroy a pretrained model: keep `deviation` small, or scale few layers, as the published vision transformers do
    (`last_layers=3, deviation=0.5`).

    Attributes:
        members: Number of members.
        scales: `"all"`: inputs and outputs of every linear map. `"inputs"`: only inputs of attention and MLP, which
            are folded into the norms before them, so that attention and MLP are stored once; for pre-norm blocks.
        last_layers: Scale only this many last layers, and the classifier; those before run once for all members. None
            scales all layers.
        start: Scales are drawn from `"normal"`, N(1, deviation), or are random `"signs"`.
        deviation: Standard deviation of `"normal"`.
        rate: Learning rate of the scales, as a multiple of that of the weights. Scales never decay.
    """

    members: Annotated[int, Range(2, END - 1)] = 3
    scales: Literal["all", "inputs"] = "all"
    last_layers: Whole | None = None
    start: Literal["normal", "signs"] = "normal"
    deviation: NotNegative = 0.1
    rate: Positive = 1.0

    def check(self, model: Ensemble) -> None:
        """Raise for more layers than the model has, and for folding scales in a post-norm model."""
        if self.last_layers is not None and self.last_layers > model.num_layers:
            raise ConfigError(f"last_layers is {self.last_layers}, but the model has {model.num_layers} layers")
        if self.scales == "inputs" and not model.config.encoder.norm_first:
            raise ConfigError("scales='inputs' needs norms before the maps; in this model they come after: use 'all'")


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

    At the end the scales are multiplied into the weights, or folded into norms: the forward pass is the ordinary one.
    If weights are scaled on both sides, the result is as large as M copies of the layers above the trunk.
    The loss is the sum over members, as for `finetune`; published code uses their mean, so with SGD its learning rates
    are M times too high here.

    The groups of the recipe say which weights and biases are trained; scales always are.

    Examples:
        >>> recipe, settings = he.Recipe(learning_rate=1e-4, steps=1), he.baselines.BatchEnsemble(members=2)
        >>> he.baselines.batch_ensemble(base, batches, recipe, settings, progress=False).num_members
        2
    """
    require_single(model, "batch_ensemble")
    settings.check(model)
    trunk = 0 if settings.last_layers is None else model.num_layers - settings.last_layers
    inputs = settings.scales == "inputs"
    zero_shot = model.config.readout.cosine is not None
    sharing = Sharing(stem=True, attention=inputs, mlp=inputs, norms=not inputs, readout=zero_shot)
    start = joined([model] * settings.members, sharing, trunk)
    job = job_of(settings, recipe, train, validation, **run)
    seed = derive_seed(recipe.seed, "scales")
    drawn = "random signs" if settings.start == "signs" else f"N(1, {settings.deviation:g})"
    line = f"BatchEnsemble, scales of {settings.scales} from {drawn} above a trunk of {trunk}"
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
            noise = torch.randn(members, *shape, generator=generator)
            values = noise.sign() if settings.start == "signs" else 1.0 + settings.deviation * noise
            return nn.Parameter(values.to(ensemble.device, ensemble.dtype))

        for name, parameter in ensemble.named_parameters():
            group, layer = place_of(name)
            if copies_of(ensemble.config, name) == 1 or (name.endswith("bias") and group != "norms"):
                continue
            key = name.replace(".", "/")
            weight = parameter[: len(parameter) // members].detach().clone()
            self.shared[key] = nn.Parameter(weight, requires_grad=parameter.requires_grad)
            parameter.requires_grad_(False)
            if name.startswith(CLASSIFIERS):
                self.rates[f"shared.{key}"] = recipe.classifier_rate
            if name.endswith("attention.qkv"):  # [h, 3, d_k, d]
                self.inputs[key], self.outputs[key] = scales(1, 1, 1, weight.shape[3]), scales(*weight.shape[:3], 1)
            elif name.endswith("attention.out"):  # [h, d_k, d]
                self.inputs[key], self.outputs[key] = scales(*weight.shape[:2], 1), scales(1, 1, weight.shape[2])
            elif name.endswith(".weight") and weight.dim() == 3:  # [1, out, in]
                self.inputs[key], self.outputs[key] = scales(1, 1, weight.shape[2]), scales(1, weight.shape[1], 1)
            elif layer is not None and name.endswith("weight") and group == "norms":  # input scales of the next map
                self.inputs[key] = scales(1, weight.shape[1])
        scaled = [f"{part}.{key}" for part in ("inputs", "outputs") for key in getattr(self, part)]
        self.rates |= dict.fromkeys(scaled, settings.rate)
        self.spared = frozenset([*scaled, *(f"shared.{key}" for key in self.shared if "norm" in key)])

    def computed(self) -> dict[str, Tensor]:
        """The per-member parameters: members concatenated along the first axis."""
        stored: dict[str, Tensor] = {}
        for key, weight in self.shared.items():
            scale = f"{key.removesuffix('bias')}weight" if key.endswith("bias") else key  # a norm's bias as its weight
            many = weight[None] * self.inputs[scale] if scale in self.inputs else weight[None]  # [M or 1, …]
            many = many * self.outputs[key] if key in self.outputs else many
            stored[key.replace("/", ".")] = many.expand(self.num_members, *weight.shape).flatten(0, 1)
        return stored

"""The models that `inference.py` measures: one user's model, and what can be made of it to get an ensemble.

All weights are random: time does not depend on them. Members are made to differ wherever fine-tuning would make
them differ, so that nothing can be shared by accident.
"""

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from model_shapes import Inputs, ModelShape
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state

import hydra_ensembles as he
from hydra_ensembles._utils import derive_seed
from hydra_ensembles.baselines.mc_dropout import mc_dropout
from hydra_ensembles.model.config import EnsembleConfig
from hydra_ensembles.model.cost import multiply_adds
from hydra_ensembles.optimize import Plan

NAMES = (
    "single",
    "ours",
    "hydra-k0",
    "hydra-k8",
    "hydra-k10",
    "hydra-uneven",
    "pruned",
    "deep-in-turn",
    "deep-stacked",
    "deep-vmap",
    "mc-dropout",
    "hydra-k4",
    "hydra-k6",
)
LABELS = {
    "single": "the user's own model",
    "ours": "our single (M = 1)",
    "pruned": "pruned, a third of the heads",
    "deep-in-turn": "Deep Ensemble, in turn",
    "deep-stacked": "Deep Ensemble, stacked (ours)",
    "deep-vmap": "Deep Ensemble, torch.func",
    "mc-dropout": "MC Dropout, M passes",
    "hydra-k0": "Hydra, no trunk",
    "hydra-k4": "Hydra, trunk of 4",
    "hydra-k6": "Hydra, trunk of 6",
    "hydra-k8": "Hydra, trunk of 8",
    "hydra-k10": "Hydra, trunk of 10",
    "hydra-uneven": "Hydra, uneven heads",
    "hydra-int8": "Hydra, no trunk, int8 weights",
    "hydra-joint": "Hydra, circuits of both towers",
    "single-texts": "the user's own model, text tower in every batch",
    "hydra-texts": "Hydra, text towers in every batch",
}
ONE_MEMBER = ("single", "ours", "pruned", "single-texts")
NOISE = 0.02  # what fine-tuning does, coarse enough to survive bfloat16
DROPOUT = 0.1


@dataclass(frozen=True)
class Contender:
    """A model ready to be measured.

    Attributes:
        name: Which one it is.
        run: Takes the tensors of a batch one by one.
        modules: What holds its weights.
        parameters: Numbers it stores.
        multiply_adds: Of one input, those that are really done.
        plan: How members run, for an ensemble of ours.
        random: Whether it answers differently each time.
    """

    name: str
    run: Callable[..., Tensor]
    modules: tuple[nn.Module, ...]
    parameters: int
    multiply_adds: int
    plan: str = ""
    random: bool = False

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, shared ones once."""
        tensors = [t for module in self.modules for t in [*module.parameters(), *module.buffers()]]
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


class Workshop:
    """Makes the contenders of one model shape, in one dtype, on one device; what can be reused is kept."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype, device: str, seed: int) -> None:
        self.shape, self.dtype, self.device, self.seed = shape, dtype, torch.device(device), seed
        self._ensembles: dict[tuple[str, int], he.Ensemble] = {}

    @cached_property
    def model(self) -> nn.Module:
        """The user's model, in float32."""
        torch.manual_seed(self.seed)
        return self._noisy(self.shape.build(), "model").eval().to(self.device)

    @cached_property
    def base(self) -> he.Ensemble:
        """The user's model as an ensemble of ours, in float32."""
        return he.convert(self.model)

    def make(self, name: str, members: int, inputs: Inputs, plan: Plan | None = None) -> Contender:
        """A contender, with the plan that suits these inputs unless one is given."""
        if name == "single":
            return self._foreign(name, 1, [self.deployed(self.model)], alone)
        if name == "deep-in-turn":
            return self._foreign(name, members, self._models(members), _in_turn)
        if name == "deep-vmap":
            return self._foreign(name, members, self._models(members), _stacked_by_vmap)
        if name == "mc-dropout":
            return self._mc_dropout(members)
        ensemble = self._kept(name, members)
        runner = ensemble.optimize(plans=None if plan is None else [plan])
        chosen = plan or runner.choice_for(inputs).plan
        module = runner.module(chosen)
        return Contender(
            name=name,
            run=module,
            modules=(module,),
            parameters=sum(p.numel() for p in ensemble.parameters()),
            multiply_adds=multiply_adds_done(ensemble.config, self.shape.tokens, ensemble.readout.tokens_read()),
            plan=chosen,
        )

    def answer(self, name: str, members: int, inputs: Inputs) -> Tensor | None:
        """What the ensemble itself answers, before it was rewritten for speed; None for models not of ours."""
        if (name, members) not in self._ensembles:
            return None
        with torch.no_grad():
            return cast(Tensor, self._ensembles[name, members](*inputs.values()))

    @property
    def single_multiply_adds(self) -> int:
        """Of one input through the user's model, which computes every token of every layer."""
        return multiply_adds(self.base.config, self.shape.tokens)

    # --- models of others --------------------------------------------------------------------------------

    def deployed(self, model: nn.Module) -> nn.Module:
        """What a user runs of a model of this shape."""
        return model

    def _models(self, members: int) -> list[nn.Module]:
        copies = [self._noisy(copy.deepcopy(self.model), "model", member) for member in range(members)]
        return [self.deployed(one) for one in copies]

    def _foreign(
        self, name: str, members: int, models: list[nn.Module], arrange: Callable[..., tuple[Any, list[nn.Module]]]
    ) -> Contender:
        models = [copy.deepcopy(model).to(self.dtype).eval() for model in models]
        count = sum(p.numel() for model in models for p in model.parameters())
        run, kept = arrange(models, self.shape.logits)
        return Contender(name, run, tuple(kept), count, members * self.single_multiply_adds)

    # --- models of ours ----------------------------------------------------------------------------------

    def _kept(self, name: str, members: int) -> he.Ensemble:
        if (name, members) not in self._ensembles:
            self._ensembles[name, members] = self._ensemble(name, members).to(self.dtype)
        return self._ensembles[name, members]

    def _ensemble(self, name: str, members: int) -> he.Ensemble:
        if name == "ours":
            return self.base.member(0)
        if name == "pruned":
            return he.prune(self.base, self._evenly(0, 0))
        if name == "deep-stacked":
            return he.Ensemble.stack([self._tuned(self.base.member(0), 0, member) for member in range(members)])
        if name == "hydra-uneven":
            pruned = [he.prune(self.base, self._unevenly(member)) for member in range(members)]
            return he.fuse([self._tuned(one, 0, member) for member, one in enumerate(pruned)])
        match = re.fullmatch(r"hydra-k(\d+)", name)
        if match is None:
            raise ValueError(f"there is no contender {name!r}; there are {', '.join(NAMES)}")
        trunk = int(match[1])
        pruned = [he.prune(self.base, self._evenly(trunk, member)) for member in range(members)]
        return he.fuse([self._tuned(one, trunk, member) for member, one in enumerate(pruned)])

    def _mc_dropout(self, passes: int) -> Contender:
        model = mc_dropout(self.base.member(0).to(self.dtype), DROPOUT, passes).model  # drops in every mode

        def run(*inputs: Tensor) -> Tensor:
            repeated = [one.repeat(passes, *(1,) * (one.dim() - 1)) for one in inputs]
            return model(*repeated)[0].unflatten(0, (passes, -1))

        done = multiply_adds_done(self.base.config, self.shape.tokens, self.base.readout.tokens_read())
        count = sum(p.numel() for p in model.parameters())
        return Contender("mc-dropout", run, (model,), count, passes * done, random=True)

    def _tuned(self, ensemble: he.Ensemble, trunk: int, member: int) -> he.Ensemble:
        """What fine-tuning with the stem and the first layers frozen leaves: everything else is a member's own."""

        def frozen(name: str) -> bool:
            layer = re.match(r"encoder\.layers\.(\d+)\.", name)
            return name.startswith("stem.") or (layer is not None and int(layer[1]) < trunk)

        self._noisy(ensemble, "member", member, frozen)
        return ensemble

    def _noisy(self, model: Any, what: str, index: int = 0, frozen: Callable[[str], bool] = lambda name: False) -> Any:
        device = next(model.parameters()).device
        generator = torch.Generator(device).manual_seed(derive_seed(self.seed, what, index))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if not frozen(name):
                    parameter.add_(NOISE * torch.randn(parameter.shape, generator=generator, device=device))
        return model

    def _evenly(self, trunk: int, member: int) -> list[tuple[int, int]]:
        """A third of the heads of every layer above the trunk, others for every member."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "even", member))
        heads = self.base.num_heads
        draws = [torch.randperm(heads, generator=generator)[: heads // 3].tolist() for _ in range(self.base.num_layers)]
        return [(layer, head) for layer, drawn in enumerate(draws) if layer >= trunk for head in drawn]

    def _unevenly(self, member: int) -> list[tuple[int, int]]:
        """A third of all heads, wherever they are, as a circuit takes them."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "uneven", member))
        layers, heads = self.base.num_layers, self.base.num_heads
        drawn = torch.randperm(layers * heads, generator=generator)[: layers * heads // 3].tolist()
        return [divmod(one, heads) for one in drawn]


def alone(models: list[nn.Module], logits: Callable[..., Tensor]) -> tuple[Any, list[nn.Module]]:
    """One model by itself."""
    model = models[0]
    return lambda *inputs: logits(model, *inputs), models


def _in_turn(models: list[nn.Module], logits: Callable[..., Tensor]) -> tuple[Any, list[nn.Module]]:
    return lambda *inputs: torch.stack([logits(model, *inputs) for model in models]), models


def _stacked_by_vmap(models: list[nn.Module], logits: Callable[..., Tensor]) -> tuple[Any, list[nn.Module]]:
    """As PyTorch's own tutorial on model ensembling does it."""
    parameters, buffers = stack_module_state(models)
    skeleton = copy.deepcopy(models[0]).to("meta")
    weights = nn.Module()
    for index, tensor in enumerate([*parameters.values(), *buffers.values()]):
        weights.register_buffer(f"stacked{index}", tensor)

    def one(parameters: Any, buffers: Any, inputs: Any) -> Tensor:
        return logits(lambda *inputs, **named: functional_call(skeleton, (parameters, buffers), inputs, named), *inputs)

    return lambda *inputs: torch.vmap(one, (0, 0, None))(parameters, buffers, inputs), [weights]


def multiply_adds_done(config: EnsembleConfig, tokens: int, read: slice | None) -> int:
    """Multiply-adds of one input, with what the last block leaves out where few tokens are read of it."""
    total = multiply_adds(config, tokens)
    if read is None:
        return total
    encoder = config.encoder
    left_out = tokens - len(range(*read.indices(tokens)))
    copies = config.copies("attention", encoder.layers - 1)
    heads = sum(len(config.heads[member][-1]) for member in range(copies))
    total -= heads * left_out * encoder.head_dim * (2 * encoder.width + 2 * tokens)
    branches = config.members if config.trunk < encoder.layers else config.copies("stem")
    return total - branches * left_out * encoder.width * encoder.mlp_width * (3 if encoder.gated else 2)

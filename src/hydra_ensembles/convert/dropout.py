"""The dropout of a model of one's own, read off what its modules are given; what else it drops shows in training."""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from .._utils import torch_seeded, warn
from ..model.config import EnsembleConfig
from ..model.dropping import Dropout
from ..model.ensemble import Ensemble
from .core import NamedTensors
from .probe import Both, difference, our_tokens

# Where a canonical model drops, by the end of the module's name: the part of the configuration, and its rate there.
_SITES = {
    "stem.dropout": ("stem", "dropout"),
    "attention.out_dropout": ("encoder", "projection_dropout"),
    "mlp.activation_dropout": ("encoder", "activation_dropout"),
    "mlp.output_dropout": ("encoder", "output_dropout"),
    "readout.dropout": ("readout", "dropout"),
    "readout.hidden_dropout": ("readout", "hidden_dropout"),
}
_ATTENTION = ("encoder", "attention_dropout")
_IN_LAYER = {"dropout": "activation_dropout", "dropout1": "projection_dropout", "dropout2": "output_dropout"}


@dataclass(frozen=True)
class _Call:
    """What a dropout was given, `[…, d]`, by its name, rate and input."""

    name: str
    rate: float
    input: Tensor


def with_read_dropout(both: Both) -> Ensemble:
    """The converted model with every rate that can be read; says so where in training the original drops more.

    A module that drops is known by its input: it is that of one of ours, in every layer. To be called for models whose
    answers agree.
    """
    inputs = {name: tensor[:1] for name, tensor in both.samples().items()}  # without padding
    with both.answering():
        with _calls(both.model, lambda module: type(module) is nn.Dropout and module.p > 0) as theirs:
            both.original(inputs)
        with _calls(both.ensemble, lambda module: isinstance(module, Dropout)) as ours:
            tokens, context = our_tokens(both.ensemble, inputs)  # all of them, as in the original
            both.ensemble.readout(tokens[-1][None], context.key_mask, next(iter(inputs.values())))
        config, explained = _matched(both.ensemble.config, theirs, ours)
        complete = _is_certain(both, config, explained, inputs)
    if not complete:
        warn(
            f"{both.architecture.name}: in training the model drops something at random that could not be read off it, "
            "and the converted one does not: if it is to be trained, say dropout= in the declaration"
        )
    if config == both.ensemble.config:
        return both.ensemble
    return Ensemble.from_state(config, both.ensemble.state_dict(), both.ensemble.metadata)


@contextmanager
def _calls(model: nn.Module, selects: Callable[[Any], bool]) -> Iterator[list[_Call]]:
    """What such modules of a model are given inside."""
    calls: list[_Call] = []

    def hook(name: str) -> Callable[..., None]:
        def record(module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            x = next(iter((*arguments, *keywords.values())))
            calls.append(_Call(name, module.p, x.to_padded_tensor(0.0) if x.is_nested else x))

        return record

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if selects(module):
                hooks.enter_context(module.register_forward_pre_hook(hook(name), with_kwargs=True))
        yield calls


def _matched(config: EnsembleConfig, theirs: Sequence[_Call], ours: Sequence[_Call]) -> tuple[EnsembleConfig, set[str]]:
    """The configuration with the rates that were read, and the names of the modules that it stands for."""
    by_site: dict[tuple[str, str], list[list[_Call]]] = defaultdict(list)  # of each layer, what drops there
    for our in ours:
        site = next(site for end, site in _SITES.items() if our.name.endswith(end))
        by_site[site].append([call for call in theirs if _same(our.input, call.input)])
    weights = [call for call in theirs if _is_attention(call.input, config)]
    if len(weights) == config.encoder.layers:
        by_site[_ATTENTION] = [[call] for call in weights]
    explained: list[_Call] = []
    for (part, rate), layers in by_site.items():
        rates = {tuple(call.rate for call in layer) for layer in layers}
        if len(rates) == 1 and len(next(iter(rates))) == 1:  # one module in every layer, at one rate
            config = replace(config, **{part: replace(getattr(config, part), **{rate: layers[0][0].rate})})
            explained += [layer[0] for layer in layers]
    unexplained = {call.name for call in theirs if not any(call is other for other in explained)}
    return config, {call.name for call in explained} - unexplained


def _same(ours: Tensor, theirs: Tensor) -> bool:
    """Whether tokens or features of one sample are the same, in whatever order their axes of length one are."""
    if ours.numel() != theirs.numel() or ours.shape[-1] != theirs.shape[-1]:
        return False
    return difference(ours.flatten(), theirs.flatten()) <= 1e-3  # of numbers that are as different as any


def _is_attention(x: Tensor, config: EnsembleConfig) -> bool:
    """Whether these are the weights of an attention, `[1, H, T, T]`."""
    if x.numel() != config.encoder.heads * x.shape[-1] ** 2 or x.shape[-1] < 2 or bool((x < 0).any()):
        return False
    return bool(((x.sum(-1) - 1).abs() < 1e-2).all())


def _is_certain(both: Both, config: EnsembleConfig, explained: set[str], inputs: NamedTensors) -> bool:
    """Whether the original has no chance left in training, when all that was read of it does not drop."""
    try:
        model: Any = copy.deepcopy(both.model)
    except Exception:  # whatever somebody's model may raise
        return explained >= {name for name, m in both.model.named_modules() if type(m) is nn.Dropout and m.p > 0}
    for name, module in model.named_modules():
        if name in explained:
            module.p = 0.0
        if isinstance(module, nn.MultiheadAttention) and module.dropout == config.encoder.attention_dropout:
            module.dropout = 0.0
        if isinstance(module, nn.TransformerEncoderLayer):
            for part, rate in _IN_LAYER.items():
                dropout: Any = getattr(module, part)
                dropout.p = 0.0 if dropout.p == getattr(config.encoder, rate) else dropout.p
    model.train()
    answers: list[Tensor] = []
    for seed in (0, 1):
        with torch_seeded(seed, both.ensemble.device):
            try:
                answers.append(replace(both, model=model).original(inputs))
            except ValueError:  # it is in no state to train, and so drops nothing
                return True
    return difference(*answers) <= both.allowed(inputs)

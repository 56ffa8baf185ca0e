"""Models of every supported architecture that somebody has altered: `convert` refuses them, or answers as they do.

What is altered is found by walking through the model, so no part of it is spared: modules are wrapped, replaced,
hooked, given another class or another `forward`; numbers, flags, settings and methods are changed; blocks are moved.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

import hydra_ensembles as he

from .counting import Row, count
from .expected import alike

CASES = 600

Alteration = Callable[[nn.Module, float], object]
Case = tuple[str, str, float]  # architecture, alteration, and which of the places it can be made in


def run(cases: int, seed: int) -> list[Row]:
    """Alterations of everything, in places drawn by the seed."""
    random = Random(seed)
    names = [str(case) for case in _cases()]
    pairs = [(name, alteration) for alteration in ALTERATIONS for name in names]
    chosen = [pairs[index % len(pairs)] for index in random.sample(range(max(cases, len(pairs))), cases)]
    return [count("altered models", check, [(*pair, round(random.random(), 4)) for pair in chosen])]


def check(case: Case) -> str:
    """Alter a model, convert it, and hold what comes out against the altered model itself."""
    name, alteration, place = case
    own = next(one for one in _cases() if str(one) == name)
    model = own.build()
    with suppress(_NothingError):  # then it is as it was, and is converted
        ALTERATIONS[alteration](model, place)
    converted = he.convert(model, **own.convert_kwargs)
    inputs = own.inputs()
    try:
        with torch.no_grad():
            wanted = own.logits(model, inputs)
    except Exception as error:
        raise AssertionError(f"converted, although it cannot answer: {type(error).__name__}: {error}") from error
    with torch.no_grad():
        found = converted(inputs)[0]
    return "same" if alike(found, wanted) else "other"


@cache
def _cases() -> list[Any]:
    from contract.all_architectures import ALL_CASES

    return list(ALL_CASES)


# --- where, and how ------------------------------------------------------------------------------------------


class _NothingError(Exception):
    """A model has nothing that could be altered in this way."""


def _chosen(candidates: list[Any], place: float) -> Any:
    if not candidates:
        raise _NothingError
    return candidates[int(place * len(candidates))]


def _modules(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """Parent, name and module of all parts."""
    return [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()]


def _scaled(answer: Any) -> Any:
    """An answer, and all tensors in it, a quarter larger; the shape of things stays."""
    if isinstance(answer, Tensor):
        return answer * 1.25 if answer.is_floating_point() else answer
    if isinstance(answer, tuple) and type(answer) is tuple:
        return tuple(_scaled(one) for one in answer)
    for name in ("logits", "last_hidden_state", "pooler_output"):
        if isinstance(getattr(answer, name, None), Tensor):
            setattr(answer, name, getattr(answer, name) * 1.25)
    return answer


class _Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)

    def __iter__(self) -> Any:
        return iter(self.inner)  # type: ignore[call-overload]

    def __len__(self) -> int:
        return len(self.inner)  # type: ignore[arg-type]

    def __getitem__(self, index: Any) -> Any:
        return self.inner[index]  # type: ignore[index]

    def forward(self, *given: Any, **named: Any) -> Any:
        return _scaled(self.inner(*given, **named))


# --- the alterations: of a place among those that a model has, a number from 0 to 1 --------------------------


def wrapped(model: nn.Module, place: float) -> None:
    """A part in a wrapper that scales what it gives."""
    parent, name, child = _chosen(_modules(model), place)
    setattr(parent, name, _Wrapped(child))


def hooked(model: nn.Module, place: float) -> None:
    """A hook that scales what a part gives."""
    _chosen(list(model.modules()), place).register_forward_hook(lambda module, given, answer: _scaled(answer))


def hooked_before(model: nn.Module, place: float) -> None:
    """A hook that scales what a part takes."""
    part = _chosen(list(model.modules()), place)
    part.register_forward_pre_hook(lambda module, given: tuple(_scaled(one) for one in given))


def forward_replaced(model: nn.Module, place: float) -> None:
    """Another `forward` on the object."""
    part = _chosen(list(model.modules()), place)
    original = part.forward
    part.forward = lambda *given, **named: _scaled(original(*given, **named))


def class_replaced(model: nn.Module, place: float) -> None:
    """A subclass of the class, as a home-made LoRA is one, with the same name."""
    part = _chosen(list(model.modules()), place)
    kind = type(part)

    def forward(self: Any, *given: Any, **named: Any) -> Any:
        return _scaled(kind.forward(self, *given, **named))

    part.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def method_replaced(model: nn.Module, place: float) -> None:
    """Another method than `forward` on the object."""
    found = [
        (part, name)
        for part in model.modules()
        for name in dir(type(part))
        if not name.startswith("__") and name not in dir(nn.Module) and callable(getattr(type(part), name, None))
    ]
    part, name = _chosen(found, place)
    original = getattr(part, name)
    object.__setattr__(part, name, lambda *given, **named: _scaled(original(*given, **named)))


def edited(kind: type, change: Callable[[Any], Any]) -> Alteration:
    """Something that a part keeps: a number, a flag, its kind of pooling, a stride."""

    def alter(model: nn.Module, place: float) -> None:
        found = [
            (part, name)
            for part in model.modules()
            for name, value in vars(part).items()
            if type(value) is kind and name != "training" and (kind is not tuple or (value and type(value[0]) is int))
        ]
        part, name = _chosen(found, place)
        setattr(part, name, change(getattr(part, name)))

    return alter


def config_edited(model: nn.Module, place: float) -> None:
    """A setting of a transformers model, after it was built."""
    settings = getattr(model, "config", None)
    kept = vars(settings) if settings else {}
    name = _chosen([name for name, value in kept.items() if type(value) in (int, float, bool, str)], place)
    value = getattr(settings, name)
    changed: Any = not value if type(value) is bool else "relu" if type(value) is str else value * 2 + 1
    setattr(settings, name, changed)


def put(by: Callable[[nn.Module], nn.Module], where: Callable[[nn.Module], bool]) -> Alteration:
    """Another module in the place of one."""

    def alter(model: nn.Module, place: float) -> None:
        parent, name, child = _chosen([one for one in _modules(model) if where(one[2])], place)
        setattr(parent, name, by(child))

    return alter


def bias_dropped(model: nn.Module, place: float) -> None:
    """A bias that is gone."""
    found = [part for part in model.modules() if isinstance(getattr(part, "bias", None), Tensor)]
    _chosen(found, place).bias = None


@torch.no_grad()
def weights_changed(model: nn.Module, place: float) -> None:
    """Other weights: nothing is wrong with that."""
    _chosen(list(model.parameters()), place).mul_(1.5)


@torch.no_grad()
def weights_not_finite(model: nn.Module, place: float) -> None:
    """A weight that is NaN."""
    _chosen(list(model.parameters()), place).view(-1)[0] = float("nan")


def shape_changed(model: nn.Module, place: float) -> None:
    """A parameter of another shape."""
    found = [(part, name) for part in model.modules() for name, value in part.named_parameters(recurse=False)]
    part, name = _chosen(found, place)
    setattr(part, name, nn.Parameter(getattr(part, name).detach().repeat_interleave(2, 0)))


def part_in_half(model: nn.Module, place: float) -> None:
    """One part in another floating type; all of them would be a model like any other."""
    parts = [part for part in model.modules() if part is not model and list(part.parameters(recurse=False))]
    _chosen(parts, place).half()


def with_blocks(change: Callable[[Any], None]) -> Alteration:
    """A list of two blocks, changed."""
    kinds = (nn.ModuleList, nn.Sequential)
    return lambda model, place: change(
        _chosen([part for part in model.modules() if isinstance(part, kinds) and len(part) == 2], place)
    )


def swap(blocks: Any) -> None:
    first = blocks[0]
    blocks[0], blocks[1] = blocks[1], first


WORDS = {"token": "avg", "avg": "token", "tok": "avg"}
ALTERATIONS: dict[str, Alteration] = {
    **{
        one.__name__.replace("_", " "): one
        for one in (wrapped, hooked, hooked_before, forward_replaced, class_replaced, method_replaced)
    },
    "number edited": edited(float, lambda value: value * 3 + 0.1),
    "whole number edited": edited(int, lambda value: value * 2),
    "flag flipped": edited(bool, lambda value: not value),
    "text edited": edited(str, lambda value: WORDS.get(value, "other")),
    "pair edited": edited(tuple, lambda value: tuple(one + 1 for one in value)),
    "config edited": config_edited,
    "replaced": put(lambda part: nn.Tanh(), lambda part: not list(part.parameters()) and not list(part.children())),
    "identity": put(lambda part: nn.Identity(), lambda part: True),
    "in sequence": put(
        lambda part: nn.Sequential(part, nn.Tanh()), lambda part: isinstance(part, nn.Linear | nn.LayerNorm | nn.Conv2d)
    ),
    "bias dropped": bias_dropped,
    "parameter added": lambda model, place: _chosen(list(model.modules()), place).register_parameter(
        "extra", nn.Parameter(torch.ones(3))
    ),
    "buffer added": lambda model, place: _chosen(list(model.modules()), place).register_buffer("extra", torch.ones(3)),
    **{
        one.__name__.replace("_", " "): one
        for one in (weights_changed, weights_not_finite, shape_changed, part_in_half)
    },
    "blocks swapped": with_blocks(swap),  # a model like any other
    "block removed": with_blocks(lambda blocks: blocks.__delitem__(0)),
    "block repeated": with_blocks(lambda blocks: blocks.__setitem__(1, blocks[0])),
    "left alone": lambda model, place: None,
}

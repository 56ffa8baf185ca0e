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


def number_edited(model: nn.Module, place: float) -> None:
    """A number that a part keeps."""
    found = [(part, name) for part in model.modules() for name, value in vars(part).items() if type(value) is float]
    part, name = _chosen(found, place)
    setattr(part, name, getattr(part, name) * 3 + 0.1)


def whole_number_edited(model: nn.Module, place: float) -> None:
    """A whole number that a part keeps, such as its number of heads."""
    found = [(part, name) for part in model.modules() for name, value in vars(part).items() if type(value) is int]
    part, name = _chosen(found, place)
    setattr(part, name, getattr(part, name) * 2)


def flag_flipped(model: nn.Module, place: float) -> None:
    """A flag that a part keeps."""
    found = [
        (part, name)
        for part in model.modules()
        for name, value in vars(part).items()
        if type(value) is bool and name != "training"
    ]
    part, name = _chosen(found, place)
    setattr(part, name, not getattr(part, name))


def text_edited(model: nn.Module, place: float) -> None:
    """A word that a part keeps, such as its kind of pooling."""
    found = [(part, name) for part in model.modules() for name, value in vars(part).items() if type(value) is str]
    part, name = _chosen(found, place)
    setattr(part, name, {"token": "avg", "avg": "token", "tok": "avg"}.get(getattr(part, name), "other"))


def pair_edited(model: nn.Module, place: float) -> None:
    """A pair of numbers, such as a stride."""
    found = [
        (part, n)
        for part in model.modules()
        for n, v in vars(part).items()
        if type(v) is tuple and v and type(v[0]) is int
    ]
    part, name = _chosen(found, place)
    setattr(part, name, tuple(value + 1 for value in getattr(part, name)))


def config_edited(model: nn.Module, place: float) -> None:
    """A setting of a transformers model, after it was built."""
    settings = getattr(model, "config", None)
    found = (
        [name for name, value in vars(settings).items() if type(value) in (int, float, bool, str)] if settings else []
    )
    name = _chosen(found, place)
    value = getattr(settings, name)
    changed: Any = not value if type(value) is bool else "relu" if type(value) is str else value * 2 + 1
    setattr(settings, name, changed)


def replaced(model: nn.Module, place: float, by: Callable[[], nn.Module] = nn.Tanh) -> None:
    """Another module in the place of one without parameters."""
    found = [one for one in _modules(model) if not list(one[2].parameters()) and not list(one[2].children())]
    parent, name, _ = _chosen(found, place)
    setattr(parent, name, by())


def identity(model: nn.Module, place: float) -> None:
    """Nothing in the place of any part."""
    parent, name, _ = _chosen(_modules(model), place)
    setattr(parent, name, nn.Identity())


def in_sequence(model: nn.Module, place: float) -> None:
    """A linear map or a norm, followed by something."""
    found = [one for one in _modules(model) if isinstance(one[2], nn.Linear | nn.LayerNorm | nn.Conv2d)]
    parent, name, child = _chosen(found, place)
    setattr(parent, name, nn.Sequential(child, nn.Tanh()))


def bias_dropped(model: nn.Module, place: float) -> None:
    """A bias that is gone."""
    found = [part for part in model.modules() if isinstance(getattr(part, "bias", None), Tensor)]
    _chosen(found, place).bias = None


def parameter_added(model: nn.Module, place: float) -> None:
    """A parameter that nobody knows."""
    _chosen(list(model.modules()), place).register_parameter("extra", nn.Parameter(torch.ones(3)))


def buffer_added(model: nn.Module, place: float) -> None:
    """A buffer that nobody knows."""
    _chosen(list(model.modules()), place).register_buffer("extra", torch.ones(3))


def weights_changed(model: nn.Module, place: float) -> None:
    """Other weights: nothing is wrong with that."""
    with torch.no_grad():
        _chosen(list(model.parameters()), place).mul_(1.5)


def weights_not_finite(model: nn.Module, place: float) -> None:
    """A weight that is NaN."""
    with torch.no_grad():
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


def blocks_swapped(model: nn.Module, place: float) -> None:
    """Blocks in another order: a model like any other."""
    blocks = _blocks(model, place)
    first = blocks[0]
    blocks[0], blocks[1] = blocks[1], first


def block_removed(model: nn.Module, place: float) -> None:
    """A block less than the settings say."""
    del _blocks(model, place)[0]


def block_repeated(model: nn.Module, place: float) -> None:
    """One block in two places."""
    blocks = _blocks(model, place)
    blocks[1] = blocks[0]


def _blocks(model: nn.Module, place: float) -> Any:
    kinds = (nn.ModuleList, nn.Sequential)
    return _chosen([part for part in model.modules() if isinstance(part, kinds) and len(part) == 2], place)


def left_alone(model: nn.Module, place: float) -> None:
    """Nothing is altered."""


ALTERATIONS: dict[str, Callable[[nn.Module, float], None]] = {
    one.__name__.replace("_", " "): one
    for one in (
        *(wrapped, hooked, hooked_before, forward_replaced, class_replaced, method_replaced),
        *(number_edited, whole_number_edited, flag_flipped, text_edited, pair_edited, config_edited),
        *(replaced, identity, in_sequence, bias_dropped, parameter_added, buffer_added),
        *(weights_changed, weights_not_finite, shape_changed, part_in_half),
        *(blocks_swapped, block_removed, block_repeated, left_alone),
    )
}

"""Altered models of every supported architecture: `convert` refuses them, or the converted model answers alike.

Places to alter are found by walking through the model, so no part is left out: modules are wrapped, replaced,
hooked, given another class or another `forward`; numbers, flags, settings and methods are changed; blocks are moved.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

import hydra_ensembles as he

from .counting import Row, alike, count

CASES = 600

Alteration = Callable[[nn.Module, float], object]
Case = tuple[str, str, float]  # architecture, alteration, and where among the possible places to make it


def run(cases: int, seed: int) -> list[Row]:
    """Every kind of alteration, in places drawn by the seed."""
    random = Random(seed)
    names = [str(case) for case in _cases()]
    pairs = [(name, alteration) for alteration in ALTERATIONS for name in names]
    chosen = [pairs[index % len(pairs)] for index in random.sample(range(max(cases, len(pairs))), cases)]
    return [count("altered models", check, [(*pair, round(random.random(), 4)) for pair in chosen])]


def check(case: Case) -> str:
    """Alter a model, convert it, and compare the result with the altered model."""
    name, alteration, place = case
    own = next(one for one in _cases() if str(one) == name)
    model = own.build()
    with suppress(_NothingError):  # then the unaltered model is converted
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
    from contract.models import ALL_CASES

    return list(ALL_CASES)


# --- where, and how ------------------------------------------------------------------------------------------


class _NothingError(Exception):
    """Raised where a model has nothing to alter in this way."""


def _chosen(candidates: list[Any], place: float) -> Any:
    if not candidates:
        raise _NothingError
    return candidates[int(place * len(candidates))]


def _scaled(answer: Any) -> Any:
    """Multiply an answer, and all tensors in it, by 1.25; keeps its structure."""
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


# --- the alterations; the place is a number from 0 to 1 among the candidates of a model ----------------------


def one_of(candidates: Callable[[nn.Module], Iterable[Any]], change: Callable[[Any], object]) -> Alteration:
    """An alteration of one of the candidates."""

    @torch.no_grad()
    def alter(model: nn.Module, place: float) -> None:
        change(_chosen(list(candidates(model)), place))

    return alter


def part(change: Callable[[Any], object]) -> Alteration:
    """An alteration of any submodule, or of the whole model."""
    return one_of(nn.Module.modules, change)


def weight(change: Callable[[Tensor], object]) -> Alteration:
    return one_of(nn.Module.parameters, change)


def _replace_method(found: tuple[nn.Module, str]) -> None:
    """Replace a method on the instance."""
    part, name = found
    original = getattr(part, name)
    object.__setattr__(part, name, lambda *given, **named: _scaled(original(*given, **named)))


def _replace_class(part: nn.Module) -> None:
    """Replace the class by a subclass with the same name, as a hand-written LoRA does."""
    kind = type(part)

    def forward(self: Any, *given: Any, **named: Any) -> Any:
        return _scaled(kind.forward(self, *given, **named))

    part.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def _methods(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """All methods of every part, `forward` among them."""
    for part in model.modules():
        for name in dir(type(part)):
            own = name == "forward" or (not name.startswith("__") and name not in dir(nn.Module))
            if own and callable(getattr(type(part), name, None)):
                yield part, name


def edited(kind: type, change: Callable[[Any], Any]) -> Alteration:
    """An alteration of an attribute: a number, a flag, a kind of pooling, a stride."""

    def kept(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
        for part in model.modules():
            yield from (
                (part, name) for name, value in vars(part).items() if type(value) is kind and name != "training"
            )

    return one_of(kept, lambda found: setattr(*found, change(getattr(*found))))


def put(by: Callable[[nn.Module], nn.Module], where: Callable[[nn.Module], bool]) -> Alteration:
    """An alteration that replaces one module by another."""
    return one_of(
        lambda model: [(up, name, part) for up in model.modules() for name, part in up.named_children() if where(part)],
        lambda found: setattr(found[0], found[1], by(found[2])),
    )


def with_blocks(change: Callable[[Any], None]) -> Alteration:
    """An alteration of a list of two blocks."""
    kinds = (nn.ModuleList, nn.Sequential)
    return one_of(lambda model: [one for one in model.modules() if isinstance(one, kinds) and len(one) == 2], change)


def swap(blocks: Any) -> None:
    first = blocks[0]
    blocks[0], blocks[1] = blocks[1], first


ALTERATIONS: dict[str, Alteration] = {
    "wrapped": put(_Wrapped, lambda part: True),
    "hooked": part(lambda part: part.register_forward_hook(lambda module, given, answer: _scaled(answer))),
    "class replaced": part(_replace_class),
    "method replaced": one_of(_methods, _replace_method),
    "number edited": edited(float, lambda value: value * 3 + 0.1),
    "flag flipped": edited(bool, lambda value: not value),
    "replaced": put(lambda part: nn.Tanh(), lambda part: not list(part.parameters()) and not list(part.children())),
    "weights changed": weight(lambda weight: weight.mul_(1.5)),  # a valid model
    "blocks swapped": with_blocks(swap),  # a valid model
    "block removed": with_blocks(lambda blocks: blocks.__delitem__(0)),
    "left alone": lambda model, place: None,
}

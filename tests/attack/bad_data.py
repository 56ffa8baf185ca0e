"""Bad sets of batches, images and texts, given to every function that reads one.

Every set states whether it must be refused, or read like a valid one.
"""

from collections import UserDict
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import hydra_ensembles as he

from .counting import Row, count
from .expected import Deed, cases_of, check_of, drawn, must_refuse_of
from .small import CLASSES, KEYS, VOCABULARY, Batch, batches, model, recipe

CASES = 1200


def run(cases: int, seed: int) -> list[Row]:
    return [count("sets of batches", check, drawn(all_cases(), cases, seed))]


@cache
def plain_data(kind: str) -> list[Batch]:
    """Valid data from which all bad data are made."""
    return batches(kind, 24, 4, seed=5)


@cache
def readers(kind: str) -> dict[str, Callable[[Any], Any]]:
    """Functions that read a set of batches, with all other arguments valid."""
    single = model(kind)
    train, held_out, foreign = batches(kind, 24, 4, seed=6), batches(kind, 24, 4, seed=7), batches(kind, 16, 4, 8, 1.5)
    quiet: dict[str, Any] = {"progress": False}
    circuit = he.HydraConfig(prune=2, shared_layers=0, members=2, strategy="sampled", pool=4, method="naive")
    tuned = he.HydraConfig(
        prune=3, shared_layers=0, members=2, strategy="taylor", calibration_batches=2, recipe=recipe(steps=6)
    )
    all_steps = recipe(steps=6)  # one pass over the data
    return {
        "calibrate": lambda data: he.calibrate(single, data).metadata.calibration,
        "evaluate": lambda data: he.evaluate(single, data, **quiet).numbers(),
        "evaluate, OOD": lambda data: he.evaluate(single, held_out, {"other": data}, **quiet).numbers(),
        "evaluate, shift": lambda data: he.evaluate(single, held_out, None, {"fog": data}, **quiet).numbers(),
        "finetune": lambda data: he.finetune(single, data, all_steps, **quiet),
        "finetune, validation": lambda data: he.finetune(single, train, all_steps, data, **quiet),
        "taylor": lambda data: he.taylor(single, data, budget=3).heads,
        "extract_circuit": lambda data: he.extract_circuit(single, data, foreign, budget=2, **quiet).heads,
        "extract_circuit, OOD": lambda data: he.extract_circuit(single, held_out, data, budget=2, **quiet).heads,
        "build, id": lambda data: he.build(single, circuit, id=data, ood=foreign, **quiet),
        "build, OOD": lambda data: he.build(single, circuit, id=held_out, ood=data, **quiet),
        "build, train": lambda data: he.build(single, tuned, train=data, id=held_out, **quiet),
        "build, validation": lambda data: he.build(single, tuned, train=train, validation=data, **quiet),
    }


UNLABELLED = ("evaluate, OOD", "extract_circuit, OOD", "build, OOD")
OPTIONAL = ("finetune, validation",)  # they accept None; `build` requires the data it is given here
READ_AGAIN = ("finetune", "finetune, validation", "build, train")


class OwnError(Exception):
    """An exception raised by the caller's own loader."""


@cache
def deeds(kind: str) -> dict[tuple[str, str], Callable[[], Deed]]:
    return {
        (entry, name): partial(_data_deed, kind, entry, name, expectation, make)
        for entry in readers.__wrapped__(kind)
        for name, (expectation, make) in data_table(kind).items()
        if not (name == "None" and entry in OPTIONAL)
    }


def _data_deed(kind: str, entry: str, name: str, expectation: str, make: Callable[[], Any]) -> Deed:
    read = readers(kind)[entry]
    if expectation in ("labels", "sets"):
        taken = "same" if expectation == "labels" else "either"
        expectation = taken if entry in UNLABELLED else "refused"
    if expectation == "once":
        expectation = "refused" if entry in READ_AGAIN else "same"
    if expectation == "theirs":
        return Deed(partial(_own_error, read, make), lambda: "came through")
    if expectation == "refused":
        return Deed(lambda: read(make()))
    return Deed(lambda: read(make()), partial(_answer, kind, entry), may_refuse=expectation == "either")


@cache
def _answer(kind: str, entry: str) -> Any:
    return readers(kind)[entry](plain_data(kind))


def _own_error(read: Callable[[Any], Any], make: Callable[[], Any]) -> str:
    try:
        read(make())
    except OwnError:
        return "came through"
    return "was lost"


def data_table(kind: str) -> dict[str, tuple[str, Callable[[], Any]]]:
    """Sets by name: the expected outcome, and how each is made."""
    good, key = plain_data(kind), KEYS[kind]

    def each(change: Callable[[Any, Tensor], Any]) -> Callable[[], list[Any]]:
        return lambda: [change(inputs, labels) for inputs, labels in good]

    def last(change: Callable[[Any, Tensor], Any]) -> Callable[[], list[Any]]:
        return lambda: [*good[:-1], change(*good[-1])]

    def named(inputs: Any) -> dict[str, Any]:
        return dict(inputs) if isinstance(inputs, dict) else {key: inputs}

    def main(inputs: Any, change: Callable[[Tensor], Any]) -> Any:
        return {**inputs, key: change(inputs[key])} if isinstance(inputs, dict) else change(inputs)

    def cut(inputs: Any, size: int) -> Any:
        return {n: t[:size] for n, t in inputs.items()} if isinstance(inputs, dict) else inputs[:size]

    def raising() -> Iterator[Any]:
        yield good[0]
        raise OwnError

    def spoilt(value: float) -> Callable[[], list[Any]]:
        def change(tensor: Tensor) -> Tensor:
            tensor = tensor.clone()
            tensor.view(-1)[5] = value
            return tensor

        return last(lambda x, y: (main(x, change), y))

    wrong = {"image": {"NaN": float("nan"), "infinity": float("inf")}, "text": {"an unknown token": VOCABULARY}}[kind]
    wrong |= {"a negative token": -1} if kind == "text" else {}
    form: dict[str, Callable[[], Any]] = {
        "None": lambda: None,
        "a number": lambda: 5,
        "a text": lambda: "data/train",
        "no batches": list,
        "an iterator that is spent": lambda: iter([]),
        "batches of None": lambda: [None, None],
        "batches of texts": lambda: ["ab", "cd"],
        "batches of three": each(lambda x, y: (x, y, y)),
        "mappings of labels alone": each(lambda x, y: {"labels": y}),
        "inputs without tensors": each(lambda x, y: ({key: "a text"}, y)),
        "inputs and labels changed over": each(lambda x, y: (y, main(x, lambda t: t) if kind == "image" else x[key])),
        "other shapes at the end": last(lambda x, y: (main(x, lambda t: t[:, None]), y)),
        "nothing but empty batches": each(lambda x, y: (cut(x, 0), y[:0])),
        "a list of samples": lambda: [(x[0] if kind == "image" else x[key][0], y[0]) for x, y in good],
        **{f"{name} at the end": spoilt(value) for name, value in wrong.items()},
    }
    labels: dict[str, Callable[[], Any]] = {
        "no labels": each(lambda x, y: (x,)),
        "a mapping without labels": each(lambda x, y: named(x)),
        "floating labels": each(lambda x, y: (x, y.float())),
        "labels in a column": each(lambda x, y: (x, y[:, None])),
        "one label for all": each(lambda x, y: (x, y[0])),
        "a label too few": last(lambda x, y: (x, y[:-1])),
        "labels beyond the classes": last(lambda x, y: (x, y + CLASSES)),
        "negative labels": last(lambda x, y: (x, y - CLASSES)),
        "labels in words": each(lambda x, y: (x, ["cat"] * len(y))),
        "labels some of which are None": each(lambda x, y: (x, [None, *y[1:].tolist()])),
    }
    right: dict[str, Callable[[], Any]] = {
        "a list": lambda: list(good),
        "mappings": each(lambda x, y: {**named(x), "labels": y}),
        "user's mappings": each(lambda x, y: UserDict({**named(x), "labels": y})),
        "labels in lists": each(lambda x, y: (x, y.tolist())),
        "labels in arrays": each(lambda x, y: (x, y.numpy())),
        "labels of 8 bits": each(lambda x, y: (x, y.to(torch.uint8))),
        "a source without a length": lambda: _Source(good.__iter__),
    }
    if kind == "image":
        images, targets = (torch.cat(part) for part in zip(*good, strict=True))
        right["a loader"] = lambda: DataLoader(TensorDataset(images, targets), batch_size=4)
        right["inputs with gradients"] = each(lambda x, y: (x.clone().requires_grad_(), y))
    table = {name: ("refused", make) for name, make in form.items()}
    table |= {name: ("labels", make) for name, make in labels.items()}
    table |= {name: ("same", make) for name, make in right.items()}
    table |= {
        "an iterator": ("once", lambda: iter(good)),
        "a mapping of sets": ("sets", lambda: {"other": good}),
        "a loader that fails": ("theirs", lambda: _Counted(raising)),
        "inputs in arrays": ("either", each(lambda x, y: (main(x, lambda t: t.numpy()), y))),
        "inputs in lists": ("either", each(lambda x, y: (main(x, lambda t: t.tolist()), y))),
        "an empty batch among others": ("either", lambda: [*good[:3], (cut(good[3][0], 0), good[3][1][:0]), *good[3:]]),
    }
    if kind == "text":
        ids, mask, segments = "input_ids", "attention_mask", "token_type_ids"
        table |= {
            "masks in arrays": ("either", each(lambda x, y: ({**x, mask: x[mask].numpy()}, y))),
            "masks misspelt": ("refused", each(lambda x, y: ({ids: x[ids], "attention_masks": x[mask]}, y))),
            "segments out of range": ("refused", last(lambda x, y: ({**x, segments: x[segments] + 2}, y))),
        }
    return table


class _Source:
    """Batches from a source without a length."""

    def __init__(self, make: Callable[[], Iterator[Any]]) -> None:
        self.make = make

    def __iter__(self) -> Iterator[Any]:
        return self.make()


class _Counted(_Source):
    def __len__(self) -> int:
        return 6


all_cases, check, must_refuse = partial(cases_of, deeds), partial(check_of, deeds), partial(must_refuse_of, deeds)

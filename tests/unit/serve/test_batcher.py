"""Batches are as large as allowed, of one shape, in order; no accepted row is lost, and cancelled rows are not run."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from hydra_ensembles.errors import RequestError
from hydra_ensembles.serve.batcher import Batcher

FOREVER = 3600.0
LIMIT = 60.0  # seconds, a safety net


class Model:
    """Answers each row with itself and its batch size; `hold` blocks the first batch until `release`."""

    def __init__(self, hold: bool = False) -> None:
        self.batches: list[list[Any]] = []
        self.entered, self._gate = threading.Event(), threading.Event()
        if not hold:
            self.release()

    def release(self) -> None:
        self._gate.set()

    def __call__(self, rows: list[Any]) -> list[tuple[Any, int]]:
        self.entered.set()
        assert self._gate.wait(LIMIT)
        self.batches.append(rows)
        if any(row == "poison" for row in rows):
            raise RuntimeError("poison")
        return [(row, len(rows)) for row in rows]


def batcher(model: Callable[..., Any], **changes: Any) -> Batcher:
    settings = {"max_batch": 4, "max_wait": 0.0, "max_queue": 8} | changes
    return Batcher(model, lambda row: type(row), **settings)


def held(**changes: Any) -> tuple[Model, Batcher, Future[Any]]:
    """A model, and a batcher whose thread is blocked on one row, `"first"`."""
    model = Model(hold=True)
    made = batcher(model, **changes)
    (first,) = made.submit(["first"])
    assert model.entered.wait(LIMIT)
    return model, made, first


def results(futures: list[Future[Any]]) -> list[Any]:
    return [future.result(LIMIT) for future in futures]


def test_what_waits_becomes_full_batches_of_one_shape_in_order() -> None:
    seen: list[tuple[int, bool]] = []
    model, made, first = held(observe=lambda rows, seconds: seen.append((rows, seconds >= 0)))
    futures = [future for row in (1, "a", 2, 3, "b", 4, 5) for future in made.submit([row])]
    assert made.waiting == 7
    model.release()
    assert results([first, *futures])[1:] == [(1, 4), ("a", 2), (2, 4), (3, 4), ("b", 2), (4, 4), (5, 1)]
    assert (model.batches, made.waiting) == ([["first"], [1, 2, 3, 4], ["a", "b"], [5]], 0)
    made.close()
    assert seen == [(1, True), (4, True), (2, True), (1, True)]


def test_a_full_batch_does_not_wait_and_another_waits_for_more_until_its_time_ends() -> None:
    made = batcher(Model(), max_wait=FOREVER)
    early = made.submit([1, 2, 3])
    assert results([*early, *made.submit([4])]) == [(row, 4) for row in (1, 2, 3, 4)]
    late = made.submit([5, "a"])
    made.close()  # nothing else ends the wait
    assert results(late) == [(5, 1), ("a", 1)]
    made = batcher(Model(), max_wait=0.001)
    assert results(made.submit([1])) == [(1, 1)]
    made.close()


def test_closing_answers_what_was_taken_in_and_takes_nothing_more() -> None:
    model, made, first = held()
    futures = made.submit([1, 2, 3, 4, 5])
    closing = threading.Thread(target=made.close)
    closing.start()
    model.release()
    closing.join(LIMIT)
    assert not closing.is_alive()
    assert all(future.done() for future in (first, *futures))
    with pytest.raises(RequestError, match="shutting down") as refused:
        made.submit([6])
    assert (refused.value.status, refused.value.retry_after) == (503, 1)


def test_one_bad_row_costs_no_other_its_answer() -> None:
    model, made, _ = held()
    good, bad, other = made.submit(["x", "poison", "y"])
    model.release()
    assert results([good, other]) == [("x", 1), ("y", 1)]
    with pytest.raises(RuntimeError, match="poison"):
        bad.result(LIMIT)
    assert results(made.submit(["z"])) == [("z", 1)]  # the thread survives
    made.close()

"""Batches are as large as allowed, of one shape, in order; no accepted row is lost, and cancelled rows are not run."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from hydra_ensembles.errors import RequestError
from hydra_ensembles.serve.batcher import Engine, ServeSettings

FOREVER = 60_000.0  # milliseconds
LIMIT = 60.0  # seconds, a safety net


class Model:
    """Answers each row with its content and its batch size; `hold` blocks batches until `gate` is set."""

    def __init__(self, hold: bool = False) -> None:
        self.batches: list[list[Any]] = []
        self.entered, self.gate = threading.Event(), threading.Event()
        if not hold:
            self.gate.set()

    def answers(self, rows: list[Any]) -> list[Any]:
        self.entered.set()
        assert self.gate.wait(LIMIT)
        contents = [row.content for row in rows]
        self.batches.append(contents)
        if "poison" in contents:
            raise RuntimeError("poison")
        return [(content, len(rows)) for content in contents]


def row(content: Any) -> Any:
    return SimpleNamespace(content=content, shape=type(content))


async def started(model: Model, **changes: Any) -> Engine:
    settings: Any = {"max_batch": 4, "max_wait": 0.0, "max_queue": 8} | changes
    engine = Engine(None, ServeSettings(**settings), model)  # type: ignore[arg-type]
    await engine.start()
    return engine


async def held(**changes: Any) -> tuple[Model, Engine, "asyncio.Task[Any]"]:
    """A model that is blocked on one row, `"first"`."""
    model = Model(hold=True)
    engine = await started(model, **changes)
    first = asyncio.create_task(engine.answer([row("first")]))
    assert await asyncio.to_thread(model.entered.wait, LIMIT)
    return model, engine, first


async def queued(engine: Engine, *contents: Any) -> list["asyncio.Task[Any]"]:
    tasks = [asyncio.create_task(engine.answer([row(content)])) for content in contents]
    await asyncio.sleep(0)  # they start, in order
    return tasks


def test_what_waits_becomes_full_batches_of_one_shape_in_order() -> None:
    async def whole() -> None:
        model, engine, first = await held()
        seen: list[int] = []
        engine.observe = lambda rows, seconds: seen.append(rows)
        tasks = await queued(engine, 1, "a", 2, 3, "b", 4, 5)
        assert engine.waiting == 7
        model.gate.set()
        found = [answer for (answer,) in await asyncio.gather(first, *tasks)]
        assert found[1:] == [(1, 4), ("a", 2), (2, 4), (3, 4), ("b", 2), (4, 4), (5, 1)]
        assert (model.batches, engine.waiting) == ([["first"], [1, 2, 3, 4], ["a", "b"], [5]], 0)
        await engine.close()
        assert seen == [1, 4, 2, 1]

    asyncio.run(whole())


def test_a_full_batch_does_not_wait_and_another_waits_for_more_until_its_time_ends() -> None:
    async def whole() -> None:
        engine = await started(Model(), max_wait=FOREVER)
        early = await queued(engine, 1, 2, 3)
        assert await engine.answer([row(4)]) == [(4, 4)]
        assert [answer for (answer,) in await asyncio.gather(*early)] == [(1, 4), (2, 4), (3, 4)]
        late = await queued(engine, 5, "a")
        await engine.close()  # nothing else ends the wait
        assert await asyncio.gather(*late) == [[(5, 1)], [("a", 1)]]
        with pytest.raises(RequestError, match="shutting down"):
            await engine.answer([row(6)])
        engine = await started(Model(), max_wait=1)
        assert await engine.answer([row(1)]) == [(1, 1)]
        await engine.close()

    asyncio.run(whole())


def test_a_full_queue_is_said_and_what_was_given_up_is_not_run() -> None:
    async def whole() -> None:
        model, engine, first = await held(max_queue=4)
        kept, given_up = await queued(engine, 1, 2)
        with pytest.raises(RequestError, match="try again") as refused:
            await engine.answer([row(3)] * 3)
        assert (refused.value.status, refused.value.retry_after) == (503, 1)
        given_up.cancel()
        await asyncio.sleep(0)
        model.gate.set()
        assert await asyncio.gather(first, kept) == [[("first", 1)], [(1, 1)]]
        await engine.close()
        assert model.batches == [["first"], [1]]

    asyncio.run(whole())


def test_a_failure_of_the_model_ends_with_its_batch() -> None:
    async def whole() -> None:
        model, engine, first = await held()
        good, bad = await queued(engine, 1, "poison")
        model.gate.set()
        assert await asyncio.gather(first, good) == [[("first", 1)], [(1, 1)]]
        with pytest.raises(RuntimeError, match="poison"):
            await bad
        assert await engine.answer([row("z")]) == [("z", 1)]
        await engine.close()

    asyncio.run(whole())

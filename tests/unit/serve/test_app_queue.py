"""One deadline and one queue for all requests: which are given up, refused, or answered together."""

import asyncio
import base64
import json
import threading
from typing import Any

import httpx
import pytest

from hydra_ensembles.serve.app import make_app
from hydra_ensembles.serve.batcher import Batcher, Runner
from served_models import served
from serving import JSON, LIMIT, opened, picture, settings, talk


class Held:
    """A model thread that blocks inside its first batch until `gate` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.gate, self.batches = threading.Event(), threading.Event(), []
        self._submitted, self._changed = 0, threading.Condition()
        original, submit = Runner.answers, Batcher.submit

        def submitted(batcher: Any, rows: Any) -> Any:
            futures = submit(batcher, rows)
            with self._changed:
                self._submitted += len(rows)
                self._changed.notify_all()
            return futures

        def held(runner: Runner, rows: Any) -> Any:
            if warm:
                self.batches.append(len(rows))
                self.entered.set()
                assert self.gate.wait(LIMIT)
            return original(runner, rows)

        def warmed(runner: Runner, examples: Any) -> None:
            warm_up(runner, examples)
            warm.append(True)

        warm, warm_up = list[bool](), Runner.warm_up
        monkeypatch.setattr(Runner, "warm_up", warmed)
        monkeypatch.setattr(Runner, "answers", held)
        monkeypatch.setattr(Batcher, "submit", submitted)

    def _wait_for(self, rows: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._submitted >= rows, LIMIT)

    async def taken(self, rows: int) -> None:
        """Wait until this many rows were submitted."""
        await asyncio.to_thread(self._wait_for, rows)

    async def first(self, client: httpx.AsyncClient) -> asyncio.Task[httpx.Response]:
        """Send a request and wait until the model runs its row."""
        asked = asyncio.create_task(client.post("/v1/predict", files={"file": picture()}))
        assert await asyncio.to_thread(self.entered.wait, LIMIT)
        return asked


def test_a_request_is_given_up_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines are triggered once the rows are in place, so the clock decides nothing."""
    held, deadlines, timeout = Held(monkeypatch), list[tuple[float | None, asyncio.Timeout]](), asyncio.timeout

    def awaited(seconds: float | None) -> asyncio.Timeout:
        deadlines.append((seconds, timeout(None)))
        return deadlines[-1][1]

    def pass_deadline(seconds: float) -> None:
        (found,) = (one for asked, one in deadlines if asked == seconds)
        found.reschedule(asyncio.get_running_loop().time())
        deadlines.clear()

    async def conversation(client: httpx.AsyncClient) -> None:
        first = await held.first(client)
        pass_deadline(0.05)
        late = await first
        assert late.status_code == 504
        assert "0.05" in late.json()["error"]
        second = asyncio.create_task(client.post("/v1/predict", files={"file": picture()}))
        await held.taken(2)
        pass_deadline(0.05)
        assert (await second).status_code == 504
        stuck = asyncio.create_task(
            client.post("/v1/predict", content=endless(), headers={"Content-Type": "image/png"})
        )
        await asyncio.wait_for(begun.wait(), LIMIT)
        pass_deadline(0.05)
        unread = await stuck
        assert unread.status_code == 408
        assert "0.05" in unread.json()["error"]
        held.gate.set()

    begun = asyncio.Event()

    async def endless() -> Any:
        yield b"some"
        begun.set()
        await asyncio.sleep(LIMIT)

    monkeypatch.setattr("hydra_ensembles.serve.app.asyncio.timeout", awaited)
    talk(make_app(served("image"), settings(timeout=0.05)), conversation)
    assert held.batches == [1]  # the abandoned row in the queue was not run


def test_rows_of_a_client_that_is_gone_are_not_run(monkeypatch: pytest.MonkeyPatch, log: list[str]) -> None:
    held = Held(monkeypatch)
    app = make_app(served("image"), settings())
    scope = {"type": "http", "method": "POST", "path": "/v1/predict", "query_string": b"", "http_version": "1.1"}

    async def conversation(client: httpx.AsyncClient) -> None:
        leave, kept = asyncio.Event(), await held.first(client)
        body = [{"type": "http.request", "body": picture(), "more_body": False}]

        async def receive() -> Any:
            if not body:
                await leave.wait()
            return body.pop() if body else {"type": "http.disconnect"}

        async def send(message: Any) -> None: ...

        gone = asyncio.create_task(app({**scope, "headers": [(b"content-type", b"image/png")]}, receive, send))
        await held.taken(2)
        leave.set()
        await asyncio.wait_for(gone, LIMIT)  # although the model is still blocked
        held.gate.set()
        assert (await kept).status_code == 200

    talk(app, conversation)
    assert held.batches == [1]
    assert any(json.loads(line).get("status") == 499 for line in log)


def test_waiting_rows_are_batched_up_to_a_full_queue_which_is_said_with_a_time_to_come_back(monkeypatch) -> None:
    held, contents = Held(monkeypatch), [picture(seed) for seed in range(4)]

    async def conversation(client: httpx.AsyncClient) -> list[Any]:
        first = await held.first(client)
        several = {"json": {"images": [base64.b64encode(one).decode() for one in contents]}}
        queued = asyncio.create_task(client.post("/v1/predict", **several))
        await held.taken(5)
        full = await client.post("/v1/predict", files={"file": picture()})
        assert (full.status_code, int(full.headers["Retry-After"]) >= 1) == (503, True)
        held.gate.set()
        assert (await first).status_code == 200
        return (await queued).json()["predictions"]

    found = talk(make_app(served("image"), settings(max_queue=4, max_batch=2)), conversation)
    expected = served("image").predict([opened(one) for one in contents]).confidence
    assert [one["confidence"] for one in found] == pytest.approx(expected.tolist(), abs=2e-4)
    assert held.batches == [1, 2, 2]


def test_open_requests_are_bounded_before_their_bodies_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)

    async def conversation(client: httpx.AsyncClient) -> None:
        first = await held.first(client)

        async def never() -> Any:
            pytest.fail("the body was read")
            yield b""

        full = await client.post("/v1/predict", content=never(), headers=JSON)
        assert (full.status_code, full.headers["Retry-After"]) == (503, "1")
        held.gate.set()
        assert (await first).status_code == 200

    talk(make_app(served("image"), settings(max_queue=1, max_batch=1)), conversation)

"""Connections of a server: endless headers are cut off; idle clients and clients that read no answer are dropped."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import suppress
from itertools import repeat
from typing import Any
from unittest.mock import Mock

import pytest

from hydra_ensembles.serve import connection
from hydra_ensembles.serve.app import make_app
from served_models import served
from serving import LIMIT, listening, settings

uvicorn = pytest.importorskip("uvicorn")
START = b"POST /v1/predict HTTP/1.1\r\nhost: here\r\n"
CHUNKED = START + b"content-type: text/plain\r\ntransfer-encoding: chunked\r\n\r\n"
LIVE = b"GET /v2/health/live HTTP/1.1\r\nhost: here\r\n\r\n"


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with listening(make_app(served("text"), settings())) as port:
        yield port


def said(place: socket.socket) -> bytes:
    """Everything a server sends until it closes the connection."""
    content = b""
    with suppress(ConnectionResetError):  # the server closed with unread data
        while part := place.recv(1 << 16):
            content += part
    return content


@pytest.mark.parametrize(
    ("start", "more"),
    [
        (START + b"name: ", b"x" * 1000),
        (CHUNKED + b"5\r\nhello\r\n0\r\n", b"name: value\r\n" * 100),  # trailers after a body
        (CHUNKED + b"5;", b"x" * 1000),
    ],
)
def test_a_head_without_an_end_is_cut(start: bytes, more: bytes, port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), LIMIT) as place:
        place.sendall(start)
        with suppress(ConnectionResetError, BrokenPipeError):
            for part in repeat(more, 16 * connection.HEAD_BYTES // len(more)):
                place.sendall(part)
        said(place)  # returns, so it was closed
    with socket.create_connection(("127.0.0.1", port), LIMIT) as place:  # other connections still work
        place.sendall(LIVE)
        assert b" 200 " in place.recv(1 << 16)


@pytest.mark.parametrize("sent", [START, LIVE + LIVE])
def test_whoever_sends_no_further_request_is_let_go(sent: bytes, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "CLIENT_TIMEOUT", 0.2)
    with socket.create_connection(("127.0.0.1", port), LIMIT) as place:
        place.sendall(sent)
        assert said(place).count(b" 200 ") == sent.count(LIVE)


def test_requests_without_number_are_cut(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), LIMIT) as place:
        place.sendall(3 * connection.PIPELINED * LIVE)  # at once: no answer is sent before the last request is read
        assert b" 400 " in said(place)


def test_whoever_reads_no_answer_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "CLIENT_TIMEOUT", 0.0)

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.Event().wait()  # never answers

    async def talk() -> None:
        ended = asyncio.Event()
        transport = Mock(asyncio.Transport, get_extra_info=lambda name: None, abort=ended.set)
        place = connection.bounded_connection()(
            uvicorn.Config(answer, lifespan="off"), uvicorn.server.ServerState(), {}
        )
        place.connection_made(transport)
        place.data_received(LIVE)
        place.pause_writing()
        place.data_received(LIVE)  # sending more requests is not reading
        async with asyncio.timeout(LIMIT):
            await ended.wait()
        place.resume_writing()  # otherwise the application would not end

    asyncio.run(talk())

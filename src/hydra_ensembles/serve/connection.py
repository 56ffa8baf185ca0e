"""Connections of the server, with limits that uvicorn does not have: on request headers and on idle time.

Whoever has no key can open connections and send heads (or what may follow a body), so neither may cost what grows: a
head without an end would fill the memory and, as it is put together anew with every part that arrives, stop everybody
else; so would heads without number, all sent before the first is answered; connections on which no request ever comes,
or no answer is ever read, would use up the files that a process may have open.
"""

import asyncio
from typing import Any

from .._utils import require

KEPT_OPEN = 75  # seconds that an idle connection stays: longer than proxies keep theirs, or they would lose requests
TURN = KEPT_OPEN + 15.0  # seconds in which a client has to send the head of a request, or to read on in an answer
HEAD_BYTES = 1 << 18  # that may arrive before a head ends, but for those that arrive with its end
PIPELINED = 100  # requests that may wait for the answer to an earlier one of their connection


def bounded_connection() -> Any:
    """A class of connections, for uvicorn: closed when a client lets its turn pass, or sends too much."""
    protocol = require("uvicorn.protocols.http.httptools_impl", extra="serve").HttpToolsProtocol

    class Connection(protocol):  # type: ignore[misc, valid-type]
        """Calls of asyncio and of the parser, each with what it means for the limits."""

        unread = 0  # bytes since the last head or piece of a body
        deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:
            """Wait for a request."""
            super().connection_made(transport)
            self.see_whose_turn()

        def connection_lost(self, exc: Exception | None) -> None:
            """Wait for nothing more."""
            self.stop_waiting()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            """Parse what came, unless too much of it was neither a head nor of a body."""
            if self.unread > HEAD_BYTES:
                self.send_400_response("The head of the request is too long.")
                return
            self.unread += len(data)
            super().data_received(data)

        def on_headers_complete(self) -> None:
            """A head has ended: now it is our turn."""
            self.unread = 0
            if len(self.pipeline) >= PIPELINED:
                raise ValueError("too many requests")  # which the parser turns into one of its own
            super().on_headers_complete()
            self.see_whose_turn()

        def on_body(self, body: bytes) -> None:
            """Take a piece of a body, whose length the application limits."""
            self.unread = 0
            super().on_body(body)

        def on_response_complete(self) -> None:
            """Wait for another request, unless it is there."""
            super().on_response_complete()
            self.see_whose_turn()

        def pause_writing(self) -> None:
            """Wait until some of an answer is read."""
            super().pause_writing()
            self.see_whose_turn()

        def resume_writing(self) -> None:
            """Some of it was."""
            super().resume_writing()
            self.see_whose_turn()

        def see_whose_turn(self) -> None:
            """Where it is the client's, end the connection after a time, with what it has not read of an answer."""
            if not (self.flow.write_paused or self.cycle is None or self.cycle.response_complete):
                self.stop_waiting()
            elif self.deadline is None:
                self.deadline = self.loop.call_later(TURN, self.transport.abort)

        def stop_waiting(self) -> None:
            """Leave it open."""
            if self.deadline is not None:
                self.deadline.cancel()
                self.deadline = None

    return Connection

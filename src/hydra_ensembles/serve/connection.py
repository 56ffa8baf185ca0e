"""Connections of the server, with limits that uvicorn does not have: on request headers and on idle time.

Clients without a key can open connections and send headers (or data after a body), so the cost of both must be
bounded. Without limits, an endless header would fill the memory and, because it is copied again with every part that
arrives, block all other clients; so would any number of pipelined requests sent before the first response. Connections
without a request, or whose client does not read the response, would use up the process's file descriptors.
"""

import asyncio
from typing import Any

from .._utils import require

KEEP_ALIVE = 75  # seconds an idle connection stays open; longer than in proxies, which would lose requests otherwise
CLIENT_TIMEOUT = KEEP_ALIVE + 15.0  # seconds to send the headers of a request, or to continue reading a response
HEAD_BYTES = 1 << 18  # bytes that may arrive before the headers end, not counting the chunk they end in
PIPELINED = 100  # requests that may wait for the response to an earlier one on the same connection


def bounded_connection() -> Any:
    """A protocol class for uvicorn that closes the connection if a client is too slow or sends too much."""
    protocol = require("uvicorn.protocols.http.httptools_impl", extra="serve").HttpToolsProtocol

    class Connection(protocol):  # type: ignore[misc, valid-type]
        """Callbacks from asyncio and the HTTP parser, with the limits added; each asks anew whose turn it is."""

        unread = 0  # bytes since the last complete headers or body chunk
        deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self.see_whose_turn()

        def connection_lost(self, exc: Exception | None) -> None:
            self.stop_waiting()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            """Parse the data, unless too many bytes have arrived that belong to neither complete headers nor a body."""
            if self.unread > HEAD_BYTES:
                self.send_400_response("The head of the request is too long.")
                return
            self.unread += len(data)
            super().data_received(data)

        def on_headers_complete(self) -> None:
            """Reset the byte count, limit pipelining, and stop the timer: now the server has to act."""
            self.unread = 0
            if len(self.pipeline) >= PIPELINED:
                raise ValueError("too many requests")  # the parser wraps it in its own exception
            super().on_headers_complete()
            self.see_whose_turn()

        def on_body(self, body: bytes) -> None:
            self.unread = 0  # the application limits the size of bodies
            super().on_body(body)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self.see_whose_turn()

        def pause_writing(self) -> None:
            super().pause_writing()
            self.see_whose_turn()

        def resume_writing(self) -> None:
            super().resume_writing()
            self.see_whose_turn()

        def see_whose_turn(self) -> None:
            """Start the timer while the client has to act, otherwise stop it; when it fires, unsent data is dropped."""
            if not (self.flow.write_paused or self.cycle is None or self.cycle.response_complete):
                self.stop_waiting()
            elif self.deadline is None:
                self.deadline = self.loop.call_later(CLIENT_TIMEOUT, self.transport.abort)

        def stop_waiting(self) -> None:
            if self.deadline is not None:
                self.deadline.cancel()
                self.deadline = None

    return Connection

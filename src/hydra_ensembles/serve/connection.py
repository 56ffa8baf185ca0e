"""Connections of the server, with limits that uvicorn does not have: on the heads of requests, and on idleness.

Whoever has no key can open connections and send heads (or what may follow a body), so neither may cost what grows: a
head without an end would fill the memory and, as it is put together anew with every part that arrives, stop everybody
else; connections on which no request ever comes would use up the files that a process may have open.
"""

import asyncio
from typing import Any

from .._utils import require

KEPT_OPEN = 75  # seconds that an idle connection stays: longer than proxies keep theirs, or they would lose requests
HEAD_WAIT = KEPT_OPEN + 15.0  # seconds until the head of the next request is there
HEAD_BYTES = 1 << 18  # that may arrive before a head ends, but for those that arrive with its end


def bounded_connection() -> Any:
    """A class of connections, for uvicorn: closed when no request is sent in time, or a head that is too long."""
    protocol = require("uvicorn.protocols.http.httptools_impl", extra="serve").HttpToolsProtocol

    class Connection(protocol):  # type: ignore[misc, valid-type]
        """Calls of asyncio and of the parser, each with what it means for the limits."""

        unread = 0  # bytes since the last head or piece of a body
        deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:
            """Wait for a request."""
            super().connection_made(transport)
            self.await_head()

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
            self.stop_waiting()
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            """Take a piece of a body, whose length the application limits."""
            self.unread = 0
            super().on_body(body)

        def on_response_complete(self) -> None:
            """Wait for another request, unless it is there."""
            super().on_response_complete()
            if self.cycle.response_complete:
                self.await_head()

        def await_head(self) -> None:
            """Close the connection after a time."""
            self.stop_waiting()
            self.deadline = self.loop.call_later(HEAD_WAIT, self.timeout_keep_alive_handler)

        def stop_waiting(self) -> None:
            """Leave it open."""
            if self.deadline is not None:
                self.deadline.cancel()

    return Connection

"""Servers for tests, in this process or on a loopback port, and images to send to them."""

import asyncio
import io
import socket
import struct
import threading
import zlib
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import numpy as np
from PIL import Image

from hydra_ensembles.model.ensemble import Ensemble
from hydra_ensembles.serve.app import make_app
from hydra_ensembles.serve.batcher import ServeSettings
from pictures import encoded

LIMIT = 120  # seconds, a safety net
QUICK: dict[str, Any] = {"max_wait": 0.0, "max_batch": 4, "max_queue": 64, "timeout": float(LIMIT)}


def settings(**changes: Any) -> ServeSettings:
    return ServeSettings(**(QUICK | changes))


def picture(seed: int = 0, size: tuple[int, int] = (20, 16), format: str = "PNG") -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return encoded(Image.fromarray(pixels), format)


def png(width: int, height: int, kind: int = 2, pixels: bytes = bytes(100)) -> bytes:
    """A PNG whose header claims this size and colour type (2: RGB, 0: grey), followed by these bytes."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n"


def opened(content: bytes) -> Image.Image:
    return Image.open(io.BytesIO(content))


def turned() -> bytes:
    """A photograph stored on its side, with an EXIF rotation."""
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(opened(picture()), "JPEG", exif=exif)


def talk(app: Any, conversation: Callable[[httpx.AsyncClient], Coroutine[Any, Any, Any]]) -> Any:
    """Start an application in this process, run a conversation with it, and stop it."""

    async def whole() -> Any:
        async with app.router.lifespan_context(app):
            transport = httpx.ASGITransport(app, raise_app_exceptions=True)
            async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=LIMIT) as client:
                return await conversation(client)

    return asyncio.run(whole())


def ask(model: Ensemble, method: str, path: str, settings: ServeSettings, **options: Any) -> httpx.Response:
    """Send one request to a new server."""
    return talk(make_app(model, settings), lambda client: client.request(method, path, **options))


@contextmanager
def listening(app: Any) -> Iterator[int]:
    """Serve an application on a real socket; yields its port."""
    place = socket.create_server(("127.0.0.1", 0))
    started = threading.Event()

    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            started.set()

    server = Server(uvicorn.Config(app, log_config=None, access_log=False))
    thread = threading.Thread(target=server.run, args=([place],))
    thread.start()
    try:
        assert started.wait(LIMIT)
        yield place.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(LIMIT)
        place.close()


def typed(kind: str) -> dict[str, str]:
    return {"Content-Type": kind}


JSON = typed("application/json")
MODEL = "/v2/models/model"


def pixels(values: list[float]) -> dict[str, Any]:
    """A request in the Open Inference Protocol."""
    shape = [len(values) // 192, 3, 8, 8]
    return {"inputs": [{"name": "pixel_values", "shape": shape, "datatype": "FP32", "data": values}]}

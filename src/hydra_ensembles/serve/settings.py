"""How a model is served: where and to whom, in which batches, within which limits."""

import math
import os
import re
from dataclasses import dataclass, field
from typing import Literal

import torch

from ..errors import ConfigError
from ..schema import require_types

API_KEY = "HYDRA_API_KEY"
"""Environment variable with the key that clients have to give: command lines are seen by everyone on a machine."""

Precision = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class ServeSettings:
    """How a model is served.

    Attributes:
        host: Address to listen on; 0.0.0.0 for every interface.
        port: Port to listen on, 0 for any that is free.
        uds: Unix socket to listen on instead, for this user alone.
        name: What clients call the model.
        api_key: Key that clients have to give; better in the environment, as HYDRA_API_KEY.
        max_batch: Most samples that the model sees at once.
        max_wait: Milliseconds that a sample waits for others to make up a batch.
        max_queue: Samples, and requests, taken in at once; further ones are told to come back (503).
        timeout: Seconds after which a request is given up (504).
        workers: Model threads; on several GPUs one after another takes the next.
        max_body: Megabytes that a request may have.
        max_pixels: Megapixels that the images of a request may have.
        max_characters: Characters that a text may have.
        precision: Floating type to compute in; that of the model if not given.
        compile: Compile the model for the batch sizes it will see.
        warm_up: Run every batch size once before the first request.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    name: str = "model"
    api_key: str | None = field(default=None, repr=False)
    max_batch: int = 16
    max_wait: float = 5.0
    max_queue: int = 256
    timeout: float = 30.0
    workers: int = 1
    max_body: float = 16.0
    max_pixels: float = 50.0
    max_characters: int = 100_000
    precision: Precision | None = None
    compile: bool = False
    warm_up: bool = True

    def __post_init__(self) -> None:
        """Check every number once, here."""
        require_types(self)
        for name, least, most in (
            ("port", 0, 65535),
            ("max_batch", 1, 4096),
            ("max_wait", 0, 60_000),
            ("max_queue", 1, 1_000_000),
            ("timeout", 0.001, 86_400),
            ("workers", 1, 64),
            ("max_body", 0.001, 4096),
            ("max_pixels", 0.001, 1000),
            ("max_characters", 1, 100_000_000),
        ):
            value = getattr(self, name)
            if not least <= value <= most or not math.isfinite(value):
                raise ConfigError(f"{name} must be between {least} and {most}, got {value}")
        if self.max_queue < self.max_batch:
            raise ConfigError(f"max_queue is {self.max_queue}, less than max_batch, {self.max_batch}; raise it")
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,100}", self.name):
            raise ConfigError(f"name is {self.name!r}; it is part of addresses: give letters, digits, and _ . - alone")
        key = self.key
        if key is not None and (len(key) < 8 or not key.isascii() or not key.isprintable() or key != key.strip()):
            raise ConfigError("the API key is shorter than 8 characters, or has some that cannot stand in a header")

    @property
    def key(self) -> str | None:
        """The key that clients have to give, from the settings or the environment; None where none is asked for."""
        return self.api_key if self.api_key is not None else os.environ.get(API_KEY)

    @property
    def dtype(self) -> torch.dtype | None:
        """Floating type to compute in, if it is not the model's."""
        found: torch.dtype | None = None if self.precision is None else getattr(torch, self.precision)
        return found

"""A seed of any study: its models and rankings are made once, by whichever process needs them first, and cached."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

import hydra_ensembles as he
from hydra_ensembles import HeadRanking
from hydra_ensembles._utils import derive_seed, require_same_run
from hydra_ensembles.files import read_json, write_json

from .samples import CIRCUIT_MEMORY, alone

REPORT = "report"  # folder of a seed: outputs of its rows on the test sets
RANKED = "rankings"  # folder of a seed: rankings of heads
CHOICES = "choices"  # folder of a study or a seed: the settings that held-out data chose for rows
Made = TypeVar("Made")
Model = TypeVar("Model", he.Ensemble, he.DualEncoder)


def slug(row: str) -> str:
    """The name of a row in file names."""
    return re.sub(r"[^a-z0-9]+", "-", row.lower()).strip("-")


def derived_seed(*parts: int | str, bits: int = 31) -> int:
    """A seed that depends only on the given parts, the same on every machine."""
    return derive_seed(*parts) % (1 << bits)


@contextmanager
def precise_products() -> Iterator[None]:
    """Multiply in full float32 where studies otherwise use TF32: small differences decide rankings."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class Once:
    """Caches values in memory by key."""

    def __init__(self) -> None:
        self._once: dict[Any, Any] = {}

    def once(self, key: Any, make: Callable[[], Made]) -> Made:
        """The cached value of a key, made on first use."""
        if key not in self._once:
            self._once[key] = make()
        return self._once[key]


class SeedFolder(Once):
    """What one seed of a study makes, cached in its folder: loaded if it exists, otherwise made and saved."""

    def __init__(self, study: Path, number: int, device: torch.device) -> None:
        super().__init__()
        self.study, self.number, self.device = study, number, device
        self.folder = study / f"seed-{number}"

    def require_same(self, path: Path, identity: Any) -> None:
        """Raise if the file in the folder says that its models were made with other settings."""
        with alone(path):
            if not path.exists():
                write_json(path, identity)
        require_same_run(read_json(path), identity, path.parent, "the study")

    def reported(self, row: str) -> Path:
        """Path of a row's report; its columns are beside it."""
        return self.folder / REPORT / f"{slug(row)}.json"

    def derived(self, *purpose: str | int) -> int:
        """A random seed for a purpose."""
        return derived_seed(self.number, *purpose)

    def kept(self, name: str, make: Callable[[], Model]) -> Model:
        """A model by name, loaded from the folder or made."""
        folder = self.folder / "models" / name
        self._made(folder, lambda: make().save_pretrained(folder))
        return cast(Model, he.load(folder, device=self.device).eval())

    def ranked(self, name: str, rank: Callable[[], HeadRanking]) -> HeadRanking:
        """A ranking by name; computed in full float32."""
        path = self.folder / RANKED / f"{name}.json"
        self._made(path, lambda: precise_products()(rank)().save(path))
        return HeadRanking.load(path)

    def extracted(self, name: str, sides: Callable[[], tuple[Any, ...]], **how: Any) -> HeadRanking:
        """An exact circuit by name.

        `sides` returns the model, ID and OOD batches, and optionally class names; not called for a cached circuit.
        """

        def extract() -> HeadRanking:
            model, inside, outside, *names = sides()
            settings: dict[str, Any] = {"method": "exact", "max_memory": CIRCUIT_MEMORY, "progress": False, **how}
            settings |= {"class_names": names[0]} if names else {}
            return he.extract_circuit(model, inside, outside, **settings)

        return self.ranked(name, extract)

    def _made(self, path: Path, make: Callable[[], object]) -> None:
        with alone(path):
            if not path.exists():
                start = time.monotonic()
                make()
                name = path.name.removesuffix(".json")
                seconds = time.monotonic() - start
                print(f"{self.study.name} seed {self.number}: {name} {seconds:.0f} s", flush=True)

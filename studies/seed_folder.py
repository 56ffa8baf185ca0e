"""The run folder of one seed: every product is a file that appears in one piece; what is there is not made again."""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hydra_ensembles._utils import write_atomically
from hydra_ensembles.errors import CheckpointError
from hydra_ensembles.heads.ranking import HeadRanking

Arrays = Mapping[str, npt.NDArray[Any]]


class NamedRecipe(Protocol):
    """What a folder needs to know of a recipe: whose it is."""

    @property
    def name(self) -> str:
        """Name of the study."""
        ...

    @property
    def digest(self) -> str:
        """A short name for the whole recipe."""
        ...


class SeedFolder:
    """Products of one seed of a study by name."""

    def __init__(self, output: Path, recipe: NamedRecipe, seed: int) -> None:
        self.study = output / recipe.name
        self.path = self.study / f"seed-{seed}"
        self.label = f"{recipe.name} seed {seed}"
        claim(self.study / "recipe.json", recipe)

    def tensors(self, name: str, make: Callable[[], Mapping[str, Tensor]], device: torch.device) -> dict[str, Tensor]:
        """Tensors saved under `name`, or those `make` gives, saved."""
        path = self.path / f"{name}.safetensors"
        if not path.exists():
            with self.timed(name):
                made = {key: tensor.detach().contiguous() for key, tensor in make().items()}
            path.parent.mkdir(parents=True, exist_ok=True)
            # many and large: renamed into place, but not forced to disk one by one
            temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
            save_file({key: tensor.cpu().clone() for key, tensor in made.items()}, temporary)
            os.replace(temporary, path)
            return made
        return {key: tensor.to(device) for key, tensor in load_file(path).items()}

    def ranking(self, name: str, make: Callable[[Path], HeadRanking]) -> HeadRanking:
        """A saved ranking, or the one `make` gives, which gets a place for a journal."""
        path = self.path / "rankings" / f"{name}.json"
        if path.exists():
            return HeadRanking.load(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with self.timed(f"rankings/{name}"):
            ranking = make(path.parent)
        ranking.save(path)
        return ranking

    def arrays(self, name: str, make: Callable[[], Arrays]) -> dict[str, npt.NDArray[Any]]:
        """Arrays saved under `name`, or those `make` gives, saved."""
        path = self.path / f"{name}.npz"
        if not path.exists():
            with self.timed(name):
                made = make()
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{path.stem}.{os.getpid()}.tmp.npz")
            np.savez(temporary, **dict(made))  # type: ignore[arg-type]
            os.replace(temporary, path)
        with np.load(path) as stored:
            return {key: stored[key] for key in stored.files}

    def facts(self, name: str, make: Callable[[], Any]) -> Any:
        """Plain data saved under `name`, or what `make` gives, saved."""
        path = self.path / f"{name}.json"
        if not path.exists():
            write_atomically(path, (json.dumps(make(), indent=1) + "\n").encode())
        return json.loads(path.read_text(encoding="utf-8"))

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Say how long something took, and note it in `seconds.jsonl`."""
        start = time.perf_counter()
        yield
        seconds = round(time.perf_counter() - start, 2)
        print(f"{self.label}: {name} {seconds:.2f} s", flush=True)
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / "seconds.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"what": name, "seconds": seconds}) + "\n")


def claim(path: Path, recipe: NamedRecipe) -> None:
    """Write down whose folder it is, or refuse one of another recipe."""
    if path.exists():
        found = json.loads(path.read_text(encoding="utf-8")).get("digest")
        if found != recipe.digest:
            raise CheckpointError(
                f"{path.parent} holds a run of recipe {found}, this one is {recipe.digest}; give another output "
                "folder, or delete it to start over"
            )
        return
    write_atomically(path, (json.dumps({"study": recipe.name, "digest": recipe.digest}) + "\n").encode())

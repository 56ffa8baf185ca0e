"""What the benchmarks share: the folder they lie in, and a second checkout to compare with."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # `studies` lies beside the benchmarks, which import it after this file


def synchronize(device: str | torch.device) -> None:
    """Wait for the device."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def by_turns(script: str, other: Path, arguments: Sequence[str], turns: int, key: str) -> list[list[list[Any]]]:
    """Rows that a script stores with the package of this checkout and with that of another, by checkout and turn.

    A turn is a process, called with the arguments but for `--against`; every time another checkout goes first.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--against")
    command = [sys.executable, script, *parser.parse_known_args(arguments)[1], "--output"]
    stored: list[list[list[Any]]] = [[], []]
    with TemporaryDirectory() as folder:
        for turn in range(turns):
            for index in sorted((0, 1), reverse=turn % 2 == 1):
                source, path = (ROOT, other)[index].resolve() / "src", Path(folder) / f"{turn}-{index}.json"
                if not (source / "hydra_ensembles").is_dir():
                    raise SystemExit(f"{other} has no package in src")
                subprocess.run([*command, str(path)], env={**os.environ, "PYTHONPATH": str(source)}, check=True)
                stored[index].append(json.loads(path.read_text())[key])
    return stored

"""Shared by the benchmarks: the import path of `studies`, and comparison with a second checkout."""

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
sys.path.append(str(ROOT))  # `studies` is next to the benchmarks, which import it after this file


def synchronize(device: str | torch.device) -> None:
    """Wait for the device."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def by_turns(script: str, other: Path, arguments: Sequence[str], turns: int, key: str) -> list[list[list[Any]]]:
    """Rows that a script stores with this checkout's package and with another's, by checkout and turn.

    Each turn runs a process with the arguments except `--against`; the checkouts alternate in going first.
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

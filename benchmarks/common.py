"""What the benchmarks share: the folder they lie in, and a second checkout to compare with."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import hydra_ensembles

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # `studies` lies beside the benchmarks, which import it after this file


def synchronize(device: str | torch.device) -> None:
    """Wait for the device."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


# --- another checkout, side by side ----------------------------------------------------------------------------------


class Worker:
    """A process that runs a benchmark script with the package of one checkout, and answers one request at a time.

    The script, called with `--worker`, has to call `serve`.
    """

    def __init__(self, script: str, checkout: Path, arguments: Sequence[str]) -> None:
        source = str(checkout.resolve() / "src")
        self.process = subprocess.Popen(
            [sys.executable, script, "--worker", *arguments],
            env={**os.environ, "PYTHONPATH": source},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        package = self.ask("package")
        if not package.startswith(source):
            raise SystemExit(f"{checkout} has no package in src; the worker found {package}")

    def ask(self, request: str, **arguments: Any) -> Any:
        """Send a request and wait for its answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps({"request": request, **arguments}), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"the worker ended with {self.process.wait()}; its error stands above")
        return json.loads(answer)


@contextmanager
def checkouts(script: str, other: Path, arguments: Sequence[str]) -> Iterator[list[Worker]]:
    """A worker with this checkout, and one with another; both end with the block."""
    workers = [Worker(script, folder, arguments) for folder in (ROOT, other)]
    yield workers
    for worker in workers:
        worker.process.communicate()


def take_turns(workers: Sequence[Worker], turns: int, request: str, **arguments: Any) -> list[list[Any]]:
    """All answers of each worker to the same request; every turn another one goes first."""
    answers: list[list[Any]] = [[] for _ in workers]
    for turn in range(turns):
        for index in sorted(range(len(workers)), reverse=turn % 2 == 1):
            answers[index].append(workers[index].ask(request, **arguments))
    return answers


def serve(handlers: dict[str, Callable[..., Any]]) -> None:
    """Answer the requests of a `Worker` until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries and compilers print must not stand among the answers
    for line in sys.stdin:
        arguments = json.loads(line)
        request = arguments.pop("request")
        answer = hydra_ensembles.__file__ if request == "package" else handlers[request](**arguments)
        print(json.dumps(answer), file=answers, flush=True)

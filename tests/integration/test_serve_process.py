"""`hydra-ensembles serve` as a process: it prints its address, and after a signal answers all requests and exits."""

import base64
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from processes import environment
from served_models import served
from serving import LIMIT, opened, picture

ENDED_INSIDE = """
import os, runpy, signal, sys
from hydra_ensembles.serve.batcher import Runner

original, warm_up, warm = Runner.answers, Runner.warm_up, []
number = getattr(signal, sys.argv.pop(1))

def answers(runner, rows):
    if warm:
        os.kill(os.getpid(), number)  # the process is told to end while the model computes
    return original(runner, rows)

def warmed(runner, examples):
    warm_up(runner, examples)
    warm.append(True)

Runner.answers, Runner.warm_up = answers, warmed
runpy.run_module("hydra_ensembles", run_name="__main__")
"""

COMMON = ("--max-batch", 1, "--name", "one", "--set", f"timeout={LIMIT}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "model"
    served("image").save_pretrained(path)
    for file in path.iterdir():
        file.chmod(0o444)
    path.chmod(0o555)  # a server writes nothing here
    return path


@contextmanager
def process(*command: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A running server, and the line with its address."""
    arguments = [sys.executable, *map(str, command)]
    pipe = subprocess.PIPE
    child = subprocess.Popen(arguments, env=environment(), stdout=pipe, stderr=pipe, text=True)
    try:
        line = next((line for line in child.stderr or () if line.startswith("serving")), "")
        assert line, child.stderr and child.stderr.read()
        yield child, line
    finally:
        child.kill()
        child.communicate()


@pytest.mark.ci  # starts a server
def test_a_signal_ends_the_server_when_all_is_answered(folder: Path) -> None:
    with process("-c", ENDED_INSIDE, "SIGTERM", "serve", folder, "--port", 0, *COMMON) as (child, line):
        address = next(word for word in line.split() if word.startswith("http"))
        with httpx.Client(base_url=address, timeout=LIMIT) as client:
            assert client.get("/v2/health/ready").status_code == 200
            images = [base64.b64encode(picture(seed)).decode() for seed in range(4)]  # one row runs, three wait
            answer = client.post("/v1/predict", json={"images": images})
        output, errors = child.communicate(timeout=LIMIT)
    assert answer.status_code == 200
    expected = served("image").predict([opened(picture(seed)) for seed in range(4)])
    assert [one["label"] for one in answer.json()["predictions"]] == expected.names()
    assert (child.returncode, "Traceback" in errors) == (0, False), errors
    assert '"rows": 4' in output


@pytest.mark.ci
def test_a_signal_while_the_model_is_warmed_ends_at_once(folder: Path) -> None:
    waits = "from threading import Event\nRunner.warm_up = lambda *_: (os.kill(os.getpid(), number), Event().wait())"
    program = ENDED_INSIDE.replace("Runner.answers, Runner.warm_up = answers, warmed", waits)
    command = [sys.executable, "-c", program, "SIGINT", "serve", str(folder), "--port", "0"]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=LIMIT)
    assert (ended.returncode, "Traceback" in ended.stderr) == (130, False), ended.stderr

"""`hydra-ensembles serve` as a process: it prints its address, and after a signal answers all requests and exits."""

import base64
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from cli_cases import fail
from hydra_ensembles.serve.app import listening
from processes import environment
from served_models import served
from serving import LIMIT, opened, picture, settings

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


@pytest.mark.ci  # starts servers
def test_a_socket_is_for_one_user_and_goes_with_the_server_when_all_is_answered(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a socket path has at most 107 bytes, and this folder's may be longer
    place = Path("hydra.sock")
    options = ("serve", folder, "--uds", place, *COMMON)
    with process("-c", ENDED_INSIDE, "SIGTERM", *options) as (child, line):
        assert f"unix:{place}" in line
        assert stat.S_IMODE(place.stat().st_mode) == 0o600
        fail("serve", folder, "--uds", place)  # a second server does not take it over
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(place)), timeout=LIMIT) as client:
            assert client.get("http://here/v2/health/ready").status_code == 200
            images = [base64.b64encode(picture(seed)).decode() for seed in range(4)]  # one row runs, three wait
            answer = client.post("http://here/v1/predict", json={"images": images})
        output, errors = child.communicate(timeout=LIMIT)
    assert answer.status_code == 200
    expected = served("image").predict([opened(picture(seed)) for seed in range(4)])
    assert [one["label"] for one in answer.json()["predictions"]] == expected.names()
    assert (child.returncode, "Traceback" in errors) == (0, False), errors
    assert '"rows": 4' in output
    assert not place.exists()


def test_a_socket_left_by_a_killed_server_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("left.sock")
    socket.create_server(str(path), family=socket.AF_UNIX).close()  # as left by a kill
    assert path.is_socket()
    with listening(settings(uds=str(path))):
        assert path.is_socket()
    assert not path.exists()


@pytest.mark.ci
def test_a_signal_while_the_model_is_warmed_ends_at_once(folder: Path) -> None:
    waits = "from threading import Event\nRunner.warm_up = lambda *_: (os.kill(os.getpid(), number), Event().wait())"
    program = ENDED_INSIDE.replace("Runner.answers, Runner.warm_up = answers, warmed", waits)
    command = [sys.executable, "-c", program, "SIGINT", "serve", str(folder), "--port", "0"]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=LIMIT)
    assert (ended.returncode, "Traceback" in ended.stderr) == (130, False), ended.stderr


def test_a_port_that_is_taken_is_said(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert str(port) in fail("serve", folder, "--port", port)

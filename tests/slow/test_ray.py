"""On Ray: a replica killed under load costs its own requests alone, which are told to come back."""

import itertools
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from hydra_ensembles.serve.app import ray_app
from hydra_ensembles.serve.batcher import API_KEY
from processes import environment
from served_models import served
from serving import LIMIT, opened, picture, settings

ray = pytest.importorskip("ray")
serve = pytest.importorskip("ray.serve")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray warns a lot, in its own threads

REQUESTS, CLIENTS, KILLED_AFTER = 200, 16, 40
KEY = {"X-API-Key": "correct horse"}


@pytest.fixture(scope="module")
def order(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file; if it exists, the next replica with a batch removes it and dies."""
    return tmp_path_factory.mktemp("order") / "die"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory, order: Path) -> Iterator[str]:
    """A local cluster with two replicas."""
    place, folder = str(order), tmp_path_factory.mktemp("served") / "model"

    def mortal() -> None:
        """Runs first in every process of the cluster."""
        import os

        from hydra_ensembles.serve.batcher import Runner

        original = Runner.answers

        def answered(self: Any, rows: Any) -> Any:
            try:
                os.unlink(place)
            except FileNotFoundError:
                return original(self, rows)
            os._exit(1)

        Runner.answers = answered

    served("image").save_pretrained(folder)
    variables = {name: environment()[name] for name in ("PYTHONPATH", "OMP_NUM_THREADS")}
    patch = pytest.MonkeyPatch()
    patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        object_store_memory=100 << 20,
        runtime_env={"env_vars": variables, "worker_process_setup_hook": mortal},
        log_to_driver=False,
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    with pytest.MonkeyPatch.context() as here:
        here.setenv(API_KEY, "correct horse")  # only in this process, not in the cluster's
        application = ray_app(
            folder, settings(name="on-ray", max_queue=256), num_replicas=2, ray_actor_options={"num_cpus": 0.5}
        )
    serve.run(application)
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()
    ray.shutdown()
    patch.undo()


def replicas() -> list[str]:
    names = (one["name"] for one in ray.util.list_named_actors(all_namespaces=True))
    return [name for name in names if "Model" in name]


def test_a_replica_dies_under_load_with_a_batch_in_its_hands(address: str, order: Path) -> None:
    assert len(replicas()) == 2
    answered, count = threading.Lock(), itertools.count(1)

    def one(seed: int) -> httpx.Response:
        answer = client.post("/v1/predict", files={"file": picture(seed % 20)})
        with answered:
            if next(count) == KILLED_AFTER:
                order.touch()
        return answer

    with httpx.Client(base_url=address, headers=KEY, timeout=LIMIT) as client, ThreadPoolExecutor(CLIENTS) as pool:
        answers = list(pool.map(one, range(REQUESTS)))
    assert not order.exists()  # the replica died
    refused = [answer for answer in answers if answer.status_code != 200]
    assert len(refused) <= CLIENTS
    assert all(answer.status_code >= 500 for answer in refused)
    expected = served("image").predict([opened(picture(seed)) for seed in range(20)])
    for index, answer in enumerate(answers):
        if answer not in refused:
            (found,) = answer.json()["predictions"]
            assert found["label"] == expected.names()[index % 20]
            assert found["confidence"] == pytest.approx(expected.confidence[index % 20].item(), abs=2e-4)


def test_routes_are_those_of_the_server(address: str) -> None:
    with httpx.Client(base_url=address, headers=KEY, timeout=LIMIT) as client:
        assert client.get("/v2/health/ready").status_code == 200
        assert client.get("/v2/models/on-ray").json()["name"] == "on-ray"
        assert "hydra_answers_total" in client.get("/metrics").text
        assert client.post("/v1/predict", files={"file": b"x"}).status_code == 415
    assert httpx.get(f"{address}/v1/model").status_code == 401

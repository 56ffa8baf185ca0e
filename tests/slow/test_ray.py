"""On Ray: data are scored exactly once, and a serving replica killed under load loses no request."""

import asyncio
import itertools
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hydra_ensembles.errors import RequestError
from hydra_ensembles.serve.batcher import API_KEY
from hydra_ensembles.serve.protocol import columns
from hydra_ensembles.serve.ray_app import ATTEMPTS, _Replicas, ray_app
from hydra_ensembles.serve.rows import Row
from hydra_ensembles.serve.scoring import Scorer
from processes import environment
from served_models import served
from serving import LIMIT, opened, picture, settings

ray = pytest.importorskip("ray")
serve = pytest.importorskip("ray.serve")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray warns a lot, in its own threads

REQUESTS, CLIENTS, KILLED_AFTER = 200, 16, 40
KEY = {"X-API-Key": "correct horse"}


def test_ray_data_takes_a_scorer_and_resumes(tmp_path: Path) -> None:
    """With Ray's checkpoints, a second run scores only what the first did not write."""
    from ray.data.checkpoint import CheckpointConfig

    one, images = served("image"), [opened(picture(seed)) for seed in range(12)]
    one.save_pretrained(tmp_path / "model")
    for part, rows in enumerate((range(7), range(7, 12))):  # Ray resumes only reads from files
        table = pa.table({"image": [picture(row) for row in rows], "id": list(rows)})
        pq.write_table(table, tmp_path / f"{part}.parquet")
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, ignore_reinit_error=True,
             runtime_env={"env_vars": {"PYTHONPATH": environment()["PYTHONPATH"]}})  # fmt: skip
    try:
        context = ray.data.DataContext.get_current()
        context.checkpoint_config = CheckpointConfig(
            id_column="id", checkpoint_path=str(tmp_path / "checkpoint"), delete_checkpoint_on_success=False
        )

        def score(*parts: str) -> None:
            settings = {"keep": ["id"], "device": "cpu"}
            data = ray.data.read_parquet([str(tmp_path / part) for part in parts]).map_batches(
                Scorer, fn_constructor_args=(str(tmp_path / "model"),), fn_constructor_kwargs=settings,
                concurrency=1, batch_size=4)  # fmt: skip
            data.write_parquet(str(tmp_path / "scores"))

        score("0.parquet")
        score("0.parquet", "1.parquet")
        context.checkpoint_config = None
    finally:
        ray.shutdown()
    found = pq.read_table(tmp_path / "scores").to_pydict()
    order = np.argsort(found["id"])
    assert np.asarray(found["id"])[order].tolist() == list(range(12))  # none lost or doubled
    for name, wanted in columns(one.predict(images)).items():
        if wanted.ndim == 1:
            np.testing.assert_allclose(np.asarray(found[name])[order], wanted, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.fixture(scope="module")
def order(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file; if it exists, the next replica with a batch removes it and dies."""
    return tmp_path_factory.mktemp("order") / "die"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory, order: Path) -> Iterator[str]:
    """A local cluster with a front end and two replicas."""
    place, folder = str(order), tmp_path_factory.mktemp("served") / "model"

    def mortal() -> None:
        """Runs first in every process of the cluster."""
        import os

        from hydra_ensembles.serve.ray_app import _Replica

        original = _Replica._answered

        def answered(self: Any, rows: Any) -> Any:
            try:
                os.unlink(place)
            except FileNotFoundError:
                return original(self, rows)
            os._exit(1)

        _Replica._answered = answered

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
        application = ray_app(folder, settings(name="on-ray", max_queue=256), min_replicas=2, max_replicas=2, cpus=0.5)
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
    assert [answer.status_code for answer in answers] == [200] * REQUESTS
    expected = served("image").predict([opened(picture(seed)) for seed in range(20)])
    found = [answer.json()["predictions"][0] for answer in answers]
    assert [one["label"] for one in found] == [expected.names()[seed % 20] for seed in range(REQUESTS)]
    confidence = expected.confidence.numpy()[np.arange(REQUESTS) % 20]
    np.testing.assert_allclose([one["confidence"] for one in found], confidence, atol=2e-4)


def test_routes_are_those_of_the_server(address: str) -> None:
    with httpx.Client(base_url=address, headers=KEY, timeout=LIMIT) as client:
        assert client.get("/v2/health/ready").status_code == 200
        assert client.get("/v2/models/on-ray").json()["name"] == "on-ray"
        assert "hydra_answers_total" in client.get("/metrics").text
        assert client.post("/v1/predict", files={"file": b"x"}).status_code == 415
    assert httpx.get(f"{address}/v1/model").status_code == 401


def test_the_key_is_that_of_the_process_that_deploys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(API_KEY, "correct horse")
    application = ray_app(tmp_path)
    monkeypatch.delenv(API_KEY)
    assert application._bound_deployment.init_args[3] == "correct horse"


class Handle:
    """A handle to replicas that answer or die in a given order."""

    def __init__(self, *found: Any) -> None:
        self.answer = self
        self._found = list(found)

    async def remote(self, *_: Any) -> Any:
        one = self._found.pop(0)
        if isinstance(one, Exception):
            raise one
        return one


def test_what_a_dead_replica_took_along_is_asked_again() -> None:
    died, full = ray.exceptions.ActorDiedError(), serve.exceptions.BackPressureError(1, 1)
    row = Row()
    assert asyncio.run(_Replicas(Handle(died, died, {"label": 1})).answer([row])) == [{"label": 1}]
    for handle in (Handle(*[died] * ATTEMPTS), Handle(full)):
        with pytest.raises(RequestError) as refused:
            asyncio.run(_Replicas(handle).answer([row]))
        assert (refused.value.status, refused.value.retry_after) == (503, 1)

"""On Ray Data: the same shards as on one machine, to the last bit, also if a worker node dies in the middle."""

import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hydra_ensembles.serve import score
from processes import environment
from served_models import served
from serving import LIMIT, picture

ray = pytest.importorskip("ray")
cluster_utils = pytest.importorskip("ray.cluster_utils")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray warns a lot, in its own threads

SHARD, SHARDS = 4, 60


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head that computes nothing."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    for name in ("PYTHONPATH", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, environment()[name])
    head = {"num_cpus": 0, "object_store_memory": 100 << 20, "include_dashboard": False}
    found = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
    yield found
    ray.shutdown()
    found.shutdown()


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """A table whose rows are read from any on, texts that are read in turn, and a broken row in each."""
    folder = tmp_path / "in"
    folder.mkdir()
    words = ["hello", "hello wörld", "wörld " * 7, None]
    table = pa.table({"text": [words[row % 7 % 4] for row in range(SHARD * (SHARDS - 4) - 2)]})
    pq.write_table(table, folder / "a.parquet", row_group_size=50)
    (folder / "b.csv").write_text("text\n" + "hello\n" * SHARD * 3 + '"one","two"\n')
    return folder


def content(output: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted((output / "rows").iterdir())}


def test_a_node_dies_in_the_middle(cluster: Any, archive: Path, tmp_path: Path) -> None:
    how: Any = {"shard_rows": SHARD, "batch_size": 3, "progress": False}
    model, output, killed = served("text"), tmp_path / "out", threading.Event()
    local = score(model, archive, tmp_path / "local", workers=0, **how)
    output.mkdir()
    for name in ("run.json", "about.json"):  # with the plan: the other one rounds differently
        shutil.copy(tmp_path / "local" / name, output)
    nodes = [cluster.add_node(num_cpus=1, object_store_memory=100 << 20) for _ in range(2)]
    cluster.wait_for_nodes()

    def kill() -> None:
        until = time.monotonic() + LIMIT
        while len(list(output.glob("rows/*.parquet"))) < SHARDS // 4 and time.monotonic() < until:
            time.sleep(0.01)
        cluster.remove_node(nodes[0], allow_graceful=False)
        killed.set()

    thread = threading.Thread(target=kill)
    thread.start()
    there = len(list(output.glob("rows/*.parquet")))
    found = score(model, archive, output, ray=cluster.address, **how)
    thread.join()
    assert killed.is_set()
    assert there < SHARDS
    assert found == local
    assert found.shards == SHARDS
    assert content(output) == content(tmp_path / "local")
    next(iter((output / "rows").glob("*_00030_*"))).unlink()
    assert score(model, archive, output, ray=cluster.address, **how) == local
    assert content(output) == content(tmp_path / "local")
    (archive / "c.png").write_bytes(picture())  # not for this model
    assert score(model, archive, output, workers=0, **how) == local

"""Several processes give the ranking of one."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from circuit_models import evidence, random_problem
from circuit_process import BUDGET

from hydra_ensembles._distributed import Ranks
from hydra_ensembles.heads.ranking import HeadRanking

PROCESS = Path(__file__).with_name("circuit_process.py")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def launch(folder: Path, ranks: int, *arguments: str) -> list[HeadRanking]:
    """What `torchrun` does: one process for each rank, with its number in the environment."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    output = folder / "ranking"
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROCESS), str(output), *arguments],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors
    return [HeadRanking.load(f"{output}.{rank}") for rank in range(ranks)]


@pytest.mark.parametrize("method", ["naive", "exact", "screened"])
def test_two_ranks_give_the_ranking_of_one(tmp_path: Path, method: str) -> None:
    journal = tmp_path / "journal.json"
    rankings = launch(tmp_path, 2, str(journal), method)
    expected = random_problem().extract(budget=BUDGET, method=method, screen_size=3)
    for ranking in rankings:
        assert evidence(ranking) == evidence(expected)
        assert ranking.provenance["audit"] == expected.provenance["audit"]
    assert rankings[0] == rankings[1]
    # the journal of two ranks is that of one
    assert evidence(random_problem().extract(budget=BUDGET, method=method, screen_size=3, journal=journal)) == evidence(
        expected
    )


def test_the_work_is_shared() -> None:
    shares = [Ranks(rank, 3).share(range(8)) for rank in range(3)]
    assert shares == [[0, 3, 6], [1, 4, 7], [2, 5]]


def test_a_single_process_needs_no_group() -> None:
    ranks = Ranks()
    assert ranks.gather(5) == [5]
    assert ranks.smallest(5) == 5
    ranks.require_same("a", "letters")

"""Small helpers: free memory, modes of modules, collected warnings."""

from pathlib import Path
from typing import Any

import pytest

from hydra_ensembles._utils import free_memory

GB = 10**9
HOST = f"MemTotal: {64 * GB // 1024} kB\nMemAvailable: {40 * GB // 1024} kB\nHugePages_Total: 0\n"


@pytest.mark.parametrize(
    ("groups", "limits", "gigabytes"),
    [
        ("", {}, 40),
        ("0::/\n", {"": (8 * GB, 7 * GB, 4 * GB)}, 5),  # limit, used, and cached
        ("0::/user/job\n", {"user/job": ("max", GB, 0), "user": (6 * GB, 2 * GB, 0)}, 4),  # of the user around a job
    ],
)
def test_free_memory_is_what_limits_leave(tmp_path: Path, groups: str, limits: Any, gigabytes: int) -> None:
    files = {"proc/meminfo": HOST} | ({"proc/self/cgroup": groups} if groups else {})
    for group, (most, used, cached) in limits.items():
        stat = {"max": most, "current": used, "stat": f"anon 5\ninactive_file {cached}"}
        files |= {f"sys/fs/cgroup/{group}/memory.{name}": f"{text}\n" for name, text in stat.items()}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert round((free_memory(tmp_path) or 0) / GB, 3) == gigabytes

"""Small helpers: free memory, modes of modules, collected warnings."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from hydra_ensembles._utils import collect_warnings, evaluation_mode, free_memory, warn
from hydra_ensembles.errors import HydraWarning

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


def test_who_leaves_evaluation_mode_last_puts_the_flags_back_also_after_an_error() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    model[0].eval()  # a frozen part in a model being trained
    first, second = evaluation_mode(model), evaluation_mode(model)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not any(module.training for module in model.modules())
    assert not second.__exit__(RuntimeError, RuntimeError("stop"), None)  # it is re-raised
    assert [module.training for module in model.modules()] == [True, False, True]


def test_what_is_noted_is_not_warned_of_and_only_by_this_thread() -> None:
    with collect_warnings() as outer:
        warn("one")
        with collect_warnings() as inner:
            warn("two")
        with ThreadPoolExecutor(1) as pool, pytest.warns(HydraWarning, match="three"):
            pool.submit(warn, "three").result()
    assert (outer, inner) == (["one"], ["two"])
    with pytest.warns(HydraWarning, match="four"):
        warn("four")

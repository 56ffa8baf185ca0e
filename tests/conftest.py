"""What all tests have in common."""

import gc
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

# A shell without job control starts `make test &` with SIGINT ignored, which Python, and every child, inherits.
signal.signal(signal.SIGINT, signal.default_int_handler)
os.fsync = lambda handle: None  # no test takes the power away; the tests of files and saves count and refuse the calls
gc.set_threshold(20_000, 50, 50)  # what is imported is much and stays: it is seldom worth a walk


TOGETHER = {name: name for name in ("contract", "circuit", "cli", "studies")}  # files share what takes long to make,
TOGETHER |= dict.fromkeys(("convert", "model"), "contract")  # and these folders the models and libraries of that one
FIRST = {*TOGETHER, "integration", "pipeline", "training"} - {"cli"}  # they take long: no worker ends with one of them,
FIRST |= {"test_public_names", "test_checkpoint_saving", "test_every_function", "test_attack_deeds"}  # nor with these


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import what takes seconds to import (Ray) for tests that are not asked for."""
    usual = config.getoption("markexpr") == "not slow and not gpu"
    return True if usual and collection_path.name == "slow" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let what takes long go first."""
    items.sort(key=lambda item: FIRST.isdisjoint((item.path.parent.name, item.path.stem)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let every test draw the same random numbers, whichever ran before it, and unit tests do without oneDNN.

    Of products as small as theirs it takes up to ten times as long as other kernels. Contract, integration and slow
    tests compute as users do, and so do those that ask for `usual_kernels`.
    """
    import torch

    _seed()
    usual = item.get_closest_marker("slow") or {"contract", "integration"} & set(item.path.parts)
    torch.backends.mkldnn.enabled = bool(usual)


@pytest.fixture
def usual_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test compute as other processes do, to the last bit."""
    import torch

    monkeypatch.setattr(torch.backends.mkldnn, "enabled", True)


def _seed() -> None:
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # it would keep the seed, and print where it was set, for every device that may come
        torch.default_generator.manual_seed(0)


def pytest_collectstart(collector: pytest.Collector) -> None:
    """The same for what files draw when they are imported."""
    if isinstance(collector, pytest.Module):
        _seed()


def pytest_collection_finish() -> None:
    """Leave all that is imported by now out of every later walk, of those at the end of the session too."""
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give a worker whole files, and all files of folders that share a finished study or build, or models."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            return next((scope for folder, scope in TOGETHER.items() if f"/{folder}/" in path), path)

    return Scheduling(config, log)


def pytest_configure(config: pytest.Config) -> None:
    """Leave nothing to chance, and let untrained models be calibrated on few samples: they answer by chance."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):  # who only waits imports no torch
        import hypothesis
        import tqdm

        for name in ("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "COLUMNS"):  # tables have no colours, and one width
            os.environ.pop(name, None)
        os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}  # no network, no threads behind forks
        tqdm.tqdm.monitor_interval = 0  # its thread takes a lock now and then, which a forked child would wait for
        if config.getoption("markexpr") not in ("slow", "gpu"):  # what takes long may have all cores
            # sums round alike everywhere, and forked children, which lack the other threads, do not wait for them
            os.environ["OMP_NUM_THREADS"] = "1"  # before torch is loaded: some of its libraries look only then
        hypothesis.settings.register_profile(
            "same", derandomize=True, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
        )
        hypothesis.settings.load_profile("same")  # the same examples everywhere, however long a busy machine takes
        import torch

        from hydra_ensembles.optimize import runner

        torch.ones(1, requires_grad=True).sum().backward()  # the first one behind a torch.export lets no fork train
        runner.REPEATS = 1  # plans are timed to choose between them, and no test asks which is the faster one
        # what ours say, tests ask for by pytest.warns
        config.addinivalue_line("filterwarnings", "ignore::hydra_ensembles.errors.HydraWarning")
    config.addinivalue_line("filterwarnings", "ignore:a share of .* can be promised from:UserWarning")
    config.addinivalue_line("filterwarnings", "ignore:few samples a class:UserWarning")

"""Configuration common to all tests."""

import gc
import os
import random
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest

# A shell without job control starts `make test &` with SIGINT ignored, which Python, and every child, inherits.
signal.signal(signal.SIGINT, signal.default_int_handler)
os.fsync = lambda handle: None  # no test cuts the power; tests of files and saves count these calls or make them fail
gc.set_threshold(20_000, 50, 50)  # imports create many long-lived objects: full collections are rarely worth it


TOGETHER = {name: name for name in ("contract", "circuit", "cli", "studies")}  # their files share slow fixtures;
TOGETHER |= dict.fromkeys(("convert", "model"), "contract")  # these folders share models and libraries with contract
FIRST = {*TOGETHER, "integration", "pipeline", "training"} - {"cli"}  # slow: first, so that no worker ends with one
FIRST |= {"test_public_names", "test_saved_models", "test_every_function", "test_attack_deeds", "test_export"}
BESIDES = {"studies", "attack", "slow"}  # folders that the usual suite skips; tests of the first two have the mark ci


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip folders without tests of the usual suite, some of which take seconds to import, unless it is not that."""
    usual = config.getoption("markexpr") == "not ci and not slow and not gpu"
    return True if usual and collection_path.name in BESIDES else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the folders that CI runs besides the suite, and run slow tests first."""
    for item in items:
        if {"studies", "attack"} & set(item.nodeid.split("/")) and item.get_closest_marker("slow") is None:
            item.add_marker("ci")
    items.sort(key=lambda item: FIRST.isdisjoint((item.path.parent.name, item.path.stem)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed every test alike, whichever ran before it, and disable oneDNN in unit tests.

    On products as small as theirs, oneDNN is up to ten times slower than other kernels. Contract, integration and slow
    tests compute as users do, and so do tests that use the fixture `usual_kernels`.
    """
    import torch

    _seed()
    usual = item.get_closest_marker("slow") or {"contract", "integration"} & set(item.path.parts)
    torch.backends.mkldnn.enabled = bool(usual)


@pytest.fixture
def usual_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test compute exactly as other processes do, bit for bit."""
    import torch

    monkeypatch.setattr(torch.backends.mkldnn, "enabled", True)


def _seed() -> None:
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # torch.manual_seed would also keep the seed, with a stack trace, for CUDA devices that may appear later
        torch.default_generator.manual_seed(0)


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Seed likewise before a test file is imported, which may draw random numbers."""
    if isinstance(collector, pytest.Module):
        _seed()


def pytest_collection_finish() -> None:
    """Exclude everything imported so far from later garbage collections, those at exit included."""
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each worker whole files, and keep folders that share a study, a build or models on one worker."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            return next((scope for folder, scope in TOGETHER.items() if f"/{folder}/" in path), path)

    return Scheduling(config, log)


def pytest_configure(config: pytest.Config) -> None:
    """Make runs deterministic, and allow calibration on few samples: untrained models answer by chance."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):  # not in xdist's main process
        import hypothesis
        import tqdm

        for name in ("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "COLUMNS"):  # no colours, fixed table width
            os.environ.pop(name, None)
        os.environ.setdefault("HF_DATASETS_CACHE", f"{tempfile.gettempdir()}/hydra-test-datasets")  # of tables
        os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}  # no network, no threads before forks
        tqdm.tqdm.monitor_interval = 0  # its thread sometimes holds a lock, on which a forked child would wait forever
        if config.getoption("markexpr") not in ("slow", "gpu"):  # those may use all cores
            # sums round alike everywhere, and a forked child does not wait for OpenMP threads that it does not have
            os.environ["OMP_NUM_THREADS"] = "1"  # set before torch is loaded: some of its libraries read it only then
        hypothesis.settings.register_profile(
            "same", derandomize=True, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
        )
        hypothesis.settings.load_profile("same")  # the same examples everywhere, without a deadline on busy machines
        import torch

        from hydra_ensembles.optimize import runner

        torch.ones(1, requires_grad=True).sum().backward()  # a first one after torch.export breaks training in forks
        runner.REPEATS = 1  # plans are timed to choose one, and no test depends on which is faster
        # tests check our own warnings with pytest.warns
        config.addinivalue_line("filterwarnings", "ignore::hydra_ensembles.errors.HydraWarning")

"""The attack counts what happens: a harness that detects nothing would report a perfect library."""

import os
import signal
import time

import pytest
import torch

from attack import counting
from attack.counting import count
from hydra_ensembles.errors import ConfigError


def _behave(case: str) -> str:
    if case == "refused":
        raise ConfigError("no")
    if case == "raw":
        raise KeyError("x")
    if case == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    if case == "memory":
        torch.ones(30 << 20)  # floats: 120 MiB
    if case == "slow":
        begun = time.process_time()
        while time.process_time() - begun <= counting.SECONDS:
            pass
    return "same" if case in ("memory", "slow") else case


def test_every_end_is_counted_once_and_the_work_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "START", "fork")  # avoids re-importing
    monkeypatch.setattr(counting, "BYTES", 100 << 20)
    cases = ["same", "crash", "refused", "raw", "other", "crash", "apart", "memory", "nonsense", "same"]
    row = count("all ends", _behave, cases)
    found = (row.cases, row.same, row.refused, row.other, row.raw, row.crash, row.slow, row.apart)
    assert found == (10, 2, 1, 1, 2, 2, 1, 1)
    assert row.failures == 6
    assert [text.split(":")[0] for text in row.examples] == ["other", "raw", "raw", "crash", "crash", "slow"]


def test_time_is_that_of_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "SECONDS", 0.05)
    assert counting.outcome_of(_behave, "slow")[0] == "slow"
    assert counting.outcome_of(_behave, "same") == ("same", "")

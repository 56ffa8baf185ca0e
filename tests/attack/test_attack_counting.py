"""The attack counts what happens: a harness that detects nothing would report a perfect library."""

import os
import signal
import time

import pytest
import torch

from attack import counting
from attack.expected import Deed, outcome
from hydra_ensembles.errors import ConfigError


def _refuse() -> None:
    raise ConfigError("no")


DEEDS = {
    "refused": Deed(_refuse),
    "refused wrongly": Deed(_refuse, lambda: 1),
    "answered wrongly": Deed(lambda: 1),
    "other": Deed(lambda: [1.0], lambda: [2.0]),
    "same": Deed(lambda: [1.0], lambda: [1.0]),
}


def _behave(case: str) -> str:
    if case == "raw":
        raise KeyError("x")
    if case == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    if case == "memory":
        torch.ones(30 << 20)  # floats: 120 MiB
    if case == "time":
        begun = time.process_time()
        while time.process_time() - begun <= counting.SECONDS:
            pass
    return outcome(DEEDS[case]) if case in DEEDS else "same" if case in ("memory", "time") else case


def test_every_end_is_counted_once_and_the_work_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "START", "fork")  # avoids re-importing
    monkeypatch.setattr(counting, "BYTES", 100 << 20)
    monkeypatch.setattr(counting, "SECONDS", 0.5)
    cases = [*DEEDS, "crash", "raw", "crash", "apart", "memory", "time", "nonsense", "same"]
    row = counting.count("all ends", _behave, cases, workers=1)
    found = {name: getattr(row, name) for name in counting.OUTCOMES}
    assert found == {"refused": 1, "same": 2, "other": 2, "raw": 3, "crash": 2, "slow": 2, "apart": 1}
    assert (row.cases, row.failures) == (len(cases), 9)
    assert [text.split(":")[0] for text in row.examples] == ["other"] * 2 + ["raw"] * 3 + ["crash"] * 2 + ["slow"] * 2

"""Fixtures shared by tests of the server."""

import pytest

import hydra_ensembles.serve.telemetry as telemetry


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines of the server's log, collected as they are written."""
    lines = list[str]()
    monkeypatch.setattr(telemetry.LOGGER, "isEnabledFor", lambda level: True)
    monkeypatch.setattr(telemetry.LOGGER, "log", lambda level, line: lines.append(line))
    return lines

"""What tests of the server share."""

import pytest

import hydra_ensembles.serve.telemetry as telemetry


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines that the server writes down, as they come."""
    lines = list[str]()
    monkeypatch.setattr(telemetry.LOGGER, "isEnabledFor", lambda level: True)
    monkeypatch.setattr(telemetry.LOGGER, "log", lambda level, line: lines.append(line))
    return lines

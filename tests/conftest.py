"""What all tests have in common."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Let the untrained models of tests be calibrated: the right temperature for answers by chance is infinite."""
    config.addinivalue_line("filterwarnings", "ignore:the temperature .* stopped at the bound:UserWarning")

"""What all tests have in common."""

import signal

import pytest

# A shell without job control starts `make test &` with SIGINT ignored, which Python, and every child, inherits.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Let the untrained models of tests be calibrated: the right temperature for answers by chance is infinite."""
    config.addinivalue_line("filterwarnings", "ignore:the temperature .* stopped at the bound:UserWarning")

"""What all tests have in common."""

import signal

import pytest

# A shell without job control starts `make test &` with SIGINT ignored, which Python, and every child, inherits.
signal.signal(signal.SIGINT, signal.default_int_handler)


TOGETHER = ("cli", "studies")  # folders whose files share what takes long to make
FIRST = ("integration", "studies", "pipeline", "training")  # tests that take long: no worker ends with one of them


@pytest.hookimpl(tryfirst=True)  # before the workers write down who goes with whom
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let a worker have whole files (`--dist loadgroup`), and files that share a finished study or build together."""
    items.sort(key=lambda item: item.path.parent.name not in FIRST)
    for item in items:
        folder = item.path.parent.name
        item.add_marker(pytest.mark.xdist_group(folder if folder in TOGETHER else item.path.name))


def pytest_configure(config: pytest.Config) -> None:
    """Let untrained models be calibrated on few samples: no temperature is right for answers by chance."""
    config.addinivalue_line("filterwarnings", "ignore:the temperature .* stopped at the bound:UserWarning")
    config.addinivalue_line("filterwarnings", "ignore:a share of .* can be promised from:UserWarning")
    config.addinivalue_line("filterwarnings", "ignore:few samples a class:UserWarning")

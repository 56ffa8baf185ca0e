"""The browser, for all tests of pages."""

from collections.abc import Iterator

import pytest

from chromium import Tab, open_tab


@pytest.fixture(scope="module")
def browser() -> Iterator[Tab]:
    with open_tab() as tab:
        yield tab


@pytest.fixture
def tab(browser: Tab) -> Tab:
    """An open page with no recorded errors or requests."""
    browser.complaints.clear()
    browser.requests.clear()
    return browser

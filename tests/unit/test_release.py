"""Extras of the wheel."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_extras_that_are_asked_for_are_there_under_the_name_that_pip_knows() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wheel = {re.sub(r"[-_.]+", "-", name).lower() for name in extras}  # older versions of pip accept only this form
    code = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    assert {*extras, *re.findall(r'extra="([^"]+)"', code)} == wheel

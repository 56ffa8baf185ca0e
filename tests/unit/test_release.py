"""`make release` refuses changes that the changelog lists without a version."""

import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / ".ci" / "release.py"


class BuildingError(Exception):
    """Raised when the build starts."""


def building(folder: Path) -> Any:
    raise BuildingError


@pytest.mark.parametrize("open_section", ["\n## [Unreleased]\n", "\n## [Unreleased]\n\n", ""])
@pytest.mark.parametrize("entry", ["", "\n- A change.\n", "\n### Models\n\n- A change.\n"])
def test_changes_without_a_version_are_refused(
    open_section: str, entry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = runpy.run_path(str(SCRIPT))["main"]
    monkeypatch.setitem(main.__globals__, "ROOT", tmp_path)
    monkeypatch.setitem(main.__globals__, "build", building)
    left = entry if open_section else ""
    closed = "\n## [0.1.0] - 2026-11-16\n\n- Closed.\n"
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n{open_section}{left}{closed}")
    with pytest.raises(SystemExit if left else BuildingError) as stopped:
        main()
    assert not left or ("A change" in str(stopped.value) and "Closed" not in str(stopped.value))


def test_extras_that_are_asked_for_are_there_under_the_name_that_pip_knows() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wheel = {re.sub(r"[-_.]+", "-", name).lower() for name in extras}  # older versions of pip accept only this form
    code = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    assert {*extras, *re.findall(r'extra="([^"]+)"', code)} == wheel

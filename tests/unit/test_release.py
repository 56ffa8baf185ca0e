"""`make release` ships nothing that the changelog has not closed."""

import runpy
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / ".ci" / "release.py"


class BuildingError(Exception):
    """The release has begun."""


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

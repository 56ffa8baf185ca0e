"""A demo writes where nothing else is, or where it wrote before."""

import json
from pathlib import Path

import pytest

from hydra_ensembles.demo.folder import DemoFolder
from hydra_ensembles.demo.settings import DemoSettings
from hydra_ensembles.errors import CheckpointError, ConfigError

SETTINGS = {"settings": {"seed": 0}}


def test_a_folder_is_made_and_claimed_again(tmp_path: Path) -> None:
    folder = DemoFolder(tmp_path / "a" / "demo", SETTINGS)
    assert json.loads(folder.config.read_text())["settings"] == {"seed": 0}
    folder.report.write_text("page")
    again = DemoFolder(tmp_path / "a" / "demo", SETTINGS)
    assert again.report.read_text() == "page"


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    assert DemoFolder(tmp_path, SETTINGS).config.is_file()


@pytest.mark.parametrize("name", ["config.json", "thesis.tex"])
def test_foreign_files_are_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"format": "mine"}')
    with pytest.raises(CheckpointError, match="was not written by the demo"):
        DemoFolder(tmp_path, SETTINGS)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == '{"format": "mine"}'


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="which is a file"):
        DemoFolder(tmp_path / "file", SETTINGS)


def test_a_demo_with_other_settings_is_kept(tmp_path: Path) -> None:
    DemoFolder(tmp_path, SETTINGS)
    with pytest.raises(CheckpointError, match=r"other settings \(\{'seed': 0\}\)"):
        DemoFolder(tmp_path, {"settings": {"seed": 1}})


def test_finishing_removes_the_work_only(tmp_path: Path) -> None:
    folder = DemoFolder(tmp_path, SETTINGS)
    (folder.work / "circuit").mkdir(parents=True)
    folder.report.touch()
    folder.finish()
    assert not folder.work.exists()
    assert folder.report.exists()


@pytest.mark.parametrize("wrong", [{"seed": -1}, {"prune": 0}, {"circuit_images": 8}, {"limit": 3}])
def test_settings_out_of_range_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=f"DemoSettings.{next(iter(wrong))} must be at least"):
        DemoSettings(**wrong)  # type: ignore[arg-type]

"""The meaning of cells in a label column, and messages about files and labels that are skipped or ambiguous."""

import warnings
from pathlib import Path

import pytest

from hydra_ensembles.data import load
from hydra_ensembles.errors import DataError, HydraWarning
from pictures import picture


@pytest.mark.parametrize(("one", "other", "said"), [("Pos", "pos", "count as two"), ("NA", "pos", "class 'NA'")])
def test_classes_that_may_be_one_or_none_are_said(tmp_path: Path, one: str, other: str, said: str) -> None:
    (tmp_path / "t.csv").write_text(f"text,label\na,{one}\nb,{other}\n", encoding="utf-8")
    with pytest.warns(HydraWarning, match=said):
        assert len(load(tmp_path / "t.csv").class_names) == 2
    with warnings.catch_warnings(action="error"):  # labels are not used
        load(tmp_path / "t.csv", labels="optional")


def test_labels_that_nobody_reads_may_be_anything(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("text,label\na,4.5\nb,4.5\n")
    foreign = load(tmp_path / "t.csv", labels="optional")
    assert (foreign.labels.tolist(), foreign.class_names) == ([-1, -1], ())
    with pytest.raises(DataError, match="row 0"):
        load(tmp_path / "t.csv")
    with pytest.raises(DataError, match="row 0"):
        load(tmp_path / "t.csv", labels="optional", class_names=["no", "yes"])


def test_files_that_are_not_read_among_images_are_told_of(tmp_path: Path) -> None:
    for name in ("a/0.png", "b/0.png"):
        (tmp_path / name).parent.mkdir()
        picture(0).save(tmp_path / name)
    (tmp_path / "a" / "boxes.txt").write_text("0 0 1 1")
    with warnings.catch_warnings(action="error"):
        assert len(load(tmp_path)) == 2
    picture(0).save(tmp_path / "stray.png")
    with pytest.warns(HydraWarning, match="1 images outside of class folders"):
        assert len(load(tmp_path)) == 2
    (tmp_path / "stray.png").unlink()
    for name in ("a/1.heic", "a/2.HEIC", "b/scan.dcm"):
        (tmp_path / name).write_bytes(b"")
    with pytest.warns(HydraWarning, match=r"2 with \.heic, 1 with \.dcm"):
        assert len(load(tmp_path)) == 2

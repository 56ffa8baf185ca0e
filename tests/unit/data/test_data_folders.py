from pathlib import Path

import numpy as np
import pytest
from stand_ins import picture

from hydra_ensembles.data.loading import load, load_image_list
from hydra_ensembles.errors import DataError


def make_classes(folder: Path, counts: dict[str, int]) -> Path:
    for class_name, count in counts.items():
        (folder / class_name).mkdir(parents=True)
        for number in range(count):
            picture(number).save(folder / class_name / f"{number}.png")
    return folder


def test_a_class_for_each_subfolder(tmp_path: Path) -> None:
    data = load(make_classes(tmp_path / "animals", {"dog": 2, "ant": 3}))
    assert (data.class_names, data.labels.tolist()) == (("ant", "dog"), [0, 0, 0, 1, 1])
    assert data.name == "animals"
    assert np.array_equal(np.asarray(data[4][0]), np.asarray(picture(1)))


def test_nested_files_are_found_and_others_ignored(tmp_path: Path) -> None:
    folder = make_classes(tmp_path / "animals", {"dog": 1})
    (folder / "dog" / "deep").mkdir()
    picture(7).save(folder / "dog" / "deep" / "x.JPEG")
    (folder / "dog" / "notes.txt").write_text("no image")
    (folder / ".cache").mkdir()
    assert len(load(folder)) == 2


def test_a_subfolder_without_images_is_no_class(tmp_path: Path) -> None:
    folder = make_classes(tmp_path / "animals", {"dog": 1, "zzz": 0, "__MACOSX": 1})
    with pytest.raises(DataError, match=r"subfolders without images: \['zzz'\].* pass class_names="):
        load(folder)
    assert load(folder, class_names=["dog", "zzz"]).class_names == ("dog", "zzz")
    assert load(folder, labels="optional").class_names == ("dog",)
    (folder / "zzz").rmdir()
    data = load(folder)
    assert (data.class_names, len(data)) == (("dog",), 1)


def test_class_names_decide_the_numbers(tmp_path: Path) -> None:
    folder = make_classes(tmp_path / "animals", {"dog": 1, "ant": 1})
    data = load(folder, class_names=["dog", "ant", "bee"])
    assert data.labels.tolist() == [0, 1]
    with pytest.raises(DataError, match=r"subfolders \['ant'\] that are not among the class names"):
        load(folder, class_names=["dog"])


def test_splits_above_the_classes(tmp_path: Path) -> None:
    for split, count in (("train", 2), ("val", 1)):
        make_classes(tmp_path / split, {"dog": count})
    assert len(load(tmp_path, "train")) == 2
    with pytest.raises(DataError, match=r"no split 'test'; found: \['train', 'val'\]"):
        load(tmp_path, "test")
    with pytest.raises(DataError, match=r"has the splits \['train', 'val'\]; choose one"):
        load(tmp_path)


def test_loose_images_need_optional_labels(tmp_path: Path) -> None:
    picture(1).save(tmp_path / "a.png")
    with pytest.raises(DataError, match=r"1 images lie in it without a class: pass labels='optional'"):
        load(tmp_path)
    data = load(tmp_path, labels="optional")
    assert data.labels.tolist() == [-1]


def test_a_broken_file_names_row_and_path(tmp_path: Path) -> None:
    folder = make_classes(tmp_path / "animals", {"dog": 1})
    (folder / "dog" / "1.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"row 1, image file .*1\.png, cannot be decoded"):
        load(folder)[1]


def test_an_image_list(tmp_path: Path) -> None:
    make_classes(tmp_path / "images" / "some set", {"dog": 2})
    listing = tmp_path / "lists" / "test_dog.txt"
    listing.parent.mkdir()
    listing.write_text("some set/dog/1.png 4\n\nsome set/dog/0.png 2\n")
    data = load("lists/test_dog.txt", root=tmp_path, images="images")
    assert data.labels.tolist() == [4, 2]
    assert data.class_names == ("0", "1", "2", "3", "4")
    assert np.array_equal(np.asarray(data[0][0]), np.asarray(picture(1)))
    with pytest.raises(DataError, match="does not exist; images= must name the folder"):
        load("lists/test_dog.txt", root=tmp_path)


def test_an_image_list_of_ood_images(tmp_path: Path) -> None:
    picture(0).save(tmp_path / "0.png")
    listing = tmp_path / "ood.txt"
    listing.write_text("0.png -1\n")
    with pytest.raises(DataError, match=r"line 1 of .*ood\.txt has no label"):
        load(listing)
    assert load(listing, labels="optional").labels.tolist() == [-1]
    listing.write_text("0.png\n")
    assert load_image_list(listing, tmp_path, labels="optional").labels.tolist() == [-1]
    listing.write_text("0.png dog\n")
    with pytest.raises(DataError, match="each line must be 'path label'"):
        load(listing)
    listing.write_text("\n")
    with pytest.raises(DataError, match="lists no images"):
        load(listing)


def test_only_line_ends_end_a_line_of_an_image_list(tmp_path: Path) -> None:
    picture(0).save(tmp_path / "a\u0085b.png")
    listing = tmp_path / "list.txt"
    listing.write_text("a\u0085b.png 1\r\na\u0085b.png 0\n", encoding="utf-8")
    data = load(listing)
    assert data.labels.tolist() == [1, 0]
    assert np.array_equal(np.asarray(data[0][0]), np.asarray(picture(0)))

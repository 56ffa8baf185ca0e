from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from small_studies import meet

from hydra_ensembles.data.dataset import TextDataset
from hydra_ensembles.errors import DataError
from pictures import encoded, picture
from studies.suites import SetRef, suite, suites

PAPER = [name for name in suites() if name.startswith("paper-")]


def test_the_papers_suites_are_those_of_its_tables() -> None:
    assert len(PAPER) == 5
    assert len(suite("paper-zero-shot-imagenet").tasks) + 1 == 9  # in the average of Table 24
    classes = suite("paper-zero-shot-cifar100").id.class_names
    assert (len(classes), list(classes)) == (100, sorted(classes))


@pytest.mark.parametrize("name", PAPER)
def test_circuits_are_never_chosen_on_reported_rows_nor_models_trained_on_them(name: str) -> None:
    one = suite(name)
    reported = (one.id, *one.near, *one.far, *one.apart, *one.tasks)
    assert not any(meet(one.circuit_ood, ref) for ref in reported)
    assert not any(meet(one.id, ref) for ref in (one.train, one.validation) if ref is not None)
    assert meet(one.id, one.id)


def test_sets_have_their_part() -> None:
    data = TextDataset([str(row) for row in range(100)], np.arange(100) % 4, ["a", "b", "c", "d"])

    def rows(**part: Any) -> list[int]:
        return SetRef("part", "numbers", **part).part_of(data).rows.tolist()

    assert rows(rows=(None, 30), without=("b", "d")) == list(range(0, 30, 2))
    assert rows(rows=(-5, None)) == [95, 96, 97, 98, 99]
    small, large = rows(share=(0.0, 0.1)), rows(share=(0.1, 1.0))
    assert (len(small), len(large)) == (10, 90)
    assert {*small, *large} == set(range(100))


def test_the_papers_image_suites_read_an_openood_folder(tmp_path: Path) -> None:
    """A stand-in for the OpenOOD 1.5 folder: image lists, and images below two folders."""
    chosen = suite("paper-cifar100")
    for number, ref in enumerate((*chosen.near, *chosen.far, chosen.circuit_ood, chosen.id)):
        image = tmp_path / ref.folder / ref.name / "0.png"
        image.parent.mkdir(parents=True, exist_ok=True)
        image.write_bytes(encoded(picture(number)))
        listing = tmp_path / ref.source
        listing.parent.mkdir(parents=True, exist_ok=True)
        label = 7 if ref is chosen.id else -1
        listing.write_text(f"{ref.name}/0.png {label}\n")
    far = {ref.name: ref.load(tmp_path) for ref in chosen.far}
    assert list(far) == ["mnist", "svhn", "textures", "places365"]
    assert far["svhn"].labels.tolist() == [-1]
    assert np.array_equal(np.asarray(far["svhn"][0][0]), np.asarray(picture(2)))
    assert chosen.id.load(tmp_path).labels.tolist() == [7]


def test_the_imagenet_validation_set_is_cut_once_for_good() -> None:
    data = TextDataset(range(50_000), np.arange(50_000) // 50)  # type: ignore[arg-type]
    refs = (suite("paper-imagenet").validation, suite("paper-imagenet").id)
    validation, test = (ref.part_of(data) for ref in refs if ref is not None)
    assert (len(validation), len(test)) == (500, 49_500)
    assert not set(validation.rows) & set(test.rows)
    assert validation.rows[:5].tolist() == [281, 315, 462, 591, 731]


def test_a_list_of_images(tmp_path: Path) -> None:
    for name in ("1 a.png", "2.png"):
        Image.new("RGB", (4, 4)).save(tmp_path / name)
    (tmp_path / "list.txt").write_text("1 a.png 3\n2.png 0\n\n")
    (tmp_path / "ood.txt").write_text("1 a.png -1\n2.png")
    data = SetRef("some", "list.txt").load(tmp_path)
    assert (data.labels.tolist(), data.name, data[0][0].size) == ([3, 0], "some", (4, 4))
    assert SetRef("ood", "ood.txt", labels="optional").load(tmp_path).labels.tolist() == [-1, -1]
    with pytest.raises(DataError, match="no label"):
        SetRef("ood", "ood.txt").load(tmp_path)

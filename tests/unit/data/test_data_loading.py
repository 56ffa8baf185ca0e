"""Every format that `load` reads, on small files; the Hub through a stand-in for the `datasets` library."""

import json
import math
import pickle
import sys
import warnings
from contextlib import nullcontext
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from datasets_stand_in import Table, stand_in_hub
from hydra_ensembles.data.dataset import ImageDataset, TextDataset, images_below
from hydra_ensembles.data.loading import Columns, load
from hydra_ensembles.errors import DataError, HydraWarning, MissingExtraError
from pictures import WriteParquet, encoded, picture


def same_image(image: Any, expected: Image.Image) -> bool:
    return image.mode == "RGB" and np.array_equal(np.asarray(image), np.asarray(expected.convert("RGB")))


def test_a_folder_with_a_file_for_each_split(image_folder: Path) -> None:
    data = load(image_folder, split="train")
    assert isinstance(data, ImageDataset)
    assert (len(data), data.class_names, data.name) == (6, ("cat", "dog"), "pictures")
    image, label = data[3]
    assert label == 1
    assert same_image(image, picture(3))
    again = pickle.loads(pickle.dumps(data.select([5, 3])))
    assert same_image(again[1][0], picture(3))
    assert len(load("pictures/test.parquet", root=image_folder.parent)) == 4
    assert load(image_folder / "test.parquet", "test").name == "pictures"
    (image_folder / "train.parquet").unlink()
    assert len(load(image_folder)) == 4  # a single split is the default


@pytest.mark.parametrize(
    ("path", "split", "token"),
    [
        ("pictures/test.parquet", "train", "no split 'train'"),
        ("pictures", None, r"\['test', 'train'\]; choose one"),
        ("pictures/nothing.parquet", None, "does not exist"),
    ],
)
def test_files_and_splits_that_are_not_there(image_folder: Path, path: str, split: str | None, token: str) -> None:
    with pytest.raises(DataError, match=token):
        load(path, split, root=image_folder.parent)


@pytest.mark.parametrize(
    ("name", "content", "token"),
    [
        ("a.parquet", "PAR1 no", "Parquet"),
        ("a.json", "{}", r"accepted suffixes: \.parquet"),
        ("a.csv", "text,label\n", "no rows"),
        ("a.csv", "picture,label\nx,0\n", r"'image' or 'text'; it has \['picture', 'label'\]"),
        ("a.csv", "text,class\nx,0\n", r"label column 'label'; it has \['text', 'class'\]"),
        ("a.csv", "text,label,text\nhello,1,x\nbye,0,y\n", "'text'"),
        ("a.csv", "text,label\nhello,1000000000000\nbye,0\n", "1000000000000"),
        ("a.jsonl", '{"text": "a\u2028b", "label": 0}\n\n{"text": \n', r"a\.jsonl.*line 3"),
        ("a.jsonl", '{"text": "a", "label": 0, "label": 1}\n', r"a\.jsonl.*line 1.*'label' is given twice"),
        ("a.jsonl", '{"text": "a", "label": 1.0}\n{"text": "b", "label": NaN}\n', r"row 1 of .*\(got nan\)"),
        ("a.jsonl", '{"text": "a", "label": -1}\n{"text": "b"}\n', r"row 0 of .*\(got -1\); 2 rows have none"),
        (
            "a.jsonl",
            '{"text": "a", "x": 1}\n{"text": "b", "x": 1.5}\n{"text": 7}\n',
            "'text', row 0 .*str.*row 2 a number",
        ),
        ("a.txt", "a.png dog\n", "'path label'"),
        ("a.txt", "a good film\n", "need a table"),
    ],
)
def test_files_that_are_broken_or_lack_something(tmp_path: Path, name: str, content: str, token: str) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    (tmp_path / "a.png").touch()
    with pytest.raises(DataError, match=token):
        load(tmp_path / name)


def test_labels_that_nobody_reads_may_be_missing(tmp_path: Path, write_parquet: WriteParquet) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"text": ["x"], "class": [0]})
    assert load(path, columns=Columns(label="class")).labels.tolist() == [0]
    unlabelled = load(path, labels="optional")
    assert (unlabelled.labels.tolist(), unlabelled.class_names) == ([-1], ())
    for labels in ([0, -1, None], [0.0, -2.0, math.nan]):
        path = write_parquet(tmp_path / "b.parquet", {"text": list("abc"), "label": labels}, ["x", "y"])
        assert load(path, labels="optional").labels.tolist() == [0, -1, -1]
    (tmp_path / "0.png").touch()
    (tmp_path / "ood.txt").write_text("0.png -1\n0.png")
    assert load(tmp_path / "ood.txt", labels="optional").labels.tolist() == [-1, -1]


def test_string_labels_are_numbered_and_decimals_are_numbers(tmp_path: Path, write_parquet: WriteParquet) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"text": list("abc"), "label": ["pos", "neg", "pos"]})
    data = load(path)
    assert (data.class_names, data.labels.tolist()) == (("neg", "pos"), [1, 0, 1])
    assert load(path, class_names=["pos", "neg"]).labels.tolist() == [0, 1, 0]
    with pytest.raises(DataError, match=r"row 0 of .* label 'pos'.*\['neg', 'neutral'\]"):
        load(path, class_names=["neg", "neutral"])
    path = write_parquet(tmp_path / "b.parquet", {"text": ["a", "b"], "label": [Decimal("1"), Decimal("0")]})
    assert load(path).labels.tolist() == [1, 0]


def test_images_in_cells_or_beside_the_file_and_corrupt_ones(tmp_path: Path, write_parquet: WriteParquet) -> None:
    whole = encoded(picture(0, size=64))
    contents = (whole, encoded(picture(5, mode="LA")), whole[: len(whole) // 2], b"not an image", None)
    picture(9).save(tmp_path / "nine.png")
    cells = [{"bytes": content, "path": None} for content in contents]
    cells += [{"bytes": None, "path": name} for name in ("nine.png", "ten.png")]  # stored next to the file
    data = load(write_parquet(tmp_path / "a.parquet", {"image": cells, "label": [0] * 7}))
    for row, expected in ((0, picture(0, size=64)), (1, picture(5, mode="LA")), (5, picture(9))):
        assert same_image(data[row][0], expected)
    (tmp_path / "b.csv").write_text("image,label\nnine.png,ten\n")  # as `score` reads them
    assert same_image(load(tmp_path / "b.csv")[0][0], picture(9))
    for row, token in ((2, "row 2 of .*a.parquet"), (3, "row 3 of"), (4, "row 4 of"), (6, "ten.png")):
        with pytest.raises(DataError, match=token):
            data[row]


def test_text_pairs_and_nested_columns(tmp_path: Path, write_parquet: WriteParquet) -> None:
    single = load(write_parquet(tmp_path / "one" / "test.parquet", {"text": ["a", "b"], "label": [1, 0]}))
    assert isinstance(single, TextDataset)
    assert (single[0], single.class_names) == (("a", 1), ("0", "1"))
    columns = {"text": ["a", "b"], "text_pair": ["c", None], "label": [1, 0]}
    pairs = load(write_parquet(tmp_path / "two" / "test.parquet", columns))
    assert pairs[0] == (("a", "c"), 1)
    with pytest.raises(DataError, match=r"row 1 of .*'text_pair'"):
        pairs[1]
    with pytest.raises(DataError, match=r"no column 'text_pear'; it has \['text', .*text_pair=\.\.\."):
        load(tmp_path / "two", columns=Columns(text_pair="text_pear"))
    path = write_parquet(tmp_path / "a.parquet", {"translation": [{"en": "dog", "de": "Hund"}]})
    assert load(path, columns=Columns(text="translation.de"), labels="optional")[0] == ("Hund", -1)
    (tmp_path / "dots.csv").write_text("review.text,review.label,image\n007,01,a.png\nb,02,b.png\n")
    named = load(tmp_path / "dots.csv", columns=Columns(text="review.text", label="review.label"))  # beside an `image`
    assert isinstance(named, TextDataset)
    assert (list(named), named.class_names) == ([("007", 0), ("b", 1)], ("01", "02"))


def test_shards_are_joined_in_order(tmp_path: Path, write_parquet: WriteParquet) -> None:
    for shard in (1, 0):
        name = f"data/train-0000{shard}-of-00002.parquet"
        write_parquet(tmp_path / name, {"text": [f"{shard}{row}" for row in range(2)], "label": [0, 1]})
    write_parquet(tmp_path / "data/test-00000-of-00001-abc123.parquet", {"text": ["t"], "label": [0]})
    assert [text for text, _ in load(tmp_path, "train")] == ["00", "01", "10", "11"]
    assert len(load(tmp_path, "test")) == 1
    for names in (["train-00000-of-00002"], ["train-00000-of-00001", "train"]):  # incomplete, and duplicate
        for name in names:
            write_parquet(tmp_path / str(len(names)) / f"{name}.parquet", {"text": ["a"], "label": [0]})
        with pytest.raises(DataError, match=r"train-00000-of-0000.*shards"):
            load(tmp_path / str(len(names)), "train")
        assert len(load(tmp_path / str(len(names)) / f"{names[0]}.parquet")) == 1  # explicitly named


def test_csv_with_quotes_and_tsv_without(tmp_path: Path) -> None:
    csv = tmp_path / "reviews" / "test.csv"
    csv.parent.mkdir()
    csv.write_text('text,label,x,x\n"good, really\nvery ""good""",1,,\nbad,0,,\nNA,0,,\n12,1,,\n', encoding="utf-8")
    data = load(csv.parent, "test")
    assert [text for text, _ in data] == ['good, really\nvery "good"', "bad", "NA", "12"]
    assert data.labels.tolist() == [1, 0, 0, 1]
    tsv = tmp_path / "dev.tsv"
    tsv.write_text('sentence\tlabel\n"unbalanced, quote\tneg\nfine\tpos\n', encoding="utf-8")
    data = load(tsv, columns=Columns(text="sentence"))
    assert (list(data), data.class_names) == ([('"unbalanced, quote', 0), ("fine", 1)], ("neg", "pos"))


@pytest.mark.parametrize(
    ("written", "labels", "names"),
    [
        ("01 02 01", [0, 1, 0], ("01", "02")),
        ("true false", [1, 0], ("false", "true")),
        ("1.0 0. NA", [1, 0, -1], ("0", "1")),
        ("-1 1", [-1, 1], ("0", "1")),
        ("yes NA", [1, 0], ("NA", "yes")),
        ("1e2 3", "row 0 of .* has the label '1e2'; labels must be whole numbers", None),
    ],
)
def test_labels_are_taken_letter_by_letter(tmp_path: Path, written: str, labels: Any, names: Any) -> None:
    """Labels are integers only if all are written so; column types once turned 01 and 02 into other classes."""
    path = tmp_path / "t.csv"
    path.write_text("text,label\n" + "".join(f"a,{one}\n" for one in written.split()))
    if isinstance(labels, str):
        with pytest.raises(DataError, match=labels):
            load(path)
        return
    data = load(path, labels="optional")
    assert (data.labels.tolist(), data.class_names) == (labels, names)


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl"])
def test_texts_of_digits_keep_every_letter(tmp_path: Path, suffix: str) -> None:
    names = ("text", "text_pair", "label")
    rows = [("007", "1.50", 0), ("1e3", "true", 1), ("", "2024-01-01", 1)]
    comma = "," if suffix == "csv" else "\t"
    lines = [comma.join(names), *(comma.join(map(str, row)) for row in rows)]
    if suffix == "jsonl":
        lines = [json.dumps(dict(zip(names, row, strict=True))) for row in rows]
    (tmp_path / f"a.{suffix}").write_text("\n".join(lines))
    assert list(load(tmp_path / f"a.{suffix}")) == [((one, other), label) for one, other, label in rows]
    named = load(tmp_path / f"a.{suffix}", columns=Columns(text="text_pair", text_pair="text"))
    assert named[2] == (("2024-01-01", ""), 1)


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


def make_classes(folder: Path, counts: dict[str, int]) -> Path:
    for class_name, count in counts.items():
        (folder / class_name).mkdir(parents=True)
        for number in range(count):
            picture(number).save(folder / class_name / f"{number}.png")
    return folder


def test_a_class_for_each_subfolder(tmp_path: Path) -> None:
    folder = make_classes(tmp_path / "animals", {"dog": 2, "ant": 3, ".cache": 1, "__MACOSX": 1})
    (folder / "dog" / "deep").mkdir()
    picture(7).save(folder / "dog" / "deep" / "x.JPEG")
    (folder / "dog" / "notes.txt").write_text("no image")
    data = load(folder)
    assert (data.class_names, data.labels.tolist(), data.name) == (("ant", "dog"), [0, 0, 0, 1, 1, 1], "animals")
    assert same_image(data[4][0], picture(1))
    assert load(folder, class_names=["dog", "ant", "bee"]).labels.tolist() == [0, 0, 0, 1, 1, 1]


def test_images_are_those_of_the_folder_that_was_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are opened later, perhaps from another working directory that has files of the same names."""
    make_classes(tmp_path / "animals", {"dog": 2})
    make_classes(tmp_path / "later" / "animals", {"cat": 5, "dog": 2})
    (tmp_path / "list.txt").write_text("animals/dog/1.png 0\n")
    monkeypatch.chdir(tmp_path)
    sets = load("animals").select([1]), load("list.txt")
    expected = [data[0][0] for data in sets]
    picture(9).save(tmp_path / "later" / "animals" / "dog" / "1.png")
    monkeypatch.chdir(tmp_path / "later")
    assert all(same_image(data[0][0], image) for data, image in zip(sets, expected, strict=True))


def test_subfolders_without_images_and_images_without_subfolders(tmp_path: Path) -> None:
    folder = make_classes(tmp_path / "animals", {"dog": 1, "zzz": 0})
    with pytest.raises(DataError, match=r"\['zzz'\].* give class_names"):
        load(folder)
    assert load(folder, class_names=["dog", "zzz"]).class_names == ("dog", "zzz")
    loose = tmp_path / "loose"
    loose.mkdir()
    picture(1).save(loose / "a.png")
    with pytest.raises(DataError, match="labels='optional', on the command line --ood"):
        load(loose)
    assert load(loose, labels="optional").labels.tolist() == [-1]


def test_a_folder_of_save_to_disk_is_told_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "all" / "part").mkdir(parents=True)
    (tmp_path / "all" / "part" / "state.json").write_text("{}")
    for folder in (tmp_path / "all", tmp_path / "all" / "part"):
        with pytest.raises(DataError, match=r"part.*to_parquet"):
            load(folder)


def test_splits_above_the_classes_with_litter_beside_them(tmp_path: Path) -> None:
    for split, count in (("train", 2), ("val", 1)):
        make_classes(tmp_path / split, {"dog": count, "ant": 1})
    (tmp_path / ".cache").mkdir()
    data = load(tmp_path, "train")
    assert (len(data), data.class_names) == (3, ("ant", "dog"))
    with pytest.raises(DataError, match=r"\['train', 'val'\]; choose one"):
        load(tmp_path)


def test_splits_among_other_folders_are_refused_and_a_class_called_train_is_not(tmp_path: Path) -> None:
    for split in ("train", "test"):
        make_classes(tmp_path / "mixed" / split, {"dog": 1})
    make_classes(tmp_path / "mixed", {"raw": 1})
    with pytest.raises(DataError, match=r"\['test', 'train'\].*split="):
        load(tmp_path / "mixed")
    make_classes(tmp_path / "one" / "train", {"dog": 1})
    make_classes(tmp_path / "one", {"raw": 1})
    with pytest.raises(DataError, match=r"\['train'\].*and also \['raw'\]"):
        load(tmp_path / "one", labels="optional")
    vehicles = make_classes(tmp_path / "vehicles", {"train": 2, "bus": 1})
    assert load(vehicles).class_names == ("bus", "train")


def test_litter_inside_classes_is_no_data(tmp_path: Path) -> None:
    """Notebook checkpoints, macOS metadata, folders named like images; symlinks to folders are followed."""
    folder = make_classes(tmp_path / "animals", {"dog": 2, "ant": 1})
    make_classes(folder / "dog", {".ipynb_checkpoints": 1, "__MACOSX": 1, "folder.png": 0, "more": 0})
    make_classes(tmp_path, {"elsewhere": 1})
    (folder / "dog" / "link").symlink_to(tmp_path / "elsewhere")
    for place in (folder / "dog", folder, tmp_path / "elsewhere"):
        (place / "._0.png").write_bytes(b"\x00\x05\x16\x07")
    data = load(folder)
    assert data.labels.tolist() == [0, 1, 1, 1]
    assert all(image.mode == "RGB" for image, _ in data)
    assert len(load(folder, labels="optional")) == 4
    assert [file.name for file in images_below(folder / "dog")] == ["0.png", "1.png", "0.png"]


def test_an_image_list(tmp_path: Path) -> None:
    make_classes(tmp_path / "images" / "some set", {"dog": 2})
    picture(5).save(tmp_path / "images" / "a\u0085b.png")
    listing = tmp_path / "lists" / "test_dog.txt"
    listing.parent.mkdir()
    listing.write_text("\ufeffsome set/dog/1.png 4\r\n\nsome set/dog/0.png 2\na\u0085b.png 0", encoding="utf-8")
    data = load("lists/test_dog.txt", root=tmp_path, images="images")
    assert (data.labels.tolist(), data.class_names) == ([4, 2, 0], ("0", "1", "2", "3", "4"))
    assert same_image(data[0][0], picture(1))
    assert same_image(data[2][0], picture(5))
    with pytest.raises(DataError, match="images="):
        load("lists/test_dog.txt", root=tmp_path)


@pytest.mark.parametrize("part", ["train", "test"])
def test_torchvision_sets_that_take_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """EMNIST takes a split and passes `train` and `download` on: it once always gave the training set."""
    taken: dict[str, Any] = {}

    def begin(self: Any, root: Path, train: bool = True, download: bool = False, **others: Any) -> None:
        taken.update(train=train, download=download)
        self.data, self.targets = torch.full((1, 28, 28), 7, dtype=torch.uint8), [2]
        self.transform = self.target_transform = None

    datasets = pytest.importorskip("torchvision.datasets")
    monkeypatch.setattr(datasets.MNIST, "__init__", begin)
    data = load("torchvision:EMNIST", f"letters-{part}", root=tmp_path, download=True)
    assert taken == {"train": part == "train", "download": True}
    assert (data.class_names[2], data.labels.tolist()) == ("b", [2])
    for name, split, token in (
        ("EMNIST", "letters", "letters-test"),
        ("MNIST", "validation", r"\['test', 'train'\]"),
        ("CIFAR10", "test", "Dataset not found.*download=True"),
        ("CIFAR11", "test", "CIFAR11.*CIFAR10"),
    ):
        with pytest.raises(DataError, match=token):
            load(f"torchvision:{name}", split, root=tmp_path)
    assert same_image(data[0][0], Image.new("L", (28, 28), 7))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    texts = Table({"text": ["a", "b"], "label": [1, 0]}, ["neg", "pos"])
    grey = {"bytes": encoded(picture(1, mode="L")), "path": None}
    known = {
        "owner/reviews": {"test": texts, "train": texts},
        "pictures": {"test": Table({"image": [grey], "label": [0]}, ["cat"])},
        "translations": {"test": Table({"translation": [{"en": "dog"}]}, [])},
    }
    return stand_in_hub(monkeypatch, known)


def test_the_hub_gives_texts_images_and_class_names(calls: list[tuple[Any, ...]]) -> None:
    data = load("hub:owner/reviews", "test", config="plain")
    assert (calls, list(data)) == ([("owner/reviews", "plain", "test")], [("a", 1), ("b", 0)])
    assert (data.class_names, data.name) == (("neg", "pos"), "owner/reviews")
    images = load("hub:pictures")  # a single split is the default
    assert same_image(images[0][0], picture(1, mode="L"))
    nested = load("hub:translations", "test", columns=Columns(text="translation.en"), labels="optional")
    assert nested[0] == ("dog", -1)


def test_what_the_hub_lacks(calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"\['test', 'train'\]; choose one"):
        load("hub:owner/reviews")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match="datasets"):
        load("hub:owner/reviews", "test")


def test_numbers_that_may_be_names_or_places_are_refused(tmp_path: Path) -> None:
    for labels, names, refused in (
        ((2, 1), ("2", "1", "0"), True),  # the class called 2, or index 2?
        ((0, 1, 2), ("1", "2", "3"), False),  # no class is called 0: indices
        ((0, 1), ("0", "1"), False),
    ):
        (tmp_path / "t.csv").write_text("text,label\n" + "".join(f"a,{one}\n" for one in labels))
        with pytest.raises(DataError, match="may mean the class called") if refused else nullcontext():
            assert load(tmp_path / "t.csv", class_names=names).labels.tolist() == list(labels)


def test_items_that_two_sets_share_are_counted_as_they_are_stored(tmp_path: Path, write_parquet: WriteParquet) -> None:
    """Texts are compared by characters, images by file or bytes, wherever stored; nothing is decoded."""
    (tmp_path / "train.csv").write_text("text,label\na,0\nb,1\nc,0\n")
    (tmp_path / "val.csv").write_text("text,label\nb,1\nd,1\n")
    train, val = load(tmp_path / "train.csv"), load(tmp_path / "val.csv")
    assert (val.shared_with(train), val.select([1]).shared_with(train)) == ((1, 2), (0, 1))
    files = {"one/0.png": 0, "one/1.png": 1, "two/0.png": 2}
    for folder, shift in (("a", 0), ("b", 2)):
        for name, seed in files.items():
            (tmp_path / folder / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / folder / name).write_bytes(encoded(picture(seed + shift)))
    one, other = load(tmp_path / "a"), load(tmp_path / "b")
    assert other.shared_with(one) == (1, 3)
    assert ImageDataset([picture(0)], [0]).shared_with(one) == (0, 0)  # in-memory pictures are not compared

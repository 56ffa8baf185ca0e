"""Every format that `load` reads, on small files; the hub through data sets of the `datasets` library in memory."""

import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hydra_ensembles.data.dataset import ImageDataset, TextDataset, images_below
from hydra_ensembles.data.loading import Columns, load
from hydra_ensembles.errors import DataError, MissingExtraError
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
    assert load(image_folder / "test.parquet").name == "pictures"
    for split, token in ((None, "choose"), ("dev", "dev")):
        with pytest.raises(DataError, match=token):
            load(image_folder, split)
    (image_folder / "train.parquet").unlink()
    assert len(load(image_folder)) == 4  # a single split is the default


def test_shards_are_read_in_order_and_one_that_is_missing_is_noticed(
    tmp_path: Path, write_parquet: WriteParquet
) -> None:
    for number, texts in enumerate((["a", "b"], ["c"])):
        columns = {"text": texts, "label": [number] * len(texts)}
        write_parquet(tmp_path / "data" / f"train-{number:05}-of-00002.parquet", columns)
    assert list(load(tmp_path)) == [("a", 0), ("b", 0), ("c", 1)]
    (tmp_path / "data" / "train-00001-of-00002.parquet").unlink()
    with pytest.raises(DataError, match="shards"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "token"),
    [
        ("a.parquet", "PAR1 no", "a.parquet"),
        ("a.csv", "text,label\n", "no data"),
        ("a.csv", "picture,label\nx,0\n", "picture"),
        ("a.csv", "text,label\nnot bad, really,1\n", "header"),  # a comma that is not quoted
        ("a.csv", "text,label\nhello,1000000000000\nbye,0\n", "1000000000000"),
        ("a.jsonl", '{"text": "a", "label": 0}\n\n{"text": \n', r"a\.jsonl"),
        ("a.jsonl", '{"text": "a", "label": -1}\n{"text": "b"}\n', "2 rows"),
    ],
)
def test_files_that_are_broken_or_lack_something(tmp_path: Path, name: str, content: str, token: str) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=token):
        load(tmp_path / name)


def test_csv_tsv_and_json_lines(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('text,label,note\n"good, or so",yes,1\nNA,no,\n')
    data = load(tmp_path / "a.csv")
    assert isinstance(data, TextDataset)
    assert (list(data), data.class_names) == ([("good, or so", 1), ("NA", 0)], ("no", "yes"))
    (tmp_path / "b.csv").write_bytes("\ufefftext,label\r\na,1\r\n\r\nb,0\r\n".encode())
    assert list(load(tmp_path / "b.csv")) == [("a", 1), ("b", 0)]
    (tmp_path / "a.tsv").write_text('sentence\tlabel\n"so it goes\t1\nfine\t0\n')
    assert list(load(tmp_path / "a.tsv", columns=Columns(text="sentence"))) == [('"so it goes', 1), ("fine", 0)]
    (tmp_path / "a.jsonl").write_text('{"text": "a", "label": 1}\n{"text": "b", "label": 0, "more": 2}\n')
    assert list(load(tmp_path / "a.jsonl")) == [("a", 1), ("b", 0)]


@pytest.mark.parametrize(
    ("labels", "names", "expected"),
    [
        (["pos", "neg", "pos"], None, ([1, 0, 1], ("neg", "pos"))),
        (["pos", "neg", "pos"], ["pos", "neg"], ([0, 1, 0], ("pos", "neg"))),
        (["2", "0", "1"], None, ([2, 0, 1], ("0", "1", "2"))),
        (["07", "10", "07"], None, ([0, 1, 0], ("07", "10"))),
        ([1.0, 0.0, 1.0], ["a", "b"], ([1, 0, 1], ("a", "b"))),
    ],
)
def test_labels_are_numbers_or_names(tmp_path: Path, write_parquet: WriteParquet, labels, names, expected) -> None:
    data = load(write_parquet(tmp_path / "a.parquet", {"text": list("abc"), "label": labels}), class_names=names)
    assert (data.labels.tolist(), data.class_names) == expected


def test_labels_that_nobody_reads_may_be_missing(tmp_path: Path, write_parquet: WriteParquet) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"text": ["x"], "class": [0]})
    assert load(path, columns=Columns(label="class")).labels.tolist() == [0]
    assert load(path, labels="optional").labels.tolist() == [-1]
    path = write_parquet(tmp_path / "b.parquet", {"text": list("abc"), "label": [0, -1, None]}, ["x", "y"])
    assert load(path, labels="optional").labels.tolist() == [0, -1, -1]
    with pytest.raises(DataError, match="rows"):
        load(path)


def test_images_in_cells_or_beside_the_file_and_corrupt_ones(tmp_path: Path, write_parquet: WriteParquet) -> None:
    whole = encoded(picture(0, size=64))
    contents = (whole, encoded(picture(5, mode="LA")), whole[: len(whole) // 2], b"not an image", None)
    picture(9).save(tmp_path / "nine.png")
    cells = [{"bytes": content, "path": None} for content in contents]
    cells += [{"bytes": None, "path": name} for name in ("nine.png", "ten.png")]  # stored next to the file
    data = load(write_parquet(tmp_path / "a.parquet", {"image": cells, "label": [0] * 7}))
    for row, expected in ((0, picture(0, size=64)), (1, picture(5, mode="LA")), (5, picture(9))):
        assert same_image(data[row][0], expected)
    for row, token in ((2, "row 2 of .*a.parquet"), (3, "row 3 of"), (4, "row 4 of"), (6, "ten.png")):
        with pytest.raises(DataError, match=token):
            data[row]
    (tmp_path / "b.csv").write_text("image,label\nnine.png,0\n")
    assert same_image(load(tmp_path / "b.csv")[0][0], picture(9))


def test_text_pairs_and_nested_columns(tmp_path: Path, write_parquet: WriteParquet) -> None:
    columns = {"text": ["a", "b"], "text_pair": ["c", None], "label": [1, 0]}
    pairs = load(write_parquet(tmp_path / "two.parquet", columns))
    assert pairs[0] == (("a", "c"), 1)
    with pytest.raises(DataError, match="row 1"):
        pairs[1]
    with pytest.raises(DataError, match="text_pear"):
        load(tmp_path / "two.parquet", columns=Columns(text_pair="text_pear"))
    path = write_parquet(tmp_path / "a.parquet", {"translation": [{"en": "dog", "de": "Hund"}]})
    assert load(path, columns=Columns(text="translation.de"), labels="optional")[0] == ("Hund", -1)


def pictures_in(folder: Path, *places: str) -> Path:
    for number, place in enumerate(places):
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        picture(number).save(folder / place)
    return folder


def test_a_folder_for_each_class(tmp_path: Path) -> None:
    folder = pictures_in(tmp_path / "pets", "dog/2.png", "cat/b/1.png", "cat/a.JPG", "loose.png", ".git/0.png")
    (folder / "cat" / "readme.md").touch()
    data = load(folder)
    assert (data.class_names, data.labels.tolist(), data.name) == (("cat", "dog"), [0, 0, 1], "pets")
    assert same_image(data[2][0], picture(0))
    assert load(folder, class_names=["dog", "cat"]).labels.tolist() == [0, 1, 1]
    assert load(folder, labels="optional").labels.tolist() == [0, 0, 1, -1]
    assert [file.name for file in images_below(folder)] == ["a.JPG", "1.png", "2.png", "loose.png"]
    with pytest.raises(DataError, match="dog"):
        load(folder, class_names=["cat"])
    with pytest.raises(DataError, match="no images"):
        load(pictures_in(tmp_path / "flat", "a.png"))


def test_a_folder_with_splits_above_the_classes(tmp_path: Path) -> None:
    folder = pictures_in(tmp_path / "pets", "train/cat/1.png", "train/dog/2.png", "test/cat/3.png")
    assert (len(load(folder, "train")), load(folder, "test").class_names) == (2, ("cat",))
    for folder_of, token in ((folder, "choose"), (pictures_in(folder, "other/4.png"), "splits")):
        with pytest.raises(DataError, match=token):  # as classes they would mix training and test data
            load(folder_of)


def test_data_of_the_datasets_library_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])})
    splits = {
        name: datasets.Dataset.from_dict({"text": texts, "label": [1] * len(texts)}, features=features)
        for name, texts in (("train", ["a", "b"]), ("test", ["c"]))
    }
    asked = []

    def load_dataset(path: str, name: str | None, split: str | None) -> Any:
        asked.append((path, name, split))
        return splits if split is None else splits[split]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    data = load("hub:glue/sst2", "test", config="small")
    assert (list(data), data.class_names, data.name) == ([("c", 1)], ("no", "yes"), "glue/sst2")
    with pytest.raises(DataError, match="choose"):
        load("hub:glue/sst2")
    assert asked == [("glue/sst2", "small", "test"), ("glue/sst2", None, None)]
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match="data"):
        load("hub:glue/sst2")

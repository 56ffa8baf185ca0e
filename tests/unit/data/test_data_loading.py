from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from stand_ins import WriteParquet, encoded, picture

from hydra_ensembles.data.dataset import ImageDataset, TextDataset
from hydra_ensembles.data.loading import Columns, load
from hydra_ensembles.errors import DataError


def test_a_folder_with_a_file_for_each_split(image_folder: Path) -> None:
    data = load(image_folder, split="train")
    assert isinstance(data, ImageDataset)
    assert (len(data), data.class_names, data.name) == (6, ("cat", "dog"), "pictures")
    image, label = data[3]
    assert image.mode == "RGB"
    assert label == 1
    assert np.array_equal(np.asarray(image), np.asarray(picture(3)))


def test_a_file_and_a_root(image_folder: Path) -> None:
    assert len(load(image_folder / "test.parquet")) == 4
    assert len(load("pictures/test.parquet", root=image_folder.parent)) == 4
    assert load(image_folder / "test.parquet", "test").name == "pictures"
    with pytest.raises(DataError, match="is one file, it has no split 'train'"):
        load(image_folder / "test.parquet", "train")


def test_missing_splits_list_those_found(image_folder: Path) -> None:
    with pytest.raises(DataError, match=r"no split 'validation'; found: \['test', 'train'\]"):
        load(image_folder, "validation")
    with pytest.raises(DataError, match=r"has the splits \['test', 'train'\]; choose one"):
        load(image_folder)
    (image_folder / "train.parquet").unlink()
    assert len(load(image_folder)) == 4  # one split needs no choosing


def test_missing_path_lists_what_lies_there(image_folder: Path) -> None:
    with pytest.raises(DataError, match=r"nothing\.parquet does not exist.*test\.parquet, train\.parquet"):
        load(image_folder / "nothing.parquet")
    with pytest.raises(DataError, match="nor does the folder"):
        load(image_folder / "no" / "where" / "at.parquet")


def test_missing_columns_are_named(tmp_path: Path, write_parquet: WriteParquet) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"picture": [b"x"], "label": [0]})
    with pytest.raises(DataError, match=r"no column 'image' or 'text'; it has \['picture', 'label'\]"):
        load(path)
    path = write_parquet(tmp_path / "b.parquet", {"text": ["x"], "class": [0]})
    with pytest.raises(DataError, match=r"no label column 'label'; it has \['text', 'class'\]"):
        load(path)
    assert load(path, columns=Columns(label="class")).labels.tolist() == [0]
    unlabelled = load(path, labels="optional")
    assert unlabelled.labels.tolist() == [-1]
    assert unlabelled.class_names == ()


def test_missing_labels_name_the_first_row(tmp_path: Path, write_parquet: WriteParquet) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"text": list("abc"), "label": [0, -1, None]}, ["x", "y"])
    with pytest.raises(DataError, match=r"row 1 of .* has no label \(got -1\), nor have 2 rows in all"):
        load(path)
    assert load(path, labels="optional").labels.tolist() == [0, -1, -1]


def test_a_corrupt_image_names_its_row(tmp_path: Path, write_parquet: WriteParquet) -> None:
    whole = encoded(picture(0, size=64))
    cells = [{"bytes": content, "path": None} for content in (whole, whole[: len(whole) // 2], b"not an image", None)]
    data = load(write_parquet(tmp_path / "a.parquet", {"image": cells, "label": [0, 0, 0, 0]}))
    data[0]
    with pytest.raises(DataError, match=r"row 1 of .*a\.parquet cannot be decoded"):
        data[1]
    with pytest.raises(DataError, match=r"row 2 of .*a\.parquet cannot be decoded as an image \(12 bytes\)"):
        data[2]
    with pytest.raises(DataError, match=r"row 3 of .*a\.parquet has no image"):
        data[3]


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1", "LA", "CMYK"])
def test_every_mode_becomes_rgb(tmp_path: Path, write_parquet: WriteParquet, mode: str) -> None:
    kind = "TIFF" if mode == "CMYK" else "PNG"
    content = encoded(picture(5, mode=mode), kind)
    data = load(write_parquet(tmp_path / "a.parquet", {"image": [content], "label": [0]}))
    assert data[0][0].mode == "RGB"
    if mode == "L":
        channels = np.asarray(data[0][0])
        assert np.array_equal(channels[..., 0], np.asarray(picture(5, mode="L")))
        assert np.array_equal(channels[..., 0], channels[..., 2])


def test_sixteen_bit_grey_is_scaled_not_clipped(tmp_path: Path, write_parquet: WriteParquet) -> None:
    deep = Image.fromarray(np.array([[0, 0x1234], [0x8000, 0xFFFF]], dtype=np.uint16))
    data = load(write_parquet(tmp_path / "a.parquet", {"image": [encoded(deep)], "label": [0]}))
    assert np.asarray(data[0][0])[..., 0].tolist() == [[0, 0x12], [0x80, 0xFF]]


def test_a_transparent_palette_gives_no_warning(tmp_path: Path, write_parquet: WriteParquet) -> None:
    image = picture(3, mode="P")
    image.info["transparency"] = bytes([0, 128] + [255] * 254)
    data = load(write_parquet(tmp_path / "a.parquet", {"image": [encoded(image)], "label": [0]}))
    assert data[0][0].mode == "RGB"


def test_images_by_path_beside_the_file(tmp_path: Path, write_parquet: WriteParquet) -> None:
    picture(9).save(tmp_path / "nine.png")
    cells = [{"bytes": None, "path": "nine.png"}, {"bytes": None, "path": "ten.png"}]
    data = load(write_parquet(tmp_path / "a.parquet", {"image": cells, "label": [0, 1]}))
    assert np.array_equal(np.asarray(data[0][0]), np.asarray(picture(9)))
    with pytest.raises(DataError, match=r"ten\.png cannot be read"):
        data[1]


def test_text_and_pairs(tmp_path: Path, write_parquet: WriteParquet) -> None:
    single = load(write_parquet(tmp_path / "one" / "test.parquet", {"text": ["a", "b"], "label": [1, 0]}))
    assert isinstance(single, TextDataset)
    assert single[0] == ("a", 1)
    assert single.class_names == ("0", "1")
    columns = {"text": ["a", "b"], "text_pair": ["c", None], "label": [1, 0]}
    pairs = load(write_parquet(tmp_path / "two" / "test.parquet", columns))
    assert pairs[0] == (("a", "c"), 1)
    with pytest.raises(DataError, match=r"row 1 of .* has no text in column 'text_pair'"):
        pairs[1]


def test_shards_are_joined_in_order(tmp_path: Path, write_parquet: WriteParquet) -> None:
    for shard in (1, 0):
        name = f"data/train-0000{shard}-of-00002.parquet"
        write_parquet(tmp_path / name, {"text": [f"{shard}{row}" for row in range(2)], "label": [0, 1]})
    write_parquet(tmp_path / "data/test-00000-of-00001-abc123.parquet", {"text": ["t"], "label": [0]})
    assert [text for text, _ in load(tmp_path, "train")] == ["00", "01", "10", "11"]
    assert len(load(tmp_path, "test")) == 1


def test_string_labels_are_numbered(tmp_path: Path, write_parquet: WriteParquet) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"text": list("abc"), "label": ["pos", "neg", "pos"]})
    data = load(path)
    assert (data.class_names, data.labels.tolist()) == (("neg", "pos"), [1, 0, 1])
    assert load(path, class_names=["pos", "neg"]).labels.tolist() == [0, 1, 0]
    with pytest.raises(DataError, match=r"row 0 of .* label 'pos', which is not one of \['neg', 'neutral'\]"):
        load(path, class_names=["neg", "neutral"])


def test_nested_columns(tmp_path: Path, write_parquet: WriteParquet) -> None:
    cells = [{"en": "dog", "de": "Hund"}]
    path = write_parquet(tmp_path / "a.parquet", {"translation": cells})
    data = load(path, columns=Columns(text="translation.de"), labels="optional")
    assert data[0] == ("Hund", -1)


def test_files_that_are_not_what_they_say(tmp_path: Path, write_parquet: WriteParquet) -> None:
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        load(tmp_path / "broken.parquet")
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(DataError, match=r"a\.json is not of a known kind; accepted suffixes: \.parquet"):
        load(tmp_path / "a.json")
    with pytest.raises(DataError, match="has no rows"):
        load(write_parquet(tmp_path / "empty.parquet", {"text": [], "label": []}))


def test_csv_with_quotes_and_tsv_without(tmp_path: Path) -> None:
    csv = tmp_path / "reviews" / "test.csv"
    csv.parent.mkdir()
    csv.write_text('text,label\n"good, really\nvery ""good""",1\nbad,0\nNA,0\n12,1\n', encoding="utf-8")
    data = load(csv.parent, "test")
    assert [text for text, _ in data] == ['good, really\nvery "good"', "bad", "NA", "12"]
    assert data.labels.tolist() == [1, 0, 0, 1]
    tsv = tmp_path / "dev.tsv"
    tsv.write_text('sentence\tlabel\n"unbalanced, quote\tneg\nfine\tpos\n', encoding="utf-8")
    data = load(tsv, columns=Columns(text="sentence"))
    assert list(data) == [('"unbalanced, quote', 0), ("fine", 1)]
    assert data.class_names == ("neg", "pos")


def test_csv_of_numbers_is_still_text(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label\n1,0\n2,1\n")
    assert load(tmp_path / "a.csv")[1] == ("2", 1)


def test_csv_errors(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label\nonly one field\n")
    with pytest.raises(DataError, match="cannot be read as a table"):
        load(tmp_path / "a.csv")
    (tmp_path / "b").mkdir()
    for suffix in ("csv", "tsv"):
        (tmp_path / "b" / f"test.{suffix}").write_text("text\n")
    with pytest.raises(DataError, match=r"both as CSV and as TSV: \['test'\]"):
        load(tmp_path / "b", "test")


def test_a_text_longer_than_a_block(tmp_path: Path) -> None:
    long_text = "word " * 400_000
    (tmp_path / "a.csv").write_text(f"text,label\nshort,0\n{long_text},1\n")
    assert load(tmp_path / "a.csv")[1][0] == long_text


def test_columns_must_have_names() -> None:
    with pytest.raises(DataError, match="the name of the label column is empty"):
        Columns(label="")

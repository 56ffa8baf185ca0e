"""Archives: every kind of file, in a fixed order; broken items are reported and skipped."""

import base64
import io
import json
import tarfile
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hydra_ensembles.data.loading import Columns
from hydra_ensembles.errors import DataError
from hydra_ensembles.serve.archives import Archive
from serving import picture


def tar(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz" if path.suffix == ".tgz" else "w") as file:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            file.addfile(info, io.BytesIO(content))
    return path


def read(path: Path, kind: Any, **settings: Any) -> list[tuple[str, Any]]:
    return [(item.name, (item.error and "!") or item.content) for item in Archive(path, kind, **settings)]


def test_images_of_every_kind_in_one_order(tmp_path: Path) -> None:
    (tmp_path / "b" / "deep").mkdir(parents=True)
    (tmp_path / "b" / "deep" / "x.PNG").write_bytes(picture())
    (tmp_path / "a.jpg").write_bytes(picture())
    (tmp_path / ".hidden.png").write_bytes(picture())
    (tmp_path / "notes.md").write_text("not an image")
    tar(tmp_path / "c.tgz", {"0/1.png": picture(1), "0/1.json": b"{}", "0/._1.png": b"", "2.jpeg": picture(2)})
    rows = [{"bytes": picture(3), "path": None}, {"bytes": None, "path": "a.jpg"}, None]
    days = [date(2026, 1, day) for day in (7, 8, 9)]
    pq.write_table(pa.table({"image": rows, "id": [7, None, 9], "day": days}), tmp_path / "d.parquet")
    (tmp_path / "e.jsonl").write_text(json.dumps({"image": "a.jpg"}) + "\n")
    assert read(tmp_path, "image") == [
        ("a.jpg", tmp_path / "a.jpg"),
        ("b/deep/x.PNG", tmp_path / "b" / "deep" / "x.PNG"),
        ("c.tgz/0/1.png", picture(1)),
        ("c.tgz/2.jpeg", picture(2)),
        ("d.parquet:0", picture(3)),
        ("d.parquet:1", tmp_path / "a.jpg"),
        ("d.parquet:2", "!"),
        ("e.jsonl:0", tmp_path / "a.jpg"),
    ]
    archive = Archive(tmp_path, "image")
    assert (archive.ignored, archive.count()) == (1, None)
    assert Archive(tmp_path / "d.parquet", "image").count() == 3
    kept = [tuple(item.kept.values()) for item in Archive(tmp_path / "d.parquet", "image", keep=["id", "day", "image"])]
    pixels = base64.b64encode(picture(3)).decode()
    assert kept[0] == ("7", "2026-01-07", json.dumps({"bytes": pixels, "path": None}))
    assert [other[:2] for other in kept[1:]] == [(None, "2026-01-08"), ("9", "2026-01-09")]
    assert Archive(tmp_path, "image", without=tmp_path / "b").count() is None
    assert "b/deep/x.PNG" not in dict(read(tmp_path, "image", without=tmp_path / "b"))


def test_texts_of_every_kind(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('text,text_pair,id\n"two\nlines",with,1\n007,,2\n', encoding="utf-8")
    (tmp_path / "b.tsv").write_text('"id\ttext\n1\ta "quote\n', encoding="utf-8-sig")  # quotes are literal in TSV
    (tmp_path / "c.jsonl").write_text('{"text": "one"}\n\n{"text": "two", "text_pair": "three"}\n')
    (tmp_path / "c2.jsonl").write_text('{"text": "alone"}\n')
    (tmp_path / "d.txt").write_text("first\n\n  second\u2028still  \n", encoding="utf-8")
    tar(tmp_path / "e.tar", {"1.txt": b"whole\ntext\n", "1.png": picture()})
    assert read(tmp_path, "text") == [
        ("a.csv:0", ("two\nlines", "with")),
        ("a.csv:1", ("007", "")),
        ("b.tsv:0", 'a "quote'),
        ("c.jsonl:0", "!"),  # the column exists, but not in this row
        ("c.jsonl:1", ("two", "three")),
        ("c2.jsonl:0", "alone"),
        ("d.txt:0", "first"),
        ("d.txt:2", "second\u2028still"),
        ("e.tar/1.txt", "whole\ntext"),
    ]
    (tmp_path / "n.jsonl").write_text('{"deep": {"en": "hello"}}\n')
    assert read(tmp_path / "n.jsonl", "text", columns=Columns(text="deep.en")) == [("n.jsonl:0", "hello")]
    named = Columns(text_pair="pear")
    assert read(tmp_path / "c.jsonl", "text", columns=named) == [("c.jsonl:0", "!"), ("c.jsonl:1", "!")]
    assert dict(read(tmp_path / "e.tar", "text", columns=named)) == {"e.tar/1.txt": "!"}  # it has no second texts
    with pytest.raises(DataError, match=r"a.csv has no column 'pear'"):
        Archive(tmp_path, "text", named)


def test_columns_with_a_dot_in_their_name_and_second_texts_that_are_missing(tmp_path: Path) -> None:
    rows = {"review.text": ["a", "b"], "text_pair": ["c", None], "review": [{"text": "no"}] * 2}
    pq.write_table(pa.table(rows), tmp_path / "a.parquet")
    (tmp_path / "b.csv").write_text("review.text,x.y\na,1\n\nb,2\n")  # an empty line is no row
    (tmp_path / "c.jsonl").write_text('{"review.text": "a"}\n{"review": {"text": "b"}}\n')
    assert read(tmp_path, "text", columns=Columns(text="review.text")) == [
        ("a.parquet:0", ("a", "c")), ("a.parquet:1", "!"), ("b.csv:0", "a"), ("b.csv:1", "b"),
        ("c.jsonl:0", "a"), ("c.jsonl:1", "b")]  # fmt: skip
    (item, _) = Archive(tmp_path / "b.csv", "text", Columns(text="review.text"), keep=["x.y"])
    assert item.kept == {"x.y": "1"}


def test_bytes_that_are_not_utf_8_are_said_to_be_that(tmp_path: Path) -> None:
    for name, content in (("a.csv", "text\nfine\ncafé\n"), ("b.jsonl", '{"text": "café"}\n'), ("c.txt", "café")):
        (tmp_path / name).write_text(content, encoding="latin-1")
    tar(tmp_path / "d.tar", {"1.txt": b"caf\xe9"})
    assert ["not valid UTF-8" in item.error for item in Archive(tmp_path, "text")] == [False, True, True, True, True]


def test_what_is_broken_is_an_item(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,id\nfine,1\nshort\nfine,2\nfine,3,4\nfine,4\n\n")
    (tmp_path / "b.csv").write_text("other\nhello\n")
    (tmp_path / "c.jsonl").write_text(
        '{"text": "fine"}\n{"text"\n[1]\n{"text": 3}\n{"text": "fine"}\n{"text": "", "text": "fine"}\n'
    )
    (tmp_path / "d.parquet").write_bytes(b"PAR1 nothing PAR1")
    whole = tar(tmp_path / "e.tar", {"1.txt": b"fine", "2.txt": b"x" * 5000}).read_bytes()
    (tmp_path / "e.tar").write_bytes(whole[:2000])
    (tmp_path / "f.tgz").write_bytes(b"no tar")
    (tmp_path / "g.txt").write_text("one\ntwo\n", encoding="utf-16")  # its second line is valid UTF-8 with NULs
    found = read(tmp_path, "text")
    assert [name for name, content in found if content == "fine"] == [
        "a.csv:0", "a.csv:2", "a.csv:4", "c.jsonl:0", "c.jsonl:4", "e.tar/1.txt"]  # fmt: skip
    broken = [
        "a.csv:1", "a.csv:3", "b.csv", "c.jsonl:1", "c.jsonl:2", "c.jsonl:3", "c.jsonl:5", "d.parquet", "e.tar",
        "f.tgz", "g.txt"]  # fmt: skip
    assert [name for name, content in found if content == "!"] == broken
    whole_files = [item.name for item in Archive(tmp_path, "text") if item.error.startswith("the file")]
    assert whole_files == [name for name in broken if ":" not in name]


@pytest.mark.parametrize(
    ("name", "damage", "texts"),
    [
        ("a.tgz", lambda raw: raw, 4),
        ("a.tar", lambda raw: raw[:2053] + b"?" + raw[2054:], 2),  # corrupts the header of the third
        ("a.tar", lambda raw: raw[: 2 * 1024], 2),  # truncated between members
        ("a.tar", lambda raw: raw + raw, 4),  # concatenated
    ],
)
def test_a_tar_shard_that_does_not_end_as_one_is_reported(name, damage, texts: int, tmp_path: Path) -> None:
    file = tar(tmp_path / name, {f"{number}.txt": b"fine" for number in range(4)})
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    wanted = [(f"{name}/{number}.txt", "fine") for number in range(texts)]
    assert read(tmp_path, "text") == wanted + [(name, "!")] * (texts < 4 or len(damage(whole)) > len(whole))


def test_a_field_may_be_long(tmp_path: Path) -> None:
    text = "\n".join(["hello"] * 40_000)  # more than the csv module's default limit
    (tmp_path / "a.csv").write_text(f'text\n"{text}"\nhello\n')
    assert read(tmp_path, "text") == [("a.csv:0", text), ("a.csv:1", "hello")]


def test_linked_folders_are_read_once(tmp_path: Path) -> None:
    for folder in ("in/deep", "elsewhere"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "in" / "deep" / "a.txt").write_text("one\n")
    (tmp_path / "elsewhere" / "b.txt").write_text("two\n")
    (tmp_path / "in" / "more").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "in" / "same").symlink_to(tmp_path / "in" / "deep")
    (tmp_path / "in" / "deep" / "above").symlink_to(tmp_path / "in")
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "in" / "deep")
    assert read(tmp_path / "in", "text") == [("deep/a.txt:0", "one"), ("more/b.txt:0", "two")]
    assert read(tmp_path / "in", "text", without=tmp_path / "elsewhere") == [("deep/a.txt:0", "one")]


def test_what_is_no_archive_is_refused_at_once(tmp_path: Path) -> None:
    for number, (name, content, kind, settings, token) in enumerate((
        ("a.md", "text", "text", {}, "no texts"),
        ("a.csv", "other\n1\n", "text", {}, "'text'"),
        ("a.csv", "text,text,id\nhello,world,1\n", "text", {}, "2 columns 'text'"),
        ("a.txt", "text\n", "text", {"keep": ["id"]}, "no tables"),
        ("a.parquet", "no table", "text", {}, "Parquet"),
    )):  # fmt: skip
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / name).write_text(content)
        with pytest.raises(DataError, match=token):
            Archive(folder, kind, **settings)  # type: ignore[arg-type]

"""Labels in tables are whole numbers or names; nothing is rounded, and a missing one is seen."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from stand_ins import WriteParquet

from hydra_ensembles.data.loading import Columns, load
from hydra_ensembles.errors import DataError


def test_fractions_are_refused_and_whole_floats_are_not(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label\na,1.0\nb,0.9\nc,1.2\n")
    for policy in ("required", "optional"):
        with pytest.raises(DataError, match=r"row 1 of .*a\.csv has the label 0\.9; labels must be whole numbers"):
            load(tmp_path / "a.csv", labels=policy)  # type: ignore[arg-type]
    (tmp_path / "b.csv").write_text("text,label\na,1.0\nb,0\nc,\n")
    assert load(tmp_path / "b.csv", labels="optional").labels.tolist() == [1, 0, -1]


def test_nan_is_no_label(tmp_path: Path, write_parquet: WriteParquet) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"text": list("abc"), "label": [1.0, math.nan, 0.0]})
    assert load(path, labels="optional").labels.tolist() == [1, -1, 0]
    with pytest.raises(DataError, match=r"row 1 of .* has no label \(got nan\)"):
        load(path)
    (tmp_path / "b.jsonl").write_text('{"text": "a", "label": "x"}\n{"text": "b", "label": NaN}\n')
    assert load(tmp_path / "b.jsonl", labels="optional").labels.tolist() == [0, -1]


@pytest.mark.parametrize("label", [[1], {"x": 1}, math.inf, 0.5])
@pytest.mark.parametrize("other", [0, "x"])
def test_what_is_no_label_names_its_row(tmp_path: Path, label: Any, other: Any) -> None:
    rows = [{"text": "a", "label": other}, {"text": "b", "label": label}]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    with pytest.raises(DataError, match=r"row 1 of .*a\.jsonl has the label "):
        load(tmp_path / "a.jsonl")


def test_dates_are_no_labels(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label\na,2024-01-01\n")
    with pytest.raises(DataError, match=r"row 0 of .* has the label .*columns=Columns\(label=\.\.\.\)"):
        load(tmp_path / "a.csv")


@pytest.mark.parametrize(("suffix", "comma"), [("csv", ","), ("tsv", "\t")])
def test_texts_of_digits_keep_every_letter(tmp_path: Path, suffix: str, comma: str) -> None:
    rows = [("text", "text_pair", "label"), ("007", "1.50", "0"), ("1e3", "true", "1"), ("", "2024-01-01", "1")]
    (tmp_path / f"a.{suffix}").write_text("\n".join(comma.join(row) for row in rows))
    data = load(tmp_path / f"a.{suffix}")
    assert list(data) == [(("007", "1.50"), 0), (("1e3", "true"), 1), (("", "2024-01-01"), 1)]
    named = load(tmp_path / f"a.{suffix}", columns=Columns(text="text_pair", text_pair="text"))
    assert named[0] == (("1.50", "007"), 0)


@pytest.mark.parametrize("break_", ["\u2028", "\u2029", "\u0085"], ids=["U+2028", "U+2029", "U+0085"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_only_line_ends_end_a_line_of_json(tmp_path: Path, break_: str, end: str) -> None:
    texts = [f"one{break_}text", "another"]
    lines = [json.dumps({"text": text, "label": 0}, ensure_ascii=False) for text in texts]
    (tmp_path / "a.jsonl").write_bytes(end.join([*lines, ""]).encode())
    assert [text for text, _ in load(tmp_path / "a.jsonl")] == texts


def test_a_broken_line_of_json_has_its_number(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a\u2028b", "label": 0}\n\n{"text": \n', encoding="utf-8")
    with pytest.raises(DataError, match=r"line 3 of .*a\.jsonl is not JSON"):
        load(tmp_path / "a.jsonl")

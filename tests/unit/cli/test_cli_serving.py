"""`hydra-ensembles export` and `score`."""

import json

import pyarrow.parquet as pq

import hydra_ensembles as he
from cli_cases import fail, succeed
from served_models import pretend


def test_export_writes_what_the_library_writes(run_folder, world, tmp_path, monkeypatch):
    one = he.Ensemble.from_pretrained(run_folder / "ensemble")
    pretend(monkeypatch, one)
    out = succeed("export", run_folder, tmp_path / "model.pt2", "--example", world / "dots", "--device", "cpu")
    assert "model.pt2.json" in out
    about = json.loads((tmp_path / "model.pt2.json").read_text())
    assert about["compared"]["batches"] == [1, 7, 32, 6]
    pretend(monkeypatch, one, lambda found: {**found, "score": found["score"] + 1})
    assert "score" in fail("export", run_folder, tmp_path / "other.pt2")
    assert not (tmp_path / "other.pt2").exists()


def test_score_writes_shards_and_says_what_it_left_out(run_folder, world, tmp_path):
    pictures, output = tmp_path / "pictures", tmp_path / "scores"
    pictures.mkdir()
    for file in (world / "dots").glob("*.png"):
        (pictures / file.name).write_bytes(file.read_bytes())
    (pictures / "0.png").write_text("no image")
    (pictures / "list.md").write_text("other")
    command = ("score", run_folder, pictures, "-o", output, "--shard-rows", 2, "--no-progress", "--wide")
    out = succeed(*command)
    assert "6 rows in 3 shards" in out
    assert "1 of them have no answer" in out
    assert json.loads(succeed(*command, "--json")) == {"rows": 6, "unreadable": 1, "shards": 3}
    rows = [row for file in sorted(output.glob("rows/*")) for row in pq.read_table(file).to_pylist()]
    assert [row["input"] for row in rows] == [f"{number}.png" for number in range(6)]
    assert len(rows[0]["probs"]) == 3
    assert "another run" in fail(*command[:-1])


def test_score_and_export_read_the_columns_they_are_told(text_folder, tmp_path, monkeypatch):
    (tmp_path / "in.csv").write_text("sentence,id\na good film,7\n")
    pretend(monkeypatch, he.Ensemble.from_pretrained(text_folder / "ensemble"))
    named = ("--column", "text=sentence")
    out = succeed("export", text_folder, tmp_path / "model.pt2", "--example", tmp_path / "in.csv", *named)
    assert "model.pt2.json and model.pt2.tokenizer.json" in out
    succeed("score", text_folder, tmp_path / "in.csv", "-o", tmp_path / "out", *named, "--keep", "id", "--no-progress")
    (row,) = pq.read_table(tmp_path / "out" / "rows").to_pylist()
    assert (row["input"], row["id"]) == ("in.csv:0", "7")

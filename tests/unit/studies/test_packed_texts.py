"""A study of texts on a machine that has neither the texts nor transformers' weights: from tokens to stored rows."""

from pathlib import Path
from typing import Any

import numpy as np
import transformers
from small_studies import CPU

import hydra_ensembles as he
from architectures_decoders import GROUPED
from studies.classifiers import ClassifierTask, recipe
from studies.engine import Stage, run
from studies.promise import compared, lines
from studies.rows import Rows, published, write_rows
from studies.sets import DataFolder
from studies.tables import read_csv
from unit.convert.test_decoders import language_model, word_tokenizer

NAME, WORDS = "text-sst2-base", 40
SIZES = {"train": 300, "rank": 8, "calibrate": 120, "B": 24, "foreign": 8}


def packed(task: ClassifierTask, classes: list[str]) -> None:
    """Write random tokens, in which one word shows the class."""
    draws, root = np.random.default_rng(0), task.source.root
    stages: tuple[Stage, ...] = ("report", "held_out")
    outside = [one.name for stage in stages for group in task._foreign(stage).values() for one in group]
    arrays: dict[str, Any] = {"classes|names": np.array(classes)}
    for name, count in {**SIZES, task.suite.id.name: 90, **dict.fromkeys(outside, 20)}.items():
        labels, widths = np.arange(count) % len(classes), np.sort(draws.integers(4, 9, count))
        ids = draws.integers(5, WORDS, (count, 9))
        ids[:, 1] = 3 + labels
        mask = np.arange(9) < widths[:, None]
        inputs = {"attention_mask": mask, "input_ids": ids * mask, "token_type_ids": 0 * ids}
        arrays |= {f"{name}|{key}": one.astype(np.uint16) for key, one in inputs.items()} | {f"{name}|labels": labels}
    (root / "packed").mkdir()
    np.savez_compressed(task.pack, **arrays)


def nomic(root: Path) -> None:
    """Write a NomicBert of four layers."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 32}
    model = transformers.NomicBertModel(transformers.NomicBertConfig(vocab_size=WORDS, head_dim=4, **sizes))
    he.convert(model.eval(), num_labels=2).save_pretrained(root / "weights" / "nomic")


def test_every_method_of_the_study_at_bert_base_size(tmp_path: Path) -> None:
    settings = recipe()
    plain = settings["tasks"][NAME]
    plain["training"] |= {"epochs": 1, "batch_size": 128, "grid": [1e-3]}
    plain["taylor_batches"] = 1
    plain["recovery"] |= {"prune": 8, "steps": 2, "batch_size": 32}
    task = ClassifierTask(NAME, settings, DataFolder(tmp_path), CPU)
    packed(task, ["negative", "positive"])
    nomic(tmp_path)
    folder = run(task, tmp_path / "runs", [], [0], ["choose", "report", "tables"])
    rows = Rows.read(folder / "rows.parquet")
    assert {*plain["methods"]} - {"Hydra (Taylor)"} <= {*rows.runs}  # its sets of heads may be equal
    assert len(rows.places["sst2|held-out"]) == SIZES["calibrate"]
    (tmp_path / "rows").mkdir()
    write_rows(tmp_path / "rows" / f"{NAME}.parquet", {"tasks": rows.about["tasks"]}, published(rows))
    assert compared(tmp_path) == [NAME]
    claims = {one["claim"] for one in read_csv(folder / "tables" / f"{NAME}_claims.csv")}
    assert len(claims) > 5
    assert {"single", "laplace", "dropout", "hydra circ", "deep"} <= {one[2] for one in lines(tmp_path, NAME)}


def test_every_method_of_the_study_of_a_decoder(tmp_path: Path) -> None:
    settings = recipe()
    plain = settings["tasks"]["smollm2-tweets"]
    plain["training"] |= {"epochs": 1, "grid": [1e-3, 2e-3]}
    plain["words"] = {"question": "is this {text}", "text": "text {text} answer"}
    plain["words"] |= {key: ["safe", ["unsafe"], "bad"] for key in ("answers", "continuations")}
    task = ClassifierTask("smollm2-tweets", settings, DataFolder(tmp_path), CPU)
    packed(task, ["hate", "offensive", "neither"])
    folder = tmp_path / "weights" / "smollm2"
    language_model({**GROUPED, "num_hidden_layers": 6}).save_pretrained(folder)
    word_tokenizer(chat=True).save_pretrained(folder)
    found = run(task, tmp_path / "runs", [], [0], ["choose", "report", "tables"])
    rows = Rows.read(found / "rows.parquet")
    assert [*rows.runs] == plain["methods"]

"""`hydra-ensembles info` and `hydra-ensembles bench`."""

import json

import pytest

import hydra_ensembles as he
from cli_cases import COLOURS, fail, succeed, vit_flags
from hydra_ensembles.cli.inspect import KEPT, PRUNED, head_map
from hydra_ensembles.report.compare import load_costs


def test_info_of_a_run(run_folder):
    out = succeed("info", run_folder)
    shown = ("members        3", "shared by all members", "3: blue, green, red", "score msp", "heads kept: 24 of 36")
    assert all(words in out for words in shown)
    rows = [line.split()[1:] for line in out.splitlines() if KEPT in line and "kept" not in line]
    assert len(rows) == 3
    assert [sum(row[member].count(PRUNED) for row in rows) for member in range(3)] == [4, 4, 4]


def test_info_as_json(run_folder, text_folder):
    found = json.loads(succeed("info", run_folder, "--json"))
    hydra = he.Ensemble.from_pretrained(run_folder / "ensemble")
    assert found["parameters"] == hydra.describe().parameters
    assert sum(group["parameters"] for group in found["groups"].values()) == found["parameters"]
    assert found["groups"]["mlp"]["shared"] is True
    assert found["groups"]["attention"]["shared"] is False
    assert found["heads"] == [[list(layer) for layer in member] for member in hydra.heads]
    assert found["labels"] == list(COLOURS)
    assert found["calibration"]["threshold"] is not None
    text = json.loads(succeed("info", text_folder, "--json"))
    assert text["preprocessing"]["tokenizer"] is True


def test_info_and_bench_of_models_that_are_not_ours(text_folder, world):
    model = vit_flags(world / "mine.safetensors")
    assert "3, without names" in succeed("info", *model)
    assert "2: negative, positive" in succeed("info", world / "bert")
    quick = ["--repeats", 1, "--warmup", 0, "--batch", 1]
    assert "bert" in succeed("bench", text_folder, "--tokens", 5, "--baseline", world / "bert", *quick)
    assert "small" in succeed("bench", *model, "--name", "small", "--baseline", "none", *quick)


def test_info_of_a_dual_encoder(tmp_path):
    from architectures_clip import transformers_clip

    he.convert(transformers_clip({}, {})).save_pretrained(tmp_path / "clip")
    out = succeed("info", tmp_path / "clip")
    assert "(image tower)" in out
    assert "(text tower)" in out
    assert "there is no classifier" in out
    assert set(json.loads(succeed("info", tmp_path / "clip", "--json"))) == {"kind", "image", "text"}
    assert "is a dual encoder" in fail("bench", tmp_path / "clip")


def test_a_head_map_is_broken_where_the_line_ends():
    heads = (((0,), (1, 2)), ((0, 1, 2), ()), ((2,), (0,)))
    wide, narrow = head_map(heads, 3, width=80), head_map(heads, 3, width=20)
    assert wide.splitlines()[1] == f"    0  {KEPT}{PRUNED}{PRUNED}       {KEPT * 3}       {PRUNED}{PRUNED}{KEPT}"
    assert len(narrow.split("\n\n")) == 3
    assert "member 2" in narrow.split("\n\n")[2]


def test_bench_beside_baselines(run_folder, tmp_path):
    out = succeed("bench", run_folder, "--batch", "1,2", "--batch", 3, "--baseline", "single", "--baseline", "deep",
                  "--optimize", "--repeats", 2, "--warmup", 0, "-o", tmp_path / "costs.json")  # fmt: skip
    assert "inputs/s" in out
    costs = load_costs(tmp_path / "costs.json")
    assert [cost.batch for cost in costs] == [1] * 4 + [2] * 4 + [3] * 4
    single, deep, hydra, optimized = costs[:4]
    assert (single.name, deep.name, hydra.name) == ("single", "deep", "run")
    assert optimized.name == "run, optimized"
    base = he.Ensemble.from_pretrained(run_folder / "base").describe().parameters
    assert single.parameters == base
    assert deep.parameters == 3 * base
    assert base < (hydra.parameters or 0) < 3 * base
    assert single.latency_ratio == 1.0


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--batch", "many"], "whole numbers"),
        (["--batch", "0"], "at least 1"),
        (["--name", "single"], "both called 'single'"),
        (["--baseline", "{world}/bert"], "only models for the same inputs compare"),
    ],
)
def test_bench_with_wrong_flags(run_folder, world, flags, says):
    assert says in fail("bench", run_folder, *(flag.format(world=world) for flag in flags))

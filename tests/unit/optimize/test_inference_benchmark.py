"""The inference benchmark, on shapes that take no time: contenders, merging of runs, tables, figures."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("timm")
BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import contenders  # noqa: E402
import inference  # noqa: E402
import inference_figures  # noqa: E402
import inference_modes  # noqa: E402
import inference_rows  # noqa: E402
import inference_tables  # noqa: E402
from model_shapes import SHAPES  # noqa: E402

sys.path.remove(str(BENCHMARKS))

from hydra_ensembles.model.cost import multiply_adds  # noqa: E402
from hydra_ensembles.model.ensemble import Ensemble  # noqa: E402
from hydra_ensembles.model.layers import Block  # noqa: E402
from hydra_ensembles.optimize.freeze import branching_layer, simplified  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*batching rule.*:UserWarning", "ignore:.*CUDA.*:UserWarning")

TINY = ["--shape", "tiny", "--dtype", "float32", "--device", "cpu", "--modes", "eager", "--repeats", "2"]


def run(path: Path, *arguments: str) -> dict[str, Any]:
    inference.main([*TINY, "--output", str(path), *arguments])
    return json.loads(path.read_text()) if path.exists() else {"rows": [], "failures": {}}


def by_name(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["contender"]: row for row in report["rows"]}


@pytest.fixture(scope="module")
def workshop() -> Any:
    return contenders.Workshop(SHAPES["tiny"], torch.float32, "cpu", seed=0)


@pytest.fixture(scope="module")
def inputs() -> Any:
    return SHAPES["tiny"].inputs(3, torch.Generator().manual_seed(0))


# --- contenders ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", contenders.NAMES)
def test_every_contender_answers_for_all_members(name: str, workshop: Any, inputs: Any) -> None:
    members = 1 if name in contenders.ONE_MEMBER else 3
    made = workshop.make(name, members, inputs)
    modes = inference_modes.Modes(made, inputs, workshop.answer(name, members, inputs))
    error = modes.error("eager")
    assert error is None if made.random else error < 1e-5
    with torch.no_grad():
        logits = made.run(*inputs.values())
    assert logits.shape == ((3, 5) if name == "single" else (members, 3, 5))
    if members > 1:
        assert min((logits[0] - one).abs().max() for one in logits[1:]) > 0  # members differ
    assert made.weight_bytes >= 4 * 0.95 * made.parameters


@pytest.mark.parametrize("trunk", [0, 8, 10])
def test_members_differ_everywhere_above_the_trunk(trunk: int, workshop: Any) -> None:
    ensemble: Ensemble = workshop._ensemble(f"hydra-k{trunk}", 3)
    assert ensemble.config.trunk == trunk
    simple = simplified(ensemble)
    assert branching_layer(simple) == trunk
    for block in simple.encoder.layers[trunk:]:
        assert isinstance(block, Block)
        assert len(block.attention.sizes) == 3
        assert block.attention.distinct is None
        assert block.attention.out_bias.shape[0] == 3
    assert ensemble.readout.classifier.weight.shape[0] == 3
    kept = [len(heads) for heads in ensemble.heads[0]]
    assert kept == [6] * trunk + [4] * (12 - trunk)


def test_uneven_members_lose_as_many_heads_at_other_places(workshop: Any) -> None:
    ensemble: Ensemble = workshop._ensemble("hydra-uneven", 3)
    for member in ensemble.heads:
        assert sum(len(layer) for layer in member) == 48
        assert len({len(layer) for layer in member}) > 1


@pytest.mark.parametrize(("name", "factor"), [("deep-in-turn", 3.0), ("deep-vmap", 3.0), ("single", 1.0)])
def test_models_that_are_not_ours_do_all_the_arithmetic(name: str, factor: float, workshop: Any, inputs: Any) -> None:
    made = workshop.make(name, 3 if factor > 1 else 1, inputs)
    assert made.multiply_adds == factor * workshop.single_multiply_adds


def test_arithmetic_counts_the_trunk_once_and_few_tokens_in_the_last_block(workshop: Any, inputs: Any) -> None:
    config = workshop._ensemble("hydra-k8", 3).config
    tokens, width, head_dim, mlp = 5, 24, 4, 96
    head = 4 * tokens * width * head_dim + 2 * tokens**2 * head_dim
    last_head = 2 * tokens * width * head_dim + 2 * width * head_dim + 2 * tokens * head_dim
    encoder = 8 * (6 * head + 2 * tokens * width * mlp)
    encoder += 3 * (3 * (4 * head + 2 * tokens * width * mlp) + 4 * last_head + 2 * width * mlp)
    rest = 4 * width * 3 * 64 + 3 * width * 5  # patches, classifiers
    assert contenders.multiply_adds_done(config, tokens, slice(0, 1)) == encoder + rest
    assert contenders.multiply_adds_done(config, tokens, None) == multiply_adds(config, tokens)
    assert workshop.make("hydra-k8", 3, inputs).multiply_adds == encoder + rest


def test_text_has_padding_and_one_full_row() -> None:
    batch = SHAPES["tiny-bert"].inputs(16, torch.Generator().manual_seed(0))
    lengths = batch["attention_mask"].sum(1)
    assert lengths.max() == 8
    assert len(set(lengths.tolist())) > 2


def test_the_most_memory_a_call_holds_is_found() -> None:
    x = torch.zeros(1 << 18)  # a megabyte

    def two_at_a_time(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        del x
        return (y * 2).sum()

    assert 2 << 20 <= inference_modes.allocated_on_cpu(two_at_a_time, [x]) < 3 << 20


# --- runs and their file ---------------------------------------------------------------------------------


def test_runs_merge_into_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "results" / "inference.json"
    first = by_name(run(path, "--batches", "2", "--contenders", "single", "hydra-k8"))
    assert set(first) == {"single", "hydra-k8"}
    assert first["hydra-k8"]["ratio_to_ours"] is None
    assert first["hydra-k8"]["plan"] in ("batched", "loop")
    second = by_name(run(path, "--batches", "2", "--contenders", "single", "hydra-k8", "ours", "deep-in-turn"))
    assert set(second) == {"single", "hydra-k8", "ours", "deep-in-turn"}
    row = second["hydra-k8"]
    assert row["latency_ms"] == first["hydra-k8"]["latency_ms"]  # not measured again
    ours = second["ours"]
    assert row["ratio_to_single"] == pytest.approx(row["latency_ms"] / row["single_ms"])
    assert row["ratio_to_ours"] == pytest.approx(row["ratio_to_single"] / ours["ratio_to_single"])
    assert row["ratio_to_deep"] == pytest.approx(row["ratio_to_single"] / second["deep-in-turn"]["ratio_to_single"])
    assert row["ratio_to_limit"] == pytest.approx(row["ratio_to_single"] / row["limit"])
    assert row["test_set_s"] == pytest.approx(25_000 * row["latency_ms"] / 1e3)
    assert row["peak_memory_bytes"] > row["weight_bytes"]
    assert row["settings"]["torch"] == str(torch.__version__)
    assert row["error"] < 1e-5
    assert "hydra-k8" in capsys.readouterr().out


def test_rows_that_are_there_are_measured_on_demand_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "inference.json"
    run(path, "--batches", "2", "--contenders", "single")
    measured = []
    monkeypatch.setattr(inference.Benchmark, "_measure", lambda self, *work: measured.append(work))
    run(path, "--batches", "2", "--contenders", "single")
    assert measured == []
    run(path, "--batches", "2", "1", "--contenders", "single")
    assert measured == [(["eager"], 1, "single", 1)]
    run(path, "--batches", "2", "--contenders", "single", "--again")
    assert measured[1:] == [(["eager"], 2, "single", 1)]


def test_rows_of_other_hardware_stay(tmp_path: Path) -> None:
    path = tmp_path / "inference.json"
    run(path, "--batches", "2", "--contenders", "single")
    report = json.loads(path.read_text())
    report["rows"][0]["hardware"] = "another machine"
    path.write_text(json.dumps(report))
    rows = run(path, "--batches", "2", "--contenders", "single")["rows"]
    assert len(rows) == 2


def test_a_time_limit_ends_the_run_with_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "inference.json"
    assert run(path, "--batches", "2", "--time-limit", "1e-9")["rows"] == []
    assert "time limit" in capsys.readouterr().out


def test_a_contender_that_fails_is_noted_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "inference.json"
    real = contenders.Workshop.make

    def make(self: Any, name: str, *rest: Any) -> Any:
        if name == "deep-vmap":
            raise RuntimeError("no batching rule\nfor this")
        return real(self, name, *rest)

    monkeypatch.setattr(contenders.Workshop, "make", make)
    report = run(path, "--batches", "2", "--contenders", "deep-vmap", "single")
    assert set(by_name(report)) == {"single"}
    assert list(report["failures"].values()) == ["RuntimeError: no batching rule"]
    monkeypatch.undo()
    report = run(path, "--batches", "2", "--contenders", "deep-vmap", "single")
    assert set(by_name(report)) == {"single", "deep-vmap"}
    assert report["failures"] == {}


def test_wrong_answers_are_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contenders.Workshop, "answer", lambda self, *of: torch.ones(3, 2, 5))
    report = run(tmp_path / "inference.json", "--batches", "2", "--contenders", "hydra-k0")
    assert report["rows"] == []
    assert "off by" in next(iter(report["failures"].values()))


def test_cost_against_the_number_of_members_and_a_given_plan(tmp_path: Path) -> None:
    path = tmp_path / "inference.json"
    report = run(path, "--batches", "2", "--members", "1", "2", "--contenders", "hydra-k8")
    assert sorted(row["members"] for row in report["rows"]) == [1, 2]
    report = run(path, "--batches", "2", "--members", "2", "--contenders", "hydra-k8", "--plan", "loop")
    assert {(row["contender"], row["members"]) for row in report["rows"]} == {
        ("hydra-k8", 1),
        ("hydra-k8", 2),
        ("hydra-k8@loop", 2),
    }


def test_preparing_compiles_and_measures_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: compiled.append(function) or function)
    report = run(tmp_path / "inference.json", "--batches", "2", "--contenders", "single", "hydra-k8", "--prepare-only")
    assert report["rows"] == []
    assert len(compiled) == 2
    assert "prepared in" in capsys.readouterr().out


def test_cells_with_targets_come_first() -> None:
    options = inference.read_options([*TINY[:4], "--device", "cpu", "--batches", "32", "4", "128"])
    work = inference.ordered(options)
    first = [(batch, name) for batch, name, _ in work[: 2 * len(inference.FIRST_CONTENDERS)]]
    assert first == [(batch, name) for batch in (4, 128) for name in inference.FIRST_CONTENDERS]
    assert len(work) == 3 * len(contenders.NAMES)


def test_graphs_without_a_gpu_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        inference.read_options(["--device", "cpu", "--modes", "graphed"])
    assert "CUDA graphs need a GPU" in capsys.readouterr().err


# --- tables and figures ----------------------------------------------------------------------------------


def row(contender: str, batch: int, ratio: float, **changes: Any) -> inference_rows.Row:
    members = 1 if contender in contenders.ONE_MEMBER else 3
    made = inference_rows.Row(
        hardware="GPU",
        shape="vit-b16",
        dtype="bfloat16",
        mode="graphed",
        batch=batch,
        contender=contender,
        members=members,
        plan="",
        latency_ms=ratio * batch,
        latency_low_ms=ratio * batch,
        latency_high_ms=ratio * batch,
        single_ms=float(batch),
        multiply_adds=10**9,
        limit=float(members),
        parameters=10**7,
        weight_bytes=10**7,
        peak_memory_bytes=None,
        repeats=5,
        seed=0,
        error=None,
        preparation_s=0.0,
    )
    return replace(made, **changes)


def rows() -> list[inference_rows.Row]:
    ratios = {"single": 1.0, "ours": 0.9, "deep-in-turn": 3.0, "hydra-k0": 1.7, "hydra-k8": 1.2}
    made = [row(name, batch, ratio) for name, ratio in ratios.items() for batch in (1, 4, 32, 128)]
    for mode in ("graphed", "graphed-eager"):
        made += [row(name, 4, ratio, dtype="float32", mode=mode) for name, ratio in ratios.items()]
    made += [
        row("hydra-k0", 4, 0.5 + 0.4 * members, members=members, mode="graphed-eager") for members in (1, 2, 3, 5, 8)
    ]
    clip = {"shape": "clip-b32", "mode": "graphed-eager", "limit": 2.5}
    made += [
        row(name, 4, ratio, **clip) for name, ratio in {"single": 1.0, "hydra-joint": 1.8, "hydra-texts": 90.0}.items()
    ]
    cpu = {"hardware": "CPU aarch64, 2 threads", "shape": "vit-s16", "dtype": "float32", "mode": "eager"}
    made += [row(name, 8, ratio, **cpu) for name, ratio in ratios.items()]
    few = cpu | {"shape": "clip-b32-100", "limit": 2.6}
    made += [row(name, 8, ratio, **few) for name, ratio in {"single": 1.0, "hydra-joint": 2.4}.items()]
    return inference_rows.completed(made)


DOCUMENT = "".join(
    f"text of {name}\n<!-- inference: {name} -->\nold\n<!-- end -->\n" for name in inference_tables.TABLES
)


def test_tables_say_how_to_measure_until_there_are_rows() -> None:
    text = inference_tables.rendered(DOCUMENT, [])
    assert text.count("Not measured yet: run `python benchmarks/inference.py --") == len(inference_tables.TABLES)
    assert "old" not in text


def test_tables_say_what_was_measured_and_which_targets_are_met() -> None:
    text = inference_tables.rendered(DOCUMENT, rows())
    assert inference_tables.rendered(text, rows()) == text
    assert "Not measured yet" not in text
    assert "| GPU | Hydra, no trunk | 1 | 1.2 | 1.70 | 3.00 | 1.89x | no |" in text
    assert "| GPU | Hydra, trunk of 8 | 4 | 1.25 | 1.20 | 3.00 | 1.33x | yes |" in text
    assert "| CPU aarch64, 2 threads | Hydra, no trunk | 8 | 0.9 | 0.57 |" in text
    assert "| Hydra, circuits of both towers | 10.0 M | 7.2 ms (1.80x) | 2.50x |" in text
    assert "| Hydra, text towers in every batch | 10.0 M | 360 ms (90.00x) | 2.50x |" in text
    assert "| Hydra, circuits of both towers | 10.0 M | 19.2 ms (2.40x) | 2.60x |" in text
    growth = "0.90x | 1.30x | 1.70x | 2.50x | 3.70x | 0.50 + 0.40 M"
    assert f"| 4 | Hydra, no trunk | {growth} |" in text


def test_figures_are_drawn_from_the_rows(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results = inference_rows.Results(tmp_path / "inference.json")
    for one in rows():
        results.add(one)
    document = tmp_path / "performance.md"
    document.write_text(DOCUMENT)
    arguments = ["--input", str(results.path), "--figures", str(tmp_path), "--document", str(document)]
    with pytest.raises(SystemExit, match="is not what the results say"):
        inference_figures.main([*arguments, "--check"])
    inference_figures.main([*arguments, "--tables"])
    inference_figures.main([*arguments, "--check"])
    drawn = {path.name: path.read_text() for path in tmp_path.glob("*.svg")}
    assert set(drawn) == {"inference_cost.svg", "inference_batches.svg", "inference_members.svg"}
    assert "0.50 + 0.40 M" in drawn["inference_members.svg"]
    assert all(f"](figures/{name})" in document.read_text() for name in drawn)
    inference_figures.main(arguments)
    assert drawn == {path.name: path.read_text() for path in tmp_path.glob("*.svg")}


def test_a_line_is_fitted_by_least_squares() -> None:
    assert inference_tables.fitted_line([1, 2, 4], [3.0, 5.0, 9.0]) == pytest.approx((1.0, 2.0))

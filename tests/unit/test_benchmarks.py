"""Every benchmark runs on a tiny shape; what its numbers rest on is checked against plain computation."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

import hydra_ensembles as he
from architectures import timm_model
from architectures_clip import DUAL_CASES, DualCase
from zero_shot_models import NAMES as CLASSES
from zero_shot_models import TEMPLATES, dual_of

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT)]
import circuit  # noqa: E402
import circuit_draws  # noqa: E402
import common  # noqa: E402
import fusion  # noqa: E402
import inference  # noqa: E402
import inference_models  # noqa: E402
import inference_report  # noqa: E402
import serve  # noqa: E402
import tables  # noqa: E402
import tower_scores  # noqa: E402

del sys.path[:2]

pytestmark = pytest.mark.filterwarnings("ignore:.*batching rule.*:UserWarning", "ignore:.*CUDA.*:UserWarning")
TINY = ["--dtype", "float32", "--device", "cpu", "--modes", "eager", "--repeats", "2", "--batches", "2"]


# --- inference -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["tiny", "tiny-clip"])
def test_every_contender_answers_as_it_should(shape: str, tmp_path: Path) -> None:
    path = tmp_path / "inference.json"
    names = inference_models.names_of(inference_models.SHAPES[shape])
    some = [name for name in names if name not in ("hydra-k4", "hydra-k6", "hydra-k10")]  # made as `hydra-k8` is
    options = [*TINY, "--shape", shape, "--output", str(path), "--contenders", *some]
    inference.main(options)
    report = json.loads(path.read_text())
    rows = {row["contender"]: row for row in report["rows"]}
    assert report["failures"] == {}
    assert set(rows) == set(some)
    for name, row in rows.items():
        assert row["members"] == (1 if name in inference_models.ONE_MEMBER else 3)
        assert row["error"] is None if name == "mc-dropout" else row["error"] < 1e-5
        # plans are chosen by the clock; one of them stores heads that untrained members have in common once
        assert row["peak_memory_bytes"] > row["weight_bytes"] >= 4 * 0.8 * row["parameters"]
        assert row["ratio_to_single"] == pytest.approx(row["latency_ms"] / row["single_ms"])
        assert row["ratio_to_ours"] == pytest.approx(row["ratio_to_single"] / rows["ours"]["ratio_to_single"])
    assert rows["deep-in-turn"]["limit"] == 3.0
    before = path.read_text()
    inference.main(options)
    assert path.read_text() == before  # rows that are there are not measured again


@pytest.mark.parametrize(
    ("shape", "name", "least", "most"),
    [
        ("tiny", "mimo", 0.9, 1.0),  # one model, but for the classifiers and the shortcut of the last block
        ("tiny", "packed", 1.0, 1.5),  # three of two thirds of the width
        ("tiny", "batch-ensemble-last", 1.3, 1.5),
        ("tiny", "lora", 2.5, 3.0),
        ("tiny", "batch-ensemble", 2.5, 3.0),
        ("tiny-bert", "lora", 2.5, 3.0),
    ],
)
def test_a_baseline_does_the_arithmetic_of_what_members_have_apart(
    shape: str, name: str, least: float, most: float
) -> None:
    workshop = inference_models.Workshop(inference_models.SHAPES[shape], torch.float32, "cpu", 0)
    model = workshop.ensemble(name, 3)
    assert least < workshop._done(model) / workshop.single_multiply_adds() <= most
    inputs = workshop.shape.inputs(2, torch.Generator().manual_seed(0))
    logits = model(*inputs.values())
    assert not torch.allclose(logits[0], logits[1], atol=1e-4)
    assert "mimo" not in inference_models.names_of(inference_models.SHAPES["tiny-bert"])


@pytest.mark.slow
def test_two_checkouts_are_timed_side_by_side(tmp_path: Path) -> None:
    path = tmp_path / "both.json"
    options = ["--shape", "tiny", "--contenders", "hydra-k8", "--against", str(ROOT), "--output", str(path)]
    inference.main([*TINY, *options])
    (row,) = json.loads(path.read_text())["rows"]
    assert row["ratio"] == pytest.approx(row["new_ms"] / row["old_ms"])
    assert row["errors"] == [pytest.approx(0.0, abs=1e-5)] * 2


def test_a_conversion_is_timed(tmp_path: Path) -> None:
    path = tmp_path / "conversion.json"
    inference.main(["--conversion", "--shape", "tiny", "--device", "cpu", "--repeats", "1", "--output", str(path)])
    found = json.loads(path.read_text())
    assert found["shape"] == "tiny"
    assert 0 < found["convert_seconds"] > found["comparison_seconds"]


def test_figures_are_drawn_from_the_results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(inference_report, "FIGURES", tmp_path)
    inference_report.main()
    names = {path.name for path in (ROOT / "docs" / "figures").glob("inference_*.svg")}
    assert {path.name for path in tmp_path.iterdir()} == names
    tower_scores.draw(common.load(tower_scores.RESULT))


def test_tables_of_the_documents_are_those_of_the_results() -> None:
    made = tables.tables()
    for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        assert tables.rendered(path.read_text(), made) == path.read_text(), f"{path.name}: run benchmarks/tables.py"


# --- circuits --------------------------------------------------------------------------------------------------------


def test_circuits_by_three_methods(tmp_path: Path) -> None:
    rows = {}
    for score, more in {"avg": [], "acc": ["--methods", "naive", "--naive-steps", "2", "--naive-heads", "4"]}.items():
        path = tmp_path / f"{score}.json"
        options = ["--tiny", "--samples", "8", "--budget", "3", "--device", "cpu", "--output", str(path)]
        circuit.main([*options, "--scores", score, *more])
        rows |= {(row["score"], row["method"]): row for row in json.loads(path.read_text())["results"]}
    assert list(rows) == [*(("avg", method) for method in circuit.METHODS), ("acc", "naive")]
    assert rows["avg", "naive"]["removed"] == rows["avg", "exact"]["removed"]
    assert rows["avg", "exact"]["model_forwards"] < rows["avg", "naive"]["model_forwards"] == 16 + 15 + 14 + 1
    assert rows["acc", "naive"]["extrapolated"]
    assert rows["acc", "naive"]["model_forwards"] == rows["avg", "naive"]["model_forwards"]


@pytest.mark.slow
def test_circuits_over_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    some = [one for one in circuit_draws.VARIANTS if one[0] == "acc" or one[3]]
    monkeypatch.setattr(circuit_draws, "VARIANTS", some)
    sizes = ["--draws", "2", "--images", "12", "--tests", "6", "--budget", "1", "--trunk", "5"]
    circuit_draws.main([*sizes, "--output", str(tmp_path / "draws.json")])
    report = json.loads((tmp_path / "draws.json").read_text())
    assert [(row["score"], row["ties"], row["max_accuracy_loss"]) for row in report["rows"]] == [
        ("acc", "order", None),
        ("acc", "likelihood", None),
        ("ood", "likelihood", circuit_draws.LIMIT),
    ]
    for row in report["rows"]:
        first, second = row["removed"]
        assert row["in_common"] == float(first == second)  # of one head
        assert len(row["far"]["draws"]) == 2


# --- fusing ----------------------------------------------------------------------------------------------------------


def test_every_way_to_fuse(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    model = timm_model("vit_base_patch16_224", img_size=fusion.SIZE, num_classes=3)
    he.convert(model).save_pretrained(tmp_path / "model")
    (tmp_path / "backbone.json").write_text("{}")
    for name in ("train", "id", "ood", "holdout_id", "holdout_ood"):
        images = torch.randint(0, 256, (6, 3, 32, 32), dtype=torch.uint8, generator=generator)
        save_file({"images": images, "labels": torch.arange(6) % 3}, tmp_path / f"{name}.safetensors")
    output = tmp_path / "fusion.json"
    few = ["--prune", "2", "--epochs", "2", "--rates", "1e-4", "--device", "cpu"]
    fusion.main(["fuse", "--folder", str(tmp_path), "--output", str(output), *few])
    rows = json.loads(output.read_text())["rows"]
    assert [row["method"] for row in rows] == ["single", *(f"member {s}" for s in fusion.SCORES), *["hydra"] * 8]
    assert rows[4]["parameters"] < rows[-1]["parameters"] < 3 * rows[0]["parameters"]


# --- scores of both towers -------------------------------------------------------------------------------------------

CASES = [case for case in DUAL_CASES if case.name in ("transformers-gelu", "open_clip-no-text-projection")]
SIZES = [5, 1, 5]  # unequal, so that a mean of batch means would be another number


@pytest.mark.parametrize("case", CASES, ids=str)
def test_scores_of_both_towers_against_plain_autograd(case: DualCase, monkeypatch: pytest.MonkeyPatch) -> None:
    dual = dual_of(case).double()
    generator = torch.Generator().manual_seed(4)
    images = torch.randn(sum(SIZES), 3, 32, 32, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, len(CLASSES), (sum(SIZES),), generator=generator)
    batches = list(zip(images.split(SIZES), labels.split(SIZES), strict=True))
    monkeypatch.setattr(tower_scores, "PROMPTS_AT_ONCE", 2 * len(TEMPLATES))  # the classes in several parts
    scores = tower_scores.taylor_scores(dual, CLASSES, batches, TEMPLATES)
    texts = [dual.encode_text([one.replace("{label}", name) for name in CLASSES])[0] for one in TEMPLATES]
    classes = F.normalize(torch.stack(texts).mean(0), dim=-1)[None]
    F.cross_entropy(dual.logits(dual.encode_image(images), classes)[0], labels).backward()
    for name, tower in (("image", dual.image), ("text", dual.text)):
        expected = torch.stack([sensitivity(block.attention.qkv) for block in tower.encoder.layers])
        assert expected.min() > 0
        torch.testing.assert_close(scores[name], expected, rtol=1e-9, atol=0)


def sensitivity(weight: Tensor) -> Tensor:
    """Mean of |W · dL/dW| of each head, `[H, 3, d_k, d]` to `[H]`."""
    assert weight.grad is not None
    return (weight.detach() * weight.grad).abs().mean((1, 2, 3))


# --- serving ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_server_is_measured(tmp_path: Path) -> None:
    output = tmp_path / "serve.json"
    serve.main(["--uploads", "32", "--turns", "1", "--requests", "100", "--output", str(output)])
    found = json.loads(output.read_text())
    assert found["throughput"]["ratio"] > 0
    assert found["latency"]["even"]["p50_ms"] <= found["latency"]["even"]["p99_ms"]
    assert found["endurance"]["wrong"] == 0, found["endurance"]["first_wrong"]
    assert 0 < found["endurance"]["broken"] < 20

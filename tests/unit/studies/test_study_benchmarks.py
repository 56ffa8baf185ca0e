"""The benchmarks behind the studies, on the small study: rates of backbones, and stored logits against full ones."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from small_study import SmallStore, small_recipe, small_store

BENCHMARKS = str(Path(__file__).resolve().parents[3] / "benchmarks")
sys.path.insert(0, BENCHMARKS)
import backbone_rates  # noqa: E402
import stored_logits  # noqa: E402
import study_tables  # noqa: E402

sys.path.remove(BENCHMARKS)

STUDY = "vision-cifar10"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The small study under the name of the real one."""
    for benchmark in (backbone_rates, stored_logits):
        monkeypatch.setattr(benchmark, "load_recipe", lambda name, tiny=False: small_recipe())


def test_the_rate_with_the_highest_mean_is_chosen(tmp_path: Path) -> None:
    store, recipe = small_store(), small_recipe()
    candidates = [backbone_rates.Candidate(1e-5, 50.0, 2), backbone_rates.Candidate(1e-2, 1.0, 1)]
    rows = [backbone_rates.measure(one, STUDY, store, "cpu", seed=100, tiny=True) for one in candidates]
    assert rows[0]["auroc"] != rows[1]["auroc"]  # the rates were used
    for row in rows:
        assert row["value"] == pytest.approx((row["accuracy"] + row["auroc"]) / 2)
    facts = backbone_rates.facts_of(recipe, rows, store, "cpu", seed=100)
    best = candidates[rows.index(max(rows, key=lambda row: row["value"]))]
    assert facts["chosen"] == {
        "learning_rate": best.learning_rate,
        "classifier_rate": best.classifier_rate,
        "epochs": best.epochs,
    }
    assert facts["samples"] == {"train": 24, "choose_id": 20, "choose_ood": 20}
    assert facts["training"]["optimizer"] == "adamw"
    assert not {"learning_rate", "classifier_rate", "epochs", "steps"} & set(facts["training"])
    assert not [name for name in store.opened if name.endswith("/test")]
    path = tmp_path / "rates.json"
    path.write_text(json.dumps({STUDY: facts}))
    chosen = [line for line in study_tables.rates(path).splitlines() if "**chosen**" in line]
    assert len(chosen) == 1
    assert f"| {best.learning_rate:g} |" in chosen[0]


def test_stored_logits_are_held_against_full_ones(finished: tuple[Path, SmallStore], tmp_path: Path) -> None:
    output = tmp_path / "stored.json"
    output.write_text(json.dumps({"zero-shot": {"largest": {}}}))
    stored_logits.main(["--study", STUDY, "--runs", str(finished[0]), "--output", str(output)])
    found = json.loads(output.read_text())
    assert list(found) == ["zero-shot", STUDY]  # what was measured earlier stays
    largest = found[STUDY]["largest"]
    temperatures = json.loads((finished[0] / STUDY / "seed-0" / "temperatures.json").read_text()).values()
    off = small_recipe().logit_step / min(1.0, *temperatures)  # of one logit at most, calibrated or not
    assert 0 < largest["nll"]["difference"] < 2 * off
    assert largest["disagreement"]["difference"] == 0  # every answer is stored
    for one in largest.values():
        assert one["difference"] == pytest.approx(abs(one["full"] - one["stored"]), abs=2e-6)


def test_full_sets_are_the_logits_before_rounding(finished: tuple[Path, SmallStore]) -> None:
    study, files, _ = stored_logits.opened(STUDY, finished[0], seed=0)
    full = stored_logits.full_sets(study, files, seed=0)
    assert full.keys() == study.sets.keys()
    for name, one in full.items():
        exact, stored = one.logits(), study.sets[name].logits()
        gap = (exact - exact.amax(-1, keepdim=True) - stored).abs().max()
        assert 0 < gap <= small_recipe().logit_step


@pytest.mark.parametrize("name", ["study_summary", "study_rates", "study_stored"])
def test_tables_without_results_say_how_to_get_them(name: str, tmp_path: Path) -> None:
    assert study_tables.study_tables(tmp_path / "studies")[name]().startswith("*Not measured yet: `")


def test_the_summary_leaves_out_what_was_not_measured(tmp_path: Path) -> None:
    row = {"accuracy": [0.5], "chosen.all.auroc": [0.25], "calibrated.ece": [0.125]}
    facts: dict[str, Any] = {"rows": dict.fromkeys(study_tables.SUMMARY, row), "costs": None}
    (tmp_path / "text-sst2.json").write_text(json.dumps(facts))
    rows = study_tables.summary(tmp_path).splitlines()[2:-2]
    assert rows == [f"| text-sst2 | {method} | 50.00 | 25.00 | 12.50 |  |" for method in study_tables.SUMMARY]

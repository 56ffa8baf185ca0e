"""Search for the best ensemble within a price: what is built, skipped and chosen; resuming; bad input."""

import os
import shutil
import warnings
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from build_cases import batches, image_model, recipe, same

import hydra_ensembles as he
from checkpoint_models import same_state
from hydra_ensembles.errors import CheckpointError, TooFewSamplesError
from hydra_ensembles.metrics.bootstrap import paired
from hydra_ensembles.metrics.probabilities import weighted_mean
from hydra_ensembles.model.member_states import place_of
from hydra_ensembles.pipeline import build as chain
from hydra_ensembles.pipeline import search as searching
from hydra_ensembles.pipeline.search import CHAINS, DEEP, FUSED, SOUP, TAUGHT, YOURS, SearchResult, SearchRow, _slug
from hydra_ensembles.training.finetune import EnsembleLearner
from processes import count_calls, watch_replacements

PLAIN = {"shared_layers": 2, "strategy": "random", "prune": 1}
TOGETHER = {**PLAIN, "training": "together"}
DEEPER = {**TOGETHER, "shared_layers": 1}
SETS: dict[str, Any] = {
    "train": batches(12, seed=1),
    "id": batches(248, size=124, seed=2),
    "ood": batches(48, size=24, seed=3, shift=1.5),
}
TOP = "encoder.layers.2.mlp.up.weight"
STEPS = 5  # of each training


def run(output: Path | None = None, **changes: Any) -> he.SearchResult:
    """A search of two trained candidates and one untrained."""
    usual = {"candidates": [PLAIN, TOGETHER, DEEPER], "price": "multiply_adds", "cost": 4.0, "progress": False}
    trained = recipe(steps=STEPS, dropout=0.0)
    model = changes.pop("model", None) or image_model()
    return he.search(model, **{**SETS, **usual, "recipe": trained, "output": output, **changes})


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, he.SearchResult]:
    """The folder and result of an uninterrupted search."""
    folder = tmp_path_factory.mktemp("search")
    return folder, run(folder)


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts fine-tunings, their updates, and circuits."""
    done: Counter[str] = Counter()
    for owner, name in ((chain, "finetune"), (chain, "extract_circuit"), (EnsembleLearner, "update")):
        count_calls(monkeypatch, owner, name, lambda name=name: done.update([name]))
    return done


def names(result: he.SearchResult, state: str) -> list[str]:
    return [row.name for row in result.rows if row.state == state]


def test_every_candidate_is_judged_beside_the_given_model_and_the_choice_is_ready(finished) -> None:
    folder, found = finished
    assert (found.rows[0].name, found.rows[0].price, len(found.rows)) == (YOURS, 1.0, 4)
    assert found.samples == {"ID": 124, "ood": 24}
    assert set(found.rows[0].numbers) == {"accuracy", "nll", "ece", "aurc", "all.auroc", "mahalanobis:all.auroc"}
    chosen = found.ensemble
    assert chosen.metadata.calibration is not None
    assert chosen.metadata.familiarity is not None
    assert same(chosen, he.load(folder / "ensemble"))
    assert (folder / "search.json").exists()
    inner = he.load(folder / "candidates" / "random-3-trunk-2-1-heads-off" / "ensemble")
    assert inner.metadata.familiarity.settings.samples == 62  # a quarter of id; another quarter calibrates


def test_a_stopped_search_goes_on_and_finds_the_same(finished, tmp_path, monkeypatch, work) -> None:
    for place in ("prices/random", "candidates/random-3-trunk-2-1-heads-off-trained-together/finetune", "search.json"):

        def stop(target: Path, place: str = place) -> None:
            if target.is_relative_to(tmp_path) and str(target.relative_to(tmp_path)).startswith(place):
                raise KeyboardInterrupt(place)

        with monkeypatch.context() as patched:
            patched.setattr(os, "replace", watch_replacements(stop))
            with pytest.raises(KeyboardInterrupt, match=place), torch.autocast("cpu", torch.bfloat16):  # is ignored
                run(tmp_path)
    found = run(tmp_path)
    assert found == finished[1]
    assert same(found.ensemble, finished[1].ensemble)
    assert work["update"] <= 3 * STEPS  # of two trainings, at most one was restarted


def test_a_finished_search_is_read_back_and_its_folder_is_for_it_alone(finished, tmp_path, work) -> None:
    assert run(finished[0]) == finished[1]
    assert not work
    folder = Path(shutil.copytree(finished[0], tmp_path / "copy"))
    for changes, token in (({"batch_size": 3}, "settings"), ({"id": batches(248, size=124, seed=9)}, "data")):
        with pytest.raises(CheckpointError, match=token):
            run(folder, **changes)


@pytest.mark.parametrize(("gain", "verdict"), [(0.05, "not significantly"), (0.5, "significantly")])
def test_the_reason_says_whether_chance_could_choose_so(gain: float, verdict: str, monkeypatch) -> None:
    nll = torch.randn(100, generator=torch.Generator().manual_seed(0)) - gain
    monkeypatch.setattr(searching, "differences", lambda *_, **how: (None, paired(weighted_mean, [nll], **how)))
    others = {"other": "judged", "third": "judged", "dear": "too dear"}  # two were evaluated
    rows = (SearchRow(YOURS, 1.0, "judged"), *(SearchRow(name, 1.2, state) for name, state in others.items()))  # type: ignore[arg-type]
    decided = he.SearchResult(rows, 1.5, "latency", (), {}, choice="other", why="it is so")
    work: Any = SimpleNamespace(judges={"ID": []}, seed=0, final=lambda name: name)
    with warnings.catch_warnings(record=True, action="always") as caught:
        weighed = searching.Search.with_significance(work, decided)
    assert weighed.why.startswith(f"it is so; its NLL is {verdict} lower (")
    assert "for 2 candidates" in weighed.why
    assert [verdict in str(warning.message) for warning in caught] == [True] * (verdict == "not significantly")


def test_a_candidate_that_diverges_is_given_up() -> None:
    wild = {**DEEPER, "recipe": recipe(steps=STEPS, dropout=0.0, learning_rate=1e30)}
    found = run(candidates=[TOGETHER, wild])
    assert names(found, "not possible") == [found.rows[2].name]
    assert names(found, "judged") == [YOURS, found.rows[1].name]


def test_the_choice_knows_the_rows_that_chose_it() -> None:
    found = run(candidates=[PLAIN]).ensemble
    assert found.metadata.calibration.share == 0.95
    again: dict[str, Any] = {"share": 0.9, "familiarity": None}
    with pytest.raises(TooFewSamplesError, match=r"of 248 held-out rows 0 certify.*248 left out"):
        he.calibrate(found, SETS["id"], **again)
    mixed = he.calibrate(found, [*SETS["id"], *batches(300, size=100, seed=9)], **again)
    assert "of 548 held-out rows 274 certify (248 left out" in mixed.metadata.history[-1]


def test_what_is_too_dear_is_never_built_and_a_plan_builds_nothing(work, tmp_path) -> None:
    plan = run(tmp_path / "new", dry_run=True, candidates=[TOGETHER, DEEPER], price="latency", batch_size=2, cost=1e5)
    assert not (tmp_path / "new").exists()
    assert not work
    assert (names(plan, "planned"), plan.choice, plan.ensemble) == ([row.name for row in plan.rows], "", None)
    prices = sorted(row.price for row in run(dry_run=True, candidates=[TOGETHER, DEEPER]).rows)
    found = run(cost=sum(prices[1:]) / 2, candidates=[TOGETHER, DEEPER])
    assert names(found, "too dear") == ["random ×3, trunk 1, 1 heads off, trained together"]
    assert work["update"] == STEPS


def test_the_usual_candidates_fit_the_model_and_train_only_with_data() -> None:
    plan, untrained = (run(candidates=None, dry_run=True, **given).rows[1:] for given in ({}, {"train": None}))
    kinds = {(row.config.strategy, row.config.training) for row in plan if row.config}
    assert {("circuit", None), ("branches", "together"), ("circuit", "together")} <= kinds
    assert {row.config.training for row in untrained if row.config} == {None}


def test_soup_mean_trunk_and_deep_ensemble_of_given_models(tmp_path: Path) -> None:
    """The configuration that the documents recommend is among the candidates, as made by `fuse`."""
    models = [image_model(5), image_model(6)]
    found = run(tmp_path, candidates=[PLAIN], models=models)
    prices = {row.name: row.price for row in found.rows}
    assert (prices[SOUP], prices[DEEP]) == (1.0, pytest.approx(3.0))
    kept = he.load(tmp_path / "candidates" / "fused-above-a-mean-trunk" / "ensemble")
    assert same_state(kept, he.fuse([image_model(), *models], mlp="separate", average=2))  # five sixths of 3, rounded
    assert prices[FUSED] == prices[TAUGHT] < prices[DEEP]
    taught, plain = he.load(tmp_path / "candidates" / _slug(TAUGHT) / "ensemble").state_dict(), kept.state_dict()
    assert {place_of(name)[1] for name in plain if not torch.equal(plain[name], taught[name])} <= {2, None}
    assert not torch.equal(plain[TOP], taught[TOP])


def test_cascades_of_given_models_are_tried_if_there_are_rows_for_their_thresholds(tmp_path: Path) -> None:
    found = run(tmp_path, candidates=[], models=[image_model(5)], id=batches(1650, size=165, seed=2), train=None)
    prices = {row.name: row.price for row in found.rows}
    for name, last in CHAINS.items():
        assert 1 < prices[name] < min(prices[last], 1.25)
        chain = he.load(tmp_path / "candidates" / _slug(name) / "ensemble")
        assert chain.settings.asked[0] <= 0.1
        assert chain.metadata.calibration is not None
    assert names(found, "judged") == [row.name for row in found.rows]


def test_judges_are_halves_or_made_from_the_half_that_judges() -> None:
    circuit = {"prune": 1, "shared_layers": 2, "members": 1}
    plan: dict[str, Any] = {"candidates": [circuit], "dry_run": True}
    assert run(**plan, ood="synthetic").samples == {"ID": 124, "synthetic": 124}
    several = {"near": SETS["ood"], "far": batches(24, size=24, seed=8, shift=4.0)}  # each is split in two
    assert run(**plan, ood=several).samples == {"ID": 124, "ood['near']": 24, "ood['far']": 12}


def test_circuits_are_extracted_once_for_all_that_can_use_them(work, tmp_path) -> None:
    circuit = {"prune": 1, "shared_layers": 2, "members": 2}
    found = run(tmp_path, candidates=[circuit, {**circuit, "training": "together"}], seed=2)
    assert len(names(found, "judged")) + len(names(found, "not possible")) == 3
    assert work["extract_circuit"] == 2  # for the score avg, and for acc


# --- how it chooses ---------------------------------------------------------------------------------------------------

SCORES = ("all.auroc", "mahalanobis:all.auroc")


def row(
    name: str, price: float, nll: float, aurc: float = 0.1, msp: float = 0.8, far: float = 0.9, right: float = 0.75
) -> SearchRow:
    numbers = {"accuracy": right, "nll": nll, "aurc": aurc, SCORES[0]: msp, SCORES[1]: far}
    return SearchRow(name, price, "judged", numbers=numbers)


def result(*rows: SearchRow, cost: float = 1.3) -> SearchResult:
    measured = (row(YOURS, 1.0, 0.9), *rows)
    return SearchResult(measured, cost, "latency", SCORES, {"ID": 100, "OOD": 50}).decided()


@pytest.mark.parametrize(
    ("rows", "choice"),
    [
        ([row("better", 1.2, 0.8), row("best", 1.3, 0.7)], "best"),
        ([row("worse NLL", 1.0, 0.91)], YOURS),
        ([row("less accurate", 1.2, 0.8, right=0.74)], YOURS),
        ([row("worse AURC", 1.2, 0.8, aurc=0.11)], YOURS),
        ([row("worse distance", 1.2, 0.8, far=0.89)], YOURS),
        ([row("dear", 1.3, 0.8), row("cheap", 1.1, 0.8)], "cheap"),
    ],
)
def test_the_choice_is_the_lowest_nll_within_the_price_that_is_nowhere_worse(rows, choice) -> None:
    found = result(*rows)
    assert found.choice == choice
    assert ("none of the" in found.why) == (choice == YOURS)

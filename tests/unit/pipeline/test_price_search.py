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
from build_cases import batches, image_model, recipe, same, samples

import hydra_ensembles as he
from architectures import timm_model
from checkpoint_models import same_state
from hydra_ensembles.errors import CheckpointError, ConfigError, DataError, StorageError
from hydra_ensembles.files import locked
from hydra_ensembles.model.metadata import Calibration
from hydra_ensembles.pipeline import chain
from hydra_ensembles.pipeline import price_search as searching
from hydra_ensembles.pipeline.search_result import DEEP, FUSED, SOUP, YOURS, SearchRow
from hydra_ensembles.training.finetune import EnsembleLearner
from processes import count_calls, watch_replacements
from unit.training.training_cases import tiny_dual

PLAIN = {"shared_layers": 2, "strategy": "random", "prune": 1}
TOGETHER = {**PLAIN, "training": "together"}
DEEPER = {**TOGETHER, "shared_layers": 1}
BRANCHES = {"shared_layers": 2, "strategy": "branches", "training": "together"}
SETS: dict[str, Any] = {
    "train": batches(12, seed=1),
    "id": batches(248, size=124, seed=2),
    "ood": batches(48, size=24, seed=3, shift=1.5),
}
STEPS = 5  # steps per training; the first comparison comes after one of them


def run(output: Path | None = None, **changes: Any) -> he.SearchResult:
    """A search of two trained candidates and one untrained."""
    usual = {"candidates": [PLAIN, TOGETHER, DEEPER], "price": "multiply_adds", "cost": 4.0, "progress": False}
    usual |= {"first": 1 / STEPS}
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


def first_numbers(monkeypatch: pytest.MonkeyPatch, trunk_2: float, trunk_1: float) -> None:
    """Replace the losses at the first comparison of the two trained candidates."""
    original, places = searching._Search._numbers, "first/random-3-trunk-{}-1-heads-off-trained-together"
    table = {places.format(2): trunk_2, places.format(1): trunk_1}

    def numbers(self: Any, name: str, make: Any) -> Any:
        if name not in table:
            return original(self, name, make)
        rest = dict.fromkeys(("accuracy", *self.settings.scores), 1.0 - table[name])
        return {"nll": table[name], "aurc": table[name], **rest}

    monkeypatch.setattr(searching._Search, "_numbers", numbers)


def test_every_candidate_is_judged_beside_the_given_model_and_the_choice_is_ready(finished) -> None:
    folder, found = finished
    assert (found.rows[0].name, found.rows[0].price, len(found.rows)) == (YOURS, 1.0, 4)
    assert found.samples == {"ID": 124, "ood": 24}
    assert set(found.rows[0].numbers) == {"accuracy", "nll", "ece", "aurc", "all.auroc", "mahalanobis:all.auroc"}
    chosen = found.ensemble
    assert chosen.metadata.calibration is not None
    assert chosen.metadata.familiarity is not None
    assert same(chosen, he.Ensemble.from_pretrained(folder / "ensemble"))
    assert he.SearchResult.load(folder / "search.json") == found
    own, mine = (
        found.losses(next(row for row in found.rows if row.name == name).numbers) for name in (YOURS, found.choice)
    )
    assert all(one <= other for one, other in zip(mine, own, strict=True))
    judged = he.Evaluation.load(next(iter((folder / "evaluations").glob("random*trunk-2*off.json"))))
    row = next(row for row in found.rows if row.name.endswith("heads off"))
    assert row.numbers["nll"] == judged.id.nll
    inner = he.Ensemble.from_pretrained(folder / "candidates" / "random-3-trunk-2-1-heads-off" / "ensemble")
    assert inner.metadata.familiarity.settings.samples == 62  # a quarter of id; another quarter calibrates


@pytest.mark.parametrize(("gain", "verdict"), [(0.05, "not significantly"), (0.5, "significantly")])
def test_the_reason_says_whether_chance_could_choose_so(gain: float, verdict: str, monkeypatch) -> None:
    right, nll = torch.ones(100), torch.randn(100, generator=torch.Generator().manual_seed(0)) - gain
    pair = searching.Paired(right, right, nll, torch.zeros(100), mistake=0.0)
    monkeypatch.setattr(searching.Paired, "of", lambda *_: pair)
    others = {"other": "judged", "third": "stopped early", "dear": "too dear"}  # two were evaluated
    rows = (SearchRow(YOURS, 1.0, "judged"), *(SearchRow(name, 1.2, state) for name, state in others.items()))  # type: ignore[arg-type]
    decided = he.SearchResult(rows, 1.5, "latency", (), {}, choice="other", why="it is so")
    work: Any = SimpleNamespace(judges={"ID": []}, settings=SimpleNamespace(seed=0), _final=lambda name: name)
    with warnings.catch_warnings(record=True, action="always") as caught:
        weighed = searching._Search._with_significance(work, decided)
    assert weighed.why.startswith(f"it is so; its NLL is {verdict} lower (")
    assert "for 2 candidates" in weighed.why
    assert [verdict in str(warning.message) for warning in caught] == [True] * (verdict == "not significantly")


@pytest.mark.parametrize("first", [1 / STEPS, 1.0])
def test_a_candidate_that_diverges_is_given_up(first: float) -> None:
    wild = {**DEEPER, "recipe": recipe(steps=STEPS, dropout=0.0, learning_rate=1e30)}
    found = run(candidates=[TOGETHER, wild, {**wild, "shared_layers": 0}], first=first)
    assert names(found, "not possible") == [row.name for row in found.rows[2:]]
    assert "1e+30" in found.rows[2].note
    assert names(found, "judged") == [YOURS, found.rows[1].name]


def test_a_model_keeps_the_calibration_that_it_came_with(tmp_path) -> None:
    own = Calibration((1.7,), 0.4, "entropy", 0.8, calibrates="probs")
    model = image_model().with_metadata(
        calibration=own, metrics={"validation/nll": 0.5, "validation/accepted_share": 1}
    )
    run(tmp_path, model=model, candidates=[PLAIN])
    kept = he.Ensemble.from_pretrained(tmp_path / "candidates" / "yours" / "ensemble").metadata
    assert (kept.calibration, kept.metrics) == (own, {"validation/nll": 0.5})
    assert kept.familiarity.settings.threshold is not None  # as for other candidates


def test_what_is_too_dear_is_never_built(work) -> None:
    limit = run(dry_run=True, candidates=[TOGETHER, DEEPER])
    prices = {row.name: row.price for row in limit.rows}
    cost = (prices["random ×3, trunk 2, 1 heads off, trained together"] + max(prices.values())) / 2
    found = run(cost=cost, candidates=[TOGETHER, DEEPER])
    assert names(found, "too dear") == ["random ×3, trunk 1, 1 heads off, trained together"]
    assert work["finetune"] == 1  # there is no other candidate to compare with, so it trains once, to the end
    assert work["update"] == STEPS
    assert next(row for row in found.rows if row.name == found.choice).price <= cost


def test_a_plan_has_prices_and_leaves_nothing_behind(tmp_path, work, monkeypatch) -> None:
    logits, measure = [], searching.measure_costs

    def measured(models: Any, inputs: Any, **settings: Any) -> Any:
        logits.append(models["other"](inputs))
        return measure(models, inputs, **settings)

    monkeypatch.setattr(searching, "measure_costs", measured)
    few = {"batch_size": 2, "candidates": [PLAIN, BRANCHES], "cost": 1e5}
    plan = run(tmp_path / "new", dry_run=True, price="latency", **few)
    assert [torch.equal(*one[:2]) for one in logits] == [False] * 2  # equal members would be priced as one
    assert not (tmp_path / "new").exists()
    assert not work
    assert [row.price > 0 for row in plan.rows] == [True] * 3
    assert names(plan, "planned") == [row.name for row in plan.rows]
    assert (plan.choice, plan.ensemble) == ("", None)


def test_one_that_is_worse_in_every_number_at_no_lower_price_stops_early(monkeypatch, work, tmp_path) -> None:
    first_numbers(monkeypatch, 0.2, 0.3)
    found = run(tmp_path, candidates=[TOGETHER, DEEPER])
    (stopped,) = names(found, "stopped early")
    assert stopped == "random ×3, trunk 1, 1 heads off, trained together"
    assert "20%" in next(row.note for row in found.rows if row.name == stopped)
    assert not list((tmp_path / "candidates").glob("random-3-trunk-1*"))
    first_numbers(monkeypatch, 0.3, 0.2)  # a better but more expensive one does not stop a cheaper one
    assert not names(run(candidates=[TOGETHER, DEEPER]), "stopped early")


def test_trained_candidates_start_from_pretrained_layers_above_the_trunk(monkeypatch) -> None:
    before, starts, tune = image_model(seed=5), list[torch.Tensor](), chain.finetune
    place = "encoder.layers.2.mlp.up.weight"  # the first layer above the trunk

    def finetune(start: he.Ensemble, *rest: Any, **named: Any) -> he.Ensemble:
        starts.append(start.member(0).state_dict()[place])
        return tune(start, *rest, **named)

    monkeypatch.setattr(chain, "finetune", finetune)
    run(candidates=[PLAIN, BRANCHES], pretrained=before)
    assert [torch.equal(start, before.state_dict()[place]) for start in starts] == [True] * len(starts) != []


def test_the_usual_candidates_fit_the_model_and_train_only_with_data() -> None:
    plan, untrained = (run(candidates=None, dry_run=True, **given).rows[1:] for given in ({}, {"train": None}))
    kinds = {(row.config.strategy, row.config.training, row.config.whole) for row in plan if row.config}
    assert {("circuit", None, False), ("branches", "together", False), ("circuit", "together", True)} <= kinds
    assert {row.config.training for row in untrained if row.config} == {None}


def test_soup_mean_trunk_and_deep_ensemble_of_given_models(tmp_path: Path) -> None:
    """The configuration that the documents recommend is among the candidates, as made by `fuse`."""
    models = [image_model(5), image_model(6)]
    found = run(tmp_path, candidates=[PLAIN], models=models)
    prices = {row.name: row.price for row in found.rows}
    assert (prices[SOUP], prices[DEEP]) == (1.0, pytest.approx(3.0))
    assert names(found, "judged") == [row.name for row in found.rows]
    kept = he.Ensemble.from_pretrained(tmp_path / "candidates" / "fused-above-a-mean-trunk" / "ensemble")
    assert same_state(kept, he.fuse([image_model(), *models], mlp="separate", average=2))  # five sixths of 3, rounded
    assert prices[FUSED] < prices[DEEP]


def test_models_of_another_library_get_the_preprocessing_and_class_names_of_the_model() -> None:
    raw = [timm_model("vit_tiny_patch16_224", num_classes=3) for _ in range(2)]
    ready = he.ImagePreprocessing((32, 32), mean=(0.1,) * 3, std=(0.2,) * 3)
    base = he.convert(raw[0], labels=["red", "green", "blue"], processor=ready)
    with warnings.catch_warnings(action="error"):
        other = searching._like(base, raw[1])
    assert (other.metadata.labels, other.metadata.preprocessing) == (base.metadata.labels, ready)


def test_without_ood_data_judges_are_made_from_the_half_that_judges() -> None:
    """They are labelled as synthetic; given judges are used as they are, whatever data the circuits use."""
    circuit = {"prune": 1, "shared_layers": 2, "members": 1, "method": "naive"}
    given = {name: value for name, value in SETS.items() if name != "ood"}
    usual = {"candidates": [circuit], "price": "multiply_adds", "cost": 4.0, "progress": False}
    found = he.search(image_model(), **given, **usual)
    assert found.samples == {"ID": 124, "synthetic": 124}
    assert names(found, "judged") == [row.name for row in found.rows]
    judged = he.search(image_model(), **given, **usual, judge_ood=SETS["ood"], dry_run=True)
    assert judged.samples == {"ID": 124, "judge_ood": 48}
    several = {"near": SETS["ood"], "far": batches(24, size=24, seed=8, shift=4.0)}  # each is split in two
    assert run(candidates=[circuit], ood=several).samples == {"ID": 124, "ood['near']": 24, "ood['far']": 12}


STOPS = (  # in chronological order
    "prices/random",
    "first/random-3-trunk-1-1-heads-off-trained-together/",
    "candidates/random-3-trunk-2-1-heads-off-trained-together/finetune",
    "search.json",
    "ensemble/",
)


def test_a_search_that_is_stopped_again_and_again_goes_on_and_finds_the_same(
    finished, tmp_path, monkeypatch, work
) -> None:
    for place in STOPS:

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
    assert work["update"] <= 2 * STEPS + 2 + STEPS  # of short and full trainings, at most one was restarted


def test_a_finished_search_is_read_back_and_its_folder_is_for_it_and_one_worker(finished, tmp_path, work) -> None:
    assert run(finished[0]) == finished[1]
    assert not work
    folder = Path(shutil.copytree(finished[0], tmp_path / "copy"))
    with pytest.raises(CheckpointError, match="tolerance"):
        run(folder, tolerance=0.1)
    with pytest.raises(CheckpointError, match="judges"):
        run(folder, id=batches(248, size=124, seed=9))
    with locked(folder, "run"), pytest.raises(StorageError, match="another"):
        run(folder)


@pytest.mark.parametrize(
    ("changes", "kind", "token"),
    [
        ({"cost": 1.01}, ConfigError, "cheapest"),
        ({"candidates": [{**PLAIN, "shared_layers": 3}]}, ConfigError, "shared_layers"),
        ({"train": None}, DataError, "give train"),
        ({"ood": [(images, labels) for images, labels in reversed(SETS["id"])]}, DataError, "same samples"),
        ({"judge_ood": SETS["ood"]}, DataError, "same samples"),
        ({"id": batches(20, seed=2)}, DataError, "24 or more"),
        ({"id": [(samples(248, 2)[0], torch.zeros(248, dtype=torch.long))]}, DataError, "classes"),
        ({"model": tiny_dual()}, ConfigError, "zero_shot"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_trained(changes, kind, token, work) -> None:
    with pytest.raises(kind, match=token):
        run(**changes)
    assert not work


def test_it_is_one_process_whose_judges_are_others_than_made_the_candidates(monkeypatch) -> None:
    with pytest.warns(he.HydraWarning, match="also judge them"):
        run(judge_id=SETS["id"], dry_run=True)
    monkeypatch.setattr(searching, "launched", lambda: True)
    with pytest.raises(ConfigError, match="one process"):
        run()


def test_branches_which_get_new_classifiers_and_lag_at_first_are_not_compared_early(work) -> None:
    assert not names(run(candidates=[TOGETHER, BRANCHES]), "stopped early")
    assert work["finetune"] == 2


def test_circuits_are_extracted_once_for_all_that_can_use_them(work, tmp_path) -> None:
    circuit = {"prune": 1, "shared_layers": 2, "members": 2, "method": "naive"}
    wanted = [circuit, {**circuit, "training": "together"}, {**circuit, "training": "together", "mlp": "separate"}]
    found = run(tmp_path, candidates=wanted, seed=2)
    assert len(names(found, "judged")) + len(names(found, "not possible")) + len(names(found, "stopped early")) == 4
    assert work["extract_circuit"] == 2  # for the score avg, and for acc

"""The monitor: its bets are fair, its alarms rare without a reason and soon with one, and a restart changes nothing."""

import copy
import json
import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

import hydra_ensembles as he
from hydra_ensembles.errors import CheckpointError, ConfigError, DataError, HydraWarning
from hydra_ensembles.metrics.conformal import Bins
from hydra_ensembles.model.metadata import Calibration, Metadata
from hydra_ensembles.monitor import (
    JUMP,
    RATIOS,
    Rate,
    Wealth,
    confidence_sequence,
    error_bets,
    input_bets,
    p_values,
)


class Calibrated:
    """What a monitor reads of a calibrated model, with predictions whose scores are drawn."""

    class_names = ("cat", "dog")

    def __init__(self, *promises: he.Promise) -> None:
        scores = self.drawn(300).score(), self.drawn(500).score()
        calibration = Calibration(promises=promises, watched={"confidence": Bins.of(*scores)}, weights="here")
        self.metadata = Metadata(calibration=calibration)

    def drawn(self, rows: int, scale: float = 2.0) -> he.Prediction:
        return he.Prediction.from_logits(scale * torch.randn(1, rows, 2), class_names=self.class_names, threshold=0.9)

    def predict(self, rows: int, scale: float = 2.0) -> he.Prediction:
        return replace(self.drawn(rows, scale), calibration=self.metadata.calibration.identity)


def point(risk: float, threshold: float, label: str | None = None) -> he.Promise:
    return he.Promise(threshold, risk, 0.95, 1000, 500, 2, 50, label=label)


def state(found: he.Monitor, folder: Path) -> Any:
    found.save(folder / "state.json")
    return json.loads((folder / "state.json").read_text())


def test_p_values_rank_a_row_among_all_before_it() -> None:
    draws = np.random.default_rng(0)
    start, bins, uniform = draws.integers(0, 9, (2, 5)), draws.integers(0, 5, (2, 150)), draws.random((2, 150))
    counts = start.copy()
    found = p_values(counts, bins, uniform)
    for stream in range(2):
        seen = list(np.repeat(np.arange(5), start[stream]))
        for row, (here, chance) in enumerate(zip(bins[stream], uniform[stream], strict=True)):
            expected = (sum(one > here for one in seen) + chance * (1 + seen.count(here))) / (len(seen) + 1)
            assert found[stream, row] == pytest.approx(expected)
            seen.append(here)
    assert (counts.sum(1) == start.sum(1) + 150).all()


def test_bets_are_fair_and_jump_as_the_referee_does() -> None:
    grid = (np.arange(20_000) + 0.5) / 20_000
    np.testing.assert_allclose(input_bets(grid[None]).mean(0), 1.0, atol=1e-9)
    ends = error_bets(np.array([[0.0, 1.0]]), 0.02)[..., 0]
    np.testing.assert_allclose(0.98 * ends[0] + 0.02 * ends[1], 1.0)
    assert ends[1] == pytest.approx(RATIOS)
    mapie = pytest.importorskip("mapie.exchangeability_testing")
    referee = mapie.OnlineMartingaleTest(jump_size=0.01, warn=False, task="classification")
    wealth, p = Wealth.of(1, 3, 1000, math.inf, 0.01), grid[::100] ** 1.5
    for one in p:
        referee.update_simple_jumper_martingale(float(one))
    wealth.bet(np.stack([1 + slope * (p - 0.5) for slope in (-1, 0, 1)], axis=1)[..., None])
    assert wealth.log[0, 0] == pytest.approx(math.log(referee.current_martingale_value))


def test_the_audit_agrees_with_mapies_monitor_of_a_risk() -> None:
    """Both stay silent while the rate is the promised one, and both notice that it has doubled."""
    mapie = pytest.importorskip("mapie.exchangeability_testing")
    draws, risk, level = np.random.default_rng(3), 0.05, 0.01
    for rate, alarms in ((risk, False), (2 * risk, True)):
        wrong = draws.random(4000) < rate
        audit = Wealth.of(1, len(RATIOS), 200, math.log(1 / level))
        audit.bet(error_bets(wrong[None].astype(float), risk))
        referee = mapie.RiskMonitoring("accuracy", test_level=2 * level, threshold=risk, warn=False)  # half is online
        referee.update(np.ones(len(wrong), dtype=int), (~wrong).astype(int))
        assert (audit.alarm_row[0] >= 0, referee.harmful_shift_detected) == (alarms, alarms)


def of_uniform(p: Any, block: int = 1000, level: float = 0.05) -> Wealth:
    bets = input_bets(p)
    wealth = Wealth.of(len(p), bets.shape[1], block, math.log(1 / level), JUMP)
    wealth.bet(bets)
    return wealth


def test_false_alarms_are_as_rare_as_promised_over_calibration_and_stream() -> None:
    """With few calibration rows of its own for each stream, and ties; ranks among these alone would alarm."""
    draws, streams, rows = np.random.default_rng(1), 400, 3000
    counts = np.stack([np.bincount(draws.integers(0, 4, 30), minlength=4) for _ in range(streams)])
    p = p_values(counts, draws.integers(0, 4, (streams, rows)), draws.random((streams, rows)))
    errors = error_bets((draws.random((streams, rows)) < 0.05).astype(float), 0.05)
    audit = Wealth.of(streams, errors.shape[1], 200, math.log(1 / 0.05))
    audit.bet(errors)
    for wealth in (of_uniform(p), of_uniform(p, block=100), audit):
        assert 0 < (wealth.alarm_row >= 0).mean() < 0.05 + 3 * math.sqrt(0.05 * 0.95 / streams)


def test_a_change_is_found_soon_also_by_an_old_monitor() -> None:
    draws = np.random.default_rng(2)
    young = of_uniform(draws.random((50, 1000)), level=0.001)
    old = copy.deepcopy(young)
    old.rows, old.low_row = 10**6, old.low_row + 10**6 - 1000  # as if all before had been lost
    delays = []
    for wealth, start in ((young, 1000), (old, 10**6)):
        p = draws.random((50, 2000))
        foreign = draws.random(p.shape) < 0.2
        wealth.bet(input_bets(np.where(foreign, 0.03 * p, p)))
        assert (wealth.alarm_row > start).all()
        assert abs(np.median(wealth.since) - start) < 50
        delays.append(np.median(wealth.alarm_row - start))
    assert delays[0] < 150
    assert delays[1] < 3 * delays[0]


def test_interval_of_the_error_rate_covers_it_at_all_times() -> None:
    draws, missed = np.random.default_rng(3), 0
    for _ in range(200):
        sums = np.cumsum(draws.random(1000) < 0.03)
        ends = [confidence_sequence(float(sums[count - 1]), count) for count in range(20, 1001, 20)]
        missed += any(not low <= 0.03 <= high for low, high in ends)
    assert missed <= 0.05 * 200
    assert confidence_sequence(0.0, 100)[0] == 0.0
    low, high = confidence_sequence(30.0, 1000)
    assert 0.01 < low < 0.03 < high < 0.06


def test_a_restart_changes_nothing(tmp_path: Path) -> None:
    model = Calibrated(point(0.05, 0.6), point(0.01, 0.9))
    watch = he.Monitor(model, on_alarm="stricter", seed=3)
    for rows in (32, 1, 1700):
        watch.audit(watch.update(model.predict(rows)), torch.randint(-1, 2, (rows,)))
    watch.save(tmp_path / "watch.json")
    again = he.Monitor.load(tmp_path / "watch.json", model)
    assert state(again, tmp_path) == state(watch, tmp_path)
    for batch in (model.predict(40, 0.5), model.predict(700, 0.5)):
        first, second = watch.update(batch), again.update(batch)
        assert torch.equal(first.accept, second.accept)
    assert watch.alarm
    assert state(again, tmp_path) == state(watch, tmp_path)
    assert watch.since is not None
    assert abs(watch.since - 1733) < 60
    assert isinstance(watch.plot(tmp_path / "watch.png"), Figure)
    json.dumps(watch.summary(), allow_nan=False)
    (tmp_path / "other.json").write_text("{}")
    model = Calibrated(point(0.05, 0.6))
    for name in ("watch.json", "other.json"):
        with pytest.raises(CheckpointError, match=r"monitor"):
            he.Monitor.load(tmp_path / name, model)


PLAIN = (point(0.05, 0.6), point(0.02, 0.8), point(0.01, 0.9))
LABELLED = (point(0.05, 0.6, "cat"), point(0.1, 0.7, "dog"), point(0.02, 0.8, "cat"))  # no stricter one for dogs


@pytest.mark.parametrize(
    ("choice", "promises", "left"),
    [
        ("decline", PLAIN, [2.0, 2.0]),
        ("stricter", PLAIN, [0.8, 0.8]),
        ("stricter", LABELLED, [0.8, 2.0]),
        (None, PLAIN, [0.0, 0.0]),
    ],
)
def test_predictions_after_the_alarm(choice: Any, promises: Any, left: list[float]) -> None:
    model = Calibrated(*promises)
    said = pytest.warns(HydraWarning, match="all answers dog") if promises is LABELLED else nullcontext()
    with said:
        watch = he.Monitor(model, on_alarm=choice)
    assert watch.update(before := model.predict(10)) is before
    while not watch.alarm:
        watch.update(model.predict(100, 0.2))
    p = watch.update(answer := model.predict(500))
    assert watch.why == ("confidence",)
    if choice is None:
        assert p is answer
        return
    low = p.certainty < torch.tensor(left)[p.label]
    assert [reason == "alarm" for reason in p.reason or []] == low.tolist()
    assert not bool(p.accept[low].any())
    watch.audit(p, torch.zeros(500, dtype=torch.long))  # what the alarm declined is audited as promised
    assert watch.audited == int(answer.accept.sum())


def test_audit_finds_more_errors_than_promised() -> None:
    model = Calibrated(point(0.05, 0.6))
    watch = he.Monitor(model)
    sampled = he.Monitor(model, asked=0.25)
    for rate, expected in ((0.05, False), (0.2, True)):
        for _ in range(10):
            p = model.predict(400)
            truth = torch.where(torch.rand(400) < rate, 1 - p.label, p.label)
            odds = torch.where(p.label == 1, 0.25, 0.5)
            watch.audit(p, truth)
            sampled.audit(p, torch.where(torch.rand(400) < odds, truth, -1), asked=odds)
        for one in (watch, sampled):
            assert one.alarm is expected
            assert isinstance(one.error_rate, Rate)
            assert one.error_rate.low < rate < one.error_rate.high
    assert watch.why == ("promise",)


def test_promises_by_label_are_audited_by_label() -> None:
    model = Calibrated(point(0.05, 0.6, "dog"))
    watch = he.Monitor(model)
    p = model.predict(2000)
    watch.audit(p, torch.where(p.label == 0, 1, p.label))  # every cat is wrong
    assert not watch.alarm
    assert watch.audited == int((p.accept & (p.label == 1)).sum())
    watch.audit(p, 1 - p.label)
    assert watch.why == ("promise of dog",)
    assert set(watch.error_rate) == {"dog"}  # type: ignore[arg-type]


def test_what_cannot_be_watched_is_refused() -> None:
    model = Calibrated(point(0.05, 0.6))
    watch, p = he.Monitor(model), model.predict(4)
    other = replace(p, calibration="there")
    for call in (lambda: watch.update(other), lambda: watch.audit(other, [0, 0, 0, 0])):
        with pytest.raises(DataError, match="watches"):
            call()
    for labels in ([0, 1], [0, 1, 2, 0], [0.0, 1.0, 1.0, 0.0]):
        with pytest.raises(DataError, match="labels"):
            watch.audit(p, labels)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="asked"):
        watch.audit(p, [0, 0, 0, 0], asked=0.5)
    with pytest.raises(DataError, match="probabilities"):
        he.Monitor(model, asked=0.5).audit(p, [0, 0, 0, 0], asked=0.1)
    shared = Calibrated()
    with pytest.raises(ConfigError, match="share"):
        he.Monitor(shared).audit(shared.predict(4), [0, 0, 0, 0])
    with pytest.warns(HydraWarning, match="all answers; he.calibrate"):
        he.Monitor(model, on_alarm="stricter")  # there is no stricter point
    with pytest.raises(ConfigError, match="calibrate"):
        he.Monitor(object())
    assert watch.update(p[:0]) is not None  # an empty batch is nothing
    assert watch.rows == 0

"""The verdict: honest about gains, losses, noise and price."""

import dataclasses

import pytest

from hydra_ensembles.metrics.bootstrap import Interval
from hydra_ensembles.report.compare import compare
from hydra_ensembles.report.verdict import differences, verdict
from sample_evaluations import costs, evaluation, methods

WORSE = {"accuracy": -0.1, "brier": 0.1, "nll": 0.2, "ece": 0.05, "aece": 0.05}


def changed(base, name, factor):
    """An evaluation that is better (factor 1), worse (-1) or the same (0) on every number."""
    result = dataclasses.replace(base.id, **{key: getattr(base.id, key) - factor * by for key, by in WORSE.items()})
    means = {
        mean: {
            score: dataclasses.replace(
                one, auroc=one.auroc + 0.02 * factor, fpr95=one.fpr95 - 0.02 * factor, aupr=one.aupr + 0.02 * factor
            )
            for score, one in scores.items()
        }
        for mean, scores in base.means.items()
    }
    return dataclasses.replace(base, name=name, id=result, means=means, intervals={})


def words(factor, **kwargs):
    base = evaluation("Single")
    runs = [base, changed(base, "Hydra", factor)]
    return verdict(compare(runs, **kwargs), "Hydra", "Single", {run.name: run for run in runs})


def test_it_says_so_when_the_method_wins():
    sentences = words(1)
    assert sentences[0] == "Hydra is better than Single on all 11 numbers measured."
    assert sentences[1].startswith("Better: accuracy ")
    assert "(+10.00)" in sentences[1]
    assert "and 8 more" in sentences[1]
    assert not any("Worse" in sentence for sentence in sentences)


def test_it_says_so_when_the_method_loses():
    sentences = words(-1)
    assert sentences[0] == "Hydra is worse than Single on all 11 numbers measured: it does not pay on this suite."
    assert sentences[1].startswith("Worse: accuracy ")
    assert "(−10.00)" in sentences[1]
    assert not any("Better" in sentence for sentence in sentences)


def test_it_says_so_when_nothing_differs():
    assert words(0)[0] == "Hydra and Single are level on all 11 numbers measured."


def test_mixed_results_are_called_mixed():
    base = evaluation("Single")
    mixed = dataclasses.replace(changed(base, "Hydra", 1), id=changed(base, "x", -1).id)
    sentences = verdict(compare([base, mixed]), "Hydra", "Single", {"Single": base, "Hydra": mixed})
    assert sentences[0] == ("Of 11 numbers measured, Hydra is better on 6, worse on 5: a mixed result against Single.")
    assert sentences[1].startswith("Better: near-OOD AUROC")
    assert sentences[2].startswith("Worse: accuracy")


def test_differences_within_the_noise_are_counted():
    base = evaluation("Single")
    better = changed(base, "Hydra", 1)
    wide = {key: Interval(0.5, 0.0, 1.0, 0.95, 10) for key in ("accuracy", "brier")}
    low, high = Interval(0.1, 0.05, 0.2, 0.95, 10), Interval(0.5, 0.4, 0.6, 0.95, 10)
    base = dataclasses.replace(base, intervals={**wide, "ece": high})
    better = dataclasses.replace(better, intervals={**wide, "ece": low})
    runs = {"Single": base, "Hydra": better}
    comparison = compare(runs)
    clear = {one.column.key: one.clear for one in differences(comparison, "Hydra", "Single", runs)}
    assert (clear["accuracy"], clear["ece"], clear["nll"]) == (False, True, None)
    text = " ".join(verdict(comparison, "Hydra", "Single", runs))
    assert "9 of these 11 differences are larger than the sampling noise" in text


def test_price_and_rivals_are_named():
    runs = methods()
    best = changed(runs[2], "Deep Ensemble", 1)
    shown = {"Single": runs[0], "Deep Ensemble": best, "Hydra": runs[2]}
    text = " ".join(verdict(compare(shown, costs()), "Hydra", "Single", shown))
    assert "The price: 2.00× the parameters, 1.00× the multiply-adds, 1.25× the time of a batch." in text
    assert "Deep Ensemble is ahead of both on accuracy" in text


@pytest.mark.parametrize("baseline", [None, "Alone"])
def test_one_method_is_described_by_itself(baseline):
    run = evaluation("Alone")
    sentences = verdict(compare([run]), "Alone", baseline, {"Alone": run})
    assert sentences[0] == f"Alone answers {run.id.accuracy * 100:.1f} % of 160 inputs of own correctly."
    assert any("near-OOD inputs" in sentence and "far-OOD inputs" in sentence for sentence in sentences)
    bare = evaluation("Alone", ood=False)
    assert not any("AUROC" in sentence for sentence in verdict(compare([bare]), "Alone", None, {"Alone": bare}))

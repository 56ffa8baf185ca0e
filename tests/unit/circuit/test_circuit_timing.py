"""The announced duration, and a progress bar that moves with every candidate; no test depends on seconds."""

import pytest
from tqdm import tqdm

from circuit_models import random_problem, searches
from hydra_ensembles.circuit import extract, timing
from hydra_ensembles.circuit.timing import bar_updater, in_words, seconds_of


def test_more_work_takes_longer() -> None:
    said = [in_words(seconds) for seconds in (3, 170, 5000, 9000)]
    assert said == ["less than a minute", "about 3 min", "about 83 min", "about 2.5 h"]
    naive, _, heads = searches(random_problem(), "avg")

    def work(candidates: list, steps: int) -> dict[str, float]:
        found = seconds_of([(naive.model, naive.samples)], candidates, steps, naive.objective, speed=1e9)
        return {method: seconds / found["naive"] for method, seconds in found.items()}

    usual, upper = work(heads, 4), work([head for head in heads if head.layer == 2], 4)
    assert 0 < usual["screened"] < usual["exact"] < usual["naive"] == 1
    assert upper["exact"] == pytest.approx(usual["exact"] / 2)  # one third of the blocks instead of two


def test_the_bar_counts_candidates_and_never_goes_back() -> None:
    with tqdm(total=15, initial=6) as bar:  # six candidates were decided in the previous step
        tell, positions = bar_updater(bar, start=6, most=5, ranks=2), []
        for decided in (1, 2, 1, 9):
            tell(decided)
            positions.append(bar.n)
        assert positions == [8, 10, 10, 11]


@pytest.mark.parametrize("method", ["auto", "naive", "exact", "screened"])
def test_a_run_says_how_long_it_takes_and_moves_by_candidates(
    method: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    monkeypatch.setattr(
        extract, "bar_updater", lambda *step: lambda decided: told.append(decided) or bar_updater(*step)(decided)
    )
    monkeypatch.setattr(
        timing, "interleaved_times", lambda passes, *_: {name: [1e-3] for name in passes}
    )  # fixed times
    random_problem().extract(method=method, budget=2, progress=True, screen_size=3, audit_steps=0)
    said = capfd.readouterr().err
    by = "exact" if method == "auto" else method
    assert f"circuit avg: less than a minute for 2 heads by '{by}'" in said
    assert "23/23" in said  # 12 candidates, then 11
    assert len(told) > 4
    random_problem().extract(method=method, budget=1, progress=False, screen_size=3, audit_steps=0)
    assert not capfd.readouterr().err

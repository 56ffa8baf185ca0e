"""The demo, in short: what it leaves behind."""

from pathlib import Path
from typing import Any

import pytest

import hydra_ensembles as he
from cli_cases import succeed
from hydra_ensembles.demo import load_sample, run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A demo on a few images of every set, through the command line."""
    place, whole = tmp_path_factory.mktemp("demo") / "out", load_sample()

    def few() -> Any:
        every = {"calibration": 2}  # half of them certify, and both thresholds together want 59
        return {name: one.select(range(0, len(one), every.get(name, 4))) for name, one in whole.items()}

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(run, "load_sample", few)
        patched.setattr(run, "demo_config", lambda seed, epochs, usual=run.demo_config: usual(seed, 3))
        told = succeed("demo", "--output", place, "--quiet")
        assert run.HYDRA in told
        assert str(place / "report.html") in told
    return place


def test_it_leaves_a_report_evaluations_and_a_model_that_says_why_it_declines(folder: Path) -> None:
    assert "<html" in (folder / "report.html").read_text()
    assert {path.name for path in (folder / "evaluations").glob("*.json")} == {
        "single.json",
        "hydra.json",
        "costs.json",
    }
    foreign = he.Evaluation.load(folder / "evaluations" / "hydra.json").foreign
    assert set(foreign) == {"ood.AnnualCrop", "ood.River", "ood.FashionMNIST"}
    model = he.load(folder / "model")
    assert (model.num_members, model.config.trunk) == (3, run.SHARED)
    seen = model.predict([load_sample()["FashionMNIST"][row][0] for row in range(8)])
    assert "unfamiliar" in seen.reason

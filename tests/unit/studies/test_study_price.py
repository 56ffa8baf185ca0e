"""The study of price: the rule that chooses, intervals over seeds, and what has to be there first."""

import ast
from pathlib import Path
from typing import Any

import pytest

from hydra_ensembles.errors import DataError
from hydra_ensembles.files import write_json
from studies import price

SETTINGS: dict[str, Any] = {
    "seeds": [0, 1, 2],
    "members": 3,
    "tasks": {"one": {"held_out": []}, "two": {"held_out": [], "seeds": [0, 1, 2, 3]}, "told": {}},
    "candidates": [
        {"trunk": 0.8, "mlp": "mean"},
        {"trunk": 0.8, "mlp": "separate"},
        {"trunk": 0.5, "mlp": "separate"},
    ],
    "most_work": 1.34,
}
CHEAP, BETTER, DEAR = price.candidates(SETTINGS)


def row(nll: float, work: float = 1.0) -> dict[str, float]:
    return {**dict.fromkeys(price.NUMBERS, 0.5), "nll": nll, "multiply_adds": work}


def store(output: Path, name: str, make: Any) -> None:
    for task in SETTINGS["tasks"]:
        for seed in price.seeds_of(SETTINGS, task):
            place = output / task / f"seed-{seed}"
            place.mkdir(parents=True, exist_ok=True)
            write_json(place / f"{name}.json", make(task, seed))


def test_the_choice_is_the_smallest_nll_of_all_tasks_among_those_that_cost_little(tmp_path: Path) -> None:
    """A task without held-out sets has no say, whatever is there of it."""

    def held_out(task: str, seed: int) -> dict[str, Any]:
        cheap = {"one": 0.80, "two": 2.0, "told": 0.0}[task]  # the best of one, and worse than Single in another
        single = {"one": 1.0, "two": 1.9, "told": 1.0}[task]
        return {price.SINGLE: row(single), CHEAP: row(cheap, 1.3), BETTER: row(0.85 * single, 1.3), DEAR: row(0.1, 1.5)}

    with pytest.raises(DataError, match=r"held_out\.json and 5 more"):
        price.choose(SETTINGS, tmp_path)
    store(tmp_path, "held_out", held_out)
    assert price.choose(SETTINGS, tmp_path)["setting"] == {"trunk": 0.8, "mlp": "separate"}
    with pytest.raises(DataError, match="multiply-adds"):
        price.choose({**SETTINGS, "most_work": 1.1}, tmp_path)


def test_differences_are_of_the_same_seed_and_intervals_are_students(tmp_path: Path) -> None:
    """Gains of 0.1, 0.2 and 0.3: mean 0.2, standard deviation 0.1, half width 4.3027 · 0.1 / sqrt(3)."""

    def report(_: str, seed: int) -> dict[str, Any]:
        rows = {name: row(1.0 + seed) for name in (price.SINGLE, price.DEEP)}
        return {**rows, price.HYDRA: row(1.0 + seed - 0.1 * (seed + 1))}

    store(tmp_path, "report", report)
    tables = price.summary(SETTINGS, tmp_path)
    assert tables["two"][price.HYDRA]["nll"]["difference"] == pytest.approx(-0.25)  # of four seeds
    found = tables["one"]
    assert found[price.HYDRA]["nll"]["difference"] == pytest.approx(-0.2)
    assert found[price.HYDRA]["nll"]["half_width"] == pytest.approx(4.30265 * 0.1 / 3**0.5, rel=1e-5)
    assert found[price.DEEP]["nll"] == {"mean": 2.0, "difference": 0.0, "half_width": 0.0}
    costs = {name: {"ratio": 1.2} for name in (price.SINGLE, price.HYDRA)}
    about = {"batch": 8, "device": "device", "tasks": dict.fromkeys(SETTINGS["tasks"], costs)}
    table = price.price_table({"tables": {"one": found}, "costs": about, "recipe": SETTINGS})
    assert "| one | Hydra | 1.20x | 50.00 | 1.800 |" in table
    assert "-0.200 ± 0.248" in table


def test_one_stage_opens_the_test_sets() -> None:
    """What is measured on them is asked for by `report` alone, which runs after the choice is written down."""
    tree = ast.parse(Path(price.__file__).read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    opening = {
        function.name
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and any(getattr(one, "value", None) == "report" for one in node.args)
    }
    readers = {
        function.name
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and node.attr in ("near", "far", "apart")
    }
    assert (opening, readers) == ({"report"}, {"outside"})


def test_the_recipe_reports_no_set_that_chose() -> None:
    for name, task in price.recipe()["tasks"].items():
        suite = price.suite(task["suite"])
        reported = {one.source for one in (*suite.near, *suite.far, suite.id)}
        assert not reported & {one["source"] for one in task.get("held_out", [])}, name

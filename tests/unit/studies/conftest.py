from collections.abc import Iterator
from pathlib import Path

import pytest
from small_study import CPU, SmallStore, small_recipe, small_store

from studies.results import StoredStudy, bring_together
from studies.run import run_stages


@pytest.fixture(scope="session", autouse=True)
def few_resamples() -> Iterator[None]:
    """Intervals of claims from a few draws: their width is tested where it matters, with numbers of its own."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("claims", "zero_shot.collecting"):
            patch.setattr(f"studies.{module}.RESAMPLES", 20)
        yield


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SmallStore]:
    """A run folder in which every stage of two seeds has run."""
    output, store = tmp_path_factory.mktemp("run"), small_store()
    run_stages(small_recipe(), store, output, CPU)
    return output, store


@pytest.fixture(scope="session")
def study(finished: tuple[Path, SmallStore]) -> StoredStudy:
    return bring_together(small_recipe(), finished[0])


@pytest.fixture
def results(study: StoredStudy, tables: dict, tmp_path: Path) -> Path:
    """A folder with the results of the small study."""
    study.save(tables, tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def tables(study: StoredStudy) -> dict:
    from studies.collecting import make_tables

    return make_tables(study)

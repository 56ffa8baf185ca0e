import pytest
from finished_studies import Finished, finished
from small_studies import ManyClasses, SmallFolder, classifier_recipe, classifier_runs, dual_recipe, dual_run


@pytest.fixture(scope="session")
def classifiers(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Two seeds of a study of classifiers."""
    output, source = tmp_path_factory.mktemp("classifiers"), SmallFolder()
    return finished(classifier_runs(output, source=source), classifier_recipe(), source, output)


@pytest.fixture(scope="session")
def duals(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """One seed of a zero-shot study."""
    output, source = tmp_path_factory.mktemp("duals"), ManyClasses()
    return finished([dual_run(output, source=source)], dual_recipe(), source, output)

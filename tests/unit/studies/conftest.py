import pytest
from finished_studies import Finished, finished
from small_studies import SmallFolder, classifier_recipe, classifier_runs


@pytest.fixture(scope="session")
def classifiers(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Two seeds of a study of classifiers."""
    output, source = tmp_path_factory.mktemp("classifiers"), SmallFolder()
    return finished(classifier_runs(output, source=source), classifier_recipe(), source, output)

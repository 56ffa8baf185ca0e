"""The studies of the results, whose columns and numbers are found once for all tests that ask for them."""

from collections import defaultdict
from typing import Any

from studies.stored import DualStudy, Study, stored_study

ZERO_SHOT = "zero-shot"
_KNOWN: dict[str, dict[Any, Any]] = defaultdict(dict)


def published(name: str) -> Study:
    """A stored study of a test's own: it may be shown other rows; what others have found of the files is known."""
    study = stored_study(name)
    study._once = _KNOWN[name]  # of rows and seeds, whatever rows are shown
    return study


def published_zero_shot() -> DualStudy:
    """The study of zero-shot classifiers."""
    study = published(ZERO_SHOT)
    assert isinstance(study, DualStudy)
    return study

"""The stored studies, with columns and numbers cached for all tests."""

from collections import defaultdict
from typing import Any

from studies.stored import DualStudy, Study, stored_study

ZERO_SHOT = "zero-shot"
_KNOWN: dict[str, dict[Any, Any]] = defaultdict(dict)


def published(name: str) -> Study:
    """A new object for a stored study, so that a test may select other rows; shares the cache of numbers."""
    study = stored_study(name)
    study._once = _KNOWN[name]  # by row and seed, whatever rows are selected
    return study


def published_zero_shot() -> DualStudy:
    """The stored study of zero-shot classifiers."""
    study = published(ZERO_SHOT)
    assert isinstance(study, DualStudy)
    return study

"""All suites by name."""

from collections.abc import Mapping
from types import MappingProxyType

from ..errors import DataError
from .paper_suites import PAPER_SUITES
from .shared_suites import SHARED_SUITES
from .suites import Suite

SUITES: Mapping[str, Suite] = MappingProxyType({**SHARED_SUITES, **PAPER_SUITES})


def suite(name: str) -> Suite:
    """Give a suite by its name.

    Raises:
        DataError: There is no such suite; the message lists those there are.
    """
    if name not in SUITES:
        raise DataError(f"no suite {name!r}; choose one of {', '.join(SUITES)}")
    return SUITES[name]

"""Names that were probably meant, for error messages."""

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The known names most like `name`, best first; none where nothing is like it."""
    by_lower = {one.lower(): one for one in known}
    return [by_lower[one] for one in difflib.get_close_matches(name.lower(), list(by_lower), n=count, cutoff=0.55)]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean a, b?`, or nothing."""
    found = nearest(name, known)
    return f"; did you mean {', '.join(found)}?" if found else ""

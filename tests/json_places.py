"""Every place in JSON data, for tests that change one."""

from typing import Any


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every container in JSON data with each of its keys or positions."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    return [place for key in keys for place in ((value, key), *places(value[key]))]

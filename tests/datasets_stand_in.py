"""A stand-in for the `datasets` library: tables by name and split."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest


class Table:
    """Behaves like `datasets.Dataset` with the Arrow format."""

    def __init__(self, columns: dict[str, list[Any]], names: list[str]) -> None:
        self._table = pa.table(columns)
        features = {"label": {"names": names, "_type": "ClassLabel"}}
        self.features = SimpleNamespace(to_dict=lambda: features)

    def with_format(self, kind: str) -> "Table":
        assert kind == "arrow"
        return self

    def __getitem__(self, rows: slice) -> pa.Table:
        assert rows == slice(None)
        return self._table


def stand_in_hub(monkeypatch: pytest.MonkeyPatch, known: dict[str, dict[str, Table]]) -> list[tuple[Any, ...]]:
    """Install a `datasets` module that knows these tables; return the list of requests it will record."""
    asked: list[tuple[Any, ...]] = []

    def load_dataset(name: str, config: str | None, split: str | None, trust_remote_code: bool) -> Any:
        assert not trust_remote_code
        asked.append((name, config, split))
        if name not in known:
            raise FileNotFoundError(f"Couldn't find a dataset {name}")
        if split is not None and split not in known[name]:
            raise ValueError(f'Unknown split "{split}". Should be one of {list(known[name])}.')
        return known[name] if split is None else known[name][split]

    module = ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    return asked

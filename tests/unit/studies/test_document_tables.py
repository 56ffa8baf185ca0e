"""Tables in the documents equal the results; kept here because other tests cache the numbers of the same studies."""

import sys
from pathlib import Path

from published import published

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))
import tables  # noqa: E402

del sys.path[0]


def test_tables_of_the_documents_are_those_of_the_results() -> None:
    stored = {name: published(name) for name in tables.studies()}
    of_studies = {name: tables.all_tasks.made(study) for name, study in stored.items()}
    made = tables.tables(stored, of_studies)
    for path in tables.documents():
        text = path.read_text()
        assert tables.rendered(text, made, stored) == (text, []), f"{path.name}: run benchmarks/tables.py"
    for name, study in stored.items():
        assert tables.all_tasks.filed(study, of_studies[name]), f"{name}: run benchmarks/tables.py"

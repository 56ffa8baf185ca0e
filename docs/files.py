"""Write the page of every file, docs/files.md: its layer, and the first sentence of its docstring."""

import ast
import re
from pathlib import Path

DOCS = Path(__file__).parent
PACKAGE = DOCS.parent / "src" / "hydra_ensembles"
HEAD = """# Every file

To look up a file; [architecture](architecture.md) explains the whole. `python docs/files.py` writes this page from
the first sentence of each file and the table of modules there.

| layer | file | what is in it |
|---:|---|---|
"""


def module_layers() -> dict[str, int]:
    """The layer of each module, as on the page on architecture; what holds all of them together is on top."""
    rows = re.findall(r"^\| (\d) \| (`.*?`) \|", (DOCS / "architecture.md").read_text(encoding="utf-8"), re.MULTILINE)
    return {name: int(layer) for layer, names in rows for name in re.findall(r"`(\w+)/?`", names)} | {"__init__": 7}


def table() -> str:
    """The page: by layer, files of the root before those of folders."""
    layers = module_layers()
    rows = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts[1:] != ("__init__",):
            told = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            rows.append((layers[parts[0]], len(parts), "/".join(parts), told.partition("\n")[0]))
    return HEAD + "".join(f"| {layer} | `{name}.py` | {told} |\n" for layer, _, name, told in sorted(rows))


if __name__ == "__main__":
    (DOCS / "files.md").write_text(table(), encoding="utf-8")

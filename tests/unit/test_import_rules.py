"""The import rules of docs/architecture.md, held against the code."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "hydra_ensembles"
CORE_LIBRARIES = {"torch", "numpy", "safetensors", "huggingface_hub", "tqdm"}
FILES = sorted(PACKAGE.rglob("*.py"))


def allowed_imports() -> dict[str, set[str]]:
    """Part → parts it may import, from the table in the documentation."""
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE)
    return {part: {name.strip() for name in names.split(",")} - {""} for part, names in rows}


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def our_imports(path: Path) -> Iterator[tuple[str, ast.AST]]:
    """Parts of ours that a file imports, with the statement."""
    package = ["hydra_ensembles", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            bare = node.level and not node.module
            modules = [f"{module}.{alias.name}" for alias in node.names] if bare else [module]
            if module == "hydra_ensembles":
                modules = [f"{module}.{alias.name}" for alias in node.names]
        for module in modules:
            names = module.split(".")
            if names[0] == "hydra_ensembles" and len(names) > 1:
                yield names[1], node


def outer_statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements that run on import: module level, without the blocks for type checkers."""
    for node in tree.body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_part_imports_only_what_its_row_lists(path: Path) -> None:
    rules, part = allowed_imports(), part_of(path)
    assert part in rules, f"{part} has no row in docs/architecture.md"
    found = {name for name, _ in our_imports(path)} - {part}
    assert found <= rules[part], f"{part} imports {sorted(found - rules[part])} against docs/architecture.md"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_our_modules_are_imported_at_the_top(path: Path) -> None:
    tree = ast.parse(path.read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inside = [
        ast.unparse(node)
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("hydra_ensembles"))
    ]
    assert not inside


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_optional_libraries_are_not_imported_at_the_top(path: Path) -> None:
    imported = set()
    for node in outer_statements(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            imported.add(node.module.partition(".")[0])
    foreign = imported - set(sys.stdlib_module_names) - CORE_LIBRARIES - {"hydra_ensembles"}
    allowed = {"typer", "rich", "click"} if part_of(path) == "cli" else set()
    assert foreign <= allowed


def test_the_table_names_no_part_that_does_not_exist() -> None:
    parts = {part_of(path) for path in FILES}
    rules = allowed_imports()
    assert set(rules) <= parts
    assert {name for names in rules.values() for name in names} <= parts


def test_importing_the_package_stays_light() -> None:
    heavy = "timm transformers open_clip torchvision sklearn torchmetrics matplotlib accelerate tokenizers PIL scipy"
    code = f"import sys, hydra_ensembles; print([m for m in {heavy.split()!r} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"

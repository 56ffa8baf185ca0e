"""The eight layers of docs/architecture.md: imports point downwards, without a circle, also those inside functions."""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "hydra_ensembles"
LAYERS = (
    "errors files settings store _utils",
    "batches digest metrics preprocessing prediction promise",
    "model model_card checkpoint",
    "heads fuse convert",
    "circuit training familiarity calibrate cascade monitor baselines optimize data",
    "evaluation report",
    "pipeline serve",
    "cli demo __main__",
)
LAYER = {part: number for number, parts in enumerate(LAYERS) for part in parts.split()}
LIGHT = {"torch", "numpy", "safetensors", "huggingface_hub", "tqdm", "filelock", "fsspec"}
FILES = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in sorted(PACKAGE.rglob("*.py"))}
OURS = [name for name in FILES if not name.endswith("__init__")]


def imports(name: str, inside_functions: bool) -> Iterator[str]:
    """Imports of a file, without those under TYPE_CHECKING: our files as `part.file`, other libraries as `!library`."""
    package = name.split(".")[:-1]
    waiting: list[ast.AST] = [ast.parse(FILES[name].read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from ("!" + alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield "!" + (node.module or "").partition(".")[0]
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1], *(node.module.split(".") if node.module else [])]
            for alias in node.names:
                module = ".".join([*base, alias.name])
                yield module if module in FILES else ".".join(base)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
        elif inside_functions or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            waiting += ast.iter_child_nodes(node)


@cache
def graph() -> dict[str, set[str]]:
    """Our files without `__init__`s, each with those it imports, through a package's `__init__` if need be."""
    found: dict[str, set[str]] = {}
    for name in OURS:
        found[name] = set()
        waiting = [to for to in imports(name, inside_functions=True) if not to.startswith("!")]
        while waiting:
            to = waiting.pop()
            if to in OURS:
                found[name].add(to)
            elif f"{to}.__init__" in FILES:
                waiting += [one for one in imports(f"{to}.__init__", True) if not one.startswith("!")]
    return found


def test_imports_point_downwards() -> None:
    layer = {name: LAYER[name.partition(".")[0]] for name in OURS}
    assert not [f"{a} -> {b}" for a, others in graph().items() for b in others if layer[b] > layer[a]]


def test_no_circle() -> None:
    left = {name: set(others) for name, others in graph().items()}
    while free := [name for name, others in left.items() if not others & left.keys()]:
        for name in free:
            del left[name]
    assert not left


def test_optional_libraries_are_not_loaded_at_the_top_and_studies_and_benchmarks_nowhere() -> None:
    for name in OURS:
        foreign = {to[1:] for to in imports(name, inside_functions=False) if to.startswith("!")}
        others = foreign - LIGHT - set(sys.stdlib_module_names)
        assert others <= ({"typer", "rich", "yaml"} if name.startswith("cli.") else set()), name
        assert not {"!studies", "!benchmarks"} & {*imports(name, inside_functions=True)}

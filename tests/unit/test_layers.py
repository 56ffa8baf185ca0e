"""The eight layers of docs/architecture.md: imports point downwards, without a cycle, and stay light."""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "hydra_ensembles"
LAYERS = (
    "errors files settings store _utils _distributed schema arguments",
    "batches classes digest fingerprints overlap metrics preprocessing prediction",
    "model model_card checkpoint",
    "heads prune fuse convert",
    "circuit training familiarity calibrate baselines optimize data run_folder",
    "evaluation report",
    "pipeline serve",
    "cli demo __main__ __init__",
)
LAYER = {part: number for number, parts in enumerate(LAYERS) for part in parts.split()}
LIGHT = {"torch", "numpy", "safetensors", "huggingface_hub", "tqdm", "filelock"}
FILES = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def top_level(name: str) -> list[ast.stmt]:
    """Statements of a file outside functions and TYPE_CHECKING."""
    return ast.parse(FILES[name].read_text()).body


def imports(name: str) -> Iterator[str]:
    """Imports of a file at load time: our files as `part.file`, other libraries as `!library`."""
    package = name.split(".")[:-1]
    for node in top_level(name):
        if isinstance(node, ast.Import):
            yield from ("!" + alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield "!" + (node.module or "").partition(".")[0]
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1], *(node.module.split(".") if node.module else [])]
            for alias in node.names:
                module = ".".join([*base, alias.name])
                yield module if module in FILES else ".".join(base)


def graph() -> dict[str, set[str]]:
    """Our files, each with those it imports."""
    return {
        name: {f"{to}.__init__" if f"{to}.__init__" in FILES else to for to in imports(name) if not to.startswith("!")}
        for name in FILES
    }


def test_imports_point_downwards() -> None:
    layer = {name: LAYER[name.partition(".")[0]] for name in FILES}
    assert not [f"{a} -> {b}" for a, others in graph().items() for b in others if layer[b] > layer[a]]


def test_no_cycle() -> None:
    left = graph()
    while free := [name for name, others in left.items() if not others & left.keys()]:
        for name in free:
            del left[name]
    assert not left


def test_optional_libraries_are_not_loaded_at_the_top_and_studies_and_benchmarks_nowhere() -> None:
    for name in FILES:
        foreign = {to[1:] for to in imports(name) if to.startswith("!")} - LIGHT - set(sys.stdlib_module_names)
        assert foreign <= ({"typer", "rich", "yaml"} if name.startswith("cli.") else set()), name

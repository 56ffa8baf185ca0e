"""The documentation names everything public; in CI: the site builds without warnings, as in `make docs`."""

import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

import hydra_ensembles as package

ROOT = Path(__file__).resolve().parents[2]
PUBLIC = [  # every package with a public list
    name
    for name in ("hydra_ensembles", *(f"hydra_ensembles.{one.name}" for one in pkgutil.iter_modules(package.__path__)))
    if hasattr(importlib.import_module(name), "__all__")
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed (extra docs)")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    said = built.stdout + built.stderr
    assert built.returncode == 0, said
    assert "WARNING" not in said, said
    return folder


def test_the_reference_names_everything_public_and_nothing_that_is_not_there() -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    shown = {name: pkgutil.resolve_name(name) for name in re.findall(r"^::: (\S+)$", pages, re.MULTILINE)}
    modules = [one for one in shown.values() if inspect.ismodule(one)]  # all their members are shown
    missing = []
    for module_name in PUBLIC:
        for name in importlib.import_module(module_name).__all__:
            value = getattr(importlib.import_module(module_name), name)
            known = any(one is value for one in shown.values()) or any(hasattr(one, name) for one in modules)
            if not (known or name.startswith("__") or inspect.ismodule(value)):
                missing.append(f"{module_name}.{name}")
    assert not missing, f"add them to a page under docs/api: {missing}"


@pytest.mark.ci
def test_the_site_is_built_with_members_of_classes(site: Path) -> None:
    inventory = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]  # written by mkdocstrings
    known = {line.split(" ")[0] for line in zlib.decompress(inventory).decode().splitlines()}
    assert "hydra_ensembles.model.ensemble.Ensemble.predict" in known

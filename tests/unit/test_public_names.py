"""Public names have a working example; extras are named as the code names them."""

import doctest
import functools
import inspect
import operator
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import hydra_ensembles as he
from hydra_ensembles.demo import load_backbone
from hydra_ensembles.model.config import PatchStemConfig
from hydra_ensembles.model.metadata import Metadata
from random_ensembles import small
from zero_shot_models import word_tokenizer

ROOT = Path(__file__).resolve().parents[2]
NAMES = [name for name in he.__all__ if name != "__version__"]


@functools.cache
def dual() -> he.DualEncoder:
    """The `dual` used by some examples."""
    blocks: dict[str, Any] = {"classes": 0, "width": 24, "heads": 4, "head_dim": 6, "mlp_width": 32}
    text = small("text", text={"vocabulary": 60, "positions": 12}, readout={"pool": "mean", "norm": "none"}, **blocks)
    image = replace(small(**blocks), stem=PatchStemConfig((16, 16), (2, 2)))
    tokenizer = Metadata(preprocessing=word_tokenizer(mask=True))
    torch.manual_seed(0)
    return he.DualEncoder(he.Ensemble(image), he.Ensemble(text, tokenizer), he.Projections.fresh(24, 24, 24)).eval()


@functools.cache
def given() -> dict[str, Any]:
    """What examples use without defining it: a trained model, and labelled batches for it."""
    base = load_backbone()
    images = torch.randn(24, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(24) % 7
    batches = list(zip(images.split(8), labels.split(8), strict=True))
    return {"he": he, "torch": torch, "base": base, "batches": batches}


@pytest.mark.parametrize("name", NAMES)
def test_the_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    documented = inspect.getdoc(operator.attrgetter(name)(he)) or ""
    names = {**given(), **({"dual": dual()} if re.search(r"\bdual\b", documented) else {})}
    example = doctest.DocTestParser().get_doctest(documented, names, name, None, None)
    assert example.examples
    said: list[str] = []
    assert not doctest.DocTestRunner(verbose=False).run(example, out=said.append).failed, "".join(said)


def test_importing_the_package_loads_no_torch_and_no_module_hides_a_function() -> None:
    code = "import sys, hydra_ensembles as he; assert 'torch' not in sys.modules; import hydra_ensembles.fuse, "
    code += "hydra_ensembles.convert.core; assert callable(he.fuse) and callable(he.convert) and he.data.load"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert he.__all__ == sorted(he.__all__)
    assert {*he.__all__, "metrics"} <= {*dir(he)}
    with pytest.raises(AttributeError, match="atlas"):
        he.atlas  # noqa: B018


def test_extras_that_are_asked_for_are_there_under_the_name_that_pip_knows() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wheel = {re.sub(r"[-_.]+", "-", name).lower() for name in extras}  # older versions of pip accept only this form
    code = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    assert {*extras, *re.findall(r'extra="([^"]+)"', code)} == wheel

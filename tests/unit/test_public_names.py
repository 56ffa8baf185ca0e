"""Public names, and those of submodules used in documents, have complete types and docstrings and a working example."""

import doctest
import functools
import inspect
import operator
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch

import hydra_ensembles as he
from hydra_ensembles.model.config import PatchStemConfig
from hydra_ensembles.model.metadata import Metadata
from random_ensembles import small
from zero_shot_models import word_tokenizer

ROOT = Path(__file__).resolve().parents[2]
NAMES = [name for name in he.__all__ if name != "__version__"]
SHOWN = ("baselines", "metrics")  # all of their functions and classes have an example
ROOMS = {  # what README, how-tos and notebooks call first
    "baselines": "deep_ensemble laplace mc_dropout",
    "data": "batches load only_classes split subset suite synthetic_ood without_classes",
    "demo": "load_backbone load_sample",
    "report": "to_markdown",
    "serve": "make_app",
    "metrics": "accuracy adaptive_ece aupr aurc auroc brier ece fpr95 nll risk_at_coverage",
}
USED = [f"{room}.{name}" for room, names in ROOMS.items() for name in names.split()]
LISTED = {f"{room}.{name}": getattr(getattr(he, room), name) for room in SHOWN for name in getattr(he, room).__all__}
SETTINGS = [name for name, thing in LISTED.items() if isinstance(thing, type) and ">>>" not in (thing.__doc__ or "")]
OTHERS = [name for name, thing in LISTED.items() if isinstance(thing, type | FunctionType) and name not in SETTINGS]


@functools.cache
def dual() -> he.DualEncoder:
    """The `dual` used by some examples; others define everything themselves."""
    blocks: dict[str, Any] = {"classes": 0, "width": 24, "heads": 4, "head_dim": 6, "mlp_width": 32}
    text = small("text", text={"vocabulary": 60, "positions": 12}, readout={"pool": "mean", "norm": "none"}, **blocks)
    image = replace(small(**blocks), stem=PatchStemConfig((16, 16), (2, 2)))
    tokenizer = Metadata(preprocessing=word_tokenizer(mask=True))
    torch.manual_seed(0)
    return he.DualEncoder(he.Ensemble(image), he.Ensemble(text, tokenizer), he.Projections.fresh(24, 24, 24)).eval()


@pytest.mark.parametrize("name", dict.fromkeys([*NAMES, *USED, *OTHERS]))
def test_the_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    documented = inspect.getdoc(operator.attrgetter(name)(he)) or ""
    given = {"dual": dual()} if re.search(r"\bdual\b", documented.partition("Examples:")[2]) else {}
    example = doctest.DocTestParser().get_doctest(documented, given, name, None, None)
    assert len(example.examples) > 1, "an example, which begins with the import"
    said: list[str] = []
    assert not doctest.DocTestRunner(verbose=False).run(example, out=said.append).failed, "".join(said)


@pytest.mark.parametrize("name", [*NAMES, *USED])
def test_types_and_docstring_are_complete(name: str) -> None:
    thing: Any = operator.attrgetter(name)(he)
    if isinstance(thing, type):
        methods = [one for key, one in vars(thing).items() if not key.startswith("_") and callable(one)]
        assert all(inspect.getdoc(one) for one in methods)
        functions = [inspect.unwrap(one) for one in methods if inspect.isfunction(one)]
    else:
        functions = [inspect.unwrap(thing)]
        described = re.findall(r"^    (\w+):", (inspect.getdoc(thing) or "").partition("Args:\n")[2], re.MULTILINE)
        assert [key for key in inspect.signature(thing).parameters if key not in described] == []
    for function in functions:
        signature = inspect.signature(function)
        untyped = [key for key, one in signature.parameters.items() if one.annotation is one.empty and key != "self"]
        assert not untyped, function
        assert signature.return_annotation is not signature.empty, function


def test_extras_that_are_asked_for_are_there_under_the_name_that_pip_knows() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wheel = {re.sub(r"[-_.]+", "-", name).lower() for name in extras}  # older versions of pip accept only this form
    code = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    assert {*extras, *re.findall(r'extra="([^"]+)"', code)} == wheel

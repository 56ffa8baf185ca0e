"""Every example runs offline as its documentation says and prints what it promises; notebooks run too."""

import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
EXPECTED = {  # what each prints, and options that make it faster
    "abstain.py": (r"test +\{.*\nAnnualCrop +\{.*\nFashionMNIST +\{", "--images 48"),
    "analyse_heads.py": (r"whole .*accuracy .*\nwithout 2 heads .*AUROC .*\n", "--images 8 --prune 2"),
    "any_network.py": (r"of the accepted answers .*\ntest: \d+% accepted, .* of them wrong\n", ""),
    "choose_members.py": (r"members +pruned +accuracy.*\n(?: .*%.*\n){5}", "--members 1 2 --images 24"),
    "hf_bert.py": (r"accept .*wonderful\n.* accept .*stale\n(?:.*\n)*saved to hydra-bert/model", "--prune 2"),
    "run_exported.py": (r"(?:\{'label': '.*', 'confidence': .*'reason': .*\}\n){3}", ""),
    "own_model.py": (r"(?:.*confidence 0\.\d\d +\(is: \w+\)\n){3}(?:.*\n)+saved to hydra-own/model", "--steps 4"),
    "search.py": (r"chosen: .*, saved to hydra-search/ensemble", "--images 64 --steps 2 --cost 9 --depths 5"),
    "timm_vit.py": (r"(?:.*(?:accept|abstain).*\n){5}(?:.*\n)+saved to hydra-vit/model", "--prune 2"),
    "which_method.py": (r"lora +3 .*x\n(?:.*\n)+laplace +20 .* 1\.00x\n", "--steps 1 --images 16"),
    "zero_shot.py": (r"at most \d\.\de-0[5-9]\n(?:.* -> .*\n){4}saved to hydra-zero-shot", "--prune 2"),
}
# the other examples repeat steps of README.md, docs/cli.md and commands that are always tested
QUICK = ("own_model.py", "zero_shot.py")
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in EXPECTED if name not in QUICK]


@pytest.mark.parametrize("name", [*[pytest.param(name, marks=pytest.mark.ci) for name in QUICK], *SLOW])
def test_example(tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """In an empty folder; warnings are errors, as in all tests."""
    pattern, faster = EXPECTED[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, *faster.split()])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    printed = capsys.readouterr().out
    assert re.search(pattern, printed), printed
    for place in re.findall(r"saved to ([\w/-]+)", printed):
        assert (tmp_path / place / "model.safetensors").exists()


def test_every_example_is_run_and_explains_itself() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} - {"train_demo_backbone.py"} == set(EXPECTED)
    for name in EXPECTED:
        text = (EXAMPLES / name).read_text()
        assert f"python examples/{name}" in text.split('"""')[1]


NOTEBOOKS = sorted((EXAMPLES.parent / "notebooks").glob("*.ipynb"))


@pytest.mark.ci  # a kernel's start takes seconds, and each runs a whole build
@pytest.mark.filterwarnings("ignore::DeprecationWarning:jupyter_client", "ignore::DeprecationWarning:zmq")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path) -> None:
    """And the stored one has no outputs, which differ between machines."""
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed (extra dev)")
    from notebooks.execute import execute

    assert not any(cell.get("outputs") for cell in nbformat.read(path, as_version=4).cells)
    execute(path)

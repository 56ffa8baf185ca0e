"""The commands `compare` and `report`, through their entry point."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from hydra_ensembles.cli.main import make_app
from hydra_ensembles.report.compare import save_costs
from sample_evaluations import costs, evaluation, methods


@pytest.fixture
def folder(tmp_path):
    for index, run in enumerate(methods()):
        run.save(tmp_path / f"{index}.json")
    save_costs(tmp_path / "costs.json", costs())
    (tmp_path / "settings.json").write_text('{"anything": "else"}')
    (tmp_path / "notes.txt").write_text("not read")
    return tmp_path


def run(*arguments):
    return CliRunner().invoke(make_app(), [str(argument) for argument in arguments])


def test_report_of_a_folder(folder):
    result = run("report", folder, "--output", folder / "out" / "report.html", "--title", "My title")
    assert result.exit_code == 0, result.output
    page = (folder / "out" / "report.html").read_text()
    assert "<h1>My title</h1>" in page
    assert "1.25×" in page
    assert "wrote" in result.output


def test_report_of_files_with_focus_and_baseline(folder):
    result = run("report", folder / "0.json", folder / "2.json", "-o", folder / "r.html", "--focus", "Single",
                 "--baseline", "Hydra")  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "How good is Single?" in (folder / "r.html").read_text()


def test_compare_prints_a_table(folder):
    result = run("compare", folder)
    assert result.exit_code == 0
    assert "Deep Ensemble" in result.output
    assert "OOD avg" in result.output


@pytest.mark.parametrize(
    ("kind", "start"), [("markdown", "| Method |"), ("latex", "% In distribution"), ("csv", "method,heads,accuracy")]
)
def test_compare_writes_other_formats(folder, kind, start):
    assert run("compare", folder, "--format", kind).output.startswith(start)
    result = run("compare", folder, "--format", kind, "--output", folder / "table")
    assert result.exit_code == 0
    assert result.output == ""
    assert (folder / "table").read_text().startswith(start)


def test_a_terminal_table_can_go_to_a_file(folder):
    assert run("compare", folder, "--output", folder / "table.txt").exit_code == 0
    assert (folder / "table.txt").read_text().count("Method") == 1


@pytest.mark.parametrize("command", ["compare", "report"])
def test_mistakes_give_one_line_and_exit_code_2(folder, command, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "cut.json").write_text('{"format": "hydra_en')
    (folder / "wrong").mkdir()
    broken = {**json.loads((folder / "0.json").read_text()), "id": 3}
    (folder / "wrong" / "run.json").write_text(json.dumps(broken))
    (folder / "different").mkdir()
    evaluation(ood=False).save(folder / "different" / "x.json")
    cases = {
        (tmp_path / "missing",): "does not exist",
        (tmp_path / "empty",): "no saved evaluation found",
        (tmp_path / "cut.json",): "not valid JSON",
        (folder / "settings.json",): "neither a saved evaluation nor a table of costs",
        (folder / "wrong",): ".id must be an object",
        (folder / "2.json", folder / "different"): "evaluate both on the same data",
    }
    for paths, says in cases.items():
        result = run(command, *paths)
        assert result.exit_code == 2, says
        lines = result.stderr.strip().splitlines()
        assert len(lines) == 1
        assert lines[0].startswith("error: ")
        assert says in lines[0]


def test_unknown_focus_and_unwritable_output(folder):
    result = run("report", folder, "--focus", "Nobody", "-o", folder / "r.html")
    assert result.exit_code == 2
    assert "focus='Nobody' is not among the methods" in result.stderr
    result = run("report", folder, "-o", folder / "notes.txt" / "r.html")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")


def test_the_module_runs_and_helps_with_examples():
    result = subprocess.run(
        [sys.executable, "-m", "hydra_ensembles.cli.main", "report", "--help"], capture_output=True, text=True
    )
    assert result.returncode == 0
    assert "  hydra-ensembles report runs/ --output report.html\n" in result.stdout
    assert "Traceback" not in result.stderr

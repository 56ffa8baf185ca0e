"""`hydra-ensembles evaluate`, `compare`, `report` and `atlas`."""

import json
import shlex
import shutil
import sys

import pytest
import yaml

from cli_cases import fail, run, save_images, succeed, vit_flags
from hydra_ensembles.cli.evaluations import grouped_specs
from hydra_ensembles.data.suites import SetRef, Suite, all_suites
from hydra_ensembles.evaluation.evaluate import _Pass
from hydra_ensembles.evaluation.evaluation import Evaluation
from hydra_ensembles.report.compare import save_costs
from processes import count_calls
from sample_evaluations import costs, evaluation, methods


@pytest.fixture(scope="module")
def evaluations(run_folder, world, tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluations")
    sets = ["--id", world / "test", "--ood", f"near:dots={world / 'dots'}", "--ood", f"far:stripes={world / 'stripes'}"]
    for model, name in ((run_folder, "Hydra"), (run_folder / "base", "Single")):
        succeed("evaluate", model, *sets, "--name", name, "--output", folder, "--quiet")
    return folder


def test_an_evaluation_is_written_with_settings_that_repeat_it(evaluations, world, tmp_path):
    found = Evaluation.load(evaluations / "hydra.json")
    assert (found.name, found.id.samples) == ("Hydra", 12)
    assert {name: one.group for name, one in found.ood.items()} == {"dots": "near", "stripes": "far"}
    assert found.selective is not None  # the threshold stored by build
    assert Evaluation.load(evaluations / "single.json").selective is None
    settings = yaml.safe_load((evaluations / "hydra.config.yaml").read_text())
    assert settings["ood"] == [f"near:dots={world / 'dots'}", f"far:stripes={world / 'stripes'}"]
    out = succeed("evaluate", "--config", evaluations / "hydra.config.yaml", "-o", tmp_path / "again.json", "-q")
    shown = ("Near-OOD", "Both calibrated thresholds together accept", "AUROC by mahalanobis", "Declined %")
    assert all(words in out for words in shown)
    assert f"wrote {tmp_path / 'again.json'}" in out
    assert Evaluation.load(tmp_path / "again.json").numbers() == found.numbers()


def test_texts_without_groups_and_with_shift(text_folder, world, tmp_path):
    flags = ["--id", world / "test.jsonl", "--shift", f"older={world / 'val.csv'}", "--also-score", "energy",
             "--bootstrap", 10, "--keep-logits", "--limit", 16, "-q"]  # fmt: skip
    (tmp_path / "news.csv").write_text("text\nlong film\nthe dull plot\na a a\n")
    out = succeed("evaluate", text_folder, *flags, "--ood", tmp_path / "news.csv", "-o", tmp_path / "out")
    assert "OOD avg" in out
    assert "older" in out
    found = Evaluation.load(tmp_path / "out" / "text-run.json", with_logits=True)
    assert (found.id.samples, found.shift["older"].samples) == (16, 16)
    assert set(found.ood["news"].detection) == {"msp", "energy", "mahalanobis"}  # fitted by build, shown by default
    assert found.intervals
    assert found.logits is not None


def test_classes_are_matched_by_name(run_folder, world, tmp_path):
    """Labels of a set with fewer classes in another order are mapped to the model's."""
    save_images(tmp_path / "some", 4, seed=9)
    shutil.rmtree(tmp_path / "some" / "blue")
    succeed("evaluate", run_folder, "--id", tmp_path / "some", "-o", tmp_path / "a.json", "--keep-logits", "-q")
    logits = Evaluation.load(tmp_path / "a.json", with_logits=True).logits
    assert set(logits.id.labels.tolist()) == {1, 2}  # green and red among blue, green, red
    printed = succeed("evaluate", run_folder, "--id", tmp_path / "some", "-o", tmp_path / "a.json", "-q", "--json")
    assert json.loads(printed) == json.loads((tmp_path / "a.json").read_text())
    assert not (tmp_path / "a.logits.safetensors").exists()  # they belonged to another evaluation
    (tmp_path / "some" / "red").rename(tmp_path / "some" / "redd")
    says = fail("evaluate", run_folder, "--id", tmp_path / "some", "-o", tmp_path / "b.json", "-q")
    assert "has the classes redd" in says
    assert "did you mean red" in says
    succeed("evaluate", run_folder, "--id", tmp_path / "some", "--by-position", "-o", tmp_path / "b.json", "-q")


def test_a_suite(run_folder, world, tmp_path, monkeypatch):
    suite = Suite(
        name="colours",
        id=SetRef("colours", "test"),
        circuit_ood=SetRef("rest", "stripes", rows=(0, 9), labels="optional"),
        validation=SetRef("held-out", "val"),
        near=(SetRef("dots", "dots", labels="optional"),),
        far=(SetRef("stripes", "stripes", rows=(9, None), labels="optional"),),
        notes="",
    )
    known = {**all_suites(), "colours": suite}
    monkeypatch.setattr("hydra_ensembles.data.suites.all_suites", lambda: known)
    common = ["--root", world, "-q"]
    out = succeed("evaluate", run_folder, "--suite", "colours", "-o", tmp_path / "e", *common)
    assert "colours (12 samples)" in out
    assert "Far-OOD" in out
    assert "no suite 'colour'" in fail("evaluate", run_folder, "--suite", "colour", *common)
    model = vit_flags(world / "mine.safetensors")
    sets = ["--id", "suite:colours:validation", "--ood", "suite:colours:circuit_ood"]
    build = [*sets, "--members", 2, "--strategy", "sampled", "--prune", 2, "--shared-layers", 0]
    succeed("build", *model, *build, "--output", tmp_path / "run", *common)


def test_an_evaluation_is_not_lost_to_another_of_the_same_name(run_folder, world, tmp_path, monkeypatch):
    """Of two folders called `ensemble`, the second is refused; the first, evaluated again, is replaced."""
    for name in ("a", "b"):
        shutil.copytree(run_folder / "ensemble", tmp_path / name / "ensemble")
    monkeypatch.chdir(tmp_path)
    sets, out = ["--id", world / "test", "--limit", 9, "-q"], tmp_path / "evaluations" / "ensemble.json"
    succeed("evaluate", "a/ensemble", *sets)
    first = out.read_text()
    for others in (["b/ensemble", *sets], ["a/ensemble", *sets, "--limit", 6]):
        assert "holds another evaluation (see ensemble.config.yaml)" in fail("evaluate", *others)
    assert out.read_text() == first
    succeed("evaluate", "./a/ensemble/", *sets, "--batch-size", 2)
    succeed("evaluate", "b/ensemble", *sets, "--ood", world / "dots", "-o", out)  # a named file is replaced
    assert list(Evaluation.load(out).ood) == ["dots"]


def test_the_settings_of_an_evaluation_mean_the_same_from_every_folder(run_folder, world, tmp_path, monkeypatch):
    shutil.copytree(run_folder / "ensemble", tmp_path / "a" / "ensemble")
    for data in ("test", "dots"):
        shutil.copytree(world / data, tmp_path / "a" / data)
    monkeypatch.chdir(tmp_path / "a")
    succeed("evaluate", "ensemble", "--id", "test", "--ood", "near:x=dots", "-o", "../evaluations", "-q")
    out, settings = (tmp_path / "evaluations" / f"ensemble.{end}" for end in ("json", "config.yaml"))
    first, written = Evaluation.load(out), yaml.safe_load(settings.read_text())
    assert written["model"] == str(tmp_path / "a" / "ensemble")
    assert written["ood"] == [f"near:x={tmp_path / 'a' / 'dots'}"]
    assert written["output"] == str(tmp_path / "evaluations")
    monkeypatch.chdir(world)
    succeed("evaluate", "--config", settings, "-q")  # the same evaluation again
    assert Evaluation.load(out).numbers() == first.numbers()


def test_an_existing_path_with_an_equals_sign_is_no_name_and_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("de.csv", "lang=de.csv"):
        (tmp_path / name).touch()
    assert grouped_specs(["far:lang=de.csv", "near:x=de.csv"]) == [
        ("far", None, "lang=de.csv"),
        ("near", "x", "de.csv"),
    ]


def test_the_identity_of_a_run_is_not_replaced_by_an_evaluation(run_folder, world, tmp_path):
    shutil.copy(run_folder / "run.json", tmp_path)
    for output in (tmp_path, tmp_path / "run.json"):
        assert "is not what" in fail("evaluate", run_folder, "--id", world / "test", "-o", output)


@pytest.fixture
def saved(tmp_path):
    for index, one in enumerate(methods()):
        one.save(tmp_path / f"{index}.json")
    save_costs(tmp_path / "costs.json", costs())
    (tmp_path / "notes.txt").write_text("not read")
    return tmp_path


def test_a_comparison_in_each_format_and_a_report(saved):
    starts = {"markdown": "| Method |", "latex": "% In distribution", "csv": "method,heads,accuracy", "table": " "}
    for kind, start in starts.items():
        out = succeed("compare", saved, "--format", kind)
        assert out.startswith(start)
        assert "Deep Ensemble" in out
    page, flags = saved / "out" / "report.html", ["--title", "My title", "--baseline", "Hydra"]
    assert f"wrote {page}" in succeed("report", saved, "--output", page, *flags, "--focus", "Single")
    assert "<h1>My title</h1>" in page.read_text()
    assert "1.25×" in page.read_text()
    assert "Nobody" in fail("report", saved, "--focus", "Nobody", "-o", page)
    assert "is not what" in fail("report", saved, "-o", saved / "0.json")
    evaluation("Other", shift=False).save(saved / "other.json")
    assert "does not exist; did you mean" in fail("compare", saved / "othr.json")
    assert "--allow-mismatch" in fail("compare", saved)
    assert "Not the same data" in succeed("compare", saved, "--allow-mismatch")
    (saved / "other.json").write_text("{")  # cut off: its row is not left out without a word
    assert "other.json is not valid JSON" in fail("compare", saved)


def test_an_interruption_names_the_line_that_goes_on(run_folder, world, tmp_path, monkeypatch):
    words = ["evaluate", run_folder, "--id", world / "test", "--batch-size", 6, "-o", tmp_path / "a.json", "-q"]
    calls = []
    count_calls(monkeypatch, _Pass, "_answer", lambda: calls.append(1), lambda: len(calls) == 2)
    monkeypatch.setattr(sys, "argv", ["hydra-ensembles", *map(str, words)])
    stopped = run(*words)
    assert stopped.exit_code == 130
    assert str(tmp_path / "a.run") in stopped.stderr
    assert stopped.stderr.endswith(f": hydra-ensembles {shlex.join(map(str, words))}\n")
    succeed(*shlex.split(stopped.stderr.rpartition(": hydra-ensembles ")[2]))
    assert len(calls) == 3  # two batches; the second was started twice
    assert not (tmp_path / "a.run").exists()
    assert (tmp_path / "a.json").exists()

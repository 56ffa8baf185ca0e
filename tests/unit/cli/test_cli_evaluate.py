"""`hydra-ensembles evaluate`, and what `compare` and `report` make of its files."""

import pytest
import yaml

from cli_cases import fail, save_images, succeed, vit_flags
from hydra_ensembles.data.suites import SUITES, SetRef, Suite
from hydra_ensembles.evaluation.evaluation import Evaluation


@pytest.fixture(scope="module")
def evaluations(run_folder, world, tmp_path_factory):
    """The ensemble and the single model on the same data."""
    folder = tmp_path_factory.mktemp("evaluations")
    sets = ["--id", world / "test", "--ood", f"near:dots={world / 'dots'}", "--ood", f"far:stripes={world / 'stripes'}"]
    for model, name in ((run_folder, "Hydra"), (run_folder / "base", "Single")):
        succeed("evaluate", model, *sets, "--name", name, "--output", folder, "--quiet")
    return folder


def test_an_evaluation_is_written_with_its_settings(evaluations, world):
    found = Evaluation.load(evaluations / "hydra.json")
    assert found.name == "Hydra"
    assert found.id.samples == 24
    assert {name: one.group for name, one in found.ood.items()} == {"dots": "near", "stripes": "far"}
    assert found.selective is not None  # the threshold that build has stored
    assert Evaluation.load(evaluations / "single.json").selective is None
    settings = yaml.safe_load((evaluations / "hydra.config.yaml").read_text())
    assert settings["ood"] == [f"near:dots={world / 'dots'}", f"far:stripes={world / 'stripes'}"]
    assert settings["score"] == "msp"


def test_the_settings_repeat_it(evaluations, tmp_path):
    out = succeed("evaluate", "--config", evaluations / "hydra.config.yaml", "-o", tmp_path / "again.json", "-q")
    assert "mean of near" in out
    assert "calibrated threshold accepts" in out
    assert f"wrote {tmp_path / 'again.json'}" in out
    first, again = (Evaluation.load(file) for file in (evaluations / "hydra.json", tmp_path / "again.json"))
    assert first.numbers() == again.numbers()


def test_compare_and_report_read_the_folder(evaluations, tmp_path):
    table = succeed("compare", evaluations, "--format", "markdown")
    assert "| Hydra |" in table
    assert "| Single |" in table
    succeed("report", evaluations, "--output", tmp_path / "report.html", "--focus", "Hydra", "--baseline", "Single")
    assert "Hydra" in (tmp_path / "report.html").read_text()


def test_texts_without_groups_and_with_shift(text_folder, world, tmp_path):
    flags = ["--id", world / "test.jsonl", "--shift", f"older={world / 'val.csv'}", "--also-score", "energy",
             "--bootstrap", 10, "--keep-logits", "--gallery", 0, "--limit", 16, "-q"]  # fmt: skip
    (tmp_path / "news.csv").write_text("text\nlong film\nthe dull plot\na a a\n")
    out = succeed("evaluate", text_folder, *flags, "--ood", tmp_path / "news.csv", "-o", tmp_path / "out")
    assert "mean of all" in out
    found = Evaluation.load(tmp_path / "out" / "text-run.json", with_logits=True)
    assert found.id.samples == 16
    assert found.shift["older"].samples == 16
    assert set(found.ood["news"].detection) == {"msp", "energy"}
    assert found.intervals
    assert found.logits is not None


def test_a_single_timm_model(world, tmp_path):
    out = succeed("evaluate", *vit_flags(world / "mine.safetensors"), "--id", world / "test", "-o", tmp_path, "-q")
    assert "timm:test_vit on test (24 samples)" in out
    assert (tmp_path / "test_vit.json").exists()


def test_classes_are_matched_by_name(run_folder, world, tmp_path):
    """Of a set with fewer classes, in another order, the labels are still those of the model."""
    save_images(tmp_path / "some", 4, seed=9)
    for file in (tmp_path / "some" / "blue").iterdir():
        file.unlink()
    (tmp_path / "some" / "blue").rmdir()
    succeed("evaluate", run_folder, "--id", tmp_path / "some", "-o", tmp_path / "a.json", "--keep-logits", "-q")
    logits = Evaluation.load(tmp_path / "a.json", with_logits=True).logits
    assert logits is not None
    assert set(logits.id.labels.tolist()) == {1, 2}  # green and red of blue, green, red
    succeed("evaluate", run_folder, "--id", tmp_path / "some", "-o", tmp_path / "a.json", "-q")
    assert not (tmp_path / "a.logits.safetensors").exists()  # they were those of another evaluation
    (tmp_path / "some" / "red").rename(tmp_path / "some" / "redd")
    says = fail("evaluate", run_folder, "--id", tmp_path / "some", "-o", tmp_path / "b.json", "-q")
    assert "has the classes redd" in says
    assert "did you mean red" in says
    assert "--by-position" in says
    succeed("evaluate", run_folder, "--id", tmp_path / "some", "--by-position", "-o", tmp_path / "b.json", "-q")


def test_a_suite(run_folder, world, tmp_path, monkeypatch):
    suite = Suite(
        name="colours",
        id=SetRef("colours", "test"),
        circuit_ood=SetRef("rest", "stripes", rows=(0, 12), labels="optional"),
        validation=SetRef("held-out", "val"),
        near=(SetRef("dots", "dots", labels="optional"),),
        far=(SetRef("stripes", "stripes", rows=(12, None), labels="optional"),),
        notes="",
    )
    known = {**SUITES, "colours": suite}
    monkeypatch.setattr("hydra_ensembles.data.suites.SUITES", known)
    common = ["--root", world, "-q"]
    out = succeed("evaluate", run_folder, "--suite", "colours", "-o", tmp_path / "e", *common)
    assert "run on colours (24 samples)" in out
    assert "mean of far" in out
    succeed("evaluate", run_folder, "--id", "colours", "--ood", "suite:colours:dots", "-o", tmp_path / "f", *common)
    says = fail("evaluate", run_folder, "--id", "colours", "--ood", "suite:colours:dot", "-o", tmp_path / "f", *common)
    assert "has no set 'dot'; did you mean dots" in says
    assert "has no set 'ood'" in fail("evaluate", run_folder, "--id", "colours", "--ood", "colours", *common)
    assert "did you mean colours" in fail("evaluate", run_folder, "--suite", "colour", *common)
    model = vit_flags(world / "mine.safetensors")
    build = ["--suite", "colours", "--members", 2, "--strategy", "sampled", "--prune", 2]
    succeed("build", *model, *build, "--output", tmp_path / "run", *common)
    assert "the suite" not in fail("evaluate", run_folder, "--suite", "colours", "-q")  # without --root: no such path


def test_wrong_settings(run_folder, world, tmp_path):
    common = [run_folder, "-o", tmp_path]
    assert "give --id DATA" in fail("evaluate", *common)
    test = ["--id", world / "test"]
    assert "write near:, far: or apart: before each" in fail(
        "evaluate", *common, *test, "--ood", world / "dots", "--ood", f"far:x={world / 'stripes'}"
    )
    twice = [f"near:x={world / 'dots'}", f"far:x={world / 'stripes'}"]
    assert "two OOD sets are called 'x'" in fail("evaluate", *common, *test, "--ood", twice[0], "--ood", twice[1])
    same = ["--ood", f"near:a={world / 'test'}/"]
    assert "names the same data as --id" in fail("evaluate", *common, *test, *same, "--limit", 6)
    loose = fail("evaluate", *common, "--id", world / "dots")
    assert loose.endswith("without a class: make a subfolder for each class, or use them as OOD data")
    assert "there is no such file" in fail("evaluate", *common, *test, "--labels", tmp_path / "no.txt")
    assert "error: --bootstrap -1 is not" in fail("evaluate", *common, *test, "--bootstrap", -1)
    assert "error: --also-score must be one of" in fail("evaluate", *common, *test, "--also-score", "magic")
    assert "error: --limit must be at least 2" in fail("evaluate", *common, *test, "--limit", 1)
    assert "device 'gpu' cannot be used here" in fail("evaluate", *common, *test, "--device", "gpu")
    assert "no data 'tset': there is no such file or folder, and no such suite" in fail(
        "evaluate", *common, "--id", "tset"
    )
    assert "did you mean test" in fail("evaluate", *common, "--id", world / "tset")
    assert not list(tmp_path.iterdir())

"""Commands that make folders and files of models."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import hydra_ensembles as he
from checkpoint_models import same_state
from cli_cases import COLOURS, fail, save_reviews, small_vit, succeed
from hydra_ensembles.data import batches, load
from hydra_ensembles.model.member_states import place_of


def test_a_converted_folder_answers_as_its_library_does(world: Path) -> None:
    ours, images = he.load(world / "base"), torch.randn(3, 3, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(ours(images)[0], small_vit()(images))
    assert ours.metadata.labels == COLOURS
    text = he.load(world / "text")
    assert text.metadata.labels == ("negative", "positive")
    assert text.predict(["good film"]).probs.shape == (1, 2)


def test_what_convert_is_told_is_in_the_folder(world: Path, tmp_path: Path) -> None:
    (tmp_path / "names.txt").write_text("no\nyes\n")
    names = ["--labels", tmp_path / "names.txt"]
    succeed("convert", world / "bert", "--set", "max_length=7", *names, "-o", tmp_path / "short")
    short = he.load(tmp_path / "short").metadata
    assert (short.preprocessing.max_length, short.labels) == (7, ("no", "yes"))


@pytest.mark.parametrize(
    ("arguments", "token"),
    [
        (["timm:test_vitt"], "test_vitt"),
        (["timm:test_vit", "--option", "num_classes=3"], "weights"),
        (["timm:test_vit", "--weights", "val.csv"], "Safetensor"),
        (["timm:test_vit", "--weights", "mine.safetensors"], "could not be loaded"),
        (["bert", "--weights", "mine.safetensors"], "leave out"),
        (["nothing"], "no model"),
        (["val"], "config.json"),
        (["bert", "-o", "val"], "already"),
    ],
)
def test_models_that_cannot_be_had(world: Path, tmp_path: Path, monkeypatch, arguments: list[str], token: str) -> None:
    monkeypatch.chdir(world)
    output = [] if "-o" in arguments else ["-o", tmp_path / "out"]
    assert token in fail("convert", *arguments, *output)
    assert not (tmp_path / "out").exists()


def test_code_of_a_model_is_never_run_and_a_model_without_classifier_is_refused(world: Path, tmp_path: Path) -> None:
    for name, change, token in (
        ("code", {"auto_map": {"AutoModel": "x.y"}}, "auto_map"),
        ("bare", {"architectures": ["BertModel"]}, "no trained classifier"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        config = json.loads((world / "bert" / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **change}))
        assert token in fail("convert", folder, "-o", tmp_path / "out")


def test_all_other_commands_take_folders_of_ours(world: Path) -> None:
    assert "convert" in fail("info", world / "bert")
    assert "convert" in fail("calibrate", world / "bert", "--data", world / "val.csv", "-o", world / "x")


def test_a_model_is_calibrated_as_the_function_does(world: Path, safe: Path) -> None:
    base, saved = he.load(world / "base"), he.load(safe)
    data = batches(load(world / "val"), base.metadata.preprocessing, 64)
    expected = he.calibrate(base, data, share=0.8)
    assert saved.metadata.calibration == expected.metadata.calibration
    assert "already" in fail("calibrate", world / "base", "--data", world / "val", "-o", safe)
    assert "holds texts" in fail("calibrate", world / "base", "--data", world / "val.csv", "-o", world / "x")


def test_a_promise_is_made_or_refused_with_the_way_out(world: Path, tmp_path: Path) -> None:
    given = ("calibrate", world / "base", "--data", world / "val", "--familiarity", "none")
    assert "needs at least" in fail(*given, "--risk", 0.0001, "-o", tmp_path / "x")
    assert "risk names" in fail(*given, "--risk", 0.1, "--risk", "a=0.1", "-o", tmp_path / "x")
    said = succeed(*given, "--risk", 0.99, "--confidence", "none", "-o", tmp_path / "y")
    assert "Promise: of the accepted answers" in said
    assert he.load(tmp_path / "y").promise.risk == 0.99


def test_trainings_become_one_model(world: Path, tmp_path: Path) -> None:
    models = [world / "base", tmp_path / "other"]
    changed = he.load(models[0])
    changed.load_state_dict({name: tensor + 0.01 for name, tensor in changed.state_dict().items()})
    changed.save_pretrained(models[1])
    loaded = [he.load(path) for path in models]
    for how, expected in (
        (["--average", "0.8", "--mlp", "separate"], he.fuse(loaded, average=0.8, mlp="separate")),
        (["--average", "2", "--mlp", "separate"], he.fuse(loaded, average=2, mlp="separate")),
        (["--as", "soup"], he.soup(loaded)),
        (["--as", "stack"], he.Ensemble.stack(loaded)),
    ):
        output = tmp_path / "-".join(how)
        succeed("fuse", *models, *how, "-o", output)
        assert same_state(he.load(output), expected)
    (tmp_path / "loose").mkdir()
    for number, path in enumerate(sorted((world / "val").rglob("*.png"))[:6]):  # without labels
        shutil.copy(path, tmp_path / "loose" / f"{number}.png")
    options = ["--average", "2", "--mlp", "separate", "--distill", tmp_path / "loose", "-o", tmp_path / "taught"]
    assert "distilled" in succeed("fuse", *models, *options)
    taught, plain = (he.load(tmp_path / name).state_dict() for name in ("taught", "--average-2---mlp-separate"))
    layers = {place_of(name)[1] for name in plain if not torch.equal(plain[name], taught[name])}
    assert layers == {2, None}
    assert not list(tmp_path.glob("*.training"))


def test_a_cascade_works_in_every_command(world: Path, tmp_path: Path) -> None:
    chain, options = tmp_path / "chain", ["--as", "cascade", "-o", tmp_path / "chain"]
    assert "--data" in fail("fuse", world / "text", world / "text", *options)
    save_reviews(tmp_path / "more.csv", 600, seed=8)
    options += ["--data", tmp_path / "more.csv"]
    told = succeed("fuse", world / "text", world / "text", *options, "--ask", 0.3)
    assert "went on" in told
    assert "went on" in succeed("info", chain)
    facts = json.loads(succeed("info", chain, "--json"))
    assert len(facts["config"]["stages"]) == 2
    succeed("calibrate", chain, "--data", tmp_path / "more.csv", "--share", 0.8, "-o", tmp_path / "safe")
    rows = succeed("predict", tmp_path / "safe", world / "news.txt", "--format", "jsonl").splitlines()
    assert all(json.loads(row)["stage"] in (0, 1) for row in rows)
    succeed("evaluate", tmp_path / "safe", "--id", world / "test.jsonl", "-o", tmp_path / "evaluations", "-q")
    assert "asked" in json.loads((tmp_path / "evaluations" / "safe.json").read_text())["numbers"]
    succeed("score", tmp_path / "safe", world / "news.txt", "-o", tmp_path / "scores", "-q")
    file = tmp_path / "costs.json"
    succeed("bench", chain, "--batch", "10", "--repeats", 1, "--output", file)
    assert [row["name"] for row in json.loads(file.read_text())["costs"]] == ["single", "chain"]
    assert "stages" in fail("export", chain, tmp_path / "x.onnx")
    assert "Cascade" in fail("fuse", chain, world / "text", "-o", tmp_path / "fused")


def test_info_as_text_and_as_json(run_folder: Path, world: Path) -> None:
    text = succeed("info", run_folder)
    assert "member 2" in text
    facts = json.loads(succeed("info", run_folder, "--json"))
    assert (facts["members"], facts["labels"]) == (3, list(COLOURS))
    assert "tokenizer" not in json.loads(succeed("info", world / "text", "--json"))["preprocessing"]


def test_bench_measures_like_with_like(run_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    options = ["--batch", "1,2", "--repeats", 1, "--baseline", "deep", "--output", file]
    succeed("bench", run_folder, *options, "--optimize")
    rows = json.loads(file.read_text())["costs"]
    assert [(row["name"], row["batch"]) for row in rows] == [
        (name, size) for size in (1, 2) for name in ("deep", "run")
    ]
    assert "whole numbers" in fail("bench", run_folder, "--batch", "0")

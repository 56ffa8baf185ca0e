"""Models by name: what is found, and what an error says about what is not."""

import json
import sys

import pytest
import torch
from safetensors.torch import save_file

from cli_cases import VIT_OPTIONS, fail, small_vit, vit_flags
from hydra_ensembles.cli.sources import ModelSettings, load_classifier, load_model
from hydra_ensembles.errors import CheckpointError, ConfigError, MissingExtraError

SMALL = [f"--model-option={name}={value}" for name, value in VIT_OPTIONS.items()]


def pixels():
    return torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def test_timm_weights_from_a_file_answer_as_timm_does(world):
    settings = ModelSettings("timm:test_vit", str(world / "mine.safetensors"), model_options=VIT_OPTIONS)
    with torch.no_grad():
        torch.testing.assert_close(load_classifier(settings)(pixels())[0], small_vit()(pixels()))


def test_a_bare_timm_name_and_random_weights_are_the_same_every_time():
    settings = ModelSettings("test_vit", random_weights=True, num_classes=4, model_options=VIT_OPTIONS)
    first, second = load_classifier(settings), load_classifier(settings)
    assert first.num_classes == 4
    assert all(torch.equal(one, other) for one, other in zip(first.parameters(), second.parameters(), strict=True))


def test_a_folder_of_timm(tmp_path):
    import timm

    model = small_vit()
    timm.models.save_for_hf(model, tmp_path / "vit", model_config={"num_classes": 3}, model_args=VIT_OPTIONS)
    ensemble = load_classifier(ModelSettings(str(tmp_path / "vit")))
    with torch.no_grad():
        torch.testing.assert_close(ensemble(pixels())[0], model(pixels()))


def test_a_folder_of_transformers_brings_labels_and_tokenizer(world, tmp_path):
    ensemble = load_classifier(ModelSettings(str(world / "bert")))
    assert ensemble.metadata.labels == ("negative", "positive")
    assert len(ensemble.predict(["a good film", "bad"])) == 2
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((world / "bert" / name).read_bytes())
    assert "tokenizer" in fail("evaluate", tmp_path, "--id", world / "val.csv", "-o", tmp_path)


def test_a_run_folder_stands_for_its_result(run_folder, tmp_path):
    assert load_classifier(ModelSettings(str(run_folder))).num_members == 3
    (tmp_path / "run.json").write_bytes((run_folder / "run.json").read_bytes())
    assert "no finished ensemble" in fail("info", tmp_path)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["test_vitt"], "did you mean test_vit"),
        (["timm:vit_base_patch16_225"], "did you mean vit_base_patch16_22"),
        (["./nowhere/model"], "no such folder"),
        (["timm:resnet18", "--random-weights"], "is not a supported architecture"),
        (["timm:test_vit", "--num-classes", "7"], "untrained classifier"),
        (["timm:test_vit", "--num-classes", "1"], "num_classes"),
        (["timm:test_vit", "--model-option", "pretrained=true"], "pretrained"),
        (["timm:test_vit", "--model-option", "depth"], "name=value"),
        (["timm:test_vit", "--weights", "x.safetensors", "--random-weights"], "exclude each other"),
        (["timm:test_vit", "--weights", "x.safetensors"], "cannot be read"),
        (["timm:test_vit", "--weights", "old.pth"], "safetensors"),
        (["timm:test_vit", "--random-weights", "--device", "gpu"], "device 'gpu'"),
    ],
)
def test_models_that_cannot_be_had(arguments, says):
    assert says in fail("info", *arguments)


def test_a_mistyped_folder_is_not_looked_for_on_the_hub(world, monkeypatch):
    monkeypatch.chdir(world)
    assert "did you mean red" in fail("info", "test/redd")


@pytest.mark.parametrize("name", ["hub:someone/something", "hf:someone/something", "someone/something"])
def test_the_hub_by_any_of_its_names(name, monkeypatch):
    asked = []

    def download(repository, file):
        asked.append((repository, file))
        raise ConnectionError("offline")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert "offline" in fail("info", name)
    assert asked == [("someone/something", "config.json")]


def test_pretrained_weights_that_cannot_be_reached(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "timm could not make vit_tiny_patch16_224" in fail("info", "timm:vit_tiny_patch16_224")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("{", "not valid JSON"),
        ("{}", "says neither 'format'"),
        (json.dumps({"model_type": "bert", "architectures": ["BertModel"]}), "no trained classifier"),
        (json.dumps({"model_type": "bert", "architectures": ["BertForSequenceClassification"]}), "could not load"),
    ],
)
def test_folders_that_are_no_model(tmp_path, config, says):
    (tmp_path / "config.json").write_text(config)
    assert says in fail("info", tmp_path)


def test_files_and_data_are_no_model(world):
    assert "is a file" in fail("info", world / "mine.safetensors")
    assert "without config.json (it has blue, green, red)" in fail("info", world / "val")


def test_weights_that_do_not_fit(world, tmp_path):
    weights = ["--weights", world / "mine.safetensors"]
    assert "do not fit timm:test_vit" in fail("info", "timm:test_vit", *weights)
    assert "head.bias" in fail("info", "timm:test_vit", *weights, *SMALL, "--num-classes", 7)
    assert "check model_options" in fail("info", "timm:test_vit", *weights, "--model-option", "colour=red")
    assert "leave out weights" in fail("info", world / "bert", *weights)
    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    assert "do not fit" in fail("info", *vit_flags(tmp_path / "other.safetensors"))


def test_class_names_from_a_file(world, tmp_path):
    (tmp_path / "names.txt").write_text("one\ntwo\nthree\n")
    labels = str(tmp_path / "names.txt")
    settings = ModelSettings("test_vit", None, 3, labels, VIT_OPTIONS, random_weights=True)
    assert load_classifier(settings).metadata.labels == ("one", "two", "three")
    for names in ("one\ntwo\n", "one\ntwo\ntwo\n"):
        (tmp_path / "names.txt").write_text(names)
        with pytest.raises(ConfigError, match="3 different classes"):
            load_classifier(settings)


def test_a_model_without_a_classifier():
    with pytest.raises(ConfigError, match="has no classifier"):
        load_classifier(
            ModelSettings("timm:test_vit", random_weights=True, model_options={**VIT_OPTIONS, "num_classes": 0})
        )


def test_without_a_library_its_extra_is_named(world, monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    monkeypatch.setitem(sys.modules, "transformers", None)
    for name, error, says in (
        ("timm:test_vit", MissingExtraError, r"hydra-ensembles\[timm\]"),
        ("test_vit", CheckpointError, "timm is not installed"),
        (str(world / "bert"), MissingExtraError, r"hydra-ensembles\[transformers\]"),
    ):
        with pytest.raises(error, match=says):
            load_model(ModelSettings(name))

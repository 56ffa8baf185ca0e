"""Models by name: what is found, and what an error says about what is not."""

import json

import pytest
import torch
from safetensors.torch import save_file

from cli_cases import VIT_OPTIONS, fail, small_vit, succeed, vit_flags
from hydra_ensembles.cli.models import load_classifier, load_model
from hydra_ensembles.cli.settings import ModelSettings
from hydra_ensembles.errors import CheckpointError, ConfigError, ConversionError, MissingExtraError


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


def test_a_folder_of_transformers_brings_labels_and_tokenizer(world):
    ensemble = load_classifier(ModelSettings(str(world / "bert")))
    assert ensemble.metadata.labels == ("negative", "positive")
    assert len(ensemble.predict(["a good film", "bad"])) == 2


def test_a_folder_without_its_tokenizer(world, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((world / "bert" / name).read_bytes())
    says = fail("evaluate", tmp_path, "--id", world / "val.csv", "-o", tmp_path)
    assert "save its tokenizer into the same folder" in says


def test_a_run_folder_stands_for_its_result(run_folder):
    assert load_classifier(ModelSettings(str(run_folder))).num_members == 3


def test_an_unfinished_run(run_folder, tmp_path):
    (tmp_path / "run.json").write_bytes((run_folder / "run.json").read_bytes())
    assert "a build that is not finished; run the same build again" in fail("info", tmp_path)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("test_vitt", "did you mean test_vit"),
        ("timm:vit_base_patch16_225", "did you mean vit_base_patch16_22"),
        ("./nowhere/model", "there is no such folder"),
        ("timm:resnet18", "is not a supported architecture"),
    ],
)
def test_unknown_models(name, says):
    options = ["--random-weights"] if name == "timm:resnet18" else []
    assert says in fail("info", name, *options)


def test_a_mistyped_folder_is_not_looked_for_on_the_hub(world, monkeypatch):
    monkeypatch.chdir(world)
    assert "did you mean red" in fail("info", "test/redd")


def test_the_hub_does_not_answer(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in ("hf:someone/something", "someone/something"):
        assert "the hub did not give such a model" in fail("info", name)
    assert "timm could not make vit_tiny_patch16_224" in fail("info", "timm:vit_tiny_patch16_224")


def test_files_and_folders_that_are_no_model(world, tmp_path):
    assert f"timm:NAME --weights {world / 'mine.safetensors'}" in fail("info", world / "mine.safetensors")
    assert "a folder without config.json (it has blue, green, red)" in fail("info", world / "val")
    (tmp_path / "config.json").write_text("{")
    assert "is not valid JSON" in fail("info", tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert "says neither 'format'" in fail("info", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": ["BertModel"]}))
    assert "BertModel, which has no trained classifier" in fail("info", tmp_path)
    name = "BertForSequenceClassification"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": [name]}))
    assert "transformers could not load" in fail("info", tmp_path)


def test_weights_that_do_not_fit(world, tmp_path):
    flags = [f"--model-option={name}={value}" for name, value in VIT_OPTIONS.items()]
    weights = ["--weights", world / "mine.safetensors"]
    assert "do not fit timm:test_vit" in fail("info", "timm:test_vit", *weights)
    says = fail("info", "timm:test_vit", *weights, *flags, "--num-classes", 7)
    assert "head.bias is [3] in the file and [7] in the model" in says
    assert "check --model-option" in fail("info", "timm:test_vit", *weights, "--model-option", "colour=red")
    assert "cannot be read" in fail("info", "timm:test_vit", "--weights", tmp_path / "none.safetensors")
    (tmp_path / "old.pth").write_bytes(b"")
    assert "is not a .safetensors file" in fail("info", "timm:test_vit", "--weights", tmp_path / "old.pth")
    assert "an untrained classifier" in fail("info", "timm:test_vit", "--num-classes", 7)
    assert "use --weights" in fail("info", "timm:test_vit", "--model-option", "pretrained=true")
    assert "exclude each other" in fail("info", "timm:test_vit", *weights, "--random-weights")
    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    assert "it lacks" in fail("info", *vit_flags(tmp_path / "other.safetensors"))


def test_a_model_without_a_classifier():
    with pytest.raises(ConfigError, match="has no classifier"):
        load_classifier(
            ModelSettings("timm:test_vit", random_weights=True, model_options={**VIT_OPTIONS, "num_classes": 0})
        )


def test_without_timm_the_extra_is_named(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(MissingExtraError, match=r"hydra-ensembles\[timm\]"):
        load_model(ModelSettings("timm:test_vit", random_weights=True))
    with pytest.raises(CheckpointError, match="timm is not installed"):
        load_model(ModelSettings("test_vit"))
    assert "hydra-ensembles[timm]" in fail("info", "timm:test_vit")


def test_without_transformers_the_extra_is_named(world, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match=r"hydra-ensembles\[transformers\]"):
        load_model(ModelSettings(str(world / "bert")))


def test_a_model_that_cannot_be_converted(monkeypatch):
    with pytest.raises(ConversionError):
        load_model(ModelSettings("timm:resnet18", random_weights=True))


def test_help_shows_how_models_are_named():
    assert "Folder, timm:NAME, hf:ID" in succeed("info", "--help")

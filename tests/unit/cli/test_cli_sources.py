"""Models and data by name: what is found, what an error says about what is not, and classes that fit the model."""

import json
import shutil
import sys
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
import torch
from safetensors.torch import save_file

from cli_cases import VIT_OPTIONS, fail, save_images, small_vit, succeed, vit_flags
from hydra_ensembles.cli.sources import (
    DataSettings,
    ModelSettings,
    fit_to_model,
    load_classifier,
    load_data,
    load_model,
    require_different,
    with_labels_of,
)
from hydra_ensembles.data.suites import SUITES
from hydra_ensembles.errors import CheckpointError, ConfigError, DataError, MissingExtraError
from hydra_ensembles.evaluation.evaluation import Evaluation

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
        (["{world}/mine.safetensors"], "is a file"),
        (["{world}/val"], "without config.json (it has blue, green, red)"),
        (["test/redd"], "did you mean red"),  # not looked for on the hub
        (["bert", "--weights", "mine.safetensors"], "leave out weights"),
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
def test_models_that_cannot_be_had(world, monkeypatch, arguments, says):
    monkeypatch.chdir(world)
    assert says in fail("info", *(argument.format(world=world) for argument in arguments))


@pytest.mark.parametrize("name", ["hub:someone/something", "hf:someone/something", "someone/something"])
def test_the_hub_by_any_of_its_names(name, monkeypatch):
    download = Mock(side_effect=ConnectionError("offline"))
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert "offline" in fail("info", name)
    download.assert_called_once_with("someone/something", "config.json")


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


def test_weights_that_do_not_fit(world, tmp_path):
    weights = ["--weights", world / "mine.safetensors"]
    assert "do not fit timm:test_vit" in fail("info", "timm:test_vit", *weights)
    assert "head.bias" in fail("info", "timm:test_vit", *weights, *SMALL, "--num-classes", 7)
    assert "check model_options" in fail("info", "timm:test_vit", *weights, "--model-option", "colour=red")
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
    flags = ["--random-weights", *SMALL, "--model-option", "num_classes=0"]
    assert "has no classifier" in fail("bench", "timm:test_vit", *flags)


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


def test_two_names_of_the_same_data(world):
    suite = next(iter(SUITES))
    require_different(("id", suite), ("ood", suite), ("ood", None), ("ood", None))  # a suite has a set for each
    for one, other in (("hub:a:test", "hub:a:test"), (f"{world}/val", f"{world}/./val/")):
        with pytest.raises(DataError, match=r"ood .* names the same data as id "):
            require_different(("id", one), ("ood", other))


def test_a_split_is_written_behind_a_path(world, tmp_path):
    for split, seed in (("train", 1), ("test", 2)):
        save_images(tmp_path / "data" / split, 2, seed)
        (tmp_path / f"{split}.jsonl").write_text(f'{{"text": "{split}", "label": 0}}\n\n{{"text": "b", "label": 1}}\n')
    assert len(load_data(f"{tmp_path / 'data'}:test", "test", DataSettings())) == 6
    with pytest.raises(DataError, match="split"):
        load_data(str(tmp_path / "data"), "test", DataSettings())
    shutil.rmtree(tmp_path / "data")
    data = load_data(f"{tmp_path}:test", "test", DataSettings())
    assert [data[index] for index in range(2)] == [("test", 0), ("b", 1)]


def test_the_hub_by_name_configuration_and_split(monkeypatch):
    asked = Mock(side_effect=FileNotFoundError("nothing there"))
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=asked))
    for spec in ("hub:owner/name", "hf:owner/name:test", "hub:glue:sst2:validation"):
        with pytest.raises(DataError, match="nothing there"):
            load_data(spec, "test", DataSettings())
    parts = (("owner/name", None, None), ("owner/name", None, "test"), ("glue", "sst2", "validation"))
    assert asked.call_args_list == [call(name, config, split=split) for name, config, split in parts]


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("hub:a:b:c:d", "hub:NAME"),
        ("", "no data ''"),
        ("tset", "no such suite"),
        ("torchvision:CIFAR10:test", "CIFAR10"),
    ],
)
def test_data_that_cannot_be_had(tmp_path, spec, says):
    with pytest.raises(DataError, match=says):
        load_data(spec, "test", DataSettings(root=str(tmp_path)))


@pytest.mark.parametrize("wrong", [{"limit": 1}, {"batch_size": 0}, {"workers": -1}])
def test_numbers_out_of_range(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        DataSettings(**wrong)


def test_limits_keep_the_proportions_of_classes(world):
    data = load_data(str(world / "val"), "id", DataSettings(limit=9))
    assert sorted(data.labels.tolist()) == [0] * 3 + [1] * 3 + [2] * 3
    assert len(load_data(str(world / "dots"), "ood", DataSettings(limit=5))) == 5


def test_labels_beyond_the_model_and_labels_by_name(text_folder, tmp_path):
    (tmp_path / "many.csv").write_text("text,label\n" + "".join(f"a film,{index}\n" for index in range(4)))
    assert "labels up to 3" in fail("evaluate", text_folder, "--id", tmp_path / "many.csv", "-o", tmp_path, "-q")
    (tmp_path / "names.csv").write_text("text,label\na film,positive\nbad film,negative\n")
    succeed("evaluate", text_folder, "--id", tmp_path / "names.csv", "-o", tmp_path, "-q")
    assert Evaluation.load(tmp_path / "text-run.json").id.samples == 2


@pytest.mark.parametrize(
    ("colours", "says"), [(["red"], "at least two classes"), (["green", "red"], r"\(green, red\), the model 3 without")]
)
def test_classes_that_do_not_fit(world, tmp_path, colours, says):
    for colour in colours:
        shutil.copytree(world / "val" / colour, tmp_path / colour)
    model = load_classifier(ModelSettings("timm:test_vit", str(world / "mine.safetensors"), model_options=VIT_OPTIONS))
    with pytest.raises(DataError, match=says):
        fit_to_model(load_data(str(tmp_path), "test", DataSettings()), "test", model, DataSettings())


def test_folders_called_by_numbers_are_those_numbers(world, tmp_path):
    """Sorted by name, 10 would come before 2."""
    model = load_classifier(
        ModelSettings("timm:test_vit", random_weights=True, num_classes=11, model_options=VIT_OPTIONS)
    )
    for name in ("2", "10"):
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / "0.png").write_bytes((world / "dots" / "0.png").read_bytes())
    data = load_data(str(tmp_path / "data"), "test", DataSettings())
    assert data.class_names == ("10", "2")
    assert sorted(fit_to_model(data, "test", model, DataSettings()).labels.tolist()) == [2, 10]
    assert sorted(fit_to_model(data, "test", model, DataSettings(by_position=True)).labels.tolist()) == [0, 1]
    assert with_labels_of(model, data).metadata.labels == ()

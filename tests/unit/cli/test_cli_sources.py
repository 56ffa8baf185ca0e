"""Models and data by name: what is found, errors about what is not, and classes that fit the model."""

import json
import shutil
import sys
import warnings
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
import torch
from PIL import Image

import hydra_ensembles as he
from cli_cases import VIT_OPTIONS, fail, save_images, small_vit, succeed
from hydra_ensembles.cli.sources import (
    DataSettings,
    ModelSettings,
    fit_to_model,
    load_classifier,
    load_data,
    with_labels_of,
)
from hydra_ensembles.data.dataset import ImageDataset
from hydra_ensembles.errors import DataError
from hydra_ensembles.evaluation.evaluation import Evaluation
from hydra_ensembles.model.metadata import Metadata
from random_ensembles import small


def test_weights_of_a_file_and_a_folder_of_timm_answer_as_timm_does(world, tmp_path):
    import timm

    model, pixels = small_vit(), torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    timm.models.save_for_hf(model, tmp_path / "vit", model_config={"num_classes": 3}, model_args=VIT_OPTIONS)
    for settings in (
        ModelSettings("timm:test_vit", str(world / "mine.safetensors"), VIT_OPTIONS),
        ModelSettings(str(tmp_path / "vit")),
    ):
        with torch.no_grad():
            torch.testing.assert_close(load_classifier(settings)(pixels)[0], model(pixels))


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
    (tmp_path / "run.json").write_text('{"format": "hydra_ensembles.evaluation"}')  # as `evaluate run` writes it
    assert "has no config.json" in fail("info", tmp_path)
    shutil.copytree(run_folder, tmp_path / "both")
    shutil.copytree(run_folder / "base", tmp_path / "both", dirs_exist_ok=True)  # a model saved in the folder itself
    assert load_classifier(ModelSettings(str(tmp_path / "both"))).num_members == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["timm:vit_base_patch16_225"], "did you mean vit_base_patch16_22"),
        (["timm:resnet18"], "convolutional network.\nIt does not fit: it has no attention heads"),
        (["timm:test_vit", "--model-option", "num_classes=7"], "untrained classifier"),
        (["timm:test_vit", "--weights", "old.pth"], "safetensors"),
        (["timm:test_vit", "--weights", "mine.safetensors"], "do not fit timm:test_vit"),
        (["timm:vit_tiny_patch16_224"], "timm could not make vit_tiny_patch16_224"),  # offline
        (["timm:test_vit", "--device", "gpu"], "device 'gpu'"),
    ],
)
def test_models_that_cannot_be_had(world, monkeypatch, arguments, says):
    monkeypatch.chdir(world)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert says in fail("info", *(argument.format(world=world) for argument in arguments))


@pytest.mark.parametrize(
    ("kind", "model", "says"),
    [
        ("bert", "BertModel", "AutoModelFor"),
        ("clip", "CLIPModel", "he.zero_shot("),
        ("gpt2", "GPT2ForSequenceClassification", "a decoder"),
    ],
)
def test_folders_that_are_no_classifier(tmp_path, kind, model, says):
    towers = {"text_config": {}, "vision_config": {}} if kind == "clip" else {}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "architectures": [model], **towers}))
    assert says in fail("info", tmp_path)


def test_a_split_is_written_behind_a_path(tmp_path):
    for split, seed in (("train", 1), ("test", 2)):
        save_images(tmp_path / "data" / split, 2, seed)
    assert len(load_data(f"{tmp_path / 'data'}:test", DataSettings())) == 6
    with pytest.raises(DataError, match="split"):
        load_data(str(tmp_path / "data"), DataSettings())


def test_the_hub_by_name_configuration_and_split(monkeypatch):
    download = Mock(side_effect=ConnectionError("offline"))
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert "offline" in fail("info", "hub:someone/something")
    download.assert_called_once_with("someone/something", "config.json")
    asked = Mock(side_effect=FileNotFoundError("nothing there"))
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=asked))
    for spec in ("hub:owner/name", "hub:owner/name:test", "hub:glue:sst2:validation"):
        with pytest.raises(DataError, match="nothing there"):
            load_data(spec, DataSettings())
    parts = (("owner/name", None, None), ("owner/name", None, "test"), ("glue", "sst2", "validation"))
    expected = [call(name, config, split=split, trust_remote_code=False) for name, config, split in parts]
    assert asked.call_args_list == expected


def test_limits_keep_the_proportions_of_classes(world):
    data = load_data(str(world / "val"), DataSettings(limit=9))
    assert sorted(data.labels.tolist()) == [0] * 3 + [1] * 3 + [2] * 3
    assert len(load_data(str(world / "dots"), DataSettings(limit=5), labelled=False)) == 5


def test_labels_beyond_the_model_and_labels_by_name(text_folder, tmp_path):
    (tmp_path / "many.csv").write_text("text,label\n" + "".join(f"a film,{index}\n" for index in range(4)))
    assert "labels up to 3" in fail("evaluate", text_folder, "--id", tmp_path / "many.csv", "-o", tmp_path, "-q")
    (tmp_path / "names.csv").write_text("text,label\na film,positive\nbad film,negative\n")
    succeed("evaluate", text_folder, "--id", tmp_path / "names.csv", "-o", tmp_path, "-q")
    assert Evaluation.load(tmp_path / "text-run.json").id.samples == 2


def pictures(names, labels=(0, 1)):
    return ImageDataset([Image.new("RGB", (8, 8))] * len(labels), labels, names)


def classifier(labels=()):
    metadata = Metadata(labels=labels, preprocessing=he.ImagePreprocessing((8, 8)))
    return he.Ensemble(small(classes=len(labels) or 11), metadata)


def test_classes_that_do_not_fit_and_folders_called_by_numbers_that_are_places():
    with pytest.raises(DataError, match="the model has 11 without names"):
        fit_to_model(pictures(("green", "red")), classifier(), DataSettings())
    data, places = pictures(("10", "2")), DataSettings(by_position=True)
    assert fit_to_model(data, classifier(), places).labels.tolist() == [0, 1]
    assert with_labels_of(classifier(), data).metadata.labels == ()
    letters = tuple("abcdefghijk")
    assert fit_to_model(data, classifier(letters), places).class_names == letters


@pytest.mark.parametrize(
    ("labels", "names", "found", "token"),
    [
        ((), ("10", "2"), [2, 10], "--by-position"),  # sorted by name; torchvision would use positions
        ((), ("0", "1", "2"), [1, 2], "from 1"),  # integers in a table without the first class
        ((), ("0", "1", "2"), [0, 2], None),
        (("001", "002", "003"), ("0", "1", "2", "3"), [0, 2], None),  # 1 and 3 in a table that lost leading zeros
        (("001", "002", "003"), ("0", "1"), None, "classes 0"),
    ],
)
def test_classes_that_are_numbers_are_the_models_or_said_to_be_doubtful(labels, names, found, token):
    present = [0, 1] if found is None or names == ("10", "2") else [one + bool(labels) for one in found]
    data, model = pictures(names, present), classifier(labels)
    if found is None:
        with pytest.raises(DataError, match=token):
            fit_to_model(data, model, DataSettings())
        return
    with warnings.catch_warnings(record=True, action="always") as said:
        assert sorted(fit_to_model(data, model, DataSettings()).labels.tolist()) == found
    assert [token in str(one.message) for one in said] == ([] if token is None else [True])


CODE = "import pathlib\npathlib.Path({mark!r}).touch()\nclass Own:\n    pass\n"


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("config.json", {"auto_map": {"AutoModelForSequenceClassification": "own.Own"}}),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["own.Own", None]}}),
    ],
)
@pytest.mark.parametrize("model_type", ["bert", "vit"])  # transformers has no tokenizer for vit
def test_a_model_that_brings_code_is_refused(world, tmp_path, monkeypatch, file, changes, model_type):
    folder, mark = tmp_path / "model", tmp_path / "code was run"
    shutil.copytree(world / "bert", folder)
    for name, more in (("config.json", {"model_type": model_type}), (file, changes)):
        path = folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **more}))
    (folder / "own.py").write_text(CODE.format(mark=str(mark)))
    asked = Mock(return_value="y")
    monkeypatch.setattr("builtins.input", asked)
    assert "auto_map" in fail("info", folder)
    assert not asked.called
    assert not mark.exists()

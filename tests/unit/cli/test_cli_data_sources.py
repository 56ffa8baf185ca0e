"""Data by name: splits, the hub, columns; and their classes in the order of a model's logits."""

import json
import shutil
import sys
from types import SimpleNamespace

import pytest

from cli_cases import VIT_OPTIONS, fail, save_images, succeed, vit_flags
from hydra_ensembles.cli.sources import (
    DataSettings,
    ModelSettings,
    fit_to_model,
    load_classifier,
    load_data,
    require_different,
    with_labels_of,
)
from hydra_ensembles.data.suites import SUITES
from hydra_ensembles.errors import ConfigError, DataError
from hydra_ensembles.evaluation.evaluation import Evaluation


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


def test_columns_of_a_table(tmp_path):
    (tmp_path / "x.jsonl").write_text(
        "\n".join(json.dumps({"sentence": f"text {index}", "mood": ("bad", "good")[index % 2]}) for index in range(6))
    )
    settings = DataSettings(columns={"text": "sentence", "label": "mood"})
    data = load_data(str(tmp_path / "x.jsonl"), "test", settings)
    assert data.class_names == ("bad", "good")
    assert data[1] == ("text 1", 1)
    with pytest.raises(DataError, match="column"):
        load_data(str(tmp_path / "x.jsonl"), "test", DataSettings())
    with pytest.raises(ConfigError, match="words"):
        load_data(str(tmp_path / "x.jsonl"), "test", DataSettings(columns={"words": "sentence"}))


def test_the_hub_by_name_configuration_and_split(monkeypatch):
    asked = []

    def load_dataset(name, config, split):
        asked.append((name, config, split))
        raise FileNotFoundError("nothing there")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    for spec in ("hub:owner/name", "hf:owner/name:test", "hub:glue:sst2:validation"):
        with pytest.raises(DataError, match="nothing there"):
            load_data(spec, "test", DataSettings())
    assert asked == [("owner/name", None, None), ("owner/name", None, "test"), ("glue", "sst2", "validation")]


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


def test_a_model_without_names_and_fewer_classes(world, tmp_path):
    save_images(tmp_path / "two", 2, seed=1)
    shutil.rmtree(tmp_path / "two" / "red")
    model = vit_flags(world / "mine.safetensors")
    says = fail("evaluate", *model, "--id", tmp_path / "two", "-o", tmp_path / "out", "-q")
    assert "2 classes (blue, green), the model 3 without names" in says
    (tmp_path / "names.txt").write_text("blue\ngreen\nred\n")
    flags = ["--labels", tmp_path / "names.txt", "-o", tmp_path / "out", "-q"]
    succeed("evaluate", *model, "--id", tmp_path / "two", *flags)


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

"""Data by name: splits, the hub, columns, and what errors say."""

import json
from types import SimpleNamespace

import pytest

from cli_cases import VIT_OPTIONS, fail, save_images, succeed, vit_flags
from hydra_ensembles.cli.class_labels import labelled_as, with_labels_of
from hydra_ensembles.cli.datasets import load_data, require_different
from hydra_ensembles.cli.models import load_classifier
from hydra_ensembles.cli.settings import DataSettings, ModelSettings
from hydra_ensembles.cli.wording import in_flags
from hydra_ensembles.errors import ConfigError, DataError
from hydra_ensembles.evaluation.evaluation import Evaluation


def test_a_suite_stands_for_different_sets(world):
    require_different(("--id", "cifar10"), ("--ood", "cifar10"), ("--ood", None), ("--ood", None))
    for one, other in (("hf:a:test", "hf:a:test"), (f"{world}/val", f"{world}/./val/")):
        with pytest.raises(DataError, match=r"--ood .* names the same data as --id "):
            require_different(("--id", one), ("--ood", other))


def test_a_split_is_written_behind_a_path(world, tmp_path):
    for split, seed in (("train", 1), ("test", 2)):
        save_images(tmp_path / "data" / split, 2, seed)
    data = load_data(f"{tmp_path / 'data'}:test", "test", DataSettings())
    assert len(data) == 6
    with pytest.raises(DataError, match="SPLIT"):
        load_data(str(tmp_path / "data"), "test", DataSettings())


def test_columns_of_a_table(tmp_path):
    (tmp_path / "x.jsonl").write_text(
        "\n".join(json.dumps({"sentence": f"text {index}", "mood": ("bad", "good")[index % 2]}) for index in range(6))
    )
    settings = DataSettings(columns={"text": "sentence", "label": "mood"})
    data = load_data(str(tmp_path / "x.jsonl"), "test", settings)
    assert data.class_names == ("bad", "good")
    assert data[1] == ("text 1", 1)
    with pytest.raises(DataError, match=r"has no column 'image' or 'text'") as caught:
        load_data(str(tmp_path / "x.jsonl"), "test", DataSettings())
    assert "with --column image=NAME --column text=NAME --column label=NAME" in in_flags(str(caught.value))
    with pytest.raises(ConfigError, match="unknown fields"):
        load_data(str(tmp_path / "x.jsonl"), "test", DataSettings(columns={"words": "sentence"}))


def test_splits_as_json_lines(tmp_path):
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(f'{{"text": "{split}", "label": 0}}\n\n{{"text": "b", "label": 1}}\n')
    data = load_data(f"{tmp_path}:test", "test", DataSettings())
    assert [data[index] for index in range(2)] == [("test", 0), ("b", 1)]


@pytest.mark.parametrize(("text", "says"), [('{"text": ', "line 2"), ("[1]", "is a list"), ("3", "is a int")])
def test_lines_that_are_no_objects(tmp_path, text, says):
    (tmp_path / "x.jsonl").write_text('{"text": "a", "label": 0}\n' + text + "\n")
    with pytest.raises(DataError, match=says):
        load_data(str(tmp_path / "x.jsonl"), "test", DataSettings())


def test_the_hub_by_name_configuration_and_split(monkeypatch):
    asked = []

    def load_dataset(name, config, split):
        asked.append((name, config, split))
        raise FileNotFoundError("nothing there")

    monkeypatch.setitem(__import__("sys").modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    for spec in ("hf:owner/name", "hf:owner/name:test", "hf:glue:sst2:validation"):
        with pytest.raises(DataError, match="nothing there"):
            load_data(spec, "test", DataSettings())
    assert asked == [("owner/name", None, None), ("owner/name", None, "test"), ("glue", "sst2", "validation")]
    with pytest.raises(DataError, match="hf:NAME"):
        load_data("hf:a:b:c:d", "test", DataSettings())


def test_torchvision_by_name(tmp_path):
    with pytest.raises(DataError, match="cannot be loaded from"):
        load_data("torchvision:CIFAR10:test", "test", DataSettings(root=str(tmp_path)))


def test_limits_keep_the_proportions_of_classes(world):
    data = load_data(str(world / "val"), "id", DataSettings(limit=9))
    assert sorted(data.labels.tolist()) == [0] * 3 + [1] * 3 + [2] * 3
    assert len(load_data(str(world / "dots"), "ood", DataSettings(limit=5))) == 5


def test_labels_beyond_the_model(text_folder, tmp_path):
    (tmp_path / "many.csv").write_text("text,label\n" + "".join(f"a film,{index}\n" for index in range(4)))
    says = fail("evaluate", text_folder, "--id", tmp_path / "many.csv", "-o", tmp_path, "-q")
    assert "has labels up to 3, but the model has 2 classes" in says
    (tmp_path / "names.csv").write_text("text,label\na film,positive\nbad film,negative\n")
    succeed("evaluate", text_folder, "--id", tmp_path / "names.csv", "-o", tmp_path, "-q")
    assert Evaluation.load(tmp_path / "text-run.json").id.samples == 2


def test_a_model_without_names_and_fewer_classes(world, tmp_path):
    save_images(tmp_path / "two", 2, seed=1)
    for file in (tmp_path / "two" / "red").iterdir():
        file.unlink()
    (tmp_path / "two" / "red").rmdir()
    model = vit_flags(world / "mine.safetensors")
    says = fail("evaluate", *model, "--id", tmp_path / "two", "-o", tmp_path / "out", "-q")
    assert "has 2 classes (blue, green), the model 3 without names; give their names with --labels" in says
    (tmp_path / "names.txt").write_text("blue\ngreen\nred\n")
    flags = ["--labels", tmp_path / "names.txt", "-o", tmp_path / "out", "-q"]
    succeed("evaluate", *model, "--id", tmp_path / "two", *flags)


def test_a_folder_of_mixed_things(tmp_path, world):
    assert "an empty name was given" in fail("evaluate", world / "bert", "--id", "", "-o", tmp_path)
    (tmp_path / "x.xlsx").write_text("")
    assert "accepted suffixes" in fail("evaluate", world / "bert", "--id", tmp_path / "x.xlsx", "-o", tmp_path)


def test_folders_called_by_numbers_are_those_numbers(world, tmp_path):
    """Sorted by name, 10 would come before 2."""
    settings = ModelSettings("timm:test_vit", random_weights=True, num_classes=11, model_options=VIT_OPTIONS)
    model = load_classifier(settings)
    for name in ("2", "10"):
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / "0.png").write_bytes((world / "dots" / "0.png").read_bytes())
    data = load_data(str(tmp_path / "data"), "test", DataSettings())
    assert data.class_names == ("10", "2")
    assert sorted(labelled_as(data, model).labels.tolist()) == [2, 10]
    assert sorted(labelled_as(data, model, by_position=True).labels.tolist()) == [0, 1]
    assert with_labels_of(model, data).metadata.labels == ()

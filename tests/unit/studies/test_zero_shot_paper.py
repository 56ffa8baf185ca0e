"""The paper's nine data sets and its kind of checkpoint: stand-in files in the layouts of their libraries."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import paper_files
import pytest
import small_clip  # imports open_clip, whose warnings it keeps away
import torch
from PIL import Image

import hydra_ensembles as he
from hydra_ensembles.data.loading import CIFAR100_CLASSES
from hydra_ensembles.data.suites import suite
from hydra_ensembles.errors import CheckpointError, ConfigError, DataError
from studies.zero_shot.checkpoint_model import PAPER_CHECKPOINT, CheckpointModel, load_dual
from studies.zero_shot.collecting import collect_zero_shot
from studies.zero_shot.paper_sets import PaperSets
from studies.zero_shot.recipe import Counts
from studies.zero_shot.sources import EvaluationSets, ModelSource
from studies.zero_shot.study import run_zero_shot_study, study_recipe

NINE = ["imagenet", "cifar100", "cifar10", "food101", "sun397", "pets", "dtd", "eurosat", "caltech101"]
CPU = torch.device("cpu")


def counts(classes: int | None = None) -> Counts:
    return Counts(
        pairs=None,
        circuits=10,
        image_circuits=10,
        calibration=10,
        taylor_batches=1,
        test=None,
        detection=None,
        classes=classes,
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("paper")
    with pytest.MonkeyPatch.context() as patch:
        paper_files.write_all(folder, patch)
        yield folder


@pytest.fixture(scope="module")
def tasks(root: Path) -> Any:
    return {task.name: task for task in PaperSets(root, counts()).tasks()}


# --- data sets ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "labels", "names"),
    [
        ("imagenet", None, {0: "tench", 134: "crane bird", 517: "construction crane", 744: "projectile"}),
        ("cifar100", [0, 1, 99], {0: "apple", 1: "aquarium fish", 99: "worm"}),
        ("cifar10", [3, 0, 9], {0: "airplane", 9: "truck"}),
        ("food101", [0, 0, 1, 1], {0: "apple pie", 1: "waffles"}),
        ("sun397", [2, 0, 1], {0: "abbey", 1: "airplane cabin", 2: "bakery shop"}),
        ("pets", [0, 1, 2], {0: "Abyssinian cat", 1: "American Bulldog dog", 2: "British Shorthair cat"}),
        ("dtd", [0, 1], {0: "banded texture", 1: "polka-dotted texture"}),
        ("eurosat", [0, 1, 2], {0: "annual crop land", 1: "forest", 2: "sea or lake"}),
        ("caltech101", [0, 1, 2], {1: "person's face", 2: "water lily"}),
    ],
)
def test_each_of_the_nine_has_pictures_labels_and_names(
    name: str, labels: list[int] | None, names: dict[int, str], tasks: Any
) -> None:
    assert list(tasks) == NINE
    test = tasks[name].test
    assert {number: test.names[number] for number in names} == names
    assert labels is None or test.images.labels.tolist() == labels
    assert tasks[name].domain == "unseen"
    image, label = test.images[len(test.images) - 1]
    assert isinstance(image, Image.Image)
    assert image.mode == "RGB"
    assert 0 <= label < len(test.names)


def test_imagenet_is_cut_as_in_the_supervised_studies(root: Path, tasks: Any) -> None:
    validation = PaperSets(root, counts()).circuits().inside
    test = tasks["imagenet"].test
    assert (len(validation.images), len(test.images), len(test.names)) == (10, 990, 1000)
    assert not set(validation.images.rows) & set(test.images.rows)
    assert len(set(test.names)) == 1000
    assert len(PaperSets(root, counts()).calibration().images) == 1000


def test_the_pictures_are_those_of_the_files(tasks: Any) -> None:
    assert np.array_equal(np.asarray(tasks["cifar100"].test.images[1][0]), np.asarray(paper_files.picture(1)))
    assert np.array_equal(np.asarray(tasks["sun397"].test.images[2][0]), np.asarray(paper_files.picture(2)))


def test_ood_sets_are_those_of_the_tables(root: Path, tasks: Any) -> None:
    sets: EvaluationSets = PaperSets(root, counts())
    found = {one.task: (list(one.near), list(one.far)) for one in sets.detections()}
    assert found == {
        "imagenet": (["ssb_hard", "ninco"], ["inaturalist", "textures"]),
        "cifar100": (["cifar10", "tinyimagenet"], ["mnist", "svhn", "textures", "places365"]),
    }
    assert set(found) <= set(tasks)
    assert sets.circuits().outside.name == "openimage_o"


def test_circuits_of_the_image_tower_read_cifar100_as_well(root: Path) -> None:
    """Of the three classes in the lists, ImageNet has no apple and no worm, and TinyImageNet has the fish."""
    sets = PaperSets(root, counts())
    data = sets.image_circuits()
    assert data.inside.names[1000:] == ("apple", "worm")
    assert sorted(data.inside.images.labels.tolist())[-2:] == [1000, 1001]
    assert len(data.inside.images) == 10 + 2
    assert len(data.outside) == len(sets.circuits().outside) + 3
    assert data.outside[len(data.outside) - 1][0].size == (8, 8)


def test_fewer_classes_for_a_quick_run(root: Path) -> None:
    calibration = PaperSets(root, counts(classes=6)).calibration()
    assert calibration.names[:2] == ("tench", "goldfish")
    assert (len(calibration.names), calibration.images.labels.tolist()) == (6, list(range(6)))


def test_names_by_position_need_every_folder_of_imagenet(tmp_path: Path) -> None:
    folder = tmp_path / paper_files.IMAGENET
    paper_files.save(folder / "val" / "n1" / "0.JPEG", paper_files.encoded())
    torch.save(({"n1": ("one",)}, ["n1"]), folder / "meta.bin")
    with pytest.raises(DataError, match="has 1 classes; names are given to the 1000"):
        PaperSets(tmp_path, counts()).circuits()


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="torchvision:ImageNet"):
        PaperSets(tmp_path, counts()).tasks()


def test_names_of_cifar100_are_those_of_the_data_set() -> None:
    assert len(set(CIFAR100_CLASSES)) == 100
    assert list(CIFAR100_CLASSES) == sorted(CIFAR100_CLASSES)
    assert suite("paper-zero-shot-cifar100").id.class_names == CIFAR100_CLASSES
    assert suite("paper-cifar100").id.class_names == ()  # supervised models may call them otherwise


# --- checkpoints -------------------------------------------------------------------------------------------


def answer(dual: he.DualEncoder, names: list[str], pictures: list[Image.Image]) -> torch.Tensor:
    ensemble = he.zero_shot(dual, names)
    return ensemble(ensemble.prepare(pictures))


@torch.no_grad()
def test_a_model_of_open_clip_answers_as_there(tmp_path: Path) -> None:
    source, model = small_clip.small_open_clip(tmp_path)
    dual = load_dual(source)
    pictures = [paper_files.picture(number).resize((40, 36)) for number in range(2)]
    transform = small_clip.open_clip.image_transform(small_clip.IMAGE_SIZE, is_train=False)
    pixels = torch.stack([transform(picture) for picture in pictures])
    tokens = small_clip.open_clip.tokenize(["A photo of a cat.", "A photo of a dog."], context_length=16)
    expected = model.get_logits(pixels, tokens)[0]
    names = ["cat", "dog"]
    assert torch.allclose(answer(dual, names, pictures)[0], expected, atol=1e-4)


@torch.no_grad()
def test_a_model_of_transformers_and_a_saved_one_answer_alike(tmp_path: Path) -> None:
    small_clip.small_transformers_clip(tmp_path / "clip")
    dual = load_dual(str(tmp_path / "clip"))
    dual.save_pretrained(tmp_path / "saved")
    again = load_dual(str(tmp_path / "saved"))
    pictures, names = [paper_files.picture(3).resize((50, 40))], ["cat", "red bus"]
    assert torch.equal(answer(dual, names, pictures), answer(again, names, pictures))
    ids = dual.text.prepare(["A photo of a cat."])
    assert int(ids["input_ids"][0, 0]) == 8  # type: ignore[index]


def test_a_checkpoint_is_a_model_of_the_study(tmp_path: Path) -> None:
    source, _ = small_clip.small_open_clip(tmp_path)
    model: ModelSource = CheckpointModel(source)
    folder: Any = None
    dual = model.dual(0, folder, CPU)
    assert model.dual(1, folder, CPU) is dual
    assert not model.trains_text
    assert source in model.description
    with pytest.raises(ConfigError, match="cannot be trained here"):
        model.tuned(dual, "a", 0, folder)


def test_images_reach_the_model_by_its_own_preprocessing(tmp_path: Path, tasks: Any) -> None:
    source, _ = small_clip.small_open_clip(tmp_path)
    model = CheckpointModel(source)
    samples = model.samples(tasks["pets"].test.images, CPU)
    batches = list(samples.evaluation(2))
    assert [tuple(inputs.shape) for inputs, _ in batches] == [(2, 3, 32, 32), (1, 3, 32, 32)]
    assert torch.cat([labels for _, labels in batches]).tolist() == [0, 1, 2]


def test_checkpoints_that_cannot_be_had(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not say which weights"):
        load_dual("open_clip:ViT-B-32")
    with pytest.raises(CheckpointError, match="open_clip could not make nothing/at-all"):
        load_dual("open_clip:nothing/at-all")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="neither a folder of a saved dual encoder nor a CLIP"):
        load_dual(str(tmp_path / "empty"))
    small_clip.small_transformers_clip(tmp_path / "clip")
    dual = load_dual(str(tmp_path / "clip"))
    bare = he.DualEncoder(he.Ensemble(dual.image.config), dual.text, dual.projections, dual.logit_scale)
    bare.save_pretrained(tmp_path / "bare")
    with pytest.raises(CheckpointError, match="does not say how images become inputs"):
        load_dual(str(tmp_path / "bare"))


# --- the study -----------------------------------------------------------------------------------------------


def test_the_whole_study_runs_on_the_papers_sets(root: Path, tmp_path: Path) -> None:
    source, _ = small_clip.small_open_clip(tmp_path / "clip")
    recipe = study_recipe("paper", source, tiny=True)
    assert study_recipe("paper", None, tiny=True).model == PAPER_CHECKPOINT
    recipe = replace(recipe, taylor_prune=2)  # of two layers
    run_zero_shot_study(recipe, root, tmp_path / "runs", device="cpu")
    text = collect_zero_shot(recipe, tmp_path / "runs", tmp_path / "results")
    facts = json.loads((tmp_path / "results" / f"{recipe.name}.json").read_text())
    assert list(facts["tasks"]) == NINE
    assert source in text
    assert "Hydra" in text

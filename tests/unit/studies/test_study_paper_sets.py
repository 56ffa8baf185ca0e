"""The paper's nine data sets: files in their libraries' layouts, a study that reads them, and the paper's numbers."""

import csv
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import paper_files
import pytest
import small_clip
import torch
from small_studies import CPU

import hydra_ensembles as he
from hydra_ensembles.baselines import BayesVLM, published_bayes_vlm
from pictures import picture
from studies import dual_rows
from studies.dual_recipe import DualCounts, load_dual_recipe
from studies.dual_rows import DualRow
from studies.dual_seed import DualSeed, DualTask
from studies.findings import METRICS
from studies.paper import FOLDER, STANDS_FOR, paper_numbers, set_numbers
from studies.samples import SampleBatches
from studies.sets import DataFolder, NamedImages, PaperSets
from studies.storing import SINGLE

NINE = ["imagenet", "cifar100", "cifar10", "food101", "sun397", "pets", "dtd", "eurosat", "caltech101"]
SIZES = {"circuits": 10, "image_circuits": 10, "calibration": 10, "taylor_batches": 1}
COUNTS = DualCounts(None, None, **SIZES, test=None, detection=None, classes=None)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("paper")
    with pytest.MonkeyPatch.context() as patch:
        paper_files.write_all(folder, patch)
        yield folder


@pytest.fixture(scope="module")
def tasks(root: Path) -> dict[str, NamedImages]:
    sets = PaperSets(root, COUNTS)
    return {one.name: sets.fewer(sets.load(one), one.name) for one in (sets.main.id, *sets.main.tasks)}


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
    name: str, labels: list[int] | None, names: dict[int, str], tasks: dict[str, NamedImages]
) -> None:
    assert list(tasks) == NINE
    test = tasks[name]
    assert {number: test.names[number] for number in names} == names
    assert labels is None or test.images.labels.tolist() == labels
    assert test.images[len(test.images) - 1][0].mode == "RGB"


def test_imagenet_is_cut_as_in_the_supervised_studies(root: Path, tasks: dict[str, NamedImages]) -> None:
    sets = PaperSets(root, COUNTS)
    validation, outside = sets.circuits()
    test = tasks["imagenet"]
    assert (len(validation.images), len(test.images), len(set(test.names))) == (10, 990, 1000)
    assert not set(validation.images.rows) & set(test.images.rows)
    assert len(sets.load(sets.main.train)) == 1000  # type: ignore[arg-type]
    held, learned = sets.calibration(), sets.training()
    assert (len(held.images), len(learned.images), held.names == learned.names) == (10, 990, True)
    assert not set(held.images.rows) & set(learned.images.rows)
    assert outside.name == "openimage_o"
    assert np.array_equal(np.asarray(tasks["cifar100"].images[1][0]), np.asarray(picture(1)))


def test_circuits_of_the_image_tower_read_cifar100_as_well(root: Path) -> None:
    """Of the three listed classes, ImageNet lacks apple and worm, and TinyImageNet has the fish."""
    sets = PaperSets(root, COUNTS)
    inside, outside = sets.image_circuits()
    assert inside.names[1000:] == ("apple", "worm")
    assert (sorted(inside.images.labels.tolist())[-2:], len(inside.images)) == ([1000, 1001], 10 + 2)
    assert len(outside) == len(sets.circuits()[1]) + 3
    few = PaperSets(root, replace(COUNTS, classes=6)).calibration()
    assert (few.names[:2], len(few.names)) == (("tench", "goldfish"), 6)
    assert set(few.images.labels.tolist()) <= set(range(6))


def test_a_study_on_the_papers_sets_opens_them_all(root: Path, tmp_path: Path) -> None:
    source, _ = small_clip.small_open_clip(tmp_path / "clip")
    recipe = load_dual_recipe(tiny=True, suite="paper", model=source)
    found = DualTask(recipe, DataFolder(root), CPU).test_sets
    assert [one.name for one in found if one.group == "id"] == NINE
    assert {(one.task, one.name) for one in found if one.group in ("near", "far")} == {
        *(("imagenet", name) for name in ("ssb_hard", "ninco", "inaturalist", "textures")),
        *(("cifar100", name) for name in ("cifar10", "tinyimagenet", "mnist", "svhn", "textures", "places365")),
    }
    assert next(iter(SampleBatches(found[0].samples, 2)))[0].shape == (2, 3, 32, 32)


def test_a_given_model_has_bayes_vlm_by_its_factors_and_vilu_on_training_images(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dual_rows, "EPOCHS", 1)
    monkeypatch.setattr(dual_rows, "RATES", (("sgd", 0.01),))
    source, _ = small_clip.small_open_clip(tmp_path / "clip")
    recipe = load_dual_recipe(tiny=True, suite="paper", model=source, factors=str(tmp_path))
    recipe = replace(recipe, counts=replace(recipe.counts, calibration=3))  # of six images, one per class
    seed = DualSeed(DualTask(recipe, DataFolder(root), CPU), 0, tmp_path / "run")
    for tag, one in (("img", seed.dual.projections.image), ("txt", seed.dual.projections.text)):
        for letter, size in (("A", one.weight.shape[2]), ("B", one.weight.shape[1])):
            drawn = torch.randn(size, size, generator=torch.Generator().manual_seed(size))
            torch.save(drawn @ drawn.T / size, tmp_path / f"{letter}_{tag}_analytic.pt")
    rows, held = dual_rows.rows_of(seed.task), seed.task.held_out
    single = rows[SINGLE].asked(seed, held)
    said = rows[dual_rows.BAYES_VLM].asked(seed, held)
    count = json.loads((seed.folder / "choices" / "bayesvlm.json").read_text())["setting"]["pseudo_count"]
    posterior = published_bayes_vlm(seed.dual, tmp_path, BayesVLM(count))
    expected = DualRow(model=lambda _, names: posterior.probit(names)).asked(seed, held)
    torch.testing.assert_close(said.probs, expected.probs)
    assert not torch.allclose(said.probs, single.probs)
    scored = rows[dual_rows.VILU].asked(seed, held)
    torch.testing.assert_close(scored.probs, single.probs)
    assert scored.score("vilu").isfinite().all()


def test_files_of_the_paper_have_a_cell_for_every_column() -> None:
    """An unquoted comma would split a cell."""
    for path in FOLDER.glob("*.csv"):
        widths = {len(row) for row in csv.reader(path.read_text(encoding="utf-8").splitlines())}
        assert len(widths) == 1, path.name
    assert paper_numbers("classifier", "SST-2")["LoRA-single"]["all.fpr95"] == pytest.approx(0.6884)


@pytest.mark.parametrize(
    ("kind", "name"), [("classifier", "sst2"), *product(("classifier", "dual"), ("imagenet", "cifar100"))]
)
def test_sets_of_the_paper_give_its_means(kind: str, name: str) -> None:
    """Except where the paper contradicts itself, as the paper map notes; for methods with all sets."""
    suite = he.data.suite(f"paper-{'zero-shot-' if kind == 'dual' else ''}{name}")
    task, near, far = STANDS_FOR[name], *([one.name for one in sets] for sets in (suite.near, suite.far))
    printed, sets, compared, wrong = paper_numbers(kind, task), set_numbers(kind, task), 0, []
    for method, own in sets.items():
        for (group, names), metric in product({"near": near, "far": far, "all": [*near, *far]}.items(), METRICS):
            if all(f"ood.{one}.{metric}" in own for one in names):
                compared += 1
                mean = np.mean([own[f"ood.{one}.{metric}"] for one in names])
                if abs(mean - printed[method][f"{group}.{metric}"]) > 0.00015:
                    wrong.append((method, f"{group}.{metric}"))
    assert compared >= 9 * (len(sets) - 2)
    table_23 = [("CircAvg", "far.fpr95"), ("CircAvg", "all.fpr95")]
    assert wrong == (table_23 if (kind, name) == ("classifier", "cifar100") else [])

"""All stages of the zero-shot study on a small model, its captions and training, and a user's own dual encoders."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_clip
import torch
from small_studies import CPU, UNSEEN, ManyClasses, SmallDual, dual_recipe, dual_seed
from typer.testing import CliRunner

import hydra_ensembles as he
from hydra_ensembles import ImagePreprocessing, Recipe
from hydra_ensembles.errors import DataError
from hydra_ensembles.model.metadata import Metadata
from pictures import picture
from random_ensembles import noisy, small
from studies import dual_rows, dual_study
from studies.__main__ import app
from studies.captions import Pairs, TrainImages, accuracy_by_names, cut_by_names, pair_labels, train_dual, view_features
from studies.column_files import read_columns
from studies.dual_findings import TABLES
from studies.dual_rows import BOTH, IMAGE, IMAGE_TUNED, ROWS
from studies.dual_seed import DualSeed, ZeroSet
from studies.dual_study import ZERO_SHOT
from studies.engine import Run
from studies.measures import Array
from studies.rows import HYDRA_CIRC
from studies.samples import MEAN, STD, ImageSamples, SampleBatches
from studies.stored import DualStudy
from studies.storing import SINGLE
from studies.weights import dual_of, load_dual, mean_pooled
from zero_shot_models import word_tokenizer

REPORTED_ONLY = {f"images/{name}/test" for name in (*UNSEEN[1:-1], "cifar100_full", "mnist", "tinyimagenet")}
SIZE = 8


@dataclass(frozen=True)
class Finished:
    """Folder and results of a study with every stage run, and the sets opened before `report` and in total."""

    output: Path
    facts: Mapping[str, Any]
    columns: Mapping[str, Array]
    before: frozenset[str]
    after: frozenset[str]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    output, source = tmp_path_factory.mktemp("dual_study"), ManyClasses()
    task = SmallDual(dual_recipe(), source, CPU)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dual_rows, "EPOCHS", 2)  # ViLU's epochs
        patch.setattr(dual_rows, "RATES", (("sgd", 0.01),))
        patch.setattr(dual_rows, "PSEUDO_COUNTS", (1.0, 10.0))
        run = Run(task, output, output / "results", [], [0])
        ZERO_SHOT.run(run, ["choose", "train", "rank", "fix"])
    before = frozenset(source.opened)
    ZERO_SHOT.run(run, ZERO_SHOT.stages)
    folder = output / "results" / "zero-shot"
    facts = json.loads((folder / "study.json").read_text())
    return Finished(output, facts, read_columns(folder / "seed-0.parquet"), before, frozenset(source.opened))


def test_every_row_is_asked_about_every_set(finished: Finished) -> None:
    facts, columns = finished.facts, finished.columns
    outside = {name: one["outside"] for name, one in facts["tasks"].items() if "outside" in one}
    assert {name: list(one["near"]) for name, one in outside.items()} == {
        "tinyimagenet": ["cifar100", "caltech101"],
        "cifar100": ["cifar10", "tinyimagenet"],
    }
    places = [(task, task, one["samples"]) for task, one in facts["tasks"].items()]
    places += [(task, name, n) for task, one in outside.items() for sets in one.values() for name, n in sets.items()]
    assert list(facts["runs"]["0"]["report"]) == list(facts["trainings"]) == list(ROWS)
    for row in ROWS:
        assert all(columns[f"{row}|{task}|{name}|msp"].shape == (count,) for task, name, count in places)
        assert all(columns[f"{row}|{task}|{task}|calibrated.doubt"].dtype == np.float16 for task in facts["tasks"])
        assert {task for task in facts["tasks"] if f"{row}|{task}|{task}|entropy" in columns} == set(outside)


def test_every_table_is_made_again_from_results(finished: Finished) -> None:
    """Tasks near chance are excluded from means."""
    folder, tasks = finished.output / "results", finished.facts["tasks"]
    study = DualStudy("zero-shot", folder)
    right = {name: finished.columns[f"{SINGLE}|{name}|{name}|correct"].mean() for name in UNSEEN}
    assert study.counted == [name for name in UNSEEN if right[name] >= 3 / tasks[name]["classes"]]
    assert 0 < len(study.counted) < len(UNSEEN)
    ran = CliRunner().invoke(app, ["zero-shot", "--from-results", "--results", str(folder)])
    assert ran.exit_code == 0, ran.exception
    for shown in (table(study) for table in TABLES.values()):
        assert shown in ran.stdout


def test_a_temperature_changes_no_label_and_is_the_one_that_was_fixed(finished: Finished) -> None:
    columns, place = finished.columns, "tinyimagenet|tinyimagenet"
    for plain, row in ((SINGLE, "Temperature Scaling"), (HYDRA_CIRC, f"{HYDRA_CIRC} + Temperature Scaling")):
        assert np.array_equal(columns[f"{row}|{place}|correct"], columns[f"{plain}|{place}|correct"])
        np.testing.assert_allclose(columns[f"{row}|{place}|msp"], columns[f"{plain}|{place}|calibrated.doubt"], 2e-3)
        fixed = finished.facts["runs"]["0"]["temperatures"]
        assert fixed[row] == fixed[plain] != 1.0


def test_test_sets_are_opened_after_all_is_fixed(finished: Finished, tmp_path: Path) -> None:
    assert not finished.before & REPORTED_ONLY
    assert finished.after >= REPORTED_ONLY
    source = ManyClasses()
    with pytest.raises(DataError, match="fix"):
        dual_study.report(dual_seed(tmp_path, source=source), HYDRA_CIRC)
    assert not source.opened


def test_rows_that_come_later_are_added_to_what_is_fixed(finished: Finished, tmp_path: Path, monkeypatch) -> None:
    """Also if another process fixes one meanwhile: rows of a seed are made side by side."""
    shutil.copytree(finished.output / "zero-shot" / "seed-0", tmp_path / "zero-shot" / "seed-0")
    seed, place = dual_seed(tmp_path), tmp_path / "zero-shot" / "seed-0" / dual_study.FIXED
    whole = json.loads(place.read_text())
    place.unlink()
    dual_study.fix(seed, SINGLE)
    first = json.loads(place.read_text())
    assert (list(first["temperatures"]), list(first["heads"])) == ([SINGLE], ["single"])
    changed = {**first, "temperatures": {SINGLE: 7.0}}
    place.write_text(json.dumps(changed))
    asked = dual_rows.DualRow.asked

    def beside(row: dual_rows.DualRow, seed: DualSeed, data: ZeroSet) -> Any:
        place.write_text(json.dumps({**changed, "temperatures": {SINGLE: 7.0, "Taylor": 8.0}}))
        return asked(row, seed, data)

    monkeypatch.setattr(dual_rows.DualRow, "asked", beside)
    for row in (SINGLE, HYDRA_CIRC):
        dual_study.fix(seed, row)
    found = json.loads(place.read_text())
    assert found["temperatures"] == {SINGLE: 7.0, "Taylor": 8.0, HYDRA_CIRC: whole["temperatures"][HYDRA_CIRC]}
    assert found["heads"] == {name: whole["heads"][name] for name in ("single", "both")}


def test_held_out_names_choose_how_to_learn(finished: Finished) -> None:
    """The stored choice is the best of all measured ones, and training uses it."""
    found, seed = finished.facts["choice"], dual_seed(finished.output)
    assert [one["steps"] for one in found["measured"]] == [one.steps for one in seed.recipe.choices]
    best = max(found["measured"], key=lambda one: one["accuracy"])
    assert found["choice"]["steps"] == best["steps"]
    assert seed.choice in seed.recipe.choices


def test_members_lose_heads_of_the_right_towers(finished: Finished) -> None:
    seed = dual_seed(finished.output)
    for family in {row.family for row in ROWS.values() if row.family is not None}:
        heads = seed.heads(family)
        assert len(heads) == len({frozenset(one) for one in heads}) == family.members
    assert {head.tower for one in seed.heads(IMAGE) for head in one} == {"image"}
    assert all(len(one) == seed.recipe.prune for one in seed.heads(BOTH))
    assert finished.facts["runs"]["0"]["heads"]["both"] == [[str(head) for head in one] for one in seed.heads(BOTH)]
    locked, tuned = seed.member(IMAGE, 1), seed.member(IMAGE_TUNED, 1)
    for name, tensor in locked.image.state_dict().items():
        assert torch.equal(tensor, tuned.image.state_dict()[name])
    texts = tuned.text.state_dict()
    assert any(not torch.equal(tensor, texts[name]) for name, tensor in locked.text.state_dict().items())


@pytest.mark.parametrize("name", [SINGLE, HYDRA_CIRC, "Hydra (Circ), image tower only, text fine-tuned"])
def test_members_in_turn_are_the_one_model_whose_cost_is_measured(finished: Finished, name: str) -> None:
    seed, row = dual_seed(finished.output), ROWS[name]
    held = seed.task.held_out
    seed.logits(IMAGE, 0, held)  # others share its image tower
    whole = row.whole(seed, held.classes)
    if row.family is not None and row.family.members == 3:
        assert whole.num_members == 3
        assert whole.config.sharing.mlp
    expected = torch.cat([whole(batch) for batch, _ in SampleBatches(held.samples, 4)], dim=1)
    torch.testing.assert_close(row.asked(seed, held).member_logits, expected.detach(), atol=1e-4, rtol=1e-4)


def small_dual(seed: int = 0) -> he.DualEncoder:
    squashed = ImagePreprocessing((SIZE, SIZE), MEAN, STD, resize_mode="squash")
    image = small(classes=0, width=24, heads=4, head_dim=6, mlp_width=32)
    words, pooled = {"vocabulary": 60, "positions": 12}, {"norm": "none", "hidden": "tanh"}
    text = small("text", 0, text=words, readout=pooled, heads=4, head_dim=4, norm_first=False)
    first = noisy(image, metadata=Metadata(preprocessing=squashed))
    second = noisy(text, 1, metadata=Metadata(preprocessing=word_tokenizer(mask=True)))
    return dual_of(first, mean_pooled(second), seed)


def images(names: tuple[str, ...], count: int = 24, side: int = 8, seed: int = 0, share: float = 1.0) -> TrainImages:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % len(names)
    pixels = torch.randint(0, 90, (count, 3, side, side), generator=generator)
    pixels[torch.arange(count), labels % 3] += 120
    return TrainImages(ImageSamples(pixels.to(torch.uint8), labels, SIZE), names, share=share)


def pairs_of(dual: he.DualEncoder, data: list[TrainImages], batch_size: int, views: int = 2) -> Pairs:
    return Pairs(data, [view_features(dual, one.samples, views) for one in data], batch_size)


def described(count: int) -> TrainImages:
    plain = images(("one",), count, seed=3)
    return TrainImages(plain.samples, captions=[[f"number {row}", f"the {row}"] for row in range(count)], share=2.0)


def test_the_same_name_is_the_same_class_and_an_image_with_captions_its_own() -> None:
    sets = [images(("cat", "dog", "bus"), 6), described(2), images(("boat", "dog"), 4), described(3)]
    assert [one.tolist() for one in pair_labels(sets)] == [[0, 1, 2, 0, 1, 2], [4, 5], [3, 1, 3, 1], [6, 7, 8]]


def test_pairs_are_training_images_with_their_texts() -> None:
    data = [images(("cat", "dog", "bus")), described(20)]
    pairs = pairs_of(small_dual(), data, batch_size=12)
    torch.manual_seed(0)
    assert len(pairs) == 44 // 12
    for features, texts, labels in pairs:
        assert len(features) == 12
        assert int((labels < 3).sum()) == 4  # in proportions one to two
        assert len(set(labels[4:].tolist())) == 8
        for text, label in zip(texts, labels.tolist(), strict=True):
            known = ("cat", "dog", "bus")[label] if label < 3 else str(label - 3)
            assert known in text


def test_held_out_names_are_every_fifth_and_nothing_of_them_is_learnt() -> None:
    names, dual = ("cat", "dog", "bus", "boat", "tree"), small_dual()
    data = [images(names, 20), described(4), images(("house", "cat"), 6, seed=5)]
    features = [view_features(dual, one.samples, 2) for one in data]
    kept, views, held = cut_by_names(data, features)
    assert list(held) == ["cat", "house"]  # the first and the sixth name
    assert torch.equal(held["cat"][0], features[0][0, data[0].samples.labels == 0])
    learnt = {one.names[label] for one in kept if one.names for label in one.samples.labels.tolist()}
    assert learnt == {*names, "house"} - set(held)
    assert [len(one.samples) for one in kept] == [view.shape[1] for view in views]
    drawn = {text for _, texts, _ in Pairs(kept, views, 12) for text in texts}
    assert not any("cat" in text for text in drawn)


def test_no_reported_set_is_trained_on() -> None:
    task = SmallDual(dual_recipe(), ManyClasses(), CPU)
    reported = {(one.source, one.split) for one in task.sets.main.tasks}
    assert not reported & {(one.source, one.split) for one in task.recipe.pairs}


def test_a_trained_dual_knows_names() -> None:
    """Trained on pairs from two sets, queried by names; a pruned member trains on with a frozen image projection."""
    names = ("cat", "dog", "bus", "boat")
    recipe = Recipe(learning_rate=0.01, epochs=6, warmup=2, batch_size=12, weight_decay=0.1, precision="bf16")
    start, data = small_dual(), [images(names, 48, share=3.0), images(("dog", "tree"), 12, side=6, seed=4)]
    rates = {"train_image_projection": True, "projection_rate": 2.0}
    dual = train_dual(start, recipe, pairs_of(start, data, 12), **rates)
    image = start.image.state_dict()
    assert all(torch.equal(tensor, image[name]) for name, tensor in dual.image.state_dict().items())
    assert not torch.equal(dual.projections.image.weight, start.projections.image.weight)
    zero, labels = he.zero_shot(dual, names), data[0].samples.labels
    right = torch.cat([zero(inputs)[0].argmax(1) for inputs, _ in SampleBatches(data[0].samples, 12)]) == labels
    assert right.double().mean() > 0.4  # chance is a quarter
    found = view_features(dual, data[0].samples, 1)[0]
    held = {name: [found[labels == label]] for label, name in enumerate(names)}
    assert accuracy_by_names(dual, held) == pytest.approx(float(right.double().mean()))  # twelve images each
    tune = Recipe(learning_rate=1e-3, steps=2, batch_size=12, train_groups=("attention", "mlp", "norms", "readout"))
    pruned = he.prune(dual, [(0, 0, "image"), (1, 2, "text")])
    member = train_dual(pruned, tune, pairs_of(pruned, data, 12, views=1))
    assert torch.equal(member.projections.image.weight, dual.projections.image.weight)


@torch.no_grad()
def test_a_model_of_open_clip_answers_as_there_also_saved_by_us(tmp_path: Path) -> None:
    source, model = small_clip.small_open_clip(tmp_path)
    load_dual(source).save_pretrained(tmp_path / "saved")
    pictures = [picture(number).resize((40, 36)) for number in range(2)]
    transform = small_clip.open_clip.image_transform(small_clip.IMAGE_SIZE, is_train=False)
    pixels = torch.stack([transform(picture) for picture in pictures])
    tokens = small_clip.open_clip.tokenize(["A photo of a cat.", "A photo of a dog."], context_length=16)
    expected = model.get_logits(pixels, tokens)[0]
    for name in (source, str(tmp_path / "saved")):
        ensemble = he.zero_shot(load_dual(name), ["cat", "dog"])
        torch.testing.assert_close(ensemble(ensemble.prepare(pictures))[0], expected, atol=1e-4, rtol=1e-4)

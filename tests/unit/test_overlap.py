"""Sets with equal samples: refused where the result would be meaningless, else warned about, in every function."""

import copy
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset
from torchvision.datasets import ImageFolder

import hydra_ensembles as he
from checkpoint_models import ensemble, labelled, single
from hydra_ensembles import overlap
from hydra_ensembles.data import ImageDataset, batches
from hydra_ensembles.errors import DataError, HydraWarning
from hydra_ensembles.evaluation.evaluate import evaluate_logits
from hydra_ensembles.model.metadata import Metadata
from hydra_ensembles.preprocessing import ImagePreprocessing
from pictures import picture
from unit.pipeline import build_cases as cases

MODEL = cases.image_model()


def copied(batches: list[Any], size: int = 5) -> list[Any]:
    images, labels = (torch.cat(part).clone() for part in zip(*batches, strict=True))
    return list(zip(images.split(size), labels.split(size), strict=True))


ID, OOD = cases.batches(16, seed=1), cases.batches(12, seed=2, shift=1.5)
SAME = {"copies": copied(ID), "a part": copied(ID[1:3]), "one after another": copied(ID[::-1])}
SOME = [*copied(ID[:1]), *OOD]
ONE = [(OOD[0][0][:1], OOD[0][1][:1])]


CONFIG = he.HydraConfig(prune=1, shared_layers=0, members=1, calibrate=False)
CALLS: dict[str, Any] = {
    "build": lambda ood, **sets: he.build(MODEL, CONFIG, **{"id": ID, **sets}, ood=ood, progress=False),
    "extract_circuit": lambda ood: he.extract_circuit(MODEL, ID, ood, budget=1, layers=[0], progress=False),
    "evaluate": lambda ood: he.evaluate(MODEL, ID, {"far": {"other": ood}}, progress=False),
}


@pytest.mark.parametrize("name", CALLS)
def test_ood_data_that_are_id_data(name: str) -> None:
    for ood in SAME.values():
        with pytest.raises(DataError, match="same samples"):
            CALLS[name](ood)
    for ood, token in ((SOME, "of 16 samples"), (ONE, "one sample")):
        with pytest.warns(HydraWarning, match=token):
            CALLS[name](ood)
    with warnings.catch_warnings(action="error"):
        CALLS[name](OOD)


def test_ood_data_that_are_trained_on_or_given_twice_and_id_data_that_validate() -> None:
    trains = he.HydraConfig(prune=1, shared_layers=0, members=1, recipe=cases.recipe(steps=1))
    with pytest.raises(DataError, match="train"):
        he.build(MODEL, trains, train=OOD, id=ID, ood=copied(OOD), progress=False)
    with pytest.raises(DataError, match=r"'b'.*'a'"):
        he.evaluate(MODEL, ID, {"a": OOD, "b": copied(OOD)}, progress=False)
    with pytest.warns(HydraWarning, match="validation"):
        CALLS["build"](OOD, validation=copied(ID))


class Items(Dataset[Any]):
    """A data set that loads items on access; `imgs` may be anything."""

    def __init__(self, items: Any = (), imgs: Any = ()) -> None:
        self.items = list(items or zip(*cases.samples(16, seed=1), strict=True))
        self.imgs = imgs

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, row: int) -> Any:
        return self.items[row]


class Folder(Items, ImageFolder):
    """A torchvision folder; `imgs` names its files."""

    def __init__(self) -> None:
        Items.__init__(self, imgs=[(f"{row}.png", 0) for row in range(16)])


ITEMS, ROWS = Items(), list(zip(*(torch.cat(part) for part in zip(*ID, strict=True)), strict=True))
PICTURES = ImageDataset([picture(seed) for seed in range(16)], [row % cases.CLASSES for row in range(16)])
PREPARED = [batches(PICTURES, ImagePreprocessing(size=(8, 8)), 4, shuffle=shuffle) for shuffle in (True, False)]
HELD_OUT: dict[str, tuple[Any, Any, str]] = {  # training data, held-out data, and how many samples are in both
    "in memory": (ID, copied(ID), "16 of 16"),
    "shuffled tensors": (DataLoader(TensorDataset(*map(torch.cat, zip(*ID, strict=True))), 4, True), ID, "16 of 16"),
    "the same rows": (DataLoader(ITEMS, 4, shuffle=True), DataLoader(ITEMS, 4), "16 of 16"),
    # the usual leak: one folder twice, with and without augmentation, split by different seeds
    "two draws": (*(DataLoader(Subset(Folder(), rows), 4) for rows in (range(12), range(8, 16))), "4 of 8"),
    "one source": (*PREPARED, "16 of 16"),
}


@pytest.mark.parametrize("case", HELD_OUT)
def test_held_out_data_that_are_trained_on(case: str) -> None:
    train, held_out, shared = HELD_OUT[case]
    with pytest.warns(HydraWarning, match=f"{shared} samples of validation"):
        he.finetune(MODEL, train, cases.recipe(steps=1), held_out, progress=False)


def test_members_that_are_equal() -> None:
    pruned = [he.prune(MODEL, [(0, 1)]), he.prune(MODEL, [(0, 2)]), he.prune(MODEL, [(0, 1)])]
    for join, token in ((he.fuse, "members 0 and 2"), (he.Ensemble.stack, r"members 0 and 2 given to Ensemble\.stack")):
        with pytest.warns(HydraWarning, match=token) as caught:
            assert join(pruned).num_members == 3
        assert caught[0].filename == __file__  # the caller's file, not the library's
        with warnings.catch_warnings(action="error"):
            join(pruned[:2])


def test_a_key_is_of_values_and_their_places() -> None:
    ids = torch.tensor([[3, 1, 2, 0], [3, 2, 1, 0], [0, 2, 0, 0], [1, 0, 1, 0]])  # the last two: same sum, same moment
    assert len(np.unique(overlap.sample_keys(ids))) == 4
    padded = {"input_ids": torch.cat([ids, torch.full((4, 3), 9)], 1), "attention_mask": torch.ones(4, 7).long()}
    padded["attention_mask"][:, 4:] = 0
    assert np.array_equal(overlap.sample_keys({"input_ids": ids}), overlap.sample_keys(padded))
    for dtype in (torch.bfloat16, torch.uint8):
        values = torch.tensor([[1, 0], [0, 1]]).to(dtype)
        assert len(set(overlap.sample_keys({"pixel_values": values}).tolist())) == 2
    signs = torch.randint(2, (1000, 48), generator=torch.Generator().manual_seed(0)).double()  # few bits set in float64
    for values in (signs, 2 * signs - 1, 255 * signs):
        assert len(np.unique(overlap.sample_keys(values))) == 1000
    many = torch.randn(600, 3, 4)
    numbered = {"pixel_values": many, "index": torch.arange(600)}  # an index does not make a sample different
    assert np.array_equal(overlap.sample_keys(many), overlap.sample_keys(numbered))
    assert np.array_equal(overlap.sample_keys(many)[500:], overlap.sample_keys(many[500:].clone()))


def measured(one: he.Ensemble, data: list[Any], told: str = "", **sets: Any) -> he.Evaluation:
    """Evaluate; must warn with this text, or not at all."""
    with pytest.warns(HydraWarning, match=told) if told else warnings.catch_warnings(action="error"):
        return he.evaluate(one, data, progress=False, **sets)


PLAIN = ensemble(single(), metadata=Metadata())
BOTH = r"about 100 % fitted the calibration and about (4[5-9]|5[0-5]) % fitted the familiarity"  # half of it
FIT, FRESH = labelled(PLAIN.config, 160, seed=1), labelled(PLAIN.config, 160, seed=2)


@pytest.fixture(scope="module")
def calibrated() -> he.Ensemble:
    return he.calibrate(PLAIN, FIT)


def test_what_set_the_thresholds_is_known_again(calibrated: he.Ensemble, tmp_path: Path) -> None:
    with pytest.warns(HydraWarning, match=BOTH) as caught:
        found = he.evaluate(calibrated, copied(FIT[::-1]), progress=False)
    assert (len(caught), found.reused) == (1, 1.0)
    half = measured(calibrated, [*FIT[:5], *FRESH[:5]], "calibration")
    assert 0.3 < half.reused < 0.7
    assert measured(calibrated, FRESH).reused == 0.0
    assert measured(PLAIN, FIT).reused is None
    few = {"layers": [0], "inputs": 0, "progress": False}
    with pytest.warns(HydraWarning, match=BOTH):
        he.atlas(calibrated, FIT, **few)
    with warnings.catch_warnings(action="error"):
        he.atlas(calibrated, FRESH, **few)
    measured(calibrated, FRESH, "set 'fog'", shift={"fog": FIT})
    unshifted = "160 of 160 samples of set 'fog' are also samples of .*not shifted at all"
    measured(PLAIN, FRESH, unshifted, shift={"fog": copied(FRESH)})
    assert measured(PLAIN, FIT, "calibration", calibration=calibrated.metadata.calibration).reused == 1.0
    found.save(tmp_path / "found.json")
    again = he.Evaluation.load(tmp_path / "found.json")
    assert again == found
    notes = he.compare({"calibrated": again, "other": half}, allow_mismatch=True).notes
    assert any("about 100 %" in note for note in notes)


def test_logits_that_were_fitted_on_are_known_again() -> None:
    torch.manual_seed(0)
    logits, other, labels = torch.randn(2, 90, 4), torch.randn(2, 90, 4), torch.arange(90) % 4
    known = he.fit_calibration(logits, labels).calibration
    with pytest.warns(HydraWarning, match="about 100 % fitted the calibration"):
        assert evaluate_logits(logits.flip(1), labels.flip(0), calibration=known).reused == 1.0
    with pytest.warns(HydraWarning, match="set 'fog'"):
        evaluate_logits(other, labels, shift={"fog": (logits, labels)}, calibration=known)
    with warnings.catch_warnings(action="error"):
        fresh = evaluate_logits(other, labels, calibration=known)
        evaluate_logits(logits, labels)
    assert fresh.reused is None  # other logits of the same samples are not recognised


def test_marks_travel_with_what_was_fitted(calibrated: he.Ensemble, tmp_path: Path) -> None:
    calibrated.save_pretrained(tmp_path)
    marks = calibrated.metadata.calibration.marks
    assert len(marks) == 160  # all of them
    for one in (he.Ensemble.from_pretrained(tmp_path), copy.deepcopy(calibrated), calibrated.optimize()):
        assert measured(one, FIT, "about 100 %").reused == 1.0
    changed = he.prune(calibrated, [(0, 0)])
    assert measured(changed, FIT).reused is None
    other = he.calibrate(changed, FRESH)
    assert measured(other, FIT).reused == 0.0


@pytest.mark.parametrize(("fitted", "new"), [(700, 250), (6_000, 1_000), (500, 2_000)])
@pytest.mark.parametrize("known", [1.0, 0.1, 0.0])
def test_the_share_of_the_new_set_is_estimated(fitted: int, new: int, known: float) -> None:
    """Not the share of the fitted set: all of a small set may be a small part of that."""
    common = min(int(known * new), fitted)
    shares = []
    for start in range(0, 40 * 10_000, 10_000):  # 40 draws: the hash of a key depends on its value
        keys = np.arange(start, start + fitted, dtype=np.int64)
        kept = overlap.FittedSet(overlap.marks_of(keys), fitted)
        shares.append(overlap.reused_of(np.arange(start + fitted - common, start + fitted - common + new), kept).share)
    assert max(shares) <= 1
    assert np.mean(shares) == pytest.approx(common / new, abs=0.08 if known < 1 else 0.15)  # capped at 1
    assert np.mean(np.array(shares) > 0.5) > 0.9 or common < new


@pytest.mark.parametrize("marks", [64, overlap.MARKS])
def test_one_sample_that_is_known_again_refuses_nothing(marks: int) -> None:
    kept = overlap.FittedSet(overlap.marks_of(np.arange(50_000))[:marks], 50_000)
    fresh = np.arange(50_000, 51_000)
    hits = np.array([int(name, 16) for name in kept.marks])
    one, three = (overlap.reused_of(np.concatenate([hits[:count], fresh[count:]]), kept) for count in (1, 3))
    assert not one.mostly
    assert one.share == pytest.approx(50 / marks)  # one mark stands for 50,000 / marks samples
    assert "judging by only 1 of them" in str(one)
    assert three.mostly == (marks == 64)  # three marks stand for 2,344 samples, or for 146


def test_all_of_a_small_set_was_fitted_on() -> None:
    fitted = he.fit_familiarity(PLAIN, FIT, held_out=0.0)
    part = FIT[:3]  # 48 of 160 samples
    with pytest.raises(DataError, match=r"validation samples were used to fit the familiarity.*on other data"):
        he.calibrate(fitted, part, temperature=False)
    with pytest.warns(HydraWarning, match=r"% of the validation samples were used to fit the familiarity"):
        he.calibrate(fitted, [*FIT[:2], *FRESH], temperature=False)
    with warnings.catch_warnings(action="error"):
        fresh = he.calibrate(fitted, FRESH, temperature=False)
    assert measured(fresh, part, "fitted the familiarity").reused == 1.0


def test_calibrated_on_the_same_samples_again_halves_them_again(calibrated: he.Ensemble) -> None:
    """Statistics from half of the samples with a threshold from all of them would not keep the promised share."""
    again = he.calibrate(calibrated, FIT)
    assert again.metadata.familiarity == calibrated.metadata.familiarity
    fresh = he.calibrate(calibrated, FRESH).metadata.familiarity
    assert fresh.settings.marks == calibrated.metadata.familiarity.settings.marks  # only the threshold is new
    with pytest.raises(DataError, match="too few"):  # the old threshold is not kept
        he.calibrate(calibrated, FIT, share=0.999)


@pytest.mark.parametrize("source", [ID, DataLoader(Items(ROWS), 4, shuffle=True)], ids=["in memory", "a loader"])
def test_samples_that_trained_a_model_are_told_when_they_calibrate_or_measure_it(source: Any, tmp_path: Path) -> None:
    """Also in another call, and for models derived from the trained one."""
    trained = he.finetune(MODEL, source, he.Recipe(learning_rate=1e-4, steps=1), progress=False)
    assert trained.metadata.trained_set.samples == 16
    trained.save_pretrained(tmp_path)
    once_more = he.finetune(he.prune(trained, [(0, 0)]), OOD, he.Recipe(learning_rate=1e-4, steps=1), progress=False)
    settings: dict[str, Any] = {"share": 0.5, "familiarity": None, "temperature": False}
    for model in (trained, he.load(tmp_path), once_more, he.Ensemble.stack([trained, MODEL])):
        with pytest.warns(HydraWarning, match="^about 100 % .* to train this ensemble"):
            he.calibrate(model, copied(ID), **settings)
        assert measured(model, copied(ID), "about 100 % trained the model").reused == 1.0
    assert once_more.metadata.trained_set.samples == 28
    with warnings.catch_warnings(action="error"):
        he.calibrate(trained, OOD, **settings)  # no warning for other data
        he.evaluate(trained, OOD, progress=False)

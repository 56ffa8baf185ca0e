"""All stages of the zero-shot study on a small model, its captions and trainings, and dual encoders of a user's own."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import small_clip
import torch
from finished_studies import Finished
from PIL import Image
from small_studies import CPU, ManyClasses, dual_recipe, dual_run

import hydra_ensembles as he
from hydra_ensembles import ImagePreprocessing, Recipe
from hydra_ensembles.errors import CheckpointError, ConfigError, DataError
from hydra_ensembles.model.config import (
    EncoderConfig,
    EnsembleConfig,
    PatchStemConfig,
    ReadoutConfig,
    TextStemConfig,
    all_heads,
)
from hydra_ensembles.model.metadata import Metadata
from pictures import picture
from studies.dual import (
    CIFAR_TRAIN,
    DualModels,
    TrainImages,
    caption_templates,
    joined_classes,
    train_dual,
    train_pairs,
    view_features,
)
from studies.engine import open_test_sets, run_stages
from studies.methods import BOTH, CALIBRATED, DUAL_METHODS, FAMILIES, HYDRA, IMAGE, IMAGE_TUNED, all_units
from studies.results import HELD_OUT
from studies.samples import MEAN, STD, ImageSamples, Prepared, SampleBatches
from studies.sets import DataFolder
from studies.weights import dual_of, load_dual, mean_pooled
from zero_shot_models import word_tokenizer

REPORTED_ONLY = {f"images/{name}/test" for name in ("caltech101", "pets", "mnist", "eurosat", "dtd10", "tinyimagenet")}
SIZE = 14


def test_every_method_is_evaluated_on_every_set(duals: Finished) -> None:
    facts = duals.results.facts
    assert facts["methods"] == {name: list(units) for name, units in DUAL_METHODS.items()}
    assert list(facts["units"]) == all_units(DUAL_METHODS)
    tasks = facts["tasks"]
    assert list(tasks) == [
        *("cifar100", "caltech101", "pets", "dtd10", "scene15", "eurosat", "cifar10", "tinyimagenet")
    ]
    assert [name for name, one in tasks.items() if one["domain"] == "seen"] == ["cifar10", "tinyimagenet"]
    assert facts["detections"] == ["tinyimagenet", "cifar100"]
    assert list(tasks["tinyimagenet"]["near"]) == ["cifar100", "caltech101"]
    assert list(tasks["cifar100"]["near"]) == ["cifar10", "tinyimagenet"]
    assert set(facts["temperatures"]["0"]) == set(CALIBRATED)
    arrays = duals.results.arrays
    assert "0/pets/pets/logits" in arrays  # few classes
    assert arrays["0/tinyimagenet/tinyimagenet/top_probabilities"].shape == (len(DUAL_METHODS), 25, 10)
    assert f"0/tinyimagenet/{HELD_OUT}/msp" in arrays


def test_test_sets_ask_for_what_was_fixed(duals: Finished, tmp_path: Path) -> None:
    assert not duals.before & REPORTED_ONLY
    assert duals.after >= REPORTED_ONLY
    source = ManyClasses()
    with pytest.raises(DataError, match="tune"):
        run_stages([dual_run(tmp_path, source=source)], ["evaluate"])
    fixed = dual_run(duals.output).record()
    with pytest.raises(DataError, match="before any test set is opened"):
        open_test_sets(dual_run(tmp_path, source=source), replace(fixed, recipe="another"))
    assert not source.opened


def test_members_lose_heads_of_the_right_towers(duals: Finished) -> None:
    run = dual_run(duals.output)
    for family in FAMILIES.values():
        heads = run.heads(family)
        assert len(heads) == len({frozenset(one) for one in heads}) == family.members
    assert {head.tower for one in run.heads(IMAGE) for head in one} == {"image"}
    assert all(len(one) == run.recipe.prune for one in run.heads(BOTH))
    locked, tuned = run.member(IMAGE, 1), run.member(IMAGE_TUNED, 1)
    for name, tensor in locked.image.state_dict().items():
        assert torch.equal(tensor, tuned.image.state_dict()[name])
    texts = tuned.text.state_dict()
    assert any(not torch.equal(tensor, texts[name]) for name, tensor in locked.text.state_dict().items())


def test_members_in_turn_are_the_fused_ensemble(duals: Finished) -> None:
    """What is stored member by member is what the one ensemble answers whose cost is measured."""
    run = dual_run(duals.output)
    fused = run.whole_model(HYDRA, BOTH.units)
    assert fused.num_members == 3
    assert fused.config.sharing.mlp
    expected = torch.cat([fused(batch) for batch, _ in SampleBatches(run.held_out[0].samples, 4)], dim=1)
    found = run.half_b(*BOTH.units)[f"tinyimagenet/{HELD_OUT}"]
    torch.testing.assert_close(found, expected.detach(), atol=1e-4, rtol=1e-4)


def test_a_second_run_makes_nothing_again(duals: Finished, capsys: pytest.CaptureFixture[str]) -> None:
    source = ManyClasses()
    run_stages([dual_run(duals.output, source=source)])
    assert capsys.readouterr().out == ""
    assert source.opened == []
    saved = he.DualEncoder.from_pretrained(duals.output / "zero-shot" / "seed-0" / "dual")  # for others to use
    assert torch.equal(saved.logit_scale, dual_run(duals.output).dual.logit_scale)


# --- captions and training ---------------------------------------------------------------------------------


def towers() -> tuple[he.Ensemble, he.Ensemble]:
    image = EncoderConfig(width=24, layers=2, heads=4, head_dim=6, mlp_width=32)
    text = EncoderConfig(width=16, layers=2, heads=4, head_dim=4, mlp_width=24, norm_first=False)
    stem = TextStemConfig(vocabulary=60, positions=12, embedding_width=16)
    squashed = ImagePreprocessing((SIZE, SIZE), MEAN, STD, resize_mode="squash")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        first = he.Ensemble(
            EnsembleConfig(PatchStemConfig((7, 7), (2, 2)), image, ReadoutConfig(), all_heads(image)),
            Metadata(preprocessing=squashed),
        )
        second = he.Ensemble(
            EnsembleConfig(stem, text, ReadoutConfig(norm="none", hidden="tanh"), all_heads(text)),
            Metadata(preprocessing=word_tokenizer(mask=True)),
        )
        for parameter in (*first.parameters(), *second.parameters()):
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return first.eval(), second.eval()


def small_dual(seed: int = 0) -> he.DualEncoder:
    image, text = towers()
    return dual_of(image, mean_pooled(text), seed)


def images(names: tuple[str, ...], count: int = 24, side: int = 8, seed: int = 0) -> TrainImages:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % len(names)
    pixels = torch.randint(0, 90, (count, 3, side, side), generator=generator)
    pixels[torch.arange(count), labels % 3] += 120
    return TrainImages(ImageSamples(pixels.to(torch.uint8), labels, SIZE), names)


def test_pairs_are_training_images_with_fresh_captions() -> None:
    assert (CIFAR_TRAIN.split, CIFAR_TRAIN.rows) == ("train", (0, 10_000))  # the last 5,000 of 50,000 validate
    names, labels = joined_classes([images(("cat", "dog", "bus"), 6), images(("boat", "dog"), 4)])
    assert names == ("cat", "dog", "bus", "boat")  # the same name is the same class
    assert labels.tolist() == [0, 1, 2, 0, 1, 2, 3, 1, 3, 1]
    pairs = train_pairs(small_dual(), [images(("cat", "dog", "bus"))], batch_size=8)
    torch.manual_seed(0)
    first, second = list(pairs), list(pairs)
    assert len(first) == len(pairs) == 3
    assert torch.cat([batch[2] for batch in first]).bincount().tolist() == [8, 8, 8]
    for _, texts, classes in first:
        assert all(("cat", "dog", "bus")[label] in text for text, label in zip(texts, classes.tolist(), strict=True))
    assert [batch[1] for batch in first] != [batch[1] for batch in second]
    torch.manual_seed(3)
    drawn = pairs.captions(torch.zeros(1000, dtype=torch.long))
    assert len(set(drawn)) == len(caption_templates()) >= 40
    assert "A photo of a cat." in drawn


def test_views_are_the_image_and_its_mirrored_middle() -> None:
    dual, samples = small_dual(), images(("cat", "dog"), 6, side=20).samples  # whose middle, 17, cannot be centred
    features = view_features(dual, samples, 2)
    assert features.shape == (2, 6, 24)
    plain = torch.cat([dual.image(inputs)[0] for inputs, _ in SampleBatches(samples, 4)])
    torch.testing.assert_close(features[0], plain, rtol=1e-4, atol=1e-5)
    middle = ImageSamples(samples.pixels[..., 1:18, 1:18].flip(-1), samples.labels, SIZE)
    torch.testing.assert_close(features[1], view_features(dual, middle, 1)[0])


def test_the_towers_before_training() -> None:
    first, again, other = small_dual(0), small_dual(0), small_dual(1)
    assert torch.equal(first.projections.text.weight[0], torch.eye(16))
    assert torch.equal(first.projections.image.weight, again.projections.image.weight)
    assert not torch.equal(first.projections.image.weight, other.projections.image.weight)
    padded = first.text.prepare(["the cat", "a photo of the red house"])
    tokens, key_mask = first.text.embed(padded["input_ids"], padded["attention_mask"])
    hidden = first.text.encoder(tokens, key_mask, None)[0]  # [B, T, d]
    kept = [one[mask.bool()].mean(0) for one, mask in zip(hidden, padded["attention_mask"], strict=True)]
    torch.testing.assert_close(first.text(padded)[0], torch.stack(kept), rtol=1e-5, atol=1e-6)


def test_a_trained_dual_goes_all_the_way(tmp_path: Path) -> None:
    """Trained, asked, pruned, tuned again, fused, saved and loaded."""
    names = ("cat", "dog", "bus", "boat")
    recipe = Recipe(learning_rate=0.01, epochs=6, warmup=2, batch_size=12, weight_decay=0.1, precision="bf16")
    start, data = small_dual(), [images(names, 48), images(("dog", "tree"), 12, side=6, seed=4)]
    dual = train_dual(start, recipe, data, train_image_projection=True, projection_rate=2.0, output=tmp_path / "run")
    image = start.image.state_dict()
    assert all(torch.equal(tensor, image[name]) for name, tensor in dual.image.state_dict().items())
    assert not torch.equal(dual.projections.image.weight, start.projections.image.weight)
    batches, zero = list(SampleBatches(data[0].samples, 12)), he.zero_shot(dual, names)
    right = torch.cat([zero(inputs)[0].argmax(1) for inputs, _ in batches]) == data[0].samples.labels
    assert right.double().mean() > 0.4  # chance is a quarter
    tune = Recipe(learning_rate=1e-3, steps=2, batch_size=12, train_groups=("attention", "mlp", "norms", "readout"))
    members = [
        train_dual(he.prune(dual, heads), tune, data)
        for heads in ([(0, 1, "image")], [(0, 0, "image"), (1, 2, "text")])
    ]
    assert torch.equal(members[0].projections.image.weight, dual.projections.image.weight)
    fused = he.fuse(members)
    fused.save_pretrained(tmp_path / "dual")
    loaded = he.DualEncoder.from_pretrained(tmp_path / "dual")
    asked = he.zero_shot(fused, names)(batches[0][0])
    assert asked.shape == (2, 12, 4)
    torch.testing.assert_close(he.zero_shot(loaded, names)(batches[0][0]), asked)
    picture = Image.fromarray(np.full((9, 11, 3), 120, dtype=np.uint8))
    assert he.zero_shot(loaded, names).predict(picture).names()[0] in names


# --- models of a user's own --------------------------------------------------------------------------------


def answer(dual: he.DualEncoder, names: list[str], pictures: list[Image.Image]) -> torch.Tensor:
    ensemble = he.zero_shot(dual, names)
    return ensemble(ensemble.prepare(pictures))


@torch.no_grad()
def test_a_model_of_open_clip_answers_as_there(tmp_path: Path) -> None:
    source, model = small_clip.small_open_clip(tmp_path)
    recipe = dual_recipe(model=source, suite="paper")
    models = DualModels(recipe, DataFolder(tmp_path), CPU)
    dual = models.trained(0, None)
    assert models.trained(1, None) is dual  # seeds change nothing in it
    assert source in models.about()["description"]
    with pytest.raises(ConfigError, match="cannot be trained"):
        models.tuned(dual, 0, None)
    pictures = [picture(number).resize((40, 36)) for number in range(2)]
    transform = small_clip.open_clip.image_transform(small_clip.IMAGE_SIZE, is_train=False)
    pixels = torch.stack([transform(picture) for picture in pictures])
    tokens = small_clip.open_clip.tokenize(["A photo of a cat.", "A photo of a dog."], context_length=16)
    expected = model.get_logits(pixels, tokens)[0]
    assert torch.allclose(answer(dual, ["cat", "dog"], pictures)[0], expected, atol=1e-4)
    samples = Prepared(ManyClasses().images(CIFAR_TRAIN).select(range(3)), dual.image.prepare)
    assert [tuple(inputs.shape) for inputs, _ in SampleBatches(samples, 2)] == [(2, 3, 32, 32), (1, 3, 32, 32)]


@torch.no_grad()
def test_a_saved_model_answers_alike(tmp_path: Path) -> None:
    dual = he.convert(small_clip.small_open_clip(tmp_path)[1])
    dual.save_pretrained(tmp_path / "saved")
    pictures, names = [picture(3).resize((50, 40))], ["cat", "red bus"]
    assert torch.equal(answer(load_dual(str(tmp_path / "saved")), names, pictures), answer(dual, names, pictures))
    bare = he.DualEncoder(he.Ensemble(dual.image.config), dual.text, dual.projections, dual.logit_scale)
    bare.save_pretrained(tmp_path / "bare")
    with pytest.raises(CheckpointError, match="images"):
        load_dual(str(tmp_path / "bare"))
    with pytest.raises(ConfigError, match="which weights"):
        load_dual("open_clip:ViT-B-32")

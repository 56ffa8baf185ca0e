"""Captions, pairs and the dual encoder of the zero-shot study, on random towers."""

import numpy as np
import pytest
import torch

import hydra_ensembles as he
from hydra_ensembles.errors import ConfigError, DataError
from hydra_ensembles.model.config import (
    EncoderConfig,
    EnsembleConfig,
    PatchStemConfig,
    ReadoutConfig,
    TextStemConfig,
    all_heads,
)
from hydra_ensembles.model.metadata import Metadata
from hydra_ensembles.training.recipe import Recipe
from studies.image_samples import ImageSamples
from studies.zero_shot.captions import CAPTION_TEMPLATES, OTHER_NAMES, Captions
from studies.zero_shot.dual_model import dual_of, mean_pooled, squashed
from studies.zero_shot.pairs import CIFAR_TRAIN, TrainImages, joined_classes, train_dual, train_pairs, view_features
from zero_shot_models import word_tokenizer

SIZE = 14


def towers() -> tuple[he.Ensemble, he.Ensemble]:
    image = EncoderConfig(width=24, layers=2, heads=4, head_dim=6, mlp_width=32)
    text = EncoderConfig(width=16, layers=2, heads=4, head_dim=4, mlp_width=24, norm_first=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        first = he.Ensemble(
            EnsembleConfig(PatchStemConfig((7, 7), (2, 2)), image, ReadoutConfig(), all_heads(image)),
            Metadata(preprocessing=squashed(SIZE)),
        )
        second = he.Ensemble(
            EnsembleConfig(
                TextStemConfig(vocabulary=60, positions=12, embedding_width=16),
                text,
                ReadoutConfig(norm="none", hidden="tanh"),
                all_heads(text),
            ),
            Metadata(preprocessing=word_tokenizer(mask=True)),
        )
        with torch.no_grad():
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


def test_templates_are_many_and_different():
    assert len(CAPTION_TEMPLATES) >= 40
    assert len(set(CAPTION_TEMPLATES)) == len(CAPTION_TEMPLATES)
    assert CAPTION_TEMPLATES[0] == "A photo of a {label}."
    assert all(template.count("{label}") == 1 for template in CAPTION_TEMPLATES)
    assert all(name not in others for name, others in OTHER_NAMES.items())


def test_captions_are_drawn_by_seed_from_all_sentences_and_names():
    captions = Captions(("hog", "lion"))
    torch.manual_seed(3)
    drawn = captions.draw(torch.tensor([0, 1] * 500))
    torch.manual_seed(3)
    assert captions.draw(torch.tensor([0, 1] * 500)) == drawn
    assert captions.draw(torch.tensor([0, 1] * 500)) != drawn
    possible = {one.replace("{label}", name) for one in CAPTION_TEMPLATES for name in ("hog", "pig")}
    assert set(drawn[::2]) <= possible
    assert len(set(drawn[::2])) > len(CAPTION_TEMPLATES)
    assert {text for text in drawn[1::2] if text.endswith("lion.")} == {"A photo of a lion."}
    with pytest.raises(DataError, match="every class needs a name"):
        Captions(("cat", " "))


def test_the_same_name_is_the_same_class():
    names, labels = joined_classes([images(("cat", "dog", "bus"), 6), images(("boat", "dog"), 4)])
    assert names == ("cat", "dog", "bus", "boat")
    assert labels.tolist() == [0, 1, 2, 0, 1, 2, 3, 1, 3, 1]


def test_cifar_pairs_are_training_images_outside_the_validation_rows():
    assert CIFAR_TRAIN.split == "train-1"  # the first file of the training set
    assert CIFAR_TRAIN.rows == (0, 10_000)  # of 50,000, whose last 5,000 are a validation set elsewhere


def test_views_are_the_image_a_mirrored_crop_and_random_crops():
    dual, samples = small_dual(), images(("cat", "dog"), 6).samples
    features = view_features(dual, samples, 4, seed=1)
    assert features.shape == (4, 6, 24)
    plain = torch.cat([dual.image(inputs)[0] for inputs, _ in samples.evaluation(4)])
    torch.testing.assert_close(features[0], plain, rtol=1e-4, atol=1e-5)
    even = images(("cat", "dog"), 6, side=20).samples  # whose middle, 17 pixels, cannot be centred
    middle = ImageSamples(even.pixels[..., 1:18, 1:18].flip(-1), even.labels, SIZE)
    torch.testing.assert_close(view_features(dual, even, 2, seed=1)[1], view_features(dual, middle, 1, seed=1)[0])
    assert torch.equal(features, view_features(dual, samples, 4, seed=1))
    assert not torch.equal(features[2], features[3])
    assert not torch.equal(features[3], view_features(dual, samples, 4, seed=2)[3])


def test_pairs_show_every_image_once_an_epoch_with_fresh_captions():
    pairs = train_pairs(small_dual(), [images(("cat", "dog", "bus"))], batch_size=8)
    torch.manual_seed(0)
    first = list(pairs)
    assert len(first) == len(pairs) == 3
    labels = torch.cat([batch[2] for batch in first])
    assert labels.bincount().tolist() == [8, 8, 8]
    for _, texts, classes in first:
        assert all(("cat", "dog", "bus")[label] in text for text, label in zip(texts, classes.tolist(), strict=True))
    second = list(pairs)
    assert [batch[1] for batch in first] != [batch[1] for batch in second]
    with pytest.raises(DataError, match="at least one view"):
        train_pairs(small_dual(), [images(("cat", "dog"))], batch_size=8, views=0)


def test_the_text_projection_starts_as_nothing_and_the_seed_decides_that_of_images():
    first, again, other = small_dual(0), small_dual(0), small_dual(1)
    assert first.projections.text is not None
    assert first.projections.image is not None
    assert torch.equal(first.projections.text.weight[0], torch.eye(16))
    assert torch.equal(first.projections.image.weight, again.projections.image.weight)
    assert not torch.equal(first.projections.image.weight, other.projections.image.weight)
    assert torch.equal(first.text.state_dict()["stem.words"], other.text.state_dict()["stem.words"])
    with pytest.raises(ConfigError, match="text encoder without classifier"):
        mean_pooled(towers()[0])


def test_texts_are_pooled_over_their_tokens_only():
    dual = small_dual()
    padded = dual.text.prepare(["the cat", "a photo of the red house"])
    mask = padded["attention_mask"]
    tower = dual.text
    tokens, key_mask = tower.embed(padded["input_ids"], mask)
    hidden = tower.encoder(tokens, key_mask, None)[0]  # [B, T, d]
    expected = torch.stack([one[kept.bool()].mean(0) for one, kept in zip(hidden, mask, strict=True)])
    torch.testing.assert_close(tower(padded)[0], expected, rtol=1e-5, atol=1e-6)


def test_a_trained_dual_goes_all_the_way(tmp_path):
    """Trained, asked, its circuits extracted over both towers, pruned, tuned again, fused, saved and loaded."""
    names = ("cat", "dog", "bus", "boat")
    recipe = Recipe(learning_rate=0.01, epochs=6, warmup=2, batch_size=12, weight_decay=0.1, precision="bf16")
    start, data = small_dual(), [images(names, 48), images(("dog", "tree"), 12, side=6, seed=4)]
    dual = train_dual(start, recipe, data, projection_rate=2.0, folder=tmp_path / "run")
    image = start.image.state_dict()
    assert all(torch.equal(tensor, image[name]) for name, tensor in dual.image.state_dict().items())
    assert not torch.equal(dual.projections.image.weight, start.projections.image.weight)
    batches = list(data[0].samples.evaluation(12))
    labels = data[0].samples.labels
    zero = he.zero_shot(dual, names)
    right = torch.cat([zero(inputs)[0].argmax(1) for inputs, _ in batches]) == labels
    assert right.double().mean() > 0.4  # chance is a quarter
    outside = [torch.randn(12, 3, SIZE, SIZE)]
    ranking = he.extract_circuit(dual, batches, outside, score="avg", budget=4, class_names=names, progress=False)
    assert {head.tower for head in ranking.heads} <= {"image", "text"}
    others = [(0, 0, "image"), (1, 2, "text")]
    tune = Recipe(learning_rate=1e-3, steps=2, batch_size=12, train_groups=("attention", "mlp", "norms", "readout"))
    members = [
        train_dual(he.prune(dual, heads), tune, data, train_image_projection=False)
        for heads in (ranking.first(4), others)
    ]
    assert torch.equal(members[0].projections.image.weight, dual.projections.image.weight)
    fused = he.fuse(members)
    fused.save_pretrained(tmp_path / "dual")
    loaded = he.DualEncoder.from_pretrained(tmp_path / "dual")
    asked = he.zero_shot(fused, names)(batches[0][0])
    assert asked.shape == (2, 12, 4)
    torch.testing.assert_close(he.zero_shot(loaded, names)(batches[0][0]), asked)
    picture = he.zero_shot(loaded, names).predict(_picture())
    assert picture.names()[0] in names


def _picture():
    module = pytest.importorskip("PIL.Image")
    return module.fromarray(np.full((9, 11, 3), 120, dtype=np.uint8))

"""NegLabel: words least similar to the classes, probabilities over classes and words, groups as published."""

import pytest
import torch
from torch.nn import functional as F

import hydra_ensembles as he
from hydra_ensembles.baselines.neg_label import NegLabel, embed_words, least_similar, neg_label
from hydra_ensembles.model.dual_encoder import DualEncoder, Projections
from unit.training.training_cases import NAMES, pair_samples, tiny_dual

WORDS = [f"{one} {two}" for one in ("cat", "dog", "red", "the", "photo") for two in ("tree", "bus", "of", "picture")]
IMAGES = pair_samples(6, seed=3)[0]
SMALL = NegLabel(share=0.6, groups=3)


def by_hand(dual, words, groups):
    """The published score for given words in order: one minus the mean probability of the classes."""
    images = dual.encode_image(IMAGES)[0]
    template = "A photo of a {}."
    pos, neg = (dual.encode_text([template.format(one) for one in names])[0] for names in (NAMES, words))
    scale = dual.logit_scale.exp()
    bias = 0.0 if dual.logit_bias is None else dual.logit_bias
    pos, neg = scale * images @ pos.T + bias, scale * images @ neg.T + bias
    shares = [
        torch.cat([pos, part], dim=1).softmax(-1)[:, : len(NAMES)].sum(-1)
        for part in neg.unflatten(1, (groups, -1)).unbind(1)
    ]
    return 1 - torch.stack(shares).mean(0)


@pytest.mark.parametrize("bias", [False, True])
def test_the_score_is_the_published_one(bias):
    dual = tiny_dual()
    dual = DualEncoder(dual.image, dual.text, dual.projections, logit_scale=2.0)
    if bias:
        maps = Projections.fresh(24, 16, 16, bias=True)
        torch.nn.init.normal_(maps.image.bias)
        dual = DualEncoder(dual.image, dual.text, maps, logit_scale=2.0, logit_bias=-3.0)
    found = neg_label(he.zero_shot(dual.eval(), NAMES), embed_words(dual, WORDS), settings=SMALL)
    known = found.metadata.familiarity
    assert known.state["neglabel.words"].shape[1:3] == (3, 3)  # 0.6 of 19: 'red bus' is a class
    every = dual.encode_text([f"A photo of a {one}." for one in WORDS])[0]
    stored = F.normalize(known.state["neglabel.words"][0].flatten(0, 1), dim=-1)
    words = [WORDS[place] for place in (stored @ every.T).argmax(1).tolist()]
    assert len(set(words)) == 9
    torch.testing.assert_close(found.predict(IMAGES).score("neglabel"), by_hand(dual, words, 3), atol=1e-5, rtol=1e-4)


def test_the_words_least_like_the_classes_are_taken():
    classes = F.normalize(torch.tensor([[[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]]), dim=-1)
    words = F.normalize(torch.tensor([[[1.0, 0.1, 0.0], [0.0, 0.1, 1.0], [0.3, 0.3, 1.0], [-1.0, -1.0, 0.0]]]), dim=-1)
    assert least_similar(words, classes, 1.0, 3).tolist() == [3, 1, 2]


def test_every_member_has_its_own_words_embedded_and_all_travels_with_the_model(tmp_path):
    fused = he.fuse([tiny_dual(0), tiny_dual(1)], stem="separate", mlp="separate")
    ensemble = he.zero_shot(fused, NAMES)
    found = neg_label(ensemble, embed_words(fused, WORDS, ("the {label}", "a photo of a {label}")), SMALL)
    score = found.predict(IMAGES).score("neglabel")
    members = found.predict(IMAGES).unfamiliarity.member_scores[0]
    assert not torch.allclose(members[0], members[1])
    found.save_pretrained(tmp_path / "saved")
    loaded = he.Ensemble.from_pretrained(tmp_path / "saved")
    torch.testing.assert_close(loaded.predict(IMAGES).score("neglabel"), score)
    torch.testing.assert_close(found.optimize(compile=False).predict(IMAGES).score("neglabel"), score)


def test_words_that_are_embedded_once_serve_every_list_of_classes():
    dual = tiny_dual()
    words = embed_words(dual, ["", *WORDS, WORDS[0]])
    assert list(words.words) == WORDS

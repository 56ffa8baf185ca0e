"""MIMO: with one image, the summed kernel equals the wide network; batches are assembled as published."""

from dataclasses import replace

import pytest
import torch
from baseline_cases import QUICK, assert_an_ensemble, single, some

from hydra_ensembles.baselines.mimo import MIMO, MimoLearner, mimo, summed, wide

SMALL = MIMO(members=3, batch_repeat=2)
CPU = torch.device("cpu")


def train(model, settings=SMALL, recipe=QUICK, **options):
    return mimo(model, some(model), recipe, settings, progress=False, **options)


def test_the_summed_kernel_answers_as_the_wide_network_for_equal_images():
    base, images = single(), some(single())[0][0]
    start = wide(base, replace(SMALL, start="scratch"), seed=1)
    assert start.config.stem.channels == 9
    expected = start(images.repeat(1, 3, 1, 1))  # [M, B, C]
    found = summed(start, start.state_dict(), base, start.metadata)
    assert found.config.stem == base.config.stem
    torch.testing.assert_close(found(images), expected)
    assert (expected[0] - expected[1]).abs().min() > 0


def test_a_pretrained_start_is_the_model_itself():
    base, images = single(), some(single())[0][0]
    start = wide(base, SMALL, seed=0)
    torch.testing.assert_close(start(images.repeat(1, 3, 1, 1)), base(images).expand(3, -1, -1))
    torch.testing.assert_close(summed(start, start.state_dict(), base, start.metadata)(images)[2], base(images)[0])


@pytest.mark.parametrize(("rho", "same"), [(0.0, 0), (0.5, 6), (1.0, 12)])
def test_every_member_sees_every_image_and_a_share_sees_the_same(rho, same):
    base = single()
    settings = replace(SMALL, rho=rho)
    learner = MimoLearner(base, wide(base, settings, 0), settings, QUICK, CPU)
    images = torch.arange(6.0, dtype=torch.float64)[:, None, None, None].expand(6, 3, 4, 6)
    shown, targets = learner.training_batch(images, torch.arange(6) % 4)
    assert shown.shape == (12, 9, 4, 6)
    seen = shown[:, ::3, 0, 0].T  # [M, B·repeat], the image that each member sees
    assert all(one.sort().values.tolist() == sorted(list(range(6)) * 2) for one in seen.long())
    assert torch.equal(targets, seen.long() % 4)
    together = (seen == seen[0]).all(dim=0)
    assert together[12 - same :].all()
    assert together.all() == (rho == 1.0)


@pytest.mark.parametrize("start", ["pretrained", "scratch"])
def test_a_trained_one_shares_all_but_classifiers_and_costs_one_model(start, tmp_path):
    base = single()
    found = train(base, replace(SMALL, start=start), replace(QUICK, reinit_classifier="random"))
    extra = sum(one.numel() for one in base.readout.classifier.parameters())
    assert sum(one.numel() for one in found.parameters()) == sum(one.numel() for one in base.parameters()) + 2 * extra
    answers = found(some(base)[0][0])
    assert (answers[0] - answers[1]).abs().max() > 0
    assert_an_ensemble(found, base, tmp_path / "saved")


def test_validation_shows_all_members_the_same_image():
    base, data = single(), some(single(), seed=5)
    found = train(base, recipe=QUICK, validation=data)
    images, labels = torch.cat([one for one, _ in data]), torch.cat([one for _, one in data])
    probs = found(images).softmax(-1).mean(0)
    accuracy = (probs.argmax(1) == labels).double().mean().item()
    assert found.metadata.metrics["validation/accuracy"] == pytest.approx(accuracy)

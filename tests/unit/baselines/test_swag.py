"""SWAG: draws have the mean and covariance of the visited points, and members are such draws."""

from dataclasses import replace

import pytest
import torch
from baseline_cases import QUICK, assert_an_ensemble, single, some

from checkpoint_models import same_state
from hydra_ensembles.baselines.swag import SWAG, Visited, swag
from hydra_ensembles.training.finetune import finetune


def train(model, recipe=QUICK, settings=SWAG(2, points=3, rank=2), **options):  # noqa: B008 (frozen)
    return swag(model, some(model), recipe, settings, progress=False, **options)


def test_draws_follow_the_published_formula():
    torch.manual_seed(0)
    points = torch.randn(6, 4, dtype=torch.float64) * torch.tensor([1.0, 2.0, 0.5, 0.0]) + 3.0
    visited = Visited(rank=4)
    for point in points:
        visited.add({"a": point[:1], "b": point[1:].view(1, 3)})
    running = points.cumsum(0) / torch.arange(1, 7)[:, None]
    late = (points - running)[-4:]  # columns of the low-rank part, as in the authors' Algorithm 1
    visited_draw = visited.draw(2.0, torch.Generator().manual_seed(1))
    found = torch.cat([visited_draw["a"], visited_draw["b"][0]])
    again = torch.Generator().manual_seed(1)
    along, *noise = (torch.randn(size, generator=again, dtype=torch.float64) for size in (4, 1, 3))
    moved = torch.cat(noise) * points.var(0, unbiased=False).sqrt() / 2**0.5 + along @ late / (2 * 3) ** 0.5
    torch.testing.assert_close(found, points.mean(0) + 2.0**0.5 * moved, atol=1e-6, rtol=0)
    assert found[3] == 3.0  # a constant weight stays constant


@pytest.mark.parametrize("kind", ["image-cls", "text-post-norm"])
def test_members_lie_around_the_mean_of_the_fine_tunings(kind, tmp_path):
    base, recipe = single(kind), replace(QUICK, steps=2)
    still = train(base, recipe, SWAG(2, points=3, rank=2, scale=0.0))
    point, points = base, []
    for index in range(3):
        point = finetune(point, some(base), recipe, progress=False, index=index)
        points.append(point.state_dict())
    for name, tensor in still.member(1).state_dict().items():
        torch.testing.assert_close(tensor, torch.stack([one[name] for one in points]).mean(0))
    found = train(base, recipe)
    assert not torch.equal(*found(some(base)[0][0]))
    assert_an_ensemble(found, base, tmp_path / "saved")


def test_what_does_not_train_is_stored_once():
    base = single()
    found = train(base, replace(QUICK, steps=1, train_groups=("readout",)))
    assert found.config.sharing.attention
    assert torch.equal(found.encoder.layers[0].mlp.up.weight, base.encoder.layers[0].mlp.up.weight)
    assert not torch.equal(*found.readout.classifier.weight)


def test_a_model_in_half_precision_visits_what_its_copy_in_float32_does():
    """At a small rate, updates are below the dtype's spacing: rounding each would undo them."""
    base, recipe = single().bfloat16(), replace(QUICK, steps=1, learning_rate=1e-4)
    found, whole = train(base, recipe), train(single().bfloat16().float(), recipe)
    assert found.dtype == torch.bfloat16
    assert same_state(found, whole.bfloat16())

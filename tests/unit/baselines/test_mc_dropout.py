"""MC Dropout: passes are members, the answer depends only on the seed, the ensemble is not modified."""

import pytest
import torch
from torch import nn

from hydra_ensembles.baselines.mc_dropout import MCDropout, mc_dropout
from hydra_ensembles.calibrate import calibrate
from hydra_ensembles.errors import ConfigError
from hydra_ensembles.model.ensemble import Ensemble
from hydra_ensembles.model.metadata import Calibration, Metadata
from random_ensembles import noisy, small

IMAGES = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def tiny(members: int = 1, kind: str = "image", readout=None, **blocks) -> Ensemble:
    settings = {"drop_path": (0.0, 0.5), **blocks}
    config = small(kind, 4, members, text={"segments": 2}, readout=readout, **settings)
    return noisy(config, metadata=Metadata(labels=("a", "b", "c", "d"), calibration=Calibration(threshold=0.5)))


@pytest.mark.parametrize("members", [1, 3])
def test_passes_are_members_and_without_dropout_the_plain_model_exactly(members):
    ensemble = tiny(members)
    view = mc_dropout(ensemble, p=0.2, passes=4)
    assert (view.num_members, view.num_classes, view.kind) == (4 * members, 4, "image")
    assert view(IMAGES).std(dim=0).min() > 0
    plain = mc_dropout(ensemble, p=0.0, passes=4)(IMAGES)
    assert torch.equal(plain, ensemble(IMAGES).repeat_interleave(4, dim=0))  # passes are grouped by member


def test_many_passes_average_to_the_deterministic_model():
    """In a causal model, left padding attends to no token: neither weights nor outputs may become NaN."""
    text = tiny(kind="text", readout={"pool": "last"}, causal=True, attention_dropout=0.1)
    ids = torch.tensor([[0, 0, 3, 4, 5], [3, 4, 5, 6, 7]])
    for ensemble, given in ((tiny(), (IMAGES,)), (text, (ids, (ids > 0).long()))):
        expected = ensemble(*given)[0]
        few, many = (mc_dropout(ensemble, 0.02, passes)(*given).mean(0) for passes in (2, 600))
        assert (many - expected).abs().max() < (few - expected).abs().max()


def test_the_answer_depends_on_the_seed_only_and_gradients_flow():
    ensemble, images = tiny(attention_dropout=0.5), IMAGES.clone().requires_grad_(True)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = mc_dropout(ensemble, 0.3, 4, seed=7)
    answer = first(images)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    for again in (first, first.train(), first.eval(), mc_dropout(ensemble, 0.3, 4, seed=7)):
        assert torch.equal(again(images), answer)
    assert not torch.equal(mc_dropout(ensemble, 0.3, 4, seed=8)(images), answer)
    answer.sum().backward()
    assert images.grad.abs().sum() > 0


def test_dropout_sits_where_the_baseline_and_the_model_have_it():
    view = MCDropout(tiny(), p=0.25, passes=2)
    rates = [module.p for module in view.modules() if isinstance(module, nn.Dropout)]
    assert rates.count(0.25) == 1 + 3 * 2  # the stem, and three per layer in two layers
    trained = tiny(attention_dropout=0.1, readout={"dropout": 0.1})
    config = MCDropout(trained, p=0.3, passes=2).model.config
    assert (config.encoder.attention_dropout, config.readout.dropout) == (0.3, 0.3)


def test_predict_gives_uncertainty_and_no_foreign_calibration():
    view = mc_dropout(tiny(), 0.3, 8)
    assert view.metadata.calibration is None
    prediction = view.predict(IMAGES)
    assert prediction.members == 8
    assert (prediction.epistemic > 0).all()
    assert prediction.accept is None
    assert prediction.class_names == ("a", "b", "c", "d")
    with pytest.raises(ConfigError, match="MCDropout"):
        calibrate(view, [(IMAGES, torch.arange(3))])

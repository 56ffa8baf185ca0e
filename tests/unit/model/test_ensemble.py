"""An ensemble at its limits: settings and inputs it refuses, and metadata that no longer fit its weights."""

import copy
import dataclasses
import pickle

import pytest
import torch
from torch import Tensor

import hydra_ensembles as he
from checkpoint_models import ensemble, single
from hydra_ensembles.errors import ConfigError
from hydra_ensembles.model.config import (
    EncoderConfig,
    EnsembleConfig,
    PatchStemConfig,
    ReadoutConfig,
    TextStemConfig,
)
from hydra_ensembles.model.metadata import Calibration, Metadata
from random_ensembles import random_batches, random_ensemble

IMAGES_24 = torch.randn(24, 3, 8, 8, generator=torch.Generator().manual_seed(0))
IMAGES = he.ImagePreprocessing((8, 8))
SIZES = {"width": 8, "layers": 2, "heads": 2, "head_dim": 4, "mlp_width": 16}
ENCODER, STEM, TEXT = EncoderConfig(**SIZES), PatchStemConfig((4, 4), (2, 2)), TextStemConfig(9, 8, 8)


def storages(model: he.Ensemble) -> list[int]:
    return [parameter.data_ptr() for parameter in model.parameters()]


def test_other_metadata_share_the_weights_and_nothing_else() -> None:
    model = ensemble(single()).train()
    before, inputs = model.metadata, torch.zeros(2, 3, 8, 8)
    changed = model.with_metadata(source="elsewhere", calibration=Calibration(2.0))
    assert storages(changed) == storages(model)
    assert (model.metadata, model.training, changed.training) == (before, True, False)
    assert all(parameter.requires_grad for parameter in changed.parameters())
    assert torch.equal(changed(inputs), model.eval()(inputs))


def test_a_member_and_a_model_from_tensors_are_copies() -> None:
    model = ensemble(single())
    state: dict[str, Tensor] = model.state_dict()
    for other in (model.member(0), he.Ensemble.from_state(model.config, state), he.Ensemble.stack([model])):
        assert not set(storages(other)) & set(storages(model))


def measured(seed: int = 0) -> he.Ensemble:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = he.Ensemble(EnsembleConfig(STEM, ENCODER, ReadoutConfig(num_classes=3)))
    return he.Ensemble.from_state(made.config, made.state_dict(), Metadata(calibration=Calibration(2.0, 0.5)))


def test_copies_keep_the_calibration_and_carry_no_buffers_placed_for_answering() -> None:
    ours = he.fit_familiarity(measured(), [(IMAGES_24, torch.arange(24) % 3)], "knn")
    expected = ours.predict(IMAGES_24)
    assert ours.metadata.familiarity._placed  # type: ignore[union-attr]
    for made in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert not made.metadata.familiarity._placed
        assert (made.metadata == ours.metadata, made.metadata.calibration) == (True, Calibration(2.0, 0.5))
        assert torch.equal(made.predict(IMAGES_24).familiarity, expected.familiarity)


def trainable(model: he.Ensemble) -> list[str]:
    return [name for name, value in model.named_parameters() if value.requires_grad]


def test_frozen_parameters_stay_frozen() -> None:
    ours = random_ensemble().requires_grad_(False)
    ours.encoder.layers[2].requires_grad_(True)
    inputs = random_batches(ours)[0][0]
    labelled = [(inputs, torch.arange(len(inputs)) % 4)]
    for made in (
        ours.with_metadata(source="here"),
        ours.member(0),
        he.prune(ours, [(0, 1)]),
        he.calibrate(ours, labelled, share=0.5, familiarity=None),
        he.mc_dropout(ours, p=0.1, passes=2).model,
    ):
        assert trainable(made) == trainable(ours)


def test_what_another_preprocessing_was_measured_with_is_dropped() -> None:
    ours = measured().with_metadata(preprocessing=IMAGES)  # none was known before: no contradiction
    assert ours.metadata.calibration is not None
    other = ours.with_metadata(preprocessing=dataclasses.replace(IMAGES, mean=(0.1, 0.1, 0.1)))
    assert (other.metadata.calibration, ours.metadata.calibration is not None) == (None, True)


def test_what_was_measured_with_other_members_is_refused() -> None:
    """A score by the disagreement of members needs several members."""
    single, both, by_members = measured(), (measured(), measured(1)), Calibration(1.0, 0.1, "mutual_information")
    known = he.fit_familiarity(single, [(IMAGES_24, torch.arange(24) % 3)], "knn").metadata.familiarity
    with pytest.raises(ConfigError, match="single member"):
        single.with_metadata(calibration=by_members)
    with pytest.raises(ConfigError, match="another model"):
        he.Ensemble.stack(both).with_metadata(familiarity=known)
    assert single.with_metadata(familiarity=known).metadata.familiarity is known
    assert he.Ensemble.stack(both).with_metadata(calibration=by_members).predict(IMAGES_24).threshold == 0.1
    with pytest.raises(ConfigError, match="single member"):
        he.Prediction.from_logits(torch.randn(1, 4, 3), threshold=0.1, score="mutual_information")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("padded", [0, 301])
def test_a_mean_of_many_tokens_neither_overflows_nor_loses_count(dtype: torch.dtype, padded: int) -> None:
    config = EnsembleConfig(TEXT, ENCODER, ReadoutConfig(pool="mean", norm="none"))
    readout, tokens = he.Ensemble(config).readout, torch.full((1, 1, 2000, 8), 60.0, dtype=dtype)
    mask = torch.ones(1, 2000, dtype=torch.long)
    mask[:, 2000 - padded :] = 0
    pooled = readout.pool(tokens, mask)
    assert pooled.dtype == dtype
    assert torch.equal(pooled, tokens[:, :, 0])  # in float16 the sum would be infinite
    few = torch.ones(1, 1, 257, 8, dtype=dtype)
    few[:, :, 0] = 3.0
    pooled = readout.pool(few, torch.ones(1, 257, dtype=torch.long))
    assert torch.equal(pooled, few.double().mean(2).to(dtype))  # bfloat16 counts only to 256 and rounds the sum to 260

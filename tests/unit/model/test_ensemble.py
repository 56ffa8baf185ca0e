"""An ensemble at its limits: settings and inputs it refuses, and metadata that no longer fit its weights."""

import copy
import dataclasses
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from operator import delitem
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import hydra_ensembles as he
from checkpoint_models import ensemble, single
from hydra_ensembles.errors import ConfigError, HydraWarning
from hydra_ensembles.model.config import (
    EncoderConfig,
    EnsembleConfig,
    PatchStemConfig,
    ReadoutConfig,
    TextStemConfig,
)
from hydra_ensembles.model.ensemble import with_valid_metadata
from hydra_ensembles.model.metadata import Calibration, Metadata
from random_ensembles import random_batches, random_ensemble

IMAGES_24 = torch.randn(24, 3, 8, 8, generator=torch.Generator().manual_seed(0))
IMAGES = he.ImagePreprocessing((8, 8))
SIZES = {"width": 8, "layers": 2, "heads": 2, "head_dim": 4, "mlp_width": 16}
ENCODER, STEM, TEXT = EncoderConfig(**SIZES), PatchStemConfig((4, 4), (2, 2)), TextStemConfig(9, 8, 8)


def test_a_saved_model_is_loaded_and_called_with_pictures(tmp_path: Path) -> None:
    ensemble(single()).with_metadata(preprocessing=IMAGES).save_pretrained(tmp_path / "vit")
    picture, loaded = Image.fromarray(np.arange(300, dtype=np.uint8).reshape(10, 10, 3)), he.load(tmp_path / "vit")
    with torch.no_grad():
        for given in (picture, [picture, picture]):
            assert torch.equal(loaded(given), loaded(loaded.prepare(given)))
            assert torch.equal(loaded.optimize()(given), loaded.optimize()(loaded.prepare(given)))


def storages(model: he.Ensemble) -> list[int]:
    return [parameter.data_ptr() for parameter in model.parameters()]


def test_other_metadata_share_the_weights_and_nothing_else() -> None:
    model = ensemble(single()).train()
    before, inputs = model.metadata, torch.zeros(2, 3, 8, 8)
    changed = model.with_metadata(source="elsewhere", calibration=Calibration((2.0,)))
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
        made = he.Ensemble(EnsembleConfig(STEM, ENCODER, ReadoutConfig(num_classes=3), ENCODER.all_heads()))
    return he.Ensemble.from_state(made.config, made.state_dict(), Metadata(calibration=Calibration((2.0,), 0.5)))


@pytest.mark.parametrize(
    "around", [lambda one: one, torch.nn.DataParallel, lambda one: torch.nn.ModuleDict({"a": one})]
)
@pytest.mark.parametrize("assign", [False, True])
def test_other_weights_are_not_calibrated(around: Any, assign: bool) -> None:
    ours, other = measured(0), measured(1)
    with pytest.warns(he.HydraWarning, match="calibrate again"):
        around(ours).load_state_dict(around(other).state_dict(), assign=assign)
    assert ours.metadata.calibration is None
    assert torch.equal(ours.readout.classifier.weight, other.readout.classifier.weight)  # type: ignore[union-attr]


def skeleton(one: he.Ensemble) -> he.Ensemble:
    with torch.device("meta"):
        return he.Ensemble(one.config, one.metadata)


@pytest.mark.parametrize(
    ("target", "assign"),
    [
        (lambda one: one, False),  # a resumed run
        (lambda one: he.Ensemble(one.config, one.metadata), False),  # newly built, its own weights never measured
        (skeleton, True),
        (lambda one: one.with_metadata(labels=("a", "b", "c")).bfloat16(), False),
    ],
)
def test_weights_that_were_measured_stay_calibrated(target: Any, assign: bool) -> None:
    source = measured()
    before = source.metadata.calibration
    made, state = target(source), {name: one.clone() for name, one in measured().state_dict().items()}
    with warnings.catch_warnings(action="error"):
        made.load_state_dict(state, assign=assign)
    assert made.metadata.calibration == before
    with pytest.warns(he.HydraWarning, match="calibrate again"):  # the loaded weights are now the calibrated ones
        made.load_state_dict(measured(1).state_dict())


@torch.no_grad()
def scaled(one: he.Ensemble) -> None:
    one.encoder.layers[0].mlp.up.weight.mul_(2.0)


def through_data(one: he.Ensemble) -> None:
    one.readout.classifier.weight.data.mul_(2.0)  # type: ignore[union-attr]


def stepped(kind: Any, one: he.Ensemble) -> None:
    one(torch.randn(2, 3, 8, 8)).sum().backward()
    kind(one.parameters(), lr=0.1).step()


EDITS: dict[str, Callable[[Any], object]] = {
    "a step": partial(stepped, torch.optim.AdamW),
    "in place": scaled,
    "replaced": lambda one: setattr(one.readout.classifier, "weight", torch.nn.Parameter(torch.zeros(1, 3, 8))),
    "layers swapped": lambda one: setattr(one.encoder, "layers", torch.nn.ModuleList(reversed(one.encoder.layers))),
    "a layer cut": lambda one: delitem(one.encoder.layers, 1),
    "of a sibling": lambda one: scaled(one.with_metadata(labels=("a", "b", "c"))),
}
UNCOUNTED: dict[str, Callable[[Any], object]] = {  # detected only where all weights are read
    "through data": through_data,
    "rows swapped": lambda one: setattr(w := one.readout.classifier.weight, "data", w.data.flip(1)),
    "a fused step": partial(stepped, partial(torch.optim.SGD, fused=True)),
}
READING: dict[str, Callable[[Any, Path], object]] = {
    "save": lambda one, folder: one.save_pretrained(folder),
    "evaluate": lambda one, _: evaluated(one),
    "deepcopy": lambda one, _: copy.deepcopy(one),
    "optimize": lambda one, _: one.optimize(),
    "with_metadata": lambda one, _: one.with_metadata(labels=("a", "b", "c")),
    "member": lambda one, _: one.member(0),
    "prune": lambda one, _: he.prune(one, []),
    "double": lambda one, _: one.double(),
    "load_state_dict": lambda one, _: one.load_state_dict(one.state_dict()),
}
USES = READING | {"predict": lambda one, _: one.predict(torch.randn(2, 3, 8, 8)), "mask": lambda one, _: masked(one)}


def evaluated(one: he.Ensemble) -> None:
    he.evaluate(one, [(torch.randn(3, 3, 8, 8), torch.arange(3))], progress=False)


def masked(one: he.Ensemble) -> None:
    with he.masked(one, [(0, 0)]):
        pass


@pytest.mark.parametrize(
    ("edit", "use"),
    [
        *((edit, "predict") for edit in EDITS),
        *(("in place", use) for use in ("save", "evaluate", "mask", "deepcopy", "optimize")),
        *((edit, "save") for edit in UNCOUNTED),
        *(("through data", use) for use in READING if use != "save"),
    ],
)
def test_weights_that_were_edited_are_not_calibrated(edit: str, use: str, tmp_path: Path) -> None:
    ours = measured()
    (EDITS | UNCOUNTED)[edit](ours)
    with pytest.warns(he.HydraWarning, match="edited"):
        USES[use](ours, tmp_path / "a")
    assert ours.metadata.calibration is None


def test_tensors_of_inference_mode_stay_calibrated_and_what_is_made_there_is_none() -> None:
    """Torch does not count edits of inference tensors; edits of the ensemble made from them are counted."""
    one, images = measured(), torch.randn(1, 3, 8, 8)
    with torch.inference_mode():
        assert one.double().predict(images).threshold == 0.5
        made = he.Ensemble.from_state(one.config, one.state_dict(), one.metadata)
    assert made.predict(images).threshold == 0.5
    made(images.double()).sum().backward()
    EDITS["in place"](made)
    with pytest.warns(he.HydraWarning, match="edited"):
        assert made.predict(images).threshold is None


@pytest.mark.parametrize(
    "same",
    [
        lambda one: one.bfloat16(),
        lambda one: one.to("cpu").to(memory_format=torch.channels_last),
        lambda one: one.double().requires_grad_(True).train(),
        lambda one: copy.deepcopy(copy.deepcopy(one)),
        lambda one: pickle.loads(pickle.dumps(one)),
        lambda one: torch.nn.DataParallel(one).module,
        lambda one: one.with_metadata(labels=("a", "b", "c")),
    ],
)
def test_what_leaves_the_weights_alone_leaves_the_calibration(same: Any, tmp_path: Path) -> None:
    ours = measured()
    with he.masked(ours, [(0, 0)]):
        assert ours.predict(torch.randn(1, 3, 8, 8)).threshold == 0.5
    made = same(ours)
    with he.masked(made, [(0, 0)]):
        evaluated(made)
    made.save_pretrained(tmp_path / "a")
    assert made.metadata.calibration == Calibration((2.0,), 0.5)
    through_data(made)
    with pytest.warns(he.HydraWarning, match="edited"):
        made.save_pretrained(tmp_path / "a")


def test_what_another_preprocessing_was_measured_with_is_dropped() -> None:
    ours = measured().with_metadata(preprocessing=IMAGES)  # none was known before: no contradiction
    assert ours.metadata.calibration is not None
    with pytest.warns(he.HydraWarning, match="another preprocessing"):
        other = ours.with_metadata(preprocessing=dataclasses.replace(IMAGES, mean=(0.1, 0.1, 0.1)))
    assert (other.metadata.calibration, ours.metadata.calibration is not None) == (None, True)


@pytest.mark.parametrize(
    ("made", "deed"),
    [
        (lambda one, folder: (one.save_pretrained(folder), he.load(folder))[1], "saved"),
        (lambda one, _: copy.deepcopy(one), "copied"),
        (lambda one, _: pickle.loads(pickle.dumps(one)), "copied"),
        (lambda one, _: one.member(0), "taken apart"),
        (lambda one, _: he.prune(one, []), "pruned"),
        (lambda one, _: he.Ensemble.stack([one]), "joined"),
        (lambda one, _: one.optimize(plans=["loop"]), "optimized"),
        (lambda one, _: he.fit_familiarity(one, [(IMAGES_24, torch.arange(24) % 3)], "knn"), "fitted"),
    ],
)
def test_what_is_made_with_heads_masked_keeps_the_mask_and_no_calibration(made: Any, deed: str, tmp_path: Path) -> None:
    ours = measured()
    with he.masked(ours, [(0, 0)]):
        expected = ours(IMAGES_24)
        with pytest.warns(he.HydraWarning, match=f"{deed} with heads masked"):
            found = made(ours, tmp_path / "a")
        assert ours.predict(IMAGES_24).threshold == 0.5
    assert (found.metadata.calibration, found.metadata.metrics) == (None, {})
    assert f"{deed} with heads masked" in found.metadata.history
    torch.testing.assert_close(found(IMAGES_24), expected)
    prediction = found.predict(IMAGES_24)
    assert (prediction.threshold, prediction.temperature) == (None, (1.0,))
    assert ours.predict(IMAGES_24).threshold == 0.5


def test_what_was_measured_with_other_members_is_refused() -> None:
    """A score by the disagreement of members needs several members."""
    single, both, by_members = measured(), (measured(), measured(1)), Calibration((1.0,), 0.1, "mutual_information")
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
    config = EnsembleConfig(TEXT, ENCODER, ReadoutConfig(pool="mean", norm="none"), ENCODER.all_heads())
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


def test_training_a_calibrated_ensemble_by_hand_is_warned_of() -> None:
    ours, images = measured(), torch.randn(2, 3, 8, 8)
    with warnings.catch_warnings(action="error"):
        ours(images)  # gradients in eval mode, as for attributions and Taylor scores
        ours.train().predict(images)
    with pytest.warns(he.HydraWarning, match="calibrate it again"):
        ours(images)


DEEDS: list[tuple[str, Any]] = [
    ("saved", lambda one, folder: one.save_pretrained(folder)),
    ("optimized", lambda one, _: one.optimize()),
    ("calibrated", lambda one, _: he.calibrate(one, random_batches(one), share=0.5, familiarity=None)),
    ("fitted", lambda one, _: he.fit_familiarity(one, random_batches(one), "knn")),
    ("taken apart", lambda one, _: one.member(0)),
    ("pruned", lambda one, _: he.prune(one, [(0, 0)])),
    ("joined", lambda one, _: he.fuse([one, random_ensemble(seed=1)], stem="separate")),
    ("joined", lambda one, _: he.soup([one, random_ensemble(seed=1)])),
    ("joined", lambda one, _: he.Ensemble.stack([one, random_ensemble(seed=1)])),
]


@pytest.mark.parametrize(("deed", "make"), DEEDS)
@pytest.mark.filterwarnings("ignore:.*one start:hydra_ensembles.HydraWarning")
def test_what_is_made_of_weights_alone_tells_of_hooks_and_refuses_other_weights(deed: str, make: Any, tmp_path) -> None:
    """The result runs no hooks and cannot store computed weights (parametrized, or pruned by torch)."""
    hooked, computed = random_ensemble(), random_ensemble()
    hooked.encoder.layers[1].register_forward_hook(lambda module, given, found: found * 2)
    with pytest.warns(HydraWarning, match=rf"encoder\.layers\.1 has the forward hook .*lambda.* {deed} does not"):
        make(hooked, tmp_path)
    torch.nn.utils.parametrizations.weight_norm(computed.readout.classifier, "weight")
    if deed not in ("calibrated", "fitted"):
        with pytest.raises(ConfigError, match=r"readout\.classifier.*remove_parametrizations"):
            make(computed, tmp_path)
    assert with_valid_metadata(computed, "exported") is computed  # exported files trace the model
    with pytest.raises(ConfigError, match=r"readout\.classifier.*shape none expected, got \[1, 1, 1\]"):
        he.Ensemble.from_state(random_ensemble().config, computed.state_dict())

"""An optimized ensemble is evaluated as the ensemble it was made from."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_models import CLASSES, NAMES, image_batches, tiny_ensemble

from hydra_ensembles.data.dataset import ImageDataset
from hydra_ensembles.errors import ConfigError
from hydra_ensembles.evaluation.evaluate import evaluate
from hydra_ensembles.model.ensemble import Ensemble
from hydra_ensembles.model.metadata import Calibration

CALIBRATION = Calibration(temperature=(2.0, 1.0, 0.5), threshold=0.3)


def headless() -> Ensemble:
    model = tiny_ensemble()
    config = replace(model.config, readout=replace(model.config.readout, num_classes=0))
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("readout.classifier.")}
    return Ensemble.from_state(config, state, model.metadata)


def test_the_saved_calibration_is_applied() -> None:
    calibrated, data = tiny_ensemble().with_metadata(calibration=CALIBRATION), image_batches()
    found, expected = (evaluate(model, data, progress=False) for model in (calibrated.optimize(), calibrated))
    assert found.numbers().keys() == expected.numbers().keys()
    for name, number in expected.numbers().items():
        assert found.numbers()[name] == pytest.approx(number, rel=1e-4, abs=1e-6), name
    assert found.selective is not None
    assert found.model == expected.model
    assert found.model.calibration == CALIBRATION
    assert found.provenance.hardware == expected.provenance.hardware


def test_raw_items_go_through_the_saved_preprocessing() -> None:
    pillow = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, (8, 10, 9, 3), dtype=np.uint8)
    data = ImageDataset([pillow.fromarray(array) for array in pixels], [index % CLASSES for index in range(8)], NAMES)
    assert evaluate(tiny_ensemble().optimize(), data, progress=False).samples == {"data": 8}


def test_inputs_come_in_the_dtype_it_computes_in() -> None:
    fast = tiny_ensemble().optimize()
    data = [(images.double(), labels) for images, labels in image_batches()]
    assert evaluate(fast, data, progress=False).provenance.dtype == "float32"


def test_another_device_and_a_missing_classifier_are_refused() -> None:
    fast = tiny_ensemble().optimize()
    assert evaluate(fast, image_batches(), progress=False, device="cpu").model.members == 3
    with pytest.raises(ConfigError, match="runs on cpu and cannot be moved to meta"):
        evaluate(fast, image_batches(), progress=False, device=torch.device("meta"))
    with pytest.raises(ConfigError, match="no classifier"):
        evaluate(headless().optimize(), image_batches(), progress=False)

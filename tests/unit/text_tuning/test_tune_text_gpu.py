import dataclasses

import pytest
import torch
from tuning_cases import largest_gap, pairs, tiny_dual

from hydra_ensembles.training.recipe import Recipe
from hydra_ensembles.training.text import image_features, tune_text

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
RECIPE = Recipe(optimizer="sgd", learning_rate=0.02, epochs=2, schedule="constant", gradient_accumulation=3)


def test_a_gpu_tunes_as_the_cpu_does():
    dual = tiny_dual()
    expected = tune_text(dual, pairs(), RECIPE, train_image_projection=True, progress=False)
    found = tune_text(dual, pairs(), RECIPE, train_image_projection=True, device="cuda", progress=False)
    assert found.device.type == "cpu"
    assert largest_gap(expected, found) < 1e-4


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_on_features_that_lie_on_the_gpu(precision):
    dual = tiny_dual().to("cuda")
    features = image_features(dual, [images for images, _, _ in pairs()]).split(8)
    data = [(feature, texts, labels) for feature, (_, texts, labels) in zip(features, pairs(), strict=True)]
    recipe = dataclasses.replace(RECIPE, precision=precision)
    tuned = tune_text(dual, data, recipe, validation=data, progress=False)
    assert tuned.device.type == "cuda"
    exact = tune_text(dual, data, RECIPE, validation=data, progress=False)
    assert largest_gap(dual, tuned) > 0
    assert largest_gap(tuned, exact) < 0.02

"""Fine-tuning, text tuning and MC Dropout on a CUDA device."""

from dataclasses import replace

import pytest
import torch
from training_cases import Stopping, batches, largest_gap, pairs, tiny, tiny_dual

from hydra_ensembles.heads.masking import prune
from hydra_ensembles.model.ensemble import Ensemble
from hydra_ensembles.training.finetune import finetune
from hydra_ensembles.training.recipe import Recipe
from hydra_ensembles.training.text import tune_text

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
RECIPE = Recipe(optimizer="adamw", learning_rate=0.003, steps=8, clip_norm=1.0)
TEXT = Recipe(optimizer="sgd", learning_rate=0.02, epochs=2, schedule="constant", gradient_accumulation=3)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_a_gpu_trains_like_the_cpu(precision):
    member, data = tiny(members=2), batches()
    on_cpu = finetune(member, data, RECIPE, data, progress=False)
    recipe = replace(RECIPE, precision=precision)
    on_gpu = finetune(member, data, recipe, data, device="cuda", progress=False)
    assert on_gpu.device == member.device
    images = torch.cat([inputs for inputs, _ in data])
    tolerance = 2e-3 if precision == "float32" else 0.15
    torch.testing.assert_close(on_gpu(images), on_cpu(images), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_compiled_blocks_train_like_those_that_are_not(precision):
    member, data = Ensemble.stack([prune(tiny(), [(0, 0)]), prune(tiny(1), [(1, 1)])]), batches()
    recipes = [replace(RECIPE, precision=precision, compile=compiled) for compiled in (False, True)]
    plain, compiled = (finetune(member, data, recipe, device="cuda", progress=False) for recipe in recipes)
    images = torch.cat([inputs for inputs, _ in data])
    tolerance = 1e-3 if precision == "float32" else 0.1
    torch.testing.assert_close(compiled(images), plain(images), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_a_run_on_a_gpu_is_repeatable_resumable_and_leaves_no_trace(tmp_path, precision):
    member = tiny(dropout=0.2).to("cuda")
    recipe = replace(RECIPE, precision=precision)
    state = torch.cuda.get_rng_state()
    plain = batches()
    expected = finetune(member, plain, recipe, batches(seed=4), progress=False)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert expected.device.type == "cuda"
    options = {"output": tmp_path, "progress": False, "checkpoint_every": 1}
    with pytest.raises(KeyboardInterrupt):
        finetune(member, Stopping(plain, 5), recipe, batches(seed=4), **options)
    resumed = finetune(member, Stopping(plain), recipe, batches(seed=4), **options)
    for name, tensor in resumed.state_dict().items():
        torch.testing.assert_close(tensor, expected.state_dict()[name], atol=1e-5, rtol=1e-5)


def test_a_gpu_tunes_as_the_cpu_does():
    dual = tiny_dual()
    expected = tune_text(dual, pairs(), TEXT, train_image_projection=True, progress=False)
    found = tune_text(dual, pairs(), TEXT, train_image_projection=True, device="cuda", progress=False)
    assert found.device.type == "cpu"
    assert largest_gap(expected, found) < 1e-4

"""Fine-tuning and MC Dropout on a CUDA device."""

import dataclasses

import pytest
import torch
from finetune_cases import batches, shuffled, tiny

from hydra_ensembles.baselines.mc_dropout import mc_dropout
from hydra_ensembles.training.finetune import finetune
from hydra_ensembles.training.recipe import Recipe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
RECIPE = Recipe(optimizer="adamw", learning_rate=0.003, steps=8, clip_norm=1.0)


@pytest.mark.parametrize("precision", ["float32", "bf16", "fp16"])
def test_a_gpu_trains_like_the_cpu(precision):
    member, data = tiny(members=2), batches()
    on_cpu = finetune(member, data, RECIPE, data, progress=False)
    recipe = dataclasses.replace(RECIPE, precision=precision)
    on_gpu = finetune(member, data, recipe, data, device="cuda", progress=False)
    assert on_gpu.device == member.device
    images = torch.cat([inputs for inputs, _ in data])
    tolerance = 2e-3 if precision == "float32" else 0.15
    torch.testing.assert_close(on_gpu(images), on_cpu(images), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("precision", ["float32", "bf16", "fp16"])
def test_a_run_on_a_gpu_is_repeatable_resumable_and_leaves_no_trace(tmp_path, precision):
    member = tiny(dropout=0.2).to("cuda")
    recipe = dataclasses.replace(RECIPE, precision=precision)
    state = torch.cuda.get_rng_state()
    first = finetune(member, shuffled(), recipe, batches(seed=4), progress=False)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert first.device.type == "cuda"

    class Stopping(list):
        read = 0

        def __iter__(self):
            for batch in super().__iter__():
                type(self).read += 1
                if self.read == 6:
                    raise RuntimeError("stopped")
                yield batch

    plain = batches()
    expected = finetune(member, plain, recipe, batches(seed=4), progress=False)
    options = {"output": tmp_path, "progress": False, "checkpoint_every": 1}
    with pytest.raises(RuntimeError, match="stopped"):
        finetune(member, Stopping(plain), recipe, batches(seed=4), **options)
    resumed = finetune(member, plain, recipe, batches(seed=4), **options)
    for name, tensor in resumed.state_dict().items():
        torch.testing.assert_close(tensor, expected.state_dict()[name], atol=1e-5, rtol=1e-5)


def test_mc_dropout_on_a_gpu_depends_on_the_seed_only():
    images = batches()[0][0].to("cuda")
    view = mc_dropout(tiny().to("cuda"), 0.3, 5)
    state = torch.cuda.get_rng_state()
    answer = view(images)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    torch.cuda.manual_seed(3)
    torch.testing.assert_close(view(images), answer)
    assert answer.std(0).min() > 0

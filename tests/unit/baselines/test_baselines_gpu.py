"""Every baseline on a CUDA device: the numbers of the CPU, on the device of the model."""

from dataclasses import replace

import pytest
import torch
from baseline_cases import QUICK, single, some

import hydra_ensembles as he
from hydra_ensembles import baselines
from unit.training.training_cases import NAMES, pair_samples, pairs, tiny_dual

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
RECIPE = replace(QUICK, dropout=None)
TRAINED = {
    "lora": (baselines.lora_ensemble, baselines.LoRA(members=2, rank=2, training="together")),
    "batch_ensemble": (baselines.batch_ensemble, baselines.BatchEnsemble(members=2)),
    "mimo": (baselines.mimo, baselines.MIMO(members=2, batch_repeat=2)),
    "packed": (baselines.packed_ensemble, baselines.Packed(members=2, alpha=2.0, heads=5)),
    "oba": (baselines.oba, baselines.OBA(keep=0.9, steps=2, batches=2)),
    "deep_ensemble": (baselines.deep_ensemble, 2),
}


@pytest.mark.parametrize("method", TRAINED)
@pytest.mark.parametrize("there", [False, True], ids=["asked for", "already there"])
def test_training_on_a_gpu_is_that_of_the_cpu(method, there):
    make, settings = TRAINED[method]
    base = single()
    data = some(base)
    expected = make(base, data, RECIPE, settings, progress=False)
    found = make(base.to("cuda") if there else base, data, RECIPE, settings, progress=False, device="cuda")
    assert found.device.type == ("cuda" if there else "cpu")
    torch.testing.assert_close(found.cpu()(data[0][0]), expected(data[0][0]), atol=1e-6, rtol=1e-6)


def test_classifiers_of_a_posterior_on_a_gpu():
    base = single()
    data = some(base)
    expected = baselines.laplace(base, data)(data[0][0])
    found = baselines.laplace(base.to("cuda"), data)(data[0][0].cuda())
    torch.testing.assert_close(found.cpu(), expected, atol=1e-6, rtol=1e-6)


def test_zero_shot_methods_on_a_gpu():
    images, words = pair_samples(5)[0], ["cat of", "dog of", "the the", "red photo", "tree bus", "boat of"]

    def answers(device):
        dual = tiny_dual().to(device)
        posterior = baselines.bayes_vlm(dual, pairs())
        base = he.zero_shot(dual, NAMES)
        labelled = [(images, pair_samples(5)[1])]
        scored = baselines.neg_label(base, words, settings=baselines.NegLabel(share=1.0, groups=2))
        recipe = baselines.ViLU.recipe(epochs=2)
        scored = baselines.vilu(scored, labelled, recipe, baselines.ViLU(hidden=(8,)), progress=False)
        prediction = scored.predict(images.to(device))
        parts = posterior.probit(NAMES)(images.to(device)), posterior.zero_shot(NAMES, members=3)(images.to(device))
        return [one.cpu() for one in (*parts, prediction.score("neglabel"), prediction.score("vilu"))]

    for found, expected in zip(answers("cuda"), answers("cpu"), strict=True):
        torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-3)

"""All baselines in one table: every shape of model, pruned and zero-shot models, interruptions, refusals, a GPU."""

from dataclasses import replace
from itertools import cycle

import pytest
import torch
from baseline_cases import KINDS, QUICK, assert_resumes, single, some, weights

import hydra_ensembles as he
from hydra_ensembles import baselines
from hydra_ensembles.baselines import MIMO, OBA, BatchEnsemble, LoRA, Packed, ViLU
from hydra_ensembles.errors import CheckpointError, ConfigError
from random_ensembles import ALL_SHAPES, SHAPES
from unit.training.training_cases import NAMES, pair_samples, pairs, tiny_dual

ONE = replace(QUICK, steps=1)
METHODS = {
    "lora": (baselines.lora_ensemble, LoRA(members=2, rank=2, training="together")),
    "batch": (baselines.batch_ensemble, BatchEnsemble(members=2)),
    "deep": (baselines.deep_ensemble, 2),
    "mimo": (baselines.mimo, MIMO(members=2, batch_repeat=1)),
    "oba": (baselines.oba, OBA(keep=0.9, steps=1, batches=1)),
}
PACKED = (baselines.packed_ensemble, Packed(members=2, alpha=6.0))  # sizes that fit the smallest model


def assert_runs(found, inputs):
    logits = found(inputs)
    assert logits.isfinite().all()
    torch.testing.assert_close(found.optimize(plans=["batched"])(inputs), logits)


@pytest.mark.parametrize(
    "shape", [pytest.param(one, marks=[pytest.mark.slow] * (one not in SHAPES)) for one in ALL_SHAPES]
)
def test_every_shape(shape):
    base = single(shape)
    data, before = some(base, (4,)), weights(base)
    for name, (make, settings) in METHODS.items():
        if name != "mimo" or base.kind == "image":
            assert_runs(make(base, data, ONE, settings, progress=False), data[0][0])
    if shape != "image-distilled-registers":  # it has two classifiers
        assert_runs(baselines.laplace(base, data), data[0][0])
    assert all(torch.equal(tensor, before[name]) for name, tensor in base.state_dict().items())  # not modified


@pytest.mark.parametrize("name", METHODS)
def test_pruned_models_keep_their_heads_and_zero_shot_ones_their_classes(name):
    gone = [(0, 1), (0, 3), *((2, head) for head in range(4))]  # leaves one layer without heads
    make, settings = METHODS[name]
    base = he.prune(single(), gone)
    found = make(base, some(base, (4,)), ONE, settings, progress=False)
    assert set(found.heads) == {base.heads[0]}
    assert_runs(found, some(base, (4,))[0][0])
    base, data = he.zero_shot(tiny_dual(), NAMES), [pair_samples(8)]
    if name == "mimo":
        with pytest.raises(ConfigError, match="zero-shot"):
            make(base, data, ONE, settings, progress=False)
        return
    found = make(base, data, ONE, settings, progress=False)
    assert found(data[0][0]).shape == (found.num_members, 8, len(NAMES))


RESUMED = [
    (baselines.lora_ensemble, LoRA(members=2, rank=2), 6, True),  # in the second member
    (*METHODS["lora"], 3, True),
    (*METHODS["batch"], 3, False),
    (*METHODS["deep"], 6, False),
    (baselines.oba, OBA(keep=0.8, steps=3, batches=2), 3, True),
]
IMAGES_ALONE = [(baselines.mimo, MIMO(members=3, batch_repeat=2), 3, False), (*PACKED, 3, False)]


@pytest.mark.parametrize(
    ("kind", "make", "settings", "stop", "other"),
    [
        *((kind, *case) for kind, case in zip(cycle(KINDS), RESUMED, strict=False)),
        *((KINDS[0], *case) for case in IMAGES_ALONE),
    ],
)
def test_a_stopped_run_goes_on_and_another_one_does_not(kind, make, settings, stop, other, tmp_path, monkeypatch):
    base = single(kind)

    def run(settings=settings, **options):
        return make(base, some(base), QUICK, settings, progress=False, **options)

    assert_resumes(run, tmp_path, monkeypatch, stop)
    if other:
        changes = {"rank": 1} if isinstance(settings, LoRA) else {"keep": 0.9}
        with pytest.raises(CheckpointError, match=r"settings|model"):
            run(replace(settings, **changes), output=tmp_path)


NO_DROPOUT = replace(QUICK, dropout=None)


def on_a_gpu(test):
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")(test))


@on_a_gpu
@pytest.mark.parametrize("there", [False, True], ids=["asked for", "already there"])
@pytest.mark.parametrize(("make", "settings"), [*METHODS.values(), PACKED])
def test_training_on_a_gpu_is_that_of_the_cpu(make, settings, there):
    base = single()
    data = some(base)
    expected = make(base, data, NO_DROPOUT, settings, progress=False)
    found = make(base.to("cuda") if there else base, data, NO_DROPOUT, settings, progress=False, device="cuda")
    assert found.device.type == ("cuda" if there else "cpu")
    torch.testing.assert_close(found.cpu()(data[0][0]), expected(data[0][0]), atol=1e-6, rtol=1e-6)


@on_a_gpu
def test_classifiers_of_a_posterior_and_zero_shot_methods_on_a_gpu():
    base = single()
    data = some(base)
    expected = baselines.laplace(base, data)(data[0][0])
    found = baselines.laplace(base.to("cuda"), data)(data[0][0].cuda())
    torch.testing.assert_close(found.cpu(), expected, atol=1e-6, rtol=1e-6)
    images = pair_samples(5)[0]

    def answers(device):
        dual = tiny_dual().to(device)
        posterior = baselines.bayes_vlm(dual, pairs())
        recipe, labelled = he.Recipe.preset("vilu", epochs=2), [(images, pair_samples(5)[1])]
        scored = baselines.vilu(he.zero_shot(dual, NAMES), labelled, recipe, ViLU(hidden=(8,)), progress=False)
        prediction = scored.predict(images.to(device))
        closed = posterior.probit(NAMES)
        return [one.cpu() for one in (closed(images.to(device)), prediction.score("vilu"))]

    for found, expected in zip(answers("cuda"), answers("cpu"), strict=True):
        torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-3)


CALM = replace(ONE, dropout=None)


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (baselines.deep_ensemble, 2),  # one order, no dropout
        (baselines.mimo, MIMO(members=2, rho=1.0, batch_repeat=1)),
    ],
)
def test_members_that_training_leaves_equal_are_said(make, settings):
    base = single()
    data = some(base, (4,))
    with pytest.warns(he.HydraWarning, match="never disagree"):
        found = make(base, data, CALM, settings, progress=False)
    assert torch.equal(*found(data[0][0]))
    with pytest.warns(he.HydraWarning, match="members 0 and 1"):
        he.fuse([found])

"""BatchEnsemble: scales multiplied into weights answer like layers that apply them."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from baseline_cases import KINDS, QUICK, assert_an_ensemble, single, some
from torch.nn import functional as F

import hydra_ensembles as he
from hydra_ensembles.baselines.batch_ensemble import BatchEnsemble, Scaled, batch_ensemble
from hydra_ensembles.baselines.building_blocks import joined
from hydra_ensembles.model.config import Sharing
from hydra_ensembles.model.member_states import member_state
from hydra_ensembles.training.finetune import EnsembleLearner
from hydra_ensembles.training.loop import Runtime
from hydra_ensembles.training.recipe import Recipe

SMALL = BatchEnsemble(members=2, deviation=0.3)
ALL = Sharing(stem=True, norms=True)
RECIPE = Recipe(learning_rate=1.0, steps=1)


def by_hand(base, scaled, member, inputs):
    """One member's logits with `y = ((x ∘ r) Wᵀ) ∘ s + b` written out, in layers with and without scales."""
    state, config = base.state_dict(), base.config
    own = member_state(scaled.ensemble.config, scaled.ensemble.state_dict(), member)  # for its biases
    heads, width = config.encoder.heads, config.encoder.head_dim
    act = {"gelu": F.gelu, "relu": F.relu}[config.encoder.activation]

    def scale(part, name):
        found = getattr(scaled, part).get(name.replace(".", "/"))
        return torch.ones((), dtype=base.dtype) if found is None else found[member].flatten()

    def linear(x, name, weight, bias_name):
        return F.linear(x * scale("inputs", name), weight) * scale("outputs", name) + own[bias_name].flatten()

    def norm(x, name):
        weight, shift = state[name + ".weight"][0], state[name + ".bias"][0]
        return F.layer_norm(x, weight.shape, weight, shift, config.encoder.norm_eps) * scale("inputs", name + ".weight")

    def attention(x, place):
        qkv, out = state[place + "qkv"], state[place + "out"]
        mapped = linear(x, place + "qkv", qkv.flatten(0, 2), place + "qkv_bias")
        q, k, v = mapped.unflatten(-1, (heads, 3, width)).permute(3, 0, 2, 1, 4)  # each [B, h, T, d_k]
        mask = None if key_mask is None else key_mask[:, None, None, :]
        z = F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)
        return linear(z, place + "out", out.flatten(0, 1).T, place + "out_bias")

    def mlp(x, place):
        hidden = act(linear(x, place + "up.weight", state[place + "up.weight"][0], place + "up.bias"))
        return linear(hidden, place + "down.weight", state[place + "down.weight"][0], place + "down.bias")

    def layer_scale(place):
        return state[place + "scale"][0] if config.encoder.layer_scale else 1.0

    x, (key_mask, *_) = base.embed(*base.unpack(inputs))
    x = x[0]
    for layer in range(config.encoder.layers):
        place = f"encoder.layers.{layer}."
        if config.encoder.norm_first:
            x = x + attention(norm(x, place + "norm1"), place + "attention.") * layer_scale(place + "attention.")
            x = x + mlp(norm(x, place + "norm2"), place + "mlp.") * layer_scale(place + "mlp.")
        else:
            x = norm(x + attention(x, place + "attention."), place + "norm1")
            x = norm(x + mlp(x, place + "mlp."), place + "norm2")
    pooled = x[:, base.readout.prefix :].mean(1) if config.readout.pool == "mean" else x[:, 0]
    x = pooled if config.readout.norm == "none" else norm(pooled, "readout.norm")
    if config.readout.hidden:
        x = torch.tanh(linear(x, "readout.hidden.weight", state["readout.hidden.weight"][0], "readout.hidden.bias"))
    return linear(x, "readout.classifier.weight", state["readout.classifier.weight"][0], "readout.classifier.bias")


@pytest.mark.parametrize(
    ("kind", "settings", "sharing", "trunk"),
    [
        ("image-cls", SMALL, ALL, 0),
        ("text-post-norm", SMALL, ALL, 0),
        ("image-cls", replace(SMALL, last_layers=1), ALL, 2),
        ("image-mean-layerscale", SMALL, ALL, 0),  # as DINOv2
    ],
    ids=["image", "text", "last", "layerscale"],
)
def test_multiplied_and_folded_scales_answer_as_scaled_layers(kind, settings, sharing, trunk):
    base, inputs = single(kind), some(single(kind))[0][0]
    scaled = Scaled(joined([base] * 2, sharing, trunk), settings, RECIPE, seed=3)
    with torch.no_grad():  # separate biases as well
        for name, parameter in scaled.ensemble.named_parameters():
            if name.endswith("bias") and "norm" not in name and parameter.shape != base.get_parameter(name).shape:
                parameter.add_(torch.randn_like(parameter))
    merged = he.Ensemble.from_state(scaled.ensemble.config, scaled.whole())
    answers = merged(inputs)
    torch.testing.assert_close(scaled(inputs), answers)
    for member in range(2):
        torch.testing.assert_close(answers[member], by_hand(base, scaled, member, inputs))
    assert (answers[0] - answers[1]).abs().min() > 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_training_moves_scales_shared_weights_and_own_biases(kind, tmp_path):
    base = single(kind)
    found = batch_ensemble(base, some(base), QUICK, replace(SMALL, last_layers=2), progress=False)
    assert found.config.trunk == base.num_layers - 2
    first, second = (found.member(index).state_dict() for index in range(2))
    name = "encoder.layers.2.mlp.up.weight"
    ratio = (first[name] / second[name])[0]
    assert torch.linalg.matrix_rank(ratio, tol=1e-8) == 1  # members differ only by row and column scales
    assert not torch.equal(first["encoder.layers.2.mlp.up.bias"], second["encoder.layers.2.mlp.up.bias"])
    assert torch.equal(first["encoder.layers.2.norm1.weight"], second["encoder.layers.2.norm1.weight"])
    assert_an_ensemble(found, base, tmp_path / "saved")


def test_scales_never_decay_and_learn_at_their_own_rate_as_classifiers_do():
    recipe, start = replace(RECIPE, weight_decay=0.1, classifier_rate=4.0), joined([single()] * 2, ALL)
    faster = partial(Scaled, settings=replace(SMALL, rate=2.0), recipe=recipe, seed=0)
    learner = EnsembleLearner(start, recipe, Runtime(torch.device("cpu")), 0, faster)
    groups = learner.optimizer.param_groups
    found = {id(one): (group["weight_decay"], group["share"]) for group in groups for one in group["params"]}
    for name, one in learner.trained.items():
        own = name.startswith(("inputs.", "outputs."))
        decay = 0.0 if own or name.endswith("bias") or "norm" in name else 0.1
        assert found[id(one)] == (decay, 2.0 if own else 4.0 if "classifier" in name else 1.0), name

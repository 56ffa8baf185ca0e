"""LoRA-Ensemble: merged updates equal peft's adapters, only updates and classifiers change, runs resume."""

import warnings
from dataclasses import replace

import pytest
import torch
from baseline_cases import QUICK, assert_an_ensemble, single, some, weights

import hydra_ensembles as he
from architectures_transformers import TEXT, VISION, token_batch, transformers_model
from hydra_ensembles.baselines.lora import LoRA, LowRank, lora_ensemble
from hydra_ensembles.training.recipe import Recipe

SMALL = LoRA(members=2, rank=2)
TOGETHER = replace(SMALL, training="together")


def train(model, settings=SMALL, recipe=QUICK, **options):
    return lora_ensemble(model, some(model), recipe, settings, progress=False, **options)


CASES = {
    "vit": ("ViTForImageClassification", {**VISION, "intermediate_size": 64}),
    "bert": ("BertForSequenceClassification", TEXT),
}


PATHS = {  # names of the four projections in transformers
    "vit": {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "o_proj"},
    "bert": {"query": "self.query", "key": "self.key", "value": "self.value", "out": "attention.output.dense"},
}


def adapters(model, case, count):
    """The model with peft adapters on its four projections, and the adapted layers under the names of `LowRank`."""
    peft, paths = pytest.importorskip("peft"), PATHS[case]
    wanted = [one for one, _ in model.named_modules() if "attention" in one and one.endswith(tuple(paths.values()))]
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=wanted)
    adapted = peft.get_peft_model(model, config, "0")
    for number in range(1, count):
        adapted.add_adapter(str(number), config)
    layers = {}
    for name, part in adapted.named_modules():
        if hasattr(part, "lora_A"):
            layer = next(int(piece) for piece in name.split(".") if piece.isdigit())
            layers[f"{layer}_{next(key for key, path in paths.items() if name.endswith(path))}"] = part
    return adapted.eval(), layers


@pytest.mark.parametrize("case", CASES)
def test_the_merged_updates_are_the_adapters_of_peft(case):
    model = transformers_model(*CASES[case]).eval()
    base = he.convert(model)
    inputs = token_batch(0, segments=True) if case == "bert" else {"pixel_values": torch.randn(3, 3, 32, 32)}
    ours = LowRank(base, LoRA(members=1, rank=3, alpha=6.0), Recipe(learning_rate=1.0, steps=1), seed=0)
    adapted, layers = adapters(model, case, 1)
    assert len(layers) == 4 * base.num_layers
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, part in layers.items():
            for mine, theirs in ((ours.down, part.lora_A), (ours.up, part.lora_B)):
                values = torch.randn(theirs["0"].weight.shape, generator=generator)
                theirs["0"].weight.copy_(values)
                mine[key].copy_(values[None])
        expected = adapted(**inputs).logits
        assert (expected - base(inputs)[0]).abs().max() > 1e-2
        merged = he.Ensemble.from_state(base.config, ours.whole())
        for answer in (ours(inputs)[0], merged(inputs)[0]):
            torch.testing.assert_close(answer, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("image-cls", SMALL), ("text-post-norm", TOGETHER), ("image-cls", replace(SMALL, members=1))],
    ids=["apart", "together", "single"],
)
def test_members_differ_in_attention_and_classifier_alone(kind, settings, tmp_path):
    base = single(kind)
    base.encoder.requires_grad_(False)
    before = weights(base)
    with warnings.catch_warnings(action="error"):  # no warning that frozen weights train
        found = train(base, settings, replace(QUICK, reinit_classifier="random"))
    assert found.num_members == settings.members
    for index in range(found.num_members):
        member = found.member(index)
        moved = {name for name, tensor in member.state_dict().items() if not torch.equal(tensor, before[name])}
        parts = {name.split(".")[-1] if "attention" in name else name for name in moved}
        assert parts == {"qkv", "out", "readout.classifier.weight", "readout.classifier.bias"}
        for layer in range(base.num_layers):
            name = f"encoder.layers.{layer}.attention.out"
            change = (member.state_dict()[name] - before[name]).flatten(0, 1)  # [h·d_k, d]
            assert torch.linalg.matrix_rank(change, tol=1e-10) <= settings.rank
    if settings.members > 1:
        assert not torch.equal(found.member(0)(some(base)[0][0]), found.member(1)(some(base)[0][0]))
    assert_an_ensemble(found, base, tmp_path / "saved")

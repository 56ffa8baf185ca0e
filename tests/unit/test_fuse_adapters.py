"""Adapters of peft over one model: the fused ensemble answers as they do in turn, and shares what they leave alone."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import hydra_ensembles as he
from architectures_decoders import texts
from architectures_transformers import TEXT, transformers_model
from cli_cases import succeed
from hydra_ensembles.errors import ConfigError, ConversionError
from hydra_ensembles.model.config import LowRank
from hydra_ensembles.model.cost import multiply_adds
from lora_models import SEQUENCES, TRANSPOSED, adapted, bert, gpt2, llama, peft

ALL = {"inputs": 4, "out": 2, "up": 4, "down": 2}
LAST: dict[str, Any] = {"layers_to_transform": [1]}
CASES: dict[
    str, tuple[Callable[[], Any], dict[str, Any], set[str], int, dict[str, int]]
] = {  # adapters; what is per member; trunk; factors
    "attention": (llama, {"target_modules": ["q_proj", "v_proj"]}, set(), 0, {"inputs": 3}),
    "top": (llama, {"target_modules": ["q_proj", "o_proj"], **LAST}, set(), 1, {"inputs": 3, "out": 3}),
    "mlp-and-head": (llama, {"target_modules": ["up_proj"], **LAST, **SEQUENCES}, {"readout"}, 1, {"up": 3}),
    "everything": (llama, {"target_modules": "all-linear", "r": 2, **SEQUENCES}, {"readout"}, 0, ALL),
    "large-rank": (llama, {"target_modules": ["k_proj"], "r": 40}, {"attention"}, 0, {}),
    "dora": (llama, {"target_modules": ["k_proj", "down_proj"], "use_dora": True}, {"attention", "mlp"}, 0, {}),
    "bert": (bert, {"target_modules": ["query", "value"], **SEQUENCES}, {"readout"}, 0, {"inputs": 6}),
    "gpt2": (gpt2, {**TRANSPOSED, "r": 2, **SEQUENCES}, {"readout"}, 0, {"inputs": 2, "out": 2, "down": 2}),
    "head": (llama, {"target_modules": ["q_proj"], "init_lora_weights": True, **SEQUENCES}, {"readout"}, 2, {}),
}


def saved(folder: Path, build: Callable[[], Any], settings: dict[str, Any], count: int = 3) -> tuple[list[Path], Any]:
    """Folders of adapters, and the answers of each, `[M, B, C]`."""
    folders, answers = [folder / f"adapter-{seed}" for seed in range(count)], []
    for seed, place in enumerate(folders):
        model = adapted(build(), seed, **settings)
        if "init_lora_weights" in settings:  # only the classifiers differ
            for name, one in model.named_parameters():
                one.data *= 0 if "lora_B" in name else 1
        model.save_pretrained(place)
        answers.append(model(**texts()).logits)
    return folders, torch.stack(answers)


def alike(found: Tensor, expected: Tensor) -> None:
    assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()


@pytest.mark.parametrize("case", CASES)
def test_fused_adapters_answer_as_in_turn(case: str, tmp_path: Path) -> None:
    build, settings, apart, trunk, ranks = CASES[case]
    folders, expected = saved(tmp_path, build, settings)
    model = build()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    hydra = he.fuse(model, adapters=folders)
    alike(hydra(texts()), expected)
    sharing = hydra.config.sharing
    assert {group for group in ("stem", "attention", "mlp", "norms", "readout") if not getattr(sharing, group)} == apart
    assert hydra.config.trunk == trunk
    assert {name: rank for name, rank in vars(hydra.config.updates).items() if rank} == ranks
    loaded = [peft.PeftModel.from_pretrained(build(), folder) for folder in folders]
    again = he.fuse(model, adapters=loaded)
    assert all(torch.equal(one, again.state_dict()[name]) for name, one in hydra.state_dict().items())
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    hydra.save_pretrained(tmp_path / "hydra")
    assert torch.equal(he.load(tmp_path / "hydra")(texts()), hydra(texts()))
    alike(hydra.optimize(compile=False)(texts()), expected)
    alike(hydra.member(1)(texts())[0], expected[1])


@torch.no_grad()
def test_factors_are_fewer_numbers_and_counted(tmp_path: Path) -> None:
    """Multiply-adds are those that the layers do, but for the shortcut of the last block."""
    settings = {"target_modules": ["q_proj", "o_proj", "up_proj"]}
    folders, _ = saved(tmp_path, llama, settings)
    hydra, ids = he.fuse(llama(), adapters=folders), torch.ones(1, 80, dtype=torch.long)
    alone = hydra.without_updates()
    assert alone.config.updates == LowRank()
    alike(hydra(texts()), alone(texts()))
    assert hydra.describe().parameters < alone.describe().parameters
    counted = {}
    for name, model in (("factors", hydra), ("alone", alone)):
        x, context = model.embed(ids, torch.ones_like(ids))
        with FlopCounterMode(display=False) as counter:
            for layer in model.encoder.layers:
                x = layer(x, context)
        counted[name] = counter.get_total_flops() // 2
    expected = multiply_adds(hydra.config, 80) - multiply_adds(alone.config, 80)
    assert counted["factors"] - counted["alone"] == expected
    alike(he.Ensemble.stack([hydra])(texts()), hydra(texts()))
    alike(hydra.with_prefix([5, 6])(texts()), alone.with_prefix([5, 6])(texts()))


def test_gradients_are_those_of_the_adapters_together(tmp_path: Path) -> None:
    settings = {"target_modules": ["q_proj", "up_proj"]}
    folders, _ = saved(tmp_path, llama, settings)
    hydra = he.fuse(llama(), adapters=folders)
    hydra(texts()).square().sum().backward()
    total = torch.zeros(())
    for folder in folders:
        model = peft.PeftModel.from_pretrained(llama(), folder)
        words = model.get_input_embeddings().weight.requires_grad_(True)
        model(**texts()).logits.square().sum().backward()
        total = total + words.grad
    alike(hydra.get_parameter("stem.words").grad[0], total)


def test_a_folder_and_its_adapters_are_enough(tmp_path: Path) -> None:
    folders, expected = saved(tmp_path, llama, {"target_modules": ["q_proj"], **SEQUENCES})
    llama().save_pretrained(tmp_path / "classifier")
    hydra = he.fuse(tmp_path / "classifier", adapters=folders)
    alike(hydra(texts()), expected)
    alike(he.fuse(llama(), adapters=folders, prefix=[5, 7])(texts()), hydra.with_prefix([5, 7])(texts()))
    language = llama("LlamaForCausalLM")
    language.model.load_state_dict(llama().model.state_dict())
    language.save_pretrained(tmp_path / "language")
    alike(he.fuse(str(tmp_path / "language"), adapters=folders)(texts()), expected)


def test_the_command_line_fuses_adapters(tmp_path: Path) -> None:
    folders, expected = saved(tmp_path, llama, {"target_modules": ["q_proj"], **SEQUENCES}, 2)
    llama().save_pretrained(tmp_path / "model")
    given = [part for folder in folders for part in ("--adapter", folder)]
    assert "fused 2 adapters" in succeed("fuse", tmp_path / "model", *given, "-o", tmp_path / "out")
    alike(he.load(tmp_path / "out")(texts()), expected)


def test_one_adapter_is_merged(tmp_path: Path) -> None:
    folders, expected = saved(tmp_path, llama, {"target_modules": ["q_proj"]}, 1)
    alike(he.fuse(llama(), adapters=folders)(texts()), expected)


def test_adapters_of_another_base_are_refused(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"target_modules": ["q_proj"]}
    (folder,), _ = saved(tmp_path, llama, settings, 1)
    with pytest.raises(ConversionError, match="adapter 0 is of another base, which differs in shape"):
        he.fuse(llama(hidden_size=48), adapters=[folder])
    with pytest.raises(ConversionError, match=r"adapter 0 is of another base: .*only one of both"):
        he.fuse(llama(num_hidden_layers=3), adapters=[folder])
    other = llama()
    other.model.norm.weight.data += 1
    with pytest.raises(ConversionError, match=r"adapter 1 is of another base: model\.norm\.weight differs"):
        he.fuse(llama(), adapters=[folder, adapted(other, **settings)])
    written = folder / "adapter_config.json"
    written.write_text(json.dumps({**json.loads(written.read_text()), "base_model_name_or_path": "someone/else"}))
    mine = llama()
    mine.config._name_or_path = "mine/this"
    with pytest.raises(ConversionError, match="someone/else, not mine/this; if it is the same, load it"):
        he.fuse(mine, adapters=[folder])
    with pytest.raises(ConversionError, match="the model they are for, or its folder; got a PeftModel"):
        he.fuse(adapted(llama(), **settings), adapters=[folder])
    with pytest.raises(ConfigError, match="fuse has no settings"):
        he.fuse([he.convert(llama())], processor=None)


def test_adapters_are_calibrated_like_any_model(tmp_path: Path) -> None:
    folders, _ = saved(
        tmp_path,
        lambda: transformers_model("BertForSequenceClassification", TEXT).eval(),
        {"target_modules": ["query"]},
    )
    hydra = he.fuse(bert(), adapters=folders)
    batches = [(texts(), torch.tensor([0, 1, 2])) for _ in range(10)]
    assert he.calibrate(hydra, batches, share=0.9).predict(texts()).accept.shape == (3,)

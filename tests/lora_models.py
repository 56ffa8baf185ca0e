"""Small random models with adapters of peft."""

from typing import Any

import pytest
import torch

from architectures_decoders import GROUPED, PLAIN
from architectures_transformers import TEXT, transformers_model

peft = pytest.importorskip("peft", reason="peft is not installed")
SEQUENCES: dict[str, Any] = {"task_type": "SEQ_CLS"}


GPT2: dict[str, Any] = {
    name: PLAIN[name] for name in ("vocab_size", "num_hidden_layers", "num_attention_heads", "hidden_size")
} | {
    "pad_token_id": 3,
    "num_labels": 5,
}
TRANSPOSED: dict[str, Any] = {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}


def gpt2() -> Any:
    return transformers_model("GPT2ForSequenceClassification", GPT2).eval()


def llama(kind: str = "LlamaForSequenceClassification", **settings: Any) -> Any:
    return transformers_model(kind, {**GROUPED, **settings}).eval()


def bert() -> Any:
    return transformers_model("BertForSequenceClassification", TEXT).eval()


def adapted(model: Any, seed: int = 0, kind: str = "LoraConfig", **settings: Any) -> Any:
    """The model with an adapter that changes its answers."""
    settings = {"r": 3, "lora_alpha": 12, **settings} if kind == "LoraConfig" else settings
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        found = peft.get_peft_model(model, getattr(peft, kind)(**settings))
        for name, parameter in found.named_parameters():
            if parameter.requires_grad:
                noise = torch.randn_like(parameter)
                parameter.data += 0.3 * noise if "lora_" in name or "ia3" in name else 0.1 * noise
    return found.eval()

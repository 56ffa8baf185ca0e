"""Small random decoders of transformers, one of each family at its own odd settings."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from architectures import ArchitectureCase, Inputs
from architectures_transformers import transformers_model

PAD = 3
_SIZES = {"vocab_size": 60, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
_SPECIAL = {"pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": 2, "num_labels": 5}
PLAIN = {**_SIZES, **_SPECIAL, "intermediate_size": 48, "max_position_embeddings": 512}
GROUPED = {**PLAIN, "num_key_value_heads": 2}
_LOCAL = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
_GEMMA = {**GROUPED, "head_dim": 12, "num_key_value_heads": 1, "query_pre_attn_scalar": 20}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_STILL = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
_NEOX = {**PLAIN, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
GRANITE = {"attention_multiplier": 0.3, "residual_multiplier": 0.4, "embedding_multiplier": 3.0}


def scaled(kind: str, **more: Any) -> dict[str, Any]:
    """Rotary positions with a scaling."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, **more}}


def texts(tokens: int = 9, left: bool = False) -> Inputs:
    """Texts of `tokens` tokens, half of them and one, padded on one side."""
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(4, 60, (3, tokens), generator=generator)
    lengths = torch.tensor([tokens, (tokens + 1) // 2, 1])[:, None]
    places = torch.arange(tokens)[None]
    mask = places >= tokens - lengths if left else places < lengths
    return {"input_ids": ids.masked_fill(~mask, PAD), "attention_mask": mask.long()}


def _logits(model: Any, inputs: Inputs) -> Tensor:
    return model(**inputs).logits


def _case(label: str, stem: str, settings: dict[str, Any]) -> ArchitectureCase:
    build = partial(transformers_model, f"{stem}ForSequenceClassification", settings)
    return ArchitectureCase(f"transformers-{label}", build, texts, _logits, "text")


CASES: list[ArchitectureCase] = [
    _case("llama", "Llama", {**GROUPED, **scaled("llama3", **_LLAMA3, original_max_position_embeddings=16)}),
    _case("llama-plain", "Llama", {**PLAIN, "attention_bias": True, "mlp_bias": True}),
    _case("mistral", "Mistral", {**GROUPED, "head_dim": 12, "sliding_window": 6}),
    _case("qwen2", "Qwen2", {**GROUPED, **scaled("linear")}),
    _case("qwen3", "Qwen3", {**GROUPED, "head_dim": 12, **scaled("yarn", original_max_position_embeddings=16)}),
    _case("gemma", "Gemma", {**GROUPED, "head_dim": 12, "num_key_value_heads": 1}),
    _case("gemma2", "Gemma2", {**_GEMMA, **_LOCAL, "attn_logit_softcapping": 3.0}),
    _case("gemma3", "Gemma3Text", {**_GEMMA, **_LOCAL}),
    _case("smollm3", "SmolLM3", {**GROUPED, "no_rope_layers": [1, 0]}),
    _case("olmo", "Olmo", {**GROUPED, **scaled("dynamic")}),
    _case("olmo2", "Olmo2", {**GROUPED, "attention_bias": True}),
    _case("phi", "Phi", {**_NEOX, "qk_layernorm": True}),
    _case("phi3", "Phi3", {**GROUPED, "sliding_window": 7}),
    _case("gpt2", "GPT2", {**_SIZES, **_SPECIAL, "n_positions": 512, **_STILL}),
    _case("neox", "GPTNeoX", _NEOX),
    _case("neox-in-turn", "GPTNeoX", {**_NEOX, "use_parallel_residual": False}),
]
_IN_CONTRACT = [f"transformers-{name}" for name in ("llama", "olmo2", "gpt2", "neox")]
CONTRACT = [case for case in CASES if case.name in _IN_CONTRACT]

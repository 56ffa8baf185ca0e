"""Decoders of transformers as classifiers: one table for all families, made by what their blocks consist of.

A family is a line in `FAMILIES`. What its blocks look like (norms before, after or around the sublayers, gates, biases,
groups of heads, rotations, windows, soft caps) is read from the live modules and the names of their tensors.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .._utils import warn
from ..errors import ConversionError
from ..model.config import EncoderConfig, EnsembleConfig, NormKind, ReadoutConfig, RotaryConfig
from ..model.ensemble import Ensemble
from ..model.metadata import Metadata
from ..preprocessing import TEXT, TextPreprocessing
from . import core
from .core import (
    Architecture,
    Entries,
    Found,
    NamedTensors,
    Source,
    Weights,
    activation_of,
    as_stored,
    concatenated,
    out_by_head,
    qkv_by_head,
    transposed,
)
from .processors import SPARE_WORDS, with_processor
from .transformers import metadata_of_classifier, plain_base, read_classifier

FAMILIES: dict[str, tuple[str, str]] = {  # name -> (module of transformers, beginning of its classes)
    "Llama": ("llama", "Llama"),
    "Mistral": ("mistral", "Mistral"),
    "Qwen 2": ("qwen2", "Qwen2"),
    "Qwen 3": ("qwen3", "Qwen3"),
    "Gemma": ("gemma", "Gemma"),
    "Gemma 2": ("gemma2", "Gemma2"),
    "Gemma 3": ("gemma3", "Gemma3Text"),
    "SmolLM 3": ("smollm3", "SmolLM3"),
    "OLMo": ("olmo", "Olmo"),
    "OLMo 2": ("olmo2", "Olmo2"),
    "Phi": ("phi", "Phi"),
    "Phi-3": ("phi3", "Phi3"),
    "GPT-2": ("gpt2", "GPT2"),
    "GPT-NeoX": ("gpt_neox", "GPTNeoX"),
    "Granite": ("granite", "Granite"),
}

# --- where the tensors are ---------------------------------------------------------------------------------------

_SEPARATE = tuple(f"self_attn.{part}_proj.*" for part in "qkv")
_STACKED = "self_attn.qkv_proj.*"  # queries of all heads, then keys and values of their groups


def _named(leaf: str, *names: str) -> tuple[str, ...]:
    return tuple(name.replace("*", leaf) for name in names)


def _flipped(name: str) -> Source:
    """Stacked queries, keys and values `[d, 3·H·d_k]`, or their biases (GPT-2)."""
    read = qkv_by_head(name).read
    return Source((name,), lambda tensors, shape: read([tensors[0].t()], shape))


def _queries(tensors: Sequence[Tensor], shape: torch.Size) -> Tensor:
    """Queries `[H, 1, d_k, …]`, from the first rows."""
    return tensors[0][: shape[0] * shape[2]].reshape(shape)


def _keys_and_values(tensors: Sequence[Tensor], shape: torch.Size) -> Tensor:
    """Keys and values of each group, `[groups, 2, d_k, …]`, from the last rows."""
    groups, _, width = shape[:3]
    rows = torch.cat(list(tensors))[-2 * groups * width :]
    return rows.reshape(2, groups, width, *shape[3:]).transpose(0, 1)


def _attention(leaf: str) -> dict[str, Entries]:
    """Alternatives for the input projections, of `leaf` weight or bias."""
    query, key, value = _named(leaf, *_SEPARATE)
    (stacked,), ending = _named(leaf, _STACKED), "_bias" * (leaf == "bias")
    return {
        f"qkv{ending}": (
            qkv_by_head(query, key, value),
            qkv_by_head(stacked),
            qkv_by_head(f"attention.query_key_value.{leaf}", layout="h qkv d"),
            _flipped(f"attn.c_attn.{leaf}"),
        ),
        f"query{ending}": tuple(Source((name,), _queries) for name in (query, stacked)),
        f"key_value{ending}": tuple(Source(names, _keys_and_values) for names in ((key, value), (stacked,))),
    }


_OUT = ("self_attn.o_proj", "self_attn.dense", "attention.dense", "attn.c_proj")
_DOWN = ("mlp.down_proj", "mlp.fc2", "mlp.dense_4h_to_h")
_UP = ("mlp.gate_up_proj", "mlp.up_proj", "mlp.fc1", "mlp.dense_h_to_4h")
_FLAT_OUT = Source(("attn.c_proj.weight",), lambda tensors, shape: tensors[0].reshape(shape))
_BLOCK: dict[str, Entries] = {
    **{f"attention.{part}": entry for leaf in ("weight", "bias") for part, entry in _attention(leaf).items()},
    "attention.out": (*(out_by_head(f"{name}.weight") for name in _OUT[:-1]), _FLAT_OUT),
    "attention.out_bias": tuple(f"{name}.bias" for name in _OUT),
    **{
        f"mlp.up.{leaf}": (
            concatenated(f"mlp.gate_proj.{leaf}", f"mlp.up_proj.{leaf}"),
            *(f"{name}.{leaf}" for name in _UP),
            transposed("mlp.c_fc.weight") if leaf == "weight" else "mlp.c_fc.bias",
        )
        for leaf in ("weight", "bias")
    },
    "mlp.down.weight": (*(f"{name}.weight" for name in _DOWN), transposed("mlp.c_proj.weight")),
    "mlp.down.bias": tuple(f"{name}.bias" for name in (*_DOWN, "mlp.c_proj")),
}
# The norms of a block, by the first name that it has; `norm2` may be missing (Phi).
_AROUND = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
_NORMS: dict[str, dict[str, str]] = {
    "pre_feedforward_layernorm": dict(zip(("norm1", "post_norm1", "norm2", "post_norm2"), _AROUND, strict=True)),
    "post_feedforward_layernorm": {
        "post_norm1": "post_attention_layernorm",
        "post_norm2": "post_feedforward_layernorm",
    },
    "ln_1": {"norm1": "ln_1", "norm2": "ln_2"},
    "input_layernorm": {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"},
}
_ATTENTION = ("self_attn", "attention", "attn")
_WORDS, _LAYERS = ("embed_tokens", "wte", "embed_in"), ("layers", "h")
_LAST_NORM = ("norm", "ln_f", "final_layer_norm", "final_layernorm")


def _part(module: Any, *names: str) -> tuple[str, Any]:
    """Name and value of the first attribute that a module has; empty and None if it has none of them."""
    return next(((name, getattr(module, name)) for name in names if hasattr(module, name)), ("", None))


def _base(model: Any) -> tuple[str, Any]:
    """The decoder below its heads, and its path with a dot at the end; of a bare decoder, itself."""
    name = str(model.base_model_prefix)
    return (f"{name}.", getattr(model, name)) if hasattr(model, name) else ("", model)


def _times(factor: float, entries: Entries) -> Entries:
    """The same tensors, multiplied by a number of the model."""
    if factor == 1:
        return entries

    def scaled(entry: Any) -> Source:
        source = as_stored(entry) if isinstance(entry, str) else entry
        return Source(source.names, lambda tensors, shape: source.read(tensors, shape) * factor)

    return tuple(scaled(entry) for entry in (entries if isinstance(entries, tuple) else (entries,)))


def _norm_weight(norm: nn.Module, path: str, like: Tensor) -> Entries:
    """The weights of a norm: ones if it has none (OLMo)."""
    return path if list(norm.parameters()) else Source((), lambda tensors, shape: like.new_ones(shape))


def _table(model: Any) -> Weights:
    """Where the parameters of this model are: the table of its own blocks."""
    prefix, base = _base(model)
    layers, blocks = _part(base, *_LAYERS)
    (words, embedding), (last, last_norm) = _part(base, *_WORDS), _part(base, *_LAST_NORM)
    like = embedding.weight
    block, residual = blocks[0], float(getattr(model.config, "residual_multiplier", 1))
    parts: dict[str, Entries] = dict(_BLOCK)
    for part in ("attention.out", "attention.out_bias", "mlp.down.weight", "mlp.down.bias"):
        parts[part] = _times(residual, parts[part])
    norms = next(names for first, names in _NORMS.items() if hasattr(block, first))
    for name, path in norms.items():
        if hasattr(block, path):
            parts |= {name: path, f"{name}.weight": _norm_weight(getattr(block, path), f"{path}.weight", like)}
    place, attention = _part(block, *_ATTENTION)
    for name in ("query_norm", "key_norm"):
        path, norm = _part(attention, f"{name[0]}_norm", f"{name[0]}_layernorm")
        if norm is not None:
            parts[f"attention.{name}"] = f"{place}.{path}"
            parts[f"attention.{name}.weight"] = _norm_weight(norm, f"{place}.{path}.weight", like)
    scale = getattr(model.config, "embedding_multiplier", 1)
    if hasattr(embedding, "embed_scale"):  # in the precision of the words
        scale = like.new_tensor(float(embedding.embed_scale))
    return {
        "stem.words": _times(float(scale), f"{prefix}{words}.weight"),
        "stem.positions": f"{prefix}wpe.weight",
        **{f"encoder.layers.{{i}}.{k}": e for k, e in core.below(f"{prefix}{layers}.{{i}}.", parts).items()},
        "readout.norm": f"{prefix}{last}",
        "readout.norm.weight": _norm_weight(last_norm, f"{prefix}{last}.weight", like),
        "readout.classifier": "score",
    }


# --- what the tensors do not show ----------------------------------------------------------------------------------


def _norm(norm: Any) -> tuple[NormKind, float]:
    """Kind and epsilon of a norm."""
    if isinstance(norm, nn.LayerNorm):
        return "layer" if norm.bias is not None else "layer_no_bias", float(norm.eps)
    if not list(norm.parameters()):
        return "layer_no_bias", 1e-5  # OLMo, as written in its code
    kind: NormKind = "rms_plus_one" if "Gemma" in type(norm).__name__ else "rms"
    return kind, float(_part(norm, "variance_epsilon", "eps")[1])


def _rotary(config: Any, base: Any) -> RotaryConfig | None:
    """Rotations by their base, or by the frequencies that the model has computed if these are scaled or partial."""
    rotary = getattr(base, "rotary_emb", None)
    if rotary is None:
        return None
    parameters, kind, local = config.rope_parameters, "", None
    if "rope_theta" not in parameters:  # a base for each type of layer
        kind, local = "full_attention_", plain_base(parameters["sliding_attention"])
        parameters = parameters["full_attention"]
    theta = float(parameters["rope_theta"])
    found: Tensor = getattr(rotary, f"{kind}inv_freq")
    rounded = found.dtype in (torch.bfloat16, torch.float16)  # by model.bfloat16(), not by loading in bfloat16
    plain = parameters.get("rope_type", "default") == "default" and parameters.get("partial_rotary_factor", 1.0) == 1
    if plain and not rounded:
        return RotaryConfig(theta, local)
    scaled: dict[str, Any] = {"frequencies": tuple(found.tolist())}
    if (factor := float(getattr(rotary, f"{kind}attention_scaling"))) != 1:
        scaled["attention_factor"] = factor
    return RotaryConfig(theta, local, **scaled)


def _longest(config: Any) -> int:
    """The longest text whose rotations are the same as those of short ones, or that has learned positions."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if parameters.get("rope_type") == "longrope":  # longer texts have other frequencies
        return int(parameters["original_max_position_embeddings"])
    return int(config.max_position_embeddings)


def _require_plain(model: Any, config: Any) -> None:
    """Refuse what changes answers and is none of the tensors."""
    if getattr(config, "quantization_config", None) is not None:
        way = "load it without quantisation, or call model.dequantize() first"
        raise ConversionError(f"its weights are quantised; {way}")
    if getattr(config, "clip_qkv", None) is not None:
        raise core.refuse("it clips queries, keys and values (clip_qkv)")
    if getattr(config, "add_cross_attention", False):
        raise core.refuse("it attends to an encoder (add_cross_attention)")


def _rate(config: Any, *names: str) -> float:
    return float(next((getattr(config, name) for name in names if getattr(config, name, None) is not None), 0.0))


def _config(found: Found, num_labels: int | None, words: tuple[int, ...] = ()) -> EnsembleConfig:
    """Read a decoder: sizes from its tensors, the rest from its modules and its configuration.

    With `words`, as many words for each class, it is a language model that answers with them.
    """
    model = found.model
    config, (_, base) = model.config, _base(model)
    _require_plain(model, config)
    blocks = _part(base, *_LAYERS)[1]
    block, first = blocks[0], "encoder.layers.0."
    attentions = [_part(one, *_ATTENTION)[1] for one in blocks]
    scales = {float(attention.scaling) for attention in attentions}
    if len(scales) > 1:
        raise core.refuse("its layers scale attention differently")
    heads, width = int(config.num_attention_heads), int(config.hidden_size)
    groups = int(getattr(config, "num_key_value_heads", None) or heads)
    head_dim = found.count(f"{first}attention.out") // width // heads
    if not head_dim:
        raise core.refuse("its attention has no output projection where this architecture has it")
    mlp_width = found.count(f"{first}mlp.down.weight") // width
    norms = [hasattr(block, name) for name in ("input_layernorm", "post_attention_layernorm")]
    parallel = 1 if norms == [True, False] else 2 * bool(getattr(block, "use_parallel_residual", False))
    kind, eps = _norm(_part(block, "input_layernorm", "ln_1", "post_attention_layernorm")[1])
    types, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
    if unknown := {*(types or ())} - {"full_attention", "sliding_attention"}:
        raise core.refuse(f"it has layers of the type {sorted(unknown)[0]}")
    local = tuple(one == "sliding_attention" for one in types) if types else (True,) * len(blocks)
    near: dict[str, Any] = {"local": local, "window": int(window) - 1} if window is not None and any(local) else {}
    rotated = tuple(bool(getattr(attention, "use_rope", True)) for attention in attentions)
    query_norm = found.count(f"{first}attention.query_norm.weight")
    has: Callable[[str], bool] = lambda part: found.has(f"{first}{part}")  # noqa: E731
    dropped = _rate(config, "resid_pdrop", "hidden_dropout")
    unusual: dict[str, Any] = {
        "kv_heads": groups if groups != heads else None,
        "sandwich": hasattr(block, "pre_feedforward_layernorm"),
        "norm_after": norms == [False, True],
        "parallel": parallel,
        "attention_scale": None if scales == {head_dim**-0.5} else scales.pop(),
        "softcap": getattr(attentions[0], "attn_logit_softcapping", None),
        "rotated": () if all(rotated) else rotated,
        "joint_qk_norm": query_norm > head_dim,
    }
    encoder = EncoderConfig(
        width=width,
        layers=len(blocks),
        heads=heads,
        head_dim=head_dim,
        mlp_width=mlp_width,
        activation=activation_of(_part(block.mlp, "act_fn", "activation_fn", "act")[1]),
        gated=found.count(f"{first}mlp.up.weight") == 2 * width * mlp_width,
        norm=kind,
        norm_eps=eps,
        qk_norm=bool(query_norm),
        qkv_bias=has("attention.qkv_bias") or has("attention.query_bias"),
        out_bias=has("attention.out_bias"),
        mlp_bias=has("mlp.down.bias"),
        causal=not getattr(config, "use_bidirectional_attention", False),
        rotary=_rotary(config, base),
        attention_dropout=_rate(config, "attn_pdrop", "attention_dropout"),
        projection_dropout=dropped,
        output_dropout=dropped,
        **near,
        **{name: value for name, value in unusual.items() if value},
    )
    stem = found.text_stem(positions=_longest(config), dropout=_rate(config, "embd_pdrop", "hidden_dropout"))
    eps = _norm(_part(base, *_LAST_NORM)[1])[1]
    if words:
        cap = getattr(config, "final_logit_softcapping", None)
        several = words if max(words) > 1 else ()
        biased = found.has("readout.classifier.bias")
        readout = ReadoutConfig("last", len(words), norm_eps=eps, bias=biased, words=several, softcap=cap)
        return EnsembleConfig(stem, encoder, readout)
    classifier = read_classifier(found, num_labels)
    pad = getattr(config, "pad_token_id", None) if found.has("readout.classifier.weight") else None
    if found.has("readout.classifier.weight") and pad not in range(stem.vocabulary):
        way = "set model.config.pad_token_id = tokenizer.pad_token_id"
        raise ConversionError(f"its pad_token_id is {pad}, so it cannot tell where texts end; {way}")
    readout = ReadoutConfig("last", norm_eps=eps, pad_token=pad, **classifier)
    return EnsembleConfig(stem, encoder, readout)


# --- the tables --------------------------------------------------------------------------------------------------


def _answer(model: Any, inputs: NamedTensors, fresh: bool) -> Tensor:
    """Logits of a classifier, or the features of the last token of a bare decoder."""
    if not fresh and hasattr(model, "score"):
        logits: Tensor = model(**inputs).logits
        return logits
    return _at_the_end(_base(model)[1](**inputs).last_hidden_state, inputs)


def _at_the_end(tokens: Tensor, inputs: NamedTensors) -> Tensor:
    """What `[B, T, …]` has at the last real token of each text."""
    return tokens[torch.arange(len(tokens)), _ends(inputs)]


def _ends(inputs: NamedTensors) -> Tensor:
    """Position `[B]` of the last real token of each text."""
    mask = inputs["attention_mask"]
    return mask.shape[1] - 1 - mask.flip(1).argmax(1)


def _declared(name: str, module: str, stem: str) -> Architecture:
    path = f"transformers.models.{module}.modeling_{module}.{stem}"
    return Architecture(
        name=f"transformers {name}",
        classes=(f"{path}ForSequenceClassification", f"{path}Model"),
        config=_config,
        weights={},
        metadata=metadata_of_classifier,
        answer=_answer,
        variant=_table,
        rounds=stem.startswith(("Gemma", "Granite")),  # factors of embeddings and sublayers are part of the weights
    )


ARCHITECTURES = tuple(_declared(name, *where) for name, where in FAMILIES.items())
_BY_CLASS = {name: one for one in ARCHITECTURES for name in one.classes}

# --- language models that answer with label words --------------------------------------------------------------------

LabelWords = Mapping[str, str | Sequence[str]]


def with_label_words(model: Any, labels: LabelWords, tokenizer: Any, template: str | None) -> Architecture:
    """The table of a language model whose classifier is the rows of its `lm_head` for these words, summed by label."""
    known = _BY_CLASS.get(core.qualified_name(_base(model)[1])) if hasattr(model, "base_model_prefix") else None
    head = model.get_output_embeddings() if known is not None else None
    if known is None or head is None or len(labels) < 2:
        problem = f"label words take a language model (...ForCausalLM) of {', '.join(FAMILIES)}, and two labels or more"
        raise ConversionError(f"{problem}; got a {type(model).__name__} and {list(labels)}")
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise ConversionError(f"label words take a fast tokenizer: tokenizer=; got a {type(tokenizer).__name__}")
    rows = _rows(labels, tokenizer)
    if abs(len(tokenizer) - head.weight.shape[0]) > SPARE_WORDS:
        sizes = f"the tokenizer has {len(tokenizer)} words, the model {head.weight.shape[0]}"
        raise ConversionError(f"{sizes}: it is that of another vocabulary; give the model's own")
    words = tuple(len(one) for one in rows.values())
    chosen = [row for one in rows.values() for row in one]
    place = next(name for name, module in model.named_modules() if module is head)
    scale = float(getattr(model.config, "logits_scaling", 1))
    text, special = _prompt(tokenizer, template)

    def read(tensors: Sequence[Tensor], shape: torch.Size) -> Tensor:
        return (tensors[0][chosen] / scale).reshape(shape)

    def table(model: Any) -> Weights:
        sources = {f"readout.classifier.{leaf}": Source((f"{place}.{leaf}",), read) for leaf in ("weight", "bias")}
        return {**_table(model), **sources}

    def answer(model: Any, inputs: NamedTensors, fresh: bool) -> Tensor:
        ends = _ends(inputs)  # [B]; the logits of all words of all tokens would be large
        logits = model(**inputs, logits_to_keep=ends).logits.diagonal(dim1=0, dim2=1).T[:, chosen]
        return torch.stack([one.logsumexp(-1) for one in logits.split(words, dim=-1)], dim=-1)

    def metadata(model: Any) -> Metadata:
        config = _config(Found(declared, model), None, words)
        found = with_processor(Metadata(labels=tuple(labels)), tokenizer, config, model)
        assert isinstance(found.preprocessing, TextPreprocessing)
        return replace(found, preprocessing=replace(found.preprocessing, template=text, special_tokens=special))

    name = f"{known.name} with label words"
    config = partial(_config, words=words)
    declared = replace(known, name=name, config=config, variant=table, answer=answer, metadata=metadata)
    return declared


@torch.no_grad()
def evened(judge: Ensemble, empty: Sequence[str]) -> Ensemble:
    """The same with biases by which the mean of its answers to texts without content gets even."""
    readout, state = judge.config.readout, judge.state_dict()
    if readout.softcap is not None:
        raise core.refuse("its logits are capped after their bias", "Leave empty= out")
    words = torch.tensor(readout.words or (1,) * readout.num_classes, device=judge.device)
    shift = -judge(list(empty))[0].float().softmax(-1).mean(0).log().repeat_interleave(words)  # [rows]
    before = state.get("readout.classifier.bias", torch.zeros_like(shift))
    state["readout.classifier.bias"] = (before + shift).reshape(1, -1).to(judge.dtype)
    config = replace(judge.config, readout=replace(readout, bias=True))
    history = (*judge.metadata.history, f"label words weighed against {len(empty)} texts without content")
    return Ensemble.from_state(config, state, replace(judge.metadata, history=history), judge.frozen, copies=False)


def _rows(labels: LabelWords, tokenizer: Any) -> dict[str, list[int]]:
    """Token ids of each label's words: their first ones, if words have several, which is said."""
    rows, cut = dict[str, list[int]](), dict[str, str]()
    for label, words in labels.items():
        tokens = {word: tokenizer.encode(word, add_special_tokens=False) for word in _listed(words)}
        if empty := [word for word, ids in tokens.items() if not ids] or not tokens:
            raise ConversionError(f"label {label!r} has no word that the tokenizer knows ({empty}); give one")
        cut |= {word: tokenizer.decode(ids[:1]) for word, ids in tokens.items() if len(ids) > 1}
        rows[label] = list(dict.fromkeys(ids[0] for ids in tokens.values()))
        for other, ids in rows.items():
            if other != label and (both := set(ids) & set(rows[label])):
                shared = f"labels {other!r} and {label!r} both begin with the token {tokenizer.decode([*both][:1])!r}"
                raise ConversionError(f"{shared}, so that it cannot tell them apart; give other words")
    if cut:
        warn(f"label words of several tokens are read as their first ones: {cut}; give words of one token each")
    return rows


def _listed(words: str | Sequence[str]) -> list[str]:
    return [words] if isinstance(words, str) else list(words)


def _prompt(tokenizer: Any, template: str | None) -> tuple[str, bool]:
    """The text around each input, with `{text}` where it goes, and whether special tokens are added to it."""
    if template is not None and template.count(TEXT) != 1:
        raise ConversionError(f"template must contain {TEXT} once, where each text goes; got {template!r}")
    if getattr(tokenizer, "chat_template", None) is None:
        return template or "", True
    turns = [{"role": "user", "content": template or TEXT}]
    chat: str = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    if chat.count(TEXT) != 1:
        raise ConversionError("the chat template of the tokenizer changes the text; set tokenizer.chat_template = None")
    return chat, False

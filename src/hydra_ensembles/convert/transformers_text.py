"""transformers for text: BERT and its relatives, with rotary positions too; and sentence-transformers around them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..errors import ConversionError
from ..model.config import EnsembleConfig, HiddenActivation, Pool, ReadoutConfig, RotaryConfig
from ..model.metadata import Metadata
from . import core
from .core import Architecture, Found, NamedTensors, Weights, activation_of, below, block
from .processors import read_processor
from .transformers import READOUT, WORDS, declare, gated, read_classifier, read_encoder

# --- BERT and its relatives ------------------------------------------------------------------------------------

_EMBEDDINGS: Weights = {
    "stem.words": "embeddings.word_embeddings.weight",
    "stem.positions": "embeddings.position_embeddings.weight",
    "stem.segments": "embeddings.token_type_embeddings.weight",
    "stem.norm": "embeddings.LayerNorm",
    "stem.project": "embeddings_project",
}
_BERT_LAYER = block(
    ("attention.output.dense", *(f"attention.self.{part}.*" for part in WORDS)),
    ("attention.output.LayerNorm", "output.LayerNorm"),
    ("intermediate.dense", "output.dense"),
)
_BERT: Weights = {**_EMBEDDINGS, **below("encoder.layer.{i}.", _BERT_LAYER)}
_DISTILBERT_LAYER = block(
    ("attention.out_lin", *(f"attention.{part}_lin.*" for part in "qkv")),
    ("sa_layer_norm", "output_layer_norm"),
    ("ffn.lin1", "ffn.lin2"),
)
_DISTILBERT: Weights = {**_EMBEDDINGS, **below("transformer.layer.{i}.", _DISTILBERT_LAYER)}
_ALBERT_LAYER = block(
    ("attention.dense", *(f"attention.{part}.*" for part in WORDS)),
    ("attention.LayerNorm", "full_layer_layer_norm"),
    ("ffn", "ffn_output"),
)
_ALBERT: Weights = {
    **_EMBEDDINGS,
    "stem.project": "encoder.embedding_hidden_mapping_in",
    **below("encoder.albert_layer_groups.0.albert_layers.0.", _ALBERT_LAYER),  # one layer, shared by all
}


def _bert_config(
    found: Found,
    num_labels: int | None,
    hidden: HiddenActivation = "tanh",
    drops_first_token: bool = True,
    counts_after_padding: bool = False,
) -> EnsembleConfig:
    """BERT, RoBERTa and ELECTRA, which differ in the readout and in how positions are counted."""
    config = found.model.config
    dropout = float(config.hidden_dropout_prob)
    after = int(found.model.base_model.embeddings.padding_idx) if counts_after_padding else None
    stem = found.text_stem(positions_after=after, dropout=dropout)
    encoder = read_encoder(found, config, norm_first=False, projection_dropout=dropout, output_dropout=dropout)
    rate = dropout if config.classifier_dropout is None else float(config.classifier_dropout)
    readout = text_readout(found, num_labels, hidden, rate, drops_first_token)
    return EnsembleConfig(stem, encoder, readout, encoder.all_heads())


def _distilbert_config(found: Found, num_labels: int | None) -> EnsembleConfig:
    config = found.model.config
    dropout, activation = float(config.dropout), activation_of(config.activation)  # a stray `hidden_act` has no effect
    encoder = read_encoder(found, config, norm_first=False, activation=activation, output_dropout=dropout)
    readout = text_readout(found, num_labels, "relu", float(config.seq_classif_dropout), False)
    return EnsembleConfig(found.text_stem(dropout=dropout), encoder, readout, encoder.all_heads())


def _albert_config(found: Found, num_labels: int | None) -> EnsembleConfig:
    """ALBERT, whose layers share weights: the canonical encoder has a copy for each layer."""
    config = found.model.config
    dropout, layers = float(config.hidden_dropout_prob), int(config.num_hidden_layers)
    encoder = read_encoder(found, config, layers=layers, norm_first=False, projection_dropout=dropout)
    readout = text_readout(found, num_labels, "tanh", float(config.classifier_dropout_prob), False)
    return EnsembleConfig(found.text_stem(dropout=dropout), encoder, readout, encoder.all_heads())


def text_readout(
    found: Found, num_labels: int | None, hidden: HiddenActivation, rate: float, drops_first_token: bool
) -> ReadoutConfig:
    """Read out the first token through a pooler or hidden layer; without classes, through a pooler if there is one."""
    classifier = read_classifier(found, num_labels)
    if not classifier["num_classes"]:
        pooled = getattr(found.model, "pooler", None) is not None
        return ReadoutConfig(norm="none", hidden="tanh" if pooled else None)
    first = rate if drops_first_token else 0.0
    return ReadoutConfig(norm="none", hidden=hidden, dropout=first, hidden_dropout=rate, **classifier)


# --- text: blocks as in BERT ----------------------------------------------------------------------------------

_ROTARY_LAYER = block(
    ("self_attn.o_proj", *(f"self_attn.{part}_proj.*" for part in "qkv")),
    ("post_attention_layernorm", "post_mlp_layernorm"),
    ("mlp.fc1", ("mlp.down_proj", "mlp.fc2")),
)
_ROTARY_BERT: Weights = {
    "stem.words": "embeddings.word_embeddings.weight",
    "stem.segments": "embeddings.token_type_embeddings.weight",
    "stem.norm": "embeddings.LayerNorm",
    **below("layers.{i}.", {**_ROTARY_LAYER, **gated("mlp.fc1")}),
}


def _base(parameters: Any) -> float:
    """Return the base of rotary positions; other forms may differ only in texts longer than those compared."""
    if parameters.get("rope_type", "default") != "default":
        raise core.refuse(f"its rotary positions are of the type {parameters['rope_type']!r}")
    return float(parameters["rope_theta"])


def _rotary_bert_config(found: Found, num_labels: int | None, drops_first_token: bool = False) -> EnsembleConfig:
    """Nomic BERT, GTE and Jina embeddings, which differ in gates, biases and the readout."""
    config, mlp = found.model.config, found.model.base_model.layers[0].mlp
    dropout = float(config.hidden_dropout_prob)
    encoder = read_encoder(
        found,
        config,
        norm_first=False,
        projection_dropout=dropout,
        activation_dropout=dropout if hasattr(mlp, "dropout") else 0.0,
        output_dropout=dropout,
        rotary=RotaryConfig(_base(config.rope_parameters)),
    )
    rate = dropout if config.classifier_dropout is None else float(config.classifier_dropout)
    stem = found.text_stem(positions=int(config.max_position_embeddings), dropout=dropout)
    readout = text_readout(found, num_labels, "tanh", rate, drops_first_token)
    return EnsembleConfig(stem, encoder, readout, encoder.all_heads())


# --- text: ModernBERT ----------------------------------------------------------------------------------------

_MODERNBERT_LAYER = block(("attn.Wo", "attn.Wqkv.*"), ("attn_norm", "mlp_norm"), ("mlp.Wi", "mlp.Wo"))
_MODERNBERT: Weights = {
    "stem.words": "embeddings.tok_embeddings.weight",
    "stem.norm": "embeddings.norm",
    **below("layers.{i}.", _MODERNBERT_LAYER),
    "readout.norm": "final_norm",
}


def _modernbert_config(found: Found, num_labels: int | None) -> EnsembleConfig:
    config = found.model.config
    local = tuple(layer_type == "sliding_attention" for layer_type in config.layer_types)
    base, local_base = (_base(config.rope_parameters[f"{reach}_attention"]) for reach in ("full", "sliding"))
    stem = found.text_stem(positions=int(config.max_position_embeddings), dropout=float(config.embedding_dropout))
    encoder = read_encoder(
        found,
        config,
        activation=activation_of(config.hidden_activation),
        first_norm=False,
        projection_dropout=float(config.attention_dropout),
        activation_dropout=float(config.mlp_dropout),
        rotary=RotaryConfig(base, local_base=local_base),
        local=local,
        window=int(config.local_attention) // 2 if any(local) else None,
    )
    readout = ReadoutConfig(norm_eps=encoder.norm_eps, **read_classifier(found, num_labels))
    if getattr(found.model, "head", None) is not None:
        readout = replace(
            readout,
            pool=config.classifier_pooling,
            hidden=config.classifier_activation,
            hidden_bias=bool(config.classifier_bias),
            hidden_norm=True,
            hidden_dropout=float(config.classifier_dropout),
        )
    return EnsembleConfig(stem, encoder, readout, encoder.all_heads())


_MODERNBERT_HEAD: Weights = {**READOUT, "readout.hidden": "head.dense", "readout.hidden_norm": "head.norm"}
_JINA = partial(_rotary_bert_config, drops_first_token=True)
_NOMIC, _GTE = ({**READOUT, "readout.hidden": (f"{key}.pooler.dense", "pooler.dense")} for key in ("nomic_bert", "gte"))

_ROBERTA = partial(_bert_config, counts_after_padding=True)
_text = partial(declare, classifiers=("ForSequenceClassification",))

ARCHITECTURES: tuple[Architecture, ...] = (
    *_text("BERT", "Bert", partial(_bert_config, drops_first_token=False), _BERT),
    *_text("RoBERTa", "Roberta", _ROBERTA, _BERT),
    *_text("XLM-RoBERTa", "XLMRoberta", _ROBERTA, _BERT, module="xlm_roberta", inside="roberta"),
    *_text("CamemBERT", "Camembert", _ROBERTA, _BERT, inside="roberta"),
    *_text("ALBERT", "Albert", _albert_config, _ALBERT),
    *_text("DistilBERT", "DistilBert", _distilbert_config, _DISTILBERT),
    *_text("ELECTRA", "Electra", partial(_bert_config, hidden="gelu"), _BERT),
    *_text("ModernBERT", "ModernBert", _modernbert_config, _MODERNBERT, inside="model", readout=_MODERNBERT_HEAD),
    *_text("Nomic BERT", "NomicBert", _rotary_bert_config, _ROTARY_BERT, module="nomic_bert", readout=_NOMIC),
    *_text("GTE", "Gte", _rotary_bert_config, _ROTARY_BERT, readout=_GTE),
    *_text("Jina", "JinaEmbeddingsV3", _JINA, _ROTARY_BERT, module="jina_embeddings_v3", inside="roberta"),
)

# --- sentence-transformers -----------------------------------------------------------------------------------

_POOLS: dict[str, Pool] = {"mean": "mean", "cls": "cls", "lasttoken": "last"}


def opened(model: Any, table_of: Callable[[type], Any]) -> tuple[Architecture, nn.Module]:
    """Return the declaration of the encoder inside, with the pooling of the model, and the encoder.

    A new classifier reads the pooled features before the model normalises or truncates them.
    """
    first, *behind = model.children() if isinstance(model, nn.Sequential) else (model,)
    inner: Any = getattr(first, "auto_model", None) or getattr(first, "model", None)
    architecture: Architecture = table_of(type(inner))
    name = f"sentence-transformers, {architecture.name}"
    with core.prefix_errors(name):
        _require_plain(model, first, behind)

    def metadata(encoder: nn.Module) -> Metadata:
        tokenizer = read_processor(first.tokenizer, architecture.config(Found(architecture, encoder), None).stem)
        base = Metadata() if behind else architecture.metadata(encoder)  # has the class names
        return replace(base, preprocessing=tokenizer, preprocessing_from="the tokenizer of the model")

    if not behind:
        return replace(architecture, name=name, metadata=metadata), inner
    pooling: Any = behind[0]
    pool = _POOLS[_mode(pooling)]

    def config(found: Found, num_labels: int | None) -> EnsembleConfig:
        cut = getattr(model, "truncate_dim", None)
        if num_labels is None and (len(behind) > 1 or cut is not None):
            change = "scaled to length one" if cut is None else f"cut to {cut} numbers (truncate_dim)"
            raise core.refuse(f"its embeddings are {change}", "A classifier can read all of them: give num_labels=")
        bare = architecture.config(found, None)
        classes = core.number_of_classes(0, num_labels)
        last = bare.readout  # has the norm after the last block
        return replace(bare, readout=ReadoutConfig(pool, classes, norm=last.norm, norm_eps=last.norm_eps))

    def answer(encoder: nn.Module, inputs: NamedTensors, fresh: bool) -> Tensor:
        tokens = encoder(**inputs).last_hidden_state  # [B, T, d]
        features = {"token_embeddings": tokens, "attention_mask": inputs["attention_mask"]}
        pooled: Tensor = pooling(features)["sentence_embedding"]
        return pooled

    unread = ("readout.hidden", "readout.classifier", "readout.distillation_classifier")
    weights = {part: entry for part, entry in architecture.weights.items() if not part.startswith(unread)}
    ignored = (*architecture.ignored, "pooler.")
    declared = replace(architecture, name=name, config=config, weights=weights, ignored=ignored)
    return replace(declared, answer=answer, metadata=metadata), inner


def _require_plain(model: Any, first: Any, behind: Sequence[Any]) -> None:
    """Raise if a model processes texts before its encoder, or tokens after it, in a way that is not converted."""
    prompt = (getattr(model, "prompts", None) or {}).get(getattr(model, "default_prompt_name", None))
    if prompt:
        way = "set model.default_prompt_name = None, and add it to your texts yourself"
        raise ConversionError(f"it puts the prompt {prompt!r} before every text, which is not converted; {way}")
    if getattr(first, "do_lower_case", False):
        raise core.refuse("it lower-cases texts before its tokenizer does anything (do_lower_case)")
    activation = getattr(model, "activation_fn", None)  # of a CrossEncoder
    if not isinstance(activation, nn.Identity | nn.Softmax | None):
        way = "if exactly one class is right, set model.activation_fn = torch.nn.Identity()"
        raise ConversionError(f"it answers with the {type(activation).__name__} of each class, not a softmax; {way}")
    kinds = [type(part).__name__ for part in behind]
    if kinds not in ([], ["Pooling"], ["Pooling", "Normalize"]):
        raise core.refuse(f"after the encoder there are {kinds}")


def _mode(pooling: Any) -> str:
    return str(getattr(pooling, "pooling_mode", None) or pooling.get_pooling_mode_str())

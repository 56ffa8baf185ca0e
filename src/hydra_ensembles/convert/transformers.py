"""transformers: what its tables share, its image and text encoders, and sentence-transformers around the latter."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..errors import ConversionError
from ..model.config import (
    EncoderConfig,
    EnsembleConfig,
    HiddenActivation,
    Pool,
    ReadoutConfig,
    Resample,
    RotaryConfig,
)
from ..model.metadata import Metadata
from . import core
from .core import (
    Architecture,
    Found,
    NamedTensors,
    Weights,
    activation_of,
    attention,
    below,
    block,
    concatenated,
    either,
    pair,
)
from .processors import read_processor

# --- shared by all of them, and by texts and towers ------------------------------------------------------------


def read_encoder(found: Found, config: Any, **settings: Any) -> EncoderConfig:
    """Read the blocks by the configuration's usual names; `settings` are what a family reads in its own way."""
    if "activation" not in settings:
        settings["activation"] = activation_of(config.hidden_act)
    if "attention_dropout" not in settings:
        rate = getattr(config, "attention_probs_dropout_prob", None)
        settings["attention_dropout"] = float(config.attention_dropout if rate is None else rate)
    return found.encoder(int(config.num_attention_heads), **settings)


def read_classifier(found: Found, num_labels: int | None) -> dict[str, Any]:
    """Return the settings of a readout that follow from the classifier, and what its outputs mean."""
    problem, settings = getattr(found.model.config, "problem_type", None), found.classifier(num_labels)
    if not found.has("readout.classifier.weight"):
        return settings
    if problem == "regression":
        raise ConversionError("problem_type is 'regression', so its outputs are no probabilities; if they are: None")
    return settings | ({"outputs": "labels"} if problem == "multi_label_classification" else {})


def metadata_of_classifier(model: Any) -> Metadata:
    """Read class names from the configuration, if numbered 0, 1, … and not placeholders like `LABEL_0`."""
    found = {int(number): name for number, name in (getattr(model.config, "id2label", None) or {}).items()}
    names = [found.get(number) for number in range(len(found))]
    if None in names or all(re.fullmatch(r"LABEL_\d+", str(name)) for name in names):
        return Metadata()
    return Metadata(labels=tuple(map(str, names)))


def answer(model: Any, inputs: NamedTensors, fresh: bool, pool: Pool = "cls") -> Tensor:
    """Return logits, or the features of a bare encoder; `pool` is the input of the family's classifiers."""
    bare = type(model).__name__.endswith("Model")  # its own `base_model` may be a part of it (DINOv3)
    output = (model.base_model if fresh and not bare else model)(**inputs)
    answers = () if fresh else (getattr(output, name, None) for name in ("logits", "pooler_output"))
    for answer in answers:
        if answer is not None:
            return cast(Tensor, answer)
    tokens: Tensor = output.last_hidden_state  # [B, T, d]
    if pool == "mean":
        return tokens.mean(1)
    patches = tokens[:, 1 + int(getattr(model.config, "num_register_tokens", 0)) :]
    return torch.cat([tokens[:, 0], patches.mean(1)], dim=-1) if pool == "cls_mean" else tokens[:, 0]


READOUT: Weights = {
    "readout.hidden": (
        *("classifier.dense", "pre_classifier", "pooler.dense", "bert.pooler.dense", "albert.pooler", "pooler"),
    ),
    "readout.classifier": ("classifier", "classifier.1", "classifier.out_proj", "cls_classifier"),
    "readout.distillation_classifier": "distillation_classifier",
}


def declare(
    name: str,
    stem: str,
    config: Callable[[Found, int | None], EnsembleConfig],
    encoder: Weights,
    classifiers: tuple[str, ...],
    ignored: tuple[str, ...] = (),
    module: str = "",
    answer: Callable[[Any, NamedTensors, bool], Tensor] = answer,
    inside: str = "",
    readout: Weights = READOUT,
) -> tuple[Architecture, Architecture]:
    """Declare a family: its classifiers, which contain the encoder under the name of the module, and its bare encoder.

    Class names are `stem`, followed by one of `classifiers` for a classifier. `ignored` are tensors of the encoder that
    the classifiers do not read either; `module` is the module of the family, by default `stem` in lower case; `inside`
    is the classifiers' name for the encoder, by default that of the module.
    """
    module = module or stem.lower()
    inside = inside or module
    path = f"transformers.models.{module}.modeling_{module}.{stem}"
    classifier = Architecture(
        name=f"transformers {name} classifier",
        classes=tuple(path + ending for ending in classifiers),
        config=config,
        weights={**below(f"{inside}.", encoder), **readout},
        ignored=tuple(f"{inside}.{beginning}" for beginning in ignored),
        metadata=metadata_of_classifier,
        answer=answer,
    )
    weights, title = {**encoder, **readout}, f"transformers {name} encoder"
    return classifier, Architecture(title, (f"{path}Model",), config, weights, ignored, answer=answer)


# --- images --------------------------------------------------------------------------------------------------

_PATCHES: Weights = {
    "stem.patch": "embeddings.patch_embeddings.projection.weight",
    "stem.patch_bias": "embeddings.patch_embeddings.projection.bias",
    "stem.class_token": "embeddings.cls_token",
    "stem.distillation_token": "embeddings.distillation_token",
    "stem.register_tokens": "embeddings.register_tokens",
    "stem.position": "embeddings.position_embeddings",
    "readout.norm": "layernorm",
}
# Releases of transformers 5 differ in the names of attention parameters, and of the layers of ViT.
_ATTENTION = ("attention.o_proj", *(f"attention.{part}_proj.*" for part in "qkv"))
WORDS = ("query", "key", "value")
_OLD_ATTENTION = ("attention.output.dense", *(f"attention.attention.{part}.*" for part in WORDS))
_VIT_NORMS = ("layernorm_before", "layernorm_after")
_VIT_LAYER = block(_ATTENTION, _VIT_NORMS, ("mlp.fc1", "mlp.fc2"))
_OLD_VIT_LAYER = block(_OLD_ATTENTION, _VIT_NORMS, ("intermediate.dense", "output.dense"))
_VIT: Weights = {**_PATCHES, **either(below("layers.{i}.", _VIT_LAYER), below("encoder.layer.{i}.", _OLD_VIT_LAYER))}


def gated(*names: str) -> Weights:
    """Declare the first layer of an MLP: gate and value stored separately, or one tensor with one of `names`."""
    return {
        f"encoder.layers.{{i}}.mlp.up.{leaf}": (
            concatenated(f"mlp.gate_proj.{leaf}", f"mlp.up_proj.{leaf}"),
            *(f"{name}.{leaf}" for name in names),
        )
        for leaf in ("weight", "bias")
    }


DINO_LAYER: Weights = {
    **either(attention(*_ATTENTION), attention(*_OLD_ATTENTION)),
    "encoder.layers.{i}.norm1": "norm1",
    "encoder.layers.{i}.norm2": "norm2",
    "encoder.layers.{i}.attention.scale": "layer_scale1.lambda1",
    **gated("mlp.fc1", "mlp.weights_in"),
    "encoder.layers.{i}.mlp.down": ("mlp.fc2", "mlp.down_proj", "mlp.weights_out"),
    "encoder.layers.{i}.mlp.scale": "layer_scale2.lambda1",
}
_DINOV2: Weights = {**_PATCHES, **below("encoder.layer.{i}.", DINO_LAYER)}


def _vit_config(found: Found, num_labels: int | None) -> EnsembleConfig:
    config = found.model.config
    dropout = float(config.hidden_dropout_prob)
    stem = found.patch_stem(pair(config.image_size), resample="bicubic", dropout=dropout)
    encoder = read_encoder(found, config, projection_dropout=dropout, output_dropout=dropout)
    two = hasattr(found.model, "distillation_classifier")
    pool: Pool = "distilled" if two else "cls" if stem.class_token else "mean"
    return EnsembleConfig(stem, encoder, _image_readout(found, num_labels, pool))


def _dinov2_config(found: Found, num_labels: int | None, resample: Resample = "bicubic") -> EnsembleConfig:
    config = found.model.config
    stem = found.patch_stem(pair(config.image_size), resample=resample, dropout=float(config.hidden_dropout_prob))
    drop_path = (float(config.drop_path_rate),) * int(config.num_hidden_layers)
    activation = {"activation": "silu"} if config.use_swiglu_ffn else {}
    encoder = read_encoder(found, config, drop_path=drop_path, **activation)
    features = num_labels is None and not found.has("readout.classifier.weight")
    readout = _image_readout(found, num_labels, "cls" if features else "cls_mean")
    return EnsembleConfig(stem, encoder, readout)


def _image_readout(found: Found, num_labels: int | None, pool: Pool) -> ReadoutConfig:
    config, classifier = found.model.config, read_classifier(found, num_labels)
    if not classifier["num_classes"] and pool == "distilled":
        raise core.refuse("it has two classifiers without classes")
    pooled = not classifier["num_classes"] and getattr(found.model, "pooler", None) is not None
    hidden = config.pooler_act if pooled else None
    return ReadoutConfig(pool, norm_eps=float(config.layer_norm_eps), hidden=hidden, **classifier)


def _mae_answer(model: Any, inputs: NamedTensors, fresh: bool) -> Tensor:
    """Return the class token of an encoder that sees all patches in order: none is masked, unlike in pre-training."""
    images = inputs["pixel_values"]
    ratio = model.config.mask_ratio
    patch = pair(model.config.patch_size)
    order = torch.arange(images.shape[2] // patch[0] * (images.shape[3] // patch[1]), device=images.device)
    model.config.mask_ratio = 0.0
    try:
        tokens: Tensor = model(images, noise=order.expand(len(images), -1).float()).last_hidden_state
    finally:
        model.config.mask_ratio = ratio
    return tokens[:, 0]


_DINOV3_LAYER: Weights = {
    **DINO_LAYER,
    "encoder.layers.{i}.attention.qkv_bias": (
        core.qkv_by_head(*(f"attention.{part}_proj.bias" for part in "qkv")),
        core.qkv_by_head("attention.q_proj.bias", "attention.v_proj.bias"),
    ),
    **gated("mlp.up_proj"),
}


def _dinov3_config(found: Found, num_labels: int | None) -> EnsembleConfig:
    config = found.model.config
    stem = found.patch_stem(pair(config.image_size), resample="bicubic")
    drop_path = (float(config.drop_path_rate),) * int(config.num_hidden_layers)
    rotary = RotaryConfig(float(config.rope_theta), centred=True)
    encoder = read_encoder(found, config, drop_path=drop_path, rotary=rotary)
    readout = ReadoutConfig(norm_eps=encoder.norm_eps, **read_classifier(found, num_labels))
    return EnsembleConfig(stem, encoder, readout)


_DINOV3: Weights = {
    "stem.patch": "embeddings.patch_embeddings.weight",
    "stem.patch_bias": "embeddings.patch_embeddings.bias",
    "stem.class_token": "embeddings.cls_token",
    "stem.register_tokens": "embeddings.register_tokens",
    **either(below("model.layer.{i}.", _DINOV3_LAYER), below("layer.{i}.", _DINOV3_LAYER)),  # releases differ
    "readout.norm": "norm",
}
_IMAGES = ("ForImageClassification",)
# A mask token is used only in pre-training, a pooler only for the features of a bare encoder.
_UNREAD = ("embeddings.mask_token", "pooler.")
_NO_REGISTERS = ("embeddings.mask_token", "embeddings.register_tokens")  # the latter is then an empty tensor
_MEAN = partial(answer, pool="mean")
_WITH_MEAN = partial(answer, pool="cls_mean")
_TEACHER = (*_IMAGES, "ForImageClassificationWithTeacher")

_IMAGE_ENCODERS: tuple[Architecture, ...] = (
    *declare("ViT", "ViT", _vit_config, _VIT, _IMAGES, _UNREAD),
    *declare("DeiT", "DeiT", _vit_config, _VIT, _TEACHER, _UNREAD),
    declare("ViT-MAE", "ViTMAE", _vit_config, _VIT, (), _UNREAD, "vit_mae", _mae_answer)[1],
    *declare("ViT-MSN", "ViTMSN", _vit_config, _VIT, _IMAGES, _UNREAD, module="vit_msn", inside="vit"),
    *declare("I-JEPA", "IJepa", _vit_config, _VIT, _IMAGES, _UNREAD, answer=_MEAN),
    *declare("DINOv2", "Dinov2", _dinov2_config, _DINOV2, _IMAGES, _UNREAD, answer=_WITH_MEAN),
    *declare(
        "DINOv2 with registers",
        "Dinov2WithRegisters",
        partial(_dinov2_config, resample="bicubic_antialias"),
        _DINOV2,
        _IMAGES,
        (*_UNREAD, *_NO_REGISTERS),
        module="dinov2_with_registers",
        answer=_WITH_MEAN,
    ),
    declare("DINOv3", "DINOv3ViT", _dinov3_config, _DINOV3, (), _NO_REGISTERS, "dinov3_vit")[1],
)

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


def plain_base(parameters: Any) -> float:
    """Return the base of rotary positions; other forms may differ only in texts longer than those compared."""
    if parameters.get("rope_type", "default") != "default":
        raise core.refuse(f"its rotary positions are of the type {parameters['rope_type']!r}")
    return float(parameters["rope_theta"])


def _text_config(
    found: Found,
    num_labels: int | None,
    hidden: HiddenActivation = "tanh",
    drops_first_token: bool = False,
    counts_after_padding: bool = False,
    drops_in: tuple[str, ...] = ("projection", "output"),
) -> EnsembleConfig:
    """Encoders with BERT's blocks: they differ in the readout, in how positions are counted, and in dropout."""
    config = found.model.config

    def rate(*names: str) -> float:
        return next(float(getattr(config, name)) for name in names if getattr(config, name, None) is not None)

    dropout = rate("hidden_dropout_prob", "dropout")
    stem: dict[str, Any] = {"dropout": dropout}
    blocks: dict[str, Any] = {f"{place}_dropout": dropout for place in drops_in}
    if counts_after_padding:
        stem["positions_after"] = int(found.model.base_model.embeddings.padding_idx)
    if (rotary := getattr(config, "rope_parameters", None)) is not None:
        stem["positions"], blocks["rotary"] = int(config.max_position_embeddings), RotaryConfig(plain_base(rotary))
    activation = activation_of(config.activation if hasattr(config, "activation") else config.hidden_act)
    layers = int(config.num_hidden_layers)  # of ALBERT, each has a copy of the one that is stored
    encoder = read_encoder(found, config, layers=layers, norm_first=False, activation=activation, **blocks)
    classifier = read_classifier(found, num_labels)
    if classifier["num_classes"]:
        after = rate("classifier_dropout", "classifier_dropout_prob", "seq_classif_dropout", "hidden_dropout_prob")
        first = after if drops_first_token else 0.0
        readout = ReadoutConfig(norm="none", hidden=hidden, dropout=first, hidden_dropout=after, **classifier)
    else:
        pooled = getattr(found.model, "pooler", None) is not None
        readout = ReadoutConfig(norm="none", hidden="tanh" if pooled else None)
    return EnsembleConfig(found.text_stem(**stem), encoder, readout)


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
    base, local_base = (plain_base(config.rope_parameters[f"{reach}_attention"]) for reach in ("full", "sliding"))
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
    return EnsembleConfig(stem, encoder, readout)


_MODERNBERT_HEAD: Weights = {**READOUT, "readout.hidden": "head.dense", "readout.hidden_norm": "head.norm"}
_NOMIC, _GTE = ({**READOUT, "readout.hidden": (f"{key}.pooler.dense", "pooler.dense")} for key in ("nomic_bert", "gte"))

_ROBERTA = partial(_text_config, drops_first_token=True, counts_after_padding=True)
_ELECTRA = partial(_text_config, hidden="gelu", drops_first_token=True)
_DISTIL = partial(_text_config, hidden="relu", drops_in=("output",))
_GTE_DROPS = partial(_text_config, drops_in=("projection", "activation", "output"))
_JINA = partial(_text_config, drops_first_token=True)
_text = partial(declare, classifiers=("ForSequenceClassification",))

ARCHITECTURES: tuple[Architecture, ...] = (
    *_IMAGE_ENCODERS,
    *_text("BERT", "Bert", _text_config, _BERT),
    *_text("RoBERTa", "Roberta", _ROBERTA, _BERT),
    *_text("XLM-RoBERTa", "XLMRoberta", _ROBERTA, _BERT, module="xlm_roberta", inside="roberta"),
    *_text("CamemBERT", "Camembert", _ROBERTA, _BERT, inside="roberta"),
    *_text("ALBERT", "Albert", partial(_text_config, drops_in=("projection",)), _ALBERT),
    *_text("DistilBERT", "DistilBert", _DISTIL, _DISTILBERT),
    *_text("ELECTRA", "Electra", _ELECTRA, _BERT),
    *_text("ModernBERT", "ModernBert", _modernbert_config, _MODERNBERT, inside="model", readout=_MODERNBERT_HEAD),
    *_text("Nomic BERT", "NomicBert", _text_config, _ROTARY_BERT, module="nomic_bert", readout=_NOMIC),
    *_text("GTE", "Gte", _GTE_DROPS, _ROTARY_BERT, readout=_GTE),
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
        own = partial(_several, architecture.config) if _sigmoids(model) else architecture.config
        return replace(architecture, name=name, config=own, metadata=metadata), inner
    pooling: Any = behind[0]
    pool = _POOLS[pooling.pooling_mode]

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


def _sigmoids(model: Any) -> bool:
    """Whether it is a CrossEncoder whose labels are each right or not."""
    return isinstance(getattr(model, "activation_fn", None), nn.Sigmoid) and int(getattr(model, "num_labels", 1)) > 1


def _several(config: Callable[[Found, int | None], EnsembleConfig], found: Found, labels: int | None) -> EnsembleConfig:
    """The configuration of a classifier, with a sigmoid for each label."""
    read = config(found, labels)
    return replace(read, readout=replace(read.readout, outputs="labels"))


def _require_plain(model: Any, first: Any, behind: Sequence[Any]) -> None:
    """Raise if a model processes texts before its encoder, or tokens after it, in a way that is not converted."""
    prompt = (getattr(model, "prompts", None) or {}).get(getattr(model, "default_prompt_name", None))
    if prompt:
        way = "set model.default_prompt_name = None, and add it to your texts yourself"
        raise ConversionError(f"it puts the prompt {prompt!r} before every text, which is not converted; {way}")
    if getattr(first, "do_lower_case", False):
        raise core.refuse("it lower-cases texts before its tokenizer does anything (do_lower_case)")
    activation = getattr(model, "activation_fn", None)  # of a CrossEncoder
    if not isinstance(activation, nn.Identity | nn.Softmax | nn.Sigmoid | None):
        way = "if exactly one class is right, set model.activation_fn = torch.nn.Identity()"
        raise ConversionError(f"it answers with the {type(activation).__name__} of each class, not a softmax; {way}")
    kinds = [type(part).__name__ for part in behind]
    if kinds not in ([], ["Pooling"], ["Pooling", "Normalize"]):
        raise core.refuse(f"after the encoder there are {kinds}")

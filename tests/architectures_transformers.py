"""Small random models of transformers, for the tests that run once per architecture."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from architectures import BLOCKS, ArchitectureCase, Inputs, images, perturbed

VISION = {**BLOCKS, "hidden_size": 32, "image_size": 32, "patch_size": 8, "num_labels": 5}
_VIT = {**VISION, "intermediate_size": 64}
_DINOV2 = {**VISION, "mlp_ratio": 2, "layerscale_value": 0.5}
_WORDS = {"vocab_size": 60, "max_position_embeddings": 24, "num_labels": 5}
_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
TEXT = {**_WORDS, **BLOCKS, **_DROPOUT, "hidden_size": 32, "intermediate_size": 64}
_NO_DROPOUT = dict.fromkeys(("dropout", "attention_dropout", "seq_classif_dropout"), 0.0)
DISTILBERT = {**_WORDS, **_NO_DROPOUT, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}


def transformers_model(model: str, settings: dict[str, Any], **arguments: Any) -> nn.Module:
    """A random model of a transformers class, given its name and its configuration."""
    import transformers

    torch.manual_seed(0)
    kind = getattr(transformers, model)
    return perturbed(kind(kind.config_class(**settings), **arguments))


def token_batch(pad: int, segments: bool, tokens: int = 11, seed: int = 2) -> Inputs:
    """Three sequences of different lengths, right-padded with `pad`; no other token has that id."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 60, (3, tokens), generator=generator)
    mask = torch.arange(tokens)[None] < torch.tensor([tokens, tokens - 4, 3])[:, None]  # [B, T]
    inputs = {"input_ids": ids.masked_fill(~mask, pad), "attention_mask": mask.long()}
    if segments:
        inputs["token_type_ids"] = (torch.arange(tokens)[None] > 5).long() * mask
    return inputs


SIZES = ((48, 48), (24, 40), (16, 64))  # image sizes other than the model's own


def vision_case(
    label: str,
    model: str,
    settings: dict[str, Any],
    answer: str = "logits",
    resize: bool = True,
    sizes: Sequence[tuple[int, int]] = SIZES,
) -> ArchitectureCase:
    """An image model; set `resize` where the library must be asked to resample the position embedding."""
    asked: dict[str, Any] = {"interpolate_pos_encoding": True} if resize else {}
    return ArchitectureCase(
        name=f"transformers-{label}",
        build=lambda: transformers_model(model, settings),
        logits=lambda model, inputs: getattr(model(**inputs, **asked), answer),
        other_inputs=tuple(partial(images, *size) for size in sizes),
    )


def text_case(
    label: str,
    model: str,
    settings: dict[str, Any],
    answer: str = "logits",
    inputs: Callable[[], Inputs] | None = None,
    pad: int = 0,
    segments: bool = True,
    **arguments: Any,
) -> ArchitectureCase:
    """A text model; without an output named `answer`, its first token is the answer."""

    def logits(model: nn.Module, inputs: Inputs) -> Tensor:
        output = model(**inputs)
        found = getattr(output, answer, None)
        return output.last_hidden_state[:, 0] if found is None else found

    return ArchitectureCase(
        name=f"transformers-{label}",
        build=lambda: transformers_model(model, settings, **arguments),
        inputs=inputs or partial(token_batch, pad, segments),
        logits=logits,
        kind="text",
        one_layer=model.startswith("Albert"),
    )


def _mae_features(model: Any, inputs: Inputs) -> Tensor:
    """The class token of an encoder that sees all patches in order."""
    batch, _, height, width = inputs["pixel_values"].shape
    order = torch.arange(height // 8 * (width // 8)).expand(batch, -1).float()
    return model(**inputs, noise=order, interpolate_pos_encoding=True).last_hidden_state[:, 0]


def save_tokenizer(folder: Path, words: Sequence[str] = "abcdefgh") -> None:
    """Save a tokenizer of a few words, as `save_pretrained` does next to a model."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    ids = {word: index for index, word in enumerate(("[PAD]", "[UNK]", "[CLS]", "[SEP]", *words))}
    core = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=core, model_max_length=16, **names).save_pretrained(folder)


def sentence_model(folder: Path, pooling: str, *more: str) -> Any:
    """A sentence-transformers model around the encoder and tokenizer saved in a folder."""
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    others: dict[str, Any] = {"normalize": Normalize, "dense": lambda: Dense(32, 8)}
    parts = [Transformer(str(folder)), Pooling(32, pooling), *(others[one]() for one in more)]
    return library.SentenceTransformer(modules=parts, device="cpu").eval()


def sentence_bert() -> nn.Module:
    """A BERT in a sentence-transformers model with mean pooling."""
    with TemporaryDirectory() as folder:
        save_tokenizer(Path(folder))
        transformers_model("BertModel", TEXT).save_pretrained(folder)
        return sentence_model(Path(folder), "mean")


_POOLED = "pooler_output"
_SWIGLU = {**_DINOV2, "use_swiglu_ffn": True}
_REGISTERS = {**_DINOV2, "num_register_tokens": 3}
_NARROW = {**TEXT, "embedding_size": 16}
_ONE_KIND = {**TEXT, "type_vocab_size": 1}
_SHARED = {**_NARROW, "classifier_dropout_prob": 0.0}
_GATED = {"num_register_tokens": 2, "use_gated_mlp": True, "hidden_act": "silu", "layerscale_value": 0.5}
_STILL = {"pos_embed_rescale": None}  # no random rescaling in training
DINOV3 = {**BLOCKS, **_GATED, **_STILL, "hidden_size": 32, "image_size": 32, "patch_size": 8, "intermediate_size": 48}
_SPECIAL = {"pad_token_id": 0, "cls_token_id": 1, "bos_token_id": 1, "sep_token_id": 2, "eos_token_id": 2}
MODERNBERT = {**_WORDS, **BLOCKS, **_SPECIAL, "hidden_size": 32, "intermediate_size": 48, "local_attention": 4}
CASES: list[ArchitectureCase] = [
    vision_case("vit", "ViTForImageClassification", _VIT),
    vision_case("vit-bare", "ViTModel", {**_VIT, "qkv_bias": False}, answer=_POOLED),
    vision_case("deit", "DeiTForImageClassification", _VIT),
    vision_case("deit-teacher", "DeiTForImageClassificationWithTeacher", _VIT),
    ArchitectureCase(
        name="transformers-vit-mae",
        build=lambda: transformers_model("ViTMAEModel", {**_VIT, "mask_ratio": 0.0}).requires_grad_(),
        logits=_mae_features,
        other_inputs=(partial(images, 48, 48), partial(images, 16, 64)),
    ),
    vision_case("vit-msn", "ViTMSNForImageClassification", _VIT),
    vision_case("ijepa", "IJepaForImageClassification", _VIT),
    vision_case("dinov2", "Dinov2ForImageClassification", _DINOV2, resize=False),
    vision_case("dinov2-swiglu-bare", "Dinov2Model", _SWIGLU, resize=False, answer=_POOLED),
    vision_case("dinov2-registers", "Dinov2WithRegistersForImageClassification", _REGISTERS, resize=False),
    text_case("bert", "BertForSequenceClassification", TEXT),
    text_case("bert-bare", "BertModel", {**TEXT, "hidden_act": "gelu_new"}, answer=_POOLED),
    text_case("roberta", "RobertaForSequenceClassification", _ONE_KIND, pad=1, segments=False),
    text_case("roberta-bare", "RobertaModel", TEXT, pad=1, answer=_POOLED, add_pooling_layer=False),
    text_case("xlm-roberta", "XLMRobertaForSequenceClassification", _ONE_KIND, pad=1, segments=False),
    text_case("xlm-roberta-bare", "XLMRobertaModel", _ONE_KIND, pad=1, segments=False, answer=_POOLED),
    text_case("camembert", "CamembertForSequenceClassification", _ONE_KIND, pad=1, segments=False),
    text_case("albert", "AlbertForSequenceClassification", _SHARED),
    text_case("albert-bare", "AlbertModel", _SHARED, answer=_POOLED),
    text_case("distilbert", "DistilBertForSequenceClassification", DISTILBERT, segments=False),
    text_case("electra", "ElectraForSequenceClassification", {**TEXT, "embedding_size": 32}),
    text_case("electra-projected", "ElectraForSequenceClassification", _NARROW),
    vision_case("dinov3", "DINOv3ViTModel", DINOV3, resize=False, answer=_POOLED),
    text_case("modernbert", "ModernBertForSequenceClassification", MODERNBERT, segments=False),
    text_case("nomic", "NomicBertForSequenceClassification", TEXT),
    text_case("jina", "JinaEmbeddingsV3ForSequenceClassification", _ONE_KIND, pad=1, segments=False),
    ArchitectureCase(
        name="sentence-transformers-bert",
        build=sentence_bert,
        inputs=lambda: token_batch(0, segments=False),
        logits=lambda model, inputs: model(dict(inputs))["sentence_embedding"],
        kind="text",
    ),
    text_case("gte", "GteForSequenceClassification", {**TEXT, "type_vocab_size": 2}, pad=1),
]
_MEAN = {**MODERNBERT, "classifier_pooling": "mean", "norm_bias": True, "attention_bias": True, "mlp_bias": True}
_PLAIN = {**DINOV3, "query_bias": False, "value_bias": False, "num_register_tokens": 0}
VARIANTS: list[ArchitectureCase] = [  # variants of architectures in the cases above
    vision_case("dinov3-plain", "DINOv3ViTModel", _PLAIN, resize=False, answer=_POOLED),
    text_case("modernbert-mean", "ModernBertForSequenceClassification", _MEAN, segments=False),
    text_case("modernbert-bare", "ModernBertModel", MODERNBERT, segments=False, answer=_POOLED),
    text_case("nomic-bare", "NomicBertModel", TEXT, answer=_POOLED),
    text_case("gte-no-segments", "GteModel", {**TEXT, "type_vocab_size": 0}, segments=False, answer=_POOLED),
]

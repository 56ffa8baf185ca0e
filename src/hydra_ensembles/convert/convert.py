"""Conversion of a library's live model to the canonical ensemble or dual encoder: table, weights, equal answers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from .._utils import unwrapped
from ..errors import ConversionError
from ..model.config import EnsembleConfig, PatchStemConfig
from ..model.dual_encoder import DualEncoder
from ..model.ensemble import Ensemble
from ..model.layers import GroupedLinear, OurModel, linear
from ..model.metadata import Metadata, invalid_names
from ..model.stem_readout import Projections
from ..preprocessing import TextPreprocessing
from . import clip, decoders, timm_torchvision, transformers
from .adapters import is_adapted, merged
from .compare import Original, require_same_answers
from .core import (
    WAYS,
    Architecture,
    DualArchitecture,
    Found,
    prefix_errors,
    qualified_name,
    require_all_used,
    translate,
)
from .declared import Declaration, read_declaration
from .decoders import LabelWords, evened, with_label_words
from .folders import opened_source, stored_tensors
from .processors import part_for, size_of_images, with_processor
from .transformers import opened

ARCHITECTURES: tuple[Architecture, ...] = (
    *timm_torchvision.ARCHITECTURES,
    *transformers.ARCHITECTURES,
    *decoders.ARCHITECTURES,
    *clip.ARCHITECTURES,
)
_BY_CLASS: dict[str, Architecture | DualArchitecture] = {name: one for one in ARCHITECTURES for name in one.classes}
_BY_CLASS |= {name: one for one in clip.DUAL_ARCHITECTURES for name in one.classes}
_SCALES = ("logit_scale", "logit_bias")
# Why common models have no table, by a word in the qualified name of their class.
_REASONS = {
    "swin": "its tokens are merged and its width changes from stage to stage",
    **dict.fromkeys(("deberta", "beit", "mpnet", "t5"), "its attention depends on relative positions"),
    **dict.fromkeys(
        ("moe", "mixtral", "deepseek_v", "gpt_oss", "dbrx", "llama4", "switch_transformers", "minimax"),
        "its MLPs are a mixture of experts",
    ),
    **dict.fromkeys(
        ("mamba", "rwkv", "jamba", "bamba", "zamba", "falcon_h1", "recurrent_gemma", "xlstm", "qwen3_next", "lfm2"),
        "it has state-space or recurrent layers",
    ),
    **dict.fromkeys(("bart", "pegasus", "marian", "prophetnet", "m2m_100"), "it is an encoder with a decoder"),
    **dict.fromkeys(
        ("ForCausalLM", "LMHeadModel"),
        "it is a language model; give labels={name: word} and tokenizer=, or model.base_model with num_labels=",
    ),
    "ForMaskedLM": "its head has another task; convert model.base_model, with num_labels=",
}


def convert(
    model: nn.Module | str | Path,
    *,
    num_labels: int | None = None,
    labels: Sequence[str] | LabelWords | None = None,
    processor: Any = None,
    tokenizer: Any = None,
    template: str | None = None,
    empty: Sequence[str] = (),
    prefix: str | Sequence[int] | None = None,
    declaration: Declaration | None = None,
    probe: bool = True,
) -> Ensemble | Any:  # Any: a dual encoder, by its class; use `isinstance`
    """Convert a model of timm, torchvision, transformers or open_clip, or your own, to an `Ensemble` with one member.

    A table for the class of the model says where each canonical parameter is; every tensor must be used, and at the end
    both models must answer two fixed inputs alike (`compare`), or the model is refused. So hooks, replaced parts and
    subclasses that change an answer are noticed. The result is a copy, in evaluation mode, and independent of the
    library the model came from. Parameters that are frozen in a partly trained model (`requires_grad`) stay frozen.

    Args:
        model: A live model; wrappers of `torch.compile` and of data parallelism are removed, and adapters of peft are
            merged into a copy. Or where it was saved: a folder, or `hub:owner/name`; its tokenizer is read, too, and
            its weights one after another, so that there is never more than one of two models in memory.
        num_labels: For a model without classifier: number of classes of a new one, drawn with a fixed seed.
        labels: Class names in the order of the logits, all different, if the model does not have them. For a language
            model: the word or words it answers with for each, `{"safe": " safe", "unsafe": [" unsafe", " bad"]}`, whose
            probabilities are summed. Its classifier is those rows of its `lm_head`; nothing is generated.
        processor: What turns raw inputs into tensors: a tokenizer or image processor of transformers, evaluation
            transforms of torchvision, or an `ImagePreprocessing` / `TextPreprocessing`. Saved with the ensemble. For a
            dual encoder also a processor of both, open_clip's tokenizer, or a list of processors.
        tokenizer: The tokenizer of a language model, for label words; the same as `processor` for other models.
        template: What each text of a language model is put into, `"Is this safe? {text} Answer:"`; the message of a
            user, if the tokenizer has a chat template.
        empty: Texts without content, such as `["", "N/A"]`: the mean answer of label words to them is taken out of all
            answers (contextual calibration, Zhao et al. 2021), so that no label is preferred from the start.
        prefix: What stands before every text of a decoder, read once for all of them, as by `Ensemble.with_prefix`; an
            empty text stands for the beginning of the template alone.
        declaration: Where the parts of your own model are.
        probe: Compare the answers of both models. False skips the comparison, for a model that cannot be run
            here or whose difference is known and intended.

    Examples:
        >>> import timm, torch, hydra_ensembles as he
        >>> model = timm.create_model("test_vit", num_classes=3).eval()  # with pretrained=True, or your own weights
        >>> base = he.convert(model, labels=["forest", "river", "road"])
        >>> images = torch.randn(2, 3, 160, 160)
        >>> torch.allclose(base(images)[0], model(images), atol=1e-5)
        True
    """
    language, folder = isinstance(labels, Mapping), None
    if empty and not language:
        raise ConversionError("empty= is for a language model with label words")
    if isinstance(model, str | Path):
        model, its_own, folder = opened_source(str(model), language=language, bare=num_labels is not None)
        processor = its_own if processor is None and tokenizer is None else processor
    if not isinstance(model, nn.Module):
        raise ConversionError(f"convert needs a live model, or the folder of one; got a {type(model).__name__}")
    model = unwrapped(model)
    adapted = is_adapted(model)
    model = merged(model) if adapted else model
    processor = tokenizer if processor is None else processor
    architecture, model = architecture_of(model, labels, processor, template, declaration)
    if isinstance(labels, Mapping):  # its architecture has them
        labels = processor = None
    probe = probe and not any(parameter.is_meta for parameter in model.parameters())  # these cannot be run
    with prefix_errors(architecture.name):
        if isinstance(architecture, DualArchitecture):
            if (num_labels, labels, prefix) != (None, None, None):
                raise ConversionError("it has two towers and no classifier; give nothing but processor=")
            return _convert_dual(architecture, model, processor, probe)
        owned = folder is not None or adapted
        ensemble = _converted(architecture, model, num_labels, labels, processor, probe, owned, folder)
    ensemble = ensemble if prefix is None else ensemble.with_prefix(prefix)
    return evened(ensemble, empty) if empty else ensemble


def convert_if_needed(model: Any) -> Any:
    """Convert a model of another library, unwrap one of ours, and return anything that is not a module unchanged."""
    if not isinstance(model, nn.Module):
        return model
    inner = unwrapped(model)  # removes `torch.compile` and data-parallel wrappers
    return inner if isinstance(inner, OurModel) else convert(model)


def architecture_of(
    model: nn.Module,
    labels: Sequence[str] | LabelWords | None = None,
    processor: Any = None,
    template: str | None = None,
    declaration: Declaration | None = None,
) -> tuple[Architecture | DualArchitecture, nn.Module]:
    """The table for a model, and the model that it is for, which may be a part of the given one."""
    if isinstance(labels, Mapping):
        return with_label_words(model, labels, processor, template), model
    if template is not None:
        raise ConversionError('template= is for a language model with label words: labels={"yes": " yes", "no": " no"}')
    if declaration is not None:
        with prefix_errors(type(model).__name__):
            return read_declaration(declaration, model, size_of_images(processor)), model
    if type(model).__module__.startswith("sentence_transformers."):
        return opened(model, table_of)
    return table_of(type(model)), model


def table_of(kind: type) -> Architecture | DualArchitecture:
    """Return the table for a class, or for the class it is derived from; raise if there is none."""
    for base in kind.__mro__:
        known = _BY_CLASS.get(f"{base.__module__}.{base.__qualname__}")
        if known is not None:
            return known
    name = f"{kind.__module__}.{kind.__qualname__}"
    if issubclass(kind, OurModel):
        raise ConversionError(f"convert needs a model of another library, but this is a {kind.__name__} already")
    reason = next((f": {reason}" for word, reason in _REASONS.items() if word in name), "")
    raise ConversionError(f"there is no table for {name}{reason}. {WAYS}")


def _converted(
    architecture: Architecture,
    model: nn.Module,
    num_labels: int | None,
    labels: Sequence[str] | None,
    processor: Any,
    probe: bool,
    owned: bool,
    folder: Path | None,
) -> Ensemble:
    """Convert a model.

    If it is `owned`, nobody else has it: it answers first, and its weights are given up one after another, or read from
    the files of its folder, so that there is never more than one of two models in memory.
    """
    found = Found(architecture, model)
    config = architecture.config(found, num_labels)
    fresh = num_labels is not None and not found.has("readout.classifier.weight")
    stated = _read_metadata(found, config, processor)
    line = f"converted from {architecture.name}" + f", with a new classifier of {num_labels} classes" * fresh
    metadata = replace(
        stated,
        source=f"{architecture.name} ({qualified_name(model)})",
        labels=_labels(labels, stated, config.readout.num_classes),
        history=(line,),
    )
    original = Original(found, config, metadata, fresh)
    answers = original.answers() if probe and owned else []
    if folder is not None:
        found.tensors = stored_tensors(folder, found)
    if owned:
        found.release()
    state, frozen = translate(found, config, may_be_fresh=num_labels is not None, owned=owned)
    ensemble = Ensemble.from_state(config, state, metadata, frozen, copies=False)
    if probe:
        require_same_answers(original, answers or original.answers(), ensemble)
    return ensemble


def _read_metadata(found: Found, config: EnsembleConfig, processor: Any) -> Metadata:
    """Read the metadata of a model, with its own preprocessing or that of a processor, adjusted to the model."""
    metadata = with_processor(found.architecture.metadata(found.model), processor, config, found.model)
    texts = metadata.preprocessing
    if not isinstance(texts, TextPreprocessing):
        return metadata
    if not found.architecture.masks:  # the model attends to padding
        texts = replace(texts, attention_mask=False)
    if config.readout.pool == "final":  # and pools the last position
        texts = replace(texts, pad_to_max=True)
    return replace(metadata, preprocessing=texts)


def _labels(labels: Sequence[str] | None, metadata: Metadata, classes: int) -> tuple[str, ...]:
    known = metadata.labels
    if len(known) == 1 and classes == 2:  # the only output, and its absence
        known = (f"not {known[0]}", *known)
    theirs = _disambiguate(known) if len(known) == classes else ()
    if labels is None:
        return theirs
    names = tuple(labels)
    if len(names) != classes or any(invalid_names(names)):
        raise ConversionError(f"labels must be {classes} names that tell the classes apart, got {names[:6]}")
    return names


def _disambiguate(names: tuple[str, ...]) -> tuple[str, ...]:
    """Add the class number to names that are blank or occur twice (ImageNet has two classes `crane`)."""
    blank, again = invalid_names(names)
    return tuple(f"{name} ({i})".strip() if name in again or i in blank else name for i, name in enumerate(names))


# --- dual encoders -------------------------------------------------------------------------------------------


def _convert_dual(dual: DualArchitecture, model: nn.Module, processor: Any, probe: bool) -> DualEncoder:
    """Convert the image tower and the text tower, with their projections."""
    paths = tuple(f"{side}." for side in (dual.image, dual.text) if isinstance(side, str))
    if len(paths) == 2:  # a tower without a path of its own checks all tensors itself
        require_all_used((), [name for name in model.state_dict() if not name.startswith((*paths, *_SCALES))])
    origin = Metadata(source=f"{dual.name} ({qualified_name(model)})", history=(f"converted from {dual.name}",))
    towers = [_convert_tower(side, model, origin, processor, probe) for side in (dual.image, dual.text)]
    (image, of_images), (text, of_texts) = towers
    scale, bias = (getattr(model, name, None) for name in _SCALES)
    return DualEncoder(image, text, Projections(of_images, of_texts), scale, bias).eval()  # type: ignore[arg-type]


def _convert_tower(
    side: str | Architecture, model: nn.Module, origin: Metadata, processor: Any, probe: bool
) -> tuple[Ensemble, GroupedLinear | None]:
    """Convert one tower without classifier, and the projection that is declared as its classifier."""
    if isinstance(side, str):
        model = model.get_submodule(side)
        side = table_of(type(model))  # type: ignore[assignment]
    assert isinstance(side, Architecture)
    found = Found(side, model)
    config = side.config(found, None)
    state, _ = translate(found, config)
    stated = _read_metadata(found, config, part_for(isinstance(config.stem, PatchStemConfig), processor))
    metadata = replace(origin, preprocessing=stated.preprocessing, preprocessing_from=stated.preprocessing_from)
    weight, bias = (state.pop(f"readout.classifier.{leaf}", None) for leaf in ("weight", "bias"))
    config = replace(config, readout=replace(config.readout, num_classes=0, bias=True))
    projection = None if weight is None else linear(weight, bias)
    ensemble = Ensemble.from_state(config, state, metadata, copies=False)
    original = Original(found, config, metadata)
    if probe:
        require_same_answers(original, original.answers(), ensemble, projection)
    return ensemble, projection

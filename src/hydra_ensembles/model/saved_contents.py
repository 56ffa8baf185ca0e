"""Contents of a saved model: configuration, metadata and tensors as plain data, checked against each other."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import CheckpointError, ConfigError
from ..model_card import dual_model_card, model_card
from ..preprocessing import TextPreprocessing
from ..schema import from_plain, to_plain
from .config import DualEncoderConfig, EnsembleConfig, TextStemConfig, output_width
from .metadata import Familiarity, FamiliaritySettings, Metadata, TextSettings, TextSide

CONFIG, WEIGHTS, TOKENIZER, CARD = "config.json", "model.safetensors", "tokenizer.json", "README.md"
FORMAT, FORMAT_VERSION = "hydra_ensembles", 2  # version 1 had no digest of config.json, and might mix dtypes
ENSEMBLE, DUAL_ENCODER = "ensemble", "dual_encoder"  # kinds of model
TEXT_SIDE = "text_side"  # key of the text side in the metadata, and prefix of its tensors
FAMILIARITY = "familiarity"  # the same for feature statistics
EXTRA_PREFIXES = (TEXT_SIDE, FAMILIARITY)  # of tensors that do not belong to the model itself, with their own dtype
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
ACCEPTED = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES.values())


@dataclass(frozen=True, kw_only=True)
class Record:
    """The fields of `config.json`; `files` has the SHA-256 of every other file that is read."""

    format: Literal["hydra_ensembles"] = "hydra_ensembles"
    format_version: Literal[1, 2] = 2
    library_version: str
    kind: str
    model: Mapping[str, Any]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether all fields must be present; in the first format some may be missing."""
        return self.format_version > 1


@dataclass(frozen=True)
class Contents:
    """A model ready to be written: configuration and metadata as JSON data, tensors by canonical name, card."""

    kind: str
    model: Mapping[str, Any]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    card: str


def ensemble_contents(name: str, config: EnsembleConfig, metadata: Metadata, state: Mapping[str, Tensor]) -> Contents:
    """What `save_pretrained` writes for an ensemble; `name` is its name in the model card."""
    plain = _plain_metadata(config, metadata)
    tensors = dict(state)
    for prefix, part in ((TEXT_SIDE, metadata.text_side), (FAMILIARITY, metadata.familiarity)):
        if part is not None:
            plain[prefix] = to_plain(part.settings)
            tensors |= {f"{prefix}.{key}": tensor for key, tensor in part.state.items()}
    return Contents(ENSEMBLE, to_plain(config), plain, tensors, model_card(name, config, metadata, state))


def dual_encoder_contents(
    name: str, config: DualEncoderConfig, image: Metadata, text: Metadata, state: Mapping[str, Tensor]
) -> Contents:
    """What `save_pretrained` writes for a dual encoder; `name` is its name in the model card."""
    plain = {"image": _plain_metadata(config.image, image), "text": _plain_metadata(config.text, text)}
    card = dual_model_card(name, config, image, text, state)
    return Contents(DUAL_ENCODER, to_plain(config), plain, state, card)


def read_ensemble(record: Record) -> tuple[EnsembleConfig, Metadata, TextSettings | None, FamiliaritySettings | None]:
    """Configuration and metadata of a stored ensemble, and the settings of its text side and of its familiarity."""
    texts = None
    fitted = None
    data = dict(record.metadata)
    config = from_plain(EnsembleConfig, record.model, "config.model", complete=True)
    if TEXT_SIDE in data:
        texts = from_plain(TextSettings, data.pop(TEXT_SIDE), f"config.metadata.{TEXT_SIDE}", complete=True)
        _check_text_side(config, texts)
    if FAMILIARITY in data:
        fitted = from_plain(FamiliaritySettings, data.pop(FAMILIARITY), f"config.metadata.{FAMILIARITY}")
    return config, _read_metadata(config, data, "config.metadata", record.complete), texts, fitted


def read_dual_encoder(record: Record) -> tuple[DualEncoderConfig, Metadata, Metadata]:
    """Configuration of a stored dual encoder, and the metadata of its image and text tower."""
    data = record.metadata
    config = from_plain(DualEncoderConfig, record.model, "config.model", complete=record.complete)
    if data.keys() != {"image", "text"}:
        raise CheckpointError(f"config.metadata has the fields {sorted(data)}, expected ['image', 'text']")
    image = _read_metadata(config.image, data["image"], "config.metadata.image", record.complete)
    return config, image, _read_metadata(config.text, data["text"], "config.metadata.text", record.complete)


def with_parts(
    tensors: Mapping[str, Tensor], metadata: Metadata, texts: TextSettings | None, fitted: FamiliaritySettings | None
) -> tuple[Mapping[str, Tensor], Metadata]:
    """Split off the tensors of text side and familiarity, which stay on the CPU, and add them to the metadata."""
    remaining = dict(tensors)

    def take(prefix: str) -> dict[str, Tensor]:
        names = [name for name in tensors if name.startswith(f"{prefix}.")]
        return {name.removeprefix(f"{prefix}."): remaining.pop(name).to("cpu", copy=True) for name in names}

    if texts is not None:
        metadata = replace(metadata, text_side=TextSide(texts, take(TEXT_SIDE)))
    if fitted is not None:
        metadata = replace(metadata, familiarity=Familiarity(fitted, take(FAMILIARITY)))
    return remaining, metadata


def text_preprocessing(metadata: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The sections of plain metadata that may hold a tokenizer: of a model, its text side, or its towers."""
    sections = (section for section in (metadata, *metadata.values()) if isinstance(section, Mapping))
    settings = (section.get("preprocessing") for section in sections)
    return [setting for setting in settings if isinstance(setting, dict) and setting.get("kind") == "text"]


def _plain_metadata(config: EnsembleConfig, metadata: Metadata) -> dict[str, Any]:
    """Metadata as JSON data, without parts that hold tensors; raises if it could not be read back."""
    plain: dict[str, Any] = to_plain(metadata.plain)
    try:
        _read_metadata(config, plain, "metadata")
    except ConfigError as error:
        raise CheckpointError(f"the model cannot be saved: {error}; replace it with with_metadata") from error
    return plain


def _read_metadata(config: EnsembleConfig, data: Any, path: str, complete: bool = True) -> Metadata:
    """Read metadata, and check labels, temperatures and preprocessing against the model."""
    strange = sorted({TEXT_SIDE, FAMILIARITY} & data.keys()) if isinstance(data, Mapping) else []
    if strange:
        raise CheckpointError(f"{path} has the unknown field {strange[0]!r}")
    metadata = from_plain(Metadata, data, path, complete=complete)
    try:
        metadata.check(config)
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error
    if isinstance(metadata.preprocessing, TextPreprocessing):
        _check_tokens(config, metadata.preprocessing, path)
    return metadata


def _check_tokens(config: EnsembleConfig, preprocessing: TextPreprocessing, path: str) -> None:
    """Refuse a padding id without an embedding, and a tokenizer that cannot be parsed."""
    assert isinstance(config.stem, TextStemConfig)
    if preprocessing.pad_id >= config.stem.vocabulary:
        raise CheckpointError(f"{path}: pad_id is {preprocessing.pad_id}, of {config.stem.vocabulary} tokens")
    try:
        preprocessing.require_tokenizer()
    except ConfigError as error:
        raise CheckpointError(f"{TOKENIZER}: {error}") from error


def _check_text_side(config: EnsembleConfig, texts: TextSettings) -> None:
    """Refuse a text side for another number of members, or for an ensemble without class embeddings."""
    if config.readout.cosine is None:
        raise CheckpointError("there is a text side, but the ensemble does not classify by class embeddings")
    if texts.members not in (1, config.members):
        raise CheckpointError(f"the text side has {texts.members} members, the ensemble {config.members}")
    ends = output_width(texts.tower) if texts.projection is None else texts.projection.outputs
    if config.readout.cosine.width not in (None, ends):
        raise CheckpointError(f"embeddings have width {ends} for texts and {config.readout.cosine.width} for images")
    if not isinstance(texts.tower.stem, TextStemConfig):
        raise CheckpointError(f"the tower of the text side reads {texts.tower.kind}s, expected texts")
    if not texts.preprocessing.tokenizer:
        raise CheckpointError("the text side has no tokenizer, so it cannot set classes")
    _check_tokens(texts.tower, texts.preprocessing, f"config.metadata.{TEXT_SIDE}")


# --- tensors ---------------------------------------------------------------------------------------------------------


def require_fit(
    stored: Mapping[str, tuple[tuple[int, ...], str]], named: Callable[[], Mapping[str, Tensor]]
) -> dict[str, tuple[int, ...]]:
    """Check stored tensors against those that `named` makes, without allocating any; returns their shapes by name."""
    try:
        with torch.device("meta"):
            expected = {name: tuple(tensor.shape) for name, tensor in named().items()}
    except (RuntimeError, OverflowError, TypeError) as error:  # sizes too large for any tensor
        raise CheckpointError(f"its configuration describes an impossible model: {first_line(error)}") from error
    shapes = expected
    for prefix in _old_poolings(stored):
        expected = _old_shapes(expected, prefix)
    problems = [f"lacks {name!r}" for name in sorted(expected.keys() - stored.keys())]
    problems += [f"has the unknown {name!r}" for name in sorted(stored.keys() - expected.keys())]
    for name in sorted(expected.keys() & stored.keys()):
        shape, dtype = stored[name]
        if shape != expected[name]:
            problems.append(f"has {name!r} with shape {list(shape)} instead of {list(expected[name])}")
        elif dtype not in DTYPES:
            problems.append(f"has {name!r} as {dtype}; accepted are {ACCEPTED}")
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise CheckpointError(f"it does not fit its configuration: it {'; it '.join(problems[:5])}{more}")
    return shapes


def upgrade_tensors(tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Convert tensors to current names and shapes: an attention that pools used to be stored as full matrices."""
    current = dict(tensors)
    for prefix in _old_poolings(tensors):
        old = {name: current.pop(f"{prefix}{name}") for name in _OLD_POOLING}
        for leaf, name in (("weight", "qkv"), ("bias", "qkv_bias")):
            heads, parts, *rest = shapes[f"{prefix}attention.{name}"]  # [K, 3, d_k, …]
            qkv = torch.cat([old[f"query.{leaf}"], old[f"key_value.{leaf}"]], dim=1)  # [G, 3·d, …]
            split = qkv.reshape(len(qkv), parts, -1, *rest).transpose(1, 2)  # [G, h, 3, d_k, …]
            current[f"{prefix}attention.{name}"] = split.reshape(heads, parts, *rest)
        out = old["out.weight"].transpose(1, 2)  # [G, h·d_k, d]
        current[f"{prefix}attention.out"] = out.reshape(shapes[f"{prefix}attention.out"])
        current[f"{prefix}attention.out_bias"] = old["out.bias"]
    return {name: current[name] for name in shapes}


_OLD_POOLING = tuple(f"{part}.{leaf}" for part in ("query", "key_value", "out") for leaf in ("weight", "bias"))


def _old_poolings(names: Iterable[str]) -> list[str]:
    """Prefixes of attention poolings stored in the old format."""
    return [name.removesuffix("query.weight") for name in names if name.endswith("readout.map.query.weight")]


def _old_shapes(shapes: Mapping[str, tuple[int, ...]], prefix: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes, with the old ones for the attention of a pooling."""
    attention = f"{prefix}attention."
    heads, _, head_dim, width = shapes.get(f"{attention}qkv", (0, 0, 0, 0))
    copies = shapes.get(f"{attention}out_bias", (0, 0))[0]
    if not width or heads * head_dim != copies * width:  # no pooling, or a pruned one, which was never stored this way
        return dict(shapes)
    rows = {"query": width, "key_value": 2 * width, "out": width}
    old: dict[str, tuple[int, ...]] = {f"{prefix}{part}.weight": (copies, size, width) for part, size in rows.items()}
    old |= {f"{prefix}{part}.bias": (copies, size) for part, size in rows.items()}
    return {**{name: shape for name, shape in shapes.items() if not name.startswith(attention)}, **old}


def part_of(name: str) -> str:
    """The part that a tensor belongs to: one of `EXTRA_PREFIXES`, or "" for the model itself."""
    part = name.partition(".")[0]
    return part if part in EXTRA_PREFIXES else ""


def require_one_dtype(dtypes: Mapping[str, str]) -> None:
    """Refuse a model with several floating-point types; each part in `EXTRA_PREFIXES` may have its own."""
    parts: dict[str, dict[str, str]] = {}  # per part, the first tensor of each type
    for name, dtype in dtypes.items():
        parts.setdefault(part_of(name), {}).setdefault(dtype, name)
    for examples in parts.values():
        if len(examples) > 1:
            types = ", ".join(f"{dtype} ({name})" for dtype, name in examples.items())
            raise CheckpointError(f"the tensors are of several types: {types}; convert the model: model.to(...)")


def first_line(error: Exception) -> str:
    """Type and first line of another library's error, for our own message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].rstrip('.') if lines else 'no further details'}"

"""The model card of a dual encoder."""

from collections.abc import Mapping

from torch import Tensor

from .config import EnsembleConfig
from .describe import describe
from .dual_config import DualEncoderConfig
from .metadata import Metadata
from .model_card import front_matter, heads_section, loading_section, one_line, table


def dual_model_card(
    name: str, config: DualEncoderConfig, image: Metadata, text: Metadata, state: Mapping[str, Tensor]
) -> str:
    """Text of the card: what the model is, how to load it, what was pruned in each tower."""
    origin = f" made from {one_line(image.source)}" if image.source else ""
    many = f", for {config.members} members in one pass per tower" if config.members > 1 else ""
    towers = {"image": (config.image, image), "text": (config.text, text)}
    sections = [
        front_matter("zero-shot-image-classification", ["uncertainty", "ensemble", "hydra-ensembles"]),
        f"# {one_line(name)}\n\nA dual encoder{origin}: images and texts in one embedding of width "
        f"{config.embedding_width}{many}, saved by the library Hydra Ensembles.",
        loading_section("DualEncoder", name, "encode_image", "images"),
        *(_tower(tower, *parts, state) for tower, parts in towers.items()),
        *(heads_section(parts[0], f"Heads kept, {tower} tower") for tower, parts in towers.items()),
        *(_history(tower, parts[1]) for tower, parts in towers.items()),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _tower(tower: str, config: EnsembleConfig, metadata: Metadata, state: Mapping[str, Tensor]) -> str:
    encoder = config.encoder
    own = [tensor for name, tensor in state.items() if name.startswith(f"{tower}.")]
    facts = describe(config, sum(tensor.numel() for tensor in own))
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in own})
    rows = [
        ["source", metadata.source or "unknown"],
        ["members", str(config.members)],
        ["encoder", f"{encoder.layers} layers, width {encoder.width}, {encoder.heads} heads of {encoder.head_dim}"],
        ["parameters", f"{facts.parameters:,} ({', '.join(dtypes)})"],
        ["multiply-adds", f"{facts.multiply_adds:,} for one input of {facts.tokens} tokens"],
    ]
    if metadata.preprocessing is not None:
        rows.append(["preprocessing", str(metadata.preprocessing)])
    return f"## The {tower} tower\n\n{table(['', ''], rows)}"


def _history(tower: str, metadata: Metadata) -> str:
    if not metadata.history:
        return ""
    lines = (f"{i}. {one_line(line)}" for i, line in enumerate(metadata.history, start=1))
    return f"## History, {tower} tower\n\n" + "\n".join(lines)

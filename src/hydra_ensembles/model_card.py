"""The README.md beside a saved model."""

from collections.abc import Mapping

from torch import Tensor

from .model.config import GROUPS, DualEncoderConfig, EnsembleConfig, PatchStemConfig
from .model.cost import describe
from .model.metadata import Metadata


def model_card(name: str, config: EnsembleConfig, metadata: Metadata, state: Mapping[str, Tensor]) -> str:
    """Text of the card: what the model is, what was pruned, how to load it, what was measured.

    Args:
        name: Hub id or folder, as it is to be given to `from_pretrained`.
        config: Architecture, members, sharing and heads.
        metadata: Source, labels, preprocessing, calibration, history and metrics.
        state: The parameters; only counted.
    """
    image = isinstance(config.stem, PatchStemConfig)
    classifies = config.readout.num_classes > 0
    task = ("image-" if image else "text-") + "classification"
    if not classifies:
        task = "image-feature-extraction" if image else "feature-extraction"
    tags = ["uncertainty", "ensemble", "hydra-ensembles"]
    sections = [
        front_matter(task, tags),
        f"# {one_line(name)}\n\n{_summary(config, metadata)}",
        loading_section("Ensemble", name, "predict" if classifies else "features", "images" if image else "texts"),
        _facts_section(config, metadata, state),
        heads_section(config),
        _labels_section(metadata),
        _calibration_section(metadata),
        _metrics_section(metadata),
        _history_section(metadata),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def front_matter(task: str, tags: list[str]) -> str:
    """The YAML block by which the hub files a model."""
    lines = ["---", "library_name: hydra_ensembles", f"pipeline_tag: {task}", "tags:", *(f"- {tag}" for tag in tags)]
    return "\n".join([*lines, "---"])


def loading_section(class_name: str, name: str, method: str, inputs: str) -> str:
    """Three lines of code that load the model and use it."""
    return (
        "## Loading\n\n```python\nimport hydra_ensembles as he\n"
        f"model = he.{class_name}.from_pretrained({name!r})\n"
        f"result = model.{method}({inputs})\n```"
    )


def heads_section(config: EnsembleConfig, title: str = "Heads kept") -> str:
    """Which attention heads each member keeps and which were removed, a row per layer."""
    total = config.encoder.heads
    kept = sum(len(heads) for member in config.heads for heads in member)
    possible = total * config.encoder.layers * config.members
    if kept == possible:
        return f"## {title}\n\nNothing was pruned: every member keeps all {total} heads of every layer."
    rows = []
    for layer in range(config.encoder.layers):
        cells = []
        for member in config.heads:
            removed = sorted(set(range(total)) - set(member[layer]))
            cells.append(f"{len(member[layer])}" + (f" (without {', '.join(map(str, removed))})" if removed else ""))
        rows.append([str(layer), *cells])
    header = ["layer", *(f"member {member}" for member in range(config.members))]
    return f"## {title}\n\n{kept} of {possible} heads are kept, of {total} per layer:\n\n{table(header, rows)}"


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(one_line(cell) for cell in line) + " |" for line in lines)


def one_line(text: str) -> str:
    """Text that cannot break out of its line or table cell."""
    return " ".join(text.split()).replace("|", "\\|")


def _summary(config: EnsembleConfig, metadata: Metadata) -> str:
    origin = f" made from {one_line(metadata.source)}" if metadata.source else ""
    if config.members == 1:
        return f"A transformer{origin}, saved by the library Hydra Ensembles as an ensemble with one member."
    return (
        f"{config.members} transformers{origin} that answer in one forward pass, saved by the library Hydra "
        "Ensembles. The answer has the logits of every member, so each prediction comes with its uncertainty."
    )


def _facts_section(config: EnsembleConfig, metadata: Metadata, state: Mapping[str, Tensor]) -> str:
    encoder = config.encoder
    facts = describe(config, sum(tensor.numel() for tensor in state.values()))
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in state.values()})
    shared = [group for group in GROUPS if getattr(config.sharing, group)]
    rows = [
        ["source", metadata.source or "unknown"],
        ["members", str(config.members)],
        ["encoder", f"{encoder.layers} layers, width {encoder.width}, {encoder.heads} heads of {encoder.head_dim}"],
        ["parameters", f"{facts.parameters:,} ({', '.join(dtypes)})"],
        ["multiply-adds", f"{facts.multiply_adds:,} for one input of {facts.tokens} tokens"],
    ]
    if config.members > 1:
        trunk = f"first {config.trunk} of {encoder.layers} layers" if config.trunk else "none"
        rows += [["shared by the members", ", ".join(shared) or "nothing"], ["shared trunk", trunk]]
    if metadata.preprocessing is not None:
        rows.append(["preprocessing", str(metadata.preprocessing)])
    if metadata.text_side is not None:
        templates = ", ".join(metadata.text_side.settings.templates)
        rows.append(["prompts", f"{templates}; the text towers are kept, so `he.retarget` can set other classes"])
    return f"## The model\n\n{table(['', ''], rows)}"


def _labels_section(metadata: Metadata) -> str:
    if not metadata.labels:
        return ""
    shown = ", ".join(one_line(label) for label in metadata.labels[:20])
    more = f" and {len(metadata.labels) - 20} more" if len(metadata.labels) > 20 else ""
    return f"## Labels\n\n{shown}{more}"


def _calibration_section(metadata: Metadata) -> str:
    calibration = metadata.calibration
    if calibration is None:
        return ""
    temperatures = ", ".join(f"{temperature:.4g}" for temperature in calibration.temperature)
    text = f"## Calibration\n\nTemperature: {temperatures}."
    if calibration.threshold is not None:
        text += (
            f" Abstain where the score `{calibration.score}` is above {calibration.threshold:.4g}; this accepted "
            f"{100 * calibration.accepted_share:.4g} % of the in-distribution validation data."
        )
    return text


def _metrics_section(metadata: Metadata) -> str:
    if not metadata.metrics:
        return ""
    rows = [[name, f"{value:.6g}"] for name, value in metadata.metrics.items()]
    return f"## Metrics\n\n{table(['metric', 'value'], rows)}"


def _history_section(metadata: Metadata) -> str:
    if not metadata.history:
        return ""
    return "## History\n\n" + "\n".join(f"{i}. {one_line(line)}" for i, line in enumerate(metadata.history, start=1))


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

"""The README.md of a saved model: the template is `model_card.md`, the sections are generated here."""

from collections.abc import Mapping, Sequence
from importlib.resources import files

from torch import Tensor

from .model.config import GROUPS, DualEncoderConfig, EnsembleConfig
from .model.cost import describe
from .model.metadata import ACCEPTS_ALL, Metadata

State = Mapping[str, Tensor]


def model_card(name: str, config: EnsembleConfig, metadata: Metadata, state: State) -> str:
    """Text of the model card: what the model is, what was pruned, how to load it (as `name`), and its metrics."""
    image = config.kind == "image"
    classifies = config.readout.num_classes > 0
    task = f"{config.kind}-classification" if classifies else f"{'image-' if image else ''}feature-extraction"
    summary = f"An ensemble with one member{_origin(metadata)}"
    if config.members > 1:
        summary = f"{config.members} transformers{_origin(metadata)} that answer in one forward pass, with the logits "
        summary += "of every member, so that each prediction comes with its uncertainty"
    call = f"{'predict' if classifies else 'features'}({config.kind}s)"
    return _card(name, "Ensemble", call, task, summary, _sections("model", "", config, metadata, state))


def dual_model_card(name: str, config: DualEncoderConfig, image: Metadata, text: Metadata, state: State) -> str:
    """Text of the model card of a dual encoder: like `model_card`, tower by tower."""
    in_members = f", for {config.members} members in one pass per tower" if config.members > 1 else ""
    width = config.embedding_of("image")
    summary = f"A dual encoder{_origin(image)}: images and texts in one embedding of width {width}{in_members}"
    sections = []
    for tower, tower_config, metadata in (("image", config.image, image), ("text", config.text, text)):
        tower_state = {key: tensor for key, tensor in state.items() if key.startswith(f"{tower}.")}
        sections.append(_sections(f"{tower} tower", f", {tower} tower", tower_config, metadata, tower_state))
    task = "zero-shot-image-classification"
    return _card(name, "DualEncoder", "encode_image(images)", task, summary, "\n\n".join(sections))


_ESCAPES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"} | {sign: f"\\{sign}" for sign in "\\|[]"})


def one_line(text: object) -> str:
    """Escape text so that it stays in its line or table cell, and is not read as HTML, a link or an image."""
    return " ".join(str(text).split()).translate(_ESCAPES)


def _card(name: str, class_name: str, call: str, task: str, summary: str, sections: str) -> str:
    values = {"title": one_line(name), "class_name": class_name, "call": call, "task": task, "summary": summary}
    frame = files(__package__).joinpath("model_card.md").read_text(encoding="utf-8")
    return frame.format(name=name, sections=sections, **values)


def _origin(metadata: Metadata) -> str:
    return f" made from {one_line(metadata.source)}" if metadata.source else ""


def _table(*rows: Sequence[object]) -> str:
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join("| " + " | ".join(one_line(cell) for cell in line) + " |" for line in lines)


def _sections(title: str, which: str, config: EnsembleConfig, metadata: Metadata, state: State) -> str:
    """All sections about an ensemble, or about one tower (`which`); unknown facts are left out."""
    labels = ", ".join(one_line(label) for label in metadata.labels[:20])
    more = f" and {len(metadata.labels) - 20} more" if len(metadata.labels) > 20 else ""
    metrics = [(name, f"{value:.6g}") for name, value in metadata.metrics.items()]
    texts = {
        f"The {title}": _facts(config, metadata, state),
        f"Heads kept{which}": _heads(config),
        f"Labels{which}": labels + more,
        f"Calibration{which}": _calibration(metadata),
        f"Metrics{which}": _table(("metric", "value"), *metrics) if metrics else "",
        f"History{which}": "\n".join(f"{i}. {one_line(line)}" for i, line in enumerate(metadata.history, start=1)),
    }
    return "\n\n".join(f"## {heading}\n\n{text}" for heading, text in texts.items() if text)


def _facts(config: EnsembleConfig, metadata: Metadata, state: State) -> str:
    encoder = config.encoder
    cost = describe(config, sum(tensor.numel() for tensor in state.values()))
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in state.values()})
    sizes = f"{encoder.layers} layers, width {encoder.width}, {encoder.heads} heads of {encoder.head_dim}"
    rows = [("", ""), ("source", metadata.source or "unknown"), ("members", str(config.members)), ("encoder", sizes)]
    rows += [("parameters", f"{cost.parameters:,} ({', '.join(dtypes)})")]
    rows += [("multiply-adds", f"{cost.multiply_adds:,} for one input of {cost.tokens} tokens")]
    if config.members > 1:
        shared = ", ".join(group for group in GROUPS if getattr(config.sharing, group))
        trunk = f"first {config.trunk} of {encoder.layers} layers" if config.trunk else "none"
        rows += [("shared by the members", shared or "nothing"), ("shared trunk", trunk)]
    if metadata.preprocessing is not None:
        origin = f" (from: {metadata.preprocessing_from})" if metadata.preprocessing_from else ""
        rows += [("preprocessing", f"{metadata.preprocessing}{origin}")]
    if metadata.text_side is not None:
        templates = ", ".join(metadata.text_side.settings.templates)
        rows += [("prompts", f"{templates}; the text towers are kept, so `he.retarget` can set other classes")]
    return _table(*rows)


def _heads(config: EnsembleConfig) -> str:
    """Which attention heads each member keeps and which were removed, one row per layer."""
    counts = config.head_counts
    total = sum(counts) * config.members
    kept = sum(len(heads) for member in config.heads for heads in member)
    if kept == total:
        return f"Nothing was pruned: every member keeps all {counts[0]} heads of every layer."
    rows = [["layer", *(f"member {member}" for member in range(config.members))]]

    def cell(heads: Sequence[int], count: int) -> str:
        removed = ", ".join(str(head) for head in range(count) if head not in heads)
        return f"{len(heads)} (without {removed})" if removed else str(len(heads))

    names = [*map(str, range(config.encoder.layers)), "pooling"]
    for name, count, members in zip(names, counts, zip(*config.heads, strict=True), strict=False):
        rows.append([name, *(cell(heads, count) for heads in members)])
    return f"{kept} of {total} heads are kept, of {counts[0]} per layer:\n\n{_table(*rows)}"


def _calibration(metadata: Metadata) -> str:
    """The temperature, and every threshold for abstaining with the share of inputs that it promises to accept."""
    calibration = metadata.calibration
    if calibration is None:
        return ""
    of_mean = calibration.calibrates == "probs" and len(calibration.temperature) == 1
    after = " (of the mean probabilities)" if of_mean else ""
    text = f"Temperature{after}: {', '.join(f'{temperature:.4g}' for temperature in calibration.temperature)}."
    limits = [(f"`{calibration.score}`", calibration.threshold, "unsure", calibration.accepted_share)]
    if metadata.familiarity is not None:
        fitted = metadata.familiarity.settings
        limits += [(f"`{fitted.scores[0]}` of the features", fitted.threshold, "unfamiliar", fitted.accepted_share)]
    rules = [
        (f"the score {score} is above {threshold:.4g} ({reason})", share)
        for score, threshold, reason, share in limits
        if threshold is not None and threshold < ACCEPTS_ALL
    ]
    if not rules:
        never = " Every input is accepted: there were too few held-out samples to decline any, or the share was 100 %."
        return text if calibration.threshold is None else text + never
    shares = " and ".join(f"{100 * share:.4g} %" for share in dict.fromkeys(share for _, share in rules))
    text += f" Abstain if {', or '.join(rule for rule, _ in rules)}. {'Each' if len(rules) > 1 else 'This'} "
    text += f"accepts {shares} of inputs like the held-out validation data"
    if len(rules) == 1:
        return f"{text}."
    both = max(sum(share for _, share in rules) - 1.0, 0.0)
    return f"{text}, both together at least {100 * both:.4g} %."

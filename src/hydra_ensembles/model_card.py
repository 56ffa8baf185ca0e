"""The README.md beside a saved model."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from .model.config import GROUPS, DualEncoderConfig, EnsembleConfig, PatchStemConfig
from .model.cost import describe
from .model.metadata import Metadata

CARD = """\
---
library_name: hydra_ensembles
pipeline_tag: {task}
tags:
- uncertainty
- ensemble
- hydra-ensembles
---

# {title}

{summary}, saved by the library Hydra Ensembles.

## Loading

```python
import hydra_ensembles as he
model = he.{class_name}.from_pretrained({name!r})
result = model.{call}
```

{sections}
"""


def model_card(name: str, config: EnsembleConfig, metadata: Metadata, state: Mapping[str, Tensor]) -> str:
    """Text of the card: what the model is, what was pruned, how to load it, what was measured.

    Args:
        name: Hub id or folder, as it is to be given to `from_pretrained`.
        config: Architecture, members, sharing and heads.
        metadata: Source, labels, preprocessing, calibration, history and metrics.
        state: The parameters; only counted.
    """
    image, classifies = isinstance(config.stem, PatchStemConfig), config.readout.num_classes > 0
    task = ("image-" if image else "text-") + "classification"
    if not classifies:
        task = "image-feature-extraction" if image else "feature-extraction"
    summary = f"An ensemble with one member{_origin(metadata)}"
    if config.members > 1:
        summary = (
            f"{config.members} transformers{_origin(metadata)} that answer in one forward pass, with the logits of "
            "every member, so that each prediction comes with its uncertainty"
        )
    return CARD.format(
        task=task,
        title=one_line(name),
        summary=summary,
        class_name="Ensemble",
        name=name,
        call=f"{'predict' if classifies else 'features'}({'images' if image else 'texts'})",
        sections=_sections("model", "", config, metadata, state),
    )


def dual_model_card(
    name: str, config: DualEncoderConfig, image: Metadata, text: Metadata, state: Mapping[str, Tensor]
) -> str:
    """Text of the card of a dual encoder: as `model_card`, tower by tower."""
    many = f", for {config.members} members in one pass per tower" if config.members > 1 else ""
    sections = []
    for tower, tower_config, metadata in (("image", config.image, image), ("text", config.text, text)):
        own = {key: tensor for key, tensor in state.items() if key.startswith(f"{tower}.")}
        sections.append(_sections(f"{tower} tower", f", {tower} tower", tower_config, metadata, own))
    return CARD.format(
        task="zero-shot-image-classification",
        title=one_line(name),
        summary=f"A dual encoder{_origin(image)}: images and texts in one embedding of width "
        f"{config.embedding_width}{many}",
        class_name="DualEncoder",
        name=name,
        call="encode_image(images)",
        sections="\n\n".join(sections),
    )


def one_line(text: object) -> str:
    """Text that cannot break out of its line or table cell."""
    return " ".join(str(text).split()).replace("|", "\\|")


def _origin(metadata: Metadata) -> str:
    return f" made from {one_line(metadata.source)}" if metadata.source else ""


def _table(*rows: Sequence[object]) -> str:
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join("| " + " | ".join(one_line(cell) for cell in line) + " |" for line in lines)


def _sections(title: str, which: str, config: EnsembleConfig, metadata: Metadata, state: Mapping[str, Tensor]) -> str:
    """Everything about an ensemble, or about one tower (`which`); what is not known is left out."""
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


def _facts(config: EnsembleConfig, metadata: Metadata, state: Mapping[str, Tensor]) -> str:
    encoder = config.encoder
    cost = describe(config, sum(tensor.numel() for tensor in state.values()))
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in state.values()})
    rows = [
        ("source", metadata.source or "unknown"),
        ("members", config.members),
        ("encoder", f"{encoder.layers} layers, width {encoder.width}, {encoder.heads} heads of {encoder.head_dim}"),
        ("parameters", f"{cost.parameters:,} ({', '.join(dtypes)})"),
        ("multiply-adds", f"{cost.multiply_adds:,} for one input of {cost.tokens} tokens"),
    ]
    if config.members > 1:
        shared = ", ".join(group for group in GROUPS if getattr(config.sharing, group))
        trunk = f"first {config.trunk} of {encoder.layers} layers" if config.trunk else "none"
        rows += [("shared by the members", shared or "nothing"), ("shared trunk", trunk)]
    if metadata.preprocessing is not None:
        rows.append(("preprocessing", metadata.preprocessing))
    if metadata.text_side is not None:
        templates = ", ".join(metadata.text_side.settings.templates)
        rows.append(("prompts", f"{templates}; the text towers are kept, so `he.retarget` can set other classes"))
    return _table(("", ""), *rows)


def _heads(config: EnsembleConfig) -> str:
    """Which attention heads each member keeps and which were removed, a row per layer."""
    total, layers = config.encoder.heads, config.encoder.layers
    kept = sum(len(heads) for member in config.heads for heads in member)
    if kept == total * layers * config.members:
        return f"Nothing was pruned: every member keeps all {total} heads of every layer."
    rows = [["layer", *(f"member {member}" for member in range(config.members))]]
    for layer in range(layers):
        rows.append([str(layer)])
        for member in config.heads:
            removed = sorted(set(range(total)) - set(member[layer]))
            rows[-1].append(f"{len(member[layer])}" + (f" (without {', '.join(map(str, removed))})" if removed else ""))
    return f"{kept} of {total * layers * config.members} heads are kept, of {total} per layer:\n\n{_table(*rows)}"


def _calibration(metadata: Metadata) -> str:
    calibration = metadata.calibration
    if calibration is None:
        return ""
    text = f"Temperature: {', '.join(f'{temperature:.4g}' for temperature in calibration.temperature)}."
    if calibration.threshold is not None:
        text += (
            f" Abstain where the score `{calibration.score}` is above {calibration.threshold:.4g}; this accepted "
            f"{100 * calibration.accepted_share:.4g} % of the in-distribution validation data."
        )
    return text

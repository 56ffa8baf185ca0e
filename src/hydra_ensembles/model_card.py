"""The README.md of a saved model: the template is `model_card.md`, the sections are generated here."""

from collections.abc import Iterable, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING

from .model.config import GROUPS
from .model.metadata import Metadata

if TYPE_CHECKING:
    from .cascade import Cascade
    from .model.dual_encoder import DualEncoder
    from .model.ensemble import Ensemble

_ESCAPES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"} | {sign: f"\\{sign}" for sign in "\\|[]"})


def model_card(name: str, model: "Ensemble") -> str:
    """Text of the model card: what the model is, what was pruned, how to load it (as `name`), and its metrics."""
    image = model.kind == "image"
    task = f"{model.kind}-classification" if model.num_classes else f"{'image-' if image else ''}feature-extraction"
    members = "one member" if model.num_members == 1 else f"{model.num_members} members that answer in one forward pass"
    summary = f"An ensemble with {members}{_origin(model.metadata)}"
    call = f"{'predict' if model.num_classes else 'features'}({model.kind}s)"
    sections = _sections("model", "", model.metadata, *_facts(model))
    return _card(name, "Ensemble", call, task, summary, sections)


def dual_model_card(name: str, model: "DualEncoder") -> str:
    """Text of the model card of a dual encoder: like `model_card`, tower by tower."""
    summary = f"A dual encoder of {model.num_members} members{_origin(model.image.metadata)}: images and texts in one "
    summary += f"embedding of width {model.embedding_width}"
    towers = (("image", model.image), ("text", model.text))
    sections = "\n\n".join(
        _sections(f"{tower} tower", f", {tower} tower", one.metadata, *_facts(one)) for tower, one in towers
    )
    return _card(name, "DualEncoder", "encode_image(images)", "zero-shot-image-classification", summary, sections)


def cascade_card(name: str, model: "Cascade") -> str:
    """Text of the model card of a cascade: its stages with the share that goes on, calibration and history."""
    stages = [one.metadata.source or type(one).__name__ if hasattr(one, "metadata") else one for one in model.stages]
    shares = [1.0, *model.settings.asked]
    rows = [(index, str(one), f"{share:.1%}") for index, (one, share) in enumerate(zip(stages, shares, strict=True))]
    head = ("stage", "model", "rows like the held-out that reach it")
    summary = f"A cascade of {len(stages)} models: a later one answers only where the earlier ones are unsure"
    sections = _sections("stages", "", model.metadata, head, *rows)
    return _card(name, "Cascade", f"predict({model.kind}s)", f"{model.kind}-classification", summary, sections)


def one_line(text: object) -> str:
    """Escape text so that it stays in its line or table cell, and is not read as HTML, a link or an image."""
    return " ".join(str(text).split()).translate(_ESCAPES)


def _card(name: str, class_name: str, call: str, task: str, summary: str, sections: str) -> str:
    values = {"title": one_line(name), "class_name": class_name, "call": call, "task": task, "summary": summary}
    frame = files(__package__).joinpath("model_card.md").read_text(encoding="utf-8")
    return frame.format(name=name, sections=sections, **values)


def _origin(metadata: Metadata) -> str:
    return f", made from {one_line(metadata.source)}" if metadata.source else ""


def _table(*rows: Sequence[object]) -> str:
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join("| " + " | ".join(one_line(cell) for cell in line) + " |" for line in lines)


def _sections(title: str, which: str, metadata: Metadata, *facts: Sequence[object]) -> str:
    """All sections about a model, or about one tower (`which`); unknown facts are left out."""
    more = f" and {len(metadata.labels) - 20} more" if len(metadata.labels) > 20 else ""
    metrics = [(name, f"{value:.6g}") for name, value in metadata.metrics.items()]
    texts = {
        f"The {title}": _table(*facts),
        f"Labels{which}": ", ".join(one_line(label) for label in metadata.labels[:20]) + more,
        f"Calibration{which}": _calibration(metadata),
        f"Metrics{which}": _table(("metric", "value"), *metrics) if metrics else "",
        f"History{which}": "\n".join(f"{i}. {one_line(line)}" for i, line in enumerate(metadata.history, start=1)),
    }
    return "\n\n".join(f"## {heading}\n\n{text}" for heading, text in texts.items() if text)


def _facts(model: "Ensemble") -> Iterable[tuple[str, object]]:
    """Rows of the table about a model: what it is, what it costs, how it reads its inputs."""
    config, encoder, metadata, cost = model.config, model.config.encoder, model.metadata, model.describe()
    yield "", ""  # the table has no headings
    yield "source", metadata.source or "unknown"
    yield "members", config.members
    yield "encoder", f"{encoder.layers} layers, width {encoder.width}, {encoder.heads} heads of {encoder.head_dim}"
    kept = sum(len(heads) for member in config.heads for heads in member)
    yield "heads kept", f"{kept} of {sum(config.head_counts) * config.members} (`describe()` lists them by layer)"
    yield "parameters", f"{cost.parameters:,} ({str(model.dtype).removeprefix('torch.')})"
    yield "multiply-adds", f"{cost.multiply_adds:,} for one input of {cost.tokens} tokens"
    if config.members > 1:
        yield "shared by the members", ", ".join(one for one in GROUPS if getattr(config.sharing, one)) or "nothing"
        if ranks := {name: rank for name, rank in vars(config.updates).items() if rank}:
            yield "ranks of the members' updates", ", ".join(f"{name} {rank}" for name, rank in ranks.items())
        yield "shared trunk", f"first {config.trunk} of {encoder.layers} layers" if config.trunk else "none"
    if metadata.preprocessing is not None:
        origin = f" (from: {metadata.preprocessing_from})" if metadata.preprocessing_from else ""
        yield "preprocessing", f"{metadata.preprocessing}{origin}"


def _calibration(metadata: Metadata) -> str:
    """The temperature, when an answer is accepted, and what is promised of it."""
    calibration, familiarity = metadata.calibration, metadata.familiarity
    if calibration is None:
        return ""
    score = "the confidence" if calibration.score == "msp" else f"minus the score `{calibration.score}`"
    lines = [f"Temperature: {calibration.temperature:.4g}."]
    if isinstance(calibration.threshold, tuple):
        lines.append(f"An answer is accepted if {score} reaches the threshold of its label.")
    elif calibration.threshold is not None:
        lines.append(f"An answer is accepted if {score} is at least {calibration.threshold:.6g}.")
    limit = None if familiarity is None else familiarity.settings.threshold
    if familiarity is not None and limit is not None:
        lines.append(f"It is declined as unfamiliar if `{familiarity.settings.scores[0]}` is above {limit:.6g}.")
    if calibration.share is not None:
        lines.append(f"Of inputs like the held-out ones at least {100 * calibration.share:.4g} % are accepted.")
    lines += [f"Promise: {one_line(str(one))}." for one in calibration.promises]
    lines += ["Nothing is promised for other inputs: of another source or another time."] * bool(calibration.promises)
    return " ".join(lines)

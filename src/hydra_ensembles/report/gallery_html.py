"""The gallery of a report: inputs with what the model said about them."""

from html import escape

from ..evaluation.evaluation import Evaluation, GalleryItem, Shelf

_SHELVES: dict[Shelf, str] = {"sure": "most sure", "wrong": "most sure, and wrong", "unsure": "least sure"}


def gallery_html(evaluation: Evaluation) -> str:
    """Every set's shelves: for foreign sets, what it was fooled by and what it caught."""
    parts = []
    for name in dict.fromkeys(item.set for item in evaluation.gallery):
        for shelf, words in _SHELVES.items():
            items = [item for item in evaluation.gallery if (item.set, item.shelf) == (name, shelf)]
            if items:
                texts = " texts" if items[0].kind == "text" else ""
                entries = "".join(_entry(item, evaluation.model.class_names) for item in items)
                heading = f"<h3>{escape(name)}: {words}</h3>"
                parts.append(f'<div>{heading}<ul class="shelf{texts}">{entries}</ul></div>')
    return f'<div class="two">{"".join(parts)}</div>'


def _entry(item: GalleryItem, names: tuple[str, ...]) -> str:
    said, right = _class(item.predicted, names), None if item.label is None else _class(item.label, names)
    answer = f'<b>{escape(said)}</b> <span class="said">{item.confidence * 100:.0f} %</span>'
    if right is not None:
        correct = item.label == item.predicted
        verdict = '<span class="right">right</span>' if correct else f'<span class="wrong">is {escape(right)}</span>'
        answer += f"<br>{verdict}"
    if item.kind == "image" and item.content.startswith("data:image/"):
        label = f"Sample {item.index} of {item.set}, predicted {said} with {item.confidence * 100:.0f} percent"
        shown = f'<img src="{escape(item.content)}" alt="{escape(label)}" loading="lazy">'
    else:
        shown = f'<p class="text">{escape(item.content)}</p>'
    return f"<li>{shown}<p>{answer}</p></li>"


def _class(index: int, names: tuple[str, ...]) -> str:
    return names[index] if index < len(names) else f"class {index}"

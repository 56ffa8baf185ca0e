"""The diagrams of a report: which member keeps which head, how often members agree, what methods cost."""

from collections.abc import Mapping, Sequence
from html import escape

from ..evaluation.evaluation import Evaluation
from ..model.config import KeptHeads
from ..model.cost import Cost
from .svg import COLOURS, colour, figure, rectangle, text

STRIPES = 6
"""Most members that get a stripe of their own in a cell of the head map; more are shown as a shade."""


def head_map(heads: KeptHeads, heads_per_layer: int, name: str) -> str:
    """Layers × heads; in each cell a stripe for every member that keeps the head.

    Args:
        heads: Heads kept, `[member][layer]`.
        heads_per_layer: Heads per layer before pruning.
        name: The model's name.
    """
    members, layers = len(heads), len(heads[0])
    side = max(14.0, min(30.0, 560 / heads_per_layer))
    left, top, gap = 34.0, 22.0, 5.0
    parts = [text(left - 8, top - 8, "layer", anchor="end")]
    parts += [text(left + (head + 0.5) * side, top - 8, str(head)) for head in range(heads_per_layer)]
    for layer in range(layers):
        y = top + layer * side
        parts.append(text(left - 8, y + side / 2 + 3.5, str(layer), anchor="end"))
        for head in range(heads_per_layer):
            x = left + head * side
            keepers = [member for member in range(members) if head in heads[member][layer]]
            parts.append(rectangle(x + gap / 2, y + gap / 2, side - gap, side - gap, "fill:var(--empty)", 3))
            parts += _keepers(x + gap / 2, y + gap / 2, side - gap, keepers, members)
    kept = [sum(len(layer) for layer in member) for member in heads]
    total = layers * heads_per_layer
    listing = ", ".join(f"member {member} keeps {count}" for member, count in enumerate(kept))
    common = sum(len(set.intersection(*(set(member[layer]) for member in heads))) for layer in range(layers))
    label = (
        f"Head map of {name}: {layers} layers of {heads_per_layer} heads, {total} in all; {listing}; "
        f"{common} are kept by all."
    )
    if members > STRIPES:
        keys = "<span>A head is the darker, the more members keep it.</span>"
    else:
        keys = " ".join(
            f'<span class="chip"><i class="key" style="background:{colour(member)}"></i>member {member}: '
            f"{count} of {total}</span>"
            for member, count in enumerate(kept)
        )
    caption = f"{keys} <span>{common} heads are kept by {'every member' if members > 1 else 'the model'}.</span>"
    width, height = left + heads_per_layer * side + 4, top + layers * side + 4
    return figure("".join(parts), width, height, label, caption, "headmap", largest=width * 1.3 + 30)


def _keepers(x: float, y: float, side: float, keepers: Sequence[int], members: int) -> list[str]:
    """The filled part of one cell."""
    if members > STRIPES:
        share = len(keepers) / members
        return [rectangle(x, y, side, side, f"fill:{colour(0)};opacity:{share:.2f}", 2)] if keepers else []
    stripe = side / members
    inner = stripe - (1.2 if members > 1 else 0)
    return [rectangle(x + member * stripe, y, inner, side, f"fill:{colour(member)}", 1.5) for member in keepers]


def agreement(table: Sequence[Sequence[float]], title: str, name: str) -> str:
    """How often two members predict the same class, as a shaded matrix."""
    members = len(table)
    side = max(30.0, min(64.0, 240 / members))
    left, top = 30.0, 22.0
    lowest = min(value for row in table for value in row)
    floor = min(lowest, 0.99)
    parts = []
    for i, row in enumerate(table):
        parts.append(text(left - 8, top + (i + 0.5) * side + 4, str(i), anchor="end"))
        parts.append(text(left + (i + 0.5) * side, top - 8, str(i)))
        for j, value in enumerate(row):
            shade = 0.08 + 0.82 * (value - floor) / (1 - floor)
            x, y = left + j * side, top + i * side
            parts.append(rectangle(x + 1, y + 1, side - 2, side - 2, f"fill:{colour(0)};opacity:{shade:.2f}", 3))
            css = "cell strong" if shade > 0.55 else "cell"
            parts.append(text(x + side / 2, y + side / 2 + 4, f"{value * 100:.0f}", css))
    pairs = [table[i][j] for i in range(members) for j in range(i)]
    mean = sum(pairs) / len(pairs) if pairs else 1.0
    label = (
        f"Member agreement of {name}, {title}: two members predict the same class for {mean * 100:.1f} percent of the "
        f"samples on average, {min(pairs, default=1.0) * 100:.1f} percent for the pair that differs most."
    )
    caption = f"<b>{escape(title)}</b> · {mean * 100:.1f} % on average"
    edge = members * side
    width = left + edge + 6
    return figure("".join(parts), width, top + edge + 6, label, caption, "agreement", largest=width * 1.15 + 30)


def cost_bars(title: str, values: Mapping[str, tuple[float, str]], order: Sequence[str]) -> str:
    """One horizontal bar a method.

    Args:
        title: What is measured.
        values: Length and words for each method that has a number.
        order: All method names, which decide the colours.
    """
    most = max(value for value, _ in values.values()) or 1.0
    row, left, width = 30.0, 4.0, 392.0
    parts = []
    for position, (name, (value, words)) in enumerate(values.items()):
        y = position * row + 4
        parts.append(text(left, y + 9, name, "bar-name", "start"))
        parts.append(text(left + width, y + 9, words, "bar-value", "end"))
        parts.append(rectangle(left, y + 13, width, 8, "fill:var(--empty)", 4))
        ink = colour(order.index(name) % COLOURS)
        parts.append(rectangle(left, y + 13, max(width * value / most, 3), 8, f"fill:{ink}", 4))
    label = f"{title}: " + ", ".join(f"{name} {words}" for name, (_, words) in values.items()) + "."
    return figure("".join(parts), 400, len(values) * row + 4, label, f"<b>{escape(title)}</b>", "bars")


def cost_figures(methods: Mapping[str, Evaluation], costs: Mapping[str, Cost]) -> list[str]:
    """Bars for every kind of cost that is known of at least one method; counts come from the models themselves."""
    order = list(methods)
    parameters: dict[str, tuple[float, str]] = {}
    work: dict[str, tuple[float, str]] = {}
    latency: dict[str, tuple[float, str]] = {}
    memory: dict[str, tuple[float, str]] = {}
    for name, evaluation in methods.items():
        cost, model = costs.get(name), evaluation.model
        stored = (cost.parameters if cost else None) or model.parameters
        sums = (cost.multiply_adds if cost else None) or model.multiply_adds
        if stored:
            parameters[name] = stored, f"{stored / 1e6:,.2f} M"
        if sums:
            work[name] = sums, f"{sums / 1e9:,.2f} G"
        if cost:
            latency[name] = cost.latency_ms, f"{cost.latency_ms:,.2f} ms · {cost.latency_ratio:.2f}×"
        if cost and cost.peak_memory_bytes is not None:
            memory[name] = cost.peak_memory_bytes, f"{cost.peak_memory_bytes / 2**20:,.0f} MiB"
    kinds = {
        "Parameters stored": parameters,
        "Multiply-adds per input": work,
        "Latency of a batch": latency,
        "Peak memory": memory,
    }
    return [cost_bars(title, values, order) for title, values in kinds.items() if values]

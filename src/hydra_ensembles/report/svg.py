"""Small building blocks of SVG figures that follow the page: colours are CSS variables, text is text."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLOURS = 8
"""How many series colours the page defines: `--c0` to `--c7`."""


@dataclass(frozen=True)
class Frame:
    """A rectangle for data inside a figure, in the figure's own units (about pixels on a phone).

    Attributes:
        x: Data range from left to right.
        y: Data range from bottom to top.
        left: Position of the left edge.
        top: Position of the upper edge.
        width: Width.
        height: Height.
    """

    x: tuple[float, float]
    y: tuple[float, float]
    left: float = 44
    top: float = 12
    width: float = 284
    height: float = 200

    def px(self, value: float) -> float:
        """Horizontal position of a value."""
        return round(self.left + self.width * _share(value, self.x), 2)

    def py(self, value: float) -> float:
        """Vertical position of a value."""
        return round(self.top + self.height * (1 - _share(value, self.y)), 2)


def _share(value: float, limits: tuple[float, float]) -> float:
    low, high = limits
    return (value - low) / ((high - low) or 1.0)


def figure(
    content: str, width: float, height: float, label: str, caption: str = "", css: str = "", largest: float = 0
) -> str:
    """A figure with its text alternative and, below it, a sentence on how to read it.

    Args:
        content: SVG elements.
        width: Width of the drawing area.
        height: Its height.
        label: What the figure shows, in words, for readers who cannot see it.
        caption: Shown below; may hold HTML, so its parts must be escaped.
        css: Class of the figure.
        largest: Widest it may be shown, in pixels; 0 for as wide as its place.
    """
    words = escape(label)
    limit = f' style="max-width:{largest:g}px"' if largest else ""
    below = f"<figcaption>{caption}</figcaption>" if caption else ""
    return (
        f'<figure class="{css}"{limit}><svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{words}">'
        f"<title>{words}</title>{content}</svg>{below}</figure>"
    )


def colour(index: int) -> str:
    """CSS colour of a series."""
    return f"var(--c{index % COLOURS})"


def text(x: float, y: float, words: str, css: str = "tick", anchor: str = "middle", extra: str = "") -> str:
    """Words at a position."""
    return f'<text x="{x:g}" y="{y:g}" class="{css}" text-anchor="{anchor}"{extra}>{escape(words)}</text>'


def rectangle(x: float, y: float, width: float, height: float, style: str, rounded: float = 0) -> str:
    """A filled rectangle; negative sizes become zero."""
    size = f'width="{max(width, 0):.2f}" height="{max(height, 0):.2f}"'
    corner = f' rx="{rounded:g}"' if rounded else ""
    return f'<rect x="{x:.2f}" y="{y:.2f}" {size}{corner} style="{style}"/>'


def line(frame: Frame, xs: Sequence[float], ys: Sequence[float], style: str) -> str:
    """A line through data points."""
    points = " ".join(f"{frame.px(x):g},{frame.py(y):g}" for x, y in zip(xs, ys, strict=True))
    return f'<polyline points="{points}" fill="none" style="{style}"/>'


def steps(frame: Frame, edges: Sequence[float], heights: Sequence[float], style: str) -> str:
    """The filled outline of a histogram."""
    path = [f"M{frame.px(edges[0]):g},{frame.py(0):g}"]
    for left, right, height in zip(edges, edges[1:], heights, strict=False):
        path.append(f"L{frame.px(left):g},{frame.py(height):g} L{frame.px(right):g},{frame.py(height):g}")
    path.append(f"L{frame.px(edges[-1]):g},{frame.py(0):g} Z")
    return f'<path d="{" ".join(path)}" style="{style}"/>'


def axes(
    frame: Frame,
    x_ticks: Sequence[tuple[float, str]],
    y_ticks: Sequence[tuple[float, str]],
    x_label: str,
    y_label: str,
) -> str:
    """Grid lines, tick labels and axis titles."""
    bottom, parts = frame.top + frame.height, []
    for value, words in y_ticks:
        y = frame.py(value)
        parts.append(
            f'<line class="grid" x1="{frame.left:g}" x2="{frame.left + frame.width:g}" y1="{y:g}" y2="{y:g}"/>'
        )
        parts.append(text(frame.left - 6, y + 3.5, words, anchor="end"))
    for value, words in x_ticks:
        parts.append(text(frame.px(value), bottom + 15, words))
    parts.append(baseline(frame))
    parts.append(text(frame.left + frame.width / 2, bottom + 31, x_label, "axis-title"))
    middle = frame.top + frame.height / 2
    parts.append(text(11, middle, y_label, "axis-title", extra=f' transform="rotate(-90 11 {middle:g})"'))
    return "".join(parts)


def baseline(frame: Frame) -> str:
    """The line a plot stands on."""
    y = frame.top + frame.height
    return f'<line class="axis" x1="{frame.left:g}" x2="{frame.left + frame.width:g}" y1="{y:g}" y2="{y:g}"/>'


def percent_ticks(values: Sequence[float]) -> list[tuple[float, str]]:
    """Ticks of an axis of shares, written in percent."""
    return [(value, f"{value * 100:g}") for value in values]


def round_ticks(low: float, high: float, wanted: int = 4) -> list[float]:
    """About `wanted` round numbers between two ends."""
    span = (high - low) or 1.0
    exponent = 10.0 ** int(f"{span / wanted:e}".partition("e")[2])
    step = next(factor * exponent for factor in (1, 2, 2.5, 5, 10) if factor * exponent >= span / wanted)
    first = -(-low // step) * step
    count = int((high - first) / step + 1e-9) + 1
    return [round(first + index * step, 12) for index in range(count)]

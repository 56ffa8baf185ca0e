"""The picture of the method in the README, as an SVG that is readable on light and dark pages.

    python benchmarks/method_figure.py           # writes docs/figures/method.svg
    python benchmarks/method_figure.py --check   # fails when the file is not what this script draws

A drawing, not a measurement: four layers of six heads, three members.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs" / "figures" / "method.svg"

LAYERS, HEADS = 4, 6
PRUNED = (  # for each member, the heads it loses in each layer, first layer first
    ((), (1, 4), (0, 3), (2, 5)),
    ((), (2, 3), (1, 5), (0, 4)),
    ((), (0, 5), (2, 4), (1, 3)),
)
STYLE = """
  .card { fill: #ffffff; stroke: #d5d9e0; } .page { fill: #f6f7f9; } .off { fill: none; stroke: #aab1bd; }
  .base { fill: #5b6675; } .mlp { fill: #c9cfd8; } .line { stroke: #5b6675; fill: none; stroke-width: 1.6; }
  .tip { fill: #5b6675; } .m0 { fill: #2563c9; } .m1 { fill: #d1571b; } .m2 { fill: #14866d; }
  text { font: 13px ui-sans-serif, system-ui, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif;
    fill: #1c2330; } .title { font-weight: 600; font-size: 14px; } .soft { fill: #56606e; font-size: 12px; }
  @media (prefers-color-scheme: dark) {
    .card { fill: #1a1e25; stroke: #39414d; } .page { fill: #13161b; } .off { stroke: #5c6673; }
    .base { fill: #aab4c0; } .mlp { fill: #3a424e; } .line { stroke: #aab4c0; } .tip { fill: #aab4c0; }
    .m0 { fill: #6ea8ff; } .m1 { fill: #ff9a5c; } .m2 { fill: #3ecfaf; }
    text { fill: #e8eaef; } .soft { fill: #b6bfcc; }
  }
"""


def grid(x: float, y: float, pruned: tuple[tuple[int, ...], ...], css: str, step: float) -> str:
    """One dot for each head, the first layer at the bottom; a pruned head is a ring."""
    dots = []
    for layer in range(LAYERS):
        for head in range(HEADS):
            gone = head in pruned[layer]
            place = f'cx="{x + head * step:g}" cy="{y + (LAYERS - 1 - layer) * step:g}"'
            dots.append(f'<circle {place} r="{step * (0.26 if gone else 0.32):.3g}" class="{"off" if gone else css}"/>')
    return "\n".join(dots)


def card(x: float, y: float, width: float, height: float) -> str:
    """A rectangle with round corners."""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="10" class="card"/>'


def text(x: float, y: float, words: str, css: str = "", anchor: str = "middle") -> str:
    """A line of text."""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" class="{css}">{words}</text>'


def arrow(x: float, y: float, end_x: float, end_y: float) -> str:
    """A line with a tip at its end, bent so that it leaves and arrives level."""
    middle = (x + end_x) / 2
    curve = f'<path d="M{x:g} {y:g} C{middle:g} {y:g} {middle:g} {end_y:g} {end_x - 6:g} {end_y:g}" class="line"/>'
    return f'{curve}\n<path d="M{end_x:g} {end_y:g} l-8 -4.5 v9 z" class="tip"/>'


def fused(x: float, y: float) -> str:
    """The fused model: heads of all members side by side, one MLP for all, the common layer once."""
    parts = []
    for layer in reversed(range(LAYERS)):
        top = y + (LAYERS - 1 - layer) * 44
        if not any(member[layer] for member in PRUNED):
            parts += [
                f'<circle cx="{x + 84 + head * 14:g}" cy="{top:g}" r="4.4" class="base"/>' for head in range(HEADS)
            ]
        else:
            place = x
            for member, losses in enumerate(PRUNED):
                for _ in range(HEADS - len(losses[layer])):
                    parts.append(f'<circle cx="{place:g}" cy="{top:g}" r="4.4" class="m{member}"/>')
                    place += 14
                place += 42
        parts.append(f'<rect x="{x - 6:g}" y="{top + 12:g}" width="250" height="8" rx="4" class="mlp"/>')
    return "\n".join(parts)


def drawing() -> str:
    """The whole picture."""
    parts = ['<rect width="960" height="372" rx="14" class="page"/>']
    parts += [card(20, 112, 168, 150), text(104, 138, "one trained model", "title")]
    parts += [grid(54, 160, ((),) * LAYERS, "base", 20), text(104, 250, "layers of attention heads", "soft")]
    for member in range(3):
        top = 20 + member * 114
        parts += [arrow(188, 187, 248, top + 52), card(250, top, 150, 104)]
        parts += [
            grid(282, top + 22, PRUNED[member], f"m{member}", 17.2),
            text(325, top + 96, f"member {member + 1}", "soft"),
        ]
        parts.append(arrow(400, top + 52, 460, 187))
    parts += [text(104, 300, "prune different heads", "soft"), text(440, 300, "fuse", "soft")]
    parts += [card(462, 60, 286, 254), text(605, 86, "one Hydra Ensemble", "title"), fused(486, 116)]
    parts += [text(605, 296, "own heads, shared MLPs", "soft")]
    for member, heights in enumerate(((34, 9, 5), (27, 14, 7), (30, 7, 11))):
        top = 66 + member * 56
        parts.append(arrow(748, 187, 790, top + 20))
        for index, height in enumerate(heights):
            place = f'x="{798 + index * 16:g}" y="{top + 38 - height:g}" width="12" height="{height:g}" rx="2"'
            parts.append(f'<rect {place} class="m{member}"/>')
    for row, words in enumerate(("label, confidence", "how far members differ", "accept or abstain")):
        parts.append(text(790, 258 + 20 * row, words, anchor="start"))
    for row, words in enumerate(("three", "predictions,", "one pass")):
        parts.append(text(855, 92 + 17 * row, words, "soft", "start"))
    label = "Different heads are pruned from copies of one model; the copies are fused and answer in one pass."
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 372" role="img" aria-label="{label}">\n'
        f"<style>{STYLE}</style>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def write_or_check(target: Path, picture: str, description: str | None) -> None:
    """Read the command line of a script that draws one picture: write it, or compare it with the file."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if not options.check:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(picture)
    elif not target.exists() or target.read_text() != picture:
        sys.exit(f"{target.relative_to(ROOT)} is stale; run python benchmarks/{Path(sys.argv[0]).name}")


if __name__ == "__main__":
    write_or_check(TARGET, drawing(), __doc__)

"""The picture of one fused layer in the concepts page; see `method_figure.py`, whose style it shares.

python benchmarks/fused_layer_figure.py           # writes docs/figures/fused_layer.svg
python benchmarks/fused_layer_figure.py --check   # fails when the file is not what this script draws
"""

from method_figure import ROOT, STYLE, arrow, card, text, write_or_check

TARGET = ROOT / "docs" / "figures" / "fused_layer.svg"

HEADS = (4, 3, 5)  # kept by each member
ROWS = (92, 152, 212)  # where the members' tokens lie


def bars(x: float) -> list[str]:
    """Token activations of the three members, one under another."""
    return [
        f'<rect x="{x + column * 11:g}" y="{y - 16:g}" width="8" height="32" rx="2" class="m{member}"/>'
        for member, y in enumerate(ROWS)
        for column in range(4)
    ]


def grouped(x: float, title: str, upright: bool) -> list[str]:
    """A product in which each member has a block of its own, as tall (or as wide) as it has heads."""
    parts, unit, place, across = [card(x, 62, 126, 182), text(x + 63, 50, title)], 8.0, 82.0, x + 16
    for member, heads in enumerate(HEADS):
        size = heads * unit
        width, height = (30.0, size) if upright else (size, 42.0)
        corner = f'x="{across:g}" y="{place:g}" width="{width:g}" height="{height:g}"'
        parts.append(f'<rect {corner} rx="2" class="m{member}"/>')
        across, place = across + width + 2, place + (height + 14 if upright else 50)
    return parts


def heads(x: float) -> list[str]:
    """The heads each member kept, as dots."""
    return [
        f'<circle cx="{x + head * 15:g}" cy="{y:g}" r="5" class="m{member}"/>'
        for member, y in enumerate(ROWS)
        for head in range(HEADS[member])
    ]


def drawing() -> str:
    """The whole picture."""
    captions = (
        (50, "tokens of three", "members"),
        (179, "a block per member,", "as large as its heads"),
        (332, "in each head", "that was kept"),
        (487, "back to the", "model's width"),
        (663, "one for all: the mean", "of the members' weights"),
        (836, "tokens of three", "members"),
    )
    parts = ['<rect width="886" height="300" rx="14" class="page"/>', *bars(30), *bars(816)]
    parts += [text(x, 270, first, "soft") for x, first, _ in captions]
    parts += [text(x, 286, second, "soft") for x, _, second in captions]
    parts += [*grouped(116, "query, key, value", upright=True), text(332, 50, "attention"), *heads(302)]
    parts += [*grouped(424, "output", upright=False), card(600, 62, 126, 182), text(663, 50, "MLP")]
    parts += ['<rect x="622" y="84" width="82" height="138" rx="6" class="mlp"/>']
    parts += [text(443, 20, "one fused layer; norms and residuals are not drawn", "soft")]
    for member, y in enumerate(ROWS):
        parts += [arrow(78, y, 114, y), arrow(242, y, 288, y), arrow(302 + HEADS[member] * 15, y, 422, y)]
        parts += [arrow(550, y, 598, y), arrow(726, y, 806, y)]
    label = "In a fused layer each member has its own attention heads, in one grouped product, and all share one MLP."
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 886 300" role="img" aria-label="{label}">\n'
        f"<style>{STYLE}</style>\n" + "\n".join(parts) + "\n</svg>\n"
    )


if __name__ == "__main__":
    write_or_check(TARGET, drawing(), __doc__)

"""Figure and table of the Taylor scores of a dual encoder's two towers, from what `tower_scores.py` computed.

python benchmarks/tower_scores_figure.py           # writes docs/figures/tower_scores.svg
python benchmarks/tower_scores_figure.py --check   # fails when the file is not what the results say
"""

import io
import json
import math
import statistics
import sys
from typing import Any

from method_figure import ROOT, write_or_check

RESULTS = ROOT / "results" / "zero_shot_tower_scores.json"
TARGET = ROOT / "docs" / "figures" / "tower_scores.svg"
COLOURS = {"image": "#2166ac", "text": "#d6904a"}


def drawing(data: dict[str, Any]) -> str:
    """One point a head, by layer and head; a bar for the mean of each layer. Depth is a share, as layers differ."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    settings: Any = {"svg.hashsalt": "tower_scores", "svg.fonttype": "none", "font.size": 9}
    with matplotlib.rc_context({**settings, "axes.spines.top": False, "axes.spines.right": False}):
        figure, axes = pyplot.subplots(figsize=(8, 3.4))
        for name, tower in data["towers"].items():
            layers, heads = tower["layers"], tower["heads"]
            label = f"{name} tower, {layers} layers of {heads} heads"
            for layer, scores in enumerate(tower["scores"]):
                places = [(layer + (head + 0.5) / heads) / layers for head in range(heads)]
                axes.plot(places, scores, ".", color=COLOURS[name], label=None if layer else label, markersize=4)
                ends = layer / layers, (layer + 1) / layers
                axes.hlines(_mean(scores), *ends, color=COLOURS[name], linewidth=1.5)
        axes.set_yscale("log")
        axes.set(xlabel="depth: layer, and within it head", ylabel="mean of |W · dL/dW|", xlim=(0, 1))
        axes.legend(frameon=False, fontsize=8)
        figure.tight_layout()
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None}, facecolor="white")
        pyplot.close(figure)
    return buffer.getvalue()


def table() -> str:
    """Scores of both towers, and where those of the image tower are higher; or how to compute them."""
    if not RESULTS.exists():
        return "Not computed yet: run `python benchmarks/tower_scores.py --model FOLDER --data FOLDER`."
    return rendered(json.loads(RESULTS.read_text()))


def rendered(data: dict[str, Any]) -> str:
    """The table of some results."""
    lines = [
        "| tower | layers × heads | smallest | median | largest | mean of the first layer | mean of the last layer |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for name, tower in data["towers"].items():
        scores = [score for layer in tower["scores"] for score in layer if not math.isnan(score)]
        first, last = _mean(tower["scores"][0]), _mean(tower["scores"][-1])
        numbers = (min(scores), statistics.median(scores), max(scores), first, last)
        cells = " | ".join(f"{number:.2e}" for number in numbers)
        lines.append(f"| {name} | {tower['layers']} × {tower['heads']} | {cells} |")
    higher, compared = image_is_higher(data)
    lines += [
        "",
        f"At the same depth, the mean of a layer is higher in the image tower at {sum(higher)} of {compared} places "
        f"({_places(higher)}); in the paper's CLIP it is in all layers but the first three.",
        "",
        f"{data['model']}; cross-entropy of the zero-shot logits on {data['images']:,} images ({data['data']}, "
        f"{data['classes']} classes), {data['hardware']}, torch {data['versions']['torch']}. From "
        f"`results/{RESULTS.name}`.",
    ]
    return "\n".join(lines)


def image_is_higher(data: dict[str, Any]) -> tuple[list[bool], int]:
    """For each layer of the tower with fewer layers: whether the image tower's mean is higher at that depth."""
    image, text = ([_mean(layer) for layer in data["towers"][name]["scores"]] for name in ("image", "text"))
    places = min(len(image), len(text))
    at = [(place + 0.5) / places for place in range(places)]
    higher = [image[int(depth * len(image))] > text[int(depth * len(text))] for depth in at]
    return higher, places


def _places(higher: list[bool]) -> str:
    lower = [str(place + 1) for place, one in enumerate(higher) if not one]
    return f"not at {', '.join(lower)}, counted from the input" if lower else "everywhere"


def _mean(scores: list[float]) -> float:
    """Of the heads that are there; NaN for a layer without heads."""
    present = [score for score in scores if not math.isnan(score)]
    return statistics.fmean(present) if present else math.nan


if __name__ == "__main__":
    if not RESULTS.exists():
        sys.exit(f"{RESULTS} does not exist; run python benchmarks/tower_scores.py first")
    write_or_check(TARGET, drawing(json.loads(RESULTS.read_text())), __doc__)

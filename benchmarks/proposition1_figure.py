"""Figure and table about Proposition 1, from the numbers that `proposition1.py` computed.

python benchmarks/proposition1_figure.py           # writes docs/figures/proposition1.svg
python benchmarks/proposition1_figure.py --check   # fails when the file is not what the results say
"""

import io
import json
from typing import Any

from method_figure import ROOT, write_or_check

RESULTS = ROOT / "results" / "proposition1.json"
TARGET = ROOT / "docs" / "figures" / "proposition1.svg"
COLOURS = {"whole": "#4d4d4d", "Taylor": "#b2182b", "CircAcc": "#d6904a", "CircAvg": "#2166ac", "random": "#9aa3ae"}


def is_random(name: str) -> bool:
    """Whether a set of heads was drawn at random."""
    return name.startswith("random")


def drawing(data: dict[str, Any]) -> str:
    """Three panels: loss by severity, predicted against measured widening, spectrum of the Hessian difference."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    settings: Any = {"svg.hashsalt": "proposition1", "svg.fonttype": "none", "font.size": 9}
    with matplotlib.rc_context({**settings, "axes.spines.top": False, "axes.spines.right": False}):
        figure, (losses, widening, spectrum) = pyplot.subplots(1, 3, figsize=(10.5, 3.2))
        for name, values in data["loss_by_severity"].items():
            label = f"{name} model" if name == "whole" else f"without {data['prune']} heads, {name}"
            losses.plot(range(len(values)), values, "o-", color=COLOURS[name], label=label, markersize=3.5)
        losses.set(xlabel="severity of the corruption (0: clean)", ylabel="cross-entropy", title="Loss")
        losses.legend(frameon=False, fontsize=8)
        _widening(widening, data)
        values = data["conditions"]["eigenvalues_of_hessian_difference"]
        colours = [COLOURS["Taylor"] if value < 0 else COLOURS["CircAvg"] for value in values]
        spectrum.bar(range(1, len(values) + 1), values, color=colours)
        spectrum.axhline(0, color=COLOURS["whole"], linewidth=0.8)
        spectrum.set(xlabel="eigenvalue, smallest first", title="Hessian, corrupted minus clean")
        figure.tight_layout()
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None}, facecolor="white")
        pyplot.close(figure)
    return buffer.getvalue()


def _widening(axes: Any, data: dict[str, Any]) -> None:
    """One point for each set of heads: change of the loss gap, to second order and measured."""
    seen = set()
    for name, one in data["sets"].items():
        kind = "random" if is_random(name) else name
        label = None if kind in seen else ("random heads" if kind == "random" else kind)
        seen.add(kind)
        place = one["gap_change_second_order"], one["gap_change"]
        axes.plot(*place, "o", color=COLOURS[kind], label=label, markersize=4 if kind == "random" else 6)
    for line in (axes.axhline, axes.axvline):
        line(0, color=COLOURS["random"], linewidth=0.8)
    axes.set(xlabel="to second order", ylabel="measured", title="Change of the loss gap by pruning")
    axes.legend(frameon=False, fontsize=8)


def table() -> str:
    """The named sets of heads, the random ones summed up, and how the data were made."""
    data = json.loads(RESULTS.read_text())
    lines = [
        "| heads pruned | clean loss | corrupted loss | gap | change of the gap | to second order "
        "| noisy gradient · step | curvature difference |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    lines.append(f"| none | {data['clean_loss']:.3f} | {data['noisy_loss']:.3f} | {_gap(data):.3f} | | | | |")
    for name, one in data["sets"].items():
        if is_random(name):
            continue
        lines.append(
            f"| {data['prune']}, {name} | {one['clean_loss']:.3f} | {one['noisy_loss']:.3f} | {_gap(one):.3f} "
            f"| {one['gap_change']:+.3f} | {one['gap_change_second_order']:+.3f} | {one['noisy_first_order']:+.3f} "
            f"| {_curvature(one):+.3f} |"
        )
    return "\n".join([*lines, "", *_summary(data)])


def _gap(row: dict[str, Any]) -> float:
    return float(row["noisy_loss"] - row["clean_loss"])


def _curvature(row: dict[str, Any]) -> float:
    return float(row["noisy_second_order"] - row["clean_second_order"])


def _summary(data: dict[str, Any]) -> list[str]:
    drawn = [one for name, one in data["sets"].items() if is_random(name)]
    wider = sum(one["gap_change"] > 0 for one in drawn)
    same_sign = sum((one["gap_change"] > 0) == (one["gap_change_second_order"] > 0) for one in data["sets"].values())
    meeting = sum(one["noisy_first_order"] >= 0 and _curvature(one) > 0 for one in data["sets"].values())
    found = data["conditions"]
    positive = sum(value > 0 for value in found["eigenvalues_of_hessian_difference"])
    aligned, curved, both = (f"{found[f'share_{name}']:.1%}" for name in ("aligned", "curved", "both"))
    return [
        f"- Random sets of {data['prune']} heads: the gap grew for {wider} of the {len(drawn)} that were measured.",
        f"- For {same_sign} of all {len(data['sets'])} sets the second-order estimate and the change have one sign.",
        f"- Sets measured that meet both conditions on the step: {meeting} of {len(data['sets'])}.",
        f"- Eigenvalues of the difference of the Hessians: {positive} of {data['heads']} are positive.",
        f"- Of {found['random_sets']:,} random sets, {aligned} do not point against the noisy gradient, {curved} have "
        f"more curvature on corrupted images, {both} both.",
        f"- Norm of the gradient in the gates: {found['clean_gradient_norm']:.3f} on clean images, "
        f"{found['noisy_gradient_norm']:.3f} on corrupted ones.",
        "",
        f"{data['test_images']} test images, clean and corrupted at severity {data['severity']} (one of the "
        f"{len(data['corruptions'])} corruptions each), {data['heads']} heads, seed {data['seed']}, torch "
        f"{data['versions']['torch']}, {data['hardware']}. From `results/{RESULTS.name}`.",
    ]


if __name__ == "__main__":
    write_or_check(TARGET, drawing(json.loads(RESULTS.read_text())), __doc__)

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
COLOURS = {
    "whole": "#4d4d4d",
    "Taylor": "#b2182b",
    "CircAcc": "#d6904a",
    "CircAvg": "#2166ac",
    "random": "#9aa3ae",
    "meeting": "#35978f",
}
LABELS = {"random": "random heads", "meeting": "meets the conditions"}


def kind_of(name: str) -> str:
    """A set that a ranking chose has its name, others are `random`, or `meeting` the conditions."""
    return name.split(" ")[0]


def drawing(data: dict[str, Any]) -> str:
    """Three panels: loss by severity, predicted against measured widening, spectrum of the Hessian difference."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    settings: Any = {"svg.hashsalt": "proposition1", "svg.fonttype": "none", "font.size": 9}
    with matplotlib.rc_context({**settings, "axes.spines.top": False, "axes.spines.right": False}):
        figure, (losses, widening, spectrum) = pyplot.subplots(1, 3, figsize=(10.5, 3.2))
        for name, curve in data["by_severity"].items():
            label = f"{name} model" if name == "whole" else f"without {data['prune']} heads, {name}"
            values = [point["loss"] for point in curve]
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
        kind = kind_of(name)
        label = None if kind in seen else LABELS.get(kind, kind)
        seen.add(kind)
        place = one["whole"]["gap_change_second_order"], one["whole"]["gap_change"]
        axes.plot(*place, "o", color=COLOURS[kind], label=label, markersize=4 if kind in LABELS else 6)
    for line in (axes.axhline, axes.axvline):
        line(0, color=COLOURS["random"], linewidth=0.8)
    axes.set(xlabel="to second order", ylabel="measured", title="Change of the loss gap by pruning")
    axes.legend(frameon=False, fontsize=7.5, loc="lower right")


def table() -> str:
    """The sets that rankings chose, the random ones summed up, and how the data were made."""
    data = json.loads(RESULTS.read_text())
    lines = [
        "| heads pruned | clean loss | corrupted loss | gap | change of the gap | to second order "
        "| noisy gradient · step | curvature difference |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
        f"| none | {data['clean_loss']:.3f} | {data['noisy_loss']:.3f} | {_gap(data):.3f} | | | | |",
    ]
    for name, one in data["sets"].items():
        if kind_of(name) in LABELS:
            continue
        curvature, whole = one["noisy_second_order"] - one["clean_second_order"], one["whole"]
        lines.append(
            f"| {data['prune']}, {name} | {whole['clean_loss']:.3f} | {whole['noisy_loss']:.3f} | {_gap(whole):.3f} "
            f"| {whole['gap_change']:+.3f} | {whole['gap_change_second_order']:+.3f} | {one['noisy_first_order']:+.3f} "
            f"| {curvature:+.3f} |"
        )
    return "\n".join([*lines, "", *_conditions(data), *_outcomes(data), "", _source(data)])


def _gap(row: dict[str, Any]) -> float:
    return float(row["noisy_loss"] - row["clean_loss"])


def _conditions(data: dict[str, Any]) -> list[str]:
    found = data["conditions"]
    aligned, curved, both = (f"{found[f'share_{name}']:.1%}" for name in ("aligned", "curved", "both"))
    eigenvalues, diagonal = (
        sum(value > 0 for value in found[f"{name}_of_hessian_difference"]) for name in ("eigenvalues", "diagonal")
    )
    return [
        f"- Condition 1: the gradient in the gates has norm {found['clean_gradient_norm']:.3f} on clean images, "
        f"{found['noisy_gradient_norm']:.3f} on corrupted ones.",
        f"- Condition 2: of {found['random_sets']:,} random sets, {aligned} do not point down the noisy loss.",
        f"- Condition 3: {eigenvalues} of {data['heads']} eigenvalues of the difference of the Hessians are positive, "
        f"and {diagonal} of the numbers on its diagonal. Along the step itself, {curved} of the random sets have more "
        f"curvature on corrupted images; with condition 2, {both}.",
    ]


def _outcomes(data: dict[str, Any]) -> list[str]:
    def count(kind: str, step: str) -> str:
        found = [one[step]["gap_change"] > 0 for name, one in data["sets"].items() if kind_of(name) == kind]
        return f"{sum(found)} of {len(found)}"

    signs = [(one["whole"]["gap_change"] > 0) == (one["whole"]["gap_change_second_order"] > 0) for one in _sets(data)]
    whole = data["by_severity"]["whole"]
    return [
        f"- The gap grew for {count('random', 'whole')} random sets.",
        f"- Of sets that meet conditions 2 and 3 along the step, it grew for {count('meeting', 'tenth')} after a tenth "
        f"of the step, and for {count('meeting', 'whole')} after the whole step.",
        f"- For {sum(signs)} of all {len(signs)} sets the second-order estimate has the sign of the change.",
        f"- The whole model is right on {whole[0]['accuracy']:.1%} of the clean images with a mean confidence of "
        f"{whole[0]['confidence']:.1%}, and on {whole[data['severity']]['accuracy']:.1%} of the corrupted ones with "
        f"{whole[data['severity']]['confidence']:.1%}.",
    ]


def _sets(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Every set once; a random one may also be among those that meet the conditions."""
    return list({json.dumps(one["heads"]): one for one in data["sets"].values()}.values())


def _source(data: dict[str, Any]) -> str:
    return (
        f"{data['test_images']} test images, clean and corrupted at severity {data['severity']} (one of the "
        f"{len(data['corruptions'])} corruptions each), {data['heads']} heads, seed {data['seed']}, torch "
        f"{data['versions']['torch']}, {data['hardware']}. From `results/{RESULTS.name}`."
    )


if __name__ == "__main__":
    write_or_check(TARGET, drawing(json.loads(RESULTS.read_text())), __doc__)

"""Draw the figures of concepts and results, as SVGs that follow the reader's choice of light or dark.

    python docs/figures.py          # writes docs/figures/*.svg, in less than a minute

Four concepts are sketches; that of the two reasons to abstain shows answers of the embedded model. Figures of results
are drawn from `results/tables/`.
"""

import csv
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import hydra_ensembles as he
from hydra_ensembles import data
from hydra_ensembles.demo import load_backbone, load_sample

FIGURES = Path(__file__).parent / "figures"
TABLES = Path(__file__).parents[1] / "results" / "tables"
WIDTH = 600
MEMBERS = ("m0", "m1", "m2")
FOREIGN = {"unknown land use": "AnnualCrop", "clothes": "FashionMNIST"}
STYLE = """<style>
  .card { fill: #ffffff; stroke: #d5d9e0; } .page { fill: #f6f7f9; } .off { fill: none; stroke: #aab1bd; }
  .base { fill: #5b6675; } .mlp { fill: #c9cfd8; } .line { stroke: #5b6675; fill: none; stroke-width: 1.6; }
  .thin { stroke: #aab1bd; fill: none; } .dash { stroke: #5b6675; fill: none; stroke-dasharray: 5 4; }
  .tip { fill: #5b6675; } .m0 { fill: #2563c9; } .m1 { fill: #d1571b; } .m2 { fill: #14866d; } .m3 { fill: #8b3fb5; }
  .m4 { fill: #8a6d1a; }
  .s0 { stroke: #2563c9; } .s1 { stroke: #d1571b; } .s2 { stroke: #14866d; }
  .curve { fill: none; stroke-width: 2.6; } .wash { fill: #d1571b; opacity: .08; }
  text { font: 15px ui-sans-serif, system-ui, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif;
    fill: #1c2330; } .title { font-weight: 600; } .soft { fill: #56606e; font-size: 13.5px; }
  @media (prefers-color-scheme: dark) {
    .card { fill: #1a1e25; stroke: #39414d; } .page { fill: #13161b; } .off, .thin { stroke: #5c6673; }
    .base { fill: #aab4c0; } .mlp { fill: #3a424e; } .line, .dash { stroke: #aab4c0; } .tip { fill: #aab4c0; }
    .m0 { fill: #6ea8ff; } .m1 { fill: #ff9a5c; } .m2 { fill: #3ecfaf; } .m3 { fill: #d194f5; }
    .m4 { fill: #e0be5a; }
    .s0 { stroke: #6ea8ff; } .s1 { stroke: #ff9a5c; } .s2 { stroke: #3ecfaf; } .wash { fill: #ff9a5c; }
    text { fill: #e8eaef; } .soft { fill: #b6bfcc; }
  }
</style>"""


class Drawing:
    """A picture of a fixed width, put together piece by piece."""

    def __init__(self, height: int, about: str) -> None:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{about}">'
        )
        self.parts = [head, STYLE]
        self.box(0, 0, WIDTH, height, "page", 14)

    def box(self, x: float, y: float, wide: float, tall: float, kind: str, round_: float = 3) -> None:
        """A rectangle."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{wide:g}" height="{tall:g}" rx="{round_:g}" class="{kind}"/>'
        )

    def dot(self, x: float, y: float, kind: str, radius: float = 6) -> None:
        """A disc."""
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" class="{kind}"/>')

    def mark(self, x: float, y: float, kind: str, square: bool, _: str) -> None:
        """The mark of a method."""
        if square:
            self.box(x - 5, y - 5, 10, 10, kind, 1)
        else:
            self.dot(x, y, kind)

    def say(self, x: float, y: float, text: str, kind: str = "", anchor: str = "middle") -> None:
        """A line of text."""
        self.parts.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" class="{kind}">{text}</text>')

    def path(self, points: Sequence[tuple[float, float]], kind: str) -> None:
        """Straight lines from point to point."""
        told = " L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        self.parts.append(f'<path d="M{told}" class="{kind}"/>')

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """A line to the right that leaves and arrives level."""
        half = f"{(x + to_x) / 2:g}"
        self.parts.append(
            f'<path d="M{x:g} {y:g} C{half} {y:g} {half} {to_y:g} {to_x - 8:g} {to_y:g}" class="line"/>'
            f'<path d="M{to_x:g} {to_y:g} l-9 -4.5 v9 z" class="tip"/>'
        )

    def bars(self, x: float, foot: float, shares: Sequence[float], kind: str, tall: float = 50) -> None:
        """Probabilities of classes, side by side."""
        for place, share in enumerate(shares):
            self.box(x + 17 * place, foot - tall * share, 14, tall * share, kind, 2)

    def save(self, name: str) -> None:
        """Write the figure."""
        (FIGURES / f"{name}.svg").write_text("\n".join([*self.parts, "</svg>\n"]))


def members() -> None:
    """The same mean for two reasons."""
    drawing = Drawing(
        300, "Three members agree on 0.7 for one input and contradict each other on another; the mean is the same."
    )
    inputs = (
        ("between two classes", [(0.7, 0.3)] * 3, "all of them hesitate:", "aleatoric"),
        ("like nothing known", [(0.98, 0.02), (0.95, 0.05), (0.17, 0.83)], "they contradict each other:", "epistemic"),
    )
    for side, (title, shares, why, name) in enumerate(inputs):
        left = 20 + 285 * side
        drawing.box(left, 20, 275, 260, "card", 10)
        drawing.say(left + 137, 48, title, "title")
        for number, (kind, pair) in enumerate(zip(MEMBERS, shares, strict=True)):
            drawing.bars(left + 24 + 58 * number, 138, pair, kind, 62)
            drawing.say(left + 40 + 58 * number, 158, str(number + 1), "soft")
        drawing.bars(left + 214, 138, (0.7, 0.3), "base", 62)
        drawing.say(left + 230, 158, "mean", "soft")
        drawing.say(left + 190, 112, "→", "")
        drawing.say(left + 137, 194, "the mean says 0.7", "")
        drawing.say(left + 137, 226, why, "soft")
        drawing.say(left + 137, 250, f"{name} uncertainty", "title")
    drawing.save("concept_members")


def trunk() -> None:
    """Common layers run once, the rest for each member."""
    drawing = Drawing(
        270, "The first layers are common to all members and run once; the last ones run for each member."
    )
    drawing.say(58, 140, "input")
    drawing.arrow(80, 135, 110, 135)
    drawing.box(110, 60, 190, 150, "card", 10)
    drawing.say(205, 48, "trunk: runs once", "title")
    for layer in range(4):
        drawing.box(126 + 41 * layer, 78, 34, 114, "mlp", 5)
        for head in range(5):
            drawing.dot(143 + 41 * layer, 97 + 19 * head, "base")
    drawing.say(440, 48, "runs for each member", "title")
    gone = {0: (1, 3), 1: (0, 4), 2: (2, 3)}
    for number, kind in enumerate(MEMBERS):
        middle = 80 + 55 * number
        drawing.arrow(300, 135, 330, middle)
        for layer in range(2):
            drawing.box(332 + 74 * layer, middle - 18, 68, 36, "card", 5)
            for head in range(5):
                off = head == gone[number][layer]
                drawing.dot(344 + 74 * layer + 11 * head, middle, "off" if off else kind, 4.2)
        drawing.arrow(474, middle, 500, middle)
        drawing.bars(508, middle + 18, [(0.9, 0.1), (0.7, 0.3), (0.85, 0.15)][number], kind, 36)
    drawing.arrow(546, 135, 562, 135)
    drawing.say(578, 140, "p")
    drawing.say(205, 240, "equal weights, stored once", "soft")
    drawing.say(440, 240, "own heads, shared or own MLPs", "soft")
    drawing.save("concept_trunk")


def circuits() -> None:
    """One head after another is removed, each time the one whose removal hurts least."""
    drawing = Drawing(
        352, "At every step each head is switched off on trial; the one whose removal leaves the best score is removed."
    )
    steps = ([52, 30, 44, 58, 22, 40, 49, 35], [47, 26, 41, 0, 20, 38, 51, 30], [43, 22, 45, 0, 17, 33, 0, 27])
    for step, scores in enumerate(steps):
        foot = 92 + 92 * step
        drawing.say(22, foot - 8, f"step {step + 1}", "title", "start")
        drawing.path([(92, foot + 0.5), (400, foot + 0.5)], "thin")
        best = scores.index(max(scores))
        for head, score in enumerate(scores):
            x = 112 + 38 * head
            drawing.box(x - 10, foot - score, 20, score, "m1" if head == best else "mlp", 2)
            drawing.dot(x, foot + 16, "off" if score == 0 else "m1" if head == best else "base", 7)
        drawing.say(420, foot - 22, "score without a head:", "soft", "start")
        drawing.say(420, foot - 4, "highest is removed", "soft", "start")
    drawing.say(300, 332, "three scores (accuracy, OOD detection, both) give three members", "soft")
    drawing.save("concept_circuits")


def two_reasons() -> None:
    """Answers of the embedded model by both scores, with thresholds that together accept 95 % of familiar images."""
    drawing = Drawing(
        452,
        "Each image by how unsure the model is and how unfamiliar it looks; mistakes to the right, clothes above.",
    )
    base, sample = load_backbone(), load_sample()
    preprocess: Any = base.metadata.preprocessing

    def batches(name: str) -> data.BatchLoader:
        return data.batches(sample[name], preprocess)

    model = he.calibrate(he.fit_familiarity(base, batches("circuit_id"), held_out=0.0), batches("calibration"))
    answers = {
        name: he.Prediction.concat([model.predict(inputs) for inputs, _ in batches(name)])
        for name in ("test", *FOREIGN.values())
    }
    unsure = {name: 1 - p.confidence for name, p in answers.items()}
    distance = {name: p.score("mahalanobis") for name, p in answers.items()}
    test = answers["test"]
    assert isinstance(test.threshold, float)
    assert test.unfamiliarity is not None
    assert test.unfamiliarity.threshold is not None
    left, right, top, foot = 66, 576, 22, 352

    def between(value: float, low: float, high: float) -> float:
        return math.log(min(max(value, low), high) / low) / math.log(high / low)

    def across(score: float) -> float:
        return left + (right - left) * between(score, 0.0005, 1)

    def up(distance: float) -> float:
        return foot - (foot - top) * between(distance, 10, 3000)

    drawing.box(left, top, right - left, foot - top, "card", 6)
    x, y = across(1 - test.threshold), up(test.unfamiliarity.threshold)
    drawing.box(left, top, right - left, y - top, "wash", 0)
    drawing.box(x, y, right - x, foot - y, "wash", 0)
    wrong = test.label != torch.tensor(sample["test"].labels)
    kinds = {"familiar": "base", "mistaken": "m1", "unknown land use": "m2", "clothes": "m0"}
    picked = {"familiar": ("test", ~wrong), "mistaken": ("test", wrong)}
    picked |= {label: (name, torch.ones(len(unsure[name])).bool()) for label, name in FOREIGN.items()}
    for label, (name, mask) in picked.items():
        where = mask.nonzero().flatten()
        for index in where[torch.randperm(len(where), generator=torch.Generator().manual_seed(0))[:110]].tolist():
            x_, y_ = across(unsure[name][index].item()), up(distance[name][index].item())
            drawing.dot(x_, y_, kinds[label], 3.4 if label == "mistaken" else 2.6)
    drawing.path([(x, top), (x, foot)], "dash")
    drawing.path([(left, y), (right, y)], "dash")
    drawing.say(left + 8, top + 20, "unfamiliar", "title", "start")
    drawing.say(right - 8, foot - 12, "unsure", "title", "end")
    drawing.say(left + 8, y + 22, "accepted", "title", "start")
    for value in (0.001, 0.01, 0.1, 1):
        drawing.say(across(value), foot + 18, f"{value:g}", "soft")
    drawing.say((left + right) / 2, foot + 40, "one minus confidence →", "soft")
    turned = f'<text transform="translate(24 {(top + foot) / 2:g}) rotate(-90)" text-anchor="middle" class="soft">'
    drawing.parts.append(f"{turned}distance of features →</text>")
    for value in (10, 100, 1000):
        drawing.say(left - 7, up(value) + 5, f"{value}", "soft", "end")
    for x, (label, kind) in zip((76, 180, 296, 468), kinds.items(), strict=True):
        drawing.dot(x, 424, kind, 6)
        drawing.say(x + 13, 429, label, "", "start")
    drawing.save("concept_two_reasons")


def calibration() -> None:
    """First the mean, then one temperature."""
    drawing = Drawing(
        306, "The members' probabilities are averaged first; one temperature then sharpens the mean to the right level."
    )
    for number, kind in enumerate(MEMBERS):
        drawing.bars(28, 92 + 74 * number, [(0.95, 0.03, 0.02), (0.8, 0.15, 0.05), (0.5, 0.1, 0.4)][number], kind, 52)
        drawing.arrow(86, 74 + 74 * number, 122, 148)
    drawing.bars(128, 174, (0.75, 0.09, 0.16), "base", 58)
    drawing.say(152, 198, "mean", "soft")
    drawing.arrow(182, 148, 244, 148)
    drawing.say(211, 138, "T &lt; 1", "soft")
    drawing.bars(250, 174, (0.9, 0.03, 0.07), "base", 58)
    drawing.say(274, 198, "confidence", "soft")
    drawing.say(52, 262, "members", "soft")
    left, foot, size = 356, 252, 216
    drawing.box(left, foot - size, size, size, "card", 6)
    drawing.path([(left, foot), (left + size, foot - size)], "dash")
    at = [place / 20 for place in range(21)]
    sketches = {"s1": [v**1.55 for v in at], "s0": [v**0.62 for v in at]}
    for kind, values in sketches.items():
        drawing.path([(left + size * v, foot - size * one) for v, one in zip(at, values, strict=True)], f"curve {kind}")
    drawing.path([(left + size * v, foot - size * (v - 0.012 * math.sin(9 * v))) for v in at], "curve s2")
    drawing.say(left + 12, foot - size + 34, "mean: too unsure", "", "start")
    drawing.say(left + size - 8, foot - 14, "one model: too sure", "", "end")
    drawing.say(left + size / 2, foot + 20, "confidence →, right answers ↑", "soft")
    drawing.say(left + size / 2, foot + 40, "green: after one temperature", "soft")
    drawing.save("concept_calibration")


def lines(table: str) -> Iterator[dict[str, str]]:
    """Lines of a stored table."""
    with (TABLES / f"{table}.csv").open(encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)


PANELS = {  # tasks with their backbones, and how they are called; others follow under their own names
    "cifar100 dinov2-s": "CIFAR-100",
    "tinyimagenet dinov2-s": "TinyImageNet-200",
    "cifar10 dinov2-s": "CIFAR-10",
    "sst2 minilm-l6": "SST-2, MiniLM",
    "sst2 nomic-12x768": "SST-2, 12 x 768",
    "sst2 smollm2-135m": "SST-2, SmolLM2",
    "clinc150 smollm2-135m": "CLINC150, SmolLM2",
    "tweets smollm2-135m": "tweets, SmolLM2",
    "eurosat vit-6x144": "the demo",
}
MARKS = {  # methods of the table of shares: their colour, whether they are squares, and how they are called
    "single softmax": ("off", False, "threshold, no promise"),
    "single": ("base", False, "one model"),
    "laplace": ("base", True, "Laplace"),
    "soup": ("m0", False, "soup"),
    "hydra": ("m1", False, "Hydra"),
    "hydra distilled": ("m1", True, "Hydra, distilled"),
    "cascade soup-hydra": ("m2", False, "soup, then Hydra"),
    "cascade soup-deep": ("m2", True, "soup, then Deep"),
    "deep": ("m3", False, "Deep Ensemble"),
    "hydra taylor": ("m4", True, "the paper's, Taylor"),
    "hydra circ": ("m4", False, "the paper's, circuits"),
}
RISK, DEAREST = "0.05", 3.3


def shares() -> None:
    """Share that may be answered with at most 5 % errors, against price, one point a method, one panel a task."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}  # by task and method: price and share of each seed
    for line in lines("promise_shares"):
        if line["risk"] == RISK and line["rule"] != "confidence" and line["price"]:
            point = float(line["price"]), float(line["accepted"])
            found.setdefault(f"{line['task']} {line['backbone']}", {}).setdefault(line["method"], []).append(point)
    tasks = [task for task in (*PANELS, *(task for task in found if task not in PANELS)) if task in found]
    foot = 262 * -(-len(tasks) // 3)
    drawing = Drawing(
        foot + 110, "Share that each method may answer with at most 5 % errors, against its inference time."
    )
    for place, task in enumerate(tasks):
        left, top, wide, tall = 54 + 193 * (place % 3), 44 + 262 * (place // 3), 134, 190
        means = {name: [sum(one) / len(one) for one in zip(*found[task][name], strict=True)] for name in found[task]}
        shown = {name: (price, share) for name, (price, share) in means.items() if name in MARKS and price <= DEAREST}
        low, high = (end(share for _, share in shown.values()) for end in (min, max))
        step = next(one for one in (0.01, 0.02, 0.03, 0.05, 0.1, 0.25) if high <= one * math.floor(low / one) + 4 * one)
        low = min(step * math.floor(low / step), 1 - 4 * step)
        drawing.say(left + wide / 2, top - 14, PANELS.get(task, task), "title")
        drawing.box(left, top, wide, tall, "card", 6)
        for number in range(5):
            y = top + tall * (1 - number / 4)
            drawing.say(left - 5, y + 4, f"{100 * (low + step * number):.3g} %", "soft", "end")
            if 0 < number < 4:
                drawing.path([(left, y), (left + wide, y)], "thin")
        for name in (name for name in MARKS if name in shown):
            price, share = shown[name]
            drawing.mark(left + wide * (price - 0.8) / 2.5, top + tall * (1 - (share - low) / (4 * step)), *MARKS[name])
        for price in (1, 2, 3):
            drawing.say(left + wide * (price - 0.8) / 2.5, top + tall + 18, f"{price}x", "soft")
    drawing.say(300, foot + 10, "inference time, relative to one model →", "soft")
    used = [name for name in MARKS if any(name in found[task] for task in tasks)]
    for place, name in enumerate(used):
        x, y = 24 + 192 * (place % 3), foot + 36 + 22 * (place // 3)
        drawing.mark(x, y, *MARKS[name])
        drawing.say(x + 13, y + 5, MARKS[name][2], "soft", "start")
    drawing.save("shares")


STUDIES = {
    "vision-cifar100": ("calibrated.nll", "near.auroc"),
    "vision-cifar10": ("calibrated.nll", "near.auroc"),
    "vision-tinyimagenet": ("calibrated.nll", "near.auroc"),
    "text-sst2": ("calibrated.nll", "near.auroc"),
    "zero-shot": ("unseen.nll", "tinyimagenet.near.auroc"),
}
SHOWN = (
    *(
        "Single, trained as long",
        "Laplace (last layer)",
        "Soup",
        "Hydra",
        "Deep Ensembles",
        "Single, D.2, nothing pruned",
    ),
    *("BayesVLM", "Taylor", "CircAvg", "Hydra (Taylor)", "Hydra (Circ)"),
)
LIMITS = (0.08, 4.0)  # of the two panels; beyond, the number is written


def gains(study: str) -> None:
    """What methods gain over a single model, with 95 % intervals: in log-likelihood, and in detecting near inputs."""
    metrics = STUDIES[study]
    found = {(line["method"], line["metric"]): line for line in lines(study)}
    methods = [name for name in SHOWN if (name, metrics[0]) in found]
    if "Hydra (Taylor)" in methods:  # beside the ensembles of them, single pruned models are in the table alone
        methods = [name for name in methods if name not in ("Taylor", "CircAvg")]
    foot = 50 + 28 * len(methods)
    drawing = Drawing(foot + 60, "What each method gains over a single model, with 95 % intervals.")
    titles = ("less NLL →", "near AUROC, points →")
    for row, name in enumerate(methods):
        drawing.say(196, 70 + 28 * row, name.removeprefix("Single, "), "", "end")
    for panel, (metric, limit, title) in enumerate(zip(metrics, LIMITS, titles, strict=True)):
        left, wide, unit = 208 + 195 * panel, 180, (-1.0, 100.0)[panel]
        drawing.say(left + wide / 2, 32, title, "title")
        drawing.box(left, 44, wide, foot - 36, "card", 6)
        drawing.path([(left + wide / 2, 44), (left + wide / 2, foot + 8)], "dash")
        for value in (-limit / 2, 0, limit / 2):
            drawing.say(left + wide * (value / limit + 1) / 2, foot + 28, f"{value:g}", "soft")
        for row, name in enumerate(methods):
            line, y = found[name, metric], 65 + 28 * row
            gain, half = unit * float(line["gain"]), abs(unit) * float(line["half_width"])
            ends = [left + wide * (min(max(one / limit, -1), 1) + 1) / 2 for one in (gain - half, gain + half)]
            kind = {"better": "m2", "worse": "m1"}.get(line["significant"], "base")
            if abs(gain) > limit:
                drawing.say(
                    left + 8 if gain < 0 else left + wide - 8, y + 5, f"{gain:+.2g}", "", "start" if gain < 0 else "end"
                )
            else:
                drawing.path([(ends[0], y), (ends[1], y)], "line")
                drawing.dot(left + wide * (gain / limit + 1) / 2, y, kind, 5)
    for x, (kind, label) in zip(
        (150, 260, 370), (("m2", "better"), ("m1", "worse"), ("base", "not certain")), strict=True
    ):
        drawing.dot(x, foot + 46, kind, 5)
        drawing.say(x + 12, foot + 51, label, "soft", "start")
    drawing.save(f"gains_{study}")


if __name__ == "__main__":
    for draw in (members, trunk, circuits, two_reasons, calibration, shares):
        draw()
    for study in STUDIES:
        gains(study)

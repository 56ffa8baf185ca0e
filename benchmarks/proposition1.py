"""Proposition 1 of the paper, checked on the embedded model: does pruning hurt more on corrupted images?

    python benchmarks/proposition1.py            # computes, and draws docs/figures/proposition1.svg
    python benchmarks/proposition1.py --draw     # only draws

A gate multiplies a head's part of the output projection: 1 is the model as it is, 0 the model without the head. Pruning
a set of heads is the step from 1 to 0 in their gates, so gradient and Hessian in the gates are all that a second-order
statement about pruning whole heads needs. They are computed on clean test images and on the same images corrupted (one
of the fifteen corruptions each, in turn). From them follow the conditions of the proposition and the change of the loss
gap to second order for any set of heads, which is held against the change measured by pruning: for sets that rankings
choose, for random ones, and for random ones that meet the conditions, at a tenth of the step and at the whole step.
Heads are ranked on other images than those the losses are computed on. About ten minutes on a core.
"""

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, hardware, load, pyplot, save_figure, store, table, versions
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import hydra_ensembles as he
from hydra_ensembles import data
from hydra_ensembles.demo.embedded import load_backbone, load_sample

RESULT = "proposition1.json"
SEVERITIES = (0, 1, 2, 3, 4, 5)  # 0: clean
EXPANDED = 3  # the severity whose gradient and Hessian are computed
DRAWS = 10_000
COLOURS = {
    "whole": "#4d4d4d",
    "Taylor": "#b2182b",
    "CircAcc": "#d6904a",
    "CircAvg": "#2166ac",
    "random": "#9aa3ae",
    "meeting": "#35978f",
}
DRAWN = {"random": "random heads", "meeting": "meets the conditions"}

Batches = list[tuple[Tensor, Tensor]]


# --- the loss in the gates -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expansion:
    """A mean loss around the whole model: value, gradient `[L·H]` and Hessian `[L·H, L·H]` in the gates, float64."""

    value: float
    gradient: Tensor
    hessian: Tensor

    def second_order(self, steps: Tensor) -> Tensor:
        """Half the curvature along steps `[..., L·H]`."""
        return (steps @ self.hessian * steps).sum(-1) / 2


def gated_logits(model: he.Ensemble, gates: Tensor, inputs: Tensor) -> Tensor:
    """Logits `[B, C]` with gates `[L, H]` on the heads of a model with one member, none pruned."""
    names = [f"encoder.layers.{layer}.attention.out" for layer in range(model.num_layers)]
    weights = {
        name: model.get_parameter(name).detach() * gates[layer, :, None, None]  # [H, d_k, d]
        for layer, name in enumerate(names)
    }
    logits: Tensor = functional_call(model, weights, (inputs,))[0]  # [1, B, C] -> [B, C]
    return logits


def measure(model: he.Ensemble, gates: Tensor, batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """What a model with these gates answers: mean loss, share of right answers, mean confidence."""
    sums, samples = torch.zeros(3, dtype=torch.float64), 0
    with torch.no_grad():
        for inputs, labels in batches:
            logits = gated_logits(model, gates, inputs).double()
            confidence, label = logits.softmax(-1).max(-1)
            loss = F.cross_entropy(logits, labels, reduction="sum")
            sums += torch.stack([loss, (label == labels).sum(), confidence.sum()])
            samples += len(labels)
    return dict(zip(("loss", "accuracy", "confidence"), (sums / samples).tolist(), strict=True))


def expand(model: he.Ensemble, batches: Iterable[tuple[Tensor, Tensor]]) -> Expansion:
    """Value, gradient and Hessian of the mean loss at the whole model."""
    count = model.num_layers * model.num_heads
    value, samples = 0.0, 0
    gradient, hessian = torch.zeros(count, dtype=torch.float64), torch.zeros(count, count, dtype=torch.float64)
    for inputs, labels in batches:
        gates = torch.ones(model.num_layers, model.num_heads, dtype=model.dtype, requires_grad=True)
        with sdpa_kernel(SDPBackend.MATH):  # the fused kernels cannot be differentiated twice
            loss = F.cross_entropy(gated_logits(model, gates, inputs), labels, reduction="sum")
            (slope,) = torch.autograd.grad(loss, gates, create_graph=True)
            flat = slope.flatten()
            rows = [torch.autograd.grad(flat[row], gates, retain_graph=True)[0].flatten() for row in range(count)]
        value += loss.item()
        gradient += flat.detach().double()
        hessian += torch.stack(rows).double()
        samples += len(labels)
    hessian = (hessian + hessian.T) / 2  # symmetric but for rounding
    return Expansion(value / samples, gradient / samples, hessian / samples)


def pruning_step(model: he.Ensemble, heads: Sequence[he.Head]) -> Tensor:
    """The step `[L·H]` in the gates that takes these heads out."""
    step = torch.zeros(model.num_layers * model.num_heads, dtype=torch.float64)
    step[[head.layer * model.num_heads + head.head for head in heads]] = -1.0
    return step


def gates_after(model: he.Ensemble, step: Tensor, share: float = 1.0) -> Tensor:
    """Gates `[L, H]` after a share of a step."""
    return (1.0 + share * step).reshape(model.num_layers, model.num_heads).to(model.dtype)


# --- the experiment --------------------------------------------------------------------------------------------------


def corrupted(dataset: Any, model: he.Ensemble, severity: int, seed: int) -> Batches:
    """All images in batches, the n-th with the n-th of the fifteen corruptions; severity 0 leaves them alone."""
    pictures = [dataset[index][0] for index in range(len(dataset))]
    if severity:
        pictures = [
            data.corrupt(picture, name, severity, seed=seed + index, parameters="tinyimagenet")
            for index, (picture, name) in enumerate(zip(pictures, cycle(data.CORRUPTIONS), strict=False))
        ]
    inputs: Any = model.prepare(pictures)
    labels = torch.tensor([int(label) for label in dataset.labels])
    return list(zip(inputs.split(40), labels.split(40), strict=True))


def rankings(model: he.Ensemble, sample: Any, prune: int, images: int, seed: int) -> dict[str, list[he.Head]]:
    """Sets of heads to prune by name: two rankings that look at clean data only, one that also looks at OOD data."""
    preprocess: Any = model.metadata.preprocessing
    known, unknown = (
        data.batches(data.subset(sample[name], images, seed=seed), preprocess, batch_size=64)
        for name in ("circuit_id", "circuit_ood")
    )
    how: dict[str, Any] = {"method": "exact", "ties": "order"}
    return {
        "Taylor": list(he.taylor(model, known, budget=prune, scope="global").first(prune)),
        "CircAcc": list(he.extract_circuit(model, known, score="acc", budget=prune, **how).first(prune)),
        "CircAvg": list(he.extract_circuit(model, known, unknown, score="avg", budget=prune, **how).first(prune)),
    }


def random_steps(model: he.Ensemble, prune: int, seed: int) -> Tensor:
    """Steps `[DRAWS, L·H]` that take random heads out."""
    generator, heads = torch.Generator().manual_seed(seed), model.num_layers * model.num_heads
    drawn = torch.stack([torch.randperm(heads, generator=generator)[:prune] for _ in range(DRAWS)])
    return torch.zeros(DRAWS, heads, dtype=torch.float64).scatter(1, drawn, -1.0)


def conditions(clean: Expansion, noisy: Expansion, steps: Tensor) -> tuple[dict[str, Any], Tensor]:
    """What the proposition assumes, over all directions and over random steps; which steps `[DRAWS]` meet it."""
    aligned = steps @ noisy.gradient >= 0
    curved = noisy.second_order(steps) > clean.second_order(steps)
    shares = {"aligned": aligned, "curved": curved, "both": aligned & curved}
    facts = {
        "eigenvalues_of_hessian_difference": torch.linalg.eigvalsh(noisy.hessian - clean.hessian).tolist(),
        "diagonal_of_hessian_difference": (noisy.hessian - clean.hessian).diagonal().tolist(),
        "clean_gradient_norm": clean.gradient.norm().item(),
        "noisy_gradient_norm": noisy.gradient.norm().item(),
        "random_sets": len(steps),
        **{f"share_{name}": one.double().mean().item() for name, one in shares.items()},
    }
    return facts, aligned & curved


def measured(
    model: he.Ensemble, step: Tensor, batches: dict[str, Batches], expansions: dict[str, Expansion]
) -> dict[str, Any]:
    """One set of heads: terms of the expansion, and what a tenth of the step and the whole of it do to both losses."""
    terms: dict[str, Any] = {f"{name}_first_order": (one.gradient @ step).item() for name, one in expansions.items()}
    terms |= {f"{name}_second_order": one.second_order(step).item() for name, one in expansions.items()}
    first, second = (terms[f"noisy_{order}"] - terms[f"clean_{order}"] for order in ("first_order", "second_order"))
    gap = expansions["noisy"].value - expansions["clean"].value
    for name, share in {"tenth": 0.1, "whole": 1.0}.items():
        gates = gates_after(model, step, share)
        losses = {f"{kind}_loss": measure(model, gates, some)["loss"] for kind, some in batches.items()}
        change = losses["noisy_loss"] - losses["clean_loss"] - gap
        expected = share * first + share**2 * second
        terms[name] = {**losses, "gap_change": change, "gap_change_second_order": expected}
    return {"heads": [[*divmod(index, model.num_heads)] for index in step.nonzero()[:, 0].tolist()], **terms}


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The whole experiment."""
    model, sample = load_backbone(), load_sample().sets
    test = data.subset(sample["test"], options.images, seed=options.seed, stratified=True)
    by_severity = {severity: corrupted(test, model, severity, options.seed) for severity in SEVERITIES}
    ranked = rankings(model, sample, options.prune, options.ranking_images, options.seed)
    named = {name: pruning_step(model, heads) for name, heads in ranked.items()}
    print(f"{len(test)} test images; computing gradients and Hessians", flush=True)
    batches = {"clean": by_severity[0], "noisy": by_severity[EXPANDED]}
    expansions = {name: expand(model, some) for name, some in batches.items()}
    steps = random_steps(model, options.prune, options.seed)
    facts, meeting = conditions(expansions["clean"], expansions["noisy"], steps)
    chosen = named | {f"random {row}": steps[row] for row in range(options.draws)}
    chosen |= {f"meeting {row}": steps[row] for row in meeting.nonzero()[: options.draws, 0].tolist()}
    print("pruning and measuring", flush=True)
    curves = {
        name: [measure(model, gates_after(model, step), by_severity[severity]) for severity in SEVERITIES]
        for name, step in {"whole": torch.zeros_like(steps[0]), **named}.items()
    }
    return {
        "model": "embedded demo backbone, EuroSAT (7 classes)",
        "heads": model.num_layers * model.num_heads,
        "classes": model.num_classes,
        "prune": options.prune,
        "test_images": len(test),
        "ranking_images": options.ranking_images,
        "severity": EXPANDED,
        "corruptions": list(data.CORRUPTIONS),
        "clean_loss": expansions["clean"].value,
        "noisy_loss": expansions["noisy"].value,
        "conditions": facts,
        "sets": {name: measured(model, step, batches, expansions) for name, step in chosen.items()},
        "by_severity": curves,
        "seed": options.seed,
        "versions": versions(),
        "hardware": hardware("cpu"),
    }


# --- figure and table ------------------------------------------------------------------------------------------------


def kind_of(name: str) -> str:
    """A set that a ranking chose has its name, others are `random`, or `meeting` the conditions."""
    return name.split(" ")[0]


def draw(found: dict[str, Any]) -> Any:
    """Three panels: loss by severity, predicted against measured widening, spectrum of the Hessian difference."""
    figure, (losses, widening, spectrum) = pyplot().subplots(1, 3, figsize=(10.5, 3.2))
    for name, curve in found["by_severity"].items():
        label = f"{name} model" if name == "whole" else f"without {found['prune']} heads, {name}"
        losses.plot([point["loss"] for point in curve], "o-", color=COLOURS[name], label=label, markersize=3.5)
    losses.set(xlabel="severity of the corruption (0: clean)", ylabel="cross-entropy", title="Loss")
    losses.legend(frameon=False, fontsize=8)
    seen: set[str] = set()
    for name, one in found["sets"].items():
        kind, whole = kind_of(name), one["whole"]
        label = "_" if kind in seen else DRAWN.get(kind, kind)  # matplotlib leaves labels with _ out of the legend
        place, size = (whole["gap_change_second_order"], whole["gap_change"]), 4 if kind in DRAWN else 6
        widening.plot(*place, "o", color=COLOURS[kind], label=label, markersize=size)
        seen.add(kind)
    for line in (widening.axhline, widening.axvline):
        line(0, color=COLOURS["random"], linewidth=0.8)
    widening.set(xlabel="to second order", ylabel="measured", title="Change of the loss gap by pruning")
    widening.legend(frameon=False, fontsize=7.5, loc="lower right")
    values = found["conditions"]["eigenvalues_of_hessian_difference"]
    colours = [COLOURS["Taylor"] if value < 0 else COLOURS["CircAvg"] for value in values]
    spectrum.bar(range(1, len(values) + 1), values, color=colours)
    spectrum.axhline(0, color=COLOURS["whole"], linewidth=0.8)
    spectrum.set(xlabel="eigenvalue, smallest first", title="Hessian, corrupted minus clean")
    figure.tight_layout()
    return figure


def proposition_table() -> str:
    """The sets that rankings chose, the random ones summed up, and how the data were made."""
    found = load(RESULT)
    sets, facts, whole = found["sets"], found["conditions"], found["by_severity"]["whole"]
    gap = found["noisy_loss"] - found["clean_loss"]
    rows = [("none", f"{found['clean_loss']:.3f}", f"{found['noisy_loss']:.3f}", f"{gap:.3f}", "", "", "", "")]
    for name, one in sets.items():
        if kind_of(name) not in DRAWN:
            after, curvature = one["whole"], one["noisy_second_order"] - one["clean_second_order"]
            losses = (after["clean_loss"], after["noisy_loss"], after["noisy_loss"] - after["clean_loss"])
            changes = (after["gap_change"], after["gap_change_second_order"], one["noisy_first_order"], curvature)
            cells = [*(f"{loss:.3f}" for loss in losses), *(f"{change:+.3f}" for change in changes)]
            rows.append((f"{found['prune']}, {name}", *cells))  # type: ignore[arg-type]
    header = ("heads pruned", "clean loss", "corrupted loss", "gap", "change of the gap", "to second order",
              "noisy gradient · step", "curvature difference")  # fmt: skip

    def grew(kind: str, step: str) -> str:
        of_kind = [one[step]["gap_change"] > 0 for name, one in sets.items() if kind_of(name) == kind]
        return f"{sum(of_kind)} of {len(of_kind)}"

    aligned, curved, both = (f"{facts[f'share_{name}']:.1%}" for name in ("aligned", "curved", "both"))
    positive = [
        sum(value > 0 for value in facts[f"{name}_of_hessian_difference"]) for name in ("eigenvalues", "diagonal")
    ]
    once = {json.dumps(one["heads"]): one["whole"] for one in sets.values()}.values()  # a random set may also meet them
    signs = [(one["gap_change"] > 0) == (one["gap_change_second_order"] > 0) for one in once]
    clean, noisy = whole[0], whole[found["severity"]]
    lines = [
        f"- Condition 1: the gradient in the gates has norm {facts['clean_gradient_norm']:.3f} on clean images, "
        f"{facts['noisy_gradient_norm']:.3f} on corrupted ones.",
        f"- Condition 2: of {facts['random_sets']:,} random sets, {aligned} do not point down the noisy loss.",
        f"- Condition 3: {positive[0]} of {found['heads']} eigenvalues of the difference of the Hessians are positive, "
        f"and {positive[1]} of the numbers on its diagonal. Along the step itself, {curved} of the random sets have "
        f"more curvature on corrupted images; with condition 2, {both}.",
        f"- The gap grew for {grew('random', 'whole')} random sets.",
        f"- Of sets that meet conditions 2 and 3 along the step, it grew for {grew('meeting', 'tenth')} after a tenth "
        f"of the step, and for {grew('meeting', 'whole')} after the whole step.",
        f"- For {sum(signs)} of all {len(signs)} sets the second-order estimate has the sign of the change.",
        f"- The whole model is right on {clean['accuracy']:.1%} of the clean images with a mean confidence of "
        f"{clean['confidence']:.1%}, and on {noisy['accuracy']:.1%} of the corrupted ones with "
        f"{noisy['confidence']:.1%}.",
    ]
    about = (
        f"{found['test_images']} test images, clean and corrupted at severity {found['severity']} (one of the "
        f"{len(found['corruptions'])} corruptions each), {found['heads']} heads, seed {found['seed']}, torch "
        f"{found['versions']['torch']}, {found['hardware']}. From `results/{RESULT}`."
    )
    return "\n".join([*table(header, rows), "", *lines, "", about])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="only draw, from the results")
    parser.add_argument("--output", type=Path, default=RESULTS / RESULT)
    parser.add_argument("--prune", type=int, default=9, help="heads to prune, as the demo does")
    parser.add_argument("--images", type=int, default=120, help="test images, clean and corrupted")
    parser.add_argument("--ranking-images", type=int, default=48, help="ID and as many OOD images that rank heads")
    parser.add_argument("--draws", type=int, default=12, help="random sets, and as many that meet the conditions")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if not options.draw:
        store(options.output, run(options))
    if options.output == RESULTS / RESULT:
        save_figure(draw(load(RESULT)), "proposition1.svg")


if __name__ == "__main__":
    main()

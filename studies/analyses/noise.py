"""Proposition 1 of the paper on real models (B.1): does pruning hurt more on noisy data, and do its conditions hold?

Gradient and Hessian in the gates of all heads are computed on clean test samples and on the same samples with noise:
images with one of the fifteen corruptions each, in turn, texts with some of their tokens replaced. They give the
conditions of the proposition and the second-order change of the loss gap for any set of heads, which is compared with
the change measured by pruning: for sets that rankings choose, for random ones, and for random ones that meet the
conditions, at a tenth of the step and at the whole step. Heads are ranked on other samples. In the attention weights
the same terms are computed along the steps of the rankings, and the diagonals of the Hessians.
"""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

import hydra_ensembles as he
from hydra_ensembles.batches import move
from hydra_ensembles.data.corruptions import CORRUPTIONS, corrupted

from ..results import markdown
from ..samples import SampleBatches, Samples
from ..seed import Seed
from ..seed_folder import precise_products
from ..sets import at_most
from ..task import Drawn, Task
from .analysis import Analysis, Result, asked, paper
from .drawing import COLOURS, DARK, GREEN, GREY, OURS, THEIRS, fields, legend
from .gates import Batches, Expansion, expand, gates_after, measure, pruning_step, weight_terms

DRAWS = 10_000
DRAWN = {"random": "random heads", "meeting": "meets the conditions"}
MARKS = {"whole": "D", "Taylor": "s", "CircAcc": "v", "CircAvg": "o", "random": "^", "meeting": "P"}
PAPER_TASKS = ("CIFAR-100", "ImageNet-1K")

Steps = Mapping[str, Tensor]  # steps in the gates, by how the heads were chosen


def run(seed: Seed) -> dict[str, Any]:
    """Run the experiment for a task."""
    task, base, count = seed.task, seed.base, seed.prune
    chosen = asked(task, "noise")
    by_severity = {0: clean(task), chosen["severity"]: noisy(task, seed.number)}
    ranked = {
        "Taylor": seed.taylor().first(count),
        "CircAcc": seed.circuit("acc").first(count),
        "CircAvg": seed.circuit("avg").first(count),
    }
    ranked_steps = {name: pruning_step(base, heads) for name, heads in ranked.items()}
    kind = (
        f"corrupted at severity {chosen['severity']}"
        if task.kind == "image"
        else f"{chosen['replaced']:.0%} of the tokens replaced"
    )
    return {"noise": kind, **experiment(base, by_severity, ranked_steps, count, chosen, seed.number)}


# --- samples ---------------------------------------------------------------------------------------------------------


def clean(task: Task) -> Batches:
    """Unchanged test samples, in the order of `noisy`."""
    if task.kind == "text":
        return placed(task, Drawn(task.inside("report"), asked(task, "noise")["images"]))
    return placed(task, task.samples(*_in_turn(task, 0)))


def noisy(task: Task, seed: int) -> Batches:
    """The same samples with noise."""
    chosen = asked(task, "noise")
    if task.kind == "image":
        return placed(task, task.samples(*_in_turn(task, chosen["severity"])))
    draws = torch.Generator().manual_seed(seed)
    return [({**inputs, "input_ids": replaced(inputs, chosen["replaced"], draws)}, y) for inputs, y in clean(task)]


def _in_turn(task: Task, severity: int) -> list[Any]:
    """Every fifteenth image with the same corruption, grouped by corruption; severity 0 leaves them unchanged."""
    images = at_most(task.source.images(task.suite.id), asked(task, "noise")["images"])
    parts = [images.select(np.arange(start, len(images), len(CORRUPTIONS))) for start in range(len(CORRUPTIONS))]
    if not severity:
        return [part for part in parts if len(part)]
    parameters = task.plain["corruptions"]
    pairs = zip(parts, CORRUPTIONS, strict=True)
    return [corrupted(part, name, severity, parameters=parameters) for part, name in pairs if len(part)]


def placed(task: Task, samples: Samples) -> Batches:
    """Samples in batches on the device of the task."""
    batches = SampleBatches(samples, asked(task, "noise")["batch"])
    return [(move(inputs, task.device, torch.float32), labels.to(task.device)) for inputs, labels in batches]


def replaced(inputs: Mapping[str, Tensor], share: float, draws: torch.Generator) -> Tensor:
    """Token ids `[B, T]`, some replaced by others from the batch; the first and the last token stay."""
    ids = inputs["input_ids"].cpu()
    mask = inputs["attention_mask"].cpu().bool()
    inner = mask & mask.roll(-1, 1)  # excludes the last token; full rows are handled below
    inner[:, 0] = inner[:, -1] = False
    chosen = inner & (torch.rand(ids.shape, generator=draws) < share)
    words = ids[inner]
    changed = ids.clone()
    changed[chosen] = words[torch.randint(len(words), (int(chosen.sum()),), generator=draws)]
    return changed.to(inputs["input_ids"].device)


# --- the experiment --------------------------------------------------------------------------------------------------


def experiment(
    model: he.Ensemble,
    by_severity: Mapping[int, Batches],
    ranked_steps: Steps,
    prune: int,
    chosen: Mapping[str, Any],
    seed: int,
) -> dict[str, Any]:
    """All results for a model without `prune` heads on clean samples (severity 0) and at the other severities."""
    batches = {"clean": by_severity[0], "noisy": by_severity[chosen["severity"]]}
    with precise_products():
        expansions = {name: expand(model, some) for name, some in batches.items()}
        steps = random_steps(model, prune, seed)
        facts, meeting = conditions(expansions["clean"], expansions["noisy"], steps)
        tried = dict(ranked_steps) | {f"random {row}": steps[row] for row in range(chosen["random"])}
        tried |= {f"meeting {row}": steps[row] for row in meeting.nonzero()[: chosen["random"], 0].tolist()}
        curves = {
            name: [measure(model, gates_after(model, step), some) for some in by_severity.values()]
            for name, step in {"whole": torch.zeros_like(steps[0]), **ranked_steps}.items()
        }
        sets = {name: measured(model, step, batches, expansions) for name, step in tried.items()}
        weights = in_weights(model, batches, ranked_steps, chosen["probes"])
    return {
        "heads": model.num_layers * model.num_heads,
        "classes": model.num_classes,
        "prune": prune,
        "samples": sum(len(labels) for _, labels in batches["clean"]),
        "severity": chosen["severity"],
        "severities": list(by_severity),
        "clean_loss": expansions["clean"].value,
        "noisy_loss": expansions["noisy"].value,
        "conditions": facts,
        "sets": sets,
        "weights": weights,
        "by_severity": curves,
    }


def in_weights(model: he.Ensemble, batches: Mapping[str, Batches], ranked_steps: Steps, probes: int) -> dict[str, Any]:
    """The terms of the proposition in the attention weights, and the diagonals of the Hessians."""
    clean, noisy = (weight_terms(model, batches[name], ranked_steps, probes) for name in ("clean", "noisy"))
    difference = noisy.traces - clean.traces  # [L, H]
    along = {
        name: {
            "clean_first_order": clean.first[name],
            "noisy_first_order": noisy.first[name],
            "clean_second_order": clean.second[name],
            "noisy_second_order": noisy.second[name],
        }
        for name in ranked_steps
    }
    return {
        "weights": clean.weights,
        "clean_trace": clean.traces.sum().item(),
        "noisy_trace": noisy.traces.sum().item(),
        "mean_of_diagonal_difference": difference.sum().item() / clean.weights,
        "heads_with_more_curvature": int((difference > 0).sum()),
        "sets": along,
    }


def random_steps(model: he.Ensemble, prune: int, seed: int) -> Tensor:
    """Steps `[DRAWS, L·H]` that remove random heads."""
    generator = torch.Generator().manual_seed(seed)
    heads = model.num_layers * model.num_heads
    drawn = torch.stack([torch.randperm(heads, generator=generator)[:prune] for _ in range(DRAWS)])
    return torch.zeros(DRAWS, heads, dtype=torch.float64).scatter(1, drawn, -1.0)


def conditions(clean: Expansion, noisy: Expansion, steps: Tensor) -> tuple[dict[str, Any], Tensor]:
    """The proposition's assumptions, over all directions and over random steps; and which steps `[DRAWS]` meet them."""
    aligned = steps @ noisy.gradient >= 0
    curved = noisy.second_order(steps) > clean.second_order(steps)
    shares = {"aligned": aligned, "curved": curved, "both": aligned & curved}
    facts = {
        "eigenvalues_of_hessian_difference": torch.linalg.eigvalsh(noisy.hessian - clean.hessian).tolist(),
        "diagonal_of_hessian_difference": (noisy.hessian - clean.hessian).diagonal().tolist(),
        "clean_gradient_norm": clean.gradient.norm().item(),
        "noisy_gradient_norm": noisy.gradient.norm().item(),
        "random_sets": len(steps),
        **{f"share_{name}": holds.double().mean().item() for name, holds in shares.items()},
    }
    return facts, aligned & curved


def measured(
    model: he.Ensemble, step: Tensor, batches: Mapping[str, Batches], expansions: Mapping[str, Expansion]
) -> dict[str, Any]:
    """One set of heads: terms of the expansion, and both losses after a tenth of the step and the whole step."""
    terms: dict[str, Any] = {f"{name}_first_order": (loss.gradient @ step).item() for name, loss in expansions.items()}
    terms |= {f"{name}_second_order": loss.second_order(step).item() for name, loss in expansions.items()}
    first, second = (terms[f"noisy_{order}"] - terms[f"clean_{order}"] for order in ("first_order", "second_order"))
    gap = expansions["noisy"].value - expansions["clean"].value
    for name, share in {"tenth": 0.1, "whole": 1.0}.items():
        gates = gates_after(model, step, share)
        losses = {f"{kind}_loss": measure(model, gates, some)["loss"] for kind, some in batches.items()}
        change = losses["noisy_loss"] - losses["clean_loss"] - gap
        expected = share * first + share**2 * second
        terms[name] = {**losses, "gap_change": change, "gap_change_second_order": expected}
    return {"heads": [[*divmod(index, model.num_heads)] for index in step.nonzero()[:, 0].tolist()], **terms}


# --- figure and table ------------------------------------------------------------------------------------------------


def kind_of(name: str) -> str:
    """The kind of a set: the name of its ranking, `random`, or `meeting` the conditions."""
    return name.split(" ")[0]


def figure(result: Result) -> Any:
    """Three panels: loss by severity, predicted against measured widening, spectrum of the Hessian difference."""
    of_seed = next(iter(result["seeds"].values()))
    colours = {**COLOURS, "meeting": GREEN}
    drawing, ((losses, widening, spectrum),) = fields(1, 3, 2.9)
    for name, curve in of_seed["by_severity"].items():
        heights = [point["loss"] for point in curve]
        label = "whole model" if name == "whole" else name
        style: dict[str, Any] = {"marker": MARKS[name], "markersize": 4, "linewidth": 1.2}
        losses.plot(of_seed["severities"], heights, color=colours[name], label=label, **style)
    losses.set(xlabel="severity of the noise (0: clean)", title=f"loss, {of_seed['prune']} heads pruned")
    seen: set[str] = set()
    for name, pruned in of_seed["sets"].items():
        kind = kind_of(name)
        whole = pruned["whole"]
        label = "_" if kind in seen else DRAWN.get(kind, kind)  # matplotlib's legend omits labels that begin with _
        point = (whole["gap_change_second_order"], whole["gap_change"])
        size = 4 if kind in DRAWN else 6
        widening.plot(*point, MARKS[kind], color=colours[kind], label=label, markersize=size)
        seen.add(kind)
    for line in (widening.axhline, widening.axvline):
        line(0, color=GREY, linewidth=0.8)
    widening.set(xlabel="to second order", ylabel="measured", title="change of the gap")
    values = of_seed["conditions"]["eigenvalues_of_hessian_difference"]
    spectrum.bar(range(1, len(values) + 1), values, color=[THEIRS if value < 0 else OURS for value in values])
    spectrum.axhline(0, color=DARK, linewidth=0.8)
    spectrum.set(xlabel="eigenvalue, smallest first", title="Hessian, noisy less clean")
    legend(drawing, losses, widening)
    return drawing


def table(result: Result) -> str:
    """The sets that rankings chose, a summary of the random ones, and how the data was made; for the first seed."""
    seed, of_seed = next(iter(result["seeds"].items()))
    sets = of_seed["sets"]
    facts = of_seed["conditions"]
    whole = of_seed["by_severity"]["whole"]
    gap = of_seed["noisy_loss"] - of_seed["clean_loss"]
    rows = [["none", f"{of_seed['clean_loss']:.3f}", f"{of_seed['noisy_loss']:.3f}", f"{gap:.3f}", *[""] * 5]]
    for name, pruned in sets.items():
        if kind_of(name) not in DRAWN:
            after = pruned["whole"]
            curvature = pruned["noisy_second_order"] - pruned["clean_second_order"]
            losses = (after["clean_loss"], after["noisy_loss"], after["noisy_loss"] - after["clean_loss"])
            changes = [after["gap_change"], after["gap_change_second_order"], pruned["noisy_first_order"], curvature]
            cells = [*(f"{loss:.3f}" for loss in losses), *(f"{change:+.3f}" for change in changes)]
            first = of_seed["weights"]["sets"][name]["noisy_first_order"] if "weights" in of_seed else None
            rows.append([f"{of_seed['prune']}, {name}", *cells, "" if first is None else f"{first:+.3f}"])
    header = ["heads pruned", "clean loss", "noisy loss", "gap", "change of the gap", "to second order",
              "noisy gradient · step", "curvature difference", "noisy gradient · step, in weights"]  # fmt: skip

    def grew(kind: str, step: str) -> str:
        of_kind = [pruned[step]["gap_change"] > 0 for name, pruned in sets.items() if kind_of(name) == kind]
        return f"{sum(of_kind)} of {len(of_kind)}"

    aligned, curved, both = (f"{facts[f'share_{name}']:.1%}" for name in ("aligned", "curved", "both"))
    positive = [
        sum(value > 0 for value in facts[f"{name}_of_hessian_difference"]) for name in ("eigenvalues", "diagonal")
    ]
    heads = of_seed["heads"]
    diagonal = sum(facts["diagonal_of_hessian_difference"]) / heads
    once = {json.dumps(pruned["heads"]): pruned["whole"] for pruned in sets.values()}.values()  # some are of both kinds
    signs = [(change["gap_change"] > 0) == (change["gap_change_second_order"] > 0) for change in once]
    clean = whole[0]
    noisy = whole[of_seed["severities"].index(of_seed["severity"])]
    lines = [
        f"- Condition 1: the gradient in the gates has norm {facts['clean_gradient_norm']:.3f} on clean samples, "
        f"{facts['noisy_gradient_norm']:.3f} on noisy ones.",
        f"- Condition 2: of {facts['random_sets']:,} random sets, {aligned} do not point down the noisy loss. The "
        f"paper's Taylor step: {printed_there('gradient')}.",
        f"- Condition 3: {positive[0]} of {heads} eigenvalues of the difference of the Hessians are positive, "
        f"and {positive[1]} of the numbers on its diagonal, whose mean is {diagonal:+.4f} (the paper's, in weights: "
        f"{printed_there('diagonal')}). Along the step itself, {curved} of the random sets have more curvature on "
        f"noisy samples; with condition 2, {both}.",
        *in_words_of_weights(of_seed),
        f"- The gap grew for {grew('random', 'whole')} random sets.",
        f"- Of sets that meet conditions 2 and 3 along the step, it grew for {grew('meeting', 'tenth')} after a tenth "
        f"of the step, and for {grew('meeting', 'whole')} after the whole step.",
        f"- For {sum(signs)} of all {len(signs)} sets the second-order estimate has the sign of the change.",
        f"- The whole model is right on {clean['accuracy']:.1%} of the clean samples with a mean confidence of "
        f"{clean['confidence']:.1%}, and on {noisy['accuracy']:.1%} of the noisy ones with {noisy['confidence']:.1%}.",
    ]
    about = f"{of_seed['samples']} test samples, clean and {of_seed['noise']}; {heads} heads; seed {seed}"
    return "\n".join([markdown(header, rows), "", *lines, "", f"{about}; {result['device']}."])


def printed_there(column: str) -> str:
    """The paper's values for its two tasks."""
    return " and ".join(f"{paper('B.1', task)['Taylor'][column]} on {task}" for task in PAPER_TASKS)


def in_words_of_weights(of_seed: Result) -> list[str]:
    """The difference of the Hessians' diagonals in weights."""
    if "weights" not in of_seed:
        return []
    terms = of_seed["weights"]
    return [
        f"- In the {terms['weights']:,} weights of the attention the diagonals of the Hessians sum up to "
        f"{terms['clean_trace']:.1f} on clean samples and {terms['noisy_trace']:.1f} on noisy ones (mean of the "
        f"difference {terms['mean_of_diagonal_difference']:+.2e}); {terms['heads_with_more_curvature']} of "
        f"{of_seed['heads']} heads have more on noisy ones."
    ]


ANALYSIS = Analysis("Conditions of Proposition 1 (B.1)", run, table, figure)

"""The paper's analyses on the models of a seed: each gives rows of numbers, and one CSV table.

`untrained`: pruning without training after (B.1, Tables 4 and 6). `shares`: how many heads can go (B.3, Figures 5 and
6). `overlap`: what choices of heads have in common (B.2.2). `separation`: what heads tell apart (B.2.1, Table 5).
`diversity`: what makes members differ (B.5, Tables 8 and 9). `members`: what more of them bring and cost (B.6, B.7).
`noise`: Proposition 1 (B.1).
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import combinations
from operator import itemgetter
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import Tensor

import hydra_ensembles as he
from hydra_ensembles import HeadRanking
from hydra_ensembles.errors import ConfigError
from hydra_ensembles.heads import jensen_shannon, overlap
from hydra_ensembles.heads.masking import attention_of, heads_in
from hydra_ensembles.heads.ranking import CIRCUIT_ORDER, circuit_members, random_members, sampled_members
from hydra_ensembles.model.cost import measure_costs
from hydra_ensembles.training.recipe import DataRecipe

from .classifiers import ClassifierLab, recipe
from .engine import choose, of_set, temperature_of
from .measures import FEWEST, plain_numbers
from .noise import noise
from .samples import Drawn, SampleBatches
from .sets import read_recipe
from .tables import write_csv

Found = dict[str, dict[str, Any]]  # numbers by row
Analysis = Callable[[ClassifierLab], Found]


def settings() -> dict[str, Any]:
    """The settings of the studies of classifiers, with those of the analyses."""
    return {**recipe(), "analyses": read_recipe("analyses")}


def asked(lab: ClassifierLab, name: str) -> Any:
    """A setting of the analyses."""
    return lab.task.settings["analyses"][name]


def measured(lab: ClassifierLab, model: he.Ensemble) -> dict[str, float]:
    """Every metric of a model on the reported sets, with the disagreement of its members."""
    held = lab.task.calibration().samples
    logits = lab.answered(model, held).member_logits
    calibration = temperature_of(logits, held.labels)
    columns: dict[str, Any] = {}
    groups: dict[str, list[str]] = {}
    apart: dict[str, float] = {}
    for one in lab.task.sets("report"):
        drawn = Drawn(one.samples, asked(lab, "samples"))
        answers = lab.answered(model, drawn)
        labels = drawn.labels.to(answers.label.device) if one.labelled else None
        of_one = of_set(answers, calibration.prediction(answers.member_logits), labels)
        columns |= {f"{one.name}|{name}": column for name, column in of_one.items()}
        groups.setdefault(one.group, []).append(one.name)
        apart[one.name] = float(answers.disagreement.double().mean())
    (inside,) = groups.pop("id")
    fewest = lab.task.settings.get("fewest", FEWEST)
    numbers = plain_numbers(columns, inside, groups, fewest) | {"disagreement": apart.pop(inside)}
    return {key: float(value) for key, value in numbers.items()} | {"all.disagreement": mean(apart.values())}


def few_steps(lab: ClassifierLab, **changes: Any) -> DataRecipe:
    """D.2 with the few steps of an analysis; a trial has fewer still."""
    plain = dict(asked(lab, "training"))
    rates = plain.pop("rates")
    if rates and lab.task.name not in rates:
        raise ConfigError(f"no rate of D.2 is chosen for {lab.task.name}; {', '.join(rates)} have one")
    if not rates:
        choose(lab, "CircAvg")  # unless it is chosen
    rate = rates[lab.task.name] if rates else float(lab.setting("CircAvg")["rate"])
    plain |= {"learning_rate": rate, **changes}
    if lab.task.share < 1 and plain.get("steps"):
        plain["steps"] = max(2, round(lab.task.share * plain["steps"]))
    return lab.task.recovery(**plain)


def side_by_side(lab: ClassifierLab, name: str, members: Callable[[], Sequence[he.Ensemble]]) -> list[he.Ensemble]:
    """Train members by D.2 on the same batches, in one pass if they fit: each gets the gradient it would get alone."""
    training = few_steps(lab, seed=lab.derived(name))
    if lab.task.letter:  # of the paper's size, one after another
        pruned = members()
        starts = [partial(itemgetter(index), pruned) for index in range(len(pruned))]
        return [lab.trained(f"{name}-{index}", start, training) for index, start in enumerate(starts)]
    trained = lab.trained(f"{name}-{marked(lab, name)}", lambda: he.Ensemble.stack(members()), training)
    return [trained.member(index) for index in range(trained.num_members)]


def marked(lab: ClassifierLab, name: str) -> str:
    """A hash of an analysis's settings, in the names of its files."""
    chosen = {
        key: value for key, value in lab.task.settings["analyses"].items() if key in ("samples", "training", name)
    }
    return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:8]


def heads_of(model: he.Ensemble) -> int:
    """The number of heads of a model with one member."""
    return sum(len(layer) for layer in model.heads[0])


def counted(model: he.Ensemble, share: float) -> int:
    """A share of a model's heads, at least one."""
    return max(1, round(share * heads_of(model)))


# --- pruned models ---------------------------------------------------------------------------------------------------


def untrained(lab: ClassifierLab) -> Found:
    """Single without the paper's share of heads, and without training after, by how they were chosen."""
    count, base = lab.prune, lab.base
    chosen = {
        "Taylor": lab.taylor().first(count),
        "CircAvg": lab.circuit("avg").first(count),
        "CircAcc": lab.circuit("acc").first(count),
        "CircOOD": lab.circuit("ood").first(count),
        "Random": random_members(base, count, 1, lab.number)[0],
    }
    pruned = {name: measured(lab, he.prune(base, heads)) for name, heads in chosen.items()}
    return {"Single": measured(lab, base), **pruned}


def shares(lab: ClassifierLab) -> Found:
    """Models by number of heads and how they were chosen, before and after training; the whole model too."""
    base = lab.base
    counts = [counted(base, share) for share in asked(lab, "shares")]
    circuit = lab.circuit("avg", max(counts))
    pruned = {"none|0": base}
    for count in counts:
        pruned[f"Taylor|{count}"] = he.prune(base, lab.taylor(0, count).first(count))
        pruned[f"CircAvg|{count}"] = he.prune(base, circuit.first(count))
        pruned[f"random|{count}"] = he.prune(base, random_members(base, count, 1, lab.number)[0])
    trained = side_by_side(lab, "shares", lambda: list(pruned.values()))
    after = {f"trained|{name}": measured(lab, model) for name, model in zip(pruned, trained, strict=True)}
    return {f"untrained|{name}": measured(lab, model) for name, model in pruned.items()} | after


# --- which heads are chosen ------------------------------------------------------------------------------------------


def overlaps(lab: ClassifierLab) -> Found:
    """Overlap and divergence of every pair of choices, and those of random ones with a circuit."""
    count, base, task = lab.prune, lab.base, lab.task

    def taylor_over_layers() -> HeadRanking:
        batches = SampleBatches(task.train, 128, training=True)
        draws = {"seed": lab.derived("taylor", 0), "calibration_batches": task.settings["taylor_batches"]}
        return he.taylor(base, batches, budget=count, scope="global", **draws)

    chosen = {
        "CircAvg": lab.circuit("avg"),
        "CircAcc": lab.circuit("acc"),
        "CircOOD": lab.circuit("ood"),
        "Taylor": lab.taylor(),
        "Taylor, all layers at once": lab.ranked(f"taylor-global-{count}", taylor_over_layers),
    }

    def compared(first: HeadRanking, second: HeadRanking) -> dict[str, float]:
        return {"overlap": overlap(first, second, count), "divergence": jensen_shannon(first, second, count)}

    pairs = {f"{one}, {two}": compared(chosen[one], chosen[two]) for one, two in combinations(chosen, 2)}
    heads, draws = heads_in(base), np.random.default_rng(0)
    by_chance = []
    for _ in range(asked(lab, "overlap")["draws"]):
        drawn = tuple(heads[row] for row in draws.permutation(len(heads))[:count])
        by_chance.append(compared(chosen["CircAvg"], HeadRanking(drawn, (0.0,) * count, "random", "random")))
    chance = {key: mean(one[key] for one in by_chance) for key in ("overlap", "divergence")}
    return {**pairs, "CircAvg, random heads": chance}


def separation(lab: ClassifierLab) -> Found:
    """Distances between ID and OOD data in the heads of the last layer, for CircOOD and the whole model (Table 5)."""
    base, chosen = lab.base, asked(lab, "separation")
    circuit = he.prune(base, lab.circuit("ood", heads_of(base)).heads[: lab.prune])

    def vectors(model: he.Ensemble, samples: Any) -> dict[Any, Tensor]:
        return last_vectors(model, lab.task.batches(Drawn(samples, chosen["samples"])))

    def apart(inside: Mapping[Any, Tensor], outside: Mapping[Any, Tensor], heads: Iterable[Any]) -> dict[str, float]:
        found = [centroid_distance(inside[head], outside[head]) for head in heads]
        return {kind: mean(one[kind] for one in found) for kind in ("euclidean", "mahalanobis") if found}

    first, *others = lab.task.sets("report")
    pruned, whole = vectors(circuit, first.samples), vectors(base, first.samples)
    rows: Found = {}
    for one in others:
        dense = vectors(base, one.samples)
        rows[f"{one.name}|circuit"] = apart(pruned, vectors(circuit, one.samples), pruned)
        rows[f"{one.name}|dense"] = apart(whole, dense, whole)
        rows[f"{one.name}|kept"] = apart(whole, dense, pruned)
    return rows


@torch.no_grad()
def last_vectors(model: he.Ensemble, batches: Iterable[Any]) -> dict[int, Tensor]:
    """Outputs of the heads of the last layer before their projection, mean over tokens or class token, `[N, d_k]`."""
    last, parts = model.num_layers - 1, []
    pooled = model.config.readout.pool in ("cls", "distilled", "cls_mean")
    for inputs, _ in batches:
        x, context = model.embed(*model.unpack(model.prepare(inputs)))  # [1, B, T, d]
        blocks: Any = model.encoder.layers
        for block in blocks[:-1]:
            x = block(x, context)
        z = attention_of(model, last).mix(blocks[-1].attention_input(x), context).float().cpu()  # [B, T, H, d_k]
        there = torch.ones(z.shape[:2]) if context.key_mask is None else context.key_mask.float().cpu()  # [B, T]
        weights = (there / there.sum(1, keepdim=True))[:, :, None, None]
        parts.append(z[:, 0] if pooled else (z * weights).sum(1))
    return dict(zip(model.heads[0][last], torch.cat(parts).unbind(1), strict=True))


def centroid_distance(inside: Tensor, outside: Tensor) -> dict[str, float]:
    """Distance between the means of ID vectors `[N, d]` and OOD vectors `[K, d]`, also by the ID covariance."""
    gap = (outside.mean(0) - inside.mean(0)).double()  # [d]
    covariance = inside.double().T.cov()
    covariance.diagonal().add_(1e-6 * covariance.diagonal().mean().clamp(min=1e-300))
    squared = gap @ torch.linalg.lstsq(covariance, gap[:, None], driver="gelsd").solution[:, 0]
    return {"euclidean": float(gap.norm()), "mahalanobis": float(squared.clamp(min=0).sqrt())}


# --- members ---------------------------------------------------------------------------------------------------------

VARIANTS = {  # whether heads, data order and dropout noise are free
    "heads": (1, 0, 0),
    "order": (0, 1, 0),
    "noise": (0, 0, 1),
    "order and noise": (0, 1, 1),
    "heads, order and noise": (1, 1, 1),
    "nothing": (0, 0, 0),
}


def diversity(lab: ClassifierLab) -> Found:
    """Ensembles whose members differ in some of the sources, with Single and a Deep Ensemble.

    Heads are drawn from a circuit; the order of the batches (with their augmentation) and the dropout have seeds.
    """
    base, plain = lab.base, asked(lab, "diversity")
    if lab.task.name not in plain["tasks"]:
        raise ConfigError(f"no dropout is chosen for {lab.task.name}; {', '.join(plain['tasks'])} have one")
    chosen = plain["tasks"][lab.task.name]
    prune = counted(base, chosen["prune"])
    pool = round(plain["pool"] * prune)
    heads = sampled_members(lab.circuit("avg", pool), prune, pool, lab.members, lab.number)

    def member(free: Sequence[int], again: int = 0) -> he.Ensemble:
        """One training; `again` numbers those with all seeds equal, which differ only by the hardware."""
        drawn, order, noise = free
        draws = {"seed": lab.derived("noise", noise), "order_seed": lab.derived("order", order)}
        length = {} if plain["steps"] is None else {"steps": plain["steps"]}
        training = few_steps(lab, dropout=chosen["dropout"], **draws, **length)
        name = f"diversity-{marked(lab, 'diversity')}-{drawn}{order}{noise}-{again}"
        return lab.trained(name, lambda: he.prune(base, heads[drawn]), training)

    rows = {"Single": measured(lab, base), "one member": measured(lab, member((0, 0, 0)))}
    rows["Deep Ensembles"] = measured(lab, he.Ensemble.stack(lab.singles))
    for title, free in VARIANTS.items():
        members = [member([index * flag for flag in free], 0 if any(free) else index) for index in range(lab.members)]
        rows[f"free: {title}"] = measured(lab, he.fuse(members, mlp="mean"))
    return rows


def more_members(lab: ClassifierLab) -> Found:
    """Metrics and times by the number of members, fused and separate (Tables 10 and 11)."""
    base, chosen = lab.base, asked(lab, "members")
    counts, pool = chosen["counts"], round(chosen["pool"] * lab.prune)
    rankings: dict[str, HeadRanking] = {score: lab.circuit(score) for score in CIRCUIT_ORDER}
    rankings["avg"] = lab.circuit("avg", pool)
    heads = circuit_members(rankings, lab.prune, max(counts), pool, lab.number)
    trained = side_by_side(lab, "members", lambda: [he.prune(base, lost) for lost in heads])
    models = {"Single": base, "Deep Ensembles, 3": he.Ensemble.stack(lab.singles)}
    for count in counts:
        models[f"Hydra (Circ), {count}"] = he.fuse(trained[:count], mlp="mean") if count > 1 else trained[0]
        if count > 1:
            models[f"MLPs apart, {count}"] = he.fuse(trained[:count], mlp="separate")
    rows = {name: measured(lab, model) for name, model in models.items()}
    for batch in chosen["batches"]:
        inputs = base.prepare(next(iter(SampleBatches(lab.task.inside["B"], batch)))[0])
        for cost in measure_costs({name: model.optimize(inputs) for name, model in models.items()}, inputs, repeats=5):
            rows[cost.name] |= {f"milliseconds.{batch}": cost.latency_ms, f"ratio.{batch}": cost.latency_ratio}
    return rows


ANALYSES: Mapping[str, Analysis] = {
    "untrained": untrained,
    "noise": noise,
    "separation": separation,
    "overlap": overlaps,
    "shares": shares,
    "diversity": diversity,
    "members": more_members,
}


def analyse(name: str, lab: ClassifierLab) -> Found:
    """Run an analysis on a seed; kept in its folder."""
    found: Found = lab.store.step(f"analyses/{name}-{marked(lab, name)}", lambda: ANALYSES[name](lab))
    return found


def write_analysis(name: str, task: str, by_seed: Mapping[int, Found], folder: Path) -> Path:
    """Write what an analysis found: a line for each seed and row, a column for each number."""
    keys = list(dict.fromkeys(key for found in by_seed.values() for row in found.values() for key in row))
    lines = [
        [task, seed, row, *(numbers.get(key) for key in keys)]
        for seed, found in by_seed.items()
        for row, numbers in found.items()
    ]
    return write_csv(folder / f"analysis_{name}.csv", [["task", "seed", "row", *keys], *lines])

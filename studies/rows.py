"""Every row of the studies of classifiers: how its model is made, and what it costs to train.

*Hydra (Circ)*, *Hydra (Taylor)*, *CircAvg*, *CircAcc*, *CircOOD* and *Taylor* are the paper's procedure: heads in its
share, D.2 as it is printed for the task. *Hydra* is our default, one setting for all tasks; *Hydra, tuned* what half B
of the task chose. Nothing else is called Hydra.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import hydra_ensembles as he
from hydra_ensembles.fuse import Fusion
from hydra_ensembles.heads.members import CIRCUIT_ORDER
from hydra_ensembles.training.recipe import Recipe

from .baseline_rows import BASELINES
from .row import EVERY, Model, Row, rate_of
from .seed import SINGLE as SINGLE
from .seed import Heads, Seed, Setting
from .task import Task

DEEP, SOUP = "Deep Ensembles", "Soup"
HYDRA, TUNED, HYDRA_CIRC, HYDRA_TAYLOR = "Hydra", "Hydra, tuned", "Hydra (Circ)", "Hydra (Taylor)"
CIRC_AVG, MC_DROPOUT = "CircAvg", "MC Dropout"
CURVE = "vision-cifar100"  # where it is seen what short recovery costs


# --- settings to choose from -----------------------------------------------------------------------------------------


def single_rates(task: Task) -> list[Setting]:
    """The rates of Single's own training, where it has several."""
    rates = task.training().rates
    return [{"rate": rate} for rate in rates] if len(rates) > 1 else [{}]


def paper_rates(task: Task) -> list[Setting]:
    """The rates of D.2."""
    preset = Recipe.preset(task.plain["recovery"]["preset"])
    return [{"rate": rate} for rate in preset.rates]


def dropout_rates(_: Task) -> list[Setting]:
    """Rates of MC Dropout."""
    return [{"rate": rate} for rate in (0.1, 0.03, 0.01)]


def fusings(task: Task) -> list[Setting]:
    """Fusings of the fine-tunings."""
    return list(task.settings["candidates"])


# --- models ----------------------------------------------------------------------------------------------------------


def single(seed: Seed, setting: Setting) -> he.Ensemble:
    """The model a user has; at a rate of its grid, where it has one."""
    return seed.single(rate=rate_of(setting)) if setting else seed.base


def longer(seed: Seed, _: Setting) -> he.Ensemble:
    """One model, trained as long as all members of an ensemble."""
    number = seed.derived("backbone", 0)
    usual = seed.training(seed=number)
    epochs, steps = (None if one is None else seed.members * one for one in (usual.epochs, usual.steps))
    return seed.trained("longer", lambda: seed.fresh(number), replace(usual, epochs=epochs, steps=steps))


def branches(seed: Seed, setting: Setting) -> he.Ensemble:
    """The fine-tunings above the mean of their first layers, maybe without heads that circuits name."""
    models = seed.singles
    trunk = round(setting["trunk"] * models[0].num_layers)
    share = setting.get("share", 0.0)
    if share:
        layers = range(trunk, models[0].num_layers)
        count = max(1, round(share * sum(len(models[0].heads[0][layer]) for layer in layers)))
        models = [
            he.prune(model, seed.circuit(score, count, layers).first(count))
            for model, score in zip(models, CIRCUIT_ORDER, strict=True)
        ]
    if not trunk:
        return he.fuse(models, mlp=setting["mlp"], stem="separate")
    return he.fuse(models, mlp=setting["mlp"], average=trunk)


def paper_members(seed: Seed, kind: Heads, setting: Setting, **changes: Any) -> list[he.Ensemble]:
    """The members of the paper's, trained apart."""
    return [seed.recovered(kind, index, rate_of(setting), **changes) for index in range(seed.members)]


def of_paper(kind: Heads, index: int) -> Callable[[Seed, Setting], he.Ensemble]:
    """A row with one member of the paper's."""
    return lambda seed, setting: seed.recovered(kind, index, rate_of(setting))


def after(steps: int) -> Callable[[Seed, Setting], he.Ensemble]:
    """A row with CircAvg after other steps of recovery than the study's."""

    def make(seed: Seed, setting: Setting) -> he.Ensemble:
        return seed.recovered("circuits", 0, rate_of(setting), steps=steps, warmup=max(1, steps // 20))

    return make


def fused(kind: Heads, mlp: Fusion, whole: bool = False) -> Callable[[Seed, Setting], he.Ensemble]:
    """A row with all members of the paper's, fused; maybe with the whole model as one more."""

    def make(seed: Seed, setting: Setting) -> he.Ensemble:
        members = paper_members(seed, kind, setting)
        return he.fuse([*members, seed.whole_recovered(rate_of(setting))] if whole else members, mlp=mlp)

    return make


def dropout(seed: Seed, setting: Setting) -> Model:
    """MC Dropout of Single, five passes."""
    return he.mc_dropout(seed.base, rate_of(setting), 5, seed.number)


ROWS: Mapping[str, Row] = {
    SINGLE: Row(single, 1, single_rates, kinds=EVERY),
    "Single, trained as long": Row(longer, 3, kinds=EVERY),
    "Single, D.2, nothing pruned": Row(
        lambda seed, one: seed.whole_recovered(rate_of(one)), 2, paper_rates, kinds=EVERY
    ),
    MC_DROPOUT: Row(dropout, 1, dropout_rates, kinds=EVERY),
    **BASELINES,
    SOUP: Row(lambda seed, _: he.soup(seed.singles), 3),
    DEEP: Row(lambda seed, _: he.Ensemble.stack(seed.singles), 3, kinds=EVERY),
    "Deep Ensembles, MLPs averaged": Row(lambda seed, _: he.fuse(seed.singles, stem="separate"), 3),
    "Taylor": Row(of_paper("taylor", 0), 2, like=CIRC_AVG, kinds=EVERY, paper=("taylor", 1)),
    CIRC_AVG: Row(of_paper("circuits", 0), 2, paper_rates, kinds=EVERY, paper=("circuits", 1)),
    "CircAvg, 100 steps": Row(after(100), 1.1, like=CIRC_AVG, only=CURVE),
    "CircAvg, 1,000 steps": Row(after(1000), 1.5, like=CIRC_AVG, only=CURVE),
    "CircAvg, 10,000 steps": Row(after(10_000), 6, like=CIRC_AVG, only=CURVE),
    "CircAcc": Row(of_paper("circuits", 1), 2, like=CIRC_AVG, kinds=EVERY, paper=("circuits", 2)),
    "CircOOD": Row(of_paper("circuits", 2), 2, like=CIRC_AVG, kinds=EVERY, paper=("circuits", 3)),
    "Random heads": Row(fused("random", "mean"), 4, like=CIRC_AVG, kinds=EVERY, paper=("random", 3)),
    HYDRA_TAYLOR: Row(fused("taylor", "mean"), 4, like=CIRC_AVG, kinds=EVERY, paper=("taylor", 3)),
    HYDRA_CIRC: Row(fused("circuits", "mean"), 4, like=CIRC_AVG, kinds=EVERY, paper=("circuits", 3)),
    "Hydra (Circ), MLPs apart": Row(
        fused("circuits", "separate"), 4, like=CIRC_AVG, kinds=EVERY, paper=("circuits", 3)
    ),
    "Hydra (Circ) and the whole model": Row(
        fused("circuits", "mean", whole=True), 5, like=CIRC_AVG, paper=("circuits", 3)
    ),
    "Branches, heads pruned": Row(lambda seed, _: branches(seed, {**seed.task.settings["hydra"], "share": 0.1}), 3),
    HYDRA: Row(lambda seed, _: branches(seed, seed.task.settings["hydra"]), 3),
    TUNED: Row(branches, 3, fusings),
}
"""In the order of the tables."""


def rows_of(task: Task) -> dict[str, Row]:
    """The rows that a task has; from scratch, none that averages weights of models that were trained apart."""
    kind = "scratch" if task.scratch else task.kind
    return {name: row for name, row in ROWS.items() if kind in row.kinds and row.only in (None, task.name)}

"""Every row of the studies of classifiers: how its model is made, the settings half B chooses from, its trainings.

*Hydra (Circ)*, *Hydra (Taylor)*, *CircAvg*, *CircAcc*, *CircOOD* and *Taylor* follow the paper: its share of heads, and
D.2 as printed for the task. *Hydra* is our default, one setting for all tasks; *Hydra, tuned* is what half B of the
task chose. Nothing else is called Hydra.

Methods by other authors are trained on Single's data for as many epochs. Each has a few settings, including its
authors' where known. Learning rates are relative to Single's: a method that trains few weights needs higher ones.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import hydra_ensembles as he
from hydra_ensembles import baselines
from hydra_ensembles.fuse import Fusion
from hydra_ensembles.heads.members import CIRCUIT_ORDER
from hydra_ensembles.training.recipe import Recipe

from .seed import Heads, Seed, Setting
from .seed_folder import slug
from .storing import SINGLE as SINGLE
from .task import Task

DEEP, SOUP = "Deep Ensembles", "Soup"
HYDRA, TUNED, HYDRA_CIRC, HYDRA_TAYLOR = "Hydra", "Hydra, tuned", "Hydra (Circ)", "Hydra (Taylor)"
CIRC_AVG, MC_DROPOUT = "CircAvg", "MC Dropout"
LORA, BATCH_ENSEMBLE, MIMO, PACKED = "LoRA-Ensemble", "BatchEnsemble", "MIMO", "Packed-Ensembles"
OBA, LAPLACE, SNAPSHOT, SWAG = "OBA", "Laplace (last layer)", "Snapshot", "SWAG"
CLASSIFIERS = "Deep Ensembles (classifiers)"

PRETRAINED = ("image", "text")  # kinds of tasks that start from a pretrained model
EVERY = (*PRETRAINED, "scratch")
CURVE = "vision-cifar100"  # task that shows the cost of short recovery
LAPLACE_MEMBERS = 20  # classifiers drawn, at the price of one model
POINTS = 10  # points that SWAG visits
OBA_STEPS, OBA_BATCHES = 8, 16  # the public code uses 49 and 200: 77 times as much

Model = Any
"""An `Ensemble`, or any model whose `predict` returns a `Prediction`."""
Settings = Callable[[Task], list[Setting]]
Making = Callable[[Seed, Setting], Model]


@dataclass(frozen=True)
class Row:
    """A method: its model for a seed and a setting, and the full model trainings that it needs, including Single's.

    Trainings are counted in forward and backward passes over Single's training data, D.2 as one, and rounded up; if
    settings differ, the most expensive one counts.
    """

    make: Making
    trainings: float
    settings: Settings = lambda _: [{}]  # that half B of the first seed chooses from
    like: str | None = None  # the row whose setting it uses
    kinds: Sequence[str] = PRETRAINED
    only: str | None = None  # the only task that has it
    paper: tuple[Heads, int] | None = None  # kind and number of the paper's members that it uses
    fine_tunings: int | None = 1  # by Single's recipe, that it is made of; None: one per member

    @property
    def trains(self) -> bool:
        """Whether it trains more than its fine-tunings and the paper's members."""
        _, members = self.paper or ("", 0)
        return self.fine_tunings is not None and self.trainings > self.fine_tunings + members

    def options(self, task: Task) -> list[Setting]:
        """The settings to choose from; a single one is stored too, for rows that are `like` this one."""
        options = self.settings(task) if self.like is None else []
        return [] if options == [{}] else options

    def model(self, seed: Seed, name: str) -> Model:
        """Its model with the chosen setting."""
        if self.like is not None or self.options(seed.task):
            return self.make(seed, seed.chosen(self.like or name))
        return self.make(seed, {})


# --- settings to choose from -----------------------------------------------------------------------------------------


def one_of(*settings: Setting) -> Settings:
    """The same settings on every task."""
    return lambda _: list(settings)


def rates(*values: float) -> Settings:
    """The same learning rates on every task."""
    return one_of(*({"rate": value} for value in values))


def rate_of(setting: Setting) -> float:
    """The learning rate of a setting."""
    return float(setting["rate"])


def single_rates(task: Task) -> list[Setting]:
    """The learning rates of Single's own training, if it has several."""
    grid = task.training().rates
    return [{"rate": rate} for rate in grid] if len(grid) > 1 else [{}]


def paper_rates(task: Task) -> list[Setting]:
    """The learning rates of D.2."""
    return [{"rate": rate} for rate in Recipe.preset(task.plain["recovery"]["preset"]).rates]


def mimo_settings(task: Task) -> list[Setting]:
    """The paper's setting, and one where members share images more often; a higher rate if the stem is pretrained."""
    faster = 1 if task.scratch else 3
    return [{"rho": 0.5, "repeat": 4, "faster": faster}, {"rho": 0.9, "repeat": 2, "faster": faster}]


# --- fine-tunings, and the paper's members ---------------------------------------------------------------------------


def single(seed: Seed, setting: Setting) -> he.Ensemble:
    """The model a user has; at a given learning rate if it has several."""
    return seed.single(rate=rate_of(setting)) if setting else seed.base


def longer(seed: Seed, setting: Setting) -> he.Ensemble:
    """One model, trained as long as all members of an ensemble, at a learning rate relative to Single's."""
    number = seed.derived("backbone", 0)
    usual = seed.training(seed=number)
    epochs, steps = (None if count is None else seed.members * count for count in (usual.epochs, usual.steps))
    training = replace(usual, epochs=epochs, steps=steps, learning_rate=rate_of(setting) * usual.rates[0])
    return seed.trained(f"longer-{rate_of(setting):g}", lambda: seed.fresh(number), training)


def branches(seed: Seed, setting: Setting) -> he.Ensemble:
    """The fine-tunings above the mean of their first layers, optionally without heads that circuits remove."""
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


def of_paper(kind: Heads, index: int, steps: int | None = None) -> Making:
    """A row with one of the paper's members; `steps` overrides the study's recovery steps."""
    changes = {} if steps is None else {"steps": steps, "warmup": max(1, steps // 20)}
    return lambda seed, setting: seed.recovered(kind, index, rate_of(setting), **changes)


def fused(kind: Heads, mlp: Fusion = "mean", whole: bool = False) -> Making:
    """A row with all of the paper's members, fused; `whole` adds the unpruned model as one more."""

    def make(seed: Seed, setting: Setting) -> he.Ensemble:
        members = [seed.recovered(kind, index, rate_of(setting)) for index in range(seed.members)]
        return he.fuse([*members, seed.whole_recovered(rate_of(setting))] if whole else members, mlp=mlp)

    return make


# --- methods by other authors ----------------------------------------------------------------------------------------


def learned(
    seed: Seed,
    row: str,
    setting: Setting,
    method: Callable[..., he.Ensemble],
    start: Callable[[], he.Ensemble],
    training: Recipe,
    *settings: Any,
    **more: Any,
) -> he.Ensemble:
    """The model that a method makes from `start()` with a recipe; cached by row and setting."""

    def make() -> he.Ensemble:
        return method(start(), seed.task.lessons(training), training, *settings, progress=False, **more)

    return seed.kept(slug(f"{row} {dict(setting)}"), make)


def sped_up(seed: Seed, factor: float, /, **changes: Any) -> Recipe:
    """Single's recipe with another learning rate for everything but the classifier, without early stopping."""
    usual = seed.training()
    rate = factor * usual.rates[0]
    alone: dict[str, Any] = {"classifier_rate": usual.classifier_rate / factor, "patience": None}
    return seed.task.training(learning_rate=rate, **alone, **changes)


def updates(seed: Seed) -> int:
    """The number of updates in Single's training."""
    training = seed.training()
    return training.plan(len(seed.task.lessons(training)))[0]


def lora(seed: Seed, setting: Setting) -> he.Ensemble:
    """Low-rank updates of the attention and a classifier for each member; all else stays pretrained."""
    training = sped_up(seed, setting["faster"], seed=seed.derived("lora"), reinit_classifier="random")
    settings = baselines.LoRA(seed.members) if setting["as"] == "paper" else baselines.LoRA.joint(seed.members)
    return learned(seed, LORA, setting, baselines.lora_ensemble, seed.task.start, training, settings)


def scaled(seed: Seed, setting: Setting) -> he.Ensemble:
    """BatchEnsemble: per-member scales of the inputs and outputs of shared weights, which are trained like Single's."""
    number = seed.derived("scales")
    scales: dict[str, Any] = {"deviation": setting["deviation"], "rate": float(setting["rate"])}

    def method(start: he.Ensemble, lessons: Any, training: Recipe, progress: bool) -> he.Ensemble:
        layers = max(1, round(setting["last"] * start.num_layers))
        settings = baselines.BatchEnsemble(seed.members, last_layers=layers, **scales)
        return baselines.batch_ensemble(start, lessons, training, settings, progress=progress)

    training = sped_up(seed, setting["faster"], seed=number)
    return learned(seed, BATCH_ENSEMBLE, setting, method, lambda: seed.fresh(number), training)


def several_images(seed: Seed, setting: Setting) -> he.Ensemble:
    """MIMO: one network for several images at once; from scratch if Single is."""
    number = seed.derived("mimo")
    start = "scratch" if seed.task.scratch else "pretrained"
    settings = baselines.MIMO(seed.members, setting["rho"], setting["repeat"], start)  # type: ignore[arg-type]
    training = sped_up(seed, setting["faster"], seed=number)
    return learned(seed, MIMO, setting, baselines.mimo, lambda: seed.fresh(number), training, settings)


def packed(seed: Seed, setting: Setting) -> he.Ensemble:
    """Packed-Ensembles: narrow members, trained together from scratch."""
    training = sped_up(seed, setting["faster"], seed=seed.derived("packed"))
    settings = baselines.Packed(seed.members, setting["alpha"])
    return learned(seed, PACKED, setting, baselines.packed_ensemble, seed.task.start, training, settings)


def apoptosis(seed: Seed, setting: Setting) -> he.Ensemble:
    """OBA: Single without the weights that matter least by curvature, trained by D.2."""
    training = seed.task.recovery(seed=seed.derived("recovery", 0), learning_rate=rate_of(setting))
    often = (1, 1) if seed.task.short else (OBA_STEPS, OBA_BATCHES)
    settings = baselines.OBA(seed.task.plain["oba"], *often)
    return learned(seed, OBA, setting, baselines.oba, lambda: seed.base, training, settings)


def last_layer(seed: Seed, setting: Setting) -> he.Ensemble:
    """Classifiers drawn around Single's; nothing is trained, so nothing is cached."""
    prior = setting.get("prior")
    settings = baselines.Laplace(LAPLACE_MEMBERS, setting["structure"], prior, seed=seed.derived("laplace"))
    return baselines.laplace(seed.base, seed.task.batches(seed.task.train), settings)


def snapshots(seed: Seed, setting: Setting) -> he.Ensemble:
    """Members along one training, as long as Single's; the learning rate restarts for each."""
    number = seed.derived("snapshots")
    steps = max(2, updates(seed) // seed.members)
    training = sped_up(seed, rate_of(setting), seed=number, epochs=None, steps=steps)
    start = partial(seed.fresh, number)
    return learned(seed, SNAPSHOT, setting, baselines.deep_ensemble, start, training, seed.members, snapshots=True)


def around_the_end(seed: Seed, setting: Setting) -> he.Ensemble:
    """SWAG: train Single as long again at a constant rate, and draw members around the points it visits."""
    settings = baselines.SWAG(seed.members, POINTS, POINTS)
    steps = max(1, updates(seed) // settings.points)
    constant = {"epochs": None, "steps": steps, "schedule": "constant", "warmup": 0}
    training = sped_up(seed, rate_of(setting), seed=seed.derived("swag"), **constant)
    return learned(seed, SWAG, setting, baselines.swag, lambda: seed.base, training, settings)


def classifiers(seed: Seed, setting: Setting) -> he.Ensemble:
    """Classifiers trained separately on a frozen Single: the paper's D for texts."""
    rate = rate_of(setting) * seed.training().rates[0]
    alone: dict[str, Any] = {"train_groups": ["readout"], "reinit_classifier": "random", "learning_rate": rate}
    training = seed.task.training(seed=seed.derived("classifiers"), patience=None, **alone)
    return learned(seed, CLASSIFIERS, setting, baselines.deep_ensemble, lambda: seed.base, training, seed.members)


BASELINES: Mapping[str, Row] = {
    LORA: Row(  # as in the paper (rank 4, alpha 8, separate), slower, and as in the public code (rank 8, a wide start)
        lora,
        3,
        one_of({"as": "paper", "faster": 50}, {"as": "paper", "faster": 10}, {"as": "public", "faster": 10}),
        fine_tunings=0,
    ),
    "LoRA-single": Row(lambda seed, setting: lora(seed, setting).member(0), 1, like=LORA, fine_tunings=0),
    BATCH_ENSEMBLE: Row(  # the last quarter of the layers far apart, as in published transformers; all layers, closer
        scaled,
        3,
        one_of(
            {"last": 0.25, "deviation": 0.5, "rate": 50, "faster": 3},
            {"last": 1.0, "deviation": 0.1, "rate": 50, "faster": 1},
        ),
        fine_tunings=0,
    ),
    MIMO: Row(several_images, 4, mimo_settings, kinds=("image", "scratch"), fine_tunings=0),
    PACKED: Row(  # the paper's width, at Single's rate and at a higher one for narrow models
        packed,
        1.5,
        one_of({"alpha": 2.0, "faster": 1}, {"alpha": 2.0, "faster": 2}),
        kinds=("scratch",),
        fine_tunings=0,
    ),
    OBA: Row(apoptosis, 3, like=CIRC_AVG, kinds=("image",)),
    LAPLACE: Row(  # Kronecker-factored or diagonal curvature with the most likely prior; and a wide prior
        last_layer,
        1,
        one_of({"structure": "kron"}, {"structure": "diag"}, {"structure": "kron", "prior": 1.0}),
        kinds=EVERY,
    ),
    SNAPSHOT: Row(snapshots, 1, rates(1, 3), kinds=EVERY, fine_tunings=0),
    SWAG: Row(around_the_end, 2, rates(0.3, 1), kinds=EVERY),
    CLASSIFIERS: Row(classifiers, 2, rates(3, 30), kinds=EVERY),
}


def paper_row(make: Making, trainings: float, paper: tuple[Heads, int] | None, **changes: Any) -> Row:
    """A row of the paper's procedure, at CircAvg's learning rate."""
    return Row(make, trainings, **{"like": CIRC_AVG, "kinds": EVERY, "paper": paper, **changes})


ROWS: Mapping[str, Row] = {
    SINGLE: Row(single, 1, single_rates, kinds=EVERY),
    "Single, trained as long": Row(longer, 3, rates(0.3, 1, 3), kinds=EVERY, fine_tunings=0),
    "Single, D.2, nothing pruned": Row(
        lambda seed, setting: seed.whole_recovered(rate_of(setting)), 2, paper_rates, kinds=EVERY
    ),
    MC_DROPOUT: Row(
        lambda seed, setting: he.mc_dropout(seed.base, rate_of(setting), 5, seed.number),
        1,
        rates(0.1, 0.03, 0.01, 0.003),
        kinds=EVERY,
    ),
    **BASELINES,
    SOUP: Row(lambda seed, _: he.soup(seed.singles), 3, fine_tunings=None),
    DEEP: Row(lambda seed, _: he.Ensemble.stack(seed.singles), 3, kinds=EVERY, fine_tunings=None),
    "Deep Ensembles, MLPs averaged": Row(lambda seed, _: he.fuse(seed.singles, stem="separate"), 3, fine_tunings=None),
    "Taylor": paper_row(of_paper("taylor", 0), 2, ("taylor", 1)),
    CIRC_AVG: Row(of_paper("circuits", 0), 2, paper_rates, kinds=EVERY, paper=("circuits", 1)),
    "CircAvg, 100 steps": Row(of_paper("circuits", 0, 100), 1.1, like=CIRC_AVG, only=CURVE),
    "CircAvg, 1,000 steps": Row(of_paper("circuits", 0, 1000), 1.5, like=CIRC_AVG, only=CURVE),
    "CircAvg, 10,000 steps": Row(of_paper("circuits", 0, 10_000), 6, like=CIRC_AVG, only=CURVE),
    "CircAcc": paper_row(of_paper("circuits", 1), 2, ("circuits", 2)),
    "CircOOD": paper_row(of_paper("circuits", 2), 2, ("circuits", 3)),
    "Random heads": paper_row(fused("random"), 4, ("random", 3)),
    HYDRA_TAYLOR: paper_row(fused("taylor"), 4, ("taylor", 3)),
    HYDRA_CIRC: paper_row(fused("circuits"), 4, ("circuits", 3)),
    "Hydra (Circ), MLPs apart": paper_row(fused("circuits", "separate"), 4, ("circuits", 3)),
    "Hydra (Circ) and the whole model": paper_row(fused("circuits", whole=True), 5, ("circuits", 3), kinds=PRETRAINED),
    "Branches, heads pruned": Row(
        lambda seed, _: branches(seed, {**seed.task.settings["hydra"], "share": 0.1}), 3, fine_tunings=None
    ),
    HYDRA: Row(lambda seed, _: branches(seed, seed.task.settings["hydra"]), 3, fine_tunings=None),
    TUNED: Row(branches, 3, lambda task: list(task.settings["candidates"]), fine_tunings=None),
}
"""Rows in the order of the tables."""


def rows_of(task: Task) -> dict[str, Row]:
    """The rows of a task; a control study names its own. From scratch, no row averages models trained separately."""
    kind = "scratch" if task.scratch else task.kind
    rows = {name: row for name, row in ROWS.items() if kind in row.kinds and row.only in (None, task.name)}
    return {name: rows[name] for name in task.plain.get("rows", rows)}

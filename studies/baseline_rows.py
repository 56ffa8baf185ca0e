"""Rows of the studies of classifiers that others propose: trained on Single's data, in as many epochs.

Each has a few settings, its authors' among them where they are known, and half B of the first seed chooses. Rates are
given over Single's: a method that trains little of a model needs higher ones.
"""

from collections.abc import Mapping
from typing import Any

import hydra_ensembles as he
from hydra_ensembles import baselines
from hydra_ensembles.training.recipe import Recipe

from .row import EVERY, Row, rate_of
from .seed import Seed, Setting, slug
from .task import Task

LORA, BATCH_ENSEMBLE, MIMO, PACKED = "LoRA-Ensemble", "BatchEnsemble", "MIMO", "Packed-Ensembles"
OBA, LAPLACE, SNAPSHOT, SWAG = "OBA", "Laplace (last layer)", "Snapshot", "SWAG"
CLASSIFIERS = "Deep Ensembles (classifiers)"
LAPLACE_MEMBERS = 20  # classifiers that are drawn, at the price of one model
POINTS = 10  # that SWAG visits
OBA_STEPS, OBA_BATCHES = 8, 16  # the public code has 49 and 200: 77 times as much


def sped_up(seed: Seed, factor: float, /, **changes: Any) -> Recipe:
    """Single's recipe with another rate of all but the classifier; nothing stops early."""
    usual = seed.training()
    rate = factor * usual.rates[0]
    alone: dict[str, Any] = {"classifier_rate": usual.classifier_rate / factor, "patience": None}
    return seed.task.training(learning_rate=rate, **alone, **changes)


def updates(seed: Seed) -> int:
    """How many Single's training has."""
    training = seed.training()
    return training.plan(len(seed.task.lessons(training)))[0]


def named(row: str, setting: Setting) -> str:
    """What the model of a row with a setting is called in the folder of a seed."""
    return slug(f"{row} {dict(setting)}")


# --- settings to choose from -----------------------------------------------------------------------------------------


def lora_settings(_: Task) -> list[Setting]:
    """As the paper trains (rank 4, alpha 8, apart), and as the public code does (rank 8, a wide start, together)."""
    return [{"as": "paper", "faster": 50}, {"as": "public", "faster": 10}]


def scale_settings(_: Task) -> list[Setting]:
    """The last quarter of the layers far apart, as in published vision transformers; all layers, nearer."""
    return [
        {"last": 0.25, "deviation": 0.5, "rate": 50, "faster": 3},
        {"last": 1.0, "deviation": 0.1, "rate": 50, "faster": 1},
    ]


def mimo_settings(task: Task) -> list[Setting]:
    """The paper's, and more often the same image for all; at a higher rate where the stem was pretrained for one."""
    faster = 1 if task.scratch else 3
    return [{"rho": 0.5, "repeat": 4, "faster": faster}, {"rho": 0.9, "repeat": 2, "faster": faster}]


def packed_settings(_: Task) -> list[Setting]:
    """The paper's width, at Single's rate and a higher one, for narrow models."""
    return [{"alpha": 2.0, "faster": 1}, {"alpha": 2.0, "faster": 2}]


def laplace_settings(_: Task) -> list[Setting]:
    """Curvature as a Kronecker product or a diagonal with the likeliest prior, and a wide prior."""
    return [{"structure": "kron"}, {"structure": "diag"}, {"structure": "kron", "prior": 1.0}]


def rates(*factors: float) -> Any:
    """Rates over Single's."""
    return lambda _: [{"rate": factor} for factor in factors]


# --- models ----------------------------------------------------------------------------------------------------------


def lora(seed: Seed, setting: Setting) -> he.Ensemble:
    """Low-rank updates of the attention and a classifier for each member; all else stays pretrained."""
    task = seed.task
    training = sped_up(seed, setting["faster"], seed=seed.derived("lora"), reinit_classifier="random")
    settings = baselines.LoRA(seed.members) if setting["as"] == "paper" else baselines.LoRA.joint(seed.members)
    return seed.kept(
        named(LORA, setting),
        lambda: baselines.lora_ensemble(task.start(), task.lessons(training), training, settings, progress=False),
    )


def scaled(seed: Seed, setting: Setting) -> he.Ensemble:
    """Scales of inputs and outputs of shared weights, which train as Single's do."""
    task, number = seed.task, seed.derived("scales")
    training = sped_up(seed, setting["faster"], seed=number)

    def make() -> he.Ensemble:
        start = seed.fresh(number)
        layers = max(1, round(setting["last"] * start.num_layers))
        settings = baselines.BatchEnsemble(
            seed.members, last_layers=layers, deviation=setting["deviation"], rate=float(setting["rate"])
        )
        return baselines.batch_ensemble(start, task.lessons(training), training, settings, progress=False)

    return seed.kept(named(BATCH_ENSEMBLE, setting), make)


def several_images(seed: Seed, setting: Setting) -> he.Ensemble:
    """One network for several images at once; from scratch where Single is."""
    task, number = seed.task, seed.derived("mimo")
    training = sped_up(seed, setting["faster"], seed=number)
    start = "scratch" if task.scratch else "pretrained"
    settings = baselines.MIMO(seed.members, setting["rho"], setting["repeat"], start)  # type: ignore[arg-type]
    return seed.kept(
        named(MIMO, setting),
        lambda: baselines.mimo(seed.fresh(number), task.lessons(training), training, settings, progress=False),
    )


def packed(seed: Seed, setting: Setting) -> he.Ensemble:
    """Narrow members, trained together from scratch."""
    task = seed.task
    training = sped_up(seed, setting["faster"], seed=seed.derived("packed"))
    settings = baselines.Packed(seed.members, setting["alpha"])
    return seed.kept(
        named(PACKED, setting),
        lambda: baselines.packed_ensemble(task.start(), task.lessons(training), training, settings, progress=False),
    )


def apoptosis(seed: Seed, setting: Setting) -> he.Ensemble:
    """Single without the weights that curvature says to matter least, trained by D.2."""
    task = seed.task
    training = task.recovery(seed=seed.derived("recovery", 0), learning_rate=rate_of(setting))
    settings = baselines.OBA(task.plain["oba"], OBA_STEPS, OBA_BATCHES)
    return seed.kept(
        named(OBA, setting),
        lambda: baselines.oba(seed.base, task.lessons(training), training, settings, progress=False),
    )


def last_layer(seed: Seed, setting: Setting) -> he.Ensemble:
    """Classifiers drawn around Single's; nothing is trained, so nothing is kept."""
    prior = setting.get("prior")
    settings = baselines.Laplace(LAPLACE_MEMBERS, setting["structure"], prior, seed=seed.derived("laplace"))
    return baselines.laplace(seed.base, seed.task.batches(seed.task.train), settings)


def snapshots(seed: Seed, setting: Setting) -> he.Ensemble:
    """Members along one training, as long as Single's; the rate rises anew for each."""
    task, number = seed.task, seed.derived("snapshots")
    steps = max(2, updates(seed) // seed.members)
    training = sped_up(seed, rate_of(setting), seed=number, epochs=None, steps=steps)
    return seed.kept(
        named(SNAPSHOT, setting),
        lambda: baselines.deep_ensemble(
            seed.fresh(number), task.lessons(training), training, seed.members, snapshots=True, progress=False
        ),
    )


def around_the_end(seed: Seed, setting: Setting) -> he.Ensemble:
    """Single trains on at a constant rate, as long as it has; members are drawn around the points it visits."""
    task, settings = seed.task, baselines.SWAG(seed.members, POINTS, POINTS)
    steps = max(1, updates(seed) // settings.points)
    constant = {"epochs": None, "steps": steps, "schedule": "constant", "warmup": 0}
    training = sped_up(seed, rate_of(setting), seed=seed.derived("swag"), **constant)
    return seed.kept(
        named(SWAG, setting),
        lambda: baselines.swag(seed.base, task.lessons(training), training, settings, progress=False),
    )


def classifiers(seed: Seed, setting: Setting) -> he.Ensemble:
    """Classifiers trained apart on Single, which is frozen: the paper's D for texts."""
    task = seed.task
    rate = rate_of(setting) * seed.training().rates[0]
    alone: dict[str, Any] = {"train_groups": ["readout"], "reinit_classifier": "random", "learning_rate": rate}
    training = task.training(seed=seed.derived("classifiers"), patience=None, **alone)
    return seed.kept(
        named(CLASSIFIERS, setting),
        lambda: baselines.deep_ensemble(seed.base, task.lessons(training), training, seed.members, progress=False),
    )


BASELINES: Mapping[str, Row] = {
    LORA: Row(lora, 3, lora_settings),
    "LoRA-single": Row(lambda seed, one: lora(seed, one).member(0), 1, like=LORA),
    BATCH_ENSEMBLE: Row(scaled, 3, scale_settings),
    MIMO: Row(several_images, 4, mimo_settings, kinds=("image", "scratch")),
    PACKED: Row(packed, 1.5, packed_settings, kinds=("scratch",)),
    OBA: Row(apoptosis, 3, like="CircAvg", kinds=("image",)),
    LAPLACE: Row(last_layer, 1, laplace_settings, kinds=EVERY),
    SNAPSHOT: Row(snapshots, 1, rates(1, 3), kinds=EVERY),
    SWAG: Row(around_the_end, 2, rates(0.3, 1), kinds=EVERY),
    CLASSIFIERS: Row(classifiers, 2, rates(3, 30), kinds=EVERY),
}
"""In the order of the tables."""

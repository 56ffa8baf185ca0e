"""Every method of the studies of classifiers: how its model is made, its settings, and its trainings.

*Hydra (Circ)*, *Hydra (Taylor)*, *CircAvg*, *CircAcc*, *CircOOD* and *Taylor* follow the paper: its share of heads, and
D.2 as printed for the task. *Hydra* is our default, one setting for all tasks; *Hydra, tuned* is what half B of the
task chose; in *Hydra, distilled* the default's members then learned, without labels, to answer like the fine-tunings
that they came from. Nothing else is called Hydra.

Methods by other authors are trained on Single's data for as many epochs. Each has a few settings, including its
authors' where known. Learning rates are relative to Single's: a method that trains few weights needs higher ones.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import hydra_ensembles as he
from hydra_ensembles import baselines
from hydra_ensembles.fuse import Fusion
from hydra_ensembles.heads.ranking import CIRCUIT_ORDER
from hydra_ensembles.training.distill import RECIPE as DISTILLING
from hydra_ensembles.training.recipe import DataRecipe

from .classifiers import ClassifierLab, ClassifierTask, Heads
from .engine import Method, Setting, slug
from .rows import SINGLE as SINGLE
from .samples import SampleBatches, Unchanged
from .weights import judge

DEEP, SOUP = "Deep Ensembles", "Soup"
HYDRA, TUNED, HYDRA_CIRC, HYDRA_TAYLOR = "Hydra", "Hydra, tuned", "Hydra (Circ)", "Hydra (Taylor)"
DISTILLED = "Hydra, distilled"
LOOKED_FOR = tuple(f"{DISTILLED}, {which}" for which in ("cheap", "dearer", "beside"))  # in a study of their own
CIRC_AVG, MC_DROPOUT = "CircAvg", "MC Dropout"
LORA, BATCH_ENSEMBLE, MIMO, PACKED = "LoRA-Ensemble", "BatchEnsemble", "MIMO", "Packed-Ensembles"
OBA, LAPLACE, WORDS = "OBA", "Laplace (last layer)", "Label words"
CLASSIFIERS = "Deep Ensembles (classifiers)"
CLASSIFIER_ALONE, ALONE = "Hydra (Circ), classifier alone", "cifar100-classifier"  # D.2 read otherwise

PRETRAINED = ("image", "text")  # kinds of tasks that start from a pretrained model
EVERY = (*PRETRAINED, "scratch")
LAPLACE_MEMBERS = 20  # classifiers drawn, at the price of one model

Settings = Callable[[ClassifierTask], Sequence[Setting]]
Making = Callable[[ClassifierLab, Setting], Any]


@dataclass(frozen=True)
class Row(Method):
    """A method of some kinds of tasks.

    Trainings are counted in forward and backward passes over Single's training data, D.2 as one, and rounded up; if
    settings differ, the most expensive one counts.
    """

    kinds: Sequence[str] = PRETRAINED


# --- settings to choose from -----------------------------------------------------------------------------------------


def one_of(*settings: Setting) -> Settings:
    """The same settings on every task."""
    return lambda _: list(settings)


def listed(name: str) -> Settings:
    """The settings that a task lists under a name."""
    return lambda task: list(task.plain[name])


def rates(*values: float) -> Settings:
    """The same learning rates on every task."""
    return one_of(*({"rate": value} for value in values))


def rate_of(setting: Setting) -> float:
    """The learning rate of a setting."""
    return float(setting["rate"])


def single_rates(task: ClassifierTask) -> list[Setting]:
    """The learning rates of Single's own training, if it has several."""
    grid = task.training().rates
    return [{"rate": rate} for rate in grid] if len(grid) > 1 else []


def paper_rates(task: ClassifierTask) -> list[Setting]:
    """The learning rates of D.2."""
    return [{"rate": rate} for rate in DataRecipe.preset(task.plain["recovery"]["preset"]).rates]


def mimo_settings(task: ClassifierTask) -> list[Setting]:
    """The paper's setting, and one where members share images more often; a higher rate if the stem is pretrained."""
    faster = 1 if task.scratch else 3
    both: list[Setting] = [{"rho": 0.5, "repeat": 4, "faster": faster}, {"rho": 0.9, "repeat": 2, "faster": faster}]
    return both[:1] if task.letter else both


def lora_settings(task: ClassifierTask) -> list[Setting]:
    """As in the paper (rank 4, alpha 8, separate), at two rates, and as in the public code (rank 8, a wide start)."""
    if task.letter:  # its rate is not said; Single's are high
        return [{"as": "paper", "faster": 10}, {"as": "paper", "faster": 1}]
    return [{"as": "paper", "faster": 50}, {"as": "paper", "faster": 10}, {"as": "public", "faster": 10}]


# --- fine-tunings, and the paper's members ---------------------------------------------------------------------------


def single(lab: ClassifierLab, setting: Setting) -> he.Ensemble:
    """The model a user has; at a given learning rate if it has several."""
    return lab.single(rate=rate_of(setting)) if setting else lab.base


def longer(lab: ClassifierLab, setting: Setting) -> he.Ensemble:
    """One model, trained as long as all members of an ensemble, at a learning rate relative to Single's."""
    number = lab.derived("backbone", 0)
    usual = lab.training(seed=number)
    epochs, steps = (None if count is None else lab.members * count for count in (usual.epochs, usual.steps))
    training = replace(usual, epochs=epochs, steps=steps, learning_rate=rate_of(setting) * usual.rates[0])
    return lab.trained(f"longer-{rate_of(setting):g}", lambda: lab.fresh(number), training)


def branches(lab: ClassifierLab, setting: Setting) -> he.Ensemble:
    """The fine-tunings above the mean of their first layers, optionally without heads.

    Circuits remove a `share` of those above it; or of each layer so many `lost` ones by each model's own Taylor scores.
    """
    models = lab.fine_tunings(setting.get("members", lab.members))
    trunk = round(setting["trunk"] * models[0].num_layers)
    share = setting.get("share", 0.0)
    if share:
        layers = range(trunk, models[0].num_layers)
        count = max(1, round(share * sum(len(models[0].heads[0][layer]) for layer in layers)))
        models = [
            he.prune(model, lab.circuit(score, count, layers).first(count))
            for model, score in zip(models, CIRCUIT_ORDER, strict=True)
        ]
    if lost := setting.get("lost", 0) * (models[0].num_layers - trunk):
        batches, above = SampleBatches(lab.task.train, 128, training=True), range(trunk, models[0].num_layers)
        most = min(len(batches), lab.task.settings["taylor_batches"])
        how: dict[str, Any] = {"layers": above, "seed": lab.number, "calibration_batches": most}
        ranked = [he.taylor(model, batches, budget=lost, **how) for model in models]
        models = [he.prune(model, ranking.first(lost)) for model, ranking in zip(models, ranked, strict=True)]
    if not trunk:
        return he.fuse(models, mlp=setting["mlp"], stem="separate")
    return he.fuse(models, mlp=setting["mlp"], average=trunk)


def distilled(lab: ClassifierLab, setting: Setting) -> he.Ensemble:
    """A Hydra whose members learned the answers of their own fine-tunings, on Single's training data without labels.

    `rows` are these `plain`, or with those of `others` beside them.
    """
    if "method" in setting:  # for comparison
        return lab.model(setting["method"])
    how = {**lab.task.settings["hydra"], **lab.task.settings["distilled"], **lab.task.plain.get("distilled", {})}
    how |= setting
    usual = lab.training(seed=lab.derived("distilled"))
    training = DataRecipe(
        learning_rate=how["faster"] * usual.rates[0],
        epochs=how["epochs"],
        train_groups=DISTILLING.train_groups,
        seed=usual.seed,
        precision=usual.precision,
        compile=usual.compile,
        batch_size=usual.batch_size,
        rand_augment=usual.rand_augment,
    )

    def make() -> he.Ensemble:
        lessons = lab.task.lessons(training)
        if how.get("rows"):
            samples = Unchanged(lab.task.train) if how["rows"] == "plain" else lab.task.with_others
            lessons = SampleBatches(samples, lessons.batch_size, lessons.training)
        models = lab.fine_tunings(how.get("members", lab.members))
        return he.distill(branches(lab, how), models, lessons, training, progress=False)

    return lab.kept(slug(f"distilled {dict(setting)}"), make)


def of_paper(kind: Heads, index: int) -> Making:
    """A row with one of the paper's members."""
    return lambda lab, setting: lab.recovered(kind, index, rate_of(setting))


def fused(kind: Heads, mlp: Fusion = "mean", whole: bool = False, preset: str | None = None) -> Making:
    """A row with all of the paper's members, fused; `whole` adds the unpruned model as one more."""

    def make(lab: ClassifierLab, setting: Setting) -> he.Ensemble:
        members = [lab.recovered(kind, index, rate_of(setting), preset) for index in range(lab.members)]
        return he.fuse([*members, lab.whole_recovered(rate_of(setting))] if whole else members, mlp=mlp)

    return make


# --- methods by other authors ----------------------------------------------------------------------------------------


def learned(
    lab: ClassifierLab,
    row: str,
    setting: Setting,
    method: Callable[..., he.Ensemble],
    start: Callable[[], he.Ensemble],
    training: DataRecipe,
    *settings: Any,
    **more: Any,
) -> he.Ensemble:
    """The model that a method makes from `start()` with a recipe; cached by row and setting."""

    def make() -> he.Ensemble:
        return method(start(), lab.task.lessons(training), training, *settings, progress=False, **more)

    return lab.kept(slug(f"{row} {dict(setting)}"), make)


def sped_up(lab: ClassifierLab, factor: float, /, **changes: Any) -> DataRecipe:
    """Single's recipe with another learning rate for everything but the classifier, without early stopping."""
    usual = lab.training()
    rate = factor * usual.rates[0]
    alone: dict[str, Any] = {"classifier_rate": usual.classifier_rate / factor, "patience": None}
    return lab.task.training(learning_rate=rate, **alone, **changes)


def updates(lab: ClassifierLab) -> int:
    """The number of updates in Single's training."""
    training = lab.training()
    return training.plan(len(lab.task.lessons(training)))[0]


def lora(lab: ClassifierLab, setting: Setting) -> he.Ensemble:
    """Low-rank updates of the attention and a classifier for each member; all else stays pretrained."""
    training = sped_up(lab, setting["faster"], seed=lab.derived("lora"), reinit_classifier="random")
    together: Any = {"rank": 8, "alpha": None, "gain": 10.0, "training": "together"}  # as the public code
    settings = baselines.LoRA(lab.members, **({} if setting["as"] == "paper" else together))
    return learned(lab, LORA, setting, baselines.lora_ensemble, lab.task.start, training, settings)


def scaled(lab: ClassifierLab, setting: Setting) -> he.Ensemble:
    """BatchEnsemble: per-member scales of the inputs and outputs of shared weights, which are trained like Single's."""
    number = lab.derived("scales")
    scales: dict[str, Any] = {"deviation": setting["deviation"], "rate": float(setting["rate"])}

    def method(start: he.Ensemble, lessons: Any, training: DataRecipe, progress: bool) -> he.Ensemble:
        layers = max(1, round(setting["last"] * start.num_layers))
        settings = baselines.BatchEnsemble(lab.members, last_layers=layers, **scales)
        return baselines.batch_ensemble(start, lessons, training, settings, progress=progress)

    training = sped_up(lab, setting["faster"], seed=number)
    return learned(lab, BATCH_ENSEMBLE, setting, method, lambda: lab.fresh(number), training)


def several_images(lab: ClassifierLab, setting: Setting) -> he.Ensemble:
    """MIMO: one network for several images at once; from scratch if Single is."""
    number = lab.derived("mimo")
    start = "scratch" if lab.task.scratch else "pretrained"
    settings = baselines.MIMO(lab.members, setting["rho"], setting["repeat"], start)  # type: ignore[arg-type]
    training = sped_up(lab, setting["faster"], seed=number)
    return learned(lab, MIMO, setting, baselines.mimo, lambda: lab.fresh(number), training, settings)


def packed(lab: ClassifierLab, setting: Setting) -> he.Ensemble:
    """Packed-Ensembles: narrow members, trained together from scratch."""
    training = sped_up(lab, setting["faster"], seed=lab.derived("packed"))
    settings = baselines.Packed(lab.members, setting["alpha"])
    return learned(lab, PACKED, setting, baselines.packed_ensemble, lab.task.start, training, settings)


def apoptosis(lab: ClassifierLab, setting: Setting) -> he.Ensemble:
    """OBA: Single without the weights that matter least by curvature, trained by D.2."""
    training = lab.task.recovery(seed=lab.derived("recovery", 0), learning_rate=rate_of(setting))
    settings = baselines.OBA(lab.task.plain["oba"], **lab.task.settings["oba_size"])
    return learned(lab, OBA, setting, baselines.oba, lambda: lab.base, training, settings)


def last_layer(lab: ClassifierLab, setting: Setting) -> he.Ensemble:
    """Classifiers drawn around Single's; nothing is trained, so nothing is cached."""
    settings = baselines.Laplace(LAPLACE_MEMBERS, setting.get("prior"), seed=lab.derived("laplace"))
    return baselines.laplace(lab.base, lab.task.batches(lab.task.train), settings)


def classifiers(lab: ClassifierLab, setting: Setting) -> he.Ensemble:
    """Classifiers trained separately on a frozen Single: the paper's D for texts."""
    rate = rate_of(setting) * lab.training().rates[0]
    alone: dict[str, Any] = {"train_groups": ["readout"], "reinit_classifier": "random", "learning_rate": rate}
    training = lab.task.training(seed=lab.derived("classifiers"), patience=None, **alone)
    return learned(lab, CLASSIFIERS, setting, baselines.deep_ensemble, lambda: lab.base, training, lab.members)


BASELINES: Mapping[str, Row] = {
    LORA: Row(lora, 3, lora_settings),
    "LoRA-single": Row(lambda lab, setting: lora(lab, setting).member(0), 1, like=LORA),
    BATCH_ENSEMBLE: Row(  # the last quarter of the layers far apart, as in published transformers; all layers, closer
        scaled,
        3,
        one_of(
            {"last": 0.25, "deviation": 0.5, "rate": 50, "faster": 3},
            {"last": 1.0, "deviation": 0.1, "rate": 50, "faster": 1},
        ),
    ),
    MIMO: Row(several_images, 4, mimo_settings, kinds=("image", "scratch")),
    PACKED: Row(  # the paper's width, at Single's rate and at a higher one for narrow models
        packed,
        1.5,
        one_of({"alpha": 2.0, "faster": 1}, {"alpha": 2.0, "faster": 2}),
        kinds=("scratch",),
    ),
    OBA: Row(apoptosis, 3, like=CIRC_AVG, kinds=("image",)),
    LAPLACE: Row(  # Kronecker-factored curvature with the most likely prior; and a wide prior
        last_layer, 1, one_of({"structure": "kron"}, {"structure": "kron", "prior": 1.0}), kinds=EVERY
    ),
    CLASSIFIERS: Row(classifiers, 2, rates(3, 30), kinds=EVERY),
}


def paper_row(make: Making, trainings: float, **changes: Any) -> Row:
    """A row of the paper's procedure, at CircAvg's learning rate."""
    return Row(make, trainings, **{"like": CIRC_AVG, "kinds": EVERY, **changes})


def label_words(lab: ClassifierLab, setting: Setting) -> he.Ensemble:
    """The language model itself, not trained: the probabilities of a word for each class, within a template."""
    words = dict(zip(lab.task.class_names, lab.task.plain["words"][setting["words"]], strict=True))
    template = lab.task.plain["words"][setting["template"]]
    how = words, template, setting["template"] == "question"
    return lab.once(slug(str(dict(setting))), lambda: judge(lab.task.source.root, *how).to(lab.task.device))


def label_settings(_: ClassifierTask) -> list[Setting]:
    """A question in the chat template, with words without a space; or a text that is to be continued."""
    return [{"template": "question", "words": "answers"}, {"template": "text", "words": "continuations"}]


ROWS: Mapping[str, Row] = {
    SINGLE: Row(single, 1, single_rates, kinds=EVERY),
    "Single, trained as long": Row(longer, 3, rates(0.3, 1, 3), kinds=EVERY),
    "Single, D.2, nothing pruned": Row(
        lambda lab, setting: lab.whole_recovered(rate_of(setting)), 2, paper_rates, kinds=EVERY
    ),
    MC_DROPOUT: Row(
        lambda lab, setting: he.mc_dropout(lab.base, rate_of(setting), 5, lab.number),
        1,
        rates(0.1, 0.03, 0.01, 0.003),
        kinds=EVERY,
    ),
    **BASELINES,
    SOUP: Row(lambda lab, _: he.soup(lab.singles), 3),
    DEEP: Row(lambda lab, _: he.Ensemble.stack(lab.singles), 3, kinds=EVERY),
    "Deep Ensembles, MLPs averaged": Row(lambda lab, _: he.fuse(lab.singles, stem="separate"), 3),
    "Taylor": paper_row(of_paper("taylor", 0), 2),
    CIRC_AVG: Row(of_paper("circuits", 0), 2, paper_rates, kinds=EVERY),
    "CircAcc": paper_row(of_paper("circuits", 1), 2),
    "CircOOD": paper_row(of_paper("circuits", 2), 2),
    "Random heads": paper_row(fused("random"), 4),
    HYDRA_TAYLOR: paper_row(fused("taylor"), 4),
    HYDRA_CIRC: paper_row(fused("circuits"), 4),
    CLASSIFIER_ALONE: paper_row(fused("circuits", preset=ALONE), 4, kinds=("image",)),
    "Hydra (Circ), MLPs apart": paper_row(fused("circuits", "separate"), 4),
    "Hydra (Circ) and the whole model": paper_row(fused("circuits", whole=True), 5, kinds=PRETRAINED),
    "Branches, heads pruned": Row(lambda lab, _: branches(lab, {**lab.task.settings["hydra"], "share": 0.1}), 3),
    HYDRA: Row(lambda lab, _: branches(lab, lab.task.settings["hydra"]), 3),
    DISTILLED: Row(distilled, 4),
    **{name: Row(distilled, 9, listed(name), kinds=()) for name in LOOKED_FOR},
    TUNED: Row(branches, 3, lambda task: list(task.settings["candidates"])),
    WORDS: Row(label_words, 0, label_settings, kinds=()),
}
"""Methods in the order of the tables."""


def methods_of(task: ClassifierTask) -> dict[str, Method]:
    """The methods of a task; its recipe may name them, and their settings.

    From scratch, none averages models trained separately.
    """
    kind = "scratch" if task.scratch else task.kind
    methods = {name: row for name, row in ROWS.items() if kind in row.kinds}
    if not task.plain["recovery"]["preset"].startswith("cifar100"):
        methods.pop(CLASSIFIER_ALONE, None)
    found: dict[str, Method] = {name: ROWS[name] for name in task.plain.get("methods", methods)}
    for name, settings in task.plain.get("settings", {}).items():
        found[name] = replace(found[name], settings=one_of(*settings))
    return found

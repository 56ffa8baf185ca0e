"""Exploring settings on half B, and the decision: no test set is in reach here."""

from pathlib import Path

from torch import Tensor

from hydra_ensembles.errors import DataError
from hydra_ensembles.fuse import fuse
from hydra_ensembles.metrics.calibration import accuracy
from hydra_ensembles.metrics.ood import auroc
from hydra_ensembles.model.ensemble import Ensemble
from hydra_ensembles.prediction import Prediction, ScoreName

from .decision import Candidate, Chosen, Decision, rate_name
from .methods import HYDRA, HYDRA_TRUNK, MC_DROPOUT, fixed_methods
from .recipe import StudyRecipe
from .seed_folder import SeedFolder
from .seed_models import SeedModels
from .specs import dropout
from .units import joined

Measured = dict[str, dict[str, float]]  # "method|model|score" -> accuracy, auroc, cost


def candidates(recipe: StudyRecipe) -> list[tuple[str, Chosen]]:
    """Every setting that may become a method."""
    pairs = [(HYDRA, one) for one in recipe.explore] + [(HYDRA_TRUNK, one) for one in recipe.explore_trunk]
    return [(method, Chosen(one, mlp)) for method, one in pairs for mlp in recipe.fusions]


def explore(models: SeedModels) -> Measured:
    """Measure every candidate and every fixed method of one seed on half B, with every score."""
    return models.folder.facts("explored", lambda: _explore(models))


def _explore(models: SeedModels) -> Measured:
    recipe, labels = models.recipe, models.data.choose_id.labels
    found: Measured = {}
    for method, units in fixed_methods(recipe).items():
        _measure(found, f"{method}|", *joined(models, units), labels, recipe, None)
    for rate in recipe.dropout.rates:
        _measure(found, f"{MC_DROPOUT}|{rate_name(rate)}", *joined(models, (dropout(rate),)), labels, recipe, None)
    costs: dict[str, float] = {}
    for method, one in candidates(recipe):
        key = one.members.key
        if key not in costs:
            costs[key] = _relative_cost(models, one)
        logits = joined(models, one.members.units(one.mlp, recipe.members))
        _measure(found, f"{method}|{one.name}", *logits, labels, recipe, costs[key])
    return found


def _measure(
    found: Measured,
    name: str,
    id_logits: Tensor,
    ood_logits: Tensor,
    labels: Tensor,
    recipe: StudyRecipe,
    cost: float | None,
) -> None:
    inside, outside = Prediction.from_logits(id_logits), Prediction.from_logits(ood_logits)
    for score in recipe.scores:
        if score == "mutual_information" and len(id_logits) == 1:  # zero for one member, whatever the input
            continue
        found[f"{name}|{score}"] = {
            "accuracy": accuracy(inside.probs, labels),
            "auroc": auroc(inside.score(score), outside.score(score)),
            **({} if cost is None else {"cost": cost}),
        }


def _relative_cost(models: SeedModels, one: Chosen) -> float:
    """Multiply-adds of the ensemble over those of the single model."""
    members: list[Ensemble] = [models.member(one.members, index) for index in range(models.recipe.members)]
    return fuse(members, mlp="separate").describe().multiply_adds / models.base.describe().multiply_adds


def decide(recipe: StudyRecipe, measured: list[Measured]) -> Decision:
    """Choose settings and scores by the weighted mean of ID accuracy and OOD AUROC, over the explored seeds."""
    compared = []
    for key in measured[0]:
        method, model, score = key.split("|")
        parts = [one[key] for one in measured]
        right, separated = (sum(part[name] for part in parts) / len(parts) for name in ("accuracy", "auroc"))
        weight = recipe.accuracy_weight
        compared.append(
            Candidate(
                method=method,
                model=model,
                score=_score(score),
                accuracy=right,
                auroc=separated,
                value=weight * right + (1 - weight) * separated,
                cost=parts[0].get("cost"),
            )
        )
    settings = {(method, one.name): one for method, one in candidates(recipe)}
    best = {
        method: _best([one for one in compared if one.method == method], recipe, method)
        for method in dict.fromkeys(one.method for one in compared)
    }
    return Decision(
        recipe=recipe.digest,
        seeds=recipe.explore_seeds,
        hydra=settings[HYDRA, best[HYDRA].model],
        trunk=settings[HYDRA_TRUNK, best[HYDRA_TRUNK].model],
        dropout=next(rate for rate in recipe.dropout.rates if best[MC_DROPOUT].model == rate_name(rate)),
        scores={method: one.score for method, one in best.items()},
        candidates=tuple(compared),
    )


def _best(found: list[Candidate], recipe: StudyRecipe, method: str) -> Candidate:
    """The candidate with the highest value; of a trunk, among those that are cheap enough (or the cheapest)."""
    if method == HYDRA_TRUNK:
        cheapest = min(one.cost or 0.0 for one in found)
        found = [one for one in found if (one.cost or 0.0) <= max(recipe.trunk_cost, cheapest)]
    return max(found, key=lambda one: one.value)  # equal: the first in the recipe's order


def _score(name: str) -> ScoreName:
    return name  # type: ignore[return-value]


def decision_path(output: Path, recipe: StudyRecipe) -> Path:
    """Where the decision of a study lies."""
    return output / recipe.name / "decision.json"


def choose(output: Path, recipe: StudyRecipe) -> Decision:
    """The decision of a study: read, or made from what the explored seeds measured.

    Raises:
        DataError: A seed has not been explored yet.
    """
    path = decision_path(output, recipe)
    if path.exists():
        return Decision.load(path)
    measured = []
    for seed in recipe.explore_seeds:
        folder = SeedFolder(output, recipe, seed)
        if not (folder.path / "explored.json").exists():
            raise DataError(f"seed {seed} of {recipe.name} has not been explored; run its stage `explore` first")
        measured.append(folder.facts("explored", dict))
    decision = decide(recipe, measured)
    decision.save(path)
    return decision

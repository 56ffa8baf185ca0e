"""Last-layer Laplace: classifiers drawn from the posterior around the trained one."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .._utils import derive_seed, without_autocast
from ..batches import Batches, iterate
from ..errors import ConfigError
from ..metrics.probabilities import check_finite
from ..model.config import Sharing
from ..model.dropout import dropping
from ..model.ensemble import Ensemble
from ..model.kinds import require_single
from ..settings import Checked, Positive, Seed, Whole
from .building_blocks import append_one, joined, split_bias, with_bias

Structure = Literal["kron", "diag", "full"]


@dataclass(frozen=True)
class Laplace(Checked):
    """The posterior of the classifier, and how many classifiers are drawn.

    Attributes:
        members: Number of classifiers to draw.
        structure: Structure of the curvature: `"kron"` (a Kronecker product), `"diag"`, or `"full"`, for small
            classifiers.
        prior_precision: Precision of a normal prior around zero; None maximises the marginal likelihood.
        seed: Seed for drawing the classifiers.
    """

    members: Whole = 20
    structure: Structure = "kron"
    prior_precision: Positive | None = None
    seed: Seed = 0


@without_autocast()
@torch.no_grad()
def laplace(model: Ensemble, batches: Batches, settings: Laplace = Laplace()) -> Ensemble:  # noqa: B008 (frozen)
    """Draw classifiers around the model's own as members, which share everything else; nothing is trained.

    The posterior is normal; its precision is the Gauss-Newton curvature of the cross-entropy on the training data plus
    that of the prior. All members cost little more than one: only the last layer differs.

    `batches` are the training data of the model, read once; labels are not used.
    """
    require_single(model, "laplace")
    if model.readout.classifier is None or model.readout.distillation_classifier is not None:
        raise ConfigError("laplace takes a model with one linear classifier, not class embeddings or two classifiers")
    classifier = model.readout.classifier
    mean = with_bias(classifier)
    curvature = Curvature(settings.structure, *mean.shape)
    with dropping(False):
        for index, inputs, _ in iterate(batches, "batches", labelled=False):
            features, logits = model.features_and_logits(inputs)  # [1, B, d], [1, B, C]
            penultimate = model.readout.penultimate(features)
            check_finite(logits, f"logits of batch {index}", "batches")
            curvature.add(penultimate[0].cpu().double(), logits[0].cpu().double())
    posterior = curvature.posterior(mean, settings.prior_precision)
    classifiers = posterior.draw(settings.members, derive_seed(settings.seed, "laplace"))  # [S, C, d (+ 1)]
    many = joined([model] * settings.members, Sharing(stem=True, attention=True, mlp=True, norms=True))
    state = many.state_dict()
    drawn = {f"readout.classifier.{name}": tensor for name, tensor in split_bias(classifiers, classifier).items()}
    state |= {name: tensor.to(state[name]) for name, tensor in drawn.items()}
    line = (
        f"{settings.members} classifiers of a last-layer Laplace approximation ({settings.structure}, prior precision "
        f"{posterior.prior:.4g}, {curvature.samples} samples)"
    )
    return Ensemble.from_state(many.config, state, model.metadata.after(line))


class Curvature:
    """Gauss-Newton curvature of the cross-entropy in a classifier `[C, d]`, added up batch by batch in float64.

    For one sample it is the product of `diag(p) - p pᵀ` over classes and `a aᵀ` over inputs; the structure `"kron"`
    sums the two factors separately. A bias is the weight of an input that is always one.
    """

    def __init__(self, structure: Structure, classes: int, inputs: int) -> None:
        self.structure, self.samples = structure, 0
        sizes = {"kron": (classes, classes), "diag": (classes, inputs), "full": (classes, inputs, classes, inputs)}
        self.sums = torch.zeros(sizes[structure], dtype=torch.float64)
        self.inputs = torch.zeros(inputs, inputs, dtype=torch.float64)

    def add(self, features: Tensor, logits: Tensor) -> None:
        """Add samples: inputs of the classifier `[B, d]`, and logits `[B, C]`."""
        self.samples += len(features)
        features = append_one(features, self.inputs.shape[0] > features.shape[1])
        probs = logits.softmax(-1)
        if self.structure == "diag":
            self.sums += (probs * (1 - probs)).T @ features.square()
            return
        self.inputs += features.T @ features
        if self.structure == "kron":
            self.sums += probs.sum(0).diag() - probs.T @ probs
            return
        spread = torch.diag_embed(probs) - probs[:, :, None] * probs[:, None, :]  # [B, C, C]
        self.sums += torch.einsum("bce,bi,bj->ciej", spread, features, features)

    def posterior(self, mean: Tensor, prior: float | None) -> "Posterior":
        """The normal distribution around `mean` `[C, d]`, with the prior (None: the likeliest)."""
        axes: tuple[Tensor, ...] = ()
        if self.structure == "diag":
            values = self.sums.flatten()
        elif self.structure == "full":
            values, vectors = torch.linalg.eigh(self.sums.flatten(2).flatten(0, 1))
            axes = (vectors,)
        else:
            outputs, left = torch.linalg.eigh(self.sums)
            inputs, right = torch.linalg.eigh(self.inputs / self.samples)
            values = (outputs.clamp(min=0)[:, None] * inputs.clamp(min=0)).flatten()
            axes = (left, right)
        values = values.clamp(min=0)
        return Posterior(mean, values, axes, likeliest_prior(values, mean) if prior is None else prior)


def likeliest_prior(values: Tensor, mean: Tensor) -> float:
    """Prior precision that maximises the marginal likelihood, given the curvature's eigenvalues; MacKay's iteration."""
    squared = float(mean.square().sum())
    prior = 1.0
    if not squared or not values.any():
        return prior  # the data do not determine the prior
    for _ in range(10_000):
        determined = float((values / (values + prior)).sum())  # effective number of parameters
        prior, before = determined / squared, prior
        if abs(prior - before) <= 1e-10 * before:
            break
    return prior


@dataclass(frozen=True)
class Posterior:
    """A normal distribution of classifiers: precisions `values + prior` along `axes` (none: along the parameters)."""

    mean: Tensor  # [C, d]
    values: Tensor  # [C·d]
    axes: tuple[Tensor, ...]  # eigenvectors of outputs and inputs (a Kronecker product), or of all parameters
    prior: float

    def draw(self, count: int, seed: int) -> Tensor:
        """Draw classifiers `[count, C, d]`."""
        noise = torch.randn(count, len(self.values), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        scaled = noise / (self.values + self.prior).sqrt()
        if len(self.axes) == 1:
            scaled = scaled @ self.axes[0].T
        moved = scaled.unflatten(1, self.mean.shape)  # [count, C, d]
        return self.mean + (self.axes[0] @ moved @ self.axes[1].T if len(self.axes) == 2 else moved)

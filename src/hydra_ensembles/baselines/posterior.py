"""Last-layer Laplace: classifiers drawn from a normal distribution around the model's own."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .._utils import derive_seed, without_autocast
from ..batches import Batches, iterate
from ..errors import ConfigError
from ..metrics.probabilities import check_finite
from ..model.config import Sharing
from ..model.dual_encoder import require_single
from ..model.ensemble import Ensemble
from ..model.layers import dropping
from ..settings import Checked, Positive, Seed, Whole
from .building_blocks import append_one, joined, with_bias


@dataclass(frozen=True)
class Laplace(Checked):
    """The posterior of the classifier, and how many classifiers are drawn.

    Attributes:
        members: Number of classifiers to draw.
        prior_precision: Precision of a normal prior around zero; None maximises the marginal likelihood.
        seed: Seed for drawing the classifiers.
    """

    members: Whole = 20
    prior_precision: Positive | None = None
    seed: Seed = 0


@without_autocast()
@torch.no_grad()
def laplace(model: Ensemble, batches: Batches, settings: Laplace = Laplace()) -> Ensemble:  # noqa: B008 (frozen)
    """Draw classifiers around the model's own as members, which share everything else; nothing is trained.

    The posterior is normal; its precision is the Gauss-Newton curvature of the cross-entropy on the training data, as a
    Kronecker product, plus that of the prior. All members cost little more than one: only the last layer differs.

    `batches` are the training data of the model, read once; labels are not used.
    """
    require_single(model, "laplace")
    classifier = model.readout.classifier
    if classifier is None or model.readout.distillation_classifier is not None or classifier.weight.shape[1] < 2:
        raise ConfigError("laplace takes a model with one linear classifier of several classes, no class embeddings")
    mean, biased = with_bias(classifier), classifier.bias is not None
    outputs, seen, samples = torch.zeros(()), torch.zeros(()), 0
    with dropping(False):
        for index, inputs, _ in iterate(batches, "batches", labelled=False):
            features, logits = model.features_and_logits(inputs)  # [1, B, d], [1, B, C]
            check_finite(logits, f"logits of batch {index}")
            ours = append_one(model.readout.penultimate(features)[0].cpu().double(), biased)
            more = curvature(ours, logits[0].cpu().double())
            outputs, seen, samples = outputs + more[0], seen + more[1], samples + len(ours)
    posterior = Posterior.of(mean, outputs, seen / samples, settings.prior_precision)
    drawn = posterior.draw(settings.members, derive_seed(settings.seed, "laplace"))  # [S, C, d (+ 1)]
    many = joined([model] * settings.members, Sharing(stem=True, attention=True, mlp=True, norms=True))
    state, place = many.state_dict(), "readout.classifier."
    parts = {"weight": drawn[..., :-1], "bias": drawn[..., -1]} if biased else {"weight": drawn}
    state |= {place + name: part.to(state[place + name]) for name, part in parts.items()}
    line = (
        f"{settings.members} classifiers of a last-layer Laplace approximation (kron, prior precision "
        f"{posterior.prior:.4g}, {samples} samples)"
    )
    return Ensemble.from_state(many.config, state, model.metadata.after(line))


def curvature(inputs: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Gauss-Newton curvature of the cross-entropy of samples, in a classifier with inputs `[B, d]` and logits `[B, C]`.

    For one sample it is the product of `diag(p) - p pᵀ` over classes and `a aᵀ` over inputs; these factors are summed
    separately: `[C, C]` and `[d, d]`.
    """
    probs = logits.softmax(-1)
    return probs.sum(0).diag() - probs.T @ probs, inputs.T @ inputs


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
    """A normal distribution of classifiers: precisions `values + prior` along the products of two axes."""

    mean: Tensor  # [C, d]
    values: Tensor  # [C, d]
    axes: tuple[Tensor, Tensor]  # eigenvectors of outputs and inputs
    prior: float

    @classmethod
    def of(cls, mean: Tensor, outputs: Tensor, inputs: Tensor, prior: float | None) -> "Posterior":
        """From the factors of the curvature, `[C, C]` and `[d, d]`, and the prior (None: the likeliest)."""
        (over_outputs, left), (over_inputs, right) = torch.linalg.eigh(outputs), torch.linalg.eigh(inputs)
        values = over_outputs.clamp(min=0)[:, None] * over_inputs.clamp(min=0)
        return cls(mean, values, (left, right), likeliest_prior(values, mean) if prior is None else prior)

    def draw(self, count: int, seed: int) -> Tensor:
        """Draw classifiers `[count, C, d]`."""
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(count, self.values.numel(), dtype=torch.float64, generator=generator)
        moved = noise.unflatten(1, self.mean.shape) / (self.values + self.prior).sqrt()
        return self.mean + self.axes[0] @ moved @ self.axes[1].T

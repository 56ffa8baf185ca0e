"""BayesVLM: a posterior over the projections of a dual encoder, from pairs of images and texts.

For one side, with projection P, its inputs a and embeddings h = P a, the posterior of P is normal with a Kronecker
product as precision: `(√τ A + √λ I) ⊗ (√τ B + √λ I)`. A sums `a aᵀ`, B the Gauss-Newton curvature of the contrastive
loss in h, each divided by √n; τ is the number of pairs that the n given ones count for, λ the precision of the prior.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from torch import Tensor
from torch.nn import functional as F

from .._utils import with_float64, without_autocast
from ..batches import Batches, Inputs
from ..errors import CheckpointError, ConfigError
from ..model.dual_encoder import DualEncoder, checked_names, checked_templates, embed, prompts_of, require_model
from ..model.layers import GroupedLinear, dropping
from ..model.metadata import Metadata
from ..settings import END, Checked, Positive, Range
from ..training.text import features_of, read_pairs
from .building_blocks import View, append_one, with_bias

_ROWS = 1024  # samples per block of the similarity matrix
_PROMPTS = 256


@dataclass(frozen=True)
class BayesVLM(Checked):
    """How the posterior of the projections is computed.

    Attributes:
        pseudo_count: How many pairs the data count for, regardless of their number.
        negatives: Number of pairs that are compared with each other, as in contrastive training.
        prior_precision: Precision of a normal prior around zero; None maximises the evidence, for each side.
    """

    pseudo_count: Positive = 10.0
    negatives: Annotated[int, Range(2, END - 1)] = 32_768
    prior_precision: Positive | None = None


@without_autocast()
def bayes_vlm(dual: DualEncoder, pairs: Batches, settings: BayesVLM = BayesVLM()) -> "VLMPosterior":  # noqa: B008
    """The posterior of both projections, from pairs of images and texts; nothing is trained.

    `dual` has one member and two projections, and is copied. `pairs` are batches `(images, texts)`, as for `tune_text`,
    also with features instead of images; read once, and all embeddings are held in memory.
    """
    projections = _projections(dual)
    images, texts = _inputs_of_projections(dual, pairs)
    scale, device = dual.logit_scale.exp().item(), with_float64(dual.device)
    with torch.no_grad():
        biased = [projection.bias is not None for projection in projections]
        features = [append_one(part, bias) for part, bias in zip((images, texts), biased, strict=True)]
        means = [with_bias(projection) for projection in projections]
        embedded = [part @ mean.T for part, mean in zip(features, means, strict=True)]
        sides = []
        for side, other in ((0, 1), (1, 0)):
            taken, ours, theirs = (part.to(device) for part in (features[side], embedded[side], embedded[other]))
            inputs, outputs = kronecker_factors(taken, ours, theirs, scale, settings.negatives)
            sides.append(ProjectionPosterior.of(means[side], inputs.cpu(), outputs.cpu(), settings))
    return VLMPosterior(copy.deepcopy(dual), *sides)


def published_bayes_vlm(
    dual: DualEncoder,
    folder: str | Path,
    settings: BayesVLM = BayesVLM(),  # noqa: B008 (frozen)
) -> "VLMPosterior":
    """The posterior from published factors: `A_img_analytic.pt`, `B_img_analytic.pt`, and the same for `txt`.

    Only tensors are read, no code of the pickles is run. The published priors are for a pseudo-count of one; the
    authors' own script refits them for its own count, as is done here. The published factors of SigLIP are for the last
    map inside its pooling head, not for a projection: they fit no model here.
    """
    sides = []
    for tag, projection in zip(("img", "txt"), _projections(dual), strict=True):
        mean = with_bias(projection)
        paths = [Path(folder) / f"{letter}_{tag}_analytic.pt" for letter in "AB"]
        inputs, outputs = (torch.load(path, map_location="cpu", weights_only=True).double() for path in paths)
        if (len(outputs), len(inputs)) != mean.shape:
            sizes = f"{len(outputs)}x{len(inputs)}, not {mean.shape[0]}x{mean.shape[1]}"
            raise CheckpointError(f"the factors in {folder} are for a projection {sizes} as in this model")
        sides.append(ProjectionPosterior.of(mean, inputs, outputs, settings))
    return VLMPosterior(copy.deepcopy(dual), *sides)


def kronecker_factors(
    features: Tensor, embedded: Tensor, other: Tensor, scale: float, negatives: int
) -> tuple[Tensor, Tensor]:
    """A `[d, d]` and B `[e, e]` of one side, each divided by √n.

    B sums `Jᵀ (Yᵀ (diag(p) - p pᵀ) Y) J · scale²` over samples, where Y are the other side's embeddings of length one,
    p the probabilities of one sample over them, and J the derivative of `h / |h|`. The sum is expanded so that no
    matrix per sample is needed.

    `features` `[n, d]` are the projection's inputs, `embedded` `[n, e]` its outputs, `other` `[n, e]` the other side's;
    `negatives` samples are compared with each other.
    """
    count, width = embedded.shape
    outputs = embedded.new_zeros(width, width)
    for rows in torch.arange(count, device=embedded.device).tensor_split(math.ceil(count / negatives)):
        targets = F.normalize(other[rows], dim=-1)  # Y [C, e]
        totals = embedded.new_zeros(len(rows))  # [C]
        for batch in rows.split(_ROWS):
            unit = F.normalize(embedded[batch], dim=-1)  # u, [B, e]
            length = embedded[batch].norm(dim=-1)  # |h|, [B]
            cosines = unit @ targets.T  # [B, C]
            probs = (scale * cosines).softmax(-1)
            means = probs @ targets  # m = Yᵀ p, [B, e]
            weight = length.pow(-2)  # [B]
            along = (probs * cosines) @ targets - means * (means * unit).sum(-1, keepdim=True)  # S u, [B, e]
            cross = unit.T @ (weight[:, None] * along)
            inner = weight * (along * unit).sum(-1)  # uᵀ S u
            outputs += unit.T @ (inner[:, None] * unit) - cross - cross.T - means.T @ (weight[:, None] * means)
            totals += weight @ probs
        outputs += targets.T @ (totals[:, None] * targets)
    return features.T @ features / math.sqrt(count), outputs * scale**2 / math.sqrt(count)


@dataclass(frozen=True, eq=False)
class ProjectionPosterior:
    """A normal distribution of projections: a mean `[e, d]`, and precisions of inputs `[d, d]` and outputs `[e, e]`."""

    mean: Tensor
    inputs: Tensor
    outputs: Tensor
    prior: float

    @classmethod
    def of(cls, mean: Tensor, inputs: Tensor, outputs: Tensor, settings: BayesVLM) -> "ProjectionPosterior":
        """The posterior from the factors A and B."""
        root, prior = math.sqrt(settings.pseudo_count), settings.prior_precision
        if prior is None:
            prior = likeliest_precision(mean, root * inputs, root * outputs)
        added = math.sqrt(prior)
        first, second = (root * part + added * torch.eye(len(part), dtype=part.dtype) for part in (inputs, outputs))
        return cls(mean, first, second, prior)

    def spread(self, features: Tensor) -> Tensor:
        """`aᵀ A⁻¹ a` `[B]` of inputs `[B, d]`: the covariance of an embedding is this times `covariance`."""
        return (features * torch.linalg.solve(self.inputs.to(features), features.T).T).sum(-1)

    @property
    def covariance(self) -> Tensor:
        """Covariance of the outputs, `[e, e]`."""
        return torch.linalg.inv(self.outputs)


def likeliest_precision(mean: Tensor, inputs: Tensor, outputs: Tensor) -> float:
    """Prior precision that maximises the evidence `½ dq log λ - ½ λ |P|² - ½ log det(posterior precision)`."""
    values = [torch.linalg.eigvalsh(part).clamp(min=0) for part in (inputs, outputs)]
    sizes = (len(values[1]), len(values[0]))
    squared = mean.square().sum()

    def evidence(log_prior: Tensor) -> Tensor:
        root = (log_prior / 2).exp()[:, None]  # √λ, [grid, 1]
        determinants = sum(size * (part + root).log().sum(-1) for size, part in zip(sizes, values, strict=True))
        return (mean.numel() * log_prior - log_prior.exp() * squared - determinants) / 2

    low, high = -30.0, 40.0
    for _ in range(8):  # each grid spans the neighbours of the previous grid's best point
        grid = torch.linspace(low, high, 201, dtype=mean.dtype)
        best = int(evidence(grid).argmax())
        low, high = float(grid[max(best - 1, 0)]), float(grid[min(best + 1, 200)])
    return math.exp((low + high) / 2)


@dataclass(frozen=True, eq=False)
class VLMPosterior:
    """Posteriors of both projections of a dual encoder (a copy), from which classifiers are made."""

    dual: DualEncoder  # a copy, because the posteriors are valid only for these towers
    image: ProjectionPosterior
    text: ProjectionPosterior

    @without_autocast()
    def probit(self, class_names: Sequence[str], template: str = "A photo of a {label}.") -> "ProbitClassifier":
        """The closed form: one pass, logits `μ / √(1 + π/8 σ²)` from mean and variance of every similarity."""
        names = checked_names(class_names)
        return ProbitClassifier(self, names, self._texts(prompts_of(names, checked_templates(template))))

    @torch.no_grad()
    def _texts(self, prompts: Sequence[str]) -> Tensor:
        """Inputs of the text projection, `[prompts, d]` in float64 on the CPU; a one is appended if it has a bias."""
        with dropping(False):
            parts = [prompts[start : start + _PROMPTS] for start in range(0, len(prompts), _PROMPTS)]
            features = torch.cat([embed(self.dual.text, None, list(batch), normalize=False)[0] for batch in parts])
        return append_one(features.cpu().double(), _projections(self.dual)[1].bias is not None)


class ProbitClassifier(View):
    """A zero-shot classifier of one member whose logits shrink with the uncertainty of image and class embeddings."""

    def __init__(self, posterior: VLMPosterior, names: Sequence[str], texts: Tensor) -> None:
        super().__init__()
        self.model = copy.deepcopy(posterior.dual.image)
        self.metadata = Metadata(labels=tuple(names), preprocessing=self.model.metadata.preprocessing)
        self.biased = _projections(posterior.dual)[0].bias is not None
        self.kind, self.num_members, self.num_classes = "image", 1, len(names)
        covariances = posterior.image.covariance, posterior.text.covariance
        classes = texts @ posterior.text.mean.T  # g, [C, e]
        spread = posterior.text.spread(texts)  # aᵀ A⁻¹ a, [C]
        self.terms = {
            "projection": posterior.image.mean,
            "inputs": torch.linalg.inv(posterior.image.inputs),
            "of_text": covariances[1],
            "classes": classes,
            "spread": spread,
            "lengths": classes.square().sum(-1) + spread * covariances[1].trace(),  # E|g|², [C]
            "of_image": covariances[0].trace(),
            "by_image": (classes @ covariances[0] * classes).sum(-1) + spread * (covariances[0] * covariances[1]).sum(),
            "scale": posterior.dual.logit_scale.detach().cpu().double().exp(),
        }
        self.eval()

    def similarities(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Mean and variance of the scaled similarities, `[B, C]` each, in float64."""
        with dropping(False):
            features = embed(self.model, None, inputs, normalize=False)[0]
        features = features.to(with_float64(features.device)).double()
        self.terms = {name: tensor.to(features.device) for name, tensor in self.terms.items()}  # kept there
        terms = self.terms
        augmented = append_one(features, self.biased)
        embedded = augmented @ terms["projection"].T  # h, [B, e]
        spread = (augmented @ terms["inputs"] * augmented).sum(-1)  # aᵀ A⁻¹ a, [B]
        lengths = embedded.square().sum(-1) + spread * terms["of_image"]  # E|h|², [B]
        both = lengths[:, None] * terms["lengths"]
        mean = embedded @ terms["classes"].T / both.sqrt()
        # Variance of h·g for independent normal h and g
        by_text = (embedded @ terms["of_text"] * embedded).sum(-1)  # [B]
        variance = by_text[:, None] * terms["spread"] + spread[:, None] * terms["by_image"]
        return terms["scale"] * mean, terms["scale"] ** 2 * variance / both

    @torch.no_grad()
    def forward(self, inputs: Inputs) -> Tensor:
        """Logits `[1, B, C]`."""
        mean, variance = self.similarities(inputs)
        return (mean / (1 + math.pi / 8 * variance).sqrt()).float().to(self.device)[None]


# --- both sides of a dual encoder ------------------------------------------------------------------------


def _projections(model: object) -> tuple[GroupedLinear, GroupedLinear]:
    """The projections of images and texts, for a dual encoder with one member."""
    dual: DualEncoder = require_model(model, "BayesVLM", DualEncoder)
    if dual.num_members != 1:
        raise ConfigError(f"BayesVLM takes a single dual encoder, got {dual.num_members} members; give dual.member(i)")
    image, text = dual.projections.image, dual.projections.text
    if image is None or text is None:
        raise ConfigError("BayesVLM is about the projections into the common embedding; this dual encoder lacks one")
    if dual.logit_bias is not None:
        raise ConfigError("BayesVLM takes models trained with CLIP's softmax; this one has SigLIP's logit bias")
    if dual.image.num_classes:
        raise ConfigError("the image tower must end in features, not in a map of its own; convert it without one")
    return image, text


def _inputs_of_projections(dual: DualEncoder, pairs: Batches) -> tuple[Tensor, Tensor]:
    """Inputs of the projections of images and texts, `[n, d]` each, in float64 on the CPU."""
    parts: dict[str, list[Tensor]] = {"images": [], "texts": []}
    with torch.no_grad(), dropping(False):
        for index, raw in enumerate(pairs):
            images, texts, _ = read_pairs(raw, "pairs", index)
            parts["texts"].append(embed(dual.text, None, dual.text.prepare(texts), normalize=False)[0].cpu().double())
            parts["images"].append(features_of(dual.image, images).cpu().double())
    return torch.cat(parts["images"]), torch.cat(parts["texts"])

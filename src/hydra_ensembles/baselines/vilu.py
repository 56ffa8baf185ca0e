"""ViLU: a small network learns when a zero-shot model is right, from image, classes and predicted class."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from .._utils import derive_seed
from ..batches import Batches
from ..errors import ConfigError
from ..familiarity import read_answers, with_score
from ..metrics.distance import log_odds
from ..model.dual_encoder import require_ensemble
from ..model.ensemble import Ensemble
from ..model.metadata import Familiarity, FamiliaritySettings
from ..settings import Checked, Whole
from ..training.loop import Job, Learner, TrainOptions, train_best, trains
from ..training.recipe import Recipe


@dataclass(frozen=True)
class ViLU(Checked):
    """The network, and the batches it learns from.

    Attributes:
        hidden: Widths of all its layers except the last.
        batch_size: Samples in a batch of cached embeddings.
    """

    hidden: tuple[Whole, ...] = (512, 256, 128)
    batch_size: Whole = 128


@trains
def vilu(
    ensemble: Ensemble,
    train: Batches,
    recipe: Recipe | None = None,
    settings: ViLU = ViLU(),  # noqa: B008 (frozen)
    validation: Batches | None = None,
    **run: Unpack[TrainOptions],
) -> Ensemble:
    """Train the score `vilu` for a copy of a zero-shot ensemble: `p.score("vilu")`, saved with the model.

    Images are embedded once, and the network learns on the embeddings; neither the model nor its answers change. The
    score is minus the log-odds of being right, so `sigmoid(-score)` is a confidence.

    `ensemble` is made by `he.zero_shot`; every member gets its own network. `train` is read once. Settings of blocks
    and groups of the recipe (None: the preset `"vilu"`) are ignored. With `validation`, the best network, of all epochs
    and rates, is the one whose confidence has the lowest NLL; it may be no better than a constant.
    """
    statistics = projection_of(ensemble)
    recipe = Recipe.preset("vilu") if recipe is None else recipe
    rows = ensemble.state_dict()["readout.class_embeddings.weight"].float().cpu()  # [G, C, e], times the logit scale
    rows = rows.expand(ensemble.num_members, -1, -1)
    statistics["texts"] = F.normalize(rows, dim=-1)
    cached = cache(ensemble, train, "train", statistics, settings.batch_size, shuffle=True)
    held = None if validation is None else cache(ensemble, validation, "validation", statistics, settings.batch_size)
    job = Job(recipe, cached, held, settings=settings, **run)
    recipe.check(ensemble, cached, held)
    result = train_best(partial(ViLULearner, rows, settings, recipe), ensemble, job)
    line, samples = f"ViLU: {result.described(recipe, 'a network')}", len(cached.dataset)  # type: ignore[arg-type]
    fitted = FamiliaritySettings(("vilu",), samples)
    state = {
        f"vilu.{part}": one.float().cpu().clone().contiguous() for part, one in (statistics | result.weights).items()
    }
    return with_score(ensemble, Familiarity(fitted, state), line)


def projection_of(ensemble: Ensemble) -> dict[str, Tensor]:
    """How a zero-shot ensemble projects features: `projection` `[M, e, d]` and `shift` `[M, e]`, on the CPU."""
    readout = require_ensemble(ensemble, "vilu").readout
    if readout.class_embeddings is None or readout.hidden is not None:
        raise ConfigError("vilu takes a zero-shot classifier (he.zero_shot) that projects features in a single layer")
    weight, bias = torch.eye(readout.features)[None], None
    if readout.projection is not None:
        weight, bias = readout.projection.weight.detach().float().cpu(), readout.projection.bias
    shift = torch.zeros(1, weight.shape[1]) if bias is None else bias.detach().float().cpu()
    members = ensemble.num_members
    return {"projection": weight.expand(members, -1, -1).contiguous(), "shift": shift.expand(members, -1).contiguous()}


def cache(
    ensemble: Ensemble, batches: Batches, name: str, statistics: Mapping[str, Tensor], size: int, shuffle: bool = False
) -> DataLoader[tuple[Tensor, ...]]:
    """Batches of the embeddings of all images, and of which members are right."""
    samples = read_answers(ensemble, batches, name)
    x = torch.baddbmm(statistics["shift"][:, None], samples.features, statistics["projection"].mT)
    right = samples.logits.argmax(dim=-1) == samples.labels
    data = TensorDataset(F.normalize(x, dim=-1).transpose(0, 1).contiguous(), right.T.contiguous())  # [B, M, …]
    generator = torch.Generator() if shuffle else None
    return DataLoader(data, batch_size=size, shuffle=shuffle, generator=generator)


class ViLULearner(Learner[tuple[Tensor, ...]]):
    """Trains one network per member on the cached embeddings.

    The best network has the lowest NLL, not the highest accuracy: a network that has memorised its images may still
    be accurate, but overconfident where it is wrong.
    """

    by_nll = True

    def __init__(self, rows: Tensor, settings: ViLU, recipe: Recipe, device: torch.device) -> None:
        self.rows = rows.to(device)  # [M, C, e]
        self.texts = F.normalize(self.rows, dim=-1)
        members, _, width = rows.shape
        self.model = nn.ParameterDict()
        generator = torch.Generator().manual_seed(derive_seed(recipe.seed, "vilu"))
        for layer, (inputs, outputs) in enumerate(pairwise((3 * width, *settings.hidden, 1))):
            for name, shape in ((f"weight{layer}", (outputs, inputs)), (f"bias{layer}", (outputs,))):
                values = (2 * torch.rand(members, *shape, generator=generator) - 1) * inputs**-0.5  # as of nn.Linear
                self.model[name] = nn.Parameter(values.to(device))
        super().__init__(self.model, recipe, device, {})

    def read(self, raw: Any, index: int) -> tuple[Tensor, ...]:
        """Return the cached batch unchanged."""
        return tuple(raw)

    def odds(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Log-odds of being right, and whether the member is right, `[M, B]` each."""
        embedded, right = (part.to(self.device).transpose(0, 1) for part in batch)
        probs = (embedded @ self.rows.mT).softmax(dim=-1)  # [M, B, C]; unaffected by a bias common to all logits
        with self.autocast():
            odds = log_odds({"texts": self.texts, **self.model}, embedded, probs)
        return odds.float(), right

    def loss(self, batch: tuple[Tensor, ...]) -> Tensor:
        """Cross-entropy of right and wrong; the more accurate a member, the higher the weight of its mistakes."""
        odds, right = self.odds(batch)
        weight = mistake_weights(right)
        return F.binary_cross_entropy_with_logits(odds, right.float(), weight, reduction="none").mean(1).sum()

    def size(self, batch: tuple[Tensor, ...]) -> int:
        """Number of images."""
        return len(batch[0])

    @torch.no_grad()
    def measure(self, validation: Batches) -> tuple[float, float]:
        """Accuracy of the networks in predicting whether a member is right, and their mean cross-entropy."""
        correct, loss, count = 0.0, 0.0, 0
        for batch in validation:
            odds, right = self.odds(tuple(batch))
            correct += float(((odds > 0) == right).sum())
            loss += float(F.binary_cross_entropy_with_logits(odds, right.float(), reduction="sum"))
            count += right.numel()
        return correct / count, loss / count


def mistake_weights(right: Tensor) -> Tensor:
    """Weights `[M, B]`: one where a member is right, `log(1 + a / (1 - a))` where it is wrong, with its accuracy a."""
    accuracy = right.float().mean(dim=1, keepdim=True)
    weight = (accuracy / (1 - accuracy).clamp(min=1e-12)).log1p()
    return torch.where(right, torch.ones_like(weight), weight)

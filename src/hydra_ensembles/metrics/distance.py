"""Distance of features from those of familiar data, given fitted statistics: scores, higher = less familiar.

Everything here is a pure function of features `[M, B, d]` and of tensors that `hydra_ensembles.familiarity` fits: each
member is compared with its own statistics. Nothing synchronises with the device.
"""

from collections.abc import Mapping
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

FamiliarityName = Literal["mahalanobis", "mahalanobis++", "relative_mahalanobis", "relative_mahalanobis++", "knn"]

LearnedName = Literal["vilu"]  # for zero-shot models; fitted by `hydra_ensembles.baselines`
FittedName = Literal[FamiliarityName, LearnedName]
FamiliarityChoice = Literal[FamiliarityName, "auto"]

FAMILIARITY_NAMES: tuple[FamiliarityName, ...] = get_args(FamiliarityName)
BY_CLASS = FAMILIARITY_NAMES[:4]  # these compare with class means, so fitting them needs labels

Statistics = Mapping[str, Tensor]


def prepared(name: FittedName, features: Tensor) -> Tensor:
    """Features `[M, B, d]`, scaled to length one if the score needs that."""
    return F.normalize(features, dim=-1) if name.endswith("++") or name == "knn" else features


def ready(statistics: Statistics) -> Statistics:
    """Fitted statistics with precomputed squared lengths of class means `[M, C]`, which every batch needs."""
    if "classes" not in statistics:
        return statistics
    return {**statistics, "lengths": statistics["classes"].square().sum(dim=-1)}


def unfamiliarity(name: FittedName, statistics: Statistics, features: Tensor, logits: Tensor) -> Tensor:
    """The score of each member for each sample, `[M, B]`, in the dtype of the statistics (float32 when fitted).

    * `mahalanobis`: squared Mahalanobis distance to the nearest class mean, with one covariance for all classes; with
      `++` on features of length one; `relative_`: minus the distance to the mean of all data with its covariance.
    * `knn`: distance to the k-th nearest of the N stored features, all of length one; k is N / 50, from 1 to 50.
    * `vilu`: minus the log-odds of being right that a small network gives for image, classes and predicted class.

    `features` are `[M, B, d]`, `logits` `[M, B, C]`; the statistics of every member come through `ready`.
    """
    dtype = next(iter(statistics.values())).dtype
    x = prepared(name, features.to(dtype))
    if name == "vilu":
        return -log_odds(statistics, _embedded(statistics, x), logits.to(dtype).softmax(dim=-1))
    if name == "knn":
        bank = statistics["bank"]  # [M, N, d]
        neighbours = min(50, max(1, bank.shape[1] // 50))
        neighbour = (x @ bank.mT).topk(neighbours, dim=-1).indices[..., -1]  # [M, B]
        return (x - _picked(bank, neighbour)).norm(dim=-1)
    centred = x - statistics["mean"][:, None]
    # [M, B, d], [M, C, d]
    white = centred @ statistics["whiten"]
    means = statistics["classes"]
    # squared distances [M, B, C] to the class means, minus |w|²: |m|² - 2 w·m
    nearest = torch.baddbmm(statistics["lengths"][:, None], white, means.mT, alpha=-2).argmin(dim=-1)  # [M, B]
    distance = (white - _picked(means, nearest)).square().sum(dim=-1)  # the difference avoids cancellation
    if name.startswith("relative"):
        distance = distance - (centred @ statistics["background"]).square().sum(dim=-1)
    return distance


def log_odds(statistics: Statistics, embedded: Tensor, probs: Tensor) -> Tensor:
    """Output of the `vilu` network, `[M, B]`, for image embeddings `[M, B, e]` and probabilities `[M, B, C]`.

    Its inputs: the image, the mean of class embeddings `[M, C, e]` weighted by probability, and that of the predicted
    class.
    """
    texts = statistics["texts"]
    x = torch.cat([embedded, probs @ texts, _picked(texts, probs.argmax(dim=-1))], dim=-1)  # [M, B, 3e]
    last = sum(name.startswith("weight") for name in statistics) - 1
    for layer in range(last + 1):
        x = torch.baddbmm(statistics[f"bias{layer}"][:, None], x, statistics[f"weight{layer}"].mT)
        x = x if layer == last else x.relu()
    return x[..., 0]


def _embedded(statistics: Statistics, features: Tensor) -> Tensor:
    """Project features `[M, B, d]` to embeddings of length one `[M, B, e]`."""
    return F.normalize(torch.baddbmm(statistics["shift"][:, None], features, statistics["projection"].mT), dim=-1)


def _picked(rows: Tensor, index: Tensor) -> Tensor:
    """The row of `[M, N, d]` at each index `[M, B]`, as `[M, B, d]`."""
    return rows.gather(1, index[..., None].expand(-1, -1, rows.shape[-1]))

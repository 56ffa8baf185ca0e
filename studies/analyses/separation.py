"""Distance between ID and OOD data in the outputs of single heads (B.2.1): Table 5, and Figure 4 for all heads."""

from collections.abc import Iterable
from statistics import mean
from typing import Any

import torch
from torch import Tensor

import hydra_ensembles as he
from hydra_ensembles.heads import Head, centroid_distance, head_vectors

from ..results import markdown
from ..seed import Seed
from ..task import Drawn
from .analysis import Analysis, Result, about, asked, by_seed, cell, heads_of, paper
from .drawing import OURS, THEIRS, cloud, fields, legend

KINDS = {"circuit": "CircOOD", "dense": "whole model", "kept": "whole model, heads of CircOOD"}
FAR = "mnist"  # the set of Figure 4
Vectors = dict[Head, Tensor]


def run(seed: Seed) -> dict[str, Any]:
    """Distances by set, for CircOOD and the whole model; and points for the heads removed first and last."""
    task = seed.task
    base = seed.base
    chosen = asked(seed.task, "separation")
    order = seed.circuit("ood", heads_of(base)).heads  # ranks all heads
    circuit = he.prune(base, order[: seed.prune])
    sets = {name: samples for group in task.outside("report").values() for name, samples in group.items()}
    inside = task.batches(Drawn(task.inside("report"), chosen["samples"]))
    vectors = {"circuit": head_vectors(circuit, inside), "dense": head_vectors(base, inside)}
    rows: dict[str, Any] = {}
    for name, samples in sets.items():
        outside = task.batches(Drawn(samples, chosen["samples"]))
        dense = head_vectors(base, outside)
        rows[name] = {
            "circuit": distances(vectors["circuit"], head_vectors(circuit, outside), vectors["circuit"]),
            "dense": distances(vectors["dense"], dense, vectors["dense"]),
            "kept": distances(vectors["dense"], dense, vectors["circuit"]),
        }
    ends = {"last": order[-chosen["heads"] :][::-1], "first": order[: chosen["heads"]]}
    far = sets[FAR] if FAR in sets else next(iter(sets.values()))
    points = {
        end: head_points(base, (inside, task.batches(Drawn(far, chosen["samples"]))), heads, chosen["points"])
        for end, heads in ends.items()
    }
    return {"prune": seed.prune, "left": len(vectors["circuit"]), "rows": rows, "points": points}


def distances(inside: Vectors, outside: Vectors, heads: Iterable[Head]) -> dict[str, float] | None:
    """Both centroid distances, averaged over heads; None if there are none."""
    apart = [centroid_distance(inside[head], outside[head]) for head in heads]
    if not apart:
        return None
    return {kind: mean(getattr(distance, kind) for distance in apart) for kind in ("euclidean", "mahalanobis")}


def head_points(model: he.Ensemble, sides: tuple[Any, Any], heads: Iterable[Head], count: int) -> list[dict[str, Any]]:
    """For each head, ID and OOD vectors in their first two principal components, and their centroids' distance."""
    chosen = tuple(heads)
    inside, outside = (head_vectors(model, side, sorted({head.layer for head in chosen})) for side in sides)
    points = []
    for head in chosen:
        joined = torch.cat([inside[head], outside[head]])
        placed = (joined - joined.mean(0)) @ principal(joined)  # [N, 2]
        apart = centroid_distance(inside[head], outside[head])
        parts = zip(("inside", "outside"), placed.double().split([len(inside[head]), len(outside[head])]), strict=True)
        coordinates = {side: points[:count].round(decimals=3).tolist() for side, points in parts}
        points.append({"head": str(head), "mahalanobis": apart.mahalanobis, **coordinates})
    return points


def principal(vectors: Tensor) -> Tensor:
    """The first two principal directions `[d, 2]` of vectors `[N, d]`; the largest entry of each is positive."""
    directions = torch.linalg.svd((vectors - vectors.mean(0)).double(), full_matrices=False).Vh[:2].T  # [d, 2]
    largest = directions.gather(0, directions.abs().argmax(0, keepdim=True))
    return (directions * largest.sign()).to(vectors.dtype)


def table(result: Result) -> str:
    """Table 5."""
    printed = paper("5", "CIFAR-100")
    head = ["OOD set"]
    for title in KINDS.values():
        head += [f"{title}: Euclidean ↑", "Mahalanobis ↑"]
    lines = []
    columns = [(kind, metric) for kind in KINDS for metric in ("euclidean", "mahalanobis")]
    names = list(by_seed(result, "rows")[0])
    same_task = result["task"] == "vision-cifar100"
    for name in names:
        lines.append([name, *(cell(by_seed(result, "rows", name, *column), "distance") for column in columns)])
        if name in printed and same_task:
            cells = [printed[name].get(".".join(column), "") for column in columns]
            lines.append(["*paper*", *(f"*{text}*" if text else "" for text in cells)])
    lines.append(["mean", *(cell(_over_sets(result, names, *column), "distance") for column in columns)])
    if same_task and set(printed) == set(names):
        theirs = [[float(text) for name in names if (text := printed[name].get(".".join(key)))] for key in columns]
        lines.append(["*paper*", *(f"*{mean(numbers):.2f}*" if numbers else "" for numbers in theirs)])
    apart = {
        end: [mean(point["mahalanobis"] for point in points) for points in by_seed(result, "points", end)]
        for end in ("last", "first")
    }
    note = (
        f"Mean over the heads of the last layer ({cell(by_seed(result, 'left'), 'heads', _whole)} of them left in "
        f"CircOOD). Mahalanobis distance of the heads that went last {cell(apart['last'], 'distance')}, first "
        f"{cell(apart['first'], 'distance')}. {about(result)}"
    )
    return markdown(head, lines, note)


def _over_sets(result: Result, names: Iterable[str], kind: str, metric: str) -> list[float | None]:
    """For each seed the mean over sets; None if a kind has no head left."""
    by_set = zip(*(by_seed(result, "rows", name, kind, metric) for name in names), strict=True)
    return [None if None in values else mean(values) for values in by_set]


def _whole(value: float, _: str) -> str:
    return f"{value:.1f}".removesuffix(".0")


def figure(result: Result) -> Any:
    """Figure 4: heads removed last above, first below."""
    ends = next(iter(result["seeds"].values()))["points"]
    drawing, axes = fields(2, len(ends["last"]), 1.45)
    for row, (end, title) in zip(axes, {"last": "went last", "first": "went first"}.items(), strict=True):
        for field, head in zip(row, ends[end], strict=True):
            cloud(field, head["inside"], OURS, "ID")
            cloud(field, head["outside"], THEIRS, "OOD")
            field.set(xticks=[], yticks=[])
            field.set_title(f"head {head['head']}", fontsize=8)
        row[0].set_ylabel(title)
    legend(drawing, axes[0][0])
    return drawing


ANALYSIS = Analysis("What heads tell apart (Table 5, Figure 4)", run, table, figure)

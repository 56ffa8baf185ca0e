"""How far ID and OOD data lie apart in what single heads say (B.2.1): Table 5, and Figure 4 for the whole ranking."""

from collections.abc import Iterable
from statistics import mean
from typing import Any

import torch
from torch import Tensor

import hydra_ensembles as he
from hydra_ensembles.heads import Head, centroid_distance, head_vectors

from ..results import markdown
from ..seed import Seed
from .analysis import Analysis, Found, about, asked, by_seed, cell, drawn_batches, heads_of, paper, rounded
from .drawing import OURS, THEIRS, cloud, fields, legend

KINDS = {"circuit": "CircOOD", "dense": "whole model", "kept": "whole model, heads of CircOOD"}
FAR = "mnist"  # the set of Figure 4
Vectors = dict[Head, Tensor]


def run(seed: Seed) -> dict[str, Any]:
    """Distances by set, of CircOOD and of the whole model; points of the heads that went first and last."""
    task = seed.task
    base = seed.base
    chosen = asked(seed.task, "separation")
    order = seed.circuit("ood", heads_of(base)).heads  # to the end
    circuit = he.prune(base, order[: seed.prune])
    sets = {name: samples for group in task.outside("report").values() for name, samples in group.items()}
    inside = drawn_batches(task, task.inside("report"), chosen["samples"])
    known = {"circuit": head_vectors(circuit, inside), "dense": head_vectors(base, inside)}
    rows: dict[str, Any] = {}
    for name, samples in sets.items():
        outside = drawn_batches(task, samples, chosen["samples"])
        whole = head_vectors(base, outside)
        rows[name] = {
            "circuit": distances(known["circuit"], head_vectors(circuit, outside), known["circuit"]),
            "dense": distances(known["dense"], whole, known["dense"]),
            "kept": distances(known["dense"], whole, known["circuit"]),
        }
    ends = {"last": order[-chosen["heads"] :][::-1], "first": order[: chosen["heads"]]}
    shown = sets[FAR] if FAR in sets else next(iter(sets.values()))
    points = {
        end: head_points(
            base,
            (inside, drawn_batches(task, shown, chosen["samples"])),
            heads,
            chosen["points"],
        )
        for end, heads in ends.items()
    }
    return {"prune": seed.prune, "left": len(known["circuit"]), "rows": rows, "points": points}


def distances(inside: Vectors, outside: Vectors, heads: Iterable[Head]) -> dict[str, float] | None:
    """Both distances of the centroids, the mean over some heads; None where there are none."""
    found = [centroid_distance(inside[head], outside[head]) for head in heads]
    if not found:
        return None
    return {kind: mean(getattr(one, kind) for one in found) for kind in ("euclidean", "mahalanobis")}


def head_points(model: he.Ensemble, sides: tuple[Any, Any], heads: Iterable[Head], count: int) -> list[dict[str, Any]]:
    """Of each head, ID and OOD vectors in their first two principal components, and the distance of their centroids."""
    wanted = tuple(heads)
    inside, outside = (head_vectors(model, one, sorted({head.layer for head in wanted})) for one in sides)
    found = []
    for head in wanted:
        both = torch.cat([inside[head], outside[head]])
        placed = (both - both.mean(0)) @ principal(both)  # [N, 2]
        known, foreign = placed.split([len(inside[head]), len(outside[head])])
        apart = centroid_distance(inside[head], outside[head])
        kept = {"inside": rounded(known[:count], 3), "outside": rounded(foreign[:count], 3)}
        found.append({"head": str(head), "mahalanobis": apart.mahalanobis, **kept})
    return found


def principal(vectors: Tensor) -> Tensor:
    """The first two principal directions `[d, 2]` of vectors `[N, d]`; the largest entry of each is positive."""
    directions = torch.linalg.svd((vectors - vectors.mean(0)).double(), full_matrices=False).Vh[:2].T  # [d, 2]
    largest = directions.gather(0, directions.abs().argmax(0, keepdim=True))
    return (directions * largest.sign()).to(vectors.dtype)


def table(found: Found) -> str:
    """Table 5."""
    there = paper("5", "CIFAR-100")
    head = ["OOD set"]
    for title in KINDS.values():
        head += [f"{title}: Euclidean ↑", "Mahalanobis ↑"]
    lines = []
    columns = [(kind, one) for kind in KINDS for one in ("euclidean", "mahalanobis")]
    names = list(by_seed(found, "rows")[0])
    known = found["task"] == "vision-cifar100"
    for name in names:
        lines.append([name, *(cell(by_seed(found, "rows", name, *one), "distance") for one in columns)])
        if name in there and known:
            shown = [there[name].get(".".join(one), "") for one in columns]
            lines.append(["*paper*", *(f"*{one}*" if one else "" for one in shown)])
    lines.append(["mean", *(cell(_over_sets(found, names, *one), "distance") for one in columns)])
    if known and set(there) == set(names):
        theirs = [[float(one) for name in names if (one := there[name].get(".".join(key)))] for key in columns]
        lines.append(["*paper*", *(f"*{mean(one):.2f}*" if one else "" for one in theirs)])
    apart = {
        end: [mean(one["mahalanobis"] for one in points) for points in by_seed(found, "points", end)]
        for end in ("last", "first")
    }
    note = (
        f"Mean over the heads of the last layer ({cell(by_seed(found, 'left'), 'heads', _whole)} of them left in "
        f"CircOOD). Mahalanobis distance of the heads that went last {cell(apart['last'], 'distance')}, first "
        f"{cell(apart['first'], 'distance')}. {about(found)}"
    )
    return markdown(head, lines, note)


def _over_sets(found: Found, names: Iterable[str], kind: str, one: str) -> list[float | None]:
    """Of each seed the mean over sets; None where a kind has no head left."""
    by_set = zip(*(by_seed(found, "rows", name, kind, one) for name in names), strict=True)
    return [None if None in values else mean(values) for values in by_set]


def _whole(value: float, _: str) -> str:
    return f"{value:.1f}".removesuffix(".0")


def figure(found: Found) -> Any:
    """Figure 4: heads that went last above, first below."""
    ends = next(iter(found["seeds"].values()))["points"]
    drawing, axes = fields(2, len(ends["last"]), 1.45)
    for row, (end, title) in zip(axes, {"last": "went last", "first": "went first"}.items(), strict=True):
        for place, one in zip(row, ends[end], strict=True):
            cloud(place, one["inside"], OURS, "ID")
            cloud(place, one["outside"], THEIRS, "OOD")
            place.set(xticks=[], yticks=[])
            place.set_title(f"head {one['head']}", fontsize=8)
        row[0].set_ylabel(title)
    legend(drawing, axes[0][0])
    return drawing


ANALYSIS = Analysis("What heads tell apart (Table 5, Figure 4)", run, table, figure)

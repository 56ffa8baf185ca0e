"""Results of the first version made readable: `python -m studies.convert_results OLD_FOLDER NEW_FOLDER`.

The first version stored logits of many classes by a codec: of every group of rows that answer together some classes one
by one, and of the others, a member's tail, three numbers. Its decoder is here and nowhere else. What it gives is
written as columns (see `results`): logits in float16 where there are few classes, exact columns where there are many.
Numbers of the JSON files stay as they were.
"""

import json
import math
import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .results import ABSOLUTE, FORMAT, Answers, Array, Results, read_arrays

KINDS = {"hydra_ensembles.study 1": "classifier", "hydra_ensembles.zero_shot_study 1": "dual"}
FINENESS, MIXTURES, BISECTIONS, WIDEST, HIGHEST = 8, 16, 60, 200.0, -1 / 16  # of the codec
PRIMES = tuple(number for number in range(2, 100) if all(number % other for other in range(2, number)))


def convert(source: Path) -> Results:
    """The results in `source`, a JSON file with its `.npz` beside it."""
    old = json.loads(source.read_text(encoding="utf-8"))
    kind = KINDS[old["format"]]
    facts = {**old, "format": FORMAT, "kind": kind}
    sets = _sets(read_arrays(source.with_suffix(".npz")))
    if kind == "classifier":
        task = next(name for name, one in old["sets"].items() if one["group"] == "id")
        facts["scores"], facts["calibrated"] = old["decision"]["decision"]["scores"], ["Temperature Scaling"]
        groups: dict[str, dict[str, int]] = {}
        for name, one in old["sets"].items():
            groups.setdefault(one["group"], {})[name] = one["samples"]
        samples = groups.pop("id")[task]
        classes = int(sets[f"0.{task}"]["classes"][0])
        facts["tasks"] = {task: {"domain": None, "classes": classes, "samples": samples, **groups}}
        del facts["sets"]
    else:
        facts["calibrated"] = list(next(iter(old["temperatures"].values())))
        facts["images"] = facts.pop("sets")
        facts["tasks"] = {name: {**one, **old["detections"].get(name, {})} for name, one in old["tasks"].items()}
        facts["detections"] = list(old["detections"])
    arrays: dict[str, Array] = {}
    for name, one in sets.items():
        seed, _, rest = name.partition(".")
        place = f"{task}/{rest}" if kind == "classifier" else _place(rest)
        logits, labels = _decoded(one), one.get("labels")
        answers = Answers(
            units=dict(zip(facts["units"], logits.split(list(facts["units"].values())), strict=True)),
            methods=facts["methods"],
            labels=None if labels is None else torch.from_numpy(labels),
            temperatures=facts["temperatures"][seed],
            calibrated=facts["calibrated"],
        )
        made = answers.arrays()
        for key in ("peak", "top_probabilities", "top_classes", *ABSOLUTE):  # of logits less their largest: unknown
            made.pop(key, None)
        arrays |= {f"{seed}/{place}/{key}": array for key, array in made.items()}
    return Results(facts, arrays)


def _place(name: str) -> str:
    """`task.NAME` and `ood.TASK.NAME` as `TASK/SET`."""
    kind, _, rest = name.partition(".")
    return f"{rest}/{rest}" if kind == "task" else rest.replace(".", "/", 1)


def _sets(stored: Mapping[str, Array]) -> dict[str, dict[str, Array]]:
    sets: dict[str, dict[str, Array]] = {}
    for key, array in stored.items():
        name, _, part = key.rpartition(".")
        sets.setdefault(name, {})[part] = array
    return sets


def _decoded(one: Mapping[str, Array]) -> Tensor:
    """Logits `[S, N, C]` of a stored set: as they are, or group by group."""
    if "codes" not in one:
        return torch.from_numpy(one["values"].astype(np.float32))
    flat, rows, kept, found = one["places"][one["codes"]], 0, 0, []
    for number, (members, samples, width) in enumerate(one["shapes"].tolist()):
        own, flat = np.split(flat, [members * samples * width])
        values = own.reshape(width, members, samples).transpose(1, 2, 0)
        classes = one["kept"][kept : kept + width - 1].T
        entropy = one["entropy"].T[rows : rows + members]
        found.append(_group(values, classes, entropy, one["mixture"][number], int(one["classes"][0])))
        rows, kept = rows + members, kept + width - 1
    return torch.cat(found)


def _group(values: Array, kept: Array, entropy: Array, mixture: Array, classes: int) -> Tensor:
    """Logits `[R, N, C]` of rows that answer together: kept classes as they are, tails of the stored shape."""
    given = torch.from_numpy(values.astype(np.float32))  # [R, N, k + 1], the level of the tail last
    places, steps, mixed = (torch.from_numpy(array.astype(np.int64)) for array in (kept, entropy, mixture))
    shapes, orders = _shapes(classes, places.shape[-1]).float(), _orders(len(given), classes - places.shape[-1])
    tails = torch.stack(
        [given[row, :, -1:] + shapes[steps[row]].gather(1, orders[mixed, row]) for row in range(len(given))]
    ).clamp_max(HIGHEST)
    index = places.expand(len(given), -1, -1)  # [R, N, k]
    others = torch.ones(*given.shape[:2], classes, dtype=torch.bool).scatter_(2, index, False)
    return given.new_empty(others.shape).masked_scatter_(others, tails).scatter_(2, index, given[..., :-1])


@lru_cache(maxsize=16)
def _shapes(classes: int, kept: int) -> Tensor:
    """Logits by place, over their level, for every entropy: the lower part of a normal distribution."""
    count = classes - kept
    places = torch.arange(kept, classes, dtype=torch.double)
    normal = torch.special.ndtri((classes - places - 0.5) / classes)  # descending
    even = math.ceil(FINENESS * math.log(count))
    entropy = torch.arange(1 + even, dtype=torch.double).div(FINENESS).clamp_max(math.log(count))
    low, high = torch.zeros_like(entropy), torch.full_like(entropy, WIDEST)
    for _ in range(BISECTIONS):
        width = (low + high) / 2
        found = torch.special.entr((width[:, None] * normal).softmax(-1)).sum(-1)
        low, high = torch.where(found > entropy, width, low), torch.where(found > entropy, high, width)
    shapes = (high[:, None] * normal).log_softmax(-1) + entropy[:, None]
    shapes[-1] = 0.0  # all classes alike
    return shapes


@lru_cache(maxsize=16)
def _orders(rows: int, count: int) -> Tensor:
    """The place of every class in the tail of every row, for every mixture: `[MIXTURES, rows, count]`."""
    normal = torch.special.ndtri((torch.arange(count, dtype=torch.double) + 0.5) / count)
    number = torch.arange(1, count + 1, dtype=torch.double)
    own = torch.stack([_rank(number.mul(math.sqrt(PRIMES[row % len(PRIMES)])).frac()) for row in range(rows)])
    apart = (torch.arange(MIXTURES, dtype=torch.double) / (MIXTURES - 1)) ** 2  # one less the correlation
    mixed = (1 - apart).sqrt()[:, None, None] * normal + apart.sqrt()[:, None, None] * normal[own]
    return _rank(mixed)


def _rank(values: Tensor) -> Tensor:
    """The place of every value among those of the last axis in ascending order."""
    return values.argsort(dim=-1, stable=True).argsort(dim=-1, stable=True)


def main(arguments: list[str]) -> None:
    """Convert every study of a folder."""
    source, target = map(Path, arguments)
    for path in sorted(source.glob("*.json")):
        converted: Any = convert(path)
        converted.save(target)
        print(f"{target / path.name}: {(target / path.with_suffix('.npz').name).stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main(sys.argv[1:])

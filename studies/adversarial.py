"""Adversarial images: how often models are right, and what passes under a promise, if each pixel may change a little.

Projected gradient descent in the maximum norm, on the pixels that a model reads (resized images). A model is attacked
as a whole: gradients pass through all members and the mean of their probabilities. `answer` raises the likeliest wrong
answer above the right one; `answer and familiarity` also keeps the image among the familiar ones. Of the images on the
way the worst counts: wrong and accepted, else wrong. A promise is for rows like those that certified it: here it is
void, and the table shows what passes.
"""

import platform
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

import hydra_ensembles as he
from hydra_ensembles.demo import load_backbone, load_sample
from hydra_ensembles.metrics.probabilities import log_mean_probs

from .classifiers import ClassifierTask
from .engine import opened
from .methods import DEEP, HYDRA, SINGLE, SOUP
from .samples import MEAN, STD, Drawn
from .small import MEMBERS, demo_models, tuned
from .tables import cell, read_csv, write_csv

TABLE = "adversarial.csv"
RADII, STEPS, REACH = (1, 4), 20, 2.5  # in 255ths; REACH: all steps together, in radii
ATTACKS = {"answer": 0.0, "answer and familiarity": 10.0}  # weight of familiarity beside the margin of the answer
RISK, IMAGES = 0.05, 1000
MODELS = (SINGLE, SOUP, HYDRA, DEEP)
HEAD = ("data", "seed", "model", "attack", "radius", "images", "accuracy", "accepted", "wrong_accepted", "risk")
Line = dict[str, Any]
Batches = Iterable[tuple[Tensor, Tensor]]


def attacked(
    model: he.Ensemble, inputs: Tensor, labels: Tensor, radius: float, weight: float, scale: Sequence[Sequence[float]]
) -> Tensor:
    """The worst images found within `radius` (of pixels in 0 to 1) of images `[B, 3, h, w]`, normalised by `scale`."""
    mean, deviation = (torch.tensor(one, device=inputs.device)[:, None, None] for one in scale)  # [3, 1, 1]
    reach, black, white = radius / deviation, -mean / deviation, (1 - mean) / deviation
    familiarity = model.metadata.familiarity
    assert familiarity is not None
    limit = familiarity.settings.threshold
    assert limit is not None
    kept, worst = inputs, torch.full_like(labels, -1)
    moved = inputs + reach * (2 * torch.rand_like(inputs) - 1)
    for _ in range(STEPS + 1):
        moved = moved.clamp(inputs - reach, inputs + reach).clamp(black, white).detach().requires_grad_()
        features, logits = model.features_and_logits(moved)  # [M, B, d], [M, B, C]
        scores = familiarity.scores(features, logits)  # [1, M, B]
        found = model.prediction(logits.detach(), scores.detach())
        wrong = (found.label != labels).long()
        harm = wrong * (1 + found.accept.long())
        kept = torch.where((harm >= worst)[:, None, None, None], moved.detach(), kept)
        worst = worst.maximum(harm)
        logs = log_mean_probs(logits)  # [B, C]
        right = logs.gather(1, labels[:, None])[:, 0]
        others = logs.scatter(1, labels[:, None], -torch.inf).amax(dim=1)
        beyond = (scores[0].mean(dim=0) / limit).log().relu()  # [B], 0 for familiar ones
        (slope,) = torch.autograd.grad((others - right - weight * beyond).sum(), moved)
        moved = moved.detach() + REACH / STEPS * reach * slope.sign()
    return kept


def measured(model: he.Ensemble, batches: Batches, scale: Sequence[Sequence[float]]) -> Iterator[Line]:
    """What a calibrated model says of images as they are, and after every attack."""
    model = model.eval().requires_grad_(False)
    settings = [("none", 0), *((attack, radius) for attack in ATTACKS for radius in RADII)]
    for attack, radius in settings:
        sums = torch.zeros(4)
        torch.manual_seed(0)
        for inputs, labels in batches:
            images, right = inputs.to(model.device), labels.to(model.device)
            if radius:
                images = attacked(model, images, right, radius / 255, ATTACKS[attack], scale)
            said = model.predict(images)
            wrong = said.label != right
            sums += torch.stack([wrong.new_ones(len(wrong)), ~wrong, said.accept, wrong & said.accept]).sum(dim=1).cpu()
        count, *shares = sums.tolist()
        named = zip(("accuracy", "accepted", "wrong_accepted"), (one / count for one in shares), strict=True)
        about = {"hardware": hardware(model.device), "torch": str(torch.__version__)}
        yield {"attack": attack, "radius": radius, "images": int(count), "risk": RISK, **dict(named), **about}


def hardware(device: torch.device) -> str:
    """What computes."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU {platform.machine()}"


def of_models(
    name: str,
    seed: int,
    models: Mapping[str, he.Ensemble],
    held_out: Any,
    train: Any,
    test: Batches,
    scale: Sequence[Sequence[float]],
) -> Iterator[Line]:
    """The lines of several models, each calibrated on the same rows."""
    for kind, model in models.items():
        began = time.perf_counter()
        safe = he.calibrate(model, held_out, risk=RISK, train=train)
        yield from ({"data": name, "seed": seed, "model": kind, **line} for line in measured(safe, test, scale))
        print(f"{name}, seed {seed}, {kind}: {time.perf_counter() - began:.0f} s", flush=True)


def of_demo(seed: int, images: int, device: torch.device) -> Iterator[Line]:
    """The lines of the embedded model and of its fine-tunings."""
    backbone, sample = load_backbone().to(device), load_sample()
    prepare: Any = backbone.metadata.preprocessing
    models = demo_models(backbone, [tuned(backbone, sample, MEMBERS * seed + one) for one in range(MEMBERS)])
    sets = (sample["calibration"], sample["circuit_id"], sample["test"].select(range(min(images, len(sample["test"])))))
    held_out, train, test = (list(he.data.batches(one, prepare, 60)) for one in sets)
    return of_models("demo", seed, models, held_out, train, cast(Any, test), (prepare.mean, prepare.std))


def of_task(task: ClassifierTask, folder: Path, seed: int, images: int) -> Iterator[Line]:
    """The lines of the models of a study."""
    with opened(task, folder, seed) as opened_lab:
        lab = cast(Any, opened_lab)
        models = {name: lab.model(name) for name in MODELS}
        parts = (task.inside["B"], task.inside["calibrate"], Drawn(task.reported(task.suite.id), images))
        held_out, train, test = map(task.batches, parts)
        yield from of_models(task.name, seed, models, held_out, train, test, (MEAN, STD))


def write_lines(path: Path, lines: Iterable[Line]) -> Path:
    """Write lines, instead of earlier ones of the same data and seed."""
    found = [{key: cell(value) for key, value in line.items()} for line in lines]
    done = {(line["data"], line["seed"]) for line in found}
    earlier = read_csv(path) if path.exists() else []
    both = [line for line in earlier if (line["data"], line["seed"]) not in done] + found
    keys = list(dict.fromkeys((*HEAD, *(key for line in both for key in line))))
    return write_csv(path, [keys, *([line.get(key, "") for key in keys] for line in both)])

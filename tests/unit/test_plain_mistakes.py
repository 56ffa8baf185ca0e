"""Plain mistakes in every argument of public functions give one of our errors or an answer, never a raw exception.

This covers functions missing from the tables of `attack/`. Each has a valid call, and each of its arguments is
replaced in turn by every value of its lists, whatever the annotation says.
"""

import inspect
import warnings
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hydra_ensembles as he
from attack import values
from attack.bad_data import data_table
from hydra_ensembles import metrics
from hydra_ensembles.data.dataset import ImageDataset, only_classes, split, subset, without_classes
from hydra_ensembles.data.loading import load
from hydra_ensembles.errors import ConfigError, HydraError
from hydra_ensembles.evaluation.evaluate import evaluate_logits
from hydra_ensembles.model.cost import measure_costs
from sample_evaluations import evaluation
from unit.pipeline import build_cases as cases
from unit.training.training_cases import tiny_dual


class Unreadable:
    """An object that no argument accepts."""


PLAIN = int | float | str | tuple | None  # types of defaults that are plain values
X, Y = cases.samples(6, seed=9)
VALUES = values.VALUES | {
    "object": Unreadable,
    "folder": lambda: Path("folder"),
    "file": lambda: Path("file"),
    "under a file": lambda: Path("file/within"),
    "dict of None": lambda: {"near": None},
    "dict of dict": lambda: {"near": {"x": None}},
    "wrong keys": lambda: {"pixels": X, "label": Y},
    "type": lambda: int,
    "function": lambda: lambda *_: None,
    "empty tensor": lambda: torch.empty(0),
    "device": lambda: torch.device("meta"),
    "dtype": lambda: torch.int8,
    "module": lambda: torch.nn.Linear(2, 2),
    "used generator": lambda: iter(()),
}
BATCHES = {name: make for name, (expected, make) in data_table("image").items() if expected != "theirs"}
DATA = {"train", "pairs", "batches", "id_batches", "id_data"}


def data(seed: int = 1, shift: float = 0.0) -> list[Any]:
    return cases.batches(8, seed=seed, shift=shift)


BASELINES, MODEL, DUAL = he.baselines, cases.image_model(), tiny_dual()
RECIPE, SCORES = cases.recipe(steps=1), torch.arange(6.0)
ZERO_SHOT = he.zero_shot(DUAL, class_names=["red", "green"], templates=["a {label}"])
RANKING = he.HeadRanking(((0, 0),), (1.0,), "m", "acc")
METHODS: dict[str, Any] = {  # small settings of the baselines that train
    "batch_ensemble": BASELINES.BatchEnsemble(members=2),
    "lora_ensemble": BASELINES.LoRA(members=1, rank=1),
    "mimo": BASELINES.MIMO(members=2, batch_repeat=1),
    "oba": BASELINES.OBA(steps=1, batches=1),
    "packed_ensemble": BASELINES.Packed(members=1, alpha=1.0),
    "neg_label": BASELINES.NegLabel(share=1.0, groups=1),
    "vilu": BASELINES.ViLU(hidden=(4,)),
}
ATLAS = {"ensemble": MODEL, "id_data": data(1), "ood": {"far": data(2, 1.5)}, "inputs": 1, "layers": [0]}
LOGITS, TWO = torch.randn(2, 6, 3), ImageDataset([1, 2], [0, 1], ("a", "b"))
SETS = {"ood": {"x": torch.randn(2, 5, 3)}, "shift": {"s": (torch.randn(2, 6, 3), Y)}}
Call = tuple[Callable[..., Any], Callable[[], dict[str, Any]]]  # a function, and valid arguments
CALLS: dict[str, Call] = {  # for a partial, only the listed arguments are replaced; otherwise also those with a default
    "ImageDataset": (ImageDataset, lambda: {"source": [1, 2], "labels": [0, 1], "class_names": ("a", "b")}),
    "atlas": (he.atlas, lambda: ATLAS),
    "evaluate_logits": (evaluate_logits, lambda: {"id_logits": LOGITS, "labels": Y, **SETS}),
    **{
        method: (
            partial(getattr(BASELINES, method), validation=data(2), progress=False),
            lambda small=small: {"model": MODEL, "train": data(1), "recipe": RECIPE, "settings": small},
        )
        for method, small in METHODS.items()
        if method not in ("neg_label", "vilu")
    },
    "bayes_vlm": (BASELINES.bayes_vlm, lambda: {"dual": DUAL, "pairs": [(X, ["cat"] * 6)]}),
    "bayes_vlm, published": (BASELINES.published_bayes_vlm, lambda: {"dual": DUAL, "folder": "folder"}),
    "deep_ensemble": (
        partial(BASELINES.deep_ensemble, progress=False),
        lambda: {"model": MODEL, "train": data(1), "recipe": RECIPE, "members": 1},
    ),
    "laplace": (
        BASELINES.laplace,
        lambda: {"model": MODEL, "batches": data(1), "settings": BASELINES.Laplace(members=2)},
    ),
    "neg_label": (
        partial(BASELINES.neg_label, ZERO_SHOT),
        lambda: {"words": ["cat", "dog", "bus"], "templates": None, "settings": METHODS["neg_label"]},
    ),
    "vilu": (
        partial(BASELINES.vilu, ZERO_SHOT, progress=False, validation=None),
        lambda: {"train": [(X, Y % 2)], "recipe": BASELINES.ViLU.recipe(epochs=1), "settings": METHODS["vilu"]},
    ),
    "fit_familiarity": (
        he.fit_familiarity,
        lambda: {"ensemble": MODEL, "id_batches": data(), "score": "knn", "neighbours": 1, "stored": 10},
    ),
    "measure_costs": (measure_costs, lambda: {"models": {"m": MODEL}, "inputs": X, "repeats": 1, "warmup": 0}),
    "HeadRanking.save": (RANKING.save, lambda: {"path": "saved.json"}),
    "Evaluation.save": (evaluation().save, lambda: {"path": "saved.json"}),
    "save_pretrained": (MODEL.save_pretrained, lambda: {"folder": "saved"}),
    "write_atlas": (he.write_atlas, lambda: {"path": "atlas.html", "atlas": small_atlas()}),
    "load": (load, lambda: {"name_or_path": "folder"}),
    "subset": (subset, lambda: {"dataset": TWO, "n": 1, "seed": 0}),
    "split": (split, lambda: {"dataset": TWO, "fractions": 0.5, "seed": 0}),
    "batches": (he.data.batches, lambda: {"dataset": TWO, "preprocess": len, "batch_size": 1}),
    "select": (TWO.select, lambda: {"indices": [1, 0]}),
    "relabel": (TWO.relabel, lambda: {"new_labels": {0: 1, 1: 0}, "class_names": ["b", "a"]}),
    "with_classes": (TWO.with_classes, lambda: {"class_names": ["b", "a"]}),
    "only_classes": (only_classes, lambda: {"dataset": TWO, "classes": ["a"]}),
    "without_classes": (without_classes, lambda: {"dataset": TWO, "classes": ["a"]}),
    "fit_sets": (metrics.fit_sets, lambda: {"probs": torch.full((6, 3), 1 / 3), "labels": Y, "share": 0.9}),
    "conformal_threshold": (metrics.conformal_threshold, lambda: {"scores": SCORES, "share": 0.9}),
    "p_values": (metrics.p_values, lambda: {"reference": SCORES, "scores": SCORES}),
}


@cache
def small_atlas() -> he.Atlas:
    return he.atlas(MODEL, data(1), layers=[0], inputs=0, progress=False)


def arguments(name: str) -> dict[str, Any]:
    """Arguments of a valid call: those of the table, and the defaults of all others."""
    function, make = CALLS[name]
    known = {} if isinstance(function, partial) else inspect.signature(function).parameters
    usual = {key: one.default for key, one in known.items() if isinstance(one.default, PLAIN)}
    return usual | ({"progress": False} if "progress" in known else {}) | make()


def mistakes(name: str, every: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Every nth wrong call of a function, with different values for each argument: a description, and the call."""
    function, _ = CALLS[name]
    for place, argument in enumerate(arguments(name)):
        values = VALUES | BATCHES if argument in DATA else VALUES
        for title, make in islice(values.items(), place % every, None, every):
            yield f"{argument} = {title}", lambda a=argument, m=make: function(**{**arguments(name), a: m()})


@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CALLS)
def test_every_mistake_is_answered_or_refused_in_our_words(name: str, every: int, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)  # some values are file names, which may be written
    Path("folder").mkdir()
    Path("file").touch()
    raw = []
    for title, call in mistakes(name, every):
        try:
            with warnings.catch_warnings(action="ignore"):
                call()
        except HydraError:
            pass
        except Exception as error:
            raw.append(f"{title}: {error!r}")
    assert not raw, "\n".join(raw)


def test_settings_of_another_kind_are_refused() -> None:
    """Cases that the tables of `attack/` do not cover."""
    with pytest.raises(ConfigError, match="TextPreprocessing"):
        MODEL.with_metadata(preprocessing=he.TextPreprocessing(8))
    with pytest.raises(ConfigError, match="count"):
        he.heads.overlap(RANKING, RANKING, count=0)


def test_a_seed_of_numpy_draws_what_the_same_number_of_python_draws() -> None:
    (own,), (other,) = (he.data.synthetic_ood([(X, Y)], seed=seed)[0] for seed in (3, np.int64(3)))
    assert torch.equal(own, other)

"""Settings validate themselves: fields refuse what their annotations exclude, and bad combinations.

The values each setting accepts are listed independently in `attack/bad_settings.py`, which tries all that must be
refused.
"""

import dataclasses
import importlib
import math
import pkgutil
import types
from collections.abc import Iterator
from functools import partial
from operator import add
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch

import hydra_ensembles as he
from hydra_ensembles.arguments import Checked
from hydra_ensembles.data.batching import TrainTransform
from hydra_ensembles.demo import DemoSettings
from hydra_ensembles.errors import ConfigError
from unit.pipeline.build_cases import image_model, recipe, samples

for module in pkgutil.walk_packages(he.__path__, "hydra_ensembles."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)


def kinds(base: type = Checked) -> Iterator[type]:
    for one in base.__subclasses__():
        yield from (one, *kinds(one))


SIZES = {"width": 8, "layers": 2, "heads": 2, "head_dim": 4, "mlp_width": 8, "patch_size": (2, 2), "grid": (2, 2)}
TEXTS = {"vocabulary": 9, "positions": 9, "embedding_width": 8, "outputs": 3, "max_length": 8, "base": 10.0}
NEEDED: dict[str, Any] = {**SIZES, **TEXTS, "size": (8, 8), "model": "m", "output": "o", "id": "i", "ood": ("o",)}
NEEDED |= {"scores": ("knn",), "samples": 9}
GOOD = {he.Recipe: {"learning_rate": 0.1, "steps": 10}, he.HydraConfig: {"prune": 4}}
KINDS = {f"{one.__module__}.{one.__name__}": one for one in kinds()}


def good(kind: Any) -> dict[str, Any]:
    """Valid settings: fields without defaults, and the data an evaluation needs."""
    bare = [one.name for one in dataclasses.fields(kind) if one.default is one.default_factory or one.name == "id"]
    return {name: NEEDED[name] for name in bare} | GOOD.get(kind, {})


def wrong(hint: Any) -> Iterator[Any]:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        accepted, step = inner[1], partial(add, 1) if inner[0] is int else lambda x: math.nextafter(x, math.inf)
        yield -step(-accepted.least) if accepted.above is None else accepted.above
        yield step(accepted.most) if accepted.below is None else accepted.below  # infinity where unbounded
        yield from wrong(inner[0])
    elif origin in (Union, types.UnionType):
        yield from wrong(inner[0]) if len(inner) == 2 and inner[1] is types.NoneType else ()
    else:
        others: dict[Any, tuple[Any, ...]] = {int: (1.5, "3", True), float: ("2", True, math.nan), bool: ("no", 1)}
        yield from ("nonsense",) if origin is Literal else others.get(hint, ())


@pytest.mark.parametrize("name", KINDS)
def test_values_beyond_what_is_annotated_are_refused(name: str) -> None:
    kind = KINDS[name]
    usual = good(kind)
    kind(**usual)
    for field, hint in get_type_hints(kind, include_extras=True).items():
        for value in wrong(hint) if field in {one.name for one in dataclasses.fields(kind) if one.init} else ():
            with pytest.raises(ConfigError, match=field):
                kind(**{**usual, field: value})


WHOLE = recipe(train_groups=("stem", "attention", "mlp", "norms", "readout"))


@pytest.mark.parametrize(
    ("kind", "changes", "token"),
    [
        (he.Recipe, {"warmup": 10}, "warmup"),  # all of the steps
        (he.Recipe, {"epochs": 2}, "epochs"),  # in addition to steps
        (he.Recipe, {"grid": (0.1,)}, "grid"),  # in addition to a learning rate
        (he.Recipe, {"train_groups": ("mlp", "mlp")}, "train_groups"),
        (he.Recipe, {"learning_rate": None, "grid": (0.1, 0.1)}, "grid"),
        (he.Recipe, {"learning_rate": None, "grid": ("0.1",)}, "grid"),
        (he.Recipe, {"train_groups": ("mlp",), "reinit_classifier": "zeros"}, "reinit_classifier"),
        (he.Recipe, {"rand_augment": {"operations": 2, "magnitude": 31}}, "magnitude"),
        (he.HydraConfig, {"pool": 4}, "pool"),  # equal to the number of pruned heads
        (he.HydraConfig, {"recipe": WHOLE}, "stem"),
        (he.HydraConfig, {"strategy": "branches", "prune": 2, "training": "together"}, "branches"),
        (he.HydraConfig, {"strategy": "branches", "prune": None}, "training"),
        (he.HydraConfig, {"whole": True, "members": 1}, "members"),
        (he.HydraConfig, {"average_trunk": True}, "average_trunk"),
        (he.HydraConfig, {"average_trunk": True, "training": "together"}, "average_trunk"),
        (he.HydraConfig, {"average_trunk": True, "training": "apart", "shared_layers": 0}, "average_trunk"),
        (DemoSettings, {"shared_layers": 6}, "last_blocks"),
        *((DemoSettings, {name: 0}, name) for name in ("epochs", "limit", "draws")),
        (DemoSettings, {"share": 1}, "share"),
        (he.ImagePreprocessing, {"mean": (0.0, 0.0)}, "mean"),
        (TrainTransform, {"crop_scale": (0.9, 0.5)}, "crop_scale"),
        (TrainTransform, {"flip_probability": 1.5}, "flip_probability"),
        (TrainTransform, {"std": (1, 0, 1)}, "std"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(kind: Any, changes: dict[str, Any], token: str) -> None:
    with pytest.raises(ConfigError, match=token):
        kind(**{**good(kind), **changes})


def test_settings_of_another_kind_and_numbers_of_numpy() -> None:
    images, labels = samples(6, seed=9)
    with pytest.raises(ConfigError, match="TextPreprocessing"):
        image_model().with_metadata(preprocessing=he.TextPreprocessing(8))
    ranking = he.HeadRanking(((0, 0),), (1.0,), "m", "acc")
    with pytest.raises(ConfigError, match="count"):
        he.heads.overlap(ranking, ranking, count=0)
    (own,), (other,) = (he.data.synthetic_ood([(images, labels)], seed=seed)[0] for seed in (3, np.int64(3)))
    assert torch.equal(own, other)

"""Plain mistakes in every argument of every public function: an error of ours, or an answer, never a raw exception.

The table is made, not written: each function has a call that works, and each of its arguments is replaced in turn by
every value of a common list, whatever its annotation says.
"""

import inspect
import math
import warnings
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import checkpoint_models
import hydra_ensembles as he
from hydra_ensembles import metrics
from hydra_ensembles.data.dataset import ImageDataset, split, subset
from hydra_ensembles.data.loading import load
from hydra_ensembles.errors import ConfigError, HydraError
from hydra_ensembles.evaluation.evaluate import evaluate_logits
from hydra_ensembles.model.config import EncoderConfig, PatchStemConfig, ReadoutConfig, output_width
from hydra_ensembles.model.cost import measure_costs
from hydra_ensembles.model.metadata import Calibration
from sample_evaluations import costs, evaluation
from unit.pipeline import build_cases as cases
from unit.training.training_cases import tiny_dual
from zero_shot_models import word_tokenizer


class Unreadable:
    """An object that nothing can be made of."""


PLAIN = int | float | str | tuple | None  # kinds of defaults that are values
X, Y = cases.samples(6, seed=9)
VALUES: dict[str, Callable[[], Any]] = {  # made anew for every call: generators are used up
    "None": lambda: None,
    "object": Unreadable,
    "True": lambda: True,
    "0": lambda: 0,
    "-1": lambda: -1,
    "1.5": lambda: 1.5,
    "NaN": lambda: float("nan"),
    "1j": lambda: 1j,
    "text": lambda: "nonsense",
    "half a character": lambda: "\ud800",
    "null character": lambda: "a\0b",
    "bytes": lambda: b"abc",
    "folder": lambda: Path("folder"),
    "file": lambda: Path("file"),
    "under a file": lambda: Path("file/within"),
    "empty list": list,
    "empty dict": dict,
    "list of None": lambda: [None],
    "list of text": lambda: ["a", "b"],
    "list of lists": lambda: [[0, 0], [0]],
    "dict of None": lambda: {"near": None},
    "dict of dict": lambda: {"near": {"x": None}},
    "wrong keys": lambda: {"pixels": X, "label": Y},
    "set": lambda: {1, 2},
    "type": lambda: int,
    "function": lambda: lambda *_: None,
    "array": lambda: np.zeros((2, 3)),
    "object array": lambda: np.array([object()], dtype=object),
    "scalar tensor": lambda: torch.tensor(1.0),
    "empty tensor": lambda: torch.empty(0),
    "complex tensor": lambda: torch.zeros(2, 3, dtype=torch.complex64),
    "NaN tensor": lambda: torch.full((2, 3), float("nan")),
    "device": lambda: torch.device("meta"),
    "dtype": lambda: torch.int8,
    "module": lambda: torch.nn.Linear(2, 2),
    "used generator": lambda: iter(()),
}
BATCHES: dict[str, Callable[[], Any]] = {  # what may go wrong within batches
    "inputs alone": lambda: [(X,), X],
    "no samples": lambda: [(X[:0], Y[:0])],
    "no samples after some": lambda: [(X, Y), (X[:0], Y[:0])],
    "one sample": lambda: [(X[:1], Y[:1])],
    "one class": lambda: [(X, torch.zeros_like(Y))],
    "complex labels": lambda: [(X, Y.to(torch.complex64))],
    "complex list": lambda: [(X, [1j] * 6)],
    "bool labels": lambda: [(X, Y > 0)],
    "float labels": lambda: [(X, Y.float())],
    "labels too large": lambda: [(X, Y + 100)],
    "negative labels": lambda: [(X, Y - 100)],
    "labels of other length": lambda: [(X, Y[:3])],
    "labels in a column": lambda: [(X, Y[:, None])],
    "labels as text": lambda: [(X, "abcdef")],
    "labels as objects": lambda: [(X, [object()] * 6)],
    "labels nested unevenly": lambda: [(X, [[1], [1, 2]])],
    "labels beyond 64 bits": lambda: [(X, [10**30] * 6)],
    "label is a number": lambda: [(X, 3)],
    "NaN inputs": lambda: [(X * float("nan"), Y)],
    "three parts": lambda: [(X, Y, Y)],
    "a dict without inputs": lambda: [{"labels": Y}],
    "a scalar as inputs": lambda: [(torch.tensor(1.0), Y)],
    "scalars in a dict": lambda: [{"pixel_values": torch.tensor(1.0), "labels": Y}],
    "arrays": lambda: [(X.numpy(), Y.numpy())],
    "a generator": lambda: ((X, Y) for _ in range(3)),
}
OWN = {"ensemble = type", "ensemble = module"}  # of `evaluate`: what the user's own model raises passes through
DATA = {"train", "pairs", "batches", "id", "ood", "validation", "id_batches", "ood_batches", "id_data"}


def data(seed: int = 1, shift: float = 0.0) -> list[Any]:
    return cases.batches(8, seed=seed, shift=shift)


@cache
def dual() -> he.DualEncoder:
    """Two small towers; the text tower reads strings."""
    text = checkpoint_models.ensemble(checkpoint_models.text())
    towers = checkpoint_models.ensemble(checkpoint_models.single()), text.with_metadata(preprocessing=word_tokenizer())
    return he.DualEncoder(*towers, he.Projections.fresh(*(output_width(one.config) for one in towers), 4)).eval()


def entered(**given: Any) -> None:
    with he.masked(**given):
        pass


BASELINES, MODEL, DUAL = he.baselines, cases.image_model(), tiny_dual()
PRUNED, RECIPE, SCORES = he.prune(MODEL, [(0, 1)]), cases.recipe(steps=1), torch.arange(6.0)
LABELLED: dict[str, Any] = {"probs": torch.full((6, 3), 1 / 3), "labels": Y}
MEMBERS = {"member_probs": LABELLED["probs"][None]}
OOD = {"id_scores": SCORES, "ood_scores": SCORES + 1}
RISK = {"scores": SCORES, "errors": Y > 0}
CLASSES = {"class_names": ["red", "green"], "templates": ["a {label}"]}
ZERO_SHOT = he.zero_shot(DUAL, **CLASSES)
UNTRAINED = he.HydraConfig(prune=1, members=2, strategy="random", familiarity=None)
TRAINED = he.HydraConfig(prune=1, members=1, method="naive", recipe=RECIPE)
RANKING = he.HeadRanking(((0, 0),), (1.0,), "m", "acc")
WIDTHS = {"width": 8, "layers": 2, "heads": 2, "head_dim": 4, "mlp_width": 8}
METHODS: dict[str, Any] = {  # small settings of the baselines that train
    "batch_ensemble": BASELINES.BatchEnsemble(members=2),
    "lora_ensemble": BASELINES.LoRA(members=1, rank=1),
    "mimo": BASELINES.MIMO(members=2, batch_repeat=1),
    "oba": BASELINES.OBA(steps=1, batches=1),
    "packed_ensemble": BASELINES.Packed(members=1, alpha=1.0),
}
SETTINGS: dict[type, dict[str, Any]] = {  # what has no default
    **{one: {} for one in (he.HydraConfig, Calibration, ReadoutConfig)},
    **{getattr(BASELINES, one): {} for one in ("BatchEnsemble", "BayesVLM", "LoRA", "Laplace", "MIMO", "NegLabel")},
    **{getattr(BASELINES, one): {} for one in ("OBA", "Packed", "ViLU")},
    he.Recipe: {"learning_rate": 0.1, "steps": 1},
    he.HeadRanking: {"heads": [(0, 0)], "scores": [1.0], "method": "m", "score": "acc", "provenance": {}},
    he.ImagePreprocessing: {"size": (8, 8)},
    he.TextPreprocessing: {"max_length": 8},
    EncoderConfig: WIDTHS,
    PatchStemConfig: {"patch_size": (2, 2), "grid": (2, 2)},
    ImageDataset: {"source": [1, 2], "labels": [0, 1], "class_names": ("a", "b")},
}
Call = tuple[Callable[..., Any], Callable[[], dict[str, Any]]]  # a function, and arguments that it takes
CALLS: dict[str, Call] = {  # of a partial function, what is given is looked at; of others also what has a default
    **{kind.__name__: (kind, lambda given=given: given) for kind, given in SETTINGS.items()},
    "build": (
        he.build,
        lambda: {"model": MODEL, "config": UNTRAINED, "id": data(2)},
    ),
    "build, trained": (
        partial(he.build, MODEL, TRAINED, id=data(2), validation=data(4), progress=False),
        lambda: {"train": data(1), "ood": data(3, 1.5)},
    ),
    "calibrate": (he.calibrate, lambda: {"ensemble": MODEL, "validation": data(), "share": 0.9}),
    "compare": (he.compare, lambda: {"evaluations": [evaluation()], "costs": costs(), "columns": ()}),
    "convert": (he.convert, lambda: {"model": torch.nn.Linear(2, 2)}),
    "atlas": (
        he.atlas,
        lambda: {"ensemble": MODEL, "id_data": data(1), "ood": {"far": data(2, 1.5)}, "inputs": 1, "layers": [0]},
    ),
    "evaluate": (
        he.evaluate,
        lambda: {"ensemble": MODEL, "id_data": data(1), "ood": {"far": data(2, 1.5)}, "shift": {"s": data(3)}},
    ),
    "evaluate_logits": (
        evaluate_logits,
        lambda: {
            "id_logits": torch.randn(2, 6, 3),
            "labels": Y,
            "ood": {"x": torch.randn(2, 5, 3)},
            "shift": {"s": (torch.randn(2, 6, 3), Y)},
        },
    ),
    "extract_circuit": (
        he.extract_circuit,
        lambda: {
            "ensemble": MODEL,
            "id_batches": data(1),
            "ood_batches": data(2, 1.5),
            "score": "avg",
            "budget": 1,
            "method": "exact",
            "layers": [0],
        },
    ),
    "extract_circuit of towers": (
        partial(he.extract_circuit, dual(), data(1), score="acc", budget=1, progress=False),
        lambda: {"towers": ("image",), **CLASSES},
    ),
    "finetune": (
        he.finetune,
        lambda: {"member": MODEL, "train": data(1), "recipe": RECIPE, "validation": data(2), "checkpoint_every": 1},
    ),
    "fit_calibration": (he.fit_calibration, lambda: {"member_logits": torch.randn(2, 6, 3), "labels": Y}),
    "fuse": (he.fuse, lambda: {"members": [MODEL, PRUNED], "norms": "mean", "readout": "mean"}),
    **{
        method: (
            partial(getattr(BASELINES, method), validation=data(2), progress=False),
            lambda small=small: {"model": MODEL, "train": data(1), "recipe": RECIPE, "settings": small},
        )
        for method, small in METHODS.items()
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
    "masked": (entered, lambda: {"ensemble": MODEL, "heads": [(0, 0)], "member": None}),
    "mc_dropout": (he.mc_dropout, lambda: {"ensemble": MODEL, "p": 0.1, "passes": 2}),
    "prune": (he.prune, lambda: {"ensemble": MODEL, "heads": [(0, 0)]}),
    "taylor": (he.taylor, lambda: {"ensemble": MODEL, "batches": data(), "budget": 3, "calibration_batches": 1}),
    "neg_label": (
        partial(BASELINES.neg_label, ZERO_SHOT),
        lambda: {
            "words": ["cat", "dog", "bus"],
            "templates": None,
            "settings": BASELINES.NegLabel(share=1.0, groups=1),
        },
    ),
    "vilu": (
        partial(BASELINES.vilu, ZERO_SHOT, progress=False, validation=None),
        lambda: {
            "train": [(X, Y % 2)],
            "recipe": BASELINES.ViLU.recipe(epochs=1),
            "settings": BASELINES.ViLU(hidden=(4,)),
        },
    ),
    "write_atlas": (he.write_atlas, lambda: {"path": "atlas.html", "atlas": small_atlas()}),
    "write_report": (he.write_report, lambda: {"path": "report.html", "evaluations": []}),
    "HeadRanking.load": (he.HeadRanking.load, lambda: {"path": "missing.json"}),
    "HeadRanking.save": (RANKING.save, lambda: {"path": "saved.json"}),
    "Evaluation.load": (he.Evaluation.load, lambda: {"path": "missing.json"}),
    "Evaluation.save": (evaluation().save, lambda: {"path": "saved.json"}),
    "load": (load, lambda: {"name_or_path": "folder"}),
    "subset": (subset, lambda: {"dataset": ImageDataset([1, 2], [0, 1]), "n": 1, "seed": 0}),
    "split": (split, lambda: {"dataset": ImageDataset([1, 2], [0, 1]), "fractions": 0.5, "seed": 0}),
    "measure_costs": (measure_costs, lambda: {"models": {"m": MODEL}, "inputs": X, "repeats": 1, "warmup": 0}),
    "zero_shot": (he.zero_shot, lambda: {"dual": dual(), **CLASSES}),
    "fit_familiarity": (
        he.fit_familiarity,
        lambda: {"ensemble": MODEL, "id_batches": data(), "score": "knn", "neighbours": 1, "stored": 10},
    ),
    "soup": (he.soup, lambda: {"models": [MODEL]}),
    "optimize": (
        partial(MODEL.optimize),
        lambda: {"plans": ["batched"], "compiled_shapes": 1, "graphs": None, "dtype": None},
    ),
    "from_pretrained": (he.Ensemble.from_pretrained, lambda: {"source": "folder"}),
    "save_pretrained": (MODEL.save_pretrained, lambda: {"folder": "saved"}),
    "member": (MODEL.member, lambda: {"index": 0}),
    "with_metadata": (
        MODEL.with_metadata,
        lambda: {"labels": (), "preprocessing": None, "calibration": None, "history": (), "metrics": {}, "source": ""},
    ),
    "Prediction": (he.Prediction.from_logits, lambda: {"member_logits": torch.randn(2, 6, 3), "temperature": 1.0}),
    "Prediction.concat": (he.Prediction.concat, lambda: {"predictions": [MODEL.predict(X)]}),
    "Recipe.preset": (he.Recipe.preset, lambda: {"name": "sst2"}),
    "bootstrap_ood": (metrics.bootstrap_ood, lambda: {"metric": "auroc", **OOD, "resamples": 2}),
    "fit_sets": (metrics.fit_sets, lambda: {**LABELLED, "share": 0.9}),
    **{
        name: (getattr(metrics, name), lambda given=given: given)
        for given, names in (
            (LABELLED, "accuracy brier nll top_label ece adaptive_ece"),
            (OOD, "auroc aupr fpr95 discordance roc_curve"),
            (RISK, "aurc risk_coverage risk_at_coverage"),
            (MEMBERS, "mutual_information disagreement"),
        )
        for name in names.split()
    },
    "conformal_threshold": (metrics.conformal_threshold, lambda: {"scores": SCORES, "share": 0.9}),
    "p_values": (metrics.p_values, lambda: {"reference": SCORES, "scores": SCORES}),
}


@cache
def small_atlas() -> he.Atlas:
    return he.atlas(MODEL, data(1), layers=[0], inputs=0, progress=False)


def arguments(name: str) -> dict[str, Any]:
    """Of a call that works: what the table gives, and the defaults of everything else."""
    function, make = CALLS[name]
    known = {} if isinstance(function, partial) else inspect.signature(function).parameters
    usual = {key: one.default for key, one in known.items() if isinstance(one.default, PLAIN)}
    return usual | ({"progress": False} if "progress" in known else {}) | make()


def mistakes(name: str, every: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Every nth wrong call of a function, other values for each argument: what is wrong about it, and the call."""
    function, _ = CALLS[name]
    for place, argument in enumerate(arguments(name)):
        values = VALUES | BATCHES if argument in DATA else VALUES
        for title, make in islice(values.items(), place % every, None, every):
            yield f"{argument} = {title}", lambda a=argument, m=make: function(**{**arguments(name), a: m()})


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CALLS)
def test_every_mistake_is_answered_or_refused_in_our_words(name: str, every: int, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)  # some values are names of files, and may be written
    Path("folder").mkdir()
    Path("file").touch()
    raw = []
    for title, call in mistakes(name, every):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                call()
        except HydraError:
            pass
        except Exception as error:
            if name == "evaluate" and title in OWN:
                continue
            raw.append(f"{title}: {error!r}")
    assert not raw, "\n".join(raw)


@pytest.mark.parametrize(
    ("call", "given", "token"),
    [  # taken in silence by earlier versions
        (MODEL.with_metadata, {"calibration": 1.5}, "calibration"),
        (MODEL.with_metadata, {"metrics": 2}, "metrics"),
        (MODEL.with_metadata, {"labels": ["a"]}, "1 labels"),
        (MODEL.with_metadata, {"preprocessing": he.TextPreprocessing(8)}, "TextPreprocessing"),
        (MODEL.optimize, {"compiled_shapes": True}, "compiled_shapes"),
        (metrics.bootstrap_ood, {"metric": "auroc", **OOD, "seed": None}, "seed"),
        (he.taylor, {"ensemble": MODEL, "batches": [], "budget": 3, "seed": 2**70}, "seed"),
        (he.search, {"model": MODEL, "id": [], "ood": [], "cost": 0.9}, "cost of search"),
        (he.evaluate, {"ensemble": MODEL, "id_data": [], "batch_size": 0}, "of at least 1"),
        (he.finetune, {"member": MODEL, "train": [], "recipe": RECIPE, "index": -1}, "index"),
        (he.heads.overlap, {"first": RANKING, "second": RANKING, "count": 0}, "count"),
        (
            he.tune_text,
            {"dual": dual().member(0), "train": [], "recipe": RECIPE, "projection_rate": math.inf},
            "projection_rate",
        ),
    ],
)
def test_settings_of_another_kind_are_refused(call: Callable[..., Any], given: dict[str, Any], token: str) -> None:
    with pytest.raises(ConfigError, match=token):
        call(**given)


def test_a_seed_of_numpy_draws_what_the_same_number_of_python_draws() -> None:
    (own,), (other,) = (he.data.synthetic_ood([(X, Y)], seed=seed)[0] for seed in (3, np.int64(3)))
    assert torch.equal(own, other)

"""Every setting of every function and dataclass, given values that users may pass by mistake.

The values are the same for all settings. What a setting accepts is stated here, independent of the code that
checks it: those values must be accepted, and all others refused with a clear error.
"""

import atexit
import contextlib
import inspect
import math
import shutil
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import hydra_ensembles as he
from architectures import timm_model
from hydra_ensembles import baselines, data, metrics
from hydra_ensembles.calibrate import fit_calibration
from hydra_ensembles.model.config import EncoderConfig, PatchStemConfig, ReadoutConfig, TextStemConfig
from hydra_ensembles.model.cost import measure_costs
from hydra_ensembles.model.metadata import Calibration
from hydra_ensembles.training.recipe import RandAugment

from .bad_data import data_table
from .counting import Row, count
from .expected import Deed, drawn, outcome
from .jobs import evaluation
from .small import CLASSES, HEADS, LAYERS, NAMES, batches, dual, hydra, model, pairs, recipe, samples
from .values import LARGE, VALUES, Takes, anything, either, nothing, number, only, text, whole

CASES = 3000

Case = tuple[str, str]  # a setting, and the name of a value


def run(cases: int, seed: int) -> list[Row]:
    return [count("settings", check, drawn(all_cases(), cases, seed))]


@cache
def all_cases() -> list[Case]:
    """Every value for every setting; of those that read data and of which nothing is said, every bad set, too."""
    return [
        (name, value)
        for name, (_, takes, without) in settings().items()
        for value in (VALUES if takes is not anything or not name.endswith(DATA) else VALUES | SETS)
        if value not in without
    ]


def check(case: Case) -> str:
    name, value = case
    call, takes, _ = settings()[name]
    made = (VALUES | SETS)[value]()
    if must_refuse(case):
        return outcome(Deed(lambda: call(made)))
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):  # some values are names of files
        Path("folder").mkdir()
        Path("file").touch()
        return outcome(Deed(lambda: (call(made), True)[1], lambda: True, may_refuse=takes(made) is None))


def must_refuse(case: Case) -> bool:
    """Whether a setting must refuse a value."""
    return settings()[case[0]][1]((VALUES | SETS)[case[1]]()) is False


# --- the settings ----------------------------------------------------------------------------------------------

Setting = tuple[Callable[[Any], Any], Takes, tuple[str, ...]]  # a call, what it accepts, and values not to try
PLAIN = int | float | str | tuple | None  # types of defaults that are plain values
DEVICE = either(only(none=True), "")
FEW_HEADS = either(only((), {}), "", {})
SETS = {name: make for name, (expected, make) in data_table("image").items() if expected != "theirs"}
DATA = ("(train)", "(pairs)", "(batches)", "(id_batches)", "(id_data)")  # of functions that `bad_data` does not read
SHARE, RATE, SIZE = number(0, 1, above=True, below=False), either(number(0, 1), 1), whole(1, 1 << 24)


@cache
def settings() -> dict[str, Setting]:
    """All settings by name."""
    found: dict[str, Setting] = {}

    def of(call: Any, takes: dict[str, Takes], name: str = "", /, *, costly: str = "", **usual: Any) -> None:
        """Settings of a function or class: what each accepts, by names in a row, and valid values of the others.

        A large number for the one named `costly` would take too long. `evaluate` calls what can be called, and errors
        of that come through.
        """
        for names, one in takes.items():
            for argument in names.split():

                def given(value: Any, argument: str = argument) -> Any:
                    return call(**{**usual, argument: value})

                title = f"{name or call.__qualname__}({argument})"
                without = ("int", "a module") if title == "evaluate(ensemble)" else ("2**70",) * (argument == costly)
                found[title] = given, one, without

    for table in (_dataclasses, _baselines, _functions, _circuits, _models, _zero_shot, _metrics, _results, _others):
        table(of)
    return found


Of = Callable[..., None]


def _dataclasses(of: Of) -> None:
    of(
        he.Recipe,
        {
            "learning_rate classifier_rate": number(0, above=True),
            "weight_decay": number(0),
            "floor": number(0, 1, below=False),
            "momentum label_smoothing min_delta": number(0, 1),
            "dropout": number(0, 1, none=True),
            "clip_norm": number(0, above=True, none=True),
            "last_blocks patience evaluate_every batch_size": whole(1, none=True),
            "steps gradient_accumulation": whole(1),
            "seed": whole(0),
            "order_seed": whole(0, none=True),
            "optimizer schedule precision train_groups betas": nothing,
            "reinit_classifier": only(none=True),
            "rand_augment": either(only(none=True), {}),
            "no_decay_on_bias_and_norm": only(True),
            "ours": either(only(()), {}),
            "warmup": _warmup,
        },
        learning_rate=0.1,
        steps=4,
    )
    of(he.Recipe, {"grid": _or_tensor(_is_one)}, steps=4)
    of(he.Recipe, {"epochs": whole(1)}, learning_rate=0.1)
    of(he.Recipe.preset, {"name": nothing})
    of(RandAugment, {"operations": whole(1), "magnitude": whole(0, 30)})
    of(
        he.HydraConfig,
        {
            "members calibration_batches": whole(1),
            "strategy method ties taylor_scope stem mlp norms readout": nothing,
            "whole calibrate per_member_temperature": only(True),
            "training recipe": only(none=True),
            "max_accuracy_loss": number(0, 1, below=False, none=True),
            "pool": either(whole(2, none=True), 1),
            "shared_layers": whole(0, none=True),
            "accepted_share": SHARE,
            "seed": whole(0),
            "prune": whole(1, none=True),
        },
        prune=1,
    )
    temperature = _or_tensor(lambda v: None if _is_one(v) else False)
    known = {"temperature": temperature, "threshold": _threshold, "score": nothing, "accepted_share": SHARE}
    of(Calibration, known)
    images = {"size mean std interpolation resize_mode crop_corner": nothing, "crop_fraction": SHARE}
    of(he.ImagePreprocessing, images, size=(8, 8))
    of(
        he.TextPreprocessing,
        {
            "max_length": whole(1, 1 << 20),
            "pad_id": whole(0),
            "pad_token": text(empty=True),
            "pad_to_max attention_mask segments": only(True),
            "cleaning": nothing,
            "tokenizer": either(text(empty=True), "2", "nonsense"),
        },
        max_length=9,
    )
    encoder = {
        "width layers heads head_dim mlp_width": SIZE,
        "attention_dropout projection_dropout activation_dropout output_dropout": RATE,
        "activation norm": nothing,
        "drop_path": only(()),
    }
    of(EncoderConfig, encoder, width=8, layers=2, heads=2, head_dim=4, mlp_width=8)
    stem = {
        "patch_size grid resample": nothing,
        "channels": SIZE,
        "registers": whole(0, 1 << 24),
        "position_prefix": whole(0, 1),
        "dropout": RATE,
    }
    of(PatchStemConfig, stem, patch_size=(2, 2), grid=(2, 2))
    words = {
        "vocabulary positions embedding_width": SIZE,
        "segments": whole(0, 1 << 24),
        "positions_after": whole(0, 7, none=True),
    }
    of(TextStemConfig, words, vocabulary=9, positions=9, embedding_width=8)
    readout = {
        "pool norm": nothing,
        "num_classes map_heads": whole(0, 1 << 24),
        "hidden": only(none=True),
        "dropout": RATE,
        "eot_token": either(whole(0, none=True), -1),
    }
    of(ReadoutConfig, readout)


def _baselines(of: Of) -> None:
    some, several, positive, share = whole(1), whole(2), number(0, above=True), number(0, 1, below=False)
    few, scale = whole(1, none=True), number(0, above=True, none=True)
    of(baselines.LoRA, {"rank members": some, "alpha": scale, "training": nothing})
    of(baselines.BatchEnsemble, {"members": several, "deviation": number(0), "rate": positive, "last_layers": few})
    of(baselines.Packed, {"members": some, "alpha": positive, "heads": few})
    of(baselines.OBA, {"keep": number(0, 1), "steps": some})
    of(baselines.Laplace, {"members": some, "samples": few, "prior_precision": scale, "structure": nothing})
    of(baselines.MIMO, {"members": several, "rho": share, "batch_repeat": some})
    of(baselines.SWAG, {"points": either(several, 2), "rank": either(several, LARGE), "scale": number(0)})
    of(baselines.BayesVLM, {"pseudo_count": positive, "negatives": several})
    of(baselines.NegLabel, {"share": SHARE, "percentile": share, "groups": some})
    of(baselines.ViLU, {"batch_size": some})


def _warmup(value: Any) -> bool | None:
    return whole(0, 3)(value) if isinstance(value, int | np.integer | Tensor) else number(0, 1)(value)


def _or_tensor(takes: Takes) -> Takes:
    """A list of numbers, which may also be given as a tensor."""
    return lambda value: None if isinstance(value, Tensor) and value.tolist() == [1.0, 2.0] else takes(value)


def _is_one(value: Any) -> bool:
    return type(value) is list and value == [1]


def _threshold(value: Any) -> bool | None:
    if value is None:
        return True
    return None if isinstance(value, float) and value == math.inf else number(-math.inf)(value)


def _functions(of: Of) -> None:
    own, several = model(), hydra()
    data, foreign, train = batches(seed=2), batches(seed=3, shift=1.5), batches(count=8, seed=4)
    of(he.calibrate, {"ensemble score": nothing, "share": SHARE}, ensemble=several, validation=data)
    logits, labels = torch.randn(2, 12, CLASSES), torch.arange(12) % CLASSES
    fitted = {"member_logits labels score": nothing, "share": SHARE}
    of(fit_calibration, fitted, member_logits=logits, labels=labels)
    of(
        he.evaluate,
        {
            "ensemble score convention": nothing,
            "ood shift": either(only({}, none=True), ()),
            "bootstrap": either(whole(0), 1),
            "scores": either(only(()), "", {}, None),
            "num_workers": whole(0),
            "batch_size": whole(1),
            "device": DEVICE,
            "name": either(text(none=True, empty=True), "\ud800"),
            "calibration": either(only(none=True), 0, "", (), {}),
        },
        costly="bootstrap",
        ensemble=several,
        id_data=data,
        ood={"other": foreign},
        progress=False,
    )
    trained = {"member recipe": nothing, "index": whole(0), "checkpoint_every": whole(1), "device": DEVICE}
    of(he.finetune, trained, member=own, train=train, recipe=recipe(steps=1), progress=False)
    config = he.HydraConfig(prune=3, shared_layers=0, members=2, strategy="random", calibrate=False)
    built = {"model config": nothing, "device": DEVICE, "class_names": only(none=True)}
    of(he.build, built, model=own, config=config, progress=False)


def _circuits(of: Of) -> None:
    own, data, foreign = model(), batches(count=8, seed=2), batches(count=8, seed=3, shift=1.5)
    whole_budget = {"budget": whole(1, LAYERS * HEADS)}
    of(he.taylor, whole_budget, ensemble=own, batches=data, scope="global")
    of(he.taylor, {"layers": either(_is_one, None)}, ensemble=own, batches=data, budget=1)
    taylor = {
        "ensemble scope": nothing,
        "removed": FEW_HEADS,
        "seed": whole(0),
        "calibration_batches": whole(1, 2, none=True),
        "dtype": only(none=True),
        "device": DEVICE,
    }
    of(he.taylor, taylor, ensemble=own, batches=data, budget=LAYERS)
    circuit = whole_budget | {
        "ensemble score method ties": nothing,
        "max_accuracy_loss": number(0, 1, below=False, none=True),
        "layers": either(lambda v: v is None or _is_one(v), {1, 2}),
        "removed": FEW_HEADS,
        "dtype class_names": only(none=True),
        "device": DEVICE,
        "max_memory": either(whole(1, none=True), 1.5, 0.5),
        "batch_size screen_size": whole(1, none=True),
        "audit_steps seed": whole(0),
    }
    of(he.extract_circuit, circuit, ensemble=own, id_batches=data, ood_batches=foreign, budget=1, progress=False)
    of(he.taylor(own, data, budget=3, scope="global").first, {"count": whole(0, LAYERS * HEADS)})
    of(he.HeadRanking.load, {"path": nothing})
    of(he.HeadRanking, {"heads scores": FEW_HEADS}, heads=(), scores=(), method="m", score="s")


def _models(of: Of) -> None:
    own, several = model(), hydra()

    def masked(heads: Any, member: Any = None) -> None:
        with contextlib.closing(contextlib.ExitStack()) as stack:
            stack.enter_context(he.masked(several, heads, member))

    layer, index = whole(0, LAYERS - 1), whole(0, HEADS - 1)
    of(he.prune, {"ensemble": nothing, "heads": FEW_HEADS}, ensemble=own, heads=[(0, 1)])
    of(lambda head: he.prune(own, [head]), {"head": nothing}, "prune")
    of(
        lambda layer, index: he.prune(own, [(layer, index)]),
        {"layer": layer, "index": index},
        "prune",
        layer=1,
        index=1,
    )
    of(masked, {"heads": FEW_HEADS, "member": whole(0, 1, none=True)}, "masked", heads=[(2, 0)])
    of(lambda layer: masked([(layer, 1)]), {"layer": layer}, "masked")
    of(he.fuse, {"members stem mlp norms readout": nothing}, members=[own, he.prune(own, [(0, 1)])])
    of(lambda member: he.fuse([own, member]), {"member": nothing}, "fuse")
    of(he.soup, {"models": nothing})
    of(he.Ensemble.stack, {"members": nothing})
    of(several.member, {"index": either(whole(-2, 1), -1)})
    metadata = {
        "labels": only(()),
        "calibration": either(only(none=True), {}),
        "preprocessing": only(none=True),
        "history": either(only(()), ["a", "b"]),
        "metrics": either(only({}, {"a": 1}), {}),
        "unknown": nothing,
    }
    of(own.with_metadata, metadata)
    read = {"source": nothing, "device": DEVICE, "dtype": only(none=True)}
    of(he.Ensemble.from_pretrained, read, "Ensemble.from_pretrained", source=_saved())
    dropout = {"ensemble": nothing, "p": either(number(0, 1), 1), "passes": whole(1), "seed": whole(0)}
    of(he.mc_dropout, dropout, ensemble=own, p=0.1, passes=2)
    of(several.optimize, {"plans dtype": only(none=True), "shapes": whole(1)})
    bare = timm_model("vit_tiny_patch16_224", num_classes=0)
    processor = either(only(none=True), (), "", {}, 0)
    of(he.convert, {"model": nothing, "num_labels": either(whole(1, none=True), 1), "processor": processor}, model=bare)
    of(he.convert, {"labels": either(only(["a", "b"], none=True), (), "", {})}, model=bare, num_labels=2)


@cache
def _saved() -> Path:
    place = Path(tempfile.mkdtemp(prefix="attack-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    model().save_pretrained(place)
    return place


def _zero_shot(of: Of) -> None:
    towers, names = dual(), list(NAMES)
    classes = he.zero_shot(towers, names)
    words = either(nothing, ["a", "b"])  # letters that the tokenizer does not distinguish
    of(he.zero_shot, {"dual templates": nothing, "class_names": words}, dual=towers, class_names=names)
    anew = {"ensemble": nothing, "class_names": words, "templates": only(none=True)}
    of(he.retarget, anew, ensemble=classes, class_names=names)
    rows, usual = pairs(8), {"dual": towers, "recipe": recipe(steps=1), "progress": False}
    tuned = {
        "dual train recipe": nothing,
        "validation": only(none=True),
        "projection_rate": number(0, above=True),
        "checkpoint_every": whole(1),
    }
    of(he.tune_text, tuned, train=rows, **usual)

    def tune(**changes: Any) -> Any:
        train = [tuple(({"images": x, "texts": t, "labels": y} | changes).values()) for x, t, y in rows]
        return he.tune_text(train=train, **usual)

    of(tune, {"images texts": nothing, "labels": only(none=True)}, "tune_text")
    sets = {"id_batches": batches(count=8), "ood_batches": batches(count=8, shift=1.5)}
    circuit = partial(he.extract_circuit, towers, **sets, budget=1, progress=False)
    of(circuit, {"class_names": words, "towers": nothing}, "extract_circuit of two towers", class_names=names[:CLASSES])
    of(towers.member, {"index": either(only(0, -1), -1)})
    of(towers.encode_text, {"inputs": either(text(empty=None), ["a", "b"])})
    of(towers.encode_image, {"inputs": nothing})
    of(he.DualEncoder.from_pretrained, {"source": nothing}, "DualEncoder.from_pretrained")


def _metrics(of: Of) -> None:
    probs = torch.softmax(torch.randn(12, CLASSES, generator=torch.Generator().manual_seed(0)), -1)
    labels, scores, errors = torch.arange(12) % CLASSES, torch.rand(12), torch.arange(12) % 2 == 0
    for metric in (metrics.accuracy, metrics.brier, metrics.nll, metrics.ece, metrics.adaptive_ece, metrics.top_label):
        of(metric, {"probs labels": nothing}, probs=probs, labels=labels)
    for metric in (metrics.ece, metrics.adaptive_ece):
        of(metric, {"bins": whole(1)}, costly="bins", probs=probs, labels=labels)
    for metric in (metrics.mutual_information, metrics.disagreement):
        of(metric, {"member_probs": nothing})
    detecting = {"id_scores ood_scores": lambda v: isinstance(v, Tensor) and v.shape == (2,)}
    for metric in (metrics.auroc, metrics.aupr, metrics.fpr95):
        of(metric, {**detecting, "convention": nothing}, id_scores=scores, ood_scores=scores)
    for metric in (metrics.roc_curve, metrics.discordance):
        of(metric, detecting, id_scores=scores, ood_scores=scores)
    for metric in (metrics.aurc, metrics.risk_coverage, metrics.risk_at_coverage):
        of(metric, {"scores errors": nothing}, scores=scores, errors=errors)
    of(metrics.risk_at_coverage, {"coverage": SHARE}, scores=scores, errors=errors)
    of(
        metrics.bootstrap_ood,
        {
            "metric": nothing,
            "resamples": either(whole(1), 1),
            "level": either(number(0, 1, above=True), 1),
            "seed": either(whole(0), 1),
        },
        costly="resamples",
        metric="auroc",
        id_scores=scores,
        ood_scores=scores + 1,
        resamples=8,
    )
    logits, positive = torch.randn(2, 6, CLASSES), number(0, above=True, none=True)

    def temperatures(value: Any) -> bool | None:
        return None if isinstance(value, Tensor) and value.numel() == 2 else positive(value)

    made = {"member_logits score": nothing, "temperature": either(temperatures, LARGE), "threshold": _threshold}
    of(he.Prediction.from_logits, {**made, "class_names": only(none=True)}, member_logits=logits)
    of(he.Prediction.from_logits(logits).score, {"name": only(none=True)})
    of(he.Prediction.concat, {"predictions": nothing})


def _results(of: Of) -> None:
    one, other = evaluation(1, "A"), evaluation(1, "B")
    compared = {"evaluations": nothing, "costs columns": either(only((), {}, none=True), "", {})}
    of(he.compare, compared, evaluations=[one, other])
    of(lambda evaluation: he.compare([one, evaluation]), {"evaluation": nothing}, "compare")
    of(lambda named: he.compare({"A": one, "B": named}), {"named": nothing}, "compare")
    shown = {"evaluations": nothing, "focus": either(only(none=True), "", ()), "baseline": only(none=True)}
    of(he.write_report, {**shown, "title": text(none=True)}, path=_saved() / "r.html", evaluations=[one, other])
    of(he.Evaluation.load, {"path": nothing})


def _others(of: Of) -> None:
    """Functions of which only this is known: they answer, or refuse in our words."""

    def all_of(call: Any, name: str = "", /, **usual: Any) -> None:
        """All arguments with plain defaults and those given; of a `partial` only those."""
        known = {} if isinstance(call, partial) else inspect.signature(call).parameters
        plain = {key: one.default for key, one in known.items() if isinstance(one.default, PLAIN)}
        usual = plain | ({"progress": False} if "progress" in known else {}) | usual
        of(call, {" ".join(usual): anything}, name, **usual)

    own, towers, train = model(), dual(), batches(count=8)
    images, labels = samples("image", 6)
    for method, small in {
        "batch_ensemble": baselines.BatchEnsemble(members=2),
        "lora_ensemble": baselines.LoRA(members=1, rank=1),
        "mimo": baselines.MIMO(members=2, batch_repeat=1),
        "oba": baselines.OBA(steps=1, batches=1),
        "packed_ensemble": baselines.Packed(members=1, alpha=1.0),
    }.items():
        trains = partial(getattr(baselines, method), validation=batches(count=8, seed=2), progress=False)
        all_of(trains, method, model=own, train=train, recipe=recipe(steps=1), settings=small)
    several = partial(baselines.deep_ensemble, progress=False)
    all_of(several, "deep_ensemble", model=own, train=train, recipe=recipe(steps=1), members=1)
    all_of(baselines.laplace, model=own, batches=train, settings=baselines.Laplace(members=2))
    all_of(baselines.bayes_vlm, dual=towers, pairs=[(images, ["cat"] * 6)])
    all_of(baselines.published_bayes_vlm, dual=towers, folder="folder")
    classes = he.zero_shot(towers, ["red", "green"], ["a {label}"])
    negative, learned = baselines.NegLabel(share=1.0, groups=1), baselines.ViLU(hidden=(4,))
    told = partial(baselines.neg_label, classes)
    all_of(told, "neg_label", words=["cat", "dog", "bus"], templates=None, settings=negative)
    steps, doubting = baselines.ViLU.recipe(epochs=1), partial(baselines.vilu, classes, progress=False, validation=None)
    all_of(doubting, "vilu", train=[(images, labels % 2)], recipe=steps, settings=learned)
    all_of(he.fit_familiarity, ensemble=own, id_batches=train, score="knn", neighbours=1, stored=10)
    all_of(measure_costs, models={"m": own}, inputs=images, repeats=1, warmup=0)
    for saved in (he.HeadRanking(((0, 0),), (1.0,), "m", "acc"), evaluation()):
        of(saved.save, {"path": lambda v: None if isinstance(v, str | Path) and v != "" else False})
    all_of(own.save_pretrained, folder="saved")
    two = data.ImageDataset([1, 2], [0, 1], ("a", "b"))
    all_of(data.ImageDataset, source=[1, 2], labels=[0, 1], class_names=("a", "b"))
    all_of(data.load, name_or_path="folder")
    all_of(data.subset, dataset=two, n=1, seed=0)
    all_of(data.split, dataset=two, fractions=0.5, seed=0)
    all_of(data.batches, dataset=two, preprocess=len, batch_size=1)
    all_of(two.select, indices=[1, 0])
    all_of(two.relabel, new_labels={0: 1, 1: 0}, class_names=["b", "a"])
    all_of(two.with_classes, class_names=["b", "a"])
    for pick in (data.only_classes, data.without_classes):
        all_of(pick, dataset=two, classes=["a"])
    all_of(metrics.fit_sets, probs=torch.full((6, 3), 1 / 3), labels=labels, share=0.9)
    all_of(metrics.conformal_threshold, scores=torch.arange(6.0), share=0.9)
    all_of(metrics.p_values, reference=torch.arange(6.0), scores=torch.arange(6.0))

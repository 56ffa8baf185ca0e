"""Every setting of every function and dataclass, given values that users may pass by mistake.

The values are the same for all settings. What a setting accepts is stated here, independent of the code that
checks it: those values must be accepted, and all others refused with a clear error.
"""

import atexit
import contextlib
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
from hydra_ensembles import baselines, metrics
from hydra_ensembles.model.config import EncoderConfig, PatchStemConfig, ReadoutConfig, TextStemConfig
from hydra_ensembles.model.metadata import Calibration
from hydra_ensembles.training.recipe import RandAugment

from .counting import Row, count
from .expected import Deed, drawn, outcome
from .jobs import evaluation
from .small import CLASSES, HEADS, LAYERS, NAMES, batches, dual, hydra, model, pairs, recipe
from .values import LARGE, VALUES, Takes, either, nothing, number, only, text, whole

CASES = 3000

Case = tuple[str, str]  # a setting, and the name of a value


def run(cases: int, seed: int) -> list[Row]:
    return [count("settings", check, drawn(all_cases(), cases, seed))]


@cache
def all_cases() -> list[Case]:
    """Every value for every setting, except numbers that would only cause too much work."""
    return [(name, value) for name, one in settings().items() for value in VALUES if not (value == "2**70" and one[2])]


def check(case: Case) -> str:
    name, value = case
    call, takes, _ = settings()[name]
    made = VALUES[value]()
    if must_refuse(case):
        return outcome(Deed(lambda: call(made)))
    return outcome(Deed(lambda: (call(made), True)[1], lambda: True, may_refuse=takes(made) is None))


def must_refuse(case: Case) -> bool:
    """Whether a setting must refuse a value."""
    return settings()[case[0]][1](VALUES[case[1]]()) is False


# --- the settings ----------------------------------------------------------------------------------------------


@cache
def settings() -> dict[str, tuple[Callable[[Any], Any], Takes, bool]]:
    """Settings by name: a call with the value, what it accepts, and whether a large number would take too long."""
    found: dict[str, tuple[Callable[[Any], Any], Takes, bool]] = {}

    def add(name: str, call: Callable[[Any], Any], takes: Takes, costly: bool = False) -> None:
        found[name] = call, takes, costly

    for table in (_dataclasses, _baselines, _functions, _circuits, _models, _zero_shot, _metrics, _results):
        table(add)
    return found


Add = Callable[..., None]
DEVICE = either(only(none=True), "")
FEW_HEADS = either(only((), {}), "", {})


def _each(add: Add, form: str, call: Callable[..., Any], takes: dict[str, Takes], **usual: Any) -> None:
    """Several settings of one function or class; a key may hold several names that accept the same."""
    for names, one in takes.items():
        for name in names.split():
            add(form.format(name), lambda value, name=name: call(**{**usual, name: value}), one)


def _dataclasses(add: Add) -> None:
    share, rate, size = number(0, 1, above=True, below=False), either(number(0, 1), 1), whole(1, 1 << 24)
    _each(
        add,
        "Recipe.{}",
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
    _each(add, "Recipe.{}", he.Recipe, {"grid": _or_tensor(_is_one)}, steps=4)
    _each(add, "Recipe.{}", he.Recipe, {"epochs": whole(1)}, learning_rate=0.1)
    add("Recipe.preset", he.Recipe.preset, nothing)
    _each(add, "RandAugment.{}", RandAugment, {"operations": whole(1), "magnitude": whole(0, 30)})
    hydra_config: dict[str, Takes] = {
        "members calibration_batches": whole(1),
        "strategy method ties taylor_scope stem mlp norms readout": nothing,
        "whole calibrate per_member_temperature": only(True),
        "training recipe": only(none=True),
        "max_accuracy_loss": number(0, 1, below=False, none=True),
        "pool": either(whole(2, none=True), 1),
        "shared_layers": whole(0, none=True),
        "accepted_share": share,
        "seed": whole(0),
        "prune": whole(1, none=True),
    }
    _each(add, "HydraConfig.{}", he.HydraConfig, hydra_config, prune=1)
    calibration: dict[str, Takes] = {"temperature": _or_tensor(lambda v: None if _is_one(v) else False)}
    calibration |= {"threshold": _threshold}
    _each(add, "Calibration.{}", Calibration, {**calibration, "score": nothing, "accepted_share": share})
    images: dict[str, Takes] = {"size mean std interpolation resize_mode crop_corner": nothing, "crop_fraction": share}
    _each(add, "ImagePreprocessing.{}", he.ImagePreprocessing, images, size=(8, 8))
    texts: dict[str, Takes] = {
        "max_length": whole(1, 1 << 20),
        "pad_id": whole(0),
        "pad_token": text(empty=True),
        "pad_to_max attention_mask segments": only(True),
        "cleaning": nothing,
        "tokenizer": either(text(empty=True), "2", "nonsense"),
    }
    _each(add, "TextPreprocessing.{}", he.TextPreprocessing, texts, max_length=9)
    encoder: dict[str, Takes] = {
        "width layers heads head_dim mlp_width": size,
        "attention_dropout projection_dropout activation_dropout output_dropout": rate,
        "activation norm": nothing,
        "drop_path": only(()),
    }
    _each(add, "EncoderConfig.{}", EncoderConfig, encoder, width=8, layers=2, heads=2, head_dim=4, mlp_width=8)
    stem: dict[str, Takes] = {
        "patch_size grid resample": nothing,
        "channels": size,
        "registers": whole(0, 1 << 24),
        "position_prefix": whole(0, 1),
        "dropout": rate,
    }
    _each(add, "PatchStemConfig.{}", PatchStemConfig, stem, patch_size=(2, 2), grid=(2, 2))
    words: dict[str, Takes] = {
        "vocabulary positions embedding_width": size,
        "segments": whole(0, 1 << 24),
        "positions_after": whole(0, 7, none=True),
    }
    _each(add, "TextStemConfig.{}", TextStemConfig, words, vocabulary=9, positions=9, embedding_width=8)
    readout: dict[str, Takes] = {
        "pool norm": nothing,
        "num_classes map_heads": whole(0, 1 << 24),
        "hidden": only(none=True),
        "dropout": rate,
        "eot_token": either(whole(0, none=True), -1),
    }
    _each(add, "ReadoutConfig.{}", ReadoutConfig, readout)


def _baselines(add: Add) -> None:
    some, several, positive, share = whole(1), whole(2), number(0, above=True), number(0, 1, below=False)
    few, scale = whole(1, none=True), number(0, above=True, none=True)
    known: dict[Any, dict[str, Takes]] = {
        baselines.LoRA: {"rank members": some, "alpha": scale, "training": nothing},
        baselines.BatchEnsemble: {"members": several, "deviation": number(0), "rate": positive, "last_layers": few},
        baselines.Packed: {"members": some, "alpha": positive, "heads": few},
        baselines.OBA: {"keep": number(0, 1), "steps": some},
        baselines.Laplace: {"members": some, "samples": few, "prior_precision": scale, "structure": nothing},
        baselines.MIMO: {"members": several, "rho": share, "batch_repeat": some},
        baselines.SWAG: {"points": either(several, 2), "rank": either(several, LARGE), "scale": number(0)},
        baselines.BayesVLM: {"pseudo_count": positive, "negatives": several},
        baselines.NegLabel: {"share": number(0, 1, above=True, below=False), "percentile": share, "groups": some},
        baselines.ViLU: {"batch_size": some},
    }
    for kind, takes in known.items():
        _each(add, f"{kind.__name__}.{{}}", kind, takes)


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


def _functions(add: Add) -> None:
    own, several = model(), hydra()
    data, foreign, train = batches(seed=2), batches(seed=3, shift=1.5), batches(count=8, seed=4)
    quiet: dict[str, Any] = {"progress": False}
    share = number(0, 1, above=True, below=False)
    add("calibrate(ensemble)", lambda v: he.calibrate(v, data), nothing)
    _each(add, "calibrate({})", partial(he.calibrate, several, data), {"share": share, "score": nothing})
    logits, labels = torch.randn(2, 12, CLASSES), torch.arange(12) % CLASSES
    fitted: dict[str, Takes] = {"member_logits labels score": nothing, "share": share}
    _each(add, "fit_calibration({})", he.fit_calibration, fitted, member_logits=logits, labels=labels)
    evaluate = partial(he.evaluate, several, data, {"other": foreign}, **quiet)
    sets = either(only({}, none=True), ())
    add("evaluate(ensemble)", lambda v: he.evaluate(v, data, **quiet), nothing)
    add("evaluate(ood)", lambda v: he.evaluate(several, data, v, **quiet), sets)
    add("evaluate(shift)", lambda v: he.evaluate(several, data, None, v, **quiet), sets)
    add("evaluate(bootstrap)", lambda v: evaluate(bootstrap=v), either(whole(0), 1), costly=True)
    evaluated: dict[str, Takes] = {
        "score convention": nothing,
        "scores": either(only(()), "", {}, None),
        "gallery num_workers": whole(0),
        "batch_size": whole(1),
        "device": DEVICE,
        "name": either(text(none=True, empty=True), "\ud800"),
        "calibration": either(only(none=True), 0, "", (), {}),
    }
    _each(add, "evaluate({})", evaluate, evaluated)
    add("finetune(member)", lambda v: he.finetune(v, train, recipe(steps=1), **quiet), nothing)
    add("finetune(recipe)", lambda v: he.finetune(own, train, v, **quiet), nothing)
    trained: dict[str, Takes] = {"index": whole(0), "checkpoint_every": whole(1), "device": DEVICE}
    _each(add, "finetune({})", partial(he.finetune, own, train, recipe(steps=1), **quiet), trained)
    config = he.HydraConfig(prune=3, shared_layers=0, members=2, strategy="random", calibrate=False)
    add("build(model)", lambda v: he.build(v, config, **quiet), nothing)
    add("build(config)", lambda v: he.build(own, v, id=data, **quiet), nothing)
    _each(add, "build({})", partial(he.build, own, config, **quiet), {"device": DEVICE, "class_names": only(none=True)})


def _circuits(add: Add) -> None:
    own, data, foreign = model(), batches(count=8, seed=2), batches(count=8, seed=3, shift=1.5)
    add("taylor(ensemble)", lambda v: he.taylor(v, data, budget=3), nothing)
    add("taylor(budget)", lambda v: he.taylor(own, data, budget=v, scope="global"), whole(1, LAYERS * HEADS))
    add("taylor(layers)", lambda v: he.taylor(own, data, layers=v, budget=1), either(_is_one, None))
    taylor: dict[str, Takes] = {
        "scope": nothing,
        "removed": FEW_HEADS,
        "seed": whole(0),
        "calibration_batches": whole(1, 2, none=True),
        "dtype": only(none=True),
        "device": DEVICE,
    }
    _each(add, "taylor({})", partial(he.taylor, own, data), taylor, budget=LAYERS)
    add("extract_circuit(ensemble)", lambda v: he.extract_circuit(v, data, foreign, budget=1, progress=False), nothing)
    circuit: dict[str, Takes] = {
        "budget": whole(1, LAYERS * HEADS),
        "score method ties": nothing,
        "max_accuracy_loss": number(0, 1, below=False, none=True),
        "layers": either(lambda v: v is None or _is_one(v), {1, 2}),
        "removed": FEW_HEADS,
        "dtype": only(none=True),
        "device": DEVICE,
        "max_memory": either(whole(1, none=True), 1.5, 0.5),
        "batch_size screen_size": whole(1, none=True),
        "audit_steps seed": whole(0),
        "class_names": only(none=True),
    }
    extract = partial(he.extract_circuit, own, data, foreign, progress=False)
    _each(add, "extract_circuit({})", extract, circuit, budget=1)
    ranking = he.taylor(own, data, budget=3, scope="global")
    add("HeadRanking.first", ranking.first, whole(0, LAYERS * HEADS))
    add("HeadRanking.load", he.HeadRanking.load, nothing)
    add("HeadRanking(heads)", lambda v: he.HeadRanking(v, (), "m", "s"), FEW_HEADS)
    add("HeadRanking(scores)", lambda v: he.HeadRanking((), v, "m", "s"), FEW_HEADS)


def _models(add: Add) -> None:
    own, several = model(), hydra()

    def masked(heads: Any, member: Any = None) -> None:
        with contextlib.closing(contextlib.ExitStack()) as stack:
            stack.enter_context(he.masked(several, heads, member))

    add("prune(ensemble)", lambda v: he.prune(v, [(0, 1)]), nothing)
    add("prune(heads)", lambda v: he.prune(own, v), FEW_HEADS)
    add("prune(head)", lambda v: he.prune(own, [v]), nothing)
    add("prune(layer)", lambda v: he.prune(own, [(v, 1)]), whole(0, LAYERS - 1))
    add("prune(index)", lambda v: he.prune(own, [(1, v)]), whole(0, HEADS - 1))
    add("masked(heads)", masked, FEW_HEADS)
    add("masked(layer)", lambda v: masked([(v, 1)]), whole(0, LAYERS - 1))
    add("masked(member)", lambda v: masked([(2, 0)], v), whole(0, 1, none=True))
    add("fuse(members)", he.fuse, nothing)
    add("fuse(member)", lambda v: he.fuse([own, v]), nothing)
    for name in ("stem", "mlp", "norms", "readout"):
        add(f"fuse({name})", lambda v, name=name: he.fuse([own, he.prune(own, [(0, 1)])], **{name: v}), nothing)
    add("soup(models)", he.soup, nothing)
    add("Ensemble.stack", he.Ensemble.stack, nothing)
    add("Ensemble.member", several.member, either(whole(-2, 1), -1))
    metadata: dict[str, Takes] = {
        "labels": only(()),
        "calibration": either(only(none=True), {}),
        "preprocessing": only(none=True),
        "history": either(only(()), ["a", "b"]),
        "metrics": either(only({}, {"a": 1}), {}),
        "unknown": nothing,
    }
    _each(add, "Ensemble.with_metadata({})", own.with_metadata, metadata)
    add("Ensemble.from_pretrained", he.Ensemble.from_pretrained, nothing)
    _each(add, "Ensemble.from_pretrained({})", _loaded, {"device": DEVICE, "dtype": only(none=True)})
    add("mc_dropout(ensemble)", lambda v: he.mc_dropout(v, 0.1, 2), nothing)
    dropout: dict[str, Takes] = {"p": either(number(0, 1), 1), "passes": whole(1), "seed": whole(0)}
    _each(add, "mc_dropout({})", partial(he.mc_dropout, own), dropout, p=0.1, passes=2)
    _each(add, "optimize({})", several.optimize, {"plans dtype": only(none=True), "compiled_shapes": whole(1)})
    add("convert(model)", he.convert, nothing)
    add("convert(num_labels)", lambda v: he.convert(_bare(), num_labels=v), either(whole(1, none=True), 1))
    names = either(only(["a", "b"], none=True), (), "", {})
    add("convert(labels)", lambda v: he.convert(_bare(), num_labels=2, labels=v), names)
    add("convert(processor)", lambda v: he.convert(_bare(), processor=v), either(only(none=True), (), "", {}, 0))


@cache
def _bare() -> Any:
    from architectures import timm_model

    return timm_model("vit_tiny_patch16_224", num_classes=0)


def _loaded(**settings: Any) -> he.Ensemble:
    return he.Ensemble.from_pretrained(_saved(), **settings)


@cache
def _saved() -> Path:
    place = Path(tempfile.mkdtemp(prefix="attack-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    model().save_pretrained(place)
    return place


def _zero_shot(add: Add) -> None:
    towers, names = dual(), list(NAMES)
    classes = he.zero_shot(towers, names)
    words = either(nothing, ["a", "b"])  # letters that the tokenizer does not distinguish
    add("zero_shot(dual)", lambda v: he.zero_shot(v, names), nothing)
    add("zero_shot(class_names)", lambda v: he.zero_shot(towers, v), words)
    add("zero_shot(templates)", lambda v: he.zero_shot(towers, names, v), nothing)
    add("retarget(ensemble)", lambda v: he.retarget(v, names), nothing)
    add("retarget(class_names)", lambda v: he.retarget(classes, v), words)
    add("retarget(templates)", lambda v: he.retarget(classes, names, v), only(none=True))
    given = pairs(8)

    def tune(train: Any = given, **settings: Any) -> Any:
        return he.tune_text(towers, train, recipe(steps=1), progress=False, **settings)

    add("tune_text(dual)", lambda v: he.tune_text(v, given, recipe(steps=1), progress=False), nothing)
    add("tune_text(train)", tune, nothing)
    add("tune_text(recipe)", lambda v: he.tune_text(towers, given, v, progress=False), nothing)
    tuned: dict[str, Takes] = {"validation": only(none=True), "projection_rate": number(0, above=True)}
    _each(add, "tune_text({})", tune, {**tuned, "checkpoint_every": whole(1)})
    add("tune_text, labels", lambda v: tune([(x, t, v) for x, t, _ in given]), only(none=True))
    add("tune_text, texts", lambda v: tune([(x, v, y) for x, _, y in given]), nothing)
    add("tune_text, images", lambda v: tune([(v, t, y) for _, t, y in given]), nothing)
    circuit = partial(
        he.extract_circuit, towers, batches(count=8), batches(count=8, shift=1.5), budget=1, progress=False
    )
    add("extract_circuit(class_names of a dual encoder)", lambda v: circuit(class_names=v), words)
    add("extract_circuit(towers)", lambda v: circuit(class_names=names[:CLASSES], towers=v), nothing)
    add("DualEncoder.member", towers.member, either(only(0, -1), -1))
    add("DualEncoder.encode_text", towers.encode_text, either(text(empty=None), ["a", "b"]))
    add("DualEncoder.encode_image", towers.encode_image, nothing)
    add("DualEncoder.from_pretrained", he.DualEncoder.from_pretrained, nothing)


def _metrics(add: Add) -> None:
    probs = torch.softmax(torch.randn(12, CLASSES, generator=torch.Generator().manual_seed(0)), -1)
    labels, scores, errors = torch.arange(12) % CLASSES, torch.rand(12), torch.arange(12) % 2 == 0
    for name in ("accuracy", "brier", "nll", "ece", "adaptive_ece", "top_label"):
        function = getattr(metrics, name)
        add(f"{name}(probs)", lambda v, f=function: f(v, labels), nothing)
        add(f"{name}(labels)", lambda v, f=function: f(probs, v), nothing)
    for name in ("mutual_information", "disagreement"):
        add(f"{name}(member_probs)", getattr(metrics, name), nothing)
    for name in ("auroc", "aupr", "fpr95", "roc_curve", "discordance"):
        function = getattr(metrics, name)
        add(f"{name}(id_scores)", lambda v, f=function: f(v, scores), lambda v: isinstance(v, Tensor) and v.ndim == 1)
        add(f"{name}(ood_scores)", lambda v, f=function: f(scores, v), lambda v: isinstance(v, Tensor) and v.ndim == 1)
    for name in ("auroc", "aupr", "fpr95"):
        add(f"{name}(convention)", lambda v, name=name: getattr(metrics, name)(scores, scores, v), nothing)
    for name in ("aurc", "risk_coverage", "risk_at_coverage"):
        function = getattr(metrics, name)
        add(f"{name}(scores)", lambda v, f=function: f(v, errors), nothing)
        add(f"{name}(errors)", lambda v, f=function: f(scores, v), nothing)
    for name in ("ece", "adaptive_ece"):
        add(f"{name}(bins)", lambda v, name=name: getattr(metrics, name)(probs, labels, bins=v), whole(1), costly=True)
    coverage = number(0, 1, above=True, below=False)
    add("risk_at_coverage(coverage)", lambda v: metrics.risk_at_coverage(scores, errors, v), coverage)
    resampled = partial(metrics.bootstrap_ood, "auroc", scores, scores + 1)
    add("bootstrap_ood(resamples)", lambda v: resampled(resamples=v), either(whole(1), 1), costly=True)
    chance: dict[str, Takes] = {"level": either(number(0, 1, above=True), 1), "seed": either(whole(0), 1)}
    _each(add, "bootstrap_ood({})", resampled, chance, resamples=8)
    add("bootstrap_ood(metric)", lambda v: metrics.bootstrap_ood(v, scores, scores, resamples=8), nothing)
    logits = torch.randn(2, 6, CLASSES)
    made = partial(he.Prediction.from_logits, logits)
    add("Prediction.from_logits", he.Prediction.from_logits, nothing)
    positive = number(0, above=True, none=True)
    each = lambda v: None if isinstance(v, Tensor) and v.numel() == 2 else positive(v)  # noqa: E731
    settings: dict[str, Takes] = {"temperature": either(each, LARGE), "threshold": _threshold, "score": nothing}
    _each(add, "Prediction({})", made, {**settings, "class_names": only(none=True)})
    add("Prediction.score", lambda v: made().score(v), only(none=True))
    add("Prediction.concat", he.Prediction.concat, nothing)


def _results(add: Add) -> None:
    runs = [evaluation(1, "A"), evaluation(1, "B")]
    add("compare(evaluations)", he.compare, nothing)
    add("compare(evaluation)", lambda v: he.compare([runs[0], v]), nothing)
    add("compare(named)", lambda v: he.compare({"A": runs[0], "B": v}), nothing)
    _each(add, "compare({})", partial(he.compare, runs), {"costs columns": either(only((), {}, none=True), "", {})})
    page = _saved() / "r.html"
    add("write_report(evaluations)", lambda v: he.write_report(page, v), nothing)
    shown: dict[str, Takes] = {"focus": either(only(none=True), "", ()), "baseline": only(none=True)}
    _each(add, "write_report({})", partial(he.write_report, page, runs), {**shown, "title": text(none=True)})
    add("Evaluation.load", he.Evaluation.load, nothing)

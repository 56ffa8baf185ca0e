"""Every setting of every function and dataclass, given what somebody might give by mistake.

The values are the same for all settings. Which of them a setting takes is said beside it, apart from the code that
checks it: what it takes must be taken, and all else be refused with a clear error.
"""

import contextlib
import math
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import hydra_ensembles as he
from hydra_ensembles import metrics
from hydra_ensembles.model.config import EncoderConfig, PatchStemConfig, ReadoutConfig, TextStemConfig
from hydra_ensembles.model.metadata import Calibration
from hydra_ensembles.training.recipe import RandAugment

from .counting import Row, count
from .expected import Deed, drawn, outcome
from .jobs import evaluation
from .small import CLASSES, HEADS, LAYERS, NAMES, batches, dual, hydra, model, pairs, recipe
from .values import LARGE, VALUES, Takes, either, nothing, number, only, text, whole

CASES = 3000

Case = tuple[str, str]  # a setting, and a value by its name


def run(cases: int, seed: int) -> list[Row]:
    """One row."""
    return [count("settings", check, drawn(all_cases(), cases, seed))]


@cache
def all_cases() -> list[Case]:
    """Every value for every setting; numbers that only ask for too much work are left out."""
    return [(name, value) for name, one in settings().items() for value in VALUES if not (value == "2**70" and one[2])]


def check(case: Case) -> str:
    """Give a setting a value."""
    name, value = case
    call, takes, _ = settings()[name]
    made = VALUES[value]()
    expected = takes(made)
    if expected is False:
        return outcome(Deed(lambda: call(made)))
    return outcome(Deed(lambda: (call(made), True)[1], lambda: True, may_refuse=expected is None))


# --- the settings ----------------------------------------------------------------------------------------------


@cache
def settings() -> dict[str, tuple[Callable[[Any], Any], Takes, bool]]:
    """Settings by name: a call with the value, what it takes, and whether a large number would take too long."""
    found: dict[str, tuple[Callable[[Any], Any], Takes, bool]] = {}

    def add(name: str, call: Callable[[Any], Any], takes: Takes, costly: bool = False) -> None:
        found[name] = call, takes, costly

    for table in (_recipe, _hydra_config, _dataclasses, _functions, _circuits, _models, _zero_shot, _metrics, _results):
        table(add)
    return found


Add = Callable[..., None]


def _recipe(add: Add) -> None:
    def given(**settings: Any) -> he.Recipe:
        return he.Recipe(**{"learning_rate": 0.1, "steps": 4, **settings})

    numbers = {
        "classifier_rate": number(0, above=True),
        "momentum": number(0, 1),
        "weight_decay": number(0),
        "floor": number(0, 1, below=False),
        "label_smoothing": number(0, 1),
        "dropout": number(0, 1, none=True),
        "clip_norm": number(0, above=True, none=True),
        "min_delta": number(0, 1),
        "last_blocks": whole(1, none=True),
        "patience": whole(1, none=True),
        "evaluate_every": whole(1, none=True),
        "gradient_accumulation": whole(1),
        "seed": whole(0),
        "order_seed": whole(0, none=True),
        "batch_size": whole(1, none=True),
        "optimizer": nothing,
        "schedule": nothing,
        "precision": nothing,
        "reinit_classifier": only(none=True),
        "train_groups": nothing,
        "rand_augment": only(none=True),
        "no_decay_on_bias_and_norm": only(True),
        "ours": only(()),
        "betas": nothing,
        "warmup": _warmup,
    }
    for name, takes in numbers.items():
        tolerant = either(takes, {}) if name in ("rand_augment", "ours") else takes
        add(f"Recipe.{name}", lambda value, name=name: given(**{name: value}), tolerant)
    add("Recipe.learning_rate", lambda value: he.Recipe(learning_rate=value, steps=4), number(0, above=True))
    add("Recipe.grid", lambda value: he.Recipe(grid=value, steps=4), _is_one)
    add("Recipe.steps", lambda value: he.Recipe(learning_rate=0.1, steps=value), whole(1))
    add("Recipe.epochs", lambda value: he.Recipe(learning_rate=0.1, epochs=value), whole(1))
    add("Recipe.preset", he.Recipe.preset, nothing)
    add("RandAugment.operations", lambda value: RandAugment(operations=value), whole(1))
    add("RandAugment.magnitude", lambda value: RandAugment(magnitude=value), whole(0, 30))


def _warmup(value: Any) -> bool | None:
    return whole(0, 3)(value) if isinstance(value, int | np.integer | Tensor) else number(0, 1)(value)


def _is_one(value: Any) -> bool:
    return type(value) is list and value == [1]


def _hydra_config(add: Add) -> None:
    takes_of: dict[str, Takes] = {
        "members": whole(1),
        "strategy": nothing,
        "whole": only(True),
        "training": only(none=True),
        "method": nothing,
        "ties": nothing,
        "max_accuracy_loss": number(0, 1, below=False, none=True),
        "pool": either(whole(2, none=True), 1),
        "taylor_scope": nothing,
        "calibration_batches": whole(1),
        "recipe": only(none=True),
        "shared_layers": whole(0, none=True),
        "stem": nothing,
        "mlp": nothing,
        "norms": nothing,
        "readout": nothing,
        "calibrate": only(True),
        "per_member_temperature": only(True),
        "accepted_share": number(0, 1, above=True, below=False),
        "seed": whole(0),
    }
    for name, takes in takes_of.items():
        add(f"HydraConfig.{name}", lambda value, name=name: he.HydraConfig(**{"prune": 1, name: value}), takes)
    add("HydraConfig.prune", lambda value: he.HydraConfig(prune=value), whole(1, none=True))


def _dataclasses(add: Add) -> None:
    add(
        "Calibration.temperature", lambda value: Calibration(temperature=value), lambda v: None if _is_one(v) else False
    )
    add("Calibration.threshold", lambda value: Calibration(threshold=value), _threshold)
    add("Calibration.score", lambda value: Calibration(score=value), nothing)
    add("Calibration.accepted_share", lambda v: Calibration(accepted_share=v), number(0, 1, above=True, below=False))
    images: dict[str, Takes] = {
        "size": nothing,
        "mean": nothing,
        "std": nothing,
        "interpolation": nothing,
        "crop_fraction": number(0, 1, above=True, below=False),
        "resize_mode": nothing,
        "crop_corner": nothing,
    }
    for name, takes in images.items():
        add(
            f"ImagePreprocessing.{name}", lambda v, name=name: he.ImagePreprocessing(**{"size": (8, 8), name: v}), takes
        )
    texts: dict[str, Takes] = {
        "max_length": whole(1, 1 << 20),
        "pad_id": whole(0),
        "pad_token": text(empty=True),
        "pad_to_max": only(True),
        "attention_mask": only(True),
        "segments": only(True),
        "cleaning": nothing,
        "tokenizer": either(text(empty=True), "2", "nonsense"),
    }
    for name, takes in texts.items():
        add(f"TextPreprocessing.{name}", lambda v, name=name: he.TextPreprocessing(**{"max_length": 9, name: v}), takes)
    sizes = {"width": 8, "layers": 2, "heads": 2, "head_dim": 4, "mlp_width": 8}
    for name in sizes:
        add(f"EncoderConfig.{name}", lambda v, name=name: EncoderConfig(**{**sizes, name: v}), whole(1, 1 << 24))
    for name in ("attention_dropout", "projection_dropout", "activation_dropout", "output_dropout"):
        add(f"EncoderConfig.{name}", lambda v, name=name: EncoderConfig(**{**sizes, name: v}), either(number(0, 1), 1))
    for name in ("activation", "norm", "drop_path"):
        takes = only(()) if name == "drop_path" else nothing
        add(f"EncoderConfig.{name}", lambda v, name=name: EncoderConfig(**{**sizes, name: v}), takes)
    stem = {"patch_size": (2, 2), "grid": (2, 2)}
    for name, takes in {
        "patch_size": nothing,
        "grid": nothing,
        "channels": whole(1, 1 << 24),
        "registers": whole(0, 1 << 24),
        "position_prefix": whole(0, 1),
        "resample": nothing,
        "dropout": either(number(0, 1), 1),
    }.items():
        add(f"PatchStemConfig.{name}", lambda v, name=name: PatchStemConfig(**{**stem, name: v}), takes)
    words = {"vocabulary": 9, "positions": 9, "embedding_width": 8}
    for name, takes in {
        "vocabulary": whole(1, 1 << 24),
        "positions": whole(1, 1 << 24),
        "embedding_width": whole(1, 1 << 24),
        "segments": whole(0, 1 << 24),
        "positions_after": whole(0, 7, none=True),
    }.items():
        add(f"TextStemConfig.{name}", lambda v, name=name: TextStemConfig(**{**words, name: v}), takes)
    for name, takes in {
        "pool": nothing,
        "num_classes": whole(0, 1 << 24),
        "norm": nothing,
        "hidden": only(none=True),
        "dropout": either(number(0, 1), 1),
        "eot_token": either(whole(0, none=True), -1),
        "map_heads": whole(0, 1 << 24),
    }.items():
        add(f"ReadoutConfig.{name}", lambda v, name=name: ReadoutConfig(**{name: v}), takes)


def _threshold(value: Any) -> bool | None:
    if value is None:
        return True
    return None if isinstance(value, float) and value == math.inf else number(-math.inf)(value)


def _device(value: Any) -> bool | None:
    return value is None


def _dtype(value: Any) -> bool:
    return value is None


def _functions(add: Add) -> None:
    own, several = model(), hydra()
    data, foreign, train = batches(seed=2), batches(seed=3, shift=1.5), batches(count=8, seed=4)
    quiet: dict[str, Any] = {"progress": False}
    share = number(0, 1, above=True, below=False)
    add("calibrate(ensemble)", lambda v: he.calibrate(v, data), nothing)
    add("calibrate(share)", lambda v: he.calibrate(several, data, share=v), share)
    add("calibrate(score)", lambda v: he.calibrate(several, data, score=v), nothing)
    logits, labels = torch.randn(2, 12, CLASSES), torch.arange(12) % CLASSES
    add("fit_calibration(member_logits)", lambda v: he.fit_calibration(v, labels), nothing)
    add("fit_calibration(labels)", lambda v: he.fit_calibration(logits, v), nothing)
    add("fit_calibration(share)", lambda v: he.fit_calibration(logits, labels, share=v), share)
    add("fit_calibration(score)", lambda v: he.fit_calibration(logits, labels, score=v), nothing)

    def evaluate(**settings: Any) -> Any:
        return he.evaluate(several, data, {"other": foreign}, **quiet, **settings)

    add("evaluate(ensemble)", lambda v: he.evaluate(v, data, **quiet), nothing)
    add("evaluate(ood)", lambda v: he.evaluate(several, data, v, **quiet), either(only({}, none=True), ()))
    add("evaluate(shift)", lambda v: he.evaluate(several, data, None, v, **quiet), either(only({}, none=True), ()))
    add("evaluate(score)", lambda v: evaluate(score=v), nothing)
    add("evaluate(scores)", lambda v: evaluate(scores=v), either(only(()), "", {}, None))
    add("evaluate(convention)", lambda v: evaluate(convention=v), nothing)
    add("evaluate(bootstrap)", lambda v: evaluate(bootstrap=v), either(whole(0), 1), costly=True)
    add("evaluate(gallery)", lambda v: evaluate(gallery=v), whole(0))
    add("evaluate(batch_size)", lambda v: evaluate(batch_size=v), whole(1))
    add("evaluate(num_workers)", lambda v: evaluate(num_workers=v), whole(0))
    add("evaluate(device)", lambda v: evaluate(device=v), either(_device, ""))
    add("evaluate(name)", lambda v: evaluate(name=v), either(text(none=True, empty=True), "\ud800"))
    add("evaluate(calibration)", lambda v: evaluate(calibration=v), either(only(none=True), 0, "", (), {}))

    add("finetune(member)", lambda v: he.finetune(v, train, recipe(steps=1), **quiet), nothing)
    add("finetune(recipe)", lambda v: he.finetune(own, train, v, **quiet), nothing)
    add("finetune(index)", lambda v: he.finetune(own, train, recipe(steps=1), index=v, **quiet), whole(0))
    add(
        "finetune(checkpoint_every)",
        lambda v: he.finetune(own, train, recipe(steps=1), checkpoint_every=v, **quiet),
        whole(1),
    )
    add("finetune(device)", lambda v: he.finetune(own, train, recipe(steps=1), device=v, **quiet), either(_device, ""))
    config = he.HydraConfig(prune=3, members=2, strategy="random", calibrate=False)
    add("build(model)", lambda v: he.build(v, config, **quiet), nothing)
    add("build(config)", lambda v: he.build(own, v, id=data, **quiet), nothing)
    add("build(device)", lambda v: he.build(own, config, device=v, **quiet), either(_device, ""))
    add("build(class_names)", lambda v: he.build(own, config, class_names=v, **quiet), only(none=True))


def _circuits(add: Add) -> None:
    own, data, foreign = model(), batches(count=8, seed=2), batches(count=8, seed=3, shift=1.5)

    def taylor(**settings: Any) -> Any:
        return he.taylor(own, data, **{"budget": LAYERS, **settings})

    heads: Takes = either(only((), {}), "", {})
    add("taylor(ensemble)", lambda v: he.taylor(v, data, budget=3), nothing)
    add("taylor(budget)", lambda v: taylor(budget=v, scope="global"), whole(1, LAYERS * HEADS))
    add("taylor(scope)", lambda v: taylor(scope=v), nothing)
    add("taylor(layers)", lambda v: taylor(layers=v, budget=1), lambda v: None if v is None else _is_one(v))
    add("taylor(removed)", lambda v: taylor(removed=v), heads)
    add("taylor(seed)", lambda v: taylor(seed=v), whole(0))
    add("taylor(calibration_batches)", lambda v: taylor(calibration_batches=v), whole(1, 2, none=True))
    add("taylor(dtype)", lambda v: taylor(dtype=v), _dtype)
    add("taylor(device)", lambda v: taylor(device=v), either(_device, ""))

    def circuit(**settings: Any) -> Any:
        return he.extract_circuit(own, data, foreign, **{"budget": 1, "progress": False, **settings})

    add("extract_circuit(ensemble)", lambda v: he.extract_circuit(v, data, foreign, budget=1, progress=False), nothing)
    add("extract_circuit(budget)", lambda v: circuit(budget=v), whole(1, LAYERS * HEADS))
    add("extract_circuit(score)", lambda v: circuit(score=v), nothing)
    add("extract_circuit(method)", lambda v: circuit(method=v), nothing)
    add("extract_circuit(ties)", lambda v: circuit(ties=v), nothing)
    share = number(0, 1, below=False, none=True)
    add("extract_circuit(max_accuracy_loss)", lambda v: circuit(max_accuracy_loss=v), share)
    add("extract_circuit(layers)", lambda v: circuit(layers=v), lambda v: v is None or _is_one(v))
    add("extract_circuit(removed)", lambda v: circuit(removed=v), heads)
    add("extract_circuit(dtype)", lambda v: circuit(dtype=v), _dtype)
    add("extract_circuit(device)", lambda v: circuit(device=v), either(_device, ""))
    bytes_given = either(whole(1, none=True), 1.5, 0.5)
    add("extract_circuit(max_memory)", lambda v: circuit(max_memory=v), bytes_given)
    add("extract_circuit(batch_size)", lambda v: circuit(batch_size=v), whole(1, none=True))
    add("extract_circuit(screen_size)", lambda v: circuit(screen_size=v), whole(1, none=True))
    add("extract_circuit(audit_steps)", lambda v: circuit(audit_steps=v), whole(0))
    add("extract_circuit(seed)", lambda v: circuit(seed=v), whole(0))
    add("extract_circuit(class_names)", lambda v: circuit(class_names=v), only(none=True))
    ranking = he.taylor(own, data, budget=3, scope="global")
    add("HeadRanking.first", ranking.first, whole(0, LAYERS * HEADS))
    add("HeadRanking.load", he.HeadRanking.load, nothing)
    add("HeadRanking(heads)", lambda v: he.HeadRanking(v, (), "m", "s"), either(only((), {}), "", {}))
    add("HeadRanking(scores)", lambda v: he.HeadRanking((), v, "m", "s"), either(only((), {}), "", {}))


def _models(add: Add) -> None:
    own, several = model(), hydra()
    heads: Takes = either(only((), {}), "", {})

    def masked(heads: Any, member: Any = None) -> None:
        with contextlib.closing(contextlib.ExitStack()) as stack:
            stack.enter_context(he.masked(several, heads, member))

    add("prune(ensemble)", lambda v: he.prune(v, [(0, 1)]), nothing)
    add("prune(heads)", lambda v: he.prune(own, v), heads)
    add("prune(head)", lambda v: he.prune(own, [v]), nothing)
    add("prune(layer)", lambda v: he.prune(own, [(v, 1)]), whole(0, LAYERS - 1))
    add("prune(index)", lambda v: he.prune(own, [(1, v)]), whole(0, HEADS - 1))
    add("masked(heads)", masked, heads)
    add("masked(layer)", lambda v: masked([(v, 1)]), whole(0, LAYERS - 1))
    add("masked(member)", lambda v: masked([(2, 0)], v), whole(0, 1, none=True))
    add("fuse(members)", he.fuse, nothing)
    add("fuse(member)", lambda v: he.fuse([own, v]), nothing)
    for name in ("stem", "mlp", "norms", "readout"):
        add(f"fuse({name})", lambda v, name=name: he.fuse([own, he.prune(own, [(0, 1)])], **{name: v}), nothing)
    add("soup(models)", he.soup, nothing)
    add("Ensemble.stack", he.Ensemble.stack, nothing)
    add("Ensemble.member", several.member, either(whole(-2, 1), -1))
    add("Ensemble.with_metadata(labels)", lambda v: own.with_metadata(labels=v), only(()))
    add("Ensemble.with_metadata(calibration)", lambda v: own.with_metadata(calibration=v), either(only(none=True), {}))
    add("Ensemble.with_metadata(preprocessing)", lambda v: own.with_metadata(preprocessing=v), only(none=True))
    add("Ensemble.with_metadata(history)", lambda v: own.with_metadata(history=v), either(only(()), ["a", "b"]))
    add("Ensemble.with_metadata(metrics)", lambda v: own.with_metadata(metrics=v), either(only({}, {"a": 1}), {}))
    add("Ensemble.with_metadata(unknown)", lambda v: own.with_metadata(foo=v), nothing)
    add("Ensemble.from_pretrained", he.Ensemble.from_pretrained, nothing)
    add("Ensemble.from_pretrained(device)", lambda v: _loaded(device=v), either(_device, ""))
    add("Ensemble.from_pretrained(dtype)", lambda v: _loaded(dtype=v), _dtype)
    add("mc_dropout(ensemble)", lambda v: he.mc_dropout(v, 0.1, 2), nothing)
    add("mc_dropout(p)", lambda v: he.mc_dropout(own, v, 2), either(number(0, 1), 1))
    add("mc_dropout(passes)", lambda v: he.mc_dropout(own, 0.1, v), whole(1))
    add("mc_dropout(seed)", lambda v: he.mc_dropout(own, 0.1, 2, v), whole(0))
    add("optimize(plans)", lambda v: several.optimize(plans=v), only(none=True))
    add("optimize(dtype)", lambda v: several.optimize(dtype=v), _dtype)
    add("optimize(compiled_shapes)", lambda v: several.optimize(compiled_shapes=v), whole(1))
    add("convert(model)", he.convert, nothing)
    add("convert(num_labels)", lambda v: he.convert(_bare(), num_labels=v), either(whole(1, none=True), 1))
    add(
        "convert(labels)",
        lambda v: he.convert(_bare(), num_labels=2, labels=v),
        either(only(["a", "b"], none=True), (), "", {}),
    )
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
    model().save_pretrained(place)
    return place


def _zero_shot(add: Add) -> None:
    towers, names = dual(), list(NAMES)
    words = either(nothing, ["a", "b"])  # letters that the tokenizer does not tell apart
    add("zero_shot(dual)", lambda v: he.zero_shot(v, names), nothing)
    add("zero_shot(class_names)", lambda v: he.zero_shot(towers, v), words)
    add("zero_shot(templates)", lambda v: he.zero_shot(towers, names, v), nothing)
    add("retarget(ensemble)", lambda v: he.retarget(v, names), nothing)
    add("retarget(class_names)", lambda v: he.retarget(he.zero_shot(towers, names), v), words)
    add("retarget(templates)", lambda v: he.retarget(he.zero_shot(towers, names), names, v), only(none=True))
    given = pairs(8)

    def tune(train: Any = given, how: Any = None, **settings: Any) -> Any:
        return he.tune_text(towers, train, recipe(steps=1) if how is None else how, progress=False, **settings)

    add("tune_text(dual)", lambda v: he.tune_text(v, given, recipe(steps=1), progress=False), nothing)
    add("tune_text(train)", lambda v: he.tune_text(towers, v, recipe(steps=1), progress=False), nothing)
    add("tune_text(recipe)", lambda v: he.tune_text(towers, given, v, progress=False), nothing)
    add("tune_text(validation)", lambda v: tune(validation=v), only(none=True))
    add("tune_text(projection_rate)", lambda v: tune(projection_rate=v), number(0, above=True))
    add("tune_text(checkpoint_every)", lambda v: tune(checkpoint_every=v), whole(1))
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
    two_scores = either(nothing)
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
        add(f"{name}(scores)", lambda v, f=function: f(v, errors), two_scores)
        add(f"{name}(errors)", lambda v, f=function: f(scores, v), nothing)
    bins = whole(1)
    for name in ("ece", "adaptive_ece"):
        add(f"{name}(bins)", lambda v, name=name: getattr(metrics, name)(probs, labels, bins=v), bins, costly=True)
    coverage = number(0, 1, above=True, below=False)
    add("risk_at_coverage(coverage)", lambda v: metrics.risk_at_coverage(scores, errors, v), coverage)
    for name, takes in (("resamples", whole(1)), ("level", number(0, 1, above=True)), ("seed", whole(0))):
        add(
            f"bootstrap_ood({name})",
            lambda v, name=name: metrics.bootstrap_ood("auroc", scores, scores + 1, **{"resamples": 8, name: v}),
            either(takes, 1),
            costly=name == "resamples",
        )
    add("bootstrap_ood(metric)", lambda v: metrics.bootstrap_ood(v, scores, scores, resamples=8), nothing)
    logits = torch.randn(2, 6, CLASSES)
    made = partial(he.Prediction.from_logits, logits)
    add("Prediction.from_logits", he.Prediction.from_logits, nothing)
    positive = number(0, above=True, none=True)
    each = lambda v: None if isinstance(v, Tensor) and v.numel() == 2 else positive(v)  # noqa: E731
    add("Prediction(temperature)", lambda v: made(temperature=v), either(each, LARGE))
    add("Prediction(threshold)", lambda v: made(threshold=v), _threshold)
    add("Prediction(score)", lambda v: made(score=v), nothing)
    add("Prediction(class_names)", lambda v: made(class_names=v), only(none=True))
    add("Prediction.score", lambda v: made().score(v), only(none=True))
    add("Prediction.concat", he.Prediction.concat, nothing)


def _results(add: Add) -> None:
    runs = [evaluation(1, "A"), evaluation(1, "B")]
    add("compare(evaluations)", he.compare, nothing)
    add("compare(evaluation)", lambda v: he.compare([runs[0], v]), nothing)
    add("compare(named)", lambda v: he.compare({"A": runs[0], "B": v}), nothing)
    add("compare(costs)", lambda v: he.compare(runs, v), either(only((), {}, none=True), "", {}))
    add("compare(columns)", lambda v: he.compare(runs, columns=v), either(only((), {}), "", {}))
    add("write_report(evaluations)", lambda v: he.write_report(_saved() / "r.html", v), nothing)
    add(
        "write_report(focus)",
        lambda v: he.write_report(_saved() / "r.html", runs, focus=v),
        either(only(none=True), "", ()),
    )
    add("write_report(baseline)", lambda v: he.write_report(_saved() / "r.html", runs, baseline=v), only(none=True))
    add("write_report(title)", lambda v: he.write_report(_saved() / "r.html", runs, title=v), text(none=True))
    add("Evaluation.load", he.Evaluation.load, nothing)

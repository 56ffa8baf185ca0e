"""`hydra-ensembles info`: what is in a model."""

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Console

from ..model.clip import DualEncoder
from ..model.config import GROUPS, PatchStemConfig
from ..model.ensemble import Ensemble
from ..model.members import place_of
from ..schema import to_plain
from . import options
from .errors import one_line_errors
from .head_map import KEPT, PRUNED, head_map
from .models import load_model
from .settings import ModelSettings
from .yaml_file import read_pairs

SHOWN_LABELS = 12
EXAMPLES = """\b
Examples:
  hydra-ensembles info run
  hydra-ensembles info my-hydra --json
  hydra-ensembles info timm:vit_base_patch16_224 --random-weights
"""


@one_line_errors
def info(
    model: options.ModelArgument,
    as_json: Annotated[bool, typer.Option("--json", help="Everything as JSON.")] = False,
    weights: options.WeightsOption = None,
    num_classes: options.NumClassesOption = None,
    model_option: options.ModelOptionOption = None,
    random_weights: options.RandomWeightsOption = None,
) -> None:
    """Show architecture, members, parameters, heads kept, labels, preprocessing, calibration and origin of a model."""
    found = load_model(
        ModelSettings(
            model=model,
            weights=weights,
            num_classes=num_classes,
            model_options=read_pairs(model_option, "--model-option") or {},
            random_weights=bool(random_weights),
            device="cpu",
        )
    )
    towers = {"image": found.image, "text": found.text} if isinstance(found, DualEncoder) else {"": found}
    facts = {name: describe_ensemble(tower) for name, tower in towers.items()}
    if as_json:
        content = facts.get("", {"kind": "dual encoder", **facts})
        print(json.dumps(content, indent=1, ensure_ascii=False))
        return
    width = Console().width
    print("\n\n".join(_text(f"{model} ({name} tower)" if name else model, fact, width) for name, fact in facts.items()))


def describe_ensemble(ensemble: Ensemble) -> dict[str, Any]:
    """Everything worth knowing about an ensemble, as plain data."""
    config, metadata, description = ensemble.config, ensemble.metadata, ensemble.describe()
    groups = {
        group: {
            "parameters": sum(p.numel() for name, p in ensemble.named_parameters() if place_of(name)[0] == group),
            "shared": config.members > 1 and getattr(config.sharing, group),
        }
        for group in GROUPS
    }
    preprocessing = to_plain(metadata.preprocessing)
    if preprocessing is not None and "tokenizer" in preprocessing:
        preprocessing["tokenizer"] = bool(preprocessing["tokenizer"])
    return {
        "kind": ensemble.kind,
        "source": metadata.source,
        "members": ensemble.num_members,
        "layers": ensemble.num_layers,
        "heads_per_layer": ensemble.num_heads,
        "width": config.encoder.width,
        "mlp_width": config.encoder.mlp_width,
        "input": _input(ensemble),
        "classes": ensemble.num_classes,
        "labels": list(metadata.labels),
        "dtype": str(ensemble.dtype).removeprefix("torch."),
        "parameters": description.parameters,
        "multiply_adds": description.multiply_adds,
        "groups": groups,
        "trunk": config.trunk,
        "heads": to_plain(description.heads),
        "preprocessing": preprocessing,
        "calibration": to_plain(metadata.calibration),
        "metrics": dict(metadata.metrics),
        "history": list(metadata.history),
    }


def _input(ensemble: Ensemble) -> str:
    stem = ensemble.config.stem
    if isinstance(stem, PatchStemConfig):
        (height, width), (tall, wide) = stem.image_size, stem.patch_size
        return f"{height}x{width} pixels in {stem.channels} channels, patches of {tall}x{wide}"
    return f"up to {stem.max_tokens} tokens of a vocabulary of {stem.vocabulary:,}"


def _text(title: str, facts: Mapping[str, Any], width: int) -> str:
    heads: tuple[tuple[tuple[int, ...], ...], ...] = tuple(
        tuple(tuple(layer) for layer in member) for member in facts["heads"]
    )
    kept = sum(len(layer) for member in heads for layer in member)
    total = facts["members"] * facts["layers"] * facts["heads_per_layer"]
    lines = [
        title,
        _line("source", facts["source"] or "unknown"),
        _line("input", f"{facts['kind']}: {facts['input']}"),
        _line("members", str(facts["members"])),
        _line(
            "encoder",
            f"{facts['layers']} layers of {facts['heads_per_layer']} heads, width {facts['width']}, "
            f"MLP {facts['mlp_width']}, {facts['dtype']}",
        ),
        _line("classes", _labels(facts)),
        _line("parameters", f"{facts['parameters'] / 1e6:,.2f} M, {facts['multiply_adds'] / 1e9:,.2f} G multiply-adds"),
    ]
    for group, part in facts["groups"].items():
        stored = "" if facts["members"] == 1 else ", shared by all members" if part["shared"] else ", one per member"
        lines.append(_line(f"  {group}", f"{part['parameters'] / 1e6:,.2f} M{stored}"))
    if facts["trunk"]:
        lines.append(_line("trunk", f"the first {facts['trunk']} layers are common to all members and run once"))
    lines += [
        _line("preprocessing", _settings(facts["preprocessing"])),
        _line("calibration", _calibration(facts["calibration"])),
        *(_line("metric", f"{name} = {value:.4g}") for name, value in facts["metrics"].items()),
        *(_line("history" if not index else "", line) for index, line in enumerate(facts["history"])),
        "",
        f"heads kept: {kept} of {total} ({KEPT} kept, {PRUNED} pruned)",
        head_map(heads, facts["heads_per_layer"], width),
    ]
    return "\n".join(lines)


def _line(name: str, value: str) -> str:
    return f"  {name:<14} {value}"


def _labels(facts: Mapping[str, Any]) -> str:
    names, classes = facts["labels"], facts["classes"]
    if not classes:
        return "none, there is no classifier"
    if not names:
        return f"{classes}, without names"
    more = f" and {classes - SHOWN_LABELS} more" if classes > SHOWN_LABELS else ""
    return f"{classes}: {', '.join(names[:SHOWN_LABELS])}{more}"


def _settings(settings: Mapping[str, Any] | None) -> str:
    if settings is None:
        return "unknown: the model takes tensors only"
    return ", ".join(f"{name} {_value(value)}" for name, value in settings.items() if name != "kind")


def _value(value: Any) -> str:
    return "/".join(f"{item:.4g}" for item in value) if isinstance(value, list) else str(value)


def _calibration(calibration: Mapping[str, Any] | None) -> str:
    if calibration is None:
        return "none: predictions come without a verdict"
    threshold = calibration["threshold"]
    rule = "no threshold" if threshold is None else f"abstain where {calibration['score']} is above {threshold:.4g}"
    share = calibration["accepted_share"]
    return f"temperature {_value(calibration['temperature'])}; {rule} (accepts {share:.0%} of held-out data)"

"""`hydra-ensembles info` and `bench`: what is in a model, and what it costs."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ..errors import ConfigError
from ..model.clip import DualEncoder
from ..model.config import GROUPS, EnsembleConfig, PatchStemConfig, all_heads
from ..model.cost import Cost, measure_costs
from ..model.ensemble import Ensemble
from ..model.members import place_of
from ..report.compare import save_costs
from ..schema import to_plain
from .command import command
from .sources import ModelSettings, load_classifier, load_model

KEPT, PRUNED = "■", "·"
SHOWN = 12  # items of a list
SINGLE, DEEP, NONE = "single", "deep", "none"
TOKENS = 128  # length of a text, as far as the model takes so many


@command
def info(
    model: ModelSettings,
    as_json: Annotated[bool, typer.Option("--json", help="Everything as JSON.")] = False,
) -> None:
    """Show what is in a model, with a map of its heads.

    Examples:
      hydra-ensembles info run
      hydra-ensembles info my-hydra --json
      hydra-ensembles info timm:vit_base_patch16_224 --random-weights
    """
    found = load_model(model)
    facts: dict[str, Any]
    if isinstance(found, DualEncoder):
        facts = {"kind": "dual encoder", "image": _facts(found.image), "text": _facts(found.text)}
        shown = {f"{model.model} ({tower} tower)": facts[tower] for tower in ("image", "text")}
    else:
        facts = _facts(found)
        shown = {model.model: facts}
    if as_json:
        print(json.dumps(facts, indent=1, ensure_ascii=False))
    else:
        print("\n\n".join("\n".join(_lines(title, tower)) for title, tower in shown.items()))


def _facts(ensemble: Ensemble) -> dict[str, Any]:
    """Everything worth knowing about an ensemble, as plain data."""
    config, metadata, description = ensemble.config, ensemble.metadata, ensemble.describe()
    groups = {
        group: {
            "parameters": sum(p.numel() for name, p in ensemble.named_parameters() if place_of(name)[0] == group),
            "shared": config.members > 1 and getattr(config.sharing, group),
        }
        for group in GROUPS
    }
    preprocessing = to_plain(metadata.preprocessing) or {}
    if "tokenizer" in preprocessing:
        preprocessing["tokenizer"] = bool(preprocessing["tokenizer"])
    stem = config.stem
    if isinstance(stem, PatchStemConfig):
        (height, width), (tall, wide) = stem.image_size, stem.patch_size
        reads = f"{height}x{width} pixels in {stem.channels} channels, patches of {tall}x{wide}"
    else:
        reads = f"up to {stem.max_tokens} tokens of a vocabulary of {stem.vocabulary:,}"
    return {
        "kind": ensemble.kind,
        "source": metadata.source,
        "members": ensemble.num_members,
        "layers": ensemble.num_layers,
        "heads_per_layer": ensemble.num_heads,
        "width": config.encoder.width,
        "mlp_width": config.encoder.mlp_width,
        "input": reads,
        "classes": ensemble.num_classes,
        "labels": list(metadata.labels),
        "dtype": str(ensemble.dtype).removeprefix("torch."),
        "parameters": description.parameters,
        "multiply_adds": description.multiply_adds,
        "groups": groups,
        "trunk": config.trunk,
        "heads": to_plain(description.heads),
        "preprocessing": preprocessing or None,
        "calibration": to_plain(metadata.calibration),
        "metrics": dict(metadata.metrics),
        "history": list(metadata.history),
    }


def _lines(title: str, facts: Mapping[str, Any]) -> list[str]:
    """The facts in words, and the map of heads."""
    members, per_layer, calibration = facts["members"], facts["heads_per_layer"], facts["calibration"]
    classes = f"{facts['classes']}, without names" if facts["classes"] else "none, there is no classifier"
    rows = [
        ("source", facts["source"] or "unknown"),
        ("input", f"{facts['kind']}: {facts['input']}"),
        ("members", str(members)),
        ("encoder", f"{facts['layers']} layers of {per_layer} heads, width {facts['width']}, MLP {facts['mlp_width']}, "
                    f"{facts['dtype']}"),
        ("classes", f"{facts['classes']}: {_value(facts['labels'])}" if facts["labels"] else classes),
        ("parameters", f"{_millions(facts['parameters'], 2)} M, {facts['multiply_adds'] / 1e9:,.2f} G multiply-adds"),
    ]  # fmt: skip
    for group, part in facts["groups"].items():
        stored = "" if members == 1 else ", shared by all members" if part["shared"] else ", one per member"
        rows.append((f"  {group}", f"{_millions(part['parameters'], 2)} M{stored}"))
    if facts["trunk"]:
        rows.append(("trunk", f"the first {facts['trunk']} layers are common to all members and run once"))
    rows += [
        ("preprocessing", _value(facts["preprocessing"] or "unknown: the model takes tensors only")),
        ("calibration", _value(calibration or "none: predictions come without a verdict")),
        *(("metric", f"{name} = {value:.4g}") for name, value in facts["metrics"].items()),
        *(("" if index else "history", line) for index, line in enumerate(facts["history"])),
    ]
    kept = sum(len(layer) for member in facts["heads"] for layer in member)
    return [
        title,
        *(f"  {name:<14} {value}" for name, value in rows),
        "",
        f"heads kept: {kept} of {members * facts['layers'] * per_layer} ({KEPT} kept, {PRUNED} pruned)",
        head_map(facts["heads"], per_layer, Console().width),
    ]


def _value(value: Any) -> str:
    """Plain data in words; of a long list the first items."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_value(item)}" for name, item in value.items() if name != "kind")
    if isinstance(value, list):
        more = f" and {len(value) - SHOWN} more" if len(value) > SHOWN else ""
        between = ", " if all(isinstance(item, str) for item in value) else "/"
        return between.join(_value(item) for item in value[:SHOWN]) + more
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def head_map(heads: Sequence[Sequence[Sequence[int]]], per_layer: int, width: int = 100) -> str:
    """Which heads each member keeps, of `[member][layer]` indices: a row a layer, a block a member.

    Members that do not fit beside others in `width` characters go below them.
    """
    column = max(per_layer, len(f"member {len(heads) - 1}")) + 2
    beside = max(1, (width - 7) // column)
    blocks = []
    for start in range(0, len(heads), beside):
        members = range(start, min(start + beside, len(heads)))
        lines = ["layer  " + "".join(f"member {member}".ljust(column) for member in members)]
        for layer in range(len(heads[0])):
            kept = [heads[member][layer] for member in members]
            cells = ("".join(KEPT if head in one else PRUNED for head in range(per_layer)) for one in kept)
            lines.append(f"{layer:>5}  {''.join(cell.ljust(column) for cell in cells)}")
        blocks.append("\n".join(line.rstrip() for line in lines))
    return "\n\n".join(blocks)


@command
def bench(
    model: ModelSettings,
    batch: Annotated[list[str] | None, typer.Option("--batch", "-b", help="Batch sizes, as 1,8,32.")] = None,
    baseline: Annotated[
        list[str] | None, typer.Option(help="single, deep, none, or a model; single if not given.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="What the table calls the model.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each model.")] = 20,
    warmup: Annotated[int, typer.Option(min=0, help="Runs before the clock starts.")] = 3,
    tokens: Annotated[int, typer.Option(min=1, help="Length of the texts, as far as the model takes it.")] = TOKENS,
    optimize: Annotated[bool, typer.Option("--optimize", help="Measure the optimized ensemble, too.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the costs as JSON, too.")] = None,
) -> None:
    """Measure what a model costs, beside baselines.

    That is latency, throughput, parameters and memory. The baseline single is the same architecture with one member and
    all heads, deep as many such models as the ensemble has members. All take turns on the same random inputs; the ratio
    is to the first baseline. compare and report read the file that --output writes, and take its last batch size.

    Examples:
      hydra-ensembles bench run
      hydra-ensembles bench run --batch 1,8,32 --baseline single --baseline deep
      hydra-ensembles bench run --baseline timm:vit_base_patch16_224 --output evaluations/costs.json
    """
    sizes = _batch_sizes(batch or ["1,8"])
    ensemble = load_classifier(model)
    models = _baselines(ensemble, baseline or [SINGLE], model.device)
    title = name or model.own_name
    if title in models:
        raise ConfigError(f"the model and a baseline are both called {title!r}; give the model another name")
    models[title] = ensemble
    measured: dict[str, Callable[[Any], Any]] = dict(models)
    if optimize:
        measured[f"{title}, optimized"] = ensemble.optimize()
    costs: list[Cost] = []
    for size in sizes:
        costs += measure_costs(measured, _inputs(ensemble, size, tokens), repeats=repeats, warmup=warmup)
    Console().print(_cost_table(costs, models))
    if output is not None:
        save_costs(output, costs)
        print(f"wrote {output}")


def _batch_sizes(given: list[str]) -> list[int]:
    sizes = [part for text in given for part in text.replace(",", " ").split()]
    if not sizes or not all(size.isdecimal() and int(size) for size in sizes):
        raise ConfigError(f"batch takes whole numbers of at least 1, as 1,8,32; got {', '.join(given)}")
    return [int(size) for size in sizes]


def _baselines(ensemble: Ensemble, names: list[str], device: str) -> dict[str, Ensemble]:
    """Baselines by name, in the order given, on the device of the ensemble."""
    found: dict[str, Ensemble] = {}
    for name in names:
        if name in (SINGLE, DEEP):
            found[name] = _whole(ensemble, 1 if name == SINGLE else ensemble.num_members)
        elif name != NONE:
            other = load_classifier(ModelSettings(name, device=device))
            if (other.kind, _shape(other)) != (ensemble.kind, _shape(ensemble)):
                raise ConfigError(
                    f"baseline {name} takes {other.kind} inputs of {_shape(other)}, the model {ensemble.kind} inputs "
                    f"of {_shape(ensemble)}; only models for the same inputs compare"
                )
            found[Path(name).name] = other
    return found


def _whole(ensemble: Ensemble, members: int) -> Ensemble:
    """Fresh models of the same architecture with all heads; weights make no difference to what they cost."""
    config = ensemble.config
    with torch.random.fork_rng(), torch.device(ensemble.device):
        torch.manual_seed(0)
        heads = all_heads(config.encoder, members)
        made = Ensemble(EnsembleConfig(config.stem, config.encoder, config.readout, heads))
    return made.to(ensemble.dtype).eval()


def _shape(ensemble: Ensemble) -> tuple[int, ...]:
    stem = ensemble.config.stem
    return (stem.channels, *stem.image_size) if isinstance(stem, PatchStemConfig) else (stem.max_tokens,)


def _inputs(ensemble: Ensemble, size: int, tokens: int) -> Tensor:
    stem, generator = ensemble.config.stem, torch.Generator().manual_seed(0)
    if isinstance(stem, PatchStemConfig):
        images = torch.randn(size, *_shape(ensemble), generator=generator)  # [B, channels, H, W]
        return images.to(ensemble.device, ensemble.dtype)
    length = min(tokens, stem.max_tokens)
    return torch.randint(0, stem.vocabulary, (size, length), generator=generator).to(ensemble.device)  # [B, T]


def _cost_table(costs: list[Cost], models: Mapping[str, Ensemble]) -> Table:
    table = Table("model", title=f"on {costs[0].device}, medians of {costs[0].repeats} runs", title_justify="left")
    for heading in ("batch", "latency (ms)", "ratio", "inputs/s", "params (M)", "weights (MB)", "peak (MB)"):
        table.add_column(heading, justify="right")
    for index, cost in enumerate(costs):
        model = models.get(cost.name)
        stored = None if model is None else sum(parameter.nbytes for parameter in model.parameters())
        table.add_row(
            cost.name,
            str(cost.batch),
            f"{cost.latency_ms:.2f}",
            f"{cost.latency_ratio:.2f}×",
            f"{cost.batch / cost.latency_ms * 1e3:,.0f}",
            _millions(cost.parameters, 2),
            _millions(stored, 1),
            _millions(cost.peak_memory_bytes, 1),
            end_section=index + 1 < len(costs) and costs[index + 1].batch != cost.batch,
        )
    return table


def _millions(value: int | None, digits: int) -> str:
    return "–" if value is None else f"{value / 1e6:.{digits}f}"

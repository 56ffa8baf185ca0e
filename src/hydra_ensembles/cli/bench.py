"""`hydra-ensembles bench`: what a model costs, beside the single model and the Deep Ensemble of its architecture."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ..errors import ConfigError
from ..model.config import EnsembleConfig, PatchStemConfig, all_heads
from ..model.cost import Cost, measure_costs
from ..model.ensemble import Ensemble
from ..report.compare import save_costs
from . import options
from .errors import one_line_errors
from .models import load_classifier
from .settings import AUTOMATIC, ModelSettings
from .yaml_file import read_pairs

SINGLE, DEEP, NONE = "single", "deep", "none"
TOKENS = 128  # length of a text, as far as the model takes so many
EXAMPLES = """\b
Examples:
  hydra-ensembles bench run
  hydra-ensembles bench run --batch 1,8,32 --baseline single --baseline deep
  hydra-ensembles bench run --baseline timm:vit_base_patch16_224 --output evaluations/costs.json

The baseline single is the same architecture with one member and all heads, deep as many such models as the ensemble
has members. All take turns on the same random inputs; the ratio is to the first baseline. compare and report read the
file that --output writes, and take the last batch size from it.
"""


@one_line_errors
def bench(
    model: options.ModelArgument,
    batch: Annotated[
        list[str] | None, typer.Option("--batch", "-b", help="Batch sizes, as 1,8,32; 1 and 8 if not given.")
    ] = None,
    baseline: Annotated[
        list[str] | None, typer.Option("--baseline", help="single, deep, none, or a model; single if not given.")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="What the table calls the model.")] = None,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Timed runs of each model.")] = 20,
    warmup: Annotated[int, typer.Option("--warmup", min=0, help="Runs before the clock starts.")] = 3,
    tokens: Annotated[int | None, typer.Option("--tokens", min=1, help="Length of the texts.")] = None,
    optimize: Annotated[bool, typer.Option("--optimize", help="Measure the optimized ensemble, too.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the costs as JSON, too.")] = None,
    weights: options.WeightsOption = None,
    num_classes: options.NumClassesOption = None,
    model_option: options.ModelOptionOption = None,
    random_weights: options.RandomWeightsOption = None,
    device: options.DeviceOption = None,
) -> None:
    """Measure latency, throughput, parameters and memory of a model beside baselines."""
    settings = ModelSettings(
        model=model,
        weights=weights,
        num_classes=num_classes,
        model_options=read_pairs(model_option, "--model-option") or {},
        random_weights=bool(random_weights),
        device=device or AUTOMATIC,
    )
    sizes = _batch_sizes(batch or ["1,8"])
    ensemble = load_classifier(settings)
    models = _baselines(ensemble, baseline or [SINGLE], settings)
    title = name or Path(model.rstrip("/")).name
    if title in models:
        raise ConfigError(f"the model and a baseline are both called {title!r}; give --name")
    models[title] = ensemble
    measured: dict[str, Callable[[Any], Any]] = dict(models)
    if optimize:
        measured[f"{title}, optimized"] = ensemble.optimize()
    costs: list[Cost] = []
    for size in sizes:
        costs += measure_costs(measured, _inputs(ensemble, size, tokens), repeats=repeats, warmup=warmup)
    _print_costs(costs, models)
    if output is not None:
        save_costs(output, costs)
        print(f"wrote {output}")


def _batch_sizes(given: list[str]) -> list[int]:
    try:
        sizes = [int(size) for part in given for size in part.replace(",", " ").split()]
    except ValueError as error:
        raise ConfigError(f"--batch takes whole numbers, as 1,8,32; got {', '.join(given)}") from error
    if not sizes or min(sizes) < 1:
        raise ConfigError(f"--batch takes numbers of at least 1, as 1,8,32; got {', '.join(given)}")
    return sizes


def _baselines(ensemble: Ensemble, names: list[str], settings: ModelSettings) -> dict[str, Ensemble]:
    """Baselines by name, in the order given, on the device of the ensemble."""
    found: dict[str, Ensemble] = {}
    for name in names:
        if name == NONE:
            continue
        if name in (SINGLE, DEEP):
            found[name] = _whole(ensemble, 1 if name == SINGLE else ensemble.num_members)
            continue
        other = load_classifier(ModelSettings(model=name, device=settings.device))
        if (other.kind, _shape(other)) != (ensemble.kind, _shape(ensemble)):
            raise ConfigError(
                f"baseline {name} takes {other.kind} inputs of {_shape(other)}, the model {ensemble.kind} inputs of "
                f"{_shape(ensemble)}; only models for the same inputs compare"
            )
        found[Path(name).name] = other
    return found


def _whole(ensemble: Ensemble, members: int) -> Ensemble:
    """Fresh models of the same architecture with all heads; weights make no difference to what they cost."""
    config = ensemble.config
    heads = all_heads(config.encoder, members)
    with torch.random.fork_rng(), torch.device(ensemble.device):
        torch.manual_seed(0)
        made = Ensemble(EnsembleConfig(config.stem, config.encoder, config.readout, heads))
    return made.to(ensemble.dtype).eval()


def _shape(ensemble: Ensemble) -> tuple[int, ...]:
    stem = ensemble.config.stem
    return (stem.channels, *stem.image_size) if isinstance(stem, PatchStemConfig) else (stem.max_tokens,)


def _inputs(ensemble: Ensemble, size: int, tokens: int | None) -> Tensor:
    stem, generator = ensemble.config.stem, torch.Generator().manual_seed(0)
    if isinstance(stem, PatchStemConfig):
        images = torch.randn(size, *_shape(ensemble), generator=generator)  # [B, channels, H, W]
        return images.to(ensemble.device, ensemble.dtype)
    length = min(tokens or TOKENS, stem.max_tokens)
    return torch.randint(0, stem.vocabulary, (size, length), generator=generator).to(ensemble.device)  # [B, T]


def _print_costs(costs: list[Cost], models: dict[str, Ensemble]) -> None:
    table = Table(title=f"on {costs[0].device}, medians of {costs[0].repeats} runs", title_justify="left")
    table.add_column("model")
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
    Console().print(table)


def _millions(value: int | None, digits: int) -> str:
    return "–" if value is None else f"{value / 1e6:.{digits}f}"

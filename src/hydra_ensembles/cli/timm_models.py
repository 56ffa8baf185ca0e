"""Models of timm, with pretrained weights, weights from a file, or random ones."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from .._utils import require
from ..convert.convert import convert
from ..errors import CheckpointError, ConfigError, HydraError, MissingExtraError
from ..model.ensemble import Ensemble
from .nearest import did_you_mean
from .settings import ModelSettings

CLASSIFIERS = ("head.weight", "head.fc.weight")
RESERVED = {"pretrained", "checkpoint_path"}
RANDOM_SEED = 0  # random weights are the same whenever they are asked for


def timm_names() -> list[str]:
    """Every name that timm knows; none where it is not installed."""
    try:
        return list(require("timm", extra="timm").list_models())
    except MissingExtraError:
        return []


def is_timm_name(name: str) -> bool:
    """Whether timm knows a model of this name; a tag after a point is looked past."""
    return name.partition(".")[0] in timm_names()


def load_timm(name: str, settings: ModelSettings) -> Ensemble:
    """Make a timm model and convert it.

    Args:
        name: A name of timm; `hf-hub:` and `local-dir:` are timm's own prefixes.
        settings: Where the weights come from, and further arguments.

    Raises:
        HydraError: The name is not known, the weights do not fit or cannot be had, or the architecture is not
            supported.
    """
    timm = require("timm", extra="timm")
    if ":" not in name and not is_timm_name(name):
        raise CheckpointError(f"timm has no model {name!r}{did_you_mean(name, timm_names())}")
    options: dict[str, Any] = dict(settings.model_options)
    reserved = sorted(options.keys() & RESERVED)
    if reserved:
        raise ConfigError(f"--model-option {reserved[0]} cannot be set; use --weights or --random-weights")
    if settings.weights is None and not settings.random_weights:
        return _pretrained(timm, name, settings, options)
    state: dict[str, torch.Tensor] = {}
    if settings.weights is not None:
        state = _read_state(Path(settings.weights).expanduser())
    classes = settings.num_classes or next((len(state[key]) for key in CLASSIFIERS if key in state), None)
    with torch.random.fork_rng():
        torch.manual_seed(RANDOM_SEED)
        model = _create(timm, name, **{"num_classes": classes, **options})
    if settings.weights is not None:
        _fill(model, state, name, settings.weights)
    converted: Ensemble = convert(model)
    return converted


def _pretrained(timm: Any, name: str, settings: ModelSettings, options: dict[str, Any]) -> Ensemble:
    if settings.num_classes is not None:
        raise ConfigError(
            f"--num-classes {settings.num_classes} would put an untrained classifier on {name}; give the weights of "
            "your fine-tuned model with --weights, or --random-weights to try things out"
        )
    model = _create(timm, name, pretrained=True, **options)
    converted: Ensemble = convert(model)
    return converted


def _create(timm: Any, name: str, *, pretrained: bool = False, **options: Any) -> Any:
    try:
        return timm.create_model(name, pretrained=pretrained, **options).eval()
    except HydraError:
        raise
    except Exception as error:  # timm raises whatever its model, the hub client or the HTTP library does
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = f"{type(error).__name__}: {lines[0] if lines else 'no further details'}"
        hint = (
            "its pretrained weights may not exist or not be reachable: check the connection, or give --weights FILE"
            if pretrained
            else "check --model-option and --num-classes"
        )
        raise CheckpointError(f"timm could not make {name}: {reason}; {hint}") from error


def _read_state(path: Path) -> dict[str, torch.Tensor]:
    if path.suffix != ".safetensors":
        raise CheckpointError(
            f"--weights {path} is not a .safetensors file, and no other kind is read because others can run code; "
            "save the model with safetensors.torch.save_file(model.state_dict(), 'model.safetensors')"
        )
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a mapping
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"the weights {path} cannot be read: {error}") from error


def _fill(model: Any, state: dict[str, torch.Tensor], name: str, path: str) -> None:
    own = model.state_dict()
    missing, extra = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    shapes = [
        f"{key} is {list(state[key].shape)} in the file and {list(own[key].shape)} in the model"
        for key in sorted(own.keys() & state.keys())
        if own[key].shape != state[key].shape
    ]
    problems = [f"it lacks {missing[:3]}"] if missing else []
    problems += [f"{extra[:3]} are not of this model"] if extra else []
    problems += shapes[:2]
    if problems:
        raise CheckpointError(
            f"the weights {path} do not fit timm:{name}: {'; '.join(problems)}. Check the name, --num-classes and "
            "--model-option (img_size, patch_size, ...)"
        )
    model.load_state_dict(state)

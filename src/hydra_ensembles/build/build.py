"""From one model to a fused, calibrated ensemble: the whole chain, stage by stage, resumable at each."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .._version import __version__
from ..batches import Batches
from ..calibrate import calibrate
from ..convert import convert
from ..ensemble import Ensemble
from ..errors import ConfigError, DataError
from ..finetune import Recipe, finetune
from ..fuse import fuse
from ..heads import Head, HeadRanking, extract_circuit, taylor
from ..heads.fingerprint import data_fingerprint, model_fingerprint
from ..heads.members import CIRCUIT_ORDER, circuit_members, random_members, sampled_members, taylor_members
from ..prune import prune
from ..schema import to_plain
from .config import HydraConfig
from .halves import Batch, halves, read_all
from .run_folder import RunFolder


def build(
    model: nn.Module,
    config: HydraConfig,
    *,
    train: Batches | None = None,
    id: Batches | None = None,
    ood: Batches | None = None,
    validation: Batches | None = None,
    output: str | Path | None = None,
    device: torch.device | str | None = None,
    progress: bool = True,
) -> Ensemble:
    """Make a Hydra Ensemble: convert, rank heads, choose members, prune, fine-tune, fuse, calibrate.

    Each stage leaves its product in `output`; called again with the same arguments, a build that was stopped
    at any point goes on there and ends with the same ensemble. A folder of another build is refused.

    Args:
        model: A model that `convert` takes, or an `Ensemble` with one member.
        config: What to make.
        train: Labelled training batches, for fine-tuning and for Taylor rankings.
        id: Held-out labelled in-distribution batches. A half drawn by the seed ranks heads, the other half
            calibrates (and chooses between learning rates), unless `validation` is given.
        ood: Batches unlike the training data, for circuits. Use other data to report results.
        validation: Held-out labelled batches for calibration and for choosing in fine-tuning.
        output: Run folder.
        device: Where to compute; None stays where the model is.
        progress: Whether to show progress bars.

    Returns:
        The fused ensemble. In `output` it is saved as `ensemble/`, beside `summary.json`.
    """
    base = model if isinstance(model, Ensemble) else convert(model)
    if not isinstance(base, Ensemble):
        raise ConfigError("build takes a classifier; a dual encoder has to be made into one first")
    base = base.to(device) if device is not None else base
    data = _Data(config, train, id, ood, validation)
    _check(config, base, data)
    run = RunFolder(output, _identity(config, base, data))
    run.ensemble("base", lambda: base)

    heads = _choose(run, base, config, data, progress)
    tuned = _finetune(run, [prune(base, chosen) for chosen in heads], config, data, progress)
    members = [run.ensemble(f"members/{index}", lambda one=one: one) for index, one in enumerate(tuned)]  # type: ignore[misc]
    fused = run.ensemble("fused", lambda: _fuse(members, config))
    final = run.ensemble("ensemble", lambda: _calibrate(fused, config, data))
    run.write_summary(_summary(run, final, config, heads, data))
    return final if device is None else final.to(device)


class _Data:
    """The data of a build, held-out sets read into memory and split once."""

    def __init__(
        self,
        config: HydraConfig,
        train: Batches | None,
        id: Batches | None,
        ood: Batches | None,
        validation: Batches | None,
    ) -> None:
        self.train = train
        self.ood = None if ood is None else read_all(ood, "ood")
        self.ranking: list[Batch] | None = None
        self.validation: list[Batch] | None = None if validation is None else read_all(validation, "validation")
        if id is not None:
            held_out = read_all(id, "id")
            if validation is not None:
                self.ranking = held_out
            else:
                self.ranking, self.validation = halves(held_out, config.seed, "id")

    def fingerprints(self) -> dict[str, str | None]:
        """What the held-out sets contain; the training data is checked by fine-tuning itself."""
        sets = {"ranking": self.ranking, "validation": self.validation, "ood": self.ood}
        return {name: None if data is None else data_fingerprint(data, name) for name, data in sets.items()}


def _check(config: HydraConfig, base: Ensemble, data: _Data) -> None:
    """Everything that can be known to fail before any work is done."""
    if base.num_members != 1 or not base.num_classes:
        raise ConfigError(
            f"build starts from one classifier, got {base.num_members} members and {base.num_classes} classes; "
            "give a model with a classifier, or convert it with num_labels="
        )
    if config.strategy in ("circuit", "sampled") and (data.ranking is None or data.ood is None):
        raise DataError(
            f'strategy "{config.strategy}" extracts circuits, which needs id= and ood=; '
            'without OOD data use strategy="taylor"'
        )
    if config.strategy == "taylor" and data.train is None and data.ranking is None:
        raise DataError('strategy "taylor" reads labelled batches; give train= or id=')
    if config.recipe is not None and data.train is None:
        raise DataError("the config has a recipe for fine-tuning, which needs train=")
    if config.calibrate and data.validation is None:
        raise DataError("calibration needs held-out data: give id= or validation=, or set calibrate=False")
    free = _prunable(config, base)
    if config.prune > free:
        raise ConfigError(
            f"HydraConfig.prune is {config.prune}, but there are {free} heads above the first "
            f"{config.shared_layers} layers"
        )


def _layers(config: HydraConfig, base: Ensemble) -> range:
    """Layers in which members may differ."""
    if config.shared_layers >= base.num_layers:
        raise ConfigError(
            f"HydraConfig.shared_layers is {config.shared_layers}, the model has {base.num_layers} layers; "
            "at least the last one must be left for the members to differ"
        )
    return range(config.shared_layers, base.num_layers)


def _prunable(config: HydraConfig, base: Ensemble) -> int:
    return sum(len(base.heads[0][layer]) for layer in _layers(config, base))


def _choose(
    run: RunFolder, base: Ensemble, config: HydraConfig, data: _Data, progress: bool
) -> tuple[tuple[Head, ...], ...]:
    """The heads each member loses."""
    layers = _layers(config, base)
    if config.strategy == "random":
        return random_members(base, config.prune, config.members, config.seed, layers)
    if config.strategy == "taylor":
        source = data.train if data.train is not None else data.ranking
        assert source is not None  # _check has seen to it
        return taylor_members(
            [_taylor(run, base, config, source, layers, member) for member in range(config.members)], config.prune
        )
    pool = config.pool_size(_prunable(config, base))
    scores = ("avg",) if config.strategy == "sampled" else CIRCUIT_ORDER[: config.members]
    rankings = {
        score: _circuit(
            run,
            base,
            config,
            data,
            layers,
            score,
            pool if score == "avg" and config.draws_from_pool else config.prune,
            progress,
        )
        for score in scores
    }
    if config.strategy == "sampled":
        return sampled_members(rankings["avg"], config.prune, pool, config.members, config.seed)
    return circuit_members(
        rankings, config.prune, config.members, pool if config.draws_from_pool else None, config.seed
    )


def _taylor(
    run: RunFolder, base: Ensemble, config: HydraConfig, source: Batches, layers: range, member: int
) -> HeadRanking:
    return run.ranking(
        f"rankings/taylor-{member}",
        lambda: taylor(
            base,
            source,
            budget=config.prune,
            scope=config.taylor_scope,
            layers=layers,
            seed=config.seed + member,
            calibration_batches=config.calibration_batches,
        ),
    )


def _circuit(
    run: RunFolder,
    base: Ensemble,
    config: HydraConfig,
    data: _Data,
    layers: range,
    score: Any,
    budget: int,
    progress: bool,
) -> HeadRanking:
    assert data.ranking is not None  # _check has seen to it
    ranking = data.ranking
    return run.ranking(
        f"rankings/{score}",
        lambda: extract_circuit(
            base,
            ranking,
            data.ood,
            score=score,
            budget=budget,
            method=config.method,
            layers=layers,
            journal=run.place(f"rankings/{score}.journal"),
            progress=progress,
        ),
    )


def _finetune(
    run: RunFolder, members: Sequence[Ensemble], config: HydraConfig, data: _Data, progress: bool
) -> Sequence[Ensemble]:
    if config.recipe is None or data.train is None:
        return members
    recipe = _above_the_trunk(config.recipe, config, members[0])
    return finetune(members, data.train, recipe, data.validation, output=run.place("finetune"), progress=progress)


def _above_the_trunk(recipe: Recipe, config: HydraConfig, member: Ensemble) -> Recipe:
    """The recipe, kept out of the layers that all members share."""
    if not config.shared_layers:
        return recipe
    free = member.num_layers - config.shared_layers
    return replace(recipe, last_blocks=free if recipe.last_blocks is None else min(free, recipe.last_blocks))


def _fuse(members: Sequence[Ensemble], config: HydraConfig) -> Ensemble:
    return fuse(members, stem=config.stem, mlp=config.mlp, norms=config.norms, readout=config.readout)


def _calibrate(fused: Ensemble, config: HydraConfig, data: _Data) -> Ensemble:
    if not config.calibrate or data.validation is None:
        return fused
    return calibrate(fused, data.validation, share=config.accepted_share, per_member=config.per_member_temperature)


def _identity(config: HydraConfig, base: Ensemble, data: _Data) -> dict[str, Any]:
    return {"config": to_plain(config), "model": model_fingerprint(base), **data.fingerprints()}


def _summary(
    run: RunFolder, final: Ensemble, config: HydraConfig, heads: Sequence[Sequence[Head]], data: _Data
) -> dict[str, Any]:
    described = final.describe()
    sizes = {"ranking": data.ranking, "validation": data.validation, "ood": data.ood}
    calibration = final.metadata.calibration
    return {
        "config": to_plain(config),
        "versions": {"hydra_ensembles": __version__, "torch": torch.__version__},
        "samples": {
            name: None if batches is None else sum(_length(batch) for batch in batches)
            for name, batches in sizes.items()
        },
        "pruned": [[str(head) for head in member] for member in heads],
        "parameters": described.parameters,
        "multiply_adds": described.multiply_adds,
        "trunk": final.config.trunk,
        "calibration": None if calibration is None else to_plain(calibration),
        "metrics": dict(final.metadata.metrics),
        "history": list(final.metadata.history),
        "seconds": run.seconds,
    }


def _length(batch: Batch) -> int:
    inputs = batch[0]
    return len(inputs) if isinstance(inputs, torch.Tensor) else len(next(iter(inputs.values())))

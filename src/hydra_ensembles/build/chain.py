"""From one model to a fused, calibrated ensemble: the whole chain, stage by stage, resumable at each."""

from collections.abc import Sequence
from functools import cached_property
from itertools import takewhile
from pathlib import Path

import torch
from torch import nn

from ..batches import Batches
from ..calibrate import calibrate
from ..errors import ConfigError
from ..fuse import fuse
from ..model.clip import DEFAULT_TEMPLATES, Templates
from ..model.ensemble import Ensemble
from ..training.finetune import finetune
from .checks import above_the_trunk, require_possible
from .choose import Chooser
from .config import HydraConfig
from .data import BuildData, read_data
from .identity import run_identity
from .member_choice import MemberChoice
from .run_folder import SUMMARY, RunFolder
from .start import Start, starting_point
from .summary import build_summary


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
    class_names: Sequence[str] | None = None,
    templates: Templates = DEFAULT_TEMPLATES,
) -> Ensemble:
    """Make a Hydra Ensemble: convert, rank heads, choose members, prune, fine-tune, fuse, calibrate.

    Each stage leaves its product in `output`: `base/`, `rankings/`, `heads.json`, `finetune/` and `members/`,
    `fused/`, `ensemble/`, `summary.json`. Called again with the same arguments, a build that was stopped at any
    point goes on there and (on a CPU) ends with the same bits; of a finished one the result is read back. To
    repeat a stage, delete its product and those after it. The folder of another build is refused. Held-out data are
    compared sample by sample; of `train` only the length, the first batch, and all labels where the source has them
    in memory, so use another folder when training inputs change in another way.

    Of a dual encoder (CLIP), heads of both towers are ranked together and pruned, and the members classify images
    by the class names, as `zero_shot` does. For the image tower alone, build from `zero_shot(dual, class_names)`.

    Args:
        model: A model that `convert` takes, or an `Ensemble` or a `DualEncoder` with one member. It is not changed.
        config: What to make.
        train: Labelled training batches that can be read again and again, for fine-tuning and for Taylor
            rankings.
        id: Held-out labelled in-distribution batches, kept in memory. A half drawn by the seed ranks heads, the
            other half calibrates (and chooses between learning rates), unless `validation` is given.
        ood: Batches unlike the training data, for circuits, kept in memory. Use other data to report results.
        validation: Held-out labelled batches for calibration and for choosing in fine-tuning.
        output: Run folder; None keeps nothing.
        device: Where to compute; None stays where the model is.
        progress: Whether to show progress bars.
        class_names: Of a dual encoder: the names of the classes, in the order of the labels.
        templates: Of a dual encoder: sentences with `{label}` where a name goes.

    Returns:
        The fused ensemble. In `output` it is saved as `ensemble/`, beside `summary.json`.

    Raises:
        HydraError: Config, model and data do not go together, which is found before any long work as far as
            possible; `output` holds another build, or a product that is damaged (the message says what to
            delete).
    """
    if not isinstance(config, HydraConfig):
        raise ConfigError(f"config must be a HydraConfig, got {type(config).__name__}")
    start = starting_point(model, config, class_names, templates, device)
    data = read_data(config, start.base.num_classes, train=train, id=id, ood=ood, validation=validation)
    require_possible(config, start, data)
    run = RunFolder(output, run_identity(config, start, data), start.base.device)
    return _Chain(config, start, data, run, progress).finish()


class _Chain:
    """The stages. Each gives its product from the run folder, or makes it from that of the stage before."""

    def __init__(self, config: HydraConfig, start: Start, data: BuildData, run: RunFolder, progress: bool) -> None:
        self.config, self.start, self.data, self.run, self.progress = config, start, data, run, progress
        self.base = start.base

    def finish(self) -> Ensemble:
        """Run what is missing; the result, with its summary written."""
        if not self.run.has("ensemble") and not self.run.has("base"):
            self.run.ensemble("base", lambda: self.base)
        final = self.run.ensemble("ensemble", self._calibrated)
        if not self.run.has(SUMMARY):
            self.run.write_summary(
                build_summary(self.config, self.base, self.data, self.choices, final, self.run.seconds)
            )
        return final

    @cached_property
    def choices(self) -> tuple[MemberChoice, ...]:
        """The heads each member loses."""
        return self.run.heads(Chooser(self.config, self.start, self.data, self.run, self.progress).members)

    def _calibrated(self) -> Ensemble:
        config, validation = self.config, self.data.validation
        fused = self.run.ensemble("fused", self._fused)
        if not config.calibrate or validation is None:
            return fused
        return calibrate(fused, validation, share=config.accepted_share, per_member=config.per_member_temperature)

    def _fused(self) -> Ensemble:
        config = self.config
        members = [
            self.run.ensemble(f"members/{index}", lambda index=index: self._member(index))  # type: ignore[misc]
            for index in range(config.members)
        ]
        return fuse(members, stem=config.stem, mlp=config.mlp, norms=config.norms, readout=config.readout)

    def _member(self, index: int) -> Ensemble:
        """One member, pruned and fine-tuned; its history says which member it was and how its heads were chosen."""
        choice = self.choices[index]
        member = self._finetuned(self.start.pruned(choice.heads), index)
        history = member.metadata.history
        pairs = zip(self.base.metadata.history, history, strict=False)
        before = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        lines = (f"member {index} ({choice.origin}): {line}" for line in history[before:])
        return member.with_metadata(history=(*history[:before], *lines))

    def _finetuned(self, member: Ensemble, index: int) -> Ensemble:
        recipe, data = self.config.recipe, self.data
        if recipe is None or data.train is None:
            return member
        return finetune(
            member,
            data.train,
            above_the_trunk(recipe, self.config, member.num_layers),
            data.validation,
            output=self.run.place("finetune"),
            progress=self.progress,
            index=index,
        )

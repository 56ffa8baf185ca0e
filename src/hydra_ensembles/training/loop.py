"""The training loop: updates, validation, checkpoints by steps and by time, on one process or several."""

import math
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from time import monotonic
from typing import Any, ClassVar, Generic, ParamSpec, TypedDict, TypeVar

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from tqdm import tqdm

from .._distributed import SINGLE_PROCESS, Ranks, all_ranks, check_unsharded, launched, local_device
from .._utils import derive_seed, require_device, unlimited_recompiles, warn, without_autocast
from ..arguments import Whole, checked
from ..batches import Batches, epoch_of, length_of, require_rereadable, restored
from ..errors import CheckpointError, DataError, DivergedError
from ..files import expanded, read_sealed, remove_leftovers, resumable
from ..fingerprints import model_fingerprint, source_fingerprint
from ..model.dual_encoder import DualEncoder
from ..model.ensemble import Ensemble
from ..model.layers import Block
from ..schema import to_plain
from .recipe import Recipe, make_optimizer
from .training_state import (
    INDEX,
    Position,
    RunState,
    Validation,
    explain_errors,
    read_state,
    read_tensors,
    remove_unused,
    require_layout,
    write_state,
)

BatchT = TypeVar("BatchT")
P = ParamSpec("P")
R = TypeVar("R")
EARLY, USUAL = 20.0, 60.0  # seconds until the first checkpoint, and at least between further ones
SHARE = 0.02  # maximum share of the time spent on writing checkpoints
_STATE = {"sgd": ("momentum_buffer",), "adamw": ("exp_avg", "exp_avg_sq", "step")}  # of the optimizer, per parameter
_AUTOCAST: Mapping[str, torch.dtype | None] = {"float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Runtime:
    """Where a run computes: its device, and the ranks that share the batches and average gradients."""

    device: torch.device
    ranks: Ranks = SINGLE_PROCESS


@contextmanager
def training_runtime(device: torch.device | str | None, fallback: torch.device) -> Iterator[Runtime]:
    """Train on `device` or `fallback`; if several processes were launched, each uses its own GPU, if there are any."""
    chosen = require_device(device or fallback)
    if launched():
        on_gpu = torch.cuda.is_available() if device is None else chosen.type == "cuda"
        chosen = local_device(torch.device("cuda")) if on_gpu else torch.device("cpu")
    with all_ranks(chosen) as ranks:
        yield Runtime(chosen, ranks)


class Learner(ABC, Generic[BatchT]):
    """A model in training; parameters with `requires_grad` train. `shares` and `spared`: see `make_optimizer`.

    Subclasses define what a batch is, how gradients are computed, and how the model is validated.
    """

    by_nll: ClassVar[bool] = False  # whether the lowest validation NLL selects weights, not the highest accuracy

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        runtime: Runtime,
        shares: Mapping[str, float],
        spared: Collection[str] = (),
    ) -> None:
        self.recipe, self.runtime = recipe, runtime
        self.trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.optimizer = make_optimizer(self.trained, recipe, shares, spared)
        self.scaler = GradScaler(runtime.device.type, enabled=recipe.precision == "fp16")
        if recipe.compile:
            for block in (module for module in model.modules() if isinstance(module, Block)):
                block.compile()

    @abstractmethod
    def read(self, raw: Any, index: int) -> BatchT:
        """Check and return a training batch; `index` is its number, for messages."""

    @abstractmethod
    def backward(self, group: list[BatchT], seed: int) -> Tensor:
        """Accumulate the scaled gradients of `group`, whose batches count as one; return the mean loss.

        `seed` is for the dropout of this update; every rank derives its own.
        """

    @abstractmethod
    def measure(self, validation: Batches) -> tuple[float, float]:
        """Accuracy and negative log-likelihood on validation data."""

    def autocast(self) -> torch.autocast:
        """Autocast with the precision of the recipe."""
        dtype = _AUTOCAST[self.recipe.precision]
        return torch.autocast(self.runtime.device.type, dtype=dtype, enabled=dtype is not None)

    def update(self, group: list[BatchT], rate: float, seed: int) -> float:
        """One step on batches that count as one; return the mean loss, or raise `FloatingPointError` before the step.

        The loss is the mean over ranks, so that all ranks see the same value and stop together.
        """
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = rate * parameters["share"]
        ranks = self.runtime.ranks
        loss = ranks.total(self.backward(group, seed)).item() / ranks.size
        self.scaler.unscale_(self.optimizer)
        gradients = [parameter.grad for parameter in self.trained.values() if parameter.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        finite = self.scaler.is_enabled() or math.isfinite(norm.item())  # the scaler skips such steps itself
        if not math.isfinite(loss) or not finite:
            raise FloatingPointError(f"the loss is {loss} and the norm of the gradient {norm.item()}")
        if self.recipe.clip_norm is not None:
            nn.utils.clip_grads_with_norm_(self.trained.values(), self.recipe.clip_norm, norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    def weights(self) -> dict[str, Tensor]:
        """A copy of the trained parameters."""
        return {name: parameter.detach().clone() for name, parameter in self.trained.items()}

    def tensors(self) -> dict[str, Tensor]:
        """Everything to save: weights, optimizer state and scaler."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.trained.items():
            state = self.optimizer.state.get(parameter, {}).items()
            tensors |= {f"optimizer/{name}/{key}": value for key, value in state if isinstance(value, Tensor)}
            tensors[f"weights/{name}"] = parameter
        if self.scaler.is_enabled():
            scaler = self.scaler.state_dict()
            tensors["scaler/scale"] = torch.tensor(scaler["scale"], dtype=torch.float64)
            tensors["scaler/growth_tracker"] = torch.tensor(scaler["_growth_tracker"])
        return tensors

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `tensors` returned; raise `CheckpointError` on other names, shapes or dtypes."""
        scalar = torch.zeros(())
        layout: dict[str, Tensor] = {}
        states: dict[str, dict[str, Tensor]] = {}  # of the optimizer, by parameter
        for name, parameter in self.trained.items():
            prefix = f"optimizer/{name}/"
            states[name] = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
            layout[f"weights/{name}"] = parameter
            if states[name]:  # then it must be complete
                parts = _STATE[self.recipe.optimizer]
                layout |= {prefix + part: scalar if part == "step" else parameter for part in parts}
        if self.scaler.is_enabled():
            layout |= {"scaler/scale": scalar.double(), "scaler/growth_tracker": scalar.long()}
        require_layout(tensors, layout)
        for key, step in tensors.items():
            if key.endswith("/step") and not (step >= 0 and float(step).is_integer()):
                raise CheckpointError(f"the tensor {key!r} is {step.item():g}; steps are counted from 0")
        for name, parameter in self.trained.items():
            with torch.no_grad():
                parameter.copy_(tensors[f"weights/{name}"])
            if states[name]:  # AdamW keeps its step count on the CPU
                self.optimizer.state[parameter] = {
                    key: value if key == "step" else value.to(parameter.device) for key, value in states[name].items()
                }
        if self.scaler.is_enabled():
            scale, growth = tensors["scaler/scale"].item(), tensors["scaler/growth_tracker"].item()
            self.scaler.load_state_dict({**self.scaler.state_dict(), "scale": scale, "_growth_tracker": growth})


def trains(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a public training function: `checked`, with gradients and its own precision, whatever the caller set."""
    return checked(torch.inference_mode(False)(torch.enable_grad()(without_autocast()(function))))


class TrainOptions(TypedDict, total=False):
    """Options of every training besides model, data and recipe; all may be left out.

    Attributes:
        output: Folder for checkpoints; a run that was killed resumes from there. None, the default, writes none.
        progress: Whether to show a progress bar (default: yes).
        device: Where to train; None, the default, stays on the model's device.
        checkpoint_every: Updates between checkpoints, by default 500.
    """

    output: str | Path | None
    progress: bool
    device: torch.device | str | None
    checkpoint_every: Whole


@dataclass(frozen=True)
class Job:
    """What to train, for all learning rates, and how (see `TrainOptions`); raises if the data cannot be used."""

    recipe: Recipe
    train: Batches
    validation: Batches | None
    _: KW_ONLY
    output: str | Path | None = None
    progress: bool = True
    device: torch.device | str | None = None
    checkpoint_every: int = 500
    index: int = 0  # of the member; random numbers are derived from it
    subfolder: str = "member-{}"  # of `output`, for checkpoints; formatted with the index
    identity: Mapping[str, Any] = field(default_factory=dict)  # what else the run depends on, as plain data

    @property
    def folder(self) -> Path | None:
        """Folder of the checkpoints."""
        return None if self.output is None else expanded(self.output) / self.subfolder.format(self.index)

    def __post_init__(self) -> None:
        """Check what `Recipe.check` does not."""
        require_rereadable(self.train, "train")
        if self.validation is not None:
            require_rereadable(self.validation, "validation")
            check_unsharded(self.validation, "validation")


@dataclass(frozen=True)
class RunResult:
    """Result of a run."""

    weights: dict[str, Tensor]  # trained parameters by name
    best: Validation | None  # the validation they were chosen by
    steps: int
    rate: float
    diverged: tuple[float, ...] = ()  # the other learning rates of the recipe that diverged

    def state_like(self, start: nn.Module) -> dict[str, Tensor]:
        """All weights of `start`, in its dtype and on its device, with trained ones replaced."""
        return {
            name: self.weights[name].to(tensor.device, tensor.dtype) if name in self.weights else tensor
            for name, tensor in start.state_dict().items()
        }

    def described(self, recipe: Recipe, parts: str | None = None) -> str:
        """A history line: parts, steps, optimizer, learning rate, seed, and validation accuracy."""
        where = "" if recipe.last_blocks is None else f" of the last {recipe.last_blocks} blocks"
        chosen = f", chosen of {len(recipe.grid)}" if recipe.grid else ""
        chosen += f" ({_listed(self.diverged)} diverged)" if self.diverged else ""
        best = self.best
        quality = "" if best is None else f"; validation accuracy {best.accuracy:.4f} at step {best.step}"
        return (
            f"{parts or ', '.join(recipe.train_groups)}{where} for {self.steps} steps: {recipe.optimizer}, "
            f"learning rate {self.rate:g}{chosen}, seed {recipe.seed}{quality}"
        )


def train_best(
    make_learner: Callable[[Runtime], Learner[BatchT]], start: Ensemble | DualEncoder, job: Job
) -> RunResult:
    """Train copies of `start`, one per learning rate; return the best result, of equal ones that of the lowest rate.

    A rate that diverges is skipped with a warning; if all diverge, raise `DivergedError`.
    """
    with restored(job.train, job.validation), training_runtime(job.device, start.device) as runtime:
        ranks, identity, data = runtime.ranks, dict(job.identity), dict[str, Any]()
        if job.folder is not None or ranks.size > 1:
            seed = derive_seed(job.recipe.seed, "fingerprint")
            held_out = None if job.validation is None else source_fingerprint(job.validation, "validation", seed)
            train = ranks.common(partial(source_fingerprint, job.train, "train", seed), job.train)
            data = {"train": train, "validation": held_out}
            identity["model"] = model_fingerprint(start)
        shared = replace(job, train=ranks.share_batches(job.train), identity={**identity, **data})
        # ranks with different steps would deadlock, or end with different weights
        ranks.require_same((identity, to_plain(job.recipe), job.index, job.checkpoint_every), "model or recipe")
        ranks.require_same_data((data, length_of(shared.train)), "training or validation data")
        folder = None if job.folder is None or _is_read_only(job.folder, job.recipe.rates) else job.folder
        with nullcontext() if folder is None else ranks.locked(folder, "training"), resumable(folder):
            if folder is not None and ranks.rank == 0:
                remove_leftovers(folder)
            with _compiling() if job.recipe.compile else nullcontext():
                return _best_of(lambda rate: Training(make_learner(runtime), shared, rate).finish(), job.recipe)


def _best_of(train: Callable[[float], RunResult], recipe: Recipe) -> RunResult:
    """Train at each rate of a recipe, from the lowest; return the best result."""
    results: list[RunResult] = []
    diverged: dict[float, str] = {}  # messages only: the exceptions would keep models in memory
    for rate in sorted(recipe.rates):
        try:
            results.append(train(rate))
        except DivergedError as error:
            if len(recipe.rates) == 1:
                raise
            diverged[rate] = str(error)
    if not results:
        raise DivergedError(f"all learning rates diverged ({_listed(diverged)}); the lowest: {diverged[min(diverged)]}")
    for rate, message in diverged.items():
        warn(f"the learning rate {rate:g} diverged and is dropped; the best of the others is used: {message}")
    best = max(results, key=lambda result: () if result.best is None else result.best.merit)
    return replace(best, diverged=tuple(diverged))


def _listed(rates: Iterable[float]) -> str:
    return ", ".join(f"{rate:g}" for rate in rates)


@contextmanager
def _compiling() -> Iterator[None]:
    """Allow as many recompilations as blocks need; silence compiler warnings on gradients and precision."""
    with unlimited_recompiles(), warnings.catch_warnings():
        for message in (r"The \.grad attribute of a Tensor that is not a leaf", "TensorFloat32 tensor cores"):
            warnings.filterwarnings("ignore", message, UserWarning)
        yield


def _is_read_only(folder: Path, rates: Iterable[float]) -> bool:
    """Whether a training is finished and its folder is read-only: then nothing needs to be written."""
    if not folder.exists() or os.access(folder, os.W_OK):
        return False
    states = [_rate_folder(folder, rate) / INDEX for rate in rates]
    return all(state.exists() and read_sealed(state).get("finished") is True for state in states)


def _rate_folder(folder: Path, rate: float) -> Path:
    return folder / f"rate-{rate!r}"


class Training(Generic[BatchT]):
    """The state of a run at one learning rate, and its loop."""

    def __init__(self, learner: Learner[BatchT], job: Job, rate: float) -> None:
        self.learner, self.runtime, self.job, self.recipe, self.rate = learner, learner.runtime, job, job.recipe, rate
        self.folder = None if job.folder is None else _rate_folder(job.folder, rate)
        self.seed = derive_seed(job.recipe.seed, "member", job.index)
        order_seed = job.recipe.order_seed
        self.order = self.seed if order_seed is None else derive_seed(order_seed, "order")
        self.total, self.warmup = job.recipe.plan(length_of(job.train))
        self.best_weights: dict[str, Tensor] = {}
        self.saved = monotonic()  # time of the last checkpoint
        self.pause = EARLY  # seconds until the next
        self.title = f"member {job.index}, learning rate {rate:g}"  # in messages
        settings = {"recipe": to_plain(job.recipe), "rate": rate, "member": job.index}
        self.state = RunState({**job.identity, **settings, "processes": self.runtime.ranks.size})

    def finish(self) -> RunResult:
        """Train until the budget is spent or patience runs out; return the best (without validation, last) weights."""
        finished = self._resume()
        if finished is not None:
            return finished
        quiet = not self.job.progress or self.runtime.ranks.rank > 0
        begun = self.state.position.step
        with tqdm(total=self.total, initial=begun, desc=self.title, unit="step", disable=quiet) as bar:
            while not self._done():
                with epoch_of(self.job.train, self.state.position.epoch, self.order, self.runtime.device):
                    self._run_epoch(bar)
        step, epochs = self.state.position.step, self.recipe.epochs
        if epochs is not None and self.state.position.epoch >= epochs and step != self.total:
            promised = f"the length of train promised {self.total} steps, but it gave {step}"
            warn(f"{promised}: the learning rate was planned for the former; give the right length, or steps=")
        weights = self.best_weights or self.learner.weights()
        if not all(bool(tensor.isfinite().all()) for tensor in weights.values()):
            advice = "lower the rate, clip, or use a wider precision"
            raise DivergedError(f"weights are not finite after step {step} ({self.title}): {advice}")
        self.state = replace(self.state, finished=True, files={}, checksums={})
        self._write({"result": weights})
        return RunResult(weights, self.state.best, step, self.rate)

    def _resume(self) -> RunResult | None:
        """Continue from the checkpoint in the folder, if there is one; return the result of a finished run."""
        saved = None if self.folder is None else read_state(self.folder, self.state.fingerprint)
        if saved is None or self.folder is None:
            return None
        with explain_errors(self.folder):
            self.state, tensors = read_tensors(self.folder, saved, self.learner.trained)
            for part in tensors.keys() & {"result", "best"}:
                require_layout(tensors[part], self.learner.trained)
            if self.runtime.ranks.rank == 0:
                remove_unused(self.folder, saved)  # left if the run was killed before it removed them
            if saved.finished:
                return RunResult(tensors["result"], saved.best, saved.position.step, self.rate)
            self.learner.restore(tensors["current"])
        self.best_weights = {name: x.to(self.runtime.device) for name, x in tensors.get("best", {}).items()}
        return None

    def _done(self) -> bool:
        patience, epochs, position = self.recipe.patience, self.recipe.epochs, self.state.position
        spent = position.step >= self.total if epochs is None else position.epoch >= epochs
        return spent or (patience is not None and self.state.waited >= patience)

    def _run_epoch(self, bar: "tqdm[Any]") -> None:
        """Train from the current position to the end of the epoch, or of the run."""
        every, skipped = self.recipe.evaluate_every, self.state.position.batch
        batches = (self.learner.read(raw, index) for index, raw in enumerate(self.job.train))
        for _ in range(skipped):
            next(batches, None)  # trained on before the checkpoint
        while not self._done():
            group = list(islice(batches, self.recipe.gradient_accumulation))
            if not group:
                position = self.state.position
                if position.batch == 0:
                    raise DataError("train has no batches in an epoch; every process needs one, check the loader")
                self.state = replace(self.state, position=Position(position.step, position.epoch + 1))
                break
            self._update(group, bar)
            if every is not None and self.state.position.step % every == 0:
                self._validate()
                self._save()
            elif self._due() and not self._done():  # at the end, validate first
                self._save()
        if every is None or self._done():
            self._validate()
        self._save()

    def _update(self, group: list[BatchT], bar: "tqdm[Any]") -> None:
        """One step on the batches of the group."""
        position = self.state.position
        step, epoch, batch = position.step, position.epoch, position.batch
        rate = self.rate * self.recipe.rate_factor(step, self.total, self.warmup)
        try:
            loss = self.learner.update(group, rate, derive_seed(self.seed, "dropout", step))
        except FloatingPointError as error:
            numbers = ", ".join(str(batch + number) for number in range(len(group)))
            saved = self.folder is not None and (self.folder / INDEX).exists()
            checkpoint = f"; the last checkpoint stays in {self.folder}" if saved else ""
            raise DivergedError(
                f"{error} at step {step} (batch {numbers} of epoch {epoch}, {self.title}): look for bad values there, "
                f"lower the rate, clip, or use a wider precision{checkpoint}"
            ) from error
        self.state = replace(self.state, position=Position(step + 1, epoch, batch + len(group)))
        bar.set_postfix({"loss": f"{loss:.4f}", "lr": f"{rate:.2e}"}, refresh=False)
        bar.update()

    def _validate(self) -> None:
        """Validate, keep the weights if they are the best so far, and update patience."""
        data, position, evaluations = self.job.validation, self.state.position, self.state.evaluations
        if data is None or (evaluations and evaluations[-1].step == position.step):
            return
        with epoch_of(data, 0, derive_seed(self.seed, "validation"), self.runtime.device):
            measured = self.learner.measure(data)
            if not all(map(math.isfinite, measured)):
                at = f"after step {position.step} ({self.title})"
                raise DivergedError(
                    f"validation has an NLL of {measured[1]} {at}: look for bad values, or lower the rate"
                )
            validation = Validation(position.step, position.epoch, *measured, by_nll=self.learner.by_nll)
        self.state = self.state.after(validation, self.recipe.min_delta)
        if self.state.best is validation:
            self.best_weights = self.learner.weights()

    def _due(self) -> bool:
        """Whether a checkpoint is due by steps or time; only by steps with several processes, whose clocks differ."""
        if self.state.position.step % self.job.checkpoint_every == 0:
            return True
        return self.folder is not None and self.runtime.ranks.size == 1 and monotonic() - self.saved >= self.pause

    def _save(self) -> None:
        begun = monotonic()
        is_best = self.state.best is not None and self.state.best.step == self.state.position.step
        self._write({"current": self.learner.tensors(), **({"best": self.best_weights} if is_best else {})})
        self.saved = monotonic()
        self.pause = max(USUAL, (self.saved - begun) / SHARE)

    def _write(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        if self.folder is not None and self.runtime.ranks.rank == 0:
            self.state = write_state(self.folder, self.state, tensors)
        self.runtime.ranks.wait()

"""The training loop: updates, validation, the best of several learning rates, and resuming.

A finished training is a product of the store in `output`. While one runs, its whole state is one safetensors file
there, rewritten every `checkpoint_every` updates; a run that was killed continues from it to the same bits.
"""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Generic, ParamSpec, TypedDict, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from tqdm import tqdm

from .._utils import derive_seed, require_device, torch_seeded, unlimited_recompiles, warn, without_autocast
from ..batches import Batches, epoch_of, length_of, require_rereadable, restored
from ..digest import digest, source_digest
from ..errors import CheckpointError, DataError, DivergedError
from ..files import expanded, remove, write_atomically
from ..model.dual_encoder import DualEncoder
from ..model.ensemble import Ensemble
from ..model.layers import Block
from ..settings import from_plain, to_plain
from ..store import Form, Store
from .recipe import Recipe, make_optimizer

BatchT = TypeVar("BatchT")
P = ParamSpec("P")
R = TypeVar("R")


class Learner(ABC, Generic[BatchT]):
    """A model in training; parameters with `requires_grad` train. `shares` and `spared`: see `make_optimizer`.

    Subclasses define what a batch is, how gradients are computed, and how the model is validated.
    """

    by_nll: ClassVar[bool] = False  # whether the lowest validation NLL selects weights, not the highest accuracy

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        device: torch.device,
        shares: Mapping[str, float],
        spared: Collection[str] = (),
    ) -> None:
        self.recipe, self.device = recipe, device
        self.trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.optimizer = make_optimizer(self.trained, recipe, shares, spared)
        self.compiled(model)

    def compiled(self, model: nn.Module) -> None:
        """Compile the blocks of a model if the recipe says so."""
        if self.recipe.compile:
            for block in (module for module in model.modules() if isinstance(module, Block)):
                block.compile()

    @abstractmethod
    def read(self, raw: Any, index: int) -> BatchT:
        """Check and return a training batch; `index` is its number, for messages."""

    @abstractmethod
    def loss(self, batch: BatchT) -> Tensor:
        """The mean loss of the samples of a batch, with the dropout of torch's generators."""

    @abstractmethod
    def size(self, batch: BatchT) -> int:
        """Number of samples in a batch."""

    @abstractmethod
    def measure(self, validation: Batches) -> tuple[float, float]:
        """Accuracy and negative log-likelihood on validation data."""

    def autocast(self) -> torch.autocast:
        """Autocast with the precision of the recipe."""
        enabled = self.recipe.precision == "bf16"
        return torch.autocast(self.device.type, dtype=torch.bfloat16 if enabled else None, enabled=enabled)

    def backward(self, group: list[BatchT], seed: int) -> Tensor:
        """Accumulate the gradients of `group`, whose batches count as one; return the mean loss.

        `seed` is for the dropout of this update.
        """
        sizes = list(map(self.size, group))
        total = torch.zeros((), device=self.device)
        for index, batch in enumerate(group):
            with torch_seeded(derive_seed(seed, index, 0), self.device):  # 0: stored results depend on it
                share = self.loss(batch) * (sizes[index] / sum(sizes))
            share.backward()
            total += share.detach()
        return total

    def update(self, group: list[BatchT], rate: float, seed: int) -> float:
        """One step on batches that count as one; return the loss, or raise `FloatingPointError` before the step."""
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = rate * parameters["share"]
        loss = self.backward(group, seed).item()
        gradients = [parameter.grad for parameter in self.trained.values() if parameter.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        if not math.isfinite(loss) or not math.isfinite(norm.item()):
            raise FloatingPointError(f"the loss is {loss} and the norm of the gradient {norm.item()}")
        if self.recipe.clip_norm is not None:
            nn.utils.clip_grads_with_norm_(self.trained.values(), self.recipe.clip_norm, norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    def weights(self) -> dict[str, Tensor]:
        """A copy of the trained parameters."""
        return {name: parameter.detach().clone() for name, parameter in self.trained.items()}

    def tensors(self) -> dict[str, Tensor]:
        """Everything to save: weights and optimizer state."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.trained.items():
            state = self.optimizer.state.get(parameter, {}).items()
            tensors |= {f"optimizer/{name}/{key}": value for key, value in state if isinstance(value, Tensor)}
            tensors[f"weights/{name}"] = parameter
        return tensors

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `tensors` returned."""
        for name, parameter in self.trained.items():
            with torch.no_grad():
                parameter.copy_(tensors[f"weights/{name}"])
            prefix = f"optimizer/{name}/"
            state = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
            if state:  # AdamW keeps its step count on the CPU
                self.optimizer.state[parameter] = {
                    key: value if key == "step" else value.to(parameter.device) for key, value in state.items()
                }


def trains(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a public training function: with gradients and its own precision, whatever the caller set."""
    return torch.inference_mode(False)(torch.enable_grad()(without_autocast()(function)))


class TrainOptions(TypedDict, total=False):
    """Options of every training besides model, data and recipe; all may be left out."""

    output: str | Path | None  # folder for the state; a run that was killed resumes from there. None writes nothing
    progress: bool  # whether to show a progress bar (default: yes)
    device: torch.device | str | None  # where to train; None stays on the model's device
    checkpoint_every: int  # updates between two writes of the state, by default 200


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
    checkpoint_every: int = 200
    index: int = 0  # of the member; random numbers are derived from it
    settings: Any = None  # of the method: what else the run depends on

    def __post_init__(self) -> None:
        """Check what `Recipe.check` does not."""
        require_rereadable(self.train, "train")
        if self.validation is not None:
            require_rereadable(self.validation, "validation")


# --- where a run stands, and its result ------------------------------------------------------------------------


@dataclass(frozen=True)
class Validation:
    """Accuracy and negative log-likelihood on validation data after some updates."""

    step: int
    accuracy: float
    nll: float
    by_nll: bool = False  # whether NLL decides what is better, not accuracy

    @property
    def merit(self) -> tuple[float, float]:
        """Larger is better: accuracy first, then lower NLL; with `by_nll` in the opposite order."""
        return (-self.nll, self.accuracy) if self.by_nll else (self.accuracy, -self.nll)


@dataclass(frozen=True)
class Position:
    """Where a run stands: updates made, epochs finished, batches read in the current epoch, and all validations.

    `loss` is the mean training loss of the last tenth of the updates, as far as they are made.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    evaluations: tuple[Validation, ...] = ()
    loss: float = 0.0

    @property
    def best(self) -> Validation | None:
        """The best validation, of equal ones the first."""
        return max(self.evaluations, key=lambda one: one.merit, default=None)

    def waited(self, min_delta: float) -> int:
        """Number of last validations without an improvement by more than `min_delta`."""
        reference, waited = -math.inf, 0
        for one in self.evaluations:
            improved = one.merit[0] - min_delta > reference
            reference, waited = (one.merit[0], 0) if improved else (reference, waited + 1)
        return waited


State = tuple[Position, dict[str, Tensor]]


def _write_state(path: Path, state: State) -> None:
    """Write one file with the tensors, and in its header the position and the digest of the tensors."""
    position, tensors = state
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    header = json.dumps({"position": to_plain(position), "digest": digest(plain)})
    write_atomically(path, save(plain, {"training": header}))


def _read_state(path: Path) -> State:
    """Read what `_write_state` wrote, unless it was damaged."""
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
            header = json.loads((file.metadata() or {})["training"])
        if header["digest"] != digest(tensors):
            raise CheckpointError("its content was changed")
        return from_plain(Position, header["position"]), tensors
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be used: {error}; delete it to start this training again") from error


@dataclass(frozen=True)
class RunResult:
    """Result of a run."""

    weights: dict[str, Tensor]  # trained parameters by name
    end: Position
    rate: float
    diverged: tuple[str, ...] = ()  # the other learning rates of the recipe that diverged

    def state_like(self, start: nn.Module) -> dict[str, Tensor]:
        """All weights of `start`, in its dtype and on its device, with trained ones replaced."""
        return {
            name: self.weights[name].to(tensor.device, tensor.dtype) if name in self.weights else tensor
            for name, tensor in start.state_dict().items()
        }

    def described(self, recipe: Recipe, parts: str | None = None) -> str:
        """A history line: parts, steps, optimizer, learning rate, seed, and validation accuracy."""
        what = parts or ", ".join(recipe.train_groups)
        what += "" if recipe.last_blocks is None else f" of the last {recipe.last_blocks} blocks"
        rate = f"{self.rate:g}" + (f", chosen of {len(recipe.grid)}" if recipe.grid else "")
        rate += f" ({', '.join(self.diverged)} diverged)" if self.diverged else ""
        best = self.end.best
        quality = "" if best is None else f"; validation accuracy {best.accuracy:.4f} at step {best.step}"
        trained = f"{what} for {self.end.step} steps: {recipe.optimizer}"
        return f"{trained}, learning rate {rate}, seed {recipe.seed}{quality}"


def train_best(
    make_learner: Callable[[torch.device], Learner[BatchT]], start: Ensemble | DualEncoder, job: Job
) -> RunResult:
    """Train copies of `start`, one per learning rate; return the best result, of equal ones that of the lowest rate.

    A rate that diverges is skipped with a warning; if all diverge, raise `DivergedError`. The grid is not part of the
    identity of the folder, so that rates that are finished serve another grid.
    """
    with ExitStack() as stack:
        stack.enter_context(restored(job.train, job.validation))
        device = require_device(job.device or start.device)
        folder = None if job.output is None else expanded(job.output) / f"member-{job.index}"
        plain = to_plain(job.recipe)
        identity = {
            "recipe": {key: plain[key] for key in plain.keys() - {"grid", "learning_rate"}},
            "method": type(job.settings).__name__,
            "settings": to_plain(job.settings),
            "member": job.index,
        }
        if folder is not None:
            seed = derive_seed(job.recipe.seed, "fingerprint")
            held_out = None if job.validation is None else source_digest(job.validation, "validation", seed)
            identity |= {"train": source_digest(job.train, "train", seed), "validation": held_out}
            identity["model"] = digest([to_plain(start.config), start])
        store = stack.enter_context(Store(folder, identity, "a training"))
        if job.recipe.compile:
            stack.enter_context(unlimited_recompiles())

        def trained(rate: float) -> RunResult:
            state = store.path(f"rate-{rate!r}.state")
            form = Form(".safetensors", _read_state, _write_state)
            run = partial(Training, make_learner, device, job, rate)
            end, weights = store.step(f"rate-{rate!r}", lambda: run().finish(state), form)
            if state is not None:
                remove(state)
            return RunResult(weights, end, rate)

        results: list[RunResult] = []
        diverged: list[str] = []
        for rate in sorted(job.recipe.rates):
            try:
                results.append(trained(rate))
            except DivergedError as error:
                if rate == max(job.recipe.rates) and not results:  # of one, or of all
                    raise
                diverged.append(f"{rate:g}")
                warn(f"the learning rate {rate:g} diverged and is dropped: {error}")

    def merit(result: RunResult) -> tuple[float, ...]:
        if job.recipe.select == "train":
            return (-result.end.loss,)
        return () if result.end.best is None else result.end.best.merit

    best = max(results, key=merit)
    return replace(best, diverged=tuple(diverged))


class Training(Generic[BatchT]):
    """A run at one learning rate: its state, and its loop."""

    def __init__(
        self, make: Callable[[torch.device], Learner[BatchT]], device: torch.device, job: Job, rate: float
    ) -> None:
        self.learner, self.device, self.job, self.recipe, self.rate = make(device), device, job, job.recipe, rate
        self.seed = derive_seed(job.recipe.seed, "member", job.index)
        order_seed = job.recipe.order_seed
        self.order = self.seed if order_seed is None else derive_seed(order_seed, "order")
        self.total, self.warmup = job.recipe.plan(length_of(job.train))
        self.at = Position()
        self.best_weights: dict[str, Tensor] = {}
        self.title = f"member {job.index}, learning rate {rate:g}"  # in messages

    def finish(self, path: Path | None) -> State:
        """Train until the budget is spent or patience runs out; return the best (without validation, last) weights.

        With a path, start from the state there, if there is one, and rewrite it every so many updates.
        """
        self.path = path
        if path is not None and path.exists():
            self.at, tensors = _read_state(path)
            self.learner.restore(tensors)
            best = {name: tensor for name, tensor in tensors.items() if name.startswith("best/")}
            self.best_weights = {name[5:]: tensor.to(self.device) for name, tensor in best.items()}
            del tensors, best
        quiet = not self.job.progress
        with tqdm(total=self.total, initial=self.at.step, desc=self.title, unit="step", disable=quiet) as bar:
            while not self._done():
                with epoch_of(self.job.train, self.at.epoch, self.order, self.device):
                    self._run_epoch(bar)
        self._validate()
        return self.at, self.best_weights or self.learner.weights()

    def _done(self) -> bool:
        patience, epochs = self.recipe.patience, self.recipe.epochs
        spent = self.at.step >= self.total if epochs is None else self.at.epoch >= epochs
        return spent or (patience is not None and self.at.waited(self.recipe.min_delta) >= patience)

    def _run_epoch(self, bar: "tqdm[Any]") -> None:
        """Train from the current position to the end of the epoch, or of the run."""
        every = self.recipe.evaluate_every
        batches = (self.learner.read(raw, index) for index, raw in enumerate(self.job.train))
        for _ in range(self.at.batch):
            next(batches, None)  # trained on before the run was stopped
        while not self._done():
            group = list(islice(batches, self.recipe.gradient_accumulation))
            if not group:
                if self.at.batch == 0:
                    raise DataError("train has no batches in an epoch; check the loader")
                self.at = replace(self.at, epoch=self.at.epoch + 1, batch=0)
                break
            self._update(group, bar)
            if every is not None and self.at.step % every == 0:
                self._validate()
            if self.at.step % self.job.checkpoint_every == 0:
                self._save()
        if every is None:
            self._validate()

    def _update(self, group: list[BatchT], bar: "tqdm[Any]") -> None:
        """One step on the batches of the group."""
        step, epoch, batch = self.at.step, self.at.epoch, self.at.batch
        rate = self.rate * self.recipe.rate_factor(step, self.total, self.warmup)
        try:
            loss = self.learner.update(group, rate, derive_seed(self.seed, "dropout", step))
        except FloatingPointError as error:
            where = f"at step {step} (batch {batch} of epoch {epoch}, {self.title})"
            raise DivergedError(f"{error} {where}: look for bad values there, lower the rate, or clip") from error
        counted = max(step - int(0.9 * self.total), 0)  # updates of the last tenth before this one
        mean = self.at.loss + (loss - self.at.loss) / (counted + 1)
        self.at = replace(self.at, step=step + 1, batch=batch + len(group), loss=mean)
        bar.set_postfix({"loss": f"{loss:.4f}", "lr": f"{rate:.2e}"}, refresh=False)
        bar.update()

    def _validate(self) -> None:
        """Validate, unless just done, and keep the weights if they are the best so far."""
        data, evaluations = self.job.validation, self.at.evaluations
        if data is None or (evaluations and evaluations[-1].step == self.at.step):
            return
        with epoch_of(data, 0, derive_seed(self.seed, "validation"), self.device):
            measured = self.learner.measure(data)
        if not all(map(math.isfinite, measured)):
            at = f"after step {self.at.step} ({self.title})"
            raise DivergedError(f"validation has an NLL of {measured[1]} {at}: look for bad values, or lower the rate")
        validation = Validation(self.at.step, *measured, by_nll=self.learner.by_nll)
        self.at = replace(self.at, evaluations=(*evaluations, validation))
        if self.at.best is validation:
            self.best_weights = self.learner.weights()

    def _save(self) -> None:
        """Rewrite the state."""
        if self.path is not None:
            best = {f"best/{name}": tensor for name, tensor in self.best_weights.items()}
            _write_state(self.path, (self.at, {**self.learner.tensors(), **best}))

"""One training loop: updates, validation, checkpoints that resume, one process or several."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset
from tqdm import tqdm

from .._distributed import ALONE, Ranks, all_ranks, is_sharded, launched, local_device
from .._utils import derive_seed, require_device
from ..batches import Batches, epoch_of, length_of, require_rereadable
from ..errors import ConfigError, DataError
from ..model.config import require_whole
from ..model.ensemble import Ensemble
from ..schema import to_plain
from .recipe import Recipe, make_optimizer
from .reproducible import Checkpoints, Position, RunState, Validation

BatchT = TypeVar("BatchT")
_LOADING = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context")
_LOADING_TOO = ("generator", "prefetch_factor", "persistent_workers")
_AUTOCAST: Mapping[str, torch.dtype | None] = {"float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Runtime:
    """Where a run computes: its device, and the ranks that share its batches and average their gradients."""

    device: torch.device
    ranks: Ranks = ALONE

    def wrap(self, model: Ensemble) -> nn.Module:
        """The model as it is called in training."""
        if self.ranks.size == 1:
            return model
        headless = any(not any(heads) for heads in zip(*model.heads, strict=True))  # its norm gets no gradient
        places = [self.device] if self.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=places, find_unused_parameters=headless)

    def share(self, train: Batches) -> Batches:
        """The batches this rank reads: every n-th, as many for each; a loader that is split already is left alone."""
        rank, size = self.ranks.rank, self.ranks.size
        if size == 1 or is_sharded(train):
            return train
        loader = train if isinstance(train, DataLoader) else None
        if loader is None or loader.batch_sampler is None or isinstance(loader.dataset, IterableDataset):
            return EveryNth(train, rank, size)
        sampler: Any = EveryNth(loader.batch_sampler, rank, size)
        settings = {name: getattr(loader, name) for name in (*_LOADING, *_LOADING_TOO)}
        return DataLoader(loader.dataset, batch_sampler=sampler, **settings)


class EveryNth:
    """Items number `start`, `start + step`, … of a source, as many for every `start`."""

    def __init__(self, batches: Batches, start: int, step: int) -> None:
        self.batches, self.start, self.step = batches, start, step

    def __len__(self) -> int:
        length = length_of(self.batches)
        if length is None:
            raise TypeError("the source has no length")
        return length // self.step

    def __iter__(self) -> Iterator[Any]:
        kept: Any = None
        for index, batch in enumerate(self.batches):
            if index % self.step == self.start:
                kept = batch
            if index % self.step == self.step - 1:
                yield kept


@contextmanager
def training_runtime(device: torch.device | str | None, fallback: torch.device) -> Iterator[Runtime]:
    """Where this process trains: on `device` or `fallback`; one of several, on a GPU of its own where there are any."""
    place = require_device(device) or fallback
    if launched():
        on_gpu = torch.cuda.is_available() if device is None else place.type == "cuda"
        place = local_device(torch.device("cuda")) if on_gpu else torch.device("cpu")
    with all_ranks(place) as ranks:
        yield Runtime(place, ranks)


class NotFiniteError(ArithmeticError):
    """A loss or a gradient that is not finite: what it is, and its place among the batches of the update."""


def require_finite_loss(loss: Tensor, batch: int) -> float:
    """The loss as a number, or an error that says which batch of the update it came from."""
    value = loss.item()
    if not math.isfinite(value):
        raise NotFiniteError(f"the loss is {value}", batch)
    return value


class Learner(ABC, Generic[BatchT]):
    """A model in training, in which `requires_grad` says what trains; `shares` and `spared` as for `make_optimizer`.

    Subclasses say what a batch is, what its gradients are, and how the model is measured.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        runtime: Runtime,
        shares: Mapping[str, float],
        spared: Container[str] = (),
    ) -> None:
        self.recipe, self.runtime = recipe, runtime
        self.trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.optimizer = make_optimizer(self.trained, recipe, shares, spared)
        self.scaler = GradScaler(runtime.device.type, enabled=recipe.precision == "fp16")

    @abstractmethod
    def read(self, raw: Any, index: int) -> BatchT:
        """A batch of the training data, checked; `index` is its number, for messages."""

    @abstractmethod
    def backward(self, group: list[BatchT], seed: int) -> float:
        """Leave the scaled gradients of batches that count as one in the parameters; gives their mean loss.

        The seed is that of the dropout of this update; every rank draws its own.
        """

    @abstractmethod
    def measure(self, validation: Batches) -> tuple[float, float]:
        """Accuracy and negative log-likelihood on validation data."""

    def autocast(self) -> torch.autocast:
        """The precision of the recipe."""
        dtype = _AUTOCAST[self.recipe.precision]
        return torch.autocast(self.runtime.device.type, dtype=dtype, enabled=dtype is not None)

    def update(self, group: list[BatchT], rate: float, seed: int) -> float:
        """One step of the optimizer on one or more batches at once; gives the mean loss over their samples."""
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = rate * parameters["share"]
        loss = self.backward(group, seed)
        self.scaler.unscale_(self.optimizer)
        gradients = [parameter.grad for parameter in self.trained.values() if parameter.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        if not self.scaler.is_enabled() and not math.isfinite(norm.item()):  # the scaler skips such steps itself
            raise NotFiniteError(f"the gradient has norm {norm.item()}", 0)
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
        """Everything to save: weights, what the optimizer keeps for each of them, and the scaler."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.trained.items():
            kept = self.optimizer.state.get(parameter, {}).items()
            tensors |= {f"optimizer/{name}/{what}": value for what, value in kept if isinstance(value, Tensor)}
            tensors[f"weights/{name}"] = parameter
        if self.scaler.is_enabled():
            state = self.scaler.state_dict()
            tensors["scaler/scale"] = torch.tensor(state["scale"], dtype=torch.float64)
            tensors["scaler/growth_tracker"] = torch.tensor(state["_growth_tracker"])
        return tensors

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back what `tensors` gave."""
        for name, parameter in self.trained.items():
            with torch.no_grad():
                parameter.copy_(tensors[f"weights/{name}"])
            prefix = f"optimizer/{name}/"
            kept = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
            if kept:  # AdamW counts its steps on the CPU
                self.optimizer.state[parameter] = {
                    what: value if what == "step" else value.to(parameter.device) for what, value in kept.items()
                }
        if self.scaler.is_enabled():
            scale, growth = tensors["scaler/scale"].item(), tensors["scaler/growth_tracker"].item()
            self.scaler.load_state_dict({**self.scaler.state_dict(), "scale": scale, "_growth_tracker": growth})


@dataclass(frozen=True)
class Job:
    """What is to be trained, whatever the learning rate."""

    recipe: Recipe
    train: Batches  # that this process reads
    validation: Batches | None
    index: int  # of the member; its random numbers are derived from it
    folder: Path | None  # of the checkpoints
    identity: Mapping[str, Any]  # what the run depends on besides recipe, rate, member and processes, as plain data
    checkpoint_every: int
    progress: bool


def check_job(train: Batches, validation: Batches | None, recipe: object, checkpoint_every: int) -> None:
    """What `finetune` and `tune_text` ask of their arguments alike, besides `Recipe.check`."""
    if not isinstance(recipe, Recipe):
        raise ConfigError(f"recipe must be a Recipe, such as Recipe.preset('sst2'), got {type(recipe).__name__}")
    require_rereadable(train, "train")
    if validation is not None:
        require_rereadable(validation, "validation")
    require_whole("checkpoint_every", checkpoint_every, 1)


@dataclass(frozen=True)
class RunResult:
    """What a run ends with: trained parameters by name, the validation they were chosen by, steps, learning rate."""

    weights: dict[str, Tensor]
    best: Validation | None
    steps: int
    rate: float

    def state_like(self, start: nn.Module) -> dict[str, Tensor]:
        """All weights of `start`, in its dtype and on its device, with the trained ones in place."""
        return {
            name: self.weights[name].to(tensor.device, tensor.dtype) if name in self.weights else tensor
            for name, tensor in start.state_dict().items()
        }

    def described(self, recipe: Recipe) -> str:
        """One line for a history: parts, steps, optimizer, learning rate, seed, and how good it was."""
        where = "" if recipe.last_blocks is None else f" of the last {recipe.last_blocks} blocks"
        chosen = f", chosen of {len(recipe.grid)}" if recipe.grid else ""
        best = self.best
        found = "" if best is None else f"; validation accuracy {best.accuracy:.4f} at step {best.step}"
        return (
            f"{', '.join(recipe.train_groups)}{where} for {self.steps} steps: {recipe.optimizer}, learning rate "
            f"{self.rate:g}{chosen}, seed {recipe.seed}{found}"
        )


def train_best(make_learner: Callable[[], Learner[BatchT]], job: Job, runtime: Runtime) -> RunResult:
    """Train once per learning rate of the recipe, smallest first; the best result."""
    first, *others = (Run(make_learner, job, rate, runtime).finish() for rate in sorted(job.recipe.rates))
    best = first
    for result in others:
        if result.best is not None and result.best.better_than(best.best):
            best = result
    return best


class Run(Generic[BatchT]):
    """The state of a run at one learning rate, and the loop that moves it on."""

    def __init__(self, make_learner: Callable[[], Learner[BatchT]], job: Job, rate: float, runtime: Runtime) -> None:
        self.job, self.recipe, self.rate, self.runtime = job, job.recipe, rate, runtime
        self.store = Checkpoints(None if job.folder is None else job.folder / f"rate-{rate!r}")
        self.seed = derive_seed(job.recipe.seed, "member", job.index)
        self.total, self.warmup = job.recipe.plan(length_of(job.train))
        self.learner = make_learner()
        self.best_weights: dict[str, Tensor] = {}
        own = {"recipe": to_plain(job.recipe), "rate": rate, "member": job.index, "processes": runtime.ranks.size}
        self.state = RunState({**job.identity, **own})

    def finish(self) -> RunResult:
        """Train until the budget is spent or patience runs out, and give the best weights (or the last)."""
        saved = self.store.read(self.state.fingerprint)
        if saved is not None and saved.finished:
            return RunResult(self.store.tensors(saved, "result"), saved.best, saved.position.step, self.rate)
        if saved is not None:
            self.state = saved
            self.learner.restore(self.store.tensors(saved, "current"))
            best = {} if saved.best is None else self.store.tensors(saved, "best")
            self.best_weights = {name: tensor.to(self.runtime.device) for name, tensor in best.items()}
        first = self.runtime.ranks.rank == 0
        with tqdm(
            total=self.total,
            initial=self.state.position.step,
            desc=f"member {self.job.index}, learning rate {self.rate:g}",
            unit="step",
            disable=not (self.job.progress and first),
        ) as bar:
            while not self._done():
                self._run_epoch(bar)
        weights = self.best_weights or self.learner.weights()
        if first:
            self.store.write(replace(self.state, finished=True, files={}), {"result": weights})
        self.runtime.ranks.wait()
        return RunResult(weights, self.state.best, self.state.position.step, self.rate)

    def _done(self) -> bool:
        patience, position = self.recipe.patience, self.state.position
        if patience is not None and self.state.waited >= patience:
            return True
        if self.recipe.epochs is not None:
            return position.epoch >= self.recipe.epochs
        return position.step >= self.total

    def _run_epoch(self, bar: "tqdm[Any]") -> None:
        """Train from the present position to the end of the epoch, or of the run."""
        with epoch_of(self.job.train, self.state.position.epoch, self.seed, self.runtime.device):
            if self._run_batches(bar):
                position = self.state.position
                self.state = replace(self.state, position=Position(position.step, position.epoch + 1, 0))
            if self.recipe.evaluate_every is None or self._done():
                self._validate()
            self._save()

    def _run_batches(self, bar: "tqdm[Any]") -> bool:
        """Update until the batches of the epoch or the run end; whether it was the batches that ended."""
        skipped = self.state.position.batch
        batches = self._batches()
        next(islice(batches, skipped, skipped), None)  # read and drop what was trained on before the checkpoint
        while not self._done():
            group = list(islice(batches, self.recipe.gradient_accumulation))
            if not group:
                return True
            self._update(group, bar)
            step, every = self.state.position.step, self.recipe.evaluate_every
            if every is not None and step % every == 0:
                self._validate()
                self._save()
            elif step % self.job.checkpoint_every == 0 and not self._done():  # the end is validated first
                self._save()
        return False

    def _batches(self) -> Iterator[BatchT]:
        """Checked batches of this epoch, still where the loader put them."""
        empty = True
        for index, raw in enumerate(self.job.train):
            empty = False
            yield self.learner.read(raw, index)
        if empty:
            epoch = self.state.position.epoch
            raise DataError(f"train has no batches in epoch {epoch}; every process needs one, check the loader")

    def _update(self, group: list[BatchT], bar: "tqdm[Any]") -> None:
        """One step on the batches of the group."""
        position = self.state.position
        rate = self.rate * self.recipe.rate_factor(position.step, self.total, self.warmup)
        try:
            loss = self.learner.update(group, rate, derive_seed(self.seed, "dropout", position.step))
        except NotFiniteError as error:
            what, batch = error.args
            kept = "" if self.store.folder is None else f"; the last checkpoint stays in {self.store.folder}"
            raise DataError(
                f"{what} at step {position.step} (batch {position.batch + batch} of epoch {position.epoch}, member "
                f"{self.job.index}, learning rate {self.rate:g}): look for bad values in that batch, lower the rate, "
                f"clip the gradient, or use a wider precision{kept}"
            ) from error
        moved = Position(position.step + 1, position.epoch, position.batch + len(group))
        self.state = replace(self.state, position=moved)
        best = {} if self.state.best is None else {"best": f"{self.state.best.accuracy:.4f}"}
        bar.set_postfix({"loss": f"{loss:.4f}", "lr": f"{rate:.2e}", **best}, refresh=False)
        bar.update()

    def _validate(self) -> None:
        """Measure on validation, keep the weights if they are the best so far, and count patience."""
        validation, position, done = self.job.validation, self.state.position, self.state.evaluations
        if validation is None or (done and done[-1].step == position.step):
            return
        with epoch_of(validation, 0, derive_seed(self.seed, "validation"), self.runtime.device):
            found = Validation(position.step, position.epoch, *self.learner.measure(validation))
        self.state = self.state.after(found, self.recipe.min_delta)
        if self.state.best is found:
            self.best_weights = self.learner.weights()

    def _save(self) -> None:
        if self.runtime.ranks.rank == 0 and self.store.folder is not None:
            tensors: dict[str, Mapping[str, Tensor]] = {"current": self.learner.tensors()}
            if self.state.best is not None and self.state.best.step == self.state.position.step:
                tensors["best"] = self.best_weights
            self.state = self.store.write(self.state, tensors)
        self.runtime.ranks.wait()

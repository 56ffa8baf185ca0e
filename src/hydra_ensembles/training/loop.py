"""One training loop: updates, validation, checkpoints that resume, one process or several."""

import hashlib
import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeGuard, TypeVar, cast

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from tqdm import tqdm

from .._utils import derive_seed, require, require_device, require_same_run, write_atomically
from ..batches import Batches, borrowed, epoch_of, iterate, length_of, move, parts_of, read_batch, require_labels
from ..errors import CheckpointError, ConfigError, DataError
from ..heads.ranking import tensor_bytes
from ..model.ensemble import Ensemble
from ..schema import from_plain, to_plain
from .recipe import RATE_FACTOR, Recipe, rate_factor, warmup_updates


class Runtime:
    """One process. The one below overrides whatever differs for several."""

    def __init__(self, device: torch.device, rank: int = 0, processes: int = 1) -> None:
        self.device = device
        self.rank = rank
        self.processes = processes

    def wrap(self, model: Ensemble) -> nn.Module:
        """The model as it is called in training."""
        return model

    def share(self, train: Batches) -> Batches:
        """The part of the training batches that this process reads."""
        return train

    def without_exchange(self, model: nn.Module) -> AbstractContextManager[Any]:
        """A block whose gradients stay in this process, because more are to be added to them."""
        return nullcontext()

    def total(self, numbers: Tensor) -> Tensor:
        """Sum over all processes."""
        return numbers

    def gather(self, rows: Tensor) -> list[Tensor]:
        """The tensor of every process, in their order; they may differ in the number of rows."""
        return [rows]

    def wait(self) -> None:
        """Go on when all processes have come this far."""


class Processes(Runtime):
    """One of several processes that accelerate, torchrun or a scheduler started; they average gradients.

    Each process reads its own share of the batches, so one update sees as many batches as there are processes.
    """

    def __init__(self, device: torch.device | None) -> None:
        accelerate = require("accelerate", extra="train")
        on_cpu = device is not None and device.type == "cpu"
        self._accelerator = accelerate.Accelerator(cpu=on_cpu or not torch.cuda.is_available(), mixed_precision="no")
        self._prepare_loader = accelerate.data_loader.prepare_data_loader
        self._ddp_options = accelerate.DistributedDataParallelKwargs
        super().__init__(self._accelerator.device, self._accelerator.process_index, self._accelerator.num_processes)

    def wrap(self, model: Ensemble) -> nn.Module:
        """The model in DistributedDataParallel, by `Accelerator.prepare`."""
        headless = any(not any(heads) for heads in zip(*model.heads, strict=True))  # its norm gets no gradient
        self._accelerator.ddp_handler = self._ddp_options(find_unused_parameters=headless)
        return cast(nn.Module, self._accelerator.prepare_model(model))

    def share(self, train: Batches) -> Batches:
        """Every n-th batch; a loader that already distributes itself is left alone."""
        if isinstance(train, DataLoader):
            if isinstance(train.sampler, DistributedSampler):
                return train
            return cast(Batches, self._prepare_loader(train, put_on_device=False))
        return EveryNth(train, self.rank, self.processes)

    def without_exchange(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Accelerate's `no_sync`."""
        return cast(AbstractContextManager[Any], self._accelerator.no_sync(model))

    def total(self, numbers: Tensor) -> Tensor:
        """Sum over all processes."""
        return cast(Tensor, self._accelerator.reduce(numbers, "sum"))

    def gather(self, rows: Tensor) -> list[Tensor]:
        """The tensor of every process, in their order; they may differ in the number of rows."""
        own = torch.zeros(self.processes, dtype=torch.long, device=self.device)
        own[self.rank] = len(rows)
        counts = self.total(own).tolist()
        padded = rows.new_zeros(max(counts), *rows.shape[1:])
        padded[: len(rows)] = rows
        gathered = cast(Tensor, self._accelerator.gather(padded)).chunk(self.processes)
        return [part[:count] for part, count in zip(gathered, counts, strict=True)]

    def wait(self) -> None:
        """Go on when all processes have come this far."""
        self._accelerator.wait_for_everyone()


class EveryNth:
    """Batches number `start`, `start + step`, … of a source, as many for every `start`."""

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


def find_runtime(device: torch.device | str | None, fallback: torch.device) -> Runtime:
    """The runtime of this process: several where the environment says so, else one on `device`."""
    wanted = require_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return Processes(wanted)
    return Runtime(fallback if wanted is None else wanted)


SOME_BATCHES, SOME_ROWS = 8, 64
"""Of the batches of a list and the rows of a tensor: how many are looked at, from the first to the last."""


def content_of(batch: Any, name: str, index: int = 0) -> dict[str, Tensor]:
    """The tensors of a batch by name, labels among them."""
    inputs, labels = read_batch(batch, name, index)
    tensors = {"inputs": inputs} if isinstance(inputs, Tensor) else dict(inputs)
    return tensors if labels is None else {**tensors, "labels": labels}


def fingerprint(
    batches: Batches, name: str, seed: int, content: Callable[[Any, str, int], Mapping[str, Tensor]] = content_of
) -> str:
    """A short name for a data source, from what can be had without reading an epoch.

    That is its length, the first batch it gives, and of what lies in memory: all labels and row numbers of its data
    set, some rows of a `TensorDataset`, all labels and some batches of a list. Two sources that agree in all of this,
    and differ in items that only reading them would show, have the same name.

    Args:
        batches: The source; it is left as it was.
        name: What to call it in errors.
        seed: Whose order the first batch is the first of.
        content: The tensors of a batch by name, given the batch, the name of the source and its position.

    Raises:
        DataError: The source has no batches, or they cannot be read.
    """
    digest = hashlib.sha256(f"{length_of(batches)}".encode())
    with borrowed(batches), epoch_of(batches, 0, seed, torch.device("cpu")):
        at_hand = dict(_at_hand(batches))
        first = next(iter(batches), None)
    if first is None:
        raise DataError(f"{name} has no batches; check the loader")
    _take_in(digest, content(first, name, 0))
    if _in_memory(batches):
        for index in _spread(len(batches), SOME_BATCHES):
            _take_in(digest, content(batches[index], name, index))
    _take_in(digest, at_hand)
    return digest.hexdigest()[:16]


def _in_memory(batches: Batches) -> TypeGuard[list[Any] | tuple[Any, ...]]:
    """Whether a source is a list and no more; a class made from one may do something when it is read."""
    return type(batches) in (list, tuple)


def _at_hand(batches: Batches) -> Iterator[tuple[str, Tensor]]:
    """What a source holds in memory that tells its items apart, by name."""
    if _in_memory(batches):
        for number, batch in enumerate(batches):
            labels = _as_tensor(_labels(batch))
            if labels is not None:
                yield f"batch {number}", labels
    parts = [inner for part in parts_of(batches) for inner in (part, *_members(part))]
    for number, part in enumerate(parts):
        for attribute in ("labels", "targets", "rows", "indices"):
            values = _as_tensor(getattr(part, attribute, None))
            if values is not None:
                yield f"{attribute} {number}", values
        if isinstance(part, TensorDataset):
            for column, tensor in enumerate(part.tensors):
                rows = tensor if tensor.dim() == 1 else tensor[_spread(len(tensor), SOME_ROWS)]
                yield f"column {number} {column}", rows


def _labels(batch: Any) -> Any:
    """Where the labels of a batch are, if it has any; not checked."""
    if isinstance(batch, Mapping):
        return batch.get("labels", batch.get("label"))
    return batch[-1] if isinstance(batch, list | tuple) and len(batch) > 1 else None


def _members(part: Any) -> Iterable[Any]:
    """The data sets that one of several (a `ConcatDataset`) is made of."""
    members = getattr(part, "datasets", None)
    return members if isinstance(members, list | tuple) else ()


def _as_tensor(values: Any) -> Tensor | None:
    """Numbers or strings in a tensor; None for anything else."""
    if isinstance(values, Tensor):
        return values
    if isinstance(values, list | tuple | range) and len(values):
        if isinstance(values[0], str):
            values = np.frombuffer("\x1f".join(map(str, values)).encode(), np.uint8)
        elif not isinstance(values[0], int | float | np.number):
            return None
    if not isinstance(values, np.ndarray | list | tuple | range):
        return None
    try:
        return torch.from_numpy(np.array(values))
    except (TypeError, ValueError):  # objects, lists of different lengths
        return None


def _spread(count: int, some: int) -> list[int]:
    """At most `some` positions out of `count`, evenly from the first to the last."""
    return sorted({round(position) for position in np.linspace(0, max(count - 1, 0), min(count, some)).tolist()})


def _take_in(digest: Any, tensors: Mapping[str, Tensor]) -> None:
    for key, tensor in sorted(tensors.items()):
        digest.update(f"{key} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor_bytes(tensor))


@dataclass(frozen=True)
class Evaluation:
    """Accuracy and negative log-likelihood of the mean member probabilities, and when they were measured."""

    step: int
    epoch: int
    accuracy: float
    nll: float

    def better_than(self, other: "Evaluation | None") -> bool:
        """Higher accuracy; where equal, lower NLL. Equal in both, the earlier one stays."""
        return other is None or (self.accuracy, -self.nll) > (other.accuracy, -other.nll)


@dataclass(frozen=True)
class Patience:
    """How many evaluations in a row brought no improvement over `reference`, the last accuracy that did."""

    reference: float = -math.inf
    waited: int = 0

    def after(self, accuracy: float, min_delta: float) -> "Patience":
        """The state after one more evaluation."""
        if accuracy - min_delta > self.reference:
            return Patience(accuracy, 0)
        return Patience(self.reference, self.waited + 1)


def measure(
    model: nn.Module, validation: Batches, classes: int, runtime: Runtime, autocast: torch.dtype | None
) -> tuple[float, float]:
    """Accuracy and NLL of the mean probabilities over all validation batches; processes share the work."""
    device = runtime.device
    dtype = next(model.parameters()).dtype
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # correct, NLL, samples
    training = model.training
    model.eval()
    with torch.no_grad():
        for index, (inputs, labels) in enumerate(iterate(validation, "validation")):
            if index % runtime.processes != runtime.rank:
                continue
            target = require_labels(labels, classes, "validation", index).to(device)
            with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
                logits = model(move(inputs, device, dtype))  # [M, B, C]
            log_probs = logits.double().log_softmax(-1).logsumexp(0) - math.log(logits.shape[0])  # [B, C]
            correct = (log_probs.argmax(1) == target).sum()
            nll = -log_probs.gather(1, target[:, None]).sum()
            sums += torch.stack([correct.double(), nll, torch.tensor(float(len(target)), device=device).double()])
    model.train(training)
    correct_sum, nll_sum, samples = runtime.total(sums).tolist()
    if not samples or not math.isfinite(nll_sum):
        raise DataError(
            f"validation has {samples:.0f} samples and a negative log-likelihood of {nll_sum}; "
            "it needs at least one sample and finite logits"
        )
    return correct_sum / samples, nll_sum / samples


FORMAT = "hydra-ensembles fine-tuning 1"
INDEX = "checkpoint.json"


@dataclass(frozen=True)
class Position:
    """How far a run is: updates made, epochs finished, batches read of the present epoch."""

    step: int = 0
    epoch: int = 0
    batch: int = 0


@dataclass(frozen=True)
class RunState:
    """Everything a run needs to go on, besides tensors.

    Attributes:
        fingerprint: What the run was started with; a checkpoint serves only the same.
        position: How far it is.
        evaluations: Every evaluation so far: the journal of the run.
        best: The evaluation whose weights are kept.
        waited: Of the patience: evaluations without improvement.
        reference: Of the patience: the accuracy to improve on; None before the first evaluation.
        finished: Whether the result is final.
        files: Tensor files, by what they hold.
    """

    fingerprint: Mapping[str, Any]
    position: Position = Position()
    evaluations: tuple[Evaluation, ...] = ()
    best: Evaluation | None = None
    waited: int = 0
    reference: float | None = None
    finished: bool = False
    files: Mapping[str, str] = field(default_factory=dict)
    format: str = FORMAT

    @property
    def patience(self) -> Patience:
        """The state of early stopping."""
        return Patience(waited=self.waited) if self.reference is None else Patience(self.reference, self.waited)


class Store:
    """The folder of one run; without a folder it keeps nothing."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def read(self, fingerprint: Mapping[str, Any]) -> RunState | None:
        """The saved state, or None when there is none; a state of another run is refused."""
        if self.folder is None or not (self.folder / INDEX).exists():
            return None
        path = self.folder / INDEX
        try:
            state = from_plain(RunState, json.loads(path.read_text(encoding="utf-8")), path.name)
        except (json.JSONDecodeError, UnicodeDecodeError, ConfigError) as error:
            raise CheckpointError(f"{path} cannot be read ({error}); delete its folder to start afresh") from error
        if state.format != FORMAT:
            raise CheckpointError(f"{path} has format {state.format!r}, this version reads {FORMAT!r}")
        asked = json.loads(json.dumps(to_plain(fingerprint)))
        require_same_run(dict(state.fingerprint), asked, self.folder, "the training")
        return state

    def tensors(self, state: RunState, what: str) -> dict[str, Tensor]:
        """The tensors of one of the files a state names."""
        if self.folder is None:
            raise CheckpointError("nothing was stored: the run has no folder")
        path = self.folder / Path(state.files[what]).name
        try:
            return load(path.read_bytes())
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read ({error}); delete its folder to start afresh") from error

    def write(self, state: RunState, tensors: Mapping[str, Mapping[str, Tensor]]) -> RunState:
        """Save a state with its tensors; files of `state.files` that are not given anew stay in use.

        Returns:
            The state as saved, naming its files.
        """
        if self.folder is None:
            return state
        files = dict(state.files)
        for what, named in tensors.items():
            files[what] = f"{what}-{state.position.step}-{state.position.epoch}.safetensors"
            content = {name: tensor.detach().cpu().contiguous() for name, tensor in named.items()}
            write_atomically(self.folder / files[what], save(content))
        state = replace(state, files=files)
        text = json.dumps(to_plain(state), indent=2)
        write_atomically(self.folder / INDEX, text.encode())
        for path in self.folder.glob("*.safetensors"):
            if path.name not in files.values():
                path.unlink(missing_ok=True)
        return state


def optimizer_tensors(optimizer: torch.optim.Optimizer, trained: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The tensors an optimizer keeps for each parameter, named `parameter/what`."""
    return {
        f"{name}/{what}": value
        for name, parameter in trained.items()
        for what, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def restore_optimizer(
    optimizer: torch.optim.Optimizer, trained: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]
) -> None:
    """Put saved tensors back where `optimizer_tensors` found them."""
    names = {parameter: name for name, parameter in trained.items()}
    listed = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    saved: dict[int, dict[str, Tensor]] = {}
    for number, parameter in enumerate(listed):
        prefix = f"{names[parameter]}/"
        one = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
        if one:
            saved[number] = one
    optimizer.load_state_dict({"state": saved, "param_groups": optimizer.state_dict()["param_groups"]})


BatchT = TypeVar("BatchT")
_AUTOCAST: Mapping[str, torch.dtype | None] = {"float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class NotFiniteError(ArithmeticError):
    """A loss or a gradient that is not finite; `batch` is its place among the batches of the update."""

    def __init__(self, what: str, batch: int) -> None:
        super().__init__(what)
        self.what, self.batch = what, batch


class BaseLearner(ABC, Generic[BatchT]):
    """A model in training. Subclasses say what a batch is, what its loss is, and how the model is measured."""

    def __init__(
        self,
        trained: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        recipe: Recipe,
        runtime: Runtime,
    ) -> None:
        self.recipe, self.runtime = recipe, runtime
        self.trained, self.optimizer = dict(trained), optimizer
        self.scaler = GradScaler(runtime.device.type, enabled=recipe.precision == "fp16")
        self.autocast = _AUTOCAST[recipe.precision]

    @abstractmethod
    def begin(self) -> None:
        """Get ready to train, after the weights are in place."""

    @abstractmethod
    def read(self, raw: Any, index: int) -> BatchT:
        """A batch of the training data, checked; `index` is its number, for messages."""

    @abstractmethod
    def update(self, group: list[BatchT], rate: float, seed: int) -> float:
        """One step of the optimizer on one or more batches at once; gives the mean loss over their samples.

        Args:
            group: Batches that count as one.
            rate: Learning rate.
            seed: Of the dropout of this update; every process draws its own.
        """

    @abstractmethod
    def measure(self, validation: Batches) -> tuple[float, float]:
        """Accuracy and negative log-likelihood on validation data."""

    def set_rate(self, rate: float) -> None:
        """Give every group of parameters its learning rate."""
        for options in self.optimizer.param_groups:
            options["lr"] = rate * options.get(RATE_FACTOR, 1.0)

    def step(self) -> None:
        """Clip and apply the gradients, then forget them."""
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

    def weights(self) -> dict[str, Tensor]:
        """A copy of the trained parameters."""
        return {name: parameter.detach().clone() for name, parameter in self.trained.items()}

    def tensors(self) -> dict[str, Tensor]:
        """Everything to save: weights, what the optimizer keeps, and the scaler."""
        tensors: dict[str, Tensor] = {f"weights/{name}": parameter for name, parameter in self.trained.items()}
        kept = optimizer_tensors(self.optimizer, self.trained)
        tensors |= {f"optimizer/{name}": value for name, value in kept.items()}
        if self.scaler.is_enabled():
            state = self.scaler.state_dict()
            tensors["scaler/scale"] = torch.tensor(state["scale"], dtype=torch.float64)
            tensors["scaler/growth_tracker"] = torch.tensor(state["_growth_tracker"])
        return tensors

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back what `tensors` gave."""
        with torch.no_grad():
            for name, parameter in self.trained.items():
                parameter.copy_(tensors[f"weights/{name}"])
        kept = {name.removeprefix("optimizer/"): value for name, value in tensors.items()}
        restore_optimizer(self.optimizer, self.trained, kept)
        if self.scaler.is_enabled():
            scale = {
                "scale": tensors["scaler/scale"].item(),
                "_growth_tracker": tensors["scaler/growth_tracker"].item(),
            }
            self.scaler.load_state_dict({**self.scaler.state_dict(), **scale})


@dataclass(frozen=True)
class RunPlan:
    """What one run is to do; `index` is the number of the member, from which its random numbers are derived."""

    recipe: Recipe
    rate: float
    index: int
    train: Batches
    validation: Batches | None
    checkpoint_every: int
    fingerprint: Mapping[str, Any]
    progress: bool


@dataclass(frozen=True)
class RunResult:
    """What a run ends with: the trained parameters by name, the evaluation they were chosen by, the last step."""

    weights: dict[str, Tensor]
    best: Evaluation | None
    steps: int


class Run(Generic[BatchT]):
    """The state of a run and the loop that moves it on."""

    def __init__(
        self, make_learner: Callable[[], BaseLearner[BatchT]], plan: RunPlan, runtime: Runtime, store: Store
    ) -> None:
        self.plan, self.recipe = plan, plan.recipe
        self.runtime, self.store = runtime, store
        self.seed = derive_seed(self.recipe.seed, "member", plan.index)
        self.total = self.recipe.updates(length_of(plan.train))
        self.warmup = warmup_updates(self.recipe.warmup, self.total)
        self.learner = make_learner()
        self.best_weights: dict[str, Tensor] = {}
        self.state = RunState(plan.fingerprint)

    def finish(self) -> RunResult:
        """Train until the budget is spent or patience runs out, and give the best weights (or the last)."""
        saved = self.store.read(self.plan.fingerprint)
        if saved is not None and saved.finished:
            return RunResult(self.store.tensors(saved, "result"), saved.best, saved.position.step)
        if saved is not None:
            self._restore(saved)
        self.learner.begin()
        main = self.runtime.rank == 0
        with tqdm(
            total=self.total,
            initial=self.state.position.step,
            desc=f"member {self.plan.index}, learning rate {self.plan.rate:g}",
            unit="step",
            disable=not (self.plan.progress and main),
        ) as bar:
            while not self._done():
                self._run_epoch(bar)
        weights = self.best_weights or self.learner.weights()
        if main:
            self.store.write(replace(self.state, finished=True, files={}), {"result": weights})
        self.runtime.wait()
        return RunResult(weights, self.state.best, self.state.position.step)

    def _done(self) -> bool:
        patience, position = self.recipe.patience, self.state.position
        if patience is not None and self.state.waited >= patience:
            return True
        if self.recipe.epochs is not None:
            return position.epoch >= self.recipe.epochs
        return position.step >= self.total

    def _run_epoch(self, bar: "tqdm[Any]") -> None:
        """Train from the present position to the end of the epoch, or of the run."""
        with epoch_of(self.plan.train, self.state.position.epoch, self.seed, self.runtime.device):
            if self._run_batches(bar):
                position = self.state.position
                self.state = replace(self.state, position=Position(position.step, position.epoch + 1, 0))
            if self.recipe.evaluate_every is None or self._done():
                self._evaluate()
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
                self._evaluate()
                self._save()
            elif step % self.plan.checkpoint_every == 0 and not self._done():  # the end is evaluated first
                self._save()
        return False

    def _batches(self) -> Iterator[BatchT]:
        """Checked batches of this epoch, still where the loader put them."""
        empty = True
        for index, raw in enumerate(self.plan.train):
            empty = False
            yield self.learner.read(raw, index)
        if empty:
            raise DataError(
                f"train has no batches in epoch {self.state.position.epoch}; check the loader, and that every process "
                "gets at least one"
            )

    def _update(self, group: list[BatchT], bar: "tqdm[Any]") -> None:
        """One step on the batches of the group."""
        recipe, position = self.recipe, self.state.position
        rate = self.plan.rate * rate_factor(
            position.step, total=self.total, warmup=self.warmup, schedule=recipe.schedule, floor=recipe.floor
        )
        try:
            loss = self.learner.update(group, rate, derive_seed(self.seed, "dropout", position.step))
        except NotFiniteError as error:
            kept = "" if self.store.folder is None else f"; the last checkpoint stays in {self.store.folder}"
            raise DataError(
                f"{error.what} at step {position.step} (batch {position.batch + error.batch} of epoch "
                f"{position.epoch}, member {self.plan.index}, learning rate {self.plan.rate:g}): look for bad values "
                f"in that batch, lower the learning rate, clip the gradient, or use a wider precision{kept}"
            ) from error
        moved = Position(position.step + 1, position.epoch, position.batch + len(group))
        self.state = replace(self.state, position=moved)
        best = {} if self.state.best is None else {"best": f"{self.state.best.accuracy:.4f}"}
        bar.set_postfix({"loss": f"{loss:.4f}", "lr": f"{rate:.2e}", **best}, refresh=False)
        bar.update()

    def _evaluate(self) -> None:
        """Measure on validation, keep the weights if they are the best so far, and count patience."""
        state, position = self.state, self.state.position
        if self.plan.validation is None or (state.evaluations and state.evaluations[-1].step == position.step):
            return
        with epoch_of(self.plan.validation, 0, derive_seed(self.seed, "validation"), self.runtime.device):
            accuracy, nll = self.learner.measure(self.plan.validation)
        evaluation = Evaluation(position.step, position.epoch, accuracy, nll)
        best = state.best
        if evaluation.better_than(best):
            best, self.best_weights = evaluation, self.learner.weights()
        patience = state.patience.after(accuracy, self.recipe.min_delta)
        self.state = replace(
            state,
            evaluations=(*state.evaluations, evaluation),
            best=best,
            waited=patience.waited,
            reference=patience.reference,
        )

    def _save(self) -> None:
        if self.runtime.rank == 0 and self.store.folder is not None:
            tensors: dict[str, Mapping[str, Tensor]] = {"current": self.learner.tensors()}
            if self.state.best is not None and self.state.best.step == self.state.position.step:
                tensors["best"] = self.best_weights
            self.state = self.store.write(self.state, tensors)
        self.runtime.wait()

    def _restore(self, saved: RunState) -> None:
        self.learner.restore(self.store.tensors(saved, "current"))
        if saved.best is not None:
            best = self.store.tensors(saved, "best")
            self.best_weights = {name: tensor.to(self.runtime.device) for name, tensor in best.items()}
        self.state = saved

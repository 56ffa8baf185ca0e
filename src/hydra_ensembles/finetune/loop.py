"""One training run: one model at one learning rate, from its start or from its checkpoint to its end."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Generic

from torch import Tensor
from tqdm import tqdm

from .._utils import derive_seed
from ..batches import Batches, epoch_of, length_of
from ..errors import DataError
from .base_learner import BaseLearner, BatchT, NotFiniteError
from .checkpoints import Position, RunState, Store
from .recipe import Recipe
from .runtime import Runtime
from .schedule import rate_factor, warmup_updates
from .validation import Evaluation


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

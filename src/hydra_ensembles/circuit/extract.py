"""Algorithm 1: repeatedly remove the head whose removal hurts the score least."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, cast, get_args

import torch
from tqdm import tqdm

from .._distributed import Ranks, all_ranks, local_device
from .._utils import require_device, warn, without_autocast
from ..arguments import Count, Range, Seed, Share, Whole, checked
from ..batches import Batches, Sources
from ..classes import in_model_order
from ..data.synthetic import synthetic_ood
from ..errors import ConfigError, DataError
from ..files import expanded, resumable
from ..fingerprints import model_fingerprint
from ..heads.masking import ONE_TOWER, checked_layers, max_removable, removable, split_heads, towers_of, working_copy
from ..heads.members import Score
from ..heads.ranking import Head, HeadLike, HeadRanking, require_budget
from ..model.dual_encoder import DualEncoder, Tower
from ..model.ensemble import Ensemble
from ..model.kinds import require_model
from ..model.zero_shot import DEFAULT_TEMPLATES, Templates, checked_names, checked_templates, zero_shot
from .cache import CachedTower, Work, WorkingModel, default_max_memory, fitting_batch_size, forward_cost
from .exact import Exact, Naive
from .joint import JointExact, JointNaive, Texts, of_tower, read_texts
from .journal import FORMAT, Journal, Step, resumed, stored_journal
from .scores import CircuitData, Distance, Method, Objective, OODScore, Ties, read_samples
from .screened import RESET_EVERY, Screened
from .timing import LONGEST, bar_updater, in_words, say, seconds_of, speed_of


@checked
@torch.inference_mode(False)  # "screened" needs gradients, also if the caller is in inference mode
@without_autocast()
def extract_circuit(
    ensemble: Ensemble | DualEncoder,
    id_batches: Batches,
    ood_batches: Sources | Literal["synthetic"] | None = None,
    *,
    score: Score = "avg",
    budget: int,
    method: Method = "auto",
    ties: Ties = "likelihood",
    ood_score: OODScore = "msp",
    max_accuracy_loss: Share | None = None,
    layers: Iterable[int] | None = None,
    removed: Iterable[HeadLike] = (),
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    max_memory: Annotated[float, Range(1)] | None = None,
    batch_size: Whole | None = None,
    journal: str | Path | None = None,
    progress: bool = True,
    screen_size: Whole | None = None,
    audit_steps: Count = 2,
    seed: Seed = 0,
    class_names: Sequence[str] | None = None,
    templates: Templates = DEFAULT_TEMPLATES,
    towers: Sequence[Tower] = ("image", "text"),
) -> HeadRanking:
    """Rank heads by switching them off one after another, each time the one whose removal hurts least.

    This is Algorithm 1 of the paper: every step permanently switches off the head without which the score S is
    highest. S is the accuracy on ID data (`"acc"`), the AUROC of the maximum softmax probability between ID and OOD
    data (`"ood"`, ties count half; with several OOD sources the mean of their AUROCs), or the mean of both (`"avg"`).

    * `"naive"` runs the whole model for every head. The reference.
    * `"exact"` makes the same choices with less work. In float64 the result equals the naive one; in float32 rounding
      may decide between heads that are a few integer units apart.
    * `"screened"` estimates all heads from their earlier effect on each sample, and measures only the best ones
      (on a GPU, with float32 products in TF32; for the accuracy it is `"exact"` with such products).
      Approximate; audited steps show how often its choice was as good as that of `"exact"`.
    * `"auto"` times a few passes, and takes `"exact"` if that takes at most ten minutes, else
      `"screened"` (for one tower). The ranking and the journal say which; a resumed run keeps it.

    For a dual encoder, the heads of both towers are candidates together, and images are classified by class names
    as in `zero_shot`. Under `torchrun` or `accelerate launch` the heads are divided among the ranks, and every rank
    returns the same ranking. Dropout is off. The model is not changed.

    Args:
        ensemble: An ensemble with a classifier, or a dual encoder; one member. Pruned heads are not candidates.
        id_batches: Labelled in-distribution batches. All samples are held in memory.
        ood_batches: OOD batches, needed for `"ood"` and `"avg"`; labels are ignored. Or a mapping from
            names to batches: sources of equal weight, however many samples each of them has. `"synthetic"` makes them
            from `id_batches`, see `data.synthetic_ood`.
        score: What to maximise.
        budget: Heads to remove.
        method: How to find the best head of each step.
        ties: Of heads that leave the same S, remove the one with the larger summed log-likelihood of the labels of the
            ID samples, rounded to 1e-6 (`"likelihood"`); then, or at once (`"order"`, as in the paper), the first
            (layer, head).
        ood_score: What detects OOD samples: the maximum softmax probability, or a feature distance that was
            fitted to the ensemble (`fit_familiarity`), such as `"mahalanobis"`; its statistics stay those of the whole
            model. `"screened"` does not support distances.
        max_accuracy_loss: Share of its accuracy on the ID samples that the model may lose in total: from 90 %, 0.02
            allows 88.2 %. A head that would cost more stays; if only such heads are left, the ranking ends there, with
            a warning and fewer heads than the budget. None for no limit, as in the paper.
        layers: Layers whose heads are candidates; None for all, which is required if both towers have candidates.
        removed: Heads that are off from the start.
        dtype: Precision of the evaluation; None for the model's own.
        device: Where to evaluate; None for where the model is. `"cuda"` is the GPU of the rank.
        max_memory: Bytes of activations to keep in addition to the embedded samples; None for half of the free memory
            of a GPU, or a quarter of the free memory of the host or container.
        batch_size: Samples in a batch, or pairs of head and sample; None for a size that suits the device.
        journal: A file that records every step. If it exists, the run resumes after its last step. One run at a time.
        progress: Print the estimated time, and show a progress bar that moves with every candidate.
        screen_size: Maximum number of heads that `"screened"` measures at a step; twice as many at every eighth step,
            where its estimates are reset. None for a third of the candidates.
        audit_steps: Steps of `"screened"`, spread evenly, at which its choice is compared with that of `"exact"`.
        seed: Seed of PyTorch's random numbers while the batches are read, for loaders that shuffle.
        class_names: For a dual encoder: the names of the classes, in the order of the labels.
        templates: For a dual encoder: sentences with `{label}` in place of a name.
        towers: For a dual encoder: the towers whose heads are candidates.

    Returns:
        The heads in removal order; `scores` are S after each removal. `provenance` holds the integers behind S,
        fingerprints, the audit, and the work done (`layer_evaluations`, blocks run on one sample; `model_forwards`,
        the multiply-adds in units of one pass of the whole model over all samples).

    Raises:
        HydraError: A model, setting, layer or head that does not fit, a budget larger than the number of candidates,
            data that is missing, empty, of a single class or not finite, or a journal that belongs to another run,
            was changed, or is being written by another process.

    Examples:
        >>> import torch, hydra_ensembles as he
        >>> from hydra_ensembles.demo import load_backbone
        >>> base = load_backbone()  # a small vision transformer: one member, 6 layers of 6 heads, 7 classes
        >>> batches = [(torch.randn(7, 3, 64, 64), torch.arange(7)) for _ in range(2)]  # or a DataLoader
        >>> ood = [(torch.randn(7, 3, 64, 64),)]
        >>> ranking = he.extract_circuit(base, batches, ood, score="avg", budget=2, layers=[5], progress=False)
        >>> [head.layer for head in ranking.first(2)], ranking.score
        ([5, 5], 'avg')
        >>> member = he.prune(base, ranking.first(2))
    """
    require_model(ensemble, "extract_circuit")
    scope = _checked_scope(ensemble, class_names, templates, towers, layers)
    off, candidates = split_heads(ensemble, scope.towers, scope.layers, removed)
    require_budget(budget, max_removable(ensemble, candidates))
    with_text = "text" in {*scope.towers, *(head.tower for head in off)}  # text heads are off, or candidates
    _check_methods(ensemble, method, ood_score, with_text)
    if score != "acc" and ood_batches is None:
        raise DataError(f'score="{score}" needs OOD samples; give ood_batches, or "synthetic", or use score="acc"')

    dtype = dtype or ensemble.dtype
    device = local_device(require_device(device or ensemble.device))
    path = None if journal is None else expanded(journal)
    distance = None
    if isinstance(ensemble, Ensemble) and ood_score != "msp" and score != "acc":
        distance = Distance(ensemble, ood_score, dtype, device)
    with all_ranks(device) as ranks:
        dual = ensemble if isinstance(ensemble, DualEncoder) else None
        model = ensemble if isinstance(ensemble, Ensemble) else zero_shot(ensemble, scope.names, scope.templates, False)
        id_batches = in_model_order(id_batches, "id_batches", model)
        if isinstance(ood_batches, str) and score != "acc":
            id_batches = list(id_batches) if isinstance(id_batches, Iterator) else id_batches
            ood_batches = synthetic_ood(id_batches, seed=seed, model=model)
        model = working_copy(model, dtype, device)
        samples = read_samples(model, id_batches, None if score == "acc" else ood_batches, seed)
        run = Extraction(
            asked=method,
            method=method,
            budget=budget,
            removed=off,
            candidates=candidates,
            screen_size=-(-len(candidates) // 3) if screen_size is None else screen_size,
            audit_steps=audit_steps,
            max_accuracy_loss=None if max_accuracy_loss is None else float(max_accuracy_loss),
            model=model,
            texts=read_texts(dual, scope.names, scope.templates, dtype, device) if dual and with_text else None,
            samples=samples,
            objective=Objective(score, samples.id_count, tuple(samples.ood_sources.values()), ties),
            distance=distance,
            ranks=ranks,
            batch_size=batch_size or fitting_batch_size(model, samples),
            max_memory=None if max_memory is None else int(max_memory),  # users write 2e9
        )
        alone = nullcontext() if path is None else ranks.locked(path.parent, "circuit extraction", path.name)
        with alone, resumable(path):
            stored = stored_journal(path, ranks)
            run.resolve_method(stored)
            identity = identity_of(run, ensemble, scope, screen_size)
            ranks.require_same((identity.model, identity.settings, budget), "model or settings")
            ranks.require_same_data(identity.data, "data")
            record = identity if path is None or stored is None else resumed(identity, stored, path, candidates)
            run.take_steps(record, path if ranks.rank == 0 else None, progress)
    return run.ranking(record, scope, seed)


class CircuitScope(NamedTuple):
    """Which heads are candidates; for a dual encoder, also the class names and the templates of their prompts."""

    towers: tuple[str, ...]
    layers: tuple[int, ...] | None  # None for all layers of several towers
    names: tuple[str, ...]  # of the classes; empty for an ensemble
    templates: tuple[str, ...]


def identity_of(
    run: "Extraction", ensemble: Ensemble | DualEncoder, scope: CircuitScope, screen_size: int | None
) -> Journal:
    """Build the identity of a journal: the model, the data, and all settings that affect which heads are chosen.

    Settings added in later releases are stored only if they differ from the earlier behaviour, so that older journals
    can be resumed. `screen_size` is the user's argument.
    """
    screened = run.method == "screened"
    settings: dict[str, Any] = {
        "score": run.objective.score,
        "method": run.method,
        "layers": None if scope.layers is None else list(scope.layers),
        "removed": [str(head) for head in run.removed],
        "dtype": str(run.model.dtype),
        "audit_steps": run.audit_steps if screened else 0,
    }
    if scope.names:
        prompts = hashlib.sha256(json.dumps([scope.names, scope.templates]).encode()).hexdigest()
        settings |= {"towers": list(scope.towers), "prompts": prompts}
    if run.objective.ties != "order":
        settings["ties"] = run.objective.ties
    if run.max_accuracy_loss is not None:
        settings["max_accuracy_loss"] = run.max_accuracy_loss
    if run.distance is not None:
        settings["ood_score"] = [run.distance.name, run.distance.fingerprint.hexdigest()]
        if run.distance.name == "knn":  # k is not part of any fingerprinted tensor
            settings["ood_score"].append(run.distance.neighbours)
    if screened:
        settings["screen_size"] = screen_size
    if run.audited:  # audited steps depend on the budget; without them, a journal can resume with a larger budget
        settings["budget"] = run.budget
    return Journal(FORMAT, model_fingerprint(ensemble), run.samples.fingerprint, settings)


def _check_methods(ensemble: Ensemble | DualEncoder, method: Method, ood_score: OODScore, with_text: bool) -> None:
    """Raise if the method does not support the request, or if the feature score was not fitted."""
    familiarity = None if isinstance(ensemble, DualEncoder) else ensemble.metadata.familiarity
    fitted = [] if familiarity is None else list(familiarity.settings.scores)
    if ood_score not in ("msp", *fitted):
        accepted = f"'msp' or a feature score fitted for this ensemble, {fitted}"
        raise ConfigError(f"ood_score must be {accepted}, got {ood_score!r}; fit_familiarity(...) fits one")
    if method == "screened" and (with_text or ood_score != "msp"):
        raise ConfigError('method="screened" is for one tower and ood_score="msp"; use method="exact"')


def _checked_scope(
    model: Ensemble | DualEncoder,
    class_names: Sequence[str] | None,
    templates: Templates,
    towers: Sequence[Tower],
    layers: Iterable[int] | None,
) -> CircuitScope:
    """Check the arguments and return the scope; class names and templates are only for dual encoders."""
    if model.num_members != 1:
        raise ConfigError(f"a circuit belongs to one model, got {model.num_members} members; give ensemble.member(i)")
    if isinstance(model, Ensemble):
        if class_names is not None:
            raise ConfigError("class_names are for dual encoders; an ensemble has its classes already")
        if model.num_classes < 2:
            raise ConfigError(f"a circuit needs answers to score, but this ensemble has {model.num_classes} classes")
        return CircuitScope((ONE_TOWER,), checked_layers(model.config, layers), (), ())
    if class_names is None:
        raise ConfigError("a dual encoder needs the names of classes to answer; give class_names")
    prompts = checked_names(class_names), checked_templates(templates)
    chosen = tuple(tower for tower in sorted(get_args(Tower)) if tower in list(towers))
    if not chosen or len(chosen) < len(towers):
        raise ConfigError(f"towers must be some of {list(get_args(Tower))}, each once, got {list(towers)}")
    if len(chosen) == 1:
        return CircuitScope(chosen, checked_layers(towers_of(model)[chosen[0]].config, layers), *prompts)
    if layers is not None:
        raise ConfigError('layers are numbered within one tower; leave `layers` out, or give towers=("image",)')
    return CircuitScope(chosen, None, *prompts)


@dataclass(eq=False)
class Extraction:
    """The greedy steps of one run; fields without a comment are as in `extract_circuit`."""

    asked: Method
    method: Method  # "auto" is replaced before the first step
    budget: int
    removed: Sequence[Head]
    candidates: Sequence[Head]  # of the first step
    screen_size: int
    audit_steps: int
    max_accuracy_loss: float | None
    model: Ensemble  # a private copy of the classifier
    texts: Texts | None  # for a dual encoder, if heads of the text tower may be off
    samples: CircuitData
    objective: Objective
    ranks: Ranks
    batch_size: int
    max_memory: int | None
    distance: Distance | None = None  # OOD score, if not the confidence
    work: Work = field(default_factory=Work)  # of this rank so far

    @property
    def audited(self) -> set[int]:
        """Steps of "screened" that are audited: evenly spaced, including the first."""
        audits = min(self.audit_steps, self.budget) if self.method == "screened" else 0
        return {index * self.budget // audits for index in range(audits)}

    def resolve_method(self, journal: Journal | None) -> None:
        """Resolve "auto": to the method in the journal, else by the estimated time."""
        if self.asked != "auto":
            return
        stored = None if journal is None else journal.settings.get("method")
        may_screen = self.texts is None and self.distance is None
        if stored in get_args(Method):
            self.method = cast(Method, stored)
        elif may_screen and self._seconds(self.candidates)["exact"] > LONGEST:
            self.method = "screened"
        else:
            self.method = "exact"

    def _seconds(self, left: Sequence[Head]) -> dict[Method, float]:
        """Estimate how long the remaining steps take with each method; all ranks use the estimate of rank 0."""
        steps = self.budget - (len(self.candidates) - len(left))
        towers = [(self.model, self.samples)]
        towers += [] if self.texts is None else [(self.texts.tower, self.texts.prompts)]
        return self.ranks.gather(seconds_of(towers, left, steps, self.objective, self._speed * self.ranks.size))[0]

    @cached_property
    def _speed(self) -> float:
        return speed_of(self.model, self.samples, self.batch_size)

    def _print_estimate(self, left: Sequence[Head], progress: bool) -> None:
        """Print the estimated time; if "auto" chose an approximate method, say so even without `progress`."""
        approximated = self.asked == "auto" and self.method == "screened"
        if not progress and not approximated:
            return
        seconds = self._seconds(left)
        steps = self.budget - (len(self.candidates) - len(left))
        text = f"circuit {self.objective.score}: {in_words(seconds[self.method])} for {steps} heads by {self.method!r}"
        if approximated:
            text += f", which is approximate; 'exact' would take {in_words(seconds['exact'])}"
        if self.ranks.rank == 0:
            (say if progress else warn)(text)

    def take_steps(self, journal: Journal, path: Path | None, progress: bool) -> None:
        """Run the greedy steps that are not in the journal yet."""
        done = journal.heads
        if len(done) >= self.budget:
            return
        left = self._left(done)
        self._print_estimate(left, progress)
        search = self._start(done)
        if journal.start is None:
            start = search.result
            journal.start = {"errors": start.errors, "discordance": start.discordance}
        if self.max_accuracy_loss is not None:  # as an exact decimal: 0.29 of 100 right answers is 29
            right = self.objective.id_count - journal.start["errors"]
            self.objective.most_errors = journal.start["errors"] + int(Fraction(str(self.max_accuracy_loss)) * right)
        before = Work()  # of all ranks
        name = f"circuit/{self.method} {self.objective.score}"
        hidden = not progress or self.ranks.rank > 0
        counts = (len(self.candidates) - step for step in range(self.budget))
        decided = list(accumulate(counts, initial=0))  # candidates before each step
        with tqdm(
            total=decided[-1], initial=decided[len(done)], desc=name, unit="head", disable=hidden, dynamic_ncols=True
        ) as bar:
            for index in range(len(done), self.budget):
                search.on_progress = bar_updater(bar, decided[index], len(self.candidates) - index, self.ranks.size)
                choice, excess = search.take(removable(self.model, left), audited=index in self.audited)
                if choice.over:
                    self._warn_of_end(journal)
                    return
                left.remove(choice.head)
                total = sum(self.ranks.gather(self.work), Work())
                spent, before = total - before, total
                layer, head, tower = choice.head
                work = spent["layer_evaluations"], spent["multiply_adds"]
                journal.add(Step(layer, head, choice.errors, choice.discordance, *work, excess, tower), path)
                reached = self.objective.achieved(choice.errors, choice.discordance)
                bar.set_postfix(removed=f"{index + 1}/{self.budget}", score=f"{reached:.4f}", refresh=False)
                search.on_progress(len(self.candidates))  # the step is complete

    def _warn_of_end(self, journal: Journal) -> None:
        assert journal.start is not None
        assert self.objective.most_errors is not None
        errors = journal.start["errors"], self.objective.most_errors
        before, least = (f"{1 - count / self.objective.id_count:.4f}" for count in errors)
        if self.ranks.rank == 0:
            ends = f"the circuit for {self.objective.score!r} ends after {len(journal.steps)} of {self.budget} heads"
            limit = f"below {least} (from {before}, max_accuracy_loss={self.max_accuracy_loss})"
            warn(f"{ends}: removing any other head would lower the accuracy {limit}")

    def _start(self, done: Sequence[Head]) -> Naive | Exact | JointExact | Screened:
        """Create the search after the steps in `done`."""
        if self.method == "screened":
            return self._screened(done)
        off, left = [*self.removed, *done], self._left(done)
        if self.method == "naive":
            common = self.model, self.samples, self.objective, self.ranks, self.work, self.batch_size, off
            return Naive(*common, distance=self.distance) if self.texts is None else JointNaive(*common, self.texts)
        if self.texts is None:
            return Exact(self._cached(self.model, self.samples, left, off), self.objective, self.ranks)
        tower, prompts = self.texts.tower, self.texts.prompts  # a quarter of the memory is for the text tower
        text_tower = self._cached(tower, prompts, of_tower(left, text=True), of_tower(off, text=True), 0.25)
        left, off = of_tower(left, text=False), of_tower(off, text=False)
        image_tower = self._cached(self.model, self.samples, left, off, 0.75)
        return JointExact(Exact(image_tower, self.objective, self.ranks), self.texts, text_tower)

    def _screened(self, done: Sequence[Head]) -> Screened:
        """Repeat the steps since the search last cleared its estimates, to restore them."""
        cleared = len(done) if self.objective.score == "acc" else len(done) - len(done) % RESET_EVERY
        left = self._left(done[:cleared])
        tower = self._cached(self.model, self.samples, left, [*self.removed, *done[:cleared]])
        search = Screened(Exact(tower, self.objective, self.ranks), self.screen_size, cleared)
        for head in done[cleared:]:
            search.choose(removable(self.model, left))
            search.remove(head)
            left.remove(head)
        return search

    def _left(self, done: Sequence[Head]) -> list[Head]:
        return [head for head in self.candidates if head not in done]

    def _cached(
        self, model: Ensemble, samples: CircuitData, left: Sequence[Head], off: Sequence[Head], share: float = 1.0
    ) -> CachedTower:
        """Wrap a copy of the model without the heads in `off`, with a share of the memory for cached activations."""
        room = default_max_memory(model.device) if self.max_memory is None else self.max_memory
        working = WorkingModel(model, off, self.work, self.distance)
        of_rank = self.ranks.share(left)
        carry = self.method == "exact"
        return CachedTower(working, samples, left, of_rank, self.batch_size, int(share * room), carry)

    def ranking(self, journal: Journal, scope: CircuitScope, seed: int) -> HeadRanking:
        """Build the ranking from the steps, with its provenance."""
        objective, start, steps = self.objective, journal.start, journal.steps[: self.budget]
        assert start is not None
        whole_pass = forward_cost(self.model, self.samples)
        if self.texts is not None:
            whole_pass += forward_cost(self.texts.tower, self.texts.prompts)
        excesses = {index: step.excess for index, step in enumerate(steps) if step.excess is not None}
        settings: dict[str, Any] = {}
        if self.distance is not None:
            settings["ood_score"] = self.distance.name
        if scope.names:
            settings |= {"towers": scope.towers, "classes": len(scope.names), "templates": scope.templates}
        if self.method == "screened":
            settings["screen_size"] = self.screen_size
        if self.max_accuracy_loss is not None:
            settings |= {"max_accuracy_loss": self.max_accuracy_loss, "complete": len(steps) == self.budget}
        return HeadRanking(
            heads=tuple(journal.heads[: self.budget]),
            scores=tuple(objective.achieved(step.errors, step.discordance) for step in steps),
            method=f"circuit/{self.method}",
            score=objective.score,
            provenance={
                "model": journal.model,
                "data": journal.data,
                "seed": seed,
                "device": self.model.device.type,
                "layers": scope.layers,
                "dtype": str(self.model.dtype),
                "asked": self.asked,
                "ties": objective.ties,
                **settings,
                "id_samples": objective.id_count,
                "ood_samples": sum(objective.ood_sizes),
                **({"ood_sources": self.samples.ood_sources} if len(objective.ood_sizes) > 1 else {}),
                "budget": self.budget,
                "removed": [list(head[: 2 if head.tower == ONE_TOWER else 3]) for head in self.removed],
                "approximate": self.method == "screened",
                "start": objective.achieved(**start),
                "errors": [step.errors for step in steps],
                "discordance": [step.discordance for step in steps],
                "layer_evaluations": sum(step.layer_evaluations for step in steps),
                "model_forwards": sum(step.multiply_adds for step in steps) / whole_pass,
                "audit": {
                    "steps": list(excesses),
                    "divergences": sum(excess > 0 for excess in excesses.values()),
                    "largest_excess": max(excesses.values(), default=0),
                },
            },
        )

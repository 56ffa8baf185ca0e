"""Algorithm 1: remove the head whose loss hurts the score least, again and again."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch
from tqdm import tqdm

from .._distributed import Ranks, all_ranks, local_device
from .._utils import require_device, require_same_run
from ..arguments import checked
from ..batches import Batches
from ..errors import CheckpointError, ConfigError, DataError, HydraError
from ..files import read_sealed, write_sealed
from ..heads.masking import TOWER, checked_layers, off_and_left, towers_of, working_copy
from ..heads.ranking import Head, HeadLike, HeadRanking, model_fingerprint, require_budget
from ..model import clip
from ..model.clip import DualEncoder
from ..model.config import require_whole
from ..model.ensemble import Ensemble
from ..schema import from_plain, to_plain
from .cache import CachedTower, Work, WorkingModel, default_max_memory, fitting_batch_size, forward_cost
from .joint import JointExact, JointNaive, Texts, of_tower, read_texts
from .scores import Method, Objective, Samples, Score, read_samples
from .screened import AFRESH, Screened
from .search import Exact, Naive


@checked
@torch.inference_mode(False)  # a caller's own would leave the gradients of "screened" nothing to work with
def extract_circuit(
    ensemble: Ensemble | DualEncoder,
    id_batches: Batches,
    ood_batches: Batches | None = None,
    *,
    score: Score = "avg",
    budget: int,
    method: Method = "exact",
    layers: Iterable[int] | None = None,
    removed: Iterable[HeadLike] = (),
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    max_memory: int | None = None,
    batch_size: int | None = None,
    journal: str | Path | None = None,
    progress: bool = True,
    screen_size: int | None = None,
    audit_steps: int = 2,
    seed: int = 0,
    class_names: Sequence[str] | None = None,
    templates: clip.Templates = clip.DEFAULT_TEMPLATES,
    towers: Sequence[clip.Tower] = ("image", "text"),
) -> HeadRanking:
    """Rank heads by switching them off one after another, each time the one whose loss hurts least.

    This is Algorithm 1 of the paper: at every step, the head without which the score S is highest is switched off for
    good; ties go to the first (layer, head). S is the accuracy on ID data (`"acc"`), the AUROC of the maximum softmax
    probability between ID and OOD data (`"ood"`, ties count half), or their mean (`"avg"`).

    * `"naive"` runs the whole model for every head. The reference.
    * `"exact"` makes the same choices with less work. In float64 the result is the naive one; in float32 rounding
      may decide between heads that are a few integer units apart.
    * `"screened"` estimates all heads by what they did to each sample before, and measures only those that come out
      best (on a GPU, with float32 products in TF32; for the accuracy it is `"exact"` with such products).
      Approximate; audited steps tell how often its choice was as good as that of `"exact"`.

    Of a dual encoder, the heads of both towers are candidates together, and images are classified by class names
    as `zero_shot` does. Under `torchrun` or `accelerate launch` the heads are spread over the ranks, and every rank
    returns the same ranking. Dropout is off. The model is left alone.

    Args:
        ensemble: An ensemble with a classifier, or a dual encoder; one member. Heads pruned before are no candidates.
        id_batches: Labelled in-distribution batches. All samples are held in memory.
        ood_batches: Out-of-distribution batches, needed for `"ood"` and `"avg"`; labels are ignored.
        score: What to keep high.
        budget: Heads to remove.
        method: How to find the best head of each step.
        layers: Layers whose heads are candidates; None for all, and where both towers have candidates.
        removed: Heads that are off from the start.
        dtype: Precision of the evaluation; None for the model's own.
        device: Where to evaluate; None for where the model is. `"cuda"` is the GPU of the rank.
        max_memory: Bytes of activations to keep beside the embedded samples; None for half of the free memory of a
            GPU, or a quarter of the host's.
        batch_size: Samples in a batch, or pairs of head and sample; None for a size that suits the device.
        journal: A file to note every step in. Where it exists, the run goes on after its last step. One run at a time.
        progress: Show a progress bar.
        screen_size: Heads that `"screened"` measures at a step, at most; twice as many at every eighth step, where
            it starts from nothing. None for a third of the candidates.
        audit_steps: Steps of `"screened"`, spread evenly, at which its choice is held against that of `"exact"`.
        seed: Start of PyTorch's random numbers while the batches are read, for loaders that shuffle.
        class_names: Of a dual encoder: the names of the classes, in the order of the labels.
        templates: Of a dual encoder: sentences with `{label}` where a name goes.
        towers: Of a dual encoder: the towers whose heads are candidates.

    Returns:
        The heads in removal order; `scores` are S after each removal. `provenance` holds the integers behind S,
        fingerprints, the audit, and the work done (`layer_evaluations`, blocks run on one sample; `model_forwards`,
        the multiply-adds in units of one pass of the whole model over all samples).

    Raises:
        HydraError: A model, setting, layer or head that does not fit, a budget larger than the number of candidates,
            data that is missing, empty, of a single class or not finite, or a journal of another run, that was
            changed, or that another process writes.
    """
    clip.require_model(ensemble, "extract_circuit")
    names, sentences = _checked_classes(ensemble, class_names, templates)
    chosen, numbered = _checked_places(ensemble, towers, layers)
    off, candidates = off_and_left(ensemble, chosen, numbered, removed)
    require_budget(budget, len(candidates))
    for name, value, accepted in (("score", score, Score), ("method", method, Method)):
        if value not in get_args(accepted):
            raise ConfigError(f"{name} must be one of {list(get_args(accepted))}, got {value!r}")
    audit_steps, seed = require_whole("audit_steps", audit_steps, 0), require_whole("seed", seed, 0)
    room = int(max_memory) if isinstance(max_memory, float) else max_memory  # bytes are written as 2e9
    for name, size in (("screen_size", screen_size), ("batch_size", batch_size), ("max_memory", room)):
        if size is not None:
            require_whole(name, size, 1)
    with_text = "text" in {*chosen, *(head.tower for head in off)}  # heads of the text tower are off, or may be
    if method == "screened" and with_text:
        raise ConfigError('method="screened" is for one tower; use method="exact", or towers=("image",)')
    if score != "acc" and ood_batches is None:
        raise DataError(f'score="{score}" compares ID with OOD samples; give ood_batches, or use score="acc"')

    dtype, place = dtype or ensemble.dtype, local_device(require_device(device or ensemble.device))
    audits = min(audit_steps, budget) if method == "screened" else 0
    settings: dict[str, Any] = {  # that decide which heads are chosen
        "score": score,
        "method": method,
        "layers": None if numbered is None else list(numbered),
        "removed": [str(head) for head in off],
        "dtype": str(dtype),
        "audit_steps": audit_steps if method == "screened" else 0,
    }
    if names:
        prompts = hashlib.sha256(json.dumps([names, sentences]).encode()).hexdigest()
        settings |= {"towers": list(chosen), "prompts": prompts}
    if method == "screened":
        settings["screen_size"] = screen_size
    if audits:  # which steps are audited depends on the budget; else a larger one continues a smaller one
        settings["budget"] = budget
    with all_ranks(place) as ranks:
        dual = ensemble if isinstance(ensemble, DualEncoder) else None
        model = ensemble if isinstance(ensemble, Ensemble) else clip.zero_shot(ensemble, names, sentences, False)
        model = working_copy(model, dtype, place)
        samples = read_samples(model, id_batches, None if score == "acc" else ood_batches, seed)
        identity = Journal(FORMAT, model_fingerprint(ensemble), samples.fingerprint, settings)
        ranks.require_same((identity, budget), "model, data or settings")
        run = Extraction(
            method=method,
            budget=budget,
            removed=off,
            candidates=candidates,
            screen_size=-(-len(candidates) // 3) if screen_size is None else screen_size,
            audited={index * budget // audits for index in range(audits)},  # spread evenly from the first on
            model=model,
            texts=read_texts(dual, names, sentences, dtype, place) if dual and with_text else None,
            samples=samples,
            objective=Objective(score, samples.id_count, samples.ood_count),
            ranks=ranks,
            batch_size=batch_size or fitting_batch_size(model, samples),
            max_memory=room,
        )
        path = None if journal is None else Path(journal).expanduser()
        with nullcontext() if path is None else ranks.locked(path.parent, "circuit extraction", path.name):
            record = resumed(identity, path, ranks, candidates)
            run.take_steps(record, path if ranks.rank == 0 else None, progress)
    more = {"seed": seed, "device": place.type, "layers": numbered, "dtype": str(dtype)}
    prompted = {"towers": chosen, "classes": len(names), "templates": sentences} if names else {}
    return run.ranking(record, {**more, **prompted})


def _checked_classes(
    model: Ensemble | DualEncoder, class_names: Sequence[str] | None, templates: clip.Templates
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names and sentences of a dual encoder, none of an ensemble; refuses a model that has no answers to score."""
    if model.num_members != 1:
        raise ConfigError(f"a circuit is of one model, got {model.num_members} members; give ensemble.member(i)")
    if isinstance(model, DualEncoder):
        if class_names is None:
            raise ConfigError("a dual encoder answers for classes by their names; give class_names")
        return clip.checked_names(class_names), clip.checked_templates(templates)
    if class_names is not None:
        raise ConfigError("class_names are for dual encoders; an ensemble has its classes already")
    if model.num_classes < 2:
        raise ConfigError(f"a circuit needs answers to score, but this ensemble has {model.num_classes} classes")
    return (), ()


def _checked_places(
    model: Ensemble | DualEncoder, towers: Sequence[clip.Tower], layers: Iterable[int] | None
) -> tuple[tuple[str, ...], tuple[int, ...] | None]:
    """Towers and layers whose heads are candidates; the layers are None for all of several towers."""
    chosen: tuple[str, ...] = (TOWER,)
    if isinstance(model, DualEncoder):
        chosen = tuple(tower for tower in sorted(get_args(clip.Tower)) if tower in towers)
        if not chosen or len(chosen) < len(towers):
            raise ConfigError(f"towers must be some of {list(get_args(clip.Tower))}, each once, got {list(towers)}")
    if len(chosen) == 1:
        return chosen, checked_layers(towers_of(model)[chosen[0]].config, layers)
    if layers is not None:
        raise ConfigError('layers are numbered within one tower; leave `layers` out, or give towers=("image",)')
    return chosen, None


@dataclass(frozen=True, eq=False)
class Extraction:
    """The greedy steps of one run; what is not explained here is named as in `extract_circuit`."""

    method: Method
    budget: int
    removed: Sequence[Head]
    candidates: Sequence[Head]  # that could be chosen at the first step
    screen_size: int
    audited: set[int]  # steps
    model: Ensemble  # a private copy of what classifies
    texts: Texts | None  # of a dual encoder, where heads of the text tower may be off
    samples: Samples
    objective: Objective
    ranks: Ranks
    batch_size: int
    max_memory: int | None
    work: Work = field(default_factory=Work)  # what was run so far, on this rank

    def take_steps(self, journal: "Journal", path: Path | None, progress: bool) -> None:
        """Take the greedy steps that the journal does not have yet."""
        done = journal.heads
        if len(done) >= self.budget:
            return
        search = self._start(done)
        if journal.start is None:
            journal.start = dict(zip(("errors", "discordance"), search.result[2:], strict=True))
        left = [head for head in self.candidates if head not in set(done)]
        counted = (0, 0)
        name, hidden = f"circuit/{self.method} {self.objective.score}", not progress or self.ranks.rank > 0
        with tqdm(total=self.budget, initial=len(done), desc=name, unit="head", disable=hidden) as bar:
            for index in range(len(done), self.budget):
                choice, excess = search.choose(left), None
                if isinstance(search, Screened) and index in self.audited:
                    measured = search.exact.choose([choice.head])
                    excess = measured.value - search.exact.choose(left, known=measured).value
                search.remove(choice.head)
                left.remove(choice.head)
                if isinstance(search, Screened):  # it chose by estimates; what is left says what it is
                    choice = search.result._replace(head=choice.head)
                each = self.ranks.gather((self.work["layer_evaluations"], self.work["multiply_adds"]))
                blocks, products = (sum(column) for column in zip(*each, strict=True))  # so far, over all ranks
                spent, counted = (blocks - counted[0], products - counted[1]), (blocks, products)
                layer, head, tower = choice.head
                journal.add(Step(layer, head, choice.errors, choice.discordance, *spent, excess, tower), path)
                bar.set_postfix(score=f"{self.objective.achieved(choice.errors, choice.discordance):.4f}")
                bar.update()

    def _start(self, done: Sequence[Head]) -> Naive | Exact | JointExact | Screened:
        """A search that goes on after some steps. "screened" repeats those since it last started from nothing."""
        repeats = self.method == "screened" and self.objective.score != "acc"
        skipped = len(done) - (len(done) % AFRESH if repeats else 0)
        off = [*self.removed, *done[:skipped]]
        left = [head for head in self.candidates if head not in done[:skipped]]
        if self.method == "naive":
            common = self.model, self.samples, self.objective, self.ranks, self.work, self.batch_size, off
            return Naive(*common) if self.texts is None else JointNaive(*common, self.texts)
        if self.texts is not None:  # a quarter of the memory is for the prompts
            tower, prompts = self.texts.tower, self.texts.prompts
            words = self._cached(tower, prompts, of_tower(left, text=True), of_tower(off, text=True), 0.25)
            left, off = of_tower(left, text=False), of_tower(off, text=False)
            pictures = self._cached(self.model, self.samples, left, off, 0.75)
            return JointExact(Exact(pictures, self.objective, self.ranks), self.texts, words)
        exact = Exact(self._cached(self.model, self.samples, left, off), self.objective, self.ranks)
        if self.method == "exact":
            return exact
        search = Screened(exact, self.screen_size, skipped)
        for head in done[skipped:]:
            search.choose(left)  # to remember what was measured
            search.remove(head)
            left.remove(head)
        return search

    def _cached(
        self, model: Ensemble, samples: Samples, left: Sequence[Head], off: Sequence[Head], share: float = 1.0
    ) -> CachedTower:
        """A copy of its own without some heads, and a share of the memory for its activations."""
        room = default_max_memory(model.device) if self.max_memory is None else self.max_memory
        own, working, carry = self.ranks.share(left), WorkingModel(model, off, self.work), self.method == "exact"
        return CachedTower(working, samples, left, own, self.batch_size, int(share * room), carry)

    def ranking(self, journal: "Journal", provenance: Mapping[str, Any]) -> HeadRanking:
        """What the steps amount to; `provenance` is what else there is to say about it."""
        objective, start, steps = self.objective, journal.start, journal.steps[: self.budget]
        assert start is not None
        whole_pass = forward_cost(self.model, self.samples)
        if self.texts is not None:
            whole_pass += forward_cost(self.texts.tower, self.texts.prompts)
        excesses = {index: step.excess for index, step in enumerate(steps) if step.excess is not None}
        screened = {"screen_size": self.screen_size} if self.method == "screened" else {}
        return HeadRanking(
            heads=tuple(journal.heads[: self.budget]),
            scores=tuple(objective.achieved(step.errors, step.discordance) for step in steps),
            method=f"circuit/{self.method}",
            score=objective.score,
            provenance={
                "model": journal.model,
                "data": journal.data,
                **provenance,
                **screened,
                "id_samples": objective.id_count,
                "ood_samples": objective.ood_count,
                "budget": self.budget,
                "removed": [list(head[: 2 if head.tower == TOWER else 3]) for head in self.removed],
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


# --- the journal: a run that was stopped goes on where it was ----------------------------------------------

FORMAT = "hydra_ensembles circuit journal 1"


@dataclass(frozen=True)
class Step:
    """One greedy step: the head removed, the integers of the model without it, and the work over all ranks.

    `excess` says, of an audited step, by how many units of the integer the choice missed the best.
    """

    layer: int
    head: int
    errors: int
    discordance: int
    layer_evaluations: int
    multiply_adds: int
    excess: int | None = None
    tower: str = TOWER


@dataclass
class Journal:
    """The steps of a run, as they are stored; `settings` is what choices depend on besides the model and the data."""

    format: str
    model: str  # fingerprints
    data: str
    settings: Mapping[str, Any]
    start: Mapping[str, int] | None = None  # `errors` and `discordance` before the first step
    steps: tuple[Step, ...] = ()

    @property
    def heads(self) -> list[Head]:
        """The heads removed so far."""
        return [Head(step.layer, step.head, step.tower) for step in self.steps]

    def add(self, step: Step, path: Path | None) -> None:
        """Append a step and write the file, where there is one, anew and in one piece, with its digest."""
        self.steps = (*self.steps, step)
        if path is not None:
            write_sealed(path, to_plain(self))


def resumed(journal: Journal, path: Path | None, ranks: Ranks, candidates: Sequence[Head]) -> Journal:
    """A journal with the steps of its file, if any, read by rank 0; all ranks stop where that is of another run."""
    problem = None
    if path is not None and ranks.rank == 0 and path.exists():
        try:
            stored = _read_journal(path)
            wanted = {**vars(journal), "start": stored.start, "steps": stored.steps}
            require_same_run(vars(stored), wanted, path, "the journal of a circuit")
            if len(set(stored.heads) & set(candidates)) < len(stored.heads):  # of before: without a digest
                raise CheckpointError(f"{path} has a head twice, or one that is no candidate; delete it to start anew")
            journal = stored
        except HydraError as error:
            problem = error
    return ranks.gather(journal, problem)[0]


def _read_journal(path: Path) -> Journal:
    try:
        journal = from_plain(Journal, read_sealed(path), "journal")
        if journal.steps and (journal.start is None or journal.start.keys() != {"errors", "discordance"}):
            raise CheckpointError("it does not say what the model was before the first step")
        return journal
    except ValueError as error:
        raise CheckpointError(
            f"{path} is not a journal of a circuit extraction ({error}); delete it to start anew, or give another path"
        ) from error

"""Algorithm 1: remove the head whose loss hurts the score least, again and again."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from tqdm import tqdm

from .._distributed import Ranks, all_ranks, local_device
from .._utils import require_device
from ..batches import Batches
from ..errors import ConfigError, DataError
from ..heads.masking import TOWER, checked_layers, existing_heads, require_heads, towers_of, working_copy
from ..heads.ranking import Head, HeadLike, HeadRanking, as_heads, model_fingerprint, require_budget
from ..model.clip import (
    DEFAULT_TEMPLATES,
    DualEncoder,
    Templates,
    Tower,
    checked_names,
    checked_templates,
    require_model,
    zero_shot,
)
from ..model.config import require_whole
from ..model.ensemble import Ensemble
from .cache import CachedTower, default_max_memory, fitting_batch_size
from .joint import JointExact, Texts, both_without, of_tower, read_texts
from .journal import Journal, Start, Step, open_journal
from .scores import Method, Objective, Samples, Score, read_samples
from .screened import AFRESH, Screened
from .search import Exact, Naive
from .working_model import Work, WorkingModel, forward_cost

Search = Naive | Exact | JointExact | Screened


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
    audit_steps: int | None = None,
    seed: int = 0,
    class_names: Sequence[str] | None = None,
    templates: Templates = DEFAULT_TEMPLATES,
    towers: Sequence[Tower] = ("image", "text"),
) -> HeadRanking:
    """Rank heads by switching them off one after another, each time the one whose loss hurts least.

    This is Algorithm 1 of the paper. At every step, each head that is left is switched off on its own, the
    score S is measured, and the head with the highest S is switched off for good; ties go to the first (layer,
    head). S is the accuracy on ID data (`"acc"`), the AUROC of the maximum softmax probability between ID and
    OOD data (`"ood"`, ties count half), or their mean (`"avg"`).

    The methods:

    * `"naive"` runs the whole model for every head. The reference.
    * `"exact"` makes the same choices with less work: activations below a layer are shared and carried over
      from step to step, and heads that can no longer win are given up before all samples were looked at. In
      float64 the result is the naive one. In float32 rounding may decide between heads that are a few
      integer units apart; `audit_steps` counts how often it does.
    * `"screened"` remembers what each head does to each sample, from when it was last measured or from a gradient
      pass, and so estimates all heads without running them; only those that come out best are measured (on a GPU,
      with float32 products in TF32). For the accuracy nothing is estimated: there it is `"exact"` with TF32 products.
      Approximate; audited steps tell how often its choice was as good as that of `"exact"`.

    Of a dual encoder, the heads of both towers are candidates together, and images are classified by class names
    as `zero_shot` does. `"exact"` runs the image tower for heads of the image tower only, and the text tower for
    heads of the text tower only.

    Under `torchrun` or `accelerate launch` the heads are spread over the ranks, and every rank returns the same
    ranking. Dropout is off. The model is left alone.

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
        journal: A file to note every step in. Where it exists, the run goes on after its last step.
        progress: Show a progress bar.
        screen_size: Heads that `"screened"` measures at a step, at most; twice as many at every eighth step, where
            it starts from nothing. None for a third of the candidates. For the accuracy no head is left out.
        audit_steps: Steps, spread evenly, at which the choice of `"exact"` is held against that of `"naive"`, or
            the choice of `"screened"` against that of `"exact"`. None for 0 and 2.
        seed: Start of PyTorch's random numbers while the batches are read, for loaders that shuffle.
        class_names: Of a dual encoder: the names of the classes, in the order of the labels.
        templates: Of a dual encoder: sentences with `{label}` where a name goes.
        towers: Of a dual encoder: the towers whose heads are candidates.

    Returns:
        The heads in removal order; `scores` are S after each removal. `provenance` holds the integers behind
        S, the work done (`layer_evaluations`, blocks run on one sample, a part of a block counted as one;
        `model_forwards`, the multiply-adds in units of one pass of the whole model over all samples),
        fingerprints, and the audit.

    Raises:
        HydraError: More than one member, no classifier, a setting, layer or head that does not exist, a budget
            larger than the number of candidates, batches that are missing, empty, or of a single class, labels
            out of range, logits that are not finite, or a journal of another run.
    """
    require_model(ensemble, "extract_circuit")
    names, sentences = _checked_classes(ensemble, class_names, templates)
    chosen = _checked_towers(ensemble, towers)
    off = as_heads(removed)
    require_heads(ensemble, off)
    settings = CircuitSettings(
        score=score,
        method=method,
        budget=budget,
        layers=_checked_layers(ensemble, chosen, layers),
        removed=off,
        dtype=ensemble.dtype if dtype is None else dtype,
        screen_size=screen_size,
        audit_steps=(2 if method == "screened" else 0) if audit_steps is None else audit_steps,
        towers=chosen,
        prompts=hashlib.sha256(json.dumps([names, sentences]).encode()).hexdigest() if names else None,
    )
    candidates = settings.candidates(ensemble)
    if max_memory is not None:
        whole = int(max_memory) if isinstance(max_memory, float) else max_memory  # bytes are written as 2e9
        max_memory = require_whole("max_memory", whole, 1)
    if batch_size is not None:
        require_whole("batch_size", batch_size, 1)
    seed = require_whole("seed", seed, 0)
    if score != "acc" and ood_batches is None:
        raise DataError(f'score="{score}" compares ID with OOD samples; give ood_batches, or use score="acc"')

    place = local_device(require_device(device) or ensemble.device)
    with all_ranks(place) as ranks:
        texts: Texts | None = None
        if isinstance(ensemble, DualEncoder):
            model = working_copy(zero_shot(ensemble, names, sentences, keep_text=False), settings.dtype, place)
            if "text" in settings.touched_towers:
                texts = read_texts(ensemble, names, sentences, settings.dtype, place)
        else:
            model = working_copy(ensemble, settings.dtype, place)
        samples = read_samples(model, id_batches, None if score == "acc" else ood_batches, seed)
        fingerprint = model_fingerprint(ensemble)
        identity = {"model": fingerprint, "data": samples.fingerprint, "settings": settings.identity()}
        ranks.require_same((identity, budget), "model, data or settings")
        record = open_journal(journal, identity, ranks)
        run = Extraction(
            settings=settings,
            candidates=candidates,
            model=model,
            texts=texts,
            samples=samples,
            ranks=ranks,
            batch_size=fitting_batch_size(model, samples) if batch_size is None else batch_size,
            max_memory=max_memory,
        )
        run.take_steps(record, progress)
    provenance: dict[str, Any] = {"model": fingerprint, "data": samples.fingerprint, "seed": seed, "device": place.type}
    if names:
        provenance |= {"towers": settings.towers, "classes": len(names), "templates": sentences}
    return run.ranking(record, provenance)


# --- what to do --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CircuitSettings:
    """Everything that decides which heads are chosen, given a model and data; named as in `extract_circuit`.

    `layers` is None for all layers of both towers; `prompts` stands for the class names of a dual encoder in their
    templates, and is None for an ensemble.
    """

    score: Score
    method: Method
    budget: int
    layers: tuple[int, ...] | None
    removed: tuple[Head, ...]
    dtype: torch.dtype
    screen_size: int | None
    audit_steps: int
    towers: tuple[str, ...]
    prompts: str | None

    def __post_init__(self) -> None:
        """Check each value by itself."""
        for name, value, accepted in (("score", self.score, Score), ("method", self.method, Method)):
            if value not in get_args(accepted):
                raise ConfigError(f"{name} must be one of {list(get_args(accepted))}, got {value!r}")
        if self.screen_size is not None:
            require_whole("screen_size", self.screen_size, 1)
        if self.method == "screened" and "text" in self.touched_towers:
            raise ConfigError(
                'method="screened" is for one tower; heads of the text tower are cheap to measure: use method="exact", '
                'or towers=("image",)'
            )
        require_whole("audit_steps", self.audit_steps, 0)

    @property
    def touched_towers(self) -> frozenset[str]:
        """Towers of which heads are off, or may be."""
        return frozenset({*self.towers, *(head.tower for head in self.removed)})

    @property
    def audited(self) -> frozenset[int]:
        """Numbers of the greedy steps that are audited, spread evenly from the first on."""
        count = min(self.audit_steps, self.budget)
        return frozenset(index * self.budget // count for index in range(count))

    def candidates(self, model: Ensemble | DualEncoder) -> list[Head]:
        """Heads that may be removed, first layer first; an error where the budget asks for more."""
        parts = towers_of(model)
        existing = (
            head for name in self.towers for head in existing_heads(parts[name].config, self.layers, tower=name)
        )
        candidates = [head for head in existing if head not in set(self.removed)]
        require_budget(self.budget, len(candidates))
        return candidates

    def identity(self) -> dict[str, object]:
        """The settings a journal must agree on to be continued.

        A larger budget continues a finished run, because the removal order of a smaller one is its
        beginning; unless steps are audited, because which ones depends on it.
        """
        settings: dict[str, object] = {
            "score": self.score,
            "method": self.method,
            "layers": None if self.layers is None else list(self.layers),
            "removed": [str(head) for head in self.removed],
            "dtype": str(self.dtype),
            "audit_steps": self.audit_steps,
        }
        if self.prompts is not None:
            settings |= {"towers": list(self.towers), "prompts": self.prompts}
        if self.method == "screened":
            settings["screen_size"] = self.screen_size
        if self.audit_steps:
            settings["budget"] = self.budget
        return settings


def _checked_classes(
    model: Ensemble | DualEncoder, class_names: Sequence[str] | None, templates: Templates
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names and sentences of a dual encoder, none of an ensemble; refuses a model that has no answers to score."""
    if model.num_members != 1:
        raise ConfigError(
            f"a circuit is extracted from one model, got an ensemble of {model.num_members} members; take one of "
            "them with ensemble.member(i)"
        )
    if isinstance(model, DualEncoder):
        if class_names is None:
            raise ConfigError("a dual encoder answers for classes by their names; give class_names")
        return checked_names(class_names), checked_templates(templates)
    if class_names is not None:
        raise ConfigError("class_names are for dual encoders; an ensemble has its classes already")
    if model.num_classes < 2:
        raise ConfigError(
            f"a circuit needs answers to score, but this ensemble has {model.num_classes} classes; convert the "
            "model with num_labels= and train its classifier first"
        )
    return (), ()


def _checked_towers(model: Ensemble | DualEncoder, towers: Sequence[Tower]) -> tuple[str, ...]:
    if isinstance(model, Ensemble):
        return (TOWER,)
    chosen, accepted = tuple(towers), get_args(Tower)
    if not chosen or len(set(chosen)) < len(chosen) or set(chosen) - set(accepted):
        raise ConfigError(f"towers must be some of {list(accepted)}, each once, got {list(chosen)}")
    return tuple(sorted(chosen))


def _checked_layers(
    model: Ensemble | DualEncoder, towers: Sequence[str], layers: Iterable[int] | None
) -> tuple[int, ...] | None:
    """The layers whose heads are candidates; None for all layers of several towers."""
    if len(towers) == 1:
        return checked_layers(towers_of(model)[towers[0]].config, layers)
    if layers is not None:
        raise ConfigError(
            "layers are numbered within one tower, but heads of both are candidates; leave `layers` out, or "
            'choose one tower with towers=("image",)'
        )
    return None


# --- doing it ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Extraction:
    """The greedy steps of one run.

    Attributes:
        settings: What to do.
        candidates: The heads that could be chosen at the first step.
        model: A private copy of what classifies.
        texts: Of a dual encoder, the text tower and its prompts, where any of its heads may be off.
        work: What was run so far, on this rank.
    """

    settings: CircuitSettings
    candidates: Sequence[Head]
    model: Ensemble
    texts: Texts | None
    samples: Samples
    ranks: Ranks
    batch_size: int
    max_memory: int | None
    work: Work = field(default_factory=Work)

    @property
    def objective(self) -> Objective:
        """What is minimised."""
        return Objective(self.settings.score, self.samples.id_count, self.samples.ood_count)

    def take_steps(self, journal: Journal, progress: bool) -> None:
        """Take the greedy steps that the journal does not have yet."""
        done, budget = journal.heads, self.settings.budget
        if len(done) >= budget:
            return
        search = self._start(done)
        if journal.start is None:
            _, _, *counts = search.result
            journal.start = Start(*counts)
        left = [head for head in self.candidates if head not in set(done)]
        counted = (0, 0)
        name = f"circuit/{self.settings.method} {self.settings.score}"
        shown = progress and self.ranks.rank == 0
        with tqdm(total=budget, initial=len(done), desc=name, unit="head", disable=not shown) as bar:
            for index in range(len(done), budget):
                choice, excess = search.choose(left), None
                if index in self.settings.audited:
                    excess = self._excess(search, choice.head, left, journal.heads)
                search.remove(choice.head)
                left.remove(choice.head)
                if isinstance(search, Screened):  # it chose by estimates; what is left says what it is
                    choice = search.result._replace(head=choice.head)
                total = self._total_work()
                spent = total[0] - counted[0], total[1] - counted[1]
                (layer, head, tower), counted = choice.head, total
                journal.add(Step(layer, head, choice.errors, choice.discordance, *spent, excess, tower))
                bar.set_postfix(score=f"{self.objective.achieved(choice.errors, choice.discordance):.4f}")
                bar.update()

    def _start(self, done: Sequence[Head]) -> Search:
        """A search that goes on after some steps. "screened" repeats those since it last started from nothing."""
        repeats = self.settings.method == "screened" and self.settings.score != "acc"
        skipped = len(done) - (len(done) % AFRESH if repeats else 0)
        off = [*self.settings.removed, *done[:skipped]]
        left = [head for head in self.candidates if head not in done[:skipped]]
        if self.settings.method == "naive":
            return self._naive(off)
        if self.settings.method == "exact":
            return self._exact(left, off) if self.texts is None else self._joint(self.texts, left, off)
        search = Screened(self._exact(left, off, carry=False), self._screen_size, skipped)
        for head in done[skipped:]:
            search.choose(left)  # to remember what was measured
            search.remove(head)
            left.remove(head)
        return search

    def _naive(self, off: Sequence[Head]) -> Naive:
        without = None
        if self.texts is not None:
            without = partial(both_without, self.model, self.texts, self.batch_size, self.work)
        return Naive(
            self.model,
            self.samples,
            self.objective,
            self.ranks,
            self.work,
            self.batch_size,
            off,
            without,
        )

    def _exact(self, candidates: Sequence[Head], off: Sequence[Head], share: float = 1.0, carry: bool = True) -> Exact:
        """Branch and bound with heads off, on a copy of its own, with a share of the memory."""
        return Exact(self._cached(self.model, self.samples, candidates, off, share, carry), self.objective, self.ranks)

    def _joint(self, texts: Texts, candidates: Sequence[Head], off: Sequence[Head]) -> JointExact:
        """The same over the heads of both towers; a quarter of the memory is for the prompts."""
        of_text = of_tower(candidates, text=True), of_tower(off, text=True)
        of_image = of_tower(candidates, text=False), of_tower(off, text=False)
        tower = self._cached(texts.tower, texts.prompts, *of_text, share=0.25)
        return JointExact(self._exact(*of_image, share=0.75), texts, tower)

    def _cached(
        self,
        model: Ensemble,
        samples: Samples,
        candidates: Sequence[Head],
        off: Sequence[Head],
        share: float,
        carry: bool = True,
    ) -> CachedTower:
        room = default_max_memory(model.device) if self.max_memory is None else self.max_memory
        own = self.ranks.share(candidates)
        working = WorkingModel(model, off, self.work)
        return CachedTower(working, samples, candidates, own, self.batch_size, int(share * room), carry)

    def _excess(self, search: Search, head: Head, left: Sequence[Head], done: Sequence[Head]) -> int:
        """By how many units a choice misses that of the method's reference."""
        if isinstance(search, Naive):
            return 0
        referee = search.exact if isinstance(search, Screened) else self._naive([*self.settings.removed, *done])
        measured = referee.evaluate(head)
        return measured.value - referee.choose(left, known=measured).value

    @property
    def _screen_size(self) -> int:
        """How many heads "screened" measures at a step, at most."""
        given = self.settings.screen_size
        return -(-len(self.candidates) // 3) if given is None else given

    def _total_work(self) -> tuple[int, int]:
        """Blocks and multiply-adds so far, over all ranks."""
        each = self.ranks.gather((self.work["layer_evaluations"], self.work["multiply_adds"]))
        blocks, products = zip(*each, strict=True)
        return sum(blocks), sum(products)

    def ranking(self, journal: Journal, provenance: Mapping[str, Any]) -> HeadRanking:
        """What the steps amount to."""
        settings, objective, start = self.settings, self.objective, journal.start
        steps = journal.steps[: settings.budget]
        whole_pass = sum(forward_cost(self.model, group) for group in self.samples.groups)
        if self.texts is not None:
            whole_pass += sum(forward_cost(self.texts.tower, group) for group in self.texts.prompts.groups)
        excesses = {index: step.excess for index, step in enumerate(steps) if step.excess is not None}
        return HeadRanking(
            heads=tuple(journal.heads[: settings.budget]),
            scores=tuple(objective.achieved(step.errors, step.discordance) for step in steps),
            method=f"circuit/{settings.method}",
            score=settings.score,
            provenance={
                **provenance,
                **({"screen_size": self._screen_size} if settings.method == "screened" else {}),
                "id_samples": objective.id_count,
                "ood_samples": objective.ood_count,
                "budget": settings.budget,
                "layers": settings.layers,
                "removed": [list(head[: 2 if head.tower == TOWER else 3]) for head in settings.removed],
                "dtype": str(settings.dtype),
                "approximate": settings.method == "screened",
                "start": None if start is None else objective.achieved(start.errors, start.discordance),
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

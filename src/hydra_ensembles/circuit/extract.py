"""Algorithm 1: remove the head whose loss hurts the score least, again and again."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from tqdm import tqdm

from .._distributed import Ranks, all_ranks, local_device
from .._utils import require_device, write_atomically
from ..batches import Batches
from ..errors import DataError, HydraError
from ..heads.masking import TOWER
from ..heads.ranking import Head, HeadLike, HeadRanking, as_heads, model_fingerprint
from ..model.clip import DEFAULT_TEMPLATES, DualEncoder, Templates, Tower
from ..model.config import require_whole
from ..model.ensemble import Ensemble
from ..schema import from_plain, to_plain
from .cache import (
    CurrentModel,
    CurrentTower,
    Texts,
    Work,
    WorkingModel,
    default_batch_size,
    default_budget,
    of_tower,
    subject_of,
    use_classes,
    working_copy,
)
from .joint import JointExact, JointNaive, TextCandidates
from .scores import Choice, CircuitSettings, Method, Objective, Samples, Score, read_samples
from .search import AFRESH, Exact, FastErrors, Naive, Screen, forward_cost

FORMAT = "hydra_ensembles circuit journal 1"


@dataclass(frozen=True)
class Step:
    """One greedy step: the head removed, and the integers of the model without it.

    Attributes:
        layer: Layer of the head.
        head: Its original index.
        errors: Wrong ID samples.
        discordance: Twice the pairs in the wrong order, plus ties; 0 where no OOD data is needed.
        layer_evaluations: Blocks run on one sample in this step, over all ranks.
        multiply_adds: Multiply-adds of this step, over all ranks.
        excess: On an audited step, by how much the choice of the method missed the reference, in units of the
            integer that is minimised; None elsewhere.
        tower: The tower of the head.
    """

    layer: int
    head: int
    errors: int
    discordance: int
    layer_evaluations: int
    multiply_adds: int
    excess: int | None = None
    tower: str = "main"


@dataclass(frozen=True)
class Start:
    """The integers of the model before the first step."""

    errors: int
    discordance: int


@dataclass(frozen=True)
class _Content:
    format: str
    model: str
    data: str
    settings: Mapping[str, Any]
    start: Start
    steps: tuple[Step, ...]


class Journal:
    """The steps of a run, kept in a file where a path is given.

    Args:
        path: The file; None keeps nothing.
        model: Fingerprint of the model.
        data: Fingerprint of the data.
        settings: What else the choices depend on.

    Raises:
        HydraError: The file belongs to another model, other data or other settings, or is no journal.
    """

    def __init__(self, path: str | Path | None, model: str, data: str, settings: Mapping[str, Any]) -> None:
        self.path = None if path is None else Path(path)
        self._header: dict[str, Any] = {"format": FORMAT, "model": model, "data": data, "settings": dict(settings)}
        self.start: Start | None = None
        self.steps: list[Step] = []
        if self.path is not None and self.path.exists():
            content = self._read(self.path)
            self.start, self.steps = content.start, list(content.steps)

    def add(self, step: Step) -> None:
        """Append a step and write the file anew, in one piece."""
        self.steps.append(step)
        if self.path is not None:
            content = {**self._header, "start": to_plain(self.start), "steps": to_plain(self.steps)}
            write_atomically(self.path, json.dumps(content, indent=1).encode())

    def _read(self, path: Path) -> _Content:
        advice = "delete the file to start anew, or give another path"
        try:
            content = from_plain(_Content, json.loads(path.read_text()), "journal")
        except (OSError, UnicodeDecodeError, json.JSONDecodeError, HydraError) as error:
            raise HydraError(f"{path} is not a journal of a circuit extraction ({error}); {advice}") from error
        if content.format != FORMAT:
            raise HydraError(f"{path} has the format {content.format!r}, expected {FORMAT!r}; {advice}")
        for name, what in (("model", "model"), ("data", "data set")):
            ours, theirs = self._header[name], getattr(content, name)
            if ours != theirs:
                raise HydraError(
                    f"{path} is the journal of another {what}: its fingerprint is {theirs[:12]}…, here it is "
                    f"{ours[:12]}…; {advice}"
                )
        ours, theirs = dict(self._header["settings"]), dict(content.settings)
        different = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
        if different:
            lines = ", ".join(f"{key}: {theirs.get(key)} there, {ours.get(key)} here" for key in different)
            raise HydraError(f"{path} is the journal of a run with other settings ({lines}); {advice}")
        return content


@dataclass(frozen=True, eq=False)
class Evaluation:
    """What an evaluation needs: a private copy of the model, the data, the aim, and means."""

    model: Ensemble
    samples: Samples
    objective: Objective
    ranks: Ranks
    work: Work
    batch_size: int
    memory_budget: int | None
    texts: Texts | None = None

    def naive(self, off: Sequence[Head]) -> Naive:
        """The reference, with heads off, on a copy of its own."""
        arguments = (_copy(self.model), self.samples, self.objective, self.ranks, self.work, self.batch_size, off)
        if self.texts is None:
            return Naive(*arguments)
        return JointNaive(*arguments, texts=replace(self.texts, tower=_copy(self.texts.tower)))

    def exact(self, candidates: Sequence[Head], off: Sequence[Head], carry: bool = True) -> Exact:
        """Branch and bound, with heads off; without `carry`, candidates keep nothing from step to step."""
        return self._exact(_copy(self.model), candidates, off, carry, self._budget)

    def joint(self, texts: Texts, candidates: Sequence[Head], off: Sequence[Head]) -> JointExact:
        """The same over the heads of both towers."""
        tower = self._working(_copy(texts.tower), of_tower(off, text=True))
        heads = of_tower(candidates, text=True)
        current = CurrentTower(tower, texts.prompts, heads, self.ranks, self.batch_size, self._budget // 4)
        text_candidates = TextCandidates(texts, current)
        model = _copy(self.model)
        use_classes(model, text_candidates.classes())
        heads, off = of_tower(candidates, text=False), of_tower(off, text=False)
        return JointExact(self._exact(model, heads, off, True, self._budget - self._budget // 4), text_candidates)

    @cached_property
    def _budget(self) -> int:
        return default_budget(self.model.device) if self.memory_budget is None else self.memory_budget

    def _working(self, model: Ensemble, off: Sequence[Head]) -> WorkingModel:
        working = WorkingModel(model, self.work)
        for head in off:
            working.drop(head)
        return working

    def _exact(
        self, model: Ensemble, candidates: Sequence[Head], off: Sequence[Head], carry: bool, budget: int
    ) -> Exact:
        working = self._working(model, off)
        current = CurrentModel(
            working, self.samples, self.objective, candidates, self.ranks, self.batch_size, budget, carry
        )
        return Exact(current, self.ranks)


def _copy(model: Ensemble) -> Ensemble:
    return working_copy(model, model.dtype, model.device)


class GreedyMethod(Protocol):
    """A way to take greedy steps."""

    def start(self) -> Choice:
        """The result of the model as it is."""

    def take(self, candidates: Sequence[Head], audit: bool) -> tuple[Choice, int | None]:
        """Choose one of the candidates and leave it off from now on.

        Returns:
            The head with its result; and, when audited, by how many units the method's own choice misses
            that of its reference.
        """


class NaiveMethod:
    """The reference itself; there is nothing to audit it by."""

    def __init__(self, naive: Naive) -> None:
        self.naive = naive

    def start(self) -> Choice:
        """The result of the model as it is."""
        return self.naive.evaluate(None)

    def take(self, candidates: Sequence[Head], audit: bool) -> tuple[Choice, int | None]:
        """Remove the best candidate."""
        choice = self.naive.choose(candidates)
        self.naive.remove(choice.head)
        return choice, 0 if audit else None


class ExactMethod:
    """Branch and bound, audited by the naive method."""

    def __init__(self, exact: Exact | JointExact, referee: Naive | None) -> None:
        self.exact, self.referee = exact, referee

    def start(self) -> Choice:
        """The result of the model as it is."""
        return self.exact.result

    def take(self, candidates: Sequence[Head], audit: bool) -> tuple[Choice, int | None]:
        """Remove the best candidate; audited, hold it against the best by the naive method's own count."""
        choice, excess = self.exact.choose(candidates), None
        if self.referee is not None:
            if audit:
                excess = self.referee.evaluate(choice.head).value - self.referee.choose(candidates).value
            self.referee.remove(choice.head)
        self.exact.remove(choice.head)
        return choice, excess


class ScreenedMethod:
    """Measures the candidates that are expected to be good, audited by branch and bound over all.

    Args:
        exact: The model whose results are reported.
        screen: Chooses, by the same model.
    """

    def __init__(self, exact: Exact, screen: Screen | FastErrors) -> None:
        self.exact, self.screen = exact, screen

    def start(self) -> Choice:
        """The result of the model as it is."""
        return self.exact.current.choice

    def take(self, candidates: Sequence[Head], audit: bool) -> tuple[Choice, int | None]:
        """Remove the best of the promising candidates; audited, hold it against the best of all."""
        head, excess = self.screen.choose(candidates), None
        if audit:
            screened = self.exact.choose([head])
            excess = screened.value - self.exact.choose(candidates, known=screened).value
        self.exact.current.remove(head)
        return replace(self.exact.current.choice, head=head), excess

    def repeat(self, candidates: Sequence[Head], head: Head) -> None:
        """Take a step whose result is known, to remember what was measured in it."""
        self.screen.choose(candidates)
        self.exact.current.remove(head)


def start_method(
    settings: CircuitSettings, evaluation: Evaluation, candidates: Sequence[Head], done: Sequence[Head]
) -> GreedyMethod:
    """Set a method up to go on after some steps.

    Args:
        settings: What to do.
        evaluation: What to do it with.
        candidates: The heads that could be chosen at the first step.
        done: Those that were chosen so far.
    """
    remembers = settings.method == "screened" and settings.score != "acc"
    repeated = len(done) % AFRESH if remembers else 0
    skipped = len(done) - repeated
    off = [*settings.removed, *done[:skipped]]
    left = [head for head in candidates if head not in done[:skipped]]
    if settings.method == "naive":
        return NaiveMethod(evaluation.naive(off))
    if settings.method == "exact":
        referee = evaluation.naive(off) if settings.audit_steps else None
        if evaluation.texts is not None:
            return ExactMethod(evaluation.joint(evaluation.texts, left, off), referee)
        return ExactMethod(evaluation.exact(left, off), referee)
    exact = evaluation.exact(left, off, carry=False)
    screen = Screen(exact, settings.screened(len(candidates)), skipped) if remembers else FastErrors(exact)
    screened = ScreenedMethod(exact, screen)
    for head in done[skipped:]:
        screened.repeat(left, head)
        left.remove(head)
    return screened


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
    memory_budget: int | None = None,
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
        memory_budget: Bytes of activations to keep beside the embedded samples; None for half of the free
            memory of a GPU, or a quarter of the host's.
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
    subject, off = subject_of(ensemble, class_names, templates, towers), as_heads(removed)
    subject.require_heads(off)
    settings = CircuitSettings(
        score=score,
        method=method,
        budget=budget,
        layers=subject.layers(layers),
        removed=off,
        dtype=ensemble.dtype if dtype is None else dtype,
        screen_size=screen_size,
        audit_steps=(2 if method == "screened" else 0) if audit_steps is None else audit_steps,
        towers=subject.towers,
        prompts=subject.prompts,
    )
    candidates = settings.candidates(subject.configs)
    if memory_budget is not None:
        whole = int(memory_budget) if isinstance(memory_budget, float) else memory_budget  # bytes are written as 2e9
        memory_budget = require_whole("memory_budget", whole, 1)
    if batch_size is not None:
        require_whole("batch_size", batch_size, 1)
    seed = require_whole("seed", seed, 0)
    if score != "acc" and ood_batches is None:
        raise DataError(f'score="{score}" compares ID with OOD samples; give ood_batches, or use score="acc"')

    place = local_device(require_device(device) or ensemble.device)
    with all_ranks(place) as ranks:
        copy = working_copy(subject.classifier, settings.dtype, place)
        samples = read_samples(copy, id_batches, None if score == "acc" else ood_batches, seed)
        fingerprint = model_fingerprint(ensemble)
        ranks.require_same((fingerprint, samples.fingerprint, settings.identity(), budget), "model, data or settings")
        record = _open_journal(journal, fingerprint, samples.fingerprint, settings, ranks)
        evaluation = Evaluation(
            model=copy,
            samples=samples,
            objective=Objective(score, samples.id_count, samples.ood_count),
            ranks=ranks,
            work=Work(),
            batch_size=default_batch_size(copy, samples) if batch_size is None else batch_size,
            memory_budget=memory_budget,
            texts=subject.texts(off, settings.dtype, place),
        )
        _run(settings, evaluation, candidates, record, progress)
    provenance: dict[str, Any] = {"model": fingerprint, "data": samples.fingerprint, "seed": seed, "device": place.type}
    if subject.names is not None:
        provenance |= {"towers": subject.towers, "classes": len(subject.names), "templates": subject.templates}
    if method == "screened":
        provenance["screen_size"] = settings.screened(len(candidates))
    return _ranking(settings, evaluation, record, provenance)


def _run(
    settings: CircuitSettings,
    evaluation: Evaluation,
    candidates: Sequence[Head],
    record: Journal,
    progress: bool,
) -> None:
    """Take the greedy steps that the journal does not have yet."""
    done = [Head(step.layer, step.head, step.tower) for step in record.steps]
    if len(done) >= settings.budget:
        return
    left = [head for head in candidates if head not in set(done)]
    method = start_method(settings, evaluation, candidates, done)
    if record.start is None:
        start = method.start()
        record.start = Start(start.errors, start.discordance)
    audited = settings.audited()
    bar = tqdm(
        total=settings.budget,
        initial=len(done),
        desc=f"circuit/{settings.method} {settings.score}",
        unit="head",
        disable=not progress or evaluation.ranks.rank != 0,
    )
    with bar:
        counted = (0, 0)
        for index in range(len(done), settings.budget):
            choice, excess = method.take(left, audit=index in audited)
            left.remove(choice.head)
            total = _total(evaluation)
            record.add(_step(choice, excess, total, counted))
            counted = total
            bar.set_postfix({"score": f"{evaluation.objective.achieved(choice.errors, choice.discordance):.4f}"})
            bar.update()


def _total(evaluation: Evaluation) -> tuple[int, int]:
    """Blocks and multiply-adds so far, over all ranks."""
    work = evaluation.work
    blocks, products = zip(*evaluation.ranks.gather((work.layer_evaluations, work.multiply_adds)), strict=True)
    return sum(blocks), sum(products)


def _step(choice: Choice, excess: int | None, total: tuple[int, int], before: tuple[int, int]) -> Step:
    (layer, head, tower), blocks, products = choice.head, total[0] - before[0], total[1] - before[1]
    return Step(layer, head, choice.errors, choice.discordance, blocks, products, excess, tower)


def _open_journal(path: str | Path | None, model: str, data: str, settings: CircuitSettings, ranks: Ranks) -> Journal:
    """The journal, read and written by rank 0; the other ranks get its steps, or its refusal."""
    problem: HydraError | None = None
    record = Journal(None, model, data, settings.identity())
    if ranks.rank == 0:
        try:
            record = Journal(path, model, data, settings.identity())
        except HydraError as error:
            problem = error
    problem = ranks.from_first(problem)
    if problem is not None:
        raise problem
    record.start, record.steps = ranks.from_first((record.start, record.steps))
    return record


def _ranking(
    settings: CircuitSettings, evaluation: Evaluation, record: Journal, provenance: dict[str, Any]
) -> HeadRanking:
    objective, texts = evaluation.objective, evaluation.texts
    steps = record.steps[: settings.budget]
    whole_pass = sum(forward_cost(evaluation.model, group) for group in evaluation.samples.groups)
    if texts is not None:
        whole_pass += sum(forward_cost(texts.tower, group) for group in texts.prompts.groups)
    excesses = [(index, step.excess) for index, step in enumerate(steps) if step.excess is not None]
    start = record.start
    return HeadRanking(
        heads=tuple(Head(step.layer, step.head, step.tower) for step in steps),
        scores=tuple(objective.achieved(step.errors, step.discordance) for step in steps),
        method=f"circuit/{settings.method}",
        score=settings.score,
        provenance={
            **provenance,
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
                "steps": [index for index, _ in excesses],
                "divergences": sum(excess > 0 for _, excess in excesses),
                "largest_excess": max((excess for _, excess in excesses), default=0),
            },
        },
    )

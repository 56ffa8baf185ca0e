"""Greedy circuit extraction: the loop around the methods, and what it leaves behind."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ..._distributed import Ranks, all_ranks, local_device
from ..._utils import require_device
from ...batches import Batches
from ...errors import DataError, HydraError
from ...model.clip import DEFAULT_TEMPLATES, DualEncoder, Templates, Tower
from ...model.config import require_whole
from ...model.ensemble import Ensemble
from ..fingerprint import model_fingerprint
from ..head import Head, HeadLike, as_heads
from ..mask import TOWER
from ..ranking import HeadRanking
from .choice import Choice
from .journal import Journal, Start, Step
from .memory import default_batch_size
from .methods import Evaluation, start_method
from .naive import forward_cost
from .samples import read_samples
from .scores import Objective
from .settings import CircuitSettings, Method, Score
from .subject import subject_of
from .work import Work
from .working_model import working_copy


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

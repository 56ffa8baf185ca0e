"""Greedy circuit extraction: the loop around the methods, and what it leaves behind."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ...batches import Batches
from ...ensemble import Ensemble
from ...errors import ConfigError, DataError, HydraError
from ..fingerprint import model_fingerprint
from ..head import Head, HeadLike, as_heads
from ..mask import checked_layers
from ..ranking import HeadRanking
from .choice import Choice
from .distributed import Ranks, all_ranks, local_device
from .journal import Journal, Start, Step
from .memory import default_batch_size
from .methods import Evaluation, start_method
from .naive import forward_cost
from .samples import read_samples
from .scores import Objective
from .settings import CircuitSettings, Method, Score
from .work import Work
from .working_model import working_copy


def extract_circuit(
    ensemble: Ensemble,
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
    screen_size: int = 6,
    audit_steps: int | None = None,
    seed: int = 0,
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
      with float32 products in TF32). Approximate; audited steps tell how often its choice was as good as that of
      `"exact"`.

    Under `torchrun` or `accelerate launch` the heads are spread over the ranks, and every rank returns the same
    ranking. Dropout is off. The ensemble is left alone.

    Args:
        ensemble: One member, with a classifier. Heads pruned before are no candidates.
        id_batches: Labelled in-distribution batches. All samples are held in memory.
        ood_batches: Out-of-distribution batches, needed for `"ood"` and `"avg"`; labels are ignored.
        score: What to keep high.
        budget: Heads to remove.
        method: How to find the best head of each step.
        layers: Layers whose heads are candidates; None for all.
        removed: Heads that are off from the start.
        dtype: Precision of the evaluation; None for the ensemble's own.
        device: Where to evaluate; None for where the ensemble is. `"cuda"` is the GPU of the rank.
        memory_budget: Bytes of activations to keep beside the embedded samples; None for half of the free
            memory of a GPU, or a quarter of the host's.
        batch_size: Samples in a batch, or pairs of head and sample; None for a size that suits the device.
        journal: A file to note every step in. Where it exists, the run goes on after its last step.
        progress: Show a progress bar.
        screen_size: Heads that `"screened"` measures at a step, at most; twice as many at every eighth step, where
            it starts from nothing.
        audit_steps: Steps, spread evenly, at which the choice of `"exact"` is held against that of `"naive"`, or
            the choice of `"screened"` against that of `"exact"`. None for 0 and 2.
        seed: Start of PyTorch's random numbers while the batches are read, for loaders that shuffle.

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
    _require_single_classifier(ensemble)
    settings = CircuitSettings(
        score=score,
        method=method,
        budget=budget,
        layers=checked_layers(ensemble.config, layers),
        removed=as_heads(removed),
        dtype=ensemble.dtype if dtype is None else dtype,
        screen_size=screen_size,
        audit_steps=(2 if method == "screened" else 0) if audit_steps is None else audit_steps,
    )
    candidates = settings.candidates(ensemble.config)
    for name, value in (("memory_budget", memory_budget), ("batch_size", batch_size)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, or None for a default, got {value}")
    if score != "acc" and ood_batches is None:
        raise DataError(f'score="{score}" compares ID with OOD samples; give ood_batches, or use score="acc"')

    place = local_device(ensemble.device if device is None else torch.device(device))
    with all_ranks(place) as ranks:
        copy = working_copy(ensemble, settings.dtype, place)
        samples = read_samples(copy, id_batches, None if score == "acc" else ood_batches, seed)
        model = model_fingerprint(ensemble)
        ranks.require_same((model, samples.fingerprint, settings.identity(), budget), "model, data or settings")
        record = _open_journal(journal, model, samples.fingerprint, settings, ranks)
        evaluation = Evaluation(
            model=copy,
            samples=samples,
            objective=Objective(score, samples.id_count, samples.ood_count),
            ranks=ranks,
            work=Work(),
            batch_size=default_batch_size(copy, samples) if batch_size is None else batch_size,
            memory_budget=memory_budget,
        )
        _run(settings, evaluation, candidates, record, progress)
    provenance = {"model": model, "data": samples.fingerprint, "seed": seed, "device": place.type}
    return _ranking(settings, evaluation, record, provenance)


def _run(
    settings: CircuitSettings,
    evaluation: Evaluation,
    candidates: Sequence[Head],
    record: Journal,
    progress: bool,
) -> None:
    """Take the greedy steps that the journal does not have yet."""
    done = [Head(step.layer, step.head) for step in record.steps]
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
    (layer, head, _), blocks, products = choice.head, total[0] - before[0], total[1] - before[1]
    return Step(layer, head, choice.errors, choice.discordance, blocks, products, excess)


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
    objective, model = evaluation.objective, evaluation.model
    steps = record.steps[: settings.budget]
    whole_pass = sum(forward_cost(model, group) for group in evaluation.samples.groups)
    excesses = [(index, step.excess) for index, step in enumerate(steps) if step.excess is not None]
    start = record.start
    return HeadRanking(
        heads=tuple(Head(step.layer, step.head) for step in steps),
        scores=tuple(objective.achieved(step.errors, step.discordance) for step in steps),
        method=f"circuit/{settings.method}",
        score=settings.score,
        provenance={
            **provenance,
            "id_samples": objective.id_count,
            "ood_samples": objective.ood_count,
            "budget": settings.budget,
            "layers": list(settings.layers),
            "removed": [list(head[:2]) for head in settings.removed],
            "dtype": str(settings.dtype),
            "approximate": settings.method == "screened",
            "start": None if start is None else objective.achieved(start.errors, start.discordance),
            "errors": [step.errors for step in steps],
            "discordance": [step.discordance for step in steps],
            "layer_evaluations": sum(step.layer_evaluations for step in steps),
            "model_forwards": sum(step.multiply_adds for step in steps) / whole_pass,
            "screen_size": settings.screen_size if settings.method == "screened" else None,
            "audit": {
                "steps": [index for index, _ in excesses],
                "divergences": sum(excess > 0 for _, excess in excesses),
                "largest_excess": max((excess for _, excess in excesses), default=0),
            },
        },
    )


def _require_single_classifier(ensemble: Ensemble) -> None:
    if ensemble.num_members != 1:
        raise ConfigError(
            f"a circuit is extracted from one model, got an ensemble of {ensemble.num_members} members; take one of "
            "them with ensemble.member(i)"
        )
    if ensemble.num_classes < 2:
        raise ConfigError(
            f"a circuit needs answers to score, but this ensemble has {ensemble.num_classes} classes; convert the "
            "model with num_labels= and train its classifier first"
        )

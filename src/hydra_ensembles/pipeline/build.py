"""The whole chain: convert, rank heads, choose members, prune, fine-tune, fuse, calibrate."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from .._utils import derive_seed, warn, without_autocast
from ..batches import (
    Batches,
    Sources,
    changed,
    first_epoch,
    iterate,
    named_sources,
    renumbered,
    require_labels,
    require_rereadable,
    size_of,
)
from ..calibrate import calibrate
from ..circuit.extract import extract_circuit
from ..data.synthetic import synthetic_ood
from ..digest import digest, digest_batches, require_other_samples, row_digests, source_digest
from ..errors import TooFewSamplesError
from ..familiarity import fit_familiarity
from ..fuse import fuse
from ..heads.masking import Head
from ..heads.ranking import (
    CIRCUIT_ORDER,
    RANKING,
    HeadRanking,
    Score,
    circuit_members,
    distinct_taylor,
    random_members,
    sampled_members,
)
from ..heads.taylor import taylor
from ..metrics.bootstrap import Interval, paired
from ..metrics.distance import FamiliarityName
from ..metrics.probabilities import at_labels, weighted_mean
from ..model.ensemble import ENSEMBLE, Ensemble
from ..settings import to_plain
from ..store import Store
from ..training.distill import RECIPE, distill
from ..training.finetune import finetune
from .settings import BuildData, HydraConfig, ReadBatch, pruned, removable, starting_model

RESULT = "ensemble"  # name of the finished ensemble in a run folder
EXTRA_HEADS = 2  # extra heads that a circuit ranks, in case it repeats another member


@torch.inference_mode(False)  # inference mode of the caller would leave Taylor scores and fine-tuning without gradients
@without_autocast()
def build(
    model: nn.Module,
    config: HydraConfig,
    *,
    train: Batches | None = None,
    id: Batches | None = None,
    ood: Sources | Literal["synthetic"] | None = None,
    validation: Batches | None = None,
    output: str | Path | None = None,
    device: torch.device | str | None = None,
    progress: bool = True,
) -> Ensemble:
    """Make an ensemble from one model: convert, rank heads, choose members, prune, fine-tune and fuse, calibrate.

    Each step leaves its product in `output`. Called again with the same arguments, an interrupted build resumes and (on
    a CPU) gives a bit-identical result; a finished one is read back, the folder of another one is refused.

    Args:
        model: A model that `convert` takes, or an `Ensemble` with one member. It is not changed.
        config: What to make.
        train: Labelled training batches that can be read repeatedly, for fine-tuning and Taylor rankings.
        id: Held-out labelled batches, kept in memory. A half drawn by the seed ranks heads, the other half calibrates.
        ood: Batches unlike the training data, for circuits, kept in memory; by name for several sources of equal
            weight; `"synthetic"` makes them from `id`, see `data.synthetic_ood`.
        validation: Held-out labelled batches for calibration and choices in fine-tuning; all of `id` then ranks heads.
        output: Run folder; None keeps nothing.
        device: Where to compute; None stays where the model is.
        progress: Whether to show progress bars.

    Examples:
        >>> config = he.HydraConfig(members=3, strategy="random", accepted_share=0.8)  # "circuit" needs ood=
        >>> hydra = he.build(base, config, id=batches, output="run", progress=False)
        >>> hydra.num_members, hydra.predict(torch.randn(5, 3, 64, 64)).accept.shape
        (3, torch.Size([5]))
    """
    base = starting_model(model, device, "build")
    config = config.settled(base)
    used = {"train": train if config.reads_train else None, "ood": ood if config.extracts_circuits else None}
    data = read_for_build(config.seed, base, id=id, validation=validation, **used)
    config.check(base, data)
    identity = {"config": to_plain(config), "model": model_identity(base), "data": data_identity(data)}
    with Store(output, identity, "a build") as run:
        chain = Chain(base, config, data, run, progress=progress)
        return chain.step(RESULT, lambda: compare_with_base(chain.assembled(), chain))


@dataclass(frozen=True, eq=False)
class Chain:
    """The steps of one build; builds of a search share a store, in which each has its own folder `at`."""

    base: Ensemble
    config: HydraConfig
    data: BuildData
    run: Store
    at: str = ""
    progress: bool = True

    def step(self, name: str, make: Callable[[], Ensemble]) -> Ensemble:
        """An ensemble of this build, read from the store or made, on the device of the model."""
        return self.run.step(f"{self.at}{name}", make, ENSEMBLE).to(self.base.device)

    def assembled(self) -> Ensemble:
        """The fused and calibrated ensemble, step by step."""
        heads = self.heads()
        if self.config.training == "together":
            members = [self.named(pruned(self.base, lost), i, origin) for i, (origin, lost) in enumerate(heads)]
            fused = self.trained(fuse(members, **self.config.fusions, trunk=self.config.trunk), 0)
        else:
            members = [self.step(f"members/{i}", partial(self.member, i, *choice)) for i, choice in enumerate(heads)]
            fused = fuse(members, **self.config.fusions, average=self.config.average_trunk * self.config.trunk)
            fused = self.distilled(fused, members) if self.config.distill else fused
        return calibrated(fused, self.config, self.data)

    def heads(self) -> list[tuple[str, list[Head]]]:
        """For each member, how its heads were chosen, and the heads it loses."""
        rows = self.run.step(f"{self.at}heads", self.choose)
        return [(row["origin"], [Head(*head) for head in row["heads"]]) for row in rows]

    def choose(self) -> list[dict[str, Any]]:
        """Choose the heads of all members."""
        config, count = self.config, self.config.pruned_members
        layers, pool = config.layers(self.base), config.pool_size(self.base)
        chosen: list[tuple[str, Sequence[Head]]] = []
        match config.strategy:
            case "random":
                heads = random_members(self.base, config.lost, count, config.seed, layers)
                chosen = [("random heads", lost) for lost in heads]
            case "taylor":
                draws = distinct_taylor(self.taylor, config.lost, count)
                chosen = [(f"taylor, draw {draw}", ranking.first(config.lost)) for draw, ranking in draws]
            case "sampled":
                size = pool or config.lost
                heads = sampled_members(self.circuit("avg", size), config.lost, size, count, config.seed)
                chosen = [("drawn from circuit avg", lost) for lost in heads]
            case "circuit":
                names = [f"circuit {score}" for score in CIRCUIT_ORDER] + ["drawn from circuit avg"] * count
                chosen = list(zip(names, self.circuits(pool), strict=False))
            case "branches":
                chosen = [("all heads", ())] * config.members
        return [{"origin": origin, "heads": lost} for origin, lost in chosen]

    def circuits(self, pool: int | None) -> Sequence[Sequence[Head]]:
        """One circuit for each of the first members; the ranking that other members are drawn from is longer."""
        lost, count = self.config.lost, self.config.pruned_members
        more = min(lost + EXTRA_HEADS, removable(self.base, self.config.layers(self.base)))
        sizes = {score: more if score != "avg" else pool or lost for score in CIRCUIT_ORDER[:count]}
        rankings: dict[str, HeadRanking] = {score: self.circuit(score, size) for score, size in sizes.items()}
        return circuit_members(rankings, lost, count, pool, self.config.seed)

    def circuit(self, score: Score, budget: int) -> HeadRanking:
        """The circuit for a score; of builds that share a store, the first one extracts it."""
        config = self.config
        name = f"rankings/{score}-{config.ties}-{budget}-above-{config.trunk}"
        settings: dict[str, Any] = {"score": score, "budget": budget, "ties": config.ties, "progress": self.progress}
        settings |= {"layers": config.layers(self.base), "output": self.run.path(f"{name}.steps")}
        sets: Any = (self.data.ranking, self.data.ood)
        return self.run.step(name, partial(extract_circuit, self.base, *sets, **settings), RANKING)

    def taylor(self, draw: int) -> HeadRanking:
        """One Taylor ranking, on calibration batches of its own."""
        config = self.config
        settings: dict[str, Any] = {"scope": config.taylor_scope, "calibration_batches": config.calibration_batches}
        how = (config.seed, draw, *settings.values(), config.lost, "above", config.trunk)
        name = "-".join(map(str, ("rankings/taylor", *how)))
        settings |= {"budget": config.lost, "layers": config.layers(self.base), "progress": self.progress}
        settings["seed"] = derive_seed(config.seed, "taylor", draw)  # neighbouring seeds of builds share no draw
        batches: Any = self.data.for_taylor
        return self.run.step(name, partial(taylor, self.base, batches, **settings), RANKING)

    def member(self, index: int, origin: str, lost: Sequence[Head]) -> Ensemble:
        """One member, pruned and trained."""
        return self.named(self.trained(pruned(self.base, lost), index), index, origin)

    def named(self, member: Ensemble, index: int, origin: str) -> Ensemble:
        """A member whose history says which one it is and how its heads were chosen."""
        before = self.base.metadata.history
        lines = (f"member {index} ({origin}): {line}" for line in member.metadata.history[len(before) :])
        return member.with_metadata(history=(*before, *lines))

    def trained(self, ensemble: Ensemble, index: int) -> Ensemble:
        """A member, or all of them together, after the recipe; training resumes where it was interrupted."""
        recipe, data = self.config.training_recipe(self.base), self.data
        if recipe is None or data.train is None:
            return ensemble
        place = self.run.path(f"{self.at}finetune")
        more: dict[str, Any] = {"output": place, "progress": self.progress, "index": index}
        return finetune(ensemble, data.train, recipe, data.validation, **more)

    def distilled(self, fused: Ensemble, members: Sequence[Ensemble]) -> Ensemble:
        """Members that learned back what fusing took from trained ones, and pruning from others; this resumes, too."""
        recipe, train, chosen = self.config.recipe, self.data.train, RECIPE
        assert train is not None  # `HydraConfig.check`
        models = members if recipe is not None else [self.base] * len(members)
        if recipe is not None:
            chosen = replace(chosen, precision=recipe.precision, compile=recipe.compile, seed=recipe.seed)
        place = self.run.path(f"{self.at}distill")
        return distill(fused, models, train, chosen, output=place, progress=self.progress)


def model_identity(base: Ensemble) -> dict[str, Any]:
    """What the products of a build depend on of its model."""
    about = [base.config, base.metadata.labels, base.metadata.preprocessing]
    return {"weights": digest(base), "about": digest(to_plain(about))}


def data_identity(data: BuildData) -> dict[str, str | None]:
    """Digests of the sets; of the training data, which may be large, only of the length and the first batch."""
    train = None if data.train is None else source_digest(data.train, "train", derive_seed(data.seed, "train"))
    sets = {name: None if batches is None else digest_batches(batches, name) for name, batches in data.held_out.items()}
    return {"train": train, **sets}


def calibrated(fused: Ensemble, config: HydraConfig, data: BuildData) -> Ensemble:
    """Last step of a build: fit familiarity on the ranking data, temperature and thresholds on the validation data."""
    if not config.calibrate or data.validation is None:
        return fused
    choice = config.familiarity
    if choice is not None and data.ranking is not None:
        score: FamiliarityName = "mahalanobis" if choice == "auto" else choice
        try:
            fused = fit_familiarity(fused, data.ranking, score, held_out=0.0, seed=config.seed)
        except TooFewSamplesError:
            if choice != "auto":
                raise  # else `calibrate` tries with half of its own samples
    return calibrate(fused, data.validation, share=config.accepted_share, familiarity=choice)


def compare_with_base(ensemble: Ensemble, chain: Chain) -> Ensemble:
    """Warn and add to the history if accuracy or NLL of the ensemble is significantly worse than the base's.

    Significant: zero lies outside the 95 % interval of the difference, by a paired bootstrap over the samples.
    """
    base, data, seed = chain.base, chain.data, chain.config.seed
    if data.validation is None:
        return ensemble
    if ensemble.metadata.calibration is not None and base.metadata.calibration is None:
        base = calibrated(base, replace(chain.config, familiarity=None), data)  # the alternative a user has
    gain, rise = differences(ensemble, base, data.validation, seed=seed)
    worse = [f"accuracy by {-gain.value:.1%} ({-gain.high:.1%} to {-gain.low:.1%})"] if gain.high < 0 else []
    worse += [f"NLL by {rise.value:.3f} ({rise.low:.3f} to {rise.high:.3f})"] if rise.low > 0 else []
    if not worse:
        return ensemble
    line = f"on held-out data significantly worse than the model itself, in {' and '.join(worse)}"
    warn(f"the ensemble is {line}: prune fewer heads, train the members, or calibrate the model itself and keep it")
    return ensemble.with_metadata(history=(*ensemble.metadata.history, line))


def differences(
    model: Ensemble, before: Ensemble, batches: list[ReadBatch], **options: Any
) -> tuple[Interval, Interval]:
    """How much higher accuracy and NLL of a model are than those of an earlier one on the same labelled batches.

    The interval of the NLL allows for one more mistake than was seen. Mistakes are rare and expensive: a model that is
    merely more confident has a lower NLL on every correct sample, and no resample would show the cost. `options` are
    those of `paired`.
    """
    ours, theirs = (
        torch.cat([one.predict(inputs).log_probs.double().cpu() for inputs, _ in batches])  # [n, C]
        for one in (model, before)
    )
    labels = torch.cat([labels.cpu().long() for _, labels in batches if labels is not None])  # [n]
    right, right_before = ((one.argmax(1) == labels).double() for one in (ours, theirs))
    others = theirs.exp().scatter(1, theirs.argmax(1, keepdim=True), 0.0)  # its probabilities of other labels
    mistake = (others * (theirs - ours)).sum() / others.sum().clamp_min(1e-300)  # mean rise in NLL on these
    rises = at_labels(theirs, labels) - at_labels(ours, labels)  # [n]
    gain = paired(weighted_mean, [right], minus=[right_before], **options)
    seen, more = (paired(weighted_mean, [one], **options) for one in (rises, torch.cat([rises, mistake[None]])))
    return gain, replace(seen, low=min(seen.low, more.low), high=max(seen.high, more.high))


# --- reading the data ------------------------------------------------------------------------------------------------


def read_sets(
    seed: int,
    model: Ensemble,
    *,
    train: Batches | None,
    id: Batches | None,
    ood: Sources | Literal["synthetic"] | None,
    validation: Batches | None = None,
) -> tuple[Batches | None, dict[str, Any], dict[str, list[ReadBatch]]]:
    """Training data, labelled and OOD sets in memory: numbered as in the model, and none the same as another."""
    if train is not None:
        require_rereadable(train, "train")
    classes = model.num_classes
    numbered = renumbered({"train": train, "id": id, "validation": validation}, model.metadata.labels, classes)
    train = numbered.pop("train")
    held_out = {
        name: None if batches is None else read_all(batches, name, seed, classes) for name, batches in numbered.items()
    }
    given = {} if ood is None or isinstance(ood, str) else named_sources(ood, "ood")
    outside = {name: read_all(batches, name, seed) for name, batches in given.items()}
    every = {**held_out, **outside}
    rows = {name: [key for inputs, _ in sets for key in row_digests(inputs)] for name, sets in every.items() if sets}
    for name in [one for one in held_out if one in rows]:
        require_other_samples(name, rows.pop(name), rows)
    return train, held_out, outside


def read_for_build(
    seed: int, model: Ensemble, *, ood: Sources | Literal["synthetic"] | None, **given: Batches | None
) -> BuildData:
    """Read and check the sets of a build.

    Without `validation`, one half of `id` ranks and the other validates, whatever the strategy: builds that differ
    only in strategy are then calibrated on the same samples. Synthetic OOD data are made from the ranking half.
    """
    train, held_out, outside = read_sets(seed, model, ood=ood, **given)
    ranking, checked = held_out["id"], held_out["validation"]
    if ranking is not None and checked is None:
        ranking, checked = halves(ranking, seed)
    circuits = {"ood": synthetic(ranking, seed)} if isinstance(ood, str) and ranking else outside
    return BuildData(train, ranking, checked, circuits, seed)


def synthetic(batches: list[ReadBatch], seed: int) -> list[ReadBatch]:
    """Synthetic OOD data, one sample per ID sample."""
    return [(inputs, None) for (inputs,) in synthetic_ood(batches, seed=seed)]


def read_all(batches: Batches, name: str, seed: int, classes: int | None = None) -> list[ReadBatch]:
    """Read all batches into memory, with labels if `classes` is given; a loader shuffles by the seed."""
    in_memory: list[ReadBatch] = []
    with first_epoch(batches, derive_seed(seed, name)):
        for index, inputs, labels in iterate(batches, name, labelled=classes is not None):
            in_memory.append((inputs, None if classes is None else require_labels(labels, classes, name, index)))
    return in_memory


def halves(batches: list[ReadBatch], seed: int) -> tuple[list[ReadBatch], list[ReadBatch]]:
    """Split the samples of `id` into two disjoint halves; an odd sample goes to the first.

    Samples stay in their batch (texts keep their padding), so a batch may be split in two. `batches` is emptied on the
    way, so that no data are in memory twice.
    """
    total = samples_in(batches)
    order = np.random.Generator(np.random.PCG64(seed)).permutation(total)
    chosen = torch.zeros(total, dtype=torch.bool)
    chosen[torch.from_numpy(order[: (total + 1) // 2])] = True
    halved: tuple[list[ReadBatch], list[ReadBatch]] = [], []
    for mask in chosen.split([size_of(inputs) for inputs, _ in batches]):
        inputs, labels = batches.pop(0)
        for half, keep in zip(halved, (mask, ~mask), strict=True):
            if keep.any():
                part = changed(inputs, itemgetter(keep))  # the mask may be on another device
                half.append((part, None if labels is None else labels[keep]))
    return halved


def samples_in(batches: list[ReadBatch]) -> int:
    """Number of samples in all batches."""
    return sum(size_of(inputs) for inputs, _ in batches)

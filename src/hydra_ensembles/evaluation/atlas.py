"""A head atlas: what every head of an ensemble is good for, found by switching it off and nothing else."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from ..arguments import Count, Range, Whole, checked
from ..batches import Inputs, changed, iterate, length_of, require_labels, require_same_classes, size_of
from ..circuit.timing import in_words, say
from ..data.batching import Preprocess
from ..data.dataset import Dataset
from ..errors import ConfigError, DataError
from ..files import DIGEST, write_sealed
from ..heads.masking import checked_layers, masked, working_copy
from ..heads.ranking import Head
from ..metrics.inputs import mean
from ..metrics.ood import auroc
from ..metrics.probabilities import at_labels
from ..model.cost import times_in_turn
from ..model.dual_encoder import require_ensemble
from ..model.ensemble import Ensemble
from ..model.metadata import Calibration
from ..overlap import Keys, require_unlike, sample_keys
from ..prediction import AnyScore, Prediction
from ..schema import from_plain, to_plain
from .evaluate import Data, batched, read_groups, require_different, set_name
from .evaluation import ModelInfo, Provenance, describe_model, provenance_of, read_saved
from .kept import Kept
from .measure import Measure
from .running import shown

FORMAT, VERSION = "hydra_ensembles.atlas", 1
MOST_INPUTS = 16  # shown for a head, of either kind: more make a page that no browser likes
_BAR = "{desc}: {percentage:3.0f}% |{bar}| {elapsed}<{remaining}"


# --- what was found ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Quality:
    """How good the answers are: share of right ones, mean log-likelihood of the labels, AUROC of each OOD set."""

    accuracy: float
    log_likelihood: float
    auroc: Mapping[str, float]

    @property
    def numbers(self) -> dict[str, float]:
        """The same by name, with the mean over OOD sets as `auroc`, where there are any."""
        known = {"accuracy": self.accuracy, "log_likelihood": self.log_likelihood}
        return known | ({"auroc": sum(self.auroc.values()) / len(self.auroc)} if self.auroc else {})


@dataclass(frozen=True)
class AtlasInput:
    """An input that some head matters for, with what the whole ensemble says of it.

    Attributes:
        set: Name of the set it is from.
        index: Its position there.
        kind: Whether `content` is an image, as a `data:` address, or a text.
        label: The right class; None for an OOD input.
    """

    set: str
    index: int
    kind: Literal["image", "text"]
    content: str
    predicted: int
    confidence: float
    label: int | None = None


@dataclass(frozen=True)
class Changed:
    """What an answer becomes without a head.

    Attributes:
        input: Which of the inputs of the atlas.
        moved: Share of the probability that goes from some classes to others, 0 to 1.
    """

    input: int
    moved: float
    predicted: int
    confidence: float


@dataclass(frozen=True)
class HeadEffect:
    """One head: who has it, and what becomes of the ensemble when every member that has it loses it.

    Attributes:
        head: Its index before any pruning.
        members: Who keeps it.
        shared: Whether it is stored once for all members.
        without: The ensemble without it.
        lost: ID inputs answered rightly with it and wrongly without.
        gained: The opposite.
        changed: The ID inputs whose answers change most, most first, then such OOD inputs.
    """

    layer: int
    head: int
    members: tuple[int, ...]
    shared: bool
    without: Quality
    lost: int
    gained: int
    changed: tuple[Changed, ...] = ()


@dataclass(frozen=True)
class Atlas:
    """Every head of an ensemble.

    Attributes:
        samples: How many inputs each set has, the ID one first.
        score: The score that detects OOD inputs.
        whole: The ensemble with all its heads.
        heads: First layer first.
        inputs: Those that `HeadEffect.changed` points to.

    Examples:
        >>> import torch, hydra_ensembles as he
        >>> from hydra_ensembles.demo import load_backbone
        >>> base = load_backbone()  # a small vision transformer: one member, 6 layers of 6 heads, 7 classes
        >>> batches = [(torch.randn(7, 3, 64, 64), torch.arange(7)) for _ in range(2)]  # or a DataLoader
        >>> found = he.atlas(base, batches, layers=[4, 5], inputs=0, progress=False)
        >>> costs = {(one.layer, one.head): found.cost(one)["log_likelihood"] for one in found.heads}
        >>> len(costs), sorted(found.cost(found.heads[0]))
        (12, ['accuracy', 'log_likelihood'])
    """

    name: str
    id_name: str
    samples: Mapping[str, int]
    score: AnyScore
    whole: Quality
    heads: tuple[HeadEffect, ...]
    inputs: tuple[AtlasInput, ...]
    model: ModelInfo
    provenance: Provenance

    def __post_init__(self) -> None:
        """What points to something points to something that is there."""
        kept, sets = self.model.heads or (), {self.id_name, *self.whole.auroc}
        if not kept or not self.model.heads_per_layer or set(self.samples) != sets or min(self.samples.values()) < 1:
            raise DataError(f"an atlas of {self.id_name!r} does not fit its model or its sets {sorted(self.samples)}")
        for one in self.heads:
            there = 0 <= one.layer < min(map(len, kept)) and one.without.auroc.keys() == self.whole.auroc.keys()
            keepers = tuple(m for m, of in enumerate(kept) if there and one.head in of[one.layer])
            if not keepers or one.members != keepers or any(not 0 <= c.input < len(self.inputs) for c in one.changed):
                raise DataError(f"head {one.layer}.{one.head} does not fit the model, the sets or inputs of the atlas")

    def cost(self, head: HeadEffect) -> dict[str, float]:
        """What the loss of a head takes from each of `Quality.numbers`; what it adds is below zero."""
        left = head.without.numbers
        return {name: value - left[name] for name, value in self.whole.numbers.items()}

    @checked
    def save(self, path: str | Path) -> None:
        """Write a JSON file."""
        write_sealed(Path(path), {"format": FORMAT, "version": VERSION, **to_plain(self)})

    @classmethod
    @checked
    def load(cls, path: str | Path) -> "Atlas":
        """Read what `save` wrote, checked field by field.

        Raises:
            DataError: The file is missing, was changed, or is no atlas, or one of a newer version.
            ConfigError: A field does not hold what it should.
        """
        data = read_saved(path, "a saved atlas")
        if data.get("format") != FORMAT or data.get("version") != VERSION:
            got = f"format {data.get('format')!r}, version {data.get('version')!r}"
            raise DataError(f"{path} is not an atlas that this library reads: it has {got}, not {FORMAT!r}, {VERSION}")
        parts = {key: value for key, value in data.items() if key not in ("format", "version", DIGEST)}
        return from_plain(cls, parts, str(path))


# --- how it is found -----------------------------------------------------------------------------------------


@checked
def atlas(
    ensemble: Ensemble,
    id_data: Data,
    ood: Mapping[str, Any] | None = None,
    *,
    name: str | None = None,
    id_name: str | None = None,
    score: AnyScore = "msp",
    inputs: Annotated[int, Range(0, MOST_INPUTS)] = 4,
    layers: Sequence[int] | None = None,
    preprocess: Preprocess | None = None,
    batch_size: Whole = 64,
    num_workers: Count = 0,
    output: str | Path | None = None,
    progress: bool = True,
) -> Atlas:
    """Switch off every head by itself, in all members that have it, and see what becomes of the answers.

    One pass over each set: the blocks below a head are run once for all heads above, and those from its layer on once
    for each head. The numbers are those that `evaluate` gives of the ensemble inside `masked(ensemble, [head])`.

    Args:
        ensemble: A classifier of any number of members, also a zero-shot one; it is not changed.
        id_data: Labelled in-distribution set, as `evaluate` takes it.
        ood: OOD sets, as `evaluate` takes them; those of a group `"apart"` are left out.
        name: What the page calls the model.
        id_name: Name of the in-distribution set; that of a data set is known.
        score: Score that detects OOD inputs.
        inputs: How many ID inputs, and how many OOD inputs, to keep for each head; at most 16.
        layers: Only the heads of these layers; None for all.
        preprocess: Turns a list of raw items into inputs; an ensemble brings its own.
        batch_size: For data sets that are not in batches.
        num_workers: Worker processes for such data sets.
        output: Run folder that keeps the answers to every batch; an atlas that was interrupted goes on there when it
            is called again with the same arguments. None keeps nothing.
        progress: Whether to say how long it takes, and show a bar.

    Raises:
        ConfigError: The model is no ensemble with a classifier, or a setting is out of range.
        DataError: A set is empty, does not fit the model, or is given twice.
        HeadError: There is no such layer.

    Examples:
        >>> import torch, hydra_ensembles as he
        >>> from hydra_ensembles.demo import load_backbone
        >>> base = load_backbone()  # a small vision transformer: one member, 6 layers of 6 heads, 7 classes
        >>> batches = [(torch.randn(7, 3, 64, 64), torch.arange(7)) for _ in range(2)]  # or a DataLoader
        >>> foreign = {"noise": [(torch.randn(7, 3, 64, 64),)]}
        >>> found = he.atlas(base, batches, foreign, layers=[5], inputs=1, progress=False)
        >>> found.save("atlas.json")
        >>> len(he.Atlas.load("atlas.json").heads), sorted(found.whole.numbers)
        (6, ['accuracy', 'auroc', 'log_likelihood'])
    """
    require_ensemble(ensemble, "atlas")
    if not ensemble.num_classes:
        raise ConfigError("this ensemble has no classifier to look at; convert the model with num_labels=")
    known, id_name, name = ensemble.verified_metadata(), id_name or set_name(id_data), name or "model"
    preprocess, calibration = preprocess or known.preprocessing, known.calibration or Calibration()
    measure = Measure(name, id_name, score, (), "torch-uncertainty", calibration, 0, False, known.familiarity)
    foreign = {key: data for group, sets in read_groups(ood).items() if group != "apart" for key, data in sets.items()}
    if id_name in foreign:
        raise DataError(f"the in-distribution set and an OOD set are both called {id_name!r}; give id_name another")
    own_title, titles = f"the in-distribution set {id_name!r}", [f"OOD set {key!r}" for key in foreign]
    require_different({own_title: id_data, **dict(zip(titles, foreign.values(), strict=True))}, preprocess)
    given = {id_name: id_data, **foreign}
    loaders = {key: batched(data, key, preprocess, batch_size, num_workers) for key, data in given.items()}
    sweep = Sweep(ensemble, working_copy(ensemble, None, None), heads_of(ensemble, layers), measure)
    require_same_classes(loaders[id_name], ensemble.metadata.labels, f"set {id_name!r}")
    shelves = {own: MostChanged(len(sweep.heads), inputs) for own in (True, False)}  # ID inputs, OOD inputs
    found: dict[str, list[Swept]] = {}
    keys: dict[str, list[Keys]] = {}
    truth: list[Tensor] = []
    settings = {"heads": [str(head) for head in sweep.heads], "score": score, "calibration": to_plain(calibration)}
    keeping, said = Kept(output, ensemble, settings, "an atlas"), not progress
    with keeping as kept_answers, torch.no_grad(), tqdm(desc="atlas", bar_format=_BAR, disable=not progress) as bar:
        for key, batches in loaders.items():
            own, first = key == id_name, 0
            for index, (read, targets) in enumerate(iterate(batches, f"set {key!r}", labelled=own)):
                prepared = ensemble.prepare(read)
                labels = require_labels(targets, ensemble.num_classes, f"set {key!r}", index) if own else None
                samples = sample_keys(read)
                batch = kept_answers.key(read, samples, labels)
                stored = kept_answers.get(batch)
                if not said and stored is None:
                    said, bar.total = True, inputs_of(given.values(), size_of(read))
                    *_, warm = times_in_turn({"pass": partial(sweep.copy, prepared)}, 2, ensemble.device)["pass"]
                    seconds = sweep.blocks / ensemble.num_layers * warm
                    words = "" if bar.total is None else f": {in_words(seconds * bar.total / size_of(read))}"
                    say(f"{len(sweep.heads)} heads, each switched off by itself{words}")
                if stored is None:
                    answers = sweep.answers(prepared, labels, f"batch {index} of set {key!r}", bar)
                    kept_answers.put(batch, answers._asdict())
                else:
                    answers = Swept(**stored)
                    bar.update(size_of(read))
                found.setdefault(key, []).append(answers)
                keys.setdefault(key, []).append(samples)
                truth += [] if labels is None else [labels.cpu()]
                about = key, first, None if labels is None else labels.tolist()
                shelves[own].put(answers, read, *about, known.preprocessing or preprocess)
                first += size_of(read)
        bar.total = bar.n  # what was guessed where batches are not alike
        bar.refresh()
    own_keys, *other_keys = (np.concatenate(parts) for parts in keys.values())
    require_unlike(own_title, own_keys, dict(zip(titles, other_keys, strict=True)))
    joined = {key: Swept.joined(parts) for key, parts in found.items()}
    whole, effects = effects_of(sweep, joined[id_name], torch.cat(truth), {key: joined[key] for key in foreign})
    shown_for = [[*shelves[True].of[row], *shelves[False].of[row]] for row in range(len(effects))]
    kept = shelves[True].kept | shelves[False].kept
    places = {key: place for place, key in enumerate(kept)}
    return Atlas(
        name,
        id_name,
        {key: one.label.shape[1] for key, one in joined.items()},
        score,
        whole,
        tuple(
            replace(effect, changed=tuple(replace(one, input=places[key]) for key, one in row))
            for effect, row in zip(effects, shown_for, strict=True)
        ),
        tuple(kept.values()),
        describe_model(ensemble, ensemble.num_members, ensemble.num_classes, known.calibration),
        provenance_of(ensemble.device, ensemble.dtype),
    )


def effects_of(
    sweep: "Sweep", own: "Swept", labels: Tensor, foreign: Mapping[str, "Swept"]
) -> tuple[Quality, list[HeadEffect]]:
    """How good the whole ensemble is, and what becomes of it without each head; no inputs are shown yet."""
    right = own.label == labels  # [1 + K, n]
    whole, *without = (
        Quality(
            accuracy=mean(right[row]),
            log_likelihood=mean(own.likelihood[row]),
            auroc={key: auroc(own.score[row], one.score[row]) for key, one in foreign.items()},
        )
        for row in range(len(right))
    )
    config, effects = sweep.ensemble.config, []
    for head, quality, left in zip(sweep.heads, without, right[1:], strict=True):
        keepers = tuple(m for m, kept in enumerate(config.heads) if head.head in kept[head.layer])
        shared = config.members > 1 and config.attention_copies(head.layer) == 1
        lost, gained = int((right[0] & ~left).sum()), int((~right[0] & left).sum())
        effects.append(HeadEffect(head.layer, head.head, keepers, shared, quality, lost, gained))
    return whole, effects


def heads_of(ensemble: Ensemble, layers: Sequence[int] | None) -> list[Head]:
    """The heads that some member keeps in some layers (None: in all), first layer first."""
    found = []
    for layer in checked_layers(ensemble.config, layers):
        there = {head for kept in ensemble.config.heads for head in kept[layer]}
        found += [Head(layer, head) for head in sorted(there)]
    if not found:
        raise ConfigError("there is no head left in these layers that could be switched off; give other layers")
    return found


def inputs_of(given: Collection[Data], batch: int) -> int | None:
    """How many inputs there are, where batches of others than our data sets hold so many each; None if not known."""
    counts = [len(one) if isinstance(one, Dataset) else length_of(one) for one in given]
    sizes = [1 if isinstance(one, Dataset) else batch for one in given]
    return None if None in counts else sum(count * size for count, size in zip(counts, sizes, strict=True) if count)


class Swept(NamedTuple):
    """What the ensemble says of B inputs with all heads, first row, and without each of K; all `[1 + K, B]`.

    `moved` is the share of the probability that went to other classes, `likelihood` the logarithm of the probability
    of the label, zero where there is none.
    """

    label: Tensor
    confidence: Tensor
    score: Tensor
    moved: Tensor
    likelihood: Tensor

    @classmethod
    def joined(cls, parts: Sequence["Swept"]) -> "Swept":
        """Those of consecutive batches."""
        return cls(*(torch.cat(part, dim=1) for part in zip(*parts, strict=True)))


@dataclass(frozen=True)
class Sweep:
    """The ensemble, a private copy of it to switch heads off in, and what is made of its logits."""

    ensemble: Ensemble
    copy: Ensemble
    heads: Sequence[Head]
    measure: Measure

    @property
    def blocks(self) -> int:
        """How many blocks are run on each batch."""
        layers = self.ensemble.num_layers
        return layers + sum(layers - head.layer for head in self.heads)

    def answers(self, inputs: Inputs, labels: Tensor | None, where: str, bar: Any) -> Swept:
        """Answers to one batch; on a GPU they are waited for once."""
        rows, finite, whole = [], [], None
        for prediction in self._predictions(inputs, bar):
            whole = prediction if whole is None else whole
            likelihood = torch.zeros_like(prediction.confidence)
            if labels is not None:
                likelihood = at_labels(prediction.log_probs, labels.to(likelihood.device))
            moved = (prediction.probs - whole.probs).abs().sum(dim=-1) / 2
            score = prediction.score(self.measure.score)
            rows.append((prediction.label, prediction.confidence, score, moved, likelihood))
            finite.append(prediction.member_logits.isfinite().all() & score.isfinite().all())
        good = torch.stack(finite).cpu()
        if not good.all():
            row = int((~good).nonzero()[0, 0])
            state = f" with head {self.heads[row - 1]} switched off" if row else ""
            raise DataError(
                f"{where} gives logits that are NaN or infinite{state}; check its inputs, or use a wider dtype"
            )
        return Swept(*(torch.stack(part).cpu() for part in zip(*rows, strict=True)))

    def _predictions(self, inputs: Inputs, bar: Any) -> Iterator[Prediction]:
        """The prediction of the ensemble, then those without each head, each from the input of its block on."""
        copy, arguments = self.copy, self.copy.unpack(inputs)
        blocks, read = list(copy.encoder.layers), copy.readout.tokens_read()
        x, context = copy.embed(*arguments)
        levels = [x]  # what enters each block, and then the readout, [N, B, T, d]
        for block in blocks[:-1]:
            levels.append(block(levels[-1], context))
        levels.append(blocks[-1](levels[-1], context, read))

        def predicted(layer: int) -> Prediction:
            x = levels[layer]
            for block in blocks[layer:]:
                x = block(x, context, read if block is blocks[-1] else None)
            pooled = copy.readout.pool(x, context.key_mask, arguments[0])
            logits = copy.readout.classify(pooled)  # [N, B, C]
            logits = logits.expand(copy.num_members, *logits.shape[1:])
            fitted, scores = self.measure.familiarity, None
            if fitted is not None and self.measure.score in fitted.settings.scores:
                features = pooled.flatten(2)
                scores = fitted.scores(features.expand(copy.num_members, *features.shape[1:]), logits)
            return self.measure.predict(logits, scores)

        step = len(arguments[0]) / self.blocks  # of the bar, which counts inputs
        yield predicted(len(blocks))
        bar.update(step * len(blocks))
        for head in self.heads:
            with masked(copy, [head]):
                yield predicted(head.layer)
            bar.update(step * (len(blocks) - head.layer))


@dataclass(eq=False)
class MostChanged:
    """For each of some heads, the inputs whose answers change most when it is off; ties go to the earlier input."""

    heads: int
    size: int
    kept: dict[tuple[str, int], AtlasInput] = field(default_factory=dict)  # by set and position

    def __post_init__(self) -> None:
        """Nothing was seen yet; where an input lies in the atlas, is known only in the end."""
        self.of: list[list[tuple[tuple[str, int], Changed]]] = [[] for _ in range(self.heads)]

    def put(
        self, answers: Swept, inputs: Inputs, name: str, first: int, labels: list[int] | None, preprocessing: object
    ) -> None:
        """Take in a batch, whose first sample has position `first` in its set."""
        parts = (part[1:].tolist() for part in (answers.moved, answers.label, answers.confidence))
        for row, (moved, label, confidence) in enumerate(zip(*parts, strict=True)):
            values = enumerate(zip(moved, label, confidence, strict=True))
            new = [((name, first + place), Changed(-1, *one)) for place, one in values if one[0] > 0]
            self.of[row] = sorted([*self.of[row], *new], key=lambda one: -one[1].moved)[: self.size]
        wanted = dict.fromkeys(key for found in self.of for key, _ in found)
        self.kept = {key: one for key, one in self.kept.items() if key in wanted}
        for key in wanted:
            if key not in self.kept:
                place = key[1] - first
                kind, content = shown(changed(inputs, itemgetter(place)), preprocessing)
                said = int(answers.label[0, place]), float(answers.confidence[0, place])
                self.kept[key] = AtlasInput(*key, kind, content, *said, None if labels is None else labels[place])

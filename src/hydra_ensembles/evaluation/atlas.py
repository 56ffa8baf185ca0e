"""The head atlas: the effect of every head of an ensemble, measured by switching it off."""

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
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
from ..batches import Batches, Inputs, changed, iterate, length_of, require_labels, size_of
from ..circuit.extract import in_words
from ..circuit.scores import NO_HEAD
from ..classes import in_model_order
from ..data.batching import Preprocess
from ..errors import ConfigError, DataError
from ..files import expanded, write_sealed
from ..heads.masking import checked_layers, masked, working_copy
from ..heads.ranking import Head
from ..metrics.inputs import mean
from ..metrics.ood import auroc
from ..metrics.probabilities import at_labels
from ..model.cost import interleaved_times
from ..model.ensemble import Ensemble
from ..model.kinds import require_ensemble
from ..model.metadata import Calibration
from ..overlap import Keys, require_unlike, sample_keys, warn_if_fitted
from ..prediction import AnyScore, Prediction
from ..schema import from_plain, to_plain
from .evaluate import Data, batched, fitted_sets, read_groups, set_name
from .evaluation import ModelInfo, Provenance, of_format, read_saved
from .measure import Measure
from .running import AnswerStore, describe_model, provenance_of, readable_input

FORMAT, VERSION = "hydra_ensembles.atlas", 1
MOST_INPUTS = 16  # maximum shown per head, ID and OOD each: more make a page too large for browsers
_BAR = "{desc}: {percentage:3.0f}% |{bar}| {elapsed}<{remaining}"


# --- results -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Quality:
    """Quality of the answers: accuracy, mean log-likelihood of the labels, AUROC of each OOD set."""

    accuracy: float
    log_likelihood: float
    auroc: Mapping[str, float]

    @property
    def numbers(self) -> dict[str, float]:
        """The same by name, with the mean over OOD sets, if any, as `auroc`."""
        numbers = {"accuracy": self.accuracy, "log_likelihood": self.log_likelihood}
        return numbers | ({"auroc": sum(self.auroc.values()) / len(self.auroc)} if self.auroc else {})


@dataclass(frozen=True)
class AtlasInput:
    """An input whose answer some head changes, with the answer of the whole ensemble.

    Attributes:
        set: Name of its set.
        index: Its position in the set.
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
    """How an answer changes without a head.

    Attributes:
        input: Index into the inputs of the atlas.
        moved: Share of the probability that moves to other classes, 0 to 1.
    """

    input: int
    moved: float
    predicted: int
    confidence: float


@dataclass(frozen=True)
class HeadEffect:
    """One head: which members have it, and how the ensemble changes if all of them lose it.

    Attributes:
        head: Its index before any pruning.
        members: The members that keep it.
        shared: Whether it is stored once for all members.
        without: The ensemble without it.
        lost: Number of ID inputs answered correctly with it and wrongly without.
        gained: The opposite.
        changed: The ID inputs whose answers change most, largest change first, then the same for OOD inputs.
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
        samples: Number of inputs of each set, the ID set first.
        score: The score that detects OOD inputs.
        whole: The ensemble with all its heads.
        heads: One entry for each head, first layer first.
        inputs: The inputs that `HeadEffect.changed` refers to.

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

    def cost(self, head: HeadEffect) -> dict[str, float]:
        """How much each of `Quality.numbers` falls without the head; negative where it rises."""
        without = head.without.numbers
        return {name: value - without[name] for name, value in self.whole.numbers.items()}

    @checked
    def save(self, path: str | Path) -> None:
        """Write a JSON file."""
        write_sealed(expanded(path), {"format": FORMAT, "version": VERSION, **to_plain(self)})

    @classmethod
    @checked
    def load(cls, path: str | Path) -> "Atlas":
        """Read what `save` wrote, checked field by field.

        Raises:
            DataError: The file is missing, was changed, or is no atlas, or one of a newer version.
            ConfigError: A field has the wrong type or value.
        """
        return from_plain(cls, of_format(read_saved(path, "a saved atlas"), FORMAT, VERSION, path), str(path))


# --- measuring -----------------------------------------------------------------------------------------------


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
    """Switch off one head at a time, in all members that have it, and measure how the answers change.

    One pass over each set: each block runs once on the whole ensemble, and for each head only the blocks from its
    layer on run again. The numbers are those that `evaluate` gives inside `masked(ensemble, [head])`.

    Args:
        ensemble: A classifier of any number of members, also a zero-shot one; it is not changed.
        id_data: Labelled in-distribution set, as for `evaluate`.
        ood: OOD sets, as for `evaluate`; those in the group `"apart"` are left out.
        name: What the page calls the model.
        id_name: Name of the in-distribution set; not needed for a data set.
        score: Score that detects OOD inputs.
        inputs: How many ID inputs, and how many OOD inputs, to keep for each head; at most 16.
        layers: Only the heads of these layers; None for all.
        preprocess: Turns a list of raw items into inputs; an ensemble has its own.
        batch_size: For data sets that are not in batches.
        num_workers: Worker processes for such data sets.
        output: Run folder that keeps the answers to every batch; an interrupted atlas resumes when called again with
            the same arguments. None keeps nothing.
        progress: Whether to say how long it takes, and show a progress bar.

    Raises:
        ConfigError: The model is no ensemble with a classifier, or a setting is out of range.
        DataError: A set is empty, does not fit the model, or is given twice. A `HydraWarning` is given for samples that
            trained the model, or fitted calibration or familiarity, as in `evaluate`.
        HeadError: There is no such layer.

    Examples:
        >>> import torch, hydra_ensembles as he
        >>> from hydra_ensembles.demo import load_backbone
        >>> base = load_backbone()  # a small vision transformer: one member, 6 layers of 6 heads, 7 classes
        >>> batches = [(torch.randn(7, 3, 64, 64), torch.arange(7)) for _ in range(2)]  # or a DataLoader
        >>> ood = {"noise": [(torch.randn(7, 3, 64, 64),)]}
        >>> found = he.atlas(base, batches, ood, layers=[5], inputs=1, progress=False)
        >>> found.save("atlas.json")
        >>> len(he.Atlas.load("atlas.json").heads), sorted(found.whole.numbers)
        (6, ['accuracy', 'auroc', 'log_likelihood'])
    """
    require_ensemble(ensemble, "atlas", classifies=True)
    metadata = ensemble.metadata
    name, id_name = name or "model", id_name or set_name(id_data)
    preprocess = preprocess or metadata.preprocessing
    calibration = metadata.calibration or Calibration()
    measure = Measure(name, id_name, score, (), "torch-uncertainty", calibration, 0, False, metadata.familiarity)
    groups = read_groups(ood, id_data).items()
    ood_sets = {key: data for group, sets in groups if group != "apart" for key, data in sets.items()}
    if id_name in ood_sets:
        raise DataError(f"the in-distribution set and an OOD set are both called {id_name!r}; give id_name another")
    title = f"the in-distribution set {id_name!r}"
    sets = {id_name: in_model_order(id_data, title, ensemble), **ood_sets}
    sweep = Sweep(ensemble, working_copy(ensemble, None, None), heads_of(ensemble, layers), measure)
    seen = {key: SetAnswers(key, inputs, key == id_name, metadata.preprocessing or preprocess) for key in sets}
    batches = {key: batched(data, key, preprocess, batch_size, num_workers) for key, data in sets.items()}
    sweep_all(sweep, seen, batches, output, progress)
    keys = {key: np.concatenate(answers.keys) for key, answers in seen.items()}
    require_unlike(title, keys[id_name], {f"OOD set {key!r}": keys[key] for key in ood_sets})
    warn_if_fitted(title, keys[id_name], fitted_sets(metadata, calibration, metadata.familiarity))
    model = describe_model(ensemble, ensemble.num_members, ensemble.num_classes, metadata.calibration)
    found = assembled(sweep, list(seen.values()), inputs)
    samples = {key: len(of_set) for key, of_set in keys.items()}
    return Atlas(name, id_name, samples, score, *found, model, provenance_of(ensemble.device, ensemble.dtype))


def heads_of(ensemble: Ensemble, layers: Sequence[int] | None) -> list[Head]:
    """The heads that some member keeps in some layers (None: in all), first layer first."""
    heads = []
    for layer in checked_layers(ensemble.config, layers):
        kept = {head for member in ensemble.config.heads for head in member[layer]}
        heads += [Head(layer, head) for head in sorted(kept)]
    if not heads:
        raise ConfigError("these layers have no head left to switch off; give other layers")
    return heads


class Swept(NamedTuple):
    """Answers to B inputs, all `[1 + K, B]`: with all heads in the first row, then without each of K heads."""

    label: Tensor
    confidence: Tensor
    score: Tensor
    moved: Tensor  # share of the probability that moves to other classes
    likelihood: Tensor  # log-probability of the right class, zero if there is none

    @classmethod
    def joined(cls, parts: Sequence["Swept"]) -> "Swept":
        """Concatenate the answers to consecutive batches."""
        return cls(*(torch.cat(part, dim=1) for part in zip(*parts, strict=True)))


@dataclass(frozen=True)
class Sweep:
    """The ensemble, a private copy in which heads are switched off, and the settings that turn logits into numbers."""

    ensemble: Ensemble
    copy: Ensemble
    heads: Sequence[Head]
    measure: Measure

    @property
    def blocks(self) -> int:
        """How many times a block runs on each batch, over all heads."""
        layers = self.ensemble.num_layers
        return layers + sum(layers - head.layer for head in self.heads)

    def say_how_long(self, prepared: Inputs, size: int, total: int | None) -> None:
        """Time a pass over a batch of this size, and print the estimated duration if the number of inputs is known."""
        *_, warm = interleaved_times({"pass": partial(self.copy, prepared)}, 2, self.ensemble.device)["pass"]
        seconds = self.blocks / self.ensemble.num_layers * warm
        words = "" if total is None else f": {in_words(seconds * total / size)}"
        tqdm.write(f"{len(self.heads)} heads, each switched off by itself{words}", file=sys.stderr)

    def answers(self, inputs: Inputs, labels: Tensor | None, where: str, bar: Any) -> Swept:
        """Answers to one batch; synchronises with the GPU only at the end."""
        rows, finite, whole = [], [], None
        for prediction in self._predictions(inputs, bar):
            whole = prediction if whole is None else whole
            likelihood = torch.zeros_like(prediction.confidence)
            if labels is not None:
                likelihood = at_labels(prediction.log_probs, labels.to(likelihood.device))
            moved = (prediction.probs - whole.probs).abs().sum(dim=-1) / 2
            score = prediction.score(self.measure.score)
            rows.append(Swept(prediction.label, prediction.confidence, score, moved, likelihood))  # [B] each
            finite.append(prediction.member_logits.isfinite().all() & score.isfinite().all())
        good = torch.stack(finite).cpu()
        if not good.all():
            head = [NO_HEAD, *self.heads][int((~good).nonzero()[0, 0])]
            raise DataError(f"{where} gives logits that are NaN or infinite with head {head} switched off")
        return Swept(*(torch.stack(part).cpu() for part in zip(*rows, strict=True)))

    def _predictions(self, inputs: Inputs, bar: Any) -> Iterator[Prediction]:
        """Yield the prediction of the ensemble, then those without each head, run from the input of its block on."""
        copy = self.copy
        arguments = self.copy.unpack(inputs)
        blocks = list(copy.encoder.layers)
        tokens = copy.readout.tokens_read()
        x, context = copy.embed(*arguments)
        levels = [x]  # inputs of each block, then of the readout, [N, B, T, d]
        for block in blocks[:-1]:
            levels.append(block(levels[-1], context))
        levels.append(blocks[-1](levels[-1], context, tokens))

        def predicted(layer: int) -> Prediction:
            x = levels[layer]
            for block in blocks[layer:]:
                x = block(x, context, tokens if block is blocks[-1] else None)
            pooled = copy.readout.pool(x, context.key_mask, arguments[0])
            logits = copy.readout.classify(pooled)  # [N, B, C]
            logits = logits.expand(copy.num_members, *logits.shape[1:])
            fitted, scores = self.measure.familiarity, None
            if fitted is not None and self.measure.score in fitted.settings.scores:
                features = pooled.flatten(2)
                scores = fitted.scores(features.expand(copy.num_members, *features.shape[1:]), logits)
            return self.measure.predict(logits, scores)

        step = len(arguments[0]) / self.blocks  # per block: the progress bar counts inputs
        yield predicted(len(blocks))
        bar.update(step * len(blocks))
        for head in self.heads:
            with masked(copy, [head]):
                yield predicted(head.layer)
            bar.update(step * (len(blocks) - head.layer))


@dataclass(eq=False)
class SetAnswers:
    """Results on one set, batch by batch: answers, keys, labels, and the inputs whose answers change most."""

    name: str
    most: int  # inputs to keep for each head; ties go to the earlier one
    labelled: bool  # whether this is the in-distribution set
    preprocessing: object  # of its inputs
    swept: list[Swept] = field(default_factory=list)
    keys: list[Keys] = field(default_factory=list)
    labels: list[Tensor] = field(default_factory=list)
    inputs: dict[int, AtlasInput] = field(default_factory=dict)  # shown inputs, by position in the set
    changes: dict[int, list[Changed]] = field(default_factory=lambda: defaultdict(list))  # per head, largest first

    def put(self, answers: Swept, inputs: Inputs, keys: Keys, labels: Tensor | None) -> None:
        """Add the next batch."""
        first = sum(map(len, self.keys))  # position of the batch in the set
        self.swept.append(answers)
        self.keys.append(keys)
        self.labels += [] if labels is None else [labels.cpu()]
        without = zip(answers.moved.tolist(), answers.label.tolist(), answers.confidence.tolist(), strict=True)
        next(without)  # the row with all heads
        for head, (moved, label, confidence) in enumerate(without):  # lists [B]
            new = [Changed(first + b, moved[b], label[b], confidence[b]) for b in range(len(moved)) if moved[b] > 0]
            self.changes[head] = sorted([*self.changes[head], *new], key=lambda one: -one.moved)[: self.most]
        positions = {change.input for changes in self.changes.values() for change in changes}
        self.inputs = {position: item for position, item in self.inputs.items() if position in positions}
        for position in positions - self.inputs.keys():
            row = position - first
            kind, content = readable_input(changed(inputs, itemgetter(row)), self.preprocessing)
            answer = int(answers.label[0, row]), float(answers.confidence[0, row])
            label = None if labels is None else int(labels[row])
            self.inputs[position] = AtlasInput(self.name, position, kind, content, *answer, label)


@torch.no_grad()
def sweep_all(
    sweep: Sweep,
    seen: Mapping[str, SetAnswers],
    batches: Mapping[str, Batches],
    output: str | Path | None,
    progress: bool,
) -> None:
    """Run every batch of every set, or read it from `output`."""
    ensemble, measure = sweep.ensemble, sweep.measure
    settings = {"heads": [*map(str, sweep.heads)], "score": measure.score, "calibration": to_plain(measure.calibration)}
    announced = not progress
    lengths = [length_of(data) for data in batches.values()]
    keeping = AnswerStore(output, ensemble, settings, "an atlas")
    with keeping as kept, tqdm(desc="atlas", bar_format=_BAR, disable=not progress) as bar:
        for key, answers_of in seen.items():
            name, labelled = f"set {key!r}", answers_of.labelled
            for index, inputs, targets in iterate(batches[key], name, labelled=labelled):
                prepared = ensemble.prepare(inputs)
                labels = require_labels(targets, ensemble.num_classes, name, index) if labelled else None
                keys = sample_keys(inputs)
                digest = kept.key(inputs, keys, labels)
                stored = kept.get(digest)
                if stored is None and not announced:
                    announced = True
                    bar.total = None if None in lengths else sum(filter(None, lengths)) * size_of(inputs)
                    sweep.say_how_long(prepared, size_of(inputs), bar.total)
                if stored is None:
                    answers = sweep.answers(prepared, labels, f"batch {index} of {name}", bar)
                    kept.put(digest, answers._asdict())
                else:
                    answers = Swept(**stored)
                    bar.update(size_of(inputs))
                answers_of.put(answers, inputs, keys, labels)
        bar.total = bar.n  # the total is an estimate if batch sizes differ
        bar.refresh()


def assembled(
    sweep: Sweep, seen: Sequence[SetAnswers], most: int
) -> tuple[Quality, tuple[HeadEffect, ...], tuple[AtlasInput, ...]]:
    """Quality of the whole ensemble, the effect of each head, and the inputs to show."""
    id_set, *ood_sets = seen
    answers = Swept.joined(id_set.swept)
    ood_scores = {one.name: Swept.joined(one.swept).score for one in ood_sets}  # [1 + K, m] each
    right = answers.label == torch.cat(id_set.labels)  # [1 + K, n]
    qualities = []  # of the whole ensemble, then without each head
    for row in range(len(right)):
        aurocs = {name: auroc(answers.score[row], scores[row]) for name, scores in ood_scores.items()}
        qualities.append(Quality(mean(right[row]), mean(answers.likelihood[row]), aurocs))
    config, effects = sweep.ensemble.config, []
    places: dict[AtlasInput, int] = {}  # indices of the inputs to show
    for index, head in enumerate(sweep.heads):
        keepers = tuple(m for m, layers in enumerate(config.heads) if head.head in layers[head.layer])
        shared = config.members > 1 and config.attention_copies(head.layer) == 1
        before, after = right[0], right[1 + index]  # [n]
        lost, gained = int((before & ~after).sum()), int((~before & after).sum())
        changes = []
        for sets in ([id_set], ood_sets):
            found = [(one.inputs[change.input], change) for one in sets for change in one.changes[index]]
            for shown_input, change in sorted(found, key=lambda pair: -pair[1].moved)[:most]:
                place = places.setdefault(shown_input, len(places))
                changes.append(replace(change, input=place))
        quality = qualities[1 + index]
        effects.append(HeadEffect(head.layer, head.head, keepers, shared, quality, lost, gained, tuple(changes)))
    return qualities[0], tuple(effects), tuple(places)

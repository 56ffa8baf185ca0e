"""A head atlas: what every head of an ensemble is good for, found by switching it off and nothing else."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from ..arguments import Count, Range, Whole, checked
from ..batches import Batches, Inputs, changed, iterate, length_of, require_labels, size_of
from ..classes import in_order
from ..data.batching import Preprocess
from ..data.dataset import Dataset
from ..errors import ConfigError, DataError
from ..files import DIGEST, write_sealed
from ..heads.masking import working_copy
from ..metrics.inputs import mean
from ..metrics.ood import auroc
from ..model.dual_encoder import require_ensemble
from ..model.ensemble import Ensemble
from ..model.metadata import Calibration
from ..overlap import Keys, require_unlike, sample_keys, warn_if_fitted
from ..prediction import AnyScore
from ..schema import from_plain, to_plain
from .evaluate import Data, batched, fitted_sets, read_groups, require_different, set_name
from .evaluation import ModelInfo, Provenance, read_saved
from .kept import Kept
from .measure import Measure
from .running import describe_model, provenance_of, shown
from .sweep import Sweep, Swept, heads_of

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
        numbers = {"accuracy": self.accuracy, "log_likelihood": self.log_likelihood}
        return numbers | ({"auroc": sum(self.auroc.values()) / len(self.auroc)} if self.auroc else {})


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
        kept = self.model.heads or ()
        sets = {self.id_name, *self.whole.auroc}
        if not kept or not self.model.heads_per_layer or set(self.samples) != sets or min(self.samples.values()) < 1:
            raise DataError(f"an atlas of {self.id_name!r} does not fit its model or its sets {sorted(self.samples)}")
        for head in self.heads:
            layer, number = head.layer, head.head
            fits = 0 <= layer < min(map(len, kept)) and head.without.auroc.keys() == self.whole.auroc.keys()
            keepers = tuple(member for member, layers in enumerate(kept) if fits and number in layers[layer])
            if not keepers or head.members != keepers or any(not 0 <= c.input < len(self.inputs) for c in head.changed):
                raise DataError(f"head {layer}.{number} does not fit the model, the sets or inputs of the atlas")

    def cost(self, head: HeadEffect) -> dict[str, float]:
        """What the loss of a head takes from each of `Quality.numbers`; what it adds is below zero."""
        without = head.without.numbers
        return {name: value - without[name] for name, value in self.whole.numbers.items()}

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
        DataError: A set is empty, does not fit the model, or is given twice. A `HydraWarning` tells of samples that its
            calibration or familiarity were fitted on, as in `evaluate`.
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
    metadata = ensemble.verified_metadata()
    name, id_name = name or "model", id_name or set_name(id_data)
    preprocess = preprocess or metadata.preprocessing
    calibration = metadata.calibration or Calibration()
    measure = Measure(name, id_name, score, (), "torch-uncertainty", calibration, 0, False, metadata.familiarity)
    title = f"set {id_name!r}"
    id_data = in_order({title: id_data}, metadata.labels, ensemble.num_classes)[title]
    sets = atlas_sets(id_data, ood, id_name, preprocess, batch_size, num_workers)
    sweep = Sweep(ensemble, working_copy(ensemble, None, None), heads_of(ensemble, layers), measure)
    answers = sweep_all(sweep, sets, inputs, metadata.preprocessing or preprocess, output, progress)
    model = describe_model(ensemble, ensemble.num_members, ensemble.num_classes, metadata.calibration)
    return assembled(sweep, sets, answers, model)


# --- in three steps: the sets, their answers, the atlas ------------------------------------------------------


@dataclass(frozen=True)
class Sets:
    """The sets of an atlas by name, the in-distribution one first: as they were given, and in batches."""

    id_name: str
    data: Mapping[str, Data]
    batches: Mapping[str, Batches]

    @property
    def titles(self) -> list[str]:
        """What errors call them."""
        id_name, *ood_names = self.data
        return [f"the in-distribution set {id_name!r}", *(f"OOD set {key!r}" for key in ood_names)]


def atlas_sets(
    id_data: Data,
    ood: Mapping[str, Any] | None,
    id_name: str,
    preprocess: Preprocess | None,
    batch_size: int,
    num_workers: int,
) -> Sets:
    """The sets that are looked at, all different from each other."""
    foreign = {key: data for group, sets in read_groups(ood).items() if group != "apart" for key, data in sets.items()}
    if id_name in foreign:
        raise DataError(f"the in-distribution set and an OOD set are both called {id_name!r}; give id_name another")
    unbatched = Sets(id_name, {id_name: id_data, **foreign}, {})
    require_different(dict(zip(unbatched.titles, unbatched.data.values(), strict=True)), preprocess)
    batches = {key: batched(data, key, preprocess, batch_size, num_workers) for key, data in unbatched.data.items()}
    return replace(unbatched, batches=batches)


@dataclass(eq=False)
class AllAnswers:
    """What was found in all sets, batch by batch: answers and keys of samples by set, the labels, inputs to show."""

    id: "MostChanged"
    ood: "MostChanged"
    swept: dict[str, list[Swept]] = field(default_factory=dict)
    keys: dict[str, list[Keys]] = field(default_factory=dict)
    labels: list[Tensor] = field(default_factory=list)


@torch.no_grad()
def sweep_all(
    sweep: Sweep, sets: Sets, most: int, preprocessing: object, output: str | Path | None, progress: bool
) -> AllAnswers:
    """Answers to every batch, those read back that `output` keeps; of either kind at `most` so many inputs a head."""
    ensemble, measure = sweep.ensemble, sweep.measure
    all_answers = AllAnswers(MostChanged(len(sweep.heads), most), MostChanged(len(sweep.heads), most))
    heads = [str(head) for head in sweep.heads]
    calibration = to_plain(measure.calibration)
    keeping = Kept(output, ensemble, {"heads": heads, "score": measure.score, "calibration": calibration}, "an atlas")
    announced = not progress
    with keeping as kept, tqdm(desc="atlas", bar_format=_BAR, disable=not progress) as bar:
        for key, batches in sets.batches.items():
            is_id = key == sets.id_name
            first = 0
            for index, (inputs, targets) in enumerate(iterate(batches, f"set {key!r}", labelled=is_id)):
                prepared = ensemble.prepare(inputs)
                labels = require_labels(targets, ensemble.num_classes, f"set {key!r}", index) if is_id else None
                samples = sample_keys(inputs)
                batch = kept.key(inputs, samples, labels)
                stored = kept.get(batch)
                if not announced and stored is None:
                    announced = True
                    bar.total = inputs_of(sets.data.values(), size_of(inputs))
                    sweep.say_how_long(prepared, size_of(inputs), bar.total)
                if stored is None:
                    answers = sweep.answers(prepared, labels, f"batch {index} of set {key!r}", bar)
                    kept.put(batch, answers._asdict())
                else:
                    answers = Swept(**stored)
                    bar.update(size_of(inputs))
                all_answers.swept.setdefault(key, []).append(answers)
                all_answers.keys.setdefault(key, []).append(samples)
                all_answers.labels += [] if labels is None else [labels.cpu()]
                about = key, first, None if labels is None else labels.tolist()
                (all_answers.id if is_id else all_answers.ood).put(answers, inputs, *about, preprocessing)
                first += size_of(inputs)
        bar.total = bar.n  # what was guessed where batches are not alike
        bar.refresh()
    return all_answers


def assembled(sweep: Sweep, sets: Sets, answers: AllAnswers, model: ModelInfo) -> Atlas:
    """The atlas of all answers, once no sample is in two sets."""
    id_keys, *ood_keys = (np.concatenate(parts) for parts in answers.keys.values())
    id_title, *ood_titles = sets.titles
    require_unlike(id_title, id_keys, dict(zip(ood_titles, ood_keys, strict=True)))
    warn_if_fitted(id_title, id_keys, fitted_sets(sweep.measure.calibration, sweep.measure.familiarity))
    joined = {key: Swept.joined(parts) for key, parts in answers.swept.items()}
    foreign = {key: swept for key, swept in joined.items() if key != sets.id_name}
    whole, effects = effects_of(sweep, joined[sets.id_name], torch.cat(answers.labels), foreign)
    inputs = answers.id.kept | answers.ood.kept
    positions = {key: position for position, key in enumerate(inputs)}
    heads = []
    for effect, *most in zip(effects, answers.id.by_head, answers.ood.by_head, strict=True):
        changes = tuple(replace(change, input=positions[key]) for part in most for key, change in part)
        heads.append(replace(effect, changed=changes))
    return Atlas(
        sweep.measure.name,
        sets.id_name,
        {key: swept.label.shape[1] for key, swept in joined.items()},
        sweep.measure.score,
        whole,
        tuple(heads),
        tuple(inputs.values()),
        model,
        provenance_of(sweep.ensemble.device, sweep.ensemble.dtype),
    )


def effects_of(
    sweep: Sweep, swept: Swept, labels: Tensor, foreign: Mapping[str, Swept]
) -> tuple[Quality, list[HeadEffect]]:
    """How good the whole ensemble is, and what becomes of it without each head; no inputs are shown yet."""
    right = swept.label == labels  # [1 + K, n]
    whole, *without = (
        Quality(
            accuracy=mean(right[row]),
            log_likelihood=mean(swept.likelihood[row]),
            auroc={key: auroc(swept.score[row], answers.score[row]) for key, answers in foreign.items()},
        )
        for row in range(len(right))
    )
    config, effects = sweep.ensemble.config, []
    for head, quality, now_right in zip(sweep.heads, without, right[1:], strict=True):
        keepers = tuple(m for m, layers in enumerate(config.heads) if head.head in layers[head.layer])
        shared = config.members > 1 and config.attention_copies(head.layer) == 1
        lost, gained = int((right[0] & ~now_right).sum()), int((~right[0] & now_right).sum())
        effects.append(HeadEffect(head.layer, head.head, keepers, shared, quality, lost, gained))
    return whole, effects


def inputs_of(sets: Collection[Data], batch: int) -> int | None:
    """How many inputs there are, where batches of others than our data sets hold so many each; None if not known."""
    counts = [len(data) if isinstance(data, Dataset) else length_of(data) for data in sets]
    sizes = [1 if isinstance(data, Dataset) else batch for data in sets]
    return None if None in counts else sum(count * size for count, size in zip(counts, sizes, strict=True) if count)


@dataclass(eq=False)
class MostChanged:
    """For each of some heads, the inputs whose answers change most when it is off; ties go to the earlier input."""

    heads: int
    size: int
    kept: dict[tuple[str, int], AtlasInput] = field(default_factory=dict)  # by set and position

    def __post_init__(self) -> None:
        """Nothing was seen yet; where an input lies in the atlas, is known only in the end."""
        self.by_head: list[list[tuple[tuple[str, int], Changed]]] = [[] for _ in range(self.heads)]

    def put(
        self, answers: Swept, inputs: Inputs, name: str, first: int, labels: list[int] | None, preprocessing: object
    ) -> None:
        """Take in a batch, whose first sample has position `first` in its set."""
        parts = (part[1:].tolist() for part in (answers.moved, answers.label, answers.confidence))
        for head, (moved, label, confidence) in enumerate(zip(*parts, strict=True)):
            values = enumerate(zip(moved, label, confidence, strict=True))
            new = [((name, first + row), Changed(-1, *change)) for row, change in values if change[0] > 0]
            self.by_head[head] = sorted([*self.by_head[head], *new], key=lambda entry: -entry[1].moved)[: self.size]
        keys = dict.fromkeys(key for changes in self.by_head for key, _ in changes)
        self.kept = {key: item for key, item in self.kept.items() if key in keys}
        for key in keys:
            if key not in self.kept:
                row = key[1] - first
                kind, content = shown(changed(inputs, itemgetter(row)), preprocessing)
                answer = int(answers.label[0, row]), float(answers.confidence[0, row])
                self.kept[key] = AtlasInput(*key, kind, content, *answer, None if labels is None else labels[row])

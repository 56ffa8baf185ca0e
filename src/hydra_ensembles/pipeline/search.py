"""The best ensemble for a price: build candidates, judge them on held-out data, choose one."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from operator import le
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

import torch
from torch import nn
from tqdm import tqdm

from .._utils import warn, without_autocast
from ..batches import Batches, Sources, changed, size_of
from ..cascade import CHOOSE_LEAST, Cascade, CascadeSettings, cascade, common_layers
from ..convert.convert import convert
from ..digest import digest, digest_batches
from ..errors import ConfigError, DataError, DivergedError, SameMembersError
from ..evaluation.evaluate import evaluate
from ..familiarity import sample_digests
from ..files import remove
from ..fuse import fuse, soup
from ..heads.ranking import random_members
from ..metrics.distance import FamiliarityName
from ..model.cost import measure_costs
from ..model.dual_encoder import load
from ..model.ensemble import Ensemble
from ..report.compare import Cell, Column, Comparison, tabulated, to_markdown
from ..settings import Range, from_plain, require
from ..store import Form, Store
from ..training.distill import distill
from ..training.recipe import Recipe
from .build import (
    RESULT,
    Chain,
    calibrated,
    data_identity,
    differences,
    halves,
    model_identity,
    read_sets,
    samples_in,
    synthetic,
)
from .settings import BuildData, HydraConfig, ReadBatch, pruned, starting_model, usual_trunk

YOURS, SOUP, FUSED, DEEP = "yours", "soup", "fused above a mean trunk", "deep ensemble"
TAUGHT = f"{FUSED}, distilled"
CHAINS = {f"{SOUP}, then {name}": name for name in (FUSED, DEEP)}  # cascades, and their second stages
ASK = 0.1  # share of rows that goes on in them
MODEL: Form[Any] = Form("", load, lambda folder, model: model.save_pretrained(folder))
DEPTHS = (5 / 6, 2 / 3, 1 / 2)  # default trunks to try, as shares of the layers
RESAMPLES = 10_000  # bootstrap resamples for the interval of a difference
REPEATS = 10  # timed runs per model, alternating with the given one

Judges = Mapping[str, list[ReadBatch]]  # held-out sets by name: the first is labelled ID data, the others are OOD
Maker = Callable[[], Any]
Price = Literal["latency", "multiply_adds"]
CandidateState = Literal["planned", "too dear", "not possible", "judged"]


@dataclass(frozen=True)
class SearchRow:
    """One candidate.

    Attributes:
        name: What tables call it.
        price: Time of a batch (or multiply-adds), relative to the given model.
        state: How far it came.
        config: How it is built; None for the given model, and for combinations of several given ones.
        numbers: Results on held-out data, under the names of `Evaluation.numbers`; empty unless it was judged.
        note: Why it was not judged.
    """

    name: str
    price: float
    state: CandidateState
    config: HydraConfig | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class SearchResult:
    """What a search found.

    Attributes:
        rows: The given model, which costs 1, and every candidate.
        cost: The highest price that was allowed.
        measured: What a price is a ratio of.
        scores: Names of the OOD AUROCs that candidates are judged by, besides `accuracy`, `nll` and `aurc`.
        samples: Number of samples used to judge, by set.
        choice: Name of the best one that is not worse than the given model; empty for a plan, which builds nothing.
        why: The reason, in a sentence.
        ensemble: The choice, calibrated, ready to use; None for a plan.

    Examples:
        >>> he.SearchResult((), cost=1.5, measured="latency", scores=(), samples={}).choice
        ''
    """

    rows: tuple[SearchRow, ...]
    cost: float
    measured: Price
    scores: tuple[str, ...]
    samples: Mapping[str, int]
    choice: str = ""
    why: str = ""
    ensemble: Ensemble | None = field(default=None, compare=False, repr=False)

    def table(self) -> Comparison:
        """All candidates side by side, with an arrow at the choice, for `to_markdown` and so on."""
        columns = (
            Column("price", "Time" if self.measured == "latency" else "MAdds", better="lower", suffix="×"),
            Column("accuracy", "Acc %", better="higher", digits=1, scale=100),
            Column("nll", "NLL", better="lower", digits=3),
            Column("aurc", "AURC", better="lower", digits=4),
            *(Column(key, key.rpartition(":")[0] or "msp", "AUROC", "higher", 1, 100) for key in self.scores),
        )

        def cell(column: Column, row: SearchRow) -> Cell:
            value = row.price if column.key == "price" else row.numbers.get(column.key)
            return Cell("–") if value is None else Cell(column.write(value), value)

        rows = {f"→ {row.name}" if row.name == self.choice else row.name: row for row in self.rows}
        judges = ", ".join(f"{name} ({count:,} samples)" for name, count in self.samples.items())
        notes = [f"Judges: {judges}. Price: {self.measured}, at most {self.cost:g}×."]
        notes += [f"Choice: {self.choice}, because {self.why}."] if self.choice else []
        left = [row for row in self.rows if row.state not in ("planned", "judged")]
        notes += [f"{row.name}: {row.state}{f' ({row.note})' if row.note else ''}." for row in left]
        return tabulated(columns, rows, cell, tuple(notes))

    def decided(self) -> "SearchResult":
        """The choice, once all rows have their numbers."""
        most = self.losses(self.rows[0].numbers)  # of the given model
        judged = [row for row in self.rows if row.numbers]
        fit = [row for row in judged if all(map(le, self.losses(row.numbers), most))]
        best = min(fit, key=lambda row: (row.numbers["nll"], row.price))  # of equals the first: the given model
        why = f"none of the {len(judged) - 1} others within {self.cost:g}× has a lower NLL and is no worse in the rest"
        if best.name != YOURS:
            lower = f"at {best.price:.2f}× it has the lowest NLL, {best.numbers['nll']:.3f} against {most[0]:.3f}"
            why = f"{lower}, of the {len(fit) - 1} within {self.cost:g}× that are no worse than yours in any number"
        return replace(self, choice=best.name, why=why)

    def losses(self, numbers: Mapping[str, float]) -> tuple[float, ...]:
        """Losses to compare candidates by: NLL, AURC, and one minus accuracy and AUROCs; lower is better."""
        return (numbers["nll"], numbers["aurc"], *(1.0 - numbers[key] for key in ("accuracy", *self.scores)))


@torch.inference_mode(False)
@without_autocast()
def search(
    model: nn.Module,
    *,
    id: Batches,
    ood: Sources | Literal["synthetic"] = "synthetic",
    train: Batches | None = None,
    cost: float = 1.5,
    candidates: Sequence[Any] | None = None,
    models: Sequence[nn.Module] = (),
    recipe: Recipe | None = None,
    familiarity: FamiliarityName | None = "mahalanobis",
    price: Price = "latency",
    batch_size: int = 32,
    output: str | Path | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    dry_run: bool = False,
    progress: bool = True,
) -> SearchResult:
    """Find the best ensemble for a price: build candidates, judge them on held-out data, choose.

    The choice has the lowest NLL of all that cost at most `cost` times as much as the given model and are not worse in
    accuracy, NLL, selective risk (AURC) and OOD AUROC; if there is none, it is the given model itself. `why` says
    whether its NLL is significantly lower. These numbers made the choice, so report others, on data that the search has
    not seen. Prices are measured before anything is built; an interrupted search resumes with the same arguments.

    Args:
        model: A trained classifier, as for `build`; always a candidate.
        id: Held-out labelled batches, kept in memory: half of them judge, a quarter ranks heads, a quarter calibrates.
            They choose, so none of them certifies a promise of the choice: keep others for `calibrate`.
        ood: Batches unlike the training data, or `{name: batches}`: half for circuits, half to judge. `"synthetic"`
            makes both from `id`: better than none, but results on real OOD inputs may differ.
        train: Labelled training batches that can be read repeatedly; without them no candidate is trained.
        cost: The highest price, 1 or more; the given model costs 1.
        candidates: `HydraConfig`s, or mappings of their fields; None takes trunks of different depth, with and without
            pruned heads, trained in different ways.
        models: Further trainings of the model: candidates are also their soup, their Deep Ensemble, all of them
            fused above the mean of their first five sixths of the layers (with `train` also distilled), and, if `id`
            has 1,600 rows, cascades: the soup first, then one of the other two for a tenth of the rows.
        recipe: How to train candidates that have no recipe of their own; None takes `Recipe.preset("hydra")`.
        familiarity: Feature score to judge by, in addition to the maximum softmax probability; None for none.
        price: How cost is measured: time of a batch, optimized, or multiply-adds.
        batch_size: Batch size for measuring latency.
        output: Folder for `search.json`, the choice in `ensemble`, and every candidate; None keeps nothing.
        device: Where to compute; None stays where the model is.
        seed: Seed for drawing halves, batches and members.
        dry_run: Only measure what the candidates would cost: a result without numbers.
        progress: Whether to print the plan and show progress bars.

    Examples:
        >>> more = [(torch.randn(28, 3, 64, 64), torch.arange(28) % 7) for _ in range(2)]  # better also ood=
        >>> few = [{"strategy": "random", "prune": 2, "shared_layers": 4}]
        >>> settings = {"candidates": few, "cost": 3.0, "price": "multiply_adds", "progress": False}
        >>> plan = he.search(base, id=more, dry_run=True, **settings)
        >>> [row.state for row in plan.rows]  # nothing is built yet; leave dry_run out, and plan.ensemble is the choice
        ['planned', 'planned']
    """
    cost = require("cost", cost, Annotated[float, Range(1)])
    base = starting_model(model, device, "search")
    data, judges = read_for_search(seed, base, train=train, id=id, ood=ood)
    proposed = usual_candidates(base, train is not None, seed) if candidates is None else candidates
    built = _checked(proposed, base, data, recipe, familiarity, strict=candidates is not None)
    identity = {
        "settings": [cost, price, batch_size, familiarity, seed],
        "candidates": built,
        "model": model_identity(base),
        "models": list(map(digest, models)),
        "data": data_identity(data),
        "judges": {name: digest_batches(sets, name) for name, sets in judges.items()},
    }
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory()) if output is None or dry_run else output
        run = stack.enter_context(Store(folder, identity, "a search"))
        given = [_like(base, other) for other in models]
        work = Search(run, base, built, given, data, judges, cost, price, batch_size, familiarity, seed, progress)
        planned = work.plan()
        if dry_run:
            return planned
        if progress:
            tqdm.write(to_markdown(planned.table()))
        decided = from_plain(SearchResult, run.step("search", lambda: work.decided(planned)), "search.json")
        return replace(decided, ensemble=run.step(RESULT, lambda: work.chosen(decided.choice), MODEL))


@dataclass(frozen=True, eq=False)
class Search:
    """A search with checked arguments; every step is kept in the store, and read back from it."""

    run: Store
    base: Ensemble
    built: Mapping[str, HydraConfig]
    models: Sequence[Ensemble]  # further trainings of the model
    data: BuildData
    judges: Judges
    cost: float
    measured: Price
    batch_size: int
    familiarity: FamiliarityName | None
    seed: int
    progress: bool

    @property
    def scores(self) -> tuple[str, ...]:
        """Names of the OOD AUROCs to judge by."""
        return ("all.auroc", *(() if self.familiarity is None else (f"{self.familiarity}:all.auroc",)))

    def plan(self) -> SearchResult:
        """Measure the price of every candidate, before any of them is built."""
        rows, cost = [SearchRow(YOURS, 1.0, "planned")], self.cost
        for name, (make, _) in self.ways().items():
            if name != YOURS:
                price = self.price(f"prices/{_slug(name)}", make)
                rows.append(SearchRow(name, price, "planned" if price <= cost else "too dear", self.built.get(name)))
        samples = {name: samples_in(batches) for name, batches in self.judges.items()}
        return SearchResult(tuple(rows), cost, self.measured, self.scores, samples)

    def decided(self, planned: SearchResult) -> SearchResult:
        """Build and judge every candidate within the price, the given model first, and choose."""
        rows = [
            row if row.state == "too dear" else self.judged(row)
            for row in tqdm(planned.rows, desc="search", unit="candidate", disable=not self.progress)
        ]
        chosen = replace(planned, rows=tuple(rows)).decided()
        return chosen if chosen.choice == YOURS else self.with_significance(chosen)

    def judged(self, row: SearchRow) -> SearchRow:
        """Build a candidate and evaluate it on held-out data; return its row."""
        at = f"candidates/{_slug(row.name)}"
        try:
            numbers = self.run.step(f"{at}/numbers", lambda: self.numbers(self.final(row.name)))
        except (SameMembersError, DivergedError) as error:
            return replace(row, state="not possible", note=str(error))
        for name in ("members", "finetune", "distill"):  # once it is judged, nothing reads them
            if (place := self.run.path(f"{at}/{name}")) is not None:
                remove(place)
        return replace(row, state="judged", numbers=numbers)

    def numbers(self, model: Ensemble) -> dict[str, float]:
        """Results of an ensemble on held-out data."""
        further: Any = () if self.familiarity is None else (self.familiarity,)
        id_set, ood_sets = self.judges["ID"], {key: sets for key, sets in self.judges.items() if key != "ID"}
        numbers = evaluate(model, id_set, ood_sets, scores=further, progress=False).numbers()
        return {key: numbers[key] for key in ("accuracy", "nll", "ece", "aurc", *self.scores)}

    def price(self, name: str, make: Maker) -> float:
        """Price of an ensemble relative to the given model; 1 if both have the same config."""
        base = self.base

        def measured() -> float:
            candidate = make()
            if candidate.config == base.config:
                return 1.0
            if self.measured == "multiply_adds":
                return candidate.describe().multiply_adds / base.describe().multiply_adds
            inputs = base.prepare(self.judges["ID"][0][0])
            rows = torch.arange(self.batch_size, device=base.device) % size_of(inputs)
            timed = {"own": base.optimize(), "other": candidate.optimize()}
            costs = measure_costs(timed, changed(inputs, lambda tensor: tensor[rows]), repeats=REPEATS, warmup=1)
            return costs[1].latency_ratio

        return float(self.run.step(name, measured))

    def final(self, name: str) -> Ensemble:
        """A candidate, built or read back, ready for use."""
        _, make = self.ways()[name]
        made: Ensemble = self.run.step(f"candidates/{_slug(name)}/{RESULT}", make, MODEL)
        return made.to(self.base.device)

    def ways(self) -> dict[str, tuple[Maker, Maker]]:
        """How to make every candidate: something as dear, to be timed before anything is built; and itself, ready."""
        base, data = self.base, self.data
        found: dict[str, tuple[Maker, Maker]] = {YOURS: (lambda: base, partial(self.ready, lambda: base))}
        for name, config in self.built.items():
            chain = Chain(base, config, data, self.run, f"candidates/{_slug(name)}/", self.progress)
            found[name] = partial(_untrained, config, base), chain.assembled
        if not self.models:
            return found
        every = [base, *self.models]
        fused = partial(fuse, every, mlp="separate", average=usual_trunk(base.num_layers))
        plain: dict[str, Maker] = {SOUP: partial(soup, every), FUSED: fused, DEEP: partial(Ensemble.stack, every)}
        found |= {name: (make, partial(self.ready, make)) for name, make in plain.items()}
        if (train := data.train) is not None:
            more: Any = {"output": self.run.path(f"candidates/{_slug(TAUGHT)}/distill"), "progress": self.progress}
            found[TAUGHT] = fused, partial(self.ready, lambda: distill(fused(), every, train, **more))
        if samples_in(data.validation or []) >= 2 * CHOOSE_LEAST:  # some choose, the others calibrate
            for name, last in CHAINS.items():
                timed = partial(_for_price, plain[SOUP], plain[last])
                found[name] = timed, partial(self.ready, partial(self.chain, last))
        return found

    def chain(self, last: str) -> Any:
        """A cascade of finished candidates, with its threshold."""
        return cascade([self.final(SOUP), self.final(last)], self.data.validation or (), ask=ASK)

    def ready(self, make: Maker) -> Ensemble:
        """A model, calibrated like the candidates."""
        model = make()
        # a cascade has the familiarity of its first stage
        data = self.data if model.front is model else replace(self.data, ranking=None)
        return calibrated(model, HydraConfig(familiarity=self.familiarity, seed=self.seed), data)

    def chosen(self, name: str) -> Ensemble:
        """The choice, which knows the samples by which it was made and chosen: they promise nothing about it."""
        read = (self.judges["ID"], self.data.ranking or [], self.data.validation or [])
        rows = torch.cat([sample_digests(inputs) for batches in read for inputs, _ in batches])
        return self.final(name).with_metadata(chosen=tuple(map(str, rows.unique().tolist())))

    def with_significance(self, chosen: SearchResult) -> SearchResult:
        """Add to the reason whether the NLL of the choice is significantly lower than the model's; warn if it is not.

        Significant: the whole interval of the paired bootstrap over the judging samples lies below zero. Its level is
        Bonferroni-corrected for the number of candidates: if none is better, 95 of 100 searches claim nothing.
        """
        others = sum(row.state == "judged" for row in chosen.rows) - 1  # judged on the same samples
        pair: Any = (self.final(chosen.choice), self.final(YOURS), self.judges["ID"])
        _, rise = differences(*pair, resamples=RESAMPLES, level=1 - 0.05 / others, seed=self.seed)
        interval = f"{rise.value:+.4f}, paired bootstrap for {others} candidates {rise.low:+.4f} to {rise.high:+.4f}"
        lower = f"its NLL is {'significantly' if rise.high < 0 else 'not significantly'} lower ({interval})"
        if rise.high >= 0:
            price = next(row.price for row in chosen.rows if row.name == chosen.choice)
            cost = f"costs {price:.2f} times as much as the given model"
            warn(f"the choice, {chosen.choice}, {cost}, but {lower}: judge on more samples, or keep the model")
        return replace(chosen, why=f"{chosen.why}; {lower}")


def read_for_search(
    seed: int, base: Ensemble, *, train: Batches | None, id: Batches, ood: Sources | Literal["synthetic"]
) -> tuple[BuildData, Judges]:
    """The data of a search: those for builds, and those to judge on, which are halves of `id` and `ood`."""
    train, labelled, outside = read_sets(seed, base, train=train, id=id, ood=ood)
    sizes = {name: samples_in(batches) for name, batches in {"id": labelled["id"], **outside}.items()}
    least = 8 * base.num_classes  # a quarter of id fits statistics of classes
    if sizes["id"] < least or min(sizes.values()) < 4:
        raise DataError(f"too few samples: {sizes}; give {least} or more of id, and 4 or more of other sets")
    held_out, judged = halves(labelled["id"], seed)
    ranking, validation = halves(held_out, seed + 1)
    if isinstance(ood, str):
        circuits, judges = {"ood": synthetic(ranking, seed)}, {ood: synthetic(judged, seed)}
    else:
        cut = {name: halves(batches, seed) for name, batches in outside.items()}
        circuits = {name: first for name, (first, _) in cut.items()}
        judges = {name: second for name, (_, second) in cut.items()}
    return BuildData(train, ranking, validation, circuits, seed), {"ID": judged, **judges}


def usual_candidates(base: Ensemble, trained: bool, seed: int) -> Iterator[dict[str, Any]]:
    """Settings of the default candidates; some may not fit this model."""
    layers = base.num_layers
    for depth in dict.fromkeys(min(round(share * layers), layers - 1) for share in DEPTHS):
        plain: dict[str, Any] = {"shared_layers": depth, "seed": seed}
        yield plain
        if trained:
            together = {**plain, "training": "together"}
            more = 2 * HydraConfig(**plain).settled(base).lost
            yield from ({**together, "strategy": "branches"}, together, {**together, "prune": more})
            yield {**plain, "strategy": "branches", "training": "apart", "average_trunk": True, "mlp": "separate"}


def _like(base: Ensemble, other: nn.Module) -> Any:
    """A further training, converted with the preprocessing of the model, and its class names if it has none."""
    if isinstance(other, Ensemble):
        return other
    model = convert(other, processor=base.metadata.preprocessing)
    unnamed = isinstance(model, Ensemble) and not model.metadata.labels and model.num_classes == base.num_classes
    return model.with_metadata(labels=base.metadata.labels) if unnamed else model


def _checked(
    proposed: Iterable[Any],
    base: Ensemble,
    data: BuildData,
    recipe: Recipe | None,
    familiarity: FamiliarityName | None,
    strict: bool,
) -> dict[str, HydraConfig]:
    """Candidates by name; those that do not fit the model raise if `strict`, otherwise they are skipped."""
    candidates: dict[str, HydraConfig] = {}
    for index, entry in enumerate(proposed):
        try:
            trains = isinstance(entry, Mapping) and entry.get("training") is not None
            plain = {"recipe": recipe, **entry} if trains else entry
            asked = entry if isinstance(entry, HydraConfig) else from_plain(HydraConfig, plain, f"candidates[{index}]")
            config = replace(asked.settled(base), calibrate=True, familiarity=familiarity)
            config.check(base, data)
        except ConfigError:
            if strict:
                raise
            continue
        if config not in candidates.values():
            name = config.in_words()
            same = sum(other.partition(" #")[0] == name for other in candidates)
            candidates[f"{name} #{same + 1}" if same else name] = config
    return candidates


def _untrained(config: HydraConfig, base: Ensemble) -> Ensemble:
    """An untrained ensemble with the config of a candidate: it loses as many heads, but not necessarily the same."""
    count, lost = config.pruned_members, config.lost
    heads: tuple[Any, ...] = ()
    if count:
        heads = random_members(base, lost, count, config.seed, config.layers(base))
    members = [pruned(base, removed) for removed in heads or [()] * config.members]
    ensemble = fuse(members, **config.fusions, trunk=config.trunk)
    if config.training is not None:  # make members differ, as after training: equal ones would be run once
        with torch.no_grad():
            for weight in ensemble.parameters():
                weight += torch.linspace(-0.01, 0.01, weight.numel(), device=weight.device).view_as(weight).to(weight)
    return ensemble


def _for_price(make_first: Maker, make_second: Maker) -> Cascade:
    """A cascade that sends on the usual share of any rows."""
    first, second = make_first(), make_second()
    made = Cascade([first, second], CascadeSettings((1.0,), (ASK,), layers=common_layers(first, second)))
    made.by_share = True
    return made


def _slug(name: str) -> str:
    """A name as a folder name."""
    return "-".join(re.findall(r"[a-z0-9]+", name.lower()))

"""The best ensemble for a price: build candidates, drop those that cannot win, judge the rest, choose one."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal, cast

import torch
from torch import nn
from tqdm import tqdm

from .._distributed import launched
from .._utils import warn, without_autocast
from ..arguments import PositiveShare, Range, Share, checked
from ..batches import Batches, Sources, changed, length_of, size_of
from ..convert.convert import convert
from ..errors import ConfigError, DivergedError, SameMembersError
from ..evaluation.evaluate import evaluate
from ..evaluation.evaluation import Evaluation
from ..familiarity import OF_ACCEPTED, PER_THRESHOLD
from ..files import remove
from ..fingerprints import data_fingerprint, model_fingerprint
from ..fuse import fuse, soup
from ..heads.members import random_members
from ..metrics.distance import FamiliarityName
from ..model.cost import measure_costs
from ..model.dual_encoder import DualEncoder
from ..model.ensemble import Ensemble
from ..model.zero_shot import DEFAULT_TEMPLATES
from ..report.table import to_markdown
from ..run_folder import RESULT, RunFolder
from ..schema import from_plain, to_plain
from ..training.recipe import Recipe
from .build_data import BuildData, Judges, StartingModel, read_for_search, samples_in, starting_model, with_upper_layers
from .chain import Chain, Paired, calibrated, model_identity
from .search_result import DEEP, FORMAT, FUSED, SOUP, YOURS, Price, SearchResult, SearchRow, dominates
from .settings import LARGEST_SEED, HydraConfig, usual_trunk

DEPTHS = (5 / 6, 2 / 3, 1 / 2)  # default trunks to try, as shares of the layers
RESAMPLES = 10_000  # bootstrap resamples for the interval of a difference
REPEATS = 10  # timed runs per model, alternating with the given one
WORK = ("fused", "members", "finetune")  # products of a build that are deleted once it is judged

Candidates = Mapping[str, tuple[HydraConfig, StartingModel]]  # the config and starting model of each


@checked
@torch.inference_mode(False)
@without_autocast()
def search(
    model: nn.Module,
    *,
    id: Batches,
    ood: Sources | Literal["synthetic"] = "synthetic",
    train: Batches | None = None,
    cost: Annotated[float, Range(1, below=1e6)] = 1.5,
    candidates: Sequence[Any] | None = None,
    models: Sequence[nn.Module] = (),
    pretrained: nn.Module | None = None,
    recipe: Recipe | None = None,
    judge_id: Batches | None = None,
    judge_ood: Sources | None = None,
    familiarity: FamiliarityName | None = "mahalanobis",
    first: PositiveShare = 0.1,
    tolerance: Share = 0.0,
    price: Price = "latency",
    batch_size: Annotated[int, Range(1, 2**31 - 1)] = 32,
    optimize: Mapping[str, Any] | None = None,
    output: str | Path | None = None,
    device: torch.device | str | None = None,
    seed: Annotated[int, Range(0, LARGEST_SEED - 1)] = 0,
    dry_run: bool = False,
    progress: bool = True,
) -> SearchResult:
    """Find the best ensemble for a price: build candidates, judge them on held-out data, choose.

    The choice has the lowest NLL of all that cost at most `cost` times as much as the given model and are not worse in
    accuracy, NLL, selective risk (AURC) and OOD AUROC by both scores; if there is none, it is the given model
    itself. These numbers made the choice, so report others, on data that the search has not seen. `why` says whether
    its NLL is significantly lower; if it is not, there is also a warning.

    Prices are measured before anything is trained: candidates above `cost` are not built. Those with the same recipe
    first train for a short while; one is dropped if another costs no more and is better in some measures and worse in
    none, or if its training diverges. Called again with the same arguments, an interrupted search resumes; a finished
    one is read back.

    Args:
        model: A trained classifier, as for `build`; it is always a candidate, with its calibration if it has one.
            Its familiarity is fitted again, as for all candidates.
        id: Held-out labelled ID batches, kept in memory. A half drawn by the seed is used to judge; of the other, one
            half ranks heads and fits familiarity, the other calibrates.
        ood: Batches unlike the training data, kept in memory, or `{name: batches}` of several sources of equal
            weight. One half is for circuits, the other to judge. `"synthetic"` makes both from `id`, see
            `data.synthetic_ood`: better than none, but results on real OOD inputs may differ.
        train: Labelled training batches that can be read repeatedly; without them no candidate is trained.
        cost: The highest price, 1 or more; the given model costs 1. Three members above five sixths of the layers have
            1.33 times its multiply-adds.
        candidates: `HydraConfig`s, or mappings of their fields; None takes trunks of different depth, with and without
            pruned heads, trained in different ways.
        models: Further trainings of the model: candidates are also their soup, their Deep Ensemble, and all of them
            fused, with the mean of their first five sixths of the layers and separate MLPs. Those of another library
            are converted with the model's preprocessing, and with its class names if they have none.
        pretrained: As for `build`, for all candidates that train.
        recipe: How to train candidates that have no recipe of their own; None takes `Recipe.preset("hydra")`.
        judge_id: Labelled ID batches to judge on, instead of half of `id`.
        judge_ood: OOD batches to judge on, or `{name: batches}`, whose mean counts; instead of half of `ood`.
        familiarity: Feature score to judge by, in addition to the maximum softmax probability; None for none.
        first: Share of the updates after which candidates are first compared; 1 skips that.
        tolerance: How much worse than the given model's accuracy, AURC and AUROCs of the choice may be.
        price: How cost is measured: time of a batch, optimized, or multiply-adds.
        batch_size: Batch size for measuring latency.
        optimize: Options of `Ensemble.optimize` for the measurement, such as `{"compile": True}`.
        output: Folder for `search.json`, the choice in `ensemble`, and every candidate; None keeps nothing.
        device: Where to compute; None stays where the model is.
        seed: Seed for drawing halves, batches and members.
        dry_run: Only measure what the candidates would cost: a result without numbers.
        progress: Whether to print the plan and show progress bars.

    Raises:
        HydraError: Model, candidates and data do not fit together, no candidate is within the price, or `output` holds
            something else; found before any long work.

    Examples:
        >>> import torch, hydra_ensembles as he
        >>> from hydra_ensembles.demo import load_backbone
        >>> base = load_backbone()  # a small vision transformer: one member, 6 layers of 6 heads, 7 classes
        >>> batches = [(torch.randn(28, 3, 64, 64), torch.arange(28) % 7) for _ in range(2)]  # or a DataLoader
        >>> settings = {"id": batches, "cost": 3.0, "price": "multiply_adds", "progress": False}  # better also ood=
        >>> plan = he.search(base, candidates=[{"strategy": "random", "prune": 2}], dry_run=True, **settings)
        >>> [row.state for row in plan.rows]  # nothing is built yet; leave dry_run out, and plan.ensemble is the choice
        ['planned', 'planned']
    """
    settings = _Settings(cost, first, tolerance, price, batch_size, familiarity, seed)
    if launched():
        raise ConfigError("a search runs in one process; start it without torchrun or accelerate launch")
    base: Any = model if isinstance(model, Ensemble | DualEncoder) else convert(model)
    if not isinstance(base, Ensemble):
        raise ConfigError("search takes classifiers; make one from a dual encoder: zero_shot(dual, class_names)")
    start = starting_model(base, None, DEFAULT_TEMPLATES, device)
    data, judges = read_for_search(seed, start.base, train, id, ood, judge_id, judge_ood)
    proposed = _usual(start, train is not None, seed) if candidates is None else candidates
    built = _checked(proposed, start, data, pretrained, recipe, familiarity, strict=candidates is not None)
    converted = [_like(start.base, other) for other in models]
    options = dict(optimize or {})
    identity = {
        "format": FORMAT,
        "settings": to_plain(settings),
        "optimize": {key: str(value) for key, value in options.items()},
        "candidates": {name: to_plain(config) for name, (config, _) in built.items()},
        "model": model_identity(start),
        "models": [model_fingerprint(other) for other in converted],
        "upper": [None if own.upper is None else model_fingerprint(own.upper) for _, own in built.values()],
        "data": data.fingerprints(),
        "judges": {name: data_fingerprint(sets, name) for name, sets in judges.items()},
    }
    with ExitStack() as stack:
        if output is None or dry_run:
            output = stack.enter_context(TemporaryDirectory())
        run = RunFolder(output, identity, what="a search", device=start.base.device)
        stack.enter_context(run.working())
        work = _Search(run, start, built, converted, data, judges, settings, options, progress)
        planned = work.plan()
        return planned if dry_run else work.finish(planned)


# --- arguments -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Settings:
    """The settings of a search, as described in `search`."""

    cost: float
    first: float
    tolerance: float
    price: Price
    batch_size: int
    familiarity: FamiliarityName | None
    seed: int

    @property
    def scores(self) -> tuple[str, ...]:
        """Names of the OOD AUROCs to judge by."""
        return ("all.auroc", *(() if self.familiarity is None else (f"{self.familiarity}:all.auroc",)))


def _like(base: Ensemble, other: nn.Module) -> Any:
    """A further training, converted with the preprocessing of the model, and its class names if it has none."""
    if isinstance(other, Ensemble):
        return other
    model = convert(other, processor=base.metadata.preprocessing)
    unnamed = isinstance(model, Ensemble) and not model.metadata.labels and model.num_classes == base.num_classes
    return model.with_metadata(labels=base.metadata.labels) if unnamed else model


def _usual(start: StartingModel, trained: bool, seed: int) -> Iterator[dict[str, Any]]:
    """Settings of the default candidates; some may not fit this model."""
    layers = start.base.num_layers
    for depth in dict.fromkeys(min(round(share * layers), layers - 1) for share in DEPTHS):
        plain: dict[str, Any] = {"shared_layers": depth, "seed": seed}
        yield plain
        if trained:
            together = {**plain, "training": "together"}
            more = 2 * HydraConfig(**plain).settled(start).lost
            yield from ({**together, "strategy": "branches"}, {**together, "whole": True}, together)
            yield {**together, "prune": more}
            yield {**plain, "strategy": "branches", "training": "apart", "average_trunk": True, "mlp": "separate"}


def _checked(
    proposed: Iterable[Any],
    start: StartingModel,
    data: BuildData,
    pretrained: nn.Module | None,
    recipe: Recipe | None,
    familiarity: FamiliarityName | None,
    strict: bool,
) -> Candidates:
    """Candidates by name; those that do not fit the model raise if `strict`, otherwise they are skipped."""
    candidates: dict[str, tuple[HydraConfig, StartingModel]] = {}
    for index, entry in enumerate(proposed):
        try:
            trains = recipe is not None and isinstance(entry, Mapping) and entry.get("training") is not None
            plain = {"recipe": recipe, **entry} if trains else entry
            asked = entry if isinstance(entry, HydraConfig) else from_plain(HydraConfig, plain, f"candidates[{index}]")
            config = replace(asked.settled(start), calibrate=True, familiarity=familiarity)
            own_start = start
            if pretrained is not None and config.recipe is not None:
                own_start = with_upper_layers(start, pretrained, 0 if config.average_trunk else config.trunk)
            config.check(own_start, _part(data, config))
        except ConfigError:
            if strict:
                raise
            continue
        if all(config != other for other, _ in candidates.values()):
            name = config.in_words()
            same = sum(other.partition(" #")[0] == name for other in candidates)
            candidates[f"{name} #{same + 1}" if same else name] = (config, own_start)
    return candidates


def _part(data: BuildData, config: HydraConfig) -> BuildData:
    """The data sets that a build with this config reads."""
    train = data.train if config.reads_train else None
    return replace(data, train=train, ood=data.ood if config.extracts_circuits else None)


def _shortened(config: HydraConfig, share: float, train: Batches | None) -> HydraConfig:
    """The config with only a share of its training steps."""
    recipe = cast(Recipe, config.recipe)
    total, warmup = recipe.plan(None if train is None else length_of(train))
    steps = max(1, round(share * total))
    every = None if recipe.evaluate_every is None else min(recipe.evaluate_every, steps)
    short = replace(recipe, steps=steps, epochs=None, warmup=warmup * steps // total, evaluate_every=every)
    return replace(config, recipe=short)


# --- the search ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Search:
    """A search with checked arguments. Results are stored in the run folder and read back from it."""

    run: RunFolder
    start: StartingModel
    built: Candidates
    models: Sequence[Ensemble]  # further trainings of the model
    data: BuildData
    judges: Judges
    settings: _Settings
    options: Mapping[str, Any]  # for `Ensemble.optimize`
    progress: bool

    def plan(self) -> SearchResult:
        """Measure the price of every candidate, before any of them is built."""
        makers: dict[str, Callable[[], Ensemble]] = {
            name: partial(_untrained, *how) for name, how in self.built.items()
        }
        rows = [SearchRow(YOURS, 1.0, "planned")]
        cost = self.settings.cost
        for name, make in {**makers, **self._of_models()}.items():
            price = self._price(f"prices/{_slug(name)}-planned", self.start.base, make)
            config = self.built[name][0] if name in self.built else None
            rows.append(SearchRow(name, price, "planned" if price <= cost else "too dear", config))
        if not any(row.state == "planned" for row in rows[1:]):
            cheapest = min(rows[1:], key=lambda row: row.price, default=None)
            why = "none fits it" if cheapest is None else f"the cheapest, {cheapest.name!r}, costs {cheapest.price:.2f}"
            raise ConfigError(f"no candidate costs at most {cost:g} times the model: {why}; raise cost, or give more")
        samples = {name: samples_in(batches) for name, batches in self.judges.items()}
        return SearchResult(tuple(rows), cost, self.settings.price, self.settings.scores, samples)

    def finish(self, planned: SearchResult) -> SearchResult:
        """Build, judge and choose, or read back a finished search; returns the result with the chosen ensemble."""
        decided = self.run.product(
            "search.json", lambda: self._result(planned), SearchResult.load, lambda file, result: result.save(file)
        )
        return replace(decided, ensemble=self.run.ensemble(RESULT, lambda: self._final(decided.choice)))

    def _result(self, planned: SearchResult) -> SearchResult:
        rows = {row.name: row for row in planned.rows}
        rivals = list(self._rivals(planned.rows))
        if self.progress:
            tqdm.write(to_markdown(planned.table()))
        builds = sum(row.state == "planned" for row in planned.rows) + sum(map(len, rivals))
        with tqdm(total=builds, desc="search", unit="build", disable=not self.progress) as bar:
            rows[YOURS] = self._judge(rows[YOURS], bar)  # first, so that unsuitable judging data fail early
            for group in rivals:
                rows |= {row.name: row for row in self._first(planned, group, bar)}
            for row in planned.rows[1:]:
                if rows[row.name].state == "planned":
                    rows[row.name] = self._judge(row, bar)
        return self._with_significance(replace(planned, rows=tuple(rows.values())).decided(self.settings.tolerance))

    def _with_significance(self, decided: SearchResult) -> SearchResult:
        """Add to the reason whether the NLL of the choice is significantly lower than the model's; warn if it is not.

        Significant: the whole interval of the paired bootstrap over the judging samples lies below zero. Its level is
        Bonferroni-corrected for the number of candidates: if none is better, 95 of 100 searches claim nothing.
        """
        if decided.choice == YOURS:
            return decided
        others = sum(row.state in ("judged", "stopped early") for row in decided.rows) - 1  # judged on the same samples
        pair = Paired.of(self._final(decided.choice), self._final(YOURS), self.judges["ID"])
        rise = pair.nll_rise(resamples=RESAMPLES, level=1 - 0.05 / others, seed=self.settings.seed)
        interval = f"{rise.value:+.4f}, paired bootstrap for {others} candidates {rise.low:+.4f} to {rise.high:+.4f}"
        lower = f"its NLL is {'significantly' if rise.high < 0 else 'not significantly'} lower ({interval})"
        if rise.high >= 0:
            price = next(row.price for row in decided.rows if row.name == decided.choice)
            warn(
                f"the choice, {decided.choice}, costs {price:.2f} times as much as the given model, but {lower}: judge "
                "on more samples (judge_id), or keep the model"
            )
        return replace(decided, why=f"{decided.why}; {lower}")

    def _rivals(self, rows: Sequence[SearchRow]) -> Iterator[list[SearchRow]]:
        """Groups of candidates with the same recipe, which can be compared before their training ends."""
        groups: dict[str, list[SearchRow]] = {}
        for row in rows:
            config, start = self.built.get(row.name, (None, self.start))
            if config is not None and config.recipe is not None and row.state == "planned":
                groups.setdefault(repr(config.training_recipe(start)), []).append(row)
        yield from (group for group in groups.values() if len(group) > 1 and self.settings.first < 1.0)

    def _first(self, planned: SearchResult, rivals: Sequence[SearchRow], bar: Any) -> Iterator[SearchRow]:
        """Train all rivals for a short while; yield the rows of those to drop."""
        losses: dict[str, tuple[float, ...]] = {}
        for row in rivals:
            config, start = self.built[row.name]
            short = _shortened(config, self.settings.first, self.data.train)
            path = f"first/{_slug(row.name)}"
            bar.set_postfix_str(f"{row.name}, for a short while")
            try:
                losses[row.name] = planned.losses(self._numbers(path, partial(self._built, path, short, start)))
            except (SameMembersError, DivergedError) as error:
                yield replace(row, state="not possible", note=str(error))
            remove(cast(Path, self.run.place(path)))
            bar.update()
        tried = [row for row in rivals if row.name in losses]
        for row in tried:
            cheaper = (other.name for other in tried if other.price <= row.price)
            better = [name for name in cheaper if dominates(losses[name], losses[row.name])]
            if better:
                after = f"after {self.settings.first:.0%} of the training"
                note = f"{after} no better than {better[0]} in any number, worse in some"
                yield replace(row, state="stopped early", note=note)

    def _judge(self, row: SearchRow, bar: Any) -> SearchRow:
        """Build a candidate, evaluate it on held-out data and measure its price again; return its row."""
        slug = _slug(row.name)
        bar.set_postfix_str(row.name)
        try:
            numbers = self._numbers(f"evaluations/{slug}", lambda: self._final(row.name))
        except (SameMembersError, DivergedError) as error:
            bar.update()
            return replace(row, state="not possible", note=str(error))
        price = self._price(f"prices/{slug}", self._final(YOURS), lambda: self._final(row.name))
        for name in WORK:
            remove(cast(Path, self.run.place(f"candidates/{slug}/{name}")))
        bar.update()
        return replace(row, state="judged", numbers=numbers, price=price)

    def _numbers(self, name: str, make: Callable[[], Ensemble]) -> Mapping[str, float]:
        """Results of an ensemble on held-out data."""
        further: Any = () if self.settings.familiarity is None else (self.settings.familiarity,)
        id_set, ood_sets = self.judges["ID"], {key: sets for key, sets in self.judges.items() if key != "ID"}

        def judge() -> Evaluation:
            return evaluate(make(), id_set, ood_sets, scores=further, name=name, progress=False)

        evaluation = self.run.product(f"{name}.json", judge, Evaluation.load, lambda file, result: result.save(file))
        numbers = evaluation.numbers()
        return {key: numbers[key] for key in ("accuracy", "nll", "ece", "aurc", *self.settings.scores)}

    def _price(self, name: str, base: Ensemble, make: Callable[[], Ensemble]) -> float:
        """Price of an ensemble relative to the given model; 1 if both have the same config."""

        def measure() -> dict[str, float]:
            candidate = make()
            if candidate.config == base.config:
                return {"price": 1.0}
            if self.settings.price == "multiply_adds":
                return {"price": candidate.describe().multiply_adds / base.describe().multiply_adds}
            inputs = base.prepare(self.judges["ID"][0][0])
            rows = torch.arange(self.settings.batch_size, device=base.device) % size_of(inputs)
            timed = {"own": base.optimize(**self.options), "other": candidate.optimize(**self.options)}
            costs = measure_costs(timed, changed(inputs, lambda tensor: tensor[rows]), repeats=REPEATS, warmup=1)
            return {"price": costs[1].latency_ratio}

        return float(self.run.json(name, measure)["price"])

    def _final(self, name: str) -> Ensemble:
        """A candidate, ready for use."""
        path = f"candidates/{_slug(name)}"
        if name in self.built:
            return self._built(path, *self.built[name])
        plain = {YOURS: lambda: self.start.base, **self._of_models()}[name]
        return self.run.ensemble(f"{path}/{RESULT}", lambda: self._ready(plain()))

    def _ready(self, model: Ensemble) -> Ensemble:
        """Calibrate a model like the candidates; if it already is, its own calibration and the related metrics stay."""
        own, familiarity = model.metadata, self.settings.familiarity
        if own.calibration is not None and familiarity is None:
            return model
        ready = calibrated(model, HydraConfig(familiarity=familiarity, seed=self.settings.seed), self.data)
        if own.calibration is None:
            return ready
        line = f"familiarity ({familiarity}) fitted as of all candidates of a search; the calibration stays"
        metrics = {name: value for name, value in own.metrics.items() if name not in (*PER_THRESHOLD, *OF_ACCEPTED)}
        return ready.with_metadata(calibration=own.calibration, metrics=metrics, history=(*own.history, line))

    def _built(self, path: str, config: HydraConfig, start: StartingModel) -> Ensemble:
        """Build an ensemble in its own run folder; all builds share the rankings."""
        run = RunFolder(self.run.place(path), {"format": FORMAT, "config": to_plain(config)}, device=start.base.device)
        return Chain(config, start, _part(self.data, config), run, self.progress, rankings=self.run).ensemble()

    def _of_models(self) -> dict[str, Callable[[], Ensemble]]:
        if not self.models:
            return {}
        every = [self.start.base, *self.models]
        trunk = usual_trunk(self.start.base.num_layers)
        return {
            SOUP: lambda: soup(every),
            FUSED: lambda: fuse(every, mlp="separate", average=trunk),
            DEEP: lambda: Ensemble.stack(every),
        }


def _untrained(config: HydraConfig, start: StartingModel) -> Ensemble:
    """An untrained ensemble with the config of a candidate: it loses as many heads, but not necessarily the same."""
    count, lost = config.pruned_members, config.lost
    heads: tuple[Any, ...] = ()
    if count:
        heads = random_members(start.ranked, lost, count, config.seed, config.layers(start))
    members = [start.pruned(removed) for removed in (*heads, *[()] * (config.members - count))]
    ensemble = fuse(members, **config.fusions, trunk=config.trunk)
    if config.training is not None:  # make members differ, as after training: equal ones would be run once
        with torch.no_grad():
            for weight in ensemble.parameters():
                weight += torch.linspace(-0.01, 0.01, weight.numel(), device=weight.device).view_as(weight).to(weight)
    return ensemble


def _slug(name: str) -> str:
    """A name as a folder name."""
    return "-".join(re.findall(r"[a-z0-9]+", name.lower()))

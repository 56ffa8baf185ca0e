"""The whole chain: convert, rank, choose, prune, fine-tune, fuse, calibrate."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from .._distributed import all_ranks
from .._utils import __version__, derive_seed, warn, without_autocast
from ..arguments import checked
from ..batches import Batches, Sources, named_sources
from ..calibrate import calibrate
from ..circuit.extract import extract_circuit
from ..errors import CheckpointError, ConfigError, DataError, SameMembersError, TooFewSamplesError
from ..familiarity import fit_familiarity
from ..fingerprints import model_fingerprint
from ..fuse import fuse
from ..heads.members import CIRCUIT_ORDER, Score, circuit_members, distinct_taylor, random_members, sampled_members
from ..heads.ranking import Head, HeadRanking
from ..heads.taylor import taylor
from ..metrics.bootstrap import Interval, paired
from ..metrics.distance import FamiliarityName
from ..metrics.probabilities import at_labels, weighted_mean
from ..model.ensemble import Ensemble
from ..model.zero_shot import DEFAULT_TEMPLATES, Templates
from ..overlap import reused_of
from ..run_folder import RESULT, RunFolder
from ..schema import from_plain, to_plain
from ..training.finetune import finetune
from .build_data import BuildData, ReadBatch, StartingModel, keys_of, read_data, starting_model, with_upper_layers
from .settings import HydraConfig

FORMAT = "hydra_ensembles build 1"
EXTRA_HEADS = 2  # extra heads that a circuit ranks if it repeats another member


@checked
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
    class_names: Sequence[str] | None = None,
    templates: Templates = DEFAULT_TEMPLATES,
    pretrained: nn.Module | None = None,
    preprocessing: Mapping[str, Any] | None = None,
) -> Ensemble:
    """Make an ensemble from one model: convert, rank heads, choose members, prune, fine-tune and fuse, calibrate.

    Members train separately and are fused, or are fused and train together (`HydraConfig.training`). If the result is
    significantly worse than the model itself, calibrated in the same way, in accuracy or NLL on held-out data, a
    warning says so and the history records it.

    Each stage leaves its product in `output`. Called again with the same arguments, an interrupted build resumes and
    (on a CPU) gives a bit-identical result; a finished one is read back. To repeat a stage, delete its product and
    those after it. The folder of another build is refused: held-out data are compared sample by sample; of `train`,
    the length, the first batch, and all labels that the source has in memory.

    For a dual encoder (CLIP), heads of both towers are ranked together and pruned, and members classify images
    by class names, as in `zero_shot`. For the image tower alone, build from `zero_shot(dual, class_names)`.

    Args:
        model: A model that `convert` takes, or an `Ensemble` or a `DualEncoder` with one member. It is not changed.
        config: What to make.
        train: Labelled training batches that can be read repeatedly, for fine-tuning and Taylor rankings. Images are
            cropped and mirrored at random only if these do so, whatever the recipe says (`data.TrainTransform`).
        id: Held-out labelled in-distribution batches, kept in memory. A half drawn by the seed ranks heads, the
            other half calibrates (and chooses between learning rates), unless `validation` is given.
        ood: Batches unlike the training data, for circuits, kept in memory. Use other data to report results. A mapping
            from names to batches gives several sources of equal weight; `"synthetic"` makes them from `id`, see
            `data.synthetic_ood`.
        validation: Held-out labelled batches for calibration and for choices in fine-tuning.
        output: Run folder; None keeps nothing.
        device: Where to compute; None stays where the model is.
        progress: Whether to show progress bars.
        class_names: For a dual encoder: the names of the classes, in the order of the labels.
        templates: For a dual encoder: sentences with `{label}` in place of a name.
        pretrained: The model before its fine-tuning: members start from its layers above the trunk.
        preprocessing: Changes to the model's own preprocessing, as in `convert`.

    Returns:
        The fused ensemble, calibrated if there are data for it, in evaluation mode, ready to `predict`.

    Raises:
        HydraError: Config, model and data do not fit together (found before any long work, as far as possible);
            `output` holds another build, or a product that this one did not make, or is in use.

    Examples:
        Use your own model (from timm, transformers, ...) instead of `base`, and a `DataLoader` instead of `batches`:

        >>> import torch, hydra_ensembles as he
        >>> from hydra_ensembles.demo import load_backbone
        >>> base = load_backbone()  # a small vision transformer: one member, 6 layers of 6 heads, 7 classes
        >>> batches = [(torch.randn(7, 3, 64, 64), torch.arange(7)) for _ in range(2)]  # or a DataLoader
        >>> config = he.HydraConfig(members=3, strategy="random", accepted_share=0.8)  # "circuit" needs ood=
        >>> hydra = he.build(base, config, id=batches, output="run", progress=False)
        >>> answer = hydra.predict(torch.randn(5, 3, 64, 64))
        >>> hydra.num_members, answer.accept.shape  # if it is False, `answer.reason` says why
        (3, torch.Size([5]))
        >>> hydra.save_pretrained("my-hydra")
    """
    start = starting_model(model, class_names, templates, device, preprocessing)
    config = config.settled(start)
    if pretrained is not None:
        start = with_upper_layers(start, pretrained, 0 if config.average_trunk else config.trunk)
    sources = () if ood is None or isinstance(ood, str) else named_sources(ood, "ood").values()
    if config.extracts_circuits and any(source is batches for source in sources for batches in (train, id, validation)):
        raise DataError("ood is the same data as train, id or validation; give data unlike the training data")
    used_ood = ood if config.extracts_circuits else None
    data = read_data(config.seed, start.base, train if config.reads_train else None, id, used_ood, validation)
    config.check(start, data)
    with all_ranks(start.base.device) as ranks, ExitStack() as alone:  # one process group for circuits and fine-tuning
        settings = {"format": FORMAT, "config": to_plain(config), "model": model_identity(start)}
        identity = {**settings, "data": data.fingerprints(ranks)}
        ranks.require_same(settings, "model or settings")
        ranks.require_same_data(identity["data"], "data")

        def opened() -> RunFolder:
            run = RunFolder(output, identity, device=start.base.device)
            if not (run.has(RESULT) and run.has("summary.json")):
                alone.enter_context(run.working())
            return run

        return Chain(config, start, data, ranks.all_or_none(opened), progress).finish()


def model_identity(start: StartingModel) -> dict[str, Any]:
    """Identity of the starting model, for a run folder."""
    # without metadata that no result depends on: text, and marks of training samples
    metadata = replace(start.base.metadata.plain, preprocessing_from="", train_marks=(), train_samples=0)
    digest = hashlib.sha256(json.dumps(to_plain(metadata), sort_keys=True).encode()).hexdigest()
    model: dict[str, Any] = {"weights": model_fingerprint(start.ranked), "metadata": digest}
    if start.upper is not None:
        model["upper"] = model_fingerprint(start.upper)
    if start.dual is not None:
        model["templates"] = list(start.templates)
    return model


def calibrated(fused: Ensemble, config: HydraConfig, data: BuildData) -> Ensemble:
    """Last step of a build: fit familiarity on the ranking data, temperature and thresholds on the validation data."""
    if not config.calibrate or data.validation is None:
        return fused
    per_member, share = config.per_member_temperature, config.accepted_share
    familiar = _familiar(fused, config, data.ranking, data.validation)
    return calibrate(familiar, data.validation, share=share, per_member=per_member, familiarity=config.familiarity)


def _familiar(
    fused: Ensemble, config: HydraConfig, ranking: list[ReadBatch] | None, validation: list[ReadBatch]
) -> Ensemble:
    """Fit familiarity on the ranking samples, if there are any; calibration then uses other samples."""
    choice = config.familiarity
    if choice is None or ranking is None:
        return fused
    try:
        score: FamiliarityName = "mahalanobis" if choice == "auto" else choice
        fitted = fit_familiarity(fused, ranking, score, held_out=0.0, seed=config.seed)
    except TooFewSamplesError:
        if choice != "auto":
            raise
        return fused  # `calibrate` will try with half of its own samples, and report problems
    familiarity = fitted.metadata.familiarity
    refused = familiarity is not None and reused_of(keys_of(validation), familiarity.settings.fitted_set).mostly
    if choice == "auto" and refused:
        return fused  # `calibrate` will fit on half of its samples and set the threshold on the rest
    return fitted  # `calibrate` checks that a score chosen by name was fitted on other samples


def compare_with_base(ensemble: Ensemble, base: Ensemble, validation: list[ReadBatch], seed: int) -> Ensemble:
    """Warn and add to the history if accuracy or NLL of the ensemble is significantly worse than the base's.

    Significant: zero lies outside the 95 % interval of the difference, by a paired bootstrap over the samples.
    """
    pair = Paired.of(ensemble, base, validation)
    gain = paired(weighted_mean, [pair.right], [pair.right_before], seed=seed)
    rise = pair.nll_rise(seed=seed)
    lines = []
    if gain.high < 0:
        lines.append(
            f"held-out accuracy {pair.right.mean():.1%} is significantly below the model's "
            f"{pair.right_before.mean():.1%} ({gain.value:+.1%}, "
            f"paired bootstrap {gain.low:+.1%} to {gain.high:+.1%}, {len(pair.right)} samples)"
        )
    if rise.low > 0:
        lines.append(
            f"held-out NLL {pair.nll.mean():.3f} is significantly above the model's {pair.nll_before.mean():.3f} "
            f"({rise.value:+.3f}, paired bootstrap {rise.low:+.3f} to {rise.high:+.3f}, {len(pair.nll)} samples)"
        )
    if not lines:
        return ensemble
    fewer = "prune fewer heads, " if ensemble.config.heads != base.config.heads * ensemble.num_members else ""
    advice = f"{fewer}train the members (with recipe and train), or calibrate the model itself and keep it"
    warn(f"{'; '.join(lines)}: {advice}")
    return ensemble.with_metadata(history=(*ensemble.metadata.history, *lines))


class Paired(NamedTuple):
    """Two models on the same samples: 1 where correct, else 0, and NLL; `[n]` each, `_before` of the earlier model."""

    right: Tensor
    right_before: Tensor
    nll: Tensor
    nll_before: Tensor
    mistake: float  # mean rise in NLL on labels other than the earlier model's answer, weighted by its probabilities

    @classmethod
    def of(cls, model: Ensemble, before: Ensemble, batches: list[ReadBatch]) -> "Paired":
        """Run both models on labelled batches."""
        parts: list[tuple[Tensor, ...]] = []
        costs = torch.zeros(2, dtype=torch.float64)  # sum of weighted rises, and sum of weights
        for inputs, targets in batches:
            labels = cast(Tensor, targets).cpu().long()
            ours = model.predict(inputs).log_probs.double().cpu()  # [B, C]
            theirs = before.predict(inputs).log_probs.double().cpu()
            expected = theirs.exp().scatter(1, theirs.argmax(1, keepdim=True), 0.0)  # its probabilities of other labels
            costs += torch.stack([(expected * (theirs - ours)).sum(), expected.sum()])
            our_right, their_right = (ours.argmax(1) == labels).double(), (theirs.argmax(1) == labels).double()
            parts.append((our_right, their_right, -at_labels(ours, labels), -at_labels(theirs, labels)))
        cost, weight = costs.tolist()
        right, right_before, nll, nll_before = (torch.cat(part) for part in zip(*parts, strict=True))
        return cls(right, right_before, nll, nll_before, mistake=cost / weight if weight else 0.0)

    def nll_rise(self, *, resamples: int = 1000, level: float = 0.95, seed: int) -> Interval:
        """How much higher the NLL is than before; the interval allows for one more mistake than was seen.

        Mistakes are rare and expensive. If a model is merely more confident, every correct sample has a lower NLL; with
        few or no mistakes among the samples, no bootstrap resample would show the cost.
        """
        rises = self.nll - self.nll_before
        more = torch.cat([rises, rises.new_tensor([self.mistake])])
        plain, extended = (
            paired(weighted_mean, [values], resamples=resamples, level=level, seed=seed) for values in (rises, more)
        )
        return replace(plain, low=min(plain.low, extended.low), high=max(plain.high, extended.high))


@dataclass(frozen=True)
class MemberHeads:
    """How the heads of a member were chosen, as text, and the heads it loses."""

    origin: str
    heads: tuple[Head, ...]


@dataclass(frozen=True)
class Choices:
    """The content of `heads.json`."""

    members: tuple[MemberHeads, ...]

    def checked_for(self, config: HydraConfig) -> list[tuple[str, list[Head]]]:
        """Origin and heads of each member, after checking them against the config."""
        count = config.pruned_members
        lost = [frozenset(member.heads) for member in self.members]
        asked = [config.lost] * count + [0] * (config.members - count)
        counts = [len(heads) for heads in lost]
        if counts != asked or len(set(lost[:count])) < count:
            raise ConfigError(
                f"members lose {counts} heads, or some lose the same; the settings ask for {asked}, different for each "
                "pruned member"
            )
        return [(member.origin, list(member.heads)) for member in self.members]


@dataclass(eq=False)
class Chain:
    """The stages of a build. Each reads its product from the run folder, or makes it from the previous stage's."""

    config: HydraConfig
    start: StartingModel
    data: BuildData
    run: RunFolder
    progress: bool
    rankings: RunFolder | None = None  # folder for rankings that builds of the same model and data share

    def __post_init__(self) -> None:
        config, self.layers = self.config, self.config.layers(self.start)
        self.pool = config.pool_size(self.start.heads(self.layers)) if config.draws_from_pool else None

    def finish(self) -> Ensemble:
        """Run the missing stages, write the summary and return the result."""
        if not self.run.has(RESULT) and not self.run.has("base"):
            self.run.ensemble("base", lambda: self.start.base)
        final = self.ensemble()
        self.run.json("summary", lambda: self._summary(final))
        return final

    def ensemble(self) -> Ensemble:
        """The fused and calibrated ensemble."""

        def judged() -> Ensemble:
            result = calibrated(self.run.ensemble("fused", self._fused), self.config, self.data)
            validation = self.data.validation
            if validation is None or self.rankings is not None:  # a search judges the base itself
                return result
            base = self.start.base
            if result.metadata.calibration is not None and base.metadata.calibration is None:
                base = calibrated(base, replace(self.config, familiarity=None), self.data)  # the alternative a user has
            return compare_with_base(result, base, validation, self.config.seed)

        return self.run.ensemble(RESULT, judged)

    def _fused(self) -> Ensemble:
        config = self.config
        if config.training == "together":
            pruned = [self._named(self.start.pruned(heads), index) for index, (_, heads) in enumerate(self.choices)]
            return self._trained(fuse(pruned, **config.fusions, trunk=config.trunk), 0)
        members = [self.run.ensemble(f"members/{i}", partial(self._member, i)) for i in range(config.members)]
        return fuse(members, **config.fusions, average=config.trunk if config.average_trunk else 0)

    def _trained(self, ensemble: Ensemble, index: int) -> Ensemble:
        recipe, train, validation = self.config.training_recipe(self.start), self.data.train, self.data.validation
        if recipe is None or train is None:
            return ensemble
        folder = self.run.place("finetune")
        return finetune(ensemble, train, recipe, validation, output=folder, progress=self.progress, index=index)

    def _member(self, index: int) -> Ensemble:
        """One member, pruned and fine-tuned; with pretrained layers, the whole member is the given model itself."""
        if self.config.whole and index == self.config.members - 1 and self.start.upper is not None:
            return self.start.base.with_metadata(calibration=None, familiarity=None)
        return self._named(self._trained(self.start.pruned(self.choices[index][1]), index), index)

    def _named(self, member: Ensemble, index: int) -> Ensemble:
        """A member whose history lines say which member it is and how its heads were chosen."""
        history = member.metadata.history
        pairs = zip(self.start.base.metadata.history, history, strict=False)
        before = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        lines = (f"member {index} ({self.choices[index][0]}): {line}" for line in history[before:])
        return member.with_metadata(history=(*history[:before], *lines))

    @cached_property
    def choices(self) -> list[tuple[str, list[Head]]]:
        """For each member: how its heads were chosen, as text, and the heads it loses."""
        plain, file = self.run.json("heads", lambda: to_plain(self._choose())), self.run.place("heads.json")
        try:
            return from_plain(Choices, plain, "heads", complete=True).checked_for(self.config)
        except ConfigError as error:
            raise CheckpointError(f"{file} cannot be used: {error}. Delete {file} and run this again") from error

    def _choose(self) -> "Choices":
        """Choose the heads of all members."""
        config, count = self.config, self.config.pruned_members
        drawn = ["drawn from circuit avg"] * count
        origins = ["random heads"] * count
        heads: tuple[tuple[Head, ...], ...] = ()
        match config.strategy:
            case "random":
                heads = random_members(self.start.ranked, config.lost, count, config.seed, self.layers)
            case "taylor":
                draws = distinct_taylor(self._taylor, config.lost, count)
                heads = tuple(ranking.first(config.lost) for _, ranking in draws)
                origins = [f"taylor, draw {draw}" for draw, _ in draws]
            case "sampled":
                pool = self.pool or config.lost
                heads = sampled_members(self._circuit("avg", pool), config.lost, pool, count, config.seed)
                origins = drawn
            case "circuit":
                heads = self._circuits()
                origins = [*(f"circuit {score}" for score in CIRCUIT_ORDER), *drawn][:count]
        origins += ["all heads"] * (config.members - count)
        heads += ((),) * (config.members - count)
        return Choices(tuple(MemberHeads(origin, tuple(lost)) for origin, lost in zip(origins, heads, strict=True)))

    def _circuits(self) -> tuple[tuple[Head, ...], ...]:
        """One circuit for each of the first members; the ranking that other members are drawn from is longer."""
        lost, count = self.config.lost, self.config.pruned_members
        budgets = dict.fromkeys(CIRCUIT_ORDER[:count], lost)
        budgets["avg"] = self.pool or lost
        rankings: dict[str, HeadRanking] = {score: self._circuit(score, budgets[score]) for score in budgets}
        try:
            return circuit_members(rankings, lost, count, self.pool, self.config.seed)
        except SameMembersError:
            more = min(lost + EXTRA_HEADS, self.start.heads(self.layers))
            if more == lost:
                raise
            rankings |= {score: self._circuit(score, more, "-further") for score in CIRCUIT_ORDER[1:count]}
            return circuit_members(rankings, lost, count, self.pool, self.config.seed)

    def _circuit(self, score: Score, budget: int, suffix: str = "") -> HeadRanking:
        config, start, ranking = self.config, self.start, self.data.ranking
        assert ranking is not None  # ensured by `HydraConfig.check`
        settings: dict[str, Any] = {"method": config.method, "ties": config.ties}
        if score == "ood":
            settings["max_accuracy_loss"] = config.max_accuracy_loss
        how = "-".join(map(str, settings.values()))
        settings |= {"score": score, "budget": budget, "layers": self.layers, "progress": self.progress}
        settings |= {} if start.dual is None else {"class_names": start.names, "templates": start.templates}
        extract = partial(extract_circuit, start.ranked, ranking, self.data.ood, **settings)
        return self._ranking(f"{score}{suffix}", budget, how, lambda journal: extract(journal=journal))

    def _taylor(self, draw: int) -> HeadRanking:
        config, source = self.config, self.data.for_taylor
        assert source is not None  # ensured by `HydraConfig.check`
        settings: dict[str, Any] = {"scope": config.taylor_scope, "calibration_batches": config.calibration_batches}
        how = "-".join(map(str, settings.values()))
        seed = derive_seed(config.seed, "taylor", draw)  # neighbouring seeds of builds share no draw
        settings |= {"budget": config.lost, "seed": seed, "layers": self.layers, "progress": self.progress}
        name = f"taylor-{config.seed}-{draw}"
        return self._ranking(name, config.lost, how, lambda _: taylor(self.start.base, source, **settings))

    def _ranking(self, name: str, budget: int, how: str, make: Callable[[Path | None], HeadRanking]) -> HeadRanking:
        """A ranking from this run or from the shared folder, where its file name contains all settings."""
        run = self.run
        product = f"rankings/{name}"
        if self.rankings is not None:
            run = self.rankings
            product = f"{product}-{how}-{budget}-above-{self.config.trunk}"
        return run.ranking(product, lambda: make(run.place(f"{product}.journal")))

    def _summary(self, final: Ensemble) -> dict[str, Any]:
        """Settings, data, members, cost and calibration of a build, as plain data."""
        counts = final.describe()
        return {
            "config": to_plain(self.config),
            "versions": {"hydra_ensembles": __version__, "torch": torch.__version__},
            "samples": self.data.samples(),
            "members": [
                {"origin": origin, "pruned": [str(head) for head in lost], "heads_kept": [len(layer) for layer in kept]}
                for (origin, lost), kept in zip(self.choices, final.config.heads, strict=True)
            ],
            "trunk": final.config.trunk,
            "parameters": counts.parameters,
            "multiply_adds": counts.multiply_adds,
            "calibration": None if (calibration := final.metadata.calibration) is None else to_plain(calibration.brief),
            "metrics": dict(final.metadata.metrics),
            "history": list(final.metadata.history),
        }

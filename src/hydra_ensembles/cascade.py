"""A cascade: a cheap model answers, and a better one only where it is unsure.

Stages are ensembles, other cascades, or functions from inputs to probabilities (a remote model). A row has the answer
of the last stage it was sent to, as one member. What the first stage finds unfamiliar is declined and sent nowhere.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from ._utils import warn, without_autocast
from .batches import Batches, Inputs, a_few, first_epoch, in_model_order, iterate, require_labels, same_names, size_of
from .calibrate import drawn, fit_temperature
from .checkpoint import STAGES, Contents, Saved, load_checkpoint
from .digest import digest
from .errors import ConfigError, DataError, TooFewSamplesError
from .familiarity import sample_digests
from .files import expanded, remove
from .metrics.conformal import conformal_threshold
from .metrics.probabilities import at_least_float32, class_logits
from .model.cost import Description, attention_cost, interleaved_times, mlp_cost
from .model.dual_encoder import require_classifier
from .model.ensemble import Answering, Ensemble, restored_metadata, stored_metadata
from .model.inputs import Prepared
from .model.layers import OurModel, dropping
from .model.member_states import place_of
from .model.metadata import Calibration, Metadata
from .model_card import cascade_card
from .optimize.runner import OptimizedEnsemble
from .prediction import REASONS, Prediction
from .settings import Checked, Share, from_plain, require, to_plain

CHOOSE_LEAST, CHOOSE_MOST = 200, 1000  # rows that choose the thresholds, at least and at most; else a fifth of all
TIMED = 16  # rows of the batch on which `cost` measures the first stage, and runs of it
UNSURE = REASONS.index("unsure")

Stage = Any  # an Ensemble, a Cascade, or a function from inputs to probabilities [B, C]


@dataclass(frozen=True)
class CascadeSettings(Checked):
    """When a stage's answer stands.

    Attributes:
        thresholds: For every stage but the last, the largest score (one minus the confidence) at which its answer
            stands.
        asked: Share of the rows that chose them that went on past each of these stages.
        mix: Whether an answer is the mean with those of the stages before.
        limit: The largest share of a batch that may go on; None for any.
        layers: First layers that the second stage has in common with the first, which run once.
    """

    thresholds: tuple[float, ...]
    asked: tuple[Share, ...]
    mix: bool = False
    limit: Share | None = None
    layers: int = 0


@dataclass(frozen=True, eq=False)
class CascadeInputs:
    """A batch for every stage: as it came, and prepared for the first."""

    raw: Any  # a tensor, a mapping of tensors, or a list of pictures or texts
    first: Any

    def rows(self, places: Tensor, prepared: bool) -> Any:
        """Some rows, from what was prepared for the first stage or from what came."""
        given = self.first if prepared else self.raw
        if isinstance(given, Mapping):
            kept = {name: tensor[places.to(tensor.device)] for name, tensor in given.items()}
            return Prepared(kept) if isinstance(given, Prepared) else kept
        return given[places.to(given.device)] if isinstance(given, Tensor) else [given[row] for row in places.tolist()]


class _First(NamedTuple):
    """What the first stage says of a batch."""

    log_probs: Tensor  # [B, C]
    unfamiliar: Tensor | None = None  # [S, M, B]
    features: Tensor | None = None  # [M, B, d]
    tokens: Tensor | None = None  # after the layers that the second stage has in common, [1, B, T, d]


class Cascade(OurModel, Answering, Saved):
    """Stages that answer in turn; made by `cascade`. It predicts, calibrates, saves and serves like an `Ensemble`.

    Attributes:
        by_share: Whether, to measure times, the share that was asked for goes on, whatever the thresholds.
    """

    _kind = "cascade"
    num_members = 1
    per_row = ("stage", "forced")
    by_share = False

    def __init__(self, stages: Sequence[Stage], settings: CascadeSettings, metadata: Metadata | None = None) -> None:
        super().__init__()
        if len(stages) < 2 or len(settings.thresholds) != len(stages) - 1:
            raise ConfigError(f"a cascade has two stages or more, and a threshold between them; got {len(stages)}")
        self.stages = list(stages)
        self.models = nn.ModuleList(stage for stage in stages if isinstance(stage, nn.Module))
        self.settings = settings
        ours = [stage for stage in stages if isinstance(stage, Answering)]
        if not ours:
            raise ConfigError("a cascade needs at least one stage that is an Ensemble; the others may be functions")
        for stage in ours:
            require_classifier(stage, "cascade")
        known = next((one.metadata for one in ours if one.metadata.labels), ours[0].metadata)
        self.num_classes, self.kind = ours[0].num_classes, ours[0].kind
        if metadata is None:
            familiarity = stages[0].metadata.familiarity if isinstance(stages[0], Ensemble) else None
            metadata = Metadata(source=ours[0].metadata.source, familiarity=familiarity)
        self.metadata = replace(metadata, labels=known.labels, preprocessing=ours[0].metadata.preprocessing)
        self._orders = [self._order_of(index, stage) for index, stage in enumerate(stages)]
        self.faults: list[int] = [0] * len(stages)

    def _order_of(self, index: int, stage: Stage) -> list[int] | None:
        """Where a stage has each class of the cascade; None if in the same order. Refused if the classes differ."""
        if not isinstance(stage, Answering):
            return None
        ours, theirs = self.metadata.labels, stage.metadata.labels
        if stage.num_classes != self.num_classes:
            raise ConfigError(f"stage {index} has {stage.num_classes} classes, others {self.num_classes}")
        if not ours or not theirs or ours == theirs:
            return None
        places = same_names(ours, theirs)
        if len(places) < len(ours):
            missing = next(name for place, name in enumerate(ours) if place not in places)
            raise ConfigError(f"stage {index} has no class {missing!r}; it has {a_few(theirs)}, others {a_few(ours)}")
        return [places[place] for place in range(len(ours))]

    # --- answering ---------------------------------------------------------------------------------------

    @property
    def front(self) -> Any:
        """The first ensemble, whose inputs it takes."""
        return next(stage for stage in self.stages if isinstance(stage, Answering)).front

    @property
    def device(self) -> torch.device:
        """Device of the first ensemble."""
        return self.front.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the first ensemble."""
        return self.front.dtype

    @property
    def raw(self) -> bool:  # type: ignore[override]
        """Whether a stage needs rows as they came: a function, or one with other preprocessing."""
        known = self.metadata.preprocessing
        return known is not None and not all(
            isinstance(stage, Answering) and not stage.raw and stage.metadata.preprocessing == known
            for stage in self.stages
        )

    def prepare(self, inputs: Any = None, **named: Any) -> CascadeInputs:
        """Read inputs, as `Ensemble.prepare` does for the first stage; later ones read the rows they are sent."""
        given = named if inputs is None else inputs
        if not isinstance(given, CascadeInputs):
            given = CascadeInputs(given if isinstance(given, Tensor | Mapping | list) else [given], given)
        first = self.stages[0]
        if not isinstance(first, Answering):
            return CascadeInputs(given.raw, given.raw)
        return CascadeInputs(given.raw, first.prepare(given if isinstance(first, Cascade) else given.first))

    def answered(self, prepared: CascadeInputs) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
        """What `answers` returns, with who answered (`stage`) and reasons to decline (`forced`)."""
        first = self._first(prepared)
        answer, stage, forced = self._in_turn(prepared, first)
        return answer[None], first.unfamiliar, {"stage": stage, "forced": forced}

    def answers(self, *inputs: Any, **named: Any) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities as logits of one member, `[1, B, C]`, and how unfamiliar the first stage finds the rows."""
        return self.answered(self.prepare(*inputs, **named))[:2]

    def features_and_logits(self, *inputs: Any, **named: Any) -> tuple[Tensor, Tensor]:
        """Features of the first stage, `[M, B, d]` (d = 0 of a function), and log-probabilities, `[1, B, C]`.

        They are for `calibrate`: whoever is unsure is asked for, whatever the limit and an earlier calibration say, and
        a stage that fails raises.
        """
        given = self.prepare(*inputs, **named)
        first = self._first(given, features=True)
        log_probs = self._in_turn(given, first, calibrating=True)[0][None]
        return log_probs[..., :0] if first.features is None else first.features, log_probs

    def _in_turn(self, given: CascadeInputs, first: _First, calibrating: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities `[B, C]`, who answered `[B]`, and reasons `[B]` to decline an answer whatever it is."""
        answer = first.log_probs.clone()
        stage = torch.zeros(len(answer), dtype=torch.long, device=answer.device)
        declined = list[Tensor]()
        waiting = torch.arange(len(answer), device=answer.device)
        fitted = self.metadata.familiarity
        most = None if fitted is None or calibrating else fitted.settings.threshold
        limit = None if calibrating else self.settings.limit
        if fitted is not None and first.unfamiliar is not None and most is not None:
            waiting = waiting[fitted.about(first.unfamiliar).score(fitted.settings.scores[0]) <= most]
        for later, threshold in enumerate(self.settings.thresholds, start=1):
            doubts = doubt_of(answer[waiting])
            going = doubts > threshold
            if self.by_share:
                most_unsure = doubts.argsort(descending=True)[: round(self.settings.asked[later - 1] * len(answer))]
                going = torch.zeros_like(going).index_fill(0, most_unsure, True)
            chosen = going.nonzero()[:, 0]  # on a GPU the only place where this waits for the stage before
            waiting = waiting[chosen]
            if not len(waiting):
                break
            if limit is not None and len(waiting) > (most := math.ceil(limit * len(answer))):
                order = doubts[chosen].argsort(stable=True)  # the least unsure first: foreign rows are the most unsure
                declined.append(waiting[order[most:]])
                waiting = waiting[order[:most]].sort().values
            try:
                found = self._later(later, given, first, waiting).to(answer)
            except Exception as error:  # of a remote model anything
                if calibrating:
                    raise
                self.faults[later] += 1
                declined.append(waiting)
                problem = " ".join(str(error).split()) or type(error).__name__
                warn(f"stage {later} of the cascade failed, and its {len(waiting)} rows are declined: {problem}")
                break
            if self.settings.mix:
                before = answer[waiting] + math.log(later)
                found = torch.logaddexp(before, found) - math.log(later + 1)
            answer[waiting], stage[waiting] = found, later
        forced = torch.zeros_like(stage)
        return answer, stage, forced.index_fill(0, torch.cat(declined), UNSURE) if declined else forced

    def _first(self, given: CascadeInputs, features: bool = False) -> _First:
        stage = self.stages[0]
        if not isinstance(stage, Ensemble | OptimizedEnsemble):
            return _First(self._asked(0, given.first))
        familiarity, prepared, tokens, pooled = self.metadata.familiarity, given.first, None, None
        if self.settings.layers:
            tokens, pooled, logits = stage.split(self.settings.layers, prepared)
        elif features or familiarity is not None:
            pooled, logits = stage.features_and_logits(prepared)
        else:
            logits = stage(prepared)
        unfamiliar = None if familiarity is None or pooled is None else familiarity.scores(pooled, logits)
        return _First(self._ordered(0, log_probs_of(stage, logits)), unfamiliar, pooled, tokens)

    def _later(self, index: int, given: CascadeInputs, first: _First, places: Tensor) -> Tensor:
        """Log-probabilities of one of the later stages for some rows."""
        stage, count = self.stages[index], len(places)
        if isinstance(stage, OptimizedEnsemble):  # to few sizes, each with its own plan and graph
            size = next(size for size in sizes_up_to(len(first.log_probs)) if size >= count)
            places = torch.cat([places, places[:1].expand(size - count)])
        rows = given.rows(places, self._reads_alike(index))
        if index == 1 and first.tokens is not None:
            logits = stage.continued(self.settings.layers, first.tokens[:, places], rows)
            return self._ordered(index, log_probs_of(stage, logits[:, :count]))
        return self._asked(index, rows)[:count]

    def _asked(self, index: int, inputs: Any) -> Tensor:
        """Log-probabilities `[B, C]` of a stage by itself, in the order of the cascade's classes."""
        stage = self.stages[index]
        if isinstance(stage, Ensemble | OptimizedEnsemble):
            return self._ordered(index, log_probs_of(stage, stage(inputs)))
        if isinstance(stage, Cascade):
            return self._ordered(index, stage.predict(inputs).log_probs)
        probs = at_least_float32(torch.as_tensor(stage(inputs)))
        if probs.shape[1:] != (self.num_classes,) or not bool(((probs >= 0) & (probs.sum(-1, True) < 1.01)).all()):
            got = f"got {list(probs.shape)} from {probs.min().item():.3g} to {probs.max().item():.3g}"
            raise DataError(f"stage {index} must return probabilities [rows, {self.num_classes}]; {got}")
        return probs.clamp_min(torch.finfo(probs.dtype).tiny).log()

    def _ordered(self, index: int, log_probs: Tensor) -> Tensor:
        order = self._orders[index]
        return log_probs if order is None else log_probs[:, order]

    def _reads_alike(self, index: int) -> bool:
        """Whether a stage takes what was prepared for the first one."""
        first, stage = self.stages[0], self.stages[index]
        if not all(isinstance(one, Ensemble | OptimizedEnsemble) for one in (first, stage)):
            return False
        alike = first.metadata.preprocessing == stage.metadata.preprocessing
        return alike and (first.device, first.dtype) == (stage.device, stage.dtype)

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        """Log-probabilities as logits of one member, `[1, B, C]`."""
        return self.answers(*inputs, **named)[0]

    def with_metadata(self, **changes: Any) -> "Cascade":
        """The same stages with some of the metadata replaced."""
        return Cascade(self.stages, self.settings, replace(self.metadata, **changes))

    def limited(self, limit: float | None) -> "Cascade":
        """The same cascade that sends on at most this share of a batch, for traffic that may be foreign."""
        settings = replace(self.settings, limit=None if limit is None else require("limit", limit, Share))
        return Cascade(self.stages, settings, self.metadata)

    def optimize(self, example_inputs: Any = None, **options: Any) -> "Cascade":
        """The same with its ensembles optimized, for inference only; rows for later ones are padded to a few sizes."""
        ours = (Ensemble, Cascade)
        stages = [one.optimize(**options) if isinstance(one, ours) else one for one in self.stages]
        fast = Cascade(stages, self.settings, self.metadata)
        fast.by_share, fast.faults = self.by_share, self.faults
        if example_inputs is not None:
            fast.warm_up(example_inputs)
        return fast

    def warm_up(self, inputs: Any) -> None:
        """Run every size that later stages may be sent of a batch like this one."""
        given = self.prepare(inputs)
        with torch.inference_mode():
            first = self._first(given)
            rows = len(first.log_probs)
            for later in range(1, len(self.stages)):
                stage = self.stages[later]
                if isinstance(stage, Cascade):
                    stage.warm_up(given.raw)
                elif isinstance(stage, OptimizedEnsemble):
                    for size in sizes_up_to(rows):
                        self._later(later, given, first, torch.arange(size, device=first.log_probs.device))

    def describe(self) -> Description:
        """Parameters of all ensembles, and multiply-adds of a row, of which the shares asked for go on."""
        shares = zip(self.stages, (1.0, *self.settings.asked), strict=True)
        known = [(one.describe(), share) for one, share in shares if isinstance(one, Answering)]
        parameters = sum(one.parameters for one, _ in known)
        work = sum(one.multiply_adds * share for one, share in known)
        for layer in range(self.settings.layers):  # common ones run once
            config, tokens = self.front.config, known[0][0].tokens
            kept, encoder = config.heads[0][layer], config.encoder
            work -= (attention_cost(encoder, kept, tokens) + mlp_cost(encoder, tokens)) * self.settings.asked[0]
        return replace(known[0][0], parameters=parameters, multiply_adds=round(work), heads=())

    @property
    def config(self) -> dict[str, Any]:
        """Settings and stages; an ensemble is named by its contents."""
        return {"settings": to_plain(self.settings), "stages": self._places()}

    # --- saving and loading ------------------------------------------------------------------------------

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the stages into folders below `stages`, then the cascade itself; a function is saved by its name."""
        target = expanded(folder)
        kept = [place.rpartition("/")[2] for stage, place in zip(self.stages, self._places(), strict=True)]
        for stage, name in zip(self.stages, kept, strict=True):
            if isinstance(stage, Saved) and not (target / STAGES / name / "config.json").exists():
                stage.save_pretrained(target / STAGES / name)
        super().save_pretrained(target)
        for old in (target / STAGES).iterdir() if (target / STAGES).is_dir() else ():
            if old.name not in kept:
                remove(old)

    def _places(self) -> list[str]:
        """Where each stage is stored, named by its contents; of a function its name."""
        places = list[str]()
        for index, stage in enumerate(self.stages):
            if isinstance(stage, Saved):
                contents = stage._contents("stage")
                known = digest([contents.model, contents.metadata, contents.tensors])
                places.append(f"{STAGES}/{index}-{known[:16]}")
            elif isinstance(stage, Answering):
                raise ConfigError("an optimized cascade is not saved; save the one it was made of")
            else:
                places.append(name_of(stage))
        return places

    def _contents(self, name: str) -> Contents:
        plain, tensors = stored_metadata(replace(self.metadata, preprocessing=None, labels=()))
        return Contents(self._kind, self.config, plain, tensors, cascade_card(name, self))

    @classmethod
    def _restored(
        cls,
        contents: Contents,
        device: str | torch.device | None,
        dtype: torch.dtype | None,
        stages: Mapping[str, Callable[..., Any]] | None = None,
    ) -> Self:
        functions, found = stages or {}, list[Any]()
        for place in contents.model["stages"]:
            if place.startswith(f"{STAGES}/"):
                inner = load_checkpoint(contents.folder / place, (Ensemble._kind, cls._kind))
                kind, more = (cls, {"stages": stages}) if inner.kind == cls._kind else (Ensemble, {})
                found.append(kind._restored(inner, device, dtype, **more))
            elif place in functions:
                found.append(functions[place])
            else:
                advice = f"he.load(folder, stages={{{place!r}: function}})"
                raise ConfigError(f"a stage is the function {place!r}, which is not stored; give it: {advice}")
        settings = from_plain(CascadeSettings, contents.model["settings"], "config.model.settings")
        return cls(found, settings, restored_metadata(contents))

    def __repr__(self) -> str:
        names = [type(one).__name__ if isinstance(one, Answering) else name_of(one) for one in self.stages]
        asked = ", ".join(f"{share:.1%}" for share in self.settings.asked)
        return f"Cascade({' -> '.join(names)}, asked={asked}, classes={self.num_classes}{self.promised})"


def sizes_up_to(most: int) -> list[int]:
    """Numbers of rows for which later stages have plans: from a sixteenth of a batch on, 2, 3, 4, 6, 8, ... rows."""
    sizes = sorted(factor << power for factor in (2, 3) for power in range(most.bit_length()))
    return [*(size for size in (1, *sizes) if most <= 16 * size < 16 * most), most]


def log_probs_of(stage: Ensemble | OptimizedEnsemble, logits: Tensor) -> Tensor:
    """Calibrated log-probabilities `[B, C]` of a stage from its member logits `[M, B, C]`."""
    rule = stage.metadata.calibration or Calibration()
    return Calibration(rule.temperature).prediction(logits, check_finite=False).log_probs


def doubt_of(log_probs: Tensor) -> Tensor:
    """One minus the largest probability, `[B]`, from log-probabilities `[B, C]`."""
    return Prediction(log_probs[None]).score("msp")


def name_of(stage: Stage) -> str:
    """The name that a function is saved by."""
    return str(getattr(stage, "__name__", type(stage).__name__))


def common_layers(first: Stage, second: Stage) -> int:
    """How many first layers two ensembles have in common bit by bit, with the stem; never all of them."""
    if not isinstance(first, Ensemble) or not isinstance(second, Ensemble):
        return 0
    ours, theirs = first.config, second.config
    alike = ours.stem == theirs.stem and ours.encoder == theirs.encoder
    if not alike or (first.device, first.dtype) != (second.device, second.dtype):
        return 0
    most = min(one.trunk if one.members > 1 else one.encoder.layers for one in (ours, theirs))
    state, other = first.state_dict(), second.state_dict()
    layers = min(most, ours.encoder.layers - 1)
    for name, tensor in state.items():
        group, layer = place_of(name)
        if group == "stem" or (layer is not None and layer < layers):
            same = name in other and tensor.shape == other[name].shape and torch.equal(tensor, other[name])
            layers = layers if same else layer or 0
    return layers


@without_autocast()
def cascade(
    stages: Sequence[Stage],
    held_out: Batches,
    *,
    ask: float | Sequence[float] | None = None,
    cost: float | None = None,
    mix: bool = False,
    limit: float | None = None,
) -> Cascade:
    """Let later stages answer only where the earlier ones are unsure.

    A fifth of the held-out rows (at least 200, at most 1,000), drawn by their digests, sets the thresholds, and a
    temperature for each ensemble that is not calibrated. `calibrate` leaves these rows out, so it may be given the same
    data afterwards; it also says when to decline the cascade's answer.

    Args:
        stages: From cheap to good: ensembles, cascades, or functions from inputs to probabilities `[B, C]`, which get
            what `predict` was given. Ensembles that begin with the same layers, such as a soup before the Hydra
            Ensemble of the same models, run them once.
        held_out: Labelled batches that nothing was trained on, read twice.
        ask: Share of rows like these that goes on to the next stage, or one for each stage but the last; else 0.1.
        cost: Instead, for two stages: time of a row over that of the first stage alone, measured on these rows.
        mix: Whether an answer is the mean of all stages that were asked, instead of the last one's.
        limit: The largest share of a batch that may go on; the rest is declined. For traffic that may be foreign.

    Examples:
        >>> held_out = [(torch.randn(100, 3, 64, 64), torch.arange(100) % 7) for _ in range(2)]
        >>> chain = he.cascade([base, base], held_out, ask=0.2)
        >>> chain.settings.asked[0] <= 0.2
        True
    """
    if ask is not None and cost is not None:
        raise ConfigError("give ask, a share of the rows, or cost, a time over the first stage's; not both")
    if cost is not None and (len(stages) != 2 or cost <= 1.0):
        raise ConfigError(f"cost={cost} must be above 1, and is for two stages; give ask, a share for each stage")
    between = len(stages) - 1
    shares = [ask] * between if isinstance(ask, float | int) else list(ask if ask is not None else [0.1] * between)
    if len(shares) != between:
        raise ConfigError(f"ask has {len(shares)} shares for {len(stages)} stages; give one for each but the last")
    shares = [require("ask", share, Share) for share in shares]
    most = None if limit is None else require("limit", limit, Share)
    plain = CascadeSettings((-1.0,) * between, (1.0,) * between, mix, most)
    chain = Cascade(stages, plain)
    rows = _Chosen.of(chain, held_out)
    chain = Cascade([_with_temperature(stage, rows) for stage in stages], plain)
    if cost is not None:
        shares = [_share_for(cost, chain, rows)]
    thresholds, asked = list[float](), list[float]()
    answer = torch.cat([chain._asked(0, inputs) for inputs in rows.inputs])
    going = torch.ones(len(answer), dtype=torch.bool)
    for later, share in enumerate(shares, start=1):
        doubts = torch.where(going.to(answer.device), doubt_of(answer), -1.0)
        threshold = conformal_threshold(doubts, 1.0 - share) if share < 1.0 else -1.0
        going &= (doubts > threshold).cpu()
        thresholds.append(threshold if math.isfinite(threshold) else 1.0)
        asked.append(going.float().mean().item())
        if later < len(stages) - 1:
            found = torch.cat([chain._asked(later, inputs) for inputs in rows.inputs]).to(answer)
            if mix:
                found = torch.logaddexp(answer + math.log(later), found) - math.log(later + 1)
            answer = torch.where(going.to(answer.device)[:, None], found, answer)
    layers = common_layers(chain.stages[0], chain.stages[1])
    settings = replace(plain, thresholds=tuple(thresholds), asked=tuple(asked), layers=layers)
    told = ", ".join(f"{share:.1%}" for share in asked)
    line = f"cascade of {len(stages)} stages: of {len(answer)} rows, {told} went on"
    metadata = replace(chain.metadata, chosen=tuple(map(str, rows.digests)), history=(*chain.metadata.history, line))
    return Cascade(chain.stages, settings, metadata)


class _Chosen(NamedTuple):
    """The rows that choose the thresholds, as batches with labels."""

    inputs: list[Inputs]
    labels: list[Tensor]
    digests: list[int]

    @classmethod
    def of(cls, chain: Cascade, held_out: Batches) -> "_Chosen":
        """The rows that are drawn first by their digests, as those on which `calibrate` fits: a fifth, at least 200."""
        source = in_model_order(held_out, "held_out", chain)
        source = source if not hasattr(source, "__next__") else list(source)
        with first_epoch(source, 0):
            known = torch.cat([sample_digests(inputs) for _, inputs, _ in iterate(source, "held_out", True, chain.raw)])
        if len(known) < CHOOSE_LEAST:
            raise TooFewSamplesError(
                f"a cascade needs {CHOOSE_LEAST} held-out rows, better thousands; got {len(known)}"
            )
        count = min(max(CHOOSE_LEAST, len(known) // 5), CHOOSE_MOST)
        first = torch.zeros(len(known), dtype=torch.bool)
        first[torch.from_numpy(drawn(known).argsort(kind="stable")[:count])] = True
        batches, labels, done = list[Inputs](), list[Tensor](), 0
        with first_epoch(source, 0):
            for index, inputs, targets in iterate(source, "held_out", True, chain.raw):
                places = first[done : done + size_of(inputs)].nonzero()[:, 0]
                done += size_of(inputs)
                if len(places):
                    checked = require_labels(targets, chain.num_classes, "held_out", index).cpu()
                    labels.append(checked[places])
                    batches.append(CascadeInputs(inputs, None).rows(places, False))
        return cls(batches, labels, known[first].unique().tolist())


def _with_temperature(stage: Stage, rows: _Chosen) -> Stage:
    """An ensemble with a temperature, so that the doubts of stages can be compared; anything else as it is."""
    if not isinstance(stage, Ensemble) or stage.metadata.calibration is not None:
        return stage
    with torch.no_grad(), dropping(False):
        logits = torch.cat([class_logits(stage(inputs)).float().cpu() for inputs in rows.inputs], dim=1)
    return stage.with_metadata(calibration=Calibration(fit_temperature(logits, torch.cat(rows.labels))))


def _share_for(cost: float, chain: Cascade, rows: _Chosen) -> float:
    """The share that may go on if a row is to take `cost` times as long as at the first stage."""
    ours = next(stage for stage in chain.stages if isinstance(stage, Ensemble | Cascade))
    largest = max(rows.inputs, key=size_of)
    few = CascadeInputs(largest, None).rows(torch.arange(min(TIMED, size_of(largest))), False)
    with torch.no_grad(), dropping(False):
        runs = {str(index): partial(chain._asked, index, few) for index in range(2)}
        times = interleaved_times(runs, TIMED, ours.device)
    first, second = (median(times[name][1:]) for name in ("0", "1"))
    return min(1.0, (cost - 1.0) * first / second)

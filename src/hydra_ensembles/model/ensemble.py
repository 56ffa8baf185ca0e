"""The Ensemble: M members, one forward pass, logits [M, B, C]."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from .._utils import warn
from ..checkpoint import Contents, Saved, placed
from ..digest import digest
from ..errors import ConfigError, DataError
from ..metrics.probabilities import class_logits
from ..model_card import model_card
from ..preprocessing import TextPreprocessing
from ..promise import Promise
from ..settings import from_plain, to_plain
from ..store import Form
from . import LATER
from .config import GROUPS, EnsembleConfig, KeptHeads, LowRank, Outputs, PatchStemConfig
from .cost import Description, multiply_adds
from .inputs import Arguments, Given, Prepared, packed, read_inputs
from .layers import Context, Encoder, GroupedNorm, OurModel, Past, Places, dropping
from .member_states import (
    join_states,
    member_config,
    member_index,
    member_state,
    require_same_architecture,
    require_same_dtype_and_device,
)
from .metadata import (
    Calibration,
    Familiarity,
    FamiliaritySettings,
    Metadata,
    common_metadata,
    member_metadata,
)
from .stem_readout import PatchStem, Readout, TextStem

if TYPE_CHECKING:
    from ..optimize.runner import OptimizedEnsemble

Model = TypeVar("Model", bound=nn.Module)
FAMILIARITY = "familiarity"  # its key in the metadata, and the prefix of its tensors


def build_with_state(build: Callable[[], Model], state: Mapping[str, Tensor], frozen: Iterable[str] = ()) -> Model:
    """Build a model whose parameters are the given tensors (not copies), in evaluation mode.

    Parameters named in `frozen` do not require gradients.
    """
    with torch.device("meta"):
        model = build()
    model.load_state_dict(state, assign=True)
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    return model.eval()


@lru_cache(maxsize=64)
def shapes_of(config: EnsembleConfig) -> Mapping[str, torch.Size]:
    """Names and shapes of the parameters of an ensemble with this configuration."""
    with torch.device("meta"):
        return {name: parameter.shape for name, parameter in Ensemble(config).named_parameters()}


@torch.inference_mode(False)
@torch.no_grad()
def copied(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous copies of tensors; even in inference mode they are trainable."""
    return {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in state.items()}


class Answering:
    """What evaluation, calibration, servers and commands need of a model: an ensemble or a cascade, optimized or not.

    Attributes:
        raw: Whether it reads raw items where it can, because its parts prepare them differently.
        per_row: Fields of its predictions, `[B]` each, that do not follow from logits.
        faults: For each stage of a cascade, how many batches it failed on, its optimized form included.
    """

    kind: Literal["image", "text"]
    num_classes: int
    num_members: int
    metadata: Metadata
    config: Any
    device: Any
    dtype: Any
    prepare: Callable[..., Any]
    answers: Callable[..., tuple[Tensor, Tensor | None]]
    describe: Callable[[], Description]
    with_metadata: Callable[..., Any]
    outputs: Outputs = "classes"
    raw = False
    per_row: tuple[str, ...] = ()
    faults: Sequence[int] = ()

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes; their numbers if no names are known."""
        return self.metadata.labels or tuple(map(str, range(self.num_classes)))

    @property
    def promise(self) -> Promise | dict[str, Promise] | None:
        """What is promised of the errors among accepted answers, or of those with each label; None if nothing is."""
        return None if self.metadata.calibration is None else self.metadata.calibration.promise

    def at(self, risk: float | Mapping[str, float]) -> Any:
        """A copy with another of the certified risks in force, if several were given to `calibrate`."""
        if self.metadata.calibration is None:
            raise ConfigError("at() changes the risk of a calibrated model; calibrate it with risk=[...]")
        return self.with_metadata(calibration=self.metadata.calibration.at(risk, self.class_names))

    @property
    def promised(self) -> str:
        """What is promised, for `repr`."""
        calibration = self.metadata.calibration
        return "" if calibration is None else "".join(f", promise: {one}" for one in calibration.promises)

    @property
    def front(self) -> Any:
        """The ensemble whose inputs it takes."""
        return self

    @property
    def preprocess(self) -> Callable[[list[Any]], Any] | None:
        """From raw items to the inputs of a batch; None if that is not known."""
        return list if self.raw else self.metadata.preprocessing

    def answered(self, prepared: Any) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
        """What `answers` returns, and the fields of `per_row`."""
        return *self.answers(prepared), {}

    @torch.no_grad()
    def predict(self, *inputs: Any, check_finite: bool = True, **named: Any) -> Any:
        """Label, confidence and uncertainty of inputs as for `forward`, with the saved calibration applied.

        A `Prediction`; of a model with several right labels, a `LabelsPrediction`. That of a cascade says who answered
        (`p.stage`).

        The answer is always that of evaluation mode, and no flag is changed: threads may share the model.
        `check_finite` refuses logits that are NaN or infinite; on a GPU it waits for them, which nothing else does.
        """
        prepared = self.prepare(*inputs, **named)
        with dropping(False):
            logits, unfamiliarity, rows = self.answered(prepared)
        found = self.prediction(logits, unfamiliarity, check_finite)
        return replace(found, **rows) if rows else found

    def prediction(self, logits: Tensor, unfamiliarity: Tensor | None = None, check_finite: bool = True) -> Any:
        """Turn the results of `answers` into a prediction, with the calibration and class names of this model."""
        if not self.num_classes:
            raise ConfigError("this ensemble has no classifier; convert the model with num_labels=, or use features()")
        calibration, familiarity = self.metadata.calibration or Calibration(), self.metadata.familiarity
        if self.outputs == "labels":
            return calibration.of_labels(logits, self.metadata.labels or None, check_finite)
        about = None if familiarity is None or unfamiliarity is None else familiarity.about(unfamiliarity)
        return calibration.prediction(logits, self.metadata.labels or None, check_finite, about)

    def warm_up(self, inputs: Any) -> None:
        """Run everything that a batch of this size may need."""
        self.predict(inputs, check_finite=False)


class Ensemble(OurModel, Answering, Saved):  # Module first: FSDP swaps the class of a module
    """A transformer classifier with M members: stem, encoder, readout; `forward` returns `[M, B, C]`.

    A single model is an ensemble with one member, a pruned model one with fewer heads, a Deep Ensemble one
    whose members share nothing, a Hydra Ensemble one whose members share stem and MLPs.

    The first axis of every parameter holds copies, also for norms and biases, `[G, d]`: in your own training loop,
    rules based on the number of axes (`ndim <= 1` for weight decay, 2 for Muon) must use names instead. If you change
    weights in place, what was measured with them (calibration, familiarity, metrics) is out of date; functions that
    return new weights drop it.

    `heads[member][layer]` are the original indices of the heads kept in the blocks; `config.heads` also has, as the
    last layer, those of an attention that pools the tokens, which for pruning is layer `num_layers`.

    Examples:
        >>> hydra = he.fuse([he.prune(base, [(5, 0)]), he.prune(base, [(5, 1)])])
        >>> hydra(torch.randn(4, 3, 64, 64)).shape  # member logits
        torch.Size([2, 4, 7])
        >>> answer = hydra.predict(torch.randn(4, 3, 64, 64))
        >>> answer.probs.shape, answer.epistemic.shape
        (torch.Size([4, 7]), torch.Size([4]))
        >>> hydra.save_pretrained("my-hydra")
        >>> he.Ensemble.from_pretrained("my-hydra").num_members
        2
    """

    _kind = "ensemble"

    def __init__(self, config: EnsembleConfig, metadata: Metadata | None = None) -> None:
        super().__init__()
        self.metadata = Metadata() if metadata is None else metadata
        self.config = config
        self.kind, self.num_members, self.num_classes = config.kind, config.members, config.readout.num_classes
        self.outputs = config.readout.outputs
        encoder = config.encoder
        self.num_layers, self.num_heads, self.head_dim = encoder.layers, encoder.heads, encoder.head_dim
        self.heads: KeptHeads = tuple(member[: self.num_layers] for member in config.heads)
        width, copies = encoder.width, config.copies("stem")
        self.stem: PatchStem | TextStem
        if isinstance(config.stem, PatchStemConfig):
            self.stem = PatchStem(config.stem, width, copies)
        else:
            self.stem = TextStem(config.stem, width, copies)
        self.encoder = Encoder(config)
        self.readout = Readout(config)
        self.before: Past | None = None  # of the prefix, once nothing changes any more (`optimize`)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise weights: norms and LayerScale as ones, biases as zeros, the rest narrowly normal."""
        if next(self.parameters()).is_meta:  # skip: drawing random numbers would still take time
            return
        norms = {id(m.weight): m.kind for m in self.modules() if isinstance(m, GroupedNorm)}
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                leaf = name.rpartition(".")[2]
                if norms.get(id(parameter)) == "rms_plus_one":
                    parameter.zero_()
                elif id(parameter) in norms or leaf == "scale":
                    parameter.fill_(1.0)
                elif leaf.endswith("bias"):
                    parameter.zero_()
                else:
                    nn.init.trunc_normal_(parameter, std=0.02)

    @property
    def frozen(self) -> list[str]:
        """Names of the parameters that do not require gradients."""
        return [name for name, parameter in self.named_parameters() if not parameter.requires_grad]

    # --- running -----------------------------------------------------------------------------------------

    def forward(
        self, inputs: Any = None, attention_mask: Any = None, token_type_ids: Any = None, **named: Any
    ) -> Tensor:
        """Member logits `[M, B, C]`, with members on the first axis (`nn.DataParallel` would join that of samples).

        Of a classifier with one output they are `[M, B, 1]`, the log-odds of the second of two classes.

        Args:
            inputs: Images `[B, 3, H, W]`, token ids `[B, T]`, or a mapping from a tokenizer or image processor
                (`pixel_values`, or `input_ids` with `attention_mask` and `token_type_ids`); or raw inputs, which go
                through the saved preprocessing: a PIL image, a string, or a list of them, in which a tuple of two
                strings is a pair; or what `prepare` returned, which is not read and checked again.
            attention_mask: `[B, T]`, 1 at tokens and 0 at padding.
            token_type_ids: `[B, T]`, the segment of each token.
            named: The same as keywords: `ensemble(**tokenizer(texts, return_tensors="pt"))`. Keywords that do not
                affect the answer (`inputs.IGNORED`) are ignored; all others are refused.
        """
        logits = self._forward(*self.unpack(inputs, attention_mask, token_type_ids, **named))
        return logits[..., 1:] if self.outputs == "odds" else logits

    def features(self, *inputs: Any, **named: Any) -> Tensor:
        """Pooled features `[M, B, d]`, the input of the classifier or its hidden layer; arguments as for `forward`."""
        return self.features_and_logits(*inputs, **named)[0]

    def answers(self, *inputs: Any, **named: Any) -> tuple[Tensor, Tensor | None]:
        """Member logits `[M, B, C]`, and how unfamiliar the inputs are by every fitted score, `[S, M, B]`."""
        familiarity = self.metadata.familiarity
        if familiarity is None:
            return class_logits(self(*inputs, **named)), None
        features, logits = self.features_and_logits(*inputs, **named)
        return logits, familiarity.scores(features, logits)

    def features_and_logits(self, *inputs: Any, **named: Any) -> tuple[Tensor, Tensor]:
        """Pooled features `[M, B, d]`, those of two tokens concatenated, and member logits `[M, B, C]`."""
        return self._features_and_logits(*self.unpack(*inputs, **named))

    def split(self, layers: int, prepared: Prepared) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens `[1, B, T, d]` after the first layers, for `continued`, and what `features_and_logits` returns."""
        return self._split(layers, *prepared.arguments)

    def continued(self, layers: int, tokens: Tensor, prepared: Prepared) -> Tensor:
        """Member logits `[M, B, C]` from the tokens that another ensemble had after first layers equal to these."""
        return self._continued(layers, tokens, *prepared.arguments[:2])

    def prepare(self, *inputs: Any, **named: Any) -> Prepared:
        """Read and check arguments of `forward`, raw inputs too, and move them to the model's device and dtype."""
        return Prepared.of(self.kind, self.unpack(*inputs, **named))

    def unpack(
        self, inputs: Any = None, attention_mask: Any = None, token_type_ids: Any = None, **named: Any
    ) -> Arguments:
        """What `prepare` does, as a tuple: images or token ids, attention mask, segments."""
        if isinstance(inputs, Prepared):
            return inputs.arguments
        named |= {"attention_mask": attention_mask, "token_type_ids": token_type_ids}
        if not isinstance(inputs, Tensor | Mapping | None):
            inputs = self._preprocessed(inputs)
        arguments = read_inputs(self.config, inputs, named)
        home = next(self.parameters(), None)  # replicas of `nn.DataParallel` have no parameters
        if home is None or torch.compiler.is_compiling():
            return packed(arguments) if self.config.packed else arguments
        # without waiting only towards a GPU: in the other direction the host could read a copy before it has arrived
        (main, *extra), soon = arguments, home.is_cuda
        main = main.to(home.device, home.dtype if main.is_floating_point() else None, non_blocking=soon)
        mask, segments = (None if one is None else one.to(home.device, non_blocking=soon) for one in extra)
        return packed((main, mask, segments)) if self.config.packed else (main, mask, segments)

    def _preprocessed(self, raw: Any) -> Given:
        """Pictures or texts as tensors."""
        preprocessing = self.metadata.preprocessing
        if preprocessing is None:
            problem = f"got {type(raw).__name__}, but there is no saved preprocessing"
            raise DataError(f"{problem}; give tensors, or convert the model with processor=")
        if self.kind == "text" and isinstance(raw, tuple):  # a DataLoader gives batches of texts as tuples
            raise DataError("got a tuple of texts; write a pair as [(first, second)], and separate texts as a list")
        return preprocessing(raw)

    def _forward(self, inputs: Tensor, *extra: Tensor | None) -> Tensor:
        """Member logits `[M, B, C]` of arguments that are prepared."""
        return self._split(0, inputs, *extra)[2]

    def _features_and_logits(self, inputs: Tensor, *extra: Tensor | None) -> tuple[Tensor, Tensor]:
        """Features `[M, B, d]` and member logits `[M, B, C]` of arguments that are prepared."""
        return self._split(0, inputs, *extra)[1:]

    def _split(
        self, layers: int, inputs: Tensor, mask: Tensor | None = None, segments: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        x, context = self.embed(inputs, mask, segments)
        tokens = self.encoder(x, context, stop=layers) if layers else x
        after = self.encoder(tokens, context, self.readout.tokens_read(context), start=layers)
        pooled = self.readout.pool(after, context.key_mask, inputs)
        return tokens, self._per_member(pooled.flatten(2)), self._per_member(self.readout.classify(pooled))

    def _continued(self, layers: int, tokens: Tensor, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        context = self._context(tokens, inputs, mask)
        after = self.encoder(tokens, context, self.readout.tokens_read(context), start=layers)
        return self._per_member(self.readout(after, context.key_mask, inputs))

    def embed(
        self, inputs: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> tuple[Tensor, Context]:
        """The input of the first block: embedded tokens `[G, B, T, d]`, and their attention context."""
        stem = self.config.stem
        text = not isinstance(stem, PatchStemConfig)
        x = self.stem(inputs, token_type_ids, len(stem.prefix)) if text else self.stem(inputs)
        return x, self._context(x, inputs, attention_mask)

    def read_prefix(self) -> Past | None:
        """Keys and values of the prefix in every layer; None without one."""
        if isinstance(self.config.stem, PatchStemConfig) or not self.config.stem.prefix:
            return None
        ids = torch.tensor([self.config.stem.prefix], device=self.device)
        x, kept = self.stem(ids), Past()
        context = self.encoder.context(None, (ids.shape[1],), x)._replace(kept=kept)
        self.encoder(x, context, Places(torch.zeros_like(ids[:, 0])))  # of the last block only keys and values are used
        return kept

    def _context(self, x: Tensor, inputs: Tensor, attention_mask: Tensor | None) -> Context:
        """The attention context of tokens `[G, B, T, d]` for these inputs."""
        stem = self.config.stem
        if isinstance(stem, PatchStemConfig):
            grid = inputs.shape[2] // stem.patch_size[0], inputs.shape[3] // stem.patch_size[1]
            return self.encoder.context(None, grid, x)
        key_mask = None if attention_mask is None else attention_mask.bool()
        context = self.encoder.context(key_mask, (inputs.shape[1],), x, len(stem.prefix))
        before = self.read_prefix() if self.before is None else self.before
        return context._replace(last=self.readout.last_token(inputs, key_mask), before=before)

    def optimize(self, example_inputs: Given | None = None, **options: Any) -> "OptimizedEnsemble":
        """A frozen, faster runner of this ensemble; for the options see `OptimizedEnsemble`."""
        runner: OptimizedEnsemble = LATER["optimize"]()(self, example_inputs, **options)
        return runner

    # --- members -----------------------------------------------------------------------------------------

    @staticmethod
    def stack(members: "Iterable[Ensemble | nn.Module]") -> "Ensemble":
        """One ensemble with all members of the given ones and nothing shared between them.

        Stacking three independently trained models gives their Deep Ensemble, in one forward pass. Models of other
        libraries are converted. A `HydraWarning` is given if two are equal.
        """
        stacked: Ensemble = LATER["stack"]()(members)
        return stacked

    def member(self, index: int) -> "Ensemble":
        """A copy of one member as a separate ensemble, without the calibration, which belongs to several members."""
        index = member_index(index, self.num_members)
        state = member_state(self.config, self.state_dict(), index)
        metadata = member_metadata(self.metadata, self.num_members)
        return Ensemble.from_state(member_config(self.config, index), state, metadata, self.frozen)

    @torch.no_grad()
    def without_updates(self) -> "Ensemble":
        """The same ensemble, whose members have weights of their own instead of updates of shared ones."""
        ranks = self.config.updates
        if ranks == LowRank():
            return self
        attention, mlp = (not any(pair) for pair in ((ranks.inputs, ranks.out), (ranks.up, ranks.down)))
        now = self.config.sharing
        sharing = replace(now, attention=now.attention and attention, mlp=now.mlp and mlp)
        config, state = replace(self.config, sharing=sharing, updates=LowRank()), self.state_dict()
        states = [member_state(self.config, state, index) for index in range(self.num_members)]
        return Ensemble.from_state(config, join_states(config, states), self.metadata, copies=False)

    @classmethod
    def from_state(
        cls,
        config: EnsembleConfig,
        state: Mapping[str, Tensor],
        metadata: Metadata | None = None,
        frozen: Iterable[str] = (),
        copies: bool = True,
    ) -> "Ensemble":
        """Build an ensemble around copies of the given tensors, or the tensors themselves; they keep dtype and device.

        All parameters are trainable, but for those named in `frozen`.
        """
        return build_with_state(lambda: cls(config, metadata), copied(state) if copies else state, frozen)

    def with_metadata(self, **changes: Any) -> "Ensemble":
        """The same ensemble with some of its metadata replaced; the weights are shared, not copied.

        Another preprocessing than before drops calibration, familiarity and metrics, unless they are given, too.
        """
        current = self.metadata
        new = changes.get("preprocessing", current.preprocessing)
        if new != current.preprocessing:
            current = replace(
                current if None in (new, current.preprocessing) else current.unmeasured, preprocessing_from=""
            )
        metadata = replace(current, **changes)
        metadata.check(self.config)
        return build_with_state(lambda: Ensemble(self.config, metadata), self.state_dict(), self.frozen)

    def with_prefix(self, prefix: str | Sequence[int] | None = None) -> "Ensemble":
        """The same decoder with tokens in front of every text, which are computed once for a batch.

        `optimize()` computes them once and for all. The weights are shared, not copied. Only decoders can have a
        prefix: their tokens do not see what comes after them.

        Args:
            prefix: A text, such as a system prompt or examples, which comes before the template; token ids, which come
                before whatever tokens are given; or None for the beginning of the template up to the text, which
                changes no answer, so that a calibration stays. Token ids are given without the prefix from then on.
        """
        config, metadata = self.config, self.metadata
        if isinstance(config.stem, PatchStemConfig) or config.stem.prefix:
            raise ConfigError("with_prefix takes a decoder of texts without a prefix; start from the model before")
        if prefix is None or isinstance(prefix, str):
            if not isinstance(metadata.preprocessing, TextPreprocessing):
                raise ConfigError("this model was converted without a tokenizer; give token ids as prefix")
            texts = metadata.preprocessing.with_prefix(prefix or "")
            prefix, known = texts.prefix, metadata if prefix is None else metadata.unmeasured
            metadata = replace(known, preprocessing=texts)
        else:
            metadata = metadata.unmeasured
        ids = tuple(int(one) for one in prefix)
        config = replace(config, stem=replace(config.stem, prefix=ids))
        metadata = replace(metadata, history=(*metadata.history, f"a prefix of {len(ids)} tokens"))
        return build_with_state(lambda: Ensemble(config, metadata), self.state_dict(), self.frozen)

    # --- saving and loading ------------------------------------------------------------------------------

    def _contents(self, name: str) -> Contents:
        warn_if_edited(self)
        plain, tensors = stored_metadata(self.metadata)
        return Contents(self._kind, to_plain(self.config), plain, self.state_dict() | tensors, model_card(name, self))

    @classmethod
    def _restored(cls, contents: Contents, device: str | torch.device | None, dtype: torch.dtype | None) -> "Ensemble":
        config = from_plain(EnsembleConfig, contents.model, "config.model")
        metadata = restored_metadata(contents)
        metadata.check(config)
        state = {name: one for name, one in contents.tensors.items() if not name.startswith(f"{FAMILIARITY}.")}
        return build_with_state(lambda: cls(config, metadata), placed(state, device, dtype))

    # --- description -------------------------------------------------------------------------------------

    def describe(self) -> Description:
        """Parameters, multiply-adds and heads kept; print it."""
        config, tokens = self.config, self.config.stem.max_tokens
        sizes = config.encoder.heads, 0 if config.pooling is None else config.pooling.heads
        parameters = sum(parameter.numel() for parameter in self.parameters())
        return Description(parameters, multiply_adds(config, tokens), tokens, config.heads, *sizes)

    def __repr__(self) -> str:
        config, encoder = self.config, self.config.encoder
        kept = sum(len(heads) for member in config.heads for heads in member)
        total = sum(config.head_counts) * config.members
        shared = [group for group in GROUPS if getattr(config.sharing, group)]
        return (
            f"Ensemble({self.kind}, members={config.members}, layers={encoder.layers}, width={encoder.width}, "
            f"heads kept={kept}/{total}, classes={self.num_classes}, shared={shared or 'nothing'}, "
            f"trunk={config.trunk}{self.promised})"
        )


def stored_metadata(metadata: Metadata) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Metadata as plain data, and the tensors of its familiarity by name."""
    familiarity = metadata.familiarity
    plain: dict[str, Any] = to_plain(replace(metadata, familiarity=None))
    if familiarity is None:
        return plain, {}
    plain[FAMILIARITY] = to_plain(familiarity.settings)
    return plain, {f"{FAMILIARITY}.{name}": tensor for name, tensor in familiarity.state.items()}


def restored_metadata(contents: Contents) -> Metadata:
    """The metadata of what was saved."""
    settings = contents.metadata[FAMILIARITY]
    metadata = from_plain(Metadata, {**contents.metadata, FAMILIARITY: None}, "config.metadata")
    if settings is None:
        return metadata
    fitted = from_plain(FamiliaritySettings, settings, f"config.metadata.{FAMILIARITY}")
    return replace(
        metadata, familiarity=Familiarity(fitted, placed(contents.part(f"{FAMILIARITY}."), None, torch.float32))
    )


def weights_of(ensemble: Answering) -> str:
    """Digest of the weights, for `Calibration.weights`; it begins with their dtype."""
    return f"{ensemble.dtype}:{digest(ensemble)}"


def warn_if_edited(ensemble: Answering) -> None:
    """Warn if an ensemble has other weights than those it was calibrated with; another dtype only rounds them."""
    calibration, state = ensemble.metadata.calibration, ensemble.state_dict()  # type: ignore[attr-defined]
    if calibration is None or not state or calibration.weights.partition(":")[0] != str(ensemble.dtype):
        return
    if calibration.weights != weights_of(ensemble):
        warn(
            "the weights were changed after this ensemble was calibrated, so its calibration is wrong: calibrate again"
        )


def singles(ensembles: Sequence[Ensemble]) -> tuple[list[dict[str, Tensor]], KeptHeads, Metadata]:
    """States and heads of all members, and their common metadata; refused if they cannot form one ensemble."""
    require_same_architecture([model.config for model in ensembles])
    states, known = list[dict[str, Tensor]](), list[Metadata]()
    for model in ensembles:
        state, metadata = model.state_dict(), model.metadata
        for index in range(model.num_members):
            states.append(member_state(model.config, state, index))
            known.append(member_metadata(metadata, model.num_members))
    require_same_dtype_and_device(states)
    return states, tuple(heads for model in ensembles for heads in model.config.heads), common_metadata(known)


ENSEMBLE: Form[Ensemble] = Form("", Ensemble.from_pretrained, lambda folder, model: model.save_pretrained(folder))

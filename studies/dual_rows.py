"""Every row of the zero-shot study: members of a seed's dual encoder, and methods by other authors.

BayesVLM and ViLU are fitted on data that also trained the study's dual encoder; their authors use a model that saw
neither.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.nn import functional as F

import hydra_ensembles as he
from hydra_ensembles import Prediction, TextPreprocessing, baselines
from hydra_ensembles.batches import move
from hydra_ensembles.errors import ConfigError, DataError
from hydra_ensembles.familiarity import with_score
from hydra_ensembles.files import write_json
from hydra_ensembles.metrics import nll
from hydra_ensembles.model.metadata import Familiarity

from .dual_seed import BATCH, DualSeed, DualTask, Family, ZeroSet
from .rows import HYDRA_CIRC
from .samples import SampleBatches
from .seed_folder import CHOICES, slug
from .storing import SINGLE, read_if_there

BAYES_VLM, VILU, NEG_LABEL = "BayesVLM", "ViLU", "NegLabel"
PSEUDO_COUNTS = (1.0, 10.0, 100.0, 1e3, 1e4)  # 10 is the authors' value
EPOCHS = 100  # of ViLU; held-out images choose the best epoch
RATES = (("sgd", 0.01), ("sgd", 0.1), ("adamw", 3e-4), ("adamw", 1e-3))
"""How ViLU's network is trained. The authors use the first for a hundred times as many updates; after ours the network
still outputs one number for all images. SGD at 0.1 leaves that plateau late; at 1 it learned nothing in two seeds."""
GROUPS, WORDS_A_GROUP = 100, 10  # of NegLabel; fewer groups if there are few words
SHORTEST = 3  # fewest letters of a word
Setting = TypeVar("Setting", bound=tuple[Any, ...])

ONE, ONE_TAYLOR = Family("single", "none", members=1), Family("taylor", "taylor", members=1)
BOTH, MORE, IMAGE = Family("both", "circuits"), Family("more", "more"), Family("image", "image")
RANDOM = Family("random", "random")
IMAGE_TUNED, BOTH_TUNED = Family("image-tuned", "image", tuned=True), Family("both-tuned", "circuits", tuned=True)


@dataclass(frozen=True)
class DualRow:
    """A method of a zero-shot study: members of a family, or any model for class names that has `predict`."""

    family: Family | None = None
    first: bool = False  # use only the first member of the family
    model: Callable[[DualSeed, Sequence[str]], Any] | None = None
    calibrated: bool = False  # its outputs are temperature-scaled
    trainings: float = 1  # of a text side, including Single's

    def asked(self, seed: DualSeed, data: ZeroSet) -> Prediction:
        """Predict on a set, without a temperature."""
        if self.family is not None:
            return Prediction.from_logits(torch.cat([seed.logits(self.family, index, data) for index in self.members]))
        model = self.whole(seed, data.classes)
        batches = SampleBatches(data.samples, BATCH)
        parts = [model.predict(move(inputs, seed.device, torch.float32)) for inputs, _ in batches]
        return Prediction.concat(parts)

    @property
    def members(self) -> Sequence[int]:
        """The indices of the members it uses."""
        return range(0 if self.family is None else 1 if self.first else self.family.members)

    def whole(self, seed: DualSeed, names: Sequence[str]) -> Any:
        """The method as one model for class names.

        Members of a family differ only in their heads and class embeddings (and text sides), so their MLPs are stored
        once and fusing them changes no output.
        """
        if self.family is None:
            assert self.model is not None  # a row has a family or a model
            return self.model(seed, names)
        ensembles = [he.zero_shot(seed.member(self.family, index), names, keep_text=False) for index in self.members]
        return ensembles[0] if len(ensembles) == 1 else he.fuse(ensembles)


# --- methods by other authors ----------------------------------------------------------------------------------------


def chosen(seed: DualSeed, row: str, names: Sequence[str], measured: Mapping[Setting, float]) -> Setting:
    """The setting with the smallest NLL on held-out images; stored with the NLL of every setting."""
    best = min(measured, key=measured.__getitem__)
    listed = [{**dict(zip(names, setting, strict=True)), "nll": loss} for setting, loss in measured.items()]
    choice = {"row": row, "setting": dict(zip(names, best, strict=True)), "measured": listed}
    write_json(_choice(seed, row), choice)
    return best


def _choice(seed: DualSeed, row: str) -> Path:
    return seed.folder / CHOICES / f"{slug(row)}.json"


def drawn_pairs(seed: DualSeed) -> list[Any]:
    """Pairs of the study with fixed texts: the same for all settings, and in every stage."""
    pairs = seed.task.pairs(seed.dual)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed.derived("bayes_vlm"))
        return list(pairs)


def bayes_vlm(seed: DualSeed, names: Sequence[str]) -> Any:
    """BayesVLM in closed form, with the pseudo-count that gives the smallest NLL on held-out images.

    Fitted on pairs of the study; for a user's own model, on factors that its authors publish.
    """
    held_out = seed.task.held_out

    def loss(posterior: Any) -> float:
        answers = DualRow(model=lambda _, names: posterior.probit(names)).asked(seed, held_out)
        return nll(answers.probs, held_out.samples.labels.to(answers.probs.device))

    def make() -> Any:
        factors = seed.recipe.factors
        pairs = [] if factors is not None else drawn_pairs(seed)

        def posterior(count: float) -> Any:
            settings = baselines.BayesVLM(count)
            if factors is None:
                return baselines.bayes_vlm(seed.dual, pairs, settings)
            return baselines.published_bayes_vlm(seed.dual, factors, settings)

        choice = read_if_there(_choice(seed, BAYES_VLM))  # chosen by an earlier stage
        if choice is not None:
            return posterior(choice["setting"]["pseudo_count"])
        posteriors = {(count,): posterior(count) for count in PSEUDO_COUNTS}
        losses = {setting: loss(model) for setting, model in posteriors.items()}
        return posteriors[chosen(seed, BAYES_VLM, ("pseudo_count",), losses)]

    return seed.once((BAYES_VLM, tuple(names)), lambda: seed.once(BAYES_VLM, make).probit(names))


def vilu(seed: DualSeed, names: Sequence[str]) -> he.Ensemble:
    """Single with the score `vilu`; its network is trained on the main task's images and works for any classes."""
    trained = _trained_vilu(seed)
    return seed.once((VILU, tuple(names)), lambda: for_classes(trained, he.zero_shot(seed.dual, names)))


def _trained_vilu(seed: DualSeed) -> he.Ensemble:
    """Use the optimizer and rate whose network best predicts, in NLL, which answers on held-out images are right."""

    def make() -> he.Ensemble:
        labelled = seed.task.sets.training()
        held_out = seed.task.held_out
        assert held_out.classes == labelled.names  # both belong to the main task
        model = he.zero_shot(seed.dual, labelled.names, keep_text=False)
        sides = seed.task.samples(labelled.images), held_out.samples
        train, validation = (SampleBatches(samples, BATCH) for samples in sides)
        settings = baselines.ViLU(batch_size=512)  # the authors' value for ImageNet

        def trained(optimizer: str, rate: float) -> he.Ensemble:
            recipe = baselines.ViLU.recipe(EPOCHS, rate, optimizer=optimizer, seed=seed.derived("vilu"))
            return baselines.vilu(model, train, recipe, settings, validation, progress=False)

        def loss(candidate: he.Ensemble) -> float:
            answers = DualRow(model=lambda *_: candidate).asked(seed, held_out)
            correct = answers.label == held_out.samples.labels.to(answers.label.device)
            return float(F.binary_cross_entropy_with_logits(-answers.score("vilu"), correct.to(answers.probs.dtype)))

        candidates, losses = dict[tuple[str, float], he.Ensemble](), dict[tuple[str, float], float]()
        for optimizer, rate in RATES:
            try:
                candidates[optimizer, rate] = trained(optimizer, rate)
                losses[optimizer, rate] = loss(candidates[optimizer, rate])
            except DataError as error:  # training may diverge; bad data fails at every rate
                print(f"{VILU} with {optimizer} at rate {rate:g}: {error}", flush=True)
        finite = {setting: value for setting, value in losses.items() if math.isfinite(value)}
        if not finite:
            raise DataError(
                f"the network of {VILU} diverged at every rate of {RATES}; look at the data, or add lower ones"
            )
        return candidates[chosen(seed, VILU, ("optimizer", "learning_rate"), finite)]

    return seed.kept("vilu", make)


def for_classes(trained: he.Ensemble, model: he.Ensemble) -> he.Ensemble:
    """A zero-shot classifier of the same model for other classes, with the trained score `vilu`.

    The network sees embeddings, not classes, so it works with any classes.
    """
    fit = trained.metadata.familiarity
    assert fit is not None  # set by vilu
    rows = F.normalize(model.state_dict()["readout.class_embeddings.weight"].float(), dim=-1)  # [G, C, e]
    texts = rows.expand(model.num_members, -1, -1).contiguous().cpu()
    return with_score(model, Familiarity(fit.settings, {**fit.state, "vilu.texts": texts}), "ViLU for other classes")


def neg_label(seed: DualSeed, names: Sequence[str]) -> he.Ensemble:
    """Single with the score `neglabel`; its words are the tokenizer's vocabulary, embedded once per seed."""

    def make() -> he.Ensemble:
        ensemble = he.zero_shot(seed.dual, names)
        limit = seed.recipe.counts.words
        words = seed.once("words", lambda: baselines.embed_words(ensemble, vocabulary(seed.dual)[:limit]))
        groups = max(1, min(GROUPS, int(len(words.words) * baselines.NegLabel().share) // WORDS_A_GROUP))
        return baselines.neg_label(ensemble, words, settings=baselines.NegLabel(groups=groups))

    return seed.once((NEG_LABEL, tuple(names)), make)


def vocabulary(dual: he.DualEncoder) -> list[str]:
    """Whole words in the text tower's tokenizer, sorted; used because WordNet is not available here."""
    from tokenizers import Tokenizer

    prepare = dual.text.metadata.preprocessing
    if not isinstance(prepare, TextPreprocessing) or not prepare.tokenizer:
        raise ConfigError("NegLabel takes words of the tokenizer, but the text tower of this model has none")
    tokens = Tokenizer.from_str(prepare.tokenizer).get_vocab()
    marked = any(token.endswith("</w>") for token in tokens)  # CLIP's tokenizer: only such tokens end a word
    words = [token.removesuffix("</w>") for token in sorted(tokens) if token.endswith("</w>") or not marked]
    return [word for word in words if word.isascii() and word.isalpha() and len(word) >= SHORTEST]


ROWS: Mapping[str, DualRow] = {
    SINGLE: DualRow(ONE),
    "Temperature Scaling": DualRow(ONE, calibrated=True),
    BAYES_VLM: DualRow(model=bayes_vlm),
    VILU: DualRow(model=vilu),
    NEG_LABEL: DualRow(model=neg_label),
    "Taylor": DualRow(ONE_TAYLOR),
    "CircAvg": DualRow(BOTH, first=True),
    "Random heads": DualRow(RANDOM),
    HYDRA_CIRC: DualRow(BOTH),
    "Hydra (Circ) + Temperature Scaling": DualRow(BOTH, calibrated=True),
    "Hydra (Circ), six more heads pruned": DualRow(MORE),
    "Hydra (Circ), image tower only": DualRow(IMAGE),
    "Hydra (Circ), image tower only, text fine-tuned": DualRow(IMAGE_TUNED, trainings=4),
    "Hydra (Circ), text fine-tuned": DualRow(BOTH_TUNED, trainings=4),
}
"""Rows in the order of the tables."""


def rows_of(task: DualTask) -> dict[str, DualRow]:
    """The rows of a study: no tuned text sides without pairs, and no BayesVLM without pairs and factors.

    A user's own model has no pairs in the study: its training data is unknown.
    """
    recipe = task.recipe
    left_out = {name for name, row in ROWS.items() if row.family and row.family.tuned and not recipe.trains_text}
    left_out |= {BAYES_VLM} if recipe.model is not None and recipe.factors is None else set()
    return {name: row for name, row in ROWS.items() if name not in left_out}

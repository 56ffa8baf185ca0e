"""Small stored objects: how each is created, and the answer it gives when loaded.

A target is created twice, from different seeds: the second save provides files of another save. An answer contains
everything that was loaded and what is computed from it, so two answers are equal only if nothing was changed.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from PIL import Image

import hydra_ensembles as he
from checkpoint_models import ensemble, inputs_for, metadata_for, text, tiny
from hydra_ensembles.evaluation.evaluation import Evaluation
from hydra_ensembles.report.table import to_markdown
from hydra_ensembles.settings import to_plain
from sample_evaluations import evaluation
from unit.training.training_cases import Stopping

from . import small
from .expected import digest
from .jobs import build, finetune, ranked, recipe


@dataclass(frozen=True)
class Target:
    name: str
    make: Callable[[Path, int], object]  # the folder, and which of the two saves
    answer: Callable[[Path], str]
    bare: tuple[str, ...] = ()  # old files without digests: edits of them cannot be detected


# --- checkpoints -----------------------------------------------------------------------------------------------------


def checkpoint(name: str, make: Callable[[int], Any], ask: Callable[[Any], tuple[Any, ...]]) -> Target:
    """A saved model; the second save has other weights."""

    def answer(folder: Path) -> str:
        model = he.load(folder)
        return digest(model, *ask(model))

    return Target(f"checkpoint of {name}", lambda folder, save: make(save).save_pretrained(folder), answer)


def _of_images(save: int) -> he.Ensemble:
    """An image model with fitted familiarity, and a threshold on the first score."""
    own = he.ImagePreprocessing(size=(2, 4), interpolation="bilinear")
    about = replace(metadata_for(tiny()), preprocessing=own, labels=("cat", "dog") if save else ("dog", "cat"))
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(60, 3, 2, 4, generator=generator), torch.arange(60) % 2)]
    fitted = he.fit_familiarity(_varied(ensemble(tiny(), metadata=about), save), data, ("mahalanobis", "knn"), stored=8)
    known = fitted.metadata.familiarity
    return fitted.with_metadata(familiarity=replace(known, settings=replace(known.settings, threshold=4.0)))


def _varied(model: he.Ensemble, save: int) -> he.Ensemble:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + save)
    return model


def _ask_images(model: he.Ensemble) -> tuple[Any, ...]:
    raw = Image.frombytes("RGB", (8, 6), bytes(range(3 * 6 * 8)))
    found = [model.predict(inputs_for(tiny())), model.predict([raw])]
    return tuple(chain(*((p.probs, p.reason, p.familiarity, p.score("knn"), p.names()) for p in found)))


def _of_texts(save: int) -> he.Ensemble:
    about: Any = metadata_for(text())
    tokens = json.loads(about.preprocessing.tokenizer)
    if save:
        tokens["model"]["vocab"] = {"[PAD]": 0, "hello": 2, "wörld": 1}
    about = replace(about, preprocessing=replace(about.preprocessing, tokenizer=json.dumps(tokens)))
    return _varied(ensemble(text(), metadata=about), save)


def _ask_texts(model: he.Ensemble) -> tuple[Any, ...]:
    found = model.predict(["hello wörld", "wörld wörld hello hello"])
    return found.probs, found.accept, found.names()


TEXTS = checkpoint("texts, with tokenizer", _of_texts, _ask_texts)
IMAGES = small.samples("image", 2)[0]
SCORES = ("avg", "acc")  # for circuits of the two saves


def _make_old_texts(folder: Path, save: int) -> None:
    TEXTS.make(folder, save)
    config = json.loads((folder / "config.json").read_text())
    del config["digest"]
    (folder / "config.json").write_text(json.dumps({**config, "format_version": 1}, indent=1))


def _ask_zero_shot(model: he.Ensemble) -> tuple[Any, ...]:
    return tuple(one.predict(IMAGES).probs for one in (model, he.retarget(model, ("boat", "dog", "house"))))


# --- results ---------------------------------------------------------------------------------------------------------


def _answer_ranking(folder: Path) -> str:
    ranking = he.HeadRanking.load(folder / "ranking.json")
    return digest(to_plain(ranking), [str(head) for head in ranking.first(3)])


def _make_evaluation(folder: Path, save: int) -> None:
    evaluation("Hydra", members=2, seed=save + 2, bootstrap=5, threshold=0.5).save(folder / "hydra.json")


def _answer_evaluation(folder: Path) -> str:
    found = Evaluation.load(folder / "hydra.json")
    return digest(found.numbers(), to_markdown(he.compare([found])), *found.intervals.values())


# --- long work -------------------------------------------------------------------------------------------------------


def _circuit(folder: Path, save: int = 0, budget: int = 5) -> he.HeadRanking:
    return ranked(folder / "circuit", score=SCORES[save], budget=budget)


def _answer_journal(folder: Path) -> str:
    found = _circuit(folder)
    about = {name: found.provenance[name] for name in ("errors", "discordance", "start", "model", "data")}
    return digest(to_plain(found.heads), found.scores, about)  # not the amount of work, which a resumed run repeats


def _long(name: str, work: Callable[..., he.Ensemble], stop: int, **settings: Any) -> Iterator[Target]:
    """Work interrupted before reading the batch of this index, and finished work."""

    def done(folder: Path, save: int = 0, stop: int = -1) -> he.Ensemble:
        how = recipe(optimizer="adamw", learning_rate=0.01, steps=6, evaluate_every=2, seed=save)
        return work(folder, train=Stopping(small.batches(count=20, seed=4), stop), recipe=how, **settings)

    def make(folder: Path, save: int, stop: int) -> None:
        with suppress(KeyboardInterrupt):
            done(folder, save, stop)

    for what, end in (("stopped", stop), ("finished", -1)):
        yield Target(f"{name}, {what}", partial(make, stop=end), lambda folder: digest(done(folder)))


TARGETS = (
    checkpoint("images, with calibration and familiarity", _of_images, _ask_images),
    TEXTS,
    Target("checkpoint of texts, first format", _make_old_texts, TEXTS.answer, bare=("config.json",)),
    checkpoint("a dual encoder", small.dual, lambda model: (model(IMAGES, ["a photo of a cat", "red bus"]),)),
    checkpoint(
        "a zero-shot classifier",
        lambda save: he.zero_shot(small.dual(save), small.NAMES, ("the {label}",)),
        _ask_zero_shot,
    ),
    Target(
        "head ranking",
        lambda folder, save: ranked(None, budget=5, score=SCORES[save]).save(folder / "ranking.json"),
        _answer_ranking,
    ),
    Target("evaluation with logits", _make_evaluation, _answer_evaluation),
    Target("circuit journal", partial(_circuit, budget=3), _answer_journal),
    *_long("fine-tuning", finetune, 6),
    *_long("build, members trained apart", build, 12, strategy="circuit", ties="order", shared_layers=1, seed=3),
    *_long(
        "build, members trained together", build, 5, strategy="random", training="together", shared_layers=1, seed=3
    ),
)

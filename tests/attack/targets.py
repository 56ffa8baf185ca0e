"""What is stored, small: how it is made, and the answer that it gives when it is read again.

A target is made twice, from other seeds: the second save is where files of another save come from. An answer holds
everything that was read and what is computed from it, so that two answers are equal only where nothing was changed.
"""

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn

import hydra_ensembles as he
from checkpoint_models import ensemble, inputs_for, metadata_for, text, tiny
from hydra_ensembles.evaluation.evaluation import Evaluation
from hydra_ensembles.evaluation.logits import LabelledLogits, MemberLogits
from hydra_ensembles.heads.ranking import HeadRanking
from hydra_ensembles.model.metadata import Calibration, Metadata
from hydra_ensembles.report.table import to_markdown
from hydra_ensembles.schema import to_plain
from random_ensembles import random_batches, random_ensemble
from sample_evaluations import evaluation, gallery
from unit.training.training_cases import Stopping
from zero_shot_models import word_tokenizer

from .expected import digest


@dataclass(frozen=True)
class Target:
    """One stored format."""

    name: str
    make: Callable[[Path, int], None]  # the folder, and which of the two saves
    answer: Callable[[Path], str]
    bare: tuple[str, ...] = ()  # files of before that have no digest: no edit of them can be noticed


# --- checkpoints -----------------------------------------------------------------------------------------------------


def _varied(model: nn.Module, save: int) -> Any:
    """The model of the second save has other weights."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + save)
    return model


def _make_images(folder: Path, save: int) -> None:
    about = metadata_for(tiny())
    own = he.ImagePreprocessing(size=(2, 4), interpolation="bilinear")
    labels = ("cat", "dog") if save else ("dog", "cat")
    calibration = Calibration(temperature=(0.5, 0.75), threshold=0.6, score="entropy")
    about = replace(about, preprocessing=own, labels=labels, calibration=calibration)
    _familiar(_varied(ensemble(tiny(), metadata=about), save)).save_pretrained(folder)


def _familiar(model: he.Ensemble) -> he.Ensemble:
    """The model with fitted statistics, and a threshold on the first of their scores."""
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(60, 3, 2, 4, generator=generator), torch.arange(60) % 2)]
    fitted = he.fit_familiarity(model, data, ("mahalanobis", "knn"), stored=8)
    known = fitted.metadata.familiarity
    assert known is not None
    return fitted.with_metadata(familiarity=replace(known, settings=replace(known.settings, threshold=4.0)))


def _answer_images(folder: Path) -> str:
    model = he.Ensemble.from_pretrained(folder)
    raw = Image.frombytes("RGB", (8, 6), bytes(range(3 * 6 * 8)))
    found = [model.predict(inputs_for(tiny())), model.predict([raw])]
    told = [(one.probs, one.reason, one.familiarity, one.score("knn"), one.names()) for one in found]
    return digest(model, *chain(*told))


def _make_texts(folder: Path, save: int) -> None:
    about = metadata_for(text())
    if save:
        tokens = json.loads(about.preprocessing.tokenizer)  # type: ignore[union-attr,arg-type]
        tokens["model"]["vocab"] = {"[PAD]": 0, "hello": 2, "wörld": 1}
        about = replace(about, preprocessing=replace(about.preprocessing, tokenizer=json.dumps(tokens)))  # type: ignore[type-var]
    _varied(ensemble(text(), metadata=about), save).save_pretrained(folder)


def _make_old_texts(folder: Path, save: int) -> None:
    _make_texts(folder, save)
    config = json.loads((folder / "config.json").read_text())
    del config["digest"]
    (folder / "config.json").write_text(json.dumps({**config, "format_version": 1}, indent=1))


def _answer_texts(folder: Path) -> str:
    model = he.Ensemble.from_pretrained(folder)
    found = model.predict(["hello wörld", "wörld wörld hello hello"])
    return digest(model, found.probs, found.accept, found.names())


IMAGES = torch.linspace(-1, 1, 2 * 3 * 4 * 6).reshape(2, 3, 4, 6)


@cache
def _dual() -> he.DualEncoder:
    image, texts = random_ensemble("image-cls", dtype=torch.float32), random_ensemble("text-mean-post-norm")
    bare = [replace(tower.config, readout=replace(tower.config.readout, num_classes=0)) for tower in (image, texts)]
    stem = replace(bare[1].stem, vocabulary=60, positions=12)  # type: ignore[call-arg]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        towers = (
            he.Ensemble(bare[0], Metadata(history=("made",))),
            he.Ensemble(replace(bare[1], stem=stem), Metadata(preprocessing=word_tokenizer(mask=True))),
        )
        return he.DualEncoder(*towers, he.Projections.fresh(10, 10, 6)).eval()


def _make_dual(folder: Path, save: int) -> None:
    _varied(copy.deepcopy(_dual()), save).save_pretrained(folder)


def _answer_dual(folder: Path) -> str:
    model = he.DualEncoder.from_pretrained(folder)
    return digest(model, model(IMAGES, ["a photo of a cat", "red bus"]))


def _make_zero_shot(folder: Path, save: int) -> None:
    dual = _varied(copy.deepcopy(_dual()), save)
    he.zero_shot(dual, ("cat", "red bus"), ("a photo of a {label}", "the {label}")).save_pretrained(folder)


def _answer_zero_shot(folder: Path) -> str:
    model = he.Ensemble.from_pretrained(folder)
    return digest(model, *(one.predict(IMAGES).probs for one in (model, he.retarget(model, ("boat", "dog", "house")))))


# --- results ---------------------------------------------------------------------------------------------------------


@cache
def _problem() -> dict[str, Any]:
    model = random_ensemble("image-cls", dtype=torch.float32)
    data = [[(x.float(), y) for x, y in random_batches(model, (12, 8), seed)] for seed in range(4)]
    return {"model": model, "id": data[0], "ood": [(x + 1, y) for x, y in data[1]], "train": data[2], "held": data[3]}


def _circuit(journal: Path | None, budget: int, save: int = 0) -> HeadRanking:
    known = _problem()
    score = "acc" if save else "avg"
    return he.extract_circuit(
        known["model"], known["id"], known["ood"], score=score, budget=budget, journal=journal, progress=False
    )


def _make_ranking(folder: Path, save: int) -> None:
    _circuit(None, 5, save).save(folder / "ranking.json")


def _answer_ranking(folder: Path) -> str:
    ranking = HeadRanking.load(folder / "ranking.json")
    return digest(to_plain(ranking), [str(head) for head in ranking.first(3)])


def _make_evaluation(folder: Path, save: int) -> None:
    found = evaluation("Hydra", members=2, seed=save + 2, bootstrap=5, threshold=0.5, items=gallery("text")[:2])
    small = torch.linspace(-2, 2, 2 * 6 * 4).reshape(2, 6, 4)
    own = LabelledLogits(small + save, torch.arange(6) % 4)
    logits = MemberLogits(own, {"near": {"close": small[:, :3]}}, {"fog": LabelledLogits(small * 2, own.labels)})
    replace(found, logits=logits).save(folder / "hydra.json")


def _answer_evaluation(folder: Path) -> str:
    found = Evaluation.load(folder / "hydra.json", with_logits=True)
    logits = found.logits
    assert logits is not None
    near = [(group, name, one) for group, sets in logits.ood.items() for name, one in sets.items()]
    shift = [(name, *one) for name, one in logits.shift.items()]
    tensors = (*logits.id, *(part for row in (*near, *shift) for part in row))
    return digest(found.to_dict(), to_markdown(he.compare([found])), *tensors)


# --- long work -------------------------------------------------------------------------------------------------------


def _make_journal(folder: Path, save: int) -> None:
    _circuit(folder / "circuit.journal", 3, save)


def _answer_journal(folder: Path) -> str:
    found = _circuit(folder / "circuit.journal", 5)
    about = {name: found.provenance[name] for name in ("errors", "discordance", "start", "model", "data")}
    return digest(to_plain(found.heads), found.scores, about)  # not the work that was done, which a new start repeats


def _recipe(save: int) -> he.Recipe:
    groups = ("attention", "norms", "readout")
    return he.Recipe(optimizer="adamw", learning_rate=0.01, steps=6, evaluate_every=2, train_groups=groups, seed=save)


def _finetuned(folder: Path, save: int = 0, stop: int = -1) -> he.Ensemble:
    known = _problem()
    train = Stopping(known["train"], stop)
    options = {"output": folder, "progress": False, "checkpoint_every": 1}
    return he.finetune(known["model"], train, _recipe(save), known["held"], **options)


def _built(training: str, folder: Path, save: int = 0, stop: int = -1) -> he.Ensemble:
    known = _problem()
    how: dict[str, Any] = {"strategy": "circuit" if training == "apart" else "random", "training": training}
    how |= {"ties": "order"}  # under which the circuits of so small a model differ
    config = he.HydraConfig(members=2, prune=3, recipe=_recipe(save), shared_layers=1, seed=3, **how)
    train = Stopping(known["train"], stop)
    data = {"train": train, "id": known["id"], "ood": known["ood"], "validation": known["held"]}
    return he.build(known["model"], config, **data, output=folder, progress=False)


def _long(name: str, work: Callable[..., he.Ensemble], stop: int) -> Iterator[Target]:
    """Work that is stopped before it reads a batch of this number, and work that is finished."""

    def make(folder: Path, save: int, stop: int) -> None:
        with suppress(KeyboardInterrupt):
            work(folder, save, stop)

    for what, end in (("stopped", stop), ("finished", -1)):
        yield Target(f"{name}, {what}", partial(make, stop=end), lambda folder: digest(work(folder)))


TARGETS = (
    Target("checkpoint of images, with calibration and familiarity", _make_images, _answer_images),
    Target("checkpoint of texts, with tokenizer", _make_texts, _answer_texts),
    Target("checkpoint of texts, first format", _make_old_texts, _answer_texts, bare=("config.json",)),
    Target("checkpoint of a dual encoder", _make_dual, _answer_dual),
    Target("checkpoint of a zero-shot classifier", _make_zero_shot, _answer_zero_shot),
    Target("head ranking", _make_ranking, _answer_ranking),
    Target("evaluation with logits", _make_evaluation, _answer_evaluation),
    Target("circuit journal", _make_journal, _answer_journal),
    *_long("fine-tuning", _finetuned, 6),
    *_long("build, members trained apart", partial(_built, "apart"), 12),
    *_long("build, members trained together", partial(_built, "together"), 5),
)

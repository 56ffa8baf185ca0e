"""Table 3 with a user's own model: from stand-in sets to the rows, with the paper's settings on their way."""

import sys
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_studies import NAMES, Pictures

import hydra_ensembles as he
from architectures_clip import transformers_clip
from hydra_ensembles import baselines
from hydra_ensembles.data.dataset import ImageDataset
from hydra_ensembles.heads.masking import heads_in
from hydra_ensembles.training.recipe import Recipe
from studies import __main__ as command
from studies import zero_shot, zero_shot_sets
from studies.paper_settings import stated
from studies.rows import Rows
from studies.suites import SetRef, suite
from zero_shot_models import word_tokenizer

FEW = {"circuits": 6, "image_circuits": 6, "calibration": 12, "taylor_batches": 1, "test": 12, "detection": 12}
MODEL = "open_clip:ViT-B-32/laion2b_s34b_b79k"


TASKS = ("imagenet", *(one.name for one in suite("paper-zero-shot-imagenet").tasks))


def load(_: Any, reference: SetRef) -> ImageDataset:
    """A set with 22 classes, whose names depend on the task."""
    task = reference.name.partition("-")[0]
    start = 3 * TASKS.index(task) if task in TASKS else 0
    labels = np.arange(66) % 22
    pictures = Pictures(labels % 4, zlib.crc32(reference.name.encode()))
    return ImageDataset(pictures, labels, NAMES[start : start + 22], reference.name)


def with_preprocessing(dual: he.DualEncoder, image: Any, text: Any) -> he.DualEncoder:
    """A dual encoder that reads pictures and strings."""
    metadata = (replace(dual.image.metadata, preprocessing=image), replace(dual.text.metadata, preprocessing=text))
    return he.DualEncoder.from_state(dual.config, dual.state_dict(), *metadata)


def factors(dual: he.DualEncoder, folder: Path) -> None:
    """Files as BayesVLM's authors publish them."""
    for tag, projection in (("img", dual.projections.image), ("txt", dual.projections.text)):
        assert projection is not None
        outputs, inputs = projection.weight.shape[-2:]
        torch.save(torch.eye(inputs), folder / f"A_{tag}_analytic.pt")
        torch.save(torch.eye(outputs), folder / f"B_{tag}_analytic.pt")


def test_table_3_runs_with_the_papers_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = he.ImagePreprocessing((32, 32)), word_tokenizer(pad=1, mask=True)
    dual = with_preprocessing(he.convert(transformers_clip({}, {})), *read)
    received: dict[str, Any] = {"recipes": [], "tasks": []}
    usual = {name: getattr(baselines, name) for name in ("vilu", "BayesVLM")}
    circuit, recipe = he.extract_circuit, zero_shot.zero_shot_recipe

    def load_dual(source: str) -> he.DualEncoder:
        received["model"] = source
        return dual

    def vilu(model: he.Ensemble, train: Any, recipe: Recipe, settings: Any, **more: Any) -> he.Ensemble:
        received["recipes"].append((recipe, settings))
        received["tasks"].append(model.metadata.labels)
        return usual["vilu"](model, train, replace(recipe, epochs=1, warmup=0), settings, **more)

    def posterior(count: float) -> Any:
        received["bayes.pseudo_count"] = f"{count:g}"
        return usual["BayesVLM"](count)

    def extract(model: Any, *batches: Any, budget: int, ties: str, **how: Any) -> Any:
        received["circuit.ties"], received["budget"] = ties, budget
        ranking = circuit(model, *batches, budget=1, ties=ties, **how)
        start = ("avg", "acc", "ood").index(how["score"])
        rest = [head for head in heads_in(model)[start:] if head not in ranking.heads]
        return replace(ranking, heads=(*ranking.heads, *rest)[:budget], scores=(0.5,) * budget)

    def shortened(*given: Any) -> dict[str, Any]:
        found = recipe(*given)
        received["paper"] = {key: found[key] for key in ("prune", "taylor_prune")} | found["counts"]
        return found | {"prune": 2, "more": 1, "image_prune": 2, "taylor_prune": 2, "counts": found["counts"] | FEW}

    monkeypatch.setattr(zero_shot, "load_dual", load_dual)
    monkeypatch.setattr(baselines, "vilu", vilu)
    monkeypatch.setattr(baselines, "BayesVLM", posterior)
    monkeypatch.setattr(he, "extract_circuit", extract)
    monkeypatch.setattr(command, "zero_shot_recipe", shortened)
    monkeypatch.setattr(zero_shot_sets.PaperSets, "load", load)
    monkeypatch.setattr(zero_shot_sets, "IMAGENET_CLASSES", 22)
    monkeypatch.setattr(zero_shot_sets, "imagenet_names", lambda: NAMES[:22])
    monkeypatch.setattr(zero_shot_sets, "_shared_classes", lambda: ())
    factors(dual, tmp_path)
    some = "Single;BayesVLM;ViLU;Taylor;Hydra (Circ)"
    options = ["--data", tmp_path, "--factors", tmp_path, "--methods", some, "-o", tmp_path / "run", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["studies", "paper", "zero-shot", *map(str, options)])
    command.app(standalone_mode=False)
    rows = Rows.read(tmp_path / "run" / "zero-shot-paper" / "rows.parquet")
    assert (list(rows.runs), len(rows.about["tasks"])) == (some.split(";"), 9)
    ((trained, settings),) = set(received["recipes"])
    found = {
        "vilu.epochs": trained.epochs,
        "vilu.learning_rate": trained.learning_rate,
        "vilu.batch_size": settings.batch_size,
    }
    found |= {"vilu.warmup_epochs": trained.warmup * trained.epochs, "vilu.warmup_from": trained.warmup_from}
    counts = received["paper"]
    found |= {
        "calibration": counts["calibration"],
        "heads.pruned": counts["prune"],
        "taylor.pruned": counts["taylor_prune"],
    }
    found |= {key: received[key] for key in ("model", "bayes.pseudo_count")}
    for row in (row for row in stated("zero-shot") if row["name"] != "prompt"):
        value = found[row["name"]]
        assert (f"{value:g}" if isinstance(value, int | float) else value) == row["value"], row
    assert (received["circuit.ties"], received["model"]) == ("order", MODEL)
    assert len(received["tasks"]) == len(set(received["tasks"])) == len(zero_shot_sets.TRAINED)  # a network for each

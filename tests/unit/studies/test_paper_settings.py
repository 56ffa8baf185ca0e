"""The paper's settings are what its command plans, and what the functions of a run receive."""

import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_paper_task import save, save_vit, write_texts

import hydra_ensembles as he
from architectures_transformers import TEXT, save_tokenizer, transformers_model
from hydra_ensembles import baselines
from hydra_ensembles.heads.masking import heads_in
from hydra_ensembles.training.recipe import Recipe
from studies import __main__ as command
from studies import paper_task
from studies.methods import LORA
from studies.paper_settings import Plan, of_presets, of_recipe, of_settings, plan, spelled, stated, told
from studies.paper_task import PaperFolder, PaperTask, named, recipe, used
from studies.samples import Prepared
from studies.sets import DataFolder
from studies.suites import suite
from studies.zero_shot import ZeroShotTask, zero_shot_recipe

CPU = torch.device("cpu")
WHOLE = 144  # heads of a model of the paper's shape
ONE_STEP = {"steps": 1, "epochs": None, "warmup": 0, "patience": None, "evaluate_every": None, "compile": False}
ROWS = "Single;LoRA-Ensemble;CircAvg;Hydra (Circ)"
OF_IMAGES = f"{ROWS};MIMO;OBA"


class Received:
    """What functions received, by the names of the table, while each does a small part of its work."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: dict[str, set[str]] = {}
        replacements: dict[Any, dict[str, Callable[..., Any]]] = {
            he: {"finetune": self.finetune, "extract_circuit": self.circuit, "prune": self.prune, "fuse": self.fuse},
            baselines: {"lora_ensemble": self.trains("lora"), "mimo": self.trains("mimo"), "oba": self.trains("oba")},
            paper_task: {"TrainTransform": self.augments, "Prepared": self.prepares},
        }
        self.usual = {name: getattr(owner, name) for owner, names in replacements.items() for name in names}
        for owner, names in replacements.items():
            for name, replacement in names.items():
                monkeypatch.setattr(owner, name, replacement)

    def notes(self, known: Plan) -> None:
        for name, value in known.items():
            self.found.setdefault(name, set()).add(value)

    def finetune(self, member: he.Ensemble, train: Any, recipe: Recipe, *rest: Any, **more: Any) -> Any:
        alone = recipe.train_groups == ("readout",)
        kind = "single" if len(heads_in(member)) == WHOLE else "alone" if alone else "pruned"
        self.notes(of_recipe(kind, recipe))
        return self.usual["finetune"](member, train, replace(recipe, **ONE_STEP), *rest, **more)

    def circuit(self, model: he.Ensemble, *batches: Any, budget: int, ties: str, **how: Any) -> Any:
        """One step of the algorithm; other heads follow in some order."""
        self.notes({"circuit.ties": ties})
        ranking = self.usual["extract_circuit"](model, *batches, budget=1, ties=ties, **how)
        shift = {"avg": 0, "acc": 1, "ood": 2}[how["score"]]
        rest = [head for head in heads_in(model)[shift:] if head not in ranking.heads and head.head < 9]
        return replace(ranking, heads=(*ranking.heads, *rest)[:budget], scores=(0.5,) * budget)

    def prune(self, model: he.Ensemble, heads: Any) -> he.Ensemble:
        self.notes({"heads.pruned": spelled(len(heads))})
        return self.usual["prune"](model, heads)

    def fuse(self, members: Any, **how: Any) -> he.Ensemble:
        self.notes({"hydra.members": spelled(len(members))})
        return self.usual["fuse"](members, **how)

    def trains(self, name: str) -> Callable[..., Any]:
        """A baseline, with one step in place of its trainings and prunings."""

        def make(start: he.Ensemble, train: Any, recipe: Recipe, settings: Any, **more: Any) -> Any:
            self.notes(of_settings(name, settings))
            few = replace(settings, steps=1, batches=1) if name == "oba" else settings
            usual = self.usual[{"lora": "lora_ensemble"}.get(name, name)]
            return usual(start, train, replace(recipe, **ONE_STEP), few, **more)

        return make

    def augments(self, preprocessing: Any, **more: Any) -> Any:
        made = self.usual["TrainTransform"](preprocessing, **more)
        self.notes({f"augment.{key}": spelled(getattr(made, key)) for key in ("crop_scale", "flip_probability")})
        return made

    def prepares(self, dataset: Any, prepare: Any) -> Prepared:
        there = {field.name for field in fields(prepare)} & {"crop_fraction", "resize_mode", "max_length"}
        kind = "text" if "max_length" in there else "evaluate"
        self.notes({f"{kind}.{key}": spelled(getattr(prepare, key)) for key in there})
        return Prepared(dataset, prepare)


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Layers and heads of ViT-B/16, and nothing else of it."""
    return f"timm:local-dir:{save_vit(tmp_path_factory.mktemp('vit'), 12, 12)}"


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("bert")
    shape = {"hidden_size": 24, "intermediate_size": 24, "num_hidden_layers": 12, "num_attention_heads": 12}
    transformers_model("BertForMaskedLM", TEXT | shape).save_pretrained(folder)
    save_tokenizer(folder)
    return str(folder)


def write_images(root: Path, name: str) -> None:
    for split, count in {"train": 8, "val": 4 if name == "cifar100" else 134, "test": 4}.items():  # 1 % validates
        for label in ("apple", "bear", "road"):
            for number in range(count):
                save(root / name / split / label / f"{number}.png", len(label) * number, 16)
    for reference in list(used(suite(f"paper-{name}")))[1:]:
        for number in range(4):
            save(root / named(reference)[0] / f"{number}.png", number, 16)


def few(model: str) -> dict[str, Any]:
    """The recipe on few samples; Taylor scores of one batch."""
    return recipe(model) | {"circuits": 6, "taylor_batches": 1}


@pytest.mark.parametrize("name", ["imagenet", "cifar100", "sst2"])
def test_functions_receive_what_the_paper_states(
    name: str, vit: str, bert: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, received = tmp_path / "data", Received(monkeypatch)
    images = name != "sst2"
    write_images(data, name) if images else write_texts(data)
    model = vit if images else bert
    methods = (f"{OF_IMAGES};Hydra (Circ), classifier alone" if name == "cifar100" else OF_IMAGES) if images else ROWS
    monkeypatch.setattr(paper_task, "recipe", few)
    options = ["--methods", methods, "--seeds", "0", "--stages", "choose,report,tables", "-o", str(tmp_path / "run")]
    options += ["--share", "0.01"]
    monkeypatch.setattr(sys, "argv", ["studies", "paper", name, "--model", model, "--data", str(data), *options])
    command.app(standalone_mode=False)
    planned = plan(PaperTask(f"paper-{name}", recipe("timm:x"), PaperFolder(data), CPU))
    for row in stated(name):
        assert planned[row["name"]] == row["value"], row
        if row["name"] != "seeds":  # of all rows: `test_paper_task` runs eight
            assert set(row["value"].split()) == {v for one in received.found[row["name"]] for v in one.split()}, row


def test_what_is_planned_without_a_run() -> None:
    """Table 3's settings, and the recipes of trainings whose data are not to be had."""
    task = ZeroShotTask(zero_shot_recipe("paper"), DataFolder(Path()), CPU)
    for name, planned in {"zero-shot": plan(task), **of_presets()}.items():
        rows = list(stated(name))
        assert len(rows) > 5
        assert {row["name"]: planned[row["name"]] for row in rows} == {row["name"]: row["value"] for row in rows}


def test_a_dry_run_prints_every_setting_with_its_place() -> None:
    task = PaperTask("paper-sst2", recipe("timm:x"), PaperFolder(Path("data")), CPU)
    lines = list(told("sst2", task))
    for row in stated("sst2"):
        assert f"  {row['name']} = {row['value']}  ({row['section']})" in lines
    assert f"  {LORA}: 0 1 2 3 4 5 6 7; 3" in lines
    assert any("data/trec" in line for line in lines)

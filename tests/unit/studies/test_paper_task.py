"""The paper's tables with a user's own data and model: from stand-in files to the table."""

import itertools
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import hydra_ensembles as he
from architectures import timm_model
from architectures_transformers import TEXT, save_tokenizer, transformers_model
from hydra_ensembles.heads.ranking import random_members
from pictures import encoded, picture
from studies import __main__ as command
from studies import paper_task
from studies.paper_task import PaperFolder, PaperTask, methods_of_table, named, recipe, used
from studies.rows import Rows
from studies.suites import suite
from studies.tables import read_csv
from studies.weights import own_backbone

CPU = torch.device("cpu")
STEPS = 2
METHODS = ["Single", "Hydra (Circ)"]
TEXTS = ("yelp", "amazon", "newsgroups20", "trec", "mnli", "rte", "wmt16")


def write_images(root: Path) -> None:
    """CIFAR-100 in class folders, in two sizes, and its OOD sets in folders of their names."""
    for split, count in {"train": 8, "val": 4, "test": 4}.items():
        for label in ("apple", "bear", "road"):
            for number in range(count):
                save(root / "cifar100" / split / label / f"{number}.png", len(label) * number, 8 + number % 2)
    for reference in list(used(suite("paper-cifar100")))[1:]:
        for number in range(6):
            save(root / named(reference)[0] / f"{number}.png", number, 12)


def save(path: Path, number: int, size: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encoded(picture(number, size=size)))


def write_texts(root: Path) -> None:
    def table(name: str, split: str, count: int, **more: list[Any]) -> None:
        (root / name).mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng(count)
        lines = [" ".join(words) for words in rng.choice(list("abcdefgh"), (count, 5))]
        pq.write_table(pa.table({"text": lines, **more}), root / name / f"{split}.parquet")

    table("sst2", "train", 3100, label=[number % 2 for number in range(3100)])
    table("sst2", "validation", 12, label=[number % 2 for number in range(12)])
    table("ag_news", "whatever", 12)
    for name in TEXTS:
        table(name, "test", 9)


def save_vit(folder: Path, depth: int, heads: int) -> Path:
    """A tiny ViT checkpoint as timm saves it."""
    from timm.models import save_for_hf

    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": depth, "num_heads": heads}
    model = timm_model("vit_base_patch16_224", **sizes, num_classes=7)
    model.pretrained_cfg |= {"input_size": (3, 16, 16)}
    save_for_hf(model, folder, model_args=sizes, safe_serialization=True)
    return folder


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vit(tmp_path_factory.mktemp("vit"), 2, 6)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    model = transformers_model("BertForMaskedLM", TEXT)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def shortened(model: str) -> dict[str, Any]:
    """The recipe with counts that run in seconds."""
    found = recipe(model)
    for name, plain in found["tasks"].items():
        words = {"epochs": 1, "batch_size": 32} if "sst2" in name else {"steps": STEPS, "warmup": 1, "batch_size": 8}
        plain["training"] |= words | ({} if "sst2" in name else {"evaluate_every": 1})
        plain["recovery"] |= words | {"prune": 2} | ({} if "sst2" in name else {"last_blocks": 1})
    few = found["analyses"]
    few |= {"noise": {"images": 15, "severity": 3, "batch": 15, "random": 2}, "overlap": {"draws": 3}}
    few["members"] |= {"counts": [1, 3]}
    return found | {"circuits": 8, "familiar": 32, "taylor_batches": 1}


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(paper_task, "recipe", shortened)
    monkeypatch.setattr(sys, "argv", ["studies", "paper", *map(str, arguments)])
    command.app(standalone_mode=False)


def test_images_from_files_to_the_table(vit: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    write_images(tmp_path / "data")
    output = tmp_path / "run"
    options = ("--methods", ";".join(METHODS), "--seeds", "0", "-o", output)
    run(monkeypatch, "cifar100", "--model", f"timm:local-dir:{vit}", "--data", tmp_path / "data", *options)
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| Hydra (Circ) |")]
    assert len(table) == 1
    assert "(92.11)" in table[0]  # the paper's beside ours
    folder = output / "paper-cifar100"
    rows = Rows.read(folder / "rows.parquet")
    assert list(rows.runs) == METHODS
    assert rows.about["tasks"] == {"cifar100": {"near": ["cifar10"], "far": ["mnist", "svhn", "textures", "places365"]}}
    assert len(rows.columns("Single", 0)["cifar100|cifar100|correct"]) == 12
    choices = [
        line for line in read_csv(folder / "tables" / "paper-cifar100_choices.csv") if line["method"] == "Single"
    ]
    assert [float(line["setting"].split(": ")[1].strip("}")) for line in choices] == [0.001, 0.003, 0.01, 0.03]


def test_table_2_runs_to_its_end_with_eight_seeds_in_every_row(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored = he.taylor

    def taylor(model: he.Ensemble, *data: Any, budget: int, seed: int, **how: Any) -> Any:
        """Scores, but heads by chance: a random model's are the same whatever it reads."""
        (heads,) = random_members(model, budget, 1, seed)
        return replace(scored(model, *data, budget=budget, seed=seed, **how), heads=heads)

    monkeypatch.setattr(he, "taylor", taylor)
    write_texts(tmp_path / "data")
    some = ("--share", "0.01", "--stages", "choose,report,tables")
    run(monkeypatch, "sst2", "--model", bert, "--data", tmp_path / "data", *some, "-o", tmp_path / "run")
    rows = Rows.read(tmp_path / "run" / "paper-sst2" / "rows.parquet")
    assert rows.about["tasks"]["sst2"]["far"] == list(TEXTS[2:])
    assert rows.runs == {method: list(range(8)) for method in paper_task.paper_numbers("classifier", "SST-2")}
    models = {line["method"]: line for line in read_csv(tmp_path / "run/paper-sst2/tables/paper-sst2_models.csv")}
    assert int(models["CircAvg"]["parameters"]) < int(models["Single"]["parameters"])
    found = [
        line for line in read_csv(tmp_path / "run/paper-sst2/tables/paper-sst2.csv") if line["metric"] == "accuracy"
    ]
    assert {line["seeds"] for line in found} == {"8"}
    counted = {line["metric"] for line in read_csv(tmp_path / "run/paper-sst2/tables/paper-sst2.csv")}
    assert {"all.fpr95", "ood.rte.fpr95"} <= counted  # FPR95 of small sets counts, too


@pytest.mark.parametrize(
    ("name", "steps", "heads", "seeds", "missing"),
    [
        ("imagenet", 120_000, 48, 8, {"Packed-Ensembles"}),
        ("cifar100", 10_000, 24, 8, {"Packed-Ensembles"}),
        ("sst2", None, 72, 8, set()),
    ],
)
def test_the_recipe_is_the_papers(name: str, steps: int | None, heads: int, seeds: int, missing: set[str]) -> None:
    task = PaperTask(f"paper-{name}", recipe("timm:x"), PaperFolder(Path()), CPU)
    assert (task.recovery(learning_rate=0.1).steps, task.plain["recovery"]["prune"]) == (steps, heads)
    assert {tuple(task.seeds_of(method)) for method in task.methods} == {tuple(range(seeds))}
    printed = set(paper_task.paper_numbers("classifier", task.plain["paper"]))
    assert printed - set(methods_of_table(task)) == missing
    assert (task.recovery(learning_rate=0.1).rand_augment is not None) == (name == "imagenet")


def test_models_of_ones_own(vit: Path, bert: Path, tmp_path: Path) -> None:
    found = own_backbone(f"timm:local-dir:{vit}", ("a", "b"), text=False)
    assert (found.num_classes, found.num_layers) == (2, 2)
    assert found.metadata.preprocessing is not None
    for source, text in (
        (f"timm:local-dir:{vit}", False),
        (bert, True),
    ):  # BERT's pooler is not in the file: drawn from one seed
        one, two = (own_backbone(str(source), ("a", "b"), text).state_dict() for _ in range(2))
        assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())
    found.save_pretrained(tmp_path / "ours")
    assert own_backbone(f"ours:{tmp_path / 'ours'}", ("a", "b"), text=False).num_classes == 2


def test_corruptions_and_analyses_of_the_papers_own_model(vit: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Tables 4 to 6 and 8 to 14 run on a model of one's own; D.2 keeps its length, at the rate that is chosen."""
    write_images(tmp_path / "data")
    own = ("--model", f"timm:local-dir:{vit}", "--data", tmp_path / "data", "-o", tmp_path / "run", "--share", "0.01")
    run(monkeypatch, "cifar100", *own, "--methods", "Single", "--seeds", "0", "--stages", "choose,report,shift,tables")
    folder = tmp_path / "run" / "paper-cifar100"
    columns = Rows.read(folder / "rows.parquet").columns("Single", 0)
    assert {"cifar100|fog 5|correct", "cifar100|jpeg_compression 1|brier"} <= set(columns)
    names = "untrained,noise,separation,overlap,shares,diversity,members"
    asked = ["studies", "analyse", names, "--task", "paper-cifar100", *map(str, own)]
    monkeypatch.setattr(sys, "argv", asked)
    command.app(standalone_mode=False)
    for name in names.split(","):
        assert read_csv(folder / "tables" / f"analysis_{name}.csv")
    (chosen,) = {path.name for path in (folder / "choices").glob("circavg.json")}
    assert chosen
    trained = he.load(folder / "seed-0" / "models" / "shares-0")
    assert f"for {STEPS} steps" in trained.metadata.history[-1]


def test_pictures_of_imagenet_are_corrupted_as_the_model_sees_them(vit: Path, tmp_path: Path) -> None:
    for split, label in itertools.product(("train", "val"), ("apple", "bear")):
        save(tmp_path / "imagenet" / split / label / "0.png", len(label), 40)
    task = PaperTask("paper-imagenet", recipe(f"timm:local-dir:{vit}"), PaperFolder(tmp_path), CPU)
    pictures = task.pictures(None)
    assert pictures[0][0].size == (16, 16)
    seen, _ = task.changed([pictures]).batch(torch.arange(1), False)
    usual, _ = task.inputs([task.source.images(task.suite.id)]).batch(torch.arange(1), False)
    torch.testing.assert_close(seen, usual, atol=0.01, rtol=0)  # bytes

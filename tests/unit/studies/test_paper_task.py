"""The paper's tables with a user's own data and model: from stand-in files to the table."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from architectures import timm_model
from architectures_transformers import TEXT, save_tokenizer, transformers_model
from pictures import encoded, picture
from studies import __main__ as command
from studies import paper_task
from studies.paper_task import PaperFolder, PaperTask, methods_of_table, named, recipe, used
from studies.rows import Rows
from studies.suites import suite
from studies.tables import read_csv
from studies.weights import own_backbone

CPU = torch.device("cpu")
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
        lines = [" ".join(rng.choice(list("abcdefgh"), 5)) for _ in range(count)]
        pq.write_table(pa.table({"text": lines, **more}), root / name / f"{split}.parquet")

    table("sst2", "train", 3040, label=[number % 2 for number in range(3040)])
    table("sst2", "validation", 12, label=[number % 2 for number in range(12)])
    table("ag_news", "whatever", 12)
    for name in TEXTS:
        table(name, "test", 9)


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny ViT checkpoint as timm saves it."""
    from timm.models import save_for_hf

    folder = tmp_path_factory.mktemp("vit")
    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 6}
    model = timm_model("vit_base_patch16_224", **sizes, num_classes=7)
    model.pretrained_cfg |= {"input_size": (3, 16, 16)}
    save_for_hf(model, folder, model_args=sizes, safe_serialization=True)
    return folder


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
        words = {"epochs": 1, "batch_size": 16} if "sst2" in name else {"steps": 2, "warmup": 1, "batch_size": 8}
        plain["training"] |= words | ({} if "sst2" in name else {"evaluate_every": 1})
        plain["recovery"] |= words | {"prune": 2} | ({} if "sst2" in name else {"last_blocks": 1})
    return found | {"circuits": 8, "taylor_batches": 1}


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


def test_texts_from_files_to_the_table(bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_texts(tmp_path / "data")
    some = ("--methods", "Single;CircAcc", "--seeds", "0", "--share", "0.01", "--stages", "choose,report,tables")
    run(monkeypatch, "sst2", "--model", bert, "--data", tmp_path / "data", *some, "-o", tmp_path / "run")
    rows = Rows.read(tmp_path / "run" / "paper-sst2" / "rows.parquet")
    assert rows.about["tasks"]["sst2"]["far"] == list(TEXTS[2:])
    models = {line["method"]: line for line in read_csv(tmp_path / "run/paper-sst2/tables/paper-sst2_models.csv")}
    assert int(models["CircAcc"]["parameters"]) < int(models["Single"]["parameters"])


@pytest.mark.parametrize(
    ("name", "steps", "heads", "seeds", "missing"),
    [
        ("imagenet", 120_000, 48, 8, {"Packed-Ensembles"}),
        ("cifar100", 10_000, 24, 8, {"Packed-Ensembles"}),
        ("sst2", None, 72, 3, set()),
    ],
)
def test_the_recipe_is_the_papers(name: str, steps: int | None, heads: int, seeds: int, missing: set[str]) -> None:
    task = PaperTask(f"paper-{name}", recipe("timm:x"), PaperFolder(Path()), CPU)
    assert (task.recovery(learning_rate=0.1).steps, task.plain["recovery"]["prune"]) == (steps, heads)
    assert len(task.plain["seeds"]) == seeds
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

"""Real models and data for an end-to-end build, and the build itself.

real_build.py CASE PREPARED OUTPUT NAME COUNT ends, as if killed, at the given write of a file in OUTPUT.
"""

import sys
from pathlib import Path
from typing import Any

import torch

import hydra_ensembles as he
from hydra_ensembles.data.batching import batches
from hydra_ensembles.data.dataset import Dataset, split, subset
from hydra_ensembles.data.loading import load
from processes import end_at_write

SIZES = {"train": 128, "id": 64, "ood": 24, "test": 128}
HEAD = he.Recipe(
    optimizer="adamw", learning_rate=3e-3, epochs=4, train_groups=("readout",), label_smoothing=0.1, dropout=0.0
)
RECIPE = he.Recipe(
    optimizer="adamw",
    learning_rate=2e-5,
    steps=4,
    warmup=1,
    schedule="linear",
    clip_norm=1.0,
    dropout=0.1,
    evaluate_every=2,
    train_groups=("attention", "mlp", "norms", "readout"),
)


def config(case: str) -> he.HydraConfig:
    """Circuits over the last layers only, so that they take seconds."""
    return he.HydraConfig(prune=3, recipe=RECIPE, shared_layers={"dinov2": 10, "minilm": 5}[case])


def dinov2(weights: Path, data: Path) -> tuple[he.Ensemble, dict[str, Dataset[Any]]]:
    """DINOv2 ViT-S/14 on small CIFAR-10 images, TinyImageNet as OOD data."""
    import timm
    from safetensors.torch import load_file
    from timm.models.vision_transformer import checkpoint_filter_fn

    model = timm.create_model("vit_small_patch14_dinov2", img_size=56, num_classes=0)
    state = {name: tensor.float() for name, tensor in load_file(weights).items()}
    model.load_state_dict(checkpoint_filter_fn(state, model))
    tiny = load(data / "images/tinyimagenet", "validation")
    torch.manual_seed(0)
    return he.convert(model, num_labels=10), _slices(load(data / "images/cifar10", "test"), tiny)


def minilm(folder: Path, data: Path) -> tuple[he.Ensemble, dict[str, Dataset[Any]]]:
    """MiniLM on SST-2, AG News as OOD data."""
    import transformers

    model = transformers.AutoModel.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    tokenizer.model_max_length = 32  # the news are long
    ensemble = he.convert(model, num_labels=2, processor=tokenizer)
    return ensemble, _slices(load(data / "text/sst2", "train"), load(data / "text/ag_news", "validation"))


def prepare(ensemble: he.Ensemble, data: dict[str, Dataset[Any]], folder: Path) -> None:
    """Fit the classifier briefly, and save the model and its batches."""
    preprocessing = ensemble.metadata.preprocessing
    assert preprocessing is not None
    prepared = {name: list(batches(one, preprocessing, 16)) for name, one in data.items()}
    he.finetune(ensemble, prepared["train"], HEAD, progress=False).save_pretrained(folder / "model")
    torch.save(prepared, folder / "batches.pt")


def read_batches(folder: Path) -> dict[str, list[Any]]:
    """The batches that `prepare` saved, by their part."""
    return torch.load(folder / "batches.pt", weights_only=True)


def run(case: str, prepared: Path, output: Path) -> he.Ensemble:
    """The build, from what `prepare` saved."""
    data = read_batches(prepared)
    sets = {name: data[name] for name in ("train", "id", "ood")}
    return he.build(
        he.Ensemble.from_pretrained(prepared / "model"), config(case), **sets, output=output, progress=False
    )


def _slices(inside: Dataset[Any], outside: Dataset[Any]) -> dict[str, Dataset[Any]]:
    """Disjoint slices of the ID data with equal shares of the classes, and some OOD data."""
    names = ("train", "id", "test")
    total = sum(SIZES[name] for name in names)
    drawn = subset(inside, total, seed=0, stratified=True)
    parts = split(drawn, [SIZES[name] / total for name in names], seed=0, stratified=True)
    return {**dict(zip(names, parts, strict=True)), "ood": subset(outside, SIZES["ood"], seed=0)}


if __name__ == "__main__":
    case, prepared, output, name, count = sys.argv[1:]
    end_at_write(Path(output), name, int(count))
    run(case, Path(prepared), Path(output))

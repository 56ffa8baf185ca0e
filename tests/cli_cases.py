"""Fixtures for the command line: a timm ViT, a BERT, images and reviews, in one folder."""

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer.testing
from PIL import Image
from safetensors.torch import save_file

from architectures import perturbed
from architectures_transformers import save_tokenizer
from hydra_ensembles.cli.main import app

typer.testing._get_command = functools.cache(typer.main.get_command)  # otherwise it rebuilds all commands for each call
COLOURS = ("blue", "green", "red")
VIT_OPTIONS = {"img_size": 16, "patch_size": 8, "depth": 3, "num_heads": 4}
WORDS = ("good", "fine", "great", "bad", "dull", "long", "film", "plot", "a", "the")
SMALL_BERT = {"vocab_size": 4 + len(WORDS), "hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 16}
SMALL_BERT |= {"num_hidden_layers": 3, "num_attention_heads": 4, "id2label": {0: "negative", 1: "positive"}}


def run(*arguments: object, **settings: Any) -> Any:
    """Run the command line in this process."""
    return typer.testing.CliRunner().invoke(app, [str(argument) for argument in arguments], **settings)


def succeed(*arguments: object, **settings: Any) -> str:
    """Run a command that must succeed and return its standard output."""
    result = run(*arguments, **settings)
    assert result.exit_code == 0, result.output
    return result.stdout


def fail(*arguments: object, **settings: Any) -> str:
    """Run a command that must refuse its input; return its error, which is one line."""
    result = run(*arguments, **settings)
    assert result.exit_code == 2, result.output
    said: str = result.stderr.strip()
    assert said.startswith("error: "), said
    assert len(said.splitlines()) == 1, said
    return said


def converted_vit(weights: Path, output: Path) -> Path:
    """A folder of the small vision transformer, made by `convert`."""
    options = [f"--option={name}={value}" for name, value in VIT_OPTIONS.items()]
    succeed("convert", "timm:test_vit", "--weights", weights, *options, "--labels", ",".join(COLOURS), "-o", output)
    return output


def small_vit() -> Any:
    import timm

    torch.manual_seed(0)
    return perturbed(timm.create_model("test_vit", num_classes=len(COLOURS), **VIT_OPTIONS), noise=0.2)


def save_vit(path: Path) -> Path:
    save_file(small_vit().state_dict(), path)
    return path


def save_bert(folder: Path) -> Path:
    """A transformers classifier with its tokenizer, as `save_pretrained` saves them."""
    import transformers

    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**SMALL_BERT))
    perturbed(model, seed=3, noise=0.2).save_pretrained(folder)  # a seed for which rankings differ
    save_tokenizer(folder, WORDS)
    return folder


def save_images(folder: Path, count: int, seed: int) -> Path:
    """Noise in which one colour is brighter, one sub-folder per colour."""
    generator = np.random.default_rng(seed)
    for channel, colour in enumerate(reversed(COLOURS)):
        (folder / colour).mkdir(parents=True)
        for index in range(count):
            pixels = generator.integers(0, 150, (20, 24, 3))
            pixels[..., channel] += 60
            Image.fromarray(pixels.astype(np.uint8)).save(folder / colour / f"{index}.png")
    return folder


def save_stripes(folder: Path, count: int, seed: int) -> Path:
    """Save images without labels."""
    folder.mkdir(parents=True)
    generator = np.random.default_rng(seed)
    for index in range(count):
        pixels = np.zeros((20, 24, 3), np.uint8)
        pixels[:: index % 4 + 2] = generator.integers(0, 255, 3)
        Image.fromarray(pixels).save(folder / f"{index}.png")
    return folder


def reviews(count: int, seed: int) -> list[tuple[str, int]]:
    generator = np.random.default_rng(seed)
    return [(" ".join(generator.choice(WORDS, size=5).tolist()), index % 2) for index in range(count)]


def save_reviews(file: Path, count: int, seed: int) -> Path:
    rows = reviews(count, seed)
    if file.suffix == ".csv":
        text = "text,label\n" + "".join(f"{review},{label}\n" for review, label in rows)
    else:
        text = "".join(json.dumps({"text": review, "label": label}) + "\n" for review, label in rows)
    file.write_text(text)
    return file

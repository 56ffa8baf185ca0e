"""How the dual encoder of the zero-shot study is trained: chosen on TinyImageNet classes that it does not train on.

    python benchmarks/zero_shot_recipe.py --shared FOLDER

Features of the TinyImageNet training images are computed once. Some classes are held out, several times over; every
candidate trains on the others, and is asked for the held-out ones by name, among themselves (`unseen`), and for the
trained ones on validation images (`seen`). The choice is the candidate with the highest mean `unseen` accuracy. No
other data set is read. On a GPU:
`--device cuda --size 112 --train-images 12000 --validation-images 2000 --views 2 --folds 4 --all`.
"""

import argparse
import json
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F
from zero_shot_candidates import FROZEN, LONG, SHORT, Candidate

import hydra_ensembles as he
from hydra_ensembles import data
from hydra_ensembles.errors import DataError
from hydra_ensembles.model.clip import average_templates, prompts_of
from hydra_ensembles.schema import to_plain
from hydra_ensembles.training.text import text_features, tune_text
from studies.image_samples import ImageSamples
from studies.store import Store
from studies.zero_shot.captions import CAPTION_TEMPLATES, Captions
from studies.zero_shot.dual_model import untrained_dual
from studies.zero_shot.label_names import label_names
from studies.zero_shot.pairs import FeaturePairs, view_features

MAKES_FEATURES = ("size", "seed", "train_images", "validation_images", "views", "templates")


@dataclass(frozen=True)
class Features:
    """Features of images and captions, and the dual encoder that made them.

    Attributes:
        dual: Before training.
        names: Names of all classes.
        captions: What may be said of them.
        tensors: `train` `[views, N, d]`, `validation` `[N, d]`, their labels, and `captions`.
    """

    dual: he.DualEncoder
    names: tuple[str, ...]
    captions: Captions
    tensors: Mapping[str, Tensor]

    @classmethod
    def compute(cls, options: argparse.Namespace) -> "Features":
        """Run both towers over everything once, or read what an earlier call with the same options kept."""
        device = torch.device(options.device)
        dual = untrained_dual(Store(options.shared), options.size, options.seed).to(device)
        folder = options.shared / "data" / "images" / "tinyimagenet"
        sets = {split: data.load(folder, split=split) for split in ("train", "validation")}
        names = label_names("tinyimagenet", sets["train"].class_names)
        captions = Captions(names, CAPTION_TEMPLATES[: options.templates])
        made_by = {name: str(getattr(options, name)) for name in MAKES_FEATURES}
        if options.features is not None and options.features.exists():
            return cls(dual, names, captions, read_features(options.features, made_by, options.device))
        tensors = {}
        for split, count, views in (
            ("train", options.train_images, options.views),
            ("validation", options.validation_images, 1),
        ):
            whole = sets[split]
            assert isinstance(whole, data.ImageDataset)
            part = data.subset(whole, min(count, len(whole)), seed=0, stratified=True)
            samples = ImageSamples.read(part, options.size, device)
            tensors[split] = view_features(dual, samples, views, options.seed)
            tensors[f"{split} labels"] = samples.labels
        tensors["validation"] = tensors["validation"][0]
        tensors["captions"] = text_features(dual, every_caption(captions))
        if options.features is not None:
            content = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
            save_file(content, options.features, metadata=made_by)
        return cls(dual, names, captions, tensors)

    @property
    def train(self) -> Tensor:
        """Features of training images, `[views, N, d]`."""
        return self.tensors["train"]

    @property
    def train_labels(self) -> Tensor:
        """Their labels `[N]`."""
        return self.tensors["train labels"].cpu()

    @property
    def validation(self) -> Tensor:
        """Features of validation images, `[N, d]`."""
        return self.tensors["validation"]

    @property
    def validation_labels(self) -> Tensor:
        """Their labels `[N]`."""
        return self.tensors["validation labels"].cpu()


def read_features(path: Path, made_by: Mapping[str, str], device: str) -> dict[str, Tensor]:
    """Features that an earlier call kept.

    Raises:
        DataError: They were made by other options.
    """
    with safe_open(path, "pt", device=device) as file:
        found = file.metadata() or {}
        other = [
            f"{name} {found.get(name)} (now {value})" for name, value in made_by.items() if found.get(name) != value
        ]
        if other:
            raise DataError(
                f"{path} holds features of other options: {', '.join(other)}; name another file, or delete it"
            )
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def every_caption(captions: Captions) -> list[str]:
    """All that can be drawn."""
    return [text for names in captions.names for text in prompts_of(names, captions.templates)]


class CachedCaptions(Captions):
    """Captions as features of a text tower that does not learn: each sentence runs through it once, ever."""

    def __init__(self, captions: Captions, features: Tensor) -> None:
        self.templates, self.names = captions.templates, captions.names
        self.table = dict(zip(every_caption(captions), features, strict=True))

    def draw(self, labels: Tensor) -> Any:
        """Features `[B, d]` of one caption for every label."""
        return self.look_up(super().draw(labels))

    def look_up(self, texts: list[str]) -> Tensor:
        """Features `[B, d]` of texts."""
        return torch.stack([self.table[text] for text in texts])


def held_out(classes: int, count: int, fold: int, seed: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Classes that one fold does not train on; those of different folds differ."""
    order = np.random.default_rng(seed).permutation(classes)
    return np.sort(order[fold * count : (fold + 1) * count])


def accuracies(
    features: Features,
    dual: he.DualEncoder,
    unseen: Sequence[int],
    templates: Sequence[str],
    cached: CachedCaptions | None,
) -> dict[str, float]:
    """Zero-shot accuracy on held-out classes, among themselves, and on the others, likewise."""
    found = {}
    image, text = dual.projections.image, dual.projections.text
    assert image is not None
    assert text is not None
    outside = set(unseen)
    groups = {"unseen": list(unseen), "seen": [c for c in range(len(features.names)) if c not in outside]}
    images = torch.cat([features.validation, features.train[0]])
    labels = torch.cat([features.validation_labels, features.train_labels])
    fresh = torch.arange(len(labels)) < len(features.validation)
    for group, classes in groups.items():
        asked = torch.isin(labels, torch.tensor(classes)) & (fresh | (group == "unseen"))
        names = [features.names[number] for number in classes]
        for how, sentences in {"one sentence": templates[:1], "eight sentences": templates[:8]}.items():
            prompts = prompts_of(names, sentences)
            written = text_features(dual, prompts) if cached is None else cached.look_up(prompts)
            embedded = average_templates(F.normalize(text(written[None]), dim=-1), len(sentences))  # [1, C, e]
            answers = (image(images[asked.to(images.device)][None])[0] @ embedded[0].T).argmax(1).cpu()
            right = torch.tensor(classes)[answers] == labels[asked]
            found[f"{group}, {how}"] = right.double().mean().item()
    return found


def measure(features: Features, candidates: Sequence[Candidate], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Train every candidate in every fold."""
    rows = []
    done: dict[tuple[str, int], he.DualEncoder] = {}
    captions = features.captions
    cached = CachedCaptions(captions, features.tensors["captions"])
    for candidate in candidates:
        start = time.perf_counter()
        folds: list[Mapping[str, float]] = []
        for fold in range(options.folds):
            unseen = held_out(len(features.names), options.held_out, fold, options.seed)
            kept = ~torch.isin(features.train_labels, torch.from_numpy(unseen))
            size = candidate.recipe.batch_size or 512
            texts = captions if candidate.tower_learns else cached
            pairs = FeaturePairs(features.train[:, kept], features.train_labels[kept], texts, size)
            recipe = replace(
                candidate.recipe,
                seed=options.seed,
                precision="bf16" if options.device != "cpu" and candidate.tower_learns else "float32",
            )
            rate = recipe.learning_rate
            assert rate is not None
            before = features.dual if candidate.after is None else done[candidate.after, fold]
            tuned = tune_text(
                before,
                pairs,
                recipe,
                train_image_projection=True,
                projection_rate=candidate.image_rate / rate,
                progress=False,
            )
            if any(one.after == candidate.name for one in candidates):
                done[candidate.name, fold] = tuned
            known = None if candidate.tower_learns else cached
            with torch.no_grad():
                found = accuracies(features, tuned, unseen.tolist(), captions.templates, known)
            folds.append({**found, "scale": tuned.logit_scale.exp().item()})
        mean = {key: float(np.mean([one[key] for one in folds])) for key in folds[0]}
        rows.append(
            {
                "candidate": candidate.name,
                "mean": mean,
                "folds": folds,
                "recipe": to_plain(candidate.recipe),
                "image_rate": candidate.image_rate,
                "after": candidate.after,
                "seconds": round(time.perf_counter() - start, 1),
            }
        )
        print(candidate.name, {key: round(value, 4) for key, value in mean.items()}, rows[-1]["seconds"], flush=True)
    return rows


def command_of(parser: argparse.ArgumentParser, options: argparse.Namespace) -> str:
    """The call that was made, without the folders of this machine."""
    parts = ["python benchmarks/zero_shot_recipe.py --shared FOLDER"]
    for name, value in vars(options).items():
        if name not in ("shared", "output", "features") and value != parser.get_default(name):
            parts.append(f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}"))
    return " ".join(parts)


def main() -> None:
    """Read the command line, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, required=True, help="folder with data/ and weights/")
    parser.add_argument("--output", type=Path, default=Path("results/zero_shot_recipe.json"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", type=int, default=56, help="side of the images, a multiple of 14")
    parser.add_argument("--train-images", type=int, default=3000)
    parser.add_argument("--validation-images", type=int, default=1000)
    parser.add_argument("--held-out", type=int, default=30, help="classes held out in each fold")
    parser.add_argument("--folds", type=int, default=2)
    parser.add_argument("--views", type=int, default=1)
    parser.add_argument("--templates", type=int, default=len(CAPTION_TEMPLATES), help="sentences to train with")
    parser.add_argument("--features", type=Path, help="file to keep the features in, for another call")
    parser.add_argument("--all", action="store_true", help="also candidates that take a GPU")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    features = Features.compute(options)
    rows = measure(features, (*FROZEN, *SHORT, *(LONG if options.all else ())), options)
    best = max(rows, key=lambda row: row["mean"]["unseen, one sentence"])
    gpu = torch.cuda.get_device_name() if options.device != "cpu" else platform.processor() or platform.machine()
    facts = {
        "command": command_of(parser, options),
        "criterion": "mean accuracy on held-out classes, asked by one sentence",
        "chosen": best["candidate"],
        "chance": 1 / options.held_out,
        "device": options.device,
        "processor": gpu,
        "seed": options.seed,
        "size": options.size,
        "counts": {
            "train": len(features.train_labels),
            "validation": len(features.validation_labels),
            "classes": len(features.names),
            "held_out": options.held_out,
            "folds": options.folds,
            "views": options.views,
            "templates": options.templates,
        },
        "versions": {"hydra_ensembles": he.__version__, "torch": torch.__version__},
        "rows": rows,
    }
    options.output.write_text(json.dumps(facts, indent=1) + "\n")
    print(f"chosen: {best['candidate']}")


if __name__ == "__main__":
    main()

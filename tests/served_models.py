"""Small ensembles for serving: image, text and zero-shot, with a trunk and uneven heads, calibrated or not."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import hydra_ensembles as he
from architectures_clip import DUAL_CASES
from checkpoint_models import encoder, ensemble, metadata_for, text
from hydra_ensembles.model.config import EnsembleConfig, PatchStemConfig, ReadoutConfig, Sharing
from hydra_ensembles.model.ensemble import Ensemble
from hydra_ensembles.serve import export as exporting
from hydra_ensembles.serve.protocol import Answering
from zero_shot_models import NAMES, dual_of

SCORES = {"image": ("relative_mahalanobis++", "knn"), "text": ("mahalanobis",), "zero-shot": ("knn",)}
HEADS = (((0, 1), (0,)), ((0, 1), (1, 2, 3)), ((0, 1), ()))  # equal in the trunk's layer, uneven after it


def config_of(kind: str) -> EnsembleConfig:
    """Three members with a shared stem and first layer; the text model has segments and post-norm."""
    stem: Any = PatchStemConfig((4, 4), (2, 2))
    readout, blocks = ReadoutConfig(num_classes=3), encoder(2)
    if kind == "text":
        stem, readout, blocks = text().stem, text().readout, encoder(2, norm_first=False)
    return EnsembleConfig(stem, blocks, readout, HEADS, Sharing(stem=True, mlp=True), 1)


def inputs_for(one: Ensemble, size: int, seed: int = 0, tokens: int = 6) -> dict[str, torch.Tensor]:
    """Random preprocessed inputs by name; all texts but the first are padded."""
    generator, stem = torch.Generator().manual_seed(seed), one.config.stem
    if one.kind == "image":
        return {"pixel_values": torch.randn(size, stem.channels, *stem.image_size, generator=generator)}
    lengths = torch.randint(1, tokens + 1, (size, 1), generator=generator)
    lengths[0] = tokens
    return {
        "input_ids": torch.randint(1, stem.vocabulary, (size, tokens), generator=generator),
        "attention_mask": (torch.arange(tokens)[None] < lengths).long(),
        "token_type_ids": torch.randint(0, 2, (size, tokens), generator=generator),
    }


def _labelled(one: Ensemble, count: int, seed: int) -> list[Any]:
    inputs, labels = inputs_for(one, count, seed), torch.arange(count) % one.num_classes
    if one.kind == "image":
        inputs["pixel_values"] += labels[:, None, None, None]
    else:  # longer than the texts in tests: with equal texts, rounding would decide the p-value
        inputs["attention_mask"][:, :3] = 1
    return [(inputs, labels)]


def served(name: str) -> Ensemble:
    """`image`, `text` or `zero-shot`, with familiarity and calibration fitted; with `, bare` appended, neither."""
    return _served(name, torch.backends.mkldnn.enabled)


@cache
def _served(name: str, one_dnn: bool) -> Ensemble:
    """Fit with the kernels the test uses, so that its scores round like those of the held-out samples."""
    kind, _, bare = name.partition(", ")
    if kind == "zero-shot":
        whole = he.zero_shot(dual_of(DUAL_CASES[0]), NAMES)
        found = he.fuse([he.prune(whole, heads) for heads in ([(1, 0), (1, 2)], [(1, 3)])])
    else:
        config = config_of(kind)
        found = ensemble(config, metadata=replace(metadata_for(config), calibration=None))
    if bare:
        return found
    found = he.fit_familiarity(found, _labelled(found, 120, 1), SCORES[kind])
    return he.calibrate(found, _labelled(found, 80, 2), share=0.7)


Change = Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]


def pretend(monkeypatch: pytest.MonkeyPatch, one: Ensemble, change: Change = lambda found: found) -> None:
    """Replace export by a dummy file that answers as the ensemble does, after `change`."""

    @torch.no_grad()
    def run(inputs: Any) -> dict[str, np.ndarray]:
        return change({key: tensor.numpy().copy() for key, tensor in Answering(one)(**inputs).items()})

    monkeypatch.setattr(exporting, "_traced", lambda *_: None)
    monkeypatch.setattr(exporting, "_write", lambda _, file, *__: file.write_text("made"))
    monkeypatch.setattr(exporting, "_runner", lambda _: run)

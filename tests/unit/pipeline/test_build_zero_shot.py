"""Building from a dual encoder: heads of both towers, zero-shot members, resumed; and from its image tower alone."""

from pathlib import Path
from typing import Any

import pytest
import torch

import hydra_ensembles as he
from architectures_clip import DUAL_CASES
from hydra_ensembles.errors import CheckpointError, ConfigError
from zero_shot_models import NAMES, OTHER_NAMES, dual_of

CASE = next(case for case in DUAL_CASES if case.name == "open_clip-nonscalar")
CONFIG = he.HydraConfig(prune=4, strategy="sampled", pool=8, members=3)


def data(count: int = 24, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 3, 32, 32, generator=generator)
    labels = torch.randint(0, len(NAMES), (count,), generator=generator)
    return list(zip(images.split(8), labels.split(8), strict=True))


def build(model: Any, config: he.HydraConfig = CONFIG, **more: Any) -> he.Ensemble:
    return he.build(model, config, id=data(), ood=data(seed=1), progress=False, **more)


@torch.no_grad()
def test_heads_of_both_towers_are_pruned_or_those_of_the_image_tower_alone(tmp_path: Path) -> None:
    dual, images = dual_of(CASE), CASE.pixels()
    ensemble = build(dual, class_names=NAMES, output=tmp_path)
    choices = he.HeadRanking.load(tmp_path / "rankings" / "avg.json")
    assert {head.tower for head in choices.heads} == {"image", "text"}
    assert any("text tower: pruned" in line for line in ensemble.metadata.history)
    towers = zip(ensemble.heads, ensemble.metadata.text_side.settings.tower.heads, strict=True)
    assert [sum(map(len, (*image, *text))) for image, text in towers] == [16 - CONFIG.prune] * 3
    again = build(dual, class_names=NAMES, output=tmp_path)
    assert torch.equal(again(images), ensemble(images))
    assert he.retarget(again, OTHER_NAMES)(images).shape == (3, len(images), len(OTHER_NAMES))
    with pytest.raises(CheckpointError, match="templates"):
        build(dual, class_names=NAMES, templates="the {label}", output=tmp_path)
    alone = build(he.zero_shot(dual, NAMES))
    assert [sum(map(len, heads)) for heads in alone.heads] == [8 - CONFIG.prune] * 3
    assert alone.metadata.text_side.settings.members == 1


def test_what_cannot_work_is_refused() -> None:
    dual, names = dual_of(CASE), {"class_names": NAMES}
    for model, config, more, token in (
        (dual, CONFIG, {}, "class_names"),
        (dual, he.HydraConfig(prune=4, strategy="taylor"), names, "one tower"),
        (dual, he.HydraConfig(prune=4, method="screened"), names, "one tower"),
        (dual, he.HydraConfig(prune=4, shared_layers=1), names, "shared_layers"),
        (dual, he.HydraConfig(prune=17), names, "16 heads"),
        (he.fuse([dual] * 2, trunk=0), CONFIG, names, "2 members"),
    ):
        with pytest.raises(ConfigError, match=token):
            build(model, config, **more)

"""The model card: valid for the Hub, and consistent with the model."""

import contextlib
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard

import hydra_ensembles as he
from architectures_clip import open_clip_model
from checkpoint_models import CONFIGS, ensemble, hydra, labelled, map_pooled, single
from hydra_ensembles.model.ensemble import Ensemble
from hydra_ensembles.model.metadata import Calibration, Metadata
from hydra_ensembles.model_card import dual_model_card, model_card


def card_of(model: Ensemble, name: str = "my-model") -> str:
    return model_card(name, model)


def test_the_hub_can_read_every_card() -> None:
    cards = {name: ModelCard(card_of(ensemble(config()))).data for name, config in CONFIGS.items()}
    assert {card.library_name for card in cards.values()} == {"hydra_ensembles"}
    for name, task in (("single", "image-"), ("text", "text-"), ("map_pooled", "image-feature-extraction")):
        assert cards[name].pipeline_tag.startswith(task)
    dual = he.convert(open_clip_model())
    card = dual_model_card("clip", dual)
    assert ModelCard(card).data.pipeline_tag == "zero-shot-image-classification"
    assert all(f"| parameters | {one.describe().parameters:,} (float32) |" in card for one in (dual.image, dual.text))


def test_the_card_names_heads_thresholds_and_what_all_of_them_accept() -> None:
    fused = card_of(ensemble(hydra()))
    for fact in ("14 of 36", "first 1 of 3 layers"):
        assert fact in fused
    plain = ensemble(single(), metadata=Metadata())
    both = he.calibrate(plain, labelled(single()))
    card, known = card_of(both), both.metadata
    assert f"the confidence is at least {known.calibration.threshold:.6g}" in card
    assert f"`mahalanobis` is above {known.familiarity.settings.threshold:.6g}" in card
    assert "at least 95 % are accepted" in card
    assert "accepted" not in card_of(plain.with_metadata(calibration=Calibration()))


def test_the_code_on_the_card_loads_the_model(tmp_path: Path) -> None:
    model = ensemble(map_pooled())
    model.save_pretrained(tmp_path / 'it\'s "mine"')
    card = (tmp_path / 'it\'s "mine"/README.md').read_text(encoding="utf-8")
    code = card.split("```python\n")[1].split("result = ")[0]
    found: dict[str, Any] = {}
    with contextlib.chdir(tmp_path):
        exec(code, found)
    assert found["model"].config == model.config
    assert "result = model.features(images)" in card

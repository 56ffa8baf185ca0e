"""Variants of the architectures in the contract tests, mainly rotary positions and local windows."""

import pytest
import torch
from convert_cases import alike, convert_wrongly, refused

import hydra_ensembles as he
from architectures import VISION_VARIANTS, ArchitectureCase, images, timm_model
from architectures_clip import TOWER_VARIANTS
from architectures_transformers import DINOV3, MODERNBERT, VARIANTS, transformers_model
from hydra_ensembles.model.dropout import dropping

CASES = [*VISION_VARIANTS, *VARIANTS, *TOWER_VARIANTS]
EVA_DINOV3 = "vit_small_patch16_dinov3"


@pytest.mark.parametrize("case", CASES, ids=str)
@torch.no_grad()
def test_variants_answer_like_the_originals_for_inputs_of_every_shape(case: ArchitectureCase) -> None:
    model = case.build()
    converted = he.convert(model)
    for inputs in (case.inputs(), *(make() for make in case.other_inputs)):
        alike(converted(inputs)[0], case.logits(model, inputs))


@pytest.mark.parametrize("case", [case for case in CASES if "dinov3" in case.name or "mean" in case.name], ids=str)
def test_models_of_double_precision_are_read_too(case: ArchitectureCase) -> None:
    assert he.convert(case.build().double()).dtype is torch.float64


def test_positions_move_in_training_as_those_of_the_original() -> None:
    moves = {"pos_embed_shift": 0.2, "pos_embed_jitter": 1.5, "pos_embed_rescale": 2.0}
    names = ("rope_shift_coords", "rope_jitter_coords", "rope_rescale_coords")
    originals = [
        transformers_model("DINOv3ViTModel", {**DINOV3, **moves}),
        timm_model(EVA_DINOV3, init_values=1.0, **dict(zip(names, moves.values(), strict=True))),
    ]
    for model in originals:
        converted, inputs = he.convert(model), images(32, 32)["pixel_values"]
        answers = []
        for one in (model.train(), converted.train()):
            torch.manual_seed(3)  # both draw shift, jitter and rescale in the same order
            answer = one(inputs)
            answers.append(answer[0] if isinstance(answer, torch.Tensor) and answer.dim() == 3 else answer)
        expected = getattr(answers[0], "pooler_output", answers[0])
        assert torch.allclose(answers[1], expected, rtol=1e-4, atol=1e-5)
        still = converted.eval()(inputs)[0]
        assert (still - expected).abs().max() > 1e-3 * expected.abs().max()
        with dropping(torch.Generator().manual_seed(0)):  # as in MC Dropout: without the training's augmentation
            assert torch.equal(converted(inputs)[0], still)


def test_a_window_is_seen_by_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    convert_wrongly(monkeypatch, lambda ensemble: setattr(ensemble.encoder, "window", 3))
    refused(transformers_model("ModernBertForSequenceClassification", MODERNBERT), r"layers\.1")

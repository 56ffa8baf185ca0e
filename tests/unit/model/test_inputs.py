"""Inputs of a model: every entry point reads them alike and ignores nothing that would change an answer."""

from collections import UserDict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import Tensor

import hydra_ensembles as he
from hydra_ensembles.baselines.building_blocks import joined
from hydra_ensembles.errors import DataError
from hydra_ensembles.model import ensemble as ensemble_module
from hydra_ensembles.model.config import Sharing
from hydra_ensembles.model.metadata import Calibration
from random_ensembles import random_ensemble
from served_models import served

TEXT, IMAGE = "text-segments-projected", "image-cls"  # 20 words, 2 segments; images [3, 4, 6]
GENERATOR = torch.Generator().manual_seed(3)
IDS = torch.randint(2, 20, (6, 7), generator=GENERATOR)
MASK = (torch.arange(7)[None] < torch.tensor([7, 3, 5, 4, 6, 2])[:, None]).long()
SEGMENTS = (torch.arange(7)[None] > 2).long() * MASK
LABELS = torch.tensor([0, 1, 2, 3, 0, 1])
BATCH = {"input_ids": IDS, "attention_mask": MASK, "token_type_ids": SEGMENTS}
PIXELS = torch.randn(2, 3, 4, 6, generator=GENERATOR)


@cache
def model(shape: str = TEXT, members: int = 1) -> he.Ensemble:
    """Cached, like its runners below; tests must not modify them."""
    single = random_ensemble(shape, dtype=torch.float32)
    return single if members == 1 else he.Ensemble.stack([single, random_ensemble(shape, dtype=torch.float32, seed=1)])


optimized, stacked = cache(he.Ensemble.optimize), cache(lambda one: joined([one, one], Sharing()))
dropping = cache(lambda one: he.mc_dropout(one, 0.1, 2))


def by_name(run: Callable[..., Any], batch: Any) -> Any:
    return run(batch) if isinstance(batch, Tensor) else run(**batch)


WAYS: dict[str, Callable[[he.Ensemble, Any], Tensor]] = {
    "forward": lambda one, batch: one(batch),
    "keywords": lambda one, batch: by_name(one, batch),
    "features": lambda one, batch: one.features(batch),
    "predict": lambda one, batch: one.predict(batch).member_logits,
    "predict, keywords": lambda one, batch: by_name(one.predict, batch).member_logits,
    "optimized": lambda one, batch: optimized(one)(batch),
    "optimized predict, keywords": lambda one, batch: by_name(optimized(one).predict, batch).member_logits,
    "mc_dropout": lambda one, batch: dropping(one)(batch),
    "mc_dropout predict, keywords": lambda one, batch: by_name(dropping(one).predict, batch).member_logits,
    "stack": lambda one, batch: stacked(one)(batch),
}


@pytest.mark.parametrize("runner", [lambda one: one, optimized, dropping], ids=["ensemble", "optimized", "mc_dropout"])
def test_predict_takes_mask_and_segments_where_forward_does(runner: Callable[[he.Ensemble], Any]) -> None:
    run = runner(model())
    expected = run(IDS, MASK, SEGMENTS)
    assert not torch.equal(expected, run(IDS))
    for beside in ((MASK, SEGMENTS), (MASK.tolist(), SEGMENTS.tolist())):
        torch.testing.assert_close(run.predict(IDS, *beside).member_logits, expected)
    torch.testing.assert_close(run.predict(inputs=IDS, attention_mask=MASK).member_logits, run(IDS, MASK))
    with pytest.raises(DataError, match="like the token ids"):
        run.predict(IDS, MASK[:, :1])
    with pytest.raises(DataError, match="attention_mask"):
        runner(model(IMAGE)).predict(PIXELS, torch.ones(2))


FORMS: dict[str, dict[str, Any]] = {
    "arrays": {"attention_mask": MASK.numpy(), "token_type_ids": SEGMENTS.numpy().astype(np.int8)},
    "lists": {"attention_mask": MASK.tolist(), "token_type_ids": SEGMENTS.tolist()},
    "bool": {"attention_mask": MASK.bool(), "token_type_ids": SEGMENTS.bool()},
    "floats of 0 and 1": {"attention_mask": MASK.float()},
    "ids in an array": {"input_ids": IDS.numpy().astype(np.int32)},
    "labels and other columns": {"labels": LABELS, "idx": torch.arange(6), "special_tokens_mask": 1 - MASK},
    "nothing where nothing is read": {"position_ids": None, "inputs_embeds": None},
}


@torch.no_grad()
@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_answer_everywhere(form: str) -> None:
    one, batch = model(), {**BATCH, **FORMS[form]}
    passed = {name: value for name, value in batch.items() if value is not None}
    for way, run in WAYS.items():
        given = passed if "keywords" in way else UserDict(batch)
        torch.testing.assert_close(run(one, given), run(one, BATCH), rtol=1e-4, atol=1e-5, msg=way)
    without = one({"input_ids": IDS})
    assert not torch.allclose(one(batch), without, atol=1e-3)  # mask and segments have an effect


def test_the_keywords_of_a_tokenizer_and_of_an_image_processor() -> None:
    text, image = model(members=2), model(IMAGE, members=2)
    assert torch.equal(text(**BATCH), text(IDS, MASK, SEGMENTS))
    assert torch.equal(image(pixel_values=PIXELS, labels=None), image(PIXELS))
    with pytest.raises(DataError, match="pixel_values"):
        image(pixel_value=PIXELS)
    assert torch.equal(text.predict(IDS, attention_mask=MASK, token_type_ids=SEGMENTS).probs, text.predict(BATCH).probs)
    for run in (text, text.predict):
        with pytest.raises(DataError, match="input_ids"):
            run(attention_mask=MASK)


def test_a_mapping_with_the_inputs_of_both_towers_serves_both() -> None:
    image, text = random_ensemble(IMAGE, dtype=torch.float32), random_ensemble("text-causal", dtype=torch.float32)
    dual, both = he.DualEncoder(image, text), {"pixel_values": PIXELS, "input_ids": IDS[:2], "attention_mask": MASK[:2]}
    apart = dual({"pixel_values": PIXELS}, {"input_ids": IDS[:2], "attention_mask": MASK[:2]})
    assert torch.equal(dual(both, both), apart)
    assert torch.equal(dual(**both), apart)
    with pytest.raises(DataError, match="input_ids"):
        image(both)


# --- refused with advice, or by further entry points; `attack/bad_inputs.py` has more of both ----------------------


ADDED = torch.zeros(6, 7).masked_fill(MASK == 0, -torch.inf)


def test_segments_of_a_model_that_has_none_are_refused_unless_they_say_nothing() -> None:
    one = random_ensemble("text-post-norm", dtype=torch.float32)
    assert torch.equal(one(IDS, MASK, torch.zeros_like(IDS)), one(IDS, MASK))
    with pytest.raises(DataError, match="segments"):
        one(IDS, MASK, SEGMENTS)


def test_two_texts_in_a_tuple_are_refused() -> None:
    """A DataLoader gives texts as tuples; two of them would get a single answer, as a pair."""
    one, two = served("text"), ("hello wörld", "hello")
    with pytest.raises(DataError, match="pair"):
        one.predict(two)
    assert (len(one.predict([two])), len(one.predict(list(two)))) == (1, 2)


def test_inputs_are_read_checked_and_moved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    one, read = model(members=2), []
    original = ensemble_module.read_inputs
    monkeypatch.setattr(ensemble_module, "read_inputs", lambda *given: (read.append(1), original(*given))[1])
    for run in (one, one.predict, one.features, one.answers):
        run(BATCH)
    assert len(read) == 4
    prepared, expected = one.prepare(BATCH), one.predict(BATCH).probs
    del read[:]
    assert torch.equal(one.predict(prepared).probs, expected)
    assert torch.equal(one(prepared), one(**prepared))
    assert len(read) == 1


def test_the_default_device_of_torch_changes_no_answer(tmp_path: Path) -> None:
    calibration = Calibration(temperature=2.0, threshold=0.5)
    one = model(IMAGE, 2).with_metadata(preprocessing=he.ImagePreprocessing((8, 12)), calibration=calibration)
    picture, original = Image.new("RGB", (12, 8)), timm.create_model("test_vit", num_classes=3).eval()
    expected, images = one.predict([picture]).probs, torch.randn(1, 3, 160, 160)
    with torch.device("meta"):  # stands for a GPU: tensors made on the CPU are elsewhere
        one.save_pretrained(tmp_path)
        assert torch.equal(he.load(tmp_path).predict([picture])[[0]].probs, expected)
        assert he.convert(original).predict(images).probs.device.type == "cpu"


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_data_are_checked_before_they_leave_the_cpu_and_not_read_back() -> None:
    one = model.__wrapped__(members=2).cuda()  # not the cached one
    for wrong in ({"input_ids": IDS + 9}, {"attention_mask": ADDED}, {"token_type_ids": SEGMENTS + 1}):
        with pytest.raises(DataError):
            one.predict({**BATCH, **wrong})
    there = {name: tensor.cuda() for name, tensor in BATCH.items()}
    with pytest.raises(DataError, match="as bool"):
        one({**there, "attention_mask": ADDED.cuda()})
    fast = one.optimize(there)
    expected = one.predict(BATCH).probs
    try:
        torch.cuda.set_sync_debug_mode("error")
        answers = [run.predict(there, check_finite=False) for run in (one, fast)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for answer in answers:
        torch.testing.assert_close(answer.probs, expected, rtol=1e-4, atol=1e-5)

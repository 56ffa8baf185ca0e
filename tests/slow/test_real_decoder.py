"""Real models from folders: they answer as in transformers, are calibrated and saved, load without any library, serve.

HYDRA_MODELS=FOLDER python -m pytest -m slow tests/slow/test_real_decoder.py    # FOLDER/smollm2, /qwen, /nomic
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hydra_ensembles as he
from processes import environment
from shared_paths import real_model

pytestmark = pytest.mark.slow
LABELS = {"positive": " positive", "negative": " negative"}
GOOD = ("wonderful", "moving", "bright", "charming", "clever", "warm", "fresh", "superb", "tender", "witty")
BAD = ("dull", "far too long", "stale", "hollow", "clumsy", "noisy", "tired", "awful", "empty", "slow")
TEXTS = [f"The {thing} was {word}." for word in (*GOOD, *BAD) for thing in ("film", "second half of the book")]
TRUTH = torch.tensor([0] * 20 + [1] * 20)
BARE = """
import sys
import torch
import hydra_ensembles as he
for name in ("transformers", "tokenizers", "peft", "timm", "accelerate", "scipy", "sklearn"):
    sys.modules[name] = None  # importing it raises ImportError
saved = torch.load(sys.argv[2], weights_only=True)
answer = he.load(sys.argv[1]).predict(saved["inputs"])
assert torch.equal(answer.probs, saved["probs"]) and torch.equal(answer.accept, saved["accept"])
"""
SERVED = """
import sys
import torch
for name in ("transformers", "peft", "timm", "accelerate"):
    sys.modules[name] = None
import hydra_ensembles as he
from serving import ask, settings
saved = torch.load(sys.argv[2], weights_only=True)
answer = ask(he.load(sys.argv[1]), "POST", "/v1/predict", settings(max_batch=1), json={"texts": saved["texts"]}).json()
found = [one["confidence"] for one in answer["predictions"]]
assert torch.allclose(torch.tensor(found), saved["probs"].max(-1).values, atol=2e-4), found
"""


def calibrated_loaded_bare_and_served(model: Any, folder: Path) -> None:
    given = model.metadata.preprocessing(TEXTS)
    safe = he.calibrate(
        model, [({name: one[rows] for name, one in given.items()}, TRUTH[rows]) for rows in ROWS], share=0.9
    )
    safe.save_pretrained(folder / "safe")
    few = {name: one[:3] for name, one in given.items()}
    answer = safe.predict(few)
    expected = {"inputs": few, "texts": TEXTS[:3], "probs": answer.probs, "accept": answer.accept}
    torch.save(expected, folder / "expected.pt")
    for script in (BARE, SERVED):
        command = [sys.executable, "-c", script, str(folder / "safe"), str(folder / "expected.pt")]
        subprocess.run(command, check=True, timeout=600, env=environment())


ROWS = torch.arange(len(TEXTS)).view(2, 20).T.reshape(4, 10)  # good and bad ones in turn


def alike(mine: Tensor, theirs: Tensor) -> None:
    assert ((mine - theirs).abs().max() / theirs.abs().max()).item() <= 2e-5


@pytest.mark.parametrize("name", ["smollm2", "qwen"])
@torch.no_grad()
def test_a_decoder_answers_with_words_as_in_transformers(name: str, tmp_path: Path) -> None:
    transformers, folder = pytest.importorskip("transformers"), real_model(name)
    judge = he.convert(folder, labels=LABELS, template="Is it good? {text}")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    answer = judge.predict(TEXTS[::8])
    ids = [tokenizer.encode(word)[0] for word in LABELS.values()]
    for text, mine in zip(TEXTS[::8], answer.log_probs, strict=True):
        turns = [{"role": "user", "content": f"Is it good? {text}"}]
        said = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        given = tokenizer(said, return_tensors="pt", add_special_tokens=False)
        alike(mine, model(**given).logits[0, -1, ids].log_softmax(-1))
    del model
    calibrated_loaded_bare_and_served(judge, tmp_path)


@torch.no_grad()
def test_nomic_gives_the_features_of_transformers(tmp_path: Path) -> None:
    transformers, folder = pytest.importorskip("transformers"), real_model("nomic")
    base = he.convert(folder, num_labels=2, labels=list(LABELS))
    model = transformers.AutoModel.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    given = tokenizer(TEXTS, padding=True, return_tensors="pt")
    alike(base.features(TEXTS)[0], model(**given).last_hidden_state[:, 0])
    calibrated_loaded_bare_and_served(base, tmp_path)

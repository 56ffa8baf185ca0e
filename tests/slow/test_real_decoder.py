"""Real models from folders: they answer as in transformers, are calibrated and saved, and load without any library."""

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


def calibrated_and_loaded_in_a_bare_environment(model: Any, folder: Path) -> None:
    given = model.metadata.preprocessing(TEXTS)
    safe = he.calibrate(
        model, [({name: one[rows] for name, one in given.items()}, TRUTH[rows]) for rows in ROWS], share=0.9
    )
    safe.save_pretrained(folder / "safe")
    few = {name: one[:3] for name, one in given.items()}
    answer = safe.predict(few)
    torch.save({"inputs": few, "probs": answer.probs, "accept": answer.accept}, folder / "expected.pt")
    command = [sys.executable, "-c", BARE, str(folder / "safe"), str(folder / "expected.pt")]
    subprocess.run(command, check=True, timeout=600, env=environment())


ROWS = torch.arange(len(TEXTS)).view(2, 20).T.reshape(4, 10)  # good and bad ones in turn


def alike(mine: Tensor, theirs: Tensor) -> None:
    assert ((mine - theirs).abs().max() / theirs.abs().max()).item() <= 2e-5


@torch.no_grad()
def test_smollm2_answers_with_words_as_in_transformers(tmp_path: Path) -> None:
    transformers, folder = pytest.importorskip("transformers"), real_model("smollm2")
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
    calibrated_and_loaded_in_a_bare_environment(judge, tmp_path)


@torch.no_grad()
def test_nomic_gives_the_features_of_transformers(tmp_path: Path) -> None:
    transformers, folder = pytest.importorskip("transformers"), real_model("nomic")
    base = he.convert(folder, num_labels=2, labels=list(LABELS))
    model = transformers.AutoModel.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    given = tokenizer(TEXTS, padding=True, return_tensors="pt")
    alike(base.features(TEXTS)[0], model(**given).last_hidden_state[:, 0])
    calibrated_and_loaded_in_a_bare_environment(base, tmp_path)

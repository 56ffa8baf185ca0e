"""A prefix is read once: the answers are those of the texts with the prefix in front."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hydra_ensembles as he
from architectures import ArchitectureCase
from architectures_decoders import CASES, PAD, texts
from hydra_ensembles.errors import ConfigError, DataError
from hydra_ensembles.heads.masking import masked
from random_ensembles import DECODERS, random_batches, random_ensemble
from unit.convert.test_decoders import language_model, word_tokenizer

PREFIX = (7, 11, 5, 9, 30, 41, 12)


def apart(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).abs().max() / expected.abs().max()).item()


def in_front(inputs: dict[str, Tensor], prefix: tuple[int, ...] = PREFIX) -> dict[str, Tensor]:
    """The same rows with the prefix before their first token, padded on the right."""
    rows = [torch.cat([torch.tensor(prefix), ids[mask.bool()]]) for ids, mask in zip(*inputs.values(), strict=True)]
    pad = torch.nn.utils.rnn.pad_sequence
    masks = pad([torch.ones_like(row) for row in rows], batch_first=True)
    return {"input_ids": pad(rows, batch_first=True, padding_value=PAD), "attention_mask": masks}


@pytest.mark.parametrize("case", CASES, ids=str)
@torch.no_grad()
def test_a_prefix_is_as_if_it_were_in_front_of_every_text(case: ArchitectureCase) -> None:
    base = he.convert(case.build())
    short = base.with_prefix(PREFIX)
    fast = short.optimize()
    for tokens in (1, 9):
        for left in (False, True):
            inputs = texts(tokens, left)
            expected = base(in_front(inputs))
            assert apart(short(inputs), expected) <= 2e-5
            assert apart(fast(inputs), expected) <= 2e-5


@pytest.mark.parametrize("shape", [shape for shape in DECODERS if shape != "text-multi-query"])
@torch.no_grad()
def test_members_plans_and_masks_agree_with_a_prefix(shape: str) -> None:
    model, prefix = random_ensemble(shape), (3, 4)
    uneven = [he.prune(model, heads) for heads in ([(0, 1), (1, 0)], [(1, 0), (1, 1), (1, 2), (1, 3)], [(2, 3)])]
    for ensemble in (he.fuse(uneven), he.Ensemble.stack([*uneven, random_ensemble(shape, seed=1)])):
        short = ensemble.with_prefix(prefix)
        rows = random_batches(model, (4,))[0][0]
        assert isinstance(rows, dict)
        rows = {name: one[:, :5] for name, one in rows.items()}
        expected = ensemble(in_front(rows, prefix))
        assert apart(short(rows), expected) <= 1e-10
        fast = short.optimize(plans=["batched", "loop"])
        assert all(apart(fast.module(plan)(rows), expected) <= 1e-10 for plan in ("batched", "loop"))
        assert apart(short.member(1)(rows)[0], expected[1]) <= 1e-10
    short = model.with_prefix(prefix)
    with masked(short, [(0, 1), (1, 0)]):
        assert apart(short(rows), he.prune(short, [(0, 1), (1, 0)])(rows)) <= 1e-10


@torch.no_grad()
def test_a_judge_reads_its_template_once_and_stays_calibrated(tmp_path: Path) -> None:
    labels: Any = {"safe": "safe", "unsafe": ["unsafe", "bad"]}
    template = "is this text safe or unsafe w20 w21 {text} answer"
    judge = he.convert(language_model(), labels=labels, tokenizer=word_tokenizer(chat=True), template=template)
    words = ["good text", "this is bad bad bad text w5", "w7"]
    rows = judge.prepare(words * 40)
    judge = he.calibrate(judge, [({**rows}, torch.arange(120) % 2)], share=0.9, familiarity=None)
    short = judge.with_prefix()
    assert short.promise is None
    assert short.metadata.calibration == judge.metadata.calibration
    assert len(short.config.stem.prefix) == 9
    assert short.prepare(words)["input_ids"].shape[1] == judge.prepare(words)["input_ids"].shape[1] - 9
    short.save_pretrained(tmp_path)
    for one in (short, he.load(tmp_path), short.optimize()):
        assert apart(one.predict(words).log_probs, judge.predict(words).log_probs) <= 2e-5
    more = judge.with_prefix("w30 w31 w32 ")
    assert more.metadata.calibration is None
    assert len(more.config.stem.prefix) == 12
    settings: Any = {"labels": labels, "tokenizer": word_tokenizer(chat=True), "template": template}
    asked = he.convert(language_model(), prefix="w30 w31 w32 ", empty=["", "w9"], **settings)
    divided = more.predict(words).probs / more.predict(["", "w9"]).probs.mean(0)
    assert apart(asked.predict(words).probs, divided / divided.sum(1, keepdim=True)) <= 2e-5
    with pytest.raises(DataError, match="longer"):
        short.predict("bad " * 512)


def test_gradients_reach_the_prefix_and_what_cannot_have_one_is_refused() -> None:
    model = random_ensemble("text-grouped-rotary")
    short = model.with_prefix((3, 4))
    short(torch.full((2, 3), 5)).sum().backward()
    gradient = short.stem.words.grad
    assert gradient is not None
    assert (gradient[0, [3, 4, 5]].abs().sum(1) > 0).all()
    for call, said in (
        (lambda: random_ensemble("text-multi-query").with_prefix((3,)), "decoder"),
        (lambda: random_ensemble("image-cls").with_prefix((3,)), "decoder"),
        (lambda: short.with_prefix((3,)), "without a prefix"),
        (lambda: model.with_prefix("is this"), "tokenizer"),
        (lambda: model.with_prefix((3,) * 8), "does not fit"),
        (lambda: model.with_prefix((99,)), "does not fit"),
        (lambda: he.extract_circuit(short, random_batches(model), score="acc", budget=1), "prefix"),
    ):
        with pytest.raises(ConfigError, match=said):
            call()

"""Local attention windows against their definition, and behaviour of rotary models beyond the contract tests."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hydra_ensembles.errors import ConfigError
from hydra_ensembles.model.config import RotaryConfig
from hydra_ensembles.model.layers import Attention, Context, attend, near_tokens
from hydra_ensembles.model.rotary import FrozenRotary, Rotary
from random_ensembles import ALL_SHAPES, encoder, random_batches, random_ensemble


def test_tables_give_what_is_computed_also_for_other_sizes() -> None:
    like = torch.zeros(1, dtype=torch.float64)
    for shape, native, sizes in (("image-rotary", (2, 3), [(2, 3), (4, 1)]), ("text-rotary-local", (8,), [(8,), (3,)])):
        rotary = Rotary(ALL_SHAPES[shape])
        frozen = FrozenRotary(rotary, native, like)
        for size in sizes:
            for expected, found in zip(rotary(size, like), frozen(size, like), strict=True):
                assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))


@pytest.mark.parametrize("read", [None, slice(0, 2)], ids=["all", "two"])
@pytest.mark.parametrize("masked", [False, True])
def test_a_window_hides_what_is_farther_away(masked: bool, read: slice | None) -> None:
    mask = torch.tensor([[True] * 7, [True] * 3 + [False] * 4]) if masked else None
    q, k, v = torch.randn(3, 2, 7, 3, 4, dtype=torch.float64).unbind()
    seen = Context(near=near_tokens(7, 2, q.device)).with_mask(mask).seen(True, read)
    found = attend(q if read is None else q[:, read], k, v, seen, 1, causal=False)
    for sample in range(2):
        for token in range(found.shape[1]):
            may = [mask is None or bool(mask[sample, at]) or at == token for at in range(7)]
            there = [at for at in range(7) if abs(at - token) <= 2 and may[at]]
            weights = torch.einsum("hd,khd->hk", q[sample, token], k[sample, there]) / 2
            expected = torch.einsum("hk,khd->hd", weights.softmax(-1), v[sample, there])
            assert torch.allclose(found[sample, token], expected)


def test_what_local_layers_see_is_worked_out_once_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_ensemble("text-rotary-local")
    (inputs, _), *_ = random_batches(model, (3,))
    calls: list[Context] = []
    own = Context.with_mask
    monkeypatch.setattr(Context, "with_mask", lambda self, mask: calls.append(self) or own(self, mask))
    model(inputs)
    assert (len(calls), sum(model.config.encoder.local)) == (1, 2)


def test_padding_far_from_all_words_stays_a_number_and_changes_no_answer() -> None:
    model = random_ensemble("text-rotary-local")
    (inputs, _), *_ = random_batches(model, (3,))
    mask = torch.arange(7)[None] < torch.tensor([[1], [2], [7]])
    answer = model({**inputs, "attention_mask": mask})
    assert answer.isfinite().all()
    short = model({"input_ids": inputs["input_ids"][:1, :1], "attention_mask": mask[:1, :1]})
    assert torch.allclose(answer[:, :1], short)


@torch.no_grad()
def test_one_program_serves_texts_shorter_and_longer_than_the_window() -> None:
    model = random_ensemble("text-rotary-local", dtype=torch.float32)
    tokens, samples = torch.export.Dim("tokens", max=8), torch.export.Dim("samples")
    given = torch.randint(20, (3, 5)), torch.ones(3, 5, dtype=torch.long)
    shapes = {"inputs": {0: samples, 1: tokens}, "attention_mask": {0: samples, 1: tokens}}
    names = dict(zip(shapes, given, strict=True))
    program = torch.export.export(model, (), names, dynamic_shapes=shapes).module()
    for length in (2, 8):
        ids, mask = torch.randint(20, (2, length)), torch.ones(2, length, dtype=torch.long)
        mask[1, 1:] = 0
        assert torch.allclose(program(inputs=ids, attention_mask=mask), model(ids, mask), atol=1e-5)


@pytest.mark.parametrize("shape", ["image-rotary", "text-rotary-local"])
def test_autocast_trains_what_it_turns(shape: str) -> None:
    model = random_ensemble(shape, dtype=torch.float32).train()
    (inputs, _), *_ = random_batches(model, (3,))
    with torch.autocast("cpu", torch.bfloat16):
        model(inputs.float() if isinstance(inputs, Tensor) else inputs).square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_rotary_layer_without_its_turns_does_not_answer() -> None:
    attention = Attention(encoder(head_dim=4, rotary=RotaryConfig(10.0)), (2,)).double()
    with pytest.raises(IndexError):
        attention(torch.randn(1, 1, 3, 10, dtype=torch.float64), Context())


@pytest.mark.parametrize(
    ("change", "token"),
    [
        ({"rotary": RotaryConfig(10.0), "head_dim": 6}, "multiple of 4"),
        ({"window": 2}, "window"),
        ({"local": (True, False, True)}, "window"),
        ({"local": (True,), "window": 2}, "local"),
        ({"rotary": {"base": 0.5}}, "base"),
        ({"rotary": {"base": 5.0, "jitter": 2.0}}, "centred"),
    ],
)
def test_settings_that_do_not_fit_are_refused(change: dict[str, object], token: str) -> None:
    config = ALL_SHAPES["image-cls"]
    with pytest.raises(ConfigError, match=token):
        replace(config, encoder=encoder(**change))

"""An optimized ensemble: choosing plans, compiling, changing shapes, precision, memory."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from architectures import close
from hydra_ensembles.model import cost
from hydra_ensembles.model.config import KeptHeads, Sharing
from hydra_ensembles.model.ensemble import Ensemble
from hydra_ensembles.model.metadata import Calibration, Metadata
from hydra_ensembles.optimize import runner
from hydra_ensembles.optimize.runner import Choice, OptimizedEnsemble
from random_ensembles import random_batches, random_ensemble

UNEVEN: KeptHeads = (((0, 1, 2), (0, 3), (1,)), ((0, 2), (0, 1, 2, 3), (2, 3)), ((1,), (3,), (0, 1, 2)))


def hydra(shape: str = "image-cls", heads: KeptHeads = UNEVEN) -> Ensemble:
    return random_ensemble(shape, heads, Sharing(stem=True, mlp=True), dtype=torch.float32)


def images(batch: int) -> Tensor:
    return torch.randn(batch, 3, 4, 6, generator=torch.Generator().manual_seed(batch))


def test_an_autocast_of_the_caller_changes_nothing_that_is_kept_or_answered() -> None:
    ensemble, inputs = hydra(), images(3)
    plain = ensemble.optimize(inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = ensemble.optimize(inputs)
        assert close(ensemble.optimize()(inputs), plain(inputs))
    for plan in ("batched", "loop"):
        pairs = zip(plain.module(plan).parameters(), inside.module(plan).parameters(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
    assert close(inside(inputs), ensemble(inputs))


def test_a_shape_is_measured_once_and_its_choice_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Mock(side_effect=runner.seconds_of)
    monkeypatch.setattr(runner, "seconds_of", measured)
    fast = hydra().optimize(images(2))
    for batch in (2, 3, 2, 3, 1):
        fast(images(batch))
    assert [len(call.args[1][0]) for call in measured.call_args_list] == [2, 3, 1]
    assert set(fast.choice_for(images(3)).seconds) == {"batched", "loop"}


def test_the_fastest_plan_is_chosen_and_one_without_memory_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[float] = []
    monkeypatch.setattr(cost.time, "perf_counter", lambda: sum(passed))
    seconds = {"batched": 2.0, "loop": 1.0}
    for no_memory, chosen in ((None, "loop"), ("loop", "batched")):
        full = torch.OutOfMemoryError("no memory")
        runs = {plan: Mock(side_effect=lambda *_, plan=plan: passed.append(seconds[plan])) for plan in seconds}
        if no_memory:
            runs[no_memory].side_effect = full
        monkeypatch.setattr(OptimizedEnsemble, "_run", lambda self, plan, compiled, part, runs=runs: runs[plan])
        assert hydra().optimize().choice_for(images(1)).plan == chosen
    runs["batched"].side_effect = full
    with pytest.raises(torch.OutOfMemoryError):
        hydra().optimize().choice_for(images(1))


@pytest.mark.parametrize("sharing", [Sharing(stem=True, mlp=True, norms=True, readout=True), Sharing()])
def test_where_nothing_is_per_member_nothing_is_measured(sharing: Sharing) -> None:
    ensemble = random_ensemble("image-cls", None, sharing)
    fast = ensemble.optimize(images(2).double())
    assert [choice.seconds for choice in fast.choices.values()] == [{}]


def test_beyond_a_number_of_shapes_the_nearest_batch_size_decides() -> None:
    ensemble = hydra()
    fast = ensemble.optimize(shapes=2)
    for batch in (1, 8, 6):
        assert close(fast(images(batch)), ensemble(images(batch)))
    for key, plan in zip(fast.choices, ("loop", "batched", "batched"), strict=True):  # 1, 8 and 6 images
        fast.choices[key] = Choice(plan)
    assert (fast.choice_for(images(5)).plan, fast.choice_for(images(2)).plan) == ("batched", "loop")


@torch.no_grad()
@pytest.mark.parametrize("shape", ["text-post-norm", "text-mean-post-norm", "text-causal"])
def test_padding_masks_and_changing_lengths(shape: str) -> None:
    ensemble = hydra(shape)
    fast = ensemble.optimize(plans=["batched"])
    batch = random_batches(ensemble, (3,))[0][0]
    for tokens in (7, 3, 1):
        part = {name: tensor[:, :tokens] for name, tensor in batch.items()}
        assert close(fast(part), ensemble(part))
        assert close(fast(part["input_ids"]), ensemble(part["input_ids"]))


@pytest.fixture
def graphs_made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Compile with a backend that runs graphs as they are, and record each graph."""
    made: list[Any] = []
    real = torch.compile

    def backend(graph: Any, example_inputs: Any) -> Any:
        made.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda module, **options: real(module, **{**options, "backend": backend}))
    yield made
    torch.compiler.reset()


def test_graphs_are_kept_up_to_a_limit_and_recorded_anew_beyond_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    for limit, expected in ((3, [1, 2, 3]), (2, [1, 2, 3] * 2)):
        record = Mock(side_effect=lambda arguments: (Mock(), arguments, arguments))
        monkeypatch.setattr(runner.GraphCache, "_record", record)
        cache = runner.GraphCache(lambda *given: given, torch.device("cuda", 0), None, limit)
        for batch in (1, 2, 3) * 2:
            cache(torch.zeros(batch))
        assert [len(call.args[0][0]) for call in record.call_args_list] == expected


@pytest.mark.ci  # compiles many times
@torch.no_grad()
def test_code_is_compiled_once_a_shape_up_to_a_limit(graphs_made: list[Any]) -> None:
    ensemble = hydra()
    fast = ensemble.optimize(compile=True, plans=["batched"], shapes=2)
    with torch._dynamo.config.patch(recompile_limit=1):  # ours is beyond the compiler's
        for batch in (1, 2, 3, 2):
            assert close(fast(images(batch)), ensemble(images(batch)))
    assert [choice.compiled for choice in fast.choices.values()] == [True, True, False]
    assert len(graphs_made) == 2
    texts = hydra("text-post-norm")
    batch = random_batches(texts, (3,))[0][0]  # with masks
    assert close(texts.optimize(compile=True, plans=["batched"])(batch), texts(batch))
    assert len(graphs_made) == 3


@torch.no_grad()
def test_a_lower_precision_is_used_for_weights_and_inputs_and_constants_fold_in_full() -> None:
    ensemble, half = hydra(), hydra().to(torch.bfloat16).optimize()
    fast = ensemble.optimize(dtype=torch.bfloat16)
    logits = fast(images(4))
    assert logits.dtype == torch.bfloat16
    assert close(logits.float(), ensemble(images(4)), 0.05)
    assert fast.predict(images(4)).probs.dtype == torch.float32
    assert close(half(images(2).bfloat16()).float(), ensemble(images(2)), 0.05)


def test_later_changes_of_the_ensemble_do_not_reach_it() -> None:
    ensemble = hydra().with_metadata(labels=("a", "b", "c", "d"), calibration=Calibration(3.0, 0.5))
    fast, inputs = ensemble.optimize(plans=["loop"]), images(5)
    before, remembered, description = fast.predict(inputs), ensemble.metadata, ensemble.describe()
    assert torch.allclose(before.probs, ensemble.predict(inputs).probs, atol=1e-5)
    for parameter in ensemble.to(torch.bfloat16).parameters():
        parameter.data.zero_()
    ensemble.metadata = Metadata(labels=("w", "x", "y", "z"), calibration=Calibration(0.1))
    after = fast.predict(inputs)
    assert torch.equal(after.probs, before.probs)
    assert torch.equal(after.accept, before.accept)
    assert (fast.metadata, fast.describe()) == (remembered, description)

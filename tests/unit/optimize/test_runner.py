"""An optimized ensemble: choosing plans, compiling, changing shapes, precision, memory."""

import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hydra_ensembles.errors import ConfigError
from hydra_ensembles.model.config import KeptHeads, Sharing
from hydra_ensembles.model.ensemble import Ensemble
from hydra_ensembles.model.metadata import Calibration, Metadata
from hydra_ensembles.optimize import runner as optimized_module
from hydra_ensembles.optimize.runner import Choice, OptimizedEnsemble, RunOptions, fastest, shape_key
from random_ensembles import random_batches, random_ensemble

EVEN: KeptHeads = (((0, 1), (0, 3), (1, 2)),) * 3
UNEVEN: KeptHeads = (((0, 1, 2), (0, 3), (1,)), ((0, 2), (0, 1, 2, 3), (2, 3)), ((1,), (3,), (0, 1, 2)))


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    yield
    torch.compiler.reset()


def hydra(shape: str = "image-cls", heads: KeptHeads = UNEVEN) -> Ensemble:
    return random_ensemble(shape, heads, Sharing(stem=True, mlp=True), dtype=torch.float32)


def images(batch: int) -> Tensor:
    return torch.randn(batch, 3, 4, 6, generator=torch.Generator().manual_seed(batch))


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-5) -> bool:
    return bool((actual - expected).abs().max() <= tolerance * expected.abs().max())


# --- choosing --------------------------------------------------------------------------------------------


def test_a_shape_is_measured_once_and_its_choice_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []

    def watched(runs: Any, arguments: Any, *rest: Any) -> Choice:
        measured.append(arguments[0].shape[0])
        return fastest(runs, arguments, *rest)

    monkeypatch.setattr(optimized_module, "fastest", watched)
    ensemble = hydra()
    fast = ensemble.optimize(images(2))
    for batch in (2, 3, 2, 3, 1):
        fast(images(batch))
    assert measured == [2, 3, 1]
    assert fast.choice_for(images(3)) is fast.choices[shape_key((images(3), None, None))]
    assert set(fast.choice_for(images(3)).seconds) == {"batched", "loop"}


def test_the_fastest_plan_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(optimized_module.time, "perf_counter", lambda: clock.now)

    def working(seconds: float) -> Any:
        def run(x: Tensor) -> None:
            clock.now += seconds

        return run

    choice = fastest({"batched": working(2.0), "loop": working(1.0)}, (images(1),), 3, torch.device("cpu"))
    assert (choice.plan, choice.seconds) == ("loop", {"batched": 2.0, "loop": 1.0})


def test_beyond_a_number_of_shapes_the_nearest_batch_size_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimized_module, "MEASURED_SHAPES", 2)
    ensemble = hydra()
    fast = ensemble.optimize()
    for batch in (1, 8, 6):
        assert close(fast(images(batch)), ensemble(images(batch)))
    for key, plan in zip(fast.choices, ("loop", "batched"), strict=False):  # of one and of eight images
        fast.choices[key] = Choice(plan)
    late = fast.choice_for(images(5))
    assert (late.plan, fast.choice_for(images(2)).plan) == ("batched", "loop")
    assert not late.seconds
    assert "nearest" in str(late)


def _failing(*arguments: Any) -> Tensor:
    raise NotImplementedError("strides must be a multiple of 16 bytes\nand more")


def test_a_plan_that_fails_drops_out_with_its_reason() -> None:
    ensemble = hydra()
    fast = ensemble.optimize(plans=["grouped", "loop"])
    fast._plain["grouped"] = _failing
    assert close(fast(images(3)), ensemble(images(3)))
    choice = fast.choice_for(images(3))
    assert choice.plan == "loop"
    assert choice.failures == {"grouped": "strides must be a multiple of 16 bytes"}
    assert "grouped failed: strides" in fast.describe()


def test_when_every_plan_fails_the_error_is_shown() -> None:
    fast = hydra().optimize(plans=["grouped", "loop"])
    fast._plain["grouped"] = fast._plain["loop"] = _failing
    with pytest.raises(NotImplementedError, match="multiple of 16"):
        fast(images(2))
    assert not fast.choices


# --- shapes ----------------------------------------------------------------------------------------------


@torch.no_grad()
def test_padding_masks_and_changing_lengths() -> None:
    for shape in ("text-post-norm", "text-mean-post-norm", "text-causal"):
        ensemble = hydra(shape)
        fast = ensemble.optimize()
        for size in (5, 1):
            batch = random_batches(ensemble, (size,))[0][0]
            assert isinstance(batch, dict)
            for tokens in (7, 3, 1):
                part = {name: tensor[:, :tokens] for name, tensor in batch.items()}
                assert close(fast(part), ensemble(part))
                assert close(fast(part["input_ids"]), ensemble(part["input_ids"]))


# --- compiling -------------------------------------------------------------------------------------------


@pytest.fixture
def graphs_made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Modules compiled from now on run as they are; each graph the compiler makes of them is noted."""
    made: list[Any] = []
    real = torch.compile

    def backend(graph: Any, example_inputs: Any) -> Any:
        made.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda module, **options: real(module, **{**options, "backend": backend}))
    return made


@torch.no_grad()
@pytest.mark.parametrize(
    ("options", "batches", "compiled", "graphs"),
    [
        ({}, (1, 2, 3, 2, 1), [True] * 3, {3}),  # beyond the compiler's own limit
        ({"compiled_shapes": 1}, (3, 1, 3), [True, False], {1}),  # the others run without
        ({"compiled_shapes": 1, "dynamic": True}, (5, 2, 7, 1), [True] * 4, {1, 2}),  # one may have its own
    ],
)
def test_code_is_compiled_once_a_shape_up_to_a_limit_or_for_all(
    options: Any, batches: Any, compiled: list[bool], graphs: set[int], graphs_made: list[Any]
) -> None:
    ensemble = hydra()
    fast = ensemble.optimize(compile=True, plans=["batched"], **options)
    with torch._dynamo.config.patch(recompile_limit=1):
        for batch in batches:
            assert close(fast(images(batch)), ensemble(images(batch)))
    assert [choice.compiled for choice in fast.choices.values()] == compiled
    assert len(graphs_made) in graphs
    assert ("most allowed" in fast.describe()) == (not all(compiled))


def test_limits_of_the_compiler_are_lifted_only_for_our_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[int] = []

    def compiled(module: Any, **options: Any) -> Any:
        return lambda *arguments: limits.append(torch.compiler.config.recompile_limit) or module(*arguments)

    monkeypatch.setattr(torch, "compile", compiled)
    fast, usual = hydra().optimize(compile=True, plans=["batched"]), torch.compiler.config.recompile_limit
    for batch in (2, 2, 1, 2):
        fast(images(batch))
    assert len(limits) == 6
    assert all(limit > usual for limit in limits)
    assert torch.compiler.config.recompile_limit == usual


def test_only_the_chosen_plan_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    def watched(module: Any, **options: Any) -> Any:
        compiled.append(module)
        return module

    monkeypatch.setattr(torch, "compile", watched)
    fast = hydra().optimize(compile=True)
    assert not compiled
    fast(images(2))
    assert compiled == [fast.module(fast.choice_for(images(2)).plan)]


@torch.no_grad()
def test_text_with_masks_compiles(graphs_made: list[Any]) -> None:
    ensemble = hydra("text-post-norm")
    fast = ensemble.optimize(compile=True, plans=["batched"])
    batch = random_batches(ensemble, (3,))[0][0]
    assert close(fast(batch), ensemble(batch))
    assert len(graphs_made) == 1


@torch.no_grad()
def test_a_failing_compiler_is_reported_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda module, **options: _failing)
    ensemble = hydra()
    fast = ensemble.optimize(compile=True)
    with pytest.warns(UserWarning, match="runs uncompiled: strides"):
        logits = fast(images(2))
    assert close(logits, ensemble(images(2)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(fast(images(2)), logits)
    assert "not compiled: strides" in fast.describe()


# --- precision and memory --------------------------------------------------------------------------------


@torch.no_grad()
def test_a_lower_precision_is_used_for_weights_and_inputs() -> None:
    ensemble = hydra()
    fast = ensemble.optimize(dtype=torch.bfloat16)
    logits = fast(images(4))
    assert logits.dtype == torch.bfloat16
    assert close(logits.float(), ensemble(images(4)), 0.05)
    assert {p.dtype for p in fast.module("loop").parameters()} == {torch.bfloat16}
    assert fast.predict(images(4)).probs.dtype == torch.float32
    assert fast.memory_bytes < 0.6 * ensemble.optimize().memory_bytes


def test_half_precision_folds_in_full_precision() -> None:
    ensemble = hydra()
    half = hydra().to(torch.bfloat16)
    with torch.no_grad():
        assert close(half.optimize()(images(2).bfloat16()).float(), ensemble(images(2)), 0.05)
    assert half.optimize().module("loop").dtype == torch.bfloat16


def test_memory_counts_what_plans_share_once() -> None:
    even = hydra(heads=EVEN)
    alone, both = even.optimize(plans=["loop"]), even.optimize(plans=["loop", "batched"])
    assert alone.memory_bytes == both.memory_bytes
    module = alone.module("loop")
    assert alone.memory_bytes == sum(tensor.nbytes for tensor in [*module.parameters(), *module.buffers()])
    uneven = hydra()
    assert uneven.optimize(plans=["loop", "batched"]).memory_bytes > uneven.optimize(plans=["loop"]).memory_bytes


def test_description_and_repr_name_plans_and_times() -> None:
    fast = hydra().optimize(images(2))
    assert repr(fast).startswith("OptimizedEnsemble(plans=['batched', 'loop'], compile=False, graphs=False")
    assert "[2, 3, 4, 6]: " in fast.describe()
    assert " ms" in fast.describe()


@pytest.mark.parametrize(
    ("options", "token"),
    [
        ({"plans": ()}, "plans"),
        ({"plans": ("fast",)}, "fast"),
        ({"dtype": torch.int8}, "floating"),
        ({"compiled_shapes": 0}, "compiled_shapes"),
        ({"graphs": True}, "CUDA"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options: dict[str, Any], token: str) -> None:
    with pytest.raises(ConfigError, match=token):
        OptimizedEnsemble(hydra(), RunOptions(**options))
    with pytest.raises(ConfigError, match="grouped"):
        hydra().optimize().module("grouped")


# --- what it was made from -------------------------------------------------------------------------------


def test_later_changes_of_the_ensemble_do_not_reach_it() -> None:
    ensemble = hydra().with_metadata(labels=("a", "b", "c", "d"), calibration=Calibration((3.0,), 0.5))
    fast, inputs = ensemble.optimize(plans=["loop"]), images(5)
    before, remembered, description = fast.predict(inputs), ensemble.metadata, ensemble.describe()
    assert torch.allclose(before.probs, ensemble.predict(inputs).probs, atol=1e-5)
    for parameter in ensemble.to(torch.bfloat16).parameters():
        parameter.data.zero_()
    ensemble.metadata = Metadata(labels=("w", "x", "y", "z"), calibration=Calibration((0.1,)))
    after = fast.predict(inputs)
    assert torch.equal(after.probs, before.probs)
    assert torch.equal(after.accept, before.accept)
    assert after.class_names == ("a", "b", "c", "d")
    assert (fast.metadata, fast.description) == (remembered, description)
    assert (fast.kind, fast.num_members, fast.num_classes) == ("image", 3, 4)
    assert (fast.device, fast.dtype) == (torch.device("cpu"), torch.float32)


def test_plans_may_come_from_an_iterator() -> None:
    fast = hydra().optimize(plans=iter(["loop"]))
    torch.testing.assert_close(fast(images(2)), hydra()(images(2)))

"""Threads: any number of them ask one model in training mode, and every answer is that of evaluation mode."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import hydra_ensembles as he
from hydra_ensembles.evaluation.evaluate import evaluate
from hydra_ensembles.model.cost import measure_costs
from hydra_ensembles.model.dropping import dropping
from random_ensembles import random_batches, random_ensemble

THREADS, TIMES = 8, 12


def dropping_model(shape: str = "text-post-norm") -> he.Ensemble:
    """Two members that drop half of everything, wherever something can be dropped."""
    plain = random_ensemble(shape, dtype=torch.float32)
    rates = dict.fromkeys(("attention_dropout", "projection_dropout", "activation_dropout", "output_dropout"), 0.5)
    encoder = replace(plain.config.encoder, drop_path=(0.0, 0.5, 0.5), **rates)
    readout = replace(plain.config.readout, dropout=0.5, hidden_dropout=0.5)
    config = replace(plain.config, encoder=encoder, readout=readout, stem=replace(plain.config.stem, dropout=0.5))
    other = random_ensemble(shape, dtype=torch.float32, seed=1)
    members = [he.Ensemble.from_state(config, one.state_dict()) for one in (plain, other)]
    return he.Ensemble.stack(members)


ASKED: dict[str, Callable[[he.Ensemble], Callable[[Any], Tensor]]] = {
    "predict": lambda model: lambda batch: model.predict(batch).member_logits,
    "optimized": lambda model: (lambda fast: lambda batch: fast.predict(batch).member_logits)(
        model.optimize(plans=["batched"])
    ),
    "mc_dropout": lambda model: (lambda view: lambda batch: view.predict(batch).member_logits)(
        he.mc_dropout(model, 0.5, 3).train()
    ),
    "measure_costs": lambda model: (
        lambda batch: torch.tensor(
            [cost.parameters for cost in measure_costs({"m": model}, batch, repeats=1, warmup=0)]
        )
    ),
    "evaluate": lambda model: (
        lambda batch: torch.tensor(
            list(evaluate(model, [(batch, torch.arange(5) % 4)], progress=False).numbers().values())
        )
    ),
}


@pytest.mark.parametrize("asked", ASKED)
def test_threads_get_the_answers_of_evaluation_mode_and_no_flag_changes(asked: str) -> None:
    model = dropping_model()
    batch, _ = random_batches(model, (5,))[0]
    ask = ASKED[asked](model.eval())
    expected = ask(batch)
    ask = ASKED[asked](model.train())
    assert not torch.equal(model(batch), model(batch))  # it drops when it is trained
    model.encoder.layers[0].eval()  # one part is frozen
    flags = {name: part.training for name, part in model.named_modules()}
    wrong, switched, done = [], [], threading.Event()

    def watch() -> None:
        while not done.is_set():
            if {name: part.training for name, part in model.named_modules()} != flags:
                switched.append(True)

    def work(start: threading.Barrier) -> None:
        start.wait()
        for _ in range(TIMES if asked not in ("evaluate", "measure_costs") else 2):
            if not torch.allclose(ask(batch), expected, rtol=1e-4, atol=1e-5, equal_nan=True):
                wrong.append(True)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        start = threading.Barrier(THREADS)
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(work, [start] * THREADS))
    finally:
        done.set()
        watcher.join()
    assert (len(wrong), len(switched)) == (0, 0)
    assert {name: part.training for name, part in model.named_modules()} == flags


def test_random_numbers_of_other_threads_do_not_reach_mc_dropout_nor_the_other_way_round() -> None:
    model = dropping_model()
    batch, _ = random_batches(model, (5,))[0]
    view = he.mc_dropout(model, 0.5, 3, seed=4)
    expected = view.predict(batch).member_logits
    assert view.model.config.encoder.attention_dropout == 0.5  # written out, with the generator
    torch.manual_seed(1)
    state = torch.get_rng_state()
    assert torch.equal(view.predict(batch).member_logits, expected)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.slow
def test_a_model_compiled_in_place_drops_nothing_in_predict_and_goes_on_dropping_in_training() -> None:
    model = dropping_model("image-cls")
    batch, _ = random_batches(model, (5,))[0]
    assert isinstance(batch, Tensor)
    expected = model.eval().predict(batch).member_logits
    torch.compiler.reset()
    model.train().compile(fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for _ in range(2):
            assert not torch.allclose(model(batch.float()), expected, atol=1e-3)
            torch.testing.assert_close(model.predict(batch).member_logits, expected)
    torch.compiler.reset()


def test_what_one_thread_is_told_holds_there_alone_and_ends_with_an_error() -> None:
    model = dropping_model().train()
    batch, _ = random_batches(model, (5,))[0]
    expected = model.predict(batch).member_logits
    with dropping(False), ThreadPoolExecutor(1) as pool:
        assert torch.allclose(model(batch), expected)
        assert not torch.allclose(pool.submit(model, batch).result(), expected, atol=1e-3)
    with pytest.raises(RuntimeError, match="stop"), dropping(False):
        raise RuntimeError("stop")
    assert not torch.allclose(model(batch), expected, atol=1e-3)

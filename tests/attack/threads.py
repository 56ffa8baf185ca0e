"""Eight threads query one model at the same time: each gets the answer of a single thread, and flags do not change."""

import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import hydra_ensembles as he
from hydra_ensembles.model.cost import measure_costs

from .counting import Row, alike, count
from .small import NAMES, batches, dual, hydra, model

CASES = 40
THREADS, ASKED = 8, 12  # threads, and queries per thread
LONG = ("evaluate", "measure_costs")  # queried twice only

Case = tuple[str, str, int]  # what is queried, the mode, and a number to tell cases apart


def run(cases: int, seed: int) -> list[Row]:
    each = max(1, cases // (2 * len(SUBJECTS)))
    return [
        count(f"8 threads, {mode} mode", check, [(name, mode, seed + i) for name in SUBJECTS for i in range(each)])
        for mode in ("evaluation", "training")
    ]


def check(case: Case) -> str:
    """Query from all threads at once; compare answers and flags with those before."""
    name, mode, seed = case
    make, asked = SUBJECTS[name]
    subject = make()
    ask = partial(asked, subject)
    questions = [inputs for inputs, _ in batches("text" if "text" in name else "image", 8 * 3, 3, seed=seed)]
    expected = [ask(inputs) for inputs in questions]
    if isinstance(subject, torch.nn.Module):
        subject.train(mode == "training")
        if mode == "training":  # a part in eval mode stays there
            next(iter(subject.children())).eval()
    flags = _flags(subject)
    wrong: list[str] = []

    def work(own: int) -> None:
        try:
            for turn in range(2 if name in LONG else ASKED):
                which = (own + turn) % len(questions)
                if not alike(ask(questions[which]), expected[which]):
                    wrong.append(f"thread {own}, turn {turn}")
                assert _flags(subject) == flags, "the flags of the model are not what they were"
        except BaseException as error:
            wrong.append(f"thread {own}: {type(error).__name__}: {error}")

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(index,)) for index in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    if any("Error" in one for one in wrong):
        raise AssertionError(f"{len(wrong)} of {THREADS * ASKED}: {wrong[0]}")
    return "other" if wrong else "same"


def _flags(subject: Any) -> list[bool]:
    return [part.training for part in subject.modules()] if isinstance(subject, torch.nn.Module) else []


def _probs(subject: Any, inputs: Any) -> Any:
    return subject.predict(inputs).probs


def _beside_masked(subject: Any, inputs: Any) -> Any:
    """The answer while other threads mask heads of the same model, and do so here once in between."""
    with he.masked(subject, [(0, 1)]):
        subject.predict(inputs)
    return subject.predict(inputs).probs


@torch.no_grad()
def _compared(towers: he.DualEncoder, images: Any) -> Any:
    return towers(images, ["a photo of a cat", "the dog"])


DROPPING = partial(model, seed=8, dropout=0.5)
SUBJECTS: dict[str, tuple[Callable[[], Any], Callable[[Any, Any], Any]]] = {
    "a model": (DROPPING, _probs),
    "a model of texts": (partial(DROPPING, "text"), _probs),
    "a hydra": (partial(hydra, dropout=0.5), _probs),
    "an optimized hydra": (lambda: hydra().optimize(), _probs),
    "an optimized model of texts": (lambda: hydra("text").optimize(), _probs),
    "MC dropout": (lambda: he.mc_dropout(model(seed=9), 0.3, 4), _probs),
    "a zero-shot classifier": (lambda: he.zero_shot(dual(), NAMES), _probs),
    "two towers": (partial(dual, seed=3), _compared),
    "beside masked heads": (DROPPING, lambda one, x: _beside_masked(one, x)),
    "evaluate": (DROPPING, lambda one, x: he.evaluate(one, [(x, torch.arange(3))], progress=False).numbers()),
    "measure_costs": (DROPPING, lambda one, x: measure_costs({"m": one}, x, repeats=1, warmup=0)[0].parameters),
}

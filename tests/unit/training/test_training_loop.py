"""The training loop: selection by validation, data order per member, and bit-exact resuming."""

import os
from dataclasses import replace

import pytest
import torch
from training_cases import Stopping, batches, pair_loader, pairs, same, samples, shuffled, tiny, tiny_dual

from hydra_ensembles.data.dataset import batches as data_batches
from hydra_ensembles.errors import CheckpointError, DataError, DivergedError, HydraWarning
from hydra_ensembles.training import loop
from hydra_ensembles.training.finetune import EnsembleLearner, finetune
from hydra_ensembles.training.loop import Position
from hydra_ensembles.training.recipe import Recipe
from hydra_ensembles.training.text import tune_text
from processes import in_a_child

RECIPE = Recipe(optimizer="sgd", learning_rate=0.05, epochs=4, schedule="constant")
PLAIN = Recipe(optimizer="sgd", learning_rate=0.05, steps=6, schedule="linear")
MEANS = {"gradient_accumulation": 2, "weight_decay": 0.01, "clip_norm": 1.0, "dropout": 0.2, "evaluate_every": 3}
HARD = Recipe(optimizer="adamw", grid=(0.01, 0.001), epochs=2, warmup=2, **MEANS)  # uses all checkpointed state


def train(source, recipe=RECIPE, validation=None, member=None, **options):
    return finetune(tiny() if member is None else member, source, recipe, validation, progress=False, **options)


def stands_at(folder, rate="0.05", member=0, end=".safetensors") -> Position:
    """Where a run ended, or (`.state`) stands."""
    return loop._read_state(folder / f"member-{member}" / f"rate-{rate}{end}")[0]


def scripted(monkeypatch, results):
    """Replace validation by a list of (accuracy, NLL)."""
    waiting = iter(results)
    monkeypatch.setattr(EnsembleLearner, "measure", lambda learner, validation: next(waiting))


def test_the_best_weights_are_returned(monkeypatch):
    data = batches()
    scripted(monkeypatch, [(0.5, 1.0), (0.8, 0.9), (0.8, 0.95), (0.6, 0.5)])
    chosen = train(data, RECIPE, data)
    assert same(chosen, train(data, replace(RECIPE, epochs=2)))
    assert chosen.metadata.metrics == {"validation/accuracy": 0.8, "validation/nll": 0.9}
    assert "validation accuracy 0.8000 at step 12" in chosen.metadata.history[-1]


def test_training_stops_when_patience_runs_out(monkeypatch, tmp_path):
    data = batches()
    scripted(monkeypatch, [(0.5, 1.0), (0.5004, 1.0), (0.5006, 1.0), (0.5006, 1.0), (0.5008, 1.0), (0.9, 1.0)])
    trained = train(data, replace(RECIPE, epochs=10, patience=2, min_delta=5e-4), data, output=tmp_path)
    end = stands_at(tmp_path)
    assert ([one.step for one in end.evaluations], end.waited(5e-4)) == ([6, 12, 18, 24, 30], 2)
    assert trained.metadata.metrics["validation/accuracy"] == 0.5008  # the best, though not better by min_delta


def test_the_measure_is_accuracy_and_nll_of_the_mean_probabilities():
    data = batches(20)
    trained = train(data, replace(RECIPE, epochs=1), data, tiny(members=3))
    images, labels = torch.cat([x for x, _ in data]), torch.cat([y for _, y in data])
    probs = trained(images).double().softmax(-1).mean(0)
    metrics = trained.metadata.metrics
    assert metrics["validation/accuracy"] == pytest.approx((probs.argmax(1) == labels).double().mean().item())
    expected = torch.nn.functional.nll_loss(probs.log(), labels).item()
    assert metrics["validation/nll"] == pytest.approx(expected, rel=1e-6)


def test_the_grid_is_decided_on_validation(monkeypatch, tmp_path):
    data = batches(16)
    recipe = Recipe(optimizer="sgd", grid=(0.1, 0.001, 0.01), epochs=1, schedule="constant")
    # rates are tried in ascending order: equal accuracy is decided by lower NLL, then by the smaller rate
    scripted(monkeypatch, [(0.5, 1.0), (0.7, 0.8), (0.7, 0.8)])
    chosen = train(data, recipe, data, output=tmp_path)
    assert "learning rate 0.01, chosen of 3" in chosen.metadata.history[-1]
    assert same(chosen, train(data, replace(recipe, grid=(), learning_rate=0.01)))
    names = {f"rate-{rate}.safetensors" for rate in recipe.grid}
    assert {path.name for path in (tmp_path / "member-0").glob("*.safetensors")} == names
    scripted(monkeypatch, [(0.5, 1.0), (0.7, 0.8), (0.7, 0.7)])
    assert "learning rate 0.1, chosen of 3" in train(data, recipe, data).metadata.history[-1]


def test_a_rate_that_diverges_is_left_out(tmp_path):
    data = batches()
    recipe = Recipe(optimizer="sgd", grid=(1e-4, 1e4, 1e-2), epochs=3, schedule="constant")
    with pytest.warns(HydraWarning, match="learning rate 10000 diverged"):
        chosen = train(data, recipe, data, output=tmp_path)
    assert "(10000 diverged)" in chosen.metadata.history[-1]
    assert same(chosen, train(data, replace(recipe, grid=(1e-4, 1e-2)), data))
    with pytest.raises(DivergedError, match="100000"), pytest.warns(HydraWarning, match="10000 "):
        train(data, replace(recipe, grid=(1e5, 1e4)), data)


TWICE = replace(RECIPE, epochs=2)


def noisy(images):
    return torch.stack(images) + torch.rand(len(images), 1, 1, 1)


def test_members_and_seeds_have_augmentations_of_their_own():
    source = data_batches(list(zip(*samples(24), strict=True)), noisy, 8)  # without shuffling
    first, second = train(source, TWICE), train(source, TWICE, index=1)
    assert not same(first, second)
    assert not same(first, train(source, replace(TWICE, seed=7)))
    assert same(second, train(source, TWICE, index=1))


class Deadly(Stopping):
    """Kill the process without cleanup."""

    def __iter__(self):
        try:
            yield from super().__iter__()
        except KeyboardInterrupt:
            os._exit(9)


def hard_run(folder, source=None):
    source = Stopping(shuffled(count=40)) if source is None else source
    return train(source, HARD, shuffled(count=16, seed=9), output=folder, checkpoint_every=2, index=1)


def test_a_killed_process_is_resumed(tmp_path):
    """Killed in the second epoch at the second learning rate, then resumed."""
    assert in_a_child(lambda: hard_run(tmp_path, Deadly(shuffled(count=40), 18))) == 9
    assert stands_at(tmp_path, "0.001", 1).step == 6
    assert 0 < stands_at(tmp_path, "0.01", 1, ".state").step < 6
    expected, resumed = hard_run(None), hard_run(tmp_path)
    assert same(expected, resumed)
    assert expected.metadata == resumed.metadata


@pytest.mark.parametrize(
    ("kind", "precision", "stops"),
    [("list", "float32", (1, 3, 7, 12)), ("list", "bf16", (9,)), ("augmented", "float32", (5, 11))],
)
def test_wherever_a_run_stops_it_goes_on_exactly(tmp_path, kind, precision, stops):
    held = batches(12, 4)  # 3 batches
    data = held if kind == "list" else data_batches(list(zip(*samples(12), strict=True)), noisy, 4, shuffle=True)
    recipe = replace(RECIPE, schedule="cosine", dropout=0.1, patience=3, precision=precision)
    expected = train(Stopping(data), recipe, held)
    for fatal in stops:
        options = {"output": tmp_path / str(fatal), "checkpoint_every": 2}
        with pytest.raises(KeyboardInterrupt):
            train(Stopping(data, fatal), recipe, held, **options)
        resumed = train(Stopping(data), recipe, held, **options)
        assert same(expected, resumed)
        assert expected.metadata == resumed.metadata
    assert kind == "list" or (data.epoch, data.stream) == (0, None)


def text_run(folder, fatal=-1, **changes):
    recipe = replace(HARD, grid=(), learning_rate=0.01, epochs=3, evaluate_every=None)
    source, held_out = Stopping(pair_loader(20, 4), fatal), pairs(8, 4, seed=5)
    options = {"output": folder, "progress": False, "checkpoint_every": 1, "train_image_projection": True, **changes}
    return tune_text(tiny_dual(), source, recipe, validation=held_out, **options)


def test_wherever_text_tuning_stops_it_goes_on_exactly(tmp_path):
    whole = text_run(None)
    for folder, fatal in ((tmp_path / "early", 4), (tmp_path / "late", 13)):
        with pytest.raises(KeyboardInterrupt):
            text_run(folder, fatal)
        resumed = text_run(folder)
        assert same(whole, resumed)
        assert whole.text.metadata == resumed.text.metadata
    assert same(whole, text_run(folder, fatal=1))  # finished: only the digest reads a batch
    with pytest.raises(CheckpointError, match="image_projection"):
        text_run(folder, train_image_projection=False)


ADAMW = replace(PLAIN, optimizer="adamw", learning_rate=0.01)


@pytest.fixture
def stopped(tmp_path):
    """The folder of a run stopped after four of six updates."""
    with pytest.raises(KeyboardInterrupt):
        train(Stopping(batches(), 5), ADAMW, output=tmp_path, checkpoint_every=1)
    assert replace(stands_at(tmp_path, "0.01", end=".state"), loss=0.0) == Position(4, 0, 4)
    return tmp_path


@pytest.mark.parametrize(
    ("change", "token"),
    [
        ({"recipe": replace(ADAMW, weight_decay=0.5)}, "recipe"),
        ({"member": tiny(seed=5)}, "model"),
        ({"source": batches(seed=7)}, "train"),
        ({"validation": batches(seed=8)}, "validation"),
    ],
)
def test_the_folder_of_another_run_is_refused(stopped, change, token):
    with pytest.raises(CheckpointError, match=token):
        train(**{"source": Stopping(batches()), "recipe": ADAMW, **change}, output=stopped)


def test_a_damaged_state_or_result_is_noticed(stopped):
    state, result = (stopped / "member-0" / f"rate-0.01.{end}" for end in ("state", "safetensors"))

    def damaged(file):
        whole = file.read_bytes()
        for content in (whole[:-1] + bytes([whole[-1] ^ 1]), whole[:-9], b""):
            file.write_bytes(content)
            with pytest.raises(CheckpointError, match=file.name):
                train(Stopping(batches()), ADAMW, output=stopped)
        file.write_bytes(whole)
        return train(Stopping(batches()), ADAMW, output=stopped)

    expected = train(batches(), ADAMW)
    assert same(expected, damaged(state))
    assert not state.exists()
    assert same(expected, damaged(result))
    assert same(expected, train(Stopping(batches(), 1), ADAMW, output=stopped))  # finished: only the digest reads


def test_a_loss_that_is_not_finite_names_its_batch(tmp_path):
    data = batches()
    data[4][0].fill_(float("inf"))
    with pytest.raises(DataError, match=r"at step 4 \(batch 4 of epoch 0, member 0"):
        train(data, PLAIN, output=tmp_path, checkpoint_every=2)
    assert stands_at(tmp_path, end=".state").step == 4

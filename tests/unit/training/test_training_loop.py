"""The loop: validation decides, a run that was stopped goes on with the same bits, another run is refused."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from training_cases import ShuffledPairs, Stopping, batches, pairs, same, shuffled, tiny, tiny_dual

from hydra_ensembles.errors import CheckpointError, DataError
from hydra_ensembles.training.finetune import EnsembleLearner, finetune
from hydra_ensembles.training.loop import Runtime
from hydra_ensembles.training.recipe import Recipe
from hydra_ensembles.training.text import TextLearner, tune_text
from processes import run_script

RECIPE = Recipe(optimizer="sgd", learning_rate=0.05, epochs=4, schedule="constant")
PLAIN = Recipe(optimizer="sgd", learning_rate=0.05, steps=6, schedule="linear")
HARD = Recipe(  # everything that a checkpoint must remember
    optimizer="adamw",
    grid=(0.01, 0.001),
    epochs=2,
    warmup=2,
    dropout=0.2,
    evaluate_every=3,
    gradient_accumulation=2,
    weight_decay=0.01,
    clip_norm=1.0,
)


def journal(folder, rate="0.05", member=0):
    return json.loads((folder / f"member-{member}" / f"rate-{rate}" / "checkpoint.json").read_text())


def scripted(monkeypatch, results):
    """Replace measuring on validation by a list of (accuracy, NLL)."""
    waiting = iter(results)
    monkeypatch.setattr(EnsembleLearner, "measure", lambda learner, validation: next(waiting))


def test_the_best_weights_are_returned(monkeypatch):
    data = batches()
    scripted(monkeypatch, [(0.5, 1.0), (0.8, 0.9), (0.8, 0.95), (0.6, 0.5)])
    chosen = finetune(tiny(), data, RECIPE, data, progress=False)
    two_epochs = finetune(tiny(), data, dataclasses.replace(RECIPE, epochs=2), progress=False)
    assert same(chosen, two_epochs)
    assert chosen.metadata.metrics == {"validation/accuracy": 0.8, "validation/nll": 0.9}
    assert "validation accuracy 0.8000 at step 12" in chosen.metadata.history[-1]


def test_training_stops_when_patience_runs_out(monkeypatch, tmp_path):
    data = batches()
    scripted(monkeypatch, [(0.5, 1.0), (0.5004, 1.0), (0.5006, 1.0), (0.5006, 1.0), (0.5008, 1.0), (0.9, 1.0)])
    recipe = dataclasses.replace(RECIPE, epochs=10, patience=2, min_delta=5e-4)
    trained = finetune(tiny(), data, recipe, data, output=tmp_path, progress=False)
    assert [one["step"] for one in journal(tmp_path)["evaluations"]] == [6, 12, 18, 24, 30]
    assert trained.metadata.metrics["validation/accuracy"] == 0.5008  # the best, though no improvement by delta
    assert journal(tmp_path)["reference"] == 0.5006


def test_evaluations_come_every_so_many_steps_and_at_the_end(tmp_path):
    data = batches()
    recipe = Recipe(optimizer="sgd", learning_rate=0.05, steps=10, evaluate_every=4)
    finetune(tiny(), data, recipe, data, output=tmp_path, progress=False)
    assert [(one["step"], one["epoch"]) for one in journal(tmp_path)["evaluations"]] == [(4, 0), (8, 1), (10, 1)]


def test_evaluating_more_often_does_not_change_the_training(monkeypatch):
    recipe = Recipe(optimizer="sgd", learning_rate=0.05, steps=9, dropout=0.1)
    plain = finetune(tiny(), shuffled(), recipe, progress=False)
    for every in (1, 3):
        rising = iter(range(100))  # accuracy that only rises: the last weights are the best
        read = lambda learner, validation, rising=rising: (len(list(validation)) and next(rising) / 100, 1.0)  # noqa: E731
        monkeypatch.setattr(EnsembleLearner, "measure", read)
        asked = dataclasses.replace(recipe, evaluate_every=every)
        assert same(plain, finetune(tiny(), shuffled(), asked, shuffled(seed=3), progress=False))


def test_the_measure_is_accuracy_and_nll_of_the_mean_probabilities():
    member, data = tiny(members=3), batches(20)
    trained = finetune(member, data, dataclasses.replace(RECIPE, epochs=1), data, progress=False)
    images, labels = torch.cat([x for x, _ in data]), torch.cat([y for _, y in data])
    probs = trained(images).double().softmax(-1).mean(0)
    metrics = trained.metadata.metrics
    assert metrics["validation/accuracy"] == pytest.approx((probs.argmax(1) == labels).double().mean().item())
    expected = torch.nn.functional.nll_loss(probs.log(), labels).item()
    assert metrics["validation/nll"] == pytest.approx(expected, rel=1e-6)


def test_the_grid_is_decided_on_validation(monkeypatch, tmp_path):
    data = batches()
    recipe = Recipe(optimizer="sgd", grid=(0.1, 0.001, 0.01), epochs=1, schedule="constant")
    # rates are tried from the smallest: equal accuracy goes to the lower NLL, then to the smaller rate
    scripted(monkeypatch, [(0.5, 1.0), (0.7, 0.8), (0.7, 0.8)])
    chosen = finetune(tiny(), data, recipe, data, output=tmp_path, progress=False)
    assert "learning rate 0.01, chosen of 3" in chosen.metadata.history[-1]
    alone = finetune(tiny(), data, dataclasses.replace(recipe, grid=(), learning_rate=0.01), progress=False)
    assert same(chosen, alone)
    folders = {path.name for path in (tmp_path / "member-0").iterdir()}
    assert folders == {"rate-0.1", "rate-0.001", "rate-0.01"}
    scripted(monkeypatch, [(0.5, 1.0), (0.7, 0.8), (0.7, 0.7)])
    better = finetune(tiny(), data, recipe, data, progress=False)
    assert "learning rate 0.1, chosen of 3" in better.metadata.history[-1]


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("kind", ["ensemble", "text"])
def test_validation_leaves_every_part_in_its_mode(kind, broken):
    """Also where someone keeps a part in evaluation mode, and where a batch cannot be read."""
    runtime = Runtime(torch.device("cpu"))
    if kind == "ensemble":
        learner, data = EnsembleLearner(tiny(), RECIPE, runtime), batches()
        frozen = learner.model.stem
    else:
        learner, data = TextLearner(tiny_dual(), RECIPE, runtime, False, 1.0), pairs()
        frozen = learner.model.text.stem
    frozen.eval()
    before = {name: module.training for name, module in learner.model.named_modules()}
    assert set(before.values()) == {True, False}
    if broken:
        with pytest.raises(DataError, match="validation"):
            learner.measure([*data, "no batch"])
    else:
        learner.measure(data)
    assert {name: module.training for name, module in learner.model.named_modules()} == before


def test_a_killed_process_is_resumed(tmp_path):
    """Ended in the middle of an epoch of the second member, and started again."""
    expected = hard_run(None)
    ended = run_script(Path(__file__).with_name("killed_training.py"), tmp_path, 27)
    assert ended.returncode == 9, ended.stderr
    assert not journal(tmp_path, "0.001", 1)["finished"]
    resumed = hard_run(tmp_path)
    assert all(same(one, other) for one, other in zip(expected, resumed, strict=True))
    assert [one.metadata for one in expected] == [one.metadata for one in resumed]


def hard_run(folder, source=None):
    """The training that is killed; also run by `killed_training.py`."""
    source = Stopping(shuffled(count=40)) if source is None else source
    held_out = shuffled(count=16, seed=9)
    return finetune([tiny(), tiny(1)], source, HARD, held_out, output=folder, progress=False, checkpoint_every=2)


@pytest.mark.parametrize(
    ("fatal", "precision"),
    [(1, "float32"), (3, "float32"), (6, "float32"), (7, "float32"), (8, "float32"), (12, "float32"), (9, "fp16")],
)
def test_wherever_a_run_stops_it_goes_on_exactly(tmp_path, fatal, precision):
    data = batches(24)  # 3 batches
    recipe = dataclasses.replace(RECIPE, schedule="cosine", dropout=0.1, patience=3, precision=precision)
    expected = finetune(tiny(), data, recipe, data, progress=False)
    options = {"output": tmp_path, "progress": False, "checkpoint_every": 2}
    with pytest.raises(KeyboardInterrupt):
        finetune(tiny(), Stopping(data, fatal), recipe, data, **options)
    resumed = finetune(tiny(), Stopping(data), recipe, data, **options)
    assert same(expected, resumed)
    assert expected.metadata == resumed.metadata


def text_run(folder, fatal=-1, **changes):
    recipe = dataclasses.replace(HARD, grid=(), learning_rate=0.01, epochs=3, evaluate_every=None)
    source, held_out = Stopping(ShuffledPairs(count=40), fatal), pairs(8, 4, seed=5)
    options = {"output": folder, "progress": False, "checkpoint_every": 1, "train_image_projection": True, **changes}
    return tune_text(tiny_dual(), source, recipe, validation=held_out, **options)


@pytest.mark.parametrize("fatal", [1, 4, 6, 13])
def test_wherever_text_tuning_stops_it_goes_on_exactly(tmp_path, fatal):
    with pytest.raises(KeyboardInterrupt):
        text_run(tmp_path, fatal)
    expected, resumed = text_run(None), text_run(tmp_path)
    assert same(expected, resumed)
    assert expected.text.metadata == resumed.text.metadata
    assert same(expected, text_run(tmp_path, fatal=1))  # finished: only the fingerprint reads a batch
    with pytest.raises(CheckpointError, match="image_projection"):
        text_run(tmp_path, train_image_projection=False)


def test_a_stop_during_validation_loses_nothing(tmp_path):
    data = batches(24)  # 3 batches: validations read 1 (fingerprint), 2 to 4, 5 to 7, 8 to 10
    recipe = Recipe(optimizer="sgd", learning_rate=0.05, steps=8, evaluate_every=3)
    expected = finetune(tiny(), data, recipe, data, progress=False)
    for fatal in (5, 6):
        with pytest.raises(KeyboardInterrupt):
            finetune(tiny(), data, recipe, Stopping(data, fatal), output=tmp_path, progress=False)
    assert same(expected, finetune(tiny(), data, recipe, Stopping(data), output=tmp_path, progress=False))


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_finished_run_is_read_back(tmp_path):
    data = batches()
    first = finetune(tiny(), Stopping(data), PLAIN, data, output=tmp_path, progress=False)
    untouched = files(tmp_path)
    reread = Stopping(data, 1)  # the fingerprint reads one batch, training would read more
    assert same(first, finetune(tiny(), reread, PLAIN, data, output=tmp_path, progress=False))
    assert files(tmp_path) == untouched
    assert untouched == {"member-0/rate-0.05/checkpoint.json", "member-0/rate-0.05/result-6-0.safetensors"}


@pytest.fixture
def stopped(tmp_path):
    """The folder of a run that was stopped after four updates; JSON and safetensors only."""
    with pytest.raises(KeyboardInterrupt):
        finetune(tiny(), Stopping(batches(), 5), PLAIN, output=tmp_path, progress=False, checkpoint_every=1)
    assert {Path(name).suffix for name in files(tmp_path)} == {".json", ".safetensors"}
    assert journal(tmp_path)["position"] == {"step": 4, "epoch": 0, "batch": 4}
    assert not journal(tmp_path)["finished"]
    return tmp_path


@pytest.mark.parametrize(
    ("change", "token"),
    [
        ({"recipe": dataclasses.replace(PLAIN, momentum=0.5)}, "recipe.momentum was 0.9 and is 0.5"),
        ({"member": tiny(seed=5)}, "model"),
        ({"train": Stopping(batches(seed=7))}, "train"),
        ({"train": Stopping(batches(40))}, "train"),
        ({"validation": batches(seed=8)}, "validation"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(stopped, change, token):
    asked = {"member": tiny(), "train": Stopping(batches()), "recipe": PLAIN, "validation": None, **change}
    with pytest.raises(CheckpointError, match=token):
        finetune(**asked, output=stopped, progress=False)


def test_a_damaged_checkpoint_is_named(stopped):
    folder = stopped / "member-0" / "rate-0.05"
    tensors = next(folder.glob("current-*.safetensors"))
    tensors.write_bytes(tensors.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"current-4-0\.safetensors"):
        finetune(tiny(), Stopping(batches()), PLAIN, output=stopped, progress=False)
    (folder / "checkpoint.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"checkpoint\.json"):
        finetune(tiny(), Stopping(batches()), PLAIN, output=stopped, progress=False)


def test_the_last_checkpoint_survives_a_loss_that_is_not_finite(tmp_path):
    data = batches()
    data[4][0].fill_(float("inf"))
    with pytest.raises(DataError, match=r"step 4 .*checkpoint stays in"):
        finetune(tiny(), data, PLAIN, output=tmp_path, progress=False, checkpoint_every=2)
    assert journal(tmp_path)["position"]["step"] == 4
    held = pairs(32, 8)
    held[3][0].fill_(float("nan"))
    recipe = dataclasses.replace(PLAIN, gradient_accumulation=2)
    with pytest.raises(DataError, match=r"step 1 \(batch 3 of epoch 0.*checkpoint stays in"):
        tune_text(tiny_dual(), held, recipe, output=tmp_path / "text", progress=False, checkpoint_every=1)

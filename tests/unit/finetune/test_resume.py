import dataclasses
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from finetune_cases import batches, same, shuffled, tiny
from killed_run import RECIPE, Deadly, run

from hydra_ensembles.errors import CheckpointError, DataError
from hydra_ensembles.training.finetune import finetune
from hydra_ensembles.training.recipe import Recipe

PLAIN = Recipe(optimizer="sgd", learning_rate=0.05, steps=6, schedule="linear")


class StopError(Exception):
    """Stands for whatever ends a run in the middle."""


class Stopping(list):
    """Batches that end the run before the given one is read, counted over all epochs; -1 never does."""

    def __init__(self, data, fatal: int) -> None:
        super().__init__(data)
        self.fatal, self.read = fatal, 0

    def __iter__(self):
        for batch in super().__iter__():
            if self.read == self.fatal:
                raise StopError
            self.read += 1
            yield batch


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_killed_run_ends_as_if_nothing_had_happened(tmp_path):
    """Killed by SIGKILL in the middle of an epoch, once in each of two members, and started again."""
    expected = run(None)
    script = str(Path(__file__).with_name("killed_run.py"))
    for fatal in (7, 30):  # batches read by each process: the fingerprint, those skipped and those trained on
        ended = subprocess.run(
            [sys.executable, script, str(tmp_path), str(fatal)], capture_output=True, text=True, check=False
        )
        assert ended.returncode == -signal.SIGKILL, ended.stderr
        assert list(tmp_path.rglob("checkpoint.json"))
    resumed = run(tmp_path)
    assert all(same(one, other) for one, other in zip(expected, resumed, strict=True))
    assert [one.metadata for one in expected] == [one.metadata for one in resumed]


@pytest.mark.parametrize(
    ("fatal", "precision"),
    [(1, "float32"), (3, "float32"), (6, "float32"), (7, "float32"), (8, "float32"), (12, "float32"), (9, "fp16")],
)
def test_wherever_a_run_stops_it_goes_on_exactly(tmp_path, fatal, precision):
    data = batches(24)  # 3 batches
    recipe = Recipe(
        optimizer="sgd", learning_rate=0.05, epochs=4, schedule="cosine", dropout=0.1, patience=3, precision=precision
    )
    expected = finetune(tiny(), data, recipe, data, progress=False)
    with pytest.raises(StopError):
        finetune(tiny(), Stopping(data, fatal), recipe, data, output=tmp_path, progress=False, checkpoint_every=2)
    resumed = finetune(tiny(), Stopping(data, -1), recipe, data, output=tmp_path, progress=False, checkpoint_every=2)
    assert same(expected, resumed)
    assert expected.metadata == resumed.metadata


def test_a_stop_during_validation_loses_nothing(tmp_path):
    data = batches(24)  # 3 batches: evaluations read 1 (fingerprint), 2 to 4, 5 to 7, 8 to 10
    recipe = Recipe(optimizer="sgd", learning_rate=0.05, steps=8, evaluate_every=3)
    expected = finetune(tiny(), data, recipe, data, progress=False)
    for fatal in (5, 6):
        validation = Stopping(data, fatal)
        with pytest.raises(StopError):
            finetune(tiny(), data, recipe, validation, output=tmp_path, progress=False)
    assert same(expected, finetune(tiny(), data, recipe, Stopping(data, -1), output=tmp_path, progress=False))


def test_a_finished_run_is_read_back(tmp_path):
    data = batches()
    first = finetune(tiny(), Stopping(data, -1), PLAIN, data, output=tmp_path, progress=False)
    untouched = files(tmp_path)
    reread = Stopping(data, 1)  # the fingerprint reads one batch, training would read more
    assert same(first, finetune(tiny(), reread, PLAIN, data, output=tmp_path, progress=False))
    assert files(tmp_path) == untouched
    assert untouched == {"member-0/rate-0.05/checkpoint.json", "member-0/rate-0.05/result-6-0.safetensors"}


def test_checkpoints_are_json_and_safetensors_only(tmp_path):
    with pytest.raises(StopError):
        finetune(tiny(), Stopping(batches(), 5), PLAIN, output=tmp_path, progress=False, checkpoint_every=2)
    assert {Path(name).suffix for name in files(tmp_path)} == {".json", ".safetensors"}
    state = json.loads((tmp_path / "member-0" / "rate-0.05" / "checkpoint.json").read_text())
    assert state["position"] == {"step": 4, "epoch": 0, "batch": 4}
    assert not state["finished"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"recipe": dataclasses.replace(PLAIN, momentum=0.5)}, "recipe.momentum was 0.9 and is 0.5"),
        ({"member": tiny(seed=5)}, "model was"),
        ({"train": Stopping(batches(seed=7), -1)}, "train was"),
        ({"train": Stopping(batches(40), -1)}, "train was"),
        ({"validation": batches(seed=8)}, "validation was None and is"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(tmp_path, change, message):
    with pytest.raises(StopError):
        finetune(tiny(), Stopping(batches(), 4), PLAIN, output=tmp_path, progress=False, checkpoint_every=1)
    asked = {"member": tiny(), "train": Stopping(batches(), -1), "recipe": PLAIN, "validation": None, **change}
    with pytest.raises(CheckpointError, match=message):
        finetune(**asked, output=tmp_path, progress=False)


def test_a_damaged_checkpoint_is_named(tmp_path):
    with pytest.raises(StopError):
        finetune(tiny(), Stopping(batches(), 4), PLAIN, output=tmp_path, progress=False, checkpoint_every=1)
    folder = tmp_path / "member-0" / "rate-0.05"
    tensors = next(folder.glob("current-*.safetensors"))
    content = tensors.read_bytes()
    tensors.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=r"current-3-0\.safetensors cannot be read"):
        finetune(tiny(), Stopping(batches(), -1), PLAIN, output=tmp_path, progress=False)
    (folder / "checkpoint.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"checkpoint\.json cannot be read"):
        finetune(tiny(), batches(), PLAIN, output=tmp_path, progress=False)


def test_the_last_checkpoint_survives_a_loss_that_is_not_finite(tmp_path):
    data = batches()
    data[4][0].fill_(float("inf"))
    with pytest.raises(DataError, match=r"at step 4 .* the last checkpoint stays in"):
        finetune(tiny(), data, PLAIN, output=tmp_path, progress=False, checkpoint_every=2)
    state = json.loads((tmp_path / "member-0" / "rate-0.05" / "checkpoint.json").read_text())
    assert state["position"]["step"] == 4


def test_a_loader_with_its_own_generator_resumes_in_the_same_order(tmp_path):
    def loader(fatal):
        source = Deadly(-1)
        source.loader = shuffled()
        source.loader.generator = source.loader.sampler.generator = torch.Generator().manual_seed(fatal + 10)
        source.sampler = source.loader.sampler  # found, and seeded, through the wrapper
        return source

    expected = finetune(tiny(), loader(0), PLAIN, progress=False)
    assert same(expected, finetune(tiny(), loader(5), PLAIN, progress=False))


def test_the_recipe_of_the_killed_run_exercises_what_it_should():
    assert RECIPE.grid
    assert RECIPE.dropout
    assert RECIPE.gradient_accumulation > 1

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tuning_cases import ShuffledPairs, pairs, same, tiny_dual

from hydra_ensembles.errors import CheckpointError, DataError
from hydra_ensembles.training.recipe import Recipe
from hydra_ensembles.training.text import pair_content, tune_text

RECIPE = Recipe(
    learning_rate=0.01, epochs=3, warmup=2, weight_decay=0.01, clip_norm=1.0, dropout=0.2, gradient_accumulation=2
)


class Deadly(ShuffledPairs):
    """Kills the process instead of raising."""

    def end(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def run(folder: Path | None, fatal: int = -1, source: type[ShuffledPairs] = ShuffledPairs, **changes):
    return tune_text(
        tiny_dual(),
        source(count=40, fatal=fatal),
        dataclasses.replace(RECIPE, **changes),
        validation=pairs(8, 4, seed=5),
        train_image_projection=True,
        output=folder,
        progress=False,
        checkpoint_every=1,
    )


def test_a_killed_run_ends_with_the_same_bits(tmp_path):
    code = "import sys; from pathlib import Path; from test_tune_text_resume import Deadly, run; "
    code += "run(Path(sys.argv[1]), 9, Deadly)"
    tests = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parents[1])])}
    ended = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False, env=environment
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert list(tmp_path.rglob("checkpoint.json"))
    expected, resumed = run(None), run(tmp_path)
    assert same(expected, resumed)
    assert expected.text.metadata == resumed.text.metadata


@pytest.mark.parametrize("fatal", [1, 4, 6, 13])
def test_wherever_a_run_stops_it_goes_on_exactly(tmp_path, fatal):
    with pytest.raises(InterruptedError):
        run(tmp_path, fatal)
    assert same(run(None), run(tmp_path))
    assert same(run(None), run(tmp_path, fatal=1))  # finished: only the fingerprint reads a batch


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    with pytest.raises(InterruptedError):
        run(tmp_path, 8)
    with pytest.raises(CheckpointError, match=r"recipe.momentum was 0.9 and is 0.5"):
        run(tmp_path, momentum=0.5)
    with pytest.raises(CheckpointError, match="image_projection was True and is False"):
        tune_text(
            tiny_dual(),
            ShuffledPairs(40),
            RECIPE,
            validation=pairs(8, 4, seed=5),
            output=tmp_path,
            progress=False,
        )


def test_a_loss_that_is_not_finite_names_its_batch_and_keeps_the_checkpoint(tmp_path):
    data = pairs(32, 8)
    data[3][0].fill_(float("nan"))
    recipe = dataclasses.replace(RECIPE, dropout=None)
    with pytest.raises(DataError, match=r"loss is nan at step 1 \(batch 3 of epoch 0.* the last checkpoint stays in"):
        tune_text(tiny_dual(), data, recipe, output=tmp_path, progress=False, checkpoint_every=1)


def test_the_content_of_pictures_counts():
    image = pytest.importorskip("PIL.Image")
    red, blue = (pair_content(([image.new("RGB", (4, 4), colour)], ["a"]), "train") for colour in ("red", "blue"))
    again = pair_content(([image.new("RGB", (4, 4), "red")], ["a"]), "train")
    assert torch.equal(red["images"], again["images"])
    assert not torch.equal(red["images"], blue["images"])

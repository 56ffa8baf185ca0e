"""`hydra-ensembles calibrate` and `fuse` through their entry point: they write what the functions return."""

import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import hydra_ensembles as he
from architectures import perturbed
from checkpoint_models import same_state
from cli_cases import fail, save_images, small_vit, succeed, vit_flags
from hydra_ensembles import data


@pytest.fixture(scope="module")
def tunings(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder, found = tmp_path_factory.mktemp("tunings"), []
    for seed in range(3):
        model = perturbed(he.convert(small_vit(), labels=["blue", "green", "red"]), seed, 0.02)
        model.save_pretrained(folder / f"seed-{seed}")
        found.append(folder / f"seed-{seed}")
    return found


@pytest.fixture(scope="module")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_images(tmp_path_factory.mktemp("held") / "val", 20, seed=8)


@pytest.mark.parametrize(("flag", "average"), [("0.8", 0.8), ("2", 2)])
def test_fine_tunings_become_one_model(tunings, tmp_path, flag: str, average: float) -> None:
    (tmp_path / "hydra" / ".saving-0").mkdir(parents=True)  # as left by a killed run
    out = succeed("fuse", *tunings, "--average", flag, "--mlp", "separate", "--output", tmp_path / "hydra")
    found = he.load(tmp_path / "hydra")
    assert same_state(found, he.fuse([he.load(one) for one in tunings], mlp="separate", average=average))
    assert found.config.trunk == 2
    assert f"calibrate {shlex.quote(str(tmp_path / 'hydra'))} --id" in out
    assert "fused 3 members" in out


def test_files_of_weights_of_one_timm_model_become_one_model(tmp_path) -> None:
    models = [small_vit() for _ in range(3)]
    for number, model in enumerate(models):
        with torch.no_grad():
            model.head.weight.add_(0.1 * number)
        save_file(model.state_dict(), tmp_path / f"{number}.safetensors")
    first, *others = sorted(tmp_path.glob("*.safetensors"))
    flags = ("--average", 0.8, "--mlp", "separate", "--output", tmp_path / "hydra")
    succeed("fuse", *vit_flags(first), *others, *flags)
    assert same_state(he.load(tmp_path / "hydra"), he.fuse(models, mlp="separate", average=0.8))
    # the second would have timm's weights
    assert "0.safetensors" in fail("fuse", *vit_flags(first), "timm:test_vit", "--output", tmp_path / "new")


def test_a_model_is_calibrated_as_the_function_does(world, held_out, tmp_path) -> None:
    flags = vit_flags(world / "mine.safetensors")
    out = succeed("calibrate", *flags, "--id", held_out, "--share", 0.9, "--no-temperature", "-o", tmp_path / "ready")
    found = he.load(tmp_path / "ready")
    assert found.metadata.calibration.temperature == (1.0,)
    assert found.metadata.calibration.accepted_share == 0.9
    assert found.metadata.familiarity is not None
    assert found.metadata.labels == ("blue", "green", "red")  # from the folders
    base = he.convert(small_vit(), labels=["blue", "green", "red"])
    again = he.calibrate(
        base, data.batches(data.load(held_out), base.metadata.preprocessing, 64), share=0.9, temperature=False
    )
    assert found.metadata.calibration == again.metadata.calibration
    assert found.metadata.history[-1] in out
    assert "preprocessing  size" in out  # for the user to check
    assert "verdict" in succeed("predict", tmp_path / "ready", world / "test", "--format", "csv")


def test_what_cannot_work_is_refused_in_a_line_and_nothing_is_written(tunings, held_out, world, tmp_path) -> None:
    new, model = tmp_path / "new", vit_flags(world / "mine.safetensors")
    for arguments, token in (
        ((*tunings, "--output", new), "average 0.8"),
        ((*tunings, "--average", "1.0", "--output", new), "below 1"),  # as in Python, where 1 is one layer
        ((*tunings, "--average", 0.8, "--output", tunings[0]), "new folder"),
    ):
        assert token in fail("fuse", *arguments)
    for arguments, token in (
        (("--id", held_out, "--output", held_out / "ready"), "among the id data"),
        (("--id", held_out, "--output", world), "new folder"),
    ):
        assert token in fail("calibrate", *model, *arguments)
    assert not new.exists()

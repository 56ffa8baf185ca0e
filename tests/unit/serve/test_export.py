"""Exported files equal the ensemble where this library is not installed; files that differ are not written."""

import io
import json
import os
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from PIL import Image

import hydra_ensembles as he
from checkpoint_models import TOKENIZER
from contract.models import ALL_CASES, variants
from hydra_ensembles.errors import ConversionError
from hydra_ensembles.serve import export as module
from hydra_ensembles.serve.protocol import columns, output_fields
from hydra_ensembles.settings import to_plain
from served_models import inputs_for, pretend, served

SIZES = ((1, 9), (7, 1), (32, 4))  # samples, tokens

# what a user runs; nothing of this library can be imported
CHILD = """
import sys
sys.modules["hydra_ensembles"] = None
import numpy as np
import onnxruntime
file, *batches = sys.argv[1:]
session = onnxruntime.InferenceSession(file)
names = [output.name for output in session.get_outputs()]
run = lambda inputs: dict(zip(names, session.run(None, inputs)))
for batch in batches:
    np.savez(batch + ".answers.npz", **run(dict(np.load(batch))))
"""


SLOW = ("image", "zero-shot, bare", "text, bare", "zero-shot")


@pytest.mark.parametrize(
    "name", [pytest.param("text", marks=pytest.mark.ci), *(pytest.param(one, marks=pytest.mark.slow) for one in SLOW)]
)
def test_the_file_answers_as_the_ensemble_without_this_library(name: str, tmp_path: Path) -> None:
    one = served(name)
    if name == "text":  # also a score that is itself an output
        one = one.with_metadata(calibration=replace(one.metadata.calibration, score="mutual_information"))
    assert one.config.trunk == 1
    assert len({len(member[1]) for member in one.config.heads}) == one.num_members  # uneven after the trunk
    file = he.export(one, tmp_path / "model.onnx", format="onnx")
    batches = []
    for samples, tokens in SIZES:
        inputs = inputs_for(one, samples, seed=samples, tokens=tokens)
        batches.append((inputs, tmp_path / f"{samples}.npz"))
        np.savez(batches[-1][1], **{key: tensor.numpy() for key, tensor in inputs.items()})
    arguments = [str(file), *(str(place) for _, place in batches)]
    subprocess.run([sys.executable, "-W", "ignore", "-c", CHILD, *arguments], check=True, cwd=tmp_path)
    for inputs, place in batches:
        wanted, found = columns(one.predict(inputs)), np.load(f"{place}.answers.npz")
        assert set(found) == set(wanted)
        known = one.metadata.familiarity
        for key, array in wanted.items():
            # feature scores are differences of large numbers: the ensemble's own differ from float64 by 2e-5
            within = 1e-4 if known is not None and key in known.settings.scores else 1e-5
            step = 1 / 40 if key in ("p_value", "familiarity") else 0  # ties with held-out scores may round either way
            np.testing.assert_allclose(found[key], array, rtol=within, atol=within + step, err_msg=key)
            assert found[key].dtype == array.dtype
    about = json.loads((tmp_path / f"{file.name}.json").read_text())
    assert [field["name"] for field in about["outputs"]] == [field.name for field in output_fields(one)]
    assert tuple(about["labels"]) == one.metadata.labels
    assert (tmp_path / f"{file.name}.tokenizer.json").exists() == (one.kind == "text")
    stored = {prop.key: json.loads(prop.value) for prop in onnx.load(file).metadata_props if prop.key in about}
    assert stored == about


# --- everything around the file, with a dummy file that takes no time ---------------------------------------------


def test_every_output_is_compared(monkeypatch, tmp_path: Path) -> None:
    one = served("image")
    (tmp_path / "model.onnx").write_text("earlier")
    for field in output_fields(one):

        def change(found: dict[str, np.ndarray], name: str = field.name) -> dict[str, np.ndarray]:
            wrong = 1 - found[name] if found[name].dtype != np.float32 else found[name] * 1.01 + 0.5
            return {**found, name: wrong.astype(found[name].dtype)}

        pretend(monkeypatch, one, change)
        with pytest.raises(ConversionError, match=field.name.replace("+", r"\+")):
            he.export(one, tmp_path / "model.onnx")
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]
    assert (tmp_path / "model.onnx").read_text() == "earlier"
    pretend(monkeypatch, one, lambda found: {**found, "probs": found["probs"] + 1e-4})
    he.export(one, tmp_path / "model.onnx", tolerance=1e-3)
    assert (tmp_path / "model.onnx").read_text() == "made"


def test_a_file_never_runs_with_the_weights_of_another(monkeypatch, tmp_path: Path) -> None:
    """As for weights beyond 2 GB, which are in a file of their own."""

    def write(_: Any, file: Path, *__: Any) -> None:
        file.write_text("made")
        file.with_name(f"{file.name}{module.DATA}").write_text(content)

    path, content, move = tmp_path / "model.onnx", "first", os.replace
    pretend(monkeypatch, served("image"))
    monkeypatch.setattr(module, "_write", write)
    he.export(served("image"), path)
    content = "second"

    def stop(source: Path, target: Path) -> None:
        if Path(target) == path:
            raise KeyboardInterrupt
        move(source, target)

    with monkeypatch.context() as killed:
        killed.setattr(os, "replace", stop)
        with pytest.raises(KeyboardInterrupt):
            he.export(served("image"), path)
    assert not path.exists()
    he.export(served("image"), path)
    assert (path.read_text(), (tmp_path / "model.onnx.data").read_text()) == ("made", "second")
    pretend(monkeypatch, served("image"))
    he.export(served("image"), path)
    assert not list(tmp_path.glob("*.data"))  # of an earlier export


EXAMPLE = runpy.run_path(str(Path(__file__).resolve().parents[3] / "examples" / "run_exported.py"))


@pytest.mark.parametrize("size", [(40, 30), (19, 90)])
@pytest.mark.parametrize(
    "changes",
    [
        {"interpolation": "bilinear", "mean": (0.5,), "std": (0.25,)},
        {"resize_mode": "squash"},
        {"crop_corner": "floor", "crop_fraction": 0.9},
    ],
)
def test_the_example_prepares_images_as_the_library(changes: dict[str, Any], size: tuple[int, int]) -> None:
    ours = he.ImagePreprocessing(size=(24, 32), **changes)
    noise = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    images = [Image.fromarray(noise), Image.fromarray(noise[:, :, 0]), Image.fromarray(noise[:, :, 0] * np.uint16(257))]
    file = io.BytesIO()
    images[2].save(file, "PPM")
    images.append(Image.open(file))  # 16 bits in Pillow's 32-bit mode
    theirs = EXAMPLE["prepare_images"](images, json.loads(json.dumps(to_plain(ours))))["pixel_values"]
    np.testing.assert_allclose(theirs, ours(images).numpy(), atol=1e-6)


def test_the_example_prepares_texts_as_the_library(tmp_path: Path) -> None:
    ours = he.TextPreprocessing(max_length=3, segments=True, pad_to_max=True, tokenizer=TOKENIZER)
    (tmp_path / "tokenizer.json").write_text(TOKENIZER)
    texts = ["hello", "hello wörld hello wörld", "wörld hello"]
    theirs = EXAMPLE["prepare_texts"](texts, to_plain(ours), tmp_path / "tokenizer.json")
    for name, tensor in ours(texts).items():
        np.testing.assert_array_equal(theirs[name], tensor.numpy())


@pytest.mark.slow  # test_rotary.py covers what differs between them: local windows for any length, in one program
@pytest.mark.parametrize("case", ALL_CASES)
def test_every_architecture_takes_any_number_of_samples_and_tokens(case, tmp_path: Path, monkeypatch) -> None:
    """Checks the graph in memory, without a file; `export` compares it at several sizes."""
    one = he.Ensemble.stack(variants(case)[:2])
    if not one.num_classes:
        pytest.skip("there is no classifier")
    made: list[Any] = []

    def write(program: Any, file: Path, *_: Any) -> None:
        made.append(program.module())
        file.touch()

    monkeypatch.setattr(module, "_write", write)
    monkeypatch.setattr(module, "_runner", lambda _: lambda inputs: module._arrays(made[0](**inputs)))
    assert he.export(one, tmp_path / "model.onnx").exists()

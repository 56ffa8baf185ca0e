"""A cascade where a model is expected: evaluation, tables, archives, servers; stages may read rows differently."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from torch import Tensor

import hydra_ensembles as he
from checkpoint_models import encoder, metadata_for
from hydra_ensembles.cascade import Cascade
from hydra_ensembles.errors import ConfigError, DataError
from hydra_ensembles.model.config import EnsembleConfig, PatchStemConfig, ReadoutConfig
from hydra_ensembles.serve import make_app, score
from random_ensembles import noisy
from serving import opened, picture, settings, talk

CLASSES = 3


def ensemble(grid: tuple[int, int], seed: int) -> he.Ensemble:
    """An image classifier for 4 x 4 patches, with preprocessing for its size."""
    blocks = encoder(2)
    config = EnsembleConfig(PatchStemConfig((4, 4), grid), blocks, ReadoutConfig(num_classes=CLASSES))
    known = metadata_for(config)
    sized = replace(known.preprocessing, size=(4 * grid[0], 4 * grid[1]))
    metadata = replace(known, labels=tuple("abc"), preprocessing=sized, calibration=None)
    return noisy(config, seed, 0.5, metadata)


def pictures(count: int, seed: int = 0) -> list[Image.Image]:
    pixels = np.random.default_rng(seed).integers(0, 256, (count, 20, 16, 3), dtype=np.uint8)
    return [Image.fromarray(one) for one in pixels]


def held_out(rows: int = 400) -> list[Any]:
    labels = torch.arange(100) % CLASSES
    return [(pictures(100, seed), labels) for seed in range(rows // 100)]


def tensors(chain: Cascade, count: int) -> Tensor:
    return chain.metadata.preprocessing(pictures(count, 7))


@pytest.fixture(scope="module")
def alike() -> Cascade:
    """Both stages read the same tensors."""
    first = ensemble((2, 2), 0)
    read = [(first.metadata.preprocessing(images), labels) for images, labels in held_out()]
    return he.cascade([first, ensemble((2, 2), 1)], read, ask=0.5)


@pytest.fixture(scope="module")
def mixed() -> Cascade:
    """Every stage has a size of its own, and the last is a function of pictures."""
    third = ensemble((3, 2), 2)

    def remote(images: list[Image.Image]) -> Tensor:
        assert all(isinstance(image, Image.Image) for image in images)
        return third.predict(images).probs

    return he.cascade([ensemble((2, 2), 0), ensemble((2, 3), 1), remote], held_out(), ask=[0.6, 0.5])


def test_an_evaluation_counts_what_goes_on_and_what_is_declined(alike: Cascade, tmp_path: Path) -> None:
    images, labels = tensors(alike, 40), torch.arange(40) % CLASSES
    batches = [(images[:30], labels[:30]), (images[30:], labels[30:])]
    found = he.evaluate(alike, batches, {"noise": [torch.rand(20, 3, 8, 8)]}, name="chain", output=tmp_path / "kept")
    p = alike.predict(images)
    numbers = found.numbers()
    assert 0 < numbers["asked"] < 1
    assert numbers["asked"] == pytest.approx((p.stage > 0).float().mean().item())
    assert numbers["accuracy"] == pytest.approx((p.label == labels).float().mean().item())
    assert 0 <= numbers["ood.noise.asked"] <= 1
    assert found.interval("asked").low < numbers["asked"]
    again = he.evaluate(alike, batches, {"noise": [torch.rand(20, 3, 8, 8)]}, name="chain", output=tmp_path / "kept")
    assert again.numbers()["asked"] == numbers["asked"]
    optimized = he.evaluate(alike.optimize(), batches, name="chain")
    assert optimized.numbers()["nll"] == pytest.approx(numbers["nll"], rel=1e-4)
    limited = he.evaluate(alike.limited(0.1), batches, name="limited").numbers()
    assert limited["asked"] == pytest.approx(0.1)
    assert limited["selective.accepted"] == pytest.approx(1 - numbers["asked"] + 0.1)
    single = he.evaluate(alike.stages[0], batches, name="first")
    table = str(he.compare([single, he.evaluate(alike, batches, name="chain")]))
    assert "Asked %" in table
    work = alike.describe()
    once = alike.stages[0].describe().multiply_adds
    assert work.multiply_adds == pytest.approx((1 + alike.settings.asked[0]) * once, rel=1e-3)
    he.write_report([found], tmp_path / "report.html")


def test_a_failing_stage_is_counted_as_declined(alike: Cascade) -> None:
    def broken(images: Any) -> Tensor:
        raise TimeoutError("no route")

    chain = Cascade([alike.stages[0], broken], alike.settings)
    batches = [(tensors(alike, 40), torch.arange(40) % CLASSES)]
    with pytest.warns(he.HydraWarning, match="no route"):
        numbers = he.evaluate(chain, batches).numbers()
    assert numbers["asked"] == 0
    assert chain.faults == [0, 1]
    assert numbers["selective.accepted"] == pytest.approx(1 - he.evaluate(alike, batches).numbers()["asked"])


def test_stages_with_other_preprocessing_get_the_rows_themselves(mixed: Cascade, tmp_path: Path) -> None:
    images = pictures(30, 9)
    p = mixed.predict(images)
    assert set(p.stage.tolist()) == {0, 1, 2}
    one = ensemble((3, 2), 2).predict(images).log_probs
    torch.testing.assert_close(p.log_probs[p.stage == 2], one[p.stage == 2])
    fast = mixed.optimize().predict(images)
    assert torch.equal(fast.stage, p.stage)
    numbers = he.evaluate(mixed, [(images, torch.arange(30) % CLASSES)], output=tmp_path / "kept").numbers()
    assert numbers["asked"] == pytest.approx((p.stage > 0).float().mean().item())
    safe = he.calibrate(mixed, held_out(), share=0.8)
    q = safe.predict(images)
    assert q.accept.any()
    assert not q.accept.all()
    with pytest.raises(DataError):
        he.calibrate(ensemble((2, 2), 0), held_out(100))


@pytest.mark.parametrize("which", ["alike", "mixed"])
def test_a_server_answers_with_the_stage(which: str, request: pytest.FixtureRequest) -> None:
    chain = request.getfixturevalue(which)
    files = [("file", (f"{seed}.png", picture(seed))) for seed in range(12)]

    async def conversation(client: Any) -> Any:
        told = await client.get("/v2/models/model")
        tensors = {"name": "pixel_values", "shape": [1, 3, 8, 8], "datatype": "FP32", "data": [0.0] * 192}
        plain = await client.post("/v2/models/model/infer", json={"inputs": [tensors]})
        answer = await client.post("/v1/predict", files=files)
        return told, plain, answer, (await client.get("/metrics")).text

    told, plain, answer, metrics = talk(make_app(chain, settings()), conversation)
    assert 'hydra_stage_faults{model="model",stage="1"} 0.0' in metrics
    assert "stage" in {one["name"] for one in told.json()["outputs"]}
    assert plain.status_code == (200 if which == "alike" else 400)
    assert answer.status_code == 200, answer.text
    p = chain.predict([opened(picture(seed)) for seed in range(12)])
    found = answer.json()["predictions"]
    assert [one["stage"] for one in found] == p.stage.tolist()
    assert [one["label"] for one in found] == p.names()
    assert len(set(p.stage.tolist())) > 1


@pytest.mark.parametrize("which", ["alike", "mixed"])
def test_an_archive_has_a_column_of_stages(which: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    chain, folder = request.getfixturevalue(which), tmp_path / "in"
    folder.mkdir()
    for seed in range(10):
        (folder / f"{seed}.png").write_bytes(picture(seed))
    (folder / "broken.png").write_bytes(b"no picture")
    found = score(chain, folder, tmp_path / "out", progress=False)
    assert (found.rows, found.unreadable) == (11, 1)
    rows = [row for file in sorted((tmp_path / "out" / "rows").iterdir()) for row in pq.read_table(file).to_pylist()]
    p = chain.predict([Image.open(folder / f"{seed}.png") for seed in range(10)])
    assert [row["stage"] for row in rows] == [*p.stage.tolist(), -1]
    about = json.loads((tmp_path / "out" / "about.json").read_text())
    assert "stage" in {one["name"] for one in about["outputs"]}


def test_what_takes_one_ensemble_says_so(alike: Cascade, tmp_path: Path) -> None:
    for work in (lambda: he.export(alike, tmp_path / "x.onnx"), lambda: he.fit_familiarity(alike, [])):
        with pytest.raises(ConfigError, match="stages"):
            work()


def test_a_cascade_comes_from_the_hub(alike: Cascade, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alike.save_pretrained(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: str(tmp_path))
    images = tensors(alike, 20)
    assert torch.equal(he.load("hub:someone/chain").predict(images).probs, alike.predict(images).probs)


def test_the_promise_of_a_cascade_is_certified_by_rows_that_did_not_choose(tmp_path: Path) -> None:
    first, second = ensemble((2, 2), 0), ensemble((2, 2), 1)
    read = first.metadata.preprocessing
    images = [read(pictures(250, seed)) for seed in range(8)]
    rows = [(part, second.predict(part).label) for part in images]  # the second stage is right, the first often not
    chain = he.cascade([first, second], rows, ask=0.8)
    safe = he.calibrate(chain, rows, risk=0.25, familiarity=None)
    assert len(chain.metadata.chosen) == 400
    assert "400 left out" in safe.metadata.history[-1]
    assert safe.promise.rows <= 1600
    p = safe.predict(images[0])
    assert p.accept.any()
    assert (p.label != rows[0][1])[p.accept].float().mean() <= 0.25
    safe.save_pretrained(tmp_path / "safe")
    again = he.load(tmp_path / "safe")
    assert again.promise == safe.promise
    assert again.metadata == safe.metadata
    assert torch.equal(again.predict(images[0]).doubt, p.doubt)
    assert again.optimize().predict(images[0]).calibration == p.calibration != ""
    watch = he.Monitor(again)
    watch.update(p)
    watch.audit(p, rows[0][1])
    assert watch.rows == 250
    assert not watch.alarm
    assert he.evaluate(again, rows[:1]).numbers()["selective.accepted"] == pytest.approx(p.accept.float().mean().item())


def test_calibration_sees_every_answer_whatever_the_limit(alike: Cascade) -> None:
    images = tensors(alike, 40)
    expected = alike.features_and_logits(images)[1]
    torch.testing.assert_close(alike.limited(0.0).features_and_logits(images)[1], expected)
    strict = he.calibrate(alike, [(images, torch.arange(40) % CLASSES)], share=0.2, familiarity="knn")
    torch.testing.assert_close(strict.features_and_logits(images)[1], expected)

    def broken(images: Any) -> Tensor:
        raise TimeoutError("no route")

    with pytest.raises(TimeoutError):
        he.calibrate(Cascade([alike.stages[0], broken], alike.settings), [(images, torch.arange(40) % CLASSES)])


def test_a_function_may_come_first(alike: Cascade) -> None:
    def cheap(images: list[Image.Image]) -> Tensor:
        return alike.stages[0].predict(images).probs

    chain = he.cascade([cheap, alike.stages[1]], held_out(), ask=0.5)
    with pytest.warns(he.HydraWarning, match="no features"):
        safe = he.calibrate(chain, held_out(), share=0.8)
    assert safe.predict(pictures(30, 9)).accept.any()

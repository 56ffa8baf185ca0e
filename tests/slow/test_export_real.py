"""The real DINOv2 as a Hydra with a trunk and uneven heads, calibrated on real images: the ONNX file agrees."""

from pathlib import Path

import numpy as np
import pytest
import torch

import hydra_ensembles as he
from hydra_ensembles.data.loading import load
from hydra_ensembles.serve.protocol import columns
from shared_paths import SHARED, shared
from studies.weights import DINOV2, pretrained

pytestmark = pytest.mark.slow


def test_the_onnx_file_of_dinov2_answers_as_the_ensemble(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    shared(str(DINOV2))
    preprocessing = he.ImagePreprocessing(size=(112, 112))
    base = pretrained(SHARED, "dinov2_vits14", 112, tuple("0123456789")).with_metadata(preprocessing=preprocessing)
    torch.manual_seed(0)
    torch.nn.init.normal_(base.readout.classifier.weight, std=0.05)
    heads = [[(layer, head) for layer in range(8, 12) for head in some] for some in ((0, 1), (2,), (3, 4, 5))]
    hydra = he.fuse([he.prune(base, some) for some in heads])
    assert hydra.config.trunk == 8
    some = load(shared("data/images/cifar10/test.parquet")).select(range(192))
    images, labels = [image for image, _ in some], torch.tensor(some.labels)
    batches = [(preprocessing(images[at : at + 32]), labels[at : at + 32]) for at in range(0, 192, 32)]
    hydra = he.fit_familiarity(hydra, batches[:3], ("mahalanobis", "knn"))
    hydra = he.calibrate(hydra, batches[3:5], share=0.9)

    file = he.export(hydra, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(file)
    names = [one.name for one in session.get_outputs()]
    answers = dict(zip(names, session.run(None, {"pixel_values": batches[5][0].numpy()}), strict=True))
    for name, wanted in columns(hydra.predict(images[160:])).items():
        if name in ("p_value", "familiarity"):
            np.testing.assert_allclose(answers[name], wanted, atol=2 / 64)  # one step of held-out scores
            continue
        size = 1 + np.abs(wanted.astype(np.float64)).max(axis=tuple(range(1, wanted.ndim)), keepdims=True, initial=0.0)
        assert (np.abs(answers[name].astype(np.float64) - wanted) <= 5e-5 * size).all(), name

"""The real DINOv2 as a Hydra with a trunk and uneven heads, calibrated on real images: the ONNX file answers alike."""

import io
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

import hydra_ensembles as he
from hydra_ensembles.serve.outputs import columns
from shared_paths import shared

pytestmark = pytest.mark.slow


def test_the_onnx_file_of_dinov2_answers_as_the_ensemble(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    import timm
    from safetensors.torch import load_file
    from timm.models.vision_transformer import checkpoint_filter_fn

    weights = load_file(shared("weights/dinov2_vits14/model.safetensors"))
    torch.manual_seed(0)
    model = timm.create_model("vit_small_patch14_dinov2", img_size=112, num_classes=10)
    found = {name: tensor.float() for name, tensor in weights.items()}
    model.load_state_dict(checkpoint_filter_fn(found, model), strict=False)
    torch.nn.init.normal_(model.head.weight, std=0.05)
    preprocessing = he.ImagePreprocessing(size=(112, 112))
    base = he.convert(model.eval(), processor=preprocessing, labels=[f"class {label}" for label in range(10)])
    heads = [[(layer, head) for layer in range(8, 12) for head in some] for some in ((0, 1), (2,), (3, 4, 5))]
    hydra = he.fuse([he.prune(base, some) for some in heads])
    assert hydra.config.trunk == 8
    table = pq.read_table(shared("data/images/cifar10/test.parquet")).slice(0, 192)
    images = [Image.open(io.BytesIO(row["bytes"])) for row in table["image"].to_pylist()]
    labels = torch.tensor(table["label"].to_pylist())
    batches = [(preprocessing(images[at : at + 32]), labels[at : at + 32]) for at in range(0, 192, 32)]
    hydra = he.fit_familiarity(hydra, batches[:3], ("mahalanobis", "knn"))
    hydra = he.calibrate(hydra, batches[3:5], share=0.9)

    file = he.export(hydra, tmp_path / "model.onnx", examples=images[160:])
    session = onnxruntime.InferenceSession(file)
    names = [one.name for one in session.get_outputs()]
    answers = dict(zip(names, session.run(None, {"pixel_values": batches[5][0].numpy()}), strict=True))
    for name, wanted in columns(hydra.predict(images[160:])).items():
        if name in ("p_value", "familiarity"):
            np.testing.assert_allclose(answers[name], wanted, atol=2 / 64)  # a step of the held-out scores
            continue
        size = 1 + np.abs(wanted.astype(np.float64)).max(axis=tuple(range(1, wanted.ndim)), keepdims=True, initial=0.0)
        assert (np.abs(answers[name].astype(np.float64) - wanted) <= 1e-5 * size).all(), name

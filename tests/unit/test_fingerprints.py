"""Fingerprints of models and data must not change: journals, run folders and results store them."""

import torch
from torch.utils.data import DataLoader, TensorDataset

from hydra_ensembles import fingerprints
from hydra_ensembles.model.ensemble import Ensemble
from hydra_ensembles.overlap import names_of, sample_keys
from random_ensembles import SHAPES

IMAGES, LABELS = torch.arange(48.0).view(4, 3, 2, 2), torch.tensor([0, 1, 1, 0])
TEXTS = {"input_ids": torch.tensor([[5, 6, 0], [7, 0, 0]]), "attention_mask": torch.tensor([[1, 1, 0], [1, 0, 0]])}


def numbered(shape: str, dtype: torch.dtype) -> Ensemble:
    ensemble = Ensemble(SHAPES[shape])
    with torch.no_grad():
        for parameter in ensemble.parameters():
            parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) / 64)
    return ensemble.to(dtype)


def test_stored_values_are_those_of_earlier_releases() -> None:
    image, text = numbered("image-cls", torch.float32), numbered("text-post-norm", torch.bfloat16)
    odd = {"b": torch.tensor(3.0), "a": torch.arange(6).view(2, 3).T, "none": torch.zeros(0, 2)}
    dataset = TensorDataset(IMAGES, LABELS)
    assert {
        "image": fingerprints.model_fingerprint(image),
        "text": fingerprints.model_fingerprint(text),
        "images": fingerprints.data_fingerprint([(IMAGES[:3], LABELS[:3]), (IMAGES[3:], LABELS[3:])]),
        "texts": fingerprints.data_fingerprint([TEXTS]),
        "tensors": fingerprints.tensors_digest(odd),
        "weights": [
            fingerprints.weights_digest(image.parameters()),
            fingerprints.weights_digest(text.parameters()),
            fingerprints.weights_digest(odd.values()),
        ],
        "list": fingerprints.source_fingerprint([(IMAGES, LABELS)], "train", 0),
        "loader": fingerprints.source_fingerprint(DataLoader(dataset, batch_size=2), "train", 0),
        "mapping": fingerprints.source_fingerprint([{**TEXTS, "labels": torch.tensor([1, 0])}], "train", 0),
        "samples": [name for inputs in (IMAGES[:2], TEXTS) for name in names_of(sample_keys(inputs))],
    } == {
        "image": "77febbf65488e9cddbc1f5282c78676733e209d07812247015e30cdbb562e29f",
        "text": "50004f45b29413f91a9863f714e376b45acfe8bae4b3988f4d87003cf1e5fb6e",
        "images": "756d0fb89b191498622e4429a9dad6b8aeff81ad1c2ccb0d4dae6b5b9b116ebd",
        "texts": "3b13f4de8041676eb9d3a1fe28f8959765d7e3a1973ade31c08ed82f32de345c",
        "tensors": "39c3a08acbcb027180824dec678d09c65ebf02bc7d8557a48d65a98ef5a66004",
        "weights": [1588503437, 3412981283, 114670985],
        "list": "311e0fcd7d99276a",
        "loader": "692e8bc7e5f1ff99",
        "mapping": "3df0548b7fa62109",
        "samples": ["9abcb74914e00000", "38624a8f69100000", "cdb40ee251e796a1", "756f72aef4519099"],
    }
    assert fingerprints.weights_digest([torch.zeros(2, device="meta")]) is None

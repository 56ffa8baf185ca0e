"""Eight-bit weights keep what the ensemble is for: OOD detection of a real pretrained model on real images."""

import pytest
import torch
from torch import Tensor

import hydra_ensembles as he
from hydra_ensembles.data.dataset import subset
from hydra_ensembles.data.loading import load
from hydra_ensembles.metrics.ood import auroc
from hydra_ensembles.preprocessing import ImagePreprocessing
from shared_paths import shared

pytestmark = pytest.mark.slow

PIXELS, FITTED, SAMPLES = 84, 300, 250
OOD = ("dtd10", "fashion_mnist")


def images(name: str, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    drawn = subset(load(shared(f"data/images/{name}"), "test"), count, seed=seed)
    inputs = ImagePreprocessing((PIXELS, PIXELS))([item for item, _ in drawn])
    assert isinstance(inputs, Tensor)
    return inputs, torch.tensor([int(label) for _, label in drawn])


def hydra() -> he.Ensemble:
    """Three members of DINOv2 ViT-S/14 with other heads pruned in the last four layers, and no classifier yet."""
    timm = pytest.importorskip("timm")
    from safetensors.torch import load_file
    from timm.models.vision_transformer import checkpoint_filter_fn

    weights = load_file(shared("weights/dinov2_vits14/model.safetensors"))
    model = timm.create_model("vit_small_patch14_dinov2", img_size=PIXELS, num_classes=0)
    model.load_state_dict(checkpoint_filter_fn({key: value.float() for key, value in weights.items()}, model))
    base = he.convert(model.eval(), num_labels=10)
    heads = [[(layer, (2 * member + layer + i) % 6) for layer in range(8, 12) for i in (0, 1)] for member in range(3)]
    return he.fuse([he.prune(base, one) for one in heads])


def fit_classifier(ensemble: he.Ensemble, features: Tensor, labels: Tensor) -> None:
    """Ridge regression on the features `[M, N, d]` of each member, in place."""
    classifier = ensemble.readout.classifier
    assert classifier is not None
    targets = torch.nn.functional.one_hot(labels, 10).double() - 0.1
    for member, one in enumerate(features.double()):
        mean = one.mean(0)
        x = one - mean
        gram = x.T @ x + 0.1 * x.square().sum() / len(x) * torch.eye(x.shape[1], dtype=torch.float64)
        weight = torch.linalg.solve(gram, x.T @ targets).T * 10  # scores of about the size of logits
        classifier.weight[member].copy_(weight)
        assert classifier.bias is not None
        classifier.bias[member].copy_(-weight @ mean)


@torch.no_grad()
def test_auroc_stays_within_a_fifth_of_a_point() -> None:
    ensemble = hydra()
    inputs, labels = images("cifar10", FITTED + SAMPLES)
    features = torch.cat([ensemble.features(part) for part in inputs[:FITTED].split(50)], dim=1)
    fit_classifier(ensemble, features, labels[:FITTED])
    fast, small = ensemble.optimize(plans=["loop"]), ensemble.optimize(weights="int8")
    assert small.memory_bytes < 0.33 * fast.memory_bytes

    def uncertainty(runner: object, part: Tensor) -> tuple[Tensor, Tensor]:
        predictions = [runner.predict(some) for some in part.split(50)]  # type: ignore[attr-defined]
        return torch.cat([p.entropy for p in predictions]), torch.cat([p.label for p in predictions])

    sets = {"id": inputs[FITTED:], **{name: images(name, SAMPLES)[0] for name in OOD}}
    exact = {name: uncertainty(fast, part) for name, part in sets.items()}
    quantised = {name: uncertainty(small, part) for name, part in sets.items()}
    assert (exact["id"][1] == labels[FITTED:]).float().mean() > 0.6  # the model does know the classes
    for name in OOD:
        before, after = auroc(exact["id"][0], exact[name][0]), auroc(quantised["id"][0], quantised[name][0])
        print(f"{name}: AUROC {100 * before:.2f} in float32, {100 * after:.2f} in int8")
        assert before > 0.65
        assert abs(before - after) <= 0.002
    agreement = (exact["id"][1] == quantised["id"][1]).float().mean()
    print(f"label agreement {100 * float(agreement):.1f}%")
    assert agreement > 0.97

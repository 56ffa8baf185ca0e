"""Head vectors against a hand-written forward pass; distances of centroids against scipy."""

import numpy as np
import pytest
import torch
from scipy.spatial.distance import mahalanobis
from torch.nn import functional as F

from circuit_models import random_problem
from hydra_ensembles.heads.masking import attention_of
from hydra_ensembles.heads.ranking import Head
from hydra_ensembles.heads.vectors import centroid_distance, head_vectors
from hydra_ensembles.prune import prune


@pytest.mark.parametrize(("shape", "layer"), [("image-cls", 1), ("text-post-norm", 1), ("image-map-rms", 3)])
def test_vectors_sum_up_to_the_attention_of_the_class_token_or_of_the_query(shape: str, layer: int) -> None:
    """Projected and summed, they equal the attention sublayer's output for the tokens that the readout uses."""
    problem = random_problem(shape)
    model = problem.model
    seen: list[torch.Tensor] = []
    handle = attention_of(model, layer).register_forward_hook(lambda _, __, output: seen.append(output[0, :, 0]))
    for inputs, _ in problem.id_batches:
        model(model.prepare(inputs))
    handle.remove()
    found = head_vectors(model, problem.id_batches, [layer])
    attention = attention_of(model, layer)
    summed = sum(
        found[Head(layer, head)] @ attention.out[head].float() for head in range(model.config.head_counts[layer])
    )
    summed = summed if attention.out_bias is None else summed + attention.out_bias[0].float()
    summed = summed if attention.scale is None else summed * attention.scale[0].float()
    torch.testing.assert_close(summed, torch.cat(seen).float(), rtol=1e-4, atol=1e-5)


def test_without_a_class_token_padding_does_not_count() -> None:
    problem = random_problem("text-mean-post-norm")
    inputs, labels = problem.id_batches[0]
    longer = {key: F.pad(one, (0, 1), value=1 if key == "input_ids" else 0) for key, one in inputs.items()}
    one, other = (head_vectors(problem.model, [(each, labels)]) for each in (inputs, longer))
    for head, vectors in one.items():
        torch.testing.assert_close(vectors, other[head], rtol=1e-4, atol=1e-5)


def test_heads_that_are_pruned_are_not_there_and_layers_are_as_asked() -> None:
    problem = random_problem()
    last = problem.model.num_layers - 1
    pruned = prune(problem.model, [(last, 0), (0, 1)])
    assert set(head_vectors(pruned, problem.id_batches)) == {Head(last, head) for head in (1, 2, 3)}
    both = head_vectors(pruned, problem.id_batches, [0, last])
    assert {head.layer for head in both} == {0, last}
    assert Head(0, 1) not in both
    assert both[Head(0, 0)].shape == (11, problem.model.config.encoder.head_dim)


def test_distances_are_those_of_scipy() -> None:
    generator = torch.Generator().manual_seed(0)
    inside, outside = (torch.randn(40, 5, generator=generator) * torch.arange(1, 6) + shift for shift in (0.0, 2.0))
    found = centroid_distance(inside, outside)
    gap = outside.double().mean(0) - inside.double().mean(0)
    assert found.euclidean == pytest.approx(float(gap.norm()))
    inverse = np.linalg.inv(np.cov(inside.double().numpy().T))
    expected = mahalanobis(inside.double().mean(0).numpy(), outside.double().mean(0).numpy(), inverse)
    assert found.mahalanobis == pytest.approx(expected, rel=1e-4)

"""Fingerprints change with every bit that counts, and with nothing else."""

import pytest
import torch
from random_ensembles import random_batches, random_ensemble, without_heads

from hydra_ensembles.errors import DataError
from hydra_ensembles.heads.ranking import data_fingerprint, model_fingerprint
from hydra_ensembles.model.config import Sharing


class TestModel:
    def test_same_weights_same_name(self) -> None:
        ensemble = random_ensemble()
        copy = ensemble.member(0).with_metadata(source="elsewhere").train().requires_grad_(False)
        assert model_fingerprint(copy) == model_fingerprint(ensemble)
        assert len(model_fingerprint(ensemble)) == 64

    def test_every_parameter_counts(self) -> None:
        ensemble = random_ensemble("text-post-norm")
        seen = {model_fingerprint(ensemble)}
        for count, parameter in enumerate(ensemble.parameters(), start=2):
            with torch.no_grad():
                parameter.view(-1)[-1] += 1e-12
            seen.add(model_fingerprint(ensemble))
            assert len(seen) == count

    def test_dtype_and_configuration_count(self) -> None:
        ensemble = random_ensemble()
        names = [
            model_fingerprint(ensemble),
            model_fingerprint(ensemble.member(0).float()),
            model_fingerprint(ensemble.member(0).bfloat16()),
            model_fingerprint(without_heads(ensemble, {(0, head) for head in range(4)})),
            model_fingerprint(random_ensemble(sharing=Sharing(mlp=True))),
        ]
        assert len(set(names)) == len(names)


class TestData:
    @pytest.mark.parametrize("shape", ["image-cls", "text-post-norm"])
    def test_the_cut_into_batches_does_not_count(self, shape: str) -> None:
        (inputs, labels), *_ = random_batches(random_ensemble(shape), (6,))

        def cut(size: int) -> list[object]:
            def part(tensor: torch.Tensor, start: int) -> torch.Tensor:
                return tensor[start : start + size]

            return [
                (
                    part(inputs, start)
                    if isinstance(inputs, torch.Tensor)
                    else {name: part(tensor, start) for name, tensor in inputs.items()},
                    part(labels, start),
                )
                for start in range(0, 6, size)
            ]

        assert len({data_fingerprint(cut(size)) for size in (1, 2, 4, 6)}) == 1

    def test_what_counts(self) -> None:
        (images, labels), *_ = random_batches(random_ensemble(), (6,))
        assert isinstance(images, torch.Tensor)
        changed = images.clone()
        changed[3, 0, 0, 0] += 1e-9
        names = [
            data_fingerprint([(images, labels)]),
            data_fingerprint([(changed, labels)]),
            data_fingerprint([(images, (labels + 1) % 4)]),
            data_fingerprint([(images.flip(0), labels.flip(0))]),
            data_fingerprint([(images[:5], labels[:5])]),
            data_fingerprint([(images.float(), labels)]),
            data_fingerprint([(images.transpose(2, 3), labels)]),
            data_fingerprint([(images.reshape(6, 3, 6, 4), labels)]),
            data_fingerprint([images]),
            data_fingerprint([{"pixel_values": images, "labels": labels}]),
        ]
        assert len(set(names)) == len(names)

    def test_strides_do_not_count(self) -> None:
        (images, labels), *_ = random_batches(random_ensemble(), (6,))
        assert isinstance(images, torch.Tensor)
        last = images.to(memory_format=torch.channels_last)
        assert data_fingerprint([(last, labels)]) == data_fingerprint([(images, labels)])

    def test_no_data(self) -> None:
        with pytest.raises(DataError, match="validation data has no batches"):
            data_fingerprint([], "validation data")

import pytest
import torch
from torch import nn

from hydra_ensembles.digest import digest, digest_batches, require_other_samples, row_digests, source_digest
from hydra_ensembles.errors import ConfigError, DataError, HydraWarning

IMAGES = torch.rand(6, 3, 40, 40, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(6)


def test_equal_values_have_equal_digests_and_others_do_not() -> None:
    values = [None, 1, 1.0, True, "1", b"1", [1, [2]], [[1], 2], {"a": 1}]
    values += [torch.ones(2), torch.ones(2, 1), IMAGES.bfloat16()]
    assert len({digest(value) for value in values}) == len(values)
    assert digest({"a": 1, "b": (2,)}) == digest({"b": [2], "a": 1})
    assert digest(IMAGES) == digest(IMAGES.transpose(1, 2).contiguous().transpose(1, 2))
    model = nn.Linear(2, 2)
    before = digest(model)
    with torch.no_grad():
        model.bias[1] += 1e-6
    assert digest(model) != before
    with pytest.raises(ConfigError, match="function"):
        digest({"a": lambda: 1})


def test_data_are_recognised() -> None:
    parts = list(zip(IMAGES.split(4), LABELS.split(4), strict=True))
    assert digest_batches(parts) != digest_batches(list(zip(IMAGES.split(4), LABELS.flip(0).split(4), strict=True)))
    assert source_digest(parts, "parts", 0) != source_digest([*parts, parts[1]], "parts", 0)  # the length counts


def test_samples_are_recognised_in_any_order_and_texts_whatever_their_padding() -> None:
    assert set(row_digests(IMAGES)) == set(row_digests(IMAGES.flip(0)))
    assert len(set(row_digests(IMAGES))) == 6
    ids, mask = torch.tensor([[5, 6, 0, 0], [7, 8, 9, 1]]), torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    short = {"input_ids": ids[:1, :2], "attention_mask": mask[:1, :2]}
    assert row_digests({"input_ids": ids, "attention_mask": mask})[0] == row_digests(short)[0]


def test_id_data_given_as_ood_are_refused() -> None:
    inside, outside = row_digests(IMAGES), row_digests(IMAGES + 1)
    require_other_samples("id", inside, {"far": outside})
    with pytest.raises(DataError, match="far"):
        require_other_samples("id", inside, {"far": inside[:3]})
    with pytest.raises(DataError, match="near"):
        require_other_samples("id", inside, {"near": outside, "far": outside[::-1]})
    with pytest.warns(HydraWarning, match="1 of 7"):
        require_other_samples("id", inside, {"far": [*outside, inside[0]]})

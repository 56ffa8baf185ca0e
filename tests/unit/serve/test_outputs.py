"""Named outputs equal those of a `Prediction` for every kind of ensemble, and the table describes them."""

import numpy as np
import pytest
import torch

from checkpoint_models import ensemble, map_pooled
from hydra_ensembles.errors import ConfigError
from hydra_ensembles.prediction import Prediction
from hydra_ensembles.serve.outputs import REASON_WORDS, Answering, columns, input_fields, output_fields
from served_models import SCORES, inputs_for, served

KINDS = ("image", "text", "zero-shot")


@pytest.mark.parametrize("bare", ["", ", bare"])
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_are_those_of_the_prediction(kind: str, bare: str) -> None:
    one = served(kind + bare)
    inputs = inputs_for(one, 9)
    p, table = one.predict(inputs), {field.name: field for field in output_fields(one)}
    with torch.no_grad():
        told = Answering(one)(**inputs)
    for found in (columns(p), {name: tensor.numpy() for name, tensor in told.items()}):
        assert list(found) == list(table)
        for name, array in found.items():
            assert (array.shape, str(array.dtype)) == ((9, *table[name].shape), table[name].dtype)
            np.testing.assert_array_equal(array, expected(p, name))
    names = set(SCORES[kind]) | {"accept", "reason", "familiarity", "p_value"}
    assert not names & table.keys() if bare else names <= table.keys()
    assert [field.name for field in input_fields(one)] == list(inputs)


def test_outputs_do_not_follow_the_usual_type_of_tensors() -> None:
    one = served("image")
    fields = output_fields(one)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert output_fields(one) == fields
    finally:
        torch.set_default_dtype(torch.float32)


def expected(p: Prediction, name: str) -> np.ndarray:
    if name == "reason":
        return np.array([REASON_WORDS.index(reason or "") for reason in p.reason])
    if name == "member_logits":
        return p.member_logits.numpy().swapaxes(0, 1)
    if p.unfamiliarity is not None and name in p.unfamiliarity.score_names:
        return p.score(name).numpy()
    methods = {"score": p.score, "p_value": p.p_value}
    return (methods[name]() if name in methods else getattr(p, name)).numpy()


def test_what_a_tokenizer_does_not_give_is_no_input_and_without_a_classifier_there_are_no_outputs() -> None:
    one = served("text")
    assert len(input_fields(one.with_metadata(preprocessing=None))) == 3
    plain = one.metadata.preprocessing.__class__(max_length=9, attention_mask=False, segments=False)
    assert [field.name for field in input_fields(one.with_metadata(preprocessing=plain))] == ["input_ids"]

    with pytest.raises(ConfigError, match="classifier"):
        output_fields(ensemble(map_pooled()))

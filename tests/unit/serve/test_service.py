"""Requests become the rows that `predict` would see, within limits; answers and outputs equal those of `predict`."""

import copy
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from checkpoint_models import ensemble, map_pooled
from hydra_ensembles.errors import ConfigError, HydraError, RequestError
from hydra_ensembles.prediction import Prediction
from hydra_ensembles.preprocessing import TextPreprocessing
from hydra_ensembles.serve.app import make_app
from hydra_ensembles.serve.outputs import REASON_WORDS, Answering, columns, input_fields, output_fields
from hydra_ensembles.serve.service import NEAREST, Service
from served_models import SCORES, inputs_for, served
from serving import POSTSCRIPT, picture, png, settings

TEXTS = ["hello", "hello wörld", "wörld " * 7, "hello hello hello"]


def service(kind: str, **changes: Any) -> Service:
    return Service(served(kind), settings(**changes))


def unmasked() -> Service:
    """The text model without a mask input, calibration kept: the tokens of these texts stay the same."""
    known = served("text").metadata
    plain = TextPreprocessing(max_length=9, attention_mask=False, tokenizer=known.preprocessing.tokenizer)
    kept = {"calibration": known.calibration, "familiarity": known.familiarity, "metrics": {}}
    return Service(served("text").with_metadata(preprocessing=plain, **kept), settings())


def same(answers: list[Any], expected: dict[str, Any]) -> None:
    assert all(list(answer) == list(expected) for answer in answers)
    for name, column in expected.items():
        near = 0.03 if name in ("p_value", "familiarity") else 2e-4  # they jump at held-out scores
        np.testing.assert_allclose([answer[name] for answer in answers], column, rtol=2e-4, atol=near, err_msg=name)


def test_what_the_model_would_warn_of_is_told_where_a_row_is_read_and_nowhere_else() -> None:
    """A warning in a model thread would print input values to standard error and never be freed."""
    served_images = service("image")
    (answer,) = served_images.workers()
    rows = served_images.tensors({"pixel_values": torch.rand(3, 3, 8, 8) * 255}, nearest=True)
    with warnings.catch_warnings(record=True, action="always") as said:
        assert len(answer(rows)) == 3
    assert said == []
    assert all("like pixels that are not normalised" in row.notes[0] for row in rows)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::UserWarning")  # inductor's advice, and its split softmax
@pytest.mark.parametrize("kind", ["image", "text"])
def test_answers_on_a_gpu_are_those_of_the_cpu(kind: str) -> None:
    known = served(kind)
    one = Service(copy.deepcopy(known).to("cuda"), settings(warm_up=True, compile=True))
    (run,) = one.workers()
    inputs = inputs_for(known, 7)
    same(run(one.tensors(inputs)), columns(known.predict(inputs)))
    assert run(one.tensors(inputs, nearest=True))[0][NEAREST] >= -1


def test_texts_are_padded_to_few_lengths_and_those_without_a_mask_to_none() -> None:
    one, alone = service("text"), unmasked()
    assert one.lengths() == [9]
    assert {row.shape for row in one.texts(TEXTS)} == {row.shape for row in one.examples()}
    assert alone.lengths() == []
    assert [row.inputs["input_ids"].shape[0] for row in alone.texts(TEXTS)] == [1, 2, 7, 3]
    same(alone.workers()[0](alone.texts(TEXTS[:1])), columns(served("text").predict(TEXTS[:1])))


def test_rows_of_several_shapes_keep_their_order() -> None:
    one = unmasked()
    (run,) = one.workers()
    expected = [columns(served("text").predict([text])) for text in TEXTS] * 2
    for answer, wanted in zip(run(one.texts([*TEXTS, *TEXTS])), expected, strict=True):
        np.testing.assert_allclose(answer["member_logits"], wanted["member_logits"][0], rtol=1e-3, atol=1e-3)


def test_the_nearest_class_is_that_of_the_features() -> None:
    one = service("image")
    known = one.ensemble.metadata.familiarity
    inputs = inputs_for(one.ensemble, 12)
    inputs["pixel_values"] *= torch.arange(1, 13)[:, None, None, None]
    (run,) = one.workers()
    found = [answer[NEAREST] for answer in run(one.tensors(inputs, nearest=True))]
    features, _ = one.ensemble.features_and_logits(**inputs)  # [M, B, d]
    statistics = {name: known.state[f"{SCORES['image'][0]}.{name}"] for name in ("mean", "whiten", "classes")}
    unit = torch.nn.functional.normalize(features, dim=-1)
    white = (unit - statistics["mean"][:, None]) @ statistics["whiten"]  # [M, B, d]
    squared = (white[:, :, None] - statistics["classes"][:, None]).square().sum(dim=(0, 3))  # [B, C]
    assert found == squared.argmin(dim=-1).tolist()
    assert len(set(found)) > 1
    bare = service("image, bare")
    assert bare.workers()[0](bare.tensors(inputs_for(bare.ensemble, 1), nearest=True))[0][NEAREST] == -1


@pytest.mark.parametrize(
    ("content", "status", "token"),
    [
        (png(9_000, 9_000), 413, "9000 x 9000"),
        (png(1, 5000, 0, bytes(10_000)), 413, "1 x 5000"),  # resized for the model, it would take gigabytes
        (picture(format="JPEG") + b"\xff\xda\0\x08" * 200 + bytes(10**7), 413, "passes"),
        (b"not an image", 415, "PNG"),
        (POSTSCRIPT, 415, "PNG"),
        (png(100, 100), 400, "image 0"),
    ],
)
def test_images_that_are_too_large_or_none_are_refused(content, status: int, token: str, monkeypatch) -> None:
    if status == 413:  # judged by their headers
        monkeypatch.setattr("hydra_ensembles.serve.service.decode_image", lambda *_: pytest.fail("decoded"))
    with pytest.raises(HydraError, match=token) as refused:
        service("image").images([content])
    assert getattr(refused.value, "status", 400) == status


def test_many_images_have_one_limit_together_and_so_has_their_number() -> None:
    narrow, small = service("image", max_pixels=0.001), [picture()] * 4  # 320 pixels per image
    assert len(narrow.images(small[:3])) == 3
    with pytest.raises(RequestError, match="image 3") as refused:
        narrow.images(small)
    assert refused.value.status == 413
    few = service("text", max_queue=4, max_batch=4)
    for read, given in ((few.texts, ["hello"] * 5), (few.tensors, inputs_for(served("text"), 5))):
        with pytest.raises(RequestError, match="5 samples") as refused:
            read(given)
        assert refused.value.status == 413


def test_long_and_empty_texts_the_wrong_kind_and_tensors_that_do_not_fit_are_refused() -> None:
    with pytest.raises(RequestError, match="11 characters") as refused:
        service("text", max_characters=10).texts(["hello wörld"])
    assert refused.value.status == 413
    images, texts = service("image"), service("text")
    for read, given, token in (
        (images.texts, ["hello"], "reads images"),
        (texts.images, [picture()], "reads texts"),
        (images.tensors, {"pixel_values": torch.zeros(1, 3, 16, 16)}, r"\[8, 8\]"),
        (images.tensors, {"pixel_values": torch.full((1, 3, 8, 8), torch.nan)}, "NaN"),
        (texts.tensors, {"input_ids": torch.full((1, 3), 99)}, "vocabulary"),
        (make_app, torch.nn.Linear(2, 2), "Linear"),
    ):
        with pytest.raises(HydraError, match=token):
            read(given)  # type: ignore[operator]


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


def expected(p: Prediction, name: str) -> np.ndarray:
    if name == "reason":
        return np.array([REASON_WORDS.index(reason or "") for reason in p.reason])
    if name == "member_logits":
        return p.member_logits.numpy().swapaxes(0, 1)
    if p.unfamiliarity is not None and name in p.unfamiliarity.score_names:
        return p.score(name).numpy()
    methods = {"score": p.score, "p_value": p.p_value}
    return (methods[name]() if name in methods else getattr(p, name)).numpy()


def test_outputs_do_not_follow_the_usual_type_of_tensors() -> None:
    one = served("image")
    fields = output_fields(one)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert output_fields(one) == fields
    finally:
        torch.set_default_dtype(torch.float32)


def test_what_a_tokenizer_does_not_give_is_no_input_and_without_a_classifier_there_are_no_outputs() -> None:
    one = served("text")
    assert len(input_fields(one.with_metadata(preprocessing=None))) == 3
    plain = one.metadata.preprocessing.__class__(max_length=9, attention_mask=False, segments=False)
    assert [field.name for field in input_fields(one.with_metadata(preprocessing=plain))] == ["input_ids"]

    with pytest.raises(ConfigError, match="classifier"):
        output_fields(ensemble(map_pooled()))

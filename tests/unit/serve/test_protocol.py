"""The Open Inference Protocol as a standard Triton client uses it, and refusals of malformed requests."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hydra_ensembles.serve.app import make_app
from hydra_ensembles.serve.batcher import Runner
from hydra_ensembles.serve.protocol import (
    HEADER,
    NAMES,
    Served,
    asked_outputs,
    columns,
    output_fields,
    read_request,
    write_answer,
)
from served_models import inputs_for, served
from serving import listening, settings

triton = pytest.importorskip("tritonclient.http")
errors = pytest.importorskip("tritonclient.utils")

KEY = "correct horse"
HEADERS = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def images() -> Iterator[Any]:
    yield from connected("image")


@pytest.fixture(scope="module")
def texts() -> Iterator[Any]:
    yield from connected("text")


def connected(kind: str) -> Iterator[Any]:
    with listening(make_app(served(kind), settings(name=f"my-{kind}"), key=KEY)) as port:
        client = triton.InferenceServerClient(f"127.0.0.1:{port}")
        yield client
        client.close()


def tensor(name: str, array: Any, binary: bool) -> Any:
    datatype = "BYTES" if array.dtype == object else NAMES[str(array.dtype)]
    given = triton.InferInput(name, list(array.shape), datatype)
    given.set_data_from_numpy(array, binary_data=binary)
    return given


def check(result: Any, expected: dict[str, Any], names: list[str]) -> None:
    for name in names:
        found = result.as_numpy(name)
        assert found.dtype == expected[name].dtype
        near = 0.03 if name in ("p_value", "familiarity") else 2e-4
        np.testing.assert_allclose(found, expected[name], rtol=2e-4, atol=near, err_msg=name)


def test_health_and_metadata(images: Any) -> None:
    assert images.is_server_live()
    assert images.is_server_ready()
    assert images.is_model_ready("my-image", "1")
    found = images.get_model_metadata("my-image", headers=dict(HEADERS))
    assert [(one["name"], one["shape"]) for one in found["inputs"]] == [("pixel_values", [-1, 3, 8, 8])]
    fields = output_fields(served("image"))
    assert [(one["name"], one["shape"]) for one in found["outputs"]] == [
        (field.name, [-1, *field.shape]) for field in fields
    ]
    assert found["parameters"]["labels"] == list(served("image").metadata.labels)
    assert found["parameters"]["reasons"] == ["", "unsure", "unfamiliar", "alarm"]


@pytest.mark.parametrize("binary", [True, False])
def test_tensors_of_images_and_an_abstention_is_an_answer(images: Any, binary: bool) -> None:
    pixels = inputs_for(served("image"), 5)["pixel_values"]
    pixels[3:] *= 50
    expected = columns(served("image").predict(pixels))
    assert not expected["accept"].all()
    given = [tensor("pixel_values", pixels.numpy(), binary)]
    every = images.infer("my-image", given, headers=dict(HEADERS), request_id="seven")
    assert every.get_response()["id"] == "seven"
    check(every, expected, list(expected))
    asked = [triton.InferRequestedOutput(name, binary_data=binary) for name in ("probs", "accept", "label")]
    some = images.infer("my-image", given, outputs=asked, headers=dict(HEADERS), model_version="1")
    assert [one["name"] for one in some.get_response()["outputs"]] == ["probs", "accept", "label"]
    check(some, expected, ["probs", "accept", "label"])


@pytest.mark.parametrize("binary", [True, False])
def test_tokens_of_texts(texts: Any, binary: bool) -> None:
    inputs = inputs_for(served("text"), 3)
    expected = columns(served("text").predict(inputs))
    given = [tensor(name, one.numpy(), binary) for name, one in inputs.items()]
    check(texts.infer("my-text", given, headers=dict(HEADERS)), expected, list(expected))


def test_errors_reach_the_client_as_its_own(images: Any) -> None:
    pixels = inputs_for(served("image"), 1)["pixel_values"].numpy()
    right, unknown = tensor("pixel_values", pixels, True), [triton.InferRequestedOutput("logits")]
    for model, given, options, token in (
        ("my-image", tensor("pixel_values", pixels[:, :, :4], True), {}, "8"),
        ("my-image", tensor("pixels", pixels, True), {}, "pixel_values"),
        ("my-image", right, {"headers": {}}, "key"),
        ("my-image", right, {"outputs": unknown}, "member_logits"),
        ("my-image", tensor("image", np.array(["x"], dtype=object), False), {}, "BYTES"),
    ):
        with pytest.raises(errors.InferenceServerException, match=token) as refused:
            images.infer(model, [given], **{"headers": dict(HEADERS), **options})
        assert refused.value.status().startswith("4")


ONE = {"name": "a", "shape": [2], "datatype": "FP32", "data": [1, 2.5]}


def body(**changes: Any) -> bytes:
    return json.dumps({"inputs": [ONE | changes]}).encode()


def test_numbers_one_after_another_or_in_rows_flags_and_several_tensors_in_json_and_binary() -> None:
    for data in ([1, 2, 3, 4, 5, 6], [[1, 2, 3], [4, 5, 6]]):
        assert read_request(body(shape=[2, 3], data=data), None)[1]["a"].tolist() == [[1, 2, 3], [4, 5, 6]]
    _, found = read_request(body(datatype="BOOL", data=[True, False]), None)
    assert (found["a"].dtype, found["a"].tolist()) == (np.bool_, [True, False])  # type: ignore[union-attr]
    binary = {"name": "b", "shape": [1, 2], "datatype": "INT16", "parameters": {"binary_data_size": 4}}
    head = json.dumps({"inputs": [binary, ONE]}).encode()
    _, found = read_request(head + np.array([5, -6], "<i2").tobytes(), str(len(head)))
    assert (found["b"].tolist(), found["a"].tolist()) == ([[5, -6]], [1.0, 2.5])


def test_numbers_that_json_has_not_are_null() -> None:
    service = Served(served("image"), "model")
    answers: Any = Runner(served("image"), 2).answers(service.reader.tensors(inputs_for(served("image"), 2)))
    (field, _), *_ = asked = asked_outputs({"outputs": [{"name": "relative_mahalanobis++"}]}, service)
    answers[1][field.name] = np.float32(np.inf)
    content, _ = write_answer({}, service, asked, answers)
    first, second = json.loads(content, parse_constant=pytest.fail)["outputs"][0]["data"]
    assert (first, second) == (pytest.approx(float(answers[0][field.name])), None)
    content, headers = write_answer({}, service, [(field, True)], answers)
    assert np.frombuffer(content[int(headers[HEADER]) :], "<f4")[1] == np.inf

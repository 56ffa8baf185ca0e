"""Every route of the server: right answers, clear refusals, and no leak of private data."""

import asyncio
import base64
import copy
import json
import re
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import httpx
import pytest
import torch

import hydra_ensembles.serve.app as app_module
from hydra_ensembles.serve.app import make_app
from hydra_ensembles.serve.batcher import API_KEY, Runner
from hydra_ensembles.serve.rows import Reader
from served_models import SCORES, served
from serving import JSON, MODEL, ask, opened, picture, pixels, settings, talk, turned, typed


def post(model: str, path: str = "/v1/predict", **options: Any) -> httpx.Response:
    changes = options.pop("changes", {})
    return ask(served(model), "POST", path, settings(**changes), **options)


def encoded(content: bytes) -> str:
    return base64.b64encode(content).decode()


@pytest.mark.parametrize(
    "options",
    [
        {"files": [("file", ("a.png", picture(0))), ("file", ("b.png", picture(1)))]},
        {"json": {"images": [encoded(picture(0)), "data:image/png;base64," + encoded(picture(1))]}},
        {"json": {"image": encoded(picture(0)), "images": [encoded(picture(1))]}},
    ],
)
def test_images_in_every_way(options: dict[str, Any]) -> None:
    answer = post("image", **options)
    assert answer.status_code == 200
    expected = served("image").predict([opened(picture(0)), opened(picture(1))])
    for index, found in enumerate(answer.json()["predictions"]):
        one = expected[index]
        assert (found["label"], found["index"]) == (one.names()[0], one.label.item())
        assert (found["accept"], found["reason"]) == (one.accept.item(), one.reason[0])
        for name in ("confidence", "entropy", "aleatoric", "epistemic", "disagreement"):
            assert found[name] == pytest.approx(getattr(one, name).item(), abs=2e-4)
        assert found["score"] == pytest.approx(one.score().item(), abs=2e-4)
        for name in SCORES["image"]:
            assert found[name] == pytest.approx(one.score(name).item(), rel=1e-3)
        assert found["top"][0] == {"label": found["label"], "probability": pytest.approx(found["confidence"])}
        assert [member["label"] for member in found["members"]] == [
            one.class_names[label] for label in one.member_probs.argmax(dim=-1)[:, 0].tolist()
        ]
        alone = one.member_logits.log_softmax(dim=-1) / one.temperature  # sharpened like the mean
        assert [member["probability"] for member in found["members"]] == pytest.approx(
            alone.softmax(dim=-1).amax(dim=-1)[:, 0].tolist(), abs=2e-4
        )


def test_whoever_sent_an_input_is_told_what_was_done_with_it() -> None:
    """Clients learn of a truncated text or a rotated photograph in the answer: they cannot read the server's log."""
    answer = post("text", json={"texts": ["hello", "wörld " * 30]})
    short, cut = answer.json()["predictions"]
    assert "notes" not in short
    assert "tokens" in cut["notes"][0]
    upright, on_its_side = post("image", files=[("file", one) for one in (picture(0), turned())]).json()["predictions"]
    assert "notes" not in upright
    assert "EXIF" in on_its_side["notes"][0]


def test_an_image_as_it_is_and_a_model_without_a_verdict() -> None:
    (plain,) = post("image, bare", content=picture(), headers=typed("image/png; charset=binary")).json()["predictions"]
    assert (plain["accept"], plain["reason"]) == (None, None)
    assert "familiarity" not in plain


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ({"json": {"texts": ["hello", "hello wörld"]}}, ["hello", "hello wörld"]),
        ({"json": {"text": "hello", "texts": [["hello", "wörld"]]}}, ["hello", ("hello", "wörld")]),
        ({"files": [("text", (None, "hello")), ("text", (None, "wörld"))]}, ["hello", "wörld"]),
    ],
)
def test_texts_in_every_way(options: dict[str, Any], texts: list[Any]) -> None:
    answer = post("text", **options)
    assert answer.status_code == 200
    expected = served("text").predict(texts)
    found = [one["confidence"] for one in answer.json()["predictions"]]
    assert found == pytest.approx(expected.confidence.tolist(), abs=2e-4)


BROKEN = {
    "not JSON": ({"content": b"{", "headers": JSON}, 400, "JSON"),
    "deep JSON": ({"content": b"[" * 100_000, "headers": JSON}, 400, "JSON"),
    "nothing": ({"json": {}}, 400, "no sample"),
    "an unknown field": ({"json": {"picture": ""}}, 400, "picture"),
    "no base64": ({"json": {"image": "%%%"}}, 400, "base64"),
    "broken image": ({"json": {"image": encoded(picture()[:200])}}, 400, "image 0"),
    "no image": ({"files": {"file": b"hello"}}, 415, "image 0"),
    "a text": ({"json": {"text": "hello"}}, 400, "reads images"),
    "a pair or two texts": ({"json": {"text": ["hello", "wörld"]}}, 400, "write texts"),
    "both": ({"json": {"text": "hello", "image": encoded(picture())}}, 400, "one kind"),
    "another type": ({"content": b"x", "headers": typed("application/x-pickle")}, 415, "application/json"),
    "compressed": ({"content": b"x", "headers": {"Content-Encoding": "gzip", **JSON}}, 415, "compressed"),
    "another field": ({"files": [("words", (None, "hello"))]}, 400, "words"),
    "too large": ({"content": bytes(200_001), "headers": JSON}, 413, "200000"),
    "too many": ({"json": {"images": [encoded(picture(0, (4, 4)))] * 65}}, 413, "65 samples"),
}


def test_broken_requests_are_refused_in_words_and_the_next_one_is_answered() -> None:
    async def chunks() -> Any:  # a body without Content-Length is cut off
        for _ in range(30):
            yield bytes(10_000)

    async def conversation(client: httpx.AsyncClient) -> None:
        endless = {"content": chunks(), "headers": typed("image/png")}, 413, "200000"
        for name, (options, status, token) in {**BROKEN, "endless": endless}.items():
            answer = await client.post("/v1/predict", **options)
            assert (name, answer.status_code) == (name, status), answer.text
            said = answer.json()["error"]
            assert token in said, (name, said)
            assert "/" not in re.sub(r"image/\*|\w+/(x-|json|form)", "", said), name  # paths stay private
        assert (await client.post("/v1/predict", files={"file": picture()})).status_code == 200

    talk(make_app(served("image"), settings(max_body=0.2)), conversation)


def test_logits_that_are_no_numbers_are_no_answer() -> None:
    assert post("image", f"{MODEL}/infer", json=pixels([3e38, -3e38] * 96)).status_code == 400
    steep = copy.deepcopy(served("image"))
    with torch.no_grad():
        steep.readout.classifier.weight.mul_(3e4 / steep.readout.classifier.weight.abs().max())  # float16 max: 65504
    for precision, status in (("float32", 200), ("float16", 400)):
        answer = ask(steep, "POST", f"{MODEL}/infer", settings(precision=precision), json=pixels([1.0, -1.0] * 96))
        assert answer.status_code == status
    assert "float16" in answer.json()["error"]


def test_a_mistake_of_ours_tells_nothing_but_a_number(monkeypatch: pytest.MonkeyPatch, log: list[str]) -> None:
    def broken(self: Any, *_: Any) -> None:
        raise RuntimeError("secret input /home/me")

    monkeypatch.setattr(Reader, "read", broken)
    answer = post("image", files={"file": picture()}, headers={"X-Request-Id": "number-7"})
    assert (answer.status_code, answer.headers["X-Request-Id"]) == (500, "number-7")
    assert "number-7" in answer.json()["error"]
    assert "secret" not in answer.text + "".join(log)
    failure = next(json.loads(line) for line in log if '"failure"' in line)
    assert (failure["error"], failure["id"]) == ("RuntimeError", "number-7")
    assert any("broken" in place for place in failure["where"])


def test_a_key_is_asked_for_everywhere_but_at_the_door(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(API_KEY, "correct horse")

    async def conversation(client: httpx.AsyncClient) -> None:
        for path in ("/", "/v2", "/v2/health/live", "/v2/health/ready", f"{MODEL}/ready"):
            assert (await client.get(path)).status_code == 200
        for path in ("/metrics", "/v1/model", MODEL):
            assert (await client.get(path)).status_code == 401
        wrong = ({}, {"X-API-Key": "correct hors"}, {"Authorization": "Basic correct horse"}, {"X-API-Key": "ü"})
        for headers in ({name: value.encode() for name, value in one.items()} for one in wrong):
            answer = await client.post("/v1/predict", files={"file": picture()}, headers=headers)
            assert (answer.status_code, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
            assert (await client.post(f"{MODEL}/infer", headers=headers)).status_code == 401
        for headers in ({"X-API-Key": "correct horse"}, {"Authorization": "bearer correct horse"}):
            assert (await client.post("/v1/predict", files={"file": picture()}, headers=headers)).status_code == 200

    talk(make_app(served("image"), settings()), conversation)


def test_a_device_that_failed_is_not_asked_again_and_the_server_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, broken, original = list[int](), list[bool](), Runner.answers

    def failing(runner: Runner, rows: Any) -> Any:
        if not broken:
            return original(runner, rows)
        calls.append(len(rows))
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    async def conversation(client: httpx.AsyncClient) -> None:
        assert (await client.get("/v2/health/ready")).status_code == 200
        broken.append(True)
        several = {"images": [encoded(picture(seed)) for seed in range(4)]}
        assert (await client.post("/v1/predict", json=several)).status_code == 500
        assert (await client.get("/v2/health/ready")).status_code == 503
        assert (await client.post("/v1/predict", json=several)).status_code == 503

    monkeypatch.setattr(Runner, "answers", failing)
    talk(make_app(served("image"), settings(max_wait=1000)), conversation)
    assert calls == [4]


def test_the_model_is_warm_before_the_server_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    done = list[str]()
    monkeypatch.setattr(app_module, "log_to_stdout", lambda: None)
    monkeypatch.setattr(app_module.Engine, "load", lambda self: done.append("load"))
    create = app_module.socket.create_server
    monkeypatch.setattr(app_module.socket, "create_server", lambda *a, **k: done.append("listen") or create(*a, **k))
    monkeypatch.setattr("uvicorn.Server.run", lambda self, sockets: done.append("run"))
    app_module.serve(served("image"), settings(port=0))
    assert done == ["load", "listen", "run"]


def test_metrics_count_outcomes_scores_batches_and_refusals() -> None:
    async def conversation(client: httpx.AsyncClient) -> str:
        before = (await client.get("/metrics")).text
        assert 'hydra_answers_total{model="model",outcome="unfamiliar"} 0.0' in before
        for seed in range(5):
            await client.post("/v1/predict", files={"file": picture(seed)})
        await client.post("/v1/predict", json={})
        return (await client.get("/metrics")).text

    text = talk(make_app(served("image"), settings()), conversation)
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if line and line[0] != "#")
    assert float(lines['hydra_requests_total{route="/v1/predict",status="200"}']) == 5
    assert float(lines['hydra_requests_total{route="/v1/predict",status="400"}']) == 1
    expected = served("image").predict([opened(picture(seed)) for seed in range(5)])
    outcomes = [reason or "accepted" for reason in expected.reason]
    for word in ("accepted", "unsure", "unfamiliar"):
        assert float(lines[f'hydra_answers_total{{model="model",outcome="{word}"}}']) == outcomes.count(word)
    assert sum(float(count) for name, count in lines.items() if name.startswith("hydra_labels_total")) == 5
    assert float(lines['hydra_score_confidence_sum{model="model"}']) == pytest.approx(
        expected.confidence.sum().item(), rel=1e-3
    )


def test_a_line_of_the_log_has_no_input(log: list[str]) -> None:
    post("text", json={"texts": ["hello", "hello wörld"]})
    post("text", json={"text": ""})
    lines = [json.loads(line) for line in log]
    good, bad = (line for line in lines if line["event"] == "request")
    assert (good["route"], good["status"], good["rows"], sum(good["outcomes"].values())) == ("/v1/predict", 200, 2, 2)
    assert bad["status"] == 400
    assert good["id"] != bad["id"]
    assert "hello" not in "".join(log)


def test_what_a_server_says_of_itself() -> None:

    async def conversation(client: httpx.AsyncClient) -> dict[str, Any]:
        paths = ("/v1/model", "/openapi.json", "/", "/nowhere", "/v1/predict", "/v2/models/x")
        return {path: await client.get(path) for path in paths}

    answers = talk(make_app(served("image"), settings()), conversation)
    model, labels = answers["/v1/model"].json(), list(served("image").metadata.labels)
    assert (model["kind"], model["members"], model["labels"]) == ("image", 3, labels)
    assert model["unsure_below"] == served("image").metadata.calibration.threshold
    assert {"/v1/predict", f"{MODEL}/infer"} <= answers["/openapi.json"].json()["paths"].keys()
    page = answers["/"]
    assert (page.status_code, "default-src 'none'" in page.headers["Content-Security-Policy"]) == (200, True)
    assert "http" not in page.headers["Content-Security-Policy"]
    for path, status in (("/nowhere", 404), ("/v1/predict", 405), ("/v2/models/x", 404)):
        assert (answers[path].status_code, answers[path].json().keys()) == (status, {"error"})  # all errors as JSON


def test_a_request_is_given_up_at_its_deadline() -> None:
    async def conversation(client: httpx.AsyncClient) -> list[httpx.Response]:
        async def endless() -> Any:
            yield b"some"
            await asyncio.Event().wait()

        unread = client.post("/v1/predict", content=endless(), headers=typed("image/png"))
        return [await client.post("/v1/predict", files={"file": picture()}), await unread]

    app = make_app(served("image"), settings(timeout=0.05))
    app.state.models["model"].engine = Mock(
        answer=lambda rows: asyncio.Event().wait(), start=AsyncMock(), close=AsyncMock()
    )
    for late in talk(app, conversation):
        assert (late.status_code, "0.05" in late.json()["error"]) == (504, True)


def test_a_full_server_refuses_before_it_reads_and_says_when_to_come_back() -> None:
    """Neither the queue nor the number of open requests grows without limit, and probes are still answered."""

    async def conversation(client: httpx.AsyncClient) -> None:
        one, hold = app.state.models["model"], asyncio.Event()
        open_requests, arrived = [], asyncio.Event()

        async def slow() -> Any:
            arrived.set()
            await hold.wait()
            yield picture()

        async def unread() -> Any:
            raise AssertionError("the body was read")
            yield b""

        for _ in range(4 + 64):  # of 4 * max_queue + 64
            open_requests.append(
                asyncio.create_task(client.post("/v1/predict", content=slow(), headers=typed("image/png")))
            )
        await arrived.wait()
        one.engine.waiting = 1
        full = await client.post("/v1/predict", content=unread(), headers=typed("image/png"))
        assert full.json()["error"] == "too many requests are open; try again later"
        assert (await client.get("/v2/health/ready")).status_code == 200
        one.engine.waiting = 0
        hold.set()
        assert {200, 503} >= {answer.status_code for answer in await asyncio.gather(*open_requests)}
        one.engine.waiting = 1
        busy = await client.post("/v1/predict", content=unread(), headers=typed("image/png"))
        assert "waiting" in busy.json()["error"]
        for answer in (full, busy):
            assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")

    app = make_app(served("image"), settings(max_queue=1))
    talk(app, conversation)


def test_several_models_each_with_its_queue_its_numbers_and_its_monitor(tmp_path: Path) -> None:
    for kind in ("image", "text"):
        served(kind).save_pretrained(tmp_path / "models" / f"my-{kind}")
    models = app_module.load_all(tmp_path / "models")
    assert isinstance(models, dict)

    async def conversation(client: httpx.AsyncClient) -> str:
        assert (await client.get("/v2")).json()["models"] == ["my-image", "my-text"]
        for where, status in (("", 400), ("?model=your-text", 404), ("?model=my-image", 400), ("?model=my-text", 200)):
            answer = await client.post(f"/v1/predict{where}", json={"text": "hello"})
            assert answer.status_code == status, answer.text
            assert status == 200 or "my-" in answer.text or "reads images" in answer.text
        assert answer.json()["model"] == "my-text"
        (found,) = answer.json()["predictions"]
        assert found["confidence"] == pytest.approx(served("text").predict(["hello"]).confidence.item(), abs=2e-4)
        assert (await client.get("/v1/model?model=my-image")).json()["kind"] == "image"
        inferred = await client.post("/v2/models/my-image/infer", json=pixels([0.5] * 192))
        assert inferred.json()["model_name"] == "my-image"
        return (await client.get("/metrics")).text

    text = talk(make_app(models, settings(watch=tmp_path / "watch")), conversation)
    for name in models:
        assert f'hydra_watch_rows{{model="{name}"}} 1.0' in text
        assert (tmp_path / "watch" / name / "monitor.json").exists()
    one = app_module.load_all(tmp_path / "models" / "my-text")
    assert one.kind == "text"


def test_the_description_has_what_answers_have() -> None:
    async def conversation(client: httpx.AsyncClient) -> tuple[Any, Any, str]:
        answer = await client.post("/v1/predict", files={"file": turned()})
        return answer.json(), (await client.get("/openapi.json")).json(), (await client.get("/docs")).text

    answer, described, docs = talk(make_app(served("image"), settings()), conversation)
    (prediction,) = answer["predictions"]
    assert described["components"]["schemas"]["Prediction"]["properties"].keys() == prediction.keys()
    predict = described["paths"]["/v1/predict"]["post"]
    assert predict["responses"].keys() == {"200", "4XX"}
    assert "multipart/form-data" in predict["requestBody"]["content"]
    assert "/openapi.json" in docs

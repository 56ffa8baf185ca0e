"""The monitor of a server, of scored archives and of the command."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest

from hydra_ensembles.errors import CheckpointError
from hydra_ensembles.serve.app import make_app
from served_models import served
from serving import MODEL, ask, pixels, settings, talk


class Hook(BaseHTTPRequestHandler):
    """Takes what is posted."""

    found: ClassVar[list[Any]] = []

    def do_POST(self) -> None:
        self.found.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


def rows(value: float, count: int = 16) -> dict[str, Any]:
    return pixels([value] * (count * 192))


def test_a_server_alarms_tells_and_keeps_the_evidence(tmp_path: Path) -> None:
    hook = HTTPServer(("127.0.0.1", 0), Hook)
    threading.Thread(target=hook.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{hook.server_port}"
    with_watch = settings(watch=tmp_path, webhook=url, on_alarm="decline")
    killed = make_app(served("image"), with_watch)

    async def until_alarm(client: httpx.AsyncClient) -> Any:
        before = (await client.get("/v1/model")).json()["watch"]
        for _ in range(40):
            answer = (await client.post(f"{MODEL}/infer", json=rows(9.0))).json()
            said = (await client.get("/v1/model")).json()["watch"]
            if said["alarm"]:
                saved = json.loads((tmp_path / "monitor.json").read_text())
                return before, said, saved, answer, (await client.get("/metrics")).text
        raise AssertionError("no alarm")

    before, said, saved, answer, metrics = talk(killed, until_alarm)
    assert (before["rows"], before["alarm"]) == (0, False)  # rows that warm the model up are not watched
    assert set(said["why"]) <= {"familiarity", "confidence"}
    assert 'hydra_watch_alarm{model="model"} 1.0' in metrics
    assert f'hydra_watch_rows{{model="model"}} {said["rows"]:.1f}' in metrics
    outputs = {one["name"]: one["data"] for one in answer["outputs"]}
    assert outputs["reason"][-1] == 3  # of the batch that alarmed, and all later ones
    (tmp_path / "monitor.json").write_text(json.dumps(saved))  # what a kill would have left
    again = ask(served("image"), "GET", "/v1/model", with_watch).json()["watch"]
    assert again["alarm"]
    assert again["rows"] == saved["_inputs"]["rows"] > 16
    for _ in range(100):
        if len(Hook.found) == 2:  # also of the alarm that the restart found
            break
        threading.Event().wait(0.05)
    hook.shutdown()
    hook.server_close()
    assert [one["event"] for one in Hook.found] == ["alarm", "alarm"]
    with pytest.raises(CheckpointError, match="another"):
        make_app(served("text"), with_watch)


def test_right_labels_are_sent_to_the_server(tmp_path: Path) -> None:
    body = {"rows": [{"label": 0, "accept": True, "right": 0}]}
    assert ask(served("image"), "POST", "/v1/audit", settings(), json=body).status_code == 404
    refused = ask(served("image"), "POST", "/v1/audit", settings(watch=tmp_path), json={"rows": [{"label": 0}]})
    assert refused.status_code == 400
    assert "right" in refused.json()["error"]

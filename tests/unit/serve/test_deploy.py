"""The files in examples/deploy: well-formed, hardened, and consistent with the server's options, ports and metrics."""

import base64
import inspect
import json
import re
import runpy
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from hydra_ensembles.cli.answers import serve
from hydra_ensembles.errors import RequestError
from hydra_ensembles.serve.app import make_app
from hydra_ensembles.serve.batcher import API_KEY, ServeSettings
from served_models import served
from serving import opened, picture, settings, talk, turned

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "examples" / "deploy"
OPTIONS = {f"--{name.replace('_', '-')}": name for name in inspect.signature(serve).parameters}


def document(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


def check_command(words: list[str]) -> dict[str, Any]:
    """Options of a `serve` command line; asserts that each exists and its value is accepted."""
    assert words[:2] == ["hydra-ensembles", "serve"]
    given = dict(zip(words[3::2], words[4::2], strict=True))
    made = {OPTIONS[name]: json.loads(value) if value.isdecimal() else value for name, value in given.items()}
    ServeSettings(**made)
    return made


@pytest.fixture(scope="module")
def exposed() -> tuple[str, set[str]]:
    """The text of /metrics and the server's routes."""
    app = make_app(served("image"), settings())

    async def conversation(client: httpx.AsyncClient) -> str:
        await client.post("/v1/predict", files={"file": picture()})
        return (await client.get("/metrics")).text

    return talk(app, conversation), {route.path for route in app.routes}


def test_containers_start_the_server_read_only_where_probes_and_users_find_it(exposed: tuple[str, set[str]]) -> None:
    lines = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    base, *stages = " \n".join(line for line in lines if line.strip() and line[0] != "#").split("FROM ")[1:]
    for stage in stages:
        assert stage.startswith("base AS ")
        steps = dict(line.split(None, 1) for line in (base + stage).splitlines() if not line.strip().startswith("base"))
        made = check_command([*json.loads(steps["ENTRYPOINT"]), *json.loads(steps["CMD"])])
        assert (made["port"], int(steps["USER"]) > 0) == (int(steps["EXPOSE"]), True)  # not root
    targets = set(re.findall(r"--target (\w+)", (DEPLOY / "Dockerfile").read_text()))
    assert targets == {stage.split()[2] for stage in stages} == {"cpu", "cuda"}
    assert f":{made['port']}/v2/health/ready" in steps["HEALTHCHECK"]
    compose, kserve = document("compose.yaml")["services"], document("kserve.yaml")
    assert API_KEY in compose["hydra"]["environment"]
    assert all(one.endswith(":ro") for service in compose.values() for one in service["volumes"])
    assert all(one.startswith("127.0.0.1:") for service in compose.values() for one in service["ports"])
    (container,) = kserve["spec"]["predictor"]["containers"]
    made = check_command([*container["command"], *container["args"]])
    assert [port["containerPort"] for port in container["ports"]] == [made["port"]]
    places = [container[probe]["httpGet"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")]
    assert {place["port"] for place in places} == {made["port"]}
    assert {kserve["metadata"]["annotations"]["prometheus.io/path"], *(one["path"] for one in places)} <= exposed[1]
    assert compose["hydra"]["read_only"] is container["securityContext"]["readOnlyRootFilesystem"] is True


def test_alerts_name_metrics_that_there_are(exposed: tuple[str, set[str]]) -> None:
    text, _ = exposed
    known = {line.split("{")[0].split(" ")[0] for line in text.splitlines() if line and line[0] != "#"}
    told = " ".join(rule["expr"] for group in document("alerts.yaml")["groups"] for rule in group["rules"])
    assert set(re.findall(r"hydra_\w+", told)) <= known
    assert all(f'le="{edge}"' in text for edge in re.findall(r'le="([\d.]+)"', told))
    assert all(f'{name}="{value}"' in text for name, value in re.findall(r'(outcome|route)="([^"]+)"', told))


def test_the_handler_answers_as_predict_does(tmp_path: Path) -> None:
    kind = runpy.run_path(str(DEPLOY / "handler.py"))["EndpointHandler"]
    served("image").save_pretrained(tmp_path / "image")
    handler = kind(str(tmp_path / "image"))
    given = [picture(0), base64.b64encode(picture(1)).decode(), opened(picture(2))]
    expected = served("image").predict([opened(picture(seed)) for seed in range(3)])
    assert [one["label"] for one in handler({"inputs": given})] == expected.names()
    assert handler({"inputs": given[0]})[0]["accept"] == expected.accept[0].item()
    assert "EXIF" in handler({"inputs": turned()})[0]["notes"][0]
    served("text").save_pretrained(tmp_path / "text")
    read = kind(str(tmp_path / "text"))
    (pair,) = read({"inputs": [["hello", "wörld"]]})
    expected = served("text").predict([("hello", "wörld")])
    assert pair["confidence"] == pytest.approx(expected.confidence.item(), abs=2e-4)
    for one, strange in ((read, ["hello", None]), (handler, ["no base64"])):
        with pytest.raises(RequestError, match="string"):
            one({"inputs": strange})

"""The server's page in a real browser: works by pointer and keyboard, fits a phone, and contacts no other host."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hydra_ensembles as he
from chromium import Tab
from hydra_ensembles.serve.app import make_app
from served_models import inputs_for, served
from serving import listening, opened, picture, settings

pillow = pytest.importorskip("PIL.Image")

PHONE, DESK = 390, 1280
ANSWERED = '!document.getElementById("result").hidden && document.getElementById("out").ariaBusy === "false"'


@pytest.fixture(scope="module")
def ports() -> Iterator[dict[str, int]]:
    images, texts = make_app(served("image"), settings(name="images")), make_app(served("text"), settings(name="texts"))
    locked = make_app(served("text, bare"), settings(name="locked", api_key="correct horse"))
    with listening(images) as first, listening(texts) as second, listening(locked) as third:
        yield {"image": first, "text": second, "locked": third}


def text(tab: Tab, name: str) -> str:
    return str(tab.run(f"document.getElementById({json.dumps(name)}).innerText"))


def fits(tab: Tab, width: int) -> None:
    assert tab.run("document.documentElement.scrollWidth") <= width
    small = """[...document.querySelectorAll("button, summary, .drop, textarea")].filter((one) => one.offsetParent)
        .filter((one) => one.getBoundingClientRect().height < 20).length"""
    assert tab.run(small) == 0  # all controls are large enough


def told(found: Any) -> str:
    return "Accepted" if found.accept.item() else f"Abstains: {found.reason[0]}"


@pytest.mark.parametrize(("width", "dark"), [(PHONE, False), (DESK, True)])
def test_an_image(tab: Tab, ports: dict[str, int], tmp_path: Path, width: int, dark: bool) -> None:
    tab.open(f"http://127.0.0.1:{ports['image']}/", width, dark=dark)
    tab.until('!document.getElementById("image").hidden')
    assert "3 members" in text(tab, "about")
    fits(tab, width)
    for seed in range(3):
        path = tmp_path / f"{seed}.png"
        path.write_bytes(picture(seed))
        tab.give_file("#file", path)
        tab.until(f'document.getElementById("prompt").textContent === "{path.name}" && {ANSWERED}')
        tab.until('[...document.querySelectorAll("#members .fill")].every((one) => one.style.width)')
        found = served("image").predict(opened(picture(seed)))
        assert (text(tab, "label"), text(tab, "outcome")) == (found.names()[0], told(found))
        assert text(tab, "confidence").startswith(f"{100 * found.confidence.item():.1f}"[:3])
        assert tab.run('document.querySelectorAll("#members .bar").length') == 3
        widths = tab.run('[...document.querySelectorAll("#members .fill")].map((one) => parseFloat(one.style.width))')
        alone = (found.member_logits.log_softmax(dim=-1) / found.temperature[0]).softmax(dim=-1).amax(dim=-1)[:, 0]
        assert widths == pytest.approx((100 * alone).tolist(), abs=0.1)
        fits(tab, width)
    tab.screenshot(tmp_path / "page.png")
    corner = pillow.open(tmp_path / "page.png").convert("RGB").getpixel((2, 2))
    assert (sum(corner) < 150) == dark
    assert tab.complaints == []
    own = f"http://127.0.0.1:{ports['image']}/"
    assert [one for one in tab.requests if not one.removeprefix("blob:").startswith(own)] == []


def test_a_file_is_reached_by_keyboard_and_said_to_be_no_image(tab: Tab, ports: dict[str, int], tmp_path: Path) -> None:
    tab.open(f"http://127.0.0.1:{ports['image']}/", PHONE)
    tab.until('!document.getElementById("image").hidden')
    tab.press("Tab")
    assert tab.run("document.activeElement.id") == "file"
    assert tab.run('getComputedStyle(document.getElementById("drop")).outlineStyle') == "solid"
    (tmp_path / "broken.png").write_bytes(b"hello")
    tab.give_file("#file", tmp_path / "broken.png")
    tab.until(ANSWERED)
    assert "image 0" in text(tab, "verdict")
    assert tab.run('document.getElementById("answer").hidden && document.getElementById("trust").hidden')


def test_a_text_by_keyboard_alone(tab: Tab, ports: dict[str, int]) -> None:
    tab.open(f"http://127.0.0.1:{ports['text']}/", PHONE)
    tab.until('!document.getElementById("text").hidden')
    tab.press("Tab")
    assert tab.run("document.activeElement.id") == "words"
    tab.write("hello wörld")
    tab.press("Enter", control=True)
    tab.until(ANSWERED)
    assert text(tab, "outcome") == told(served("text").predict("hello wörld"))
    fits(tab, PHONE)
    assert tab.complaints == []


def test_a_key_is_asked_for_and_kept(tab: Tab, ports: dict[str, int]) -> None:
    tab.open(f"http://127.0.0.1:{ports['locked']}/", PHONE)
    tab.until('!document.getElementById("key").hidden')
    for word, shown in (("wrong horse", "key"), ("correct horse", "text")):
        tab.run(f'document.getElementById("secret").value = "{word}"; document.getElementById("key").requestSubmit()')
        tab.until(f'!document.getElementById("{shown}").hidden')
    assert tab.run('document.getElementById("key").hidden')
    tab.run('document.getElementById("words").value = "hello"; document.getElementById("text").requestSubmit()')
    tab.until(ANSWERED)
    assert text(tab, "outcome") == "No verdict"


def test_what_was_not_asked_is_not_claimed(tab: Tab, tmp_path: Path) -> None:
    """Without a familiarity threshold, nothing is called familiar."""
    bare = served("image, bare")
    data = [(inputs_for(bare, 80), torch.arange(80) % bare.num_classes)]
    sure = he.calibrate(bare, data, share=0.95, familiarity=None)
    seed = next(seed for seed in range(20) if sure.predict(opened(picture(seed))).accept.item())
    (tmp_path / "one.png").write_bytes(picture(seed))
    with listening(make_app(sure, settings(name="sure"))) as port:
        tab.open(f"http://127.0.0.1:{port}/", PHONE)
        tab.until('!document.getElementById("image").hidden')
        tab.give_file("#file", tmp_path / "one.png")
        tab.until(ANSWERED)
        assert text(tab, "outcome") == "Accepted"
        assert text(tab, "why") == "Sure enough. Familiarity was not checked."
    assert tab.complaints == []


def test_a_server_that_is_not_ready_is_asked_again(tab: Tab) -> None:
    app = make_app(served("text"), settings(name="late"))
    refusing = [502]  # a proxy's error, until the page has shown it

    async def proxy(scope: Any, receive: Any, send: Any) -> None:
        if scope.get("path") != "/v1/model" or not refusing:
            await app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 502, "headers": []})
        await send({"type": "http.response.body", "body": b"a page of the proxy"})

    with listening(proxy) as port:
        tab.open(f"http://127.0.0.1:{port}/", PHONE)
        tab.until('document.getElementById("about").textContent.includes("The server said 502")')
        refusing.clear()
        tab.until('!document.getElementById("text").hidden')
    assert not [one for one in tab.complaints if "Uncaught" in one]

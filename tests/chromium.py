"""A headless Chromium, where one is installed, and what it says about a page."""

import base64
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "headless_shell")
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--enable-logging=stderr",
    "--allow-pre-commit-input",  # else keys that come before the first picture of a page are dropped without a word
    "--disable-dev-shm-usage", "--disable-hang-monitor",  # a small /dev/shm, or a slow machine, ends no page
)  # fmt: skip


@contextmanager
def open_tab() -> Iterator["Tab"]:
    """An empty tab of the installed Chromium, which runs as long as the block; or a skip."""
    binary = next((path for name in _NAMES if (path := shutil.which(name))), None)
    if binary is None:
        pytest.skip(f"no Chromium is installed (looked for {', '.join(_NAMES)})")
    (theirs, ours), (back, forth) = os.pipe(), os.pipe()
    # its helpers outlive the browser for an instant, and may write to the folder while it is removed
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # the browser reads from 3 and writes to 4, which a process cannot choose for its child but by another one
        free = f"[fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, 10) for one in ({theirs}, {forth})]"  # neither 3 nor 4
        moved = f"import fcntl, os, sys; a, b = {free}; os.dup2(a, 3); os.dup2(b, 4);"
        shell = [sys.executable, "-c", f"{moved} os.execvp(sys.argv[1], sys.argv[1:])", binary]
        flags = [*_FLAGS, "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(
            [*shell, *flags],
            pass_fds=(theirs, forth),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "LC_ALL": "C.UTF-8"},  # in others it could not open files of every name
        )
        os.close(theirs)
        os.close(forth)
        try:
            with os.fdopen(ours, "wb", buffering=0) as commands, os.fdopen(back, "rb") as events:
                yield Tab(commands, events)
        finally:
            process.kill()
            process.wait()


class Tab:
    """One page, driven by the protocol of Chromium's developer tools, over a pipe.

    Attributes:
        complaints: Errors of scripts, of the console and of loading.
        requests: Addresses that the page asked for.
    """

    def __init__(self, commands: Any, events: Any) -> None:
        self._commands, self._events, self._numbers = commands, events, itertools.count(1)
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self._session: str | None = None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "DOM"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Give a command and wait for what comes of it; what happens meanwhile is kept."""
        number = next(self._numbers)
        command = {"id": number, "method": method, "params": parameters}
        command |= {} if self._session is None else {"sessionId": self._session}
        self._commands.write(json.dumps(command).encode() + b"\0")
        while True:
            message = self._next()
            if message.get("id") == number:
                assert "error" not in message, message
                return dict(message["result"])
            self._keep(message)

    def _next(self) -> dict[str, Any]:
        content = bytearray()
        while (one := self._events.read(1)) != b"\0":
            assert one, "the browser ended"
            content += one
        return dict(json.loads(content))

    def _keep(self, message: dict[str, Any]) -> None:
        kind, found = message.get("method"), message.get("params", {})
        if kind == "Runtime.exceptionThrown":
            self.complaints.append(str(found["exceptionDetails"]))
        elif kind == "Log.entryAdded" and found["entry"]["level"] == "error":
            self.complaints.append(f"{found['entry']['text']} {found['entry'].get('url', '')}")
        elif kind == "Runtime.consoleAPICalled" and found["type"] in ("error", "assert"):
            self.complaints.append(str(found["args"]))
        elif kind == "Network.requestWillBeSent":
            self.requests.append(found["request"]["url"])

    def open(self, address: str, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Load a page in a window of a size and wait until it is there."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        self.send("Emulation.setEmulatedMedia", features=[scheme, still])
        self.send("Page.navigate", url=address)
        self.run('new Promise((done) => document.readyState === "complete" ? done() : addEventListener("load", done))')

    def run(self, script: str) -> Any:
        """The value of a script; a promise is waited for."""
        found = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, condition: str) -> None:
        """Wait until something on the page makes a condition true."""
        self.run(
            f"""new Promise((done) => {{
              const look = () => ({condition}) && done();
              const options = {{ subtree: true, childList: true, attributes: true, characterData: true }};
              new MutationObserver(look).observe(document.documentElement, options);
              look();
            }})"""
        )

    def give_file(self, selector: str, path: Path) -> None:
        """Choose a file in a field for files."""
        root = self.send("DOM.getDocument")["root"]["nodeId"]
        node = self.send("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.send("DOM.setFileInputFiles", nodeId=node, files=[str(path.resolve())])

    def press(self, key: str, control: bool = False) -> None:
        """Press a key and let it go: Tab, Enter or an arrow."""
        codes = {"Tab": 9, "Enter": 13, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
        common = {"key": key, "windowsVirtualKeyCode": codes[key], "modifiers": 2 if control else 0}
        typed = {"type": "keyDown", "text": "\r"} if key == "Enter" and not control else {"type": "rawKeyDown"}
        self.send("Input.dispatchKeyEvent", **typed, **common)
        self.send("Input.dispatchKeyEvent", type="keyUp", **common)

    def write(self, text: str) -> None:
        """Type a text where the focus is."""
        self.send("Input.insertText", text=text)

    def screenshot(self, target: Path, full: bool = True) -> None:
        """A picture of the page, with what lies below the window."""
        content = self.send("Page.captureScreenshot", captureBeyondViewport=full)["data"]
        target.write_bytes(base64.b64decode(content))

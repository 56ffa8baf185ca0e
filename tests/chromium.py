"""A headless Chromium, if one is installed, and the errors and requests of a page."""

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
    "--allow-pre-commit-input",  # otherwise keys pressed before the first paint are dropped silently
    "--disable-dev-shm-usage", "--disable-hang-monitor",  # no crash on a small /dev/shm or a slow machine
)  # fmt: skip


@contextmanager
def open_tab() -> Iterator["Tab"]:
    """Run the installed Chromium for the block and yield an empty tab; skip if there is none."""
    binary = next((path for name in _NAMES if (path := shutil.which(name))), None)
    if binary is None:
        pytest.skip(f"no Chromium is installed (looked for {', '.join(_NAMES)})")
    (theirs, ours), (back, forth) = os.pipe(), os.pipe()
    # helper processes briefly outlive the browser and may write to the folder while it is removed
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # the browser uses fds 3 and 4; Popen cannot choose a child's fds, so another process in between does
        free = f"[fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, 10) for one in ({theirs}, {forth})]"  # neither 3 nor 4
        moved = f"import fcntl, os, sys; a, b = {free}; os.dup2(a, 3); os.dup2(b, 4);"
        shell = [sys.executable, "-c", f"{moved} os.execvp(sys.argv[1], sys.argv[1:])", binary]
        flags = [*_FLAGS, "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(
            [*shell, *flags],
            pass_fds=(theirs, forth),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "LC_ALL": "C.UTF-8"},  # in other locales it could not open every file name
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
    """One page, controlled over a pipe by the Chrome DevTools Protocol.

    Attributes:
        complaints: Errors from scripts, the console and loading.
        requests: URLs the page requested.
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
        """Send a command and wait for its result; record events that arrive meanwhile."""
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
        """Load a page in a window of this size and wait until it is loaded."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        self.send("Emulation.setEmulatedMedia", features=[scheme, still])
        self.send("Page.navigate", url=address)
        self.run('new Promise((done) => document.readyState === "complete" ? done() : addEventListener("load", done))')

    def run(self, script: str) -> Any:
        """Evaluate a script and return its value; awaits promises."""
        found = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, condition: str) -> None:
        """Wait until a condition on the page is true."""
        self.run(
            f"""new Promise((done) => {{
              const look = () => ({condition}) && done();
              const options = {{ subtree: true, childList: true, attributes: true, characterData: true }};
              new MutationObserver(look).observe(document.documentElement, options);
              look();
            }})"""
        )

    def give_file(self, selector: str, path: Path) -> None:
        """Choose a file in a file input."""
        root = self.send("DOM.getDocument")["root"]["nodeId"]
        node = self.send("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.send("DOM.setFileInputFiles", nodeId=node, files=[str(path.resolve())])

    def press(self, key: str, control: bool = False) -> None:
        """Press and release a key: Tab, Enter or an arrow."""
        codes = {"Tab": 9, "Enter": 13, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
        common = {"key": key, "windowsVirtualKeyCode": codes[key], "modifiers": 2 if control else 0}
        typed = {"type": "keyDown", "text": "\r"} if key == "Enter" and not control else {"type": "rawKeyDown"}
        self.send("Input.dispatchKeyEvent", **typed, **common)
        self.send("Input.dispatchKeyEvent", type="keyUp", **common)

    def write(self, text: str) -> None:
        """Type text into the focused element."""
        self.send("Input.insertText", text=text)

    def screenshot(self, target: Path, full: bool = True) -> None:
        """Save a screenshot of the page, including the part below the window."""
        content = self.send("Page.captureScreenshot", captureBeyondViewport=full)["data"]
        target.write_bytes(base64.b64decode(content))

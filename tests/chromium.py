"""A headless Chromium, where one is installed, and what it says about a page."""

import json
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from html import unescape
from pathlib import Path

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "headless_shell")
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--enable-logging=stderr",
)  # fmt: skip
_MEASURE = """<script>
addEventListener("load", () => {
  const box = (element) => element.getBoundingClientRect();
  const drawings = [...document.querySelectorAll("figure svg")];
  const classes = {};
  for (const figure of document.querySelectorAll("figure")) {
    const name = figure.className || "none";
    classes[name] = (classes[name] || 0) + 1;
  }
  document.title = JSON.stringify({
    page: document.documentElement.scrollWidth,
    window: innerWidth,
    figures: classes,
    empty: drawings.filter((one) => box(one).width < 100 || box(one).height < 30).length,
    smallest: Math.min(...drawings.map((one) => box(one).width / one.viewBox.baseVal.width)),
    images: [...document.images].filter((one) => one.complete && one.naturalWidth > 0).length,
    broken: [...document.images].filter((one) => one.complete && one.naturalWidth === 0).length,
  });
});
</script>"""


@dataclass(frozen=True)
class Chromium:
    """The browser."""

    binary: str

    def run(self, page: Path, *flags: str) -> subprocess.CompletedProcess[str]:
        """Open a page in a fresh profile."""
        with tempfile.TemporaryDirectory() as profile:
            command = [self.binary, *_FLAGS, f"--user-data-dir={profile}", *flags, page.resolve().as_uri()]
            return subprocess.run(command, capture_output=True, text=True, timeout=120)

    def screenshot(self, page: Path, target: Path, width: int, height: int, dark: bool = False) -> str:
        """Take a picture of a page; what the page's console said."""
        scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
        done = self.run(page, f"--screenshot={target}", f"--window-size={width},{height}", scheme)
        assert target.exists(), done.stderr
        return "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)

    def measure(self, page: Path, folder: Path, width: int, height: int = 900) -> dict[str, object]:
        """Sizes of a page in a window, from a copy of it that may run one script and loads its images at once."""
        text = re.sub(r"<meta http-equiv=.Content-Security-Policy.*?>", "", page.read_text())
        copy = folder / "measured.html"
        copy.write_text(text.replace(' loading="lazy"', "").replace("</body>", f"{_MEASURE}</body>"))
        done = self.run(copy, "--dump-dom", f"--window-size={width},{height}")
        found = re.search(r"<title>(\{.*?\})</title>", done.stdout)
        assert found, done.stdout[:500] + done.stderr
        measured: dict[str, object] = json.loads(unescape(found[1]))
        return measured


def installed_chromium() -> Chromium | None:
    """The installed Chromium, if there is one."""
    binary = next((path for name in _NAMES if (path := shutil.which(name))), None)
    return None if binary is None else Chromium(binary)


def find_chromium() -> Chromium:
    """The installed Chromium, or a skip."""
    found = installed_chromium()
    if found is None:
        pytest.skip(f"no Chromium is installed (looked for {', '.join(_NAMES)})")
    return found

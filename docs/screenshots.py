"""Take the pictures of the service's page and of the report, from what `hydra-ensembles demo` has left.

    python docs/screenshots.py --demo hydra-demo      # writes docs/images/serve.png and docs/images/report.png

Needs Chromium and the extra `serve`.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from PIL import Image

from hydra_ensembles import load
from hydra_ensembles.demo import load_sample
from hydra_ensembles.serve import ServeSettings, make_app

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from chromium import Tab, open_tab  # noqa: E402
from serving import listening  # noqa: E402

ANSWERED = '!document.getElementById("result").hidden && document.getElementById("out").ariaBusy === "false"'


def small(path: Path) -> None:
    """The picture with a palette: a quarter of its size, and looks the same."""
    with Image.open(path) as picture:
        few = picture.convert("RGB").quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    few.save(path, optimize=True)


def page(tab: Tab, model: Path, target: Path) -> None:
    """What the page says of a river, which the model does not know."""
    app = make_app(load(model), ServeSettings(name="eurosat-hydra"))
    with listening(app) as port, tempfile.TemporaryDirectory() as folder:
        river = Path(folder) / "river.png"
        load_sample().near["River"][0][0].resize((256, 256)).save(river)
        tab.open(f"http://127.0.0.1:{port}/", 1000, 700)
        tab.until('!document.getElementById("image").hidden')
        tab.give_file("#file", river)
        tab.until(ANSWERED)
        tab.until('[...document.querySelectorAll("#members .fill")].every((one) => one.style.width)')
        tab.screenshot(target)


def report(tab: Tab, path: Path, target: Path) -> None:
    """The first screen of the report."""
    tab.open(path.resolve().as_uri(), 1000, 850)
    tab.screenshot(target, full=False)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", type=Path, default=Path("hydra-demo"), help="folder of the demo")
    options = parser.parse_args()
    images = ROOT / "docs" / "images"
    with open_tab() as tab:
        page(tab, options.demo / "model", images / "serve.png")
        report(tab, options.demo / "report.html", images / "report.png")
    for name in ("serve.png", "report.png"):
        small(images / name)


if __name__ == "__main__":
    main()

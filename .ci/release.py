"""`make release`: build sdist and wheel of the last commit, and try the wheel in environments of their own.

    python .ci/release.py                 # every extra; writes the files to dist/ if all of them work
    python .ci/release.py none cli onnx   # only these; `none` is the wheel alone

The wheel is built from the sdist, which shows that the sdist is complete. Versions are those of constraints.txt.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WHOLE = 9_000_000  # bytes of the wheel, the demo's model and images included
UNTRIED = {"dev", "docs"}  # extras for developing this repository


def run(*words: str | Path, at: Path) -> str:
    """Run a command in a folder without this checkout on Python's path; return its output, or exit if it fails."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run([str(word) for word in words], cwd=at, env=clean, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, words))}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


def environment(folder: Path) -> Path:
    """Create an environment and return its Python."""
    venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


def built(folder: Path) -> tuple[Path, Path]:
    """Sdist and wheel of the last commit."""
    python, source = environment(folder / "building"), folder / "source"
    run(python, "-m", "pip", "install", "-q", "build", at=folder)
    run("git", "archive", "--output", folder / "source.tar", "HEAD", at=ROOT)
    with tarfile.open(folder / "source.tar") as files:
        files.extractall(source, filter="data")
    run(python, "-m", "build", "--outdir", folder / "made", source, at=folder)
    (sdist,), (wheel,) = (folder / "made").glob("*.tar.gz"), (folder / "made").glob("*.whl")
    return sdist, wheel


def main() -> None:
    """Build, try each extra, and copy the files to dist/ if all succeeds."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    with tempfile.TemporaryDirectory(prefix="release-") as place:
        folder = Path(place)
        sdist, wheel = built(folder)
        version = wheel.name.split("-")[1]
        if f"\n## [{version}] - " not in (ROOT / "CHANGELOG.md").read_text():
            sys.exit(f"CHANGELOG.md has no section for {version}")
        if wheel.stat().st_size > WHOLE:
            sys.exit(f"{wheel.name} has {wheel.stat().st_size} bytes; at most {WHOLE} are wanted")
        smoke = Path(shutil.copy(ROOT / ".ci" / "smoke.py", folder / "smoke.py"))
        for extra in sys.argv[1:] or ["none", *sorted(set(project["optional-dependencies"]) - UNTRIED)]:
            python = environment(folder / extra)
            what = str(wheel) if extra == "none" else f"{wheel}[{extra}]"
            run(python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", what, at=folder)
            said = run(python, "-W", "ignore", smoke, extra.replace("-", "_"), version, at=folder)
            print(f"{extra:<14}{said.strip()}", flush=True)
            shutil.rmtree(folder / extra)
        (ROOT / "dist").mkdir(exist_ok=True)
        for file in (sdist, wheel):
            print(f"wrote {shutil.copy(file, ROOT / 'dist' / file.name)}")


if __name__ == "__main__":
    main()

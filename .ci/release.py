"""`make release`: build sdist and wheel of the last commit, check them, and try the wheel in empty environments.

    python .ci/release.py                 # everything; writes the files to dist/ if all checks pass
    python .ci/release.py none cli onnx   # try only these extras; `none` is the wheel alone

The wheel is built from the sdist, which shows that the sdist is complete. The environment of an extra adds only that
extra's packages to the environment of the wheel alone; versions are those of constraints.txt.
"""

import email
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CODE, WHOLE = 3_000_000, 15_000_000  # bytes, compressed: the wheel without the demo's data, and with it
DEMO = "hydra_ensembles/demo/"
UNTRIED = {"dev", "docs"}  # extras for developing this repository
IN_SDIST = ("CHANGELOG.md", "CITATION.cff", "LICENSE", "Makefile", "README.md", "constraints.txt")
IN_WHEEL = ("hydra_ensembles_cli.py", *(f"hydra_ensembles/{name}" for name in ("py.typed", "cli/commands.json")))


def run(*words: str | Path, at: Path) -> str:
    """Run a command in a folder without this checkout on Python's path; return its output, or exit if it fails."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run([str(word) for word in words], cwd=at, env=clean, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, words))}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


def environment(folder: Path, below: Path | None = None) -> Path:
    """Create an environment, on top of another one if given; return its Python."""
    venv.create(folder, with_pip=True)
    if below is not None:
        own, its = (next(one.glob("lib/python*/site-packages")) for one in (folder, below))
        (own / "below.pth").write_text(f"{its}\n")
    return folder / "bin" / "python"


def build(folder: Path) -> tuple[Path, Path]:
    """Build sdist and wheel of the last commit in a folder."""
    source, made, python = folder / "source", folder / "made", environment(folder / "building")
    made.mkdir()
    archive = folder / "source.tar"
    run("git", "archive", "--output", archive, "HEAD", at=ROOT)
    with tarfile.open(archive) as files:
        files.extractall(source, filter="data")
    requires = tomllib.loads((source / "pyproject.toml").read_text())["build-system"]["requires"]
    run(python, "-m", "pip", "install", "-q", *requires, at=folder)
    call = "from setuptools import build_meta; build_meta.build_{}({!r})"
    run(python, "-c", call.format("sdist", str(made)), at=source)
    (sdist,) = made.glob("*.tar.gz")
    with tarfile.open(sdist) as files:
        files.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    run(python, "-c", call.format("wheel", str(made)), at=unpacked)
    (wheel,) = made.glob("*.whl")
    return sdist, wheel


def unreleased(changelog: str) -> str:
    """The changelog's text under Unreleased, which a release would ship without a version."""
    return changelog.partition("\n## [Unreleased]\n")[2].partition("\n## [")[0].strip()


def look_at(sdist: Path, wheel: Path) -> tuple[str, list[str]]:
    """Check names, metadata, sizes and that the changelog has the version; return the version and the extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    with zipfile.ZipFile(wheel) as files:
        sizes = {one.filename: one.compress_size for one in files.infolist()}
        (name,) = (name for name in sizes if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(files.read(name))
    with tarfile.open(sdist) as packed:
        listed = {name.partition("/")[2] for name in packed.getnames()}
    version = str(metadata["Version"])
    data = {name: size for name, size in sizes.items() if name.startswith(DEMO) and not name.endswith(".py")}
    code, whole, extras = (
        wheel.stat().st_size - sum(data.values()),
        wheel.stat().st_size,
        metadata.get_all("Provides-Extra"),
    )
    outside = {name.partition("/")[0] for name in sizes} - {"hydra_ensembles", "hydra_ensembles_cli.py"}
    wrong = [
        *(f"the sdist lacks {name}" for name in IN_SDIST if name not in listed),
        *(f"the wheel lacks {name}" for name in IN_WHEEL if name not in sizes),
        *(f"the wheel has {name}" for name in outside if not name.endswith(".dist-info")),
        *([f"{code} bytes of code, at most {CODE}"] if code > CODE else []),
        *([f"{whole} bytes in all, at most {WHOLE}"] if whole > WHOLE else []),
        *(["the demo has no data"] if not data else []),
        *(
            f"{name} does not say {words!r}"
            for name, words in {
                "CHANGELOG.md": f"\n## [{version}] - ",
                "CITATION.cff": f"\nversion: {version}\n",
            }.items()
            if words not in (ROOT / name).read_text()
        ),
        *(
            ["extras are not those of pyproject.toml"]
            if set(extras or ()) != set(project["optional-dependencies"])
            else []
        ),
        *(
            f"{key} is {metadata[key]!r}, not {value!r}"
            for key, value in {
                "Name": project["name"],
                "Summary": project["description"],
                "License-Expression": project["license"],
                "Requires-Python": project["requires-python"],
            }.items()
            if metadata[key] != value
        ),
    ]
    if wrong:
        sys.exit("\n".join(wrong))
    print(f"{wheel.name}: {whole / 1e6:.1f} MB, of which {(whole - code) / 1e6:.1f} are the demo's; {len(sizes)} files")
    print(f"{sdist.name}: {sdist.stat().st_size / 1e6:.1f} MB, {len(listed)} files")
    return version, sorted(extras or ())


def main() -> None:
    """Build, check and try the files; copy them to dist/ only if all succeeds."""
    if left := unreleased((ROOT / "CHANGELOG.md").read_text()):
        sys.exit(f"CHANGELOG.md has changes under [Unreleased]; put them under the version to release:\n{left}")
    with tempfile.TemporaryDirectory(prefix="release-") as place:
        folder = Path(place)
        sdist, wheel = build(folder)
        version, extras = look_at(sdist, wheel)
        wanted = sys.argv[1:] or ["none", *(one for one in extras if one not in UNTRIED)]
        smoke, empty = folder / "smoke.py", folder / "empty"
        shutil.copy(ROOT / ".ci" / "smoke.py", smoke)
        empty.mkdir()
        for extra in dict.fromkeys(("none", *wanted)):
            below, what = (None, str(wheel)) if extra == "none" else (folder / "none", f"{wheel}[{extra}]")
            python = environment(folder / extra, below)
            pip = (python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt")
            run(*pip, "--no-deps", "--ignore-installed", wheel, at=empty)  # so that its command uses this Python
            run(*pip, what, at=empty)
            said = run(python, "-W", "ignore", smoke, extra.replace("-", "_"), version, at=empty)
            print(f"{extra:<14}{said.strip()}", flush=True)
            if extra != "none":
                shutil.rmtree(folder / extra)
        (ROOT / "dist").mkdir(exist_ok=True)
        for file in (sdist, wheel):
            shutil.copy(file, ROOT / "dist" / file.name)
            print(f"wrote dist/{file.name}")


if __name__ == "__main__":
    main()

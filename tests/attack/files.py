"""Every stored format under attack: files are edited and loaded, and the answer is compared with the original one.

Half of the edits are like accidents. For the other half the digests are recomputed, as by someone who knows the
format and edits it by hand: no format can detect those, so a different answer is counted separately.
"""

import hashlib
import tempfile
import warnings
from functools import cache, partial
from pathlib import Path

from hydra_ensembles.checkpoint import DIGEST
from hydra_ensembles.digest import digest
from hydra_ensembles.errors import HydraError

from .counting import Row, count
from .edits import OUTSIDE, Edit, Files, apply, edits, read_document
from .targets import TARGETS, Target

Case = tuple[int, bool, Edit]  # index of the target, whether digests are recomputed, and the edit

CASES = 10_080
PLACE = "/dev/shm" if Path("/dev/shm").is_dir() else None  # in memory: a disk is slow
CONTENT = ("json", "tensors", "bytes")  # kinds of edits after which digests are recomputed


def run(cases: int, seed: int) -> list[Row]:
    """About `cases` edits, equally many per format."""
    rows = []
    share = max(2, round(cases / len(TARGETS)))
    with tempfile.TemporaryDirectory(dir=PLACE) as folder:
        for index, target in enumerate(TARGETS):
            files = prepare(target, Path(folder) / str(index))
            for anew in (False, True):
                what = f"{target.name}, digests written anew" if anew else target.name
                found = cases_of(index, files, anew, share // 2, seed)
                first = partial(known, f"{folder}/{index}", index)
                rows.append(count(what, partial(answers_alike, folder), found, ready=first))
    return rows


def cases_of(index: int, files: Files, anew: bool, count: int, seed: int) -> list[Case]:
    """Edits of one target, with or without recomputed digests; model cards are skipped, since nothing reads them."""
    read = {name: content for name, content in files.items() if not name.endswith("README.md")}
    return [(index, anew, edit) for edit in edits(read, count, seed + anew, CONTENT if anew else ())]


def prepare(target: Target, place: Path) -> Files:
    """Create a target twice, in `one` and `two`; returns the files of the first."""
    for save, name in enumerate(("one", "two")):
        (place / name).mkdir(parents=True)
        with warnings.catch_warnings(action="ignore"):  # about small, untrained models
            target.make(place / name, save)
    return _files(place / "one")


def answers_alike(place: str, case: Case) -> str:
    """Edit a copy of the target prepared in the folder of its index, load it, and compare the answers."""
    index, anew, edit = case
    files, twin, right = known(f"{place}/{index}", index)
    with tempfile.TemporaryDirectory(dir=PLACE) as temporary:
        folder, outside = Path(temporary) / "saved", Path(temporary) / OUTSIDE
        _write(folder, files)
        apply(folder, edit, twin)
        whole = len(files) == 1 and edit.arguments[0] == "twin"  # the only file, replaced by another save's
        hidden = whole or edit.file in TARGETS[index].bare or (anew and write_digests(folder, files))
        before = outside.read_bytes() if outside.exists() else b""
        answer = TARGETS[index].answer(folder)
        if before and (not outside.exists() or outside.read_bytes() != before):
            raise AssertionError("a file outside of the folder was changed")
    return "same" if answer == right else "apart" if hidden else "other"


def write_digests(folder: Path, original: Files) -> bool:
    """Replace digests of the original files and contents by valid ones; returns whether there were any."""
    written = False
    for _ in range(4):  # a digest may cover a file with digests
        now = {name: content for name, content in _files(folder).items() if name in original}
        changed = {
            hashlib.sha256(original[name]).hexdigest(): hashlib.sha256(content).hexdigest()
            for name, content in now.items()
            if content != original[name]
        }
        for name, content in now.items():
            text = content
            for before, after in changed.items():
                text = text.replace(before.encode(), after.encode())
            document = read_document(text)
            for part in () if document is None else document[0] if document[1] else (document[0],):
                if isinstance(part, dict) and isinstance(part.get(DIGEST), str) and part[DIGEST]:
                    try:
                        right = digest({key: value for key, value in part.items() if key != DIGEST})
                    except HydraError:  # not JSON, no digest
                        continue
                    text = text.replace(part[DIGEST].encode(), right.encode())
            if text != content:
                (folder / name).write_bytes(text)
                written = True
    return written


@cache
def known(place: str, index: int) -> tuple[Files, Files, str]:
    """The files of both saves, and the right answer as computed by this process."""
    one, two = _files(Path(place) / "one"), _files(Path(place) / "two")
    with tempfile.TemporaryDirectory(dir=PLACE) as temporary:
        _write(Path(temporary) / "saved", one)
        return one, two, TARGETS[index].answer(Path(temporary) / "saved")


def _files(folder: Path) -> Files:
    found = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def _write(folder: Path, files: Files) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

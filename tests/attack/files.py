"""Every stored format under attack: files are edited, read again, and the answer is held against the one before.

Half of the edits are as accidents make them. For the other half the digests are then written anew, as somebody would
who knows the format and edits it by hand: no format can notice those, so another answer is counted apart.
"""

import hashlib
import tempfile
import warnings
from functools import cache, partial
from pathlib import Path

from hydra_ensembles.errors import HydraError
from hydra_ensembles.files import DIGEST, digest_of

from .counting import Row, count
from .edits import OUTSIDE, Edit, Files, apply, edits, read_document
from .targets import TARGETS, Target

Case = tuple[int, bool, Edit]  # number of the target, whether digests are written anew, and what is edited

CASES = 10_080
PLACE = "/dev/shm" if Path("/dev/shm").is_dir() else None  # files in memory: a disk is slow
CONTENT = ("json", "tensors", "bytes")  # kinds of edits after which digests are written anew


def run(cases: int, seed: int) -> list[Row]:
    """About so many edits, equally many of each format."""
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
    """Edits of one target, with or without digests written anew; a model card is for people, nothing reads it back."""
    read = {name: content for name, content in files.items() if not name.endswith("README.md")}
    return [(index, anew, edit) for edit in edits(read, count, seed + anew, CONTENT if anew else ())]


def prepare(target: Target, place: Path) -> Files:
    """Make a target twice, in `one` and `two`; the files of the first."""
    for save, name in enumerate(("one", "two")):
        (place / name).mkdir(parents=True)
        with warnings.catch_warnings(action="ignore"):  # of models that are small and know nothing
            target.make(place / name, save)
    return _files(place / "one")


def answers_alike(place: str, case: Case) -> str:
    """Edit a copy of a target that was prepared in the folder of its number, read it, and compare the answers."""
    index, anew, edit = case
    files, twin, right = known(f"{place}/{index}", index)
    with tempfile.TemporaryDirectory(dir=PLACE) as temporary:
        folder, outside = Path(temporary) / "saved", Path(temporary) / OUTSIDE
        _write(folder, files)
        apply(folder, edit, twin)
        whole = len(files) == 1 and edit.arguments[0] == "twin"  # all there is, of another save
        hidden = whole or edit.file in TARGETS[index].bare or (anew and write_digests(folder, files))
        before = outside.read_bytes() if outside.exists() else b""
        answer = TARGETS[index].answer(folder)
        if before and (not outside.exists() or outside.read_bytes() != before):
            raise AssertionError("a file outside of the folder was changed")
    return "same" if answer == right else "apart" if hidden else "other"


def write_digests(folder: Path, original: Files) -> bool:
    """Write right digests in place of those of the original files, of files and of content; whether there were any."""
    written = False
    for _ in range(4):  # a digest may be of a file that holds digests
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
                        right = digest_of({key: value for key, value in part.items() if key != DIGEST})
                    except HydraError:  # what is no JSON has no digest
                        continue
                    text = text.replace(part[DIGEST].encode(), right.encode())
            if text != content:
                (folder / name).write_bytes(text)
                written = True
    return written


@cache
def known(place: str, index: int) -> tuple[Files, Files, str]:
    """The files of both saves, and the right answer as this process computes it."""
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

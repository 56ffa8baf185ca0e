"""Disks that refuse writes, being full or read-only, and the permissions of new files."""

import os
import resource
import stat
from pathlib import Path
from random import Random

from hydra_ensembles.errors import StorageError

from .children import Ending, confine, forked
from .counting import Row, count
from .jobs import JOBS, Job, end_of, files_in, folder_of, given, require_known_state, require_whole, undisturbed

CASES = 150

Case = tuple[str, str, int]  # the disturbance, a job, and its size
READ_AGAIN = tuple(name for name in JOBS if name.startswith(("finetune", "tune_text", "build")))  # without writing
SIZES = (0, 1, 100, 1_000, 3_000, 8_000, 16_000, 32_000, 1 << 20)


def run(cases: int, seed: int) -> list[Row]:
    """One row each for full disks, read-only folders, and umasks."""
    share = max(1, round(cases * 0.7 / len(JOBS)))
    random = Random(seed)
    full = [("full", name, size) for name in JOBS for size in sorted(random.sample(SIZES, min(share, len(SIZES))))]
    others = Random(seed).sample(list(JOBS), max(1, min(len(JOBS), cases // 8)))
    return [
        count("disk full", check, full),
        count("read-only folder", check, [("read-only", name, 0) for name in others]),
        count("read-only folder, finished", check, [("finished", name, 0) for name in others if name in READ_AGAIN]),
        count("umask", check, [("umask", name, mask) for name in others for mask in (0o077, 0o022)]),
    ]


def check(case: Case) -> str:
    what, name, size = case
    checks = {"full": _full, "read-only": _read_only, "finished": _finished, "umask": _umask}
    return checks[what](name, size)


def _full(name: str, size: int) -> str:
    """With a limit on file size, the job is refused, no file is truncated, and with more space it resumes."""
    job, usual = JOBS[name], undisturbed(name)
    with folder_of(job) as folder:

        def cramped() -> str:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
            return job.run(folder)

        ending = forked(cramped)
        require_whole(folder)
        require_known_state(job, folder, usual.states)
        if ending.how == "refused":
            left = [file for file in files_in(folder) if file.endswith(".tmp") or ".saving-" in file]
            if left:
                raise AssertionError(f"refused, and leaves {left[:5]}: {ending.value}")
            if end_of(forked(lambda: job.run(folder)), name, folder, "with more space again") == "other":
                return "other"
            raise StorageError(str(ending.value))
        return "same" if given(ending) == usual.result else "other"


def _read_only(name: str, size: int) -> str:
    """A read-only folder is refused."""
    with folder_of(JOBS[name]) as folder:
        ending = _confined(JOBS[name], folder)
    if ending.how == "refused":
        raise StorageError(str(ending.value))
    given(ending)
    return "other"


def _finished(name: str, size: int) -> str:
    """If the work was finished before, it is loaded from a read-only folder."""
    job, usual = JOBS[name], undisturbed(name)
    with folder_of(job) as folder:
        given(forked(lambda: job.run(folder)))
        return "same" if given(_confined(job, folder)) == usual.result else "other"


def _confined(job: Job, folder: Path) -> Ending:
    """Run a job in its folder after making it read-only."""
    before = files_in(folder)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)

    def work() -> str:
        confine()
        return job.run(folder)

    ending = forked(work)
    if files_in(folder) != before:
        raise AssertionError(f"wrote {sorted(set(files_in(folder)) - set(before))} to a read-only folder")
    return ending


def _umask(name: str, mask: int) -> str:
    """New files have exactly the permissions that the umask leaves."""
    job, usual = JOBS[name], undisturbed(name)
    with folder_of(job) as folder:

        def masked() -> str:
            os.umask(mask)
            return job.run(folder)

        before = set(files_in(folder))
        if given(forked(masked)) != usual.result:
            return "other"
        for file in sorted(set(files_in(folder)) - before) or sorted(before):
            path = folder / file
            rights, wanted = stat.S_IMODE(path.stat().st_mode), (0o777 if path.is_dir() else 0o666) & ~mask
            if rights != wanted:
                raise AssertionError(f"{file} has rights {rights:o}, and the umask {mask:03o} leaves {wanted:o}")
    return "same"

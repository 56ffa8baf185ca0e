"""Kills at named points of every long work, second kills while it goes on, and the same bits in the end."""

from random import Random

from .children import forked, killed_at, watch
from .counting import Row, count
from .jobs import JOBS, files_in, folder_of, require_known_state, require_whole, undisturbed

CASES = 150

Case = tuple[str, float, float | None]  # a job, and where it is killed: how far along its points, twice perhaps


def run(cases: int, seed: int) -> list[Row]:
    """One row for each job; every other case is killed once more while it goes on."""
    rows, random = [], Random(seed)
    shares = [cases // len(JOBS) + (index < cases % len(JOBS)) for index in range(len(JOBS))]
    for name, share in zip(JOBS, shares, strict=True):
        places = [(index + random.random()) / share for index in range(share)]
        drawn = [
            (name, round(place, 4), round(random.random(), 4) if index % 2 else None)
            for index, place in enumerate(places)
        ]
        if drawn:
            rows.append(count(f"killed: {name}", check, drawn))
    return rows


def check(case: Case) -> str:
    """Kill, perhaps twice, look at what is there, go on, and hold the result against that of an undisturbed run."""
    name, *places = case
    job, usual = JOBS[name], undisturbed(name)
    with folder_of(job) as folder:
        reached = []
        for place in places:
            if place is None:
                continue
            number = int(place * len(usual.points))

            def interrupted(number: int = number) -> str:
                watch(killed_at(number))
                return job.run(folder)

            ending = forked(interrupted)
            if ending.how != "killed" and not reached:
                raise AssertionError(f"was to be killed at point {number} of {len(usual.points)}: {ending}")
            reached.append(number)
            require_whole(folder)
            require_known_state(job, folder, usual.states)
        where = ", ".join(f"{number} ({usual.points[number]})" for number in reached)
        ending = forked(lambda: job.run(folder))
        if ending.how != "given":
            raise AssertionError(f"killed at {where}, it does not go on: {ending.how}: {ending.value}")
        if ending.value != usual.result:
            return "other"
        left = sorted(set(files_in(folder)) ^ set(usual.files))
        if left:
            raise AssertionError(f"killed at {where}, files are left over or missing: {left[:5]}")
    return "same"

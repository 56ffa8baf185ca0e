"""Kills at named points of every long job, second kills while it resumes, and the same bits in the end."""

from random import Random

from .children import forked, killed_at, watch
from .counting import Row, count
from .jobs import JOBS, end_of, folder_of, require_known_state, require_whole, undisturbed

CASES = 150

Case = tuple[str, float, float | None]  # a job, and its kills as fractions of its points; the second is optional


def run(cases: int, seed: int) -> list[Row]:
    """One row per job; every other case is killed again while it resumes."""
    rows, random = [], Random(seed)
    for number, name in enumerate(list(JOBS)[:cases]):
        share = cases // len(JOBS) + (number < cases % len(JOBS))
        places = [round((index + random.random()) / share, 4) for index in range(share)]
        drawn = [(name, place, round(random.random(), 4) if index % 2 else None) for index, place in enumerate(places)]
        rows.append(count(f"killed: {name}", check, drawn))
    return rows


def check(case: Case) -> str:
    """Kill, perhaps twice, check the folder, resume, and compare with an undisturbed run."""
    name, *places = case
    job, usual = JOBS[name], undisturbed(name)
    with folder_of(job) as folder:
        reached = []
        for number in (int(place * len(usual.points)) for place in places if place is not None):

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
        return end_of(forked(lambda: job.run(folder)), name, folder, f"after a kill at {where}")

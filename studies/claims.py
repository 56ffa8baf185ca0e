"""The paper's claims compared with a stored study: its difference, ours, and a verdict with a margin.

A claim is reproduced if the whole interval lies on its side of the margin.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .cells import ACROSS, ACROSS_TOLD, gap_text, printed
from .measures import FEWEST_SEEDS, Difference
from .paper import Numbers, paper_numbers, read_csv
from .results import markdown
from .stored import ALL_BUT, UNSEEN, DualStudy, Study


def claims(study: Study) -> list[dict[str, Any]]:
    """The paper's claims about the task that this study stands for, each with margin, both differences and verdict."""
    if isinstance(study, DualStudy):
        paper: Mapping[str, Numbers] = study.paper()
        missing = "not testable"
        scopes = {"each ID task": study.detections}
        listed = [
            ({**claim, "scope": scope}, f"{scope}.{claim['metric']}")
            for claim in read_csv("zero_shot_claims")
            for scope in scopes.get(claim["scope"], [UNSEEN])
        ]
    else:
        paper, missing = paper_numbers("classifier", study.stands_for), "not run"
        of_task = [claim for claim in read_csv("classifier_claims") if study.stands_for in claim["tasks"].split(";")]
        listed = [({**claim}, claim["metric"]) for claim in of_task]
    tried = []
    for claim, key in listed:
        rows = claim["first"], claim["second"]
        theirs = [paper[row][key] for row in rows if key in paper.get(row, {})]
        ours = study.difference(*rows, key)
        verdict = missing if ours is None else judged(ours, claim["is"], float(claim["margin"]))
        gap = theirs[0] - theirs[1] if len(theirs) == 2 else None
        tried.append({**claim, "paper": gap, "ours": ours, "verdict": verdict, "across": study.across(*rows)})
    return tried


def judged(gap: Difference, claimed: str, margin: float) -> str:
    """Whether an interval lies on the claimed side of the margin, the other, or both; below three seeds, their number.

    For rows from two runs, the verdict is a tie unless the uncorrected rows give the same verdict.
    """
    if gap.as_they_are is not None:
        verdicts = {judged(version, claimed, margin) for version in (replace(gap, as_they_are=None), gap.as_they_are)}
        return verdicts.pop() if len(verdicts) == 1 else "tie"
    if gap.seeds < FEWEST_SEEDS:
        return "one seed" if gap.seeds == 1 else "two seeds"
    sign = -1.0 if claimed in ("lower", "not higher") else 1.0
    low, high = sorted((sign * (gap.value - gap.half_width), sign * (gap.value + gap.half_width)))
    edge = 0.0 if claimed in ("lower", "higher") else -margin
    return "reproduced" if low > edge else "not reproduced" if high < edge else "tie"


EXPLORED = (
    "Last column, exploratory: every one of {} OOD sets was left out in turn, after the fact; shown is what would "
    "cross the margin or stop doing so. It is no verdict."
)


def claims_table(study: Study) -> str:
    """The claims with the paper's difference and ours, and the OOD sets whose removal would change the verdict."""
    lines = []
    missing = list[str]()
    tried = claims(study)
    for claim in tried:
        if claim["ours"] is None:
            first, second = claim["first"], claim["second"]
            missing += [row for row in (first, second) if row not in study.rows] or [f"{first} beside {second}"]
            continue
        alone = "; ".join(f"{gap_text(gap, claim['metric'])} without {name}" for name, gap, _ in hangs_on(study, claim))
        lines.append([*claim_cells(claim), alone])
    wanting = f"Not tested, for want of rows: what the paper claims of {', '.join(dict.fromkeys(missing))}."
    notes = [
        wanting if missing else "",
        ACROSS_TOLD if any(claim["across"] for claim in tried) else "",
        EXPLORED.format(len(study.outside)) if any(line[-1] for line in lines) else "",
    ]
    head = ["claim", "margin", f"paper, {study.stands_for}", "here", "verdict", "without one set"]
    note = " ".join(text for text in notes if text)
    return markdown(head, lines, note) if lines else f"*{note}*"


def hangs_on(study: Study, claim: Mapping[str, Any]) -> list[tuple[str, Difference, str]]:
    """OOD sets whose removal changes the verdict on a claim about all of them: name, difference and verdict."""
    if claim["metric"] != "all.auroc" or claim["ours"] is None or len(study.outside) < 2:
        return []
    decisive = []
    for name in study.outside:
        gap = study.difference(claim["first"], claim["second"], f"{ALL_BUT}{name}.auroc")
        if gap is not None and (verdict := judged(gap, claim["is"], float(claim["margin"]))) != claim["verdict"]:
            decisive.append((name, gap, verdict))
    return decisive


def claim_cells(claim: Mapping[str, Any]) -> list[str]:
    """The cells of a claim: its words, margin, the paper's difference, ours, and the verdict."""
    ours, metric = claim["ours"], claim["metric"]
    difference = "–" if ours is None else gap_text(ours, metric)
    margin = printed(float(claim["margin"]), metric)
    claimed = f"{claim['first']} {claim['claim']}{f' {ACROSS}' if claim['across'] else ''}"
    return [claimed, margin, printed(claim["paper"], metric, "+"), difference, claim["verdict"]]


def not_testable_table(_: Study, kind: str = "classifier") -> str:
    """Claims that these data and models cannot test."""
    lines = [[row["claim"], row["why"]] for row in read_csv("not_testable") if row["kind"] == kind]
    return markdown(["claim", "why it is not testable here"], lines, align="ll")

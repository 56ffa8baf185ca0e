"""The claims of sections 5.1 to 5.3 of the paper, each with ours and a verdict, from stored tables.

`paper/claims.csv` lists them: a difference of two methods in a study that stands for the paper's task, or a ratio of
the benchmark of inference. Intervals of 95 % are over seeds and test samples where `STUDY_pairs.csv` has them, and over
seeds alone for FPR95, AUPR and aECE. A claim `holds` or `differs` if the whole interval is on one side.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import mean, stdev

from scipy.special import stdtrit

from . import paper
from .measures import FEWEST_SEEDS, LEVEL
from .tables import Cells, read_csv, write_csv

HEAD = ("claim", "section", "paper", "ours", "low", "high", "verdict", "study", "first", "second", "metric", "seeds")
COUNTED = {"dtype": "bfloat16", "mode": "graphed", "batch": "4", "hardware": "NVIDIA H200"}
OTHERWISE = {"bert-base-6": {"dtype": "float16"}}  # by shape
TIMES = ("inference.csv", "inference_paper.csv")  # a row of the second, where a whole test is run, goes before
Line = Mapping[str, str]
Found = tuple[float, float, float, int | str]  # value, interval, seeds


def paired(tables: Path, claim: Line) -> Found | None:
    """The stored difference of two methods, or None: interval over seeds and samples if there is one."""
    first, second, metric = claim["first"], claim["second"], claim["metric"]
    for line in read_csv(tables / f"{claim['study']}_pairs.csv"):
        if line["metric"] == metric and {line["first"], line["second"]} == {first, second}:
            gap = float(line["difference"]) * (1 if line["first"] == first else -1)
            half = float(line["half_width"])
            return gap, gap - half, gap + half, int(line["seeds"])
    by_seed: dict[str, dict[str, float]] = {first: {}, second: {}}
    for line in read_csv(tables / f"{claim['study']}_seeds.csv"):
        if line["method"] in by_seed and line.get(metric):
            by_seed[line["method"]][line["seed"]] = float(line[metric])
    gaps = [value - by_seed[second][seed] for seed, value in by_seed[first].items() if seed in by_seed[second]]
    if len(gaps) < FEWEST_SEEDS:
        return None
    half = float(stdtrit(len(gaps) - 1, (1 + LEVEL) / 2)) * stdev(gaps) / len(gaps) ** 0.5
    return mean(gaps), mean(gaps) - half, mean(gaps) + half, len(gaps)


def timed(tables: Path, claim: Line) -> Found | None:
    """A ratio of times or parameters of the benchmark of inference, with its fastest and slowest round."""
    counted = COUNTED | {"shape": claim["study"]} | OTHERWISE.get(claim["study"], {})
    lines = (line for name in TIMES for line in read_csv(tables / name))
    rows = {line["contender"]: line for line in lines if counted.items() <= line.items()}
    if claim["first"] not in rows:
        return None
    first = rows[claim["first"]]
    if claim["metric"] == "parameters":
        ratio = float(first["parameters"]) / float(rows[claim["second"]]["parameters"])
        return ratio, ratio, ratio, ""
    middle, low, high = (
        float(first[f"latency_{kind}ms"]) / float(first["single_ms"]) for kind in ("", "low_", "high_")
    )
    return middle, low, high, ""


def verdict(found: Found | None, claim: Line, least: float) -> str:
    """Whether an interval lies on the claimed side of the least that is claimed."""
    if not claim["study"]:
        return "not testable here"
    if found is None:
        return "not decided"
    sign = -1.0 if claim["is"] in ("lower", "not higher") else 1.0
    low, high = sorted((sign * found[1], sign * found[2]))
    return "holds" if low > sign * least else "differs" if high < sign * least else "not decided"


def judged(tables: Path) -> Iterator[Cells]:
    """Every claim with its verdict."""
    yield HEAD
    for claim in paper.read_csv("claims"):
        ratio = claim["metric"] in ("time", "parameters")
        found = (timed if ratio else paired)(tables, claim) if claim["study"] else None
        least = float(claim["margin"] or 0)
        if not ratio:  # a difference may miss zero by the margin
            least *= 1 if claim["is"] in ("lower", "not higher") else -1
        numbers = ("", "", "", "") if found is None else found
        where = (claim[key] for key in HEAD[7:11])
        yield (
            claim["claim"],
            claim["section"],
            claim["paper"],
            *numbers[:3],
            verdict(found, claim, least),
            *where,
            numbers[3],
        )


def diverse(tables: Path) -> Iterator[Cells]:
    """How much members differ, with averaged MLPs and with their own (B.7)."""
    keys = ("disagreement", "all.disagreement", "mutual_information", "all.mutual_information")
    yield (
        "task",
        "seed",
        "members",
        "mlps",
        "disagreement",
        "ood_disagreement",
        "mutual_information",
        "ood_mutual_information",
    )
    for line in read_csv(tables / "analysis_members.csv"):
        kind, _, members = line["row"].rpartition(", ")
        mlps = {"Hydra (Circ)": "averaged", "MLPs apart": "own"}.get(kind)
        if mlps and members != "1":
            yield line["task"], line["seed"], members, mlps, *(line[key] for key in keys)


def write_claims(results: Path) -> tuple[Path, Path]:
    """Write `tables/paper_claims.csv` and `tables/diversity.csv`."""
    tables = results / "tables"
    return (
        write_csv(tables / "paper_claims.csv", judged(tables)),
        write_csv(tables / "diversity.csv", diverse(tables)),
    )

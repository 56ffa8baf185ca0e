"""Numbers in sentences of the documents, each from a file under `results/`, and checks of the words about them.

Below one or more paragraphs, a comment names the sources of their numbers, one line per number, in order:

    Hydra is 0.65 points more accurate, at 1.33 times the work; the soup is as good within chance.
    <!-- numbers:
    vision-cifar100 | Hydra - Single | accuracy | better
    vision-cifar100 | Hydra / Single | work
    ! vision-cifar100 | Soup - Hydra | accuracy | chance
    -->

`tables.py` rewrites the numbers, with as many decimals as they have. It cannot rewrite words, so it fails if a number
without a sign is negative, or if a claim is wrong: significantly `better` or `worse`, not significant (`chance`), on
average `higher` or `lower`. A line that begins with `!` is a claim without a number. At the end of a difference,
`, all looks` makes its interval as wide as a correction for all looks at the test set says (`studies/data/looks.yaml`):
with `| better, all looks` a gain survives it, with `| better` and a second line `| chance, all looks` it does not;
`, 6 looks` corrects for that many.

Lines, with their parts separated by ` | ` (several on a line are separated by ` ; `):

- `STUDY | ROW | KEY`, `STUDY | ROW - ROW | KEY`: a mean, a paired difference (`± KEY`: half its interval), of a stored
  study; `cost`, `work`, `parameters`, `trainings`, `seeds` of `ROW`, or of `ROW / ROW`. `most`, `least` in place of
  a row: of all rows; `KEY & KEY` of a row: their mean. `ROW @ 0`: of that seed alone; `ROW @ all`: the plain mean over
  all its seeds, not relative to Single's.
- `STUDY | claims | VERDICT`: how many of the paper's claims have it; `STUDY | claims of all.auroc | VERDICT`: of those
  that say that this metric is higher.
- `intervals | TABLE`: the number of intervals in a table of all studies (`gains`, `methods`); `| certain`: that exclude
  zero; `| by chance`: that would if nothing differed.
- `STUDY | foretold | KEY`: rank correlation of a metric of chosen settings between held-out and test data; as
  `KEY by KEY`: of the first on the test with the second on held-out data.
- `FILE | PATH`: from a JSON file, in per cent with ` | %`; `*` in the path is each entry there, and the number is their
  mean, or `most`, `least` (`~1` is a `/` in a name). A step `batch=4,mode=graphed` is each entry of a list with these
  values. `PATH - PATH` and `PATH / PATH` are the difference and the ratio.
- `given 3 0.5`: exactly these numbers, which are not results: settings, definitions, sizes of sets.
"""

import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

from studies.all_tasks import intervals
from studies.cells import LOWER, PLAIN
from studies.claims import claims
from studies.findings import foretold
from studies.measures import FEWEST_SEEDS, LEVEL, Difference
from studies.results import fixed
from studies.stored import DualStudy, Study

COMMENT = re.compile(r"<!-- numbers:\n(.*?)\n *-->", re.DOTALL)
NUMBER = re.compile(r"(?<![\w./,-])([+−-]?)(\d{1,3}(?:,\d{3})+|\d+)(\.\d+)?(?=x?(?![\w/-]|\.\d|,\d))")  # 8x, too
NO_PROSE = re.compile(  # code, targets of links, generated parts, tables, headings, and numbers of tables and figures
    r"```.*?```|`[^`]+`|!\[[^\]]*\]|\]\([^)]*\)|<!-- (?:table|code): .*?<!-- end -->|^\|[^\n]*|^ {4}[^\n]*|^#[^\n]*"
    r"|(?:Tables?|Figures?|Appendix|section|Python|Part) \d+(?:(?:, | and | to )\d+)*|<!--.*?-->|^\d+\. ",
    re.DOTALL | re.MULTILINE,
)
A_NUMBER = next(NUMBER.finditer("+0.0"))  # stands for a number of any form
GIVEN, AT, ALL = "given", " @ ", "all"
OF_ALL: Mapping[str, Callable[[Sequence[float]], float]] = {"most": max, "least": min}
BETWEEN: Mapping[str, Callable[[float, float], float]] = {" - ": operator.sub, " / ": operator.truediv}
PRICES = ("cost", "work", "parameters", "trainings", "seeds")
VERDICTS = ("reproduced", "not reproduced", "tie", "not run", "not testable", "one seed", "two seeds")
CLAIMED, CLAIMED_OF = "claims", "claims of "
CLAIMS = ("better", "worse", "chance", "higher", "lower")
LOOKS = re.compile(r", (all|\d+) looks$")


UNCHECKED: Mapping[str, str] = {  # pages, below the root, with numbers in sentences that need no source, and why
    "docs/architecture.md": "axes and numbers of layers, no results",
    "docs/cli.md": "settings, and an exit status",
    "docs/concepts/abstaining.md": "levels of an example",
    "docs/concepts/calibration.md": "a level of an example",
    "docs/glossary.md": "bounds of definitions",
    "docs/how-to/abstain.md": "levels, and what follows from them by arithmetic",
    "docs/how-to/atlas.md": "arithmetic of an example",
    "docs/how-to/choose_members.md": "settings of an example",
    "docs/how-to/clip.md": "settings of an example, below what is quoted",
    "docs/how-to/export.md": "a tolerance, and a limit of the format",
    "docs/how-to/hf_bert.md": "a version of a library",
    "docs/how-to/own_model.md": "a value of a mask",
    "docs/how-to/paper_tables.md": "settings of the paper",
    "docs/how-to/score.md": "the label of an input without an answer",
    "docs/how-to/search.md": "sizes and a price of an example",
    "docs/paper_map.md": "the paper's date, number and settings",
    "docs/production.md": "statuses of answers, and settings to begin with",
    "docs/pruning_under_noise.md": "sizes of a model, and bounds of definitions; its results are a table",
    "docs/reliability.md": "limits that cases are judged by; its results are a table",
    "docs/table_7.md": "parameters counted by hand from shapes, as the page shows",
}


class UnbackedError(Exception):
    """A sentence that the results do not support."""


def written(text: str, studies: Mapping[str, Study], results: Path) -> tuple[str, list[str]]:
    """A document with the numbers of its sentences as in the files, and the sentences that these do not support."""
    parts, wrong, start = list[str](), list[str](), 0

    def new(source: str, match: re.Match[str]) -> str:
        try:
            return formatted(number_of(source, studies, results), match, source)
        except (UnbackedError, KeyError, IndexError, OSError) as error:
            wrong.append(f"{match[0]} ({source}): {error!r}")
            return match[0]

    for comment in COMMENT.finditer(text):
        before = text[start : comment.start()]
        lines = [part.strip() for line in comment[1].splitlines() for part in line.split(" ; ")]
        for claim in (line.removeprefix("! ") for line in lines if line.startswith("! ")):
            new(claim, A_NUMBER)
        matches = numbers_in(before)
        sources = [source for line in lines if line and not line.startswith("! ") for source in listed(line)]
        if len(matches) != len(sources):
            texts = ", ".join(match[0] for match in matches)
            wrong.append(f"{len(matches)} numbers ({texts}) have {len(sources)} sources: {'; '.join(sources)}")
        end = 0
        for match, source in zip(matches, sources, strict=False):
            parts += [before[end : match.start()], new(source, match)]
            end = match.end()
        parts += [before[end:], comment[0]]
        start = comment.end()
    return "".join([*parts, text[start:]]), wrong


def listed(line: str) -> list[str]:
    """One source for each number of a line."""
    word, *rest = line.split(" ")
    return [f"{GIVEN} | {number}" for number in rest] if word == GIVEN else [line]


def numbers_in(text: str) -> list[re.Match[str]]:
    """Numbers in the prose of a text."""
    prose = NO_PROSE.sub(lambda match: re.sub(r"[^\n]", "x", match[0]), text)
    return list(NUMBER.finditer(prose))


def without_source(text: str) -> list[str]:
    """Numbers of a document after the last comment, which therefore have no source."""
    *_, end = [0, *(comment.end() for comment in COMMENT.finditer(text))]
    return [match[0] for match in numbers_in(text[end:])]


def formatted(value: float | str, match: re.Match[str], source: str) -> str:
    """A number in the form of the one in the text; a given number must equal it."""
    if isinstance(value, str):
        if value != match[0]:
            raise UnbackedError(f"{value} is given")
        return value
    sign, _, decimals = match.groups()
    text = fixed(abs(value), len(decimals or ".") - 1)
    if sign:
        return f"{'+' if value >= 0 else '−' if sign == '+' else sign}{text}"
    if value < 0 and float(text.replace(",", "")):
        raise UnbackedError(f"{source} is {value:.3f}, and the sentence has no sign")
    return text


def number_of(source: str, studies: Mapping[str, Study], results: Path) -> float | str:
    """The number that a line names, as documents write it."""
    origin, *rest = (part.strip() for part in source.split(" | "))
    if origin == GIVEN:
        return rest[0]
    if origin.endswith(".json"):
        return of_file(results / origin, rest)
    if origin == "intervals":
        return counted([study for study in studies.values() if not isinstance(study, DualStudy)], *rest)
    if looks := LOOKS.search(rest[-1]):
        rest[-1] = rest[-1][: looks.start()]
    claim = rest.pop() if rest[-1] in CLAIMS else None
    rows, key = rest
    if looks and " - " not in rows:
        raise UnbackedError(f"{source}: only differences have looks")
    if rows == "foretold":
        key, _, said = key.partition(" by ")
        if (correlation := foretold(studies[origin], said or key, key)) is None:
            raise UnbackedError(f"{origin} has too few settings that were chosen")
        return correlation[0]
    value = of_study(studies[origin], rows, key, looks[1] if looks else "1")
    if isinstance(value, Difference):
        if claim and not holds(value, key, claim):
            raise UnbackedError(f"{source}: {scaled(value.value, key):+.3f} ± {scaled(value.half_width, key):.3f}")
        value = value.half_width if key.startswith("± ") else value.value
    elif claim:
        raise UnbackedError(f"{source}: only differences are better or worse")
    return scaled(value, key)


def scaled(value: float, key: str) -> float:
    """In per cent, except what is not a share."""
    last = key.removeprefix("± ").rpartition(".")[2]
    return value if last in (*PLAIN, *PRICES, *VERDICTS) else 100 * value


def holds(gap: Difference, key: str, claim: str) -> bool:
    """Whether a claim about a difference holds."""
    if claim in ("higher", "lower"):
        return (gap.value > 0) == (claim == "higher")
    if claim == "chance":
        return gap.seeds >= FEWEST_SEEDS and not gap.certain
    improved = (gap.value < 0) == (key.removeprefix("± ").rpartition(".")[2] in LOWER)
    return gap.certain and improved == (claim == "better")


def of_study(study: Study, rows: str, key: str, looks: str = "1") -> float | Difference:
    """A number of one row, of two rows, or the largest or smallest of all rows."""
    if rows == CLAIMED or rows.startswith(CLAIMED_OF):
        tested = claims(study)
        if rows != CLAIMED:
            metric = rows.removeprefix(CLAIMED_OF)
            tested = [claim for claim in tested if (claim["metric"], claim["is"]) == (metric, "higher")]
        return float(sum(claim["verdict"] == key for claim in tested))
    if rows in OF_ALL:
        return OF_ALL[rows]([value for row in study.rows if (value := study.mean(row, key)) is not None])
    if " - " in rows:
        first, second = rows.split(" - ")
        counted = study.looks(first, second) if looks == "all" else int(looks)
        gap = study.difference(first, second, key.removeprefix("± "), counted)
        if gap is None:
            raise UnbackedError(f"{study.name} has no {key} of {rows}")
        return gap
    if " / " in rows:
        first, second = rows.split(" / ")
        return price(study, first, key) / price(study, second, key)
    if AT in rows:
        row, _, seed = rows.partition(AT)
        seeds = study.seeds(row) if seed == ALL else [int(seed)]
        return mean(study.numbers(row, number)[key].value for number in seeds)
    if " & " in key:
        return mean(float(of_study(study, rows, part)) for part in key.split(" & "))  # type: ignore[arg-type]
    if key in PRICES:
        return price(study, rows, key)
    value = study.mean(rows, key) if rows in study.rows else None
    if value is None:
        raise UnbackedError(f"{study.name} has no {key} of {rows}")
    return value


def counted(studies: Sequence[Study], table: str, kind: str = "") -> float:
    """The number of intervals in a table of all studies, or how many exclude zero, found or expected by chance."""
    gaps = list(intervals(studies, table))
    return {
        "": float(len(gaps)),
        "certain": float(sum(gap.certain for gap in gaps)),
        "by chance": (1 - LEVEL) * len(gaps),
    }[kind]


def price(study: Study, row: str, key: str) -> float:
    """A cost of a row."""
    report = study.facts["runs"][str(study.seeds(row)[0])]["report"][row]
    match key:
        case "cost":
            return float(study.cost(row)["latency_ratio"])
        case "work":
            return float(report["multiply_adds"])
        case "parameters":
            return float(report["parameters"]) / 1e6
        case "trainings":
            return float(study.facts["trainings"][row])
    return len(study.seeds(row))


def of_file(path: Path, rest: Sequence[str]) -> float:
    """A number of a JSON file."""
    selector, *options = rest
    content = read(path)
    joined = OF_ALL.get(options[0] if options else "", mean)
    for between, operation in BETWEEN.items():
        if between in selector:
            first, second = (joined(at(content, side.split("/"))) for side in selector.split(between))
            value = operation(first, second)
            break
    else:
        value = joined(at(content, selector.split("/")))
    return 100 * value if "%" in options else value


def at(content: Any, steps: Sequence[str]) -> list[float]:
    """Every number at a path."""
    if not steps:
        return [float(content)]
    step, *rest = steps
    if step == "*":
        entries = list(content.values() if isinstance(content, dict) else content)
    elif isinstance(content, list) and "=" in step:
        values = dict(part.split("=") for part in step.split(","))
        entries = [entry for entry in content if all(str(entry.get(key)) == value for key, value in values.items())]
        if not entries:
            raise UnbackedError(f"nothing there has {step}")
    else:
        entries = [content[int(step)] if isinstance(content, list) else content[step.replace("~1", "/")]]
    return [number for entry in entries for number in at(entry, rest)]


@cache
def read(path: Path) -> Any:
    """A JSON file, read once."""
    return json.loads(path.read_text(encoding="utf-8"))

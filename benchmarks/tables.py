"""Write what the documentation takes from elsewhere: tables and numbers from `results/`, code from `examples/`.

    python benchmarks/tables.py           # rewrite
    python benchmarks/tables.py --check   # fail when marked parts or figures are not what results and examples say

It fails, too, where a number of a sentence has no source, but for pages that `quoted.UNCHECKED` names, with why. What
no check reads is words ("twice", "half"), tables without a mark, and numbers in names and powers (ViT-B/16, 1e-5).

A document marks the place with `<!-- table: NAME -->` or `<!-- code: FILE PART -->`, and `<!-- end -->`; of sentences,
numbers are written whose sources a comment below names (`quoted.py`). Nothing else is touched. What is written is in
the document itself, so that a git host and the site show the same. Analyses without a figure of theirs get it drawn.
"""

import argparse
import re
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import inference_report
import quoted
from circuit import circuit_table
from serve import serve_table

from hydra_ensembles import SearchResult
from hydra_ensembles.convert.convert import supported
from hydra_ensembles.demo import Gains
from hydra_ensembles.report import to_markdown
from hydra_ensembles.schema import from_plain
from studies.all_tasks import TITLES
from studies.analyses.registry import blocks, draw, undrawn
from studies.cells import marked, printed
from studies.circuit_draws import draws_table
from studies.dual_findings import blocks as dual_blocks
from studies.dual_recipe import ZERO_SHOT
from studies.findings import blocks as study_blocks
from studies.results import RESULTS, ROOT, load, markdown
from studies.rows import DEEP, HYDRA, HYDRA_CIRC, HYDRA_TAYLOR, SINGLE, SOUP
from studies.stored import DualStudy, Study, stored_studies
from studies.tower_scores import tower_table

COMPARED = (  # rows of the README
    SINGLE,
    "Single, trained as long",
    "Laplace (last layer)",
    SOUP,
    DEEP,
    HYDRA,
    "Single, D.2, nothing pruned",
    HYDRA_TAYLOR,
    HYDRA_CIRC,
)
GIVEN = {  # columns of the README
    "accuracy": "accuracy ↑",
    "calibrated.nll": "NLL ↓",
    "aurc": "own mistakes, AURC ↓",
    "all.auroc": "foreign, unsure ↑",
    "mahalanobis:all.auroc": "foreign, unfamiliar ↑",
}
PRICES = {  # of price.json
    "accuracy": "accuracy",
    "nll": "NLL",
    "ece": "ECE",
    "aurc": "AURC",
    "auroc_msp": "AUROC, MSP",
    "auroc_mahalanobis": "AUROC, Mahalanobis",
}


def documents() -> list[Path]:
    """README and all pages."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def studies() -> dict[str, Study]:
    """Every stored study by name."""
    classifiers = stored_studies(RESULTS / "studies")
    return {**{study.name: study for study in classifiers}, ZERO_SHOT: DualStudy(ZERO_SHOT, RESULTS / "studies")}


def tables(stored: Mapping[str, Study]) -> dict[str, str]:
    """Every table by name; of the studies, those that a document shows."""
    classifiers = [study for study in stored.values() if not isinstance(study, DualStudy)]
    zero_shot = [study for study in stored.values() if isinstance(study, DualStudy)]
    shown = {name for path in documents() for name in re.findall(r"<!-- table: ([^\n]+) -->", path.read_text())}
    return {
        "circuits": circuit_table("circuit_dinov2_cifar10.json"),
        "scaling": circuit_table("circuit_scaling.json"),
        "circuit_draws": draws_table(),
        "fusion": fusion_table(),
        "tower_scores": tower_table(load("zero_shot_tower_scores.json")),
        "demo": demo_table(),
        "attack": attack_table(),
        "serve": serve_table(),
        "search": to_markdown(SearchResult.load(RESULTS / "search.json").table()),
        "price": price_table(load("price.json")),
        "compared": compared_table(classifiers[0]),
        "demo_gain": demo_line(),
        "conversion": conversion_line(),
        "takes": takes_table(),
        **inference_report.tables(),
        **study_blocks(classifiers, shown),
        **dual_blocks(zero_shot[0], shown),
        **blocks(RESULTS / "analyses"),
    }


def fusion_table() -> str:
    """A table of the documents: every way to fuse the same three members."""
    result = load("fusion_dinov2_cifar10.json")
    lines = []
    for row in result["rows"]:
        ways = [row.get(key, "") for key in ("mlp", "norms", "readout")]
        quality = [f"{100 * row['accuracy']:.1f}", f"{row['nll']:.4f}", f"{100 * row['ece']:.2f}"]
        lines.append((row["method"], *ways, *quality, f"{100 * row['auroc']:.2f}", f"{row['parameters'] / 1e6:.2f} M"))
    header = ("method", "MLP", "norms", "readout", "accuracy", "NLL", "ECE", "AUROC", "parameters")
    about = (
        f"{result['hardware']}, torch {result['torch']}, seed {result['seed']}; {result['holdout_id']} ID and "
        f"{result['holdout_ood']} OOD images held out, {result['prune']} of 72 heads pruned. From "
        "`results/fusion_dinov2_cifar10.json`."
    )
    return markdown(header, lines, about, "llll")


def price_table(result: Mapping[str, Any]) -> str:
    """What an ensemble brings for its price, by the code of a138193: tasks and methods, means over seeds."""
    costs, settings = result["costs"], result["recipe"]
    lines = [
        f"| task | method | cost | {' | '.join(PRICES.values())} |",
        "|---|---|---:|" + "---:|" * len(PRICES),
    ]
    for task, rows in result["tables"].items():
        prices = costs["tasks"][task]
        for name, row in rows.items():
            means = [printed(row[key]["mean"], key) for key in PRICES]
            lines.append(
                f"| {task} | {name} | {prices.get(name, prices['Single'])['ratio']:.2f}x | {' | '.join(means)} |"
            )
        gains = [(rows["Hydra"][key], key) for key in PRICES]
        cells = [f"{printed(gain['difference'], key, '+')} ± {printed(gain['half_width'], key)}" for gain, key in gains]
        lines.append(f"| {task} | *Hydra less Single* | | {' | '.join(cells)} |")
    counts = {task: len(settings["tasks"][task].get("seeds", settings["seeds"])) for task in result["tables"]}
    seeds = ", ".join(f"{count} on {task}" for task, count in counts.items())
    about = (
        f"Means over seeds ({seeds}); differences are to Single of the same seed, ± the half width of Student's 95 % "
        f"interval over the seeds. Ensembles have {settings['members']} members. Per cent but for NLL; calibrated on "
        f"held-out data. AUROC: the mean over the OOD sets of a task. Cost: a batch of {costs['batch']} on an "
        f"{costs['device']}, bfloat16, against Single compiled. From `results/price.json`."
    )
    return "\n".join([*lines, "", about])


def demo_table() -> str:
    """Of the quickstart: the table of one run of the demo."""
    gains = from_plain(Gains, load("demo.json")["gains"], "gains")
    return "\n".join([to_markdown(gains.table).rstrip(), "From `results/demo.json`."])


def compared_table(study: Study) -> str:
    """Of the README: what methods take and give on one task."""
    rows = [row for row in COMPARED if row in study.rows]
    lines = [
        [row, f"{study.facts['trainings'][row]:g}", study.work(row), *(marked(study, row, key) for key in GIVEN)]
        for row in rows
    ]
    fewest, most = (choose(len(study.seeds(row)) for row in rows) for choose in (min, max))
    about = (
        f"{TITLES[study.name]}, per cent but for NLL, which is after calibration; AURC and *unsure* by the largest "
        "probability before it, *unfamiliar* by Mahalanobis distance, fitted to training data. **Better** and *worse* "
        f"than Single beyond chance (95 % intervals, paired). {fewest} to {most} seeds a row: Single's mean, and the "
        "gain over it on the seeds of the row. Work: multiply-adds. From `results/studies/`."
    )
    return markdown(["method", "trainings ↓", "work ↓", *GIVEN.values()], lines, about)


def demo_line() -> str:
    """Of the README: what the demo's ensemble catches, beside the model that it is from."""
    result = load("demo.json")["gains"]
    ours, single = (result["methods"][name] for name in ("Pruned branches", "Single"))
    keys = {"mistakes.both": "of its own mistakes", "near.both": "of near foreign images", "far.both": "of far ones"}
    means = {key: [method["numbers"][key]["mean"] for method in (ours, single)] for key in keys}
    shares = ", ".join(f"{100 * means[key][0]:.0f} % {words}" for key, words in keys.items())
    alone = ", ".join(f"{100 * means[key][1]:.0f} %" for key in keys)
    level = all({"Pruned branches", "Single"} <= set(result["best"][key]) for key in keys)
    return (
        f"The ensemble declines {shares}; the model alone {alone}, at {100 * single['price'] / ours['price']:.0f} % of "
        f"the work{': no difference beyond the scatter of draws' if level else ''}. Both promise to accept "
        f"{100 * result['share']:.0f} % of familiar images. From `results/demo.json`."
    )


def attack_table() -> str:
    """What became of every case of the attack, and of all together."""
    parts = load("attack.json")["parts"]
    columns = ["cases", "refused", "same", "other", "raw", "crash", "slow", "apart"]
    rows = [[row["what"], *(row[column] for column in columns)] for part in parts.values() for row in part["rows"]]
    total = ["**all**", *(sum(row[index + 1] for row in rows) for index in range(len(columns)))]
    lines = [[name, *(f"{number:,}" for number in numbers)] for name, *numbers in (*rows, total)]
    notes = []
    for name, part in parts.items():
        cases = sum(row["cases"] for row in part["rows"])
        share = part["share"]
        trial = "" if share == 1 else f", {share:.0%} of a whole run"
        notes.append(f"`{name}` {cases:,} cases in {part['minutes']:g} minutes (seed {part['seed']}{trial})")
    if len({part["source"] for part in parts.values()}) > 1:
        notes.append("not all on the same state of the library, see `source` there")
    last = list(parts.values())[-1]
    versions = ", ".join(f"{name} {version}" for name, version in last["versions"].items())
    about = f"Parts: {'; '.join(notes)}. {last['hardware']}; {versions}. From `results/attack.json`."
    return markdown(["what", *columns], lines, about)


def conversion_line() -> str:
    """What the comparison of answers at the end of a conversion costs."""
    run = load("conversion.json")
    return (
        f"The comparison takes {run['comparison_seconds']:.2f} s of computing for ViT-B/16 at 224 pixels (float32, "
        f"{run['hardware']}; the whole conversion {run['convert_seconds']:.2f} s). From `results/conversion.json`."
    )


def takes_table() -> str:
    """Of the README: what is converted without a declaration, with the versions that the tests run with."""
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    rows = [
        [library, pinned[{"open_clip": "open_clip_torch"}.get(library, library)], ", ".join(models)]
        for library, models in supported().items()
    ]
    return markdown(["library", "tested with", "models"], rows, align="lll")


def code(file: str, part: str) -> str:
    """The lines of a script between `# start: PART` and `# end: PART`, without their indent."""
    match = re.search(rf" *# start: {part}\n(.*?) *# end: {part}\n", (ROOT / file).read_text(), re.DOTALL)
    if match is None:
        sys.exit(f"{file} has no part between `# start: {part}` and `# end: {part}`")
    return f"```python\n{textwrap.dedent(match[1]).strip()}\n```"


def rendered(text: str, by_name: Mapping[str, str], stored: Mapping[str, Study]) -> tuple[str, list[str]]:
    """A document with all marked parts and the numbers of its sentences written anew, and what is wrong with it."""

    def write(match: re.Match[str]) -> str:
        kind, name = match.groups()
        return f"<!-- {kind}: {name} -->\n{by_name[name] if kind == 'table' else code(*name.split())}\n<!-- end -->"

    text = re.sub(r"<!-- (table|code): ([^\n]+) -->\n.*?<!-- end -->", write, text, flags=re.DOTALL)
    return quoted.written(text, stored, RESULTS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stored = studies()
    stale = list[str]()
    wrong = list[str]()
    by_name = tables(stored)
    for path in documents():
        before = path.read_text()
        after, problems = rendered(before, by_name, stored)
        name = path.relative_to(ROOT).as_posix()
        unbacked = [] if name in quoted.UNCHECKED else quoted.without_source(before)
        wrong += [f"{name}: {problem}" for problem in (*problems, *(f"{number} has no source" for number in unbacked))]
        if after != before:
            stale.append(str(path.relative_to(ROOT)))
            if not check:
                path.write_text(after)
    for result in undrawn(RESULTS / "analyses"):
        stale.append(f"the figure of {result['analysis']}-{result['task']}")
        if not check:
            draw(result, RESULTS / "analyses")
    if wrong:
        sys.exit("\n".join(["sentences that the results do not bear out:", *wrong]))
    if check and stale:
        sys.exit(f"not what results and examples say: {', '.join(stale)}; run python benchmarks/tables.py")


if __name__ == "__main__":
    main()

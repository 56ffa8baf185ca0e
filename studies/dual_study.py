"""The stages of a zero-shot study: members and temperatures are fixed before the test sets are opened.

Stages: `choose` training settings of the dual encoder, `train` it, `rank` its heads, `fix` members and temperatures (on
held-out images of the main task), `report` the outputs of every row on every set, `cost`, `store`. Existing results are
kept: a stopped run resumes.

`seed-N.parquet` in the results has the columns that `evidence` describes, as `row|task|set|column`; the test set of a
task has its name. All outputs of calibrated rows are temperature-scaled. What no table reads is left out: losses after
calibration, and the entropy of tasks without OOD sets.
"""

from typing import Any, cast

from hydra_ensembles import Prediction
from hydra_ensembles.calibrate import fit_calibration
from hydra_ensembles.errors import DataError
from hydra_ensembles.files import read_json, write_json
from hydra_ensembles.heads.members import CIRCUIT_ORDER, Score
from hydra_ensembles.schema import to_plain

from .column_files import write_columns
from .dual_rows import rows_of
from .dual_seed import CHOICE, TOWERS, DualSeed
from .engine import COSTS, Kind, Plan, Run, made_with, timed, write_costs
from .evidence import columns_of, stored
from .measures import CALIBRATED, Array
from .samples import SampleBatches, alone
from .seed_folder import REPORT
from .storing import SINGLE, by_row, choices_in, read_if_there, store

FIXED, TAYLOR = "fixed.json", "taylor"
UNREAD = (f"{CALIBRATED}nll", f"{CALIBRATED}brier")  # columns that no table of this study reads


def choose(seed: DualSeed, _: str) -> None:
    """Train with every choice on four fifths of the names, and store the one most accurate on the others."""
    path = seed.study / CHOICE
    if seed.recipe.model is None and len(seed.recipe.choices) > 1 and not path.exists():
        measured = seed.task.measured(seed.number)
        best = max(measured, key=lambda option: option["accuracy"])
        choice = {key: best[key] for key in ("steps", "learning_rate", "projection_rate")}
        write_json(path, {"choice": choice, "seed": seed.number, "measured": measured})


def train(seed: DualSeed, _: str) -> None:
    """Train and save the dual encoder."""
    seed.dual  # noqa: B018


def rank(seed: DualSeed, name: str) -> None:
    """Compute a ranking; `name` is its score and towers, or `taylor`."""
    score, _, towers = name.partition(" ")
    if name == TAYLOR:
        seed.taylor()
    else:
        seed.circuit(cast(Score, score), towers)


def fix(seed: DualSeed, name: str) -> None:
    """Make the members of a row, fit its temperature, and store both; no test set is opened.

    Later rows are added; stored entries are kept.
    """
    path = seed.folder / FIXED
    if name in (read_if_there(path) or {"temperatures": ()})["temperatures"]:
        return
    row = rows_of(seed.task)[name]
    held_out = seed.task.held_out
    logits = row.asked(seed, held_out).member_logits
    fitted = fit_calibration(logits, held_out.samples.labels)
    with alone(path):  # only now: rows of a seed are made side by side
        fixed = read_if_there(path) or {"heads": {}, "temperatures": {}}
        fixed["samples"] = len(held_out.samples)
        fixed["temperatures"][name] = fitted.temperature[0]
        if row.family is not None and not row.family.tuned:
            fixed["heads"][row.family.name] = [[str(head) for head in heads] for heads in seed.heads(row.family)]
        write_json(path, fixed)


def report(seed: DualSeed, name: str) -> None:
    """Run a row on every test set, and store its outputs; raises if its temperature is not fixed yet."""
    path = seed.reported(name)
    row = rows_of(seed.task)[name]
    if path.exists():
        return
    fixed = seed.folder / FIXED
    temperatures = read_json(fixed)["temperatures"] if fixed.exists() else {}
    if name not in temperatures:
        raise DataError(
            f"nothing is fixed yet for {name!r} in {fixed}; run the stage `fix` before test sets are opened"
        )
    temperature = temperatures[name]
    columns = dict[str, Array]()
    for data in seed.task.test_sets:
        answers = row.asked(seed, data)
        after = Prediction.from_logits(answers.member_logits, temperature=temperature, calibrates="probs")
        if row.calibrated:
            answers = Prediction.from_logits(after.log_probs[None])  # [1, N, C]
        labels = data.samples.labels.to(answers.member_logits.device) if data.group == "id" else None
        of_set = stored(columns_of(answers, after, labels))
        unread = UNREAD if data.task in seed.task.sets.suites else (*UNREAD, "entropy")
        columns |= {f"{data.task}|{data.name}|{key}": column for key, column in of_set.items() if key not in unread}
    write_columns(path.with_suffix(".parquet"), columns)
    write_json(path, {"row": name, "temperature": temperature, **made_with(seed.device)})


def jobs(run: Run, stage: str) -> Plan:
    """The jobs of a stage, grouped by seed, whose rows share image embeddings; each depends on the stage before."""
    rankings = [*(f"{score} {towers}" for towers in TOWERS for score in CIRCUIT_ORDER), TAYLOR]
    seeds = run.of(SINGLE)
    first = seeds[0]
    match stage:
        case "choose":
            return {(stage, first, ""): []}
        case "train":
            return {(stage, seed, ""): [("choose", first, "")] for seed in seeds}
        case "rank":
            return {(stage, seed, name): [("train", seed, "")] for seed in seeds for name in rankings}
        case "fix":
            before = {seed: [("train", seed, ""), *(("rank", seed, name) for name in rankings)] for seed in seeds}
            return {(stage, seed, row): before[seed] for seed in seeds for row in run.rows}
    return {(stage, seed, row): [("fix", seed, row)] for seed in seeds for row in run.rows}


def cost(run: Run) -> None:
    """Measure latency and peak memory of the reported rows, for the classes of the main task."""
    seed = DualSeed(run.task, run.of(SINGLE)[0], run.output)
    rows = rows_of(run.task)
    held_out, batch = seed.task.held_out, seed.recipe.cost_batch
    inputs = seed.dual.image.prepare(next(iter(SampleBatches(held_out.samples, batch)))[0])
    reported = [name for name in run.rows if not rows[name].calibrated and seed.reported(name).exists()]
    models = {name: rows[name].whole(seed, held_out.classes) for name in dict.fromkeys((SINGLE, *reported))}
    write_costs(seed.study, seed.device, batch, timed(models, inputs, seed.device))


def collect(run: Run) -> None:
    """Store what is finished."""
    task = run.task
    recipe = run.task.recipe
    study = run.output / run.task.name
    tasks: dict[str, Any] = {}
    for data in task.test_sets:
        if data.group == "id":
            tasks[data.task] = {"domain": data.domain, "classes": len(data.classes), "samples": len(data.samples)}
        else:
            tasks[data.task].setdefault("outside", {}).setdefault(data.group, {})[data.name] = len(data.samples)
    reports = [report for folder in study.glob(f"seed-*/{REPORT}") for report in by_row(folder, rows_of(task)).values()]

    def joined(key: str) -> str:  # reports may have been made on another machine
        return " and ".join(sorted({report[key] for report in reports}))

    facts = {
        "recipe": to_plain(recipe),
        "model": task.about(),
        "images": task.sets.name,
        "tasks": tasks,
        "trainings": {name: row.trainings for name, row in rows_of(task).items()},
        "choice": read_if_there(study / CHOICE),
        "costs": read_if_there(study / COSTS),
        "device": joined("device"),
        "versions": {"torch": joined("torch"), "hydra_ensembles": joined("version")},
    }

    def of_seed(number: int) -> dict[str, Any]:
        seed = DualSeed(task, number, run.output)
        facts_of_seed = {"circuits": circuit_facts(seed), "choices": choices_in(seed.folder)}
        return {**read_json(seed.folder / FIXED), **facts_of_seed}

    store(study, run.results, facts, of_seed)


def circuit_facts(seed: DualSeed) -> dict[str, Any]:
    """Facts of every extracted circuit: samples, and its score with all heads and without those a member loses."""
    facts = {}
    for towers, count in (("image+text", seed.recipe.prune), ("image", seed.recipe.image_prune)):
        for score in (score for score in CIRCUIT_ORDER if seed.has_circuit(score, towers)):
            ranking = seed.circuit(score, towers)
            provenance = {name: ranking.provenance[name] for name in ("id_samples", "ood_samples", "start")}
            facts[f"{score} {towers}"] = {**provenance, "end": ranking.scores[count - 1], "pruned": count}
    return facts


ZERO_SHOT = Kind(
    DualSeed,
    rows_of,
    {"choose": choose, "train": train, "rank": rank, "fix": fix, "report": report},
    jobs,
    {"cost": cost, "store": collect},
)

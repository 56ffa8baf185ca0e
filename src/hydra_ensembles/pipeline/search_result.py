"""Result of a search: candidates with prices and numbers, the fronts, the choice and its reason."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from operator import le
from pathlib import Path
from typing import Literal

from ..files import expanded, read_object, write_json
from ..model.ensemble import Ensemble
from ..report.compare import Cell, Column, Comparison, tabulated
from ..report.figures import draw_fronts
from ..settings import from_plain, to_plain
from ..store import Form
from .settings import HydraConfig

YOURS, SOUP, FUSED, DEEP = "yours", "soup", "fused above a mean trunk", "deep ensemble"

Price = Literal["latency", "multiply_adds"]
CandidateState = Literal["planned", "too dear", "not possible", "judged"]


@dataclass(frozen=True)
class SearchRow:
    """One candidate.

    Attributes:
        name: What tables call it.
        price: Time of a batch (or multiply-adds), relative to the given model.
        state: How far it came.
        config: How it is built; None for the given model, and for combinations of several given ones.
        numbers: Results on held-out data, under the names of `Evaluation.numbers`; empty unless it was judged.
        note: Why it was not judged.
    """

    name: str
    price: float
    state: CandidateState
    config: HydraConfig | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class SearchResult:
    """What a search found.

    Attributes:
        rows: The given model, which costs 1, and every candidate.
        cost: The highest price that was allowed.
        measured: What a price is a ratio of.
        scores: Names of the OOD AUROCs that candidates are judged by, besides `accuracy`, `nll` and `aurc`.
        samples: Number of samples used to judge, by set.
        choice: Name of the best one that is not worse than the given model; empty for a plan, which builds nothing.
        why: The reason, in a sentence.
        front: Names of the candidates that are not beaten at their price or below, cheapest first: by `nll`, and by
            `auroc`, the mean of the scores.
        ensemble: The choice, calibrated, ready to use; None for a plan, or if the result was read from a file.

    Examples:
        >>> he.SearchResult((), cost=1.5, measured="latency", scores=(), samples={}).choice
        ''
    """

    rows: tuple[SearchRow, ...]
    cost: float
    measured: Price
    scores: tuple[str, ...]
    samples: Mapping[str, int]
    choice: str = ""
    why: str = ""
    front: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    ensemble: Ensemble | None = field(default=None, compare=False, repr=False)

    def table(self) -> Comparison:
        """All candidates side by side, with an arrow at the choice, for `to_markdown`, `to_rich` and so on."""
        columns = (
            Column("price", "Time" if self.measured == "latency" else "MAdds", better="lower", suffix="×"),
            Column("accuracy", "Acc %", better="higher", digits=1, scale=100),
            Column("nll", "NLL", better="lower", digits=3),
            Column("aurc", "AURC", better="lower", digits=4),
            *(Column(key, key.rpartition(":")[0] or "msp", "AUROC", "higher", 1, 100) for key in self.scores),
        )

        def cell(column: Column, row: SearchRow) -> Cell:
            value = row.price if column.key == "price" else row.numbers.get(column.key)
            return Cell("–") if value is None else Cell(column.write(value), value)

        rows = {f"→ {row.name}" if row.name == self.choice else row.name: row for row in self.rows}
        judges = ", ".join(f"{name} ({count:,} samples)" for name, count in self.samples.items())
        notes = [f"Judges: {judges}. Price: {self.measured}, at most {self.cost:g}×."]
        notes += [f"Choice: {self.choice}, because {self.why}."] if self.choice else []
        for row in self.rows:
            if row.state not in ("planned", "judged"):
                notes.append(f"{row.name}: {row.state}{f' ({row.note})' if row.note else ''}.")
        return tabulated(columns, rows, cell, tuple(notes))

    def figure(self) -> str:
        """Price against NLL and against the mean of the OOD AUROCs, with both fronts, as an SVG file."""
        fronts = {}
        for key, title, factor in (("nll", "NLL", 1), ("auroc", "mean OOD AUROC (%)", -100)):
            fronts[title] = ({name: factor * value for name, value in self._values()[key].items()}, self.front[key])
        prices = {row.name: row.price for row in self.rows if row.numbers}
        return draw_fronts(prices, fronts, chosen=self.choice, given=YOURS, limit=self.cost)

    def decided(self, tolerance: float) -> "SearchResult":
        """Compute fronts and choice, once all rows have their numbers."""
        rows = [row for row in self.rows if row.numbers]
        prices = {row.name: row.price for row in rows}
        front = {key: _front(prices, by_name) for key, by_name in self._values().items()}
        nll, *other_losses = self.losses(rows[0].numbers)  # of the given model
        most = (nll, *(loss + tolerance for loss in other_losses))
        within = [row for row in rows if row.price <= self.cost]
        fit = [row for row in within if all(map(le, self.losses(row.numbers), most))]
        best = min(fit, key=lambda row: (row.numbers["nll"], row.price))  # of equals the first: the given model
        why = f"none of the {len(within) - 1} others within {self.cost:g}× has a lower NLL and is no worse in the rest"
        if best.name != YOURS:
            why = f"at {best.price:.2f}× it has the lowest NLL, {best.numbers['nll']:.3f} against {nll:.3f}, of the "
            why += f"{len(fit) - 1} within {self.cost:g}× that are no worse than yours in any number"
        return replace(self, choice=best.name, why=why, front=front)

    def losses(self, numbers: Mapping[str, float]) -> tuple[float, ...]:
        """Losses to compare candidates by: NLL, AURC, and one minus accuracy and AUROCs; lower is better."""
        return (numbers["nll"], numbers["aurc"], *(1.0 - numbers[key] for key in ("accuracy", *self.scores)))

    def _values(self) -> dict[str, dict[str, float]]:
        """The values of each front, by candidate; lower is better."""
        rows = [row for row in self.rows if row.numbers]
        auroc = {row.name: -sum(row.numbers[key] for key in self.scores) / len(self.scores) for row in rows}
        return {"nll": {row.name: row.numbers["nll"] for row in rows}, "auroc": auroc}

    def save(self, path: str | Path) -> None:
        """Write a JSON file, without the ensemble."""
        write_json(expanded(path), to_plain(replace(self, ensemble=None)))

    @classmethod
    def load(cls, path: str | Path) -> "SearchResult":
        """Read what `save` wrote."""
        return from_plain(cls, read_object(expanded(path)), str(path))


RESULT_FILE = Form(".json", SearchResult.load, lambda path, result: result.save(path))


def _front(prices: Mapping[str, float], values: Mapping[str, float]) -> tuple[str, ...]:
    """Names with a lower value than everything that costs no more, cheapest first."""
    front: list[str] = []
    for name in sorted(prices, key=lambda name: (prices[name], values[name])):
        if not front or values[name] < values[front[-1]]:
            front.append(name)
    return tuple(front)

"""Ranking heads, and choosing which of them each member loses."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..circuit.extract import extract_circuit
from ..circuit.scores import Score
from ..errors import SameMembersError
from ..heads.members import circuit_members, random_members, sampled_members, taylor_members
from ..heads.ranking import Head, HeadRanking
from ..heads.taylor import taylor
from .config import HydraConfig
from .data import BuildData
from .member_choice import MemberChoice
from .run_folder import RunFolder
from .start import Start

CIRCUITS: tuple[Score, ...] = ("avg", "acc", "ood")  # in the order in which members take them
TAYLOR_DRAWS = 4  # rankings made per member before giving up on members that differ


@dataclass(frozen=True)
class Chooser:
    """Chooses the heads of all members; rankings are products of the run folder."""

    config: HydraConfig
    start: Start
    data: BuildData
    run: RunFolder
    progress: bool

    def members(self) -> tuple[MemberChoice, ...]:
        """What each member loses, and why."""
        match self.config.strategy:
            case "random":
                return self._random()
            case "taylor":
                return self._taylor()
            case "sampled":
                return self._sampled()
            case "circuit":
                return self._circuits()

    @property
    def _layers(self) -> range | None:
        return self.start.layers(self.config)

    @property
    def _pool(self) -> int:
        return self.config.pool_size(self.start.heads(self._layers))

    def _random(self) -> tuple[MemberChoice, ...]:
        config = self.config
        chosen = random_members(self.start.ranked, config.prune, config.members, config.seed, self._layers)
        return _named(chosen, ["random heads"] * config.members)

    def _sampled(self) -> tuple[MemberChoice, ...]:
        config = self.config
        ranking = self._circuit("avg", self._pool)
        chosen = sampled_members(ranking, config.prune, self._pool, config.members, config.seed)
        return _named(chosen, ["drawn from circuit avg"] * config.members)

    def _circuits(self) -> tuple[MemberChoice, ...]:
        """One circuit for each of the first members; the ranking that others are drawn from goes further."""
        config = self.config
        pool = self._pool if config.draws_from_pool else None
        scores = CIRCUITS[: config.members]
        rankings: dict[str, HeadRanking] = {
            score: self._circuit(score, pool if pool is not None and score == "avg" else config.prune)
            for score in scores
        }
        try:
            chosen = circuit_members(rankings, config.prune, config.members, pool, config.seed)
        except SameMembersError as error:
            kept = self.run.place("rankings")
            where = "" if kept is None else f"; the rankings are kept in {kept}, other settings need another output"
            raise SameMembersError(f'{error}. In HydraConfig: prune, or strategy="sampled"{where}') from error
        drawn = config.members - len(scores)
        return _named(chosen, [*(f"circuit {score}" for score in scores), *["drawn from circuit avg"] * drawn])

    def _taylor(self) -> tuple[MemberChoice, ...]:
        """Rankings on batches drawn by one seed after another; one that repeats an earlier member is passed over."""
        config = self.config
        rankings: list[HeadRanking] = []
        kept: list[tuple[int, HeadRanking]] = []
        taken: set[frozenset[Head]] = set()
        for seed in range(config.seed, config.seed + config.members * TAYLOR_DRAWS):
            rankings.append(self._taylor_ranking(seed))
            heads = frozenset(rankings[-1].first(config.prune))
            if heads not in taken:
                taken.add(heads)
                kept.append((seed, rankings[-1]))
            if len(kept) == config.members:
                break
        else:
            taylor_members(rankings, config.prune)  # says which of them are equal, and what to do about it
        chosen = taylor_members([ranking for _, ranking in kept], config.prune)
        return _named(chosen, [f"taylor, seed {seed}" for seed, _ in kept])

    def _circuit(self, score: Score, budget: int) -> HeadRanking:
        ranking = self.data.ranking
        assert ranking is not None  # the checks have seen to it
        return self.run.ranking(
            f"rankings/{score}",
            lambda: extract_circuit(
                self.start.ranked,
                ranking,
                self.data.ood,
                score=score,
                budget=budget,
                method=self.config.method,
                layers=self._layers,
                journal=self.run.place(f"rankings/{score}.journal"),
                progress=self.progress,
                **self.start.circuit_options,
            ),
        )

    def _taylor_ranking(self, seed: int) -> HeadRanking:
        config, data = self.config, self.data
        source = data.train if data.train is not None else data.ranking
        assert source is not None  # the checks have seen to it
        return self.run.ranking(
            f"rankings/taylor-{seed}",
            lambda: taylor(
                self.start.base,
                source,
                budget=config.prune,
                scope=config.taylor_scope,
                layers=self._layers,
                seed=seed,
                calibration_batches=config.calibration_batches,
                progress=self.progress,
            ),
        )


def _named(chosen: Sequence[tuple[Head, ...]], origins: Sequence[str]) -> tuple[MemberChoice, ...]:
    return tuple(MemberChoice(origin, heads) for origin, heads in zip(origins, chosen, strict=True))

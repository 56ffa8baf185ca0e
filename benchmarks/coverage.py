"""How often 95 % intervals of `hydra_ensembles.metrics.bootstrap` contain the true value, for known distributions.

    python benchmarks/coverage.py     # results/tables/interval_coverage.csv, minutes on a CPU

Predictions are those of a model that is often unsure, or mostly sure, and overconfident by a known margin, which is
then the true ECE. Scores are normal, and higher for OOD samples. True values of the other metrics are computed from a
million samples.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from hydra_ensembles.metrics.bootstrap import Interval, paired
from hydra_ensembles.metrics.ood import OodMetric, aurc, detection, flagged, of_counts, weighted_aurc
from hydra_ensembles.metrics.probabilities import weighted_ece, weighted_mean

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # `studies` is next to the benchmarks
from studies.tables import write_csv  # noqa: E402

LAWS = {"in doubt": (4.0, 2.0), "sure": (20.0, 1.0)}  # Beta distributions of confidence: means of 0.67 and 0.95
APART = 1.5  # standard deviations between the scores of ID and OOD samples
SAMPLES, OF_CALIBRATION = (50, 200, 1000), (300, 2000)
ERRORS = (0.0, 0.01, 0.05)  # of calibration
ALL = 1_000_000  # samples used as the whole population

Draw = Callable[[np.random.Generator, int], Sequence[Tensor]]


def answers(law: str, error: float, draws: np.random.Generator, count: int) -> tuple[Tensor, Tensor]:
    """Confidences `[count]`, and which predictions are right."""
    sure = draws.beta(*LAWS[law], size=count)
    return torch.from_numpy(sure), torch.from_numpy(draws.random(count) < sure - error)


def scores(draws: np.random.Generator, count: int) -> tuple[Tensor, Tensor]:
    """Scores of ID and OOD samples, `[count]` each."""
    familiar, foreign = draws.normal(size=(2, count))
    return torch.from_numpy(familiar), torch.from_numpy(foreign + APART)


def cases(samples: Sequence[int], of_calibration: Sequence[int]) -> Iterator[tuple[dict[str, Any], Draw, float, Any]]:
    """Each case: its description, how to draw samples, the true value, and the interval function of a draw."""
    large = np.random.default_rng(0)
    for law in LAWS:
        calibrated = partial(answers, law, 0.0)
        sure, right = calibrated(large, ALL)
        truth = {"accuracy": float(right.double().mean()), "aurc": aurc(1 - sure, ~right)}
        for count in samples:
            yield {"metric": "accuracy", "law": law, "samples": count}, calibrated, truth["accuracy"], _accuracy
            yield {"metric": "aurc", "law": law, "samples": count}, calibrated, truth["aurc"], _aurc
    fp, tp, _ = flagged(*scores(large, ALL))
    for metric in get_args(OodMetric):
        true = of_counts(metric, fp, tp, "torch-uncertainty").item()
        for count in samples:
            yield {"metric": metric, "samples": count}, scores, true, partial(_ood, metric)
    for law, error, count in product(LAWS, ERRORS, of_calibration):
        yield {"metric": "ece", "law": law, "samples": count}, partial(answers, law, error), error, _ece


def _accuracy(resamples: int, _: Tensor, right: Tensor) -> Interval:
    return paired(weighted_mean, [right], resamples=resamples)


def _aurc(resamples: int, sure: Tensor, right: Tensor) -> Interval:
    return paired(weighted_aurc, [1 - sure, ~right], resamples=resamples)


def _ood(metric: OodMetric, resamples: int, *sides: Tensor) -> Interval:
    sets = torch.cat([torch.full((len(side),), number) for number, side in enumerate(sides)])
    return paired(detection(metric), [torch.cat(sides), sets], strata=sets, resamples=resamples)


def _ece(resamples: int, sure: Tensor, right: Tensor) -> Interval:
    return paired(weighted_ece, [sure, right], resamples=resamples, mirrored=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw every case repeatedly, and store how often its interval contains the true value."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=200, help="of samples, of each case")
    parser.add_argument("--resamples", type=int, default=100, help="of each interval")
    parser.add_argument("--samples", type=int, nargs="+", default=SAMPLES)
    parser.add_argument("--of-calibration", type=int, nargs="+", default=OF_CALIBRATION)
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "tables" / "interval_coverage.csv")
    options = parser.parse_args(arguments)
    lines: list[list[Any]] = [["metric", "law", "samples", "true", "held", "draws", "resamples", "level"]]
    for index, (about, draw, true, interval) in enumerate(cases(options.samples, options.of_calibration)):
        draws = np.random.default_rng([1, index])
        held = [true in interval(options.resamples, *draw(draws, about["samples"])) for _ in range(options.draws)]
        named = [about["metric"], about.get("law", ""), about["samples"], true]
        lines.append([*named, sum(held) / len(held), options.draws, options.resamples, 0.95])
        print(*lines[-1], flush=True)
    write_csv(options.output, lines)


if __name__ == "__main__":
    main()

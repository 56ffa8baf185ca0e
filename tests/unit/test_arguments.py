"""Ranges in annotations, and errors about arguments: where, what is accepted, and what was probably meant."""

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
import torch
from torch import Tensor

import hydra_ensembles as he
from hydra_ensembles.arguments import Checked, Range, checked
from hydra_ensembles.errors import ConfigError, DataError


@pytest.mark.parametrize(
    ("accepted", "got", "shown", "words"),
    [
        (Range(1, 2**63 - 1), 0, "at least 1", "a number of at least 1"),
        (
            Range(1, 2**63 - 1),
            2**63,
            "at least 1",
            "a number from 1 to 9223372036854775807",
        ),  # named only when exceeded
        (Range(0.0, 1.0), 2, "from 0 to 1", "a number from 0 to 1"),
        (Range(above=0), 0, "above 0", "a number above 0"),
        (Range(above=0), math.inf, "above 0", "a finite number above 0"),
        (Range(0), math.inf, "at least 0", "a finite number of at least 0"),
        (Range(above=0, most=1), "3", "above 0 and at most 1", "a number above 0 and at most 1"),
        (Range(0, below=1), 1, "at least 0 and below 1", "a number of at least 0 and below 1"),
        (Range(1, below=1e12), 1e12, "at least 1", "a number of at least 1 and below 1000000000000"),
    ],
)
def test_a_range_is_said_as_people_say_it(accepted: Range, got: Any, shown: str, words: str) -> None:
    assert repr(accepted) == shown
    assert words in accepted.in_words("a number", got)


def test_help_shows_no_limits_of_the_machine() -> None:
    public = [getattr(he, name) for name in he.__all__] + [getattr(he.baselines, name) for name in he.baselines.__all__]
    signatures = " ".join(str(inspect.signature(one)) for one in public if inspect.isfunction(one))
    assert "Annotated[float, above 0 and at most 1]" in signatures
    assert not [one for one in ("e-324", "0000002", "922337203685", "46116860184", " inf", "inf)") if one in signatures]


@dataclass(frozen=True)
class Settings(Checked):
    members: Annotated[int, Range(2, 9)] = 3


@checked
def made(
    model: Tensor, ood: Mapping[str, Any] | None = None, *, average: int = 0, settings: Settings | None = None
) -> int:
    return average


class Made:
    @checked
    def __init__(self, count: int) -> None:
        self.count = count


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: made(x, averge=2), r"made\(\) got an unexpected .*'averge'; did you mean 'average'\?"),
        (
            lambda x: made(x, members=5),
            r"made\(\) .*'members' is a setting of Settings: settings=Settings\(members=5\)",
        ),
        (lambda x: made(x, members=x), r"settings=Settings\(members=\.\.\.\)"),
        (lambda x: made(x, nonsense=1), r"made\(\) got an unexpected keyword argument 'nonsense'$"),
        (lambda x: made(), r"made\(\) missing a required argument: 'model'$"),
        (lambda x: made(x, None, 3), r"made\(\) too many positional arguments$"),
        (lambda x: Made(cuont=1), r"Made\(\) .*did you mean 'count'\?"),
        (lambda x: he.Prediction.from_logits(x, score_name="msp"), "did you mean 'score'"),  # not of Prediction
    ],
)
def test_a_call_that_does_not_fit_names_the_function_and_what_may_be_meant(call: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        call(torch.zeros(2))


def test_what_was_given_is_said_without_its_numbers() -> None:
    x = torch.zeros(2, 3)
    for given, words in (
        ([(x, x)], "a list of 1, the first a tuple"),
        (x, r"a Tensor \[2, 3\]"),
        ([1, 2], r"\[1, 2\] \(list\)"),
        (0, "0"),
        (he.data.suite("paper-sst2"), r"Suite.* \(Suite\)"),
    ):
        with pytest.raises(
            DataError, match=rf'ood of made must be a mapping \({{"name": \.\.\.}}\) or None, got {words}$'
        ):
            made(x, given)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"Settings\.members must be a number from 2 to 9, got 1"):
        Settings(1)

"""The result of one greedy step."""

from dataclasses import dataclass

from ..head import Head


@dataclass(frozen=True, order=True)
class Choice:
    """A candidate with its result. The smaller one is the better one; ties go to the first (layer, head)."""

    value: int
    head: Head
    errors: int
    discordance: int


NO_HEAD = Head(-1, -1)  # stands for the head of a result with no further head off

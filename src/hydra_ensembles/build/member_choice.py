"""The heads a member loses, and where the choice came from."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .._utils import write_atomically
from ..errors import CheckpointError
from ..heads.ranking import Head
from ..schema import from_plain, to_plain


@dataclass(frozen=True)
class MemberChoice:
    """One member: how its heads were chosen, in words, and the heads it loses."""

    origin: str
    heads: tuple[Head, ...]


@dataclass(frozen=True)
class _SavedChoice:
    origin: str
    heads: tuple[tuple[int, int, str], ...]


@dataclass(frozen=True)
class _SavedChoices:
    members: tuple[_SavedChoice, ...]


def save_choices(path: Path, members: Sequence[MemberChoice]) -> None:
    """Write the choices of all members as JSON."""
    write_atomically(path, (json.dumps({"members": to_plain(list(members))}, indent=1) + "\n").encode())


def load_choices(path: Path) -> tuple[MemberChoice, ...]:
    """Read what `save_choices` wrote."""
    try:
        saved = from_plain(_SavedChoices, json.loads(path.read_text(encoding="utf-8")), "choices")
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} does not hold the heads of members: {error}") from error
    return tuple(MemberChoice(one.origin, tuple(Head(*head) for head in one.heads)) for one in saved.members)

"""Every stored format under attack: a file is damaged, and loading refuses it or gives the same answer."""

import json
import os
import pickle
import shutil
import struct
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import torch

import hydra_ensembles as he

from .counting import Row, count, digest
from .small import NAMES, batches, dual, hydra, model

CASES = 4000

Case = tuple[str, str, str, int]  # target, file, kind of damage, and the seed of the place


def _ask(folder: Path) -> str:
    """Everything about a saved model, and its answers."""
    found = he.load(folder)
    if isinstance(found, he.DualEncoder):
        return digest(found.image, found.text, found.state_dict())
    kind = found.kind
    said = found.predict(batches(kind, 4, 4)[0][0])
    return digest(found, said.member_logits, said.probs, said.reason, said.familiarity)


def _ranking(folder: Path, save: int) -> None:
    own, foreign = batches("image", 12, 4, seed=2 + save), batches("image", 8, 4, seed=3, shift=1.5)
    ranking = he.extract_circuit(model(), own, foreign, budget=3, method="naive", progress=False)
    ranking.save(folder / "ranking.json")


def _evaluation(folder: Path, save: int) -> None:
    own, foreign = batches("image", 16, 4, seed=1 + save), {"near": {"other": batches("image", 12, 4, 2, 1.5)}}
    he.evaluate(hydra(), own, foreign, name="Hydra", progress=False).save(folder / "hydra.json")


def _read_evaluation(folder: Path) -> str:
    return digest(he.Evaluation.load(folder / "hydra.json").numbers())


def _run(folder: Path, save: int) -> None:
    _build(folder, seed=save)
    shutil.rmtree(folder / "ensemble")  # so that its members are read
    (folder / "ensemble.sha256").unlink()


def _build(folder: Path, seed: int = 0) -> str:
    config = he.HydraConfig(prune=3, shared_layers=0, members=2, strategy="random", seed=seed)
    return digest(he.build(model(), config, id=batches("image", 24), output=folder, progress=False))


def _fitted(save: int) -> he.Ensemble:
    return he.calibrate(hydra(), batches(seed=20 + save), share=0.7)


TARGETS: dict[str, tuple[Callable[[Path, int], object], Callable[[Path], str]]] = {
    "a hydra of images": (lambda folder, save: _fitted(save).save_pretrained(folder), _ask),
    "a model of texts": (lambda folder, save: model("text", seed=4 + save).save_pretrained(folder), _ask),
    "two towers": (lambda folder, save: dual(save).save_pretrained(folder), _ask),
    "a zero-shot model": (lambda folder, save: he.zero_shot(dual(save), NAMES).save_pretrained(folder), _ask),
    "a ranking": (_ranking, lambda folder: digest(he.HeadRanking.load(folder / "ranking.json"))),
    "an evaluation": (_evaluation, _read_evaluation),
    "an unfinished build": (_run, _build),
}


# --- damage ----------------------------------------------------------------------------------------------------------


class _Deadly:
    """Ends the process that unpickles it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (3,)


WHOLE = {
    "nothing": b"",
    "pickle": pickle.dumps(_Deadly()),
    "pointer": b"version https://git-lfs.github.com/spec/v1\nsize 12345\n",
    "list": b"[]",
    "brackets": b"[" * 200_000,
    "long": b'"' + b"x" * (5 << 20) + b'"',
}
VALUES: tuple[Any, ...] = (None, True, 0, -1, 1e308, 2**63, "", "x", [], {}, [[]], "../../x", float("nan"), "\0")


def _flip(content: bytes, random: Random) -> bytes:
    place = random.randrange(max(1, 8 * len(content)))
    changed = bytearray(content or b"\0")
    changed[place // 8] ^= 1 << place % 8
    return bytes(changed)


def _splice(content: bytes, random: Random) -> bytes:
    start, length = random.randrange(len(content) + 1), random.randint(0, 64)
    return content[:start] + random.randbytes(random.randint(0, 8)) + content[start + length :]


def _json(content: bytes, random: Random) -> bytes:
    """Replace, remove or add one value anywhere in a document, or in the header of a tensor file."""
    size = 0
    if content[:1] != b"{" and len(content) > 8:
        size = struct.unpack("<Q", content[:8])[0]
    text = content[8 : 8 + size] if size else content
    try:
        document = json.loads(text)
    except ValueError:
        return _flip(content, random)
    place = document
    while isinstance(place, dict | list) and place:
        key = random.choice(list(place) if isinstance(place, dict) else range(len(place)))
        if not isinstance(place[key], dict | list) or not place[key] or random.random() < 0.2:
            if random.random() < 0.3:
                del place[key]
            else:
                place[key] = random.choice(VALUES)
            break
        place = place[key]
    new = json.dumps(document).encode()
    return struct.pack("<Q", len(new)) + new + content[8 + size :] if size else new


DAMAGES: dict[str, Callable[[bytes, Random], bytes]] = {
    "a bit flipped": _flip,
    "bytes spliced": _splice,
    "cut": lambda content, random: content[: random.randrange(max(1, len(content)))],
    "a value changed": _json,
    "other content": lambda content, random: WHOLE[random.choice(list(WHOLE))],
}
KINDS = (*DAMAGES, "removed", "of another save", "a folder")


def run(cases: int, seed: int) -> list[Row]:
    rows = []
    with tempfile.TemporaryDirectory() as place:
        for name in TARGETS:
            files = [file for file in prepared(place, name, 0) if not file.endswith(("README.md", ".lock"))]
            random = Random(f"{seed} {name}")
            each = max(len(KINDS), cases // len(TARGETS))
            drawn = [(name, random.choice(files), KINDS[i % len(KINDS)], seed + i) for i in range(each)]
            rows.append(count(f"files of {name}", partial(check, place), drawn))
    return rows


@cache
def prepared(place: str, name: str, save: int) -> tuple[str, ...]:
    """Make a target; returns its files."""
    folder = Path(place) / name / str(save)
    folder.mkdir(parents=True)
    TARGETS[name][0](folder, save)
    return tuple(sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()))


@cache
def expected(place: str, name: str) -> str:
    prepared(place, name, 0)
    with tempfile.TemporaryDirectory() as copy:
        folder = shutil.copytree(Path(place) / name / "0", Path(copy) / "saved")
        return TARGETS[name][1](folder)


def check(place: str, case: Case) -> str:
    """Damage a copy, load it, and compare the answer."""
    name, file, kind, seed = case
    right = expected(place, name)
    prepared(place, name, 1)
    with tempfile.TemporaryDirectory() as copy:
        folder = Path(shutil.copytree(Path(place) / name / "0", Path(copy) / "saved"))
        path, twin = folder / file, Path(place) / name / "1" / file
        if kind == "removed":
            path.unlink()
        elif kind == "a folder":
            path.unlink()
            path.mkdir()
        elif kind == "of another save":
            if not twin.exists() or len(prepared(place, name, 0)) == 1:  # else it is simply another save
                return "same"
            path.write_bytes(twin.read_bytes())
        else:
            path.write_bytes(DAMAGES[kind](path.read_bytes(), Random(seed)))
        torch.manual_seed(0)
        return "same" if TARGETS[name][1](folder) == right else "other"

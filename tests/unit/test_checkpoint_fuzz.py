"""Mutated checkpoints: either a `HydraError`, or a model that is exactly what the files say.

Anything else (another exception, a crash, a wrong or half-filled model) fails the test.
"""

import json
import shutil
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from checkpoint_models import ensemble, inputs_for, same_bits, tiny
from hydra_ensembles.checkpoint import checksum
from hydra_ensembles.errors import HydraError
from hydra_ensembles.model.ensemble import Ensemble
from hydra_ensembles.schema import to_plain

SETTINGS = settings(
    max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], database=None
)
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
INTEGERS = st.sampled_from(
    [-1, 0, 1, 2, 3, 4, 5, 8, 1 << 12, 1 << 24, (1 << 24) + 1, 1 << 31, 1 << 63, 1 << 64, 10**300]
)
WORDS = st.sampled_from(["", "kind", "patch", "text", "image", "relu", "mean", "map", "cls", "rms", "../x", "0" * 64])
SCALARS = st.one_of(st.none(), st.booleans(), INTEGERS, st.floats(), WORDS, st.text(max_size=5))
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz") / "model"
    ensemble(tiny()).save_pretrained(folder)
    return folder


@contextmanager
def copy_of(folder: Path) -> Iterator[Path]:
    with TemporaryDirectory() as temporary:
        yield Path(shutil.copytree(folder, Path(temporary) / "model"))


def load(folder: Path) -> Ensemble | None:
    """The model, or None where it was refused with an error of ours that says something."""
    try:
        return Ensemble.from_pretrained(folder)
    except HydraError as error:
        message = str(error)
    assert len(message) > 20
    message.encode()  # can be printed
    return None


# --- config.json -------------------------------------------------------------------------------------------


def paths_of(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Every place in JSON data."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return [path] * bool(path) + [deeper for key, item in items for deeper in paths_of(item, (*path, key))]
    return [path]


def at(value: Any, path: tuple[str | int, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def says(whole: Any, part: Any) -> bool:
    """Whether `whole` is `part`, plus perhaps defaults for fields that `part` leaves out."""
    if isinstance(whole, dict) and isinstance(part, dict):
        return all(key in whole and says(whole[key], item) for key, item in part.items())
    return bool(whole == part)


def mutate(config: dict[str, Any], draw: Any) -> None:
    """Delete, replace, insert or copy a value at a random place."""
    path = draw(st.sampled_from(paths_of(config)))
    parent, key = at(config, path[:-1]), path[-1]
    action = draw(st.sampled_from(["delete", "replace", "near", "insert", "copy", "repeat"]))
    if action == "delete":
        del parent[key]
    elif action == "replace":
        parent[key] = draw(JSON)
    elif action == "near" and isinstance(parent[key], int | float):
        parent[key] = draw(st.sampled_from([not parent[key], parent[key] + 1, -parent[key], parent[key] * 2, 0]))
    elif action == "copy":
        parent[key] = json.loads(json.dumps(at(config, draw(st.sampled_from(paths_of(config))))))
    elif action == "repeat" and isinstance(parent[key], list):
        parent[key] = parent[key] * draw(st.integers(0, 3))
    elif isinstance(parent, dict):
        parent[draw(WORDS | st.text(max_size=5))] = draw(JSON)
    else:
        parent.insert(draw(st.integers(0, len(parent))), draw(JSON))


@SETTINGS
@given(data=st.data(), count=st.integers(1, 3))
def test_mutated_configs(original: Path, data: st.DataObject, count: int) -> None:
    config = json.loads((original / "config.json").read_text(encoding="utf-8"))
    for _ in range(count):
        mutate(config, data.draw)
    with copy_of(original) as folder:
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        model = load(folder)
        if model is None:
            return
        assert to_plain(model.config) == config["model"]
        assert says(to_plain(model.metadata), config.get("metadata", {}))
        expected = ensemble(tiny()).state_dict()
        state = model.state_dict()
        assert list(state) == list(expected)
        assert all(same_bits(state[name], expected[name]) for name in state)
        with torch.no_grad():
            logits = model(inputs_for(model.config))
        assert logits.shape == (model.num_members, 2, model.num_classes or model.readout.features)
        model.save_pretrained(folder)  # what loads can be saved and loads again, unchanged
        again = Ensemble.from_pretrained(folder)
        assert (again.config, again.metadata) == (model.config, model.metadata)


@SETTINGS
@given(position=st.floats(0, 1), change=st.binary(min_size=0, max_size=6), removed=st.integers(0, 6))
def test_mutated_config_bytes(original: Path, position: float, change: bytes, removed: int) -> None:
    with copy_of(original) as folder:
        content = (folder / "config.json").read_bytes()
        start = round(position * len(content))
        (folder / "config.json").write_bytes(content[:start] + change + content[start + removed :])
        model = load(folder)
        if model is not None:
            expected = ensemble(tiny()).state_dict()
            assert all(same_bits(tensor, expected[name]) for name, tensor in model.state_dict().items())


# --- model.safetensors -------------------------------------------------------------------------------------


def split(content: bytes) -> tuple[dict[str, Any], bytes]:
    length = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def join(header: bytes, body: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + body


def assert_as_written(model: Ensemble, content: bytes) -> None:
    """Every tensor has the bytes the header points at, read here without the safetensors library."""
    header, body = split(content)
    names = [name for name in header if name != "__metadata__"]
    assert sorted(names) == sorted(model.state_dict())
    for name, tensor in model.state_dict().items():
        entry = header[name]
        start, end = entry["data_offsets"]
        assert tensor.dtype == DTYPES[entry["dtype"]]
        assert list(tensor.shape) == entry["shape"]
        assert tensor.detach().flatten().view(torch.uint8).numpy().tobytes() == body[start:end]


def load_weights(original: Path, content: bytes, trusted: bool) -> Ensemble | None:
    """Load with these weights; `trusted` also corrects the checksum, so that the later checks are reached."""
    with copy_of(original) as folder:
        unchanged = content == (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(content)
        if trusted:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            config["files"]["model.safetensors"] = checksum(folder / "model.safetensors")
            (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        model = load(folder)
        assert trusted or (model is not None) == unchanged
        return model


@SETTINGS
@given(data=st.data(), count=st.integers(1, 2), trusted=st.booleans())
def test_mutated_header_fields(original: Path, data: st.DataObject, count: int, trusted: bool) -> None:
    header, body = split((original / "model.safetensors").read_bytes())
    for _ in range(count):
        names = sorted(header)
        name = data.draw(st.sampled_from(names))
        action = data.draw(st.sampled_from(["delete", "rename", "dtype", "shape", "offsets", "swap", "any", "entry"]))
        if action == "delete":
            del header[name]
        elif action == "rename":
            header[data.draw(st.sampled_from([*names, "new", "../x", "", "__metadata__"]))] = header.pop(name)
        elif action == "entry":
            header[name] = data.draw(JSON)
        elif action == "swap":
            other = data.draw(st.sampled_from(names))
            header[name], header[other] = header[other], header[name]
        elif isinstance(header[name], dict) and isinstance(header[name].get("shape"), list):
            entry = header[name]
            if action == "dtype":
                entry["dtype"] = data.draw(st.sampled_from(["F64", "F32", "F16", "BF16", "I32", "BOOL", "X", "f32"]))
            elif action == "shape":
                entry["shape"] = data.draw(st.lists(INTEGERS, max_size=4) | st.permutations(entry["shape"]))
            elif action == "offsets":
                entry["data_offsets"] = data.draw(st.lists(INTEGERS | st.integers(0, len(body)), max_size=3))
            else:
                entry[data.draw(st.sampled_from(sorted(entry)))] = data.draw(JSON)
    text = json.dumps(header).encode()
    content = join(text, body)
    model = load_weights(original, content, trusted)
    if model is not None:
        assert_as_written(model, content)


@SETTINGS
@example(length=0, cut=0, extra=b"", trusted=True)
@example(length=1 << 63, cut=0, extra=b"", trusted=True)
@example(length=(1 << 64) - 1, cut=0, extra=b"", trusted=True)
@example(length=None, cut=0, extra=b"", trusted=False)
@given(
    length=st.none() | st.integers(0, 5000) | st.integers(0, (1 << 64) - 1),
    cut=st.integers(0, 5000),
    extra=st.binary(max_size=16),
    trusted=st.booleans(),
)
def test_mutated_lengths(original: Path, length: int | None, cut: int, extra: bytes, trusted: bool) -> None:
    content = (original / "model.safetensors").read_bytes()
    header_length = struct.unpack("<Q", content[:8])[0]
    changed = join(content[8 : 8 + header_length], content[8 + header_length :], length)
    changed = changed[: len(changed) - cut] + extra
    model = load_weights(original, changed, trusted)
    if model is not None:
        assert_as_written(model, changed)


@SETTINGS
@given(
    flips=st.lists(st.tuples(st.floats(0, 0.999), st.integers(0, 255)), min_size=1, max_size=4), trusted=st.booleans()
)
def test_flipped_bytes(original: Path, flips: list[tuple[float, int]], trusted: bool) -> None:
    content = bytearray((original / "model.safetensors").read_bytes())
    for position, value in flips:
        content[int(position * len(content))] = value
    model = load_weights(original, bytes(content), trusted)
    if model is not None:
        assert_as_written(model, bytes(content))

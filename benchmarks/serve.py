"""What the server costs in addition to the model, its latency at half load, and whether it survives 10,000 requests.

    python benchmarks/serve.py                        # an ensemble made from the demo's backbone
    python benchmarks/serve.py --model hydra-demo/model

Three parts, each against `hydra-ensembles serve` in its own process, all on the loopback. Client, server and model
share the cores of one machine, so the client is lean: requests are bytes made in advance.

* throughput: uploads per second at saturation, compared with a plain loop that decodes the same uploads and runs the
  same batches with one model thread; they take turns.
* latency: uploads at half that rate, evenly spaced and at random times; compared with one call in a plain loop.
* endurance: many requests, one in twenty of them broken: every good one must get the answer of `predict`, every bad
  one a 4xx that says why; server memory after each tenth.
"""

import argparse
import asyncio
import io
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import common  # noqa: F401 (finds `studies`)
import numpy as np
import torch
from PIL import Image

import hydra_ensembles as he
from hydra_ensembles.demo import load_backbone, load_sample
from hydra_ensembles.serve.outputs import columns
from studies.results import RESULTS, hardware, load, markdown, store, versions

RESULT = "serve.json"
SIDE, WAIT_MS, BATCH = 256, 5.0, 16  # pixels of an upload; the server's settings
NEAR = 1e-3  # tolerance of a confidence against `predict`: batches of other sizes round differently
TARGETS = {"throughput_ratio": 0.9, "p99_bound": 2.5, "growth": 0.05}
Answer = tuple[int, bytes]


# --- model and requests ----------------------------------------------------------------------------------------------


def make_model() -> he.Ensemble:
    """Three members of the demo's backbone, calibrated: an ensemble like the demo's, without its training."""
    backbone = load_backbone()
    sample = load_sample()
    cut = [[he.Head(layer, (member + layer) % 6) for layer in (4, 5)] for member in range(3)]
    preprocessing: Any = backbone.metadata.preprocessing
    sets = {}
    for name, data in (("fit", sample.circuit_id), ("calibration", sample.calibration)):
        images, labels = zip(*(data[index] for index in range(len(data))), strict=True)
        sets[name] = [(preprocessing(list(images)), torch.tensor(labels))]
    hydra = he.fuse([he.prune(backbone, heads) for heads in cut])
    return he.calibrate(he.fit_familiarity(hydra, sets["fit"]), sets["calibration"])


def make_uploads(count: int) -> list[bytes]:
    """Images of the demo as JPEG files of a usual size."""
    sample = load_sample().test
    uploads = []
    for index in range(count):
        target = io.BytesIO()
        sample[index % len(sample)][0].resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(target, "JPEG", quality=90)
        uploads.append(target.getvalue())
    return uploads


def as_request(body: bytes, kind: str = "image/jpeg", path: str = "/v1/predict") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def broken_requests(good: bytes) -> list[bytes]:
    """Requests that must be rejected, each for a different reason."""
    header = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + (50_000).to_bytes(4, "big") * 2 + b"\x08\x02\x00\x00\x00"
    return [
        as_request(good[: len(good) // 2]),
        as_request(b"no image"),
        as_request(b""),
        as_request(header + bytes(60)),
        as_request(b"{", "application/json"),
        as_request(b'{"image": "%%"}', "application/json"),
        as_request(b'{"text": "hello"}', "application/json"),
        as_request(b"x", "application/x-pickle"),
        as_request(b"x", "multipart/form-data"),
        as_request(b'{"inputs": []}', "application/json", "/v2/models/model/infer"),
        as_request(b"", path="/v1/nothing"),
    ]


# --- server and client -----------------------------------------------------------------------------------------------


@contextmanager
def server(model: Path) -> Iterator[tuple[int, int]]:
    """Run the command in its own process with one model thread; yields its port and process id."""
    command = [sys.executable, "-m", "hydra_ensembles", "serve", str(model), "--port", "0", "--device", "cpu"]
    command += ["--max-batch", str(BATCH), "--max-wait", str(WAIT_MS), "--max-queue", "1024"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    child = subprocess.Popen(command, env=environment, stdout=nothing, stderr=pipe, text=True)
    try:
        line = next((line for line in child.stderr or () if line.startswith("serving")), "")
        match = re.search(r":(\d+) ", line)
        if match is None:
            raise SystemExit(f"the server did not start: {(child.stderr and child.stderr.read()) or line}")
        yield int(match[1]), child.pid
    finally:
        child.terminate()
        child.communicate()
    if child.returncode:
        raise SystemExit(f"the server ended with {child.returncode}")


class Connection:
    """One keep-alive connection."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, request: bytes) -> Answer:
        if self._streams is None or self._streams[0].at_eof():  # the server has closed it meanwhile
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        writer.write(request)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = re.search(rb"content-length: (\d+)", head)
        body = await reader.readexactly(int(length[1]) if length else 0)
        if b"connection: close" in head:
            await self.close()
        return int(head[9:12]), body

    async def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


async def saturate(port: int, requests: Sequence[bytes], clients: int) -> tuple[list[Answer], float]:
    """Send all requests from `clients` clients that never pause; return the answers and the seconds it took."""
    answers: list[Answer] = [(0, b"")] * len(requests)
    order = iter(range(len(requests)))

    async def client() -> None:
        connection = Connection(port)
        for index in order:
            answers[index] = await connection.ask(requests[index])
        await connection.close()

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return answers, time.perf_counter() - began


async def paced(port: int, requests: Sequence[bytes], moments: Sequence[float]) -> list[float]:
    """Send requests at given times, regardless of earlier ones; return the seconds from each time to its answer."""
    free: list[Connection] = []
    began = time.perf_counter()

    async def timed(request: bytes, moment: float) -> float:
        await asyncio.sleep(max(began + moment - time.perf_counter(), 0))
        connection = free.pop() if free else Connection(port)
        status, body = await connection.ask(request)
        if status != 200:
            raise SystemExit(f"status {status} under half load: {body!r}")
        free.append(connection)
        return time.perf_counter() - began - moment

    seconds = await asyncio.gather(*(timed(*pair) for pair in zip(requests, moments, strict=True)))
    for connection in free:
        await connection.close()
    return list(seconds)


# --- the three measurements ------------------------------------------------------------------------------------------


def plain_loop(plan: Any, uploads: Sequence[bytes], size: int) -> float:
    """Uploads per second: decoded, preprocessed and run in batches by one thread, sequentially."""
    began = time.perf_counter()
    for start in range(0, len(uploads), size):
        images = [Image.open(io.BytesIO(upload)) for upload in uploads[start : start + size]]
        columns(plan.predict(images))
    return len(uploads) / (time.perf_counter() - began)


def throughput(port: int, plan: Any, uploads: Sequence[bytes], turns: int) -> dict[str, Any]:
    requests = [as_request(upload) for upload in uploads]
    served = []
    looped = []
    for _ in range(turns):
        looped.append(plain_loop(plan, uploads, BATCH))
        answers, seconds = asyncio.run(saturate(port, requests, 4 * BATCH))
        if any(status != 200 for status, _ in answers):
            raise SystemExit(f"refused at saturation: {[answer for answer in answers if answer[0] != 200][:3]}")
        served.append(len(requests) / seconds)
    ratios = [ours / theirs for ours, theirs in zip(served, looped, strict=True)]
    return {
        "uploads_per_turn": len(uploads),
        "turns": turns,
        "server_per_second": served,
        "loop_per_second": looped,
        "ratio": statistics.median(ratios),
    }


def latency(port: int, plan: Any, uploads: Sequence[bytes], rate: float, seed: int = 0) -> dict[str, Any]:
    single = statistics.median(1 / plain_loop(plan, [upload], 1) for upload in uploads[:50])
    requests = [as_request(upload) for upload in uploads]
    generator = random.Random(seed)
    even = [index / rate for index in range(len(requests))]
    chance = np.cumsum([generator.expovariate(rate) for _ in requests]).tolist()
    report: dict[str, Any] = {"requests": len(requests), "per_second": rate, "single_call_ms": 1e3 * single}
    for name, moments in (("even", even), ("random", chance)):
        times = 1e3 * np.array(asyncio.run(paced(port, requests, moments)))
        report[name] = {f"p{percent}_ms": float(np.percentile(times, percent)) for percent in (50, 90, 99)}
    report["bound_ms"] = TARGETS["p99_bound"] * 1e3 * single + WAIT_MS
    return report


def endurance(
    port: int, process: int, model: he.Ensemble, uploads: Sequence[bytes], count: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Send good and broken requests in random order; count wrong answers, and record memory after each tenth."""
    expected = [model.predict([Image.open(io.BytesIO(upload))]) for upload in uploads]
    bad = broken_requests(uploads[0])
    generator = random.Random(1)
    plan = [generator.randrange(len(uploads)) if generator.random() >= 0.05 else -1 - generator.randrange(len(bad))
            for _ in range(count)]  # fmt: skip
    good = [as_request(upload) for upload in uploads]
    wrong: list[str] = []
    memory = [resident(process)]
    statuses = dict[str, int]()
    for tenth in range(10):
        chosen = plan[tenth * count // 10 : (tenth + 1) * count // 10]
        requests = [good[index] if index >= 0 else bad[-1 - index] for index in chosen]
        answers, _ = asyncio.run(saturate(port, requests, 32))
        for index, (status, body) in zip(chosen, answers, strict=True):
            statuses[str(status)] = statuses.get(str(status), 0) + 1
            if not (right(status, body, expected[index]) if index >= 0 else refused(status, body)):
                wrong.append(f"{index}: {status} {body[:200]!r}")
        memory.append(resident(process))
        say(f"  {(tenth + 1) * count // 10} requests, {len(wrong)} wrong, {memory[-1]:.0f} MB")
    return {
        "requests": count,
        "broken": sum(index < 0 for index in plan),
        "statuses": statuses,
        "wrong": len(wrong),
        "first_wrong": wrong[:5],
        "memory_mb": memory,
        "growth": memory[-1] / memory[2] - 1,  # since a fifth of the requests
    }


def right(status: int, body: bytes, expected: he.Prediction) -> bool:
    if status != 200:
        return False
    (answer,) = json.loads(body)["predictions"]
    near = abs(answer["confidence"] - expected.confidence.item()) < NEAR
    return answer["label"] == expected.names()[0] and near


def refused(status: int, body: bytes) -> bool:
    return 400 <= status < 500 and bool(json.loads(body)["error"])


def resident(process: int) -> float:
    """Resident memory of a process in megabytes."""
    match = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
    return int(match[1]) / 1e3 if match else float("nan")


def serve_table() -> str:
    """The table of docs/production.md: measured values and targets."""
    run = load(RESULT)
    fast, late, long = run["throughput"], run["latency"], run["endurance"]
    served, looped = (statistics.median(fast[name]) for name in ("server_per_second", "loop_per_second"))
    rows = [
        ("uploads per second at saturation", f"{served:.1f}", f"plain loop: {looped:.1f}"),
        ("their ratio", f"{fast['ratio']:.2f}", f"at least {TARGETS['throughput_ratio']}"),
        ("p99 at half load, evenly spaced", f"{late['even']['p99_ms']:.0f} ms", f"at most {late['bound_ms']:.0f} ms"),
        ("p99 at half load, at random", f"{late['random']['p99_ms']:.0f} ms", ""),
        (f"wrong answers to {long['requests']:,} requests, {long['broken']} of them broken", str(long["wrong"]), "0"),
        ("growth of memory after a fifth of them", f"{long['growth']:+.1%}", "flat"),
    ]
    before = run["load_before"]
    busy = f" that were busy with other work (load average {before:.1f})" if before > 1 else ""
    about = f"{run['hardware']}{busy}, shared by client, server and model; {run['model']}. From `results/{RESULT}`."
    return markdown(["what", "measured", "compared with"], rows, about, "lrl")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a saved ensemble that reads images")
    parser.add_argument("--uploads", type=int, default=320, help="different images")
    parser.add_argument("--turns", type=int, default=5, help="of the throughput")
    parser.add_argument("--requests", type=int, default=10_000, help="of the endurance")
    parser.add_argument("--output", type=Path, default=RESULTS / RESULT)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    load_before = os.getloadavg()[1]
    with tempfile.TemporaryDirectory() as folder:
        model = make_model() if options.model is None else he.Ensemble.from_pretrained(options.model)
        path = options.model or Path(folder) / "model"
        if options.model is None:
            model.save_pretrained(path)
        uploads = make_uploads(options.uploads)
        plan = model.optimize()
        plain_loop(plan, uploads[:BATCH], BATCH)  # measures the plans
        plain_loop(plan, uploads[:1], 1)
        with server(path) as (port, process):
            print(f"throughput: {options.turns} turns of {len(uploads)} uploads")
            fast = throughput(port, plan, uploads, options.turns)
            rate = statistics.median(fast["server_per_second"]) / 2
            print(f"  ratio {fast['ratio']:.3f}; latency at {rate:.1f} a second")
            late = latency(port, plan, uploads, rate)
            print(f"  {late}; endurance")
            long = endurance(port, process, model, uploads, options.requests, print)
    result = {
        "hardware": f"{hardware('cpu')}, {os.cpu_count()} cores",
        "load_before": load_before,  # of the last five minutes: other work on the cores
        "versions": versions("fastapi", "uvicorn", "httptools", "uvloop", "pillow"),
        "model": repr(model),
        "settings": {"max_batch": BATCH, "max_wait_ms": WAIT_MS, "upload": f"JPEG {SIDE} x {SIDE}", "model_threads": 1},
        "targets": TARGETS,
        "throughput": fast,
        "latency": late,
        "endurance": long,
    }
    store(options.output, result)
    print(f"wrote {options.output}")
    met = {
        "throughput": fast["ratio"] >= TARGETS["throughput_ratio"],
        "latency": late["even"]["p99_ms"] <= late["bound_ms"],
        "answers": long["wrong"] == 0,
        "memory": long["growth"] < TARGETS["growth"],
    }
    print(", ".join(f"{name}: {'met' if well else 'MISSED'}" for name, well in met.items()))


if __name__ == "__main__":
    main()

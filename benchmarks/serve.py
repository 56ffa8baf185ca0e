"""What the server costs beside the model, its latency at half load, and whether it survives 10,000 requests.

    python benchmarks/serve.py                        # an ensemble made from the demo's backbone
    python benchmarks/serve.py --model hydra-demo/model

Three parts, each against `hydra-ensembles serve` in its own process, on the loopback. Client, server and model share
the cores of one machine, so the client is lean: requests are bytes made in advance. *Throughput*: uploads per second at
saturation, in turn with a plain loop that decodes the same uploads and runs the same batches with one model thread.
*Latency*: uploads at half that rate, evenly spaced and at random times. *Endurance*: many requests, one in twenty of
them broken: every good one must get the answer of `predict`, every bad one a 4xx that says why; server memory after
each tenth.
"""

import argparse
import asyncio
import io
import json
import os
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from against import as_request, server
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # `studies` is next to the benchmarks

import hydra_ensembles as he  # noqa: E402
from hydra_ensembles.demo import load_backbone, load_sample  # noqa: E402
from studies.tables import write_csv  # noqa: E402

SIDE, WAIT_MS, BATCH = 256, 5.0, 16  # pixels of an upload; the server's settings
NEAR = 1e-3  # tolerance of a confidence against `predict`: batches of other sizes round differently
Answer = tuple[int, bytes]


def make_model() -> he.Ensemble:
    """Three members of the demo's backbone, calibrated: an ensemble like the demo's, without its training."""
    backbone, sample = load_backbone(), load_sample()
    cut = [[he.Head(layer, (member + layer) % 6) for layer in (4, 5)] for member in range(3)]
    images, labels = zip(*(sample["calibration"][index] for index in range(len(sample["calibration"]))), strict=True)
    held_out = [(backbone.prepare(list(images)), torch.tensor(labels))]
    return he.calibrate(he.fuse([he.prune(backbone, heads) for heads in cut]), held_out)


def make_uploads(count: int) -> list[bytes]:
    """Images of the demo as JPEG files of a usual size."""
    sample, uploads = load_sample()["test"], []
    for index in range(count):
        target = io.BytesIO()
        sample[index % len(sample)][0].resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(target, "JPEG", quality=90)
        uploads.append(target.getvalue())
    return uploads


def broken_requests(good: bytes) -> list[bytes]:
    """Requests that must be refused, each for a different reason."""
    header = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + (50_000).to_bytes(4, "big") * 2 + b"\x08\x02\x00\x00\x00"
    plain = [as_request(body) for body in (good[: len(good) // 2], b"no image", b"", header + bytes(60))]
    texts = (b"{", b'{"image": "%%"}', b'{"text": "hello"}')
    as_json = [as_request(text).replace(b"image/jpeg", b"application/json") for text in texts]
    infer = as_request(b'{"inputs": []}').replace(b"image/jpeg", b"application/json")
    missing = as_request(b"").replace(b"/v1/predict", b"/v1/nothing")
    return [*plain, *as_json, infer.replace(b"/v1/predict", b"/v2/models/model/infer"), missing]


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
            self.close()
        return int(head[9:12]), body

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


async def saturate(port: int, requests: Sequence[bytes], clients: int) -> list[Answer]:
    """Send all requests from `clients` clients that never pause; return the answers."""
    answers: list[Answer] = [(0, b"")] * len(requests)
    order = iter(range(len(requests)))

    async def client() -> None:
        connection = Connection(port)
        for index in order:
            answers[index] = await connection.ask(requests[index])
        connection.close()

    await asyncio.gather(*(client() for _ in range(clients)))
    return answers


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
        connection.close()
    return list(seconds)


def plain_loop(plan: Any, uploads: Sequence[bytes], size: int) -> float:
    """Uploads per second: decoded, preprocessed and run in batches by one thread, one after another."""
    began = time.perf_counter()
    for start in range(0, len(uploads), size):
        answers = plan.predict([Image.open(io.BytesIO(upload)) for upload in uploads[start : start + size]])
        json.dumps([answers.names(), answers.confidence.tolist(), answers.probs.tolist()])
    return len(uploads) / (time.perf_counter() - began)


def throughput(port: int, plan: Any, uploads: Sequence[bytes], turns: int) -> dict[str, float]:
    """Uploads per second at saturation beside the plain loop, in turn."""
    requests = [as_request(upload) for upload in uploads]
    served, looped = [], []
    for _ in range(turns):
        looped.append(plain_loop(plan, uploads, BATCH))
        began = time.perf_counter()
        answers = asyncio.run(saturate(port, requests, 4 * BATCH))
        served.append(len(requests) / (time.perf_counter() - began))
        if any(status != 200 for status, _ in answers):
            raise SystemExit(f"refused at saturation: {[answer for answer in answers if answer[0] != 200][:3]}")
    ratio = statistics.median(ours / theirs for ours, theirs in zip(served, looped, strict=True))
    return {
        "server_per_second": statistics.median(served),
        "loop_per_second": statistics.median(looped),
        "ratio": ratio,
    }


def latency(port: int, plan: Any, uploads: Sequence[bytes], rate: float) -> dict[str, float]:
    """Percentiles in milliseconds at a rate, evenly spaced and at random times."""
    single = 1e3 * statistics.median(1 / plain_loop(plan, [upload], 1) for upload in uploads[:50])
    requests, draws = [as_request(upload) for upload in uploads], random.Random(0)
    even = [index / rate for index in range(len(requests))]
    chance = np.cumsum([draws.expovariate(rate) for _ in requests]).tolist()
    found = {"per_second": rate, "single_call_ms": single}
    for name, moments in (("even", even), ("random", chance)):
        times = 1e3 * np.array(asyncio.run(paced(port, requests, moments)))
        found |= {f"{name}_p{percent}_ms": float(np.percentile(times, percent)) for percent in (50, 90, 99)}
    return found | {"p99_over_single": (found["even_p99_ms"] - WAIT_MS) / single}


def endurance(port: int, process: int, model: he.Ensemble, uploads: Sequence[bytes], count: int) -> dict[str, float]:
    """Good and broken requests in random order: wrong answers, and the growth of memory since a fifth of them."""
    expected = [model.predict([Image.open(io.BytesIO(upload))]) for upload in uploads]
    good, bad, draws = [as_request(upload) for upload in uploads], broken_requests(uploads[0]), random.Random(1)
    plan = [
        draws.randrange(len(good)) if draws.random() >= 0.05 else -1 - draws.randrange(len(bad)) for _ in range(count)
    ]
    wrong, memory = [], [resident(process)]
    for tenth in range(10):
        chosen = plan[tenth * count // 10 : (tenth + 1) * count // 10]
        requests = [good[index] if index >= 0 else bad[-1 - index] for index in chosen]
        for index, (status, body) in zip(chosen, asyncio.run(saturate(port, requests, 32)), strict=True):
            if not (right(status, body, expected[index]) if index >= 0 else refused(status, body)):
                wrong.append(f"{index}: {status} {body[:200]!r}")
        memory.append(resident(process))
        print(f"  {(tenth + 1) * count // 10} requests, {len(wrong)} wrong, {memory[-1]:.0f} MB", flush=True)
    print(*wrong[:5], sep="\n")
    broken = sum(index < 0 for index in plan)
    return {"requests": count, "broken": broken, "wrong": len(wrong), "growth": memory[-1] / memory[2] - 1}


def right(status: int, body: bytes, expected: he.Prediction) -> bool:
    """Whether an answer is that of `predict`."""
    if status != 200:
        return False
    (answer,) = json.loads(body)["predictions"]
    return answer["label"] == expected.names()[0] and abs(answer["confidence"] - expected.confidence.item()) < NEAR


def refused(status: int, body: bytes) -> bool:
    """Whether a request was refused with a reason."""
    return 400 <= status < 500 and bool(json.loads(body)["error"])


def resident(process: int) -> float:
    """Resident memory of a process in megabytes."""
    match = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
    return int(match[1]) / 1e3 if match else float("nan")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a saved ensemble that reads images")
    parser.add_argument("--uploads", type=int, default=320, help="different images")
    parser.add_argument("--turns", type=int, default=5, help="of the throughput")
    parser.add_argument("--requests", type=int, default=10_000, help="of the endurance")
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "tables" / "serve.csv")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = make_model() if options.model is None else he.Ensemble.from_pretrained(options.model)
        path = options.model or Path(folder) / "model"
        if options.model is None:
            model.save_pretrained(path)
        uploads, plan = make_uploads(options.uploads), model.optimize()
        plain_loop(plan, uploads[:BATCH], BATCH)  # measures the plans
        plain_loop(plan, uploads[:1], 1)
        with server(path, ROOT) as (port, process):
            fast = throughput(port, plan, uploads, options.turns)
            late = latency(port, plan, uploads, fast["server_per_second"] / 2)
            long = endurance(port, process, model, uploads, options.requests)
    facts: dict[str, Any] = {"cores": os.cpu_count(), "torch": str(torch.__version__), "model": str(model)}
    for name, part in (("throughput", fast), ("latency", late), ("endurance", long)):
        facts |= {f"{name}.{key}": value for key, value in part.items()}
    write_csv(options.output, [["key", "value"], *map(list, facts.items())])
    print(*(f"{key}: {value}" for key, value in facts.items()), sep="\n")


if __name__ == "__main__":
    main()

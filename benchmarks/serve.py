"""The server beside LitServe and a plain FastAPI endpoint, and whether it survives full load.

    pip install --no-deps --target FOLDER litserve==0.2.19 pyzmq
    PYTHONPATH=FOLDER python benchmarks/serve.py
    python benchmarks/serve.py --minutes 30         # only the endurance
    python benchmarks/serve.py --port 8000          # only load a server that runs there, with images or --kinds text

All contenders run the same function from raw rows to answers (`Answers`: the plans of `optimize`, promise and reasons)
in the same batches, and get the same requests: JSON with a JPEG file in base64, or with a text. Only ours has a
monitor, metrics and a log besides. Each is started anew in each turn, in another order, and is alone with the client,
on the loopback; `loop` is that function in one process without HTTP. 1, 8 and 64 clients never pause. `processor_ms`
is what an answer took of all its processes: a machine that others use changes it less than the times.

*Endurance*: 64 clients, one request in twenty broken: every good one must get the answer of `predict`, every bad one a
4xx that says why; the growth of memory from a fifth of the time to the end.
"""

import argparse
import asyncio
import base64
import io
import json
import os
import platform
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from against import COMMAND, as_request, environment
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # `studies` is next to the benchmarks

import hydra_ensembles as he  # noqa: E402
from hydra_ensembles.demo import load_backbone, load_sample  # noqa: E402
from hydra_ensembles.serve.batcher import ServeSettings, warm_runner  # noqa: E402
from hydra_ensembles.serve.protocol import Served, read_named  # noqa: E402
from studies.tables import read_csv, write_csv  # noqa: E402

SIDE, WAIT_MS, BATCH = 256, 5.0, 16  # pixels of an upload; the settings of all contenders
CONTENDERS, CLIENTS = ("hydra", "litserve", "fastapi", "loop"), (1, 8, 64)
BROKEN = 0.05  # share of the requests of the endurance
NEAR = 1e-3  # tolerance of a confidence against `predict`: batches of other sizes round differently
HEAD = ["kind", "contender", "clients", "requests", "per_second", "p50_ms", "p99_ms", "start_s", "memory_mb"]
HEAD += ["processor_ms", "wrong", "growth", "turns", "versions", "hardware"]
PLACES = {"hydra": "/v2/health/ready", "litserve": "/health", "fastapi": "/health"}
Answer = tuple[int, bytes]
Load = tuple[list[float], float, float]  # seconds of every answer, of all, and of the server's processors


# --- models and requests ---------------------------------------------------------------------------------------------


def image_model() -> he.Ensemble:
    """Three members of the demo's backbone with a promise: an ensemble like the demo's, without its training."""
    backbone, sample = load_backbone(), load_sample()
    cut = [[he.Head(layer, (member + layer) % 6) for layer in (4, 5)] for member in range(3)]
    images, labels = zip(*(sample["calibration"][index] for index in range(len(sample["calibration"]))), strict=True)
    held_out = [(backbone.prepare(list(images)), torch.tensor(labels))]
    return he.calibrate(he.fuse([he.prune(backbone, heads) for heads in cut]), held_out, risk=0.2)


def text_model() -> he.Ensemble:
    """MiniLM with a promise: a drawn classifier, whose own answers, a tenth of them changed, are the right labels."""
    from studies.weights import fresh_classifier, pretrained, tokenizer

    shared = ROOT.parent / "shared"
    model = fresh_classifier(pretrained(shared, "minilm", 0, ("a", "b", "c")), 0)
    model.state_dict()["readout.classifier.weight"].mul_(50)  # answers that are sure of something
    about = replace(model.metadata, preprocessing=tokenizer(shared, 128))
    model = he.Ensemble.from_state(model.config, model.state_dict(), about)
    texts = raw_rows("text", 600)
    labels = model.predict(texts).label
    labels[::10] = torch.randint(0, 3, (60,), generator=torch.Generator().manual_seed(0))
    return he.calibrate(model, [(model.prepare(texts), labels)], risk=0.3)


def raw_rows(kind: str, count: int) -> list[Any]:
    """Images of the demo as JPEG files of a usual size, or texts of 4 to 40 words."""
    if kind == "text":
        draws, words = random.Random(0), (ROOT / "README.md").read_text().split()
        return [" ".join(draws.choices(words, k=draws.randint(4, 40))) for _ in range(count)]
    sample, uploads = load_sample()["test"], []
    for index in range(count):
        target = io.BytesIO()
        sample[index % len(sample)][0].resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(target, "JPEG", quality=90)
        uploads.append(target.getvalue())
    return uploads


def body_of(raw: bytes | str) -> bytes:
    """The body that every contender reads."""
    return json.dumps({"text": raw} if isinstance(raw, str) else {"image": base64.b64encode(raw).decode()}).encode()


def as_json(body: bytes) -> bytes:
    """A request with this body."""
    return as_request(body).replace(b"image/jpeg", b"application/json")


def broken_requests() -> list[bytes]:
    """Requests that must be refused, each for a different reason."""
    good = raw_rows("image", 1)[0]
    header = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + (50_000).to_bytes(4, "big") * 2 + b"\x08\x02\x00\x00\x00"
    plain = [as_request(body) for body in (good[: len(good) // 2], b"no image", b"", header + bytes(60))]
    texts = (b"{", b'{"image": "%%"}', b'{"text": 7}', b'{"txt": "hello"}')
    infer = as_json(b'{"inputs": []}').replace(b"/v1/predict", b"/v2/models/model/infer")
    missing = as_request(b"").replace(b"/v1/predict", b"/v1/nothing")
    return [*plain, *map(as_json, texts), infer, missing]


# --- contenders, each in its process ---------------------------------------------------------------------------------


class Answers:
    """The one function of all contenders: raw rows are read one by one, and answered in batches by warm plans."""

    def __init__(self, folder: str) -> None:
        torch.set_num_threads(1)
        model = he.Ensemble.from_pretrained(folder)
        self._served, self._runner = Served(model, "model"), warm_runner(model, ServeSettings(max_batch=BATCH))

    def read(self, body: Any) -> Any:
        """The row of a parsed body."""
        return self._served.reader.read(*read_named(body))

    def __call__(self, rows: Sequence[Any]) -> list[dict[str, Any]]:
        """The answers of rows, as JSON data."""
        found: Any = self._runner.answers(rows)
        return [self._served.plain(answer) for answer in found]


def run_fastapi(folder: str, port: int) -> None:
    """An endpoint as one writes it: a queue, a task that fills batches, threads for decoding and for the model."""
    import fastapi
    import uvicorn

    answers, model = Answers(folder), ThreadPoolExecutor(1)
    app, queue = fastapi.FastAPI(), asyncio.Queue[Any]()

    async def batches() -> None:
        loop = asyncio.get_running_loop()
        while True:
            batch = [await queue.get()]
            until = loop.time() + WAIT_MS / 1e3
            while len(batch) < BATCH:
                try:
                    batch.append(await asyncio.wait_for(queue.get(), until - loop.time()))
                except TimeoutError:
                    break
            found = await loop.run_in_executor(model, answers, [row for row, _ in batch])
            for (_, future), answer in zip(batch, found, strict=True):
                future.set_result(answer)

    @app.post("/v1/predict")
    async def predict(body: dict[str, Any]) -> Any:
        future = asyncio.get_running_loop().create_future()
        queue.put_nowait((await asyncio.to_thread(answers.read, body), future))
        return await future

    @app.get("/health")
    async def health() -> str:
        return "ok"

    async def serve() -> None:
        working = asyncio.create_task(batches())
        await uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning", access_log=False)).serve()
        working.cancel()

    asyncio.run(serve())


def run_loop(folder: str, seconds: float) -> None:
    """A plain loop without HTTP, which decodes the same bodies and runs the same batches: prints its rate."""
    answers, kind = Answers(folder), he.load(folder).kind
    bodies, count = [body_of(raw) for raw in raw_rows(kind, 320)], 0
    began, used = time.perf_counter(), time.process_time()
    while time.perf_counter() < began + seconds:
        rows = [answers.read(json.loads(bodies[(count + index) % len(bodies)])) for index in range(BATCH)]
        for answer in answers(rows):
            json.dumps(answer)
        count += BATCH
    print(count, time.perf_counter() - began, time.process_time() - used)


def command_of(contender: str, folder: Path, port: int) -> list[str]:
    """What starts a contender."""
    if contender == "litserve":
        return [sys.executable, str(Path(__file__).with_name("serve_litserve.py")), str(folder), str(port)]
    if contender != "hydra":
        return [sys.executable, __file__, "--run", contender, str(folder), str(port)]
    batches = ["--max-batch", str(BATCH), "--max-wait", str(WAIT_MS), "--watch", str(folder.parent / "watch")]
    return [sys.executable, "-c", COMMAND, "serve", str(folder), "--port", str(port), "--device", "cpu", *batches]


@contextmanager
def running(contender: str, folder: Path) -> Iterator[tuple[int, int, float]]:
    """A contender in its own process: its port, its process, and the seconds until it was ready."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log, ready = folder.parent / f"{contender}.log", as_request(b"").split(b"\r\n", 1)[1]
    paths = os.pathsep.join((str(ROOT / "src"), os.environ.get("PYTHONPATH", "")))
    began = time.perf_counter()
    with log.open("w") as file:
        settings = {**environment(ROOT), "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        child = subprocess.Popen(command_of(contender, folder, port), env=settings, stdout=file, stderr=file)
    try:
        while True:
            time.sleep(0.02)
            if child.poll() is not None or time.perf_counter() > began + 120:
                raise RuntimeError(f"{contender} is not ready: {log.read_text().strip()[-2000:]}")
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=5) as asked:
                    asked.sendall(f"GET {PLACES[contender]} HTTP/1.1\r\n".encode() + ready)
                    if b" 200 " in asked.recv(64):
                        break
            except OSError:
                continue
        yield port, child.pid, time.perf_counter() - began
    finally:
        workers = [int(one.name) for one in family(child.pid)][1:]
        child.terminate()
        child.wait()
        for worker in workers:  # LitServe leaves its own behind
            with suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)


# --- load ------------------------------------------------------------------------------------------------------------


async def ask(port: int, requests: Iterator[bytes], told: Callable[[bytes, float, Answer], None]) -> None:
    """One client: requests one after another on one connection; `told` gets each, its seconds and its answer."""
    streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
    for request in requests:
        if streams is None or streams[0].at_eof():  # the server has closed it meanwhile
            streams = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        reader, writer = streams
        began = time.perf_counter()
        writer.write(request)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = re.search(rb"content-length: (\d+)", head)
        body = await reader.readexactly(int(length[1]) if length else 0)
        told(request, time.perf_counter() - began, (int(head[9:12]), body))
        if b"connection: close" in head:
            writer.close()
            streams = None
    if streams is not None:
        streams[1].close()


async def saturate(port: int, choose: Callable[[], bytes], clients: int, seconds: float, told: Any) -> float:
    """Requests of clients that never pause; returns the seconds until all had their last answer."""
    began = time.perf_counter()

    def until() -> Iterator[bytes]:
        while time.perf_counter() < began + seconds:
            yield choose()

    await asyncio.gather(*(ask(port, until(), told) for _ in range(clients)))
    return time.perf_counter() - began


def load(port: int, requests: Sequence[bytes], clients: int, seconds: float, process: int = 0) -> Load:
    """Load a server; an answer that is none ends the program."""
    began = processor(process) if process else 0.0
    times, draws = list[float](), random.Random(clients)

    def told(request: bytes, spent: float, answer: Answer) -> None:
        times.append(spent)
        if answer[0] != 200:
            raise SystemExit(f"status {answer[0]}: {answer[1]!r}")

    spent = asyncio.run(saturate(port, lambda: draws.choice(requests), clients, seconds, told))
    return times, spent, processor(process) - began if process else 0.0


def family(process: int) -> Iterator[Path]:
    """A process and its children, below /proc."""
    yield (place := Path(f"/proc/{process}"))
    for file in place.glob("task/*/children"):
        for child in file.read_text().split():
            yield from family(int(child))


def memory(process: int) -> float:
    """Megabytes of a process and its children; what they share counts once."""
    sizes = (re.search(r"^Pss:\s+(\d+) kB", (one / "smaps_rollup").read_text(), re.M) for one in family(process))
    return sum(int(size[1]) / 1e3 for size in sizes if size)


def processor(process: int) -> float:
    """Seconds of processor time of a process and its children."""
    fields = ((one / "stat").read_text().rpartition(")")[2].split() for one in family(process))
    return sum(int(one[11]) + int(one[12]) for one in fields) / os.sysconf("SC_CLK_TCK")


def compared(kind: str, folder: Path, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A line for each contender and number of clients: medians over turns, percentiles over all answers."""
    requests = [as_json(body_of(raw)) for raw in raw_rows(kind, 320)]
    loads: dict[tuple[str, int], list[Load]] = {}
    starts: dict[str, list[tuple[float, float]]] = {}  # seconds and megabytes
    for turn in range(options.turns):
        for contender in (*options.contenders[turn:], *options.contenders[:turn]):
            if contender == "loop":
                command = [*command_of("loop", folder, 0)[:-1], str(options.seconds)]
                said = subprocess.run(command, env=environment(ROOT), check=True, capture_output=True, text=True)
                count, spent, used = map(float, said.stdout.split())
                loads.setdefault((contender, 0), []).append(([spent / count] * int(count), spent, used))
                continue
            with running(contender, folder) as (port, process, start):
                load(port, requests, 8, 1)
                for clients in CLIENTS:
                    found = load(port, requests, clients, options.seconds, process)
                    loads.setdefault((contender, clients), []).append(found)
                    print(f"{kind} {contender} {clients}: {len(found[0]) / found[1]:.1f}/s", flush=True)
                starts.setdefault(contender, []).append((start, memory(process)))
    for (contender, clients), turns in loads.items():
        times = 1e3 * np.concatenate([one for one, _, _ in turns])
        line = {"kind": kind, "contender": contender, "clients": clients, "requests": len(times), "turns": len(turns)}
        line["per_second"] = statistics.median(len(one) / spent for one, spent, _ in turns)
        line["processor_ms"] = statistics.median(1e3 * used / len(one) for one, _, used in turns)
        if clients:
            line |= {f"p{percent}_ms": np.percentile(times, percent) for percent in (50, 99)}
            line |= dict(zip(("start_s", "memory_mb"), np.median(starts[contender], axis=0), strict=True))
        yield line


def endurance(kind: str, folder: Path, minutes: float) -> dict[str, Any]:
    """Good and broken requests in random order at full load: wrong answers, and the growth of memory."""
    model, raws = he.Ensemble.from_pretrained(folder), raw_rows(kind, 320)
    expected = {
        as_json(body_of(raw)): model.predict([Image.open(io.BytesIO(raw)) if isinstance(raw, bytes) else raw])
        for raw in raws
    }
    good, bad, draws = list(expected), broken_requests(), random.Random(1)
    times, wrong = list[float](), list[str]()

    def choose() -> bytes:
        return draws.choice(bad if draws.random() < BROKEN else good)

    def told(request: bytes, spent: float, answer: Answer) -> None:
        times.append(spent)
        if not (right(*answer, expected[request]) if request in expected else refused(*answer)):
            wrong.append(f"{answer[0]} {answer[1][:200]!r}")

    with running("hydra", folder) as (port, process, start):
        sizes, spent = [memory(process)], 0.0
        for _ in range(10):
            spent += asyncio.run(saturate(port, choose, max(CLIENTS), 6 * minutes, told))
            sizes.append(memory(process))
            print(f"{kind}: {len(times)} requests, {len(wrong)} wrong, {sizes[-1]:.0f} MB", flush=True)
    print(*wrong[:5], sep="\n")
    percentiles = {f"p{percent}_ms": 1e3 * np.percentile(times, percent) for percent in (50, 99)}
    line = {"kind": kind, "contender": f"hydra, {minutes:g} minutes", "clients": max(CLIENTS), "requests": len(times)}
    line |= {"per_second": len(times) / spent, **percentiles, "start_s": start, "memory_mb": sizes[-1], "turns": 1}
    return {**line, "wrong": len(wrong), "growth": sizes[-1] / sizes[2] - 1}


def right(status: int, body: bytes, expected: he.Prediction) -> bool:
    """Whether an answer is that of `predict`."""
    if status != 200:
        return False
    (answer,) = json.loads(body)["predictions"]
    return answer["label"] == expected.names()[0] and abs(answer["confidence"] - expected.confidence.item()) < NEAR


def refused(status: int, body: bytes) -> bool:
    """Whether a request was refused with a reason."""
    return 400 <= status < 500 and bool(json.loads(body)["error"])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=("image", "text"), default=("image", "text"))
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8, help="of each load")
    parser.add_argument("--minutes", type=float, help="only the endurance, so long for each kind")
    parser.add_argument("--port", type=int, help="only load this server")
    parser.add_argument("--run", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "tables" / "serve.csv")
    options = parser.parse_args(arguments)
    if options.run:
        contender, folder, number = options.run
        run_loop(folder, float(number)) if contender == "loop" else run_fastapi(folder, int(number))
        return
    if options.port:
        requests = [as_json(body_of(raw)) for raw in raw_rows(options.kinds[0], 320)]
        for clients in CLIENTS:
            times, spent, _ = load(options.port, requests, clients, options.seconds)
            late = 1e3 * np.percentile(times, (50, 99))
            print(f"{clients} clients: {len(times) / spent:.1f}/s, p50 {late[0]:.0f} ms, p99 {late[1]:.0f} ms")
        return
    torch.set_num_threads(1)
    known = [f"{name} {version(name)}" for name in ("torch", "fastapi", "uvicorn", "litserve") if find_spec(name)]
    about = {"versions": ", ".join(known), "hardware": f"CPU {platform.machine()}, {os.cpu_count()} cores, 1 thread"}
    about["hardware"] += f", load {os.getloadavg()[0]:.0f} before"
    lines: list[dict[str, Any]] = read_csv(options.output) if options.output.exists() else []
    others = [("minutes" in one["contender"]) != bool(options.minutes) for one in lines]  # of the other part
    lines = [one for one, other in zip(lines, others, strict=True) if other or one["kind"] not in options.kinds]
    for kind in options.kinds:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / "model"
            (image_model if kind == "image" else text_model)().save_pretrained(folder)
            found = [endurance(kind, folder, options.minutes)] if options.minutes else compared(kind, folder, options)
            lines += [about | line for line in found]
    write_csv(options.output, [HEAD, *([line.get(name, "") for name in HEAD] for line in lines)])
    print(options.output.read_text())


if __name__ == "__main__":
    main()

"""This source beside another checkout, alternately, in one run: the table of what became faster or slower.

    python benchmarks/against.py --against FOLDER                                    # every case, on a CPU
    python benchmarks/against.py --against FOLDER --cases fused --device cuda --batches 128 --contenders hydra-k10

One process a checkout prepares the same models (random weights, so nothing is downloaded) and then measures when it is
told to: this source and the other one in turn, five times, the first to go changing each time. A line of the table has
the median of each, their ratio (below 1: this source is faster), and the smallest and the largest ratio of a turn.
*slower* says that even the smallest ratio is above 1.03. Cases: `predict` (of a calibrated ViT-Ti at 224 pixels,
beside its own forward pass), `fused` (fused ensembles; on a GPU compiled and recorded as CUDA graphs, beside the user's
own model), `circuit` (exact extraction), `server` (uploads), `import`, `help` (beside an empty typer program with as
many commands).
"""

import argparse
import asyncio
import csv
import gc
import io
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CASES = ("predict", "fused", "circuit", "server", "import", "help")
SIDES = ("new", "old")
TURNS = 5
ALLOWED = 1.03  # a ratio that still counts as no slower
HEAD = ("case", "what", "unit", "new", "old", "ratio", "lowest", "highest", "verdict", "device", "torch", "python")
CONTENDERS = ("hydra-k0", "hydra-k8", "hydra-k10", "top-k10", "top-k11", "top-k11x8")
COMMAND = (  # the command line of either checkout, without an installed script
    "import sys; sys.argv[0] = 'hydra-ensembles'\n"
    "try:\n    from hydra_ensembles_cli import main\n"
    "except ImportError:\n    from hydra_ensembles.cli.main import main\n"
    "main()"
)

Numbers = dict[str, float]  # measured values, in milliseconds, by what was measured
Measure = Callable[[], Numbers]


# --- in the process of a checkout ------------------------------------------------------------------------------------


def vit(name: str, **settings: Any) -> Any:
    """A vision transformer of timm with random weights."""
    import timm
    import torch

    torch.manual_seed(0)
    return timm.create_model(name, pretrained=False, **settings).eval()


def milliseconds(function: Callable[[], Any], device: str, seconds: float = 1.0, least: int = 5) -> float:
    """The median time of a call, over as many calls as fit."""
    import torch

    def once() -> float:
        if device == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            start.record()
            function()
            end.record()
            torch.cuda.synchronize()
            return float(start.elapsed_time(end))
        began = time.perf_counter()
        function()
        return 1e3 * (time.perf_counter() - began)

    first = once()
    return statistics.median(once() for _ in range(max(least, min(200, int(1e3 * seconds / max(first, 1e-3))))))


def prepare_predict(device: str, batch: int) -> Measure:
    """`predict` of a calibrated model, beside the model's plain forward pass."""
    import torch

    import hydra_ensembles as he

    draws = torch.Generator().manual_seed(0)
    base = he.convert(vit("vit_tiny_patch16_224", num_classes=10)).to(device)
    held_out = []
    with torch.inference_mode():
        for _ in range(8):
            images = torch.randn(50, 3, 224, 224, generator=draws) * torch.rand(50, 1, 1, 1, generator=draws)
            labels = base(images.to(device))[0].argmax(-1).cpu()
            labels[::10] = torch.randint(0, 10, (5,), generator=draws)
            held_out.append((images, labels))
    model = he.calibrate(base, [(images.clone(), labels.clone()) for images, labels in held_out], share=0.95)
    inputs = torch.randn(batch, 3, 224, 224, generator=draws).to(device)

    @torch.inference_mode()
    def forward() -> Any:
        return model(inputs)

    def measure() -> Numbers:
        forwards, predicts = [], []
        for _ in range(5):  # in turn, so that both see the same machine
            forwards.append(milliseconds(forward, device, 0.3))
            predicts.append(milliseconds(lambda: model.predict(inputs), device, 0.3))
        plain, answered = statistics.median(forwards), statistics.median(predicts)
        return {"forward": plain, "predict": answered, "predict over forward": answered / plain}

    return measure


def prepare_fused(device: str, batch: int, name: str, mode: str) -> Measure:
    """A fused ensemble as a user runs it, beside the user's own model in the same mode."""
    import torch

    import hydra_ensembles as he

    torch.compiler.reset()
    size, dtype = ("base", torch.bfloat16) if device == "cuda" else ("small", torch.float32)
    user = vit(f"vit_{size}_patch16_224").to(device)
    base = he.convert(user)
    heads, layers = base.num_heads, base.num_layers
    trunk = int(name.partition("-k")[2].partition("x")[0])
    members = int(name.partition("x")[2] or 3)

    def tuned(index: int) -> Any:
        """A member: noise stands for its fine-tuning above the trunk; pruned ones lack a third of their heads."""
        member = base.member(0)
        if name.startswith("hydra"):
            draws = torch.Generator().manual_seed(100 + index)
            order = [torch.randperm(heads, generator=draws)[: heads // 3].tolist() for _ in range(layers)]
            member = he.prune(member, [(layer, head) for layer in range(trunk, layers) for head in order[layer]])
        draws = torch.Generator(device).manual_seed(index)
        frozen = ("stem.", *(f"encoder.layers.{layer}." for layer in range(trunk)))
        with torch.no_grad():
            for key, parameter in member.named_parameters():
                if not key.startswith(frozen):
                    parameter.add_(0.02 * torch.randn(parameter.shape, generator=draws, device=device))
        return member

    parts = [tuned(index) for index in range(members)]
    model = he.fuse(parts) if name.startswith("hydra") else he.fuse(parts, mlp="separate", average=trunk)
    model = model.to(dtype)
    images = torch.randn(batch, 3, 224, 224, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    runner = model.optimize(images)
    plan = runner.choice_for(images).plan
    ours, theirs = runner.module(plan), user.to(dtype)
    with torch.inference_mode():
        expected = model(images).float()
    functions: dict[str, Callable[[], Any]] = {}
    for key, module in (("ensemble", ours), ("single", theirs)):
        functions[key] = in_mode(module, images, mode)
    with torch.inference_mode():
        error = float((functions["ensemble"]().float() - expected).norm() / expected.norm())
    if not error < 0.1:
        raise RuntimeError(f"the answers are off by {error:.2g}")
    print(f"{name}, batch {batch}: plan {plan}, error {error:.1e}", file=sys.stderr, flush=True)

    def measure() -> Numbers:
        with torch.inference_mode():
            both = [[milliseconds(function, device, 0.5) for function in functions.values()] for _ in range(3)]
        mine, single = (statistics.median(times) for times in zip(*both, strict=True))
        return {"ensemble": mine, "user's model": single, "ensemble over user's model": mine / single}

    return measure


def in_mode(module: Any, images: Any, mode: str) -> Callable[[], Any]:
    """A call of a model: `eager`, `compiled`, or recorded as a CUDA graph, compiled before (`graphed`) or not."""
    import torch

    call = module
    if mode in ("compiled", "graphed"):
        call = torch.compile(module, dynamic=False)
    with torch.no_grad():
        for _ in range(3):
            call(images)
    if not mode.startswith("graphed"):
        return lambda: call(images)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(3):
            call(images)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        output = call(images)

    def replay() -> Any:
        graph.replay()
        return output

    return replay


def prepare_circuit(device: str, score: str) -> Measure:
    """The exact extraction of a circuit, with random weights."""
    import torch

    import hydra_ensembles as he

    size, side, depth, samples, budget = ("base", 224, 12, 128, 8) if device == "cuda" else ("tiny", 112, 6, 8, 3)
    model = he.convert(vit(f"vit_{size}_patch16_224", img_size=side, depth=depth, num_classes=10)).to(device)
    draws = torch.Generator().manual_seed(2)
    images = torch.randn(2 * samples, 3, side, side, generator=draws)
    labels = torch.randint(0, 10, (samples,), generator=draws)
    inside = list(zip(images[:samples].split(64), labels.split(64), strict=True))
    outside = list(zip(images[samples:].split(64), labels.split(64), strict=True))
    settings: dict[str, Any] = {"score": score, "budget": budget, "method": "exact", "ties": "order"}

    def extract() -> None:
        foreign = None if score == "acc" else outside
        ranking = he.extract_circuit(model, inside, foreign, progress=False, **settings)
        if device == "cuda":
            torch.cuda.synchronize()
        print(f"circuit {score}: {[str(head) for head in ranking.heads]}", file=sys.stderr, flush=True)

    extract()  # loads libraries and chooses kernels

    def measure() -> Numbers:
        began = time.perf_counter()
        extract()
        return {"extraction": 1e3 * (time.perf_counter() - began)}

    return measure


def prepare_server(folder: str) -> Measure:
    """A saved model for a server of this checkout: the demo's backbone, calibrated on noise."""
    import torch

    import hydra_ensembles as he
    from hydra_ensembles.demo import load_backbone

    draws = torch.Generator().manual_seed(3)
    images, labels = torch.rand(300, 3, 64, 64, generator=draws), torch.randint(0, 7, (300,), generator=draws)
    he.calibrate(load_backbone(), [(images, labels)], share=0.95).save_pretrained(folder)
    return dict


def work(cases: Mapping[str, Callable[..., Measure]]) -> None:
    """Answer commands from the parent, a JSON line each; only answers go to its pipe."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints goes to the error stream
    import warnings

    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "0")) or torch.get_num_threads())
    prepared: Measure | None = None
    for line in sys.stdin:
        order = json.loads(line)
        try:
            if order["do"] == "prepare":
                prepared = None
                gc.collect()
                torch.cuda.empty_cache()
                prepared = cases[order["case"]](**order["with"])
                said: dict[str, Any] = {"torch": str(torch.__version__)}
            else:
                assert prepared is not None
                said = prepared()
        except Exception as error:
            traceback.print_exc()
            said = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
        answers.write(json.dumps(said) + "\n")
        answers.flush()


# --- the parent ------------------------------------------------------------------------------------------------------


class Worker:
    """The process of a checkout, which runs a script that calls `work`."""

    def __init__(self, checkout: Path, script: str = __file__) -> None:
        self.environment = environment(checkout)
        command = [sys.executable, script, "--worker"]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, env=self.environment, stdin=pipe, stdout=pipe, text=True)

    def send(self, **order: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else {"error": "the process ended"}

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def environment(checkout: Path) -> dict[str, str]:
    """Variables of a process that imports the package of a checkout."""
    return {**os.environ, "PYTHONPATH": str(checkout / "src"), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def in_turn(measures: Mapping[str, Callable[[], Numbers]], turns: int) -> dict[str, list[Numbers]]:
    """What all sides measure, alternately; the order turns round each time."""
    found: dict[str, list[Numbers]] = {side: [] for side in measures}
    for turn in range(turns):
        for side in [*measures][:: 1 if turn % 2 == 0 else -1]:
            found[side].append(measures[side]())
    return found


def plan(options: argparse.Namespace) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """The parts that workers measure: case, name, and the arguments of its preparation."""
    device = options.device
    if "predict" in options.cases:
        for batch in (1, 8):
            yield "predict", f"calibrated ViT-Ti, batch {batch}", {"device": device, "batch": batch}
    if "fused" in options.cases:
        mode = options.mode or ("graphed" if device == "cuda" else "eager")
        for batch in options.batches or ([128, 4] if device == "cuda" else [2]):
            for name in options.contenders or (CONTENDERS if device == "cuda" else ("hydra-k0", "hydra-k8", "top-k10")):
                settings = {"device": device, "batch": batch, "name": name, "mode": mode}
                yield "fused", f"{name}, batch {batch}, {mode}", settings
    if "circuit" in options.cases:
        for score in ("avg", "acc"):
            yield "circuit", f"exact, {score}", {"device": device, "score": score}


def of_workers(options: argparse.Namespace, checkouts: Mapping[str, Path]) -> Iterator[list[Any]]:
    """Lines of the cases that run in a lasting process a checkout."""
    parts = list(plan(options))
    if not parts:
        return
    workers = {side: Worker(checkout) for side, checkout in checkouts.items()}
    try:
        for case, what, settings in parts:
            for worker in workers.values():
                worker.send(do="prepare", case=case, **{"with": settings})
            ready = {side: worker.receive() for side, worker in workers.items()}
            if failed := {side: one["error"] for side, one in ready.items() if "error" in one}:
                yield failure(case, what, failed, options)
                continue

            def measured(side: str) -> Numbers:
                workers[side].send(do="measure")
                return workers[side].receive()

            found = in_turn({side: partial(measured, side) for side in SIDES}, options.turns)
            failed = {side: one["error"] for side in SIDES for one in found[side] if "error" in one}
            if failed:
                yield failure(case, what, failed, options)
            else:
                yield from lines(case, what, found, options, ready["new"]["torch"])
    finally:
        for worker in workers.values():
            worker.close()


def lines(
    case: str, what: str, found: Mapping[str, Sequence[Numbers]], options: argparse.Namespace, torch: str
) -> Iterator[list[Any]]:
    """A line of the table for everything that both sides measured."""
    for key in found["new"][0]:
        new, old = ([one[key] for one in found[side]] for side in SIDES)
        ratios = sorted(mine / theirs for mine, theirs in zip(new, old, strict=True))
        ratio = statistics.median(new) / statistics.median(old)
        verdict = "slower" if ratios[0] > ALLOWED else "faster" if ratios[-1] < 1 / ALLOWED else "equal"
        unit = "ratio" if " over " in key else "ms"
        numbers = [statistics.median(new), statistics.median(old), ratio, ratios[0], ratios[-1]]
        about = [options.hardware, torch, platform.python_version()]
        yield [case, f"{what}: {key}", unit, *(f"{number:.5g}" for number in numbers), verdict, *about]


def failure(case: str, what: str, errors: Mapping[str, str], options: argparse.Namespace) -> list[Any]:
    """The line of what could not be measured."""
    told = "; ".join(f"{side}: {error}" for side, error in errors.items())
    return [case, what, "", *[""] * 5, f"failed ({told})", options.hardware, "", platform.python_version()]


# --- import and help -------------------------------------------------------------------------------------------------


def seconds_of(command: Sequence[str], checkout: Path) -> float:
    """The shortest of three runs of a process, in seconds."""
    found = []
    for _ in range(3):
        began = time.perf_counter()
        ended = subprocess.run(command, env=environment(checkout), capture_output=True, text=True)
        found.append(time.perf_counter() - began)
        if ended.returncode:
            raise RuntimeError(f"{command[-1]}: {ended.stderr.strip().splitlines()[-1]}")
    return min(found)


def of_processes(options: argparse.Namespace, checkouts: Mapping[str, Path]) -> Iterator[list[Any]]:
    """Lines of the cases that start a process each time."""
    with tempfile.TemporaryDirectory() as folder:
        empty = Path(folder) / "empty.py"
        empty.write_text(empty_program(15))
        for case in (case for case in ("import", "help") if case in options.cases):
            code = {"import": "import hydra_ensembles", "help": COMMAND}[case]
            more = ["--help"] if case == "help" else []

            def measured(side: str, code: str = code, more: Sequence[str] = more, case: str = case) -> Numbers:
                spent = seconds_of([sys.executable, "-c", code, *more], checkouts[side])
                numbers = {"process": 1e3 * spent}
                if case == "help":
                    plain = seconds_of([sys.executable, str(empty), "--help"], checkouts[side])
                    numbers |= {"empty typer program": 1e3 * plain, "process over empty typer program": spent / plain}
                return numbers

            try:
                for side in SIDES:
                    measured(side)  # compiles bytecode
                found = in_turn({side: partial(measured, side) for side in SIDES}, options.turns)
            except RuntimeError as error:
                yield failure(case, case, {"one side": str(error)}, options)
                continue
            yield from lines(case, case, found, options, "")


def empty_program(commands: int) -> str:
    """A typer program whose commands do nothing, with plain help."""
    functions = "\n".join(
        f'@app.command()\ndef command{number}(name: str) -> None:\n    """What command {number} is for."""\n'
        for number in range(commands)
    )
    return f"import typer\n\napp = typer.Typer(rich_markup_mode=None, add_completion=False)\n\n{functions}\napp()\n"


# --- the server ------------------------------------------------------------------------------------------------------


def of_servers(options: argparse.Namespace, checkouts: Mapping[str, Path]) -> Iterator[list[Any]]:
    """Lines about both servers, which are up at the same time and are asked in turn."""
    import numpy as np
    from PIL import Image

    draws = np.random.default_rng(0)
    requests = []
    for _ in range(256):
        target = io.BytesIO()
        coarse = Image.fromarray(draws.integers(0, 255, (16, 16, 3), dtype=np.uint8))
        coarse.resize((256, 256), Image.Resampling.BICUBIC).save(target, "JPEG", quality=90)
        requests.append(as_request(target.getvalue()))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ports = {}
        for side, checkout in checkouts.items():
            worker = Worker(checkout)
            worker.send(do="prepare", case="server", **{"with": {"folder": str(folder / side)}})
            said = worker.receive()
            worker.close()
            try:
                if "error" in said:
                    raise RuntimeError(said["error"])
                ports[side] = stack.enter_context(server(folder / side, checkout))[0]
            except RuntimeError as error:
                yield failure("server", "uploads", {side: str(error)}, options)
                return

        def measured(side: str) -> Numbers:
            return {"an upload at saturation": 1e3 * asyncio.run(saturated(ports[side], requests, 64)) / len(requests)}

        for side in SIDES:
            measured(side)
        found = in_turn({side: partial(measured, side) for side in SIDES}, options.turns)
        yield from lines("server", "uploads", found, options, said["torch"])


def as_request(body: bytes) -> bytes:
    """An upload of an image."""
    head = ("POST /v1/predict HTTP/1.1", "Host: 127.0.0.1", "Content-Type: image/jpeg", f"Content-Length: {len(body)}")
    return "\r\n".join([*head, "", ""]).encode() + body


@contextmanager
def server(model: Path, checkout: Path) -> Iterator[tuple[int, int]]:
    """A server of a checkout in its own process; yields its port and process id once it is ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", COMMAND, "serve", str(model), "--port", str(port), "--device", "cpu"]
    command += ["--max-batch", "16", "--max-wait", "5"]
    log = Path(tempfile.mkdtemp()) / "server.log"
    with log.open("w") as file:
        settings = {**environment(checkout), "OMP_NUM_THREADS": "1"}
        child = subprocess.Popen(command, env=settings, stdout=file, stderr=file)
    try:
        for _ in range(600):
            time.sleep(0.1)
            if child.poll() is not None:
                raise RuntimeError(f"the server ended: {log.read_text().strip()[-200:]}")
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=5) as asked:
                    asked.sendall(b"GET /v2/health/ready HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
                    if b" 200 " in asked.recv(64):
                        break
            except OSError:
                continue
        else:
            raise RuntimeError("the server was not ready within a minute")
        yield port, child.pid
    finally:
        child.terminate()
        child.wait()


async def saturated(port: int, requests: Sequence[bytes], clients: int) -> float:
    """Seconds in which all requests are answered, sent by clients that never pause."""
    waiting = iter(requests)

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for request in waiting:
            writer.write(request)
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            if b" 200 " not in head:
                raise RuntimeError(f"refused: {head[:100]!r}")
            await reader.readexactly(int(head.partition(b"content-length: ")[2].split()[0]))
        writer.close()

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return time.perf_counter() - began


# --- command ---------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, required=True, help="folder of another checkout")
    parser.add_argument("--cases", default=",".join(CASES), help=f"some of {', '.join(CASES)}, separated by commas")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--batches", type=int, nargs="+", help="of the fused ensembles")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, help="fused ensembles: trunk kK, xM members")
    parser.add_argument("--mode", choices=("graphed", "graphed-eager", "compiled", "eager"), help="of fused ensembles")
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "tables" / "speed_against.csv")
    options = parser.parse_args(arguments)
    options.cases = options.cases.split(",")
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"there are no cases {sorted(unknown)}; choose some of {', '.join(CASES)}")
    checkouts = {"new": ROOT, "old": options.against.resolve()}
    for checkout in checkouts.values():
        if not (checkout / "src" / "hydra_ensembles").is_dir():
            parser.error(f"{checkout} has no package in src")
    options.hardware = hardware(options.device)
    measured = []
    for source in (of_workers, of_servers, of_processes):
        if source is of_servers and "server" not in options.cases:
            continue
        for line in source(options, checkouts):
            print("  ".join(map(str, line[:9])), flush=True)
            measured.append(line)
    write(options.output, measured)
    print(f"wrote {options.output}")


def hardware(device: str) -> str:
    """The name of what times are measured on."""
    if device == "cuda":
        asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        return subprocess.run(asked, capture_output=True, text=True).stdout.strip().splitlines()[0]
    return f"CPU {platform.machine()}, {os.environ.get('OMP_NUM_THREADS') or os.cpu_count()} threads"


def write(path: Path, measured: Sequence[Sequence[Any]]) -> None:
    """Write the table; lines of an earlier run about other parts or devices stay."""
    new = {(line[0], line[1], line[9]) for line in measured}
    before: list[list[str]] = []
    if path.exists():
        with path.open(encoding="utf-8", newline="") as file:
            before = [line for line in list(csv.reader(file))[1:] if (line[0], line[1], line[9]) not in new]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([HEAD, *before, *measured])


if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        names = ("predict", "fused", "circuit", "server")
        work({name: globals()[f"prepare_{name}"] for name in names})
    else:
        main()

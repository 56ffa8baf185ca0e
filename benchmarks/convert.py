"""Time and memory of conversions, each in a process of its own; writes results/tables/convert.csv.

    python benchmarks/convert.py FOLDER... [--turns 3]     # models of transformers, as save_pretrained writes them

`live`: beside a loaded model, whose weights have been read once; `folder`: from its files, loading included; `words`:
so, too, a language model that answers with label words. `peak` is
the largest resident memory during the conversion, less that before it, in sizes of the weights; the least of all turns.
The libraries are imported before. On Linux.
"""

import argparse
import csv
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TABLE = Path(__file__).resolve().parents[1] / "results" / "tables" / "convert.csv"
WAYS = ("live", "folder", "words")
HEAD = ("model", "from", "dtype", "bytes", "seconds", "cpu_seconds", "peak", "turns", "python", "torch", "transformers")


def resident(name: str) -> int:
    """Bytes of this process by /proc: `VmRSS` now, `VmHWM` at most."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(f"{name}:")) * 1024


def measure(folder: Path, way: str) -> dict[str, Any]:
    """Convert a model once, in this process."""
    import torch
    import torch._dynamo
    import transformers

    import hydra_ensembles as he

    transformers.utils.logging.disable_progress_bar()
    transformers.AutoTokenizer.from_pretrained(folder)
    source: Any = folder
    with torch.device("meta"):  # imports the module of the model
        transformers.AutoModel.from_config(transformers.AutoConfig.from_pretrained(folder))
    if way == "live":
        source = transformers.AutoModel.from_pretrained(folder, dtype="auto").eval()
        sum(float(parameter.sum()) for parameter in source.parameters())
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    start, cpu = time.perf_counter(), time.process_time()
    how: dict[str, Any] = {"labels": {"yes": " yes", "no": " no"}} if way == "words" else {"num_labels": 2}
    ensemble = he.convert(source, **how)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return {
        "model": folder.name,
        "from": way,
        "dtype": str(ensemble.dtype).removeprefix("torch."),
        "bytes": stored,
        "seconds": round(seconds, 1),
        "cpu_seconds": round(cpu, 1),
        "peak": round((resident("VmHWM") - before) / stored, 2),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def main(given: list[str] | None = None) -> None:
    """Measure every model both ways, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--output", type=Path, default=TABLE)
    parser.add_argument("--only", choices=WAYS, help="measure once, here, and print JSON")
    options = parser.parse_args(given)
    if options.only:
        print(json.dumps(measure(options.folders[0], options.only)))
        return
    rows = list[dict[str, Any]]()
    for folder in options.folders:
        language = "ForCausalLM" in (folder / "config.json").read_text(encoding="utf-8")
        for way in WAYS if language else WAYS[:2]:
            command = [sys.executable, __file__, str(folder), "--only", way]
            turns = [
                json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
                for _ in range(options.turns)
            ]
            least = {name: min(turn[name] for turn in turns) for name in ("seconds", "cpu_seconds", "peak")}
            rows.append({**turns[0], **least, "turns": options.turns})
            print(rows[-1])
    with options.output.open("w", newline="") as file:
        writer = csv.DictWriter(file, HEAD)
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()

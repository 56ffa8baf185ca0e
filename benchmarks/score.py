"""What scoring an archive costs beside the model: rows a second, seconds a shard, memory.

    python benchmarks/score.py images texts          # beside a hand-written DataLoader loop, in turn, on a CPU
    python benchmarks/score.py gpu --workers 12      # beside the model alone and the decoders alone
    python benchmarks/score.py shards memory         # 100, 1,000 and 100,000 shards of one row; a million rows

Weights are random: time does not depend on them. The model of `score` is calibrated: every row has its confidence,
familiarity, verdict and reason, and a monitor has seen it; the loop has the user's own model and writes labels and
confidences. Both start from files and end with a file, their processes included. Lines of other parts of the table
stay.
"""

import argparse
import io
import os
import platform
import re
import resource
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import timm
import torch
from PIL import Image
from torch.utils.data import DataLoader
from torchvision import transforms

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # `studies` is next to the benchmarks

import hydra_ensembles as he  # noqa: E402
from hydra_ensembles.serve import Scorer, score  # noqa: E402
from hydra_ensembles.serve.rows import sources  # noqa: E402
from hydra_ensembles.serve.scoring import Work, _read_ahead  # noqa: E402
from studies.tables import read_csv, write_csv  # noqa: E402

SEED, BATCH = 0, 64
HEAD = ("part", "what", "value", "hardware", "torch", "python", "cores")
Numbers = dict[str, float | str]


# --- archives and models ---------------------------------------------------------------------------------------------


def photograph(seed: int) -> bytes:
    """A JPEG file of 500 x 375 pixels that is about as large as a photograph's."""
    draws = np.random.default_rng(seed)
    small = Image.fromarray(draws.integers(0, 255, (12, 16, 3), dtype=np.uint8))
    pixels = np.asarray(small.resize((500, 375), Image.Resampling.BICUBIC), dtype=np.int16)
    noisy, target = pixels + draws.integers(-12, 12, pixels.shape), io.BytesIO()
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(target, "JPEG", quality=90)
    return target.getvalue()


def photographs(folder: Path, count: int) -> Path:
    """A folder with so many photographs, of which at most 500 differ."""
    folder.mkdir()
    with ProcessPoolExecutor() as pool:
        contents = list(pool.map(photograph, range(min(count, 500)), chunksize=10))
    for index in range(count):
        (folder / f"{index:06d}.jpg").write_bytes(contents[index % len(contents)])
    return folder


def reviews(file: Path, count: int) -> Path:
    """A table of texts of 3 to 60 words, most of them short."""
    draws = np.random.default_rng(SEED)
    words = np.array(["the", "film", "is", "a", "good", "bad", "story", "with", "no", "plot", "and", "great", "actors"])
    lengths = np.clip(draws.lognormal(2.8, 0.6, count), 3, 60).astype(int)
    pq.write_table(pa.table({"text": [" ".join(draws.choice(words, length)) for length in lengths]}), file)
    return file


def vit(name: str, size: int, device: torch.device | str = "cpu") -> tuple[Any, he.Ensemble]:
    """A vision transformer of timm with random weights, and our calibrated copy."""
    torch.manual_seed(SEED)
    theirs = timm.create_model(name, img_size=size, num_classes=10).eval()
    processor = he.ImagePreprocessing((size, size), mean=(0.5,) * 3, std=(0.5,) * 3, crop_fraction=0.9)
    pictures = [Image.open(io.BytesIO(photograph(seed))) for seed in range(120)]
    base = he.convert(theirs, processor=processor).to(device)
    return theirs.to(device), calibrated(base, processor(pictures).to(device))


def calibrated(base: he.Ensemble, inputs: Any) -> he.Ensemble:
    """With a familiarity score, and a threshold that accepts nine in ten of these inputs."""
    labels = base.predict(inputs).label
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # random weights answer nothing well
        return he.calibrate(base, [(inputs, labels)], share=0.9)


# --- loops as a user writes them -------------------------------------------------------------------------------------


class Photos(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, files: Sequence[Path], size: int) -> None:
        self.files = files
        mean = std = (0.5, 0.5, 0.5)
        bicubic = transforms.InterpolationMode.BICUBIC
        steps = [transforms.Resize(int(size / 0.9), bicubic), transforms.CenterCrop(size), transforms.ToTensor()]
        self.prepare = transforms.Compose([*steps, transforms.Normalize(mean, std)])

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.prepare(Image.open(self.files[index]).convert("RGB"))


@torch.inference_mode()
def loop(model: Any, data: Any, names: Sequence[Any], output: Path, workers: int, **options: Any) -> None:
    """Labels and confidences of all items, in a Parquet file."""
    parameter, found = next(model.parameters()), []
    for inputs in DataLoader(data, BATCH, num_workers=workers, **options):
        if isinstance(inputs, torch.Tensor):
            logits = model(inputs.to(parameter.device, parameter.dtype))
        else:
            logits = model(**inputs).logits
        found.append(logits.float().softmax(-1).max(-1))
    confidence, label = (torch.cat(part).cpu().numpy() for part in zip(*found, strict=True))
    pq.write_table(pa.table({"input": list(names), "label": label, "confidence": confidence}), output)


def in_turn(ours: Callable[[Path], Any], theirs: Callable[[Path], Any], rows: int, turns: int) -> Numbers:
    """Rows a second, in turn after one turn to warm up, and ratios, also of processor time: others hardly change it."""
    seconds: dict[str, list[float]] = {"ours": [], "loop": []}
    busy: dict[str, list[float]] = {"ours": [], "loop": []}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(turns + 1):
            for name, run in (("ours", ours), ("loop", theirs))[:: 1 if turn % 2 else -1]:
                began, before = time.perf_counter(), processor_seconds()
                run(Path(folder) / f"{name}{turn}")
                seconds[name] += [time.perf_counter() - began] if turn else []
                busy[name] += [processor_seconds() - before] if turn else []
    ratios = [their / our for our, their in zip(seconds["ours"], seconds["loop"], strict=True)]
    return {
        **{f"{name}_per_second": rows / statistics.median(took) for name, took in seconds.items()},
        "processor_ratio": statistics.median(busy["loop"]) / statistics.median(busy["ours"]),
        "ratio": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios), "rows": rows, "turns": turns,
    }  # fmt: skip


def processor_seconds() -> float:
    """Of this process and of its children that have ended."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


# --- parts -----------------------------------------------------------------------------------------------------------


def images(options: argparse.Namespace, folder: Path) -> Numbers:
    """ViT-S/16 at 112 pixels on a folder of photographs."""
    theirs, ours = vit("vit_small_patch16_224", 112)
    source = photographs(folder / "photos", options.rows or 1024)
    files = sorted(source.iterdir())
    names = [file.name for file in files]
    how: Any = {"batch_size": BATCH, "workers": options.workers, "progress": False}
    by_hand = partial(loop, theirs, Photos(files, 112), names, workers=options.workers)
    return in_turn(lambda output: score(ours, source, output, **how), by_hand, len(files), options.turns)


def texts(options: argparse.Namespace, folder: Path) -> Numbers:
    """MiniLM-L6 on a table of short texts; the loop pads each batch to its longest text."""
    import transformers

    from studies.weights import minilm_folder, tokenizer

    root = minilm_folder(ROOT.parent / "shared")
    torch.manual_seed(SEED)
    config = transformers.AutoConfig.from_pretrained(root, num_labels=2)
    theirs = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    processor, encode = tokenizer(root.parents[1], 128), transformers.PreTrainedTokenizerFast.from_pretrained(root)
    source = reviews(folder / "reviews.parquet", options.rows or 8192)
    rows = pq.read_table(source)["text"].to_pylist()
    ours = calibrated(he.convert(theirs, processor=processor), processor(rows[:200]))

    def together(batch: list[str]) -> Any:
        return dict(encode(batch, padding=True, truncation=True, max_length=128, return_tensors="pt"))

    how: Any = {"batch_size": BATCH, "workers": options.workers, "progress": False}
    by_hand = partial(loop, theirs, rows, range(len(rows)), workers=options.workers, collate_fn=together)
    return in_turn(lambda output: score(ours, source, output, **how), by_hand, len(rows), options.turns)


def gpu(options: argparse.Namespace, folder: Path) -> Numbers:
    """ViT-B/16 in bfloat16 on a folder of JPEG files: the model alone, the decoders alone, both, the loop."""
    batch, device = 128, torch.device("cuda" if torch.cuda.is_available() else "cpu")
    source = photographs(folder / "photos", options.rows or 24_576)  # its processes are forked before CUDA starts
    files, count = sorted(source.iterdir()), options.rows or 24_576
    theirs, ours = vit(options.model, options.size, device)
    theirs = theirs.to(torch.bfloat16)
    how: Any = {"batch_size": batch, "precision": "bfloat16"}
    found: Numbers = {"shared_memory_gb": shutil.disk_usage("/dev/shm").free / 1e9}
    scorer = Scorer(ours, **how)
    runner = ours.optimize(plans=[scorer.plan], dtype=torch.bfloat16)
    inputs = torch.randn(batch, 3, options.size, options.size, device=device, dtype=torch.bfloat16)
    for measured in (False, True):
        began, passes = time.perf_counter(), (max(1, count // batch // 2) if measured else 3)
        for _ in range(passes):
            runner(inputs)
        if device.type == "cuda":
            torch.cuda.synchronize()
        found["model_per_second"] = passes * batch / (time.perf_counter() - began)
    work = [Work(one, ("", ""), 4096, (), {}) for one in sources(source, "image")][: max(1, count // 8192)]
    began, read = time.perf_counter(), 0
    for _, items in _read_ahead(scorer.reading, work, options.workers, None):
        read += len(items.columns["input"])
    found["decoders_per_second"] = read / (time.perf_counter() - began)
    began = time.perf_counter()
    score(ours, source, folder / "scores", workers=options.workers, progress=False, **how)
    found["score_per_second"] = count / (time.perf_counter() - began)
    times = sorted(file.stat().st_mtime for file in (folder / "scores" / "rows").iterdir())
    if len(times) > 1:  # without the start of the processes and the digest of the model
        found["score_steady_per_second"] = (count - 4096) / (times[-1] - times[0])
    slower = min(float(found["model_per_second"]), float(found["decoders_per_second"]))
    found |= {"ratio": float(found["score_per_second"]) / slower}
    found |= {"steady_ratio": float(found.get("score_steady_per_second", 0)) / slower}
    began, some = time.perf_counter(), files[: count // 3]
    loop(theirs, Photos(some, options.size), [file.name for file in some], folder / "loop.parquet", options.workers)
    return found | {"loop_per_second": len(some) / (time.perf_counter() - began), "rows": count}


def two_layers() -> he.Ensemble:
    """A small text model: two layers of 32 dimensions, words of the reviews."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.manual_seed(SEED)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=64, max_position_embeddings=64, **size)
    words = {word: index for index, word in enumerate(["[PAD]", "[UNK]", "the", "film", "is", "a", "good", "bad"])}
    known = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    known.pre_tokenizer = pre_tokenizers.Whitespace()
    processor = he.TextPreprocessing(max_length=64, segments=True, tokenizer=known.to_str())
    base = he.convert(transformers.BertForSequenceClassification(config).eval(), processor=processor)
    return calibrated(base, processor(["the film is good", "a bad film", "good good"] * 50))


def shards(options: argparse.Namespace, folder: Path) -> Numbers:
    """Milliseconds to write a shard of one row, without the model's, and to find it when resuming, by their number."""
    model, found, original, answers = two_layers(), dict[str, Any](), Scorer.answered, list[Any]()

    def answered(self: Scorer, read: Any) -> Any:
        answers.extend([] if answers else [original(self, read)])
        return answers[0]

    Scorer.answered = answered  # type: ignore[method-assign]
    for count in options.counts:
        source = reviews(folder / f"{count}.parquet", count)
        how: Any = {"shard_rows": 1, "workers": 0, "progress": False}
        for name in ("write", "resume"):
            began, before = time.perf_counter(), processor_seconds()
            score(model, source, folder / str(count), **how)
            found[f"{name}_ms_of_{count}"] = 1e3 * (time.perf_counter() - began) / count
            found[f"{name}_processor_ms_of_{count}"] = 1e3 * (processor_seconds() - before) / count
        print(found, flush=True)
    Scorer.answered = original  # type: ignore[method-assign]
    return found


def memory(options: argparse.Namespace, folder: Path) -> Numbers:
    """Resident memory after each tenth of many rows, and its growth since the second."""
    count, seen = options.rows or 1_000_000, list[float]()
    source = reviews(folder / "reviews.parquet", count)
    model, original = two_layers(), Scorer.answered
    calls = iter(range(10**9))

    def answered(self: Scorer, read: Any) -> Any:
        if next(calls) % max(1, count // (BATCH * 8 * 10)) == 0:
            match = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
            seen.append(int(match[1]) / 1e3 if match else float("nan"))
        return original(self, read)

    Scorer.answered = answered  # type: ignore[method-assign]
    began = time.perf_counter()
    score(model, source, folder / "scores", workers=options.workers, progress=False)
    Scorer.answered = original  # type: ignore[method-assign]
    rate = count / (time.perf_counter() - began)
    tenths = {f"mb_after_{place}_tenths": value for place, value in enumerate(seen)}
    return {"rows": count, "per_second": rate, **tenths, "growth": seen[-1] / seen[min(2, len(seen) - 1)] - 1}


PARTS = {"images": images, "texts": texts, "gpu": gpu, "shards": shards, "memory": memory}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--rows", type=int, help="rows of the archive")
    parser.add_argument("--turns", type=int, default=3, help="of images and texts")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes that decode, for both sides")
    parser.add_argument("--counts", type=int, nargs="+", default=[100, 1000, 100_000], help="of shards")
    parser.add_argument("--model", default="vit_base_patch16_224", help="of the part gpu, a ViT of timm")
    parser.add_argument("--size", type=int, default=224, help="of its images")
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "tables" / "score.csv")
    options = parser.parse_args(arguments)
    hardware = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    machine = (hardware, str(torch.__version__), platform.python_version(), os.cpu_count())
    kept: list[list[Any]] = [list(row.values()) for row in read_csv(options.output)] if options.output.exists() else []
    for part in options.parts:
        with tempfile.TemporaryDirectory() as folder:
            found = PARTS[part](options, Path(folder))
        print(*(f"{part}.{name}: {value}" for name, value in found.items()), sep="\n", flush=True)
        kept = [row for row in kept if row[0] != part] + [[part, *one, *machine] for one in found.items()]
        write_csv(options.output, [HEAD, *kept])


if __name__ == "__main__":
    main()

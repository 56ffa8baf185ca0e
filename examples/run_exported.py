"""Run an exported ensemble without this library: ONNX Runtime, NumPy and Pillow are enough.

python examples/run_exported.py                              # exports the embedded model first
python examples/run_exported.py model.onnx photo.jpg         # your file, written by `hydra-ensembles export`
python examples/run_exported.py text-model.onnx --text "a fine film"
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np


# start: images
def prepare_images(images: list[Any], settings: dict[str, Any]) -> dict[str, np.ndarray]:
    """PIL images as inputs of the file, prepared by the settings under "preprocessing" in its JSON."""
    from PIL import Image

    rows = []
    for image in images:
        if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):  # 16 bits
            image = Image.fromarray((np.asarray(image, np.uint16) >> 8).astype(np.uint8))
        if image.mode in ("I", "F"):
            raise ValueError(f"an image has the mode {image.mode}: which number is white? Give 8-bit or 16-bit images")
        image = image.convert("RGB" if len(settings["mean"]) == 3 else "L")
        (height, width), share = settings["size"], settings["crop_fraction"]
        tall, wide = int(height / share + 1e-6), int(width / share + 1e-6)
        if settings["resize_mode"] == "shortest" and tall == wide:  # the short side decides; the other one follows
            short = min(image.size)
            tall, wide = tall * image.height // short, wide * image.width // short
        elif settings["resize_mode"] == "shortest":  # the side that has to grow more decides
            ratio = min(image.height / tall, image.width / wide)
            tall, wide = round(image.height / ratio), round(image.width / ratio)
        image = image.resize((wide, tall), Image.Resampling[settings["interpolation"].upper()])
        half = round if settings["crop_corner"] == "round" else int
        left, top = half((wide - width) / 2), half((tall - height) / 2)
        pixels = np.asarray(image.crop((left, top, left + width, top + height)), dtype=np.float32) / 255
        rows.append(pixels.reshape(height, width, -1).transpose(2, 0, 1))  # [channels, H, W]
    mean, std = (np.array(settings[name], dtype=np.float32)[:, None, None] for name in ("mean", "std"))
    return {"pixel_values": (np.stack(rows) - mean) / std}


# end: images


# start: texts
def prepare_texts(texts: list[str], settings: dict[str, Any], tokenizer_file: Path) -> dict[str, np.ndarray]:
    """Strings as inputs of the file; the tokenizer is next to it."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    side = (tokenizer.truncation or {}).get("direction", "right")  # where long texts are cut
    tokenizer.enable_truncation(settings["max_length"], direction=side)
    length = settings["max_length"] if settings["pad_to_max"] else None
    tokenizer.enable_padding(pad_id=settings["pad_id"], pad_token=settings["pad_token"], length=length)
    found = tokenizer.encode_batch(texts)
    return {
        "input_ids": np.array([one.ids for one in found]),
        "attention_mask": np.array([one.attention_mask for one in found]),
        "token_type_ids": np.array([one.type_ids for one in found]),
    }


# end: texts


# start: run
def answers(model: Path, images: list[Any], texts: list[str]) -> list[dict[str, Any]]:
    """The answers of the file to images or texts."""
    import onnxruntime

    about = json.loads(Path(f"{model}.json").read_text(encoding="utf-8"))
    if texts:
        inputs = prepare_texts(texts, about["preprocessing"], Path(f"{model}.tokenizer.json"))
    else:
        inputs = prepare_images(images, about["preprocessing"])
    session = onnxruntime.InferenceSession(model)
    names = [one.name for one in session.get_outputs()]
    wanted = {one.name: inputs[one.name] for one in session.get_inputs()}
    found = dict(zip(names, session.run(None, wanted), strict=True))  # each with the sample as first axis
    return [
        {
            "label": about["labels"][found["label"][row]] if about["labels"] else int(found["label"][row]),
            "confidence": round(float(found["confidence"][row]), 4),
            "epistemic": round(float(found["epistemic"][row]), 4),
            "accept": bool(found["accept"][row]) if "accept" in found else None,
            "reason": about["reasons"][found["reason"][row]] if "reason" in found else None,
        }
        for row in range(len(found["label"]))
    ]


# end: run


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, help="the .onnx file")
    parser.add_argument("images", nargs="*", type=Path)
    parser.add_argument("--text", action="append", default=[])
    options = parser.parse_args()
    if options.model is None:
        import hydra_ensembles as he
        from hydra_ensembles.demo.run import load_backbone, load_sample

        options.model = he.export(load_backbone(), "demo.onnx")
        images = [load_sample()["test"][row][0] for row in range(3)]
    else:
        from PIL import Image

        images = [Image.open(path) for path in options.images]
    for one in answers(options.model, images, options.text):
        print(one)


if __name__ == "__main__":
    main()

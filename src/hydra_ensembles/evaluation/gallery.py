"""The inputs a model was most and least sure about, gathered while it runs and made into thumbnails."""

import base64
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .._utils import require
from ..batches import Inputs
from ..preprocessing import ImagePreprocessing, TextPreprocessing

Shelf = Literal["sure", "unsure", "wrong"]
Preprocessing = ImagePreprocessing | TextPreprocessing

THUMBNAIL = 96
"""Longest side of an embedded image, in pixels."""

TEXT_LENGTH = 280
"""Most characters of an embedded text."""


@dataclass(frozen=True)
class GalleryItem:
    """One input with what the model said about it.

    Attributes:
        set: Name of the set it is from.
        shelf: Among the most sure, the least sure, or the most sure of the wrong answers.
        index: Its position in the set.
        kind: Whether `content` is the address (`data:` URI) of an image, or a text.
        content: The input itself.
        score: The model's uncertainty.
        confidence: Probability of the predicted class.
        predicted: The predicted class.
        label: The right class; None for OOD inputs, which have none.
    """

    set: str
    shelf: Shelf
    index: int
    kind: Literal["image", "text"]
    content: str
    score: float
    confidence: float
    predicted: int
    label: int | None


@dataclass(frozen=True, eq=False)
class Candidate:
    """An input that may end up in the gallery."""

    score: float
    index: int
    confidence: float
    predicted: int
    label: int | None
    row: Inputs


class Extremes:
    """Keeps the most and least certain inputs of a set, batch by batch; ties go to the earlier input."""

    def __init__(self, keep: int) -> None:
        """Keep this many inputs on each shelf."""
        self.keep = keep
        self.shelves: dict[Shelf, list[Candidate]] = {"sure": [], "unsure": [], "wrong": []}

    def update(
        self, first: int, inputs: Inputs, scores: Tensor, confidence: Tensor, predicted: Tensor, labels: Tensor | None
    ) -> None:
        """Look at one batch, whose first sample has position `first` in the set."""
        if not self.keep:
            return
        order = scores.sort(stable=True).indices.tolist()
        wrong = [] if labels is None else [row for row in order if int(predicted[row]) != int(labels[row])]

        def candidate(row: int) -> Candidate:
            label = None if labels is None else int(labels[row])
            return Candidate(
                float(scores[row]),
                first + row,
                float(confidence[row]),
                int(predicted[row]),
                label,
                _row(inputs, row),
            )

        self._add("sure", [candidate(row) for row in order[: self.keep]])
        self._add("wrong", [candidate(row) for row in wrong[: self.keep]])
        unsure = scores.sort(stable=True, descending=True).indices.tolist()
        self._add("unsure", [candidate(row) for row in unsure[: self.keep]])

    def merge(self, others: "Extremes") -> None:
        """Take in what another process found."""
        for shelf, candidates in others.shelves.items():
            self._add(shelf, candidates)

    def _add(self, shelf: Shelf, found: list[Candidate]) -> None:
        sign = -1 if shelf == "unsure" else 1
        both = sorted([*self.shelves[shelf], *found], key=lambda one: (sign * one.score, one.index))
        self.shelves[shelf] = both[: self.keep]

    def items(self, name: str, preprocessing: Preprocessing | None) -> list[GalleryItem]:
        """The kept inputs as gallery items of the set called `name`."""
        show = _drawing(preprocessing)
        items = []
        for shelf, candidates in self.shelves.items():
            for one in candidates:
                kind, content = show(one.row)
                items.append(
                    GalleryItem(
                        name, shelf, one.index, kind, content, one.score, one.confidence, one.predicted, one.label
                    )
                )
        return items


def _row(inputs: Inputs, row: int) -> Inputs:
    if isinstance(inputs, Tensor):
        return inputs[row].detach().cpu().clone()
    return {name: tensor[row].detach().cpu().clone() for name, tensor in inputs.items()}


def _drawing(preprocessing: Preprocessing | None) -> Callable[[Inputs], tuple[Literal["image", "text"], str]]:
    def show(row: Inputs) -> tuple[Literal["image", "text"], str]:
        tensor = row if isinstance(row, Tensor) else row.get("pixel_values", row.get("input_ids"))
        if tensor is None:
            return "text", f"inputs: {', '.join(sorted(row))}"
        if tensor.ndim == 3:
            return "image", image_uri(tensor, preprocessing if isinstance(preprocessing, ImagePreprocessing) else None)
        text = preprocessing if isinstance(preprocessing, TextPreprocessing) else None
        mask = None if isinstance(row, Tensor) else row.get("attention_mask")
        return "text", token_text(tensor if mask is None else tensor[mask.bool()], text)

    return show


def image_uri(pixels: Tensor, preprocessing: ImagePreprocessing | None = None) -> str:
    """A small image as a `data:` address.

    Args:
        pixels: `[channels, H, W]` as the model saw it; the first three channels are shown.
        preprocessing: Its normalisation is undone; without one the values are stretched to the full range.
    """
    image_module = require("PIL.Image", extra="data")
    pixels = pixels.float()[: 3 if len(pixels) >= 3 else 1]
    if preprocessing is not None:
        shape = (-1, 1, 1)
        pixels = pixels * torch.tensor(preprocessing.std).view(shape) + torch.tensor(preprocessing.mean).view(shape)
    else:
        low, high = float(pixels.min()), float(pixels.max())
        pixels = (pixels - low) / ((high - low) or 1.0)
    levels = (pixels.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()  # [H, W, channels]
    image = image_module.fromarray(levels.squeeze(-1) if levels.shape[-1] == 1 else levels)
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=82)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


def token_text(ids: Tensor, preprocessing: TextPreprocessing | None = None) -> str:
    """Token ids as text, or as numbers where no tokenizer is known."""
    if preprocessing is None or not preprocessing.tokenizer:
        text = "token ids " + " ".join(str(token) for token in ids.tolist())
    else:
        tokenizer = require("tokenizers", extra="text").Tokenizer.from_str(preprocessing.tokenizer)
        text = str(tokenizer.decode(ids.tolist(), skip_special_tokens=True))
    return text if len(text) <= TEXT_LENGTH else text[: TEXT_LENGTH - 1] + "…"

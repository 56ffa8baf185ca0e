"""What the library says about its settings, said again in options of the command line.

Messages may hold paths and names that look like settings (`runs/seed=3,prune=2`); what touches other characters of a
path or a quotation is left alone.
"""

import re
from dataclasses import fields

from ..pipeline.settings import HydraConfig
from ..training.recipe import Recipe

_PLAIN: tuple[tuple[str, str], ...] = (
    (", or pass class_names= if they are classes without an image here", ""),
    (
        "without a class: pass labels='optional'",
        "without a class: make a subfolder for each class, or use them as OOD data",
    ),
    ("pass labels='optional' if the labels are not needed (OOD data)", "use the data as OOD data, which need none"),
    ('. In HydraConfig: prune, or strategy="sampled"', ""),  # `build` lists what helps, in flags
    ("or allow the mismatch", "or add --allow-mismatch"),
)
_ALONE, _TO_HERE = r"(?<![\w/.,'\"\\-])", r"(?![\w/.,=-]*[\w/=])"  # not inside a path, a name or a quotation


def _one_of(cls: type) -> str:
    return "|".join(field.name for field in fields(cls))


_SETTINGS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(_ALONE + pattern), replacement)
    for pattern, replacement in (
        (rf"Recipe\.({_one_of(Recipe)})\b{_TO_HERE}", "--recipe-option \\1"),
        (rf"HydraConfig\.({_one_of(HydraConfig)})\b{_TO_HERE}", "--{1}"),
        (r"evaluate\.scores\[\d+\]", "--also-score"),
        (rf'(strategy|taylor_scope|stem|mlp|norms|readout)="(\w+)"{_TO_HERE}', "--{1} \\2"),
        (r"(id|ood|train|validation)=(?=[ ,;:.]|$)", "--{1}"),
        (rf"calibrate=False{_TO_HERE}", "--no-calibrate"),
        (rf"(bootstrap|gallery|batch_size|seed)=(-?[\d.]*\d){_TO_HERE}", "--{1} \\2"),
        (r"\A(limit|batch_size|workers|num_classes|train_batch_size)(?= must)", "--{1}"),
        (r"\Aweights and random_weights(?= exclude)", "--weights and --random-weights"),
    )
)
_COLUMNS = re.compile(r"columns=Columns\(([^)]*)\)")


def in_flags(message: str) -> str:
    """A message of the library with options in place of arguments and settings."""
    for said, better in _PLAIN:
        message = message.replace(said, better)
    for pattern, replacement in _SETTINGS:
        message = pattern.sub(lambda found, text=replacement: _written(found, text), message)  # type: ignore[misc]
    return _COLUMNS.sub(
        lambda found: " ".join(f"--column {one}" for one in found[1].replace("...", "NAME").split(", ")), message
    )


def _written(found: re.Match[str], replacement: str) -> str:
    """A replacement with its groups, `{1}` as part of an option, which has hyphens."""
    if "{1}" in replacement:
        replacement = replacement.replace("{1}", found[1].replace("_", "-"))
    return found.expand(replacement)

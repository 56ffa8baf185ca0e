"""What the library says about its settings, said again in options of the command line."""

import re

_FLAGS: tuple[tuple[str, str], ...] = (
    (r", or pass class_names= if they are classes without an image here", ""),
    (
        r"without a class: pass labels='optional'",
        "without a class: make a subfolder for each class, or use them as OOD data",
    ),
    (r"pass labels='optional' if the labels are not needed \(OOD data\)", "use the data as OOD data, which need none"),
    (r"\. In HydraConfig: prune, or strategy=\"sampled\"", ""),  # `build` lists what helps, in flags
    (r"\bRecipe\.(\w+)", r"--recipe-option \1"),
    (r"\bevaluate\.scores\[\d+\]", "--also-score"),
    (r"\bHydraConfig\.(\w+)", r"--\1"),
    (r"\b(strategy|taylor_scope|stem|mlp|norms|readout)=\"(\w+)\"", r"--\1 \2"),
    (r"\b(id|ood|train|validation)=(?=[ ,;:.]|$)", r"--\1"),
    (r"\bor allow the mismatch", "or add --allow_mismatch"),
    (r"\bcalibrate=False", "--no-calibrate"),
    (r"\b(bootstrap|gallery|batch_size|seed)=(-?[\d.]+)", r"--\1 \2"),
    (r"^(limit|batch_size|workers|num_classes|train_batch_size) must", r"--\1 must"),
    (r"^weights and random_weights exclude", "--weights and --random-weights exclude"),
)
_COLUMNS = re.compile(r"columns=Columns\(([^)]*)\)")
_FLAG = re.compile(r"(?<![\w./-])--[a-z_]+")


def in_flags(message: str) -> str:
    """A message of the library with options in place of arguments and settings."""
    for pattern, replacement in _FLAGS:
        message = re.sub(pattern, replacement, message)
    message = _COLUMNS.sub(
        lambda found: " ".join(f"--column {one}" for one in found[1].replace("...", "NAME").split(", ")), message
    )
    return _FLAG.sub(lambda found: found[0].replace("_", "-"), message)

"""The heads of an ensemble, drawn: a row per layer, a block per member."""

from ..model.config import KeptHeads

KEPT, PRUNED = "■", "·"


def head_map(heads: KeptHeads, per_layer: int, width: int = 100) -> str:
    """A picture of which heads each member keeps; members go below each other where they do not fit beside.

    Args:
        heads: Original indices of the heads kept, `[member][layer]`.
        per_layer: Heads per layer before pruning.
        width: Characters a line may have.
    """
    column = max(per_layer, len(f"member {len(heads) - 1}")) + 2
    beside = max(1, (width - 7) // column)
    blocks = [_block(heads, range(start, min(start + beside, len(heads))), per_layer, column)
              for start in range(0, len(heads), beside)]  # fmt: skip
    return "\n\n".join(blocks)


def _block(heads: KeptHeads, members: range, per_layer: int, column: int) -> str:
    lines = ["layer  " + "".join(f"member {member}".ljust(column) for member in members)]
    for layer in range(len(heads[0])):
        cells = (
            "".join(KEPT if head in heads[member][layer] else PRUNED for head in range(per_layer)).ljust(column)
            for member in members
        )
        lines.append(f"{layer:>5}  {''.join(cells)}")
    return "\n".join(line.rstrip() for line in lines)

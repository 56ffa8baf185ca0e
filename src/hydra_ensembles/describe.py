"""What an ensemble costs and which heads it keeps, worked out from its configuration alone."""

from dataclasses import dataclass

from .config import EnsembleConfig, KeptHeads, PatchStemConfig


@dataclass(frozen=True)
class Description:
    """Counts of an ensemble; printing it gives a summary and the table of heads kept.

    Attributes:
        parameters: Stored parameters, shared ones counted once.
        multiply_adds: Multiply-adds of one forward pass of one input with `tokens` tokens: every matrix
            product and the patch convolution; biases, norms, softmax and activations are not counted.
        tokens: Sequence length the multiply-adds refer to.
        heads: Original indices of the heads kept, `[member][layer]`.
        heads_per_layer: Heads per layer before pruning.
    """

    parameters: int
    multiply_adds: int
    tokens: int
    heads: KeptHeads
    heads_per_layer: int

    @property
    def heads_kept(self) -> list[list[int]]:
        """How many heads are kept, a row per layer and a column per member."""
        return [[len(heads) for heads in layer] for layer in zip(*self.heads, strict=True)]

    def __str__(self) -> str:
        """Summary and layer × member table."""
        members = range(len(self.heads))
        lines = [
            f"parameters     {self.parameters / 1e6:,.2f} M",
            f"multiply-adds  {self.multiply_adds / 1e9:,.2f} G  ({self.tokens} tokens)",
            f"heads kept     of {self.heads_per_layer} per layer",
            "layer  " + "  ".join(f"member {m}" for m in members),
        ]
        for layer, counts in enumerate(self.heads_kept):
            lines.append(
                f"{layer:>5}  " + "  ".join(f"{count:>{len(f'member {m}')}}" for m, count in enumerate(counts))
            )
        return "\n".join(lines)


def describe(config: EnsembleConfig, parameters: int) -> Description:
    """Describe an ensemble of this configuration that stores `parameters` parameters."""
    tokens = config.stem.tokens if isinstance(config.stem, PatchStemConfig) else config.stem.max_tokens
    return Description(
        parameters=parameters,
        multiply_adds=multiply_adds(config, tokens),
        tokens=tokens,
        heads=config.heads,
        heads_per_layer=config.encoder.heads,
    )


def multiply_adds(config: EnsembleConfig, tokens: int) -> int:
    """Multiply-adds of one forward pass of one input, all tokens computed in every block.

    Layers that all members have in common are counted once. The shortcut of the last block (only the tokens
    that the readout looks at) is left out, so that the figure compares with those of other libraries.
    """
    encoder, stem, members = config.encoder, config.stem, config.members
    width, head_dim = encoder.width, encoder.head_dim
    total = 0
    branches = config.copies("stem")
    if isinstance(stem, PatchStemConfig):
        patches = tokens - stem.prefix_tokens
        total += branches * patches * width * stem.channels * stem.patch_size[0] * stem.patch_size[1]
    elif stem.project:
        total += branches * tokens * stem.embedding_width * width
    mlp = tokens * width * encoder.mlp_width * (3 if encoder.gated else 2)
    for layer in range(encoder.layers):
        if branches == 1 and config.copies("norms", layer) > 1 and encoder.norm_first:
            branches = members
        copies = max(branches, config.copies("attention", layer))
        heads = sum(len(config.heads[member][layer]) for member in range(copies))
        total += heads * (4 * tokens * width * head_dim + 2 * tokens * tokens * head_dim)
        branches = max(copies, config.copies("norms", layer), config.copies("mlp", layer))
        total += branches * mlp
    return total + max(branches, config.copies("readout")) * _readout(config, tokens)


def _readout(config: EnsembleConfig, tokens: int) -> int:
    """Multiply-adds of pooling and classifier for one member."""
    readout, width = config.readout, config.encoder.width
    features = 2 * width if readout.pool == "cls_mean" else width
    total = features * features if readout.hidden else 0
    if readout.cosine is not None and readout.cosine.width is not None:
        total += features * readout.cosine.width
        features = readout.cosine.width
    total += features * readout.num_classes * (2 if readout.pool == "distilled" else 1)
    if readout.pool == "map":
        total += width * width * (2 + 2 * tokens) + 2 * tokens * width + 2 * width * readout.map_mlp_width
    return total

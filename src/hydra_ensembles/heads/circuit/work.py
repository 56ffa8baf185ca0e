"""Counting the work that was done, so that methods compare by more than a clock."""

from dataclasses import dataclass

from ...model.config import EncoderConfig


@dataclass
class Work:
    """What was computed so far.

    Attributes:
        layer_evaluations: Blocks run on one sample; a block counts in full, whatever part of it was needed.
        multiply_adds: Those of the matrix products that were really needed.
    """

    layer_evaluations: int = 0
    multiply_adds: int = 0

    def add(self, layer_evaluations: int, multiply_adds: int) -> None:
        """Count some more."""
        self.layer_evaluations += layer_evaluations
        self.multiply_adds += multiply_adds


@dataclass(frozen=True)
class BlockCost:
    """Multiply-adds of the parts of a block, for one sample."""

    encoder: EncoderConfig

    def attention(self, heads: int, tokens: int, queries: int) -> int:
        """Attention with some heads over all tokens, for the queries of some of them."""
        inner, width = heads * self.encoder.head_dim, self.encoder.width
        return 2 * inner * (width * (queries + tokens) + queries * tokens)

    def few_queries(self, heads: int, tokens: int, queries: int) -> int:
        """The same without keys and values of all tokens (`working_model.few_queries`)."""
        width, asked = self.encoder.width, heads * queries
        return asked * (4 * self.encoder.head_dim * width + 2 * tokens * width)

    def head_output(self, queries: int) -> int:
        """The output projection of a single head."""
        return queries * self.encoder.head_dim * self.encoder.width

    def mlp(self, queries: int) -> int:
        """The MLP on some tokens."""
        return queries * self.encoder.width * self.encoder.mlp_width * (3 if self.encoder.gated else 2)

    def forward(self, heads: list[int], tokens: int, read: int) -> int:
        """All blocks, by the number of heads of each; the last one only for the tokens that are read."""
        queries = [*(tokens for _ in heads[1:]), read]
        return sum(self.attention(h, tokens, q) + self.mlp(q) for h, q in zip(heads, queries, strict=True))

"""Which heads to keep: addresses, masks, rankings and the choice of members."""

from .masking import masked
from .ranking import Head, HeadLike, HeadRanking, jensen_shannon, overlap, stability
from .taylor import taylor

__all__ = ["Head", "HeadLike", "HeadRanking", "jensen_shannon", "masked", "overlap", "stability", "taylor"]

"""Which heads to keep: addresses, masks, rankings and the choice of members."""

from .masking import Head, HeadLike, masked
from .ranking import HeadRanking, jensen_shannon, overlap
from .taylor import taylor

__all__ = ["Head", "HeadLike", "HeadRanking", "jensen_shannon", "masked", "overlap", "taylor"]

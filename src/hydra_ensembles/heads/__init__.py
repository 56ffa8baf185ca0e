"""Which heads to keep: addresses, masks, rankings and the choice of members."""

from .masking import masked
from .ranking import Head, HeadLike, HeadRanking, jensen_shannon, overlap, stability
from .taylor import taylor
from .vectors import CentroidDistance, centroid_distance, head_vectors

__all__ = [
    "CentroidDistance", "Head", "HeadLike", "HeadRanking", "centroid_distance", "head_vectors", "jensen_shannon",
    "masked", "overlap", "stability", "taylor",
]  # fmt: skip

"""Which heads to keep: addresses, masks, rankings and the choice of members."""

from .circuit.extract import extract_circuit
from .head import Head, HeadLike
from .mask import masked
from .ranking import HeadRanking, jensen_shannon, overlap
from .taylor import taylor

__all__ = ["Head", "HeadLike", "HeadRanking", "extract_circuit", "jensen_shannon", "masked", "overlap", "taylor"]

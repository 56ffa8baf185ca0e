"""All architectures the contract tests run on."""

from architectures import VISION_CASES, ArchitectureCase
from architectures_clip import TOWER_CASES
from architectures_own import CASES as OWN_CASES
from architectures_transformers import CASES as TRANSFORMERS_CASES

ALL_CASES: list[ArchitectureCase] = [*VISION_CASES, *TRANSFORMERS_CASES, *OWN_CASES, *TOWER_CASES]

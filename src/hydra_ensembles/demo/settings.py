"""The settings of the demo: few, and chosen on validation images only."""

from dataclasses import dataclass

from ..circuit.scores import Method
from ..errors import ConfigError
from ..pipeline.settings import HydraConfig


@dataclass(frozen=True)
class DemoSettings:
    """How the demo is run.

    Attributes:
        seed: Draws the images to rank heads on, and the batches of each Taylor ranking.
        prune: Heads each member loses, of 36; the choice is in `results/demo_choice.json`.
        shared_layers: The first so many of 6 layers stay whole and are common to all members, so they run once.
        method: How circuits are extracted.
        circuit_images: ID images, and as many OOD images, to rank heads on; fewer if `limit` is lower.
        limit: Use at most so many images of every set; None for all.
        batch_size: Images a batch while ranking and evaluating.
        bootstrap: Resamples behind the confidence intervals.
        latency_batch: Images in the batch whose time is measured.
        latency_repeats: How often it is.
    """

    seed: int = 0
    prune: int = 9
    shared_layers: int = 2
    method: Method = "exact"
    circuit_images: int = 128
    limit: int | None = None
    batch_size: int = 32
    bootstrap: int = 200
    latency_batch: int = 16
    latency_repeats: int = 7

    def __post_init__(self) -> None:
        """Check what a user can change."""
        least = {"seed": 0, "prune": 1, "circuit_images": 16, "batch_size": 1, "latency_batch": 1, "latency_repeats": 1}
        for name, smallest in (least if self.limit is None else {**least, "limit": 16}).items():
            if getattr(self, name) < smallest:
                raise ConfigError(f"DemoSettings.{name} must be at least {smallest}, got {getattr(self, name)}")

    @property
    def ranking_images(self) -> int:
        """ID images, and as many OOD images, that heads are ranked on."""
        return self.circuit_images if self.limit is None else min(self.circuit_images, self.limit)

    @property
    def circuit_build(self) -> HydraConfig:
        """Three members: the circuits for both goals, for accuracy, and for OOD detection."""
        return HydraConfig(
            prune=self.prune,
            strategy="circuit",
            method=self.method,
            shared_layers=self.shared_layers,
            calibrate=False,
            seed=self.seed,
        )

    @property
    def taylor_build(self) -> HydraConfig:
        """Three members: Taylor rankings on different batches."""
        half = max(1, -(-self.ranking_images // self.taylor_batch_size) // 2)
        return HydraConfig(
            prune=self.prune,
            strategy="taylor",
            taylor_scope="global",
            calibration_batches=half,
            shared_layers=self.shared_layers,
            calibrate=False,
            seed=self.seed,
        )

    @property
    def taylor_batch_size(self) -> int:
        """Images a batch for Taylor rankings: small, so that each ranking draws another half of them."""
        return 8

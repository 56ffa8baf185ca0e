"""Ways to train the dual encoder of the zero-shot study that `zero_shot_recipe.py` tries."""

from dataclasses import dataclass

from hydra_ensembles.model.config import Group
from hydra_ensembles.training.recipe import Recipe

BLOCKS: tuple[Group, ...] = ("attention", "mlp", "norms", "readout")
FIRST_RATE = 3e-3  # of the image projection
FEW = 20  # steps


@dataclass(frozen=True)
class Candidate:
    """One way to train.

    Attributes:
        name: What the results call it.
        recipe: Its seed is set by the command; its learning rate is that of the text side.
        image_rate: Learning rate of image projection and scale.
        after: Name of a candidate whose result this one starts from.
    """

    name: str
    recipe: Recipe
    image_rate: float
    after: str | None = None

    @property
    def tower_learns(self) -> bool:
        """Whether captions have to go through the text tower again and again."""
        return self.recipe.train_groups != ("readout",)


def projections_only(rate: float, steps: int, text: float = 0.1, batch: int = 512) -> Candidate:
    """Both towers frozen; the text projection learns at a share of the rate of the image projection."""
    recipe = Recipe(
        learning_rate=text * rate,
        steps=steps,
        warmup=0.1,
        weight_decay=0.1,
        train_groups=("readout",),
        batch_size=batch,
    )
    name = f"projections alone, rate {rate:g}, text share {text:g}, {steps} steps, batches of {batch}"
    return Candidate(name, recipe, rate)


def text_tower(
    rate: float, steps: int, blocks: int | None = None, image_rate: float = FIRST_RATE, after: str | None = None
) -> Candidate:
    """The last blocks of the text tower learn, or all of it but its embeddings."""
    batch = 512 if steps > FEW else 128
    recipe = Recipe(
        learning_rate=rate,
        steps=steps,
        warmup=0.1,
        weight_decay=0.1,
        train_groups=BLOCKS,
        last_blocks=blocks,
        batch_size=batch,
        clip_norm=1.0,
    )
    depth = "all blocks" if blocks is None else f"last {blocks} blocks"
    start = "" if after is None else ", after projections alone"
    return Candidate(f"{depth}, rate {rate:g}, {steps} steps, batches of {batch}{start}", recipe, image_rate, after)


FROZEN = (
    projections_only(FIRST_RATE, 100),
    *(projections_only(rate, 100) for rate in (1e-3, 1e-2)),
    *(projections_only(FIRST_RATE, 100, text=share) for share in (0.001, 1.0)),
    *(projections_only(FIRST_RATE, steps) for steps in (50, 300)),
)
SHORT = (text_tower(3e-5, FEW, 2, FIRST_RATE / 10, FROZEN[0].name),)
"""What a CPU can try of a text tower that learns."""
LONG = (
    *(text_tower(rate, 100) for rate in (1e-5, 3e-5, 1e-4)),
    *(text_tower(1e-5, steps) for steps in (50, 300)),
    text_tower(3e-5, 100, blocks=2),
    text_tower(1e-5, 100, image_rate=FIRST_RATE / 10, after=FROZEN[0].name),
    projections_only(FIRST_RATE / 3, 300),
)
"""Candidates for a GPU."""

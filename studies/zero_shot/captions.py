"""Captions written from class names: many sentences, a few other names for things, drawn anew every time."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from hydra_ensembles.errors import DataError
from hydra_ensembles.model.clip import LABEL, checked_templates

CAPTION_TEMPLATES: tuple[str, ...] = (
    "A photo of a {label}.",
    "a photo of the {label}",
    "a picture of a {label}",
    "an image of a {label}",
    "a snapshot of a {label}",
    "a small photo of a {label}",
    "a large photo of the {label}",
    "a blurry photo of a {label}",
    "a sharp picture of a {label}",
    "a pixelated image of a {label}",
    "a low-resolution photo of a {label}",
    "a thumbnail of the {label}",
    "a close-up of a {label}",
    "a {label} seen from afar",
    "a {label} seen from the side",
    "a {label} from above",
    "a cropped photo that shows a {label}",
    "a photo of part of a {label}",
    "a bright photo of a {label}",
    "a dark photo of the {label}",
    "a colourful picture of a {label}",
    "a black-and-white photo of a {label}",
    "a photo of one {label}",
    "a photo of several of the kind: {label}",
    "a photo of my {label}",
    "a typical {label}",
    "an unusual {label}",
    "a nice photo of the {label}",
    "a bad photo of a {label}",
    "this is a {label}",
    "here you can see a {label}",
    "there is a {label} in this picture",
    "the picture shows a {label}",
    "what we see is a {label}",
    "look at this {label}",
    "a {label} in its usual surroundings",
    "a {label} in front of a plain background",
    "a {label} in the middle of the image",
    "an example of a {label}",
    "{label}",
)
"""Sentences for training; the first one is what the study asks by."""

OTHER_NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "Arabian camel": ("dromedary",),
        "CD player": ("compact disc player",),
        "Christmas stocking": ("stocking for Christmas presents",),
        "Egyptian cat": ("Egyptian Mau cat",),
        "academic gown": ("graduation gown",),
        "airplane": ("aeroplane", "plane"),
        "alp": ("high mountain of the Alps",),
        "automobile": ("car",),
        "bannister": ("handrail of a staircase",),
        "beach wagon": ("station wagon",),
        "beacon": ("lighthouse",),
        "bee": ("honey bee",),
        "bighorn": ("bighorn sheep",),
        "black widow": ("black widow spider",),
        "bullet train": ("high-speed train",),
        "cash machine": ("automated teller machine",),
        "chest": ("wooden chest",),
        "comic book": ("comic",),
        "computer keyboard": ("keyboard",),
        "confectionery": ("candy store",),
        "convertible": ("convertible car",),
        "cougar": ("puma", "mountain lion"),
        "drumstick": ("stick of a drummer",),
        "espresso": ("cup of espresso",),
        "freight car": ("freight wagon of a train",),
        "frying pan": ("pan",),
        "gasmask": ("gas mask",),
        "go-kart": ("small racing kart",),
        "gondola": ("Venetian gondola",),
        "hog": ("pig",),
        "iPod": ("portable music player",),
        "ice lolly": ("popsicle",),
        "jinrikisha": ("rickshaw",),
        "ladybug": ("ladybird beetle",),
        "lesser panda": ("red panda",),
        "magnetic compass": ("compass",),
        "mantis": ("praying mantis",),
        "monarch": ("monarch butterfly",),
        "nail": ("metal nail",),
        "organ": ("pipe organ",),
        "ox": ("ox, a kind of cattle",),
        "pay-phone": ("public telephone",),
        "pole": ("wooden pole",),
        "pop bottle": ("soda bottle",),
        "projectile": ("missile",),
        "reel": ("fishing reel",),
        "refrigerator": ("fridge",),
        "ship": ("vessel at sea",),
        "spider web": ("cobweb",),
        "sulphur butterfly": ("yellow butterfly",),
        "tabby": ("tabby cat",),
        "teddy": ("teddy bear",),
        "thatch": ("thatched roof",),
        "torch": ("burning torch",),
        "truck": ("lorry",),
        "walking stick": ("stick insect",),
    }
)
"""Further names of classes, for captions only: what the thing is called as well, or which of several things it is."""


class Captions:
    """Captions of every class; which sentence and which name is drawn from torch's CPU generator."""

    def __init__(
        self,
        names: Sequence[str],
        templates: Sequence[str] = CAPTION_TEMPLATES,
        other_names: Mapping[str, Sequence[str]] = OTHER_NAMES,
    ) -> None:
        """Take class names in the order of the labels.

        Raises:
            DataError: A class without a name, or a template without a place for it.
        """
        if not names or not all(name.strip() for name in names):
            raise DataError(f"every class needs a name, got {[name for name in names if not name.strip()] or 'none'}")
        self.templates = checked_templates(tuple(templates))
        self.names = tuple((name, *other_names.get(name, ())) for name in names)

    def draw(self, labels: Tensor) -> list[str]:
        """A caption for every label `[B]`."""
        sentences = torch.randint(len(self.templates), labels.shape).tolist()
        choices = torch.rand(labels.shape).tolist()
        drawn = []
        for label, sentence, choice in zip(labels.tolist(), sentences, choices, strict=True):
            names = self.names[label]
            drawn.append(self.templates[sentence].replace(LABEL, names[int(choice * len(names))]))
        return drawn

"""What prompts call the classes of a data set: its own names made readable, and a few written out by hand.

Names are cleaned by rule (underscores, words run together, capitals of words that are no names). Where a name alone
does not say what the pictures show, or is a homonym, it is written out; nothing here was chosen by looking at results.
"""

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

_WORDS = re.compile(r"(?<=[a-z])(?=[A-Z])")

_TEXTURE = "{} texture"

WRITTEN_OUT: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "caltech101": {
            "Faces": "person's face with background",
            "Faces_easy": "person's face",
            "Leopards": "leopard",
            "Motorbikes": "motorbike",
            "airplanes": "airplane",
            "bass": "bass fish",
            "binocular": "binoculars",
            "buddha": "buddha statue",
            "car_side": "side of a car",
            "cougar_body": "body of a cougar",
            "cougar_face": "face of a cougar",
            "crocodile_head": "head of a crocodile",
            "flamingo_head": "head of a flamingo",
            "garfield": "cartoon cat Garfield",
            "hawksbill": "hawksbill turtle",
            "headphone": "headphones",
            "ketch": "ketch sailing boat",
            "rhino": "rhinoceros",
            "schooner": "schooner sailing ship",
            "snoopy": "cartoon dog Snoopy",
            "water_lilly": "water lily",
            "yin_yang": "yin and yang symbol",
        },
        "eurosat": {
            "AnnualCrop": "annual crop land",
            "HerbaceousVegetation": "herbaceous vegetation",
            "Industrial": "industrial buildings",
            "Pasture": "pasture land",
            "PermanentCrop": "permanent crop land",
            "Residential": "residential buildings",
            "SeaLake": "sea or lake",
        },
        "scene15": {
            "Industrial": "industrial plant",
            "InsideCity": "city centre",
            "OpenCountry": "open country",
            "Suburb": "suburban house",
        },
        "tinyimagenet": {"brass": "memorial brass plaque", "crane": "construction crane"},
    }
)
"""By data set and class; the sets of one task under the name of the set."""

_CATS = (
    "Abyssinian",
    "Bengal",
    "Birman",
    "Bombay",
    "British_Shorthair",
    "Egyptian_Mau",
    "Maine_Coon",
    "Persian",
    "Ragdoll",
    "Russian_Blue",
    "Siamese",
    "Sphynx",
)


def label_names(dataset: str, class_names: Sequence[str]) -> tuple[str, ...]:
    """Names for prompts, in the order of the classes."""
    written = WRITTEN_OUT.get(dataset, {})
    return tuple(written.get(name) or _cleaned(dataset, name) for name in class_names)


def _cleaned(dataset: str, name: str) -> str:
    words = _WORDS.sub(" ", name) if " " not in name and dataset in ("eurosat", "scene15") else name
    words = words.replace("_", " ").strip()
    if dataset in ("eurosat", "scene15"):
        words = words.lower()
    if dataset == "pets":  # the set says cat or dog by capitals alone
        return f"{words} {'cat' if name in _CATS else 'dog'}"
    return _TEXTURE.format(words) if dataset.startswith("dtd") else words

"""Classes that two data sets share, so that one of them can serve as OOD data for the other.

The rule, applied to the class names and, where a name was in doubt, to the pictures. Two classes overlap if

1. they are the same thing, or one is a kind of the other (brown bear and bear, school bus and bus);
2. the pictures of one usually show the other as the main object (thatch and house, espresso and cup,
   menorah and candle, lampshade and lamp);
3. most people would call both by the same name (alligator and crocodile, trolleybus and streetcar, stopwatch
   and clock, gerenuk and gazelle).

Relatives stay apart: lion and leopard, hamster and guinea pig, pickup truck and moving van. For CIFAR-10, its
sibling CIFAR-100 shows how broadly its names are meant: big cats, buses, tractors, trams and pickup trucks are
classes of CIFAR-100 and therefore not cats, trucks or automobiles of CIFAR-10. Its ships include boats, its
automobiles small racing cars, its trucks vans.

Homonyms that do not overlap: TinyImageNet's `crane` is the machine and its `brass` a memorial plaque;
Caltech101's `bass` is the fish.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

Overlap = Mapping[str, tuple[str, ...]]

CIFAR10_TINYIMAGENET: Overlap = MappingProxyType(
    {
        "automobile": ("beach wagon", "convertible", "go-kart", "limousine", "sports car"),
        "bird": ("albatross", "black stork", "goose", "king penguin"),
        "cat": ("Egyptian cat", "Persian cat", "tabby"),
        "dog": (
            "Chihuahua",
            "German shepherd",
            "Labrador retriever",
            "Yorkshire terrier",
            "golden retriever",
            "standard poodle",
        ),
        "frog": ("bullfrog", "tailed frog"),
        "ship": ("gondola", "lifeboat"),
        "truck": ("moving van", "police van"),
    }
)
"""For each class of CIFAR-10 that overlaps TinyImageNet-200, the classes there."""

CIFAR100_TINYIMAGENET: Overlap = MappingProxyType(
    {
        "aquarium_fish": ("goldfish",),
        "bear": ("brown bear",),
        "bee": ("bee",),
        "beetle": ("ladybug",),
        "bottle": ("beer bottle", "pill bottle", "pop bottle", "water jug"),
        "bridge": ("steel arch bridge", "suspension bridge", "viaduct"),
        "bus": ("school bus", "trolleybus"),
        "butterfly": ("monarch", "sulphur butterfly"),
        "camel": ("Arabian camel",),
        "cattle": ("bison", "ox"),
        "chair": ("rocking chair",),
        "chimpanzee": ("chimpanzee",),
        "clock": ("stopwatch",),
        "cockroach": ("cockroach",),
        "crocodile": ("American alligator",),
        "cup": ("espresso",),
        "elephant": ("African elephant",),
        "house": ("barn", "thatch"),
        "keyboard": ("computer keyboard",),
        "lamp": ("lampshade",),
        "lawn_mower": ("lawn mower",),
        "lion": ("lion",),
        "lobster": ("American lobster", "spiny lobster"),
        "mountain": ("alp",),
        "mushroom": ("mushroom",),
        "orange": ("orange",),
        "plate": ("plate",),
        "rocket": ("projectile",),
        "sea": ("seashore",),
        "snail": ("snail",),
        "snake": ("boa constrictor",),
        "spider": ("black widow", "tarantula"),
        "streetcar": ("trolleybus",),
        "sweet_pepper": ("bell pepper",),
        "table": ("desk", "dining table"),
        "telephone": ("pay-phone",),
        "tractor": ("tractor",),
        "train": ("bullet train", "freight car"),
    }
)
"""For each class of CIFAR-100 that overlaps TinyImageNet-200, the classes there."""

CALTECH101_TINYIMAGENET: Overlap = MappingProxyType(
    {
        "barrel": ("barrel",),
        "binocular": ("binoculars",),
        "butterfly": ("monarch", "sulphur butterfly"),
        "cannon": ("cannon",),
        "car_side": ("beach wagon", "convertible", "limousine", "sports car"),
        "chair": ("rocking chair",),
        "cougar_body": ("cougar",),
        "cougar_face": ("cougar",),
        "crayfish": ("American lobster", "spiny lobster"),
        "crocodile": ("American alligator",),
        "crocodile_head": ("American alligator",),
        "cup": ("espresso",),
        "dragonfly": ("dragonfly",),
        "elephant": ("African elephant",),
        "ewer": ("water jug",),
        "gerenuk": ("gazelle",),
        "lamp": ("lampshade",),
        "lobster": ("American lobster", "spiny lobster"),
        "menorah": ("candle",),
        "pizza": ("pizza",),
        "scorpion": ("scorpion",),
        "trilobite": ("trilobite",),
        "umbrella": ("umbrella",),
        "watch": ("stopwatch",),
        "wild_cat": ("Egyptian cat", "tabby"),
        "windsor_chair": ("rocking chair",),
    }
)
"""For each class of Caltech101 that overlaps TinyImageNet-200, the classes there."""

SCENE15_TINYIMAGENET: Overlap = MappingProxyType(
    {"Coast": ("seashore",), "Mountain": ("alp",), "Store": ("barbershop", "butcher shop", "confectionery")}
)
"""For each class of Scene-15 that overlaps TinyImageNet-200, the classes there."""

FASHION_MNIST_TINYIMAGENET: Overlap = MappingProxyType(
    {"bag": ("backpack",), "coat": ("fur coat",), "sandal": ("sandal",)}
)
"""For each class of Fashion-MNIST that overlaps TinyImageNet-200, the classes there."""

SCENE15_CIFAR100: Overlap = MappingProxyType(
    {
        "Bedroom": ("bed",),
        "Coast": ("sea",),
        "Forest": ("forest",),
        "Highway": ("road",),
        "Mountain": ("mountain",),
        "OpenCountry": ("plain",),
        "Suburb": ("house",),
        "TallBuilding": ("skyscraper",),
    }
)
"""For each class of Scene-15 that overlaps CIFAR-100, the classes there."""


def left(overlap: Overlap) -> tuple[str, ...]:
    """Name the overlapping classes of the first data set."""
    return tuple(overlap)


def right(overlap: Overlap) -> tuple[str, ...]:
    """Name the overlapping classes of the second data set."""
    return _sorted(name for names in overlap.values() for name in names)


def _sorted(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(names)))

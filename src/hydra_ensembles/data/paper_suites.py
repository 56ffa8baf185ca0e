"""The paper's own suites, for users who have its data.

Images are read from an OpenOOD 1.5 data folder (`benchmark_imglist/`, `images_classic/`, `images_largescale/`),
ImageNet itself through torchvision, texts from the Hugging Face hub. The paper does not say which copies of the
text sets it used; the names here are the usual ones.
"""

from dataclasses import replace

from .cifar100 import CIFAR100_CLASSES
from .suites import SetRef, Suite, named
from .tables import Columns


def _listed(name: str, task: str, list_name: str, folder: str = "images_classic") -> SetRef:
    path = f"benchmark_imglist/{task}/{list_name}.txt"
    return SetRef(name, path, folder=folder, labels="optional")


def _large(name: str, list_name: str) -> SetRef:
    return _listed(name, "imagenet", list_name, "images_largescale")


_IMAGENET = SetRef(
    "imagenet",
    "torchvision:ImageNet",
    "val",
    share=(0.01, 1.0),
    folder="images_largescale/imagenet_1k",
)
_IMAGENET_NEAR = (_large("ssb_hard", "test_ssb_hard"), _large("ninco", "test_ninco"))
_IMAGENET_FAR = (
    _large("inaturalist", "test_inaturalist"),
    _listed("textures", "imagenet", "test_textures"),
)
_CIFAR100 = SetRef(
    "cifar100",
    "benchmark_imglist/cifar100/test_cifar100.txt",
    folder="images_classic",
)
_CIFAR10_NEAR = _listed("cifar10", "cifar100", "test_cifar10")
_CIFAR100_FAR = (
    _listed("mnist", "cifar100", "test_mnist"),
    _listed("svhn", "cifar100", "test_svhn"),
    _listed("textures", "cifar100", "test_texture"),
    _listed("places365", "cifar100", "test_places365"),
)
_GLUE = "hub:nyu-mll/glue"

PAPER_IMAGENET = Suite(
    name="paper-imagenet",
    id=_IMAGENET,
    validation=SetRef(
        "imagenet-validation",
        _IMAGENET.source,
        _IMAGENET.split,
        share=(0.0, 0.01),
        folder=_IMAGENET.folder,
    ),
    circuit_ood=_large("openimage_o", "val_openimage_o"),
    near=_IMAGENET_NEAR,
    far=_IMAGENET_FAR,
    notes="Supervised ImageNet-1K. OpenImage-O is not reported, because circuits are chosen on its validation "
    "part. 1 % of the official validation set is for validation, 99 % for testing.",
)

PAPER_CIFAR100 = Suite(
    name="paper-cifar100",
    id=_CIFAR100,
    train=SetRef(
        "cifar100-train",
        "benchmark_imglist/cifar100/train_cifar100.txt",
        folder="images_classic",
    ),
    validation=SetRef(
        "cifar100-validation",
        "benchmark_imglist/cifar100/val_cifar100.txt",
        folder="images_classic",
    ),
    circuit_ood=_listed("tinyimagenet", "cifar100", "val_tin"),
    near=(_CIFAR10_NEAR,),
    far=_CIFAR100_FAR,
    notes="Supervised CIFAR-100. TinyImageNet is not reported, because circuits are chosen on its validation "
    "part; CIFAR-10 is the only near set.",
)

PAPER_SST2 = Suite(
    name="paper-sst2",
    id=SetRef("sst2", _GLUE, "validation", config="sst2", columns=Columns(text="sentence")),
    train=SetRef(
        "sst2-train",
        _GLUE,
        "train",
        rows=(3000, None),
        config="sst2",
        columns=Columns(text="sentence"),
    ),
    validation=SetRef(
        "sst2-validation",
        _GLUE,
        "train",
        rows=(None, 3000),
        config="sst2",
        columns=Columns(text="sentence"),
    ),
    circuit_ood=SetRef("ag_news", "hub:fancyzhx/ag_news", "test"),
    near=(
        SetRef("yelp", "hub:fancyzhx/yelp_polarity", "test"),
        SetRef("amazon", "hub:fancyzhx/amazon_polarity", "test", columns=Columns(text="content")),
    ),
    far=(
        SetRef("newsgroups20", "hub:SetFit/20_newsgroups", "test"),
        SetRef("trec", "hub:CogComp/trec", "test", columns=Columns(label="coarse_label")),
        SetRef(
            "mnli",
            _GLUE,
            "validation_mismatched",
            config="mnli",
            columns=Columns(text="premise", text_pair="hypothesis"),
        ),
        SetRef(
            "rte",
            _GLUE,
            "validation",
            config="rte",
            columns=Columns(text="sentence1", text_pair="sentence2"),
        ),
        SetRef(
            "wmt16",
            "hub:wmt/wmt16",
            "test",
            config="de-en",
            columns=Columns(text="translation.en"),
            labels="optional",
        ),
    ),
    notes="SST-2. AG News is not reported, because circuits are chosen on it. The test set is the official "
    "validation split, the first 3,000 training rows are the validation set.",
)

_NAMED_CIFAR100 = replace(_CIFAR100, class_names=CIFAR100_CLASSES)
_ZERO_SHOT_TASKS = (
    SetRef("cifar10", "torchvision:CIFAR10", "test"),
    SetRef("food101", "torchvision:Food101", "test"),
    SetRef("sun397", "hub:tanganke/sun397", "test"),
    SetRef("pets", "torchvision:OxfordIIITPet", "test"),
    SetRef("dtd", "torchvision:DTD", "test"),
    SetRef("eurosat", "torchvision:EuroSAT"),
    SetRef("caltech101", "torchvision:Caltech101"),
)

PAPER_ZERO_SHOT_IMAGENET = Suite(
    name="paper-zero-shot-imagenet",
    id=_IMAGENET,
    validation=PAPER_IMAGENET.validation,
    circuit_ood=PAPER_IMAGENET.circuit_ood,
    near=_IMAGENET_NEAR,
    far=_IMAGENET_FAR,
    train=SetRef("imagenet-train", _IMAGENET.source, "train", folder=_IMAGENET.folder),
    tasks=(_NAMED_CIFAR100, *_ZERO_SHOT_TASKS),
    notes="Zero-shot ImageNet-1K (Table 25) and, with it, the other eight data sets of the classification "
    "average (Table 24). Prompt: 'A photo of a {label}.' Temperatures are fitted on 5,000 training images of "
    "ImageNet-1K.",
)

PAPER_ZERO_SHOT_CIFAR100 = Suite(
    name="paper-zero-shot-cifar100",
    id=_NAMED_CIFAR100,
    validation=PAPER_IMAGENET.validation,
    circuit_ood=PAPER_IMAGENET.circuit_ood,
    near=(_CIFAR10_NEAR, _listed("tinyimagenet", "cifar100", "test_tin")),
    far=_CIFAR100_FAR,
    notes="Zero-shot CIFAR-100 (Table 26). TinyImageNet stays among the near sets, because the circuits of both "
    "encoders are chosen on ImageNet-1K and its OOD set alone.",
)

PAPER_SUITES = named(
    PAPER_IMAGENET,
    PAPER_CIFAR100,
    PAPER_SST2,
    PAPER_ZERO_SHOT_IMAGENET,
    PAPER_ZERO_SHOT_CIFAR100,
)

"""Published parameters of the fifteen corruptions, at five severities, for three image sizes.

Taken from `make_imagenet_c.py` (224 pixels), `make_tinyimagenet_c.py` (64) and `make_cifar_c.py` (32) of
https://github.com/hendrycks/robustness, the code behind ImageNet-C (Hendrycks & Dietterich 2019). Lengths are
pixels, so choose the set whose image size is nearest to yours.
"""

from typing import Literal, get_args

CorruptionName = Literal[
    "gaussian_noise",
    "shot_noise",
    "impulse_noise",
    "defocus_blur",
    "glass_blur",
    "motion_blur",
    "zoom_blur",
    "snow",
    "frost",
    "fog",
    "brightness",
    "contrast",
    "elastic_transform",
    "pixelate",
    "jpeg_compression",
]
ParameterSet = Literal["imagenet", "tinyimagenet", "cifar"]
Values = tuple[float, ...]
FiveSeverities = tuple[Values, Values, Values, Values, Values]

CORRUPTIONS: tuple[CorruptionName, ...] = get_args(CorruptionName)
PARAMETER_SETS: tuple[ParameterSet, ...] = get_args(ParameterSet)
SEVERITIES = (1, 2, 3, 4, 5)

MEANING: dict[CorruptionName, tuple[str, ...]] = {
    "gaussian_noise": ("standard deviation",),
    "shot_noise": ("photons at full brightness",),
    "impulse_noise": ("share of values replaced",),
    "defocus_blur": ("disc radius", "standard deviation of the anti-aliasing blur"),
    "glass_blur": ("standard deviation of the blur", "largest displacement", "rounds"),
    "motion_blur": ("radius", "standard deviation"),
    "zoom_blur": ("end of the zoom factors (from 1)", "step"),
    "snow": (
        "mean of the flakes",
        "standard deviation of the flakes",
        "zoom",
        "threshold",
        "motion radius",
        "motion standard deviation",
        "weight of the image",
    ),
    "frost": ("weight of the image", "weight of the frost", "scale of the frost picture"),
    "fog": ("strength", "roughness decay"),
    "brightness": ("added to the HSV value",),
    "contrast": ("factor on the distance from the mean",),
    "elastic_transform": (
        "largest displacement",
        "standard deviation of the smoothing",
        "largest shift of a corner of the affine map",
    ),
    "pixelate": ("scale",),
    "jpeg_compression": ("JPEG quality",),
}
"""What the numbers of each corruption mean, in order."""

# ImageNet-C multiplies by 244 where its images have 224 pixels; the slip is part of the published data.
_I = 244
_T = 64
_C = 32

PARAMETERS: dict[ParameterSet, dict[CorruptionName, FiveSeverities]] = {
    "imagenet": {
        "gaussian_noise": ((0.08,), (0.12,), (0.18,), (0.26,), (0.38,)),
        "shot_noise": ((60,), (25,), (12,), (5,), (3,)),
        "impulse_noise": ((0.03,), (0.06,), (0.09,), (0.17,), (0.27,)),
        "defocus_blur": ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
        "glass_blur": ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),
        "motion_blur": ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),
        "zoom_blur": ((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03)),
        "snow": (
            (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
            (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
            (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
            (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
            (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
        ),
        "frost": ((1, 0.4, 1), (0.8, 0.6, 1), (0.7, 0.7, 1), (0.65, 0.7, 1), (0.6, 0.75, 1)),
        "fog": ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)),
        "brightness": ((0.1,), (0.2,), (0.3,), (0.4,), (0.5,)),
        "contrast": ((0.4,), (0.3,), (0.2,), (0.1,), (0.05,)),
        "elastic_transform": (
            (_I * 2, _I * 0.7, _I * 0.1),
            (_I * 2, _I * 0.08, _I * 0.2),
            (_I * 0.05, _I * 0.01, _I * 0.02),
            (_I * 0.07, _I * 0.01, _I * 0.02),
            (_I * 0.12, _I * 0.01, _I * 0.02),
        ),
        "pixelate": ((0.6,), (0.5,), (0.4,), (0.3,), (0.25,)),
        "jpeg_compression": ((25,), (18,), (15,), (10,), (7,)),
    },
    "tinyimagenet": {
        "gaussian_noise": ((0.04,), (0.08,), (0.12,), (0.15,), (0.18,)),
        "shot_noise": ((250,), (100,), (50,), (30,), (15,)),
        "impulse_noise": ((0.01,), (0.02,), (0.05,), (0.08,), (0.14,)),
        "defocus_blur": ((0.5, 0.6), (1, 0.1), (1.5, 0.1), (2.5, 0.01), (3, 0.1)),
        "glass_blur": ((0.1, 1, 1), (0.5, 1, 1), (0.6, 1, 2), (0.7, 2, 1), (0.9, 2, 2)),
        "motion_blur": ((10, 1), (10, 1.5), (10, 2), (10, 2.5), (12, 3)),
        "zoom_blur": ((1.06, 0.01), (1.11, 0.01), (1.16, 0.01), (1.21, 0.01), (1.26, 0.01)),
        "snow": (
            (0.1, 0.2, 1, 0.6, 8, 3, 0.8),
            (0.1, 0.2, 1, 0.5, 10, 4, 0.8),
            (0.15, 0.3, 1.75, 0.55, 10, 4, 0.7),
            (0.25, 0.3, 2.25, 0.6, 12, 6, 0.65),
            (0.3, 0.3, 1.25, 0.65, 14, 12, 0.6),
        ),
        "frost": ((1, 0.3, 0.3), (0.9, 0.4, 0.3), (0.8, 0.45, 0.3), (0.75, 0.5, 0.3), (0.7, 0.55, 0.3)),
        "fog": ((0.4, 3), (0.7, 3), (1, 2.5), (1.5, 2), (2, 1.75)),
        "brightness": ((0.1,), (0.2,), (0.3,), (0.4,), (0.5,)),
        "contrast": ((0.4,), (0.3,), (0.2,), (0.1,), (0.05,)),
        "elastic_transform": (
            (0, 0, _T * 0.08),
            (_T * 0.05, _T * 0.3, _T * 0.06),
            (_T * 0.1, _T * 0.08, _T * 0.06),
            (_T * 0.1, _T * 0.03, _T * 0.03),
            (_T * 0.16, _T * 0.03, _T * 0.02),
        ),
        "pixelate": ((0.9,), (0.8,), (0.7,), (0.6,), (0.5,)),
        "jpeg_compression": ((65,), (58,), (50,), (40,), (25,)),
    },
    "cifar": {
        "gaussian_noise": ((0.04,), (0.06,), (0.08,), (0.09,), (0.10,)),
        "shot_noise": ((500,), (250,), (100,), (75,), (50,)),
        "impulse_noise": ((0.01,), (0.02,), (0.03,), (0.05,), (0.07,)),
        "defocus_blur": ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
        "glass_blur": ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),
        "motion_blur": ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),
        "zoom_blur": ((1.06, 0.01), (1.11, 0.01), (1.16, 0.01), (1.21, 0.01), (1.26, 0.01)),
        "snow": (
            (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
            (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
            (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
            (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
            (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
        ),
        "frost": ((1, 0.2, 0.2), (1, 0.3, 0.2), (0.9, 0.4, 0.2), (0.85, 0.4, 0.2), (0.75, 0.45, 0.2)),
        "fog": ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),
        "brightness": ((0.05,), (0.1,), (0.15,), (0.2,), (0.3,)),
        "contrast": ((0.75,), (0.5,), (0.4,), (0.3,), (0.15,)),
        "elastic_transform": (
            (0, 0, _C * 0.08),
            (_C * 0.05, _C * 0.2, _C * 0.07),
            (_C * 0.08, _C * 0.06, _C * 0.06),
            (_C * 0.1, _C * 0.04, _C * 0.05),
            (_C * 0.1, _C * 0.03, _C * 0.03),
        ),
        "pixelate": ((0.95,), (0.9,), (0.85,), (0.75,), (0.65,)),
        "jpeg_compression": ((80,), (65,), (58,), (50,), (40,)),
    },
}

"""From class names to class embeddings, by a text tower."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from .dual_encoder import embed
from .encoder.grouped import GroupedLinear
from .ensemble import Ensemble
from .errors import DataError
from .metadata import odd_names
from .training_flags import evaluation_mode

Templates = str | Sequence[str]

LABEL = "{label}"
DEFAULT_TEMPLATES: Templates = ("A photo of a {label}.",)
_PROMPTS_AT_ONCE = 256
_CLASSES_AT_ONCE = 256
_PAIRS_AT_ONCE = 4096
_NEARLY_PARALLEL = 1e-5  # of a cosine in float32; what is closer is compared number by number
_SAME = 1e-6  # embeddings of length one whose numbers differ by no more are the same


def checked_names(class_names: Sequence[str]) -> tuple[str, ...]:
    """Class names, at least two and all different."""
    if isinstance(class_names, str):
        raise DataError(f"class_names is the string {class_names!r}; give a list of names, one per class")
    names = tuple(class_names)
    blank, twice = odd_names(names)
    if blank is not None:
        raise DataError(f"class_names[{blank}] is {names[blank]!r}; every class needs a name")
    if len(names) < 2 or twice:
        problem = f"lists {twice[:5]} twice" if twice else f"has {len(names)} names"
        raise DataError(f"class_names {problem}; give at least two names, all different")
    return names


def checked_templates(templates: Templates) -> tuple[str, ...]:
    """Templates, at least one; each has a place for the name."""
    sentences = (templates,) if isinstance(templates, str) else tuple(templates)
    if not sentences:
        raise DataError("templates is empty; give at least one sentence such as 'A photo of a {label}.'")
    for index, sentence in enumerate(sentences):
        if not isinstance(sentence, str) or LABEL not in sentence:
            raise DataError(f"templates[{index}] is {sentence!r}; it must have {LABEL} where the class name goes")
    if len(set(sentences)) < len(sentences):
        raise DataError("templates lists a sentence twice, which would only give it more weight; leave it out")
    return sentences


def prompts_of(names: Sequence[str], templates: Sequence[str]) -> list[str]:
    """Every class in every template, one class after another."""
    return [template.replace(LABEL, name) for name in names for template in templates]


@torch.no_grad()
def class_embeddings(
    tower: Ensemble, projection: GroupedLinear | None, names: Sequence[str], templates: Sequence[str]
) -> Tensor:
    """Embeddings `[G, C, e]` of length one; G is 1, or the number of members that differ in tower or projection."""
    prompts = prompts_of(names, templates)
    with evaluation_mode(tower):
        batches = (prompts[start : start + _PROMPTS_AT_ONCE] for start in range(0, len(prompts), _PROMPTS_AT_ONCE))
        embedded = torch.cat([embed(tower, projection, batch, normalize=True) for batch in batches], dim=1)
    return average_templates(embedded, len(templates))


def require_distinct(classes: Tensor, names: Sequence[str]) -> None:
    """Refuse classes that no member can tell apart: their embeddings `[G, C, e]` are the same.

    Raises:
        DataError: The message names two such classes.
    """
    unit = F.normalize(classes.detach().float(), dim=-1)
    for start in range(0, len(names), _CLASSES_AT_ONCE):
        cosines = unit[:, start : start + _CLASSES_AT_ONCE] @ unit.transpose(1, 2)  # [G, some, C]
        close = (cosines.amin(0) > 1 - _NEARLY_PARALLEL).triu(start + 1)  # the later class of each pair
        for pairs in close.nonzero().split(_PAIRS_AT_ONCE):
            first, second = pairs[:, 0] + start, pairs[:, 1]
            same = (unit[:, first] - unit[:, second]).abs().amax((0, 2)) <= _SAME  # [pairs]
            if same.any():
                one, other = (names[int(side[same][0])] for side in (first, second))
                raise DataError(
                    f"the classes {one!r} and {other!r} have the same embedding, so every image would score alike for "
                    "both: the tokenizer does not know the words in which they differ, or cuts them off; name the "
                    "classes in words it knows, in templates that are short enough"
                )


def average_templates(embedded: Tensor, templates: int) -> Tensor:
    """One embedding per class, `[G, C, e]`, out of those of its prompts, `[G, C·templates, e]`, of length one."""
    if templates == 1:
        return embedded
    return F.normalize(embedded.unflatten(1, (-1, templates)).mean(2), dim=-1)

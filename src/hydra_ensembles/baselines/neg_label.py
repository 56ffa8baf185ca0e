"""NegLabel: extra words compete with the classes of a zero-shot model; inputs closer to those words look OOD."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .._utils import derive_seed, without_autocast
from ..errors import DataError
from ..model.dual_encoder import DEFAULT_TEMPLATES, DualEncoder, Templates, checked_templates, class_embeddings
from ..model.ensemble import Ensemble
from ..settings import Checked, PositiveShare, Whole
from .building_blocks import embedding_statistics, scored

_PERCENTILE = 0.95  # of a word's similarities to all classes: its similarity to them


@dataclass(frozen=True)
class NegLabel(Checked):
    """How words are chosen; the defaults are those of the public code.

    Attributes:
        share: Share of the words to use: those least similar to the classes.
        groups: The score is the mean over this many groups of words; words left over are dropped.
    """

    share: PositiveShare = 0.15
    groups: Whole = 100


@dataclass(frozen=True, eq=False)
class EmbeddedWords:
    """Words and their embeddings, for classifiers of one dual encoder with different classes.

    Attributes:
        words: Distinct and not blank.
        embeddings: `[G, N, e]`, of length one; G is 1, or the number of members whose text sides differ.
    """

    words: tuple[str, ...]
    embeddings: Tensor


@without_autocast()
@torch.no_grad()
def embed_words(dual: DualEncoder, words: Sequence[str], templates: Templates = DEFAULT_TEMPLATES) -> EmbeddedWords:
    """Embed words once, for `neg_label` of all ensembles that `he.zero_shot` makes from this dual encoder.

    `words` are a large list of nouns and adjectives, such as WordNet's; class names may be among them. `templates` are
    sentences with `{label}`.
    """
    sentences = checked_templates(templates)
    distinct = tuple(dict.fromkeys(word.strip() for word in words if word.strip()))
    if not distinct:
        raise DataError("there are no words to embed; give a large list of them, such as WordNet's nouns")
    return EmbeddedWords(distinct, class_embeddings(dual.text, dual.projections.text, distinct, sentences).float())


@without_autocast()
@torch.no_grad()
def neg_label(
    ensemble: Ensemble,
    words: EmbeddedWords,
    settings: NegLabel = NegLabel(),  # noqa: B008 (frozen)
) -> Ensemble:
    """Add the score `neglabel` to a copy of a zero-shot ensemble: `p.score("neglabel")`, saved with the model.

    No images are needed, and nothing is trained. `words` are what `embed_words` returns for the dual encoder that
    `ensemble` was made from; class names among them are left out.
    """
    statistics = embedding_statistics(ensemble, "neg_label")
    classes = {name.casefold().strip() for name in ensemble.metadata.labels}
    others = [position for position, word in enumerate(words.words) if word.casefold() not in classes]
    count = int(len(others) * settings.share) // settings.groups * settings.groups
    if not count:
        taken = f"a share of {settings.share:g} of {len(others)} words"
        raise DataError(f"{taken} cannot be put in {settings.groups} groups; give more words, or use fewer groups")
    embedded = words.embeddings.to(ensemble.device)[:, others]  # [G, N, e]
    readout = ensemble.state_dict()
    rows = readout["readout.class_embeddings.weight"].float()  # [G, C, e], multiplied by the logit scale
    chosen = least_similar(embedded, F.normalize(rows, dim=-1), _PERCENTILE, count)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(derive_seed(0, "neglabel")))
    chosen = chosen[order.to(chosen.device)]
    members = ensemble.num_members
    scale = rows.norm(dim=-1).mean(dim=-1)  # [G], the common length of class embeddings
    picked = (embedded[:, chosen] * scale[:, None, None]).expand(members, -1, -1)
    bias = readout.get("readout.class_embeddings.bias")
    offset = torch.zeros(members) if bias is None else bias.float().mean(dim=-1).expand(members)
    state = statistics | {"words": picked.unflatten(1, (settings.groups, -1)), "offset": offset}
    line = f"NegLabel: {count} of {len(others)} words in {settings.groups} groups"
    return scored(ensemble, "neglabel", state, count, line)


def least_similar(words: Tensor, classes: Tensor, percentile: float, count: int) -> Tensor:
    """Indices of the `count` words `[G, N, e]` least similar to the classes `[G', C, e]`, least similar first."""
    alike = [torch.quantile(part @ classes.mT, percentile, dim=-1) for part in words.split(1000, dim=1)]  # [G, n] each
    return torch.cat(alike, dim=1).mean(dim=0).argsort(stable=True)[:count]

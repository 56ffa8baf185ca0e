"""NegLabel: extra words compete with the classes of a zero-shot model; inputs closer to those words look OOD."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .._utils import derive_seed, without_autocast
from ..errors import ConfigError, DataError
from ..model.ensemble import Ensemble
from ..model.metadata import TextSide
from ..model.zero_shot import Templates, checked_templates, class_embeddings, text_side_of
from ..settings import Checked, PositiveShare, Seed, Share, Whole
from .building_blocks import embedding_statistics, scale_of, scored


@dataclass(frozen=True)
class NegLabel(Checked):
    """How words are chosen; the defaults are those of the public code.

    Attributes:
        share: Share of the words to use: those least similar to the classes.
        percentile: The similarity of a word to the classes is this percentile of its similarities to all of them.
        groups: The score is the mean over this many groups of words; words left over are dropped.
        seed: Seed for drawing the groups.
    """

    share: PositiveShare = 0.15
    percentile: Share = 0.95
    groups: Whole = 100
    seed: Seed = 0


@dataclass(frozen=True, eq=False)
class EmbeddedWords:
    """Words and their embeddings, for classifiers of one dual encoder with different classes.

    Attributes:
        words: Distinct and not blank.
        templates: Sentences they were inserted into.
        embeddings: `[G, N, e]`, of length one; G is 1, or the number of members whose text sides differ.
    """

    words: tuple[str, ...]
    templates: tuple[str, ...]
    embeddings: Tensor


@without_autocast()
@torch.no_grad()
def embed_words(ensemble: Ensemble, words: Sequence[str], templates: Templates | None = None) -> EmbeddedWords:
    """Embed words once, for `neg_label` of all ensembles made from the same dual encoder.

    Args:
        ensemble: Made by `he.zero_shot` with `keep_text`, for any classes.
        words: A large list; class names may be among them.
        templates: Sentences with `{label}`; None for those of the classes.

    Raises:
        ConfigError: An ensemble without its text side.
        DataError: No words.

    Examples:
        `dual` is a CLIP of transformers or open_clip, converted by `convert(model, processor=...)`:

        >>> import hydra_ensembles as he
        >>> words = he.baselines.embed_words(he.zero_shot(dual, ["cat", "dog"]), ["tree", "house", "boat"])
        >>> words.embeddings.shape == (1, 3, dual.embedding_width)
        True
    """
    embedding_statistics(ensemble, "embed_words")  # raises unless it is a zero-shot classifier
    side = text_side_of(ensemble)
    sentences = side.templates if templates is None else checked_templates(templates)
    distinct = tuple(dict.fromkeys(word.strip() for word in words if word.strip()))
    if not distinct:
        raise DataError("there are no words to embed; give a large list of them, such as WordNet's nouns")
    return EmbeddedWords(distinct, sentences, _embedded(side, distinct, sentences, ensemble.device))


def _embedded(side: TextSide, words: Sequence[str], sentences: Sequence[str], device: torch.device) -> Tensor:
    side = side.on(device)
    return class_embeddings(side.tower, side.projection, words, sentences).float()  # [G, N, e], of length one


@without_autocast()
@torch.no_grad()
def neg_label(
    ensemble: Ensemble,
    words: Sequence[str] | EmbeddedWords,
    templates: Templates | None = None,
    settings: NegLabel = NegLabel(),  # noqa: B008 (frozen)
) -> Ensemble:
    """Add the score `neglabel` to a copy of a zero-shot ensemble: `p.score("neglabel")`, saved with the model.

    No images are needed, and nothing is trained: the text tower embeds the words once.

    Args:
        ensemble: Made by `he.zero_shot` with `keep_text`; it is not changed.
        words: A large list of nouns and adjectives, such as WordNet's; those that are class names are left out. If
            several classifiers use the same words, embed them once with `embed_words`.
        templates: Sentences with `{label}`; None for those of the classes, or of the words that are embedded already.
        settings: How words are chosen.

    Raises:
        ConfigError: An ensemble without its text side.
        DataError: Too few words for the groups.

    Examples:
        `dual` is a CLIP of transformers or open_clip, converted by `convert(model, processor=...)`:

        >>> import torch, hydra_ensembles as he
        >>> classifier, settings = he.zero_shot(dual, ["cat", "dog"]), he.baselines.NegLabel(share=1.0, groups=1)
        >>> scored = he.baselines.neg_label(classifier, ["tree", "house", "boat"], settings=settings)
        >>> scored.predict(torch.randn(2, 3, 32, 32)).score("neglabel").shape
        torch.Size([2])
    """
    statistics = embedding_statistics(ensemble, "neg_label")
    side = text_side_of(ensemble)
    vocabulary = words if isinstance(words, EmbeddedWords) else embed_words(ensemble, words, templates)
    if vocabulary is words:
        _require_same_side(vocabulary, side, templates, ensemble.device)
    classes = {name.casefold().strip() for name in ensemble.metadata.labels}
    others = [position for position, word in enumerate(vocabulary.words) if word.casefold() not in classes]
    count = int(len(others) * settings.share) // settings.groups * settings.groups
    if not count:
        taken = f"a share of {settings.share:g} of {len(others)} words"
        raise DataError(f"{taken} cannot be put in {settings.groups} groups; give more words, or use fewer groups")
    embedded = vocabulary.embeddings.to(ensemble.device)[:, others]  # [G, N, e]
    readout = ensemble.state_dict()
    rows = readout["readout.class_embeddings.weight"].float()  # [G, C, e], multiplied by the logit scale
    chosen = least_similar(embedded, F.normalize(rows, dim=-1), settings.percentile, count)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(derive_seed(settings.seed, "neglabel")))
    chosen = chosen[order.to(chosen.device)]
    members = ensemble.num_members
    picked = (embedded[:, chosen] * scale_of(rows)[:, None, None]).expand(members, -1, -1)
    bias = readout.get("readout.class_embeddings.bias")
    offset = torch.zeros(members) if bias is None else bias.float().mean(dim=-1).expand(members)
    state = statistics | {"words": picked.unflatten(1, (settings.groups, -1)), "offset": offset}
    line = f"NegLabel: {count} of {len(others)} words in {settings.groups} groups"
    return scored(ensemble, "neglabel", state, count, line, words=(settings.groups, count // settings.groups))


def _require_same_side(words: EmbeddedWords, side: TextSide, templates: Templates | None, device: torch.device) -> None:
    """Raise for words embedded by another text side or in other sentences; embeds one word again to check."""
    if templates is not None and checked_templates(templates) != words.templates:
        raise ConfigError(f"the words are embedded in {words.templates}; leave templates out, or embed them again")
    again = _embedded(side, words.words[:1], words.templates, device)
    before = words.embeddings[:, :1].to(again)
    if again.shape != before.shape or not torch.allclose(again, before, atol=1e-3):
        raise ConfigError("the words were embedded by another text tower; embed them with embed_words(ensemble, words)")


def least_similar(words: Tensor, classes: Tensor, percentile: float, count: int) -> Tensor:
    """Indices of the `count` words `[G, N, e]` least similar to the classes `[G', C, e]`, least similar first."""
    alike = [torch.quantile(part @ classes.mT, percentile, dim=-1) for part in words.split(1000, dim=1)]  # [G, n] each
    return torch.cat(alike, dim=1).mean(dim=0).argsort(stable=True)[:count]

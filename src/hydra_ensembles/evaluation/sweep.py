"""Every head switched off by itself: the answers of an ensemble to a batch, with all heads and without each of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..batches import Inputs
from ..circuit.scores import NO_HEAD, not_finite
from ..circuit.timing import in_words, say
from ..errors import ConfigError
from ..heads.masking import checked_layers, masked
from ..heads.ranking import Head
from ..metrics.probabilities import at_labels
from ..model.cost import times_in_turn
from ..model.ensemble import Ensemble
from ..prediction import Prediction
from .measure import Measure


def heads_of(ensemble: Ensemble, layers: Sequence[int] | None) -> list[Head]:
    """The heads that some member keeps in some layers (None: in all), first layer first."""
    heads = []
    for layer in checked_layers(ensemble.config, layers):
        kept = {head for member in ensemble.config.heads for head in member[layer]}
        heads += [Head(layer, head) for head in sorted(kept)]
    if not heads:
        raise ConfigError("there is no head left in these layers that could be switched off; give other layers")
    return heads


class Swept(NamedTuple):
    """What the ensemble says of B inputs with all heads, first row, and without each of K; all `[1 + K, B]`.

    `moved` is the share of the probability that went to other classes, `likelihood` the logarithm of the probability
    of the label, zero where there is none.
    """

    label: Tensor
    confidence: Tensor
    score: Tensor
    moved: Tensor
    likelihood: Tensor

    @classmethod
    def joined(cls, parts: Sequence["Swept"]) -> "Swept":
        """Those of consecutive batches."""
        return cls(*(torch.cat(part, dim=1) for part in zip(*parts, strict=True)))


@dataclass(frozen=True)
class Sweep:
    """The ensemble, a private copy of it to switch heads off in, and what is made of its logits."""

    ensemble: Ensemble
    copy: Ensemble
    heads: Sequence[Head]
    measure: Measure

    @property
    def blocks(self) -> int:
        """How many blocks are run on each batch."""
        layers = self.ensemble.num_layers
        return layers + sum(layers - head.layer for head in self.heads)

    def say_how_long(self, prepared: Inputs, size: int, total: int | None) -> None:
        """Time a pass over a batch of this size, and say how long so many inputs take, where their number is known."""
        *_, warm = times_in_turn({"pass": partial(self.copy, prepared)}, 2, self.ensemble.device)["pass"]
        seconds = self.blocks / self.ensemble.num_layers * warm
        words = "" if total is None else f": {in_words(seconds * total / size)}"
        say(f"{len(self.heads)} heads, each switched off by itself{words}")

    def answers(self, inputs: Inputs, labels: Tensor | None, where: str, bar: Any) -> Swept:
        """Answers to one batch; on a GPU they are waited for once."""
        rows, finite, whole = [], [], None
        for prediction in self._predictions(inputs, bar):
            whole = prediction if whole is None else whole
            likelihood = torch.zeros_like(prediction.confidence)
            if labels is not None:
                likelihood = at_labels(prediction.log_probs, labels.to(likelihood.device))
            moved = (prediction.probs - whole.probs).abs().sum(dim=-1) / 2
            score = prediction.score(self.measure.score)
            rows.append((prediction.label, prediction.confidence, score, moved, likelihood))
            finite.append(prediction.member_logits.isfinite().all() & score.isfinite().all())
        good = torch.stack(finite).cpu()
        if not good.all():
            raise not_finite(where, [NO_HEAD, *self.heads][int((~good).nonzero()[0, 0])])
        return Swept(*(torch.stack(part).cpu() for part in zip(*rows, strict=True)))

    def _predictions(self, inputs: Inputs, bar: Any) -> Iterator[Prediction]:
        """The prediction of the ensemble, then those without each head, each from the input of its block on."""
        copy = self.copy
        arguments = self.copy.unpack(inputs)
        blocks = list(copy.encoder.layers)
        tokens = copy.readout.tokens_read()
        x, context = copy.embed(*arguments)
        levels = [x]  # what enters each block, and then the readout, [N, B, T, d]
        for block in blocks[:-1]:
            levels.append(block(levels[-1], context))
        levels.append(blocks[-1](levels[-1], context, tokens))

        def predicted(layer: int) -> Prediction:
            x = levels[layer]
            for block in blocks[layer:]:
                x = block(x, context, tokens if block is blocks[-1] else None)
            pooled = copy.readout.pool(x, context.key_mask, arguments[0])
            logits = copy.readout.classify(pooled)  # [N, B, C]
            logits = logits.expand(copy.num_members, *logits.shape[1:])
            fitted, scores = self.measure.familiarity, None
            if fitted is not None and self.measure.score in fitted.settings.scores:
                features = pooled.flatten(2)
                scores = fitted.scores(features.expand(copy.num_members, *features.shape[1:]), logits)
            return self.measure.predict(logits, scores)

        step = len(arguments[0]) / self.blocks  # of the bar, which counts inputs
        yield predicted(len(blocks))
        bar.update(step * len(blocks))
        for head in self.heads:
            with masked(copy, [head]):
                yield predicted(head.layer)
            bar.update(step * (len(blocks) - head.layer))

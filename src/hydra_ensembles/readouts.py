"""From the encoder's tokens to logits: final norm, pooling, hidden layer, classifier."""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .config import EnsembleConfig, PatchStemConfig
from .encoder.activations import ACTIVATIONS
from .encoder.grouped import GroupedLinear, GroupedNorm, empty


class Readout(nn.Module):
    """Pool the tokens of each member and classify; without a classifier, give the pooled features."""

    def __init__(self, config: EnsembleConfig) -> None:
        super().__init__()
        readout, width = config.readout, config.encoder.width
        copies = config.copies("readout")
        self.config = readout
        self.prefix = config.stem.prefix_tokens if isinstance(config.stem, PatchStemConfig) else 0
        self.norm = (
            None
            if readout.norm == "none"
            else GroupedNorm(config.copies("norms"), width, readout.norm_eps, config.encoder.norm)
        )
        self.map = MapPool(config, copies) if readout.pool == "map" else None
        features = 2 * width if readout.pool == "cls_mean" else width
        self.features = features
        self.hidden = GroupedLinear(copies, features, features) if readout.hidden else None
        self.classifier, self.distillation_classifier = None, None
        self.projection, self.class_embeddings = None, None
        if readout.cosine is not None:
            embedding = readout.cosine.width or features
            if readout.cosine.width is not None:
                self.projection = GroupedLinear(copies, features, embedding, readout.cosine.bias)
            self.class_embeddings = GroupedLinear(copies, embedding, readout.num_classes, readout.bias)
        elif readout.num_classes:
            self.classifier = GroupedLinear(copies, features, readout.num_classes, readout.bias)
            if readout.pool == "distilled":
                self.distillation_classifier = GroupedLinear(copies, features, readout.num_classes, readout.bias)
        self.dropout = nn.Dropout(readout.dropout)
        self.hidden_dropout = nn.Dropout(readout.hidden_dropout)

    def tokens_read(self) -> slice | None:
        """Positions this readout looks at, or None when it may need any of them."""
        return {"cls": slice(0, 1), "distilled": slice(0, 2)}.get(self.config.pool)

    def forward(self, x: Tensor, key_mask: Tensor | None = None, ids: Tensor | None = None) -> Tensor:
        """Map tokens `[N, B, T, d]` to logits (or features) `[N', B, C]`."""
        return self.classify(self.pool(x, key_mask, ids))

    def pool(self, x: Tensor, key_mask: Tensor | None = None, ids: Tensor | None = None) -> Tensor:
        """Pooled features `[N, B, d]`; `[N, B, 2, d]` where class and distillation token are read apart."""
        if self.norm is not None and self.config.norm == "tokens":
            x = self.norm(x)
        x = self._pool_tokens(x, key_mask, ids)
        if self.norm is not None and self.config.norm == "pooled":
            x = self.norm(x)
        return x

    def classify(self, pooled: Tensor) -> Tensor:
        """Hidden layer and classifier on pooled features, `[N, B, d]` to `[N', B, C]`."""
        if self.class_embeddings is not None:
            return cast(Tensor, self.class_embeddings(self.embedding(pooled)))
        x = self._hidden(pooled)
        if self.distillation_classifier is not None and self.classifier is not None:
            return cast(Tensor, self.classifier(x[:, :, 0]) + self.distillation_classifier(x[:, :, 1])) / 2
        return x if self.classifier is None else cast(Tensor, self.classifier(x))

    def embedding(self, pooled: Tensor) -> Tensor:
        """What is compared with class embeddings: pooled features `[N, B, d]` projected, of length one `[N', B, e]`."""
        x = self._hidden(pooled)
        return F.normalize(x if self.projection is None else self.projection(x), dim=-1)

    def _hidden(self, pooled: Tensor) -> Tensor:
        x = self.dropout(pooled)
        if self.hidden is not None and self.config.hidden is not None:
            x = self.hidden_dropout(ACTIVATIONS[self.config.hidden](self.hidden(x)))
        return cast(Tensor, x)

    def _pool_tokens(self, x: Tensor, key_mask: Tensor | None, ids: Tensor | None) -> Tensor:
        pool = self.config.pool
        if pool == "cls":
            return x[:, :, 0]
        if pool == "distilled":
            return x[:, :, :2]
        if pool == "map" and self.map is not None:
            return cast(Tensor, self.map(x[:, :, self.prefix :]))
        if pool == "mean" and key_mask is not None:
            weight = key_mask[None, :, :, None].to(x.dtype)  # [1, B, T, 1]
            return (x * weight).sum(2) / weight.sum(2)
        if pool == "mean":
            return x[:, :, self.prefix :].mean(2)
        if pool == "cls_mean":
            return torch.cat([x[:, :, 0], x[:, :, self.prefix :].mean(2)], dim=-1)
        return x[:, torch.arange(x.shape[1], device=x.device), self._end_of_text(x, key_mask, ids)]

    def _end_of_text(self, x: Tensor, key_mask: Tensor | None, ids: Tensor | None) -> Tensor:
        """Position `[B]` of the token that stands for the whole text."""
        if self.config.pool == "last" or ids is None:
            if key_mask is None:
                return torch.full((x.shape[1],), x.shape[2] - 1, device=x.device)
            return key_mask.long().sum(1) - 1
        if self.config.eot_token is None:  # the end-of-text token has the highest id of the vocabulary
            return ids.argmax(1)
        return ids.eq(self.config.eot_token).int().argmax(1)


class MapPool(nn.Module):
    """Attention pooling with one learned query, then an MLP with its residual (SigLIP's pooling head)."""

    def __init__(self, config: EnsembleConfig, copies: int) -> None:
        super().__init__()
        width, readout = config.encoder.width, config.readout
        self.heads = readout.map_heads
        self.activation = ACTIVATIONS[readout.map_activation]
        self.query_token = empty(copies, 1, width)
        self.query = GroupedLinear(copies, width, width)
        self.key_value = GroupedLinear(copies, width, 2 * width)
        self.out = GroupedLinear(copies, width, width)
        self.norm = GroupedNorm(copies, width, readout.norm_eps)
        self.up = GroupedLinear(copies, width, readout.map_mlp_width)
        self.down = GroupedLinear(copies, readout.map_mlp_width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[N, B, T, d]` to `[N', B, d]`."""
        q = self.query(self.query_token[:, None])  # [G, 1, 1, d]
        k, v = self.key_value(x).chunk(2, dim=-1)  # [N', B, T, d]
        members = k.shape[0]
        q = q.expand(members, k.shape[1], -1, -1)
        q, k, v = (part.flatten(0, 1).unflatten(2, (self.heads, -1)).transpose(1, 2) for part in (q, k, v))
        z = F.scaled_dot_product_attention(q, k, v)  # [N'·B, heads, 1, d_k]
        z = z.transpose(1, 2).flatten(2).unflatten(0, (members, -1))  # [N', B, 1, d]
        y = self.out(z)
        y = y + self.down(self.activation(self.up(self.norm(y))))
        return cast(Tensor, y)[:, :, 0]

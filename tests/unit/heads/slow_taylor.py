"""The Taylor score written down a second time, slowly, on a transformer that shares no code with ours.

The projections of a layer are matrices `[H·d_k, d]` as in the paper, and a head is a range of their rows.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from hydra_ensembles.model.ensemble import Ensemble

Heads = set[tuple[int, int]]


class PlainTransformer:
    """Pre- or post-norm encoder with class or mean pooling, one loop over the heads per layer."""

    def __init__(self, ensemble: Ensemble, off: Heads) -> None:
        self.ensemble, self.encoder, self.off = ensemble, ensemble.config.encoder, off
        self.state = {name: tensor.detach().clone() for name, tensor in ensemble.state_dict().items()}
        self.matrices = []  # per layer: query, key, value
        for layer in range(self.encoder.layers):
            qkv = self.state[f"encoder.layers.{layer}.attention.qkv"]  # [H, 3, d_k, d]
            self.matrices.append([qkv[:, part].flatten(0, 1).clone().requires_grad_() for part in range(3)])

    def loss(self, inputs: Tensor | dict[str, Tensor], labels: Tensor) -> Tensor:
        """Mean cross-entropy of all samples in one batch."""
        mask = None if isinstance(inputs, Tensor) else inputs["attention_mask"].bool()
        x = self.ensemble.embed(inputs if isinstance(inputs, Tensor) else inputs["input_ids"])[0][0].detach()
        for layer in range(self.encoder.layers):
            if self.encoder.norm_first:
                x = x + self._attend(self._norm(x, layer, "norm1"), layer, mask)
                x = x + self._mlp(self._norm(x, layer, "norm2"), layer)
            else:
                x = self._norm(x + self._attend(x, layer, mask), layer, "norm1")
                x = self._norm(x + self._mlp(x, layer), layer, "norm2")
        if "readout.norm.weight" in self.state:
            weight, bias = (self.state[f"readout.norm.{kind}"][0] for kind in ("weight", "bias"))
            x = F.layer_norm(x, x.shape[-1:], weight, bias, self.ensemble.config.readout.norm_eps)
        if self.ensemble.config.readout.pool == "cls":
            pooled = x[:, 0]
        else:
            assert mask is not None
            pooled = torch.stack([tokens[real].mean(0) for tokens, real in zip(x, mask, strict=True)])
        logits = pooled @ self.state["readout.classifier.weight"][0].T + self.state["readout.classifier.bias"][0]
        chosen = torch.log_softmax(logits, -1)[torch.arange(len(labels)), labels]
        return -chosen.mean()

    def scores(self, layer: int) -> dict[tuple[int, int], float]:
        """Scores of the heads of a layer that are on, from the gradients of the last backward pass."""
        rows, columns, result = self.encoder.head_dim, self.encoder.width, {}
        for head in range(self.encoder.heads):
            if (layer, head) in self.off:
                continue
            parts = []
            for weight in self.matrices[layer]:
                assert weight.grad is not None
                total = 0.0
                for row in range(head * rows, (head + 1) * rows):
                    total += sum(abs(weight[row, c].item() * weight.grad[row, c].item()) for c in range(columns))
                parts.append(total / (rows * columns))
            result[layer, head] = sum(parts) / 3
        return result

    def _norm(self, x: Tensor, layer: int, name: str) -> Tensor:
        weight, bias = (self.state[f"encoder.layers.{layer}.{name}.{kind}"][0] for kind in ("weight", "bias"))
        return F.layer_norm(x, x.shape[-1:], weight, bias, self.encoder.norm_eps)

    def _attend(self, x: Tensor, layer: int, mask: Tensor | None) -> Tensor:
        state = {key: self.state[f"encoder.layers.{layer}.attention.{key}"] for key in ("qkv_bias", "out", "out_bias")}
        size = self.encoder.head_dim
        y = state["out_bias"][0].expand_as(x)
        for head in range(self.encoder.heads):
            if (layer, head) in self.off:
                continue
            rows = slice(head * size, (head + 1) * size)
            weights = zip(self.matrices[layer], state["qkv_bias"][head], strict=True)
            q, k, v = (x @ weight[rows].T + bias for weight, bias in weights)  # [B, T, d_k]
            attention = q @ k.transpose(1, 2) / math.sqrt(size)  # [B, T, T]
            if mask is not None:
                attention = attention.masked_fill(~mask[:, None, :], -torch.inf)
            y = y + attention.softmax(-1) @ v @ state["out"][head]
        return y

    def _mlp(self, x: Tensor, layer: int) -> Tensor:
        up, up_bias, down, down_bias = (
            self.state[f"encoder.layers.{layer}.mlp.{name}"][0]
            for name in ("up.weight", "up.bias", "down.weight", "down.bias")
        )
        return F.gelu(x @ up.T + up_bias) @ down.T + down_bias


def slow_scores(
    ensemble: Ensemble, inputs: Tensor | dict[str, Tensor], labels: Tensor, layers: list[int], off: Heads
) -> dict[tuple[int, int], float]:
    """Scores of all heads of some layers with other heads off, from one batch that holds all samples."""
    plain = PlainTransformer(ensemble, off)
    plain.loss(inputs, labels).backward()
    return {head: score for layer in layers for head, score in plain.scores(layer).items()}

"""Texts as token ids on the device, in batches as long as their longest text."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from hydra_ensembles.data.dataset import TextDataset
from hydra_ensembles.preprocessing import TextPreprocessing

BUCKET = 32  # training batches whose texts are sorted by length together
TOKENISED_AT_ONCE = 128  # padded together, so few


class TextSamples:
    """Labelled texts: ids and segments `[N, T]` on a device, padded at the end to `T`; lengths stay on the CPU."""

    def __init__(self, ids: Tensor, segments: Tensor, lengths: Tensor, labels: Tensor) -> None:
        self.ids, self.segments, self.lengths, self.labels = ids, segments, lengths, labels

    @classmethod
    def read(cls, dataset: TextDataset, preprocessing: TextPreprocessing, device: torch.device) -> "TextSamples":
        """Tokenise a data set with a preprocessing that gives masks and segments."""
        texts = [text for text, _ in dataset]
        starts = range(0, len(texts), TOKENISED_AT_ONCE)
        parts = [preprocessing(texts[start : start + TOKENISED_AT_ONCE]) for start in starts]
        longest = max(part["input_ids"].shape[1] for part in parts)
        ids, segments, mask = (
            torch.cat([F.pad(part[name].to(torch.int32), (0, longest - part[name].shape[1])) for part in parts])
            for name in ("input_ids", "token_type_ids", "attention_mask")
        )
        labels = torch.from_numpy(dataset.labels.copy())
        return cls(ids.to(device), segments.to(device), mask.sum(1), labels)

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, rows: Sequence[int]) -> "TextSamples":
        """Some of the samples, in this order."""
        index = torch.as_tensor(rows, dtype=torch.long)
        there = index.to(self.ids.device)
        return TextSamples(self.ids[there], self.segments[there], self.lengths[index], self.labels[index])

    def evaluation(self, batch_size: int) -> "TextBatches":
        """Batches in order."""
        return TextBatches(self, batch_size, shuffle=False)

    def training(self, batch_size: int) -> "TextBatches":
        """Batches in random order, drawn from torch's CPU generator; texts of one batch are of similar length."""
        return TextBatches(self, batch_size, shuffle=True)


class TextBatches:
    """Batches as mappings with `labels`; may be read again and again."""

    def __init__(self, samples: TextSamples, batch_size: int, shuffle: bool) -> None:
        self.samples, self.batch_size, self.shuffle = samples, batch_size, shuffle

    def __len__(self) -> int:
        """Number of batches."""
        return -(-len(self.samples) // self.batch_size)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Token ids, mask and segments `[B, T]` on the device, labels `[B]` on the CPU."""
        samples, device = self.samples, self.samples.ids.device
        for rows in self._rows():
            longest = int(samples.lengths[rows].max())
            there = rows.to(device)
            places = torch.arange(longest, device=device)
            yield {
                "input_ids": samples.ids[there, :longest].long(),
                "attention_mask": (places < samples.lengths[rows].to(device)[:, None]).long(),
                "token_type_ids": samples.segments[there, :longest].long(),
                "labels": samples.labels[rows],
            }

    def _rows(self) -> list[Tensor]:
        if not self.shuffle:
            return list(torch.arange(len(self.samples)).split(self.batch_size))
        batches = []
        for bucket in torch.randperm(len(self.samples)).split(BUCKET * self.batch_size):
            batches += bucket[self.samples.lengths[bucket].argsort()].split(self.batch_size)
        return [batches[index] for index in torch.randperm(len(batches)).tolist()]

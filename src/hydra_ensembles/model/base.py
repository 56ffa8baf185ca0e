"""What models have in common: built around weights, saved and loaded, from raw inputs to a prediction."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
from torch import Tensor, nn

from ..batches import Inputs, move, read_batch
from ..checkpoint import Contents, Stored, open_checkpoint, push_checkpoint, save_checkpoint
from ..errors import ConfigError, DataError
from ..prediction import Prediction
from .config import EnsembleConfig
from .metadata import Calibration, Metadata

Model = TypeVar("Model", bound=nn.Module)


def built_around(build: Callable[[], Model], state: Mapping[str, Tensor]) -> Model:
    """A model whose parameters are the given tensors, not copies of them; in evaluation mode."""
    with torch.device("meta"):
        model = build()
    model.load_state_dict(state, assign=True)
    return model.requires_grad_(True).eval()


def copied(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of tensors, each contiguous."""
    return {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in state.items()}


class Saved:
    """Saving, loading and publishing. What is stored and how it is read back, each kind of model says itself."""

    _kind: str  # of its checkpoints

    def _contents(self, name: str) -> Contents:
        """Everything that is written; `name` is how the model card calls the model."""
        raise NotImplementedError

    @classmethod
    def _restored(cls, stored: Stored, device: str | torch.device | None, dtype: torch.dtype | None) -> Self:
        """The model that an opened checkpoint holds."""
        raise NotImplementedError

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `config.json`, `model.safetensors`, for text `tokenizer.json`, and a model card into a folder.

        Files of an earlier save are replaced; a kill in between leaves each of them whole.
        """
        save_checkpoint(folder, self._contents(Path(folder).expanduser().resolve().name))

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        *,
        revision: str | None = None,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        token: str | None = None,
    ) -> Self:
        """Load what `save_pretrained` or `push_to_hub` wrote, in evaluation mode; no code is run.

        Args:
            source: Folder, or hub id of the form `owner/name`.
            revision: Branch, tag or commit on the hub.
            device: Where the parameters go; None for the CPU.
            dtype: Floating type to convert to; None keeps the stored one.
            token: Access token for a private model; None for the one logged in with.

        Raises:
            CheckpointError: Something is missing, damaged, inconsistent, or was saved by another class.
        """
        return cls._restored(open_checkpoint(source, cls._kind, revision=revision, token=token), device, dtype)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | None = None,
        commit_message: str | None = None,
    ) -> str:
        """Publish on the hub as `owner/name`, in one commit; the address of that commit."""
        contents = self._contents(repo_id)
        return push_checkpoint(repo_id, contents, private=private, token=token, commit_message=commit_message)


class Predictor:
    """From raw inputs to tensors, and from member logits to a prediction, by the saved metadata."""

    config: EnsembleConfig
    metadata: Metadata
    if TYPE_CHECKING:

        @property
        def device(self) -> torch.device:
            """Where it runs."""

        @property
        def dtype(self) -> torch.dtype:
            """Floating type it computes in."""

    @property
    def kind(self) -> str:
        """`"image"` or `"text"`."""
        return self.config.kind

    @property
    def num_members(self) -> int:
        """Number of members, M."""
        return self.config.members

    @property
    def num_classes(self) -> int:
        """Number of classes; 0 when there is no classifier."""
        return self.config.readout.num_classes

    def prepare(self, inputs: Any) -> Inputs:
        """Inputs for `forward` on the device and in the dtype of the model; raw ones are preprocessed.

        Args:
            inputs: Tensors or a mapping of them; or a PIL image, a string, a pair of strings, or a list of them.
        """
        if not isinstance(inputs, Tensor | Mapping):
            if self.metadata.preprocessing is None:
                raise DataError(
                    f"got {type(inputs).__name__}, but this ensemble has no saved preprocessing; "
                    "give tensors, or convert the model with processor="
                )
            raw: Any = [inputs] if isinstance(inputs, tuple) and self.kind == "text" else inputs
            inputs = self.metadata.preprocessing(raw)
        return move(read_batch(inputs)[0], self.device, self.dtype)

    def _prediction(self, logits: Tensor, check_finite: bool) -> Prediction:
        """What member logits `[M, B, C]` say, with the calibration and the class names of the ensemble."""
        if not self.num_classes:
            raise ConfigError("this ensemble has no classifier; convert the model with num_labels=, or use features()")
        calibration = self.metadata.calibration or Calibration()
        temperature = calibration.temperature
        return Prediction.from_logits(
            logits,
            temperature if len(temperature) > 1 else temperature[0],
            calibration.threshold,
            calibration.score,
            self.metadata.labels or None,
            check_finite,
        )

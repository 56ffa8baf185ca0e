"""Every error this library raises on purpose, and its one kind of warning.

All are also a `ValueError`; the message says what was received, what is accepted, and what to do about it.
"""


class HydraError(ValueError):
    """Base class of the errors raised by `hydra_ensembles`.

    Examples:
        >>> import torch, hydra_ensembles as he
        >>> from hydra_ensembles.demo import load_backbone
        >>> base = load_backbone()  # a small vision transformer: one member, 6 layers of 6 heads, 7 classes
        >>> try:
        ...     he.prune(base, [(99, 0)])
        ... except he.HydraError as error:
        ...     print(type(error).__name__, isinstance(error, ValueError))
        HeadError True
    """


class HydraWarning(UserWarning):
    """A request that is carried out although it is probably a mistake.

    Examples:
        >>> import warnings, hydra_ensembles as he
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("error", he.HydraWarning)  # stop instead of going on
    """


class ConfigError(HydraError):
    """A setting, or a combination of settings, that cannot work."""


class ConversionError(HydraError):
    """A model that cannot be converted, from or to another library, without changing its predictions."""


class CheckpointError(HydraError):
    """A saved ensemble that is incomplete, inconsistent, or not ours."""


class StorageError(HydraError, OSError):
    """A file or folder that cannot be written, or that another process is using."""


class HeadError(HydraError):
    """A head address or a set of heads that does not exist in this ensemble."""


class SameMembersError(HeadError):
    """Members that would lose the same heads, and would be identical."""


class DataError(HydraError):
    """Batches, labels or scores that cannot be used as given."""


class TooFewSamplesError(DataError):
    """Valid samples, but too few, or too similar, to fit what was asked for."""


class DivergedError(DataError):
    """A training whose loss, weights or answers are not finite: the learning rate is too high, or the data are bad."""


class MissingExtraError(HydraError, ImportError):
    """An optional library that this call needs is not installed."""


class RequestError(HydraError):
    """A request that a server refuses, with the HTTP status that says whose fault it is."""

    def __init__(self, message: str, status: int = 400, retry_after: int | None = None) -> None:
        """Refuse with a status; `retry_after` is the number of seconds after which a retry makes sense."""
        super().__init__(message)
        self.status, self.retry_after = status, retry_after

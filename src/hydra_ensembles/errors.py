"""Every error this library raises on purpose, and its one kind of warning.

All are also a `ValueError`; the message says what was received, what is accepted, and what to do about it.
"""


class HydraError(ValueError):
    """Base class of the errors raised by `hydra_ensembles`."""


class HydraWarning(UserWarning):
    """Something that is done as asked, though it is hardly meant."""


class ConfigError(HydraError):
    """A setting, or a combination of settings, that cannot work."""


class ConversionError(HydraError):
    """A model that cannot be translated, from or for another library, without changing its predictions."""


class CheckpointError(HydraError):
    """A saved ensemble that is incomplete, inconsistent, or not ours."""


class StorageError(HydraError, OSError):
    """A file or folder that the disk does not take, or that another process works in."""


class HeadError(HydraError):
    """A head address or a set of heads that does not exist in this ensemble."""


class SameMembersError(HeadError):
    """Members that would lose the same heads, and so be identical."""


class DataError(HydraError):
    """Batches, labels or scores that cannot be used as given."""


class MissingExtraError(HydraError, ImportError):
    """An optional library that this call needs is not installed."""

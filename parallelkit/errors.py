"""The base of all errors of parallelkit, and those that several of its parts raise."""

from __future__ import annotations

__all__ = [
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "InvalidArgumentError",
    "InvalidIndexError",
    "InvalidTypeError",
    "ParallelKitError",
    "PeerLostError",
    "ReplicaMismatchError",
    "UsageError",
]


class ParallelKitError(Exception):
    """The base of all errors of this package."""


class InvalidArgumentError(ParallelKitError, ValueError):
    """An argument has a value that cannot be worked with. Nothing was changed."""


class InvalidTypeError(ParallelKitError, TypeError):
    """An argument has a type that cannot be worked with. Nothing was changed."""


class InvalidIndexError(ParallelKitError, IndexError):
    """A tensor has an index beyond what it looks up. Nothing was changed."""


class UsageError(ParallelKitError, RuntimeError):
    """A call that is not possible now, such as one on a closed group. Nothing was changed."""


class CollectiveMismatchError(ParallelKitError, RuntimeError):
    """The ranks of a group did not call the same collective with the same tensors.

    Raised on every rank; no tensor was changed and the group stays usable.
    """


class PeerLostError(ParallelKitError, RuntimeError):
    """A rank of the group died or left. The group is broken; `.rank` is the lost one."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> tuple[type[PeerLostError], tuple[str, int]]:
        return type(self), (str(self), self.rank)


class CollectiveTimeoutError(ParallelKitError, TimeoutError, RuntimeError):
    """A rank did not come within the group's timeout, and broke the group; `.rank` is that rank."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> tuple[type[CollectiveTimeoutError], tuple[str, int]]:
        return type(self), (str(self), self.rank)


class ReplicaMismatchError(ParallelKitError, RuntimeError):
    """Tensors that should be equal on all ranks differ."""

"""What every rank does at the same time, and fails at together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from .errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    InvalidArgumentError,
    InvalidTypeError,
    ParallelKitError,
    PeerLostError,
    UsageError,
)
from .group import Group

__all__ = ["as_ours", "check_alike", "together"]

T = TypeVar("T")


def together(
    group: Group, work: Callable[[], T], call: str, kind: type[ParallelKitError] | None = None
) -> list[T]:
    """Every rank's result of its work; where one failed, the same error on all. Collective.

    Args:
        group: the ranks.
        work: without collectives of `group` that ranks could leave half done.
        call: the name of what is done, for errors.
        kind: what errors that are not ours become. Default: ours of their own kind (ValueError,
            TypeError, others).

    Raises:
        CollectiveMismatchError: some rank calls something else.
        Otherwise what the first rank's work raised that failed, with that rank in the text.
    """
    result: T | None = None
    fault: ParallelKitError | None = None
    cause: Exception | None = None
    try:
        result = work()
    except (PeerLostError, CollectiveTimeoutError):  # there is nobody to agree with
        raise
    except Exception as error:
        fault, cause = as_ours(error, call, kind), error
    heard = group._gather_objects((result, fault), call)
    for rank, (_, refusal) in enumerate(heard):
        if refusal is not None:
            raise type(refusal)(f"{refusal} [rank {rank} of {group.size}]") from cause
    return [theirs for theirs, _ in heard]


def check_alike(call: str, told: Sequence[Sequence[str]]) -> None:
    """Raise, on every rank alike, where ranks describe differently what they must have in common.

    Args:
        call: what is done, for errors.
        told: by rank, what is the same on all of them, in words.
    """
    for rank, theirs in enumerate(told):
        for index in range(max(len(theirs), len(told[0]))):
            first, other = (
                t[index] if index < len(t) else "nothing more" for t in (told[0], theirs)
            )
            if first != other:
                raise CollectiveMismatchError(
                    f"{call}: rank {rank} differs from rank 0: {other} instead of {first}; every "
                    "rank must give the same"
                )


def as_ours(
    error: Exception, call: str, kind: type[ParallelKitError] | None = None
) -> ParallelKitError:
    """An error as one that every rank can raise: itself if it is ours; arguments as `together`."""
    if isinstance(error, ParallelKitError):
        return error
    if kind is not None:
        return kind(f"{call}: {type(error).__name__}: {error}")
    if isinstance(error, (ValueError, TypeError)):
        kind = InvalidArgumentError if isinstance(error, ValueError) else InvalidTypeError
        return kind(f"{call}: {error}")
    return UsageError(f"{call}: {type(error).__name__}: {error}")

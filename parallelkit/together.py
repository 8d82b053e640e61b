"""What every rank does at the same time, and fails at together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from .errors import (
    CollectiveTimeoutError,
    InvalidArgumentError,
    InvalidTypeError,
    ParallelKitError,
    PeerLostError,
    UsageError,
)
from .group import Group

__all__ = ["together"]

T = TypeVar("T")


def together(
    group: Group, work: Callable[[], T], call: str, kind: type[ParallelKitError] | None = None
) -> list[T]:
    """Every rank's result of its work; where one failed, the same error on all. Collective.

    Args:
        group: the ranks.
        work: without collectives of `group` that ranks could leave half done.
        call: the name of what is done, for errors that are not ours.
        kind: what those become. Default: ours of their own kind (ValueError, TypeError, others).
    """
    result: T | None = None
    fault: ParallelKitError | None = None
    cause: Exception | None = None
    try:
        result = work()
    except (PeerLostError, CollectiveTimeoutError):  # there is nobody to agree with
        raise
    except ParallelKitError as error:
        fault = cause = error
    except Exception as error:
        cause = error
        if kind is not None:
            fault = kind(f"{call}: {type(error).__name__}: {error}")
        else:
            fault = _ours(error)(f"{call}: {error}")
    heard = group._gather_objects((result, fault))
    for rank, (_, refusal) in enumerate(heard):
        if refusal is not None:
            raise type(refusal)(f"{refusal} [rank {rank} of {group.size}]") from cause
    return [theirs for theirs, _ in heard]


def _ours(error: BaseException) -> type[ParallelKitError]:
    if isinstance(error, ValueError):
        return InvalidArgumentError
    return InvalidTypeError if isinstance(error, TypeError) else UsageError

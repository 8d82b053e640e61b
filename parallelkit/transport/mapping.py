"""Memory that several ranks reach is made in steps, and what fails on one of them fails on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import ParallelKitError

__all__ = ["Gather", "MappingError", "all_or_none"]

Gather = Callable[[Any], list[Any]]  # every rank's object, by rank

# Of the system, of torch's allocator and of modules that are private to another torch.
_TROUBLE = (
    OSError,
    RuntimeError,
    MemoryError,
    ImportError,
    AttributeError,
    TypeError,
    ValueError,
)


class MappingError(ParallelKitError):
    """Shared memory could not be made, or not be reached by every rank."""


def all_or_none(
    gather: Gather, way: str, step: Callable[[], tuple[Any, Any]]
) -> tuple[Any, list[Any]]:
    """One step of every rank. Collective.

    Args:
        gather: of the ranks.
        way: in which memory is being made, for the error.
        step: gives what stays here, and what all ranks are told.

    Returns:
        What stays here, and by rank what they told.

    Raises:
        MappingError: some rank's step raised; on every rank.
    """
    mine, told, trouble = None, None, ""
    try:
        mine, told = step()
    except _TROUBLE as error:
        trouble = str(error).partition("\n")[0] or type(error).__name__
    heard = gather((told, trouble))
    for rank, (_, trouble) in enumerate(heard):
        if trouble:
            raise MappingError(f"{way}: {trouble} [rank {rank} of {len(heard)}]")
    return mine, [told for told, _ in heard]

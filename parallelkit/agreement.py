"""Errors that every rank raises alike, once all ranks have told each other what is wrong."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from .errors import (
    CollectiveMismatchError,
    InvalidArgumentError,
    InvalidIndexError,
    InvalidTypeError,
    ParallelKitError,
    UsageError,
)
from .transport import Call, Transport

if TYPE_CHECKING:
    from .group import Group

__all__ = ["refuse", "refuse_instead", "tell"]

_FAULTS: dict[str, type[ParallelKitError]] = {
    error.__name__: error
    for error in (InvalidArgumentError, InvalidIndexError, InvalidTypeError, UsageError)
}


def tell(
    description: Sequence[str],
    weight: float | torch.Tensor = 1.0,
    fault: ParallelKitError | None = None,
) -> bytes:
    """What this rank says of its call where it is refused; arguments as `refuse`."""
    kind = type(fault).__name__ if fault else ""
    number = weight if isinstance(weight, float) else "a tensor"  # which no host has read
    return json.dumps([list(description), number, kind, str(fault or "")]).encode()


def refuse(
    transport: Transport,
    rank: int,
    outcome: str,
    description: Sequence[str],
    weight: float | torch.Tensor = 1.0,
    fault: ParallelKitError | None = None,
    heard: Sequence[bytes] = (),
) -> ParallelKitError:
    """The error for a reply that is not "done", the same on every rank.

    A rank's fault comes first: one that has it need not have come to the collective of the others.
    Collective, unless the ranks have told each other already.

    Args:
        transport: reaches the other ranks.
        rank: this rank.
        outcome: of the `Reply`.
        description: what this rank called: its name first, then each property that has to agree.
        weight: this rank's weight.
        fault: what is wrong with this rank's arguments, if anything.
        heard: what every rank told (`tell`), by rank, where that is known.
    """
    if not heard:
        _, heard = transport.exchange(tell(description, weight, fault))
    calls = [json.loads(message) for message in heard]
    size, name = len(calls), description[0]
    for culprit, (_, _, kind, text) in enumerate(calls):
        if kind:
            where = f" [rank {culprit} of {size}]"
            error = _FAULTS.get(kind, InvalidArgumentError)(text.removesuffix(where) + where)
            error.__cause__ = fault if culprit == rank else None
            return error
    if outcome == "bad_weight":
        weights = ", ".join(f"{w} on rank {r}" for r, (_, w, _, _) in enumerate(calls))
        return InvalidArgumentError(
            f"{name}: weight must be finite and at least 0, and so must the sum; got {weights}. "
            "Nothing was changed; a rank with nothing to add passes weight=0"
        )
    return CollectiveMismatchError(
        f"{name}: the ranks called different things: {_difference([call[0] for call in calls])}. "
        "Nothing was changed; every rank must make the same calls in the same order"
    )


def refuse_instead(group: Group, fault: ParallelKitError) -> ParallelKitError:
    """The error of every rank because this one cannot come to the next collective. Collective.

    The others need do nothing for it: the collective that they are in ends with this error, before
    it has changed anything. So a call that communicates has its faults raised by all ranks at no
    cost; one that does not would wait here for one that does.

    Args:
        group: the ranks.
        fault: what is wrong on this rank.
    """
    if torch.compiler.is_compiling():  # traced, not run: nobody waits
        return fault
    transport = group._usable()
    call = Call(0, 0, 1.0, 1.0, 0, fault=True)
    reply = transport.all_reduce(transport.prepare(()), call)
    return refuse(transport, group.rank, reply.outcome, ["nothing"], fault=fault)


def _difference(descriptions: list[list[str]]) -> str:
    """The first property in which the ranks differ, and who has which value."""
    for index in range(max(map(len, descriptions))):
        values = [d[index] if index < len(d) else "nothing more" for d in descriptions]
        if len(set(values)) > 1:
            return "; ".join(
                f"{value} on rank{'s' if values.count(value) > 1 else ''} "
                + ", ".join(str(r) for r, v in enumerate(values) if v == value)
                for value in dict.fromkeys(values)
            )
    return "; ".join(" ".join(d) for d in descriptions)

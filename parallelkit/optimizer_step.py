"""What ranks tell each other for a step of the sharded optimizer, and what follows from it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .errors import CollectiveMismatchError, ParallelKitError, UsageError
from .group import Group
from .optimizer_checks import check_max_norm, hyper_parameters
from .optimizer_layout import Member, others_of
from .sharded_step import Squares, Work

__all__ = [
    "Agreed",
    "Facts",
    "agree",
    "check_places",
    "global_norm",
    "note_write",
    "settings_hash",
    "warn_of_nonfinite",
]


class Facts(NamedTuple):
    """What a rank tells the others before a step."""

    used: bytes  # for each parameter, whether it has a gradient here
    weight: float  # items that this rank's gradients stand for
    settings: int  # hash of all hyper-parameters
    fault: ParallelKitError | None
    largest: float  # magnitude of its gradients times what they count for; infinity: not known


class Agreed(NamedTuple):
    """What follows from it, the same on every rank."""

    moving: list[Member]  # the parameters that move
    weight: float  # of all ranks
    finite: bool  # the mean gradient is certainly finite


# Well below the range of float32, so that no order of adding overflows.
_SURELY_FINITE = 2.0**100


def settings_hash(groups: Sequence[Mapping[str, Any]], max_grad_norm: float | None) -> int:
    """Of the hyper-parameters of all groups, and of the norm; raises for what is no number."""
    call = "ShardedAdamW.step"
    check_max_norm(call, max_grad_norm)
    numbers = [0.0 if max_grad_norm is None else float(max_grad_norm)]  # None has no fixed hash
    for group in groups:
        numbers += hyper_parameters(call, group).values()
    return hash(tuple(numbers))


def agree(mine: Facts, group: Group, members: Sequence[Member], averaged: bool) -> Agreed:
    """What follows for the step, or an error; the same on every rank. Collective.

    Args:
        mine: of this rank.
        members: all of them.
        averaged: gradients are the mean already, so that all ranks have the same ones.
    """
    heard = [Facts(*facts) for facts in group._gather_objects(tuple(mine))]
    for rank, facts in enumerate(heard):
        if facts.fault is not None:
            raise type(facts.fault)(f"{facts.fault} [rank {rank} of {len(heard)}]")
    for rank, facts in enumerate(heard):
        if facts.settings != heard[0].settings:
            raise CollectiveMismatchError(
                "ShardedAdamW.step: learning rates or other hyper-parameters differ between "
                f"rank 0 and rank {rank}; nothing was changed"
            )
        if averaged and facts.used != heard[0].used:
            odd = next(
                m for m, a, b in zip(members, facts.used, heard[0].used, strict=True) if a != b
            )
            raise CollectiveMismatchError(
                f"ShardedAdamW.step: {odd.name} has a gradient on one of rank 0 and rank "
                f"{rank} only; gradients must be averaged before the step. Nothing was changed"
            )
    # Nothing at all where every weight is 0.
    some = [any(flags) for flags in zip(*(f.used for f in heard if f.weight > 0), strict=True)]
    moving = [member for member, moves in zip(members, some, strict=False) if moves]
    weight = math.fsum(facts.weight for facts in heard)
    largest = sum(facts.largest for facts in heard if facts.weight > 0)
    # Those of ranks outside the group count too, and have not been heard.
    finite = largest < _SURELY_FINITE * weight and others_of(members) is None
    return Agreed(moving, weight, finite)


def check_places(members: Iterable[Member]) -> None:
    """Raise where a parameter lies elsewhere than the optimizer has put it."""
    for member in members:
        if member.moved:
            raise UsageError(
                f"ShardedAdamW.step: {member.name} was moved or converted after the optimizer "
                "was made; call .to(...) first, and make a new optimizer now"
            )


def global_norm(mine: Squares, group: Group, members: Iterable[Member]) -> float:
    """Of the whole gradient: over the ranks of this group and those that have other parts.

    Collective over both.
    """
    heard = group._gather_objects(tuple(mine))
    squares = Squares(*(math.fsum(part) for part in zip(*heard, strict=True)))
    others = others_of(members)
    if others is None:
        return math.sqrt(squares.whole)
    # Whole parameters are equal on all of those, and count once.
    everywhere = [Squares(*s) for s in others._gather_objects(tuple(squares))]
    return math.sqrt(everywhere[0].whole + math.fsum(s.split for s in everywhere))


def note_write(members: Sequence[Member]) -> None:
    """The optimizer itself has written these parameters."""
    torch.autograd.graph.increment_version([member.parameter for member in members])
    for member in members:
        member.version = member.parameter._version


def warn_of_nonfinite(work: Work, group: Group) -> None:
    """Say whose gradient is not finite, and on which rank. Collective."""
    bad = (m.name for m, (grad, _) in work.items() if not bool(grad.isfinite().all()))
    culprits = group._gather_objects(next(bad, None))
    found = [f"{name} on rank {rank}" for rank, name in enumerate(culprits) if name]
    warnings.warn(
        "ShardedAdamW: a gradient is not finite, and every rank skips the step: "
        f"{', '.join(found) or 'the sum over the ranks is too large'}. Further skipped steps "
        "are counted in .skipped_steps",
        RuntimeWarning,
        stacklevel=7,
    )

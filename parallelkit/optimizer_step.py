"""What ranks tell each other for a step of the sharded optimizer, and what follows from it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch

from .errors import CollectiveMismatchError, UsageError
from .group import Group
from .optimizer_checks import check_max_norm, hyper_parameters
from .optimizer_layout import Member, others_of
from .sharded_step import Squares, Work

__all__ = [
    "Agreed",
    "Notice",
    "agree",
    "check_state",
    "global_norm",
    "note_write",
    "settings_hash",
    "warn_of_nonfinite",
]


class Notice(NamedTuple):
    """What a rank tells the others before a step."""

    used: bytes  # for each parameter, whether it has a gradient here
    weight: float  # items that this rank's gradients stand for
    settings: int  # hash of all hyper-parameters
    largest: float  # magnitude of its gradients times what they count for; infinity: not known
    scaled: bool  # the loss was, so that a gradient that is not finite is nothing unusual


class Agreed(NamedTuple):
    """What follows from it, the same on every rank."""

    moving: list[Member]  # the parameters that move
    weight: float  # of all ranks
    finite: bool  # the mean gradient is certainly finite
    quiet: bool  # nobody wants to hear of a step that is skipped


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


def check_state(
    call: str,
    member: Member,
    group: Mapping[str, Any],
    shown: MutableMapping[torch.Tensor, Any],
) -> None:
    """Raise where the state of a parameter is no more what its steps made it.

    Args:
        call: for errors.
        member: the parameter.
        group: its parameter group.
        shown: the optimizer's `.state`, which anybody can write to.
    """
    if shown.get(member.parameter) is not member.shown:
        if not member.has(shown.get(member.parameter)):
            raise UsageError(
                f"{call}: the state of {member.name} was replaced in `.state`; give it to "
                "load_state_dict, on every rank, or make a new optimizer"
            )
        shown[member.parameter] = member.shown  # a copy of the dict, as Lightning makes
    if group["amsgrad"] != ("max_exp_avg_sq" in member.state):
        raise UsageError(
            f"{call}: amsgrad of {member.name} was changed; it is an option of the constructor, "
            "of add_param_group and of load_state_dict"
        )


def agree(heard: Sequence[Notice], members: Sequence[Member], averaged: bool) -> Agreed:
    """What follows for the step, or an error; the same on every rank.

    Args:
        heard: of every rank; their hyper-parameters are the same.
        members: all of them.
        averaged: gradients are the mean already, so that all ranks have the same ones.
    """
    for rank, notice in enumerate(heard):
        if averaged and notice.used != heard[0].used:
            odd = next(
                m for m, a, b in zip(members, notice.used, heard[0].used, strict=True) if a != b
            )
            raise CollectiveMismatchError(
                f"ShardedAdamW.step: {odd.name} has a gradient on one of rank 0 and rank "
                f"{rank} only; gradients must be averaged before the step. Nothing was changed"
            )
    # Nothing at all where every weight is 0.
    some = [any(flags) for flags in zip(*(n.used for n in heard if n.weight > 0), strict=True)]
    moving = [member for member, moves in zip(members, some, strict=False) if moves]
    weight = sum(notice.weight for notice in heard)
    largest = sum(notice.largest for notice in heard if notice.weight > 0)
    # Those of ranks outside the group count too, and have not been heard.
    finite = largest < _SURELY_FINITE * weight and others_of(members) is None
    return Agreed(moving, weight, finite, quiet=any(notice.scaled for notice in heard))


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

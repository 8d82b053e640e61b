"""Where the sharded optimizer finds gradients, and what those still need to be the mean.

`AveragedGradients` are the global mean already and lie in `.grad`. `LocalGradients` are this rank's
sums in the buckets of a `DataParallel`; what those say of themselves is in parallelkit/buckets.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Protocol

import torch

from .buckets import GradientBuckets
from .data_parallel import DataParallel
from .errors import InvalidArgumentError, InvalidTypeError
from .group import Group
from .optimizer_layout import Buffer, Member, local_of, place, place_like_gradients

__all__ = ["AveragedGradients", "Gradients", "LocalGradients"]

# This rank's gradient of each parameter that has a place for it; and of all, whether there is one.
Found = tuple[dict[Member, torch.Tensor], bytes]


class Gradients(Protocol):
    """What the optimizer asks of either."""

    averaged: bool

    @property
    def weight(self) -> float:
        """Items that this rank's gradients stand for."""
        ...

    @property
    def scale(self) -> float:
        """The factor that they still need."""
        ...

    def place(
        self, names: Mapping[torch.Tensor, str], first: int, group: Group, share: bool
    ) -> list[Buffer]:
        """Buffers for parameters; arguments as those of `optimizer_layout.place`. Collective."""
        ...

    def check(self, name: str, parameter: torch.Tensor) -> None:
        """Raise for a parameter that has no gradients here."""
        ...

    def find(self, members: Iterable[Member]) -> Found:
        """This rank's gradients, ready to be read."""
        ...

    def largest(self) -> float:
        """No element of them is larger in magnitude; infinity where that is not known."""
        ...

    def heard(self, total_weight: float) -> None:
        """The weight of all ranks is known."""
        ...

    def clear(self) -> None:
        """The step is over, or somebody called zero_grad."""
        ...

    def give_back(self) -> None:
        """There will be no optimizer after all."""
        ...


class AveragedGradients:
    """The global mean, in `.grad`, where it stays."""

    averaged, weight, scale = True, 1.0, 1.0

    def place(
        self, names: Mapping[torch.Tensor, str], first: int, group: Group, share: bool
    ) -> list[Buffer]:
        """As `Gradients`."""
        return place(names, first, group, share)

    def check(self, name: str, parameter: torch.Tensor) -> None:
        """Any may have one."""

    def find(self, members: Iterable[Member]) -> Found:
        """As `Gradients`."""
        found = {}
        for member in members:
            grad = member.parameter.grad
            if grad is not None:
                found[member] = _usable(member, local_of(grad))
        return found, bytes(member in found for member in members)

    def largest(self) -> float:
        """Nobody has looked."""
        return math.inf

    def heard(self, total_weight: float) -> None:
        """The mean needs none."""

    def clear(self) -> None:
        """They are the user's."""

    def give_back(self) -> None:
        """They are the user's."""


class LocalGradients:
    """This rank's own, taken from a DataParallel; nobody else sees them.

    Args:
        data_parallel: whose backward accumulates them.
    """

    averaged = False

    def __init__(self, data_parallel: DataParallel) -> None:
        self._buckets: GradientBuckets = data_parallel.take_gradients()

    @property
    def weight(self) -> float:
        """As `Gradients`."""
        return self._buckets.weight

    @property
    def scale(self) -> float:
        """As `Gradients`."""
        return self._buckets.reference

    def place(
        self, names: Mapping[torch.Tensor, str], first: int, group: Group, share: bool
    ) -> list[Buffer]:
        """As `Gradients`."""
        return place_like_gradients(names, first, group, share, self._buckets)

    def check(self, name: str, parameter: torch.Tensor) -> None:
        """As `Gradients`."""
        slot = self._buckets.slot_of.get(parameter)
        if slot is None:
            raise InvalidArgumentError(
                f"ShardedAdamW: {name} is not a parameter of data_parallel; "
                "give it an optimizer of its own"
            )
        if not _readable(slot.view.dtype, parameter.dtype):
            raise InvalidArgumentError(
                f"ShardedAdamW: {name} of {parameter.dtype} must have gradients in that dtype or "
                f"in float32, and data_parallel has grad_dtype={slot.view.dtype}"
            )

    def find(self, members: Iterable[Member]) -> Found:
        """As `Gradients`: zeros where this rank has none."""
        self._buckets.settle()
        slots = {member: self._buckets.slot_of[member.parameter] for member in members}
        views = {member: slot.view for member, slot in slots.items()}
        return views, bytes(slot.used for slot in slots.values())

    def largest(self) -> float:
        """As `Gradients`."""
        return self._buckets.largest()

    def heard(self, total_weight: float) -> None:
        """As `Gradients`."""
        self._buckets.total_weight = torch.tensor(total_weight, dtype=torch.float64)

    def clear(self) -> None:
        """As `Gradients`."""
        self._buckets.reset()

    def give_back(self) -> None:
        """As `Gradients`."""
        self._buckets.private = False


def _readable(gradient: torch.dtype, parameter: torch.dtype) -> bool:
    """Whether a step on a parameter reads gradients of that dtype."""
    return gradient in (parameter, torch.float32 if parameter != torch.float64 else parameter)


def _usable(member: Member, grad: torch.Tensor) -> torch.Tensor:
    """A gradient in the parameter's order of memory, in its dtype or float32: itself, or a copy."""
    param = member.local
    if grad.layout != torch.strided:
        raise InvalidTypeError(
            f"ShardedAdamW.step: the gradient of {member.name} must be dense, "
            f"got {grad.layout}; use sparse=False"
        )
    fits = _readable(grad.dtype, param.dtype) and not grad.is_neg()
    in_rows = grad.is_contiguous() and param.is_contiguous()  # asked first: it costs less
    if fits and (in_rows or grad.stride() == param.stride()):
        return grad
    return torch.empty_like(param).copy_(grad)

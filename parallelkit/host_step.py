"""A step of the sharded optimizer whose norm, clipping and skipping the host decides."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .adamw import Setting
from .distributed_step import DistributedStep
from .group import Group
from .optimizer_layout import Buffer, Member
from .optimizer_step import global_norm, note_write, warn_of_nonfinite
from .sharded_step import NativeStep, Step
from .transport.shared_memory import SharedMemory

__all__ = ["HostStep"]


class HostStep:
    """As `DeviceStep`, for CPUs and for torch.distributed.

    Args:
        buffers: of all parameters, whose state is updated in place.
        group: the ranks.
        averaged: gradients are the global mean already.
        skipped_before: steps that were skipped before this object was made.
    """

    def __init__(
        self, buffers: Sequence[Buffer], group: Group, averaged: bool, skipped_before: int
    ) -> None:
        self._group, self._skipped_before, self._skipped = group, skipped_before, 0
        self._members = [member for buffer in buffers for member in buffer.members]
        if self._members:
            # One tensor holds all counts: adding to 150 tensors costs as much as a small step.
            self._counts = torch.stack([member.state["step"] for member in self._members])
            for member, count in zip(self._members, self._counts.unbind(), strict=True):
                member.state["step"] = count
        transport = group._transport
        self.passes: Step = (
            NativeStep(buffers, group, transport, averaged)
            if isinstance(transport, SharedMemory)
            else DistributedStep(buffers, group, averaged)
        )

    def move(
        self,
        work: Mapping[Member, tuple[torch.Tensor, Mapping[str, Any]]],
        weight: float,
        scale: float,
        max_norm: float | None,
        skip_nonfinite: bool,
        quiet: bool,
    ) -> torch.Tensor | None:
        """As `DeviceStep.move`; when it returns, the step is done."""
        if len(work) == len(self._members):
            counts, moving = self._counts, self._members
        else:
            moving = list(work)
            counts = torch.stack([member.state["step"] for member in moving])
        settings: dict[tuple[int, float], Setting] = {}
        load: dict[Member, tuple[torch.Tensor, Setting]] = {}
        for member, count in zip(moving, counts.tolist(), strict=True):
            gradient, options = work[member]
            key = (id(options), count)
            if key not in settings:
                settings[key] = Setting.of(options, int(count) + 1)
            load[member] = (gradient, settings[key])
        self.passes.load(load, weight, scale)
        norm, clip = None, 1.0
        if max_norm is not None or skip_nonfinite:
            norm = global_norm(self.passes.measure(), self._group, self._members)
            if skip_nonfinite and not math.isfinite(norm):
                self._skipped += 1
                if self._skipped_before + self._skipped == 1 and not quiet:
                    warn_of_nonfinite(load, self._group)
                return torch.tensor(norm, dtype=torch.float64)
            if max_norm is not None:
                clip = min(1.0, max_norm / (norm + 1e-6))
        self.passes.run(clip)
        if counts is self._counts:
            counts.add_(1.0)
        else:
            torch._foreach_add_([member.state["step"] for member in moving], 1.0)
        note_write(moving)
        return None if norm is None else torch.tensor(norm, dtype=torch.float64)

    def skipped(self) -> int:
        """Steps of this object that a gradient that was not finite cost."""
        return self._skipped

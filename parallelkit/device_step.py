"""The pass of the sharded optimizer on a GPU, which decides there what the host would wait for.

Whether a gradient is finite, how far the norm clips, and how many steps were taken is known on the
GPU alone: the host enqueues a step and goes on. `state["step"]` of a member becomes a number on the
GPU that the pass itself counts up.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .collectives import weighted_all_reduce_
from .group import Group
from .ops import DTYPE_CODES
from .optimizer_layout import Buffer, Member, others_of
from .optimizer_step import note_write
from .sharded_step import add_member, checked
from .transport import REDUCTIONS, Call
from .transport.cuda_peer import CudaPeer

__all__ = ["DeviceStep"]


class DeviceStep:
    """Reduce-scatter, AdamW and all-gather in one pass over memory that the ranks share.

    Args:
        buffers: of all parameters, whose state is updated in place.
        group: the ranks, on the transport "cuda-peer" or a single GPU.
        averaged: gradients are the global mean already.
    """

    def __init__(self, buffers: Sequence[Buffer], group: Group, averaged: bool) -> None:
        assert isinstance(group._transport, CudaPeer)
        self._group, self._transport = group, group._transport
        self._reduction = REDUCTIONS["total" if averaged else "sum"]
        self._members = [member for buffer in buffers for member in buffer.members]
        steps = [float(member.state["step"]) for member in self._members]
        self._counts = torch.tensor(steps, dtype=torch.float32, device=group.device)
        for member, count in zip(self._members, self._counts, strict=True):
            member.state["step"] = count
        self._native = self._transport.new_step(averaged)
        places = [(buffer, member) for buffer in buffers for member in buffer.members]
        for index, (buffer, member) in enumerate(places):
            shared = buffer.flat is not None, buffer.bucket is not None
            add_member(self._native, index, member, shared)
        self._loaded: object = None
        self._table: torch.Tensor | None = None
        self._skips = torch.zeros((), dtype=torch.float64, device=group.device)
        self._last: tuple[torch.Tensor, torch.cuda.Event] | None = None
        self._warned = False

    def move(
        self,
        work: Mapping[Member, tuple[torch.Tensor, Mapping[str, Any]]],
        weight: float,
        scale: float,
        max_norm: float | None,
        skip_nonfinite: bool,
        quiet: bool,
    ) -> torch.Tensor | None:
        """One step, enqueued on the current stream. Collective.

        Args:
            work: of the members that move: the gradient, in the parameter's order of memory, and
                the options of its parameter group.
            weight: items that this rank's gradients count for.
            scale: a factor they still need.
            max_norm: clip the global gradient to it.
            skip_nonfinite: where it is not finite nothing moves.
            quiet: do not warn of steps that were skipped.

        Returns:
            Its norm before clipping, 0-dim float64 on the GPU; None where nobody asked.
        """
        if not quiet:
            self._warn_of_skip()
        self._load(work)
        call = Call(len(self._members), 0, weight, scale, self._reduction, False)
        device = self._group.device
        squares = None
        if max_norm is not None or skip_nonfinite:
            squares = torch.empty(2, dtype=torch.float64, device=device)
            reply = self._transport.gradient_norm(self._native, call, squares)
            checked(self._group, reply, weight)
            others = others_of(self._members)
            if others is not None:  # what is whole on all of those ranks counts once
                weighted_all_reduce_(squares[1:], 1.0, others, reduction="total")
        report = torch.empty(3, dtype=torch.float64, device=device)
        reply = self._transport.sharded_step(
            self._native, call, squares, max_norm or 0.0, skip_nonfinite, report
        )
        checked(self._group, reply, weight)
        note_write(list(work))
        if squares is None:
            return None
        self._skips += report[1]
        self._remember(report)
        return report[0]

    def _load(self, work: Mapping[Member, tuple[torch.Tensor, Mapping[str, Any]]]) -> None:
        """Tell the GPU what moves, unless it knows."""
        settings: dict[tuple[Any, ...], int] = {}
        rows = []
        for index, member in enumerate(self._members):
            if member not in work:
                rows.append((0, 0, 0, 0, 0))
                continue
            grad, group = work[member]
            beta1, beta2 = map(float, group["betas"])
            options = (float(group[name]) for name in ("eps", "weight_decay"))
            setting = (float(group["lr"]), beta1, beta2, *options, bool(group["maximize"]))
            number = settings.setdefault(setting, len(settings))
            count = self._counts.data_ptr() + index * self._counts.element_size()
            addresses = member.local.data_ptr(), grad.data_ptr()
            rows.append((*addresses, DTYPE_CODES[grad.dtype], number, count))
        self._work = work  # keeps the gradients
        if self._loaded != (loaded := (rows, list(settings))):
            self._native.set(*loaded)
            # A new one each time: the last step may still read the old one, on another stream.
            size = max(1, self._native.table_bytes)
            self._table = torch.empty(size, dtype=torch.uint8, device=self._group.device)
            stream = torch.cuda.current_stream(self._group.device)
            self._native.upload(self._table.data_ptr(), stream.cuda_stream)
            capturing = torch.cuda.is_current_stream_capturing()
            self._loaded = None if capturing else loaded  # a graph fills it when it is replayed

    # -- steps that were skipped ---------------------------------------------------------------

    def skipped(self) -> int:
        """Of this object's steps; waits for the last."""
        return int(self._skips)

    def _remember(self, report: torch.Tensor) -> None:
        """Fetch the report, for the next step to look at."""
        if not self._warned and not torch.cuda.is_current_stream_capturing():
            there = report.to("cpu", non_blocking=True)  # pinned, as torch makes it then
            self._last = there, torch.cuda.current_stream(self._group.device).record_event()

    def _warn_of_skip(self) -> None:
        """Say once that a step was skipped, when the host comes to know."""
        if self._last is None or not self._last[1].query():
            return
        (report, _), self._last = self._last, None
        if report[1] > 0:
            self._warned = True
            warnings.warn(
                "ShardedAdamW: a gradient was not finite on some rank, and every rank has skipped "
                "the step. The GPU decided that, and keeps no gradients to name the parameter; "
                "skipped steps are counted in .skipped_steps",
                RuntimeWarning,
                stacklevel=7,
            )

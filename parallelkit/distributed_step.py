"""The step of the sharded optimizer where torch.distributed carries gradients and parameters."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import torch

from .adamw import MOMENTS, decode, encode, round_stochastically, update_
from .group import Group
from .ops import cpu, wide_dtype
from .optimizer_layout import Buffer, Member, in_memory_order
from .optimizer_norm import InNorm
from .sharded_step import NativeStep, Squares, Step, Work, checked
from .transport import REDUCTIONS, Call
from .transport.choose import usable_cores
from .transport.shared_memory import SharedMemory

__all__ = ["DistributedStep"]

# Of what travels at a time, all ranks' together: so little that memory for it is there already, and
# so much that the headers beside it cost nothing.
_COLUMN_BYTES = 8 << 20


class DistributedStep:
    """Reduce-scatter, AdamW on the shard and all-gather, buffer by buffer.

    Args:
        buffers: of all parameters, whose state is updated in place.
        group: the ranks.
        averaged: gradients are the global mean already.
    """

    def __init__(self, buffers: Sequence[Buffer], group: Group, averaged: bool) -> None:
        self._buffers, self._group, self._averaged = buffers, group, averaged
        self._update: Step
        if cpu is not None and group.device.type == "cpu":
            own, cores = cpu.Segment.local, len(usable_cores())
            alone = SharedMemory(
                0, 1, [os.getpid()], cores, lambda size: own(1, size), group.timeout, ring=False
            )
            apart = [Buffer(buffer.members, buffer.numel, 1) for buffer in buffers]
            self._update = NativeStep(apart, group, alone, averaged=True)
        else:
            self._update = TorchStep()

    def load(self, work: Work, weight: float, scale: float) -> None:
        """As `Step`."""
        self._work, self._weight, self._scale = work, weight, scale
        self._averaging = not self._averaged
        if self._averaged:
            self._update.load(work, 1.0, scale)

    def _average(self) -> None:
        """Give the update the mean gradient of what this rank owns, float32 or wider."""
        if self._averaging:
            self._averaging, mean = False, {}
            for buffer in filter(self._moves, self._buffers):
                for member, shard in self._reduce_scatter(buffer):
                    mean[member] = shard, self._work[member][1]
            self._update.load(mean, 1.0, 1.0)

    def measure(self) -> Squares:
        """As `Step`."""
        self._average()
        return self._update.measure()

    def run(self, clip: float) -> None:
        """As `Step`."""
        self._average()
        self._update.run(clip)
        for buffer in filter(self._moves, self._buffers):
            if buffer.size > 1:
                self._all_gather(buffer)
        self._work = {}

    def _moves(self, buffer: Buffer) -> bool:
        return any(member in self._work for member in buffer.members)

    def _columns(self, buffer: Buffer, item_bytes: int) -> Iterator[tuple[int, int]]:
        """(start, width): what of every rank's range travels at a time."""
        longest = max(end - begin for begin, end in map(buffer.range, range(buffer.size)))
        most = max(1, _COLUMN_BYTES // (buffer.size * item_bytes))
        for start in range(0, longest, most):
            yield start, min(most, longest - start)

    def _reduce_scatter(self, buffer: Buffer) -> list[tuple[Member, torch.Tensor]]:
        """The owned members that move, and the mean gradient of what is owned."""
        assert buffer.bucket is not None
        flat, transport = buffer.bucket.flat, self._group._transport
        begin, end = buffer.range(self._group.rank)
        mine = flat.new_empty(end - begin, dtype=wide_dtype(flat.dtype))
        for start, width in self._columns(buffer, mine.element_size()):
            rows = flat.new_zeros(buffer.size, width)
            for rank, row in enumerate(rows):
                first, last = buffer.range(rank)
                part = flat[min(first + start, last) : min(first + start + width, last)]
                row[: len(part)] = part
            prepared, total = transport.prepare([rows.view(-1)]), mine.new_empty(width)
            call = Call(width, 0, self._weight, self._scale, REDUCTIONS["sum"], False)
            checked(self._group, transport.reduce_scatter(prepared, total, call), self._weight)
            part = mine[start : start + width]
            part.copy_(total[: len(part)])
        return [
            (member, mine[member.offset - begin + start : member.offset - begin + stop])
            for member, start, stop in buffer.pieces(self._group.rank)
            if member in self._work
        ]

    def _all_gather(self, buffer: Buffer) -> None:
        """Give every rank the elements of the members that this rank owns, and take theirs."""
        transport, own = self._group._transport, self._group.rank
        example = buffer.members[0].parameter
        for start, width in self._columns(buffer, example.element_size()):
            mine = torch.zeros(width, dtype=example.dtype, device=example.device)
            for _, values, at in self._pieces(buffer, own, start, width):
                mine[at : at + len(values)] = values
            rows = mine.new_empty(buffer.size, width)
            prepared = transport.prepare([rows.view(-1)])
            call = Call(width, 0, 1.0, 1.0, REDUCTIONS["mean"], False)
            checked(self._group, transport.all_gather(prepared, mine, call), 1.0)
            for rank, row in enumerate(rows):
                for member, values, at in self._pieces(buffer, rank, start, width):
                    if rank != own and member in self._work:
                        values.copy_(row[at : at + len(values)])

    @staticmethod
    def _pieces(
        buffer: Buffer, rank: int, start: int, width: int
    ) -> Iterator[tuple[Member, torch.Tensor, int]]:
        """(member, its elements, their place) of a rank's range from `start` on."""
        begin = buffer.range(rank)[0] + start
        for member, first, last in buffer.pieces(rank):
            first = max(first, begin - member.offset)
            last = min(last, begin - member.offset + width)
            if first < last:
                values = in_memory_order(member.parameter)[first:last]
                yield member, values, member.offset + first - begin


class TorchStep:
    """Without native code: what this rank owns, on gradients that are the global mean already."""

    def load(self, work: Work, weight: float, scale: float) -> None:
        self._work = {member: given for member, given in work.items() if member.start < member.stop}
        self._scale = scale

    def _gradient(self, member: Member, scale: float) -> torch.Tensor:
        """Of the owned elements, float32 or wider."""
        grad = in_memory_order(self._work[member][0])
        if len(grad) == member.numel:  # not of the owned elements alone
            grad = grad[member.start : member.stop]
        factor = torch.tensor(scale, dtype=torch.float64, device=grad.device)
        return grad.to(wide_dtype(grad.dtype)) * factor

    def measure(self) -> Squares:
        sums = [0.0, 0.0]
        for member in self._work:
            if member.part.in_norm != InNorm.ELSEWHERE:
                gradient = self._gradient(member, self._scale)
                sums[member.part.in_norm] += float(gradient.double().square().sum())
        return Squares(*sums)

    def run(self, clip: float) -> None:
        for member in self._work:
            self._update(member, self._gradient(member, self._scale * clip))
        self._work = {}

    def _update(self, member: Member, grad: torch.Tensor) -> None:
        state, setting = member.state, self._work[member][1]
        param = member.owned(member.local)
        value = state.get("master_param")
        if value is None:
            value = param.to(grad.dtype)  # itself where it is float32
        names = [name for name in MOMENTS if name in state]
        moments = {name: decode(name, state) for name in names}
        update_(
            value,
            grad,
            moments["exp_avg"],
            moments["exp_avg_sq"],
            moments.get("max_exp_avg_sq"),
            setting,
        )
        draw = (setting.steps, member.number, member.start)
        for name in names:
            encode(name, moments[name], state, draw)
        if param.dtype == torch.bfloat16 and "master_param" not in state:
            value = round_stochastically("param", value, *draw)
        param.copy_(value)

"""The pass of the sharded optimizer: mean gradient of owned elements, AdamW, parameters to all.

`NativeStep` does it in one pass over memory that the ranks share; `PlainStep` goes through
torch.distributed and plain PyTorch. (On GPUs that reach each other it is `DeviceStep`, which tells
the host nothing in between.) Both are used as

    step.load(work, weight, scale)    what moves, and what this rank's gradients count for
    step.measure()                    optional: squares of the owned elements of the mean gradient
    step.run(clip)                    the step on `clip` times that gradient
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from .adamw import MOMENTS, Setting, decode, encode, round_stochastically, update_
from .agreement import refuse
from .group import Group
from .ops import DTYPE_CODES, cpu, wide_dtype
from .optimizer_layout import Buffer, Member, flat_view
from .transport import REDUCTIONS, Call, Reply
from .transport.shared_memory import SharedMemory

__all__ = ["Squares", "Step", "Work", "add_member", "checked", "make_step"]

_KINDS = {torch.bfloat16: 1, torch.int8: 2}  # of stored moments; 0: as they are computed

# Of the members that move: the gradient, in the parameter's order of memory, and the setting.
Work = Mapping[Member, tuple[torch.Tensor, Setting]]


class Squares(NamedTuple):
    """Sums of squares: of parameters that are whole on each rank of a tensor-parallel group, and of
    those of which each rank there holds a part.
    """

    whole: float
    split: float


class Step(Protocol):
    """See the module."""

    def load(self, work: Work, weight: float, scale: float) -> None:
        """Say what moves: `scale` times the gradients, which count for `weight` items."""
        ...

    def measure(self) -> Squares:
        """Of the elements this rank owns. Collective."""
        ...

    def run(self, clip: float) -> None:
        """Step on `clip` times the mean gradient. Collective."""
        ...


def make_step(buffers: Sequence[Buffer], group: Group, averaged: bool) -> Step:
    """The step for the group's transport.

    Args:
        buffers: of all parameters, whose state is updated in place.
        group: the ranks.
        averaged: gradients are the global mean already.
    """
    kind = NativeStep if isinstance(group._transport, SharedMemory) else PlainStep
    return kind(buffers, group, averaged)


def checked(group: Group, reply: Reply, weight: float) -> None:
    """Raise, the same on every rank, unless all went well."""
    if reply.outcome != "done":
        raise refuse(group._transport, group.rank, reply.outcome, ["ShardedAdamW.step"], weight)


class NativeStep:
    """csrc/cpu/sharded_step.cpp, over shared memory or in one process."""

    def __init__(self, buffers: Sequence[Buffer], group: Group, averaged: bool) -> None:
        assert cpu is not None and isinstance(group._transport, SharedMemory)
        self._group, self._transport = group, group._transport
        self._reduction = REDUCTIONS["total" if averaged else "sum"]
        flats = [b.flat for b in buffers if b.flat is not None]
        grads = [b.bucket.flat for b in buffers if b.bucket is not None]
        shared = self._transport.prepare([*flats, *grads])
        strides = iter(cpu.peer_strides(shared))
        param_strides = [next(strides) if b.flat is not None else 0 for b in buffers]
        grad_strides = [next(strides) if b.bucket is not None else 0 for b in buffers]
        self.native = cpu.ShardedStep(shared, averaged)
        self._members: list[Member] = []
        for buffer, param_stride, grad_stride in zip(
            buffers, param_strides, grad_strides, strict=True
        ):
            for member in buffer.members:
                add_member(self.native, len(self._members), member, (param_stride, grad_stride))
                self._members.append(member)

    def load(self, work: Work, weight: float, scale: float) -> None:
        settings: dict[Setting, int] = {}
        rows = []
        for member in self._members:
            if member in work:
                grad, setting = work[member]
                index = settings.setdefault(setting, len(settings))
                code = DTYPE_CODES[grad.dtype]
                rows.append((member.local.data_ptr(), grad.data_ptr(), code, index))
            else:
                rows.append((0, 0, 0, 0))
        self.native.set(rows, list(settings))
        self._work = work  # keeps the gradients
        self._weight, self._scale = weight, scale

    def _call(self, clip: float) -> Call:
        return Call(len(self._members), 0, self._weight, self._scale * clip, self._reduction, False)

    def measure(self) -> Squares:
        reply = self._transport.measure_gradient(self.native, self._call(1.0))
        checked(self._group, reply, self._weight)
        return Squares(*self.native.squares)

    def run(self, clip: float) -> None:
        reply = self._transport.sharded_step(self.native, self._call(clip))
        checked(self._group, reply, self._weight)
        self._work = {}


def add_member(native: Any, index: int, member: Member, shared: tuple[int, int]) -> None:
    """Tell a native step, on the CPU or a GPU, of a parameter and of what this rank owns of it.

    Args:
        native: the step.
        index: of the parameter in it.
        member: the parameter.
        shared: how peers reach the parameter and its gradient, as the native step wants that.
    """
    dtype, state = member.parameter.dtype, member.state
    master = state.get("master_param")
    stochastic = master is None and dtype == torch.bfloat16
    native.add_parameter(DTYPE_CODES[dtype], stochastic, member.split, *shared)
    count = member.stop - member.start
    if count:
        kind = _KINDS.get(state["exp_avg"].dtype, 0)
        moments = tuple(_address(state.get(name)) for name in MOMENTS)
        scales = tuple(_address(state.get(f"{name}_scale")) for name in MOMENTS)
        place = (index, member.number, member.start, count)
        native.add_piece(*place, _address(master), kind, moments, scales)


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


class PlainStep:
    """Reduce-scatter, AdamW on the shard and all-gather, buffer by buffer."""

    def __init__(self, buffers: Sequence[Buffer], group: Group, averaged: bool) -> None:
        self._buffers, self._group = buffers, group
        self._averaged = averaged

    def load(self, work: Work, weight: float, scale: float) -> None:
        self._work, self._weight, self._scale = work, weight, scale
        self._shards: dict[Member, torch.Tensor] | None = None

    def _owned(self, buffer: Buffer) -> list[Member]:
        return [m for m in buffer.members if m in self._work and m.start < m.stop]

    def _moves(self, buffer: Buffer) -> bool:
        return any(member in self._work for member in buffer.members)

    def _mean(self) -> dict[Member, torch.Tensor]:
        """The mean gradient of every owned piece, float32 or wider."""
        if self._shards is None:
            self._shards = {}
            for buffer in filter(self._moves, self._buffers):
                if not self._averaged:
                    self._reduce_scatter(buffer, self._shards)
                    continue
                for member in self._owned(buffer):
                    grad = flat_view(self._work[member][0])[member.start : member.stop]
                    scale = torch.tensor(self._scale, dtype=torch.float64, device=grad.device)
                    self._shards[member] = (grad * scale).to(wide_dtype(grad.dtype))
        return self._shards

    def _reduce_scatter(self, buffer: Buffer, shards: dict[Member, torch.Tensor]) -> None:
        assert buffer.bucket is not None
        flat, size = buffer.bucket.flat, buffer.size
        each = max(end - begin for begin, end in map(buffer.range, range(size)))
        rows = flat.new_zeros(size, each)
        for rank in range(size):
            begin, end = buffer.range(rank)
            rows[rank, : end - begin] = flat[begin:end]
        mine = flat.new_empty(each, dtype=wide_dtype(flat.dtype))
        call = Call(each, 0, self._weight, self._scale, REDUCTIONS["sum"], False)
        transport = self._group._transport
        prepared = transport.prepare([rows.view(-1)])
        checked(self._group, transport.reduce_scatter(prepared, mine, call), self._weight)
        begin = buffer.range(self._group.rank)[0]
        for member in self._owned(buffer):
            at = member.offset - begin
            shards[member] = mine[at + member.start : at + member.stop].clone()

    def measure(self) -> Squares:
        sums = [0.0, 0.0]
        for member, grad in self._mean().items():
            sums[member.split] += float(grad.double().square().sum())
        return Squares(*sums)

    def run(self, clip: float) -> None:
        shards = self._mean()
        for buffer in filter(self._moves, self._buffers):
            for member in self._owned(buffer):
                grad = shards[member] if clip == 1.0 else shards[member] * clip
                self._update(member, grad)
            if buffer.size > 1:
                self._all_gather(buffer)
        self._work, self._shards = {}, None

    def _update(self, member: Member, grad: torch.Tensor) -> None:
        state, setting = member.state, self._work[member][1]
        param = flat_view(member.local)[member.start : member.stop]
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
            value = round_stochastically(value, *draw)
        param.copy_(value)

    def _all_gather(self, buffer: Buffer) -> None:
        transport, size = self._group._transport, buffer.size
        begin, _ = buffer.range(self._group.rank)
        each = max(end - begin for begin, end in map(buffer.range, range(size)))
        dtype = buffer.members[0].parameter.dtype
        mine = torch.zeros(each, dtype=dtype, device=buffer.members[0].parameter.device)
        for member, start, stop in buffer.pieces(self._group.rank):
            at = member.offset - begin
            mine[at + start : at + stop] = flat_view(member.parameter)[start:stop]
        everybody = mine.new_empty(size * each)
        call = Call(each, 0, 1.0, 1.0, REDUCTIONS["mean"], False)
        prepared = transport.prepare([everybody])
        checked(self._group, transport.all_gather(prepared, mine, call), 1.0)
        for rank in range(size):
            base = rank * each - buffer.range(rank)[0]
            for member, start, stop in buffer.pieces(rank):
                if rank != self._group.rank and member in self._work:
                    at = base + member.offset
                    flat_view(member.parameter)[start:stop] = everybody[at + start : at + stop]

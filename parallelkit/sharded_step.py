"""The pass of the sharded optimizer: mean gradient of owned elements, AdamW, parameters to all.

`NativeStep` does it in one pass over memory that the ranks share; `DistributedStep` has
torch.distributed carry gradients and parameters. (On GPUs that reach each other it is `DeviceStep`,
which tells the host nothing in between.) Both are used as

    step.load(work, weight, scale)    what moves, and what this rank's gradients count for
    step.measure()                    optional: squares of the owned elements of the mean gradient
    step.run(clip)                    the step on `clip` times that gradient
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from .adamw import MOMENTS, Setting
from .agreement import refuse
from .group import Group
from .ops import DTYPE_CODES, cpu
from .optimizer_layout import Buffer, Member
from .transport import REDUCTIONS, Call, Reply
from .transport.shared_memory import SharedMemory

__all__ = ["NativeStep", "Squares", "Step", "Work", "add_member", "checked"]

_KINDS = {torch.bfloat16: 1, torch.int8: 2}  # of stored moments; 0: as they are computed

# Of the members that move: the gradient, in the parameter's order of memory, and the setting. A
# gradient that is the global mean already may be of the elements alone that this rank owns.
Work = Mapping[Member, tuple[torch.Tensor, Setting]]


class Squares(NamedTuple):
    """Sums of squares, by the first two of `optimizer_norm.InNorm`."""

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


def checked(group: Group, reply: Reply, weight: float) -> None:
    """Raise, the same on every rank, unless all went well."""
    if reply.outcome != "done":
        raise refuse(group._transport, group.rank, reply.outcome, ["ShardedAdamW.step"], weight)


class NativeStep:
    """csrc/cpu/sharded_step.cpp, over shared memory or in one process.

    Args:
        buffers: of all parameters, whose state is updated in place.
        group: the ranks, who all hear of a fault.
        transport: the group's, or that of this rank alone.
        averaged: gradients are the global mean already.
    """

    def __init__(
        self, buffers: Sequence[Buffer], group: Group, transport: SharedMemory, averaged: bool
    ) -> None:
        assert cpu is not None
        self._group, self._transport = group, transport
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
        """As `Step`."""
        settings: dict[Setting, int] = {}
        rows = []
        for member in self._members:
            if member not in work:
                rows.append((0, 0, 0, 0))
                continue
            grad, setting = work[member]
            index = settings.setdefault(setting, len(settings))
            owned_alone = member.start > 0 and grad.numel() < member.numel
            before = member.start * grad.element_size() if owned_alone else 0
            code = DTYPE_CODES[grad.dtype]
            rows.append((member.address, grad.data_ptr() - before, code, index))
        self.native.set(rows, list(settings))
        self._work = work  # keeps the gradients
        self._weight, self._scale = weight, scale

    def _call(self, clip: float) -> Call:
        return Call(len(self._members), 0, self._weight, self._scale * clip, self._reduction, False)

    def measure(self) -> Squares:
        """As `Step`."""
        reply = self._transport.measure_gradient(self.native, self._call(1.0))
        checked(self._group, reply, self._weight)
        return Squares(*self.native.squares)

    def run(self, clip: float) -> None:
        """As `Step`."""
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
    native.add_parameter(DTYPE_CODES[dtype], stochastic, member.part.in_norm, *shared)
    count = member.stop - member.start
    if count:
        kind = _KINDS.get(state["exp_avg"].dtype, 0)
        moments = tuple(_address(state.get(name)) for name in MOMENTS)
        scales = tuple(_address(state.get(f"{name}_scale")) for name in MOMENTS)
        place = (index, member.number, member.start, count)
        native.add_piece(*place, _address(master), kind, moments, scales)


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()

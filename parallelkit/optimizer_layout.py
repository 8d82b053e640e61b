"""Which rank owns which elements of the parameters.

Parameters lie in *buffers*; a buffer of n elements is cut into one range for each rank, and a
rank's *piece* of a parameter is what its range covers of it, at most one. Cuts fall on blocks of
256 elements counted from a parameter's first, so that no cut divides a block of quantised state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .adamw import BLOCK
from .buckets import LINE_BYTES, Bucket, GradientBuckets, Spec
from .errors import UsageError
from .group import Group
from .optimizer_norm import InNorm, Part, parts_of

__all__ = [
    "Buffer",
    "Member",
    "in_memory_order",
    "local_of",
    "others_of",
    "place",
    "place_like_gradients",
]

_BUFFER_BYTES = 64 << 20  # no buffer is larger, unless one parameter is


@dataclass(eq=False)
class Member:
    """A parameter, its place in a buffer, and what this rank owns of it."""

    parameter: torch.Tensor
    number: int  # in the order of placing, equal at any world size
    offset: int
    numel: int
    name: str
    start: int = 0  # this rank owns elements [start, stop)
    stop: int = 0
    version: int = -1  # of the parameter, after the optimizer's last write
    dtype: torch.dtype | None = None  # of the parameter, when it was placed
    device: str = "cpu"  # its type, then
    order: tuple[int, ...] = ()  # of its memory, then
    address: int = 0  # of its memory, at the last step
    home: torch.Tensor | None = None  # its memory, where peers write to it
    part: Part = Part(InNorm.WHOLE, None)

    def __post_init__(self) -> None:
        self.state = {}

    @property
    def local(self) -> torch.Tensor:
        """The parameter, or this rank's shard where it is a DTensor."""
        return local_of(self.parameter)

    def bring_home(self) -> None:
        """Back to where peers write to it, with the values it has; where nobody does, it may move.

        `.to("cpu:0")` on a parameter on "cpu" gives it other memory, and so does `.data = ...`.
        """
        p, home, here = self.parameter, self.home, self.local
        if here.data_ptr() == self.address and p.dtype == self.dtype:
            return  # asked first, and briefly: of every parameter, at every step
        reordered = home is None and _order_of(here) != self.order
        if (p.dtype, here.device.type) != (self.dtype, self.device) or reordered:
            raise UsageError(
                f"ShardedAdamW.step: {self.name} was {self.dtype} and is {p.dtype} on {p.device} "
                f"now{', in another order of memory' * reordered}; convert the model first, and "
                "make a new optimizer"
            )
        if home is not None:
            p.data = home.copy_(p.detach())
        else:
            self.address = here.data_ptr()
        self.version = -1  # whoever moved it may have written to it

    @property
    def state(self) -> dict[str, Any]:
        """Of the owned elements."""
        return self._state

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        self._state = state
        self.shown = MappingProxyType(state)

    def has(self, state: Mapping[str, Any] | None) -> bool:
        """Whether a mapping holds exactly the tensors of its state, and the same count of steps."""
        return (
            state is not None
            and state.keys() == self.state.keys()
            and all(state[k] is v or k == "step" for k, v in self.state.items())
            and bool(state["step"] == self.state["step"])
        )

    def owned(self, tensor: torch.Tensor) -> torch.Tensor:
        """What this rank owns of the parameter or of a tensor laid out like it, [n]."""
        return in_memory_order(tensor)[self.start : self.stop]

    def within(self, begin: int, end: int) -> tuple[int, int]:
        """What [begin, end) of the buffer covers of it, in its own elements."""
        start = min(max(begin - self.offset, 0), self.numel)
        return start, max(start, min(end - self.offset, self.numel))


@dataclass(eq=False)
class Buffer:
    """Parameters that are cut into ranges together.

    Args:
        members: in the order of their offsets, all of one dtype.
        numel: length, padding included.
        size: ranks among which it is cut; 1 where each rank keeps what it has.
        flat: the parameters' memory in reach of every rank, or None where they lie on their own.
        bucket: where their gradients lie, or None where those are in `.grad`.
    """

    members: list[Member]
    numel: int
    size: int
    flat: torch.Tensor | None = None
    bucket: Bucket | None = None

    def range(self, rank: int) -> tuple[int, int]:
        """What `rank` owns of it."""
        return self._cut(rank), self._cut(rank + 1)

    def _cut(self, rank: int) -> int:
        at = min(rank * math.ceil(self.numel / self.size), self.numel)
        for member in self.members:
            if member.offset < at < member.offset + member.numel:
                within = math.ceil((at - member.offset) / BLOCK) * BLOCK
                return member.offset + min(within, member.numel)
        return at

    def pieces(self, rank: int) -> Iterator[tuple[Member, int, int]]:
        """(member, start, stop) for each parameter that `rank` owns something of."""
        begin, end = self.range(rank)
        for member in self.members:
            start, stop = member.within(begin, end)
            if start < stop:
                yield member, start, stop

    def own(self, rank: int) -> None:
        """Note in each member what `rank`, which is this one, owns of it."""
        begin, end = self.range(rank if self.size > 1 else 0)
        for member in self.members:
            member.start, member.stop = member.within(begin, end)
            local = member.local
            member.dtype, member.device = member.parameter.dtype, local.device.type
            member.order, member.address = _order_of(local), local.data_ptr()


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a DTensor; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _order_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides that say where elements lie."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return tuple(stride for size, stride in pairs if size > 1 and tensor.numel() > 0)


def others_of(members: Iterable[Member]) -> Group | None:
    """The ranks outside the group that have other parts of some of them."""
    return next((m.part.others for m in members if m.part.others is not None), None)


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor in the order of memory, [n]."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def place(names: Mapping[torch.Tensor, str], first: int, group: Group, share: bool) -> list[Buffer]:
    """Buffers for parameters whose gradients lie in `.grad`. Collective.

    Args:
        names: of the parameters, equal in shape and dtype on every rank. A DTensor, which is split
            already, gets a buffer of its own that no other rank shares.
        first: number of the first.
        group: the ranks.
        share: move them into memory that every rank reaches.
    """
    filling: dict[torch.dtype, Buffer] = {}
    buffers: list[Buffer] = []
    for number, (parameter, name) in enumerate(names.items(), first):
        numel = local_of(parameter).numel()
        if isinstance(parameter, DTensor):
            buffers.append(Buffer([Member(parameter, number, 0, numel, name)], numel, 1))
            continue
        buffer = filling.get(parameter.dtype)
        bytes_each = parameter.element_size()
        if buffer is None or (buffer.numel + numel) * bytes_each > _BUFFER_BYTES:
            buffer = filling[parameter.dtype] = Buffer([], 0, group.size)
            buffers.append(buffer)
        buffer.members.append(Member(parameter, number, buffer.numel, numel, name))
        line = LINE_BYTES // bytes_each
        buffer.numel += math.ceil(numel / line) * line
    _finish(buffers, group, share)
    return buffers


def place_like_gradients(
    names: Mapping[torch.Tensor, str],
    first: int,
    group: Group,
    share: bool,
    buckets: GradientBuckets,
) -> list[Buffer]:
    """Buffers laid out like the gradient buckets that the named parameters are in. Collective.

    A bucket has a second one where some of its parameters came to the optimizer later.
    """
    buffers = []
    for bucket in buckets:
        slots = [slot for slot in bucket.slots if slot.parameter in names]
        if not slots:
            continue
        members = [
            Member(slot.parameter, number, slot.offset, slot.numel, slot.name)
            for number, slot in enumerate(slots, first)
        ]
        first += len(members)
        buffers.append(Buffer(members, len(bucket.flat), group.size, None, bucket))
    _finish(buffers, group, share)
    return buffers


def _finish(buffers: Sequence[Buffer], group: Group, share: bool) -> None:
    members = [member for buffer in buffers for member in buffer.members]
    parts = parts_of({member.parameter: member.name for member in members}, group)
    for member, part in zip(members, parts, strict=True):
        member.part = part
    for buffer in buffers:
        for member in buffer.members:
            p = member.parameter
            if not isinstance(p, DTensor) and not torch.ops.aten.is_non_overlapping_and_dense(p):
                p.data = p.detach().contiguous()
        buffer.own(group.rank)
        if share and buffer.size > 1:
            _move(buffer, group)


def _move(buffer: Buffer, group: Group) -> None:
    """Move a buffer's parameters into memory that every rank reaches. Collective."""
    buffer.flat = group.empty(buffer.numel, dtype=buffer.members[0].parameter.dtype).zero_()
    for member in buffer.members:
        spec = Spec.of(member.name, member.parameter)
        view = buffer.flat.as_strided(spec.shape, spec.stride, member.offset)
        view.copy_(member.parameter.detach())
        member.parameter.data = view
        member.home, member.address = view, view.data_ptr()

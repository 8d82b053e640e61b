"""Which rank owns which elements of the parameters, and the optimizer state of what a rank owns.

Parameters lie in *buffers*; a buffer of n elements is cut into one range for each rank, and a rank's
*piece* of a parameter is what its range covers of it, at most one. Cuts fall on blocks of 256
elements counted from a parameter's first, so that no cut divides a block of quantised state.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .adamw import BLOCK, MOMENTS, decode
from .buckets import Bucket, Spec
from .collectives import all_gather_flat
from .group import Group

__all__ = ["Buffer", "Member", "flat_view", "gathered", "local_of", "move", "new_state", "place"]

_BUFFER_BYTES = 64 << 20  # no buffer is larger, unless one parameter is
_LINE_BYTES = 64
_SMALL = 4096  # parameters with fewer elements keep float32 state where the others have int8
_WINDOW = 1 << 20  # elements of each rank that travel at a time when state is gathered


@dataclass(eq=False)
class Member:
    """A parameter and its place in a buffer."""

    parameter: torch.Tensor
    number: int  # in the order of placing, equal at any world size
    offset: int
    numel: int
    name: str = ""

    @property
    def local(self) -> torch.Tensor:
        """The parameter, or this rank's shard where it is a DTensor."""
        return local_of(self.parameter)

    def cut(self, begin: int, end: int) -> tuple[int, int]:
        """What [begin, end) of the buffer covers of it, in its own elements."""
        start = min(max(begin - self.offset, 0), self.numel)
        return start, max(start, min(end - self.offset, self.numel))


@dataclass(eq=False)
class Buffer:
    """Parameters that are cut into ranges together.

    Args:
        members: in the order of their offsets.
        numel: length, padding included.
        size: ranks among which it is cut.
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
            start, stop = member.cut(begin, end)
            if start < stop:
                yield member, start, stop

    def piece(self, member: Member, rank: int) -> tuple[int, int]:
        """(start, stop) of what `rank` owns of one member, maybe nothing."""
        return member.cut(*self.range(rank))


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a DTensor; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor in the order of memory, [n]."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def place(
    parameters: Sequence[torch.Tensor], names: Sequence[str], first: int, group: Group, share: bool
) -> list[Buffer]:
    """Buffers for parameters whose gradients lie in `.grad`. Collective.

    Args:
        parameters: equal shapes and dtypes on every rank.
        names: theirs, for messages.
        first: number of the first.
        group: the ranks.
        share: move them into memory that every rank reaches.
    """
    filling: dict[torch.dtype, Buffer] = {}
    buffers: list[Buffer] = []
    for number, (parameter, name) in enumerate(zip(parameters, names, strict=True), first):
        numel, line = parameter.numel(), _LINE_BYTES // parameter.element_size()
        buffer = filling.get(parameter.dtype)
        full = buffer and (buffer.numel + numel) * parameter.element_size() > _BUFFER_BYTES
        if buffer is None or full:
            buffer = filling[parameter.dtype] = Buffer([], 0, group.size)
            buffers.append(buffer)
        buffer.members.append(Member(parameter, number, buffer.numel, numel, name))
        buffer.numel += math.ceil(numel / line) * line
    for buffer in buffers:
        if share:
            move(buffer, group)
    return buffers


def move(buffer: Buffer, group: Group) -> None:
    """Move a buffer's parameters into memory that every rank reaches. Collective."""
    buffer.flat = group.empty(buffer.numel, dtype=buffer.members[0].parameter.dtype).zero_()
    for member in buffer.members:
        spec = Spec.of(member.name, member.parameter)
        view = buffer.flat.as_strided(spec.shape, spec.stride, member.offset)
        view.copy_(member.parameter.detach())
        member.parameter.data = view


def new_state(
    parameter: torch.Tensor,
    start: int,
    stop: int,
    *,
    kind: torch.dtype,
    master: bool,
    amsgrad: bool,
) -> dict[str, Any]:
    """The state before the first step of elements [start, stop) of a parameter.

    Args:
        parameter: dense, or without elements here.
        kind: dtype of the moments; a float64 parameter's are float64.
        master: keep a float32 copy.
        amsgrad: keep the largest second moment too.
    """
    count, device = stop - start, parameter.device
    if parameter.dtype == torch.float64:
        kind = torch.float64
    elif kind == torch.int8 and parameter.numel() < _SMALL:
        kind = torch.float32
    state: dict[str, Any] = {"step": torch.tensor(0.0, dtype=torch.float32)}
    for name in MOMENTS[: 3 if amsgrad else 2]:
        unsigned = kind == torch.int8 and name != "exp_avg"
        state[name] = torch.zeros(count, dtype=torch.uint8 if unsigned else kind, device=device)
        if kind == torch.int8:
            state[f"{name}_scale"] = torch.zeros(math.ceil(count / BLOCK), device=device)
    if master:
        state["master_param"] = flat_view(parameter)[start:stop].float()
    return state


def gathered(
    buffer: Buffer, key: str, states: dict[Any, dict[str, Any]], group: Group, keep: bool
) -> dict[Member, torch.Tensor]:
    """One entry of the state of all elements: [numel] for each member that has it. Collective.

    It travels in windows, so that a rank that does not keep the result needs little memory.

    Args:
        buffer: whose members are meant.
        key: of MOMENTS, or "master_param".
        states: of this rank, by parameter.
        group: the ranks.
        keep: return the result here; else an empty dict.
    """
    members = [m for m in buffer.members if m.parameter in states and key in states[m.parameter]]
    if not members:
        return {}
    if buffer.size == 1:
        return {m: decode(key, states[m.parameter]).clone() for m in members if keep}
    chosen = set(members)
    dtype = torch.float64 if members[0].parameter.dtype == torch.float64 else torch.float32
    owned = [[p for p in buffer.pieces(r) if p[0] in chosen] for r in range(group.size)]
    longest = max(sum(stop - start for _, start, stop in pieces) for pieces in owned)
    full = {m: torch.empty(m.numel, dtype=dtype, device=m.local.device) for m in members if keep}
    device = members[0].local.device
    window = min(_WINDOW, max(longest, 1))
    mine = torch.zeros(window, dtype=dtype, device=device)
    everybody = torch.empty(window * group.size, dtype=dtype, device=device)
    for at in range(0, longest, window):
        for member, start, stop, place in _within(owned[group.rank], at, window):
            origin = buffer.piece(member, group.rank)[0]
            part = _part(states[member.parameter], key, start - origin, stop - origin)
            mine[place : place + stop - start] = part
        all_gather_flat(mine, len(everybody), group, out=everybody)
        if keep:
            for rank in range(group.size):
                for member, start, stop, place in _within(owned[rank], at, window):
                    begin = rank * window + place
                    full[member][start:stop] = everybody[begin : begin + stop - start]
    return full


def _within(
    pieces: Sequence[tuple[Member, int, int]], at: int, window: int
) -> Iterator[tuple[Member, int, int, int]]:
    """What [at, at + window) of a rank's pieces, end to end, covers: (member, start, stop, place)."""
    begin = 0
    for member, start, stop in pieces:
        low, high = max(at, begin), min(at + window, begin + stop - start)
        if low < high:
            yield member, start + low - begin, start + high - begin, low - at
        begin += stop - start


def _part(state: dict[str, Any], key: str, start: int, stop: int) -> torch.Tensor:
    """Elements [start, stop) of an entry, as floats."""
    scale = state.get(f"{key}_scale")
    if scale is None:
        entry: torch.Tensor = state[key]
        return entry[start:stop]
    first = start // BLOCK * BLOCK  # whole blocks, so that scales and elements fit
    scales = scale[first // BLOCK : math.ceil(stop / BLOCK)]
    block = {key: state[key][first:stop], f"{key}_scale": scales}
    return decode(key, block)[start - first :]

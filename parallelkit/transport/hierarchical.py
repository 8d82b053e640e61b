"""Several hosts: shared memory inside each, torch.distributed between them for each shard alone.

    every host adds up its own ranks' values       shared memory, float32 or wider
    rank j of each host then holds shard j of it
    the ranks j of all hosts add up their shard j  torch.distributed
    every host's ranks hand round their shards     shared memory
    each rank rounds once, to the tensor's dtype

Only one shard a rank passes between hosts: 1 / (ranks per host) of what a collective over all ranks
alike would send. Where hosts have different numbers of ranks, the smallest number is that of the
*lanes*, the ranks that own shards and talk to other hosts; the further ranks of larger hosts own
nothing, and only then reduce-scatter sends what all-reduce does and all-gather goes by
torch.distributed alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ..errors import CollectiveTimeoutError, PeerLostError
from ..ops import wide_dtype
from . import REDUCTIONS, Call, Reply
from .process_group import ProcessGroup
from .shared_memory import SharedMemory

__all__ = ["Hierarchical"]

# What is packed at a time. A tensor of half as much that is already wide is worth no copy.
_PACK_BYTES = 8 << 20
_DIRECT_BYTES = _PACK_BYTES // 2


class Hierarchical(ProcessGroup):
    """One rank's end. Headers and messages travel over the process group of all ranks.

    Args:
        process_group: of all ranks.
        timeout: for each wait.
        hosts: the ranks of each host, ascending.
        local: shared memory among this rank's host; this object closes it.

    Raises:
        MappingError: no room for the packed values, on every rank.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        timeout: timedelta,
        hosts: Sequence[Sequence[int]],
        local: SharedMemory,
    ) -> None:
        self._local = local
        self._packed = local.empty((_PACK_BYTES,), torch.uint8)
        super().__init__(process_group, torch.device("cpu"), timeout)
        self.name = "hierarchical"
        self._hosts = hosts
        self._members = next(host for host in hosts if self._rank in host)
        self._index = self._members.index(self._rank)
        fewest = min(len(host) for host in hosts)
        self._even = all(len(host) == fewest for host in hosts)
        ranks = dist.get_process_group_ranks(process_group)
        # torch numbers a group's ranks in ascending order, whatever order they are given in.
        self._lanes = [
            sorted((host[lane] for host in hosts), key=ranks.__getitem__) for lane in range(fewest)
        ]
        self._across: dist.ProcessGroup | None = None
        if self._index < fewest:
            self._across = self._new_group([ranks[rank] for rank in self._lanes[self._index]])
        self.barrier()  # Gloo fails where a rank connects to one that has left already

    # -- waiting, inside the host and between hosts ------------------------------------------

    def _here(self, collective: Callable[[], Reply]) -> None:
        """One step inside the host; a rank that is lost here is lost to all hosts."""
        try:
            collective()
        except (PeerLostError, CollectiveTimeoutError) as error:
            late = isinstance(error, CollectiveTimeoutError)
            suspects = [self._members[error.rank]]
            self._fail("timeout" if late else "peer_lost", suspects, error)
        except KeyboardInterrupt:
            self._interrupt()
            raise

    def _between(self, collective: Callable[..., Any], *tensors: Any) -> None:
        """One step between this rank and those of the same lane."""
        self._run(collective, *tensors, **self._lane())

    def _lane(self) -> dict[str, Any]:
        """For `_run`: this rank and those of the same lane."""
        others = [rank for rank in self._lanes[self._index] if rank != self._rank]
        return {"group": self._across, "suspects": others}

    def _fail(
        self, kind: str, suspects: Sequence[int] = (), cause: Exception | None = None
    ) -> NoReturn:
        self._local.close()  # peers that wait for this rank here wait no more
        ProcessGroup._fail(self, kind, suspects, cause)

    def _interrupt(self) -> None:
        self._local.close()
        super()._interrupt()

    def _abandon(self) -> None:
        across, self._across = self._across, None
        if across is not None:
            self._destroy(across)
        super()._abandon()

    def close(self) -> None:
        self._finish_started()
        self._local.close()
        if self._across is not None:
            dist.destroy_process_group(self._across)
            self._across = None
        super().close()

    # -- collectives ----------------------------------------------------------------------------

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self._local.empty(shape, dtype)

    def _all_reduce(self, prepared: list[torch.Tensor], call: Call) -> Reply:
        reply, coefficients = self._open("all_reduce", call)
        if reply.outcome != "done":
            return reply
        mine = coefficients[self._rank]
        for wide in (torch.float32, torch.float64):
            small = []
            for tensor in prepared:
                if tensor.dtype == wide and tensor.nbytes >= _DIRECT_BYTES:
                    self._add_up(tensor.view(-1), mine)
                elif wide_dtype(tensor.dtype) == wide:
                    small.append(tensor.view(-1))
            room = self._packed.view(wide)
            for pieces in _loads(small, len(room)):
                packed = room[: sum(map(len, pieces))]
                parts = packed.split([len(piece) for piece in pieces])
                for part, piece in zip(parts, pieces, strict=True):
                    part.copy_(piece)
                self._add_up(packed, mine)
                for part, piece in zip(parts, pieces, strict=True):
                    piece.copy_(part)
        return reply

    def _add_up(self, flat: torch.Tensor, coefficient: float) -> None:
        """Replace [n] float32 or float64 by the sum over all ranks of coefficient * flat."""
        lane = -(-len(flat) // len(self._lanes))
        start, stop = (min(len(flat), lane * i) for i in (self._index, self._index + 1))
        shard = flat.new_empty(stop - start)  # torch's threads may hold on to it after a failure
        self._scatter_here(flat, shard, lane, coefficient)
        if len(shard) > 0:
            self._between(dist.all_reduce, shard)
        self._gather_here(flat, shard, lane)

    def _scatter_here(
        self, flat: torch.Tensor, shard: torch.Tensor, lane: int, coefficient: float
    ) -> None:
        """Add up inside the host: `lane` elements to each rank, while there are any."""
        if coefficient == 0.0:  # whatever this rank holds, it is never read
            flat.zero_()
            coefficient = 1.0
        call = Call(0, 0, 1.0, coefficient, REDUCTIONS["total"], False)
        prepared, unit = self._local.prepare([flat]), lane * flat.element_size()
        self._here(lambda: self._local.reduce_scatter(prepared, shard, call, unit))

    def _gather_here(self, flat: torch.Tensor, shard: torch.Tensor, lane: int) -> None:
        """Inside the host, every rank's `shard` into everybody's `flat`."""
        call = Call(0, 0, 1.0, 1.0, REDUCTIONS["total"], False)
        prepared, unit = self._local.prepare([flat]), lane * flat.element_size()
        self._here(lambda: self._local.all_gather(prepared, shard, call, unit))

    # Of even hosts the packed values are cut lane by lane, and inside a lane by its ranks: what
    # the host adds up for a lane is what the lane's ranks then deal out among them. Shards are
    # longer than the room for them, so they pass as `width` elements of each at a time.

    def _reduce_scatter(self, flat: torch.Tensor, shard: torch.Tensor, call: Call) -> Reply:
        reply, coefficients = self._open("reduce_scatter", call)
        each = -(-len(flat) // self._size) * flat[:1].numel()
        if reply.outcome != "done" or each == 0:
            return reply
        mine, flat, shard = coefficients[self._rank], flat.view(-1), shard.view(-1)
        wide = wide_dtype(flat.dtype)
        room = self._packed.view(wide)
        if not self._even:
            for start in range(0, len(flat), len(room)):
                part = flat[start : start + len(room)]
                packed = room[: len(part)]
                packed.copy_(part)
                self._add_up(packed, mine)
                first = each * self._rank
                begin, end = max(start, first), min(start + len(part), first + len(shard))
                if begin < end:
                    shard[begin - first : end - first].copy_(packed[begin - start : end - start])
            return reply
        for start, packed in self._columns(room, each):
            width = packed.shape[-1]
            for rank, row in self._rows(packed):
                part = self._part(flat, rank, each, start, width)
                row[: len(part)].copy_(part)
                row[len(part) :].zero_()
            block = flat.new_empty(len(self._hosts), width, dtype=wide)
            self._scatter_here(packed.view(-1), block.view(-1), block.numel(), mine)
            total = self._add_rows(block, **self._lane())
            shard[start : start + width].copy_(total[: len(shard[start : start + width])])
        return reply

    def _all_gather(self, flat: torch.Tensor, shard: torch.Tensor, call: Call) -> Reply:
        if not self._even:
            return super()._all_gather(flat, shard, call)
        reply, _ = self._open("all_gather", call)
        each = -(-len(flat) // self._size) * flat[:1].numel()
        if reply.outcome != "done" or each == 0:
            return reply
        flat, shard = flat.view(-1), shard.view(-1)
        for start, packed in self._columns(self._packed.view(flat.dtype), each):
            width = packed.shape[-1]
            mine = self._padded(shard[start : start + width], width)
            block = flat.new_empty(len(self._hosts), width)
            rows = [row.view(torch.uint8) for row in block]  # bytes: Gloo knows not every dtype
            self._between(dist.all_gather, rows, mine.view(torch.uint8))
            self._gather_here(packed.view(-1), block, block.numel())
            for rank, row in self._rows(packed):
                part = self._part(flat, rank, each, start, width)
                part.copy_(row[: len(part)])
        return reply

    def _columns(self, room: torch.Tensor, each: int) -> Iterator[tuple[int, torch.Tensor]]:
        """The same stretch [start, start + width) of all shards: `start`, [lanes, hosts, width]."""
        most = len(room) // self._size
        for start in range(0, each, most):
            width = min(most, each - start)
            yield (
                start,
                room[: self._size * width].view(len(self._lanes), len(self._hosts), width),
            )

    def _rows(self, packed: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Each rank and its row in packed values."""
        for lane, ranks in zip(packed, self._lanes, strict=True):
            yield from zip(ranks, lane, strict=True)

    @staticmethod
    def _part(flat: torch.Tensor, rank: int, each: int, start: int, width: int) -> torch.Tensor:
        """The elements of a rank's shard from `start` on, as far as there are any."""
        begin = each * rank + start
        return flat[begin : min(begin + width, each * (rank + 1))]


def _loads(tensors: Sequence[torch.Tensor], room: int) -> Iterator[list[torch.Tensor]]:
    """Deal 1-D tensors out into lists of at most `room` elements, cutting where it must."""
    load: list[torch.Tensor] = []
    free = room
    for tensor in tensors:
        while len(tensor) > 0:
            load.append(tensor[:free])
            tensor, free = tensor[free:], free - len(load[-1])
            if free == 0:
                yield load
                load, free = [], room
    if load:
        yield load

"""Ranks of one host over memory that all of them map: the native transport (csrc/cpu).

`Mapper`s make that memory: `FileMapper` for ranks that are processes, `parallelkit.testing` has one
for ranks that are threads. A group of one rank uses the same transport without peers.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import torch

from ..errors import UsageError
from ..ops import DTYPE_CODES, cpu
from . import CLOSED, Call, Reply
from .mapping import Gather, MappingError, all_or_none
from .memory import check_available
from .watch import BREAKING, failure

__all__ = ["FileMapper", "Mapper", "SharedMemory"]

Mapper = Callable[[int], Any]  # bytes of a slab -> the Segment all ranks share; collective

# One staging slot; a rank has two of them for inputs, and two of 1/size of it for results. Small
# enough that what one rank stages is still in cache when another reads it: four times as much costs
# 1.1 to 1.4 times the time from 16 MiB on.
_SLOT_BYTES = 512 << 10


class FileMapper:
    """Segments in a file without a name: the host's first rank makes it, the others open it.

    The file is a memfd; where PARALLELKIT_SHM_DIR names a folder, an unnamed file there. The others
    find it through /proc. Trouble on one host is trouble on all, so every rank of the group calls.

    Args:
        rank: in the group.
        members: the ranks of this host, ascending.
        gather: every rank's object, by rank of the group.
    """

    def __init__(self, rank: int, members: Sequence[int], gather: Gather) -> None:
        self._rank, self._members, self._gather = rank, members, gather
        self._folder = os.environ.get("PARALLELKIT_SHM_DIR", "")

    def __call__(self, slab_bytes: int) -> Any:
        """Map one slab of `slab_bytes` for each rank; MappingError on every rank if one fails."""
        assert cpu is not None
        segment, size, index = cpu.Segment, len(self._members), self._members.index(self._rank)
        with ExitStack() as stack:  # descriptors are closed, mappings stay

            def create() -> tuple[None, tuple[str, bytes] | None]:
                if index > 0:
                    return None, None
                check_available(slab_bytes * size)
                secret = os.urandom(32)
                path, descriptor = segment.create(self._folder, secret, size, slab_bytes)
                stack.callback(os.close, descriptor)
                return None, (path, secret)

            def reach() -> tuple[int, None]:
                descriptor = segment.open(path, secret, size, slab_bytes)
                stack.callback(os.close, descriptor)
                return descriptor, None

            def map_slabs() -> tuple[Any, None]:
                return segment.map(descriptor, index, size, slab_bytes), None

            way = "shared memory"
            _, told = all_or_none(self._gather, way, create)
            path, secret = told[self._members[0]]
            descriptor, _ = all_or_none(self._gather, way, reach)
            return all_or_none(self._gather, way, map_slabs)[0]


class _Background:
    """A collective that runs on the communicator's own thread."""

    devices: Sequence[torch.device] = ()

    def __init__(self, transport: SharedMemory, task: Any) -> None:
        self._transport, self._task = transport, task

    def done(self) -> bool:
        return bool(self._task.done())

    def wait(self) -> Reply:
        result, heard = self._transport._comm.wait(self._task)
        return self._transport._reply(result)._replace(heard=heard)


class _Closed:
    """What takes the communicator's place when its group is closed."""

    broken = False

    def leave(self) -> None:
        """A second close does nothing."""

    def __getattr__(self, name: str) -> Any:
        raise UsageError(CLOSED)


class SharedMemory:
    """The native communicator of one rank.

    Attributes:
        rank, size, timeout: as given.

    Args:
        rank: among those that share the memory.
        size: how many they are.
        pids: of their processes, by rank; 0 for threads of this one.
        cores: how many they have all together; with fewer than ranks, waiting gives a core away.
        mapper: makes memory that all of them reach.
        timeout: for each wait.
        ring: visit peers from the next rank on, else from rank 0 on.

    Raises:
        MappingError: more ranks than can share memory.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        pids: Sequence[int],
        cores: int,
        mapper: Mapper,
        timeout: timedelta,
        ring: bool,
    ) -> None:
        assert cpu is not None
        self.name = "shared-memory" if size > 1 else "single"
        self.rank, self.size, self.timeout, self._mapper = rank, size, timeout, mapper
        if size > cpu.max_ranks:
            raise MappingError(f"{size} ranks on one host, {cpu.max_ranks} at most share memory")
        slot = _SLOT_BYTES if size > 1 else 0
        control = mapper(cpu.Communicator.control_bytes(size, slot))
        self._comm: Any = cpu.Communicator(
            control, rank, size, list(pids), cores, slot, timeout.total_seconds(), ring
        )
        self._segments = 0  # made so far: their names, equal on every rank

    @property
    def broken(self) -> bool:
        """Whether a rank was lost; no call works any more."""
        return bool(self._comm.broken)

    def _reply(self, result: tuple[int, int, float]) -> Reply:
        number, rank, total = result
        if number == 0:
            return Reply("done", total)
        assert cpu is not None
        outcome = cpu.outcomes[number]
        if outcome in BREAKING:
            raise failure(outcome, rank, self.rank, self.size, self.timeout)
        return Reply(outcome, total)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        numel = math.prod(shape)
        if numel == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        segment = self._mapper(numel * dtype.itemsize)
        self._comm.add_segment(segment, self._segments)
        self._segments += 1
        slab = segment.slab(self.rank)
        return torch.frombuffer(slab, dtype=dtype, count=numel).view(tuple(shape))

    def prepare(self, tensors: Sequence[torch.Tensor]) -> Any:
        return self._comm.tensors([(t.data_ptr(), t.nbytes, DTYPE_CODES[t.dtype]) for t in tensors])

    def all_reduce(self, prepared: Any, call: Call) -> Reply:
        return self._reply(self._comm.all_reduce(prepared, call, torch.get_num_threads()))

    def start_all_reduce(self, prepared: Any, call: Call, told: bytes) -> _Background:
        task = self._comm.start_all_reduce(prepared, call, torch.get_num_threads(), told)
        return _Background(self, task)

    def start_reduce_scatter(
        self, prepared: Any, shard: torch.Tensor, call: Call, told: bytes
    ) -> _Background:
        place = shard.data_ptr(), _row_bytes(shard)
        start = self._comm.start_reduce_scatter
        return _Background(self, start(prepared, *place, call, torch.get_num_threads(), told))

    def reduce_scatter(
        self, prepared: Any, shard: torch.Tensor, call: Call, unit_bytes: int = 0
    ) -> Reply:
        """As every transport; shards are whole multiples of `unit_bytes`, default one row."""
        return self._sharded(self._comm.reduce_scatter, prepared, shard, call, unit_bytes)

    def all_gather(
        self, prepared: Any, shard: torch.Tensor, call: Call, unit_bytes: int = 0
    ) -> Reply:
        """As every transport; shards as in `reduce_scatter`."""
        return self._sharded(self._comm.all_gather, prepared, shard, call, unit_bytes)

    def _sharded(
        self, collective: Any, prepared: Any, shard: torch.Tensor, call: Call, unit_bytes: int
    ) -> Reply:
        unit = unit_bytes or _row_bytes(shard)
        return self._reply(
            collective(prepared, shard.data_ptr(), unit, call, torch.get_num_threads())
        )

    def measure_gradient(self, step: Any, call: Call) -> Reply:
        """`step.squares` becomes the sum over what this rank owns (parallelkit.sharded_step)."""
        return self._reply(self._comm.measure_gradient(step, call, torch.get_num_threads()))

    def sharded_step(self, step: Any, call: Call) -> Reply:
        """Update what this rank owns, on every rank."""
        return self._reply(self._comm.sharded_step(step, call, torch.get_num_threads()))

    def exchange(self, message: bytes, subject: int = 0) -> tuple[Reply, list[bytes]]:
        result, messages = self._comm.exchange(message, subject)
        return self._reply(result), messages

    def barrier(self) -> Reply:
        return self._reply(self._comm.barrier())

    def traffic(self) -> tuple[int, int]:
        """Bytes this rank has moved: what its arithmetic read and wrote; what was staged beside."""
        read, written, staged = self._comm.traffic
        return read + written, staged

    def close(self) -> None:
        self._comm.leave()
        self._comm = _Closed()


def _row_bytes(shard: torch.Tensor) -> int:
    return shard.element_size() * math.prod(shard.shape[1:])

"""GPUs of one host that reach each other's memory: the kernels of csrc/cuda.

Two channels join the ranks. Their *hosts* meet at every call, through the CPU's shared memory, and
agree on all that hosts know: who calls what, with which shapes and weights, and whether anybody
must be refused. That takes microseconds and waits for no GPU. The *GPUs* then meet inside the
kernels, on the stream that was current at the call, and decide there what only they know: weights
that lie on them. What a kernel found wrong shows in its status, which the next call reads and
every rank raises. A captured graph replays kernels without hosts, so nothing is agreed while one is
captured.
"""

from __future__ import annotations

import math
import os
import pickle
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn, TypeVar

import torch

from ..errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    InvalidArgumentError,
    ParallelKitError,
    PeerLostError,
    UsageError,
)
from ..ops import DTYPE_CODES
from . import CLOSED, Call, Reply, explained
from .peer_memory import Slab, SlabMapper, as_tensor
from .shared_memory import SharedMemory
from .side_stream import OnSideStream, SideStream
from .watch import BREAKING, failure

__all__ = ["CudaPeer"]

Result = TypeVar("Result")

_OPERATIONS = (
    "barrier",
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "gradient_norm",
    "sharded_step",
)
_HASHES = (1 << 63) - 1


class _Prepared:
    """Tensors of one call or many, and the table that kernels find them in."""

    def __init__(self, tensors: Sequence[torch.Tensor], native: Any) -> None:
        self.tensors, self.native = tensors, native
        self._table: torch.Tensor | None = None

    def upload(self, stream: torch.cuda.Stream) -> None:
        """Before a call on `stream`, and in a graph each time it is replayed."""
        if self.native.table_bytes == 0 or self._table is not None:
            return
        device = self.tensors[0].device
        table = torch.empty(self.native.table_bytes, dtype=torch.uint8, device=device)
        self.native.upload(table.data_ptr(), stream.cuda_stream)
        if torch.cuda.is_current_stream_capturing():
            self._captured = table  # filled by the graph; not yet
        else:
            self._table = table

    def record(self, stream: torch.cuda.Stream) -> None:
        """Keep the table from being used anew before `stream` is through with it."""
        if self._table is not None and not torch.cuda.is_current_stream_capturing():
            self._table.record_stream(stream)


class CudaPeer:
    """One rank's end.

    Attributes:
        host: as given, for what needs no GPU.

    Args:
        native: parallelkit._cuda.
        host: the ranks in the CPU's shared memory, whose timeout counts for each wait, also of
            kernels; this object closes it.
        device: this rank's GPU.
        blocks: of its kernels, equal on every rank; see `max_blocks` of the module.
        mapper: makes memory that all of them reach.
        algorithm: "auto", "direct" or "ring".
        virtual: the module's VirtualRanks, where all ranks are threads with one GPU.

    Raises:
        MappingError: no memory that all ranks reach; on every rank.
    """

    def __init__(
        self,
        native: Any,
        host: SharedMemory,
        device: torch.device,
        blocks: int,
        mapper: SlabMapper,
        algorithm: str,
        virtual: Any = None,
    ) -> None:
        rank, size, timeout = host.rank, host.size, host.timeout
        self.name = "cuda-peer" if size > 1 else "single"
        self._native, self.host, self._mapper = native, host, mapper
        self._rank, self._size, self._device, self._timeout = rank, size, device, timeout
        self._error: ParallelKitError | None = None
        self._found = "done"  # by kernels, and not yet raised
        self._control: Slab | None = mapper(native.Communicator.control_bytes(size, blocks))
        self._comm = native.Communicator(
            rank,
            size,
            device.index or 0,
            self._control.addresses,
            blocks,
            timeout.total_seconds(),
            native.algorithms.index(algorithm),
            virtual,
        )
        self._side = SideStream(device)
        self._slabs: dict[int, Any] = {}  # by number: what keeps each, and its address
        self._made = 0
        self._dropped: set[int] = set()  # slabs without a tensor here

    @property
    def broken(self) -> bool:
        """Whether a rank was lost; no call works any more."""
        return self._error is not None or self.host.broken

    # -- agreement ---------------------------------------------------------------------------------

    def agree(self, operation: str, call: Call) -> Reply:
        """The hosts meet: everybody calls the same, and no kernel has found anything wrong.

        A weight on the GPU counts as 1 here, and is judged there.
        """
        if torch.cuda.is_current_stream_capturing():
            if call.fault:
                raise UsageError(
                    f"{operation}: the arguments are refused, and a CUDA graph is being captured; "
                    "the same call outside of the capture tells why"
                )
            return Reply("done", math.nan)

        def meet() -> Reply:
            reply = self.host.all_reduce(
                self.host.prepare(()),
                call._replace(
                    signature=hash((_OPERATIONS.index(operation), call.signature)) & _HASHES,
                    weight=1.0 if isinstance(call.weight, torch.Tensor) else call.weight,
                    fault=call.fault or self._found != "done",
                ),
            )
            if reply.outcome == "fault":
                self._raise_found()
            return reply

        return self._together(meet)

    def _together(self, meet: Callable[[], Result]) -> Result:
        """One meeting of the hosts, unless the group is broken; a rank lost in it breaks it."""
        if self._error is not None:
            raise self._error
        self._look()
        try:
            return meet()
        except KeyboardInterrupt:
            self._abort("interrupted", self._rank)
            raise
        except (PeerLostError, CollectiveTimeoutError) as error:
            self._look(error)  # a kernel has seen more: it is why that rank left
            late = isinstance(error, CollectiveTimeoutError)
            self._break("timeout" if late else "peer_lost", error.rank, error)

    def _look(self, cause: Exception | None = None) -> None:
        """What kernels have found since the last look: raised where it breaks the group."""
        number, rank = self._comm.status()
        outcome = self._native.outcomes[number]
        if outcome in BREAKING:
            self._break(outcome, rank, cause)
        if outcome != "done":
            self._found = outcome

    def _raise_found(self) -> None:
        """Raise what the kernels of any rank have found in earlier calls; collective."""
        _, messages = self.host.exchange(self._found.encode())
        found = next((m.decode() for m in messages if m != b"done"), None)
        if found is None:
            return
        if self._found == "done":  # here it shows once the GPU has come so far
            torch.cuda.synchronize(self._device)
            self._look()
        self._found = "done"
        who = f"[rank {self._rank} of {self._size}]"
        if found == "bad_weight":
            raise InvalidArgumentError(
                "an earlier collective: a weight on the GPU, or the sum of the weights, was "
                f"negative or not finite; its tensors were left as they were {who}"
            )
        raise CollectiveMismatchError(
            f"an earlier collective, replayed by a CUDA graph: the ranks called different things "
            f"({found}); its tensors were left as they were {who}"
        )

    def _break(self, outcome: str, culprit: int, cause: Exception | None = None) -> NoReturn:
        raise self._abort(outcome, culprit) from cause

    def _abort(self, outcome: str, culprit: int) -> ParallelKitError:
        """Break the group for good, kernels and hosts that wait included; what says so."""
        self._comm.abort(self._native.outcomes.index(outcome), culprit)
        self.host.close()
        self._error = failure(outcome, culprit, self._rank, self._size, self._timeout)
        return self._error

    # -- memory ------------------------------------------------------------------------------------

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        self._let_go()
        numel = math.prod(shape)
        if numel == 0:
            return torch.empty(tuple(shape), dtype=dtype, device=self._device)
        slab = self._mapper(numel * dtype.itemsize)
        self._comm.add_segment(slab.addresses, slab.nbytes, slab.multicast)
        self._slabs[self._made] = slab.address, slab.owners
        weakref.finalize(slab, self._dropped.add, self._made).atexit = False
        self._made += 1
        return as_tensor(slab, self._device)[: slab.nbytes].view(dtype).view(tuple(shape))

    def _let_go(self) -> None:
        """Unmap the slabs of which no rank has a tensor any more; collective."""
        _, messages = self.exchange(pickle.dumps(self._dropped))
        unused = set[int].intersection(*map(pickle.loads, messages))
        if unused:
            torch.cuda.synchronize(self._device)
        for number in unused:
            address, _ = self._slabs.pop(number)
            self._comm.remove_segment(address)
        self._dropped -= unused

    def prepare(self, tensors: Sequence[torch.Tensor]) -> _Prepared:
        native = self._comm.tensors(
            [(t.data_ptr(), t.nbytes, DTYPE_CODES[t.dtype]) for t in tensors]
        )
        return _Prepared([tensor.detach() for tensor in tensors], native)

    # -- collectives -------------------------------------------------------------------------------

    def _weight(self, call: Call) -> tuple[float, torch.Tensor | None]:
        """A weight as kernels take it: a number, or where on this GPU it lies in float64."""
        if not isinstance(call.weight, torch.Tensor):
            return call.weight, None
        return 1.0, call.weight.detach().to(self._device, torch.float64, non_blocking=True)

    def _reduce(self, collective: Any, prepared: _Prepared, call: Call, *where: int) -> Reply:
        """An agreed all-reduce or reduce-scatter on the current stream."""
        stream = torch.cuda.current_stream(self._device)
        prepared.upload(stream)
        weight, there = self._weight(call)
        total = torch.empty((), dtype=torch.float64, device=self._device)
        collective(
            prepared.native,
            *where,
            call._replace(weight=weight),
            stream.cuda_stream,
            weight_at=0 if there is None else there.data_ptr(),
            total_at=total.data_ptr(),
        )
        prepared.record(stream)
        return Reply("done", total)

    def all_reduce(self, prepared: _Prepared, call: Call) -> Reply:
        reply = self.agree("all_reduce", call)
        if reply.outcome != "done":
            return reply
        return self._reduce(self._comm.all_reduce, prepared, call)

    def start_all_reduce(self, prepared: _Prepared, call: Call, told: bytes) -> OnSideStream:
        return self._start(lambda: self.all_reduce(prepared, call), prepared.tensors, call, told)

    def start_reduce_scatter(
        self, prepared: _Prepared, shard: torch.Tensor, call: Call, told: bytes
    ) -> OnSideStream:
        tensors = [*prepared.tensors, shard]
        return self._start(lambda: self.reduce_scatter(prepared, shard, call), tensors, call, told)

    def _start(
        self,
        collective: Callable[[], Reply],
        tensors: Sequence[torch.Tensor],
        call: Call,
        told: bytes,
    ) -> OnSideStream:
        def run() -> Reply:
            return explained(collective, told, lambda message: self.exchange(message)[1])

        weights = [call.weight] if isinstance(call.weight, torch.Tensor) else []
        return self._side.start(run, [*tensors, *weights])

    def reduce_scatter(self, prepared: _Prepared, shard: torch.Tensor, call: Call) -> Reply:
        reply = self.agree("reduce_scatter", call)
        if reply.outcome != "done":
            return reply
        where = shard.data_ptr(), shard.element_size() * math.prod(shard.shape[1:])
        return self._reduce(self._comm.reduce_scatter, prepared, call, *where)

    def all_gather(self, prepared: _Prepared, shard: torch.Tensor, call: Call) -> Reply:
        reply = self.agree("all_gather", call)
        if reply.outcome == "done":
            stream = torch.cuda.current_stream(self._device)
            prepared.upload(stream)
            where = shard.data_ptr(), shard.element_size() * math.prod(shard.shape[1:])
            self._comm.all_gather(prepared.native, *where, call, stream.cuda_stream)
            prepared.record(stream)
        return reply

    # -- the optimizer's pass (parallelkit.sharded_step) -------------------------------------------

    def new_step(self, averaged: bool) -> Any:
        """The native tables of a sharded step.

        PARALLELKIT_MULTICAST=1 lets the switch between GPUs add up gradients, in no fixed order.
        """
        multicast = os.environ.get("PARALLELKIT_MULTICAST") == "1"
        return self._native.ShardedStep(self._comm, averaged, multicast)

    def gradient_norm(self, step: Any, call: Call, squares: torch.Tensor) -> Reply:
        """`squares`, float64 [2]: of all ranks' shards of the mean gradient, whole and split."""
        reply = self.agree("gradient_norm", call)
        if reply.outcome == "done":
            stream = torch.cuda.current_stream(self._device)
            self._comm.gradient_norm(step, call, stream.cuda_stream, squares_at=squares.data_ptr())
        return reply

    def sharded_step(
        self,
        step: Any,
        call: Call,
        squares: torch.Tensor | None,
        max_norm: float,
        skip_nonfinite: bool,
        report: torch.Tensor,
    ) -> Reply:
        """Update what this rank owns, on every rank; see `Communicator.sharded_step`."""
        reply = self.agree("sharded_step", call)
        if reply.outcome == "done":
            stream = torch.cuda.current_stream(self._device)
            self._comm.sharded_step(
                step,
                call,
                stream.cuda_stream,
                squares_at=0 if squares is None else squares.data_ptr(),
                max_norm=max_norm,
                skip_nonfinite=skip_nonfinite,
                report_at=report.data_ptr(),
            )
        return reply

    # -- the hosts alone ---------------------------------------------------------------------------

    def exchange(self, message: bytes, subject: int = 0) -> tuple[Reply, list[bytes]]:
        return self._together(lambda: self.host.exchange(message, subject))

    def barrier(self) -> Reply:
        reply = self.agree("barrier", Call(0, 0, 1.0, 1.0, 0, False))
        if reply.outcome == "done":
            self._comm.barrier(torch.cuda.current_stream(self._device).cuda_stream)
        return reply

    def close(self) -> None:
        if self._control is None:
            return
        self.host.close()
        with suppress(RuntimeError):  # of what ran before, whose own call is the place to raise
            torch.cuda.synchronize(self._device)
        self._comm.close()
        self._slabs.clear()
        self._control = None
        self._error = UsageError(CLOSED)

"""Ranks anywhere, over plain torch.distributed: the transport of several hosts, and the reference.

Every number here is ordinary PyTorch. Each rank scales what it has by its share of the weights, in
float32 or wider, torch.distributed adds, and the sum is rounded once to the tensor's dtype.
"""

from __future__ import annotations

import math
import struct
import threading
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist

from ..errors import ParallelKitError, UsageError
from ..ops import wide_dtype
from . import CLOSED, REDUCTIONS, Call, Reply, explained
from .watch import Watch

__all__ = ["ProcessGroup"]

# The same function under its name of today and that of torch < 2.13.
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Result = TypeVar("Result")

# torch's own deadline comes after ours, which knows the ranks.
_GRACE = timedelta(seconds=2)

_OPERATIONS = {"barrier": 0, "exchange": 1, "all_reduce": 2, "reduce_scatter": 3, "all_gather": 4}


class _Background:
    """A collective that runs on the transport's own thread."""

    devices: Sequence[torch.device] = ()

    def __init__(self, transport: ProcessGroup, future: Future[Reply]) -> None:
        self._transport, self._future = transport, future

    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> Reply:
        return self._transport._result(self._future)


class ProcessGroup:
    """One rank's end of a torch.distributed group of its own, so that no other traffic mixes in.

    Args:
        process_group: the group whose ranks take part; None for a group of this rank alone.
        device: where header tensors live (a CUDA device for nccl).
        timeout: for each wait.
    """

    def __init__(
        self, process_group: dist.ProcessGroup | None, device: torch.device, timeout: timedelta
    ) -> None:
        self.name = "process-group" if process_group is not None else "single"
        self._device, self._timeout = device, timeout
        self._executor: ThreadPoolExecutor | None = None
        self._last: Future[Reply] | None = None
        self._error: ParallelKitError | None = None
        self._rank, self._size = 0, 1
        self._group = None
        if process_group is not None:
            self._rank, self._size = process_group.rank(), process_group.size()
            self._backend = dist.get_backend(process_group)
            ranks = dist.get_process_group_ranks(process_group)
            name = [f"parallelkit-{uuid.uuid4()}"]
            dist.broadcast_object_list(name, ranks[0], process_group)
            self._unique = name[0]
            self._group = self._new_group(ranks)
            self._watch = Watch(self._group, timeout)

    def _new_group(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        """A torch.distributed group of these ranks of the job, under a name that never comes again.

        `dist.new_group` makes a name of the ranks and of how many groups this process is in. Ranks
        that are in different numbers of groups would then wait under different names, and a name
        used before finds the addresses of those who left still in the store.
        """
        torch_groups = dist.distributed_c10d  # there is no public way to a name
        group, _ = torch_groups._new_process_group_helper(
            len(ranks),
            ranks.index(dist.get_rank()),
            list(ranks),
            dist.Backend(self._backend),
            torch_groups._get_default_store(),
            f"{self._unique}-{'-'.join(map(str, ranks))}",  # type: ignore[arg-type]
            timeout=self._timeout + _GRACE,
        )
        numbers = {rank: number for number, rank in enumerate(ranks)}
        torch_groups._world.pg_group_ranks[group] = numbers
        return cast(dist.ProcessGroup, group)

    @property
    def broken(self) -> bool:
        """Whether a rank was lost; no call works any more."""
        return self._error is not None

    # -- what torch.distributed does ---------------------------------------------------------

    def _run(
        self,
        collective: Callable[..., Any],
        *args: Any,
        group: dist.ProcessGroup | None = None,
        suspects: Sequence[int] = (),
        **kwargs: Any,
    ) -> None:
        """One torch.distributed collective, with a deadline and an error that names the rank.

        Args:
            collective: a function of torch.distributed, and what it takes.
            group: a part of this group that has it to itself, with `suspects` its other ranks.
        """
        self._check()
        group = group if group is not None else self._group
        if group is None:
            return
        try:
            work = collective(*args, group=group, async_op=True, **kwargs)
            failed = self._watch.wait(work)
        except KeyboardInterrupt:
            self._interrupt()
            raise
        except RuntimeError as error:  # a connection that is known to be closed
            failed = "peer_lost", error
        if failed is not None:
            kind, cause = failed
            self._fail(kind, suspects, cause)

    def _check(self) -> None:
        """Raise if the group is broken or closed."""
        if self._error is not None:
            raise self._error
        if self._group is not None and self._watch.called:
            self._fail(self._watch.called)

    def _fail(
        self, kind: str, suspects: Sequence[int] = (), cause: Exception | None = None
    ) -> NoReturn:
        """Break the group for good, and raise what all its ranks raise."""
        self._error = self._watch.verdict(kind, suspects)
        self._abandon()
        raise self._error from cause

    def _interrupt(self) -> None:
        """Ctrl-C was pressed here: the peers must not wait for this rank."""
        self._error = self._watch.verdict("interrupted", [self._rank])
        self._abandon()

    def _abandon(self) -> None:
        """Let go of torch's group."""
        group, self._group = self._group, None
        if group is not None:
            self._watch.close()
            self._destroy(group)

    @staticmethod
    def _destroy(group: dist.ProcessGroup) -> None:
        """End a group that may be stuck: torch waits until its last collective has timed out."""
        threading.Thread(target=dist.destroy_process_group, args=(group,), daemon=True).start()

    def _gather(self, row: torch.Tensor) -> list[torch.Tensor]:
        rows = [torch.empty_like(row) for _ in range(self._size)]
        if self._group is None:
            return [row]
        self._run(dist.all_gather, rows, row)
        return rows

    def _add_rows(self, rows: torch.Tensor, **part: Any) -> torch.Tensor:
        """The sum over ranks of that row which has this rank's place among them.

        Args:
            rows: [ranks, n] of each rank.
            part: as for `_run`, of the group that has as many ranks.
        """
        if rows.device.type == "cpu":  # Gloo's reduce-scatter sends twice as much: an all-reduce
            heard = torch.empty_like(rows)
            self._run(dist.all_to_all_single, heard, rows, **part)
            total = heard[0]
            for row in heard[1:]:
                total += row
        else:
            total = torch.empty_like(rows[0])
            self._run(_reduce_scatter_single, total, rows.view(-1), **part)
        return total

    # -- the header ---------------------------------------------------------------------------

    def _open(self, operation: str, call: Call) -> tuple[Reply, list[float]]:
        """Hear every rank's call and conclude the same everywhere; the coefficient of each rank."""
        self._check()
        if self._group is not None:
            self._watch.begun += 1
        bits = struct.unpack("<2q", struct.pack("<2d", call.weight, call.scale))
        row = [_OPERATIONS[operation], call.fault, call.signature, call.reduction, call.layout]
        row += bits
        mine = torch.tensor([_signed(value) for value in row], device=self._device)
        rows = [[int(value) for value in row] for row in self._gather(mine)]
        numbers = [struct.unpack("<2d", struct.pack("<2q", *row[5:])) for row in rows]
        weights, scales = [n[0] for n in numbers], [n[1] for n in numbers]
        total = _exact_sum(weights)
        outcome = "done"
        if any(row[0] != rows[0][0] for row in rows):
            outcome = "mismatch"
        elif any(row[1] for row in rows):
            outcome = "fault"
        elif not math.isfinite(total) or min(weights) < 0:
            outcome = "bad_weight"
        elif any(row[2:4] != rows[0][2:4] for row in rows):
            outcome = "mismatch"
        elif any(row[4] != rows[0][4] for row in rows):
            outcome = "layouts"
        if outcome != "done":
            return Reply(outcome, 0.0), []
        if call.reduction == REDUCTIONS["total"]:
            return Reply(outcome, total), scales
        share = weights if call.reduction == REDUCTIONS["mean"] else [1.0] * self._size
        return Reply(outcome, total), [
            scale * (part / total) if weight > 0 else 0.0
            for part, scale, weight in zip(share, scales, weights, strict=True)
        ]

    # -- collectives ----------------------------------------------------------------------------

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self._device)

    def prepare(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor.detach() for tensor in tensors]

    def all_reduce(self, prepared: list[torch.Tensor], call: Call) -> Reply:
        return self._in_turn(lambda: self._all_reduce(prepared, call))

    def start_all_reduce(
        self, prepared: list[torch.Tensor], call: Call, told: bytes
    ) -> _Background:
        return self._start(lambda: self._all_reduce(prepared, call), told)

    def start_reduce_scatter(
        self, prepared: list[torch.Tensor], shard: torch.Tensor, call: Call, told: bytes
    ) -> _Background:
        return self._start(lambda: self._reduce_scatter(prepared[0], shard, call), told)

    def _start(self, collective: Callable[[], Reply], told: bytes) -> _Background:
        def run() -> Reply:
            return explained(collective, told, lambda message: self._exchange(message, 0)[1])

        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="parallelkit")
        self._last = self._executor.submit(self._on_this_stream(run))
        return _Background(self, self._last)

    def _on_this_stream(self, collective: Callable[[], Reply]) -> Callable[[], Reply]:
        """What another thread is to run; on a GPU as if it had been called here and now."""
        if self._device.type != "cuda":
            return collective
        stream = torch.cuda.current_stream(self._device)

        def run() -> Reply:
            with torch.cuda.stream(stream):
                return collective()

        return run

    def _result(self, future: Future[Reply]) -> Reply:
        try:
            wait([future])
        except KeyboardInterrupt:  # the thread that runs it gives up, because it was called
            self._interrupt()
            raise
        return future.result()

    def _in_turn(self, collective: Callable[[], Result]) -> Result:
        """Run it here, after everything that was started before."""
        if self._last is not None:
            last, self._last = self._last, None
            with suppress(ParallelKitError):  # whoever waits for it hears of it
                self._result(last)
        return collective()

    def _all_reduce(self, prepared: list[torch.Tensor], call: Call) -> Reply:
        reply, coefficients = self._open("all_reduce", call)
        if reply.outcome != "done":
            return reply
        for tensor in prepared:
            if tensor.numel() > 0:
                total = self._share(tensor, coefficients[self._rank])
                self._run(dist.all_reduce, total)
                tensor.copy_(total)
        return reply

    @staticmethod
    def _share(tensor: torch.Tensor, coefficient: float) -> torch.Tensor:
        """What this rank adds; a rank of weight 0 sends zeros, whatever it holds."""
        wide = wide_dtype(tensor.dtype)
        if coefficient == 0.0:
            return torch.zeros_like(tensor, dtype=wide)
        return tensor.to(wide) * torch.tensor(coefficient, dtype=wide, device=tensor.device)

    def reduce_scatter(
        self, prepared: list[torch.Tensor], shard: torch.Tensor, call: Call
    ) -> Reply:
        return self._in_turn(lambda: self._reduce_scatter(prepared[0], shard, call))

    def _reduce_scatter(self, flat: torch.Tensor, shard: torch.Tensor, call: Call) -> Reply:
        reply, coefficients = self._open("reduce_scatter", call)
        each = -(-len(flat) // self._size)
        if reply.outcome != "done" or each == 0:
            return reply
        padded = self._padded(self._share(flat, coefficients[self._rank]), each * self._size)
        if self._group is not None:
            padded = self._add_rows(padded.view(self._size, -1)).view(each, *flat.shape[1:])
        shard.copy_(padded[: len(shard)])
        return reply

    def all_gather(self, prepared: list[torch.Tensor], shard: torch.Tensor, call: Call) -> Reply:
        return self._in_turn(lambda: self._all_gather(prepared[0], shard, call))

    def _all_gather(self, flat: torch.Tensor, shard: torch.Tensor, call: Call) -> Reply:
        reply, _ = self._open("all_gather", call)
        each = -(-len(flat) // self._size)
        if reply.outcome != "done" or each == 0:
            return reply
        mine = self._padded(shard, each)
        rows = self._gather(mine.view(torch.uint8))  # bytes: Gloo does not know every dtype
        for part, row in zip(flat.split(each), rows, strict=False):
            part.copy_(row.view(flat.dtype)[: len(part)])
        return reply

    @staticmethod
    def _padded(tensor: torch.Tensor, length: int) -> torch.Tensor:
        """The same rows and zeros after them: torch.distributed wants equal shards."""
        if len(tensor) == length:
            return tensor.contiguous()
        padded = tensor.new_zeros(length, *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        return padded

    def exchange(self, message: bytes, subject: int = 0) -> tuple[Reply, list[bytes]]:
        return self._in_turn(lambda: self._exchange(message, subject))

    def _exchange(self, message: bytes, subject: int) -> tuple[Reply, list[bytes]]:
        reply, _ = self._open("exchange", Call(subject, 0, 1.0, 1.0, 0, False))
        if reply.outcome != "done":
            return reply, []
        lengths = [int(n) for n in self._gather(torch.tensor([len(message)], device=self._device))]
        padded = torch.zeros(max(lengths), dtype=torch.uint8, device=self._device)
        if message:
            padded[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        rows = self._gather(padded) if max(lengths) else [padded] * self._size
        return reply, [
            bytes(row[:length].tolist()) for row, length in zip(rows, lengths, strict=True)
        ]

    def barrier(self) -> Reply:
        return self._in_turn(lambda: self._open("barrier", Call(0, 0, 1.0, 1.0, 0, False))[0])

    def _finish_started(self) -> None:
        """Wait for what runs in the background."""
        if self._executor is not None:
            self._executor.shutdown()

    def close(self) -> None:
        self._finish_started()
        if self._group is not None:
            self._watch.close()
            dist.destroy_process_group(self._group)
            self._group = None
        self._error = UsageError(CLOSED)


def _signed(value: int) -> int:
    """The same 64 bits as int64."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _exact_sum(weights: Sequence[float]) -> float:
    """The sum rounded once; not finite where it, or one of the weights, is not."""
    try:
        return math.fsum(weights)
    except (OverflowError, ValueError):  # too large; infinities of both signs
        return math.inf

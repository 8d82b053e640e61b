"""Ranks for tests and experiments: in processes of this machine, or inside this process."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from .errors import InvalidArgumentError, ParallelKitError, PeerLostError
from .group import Group, init
from .ops import cpu, load_cuda
from .transport import Transport
from .transport.choose import usable_cores
from .transport.cuda_peer import CudaPeer
from .transport.mapping import MappingError
from .transport.memory import check_available
from .transport.peer_memory import Slab
from .transport.shared_memory import SharedMemory

__all__ = ["RanksFailedError", "run_ranks", "virtual_ranks"]


class RanksFailedError(ParallelKitError, RuntimeError):
    """Some ranks raised or died; `.outcomes[r]` is rank r's result, or what it raised."""

    def __init__(self, message: str, outcomes: list[Any]) -> None:
        super().__init__(message)
        self.outcomes = outcomes


def run_ranks(fn: Callable[..., Any], size: int, *args: Any, timeout: float = 120.0) -> list[Any]:
    """Run `fn(group, *args)` in `size` processes of this machine; the results in rank order.

    Each process has one torch thread, torch.distributed over gloo, and `pk.init()`'s group.

    Args:
        fn: importable by name; it and its arguments and results are pickled.
        size: number of ranks, at least 1.
        args: for every rank alike.
        timeout: seconds for all of it.

    Raises:
        RanksFailedError: a rank raised, died or was not done in time. All are ended then.
    """
    if size < 1:
        raise InvalidArgumentError(f"run_ranks: size must be at least 1, got {size}")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["parallelkit.testing", fn.__module__])  # the first call's
    job = pickle.dumps((fn, args, dict(os.environ)))
    with tempfile.TemporaryDirectory(prefix="parallelkit-") as folder:
        ranks = []
        for rank in range(size):
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_run_rank, args=(rank, size, f"{folder}/store", job, theirs), daemon=True
            )
            process.start()
            theirs.close()
            ranks.append((process, mine))
        try:
            outcomes = _collect(ranks, time.monotonic() + timeout, timeout)
        finally:
            for process, connection in ranks:
                process.kill()
                process.join()
                connection.close()
    failed = [rank for rank, outcome in enumerate(outcomes) if isinstance(outcome, BaseException)]
    if failed:
        told = "\n".join(f"rank {rank}: {_told(outcomes[rank])}" for rank in failed)
        raise RanksFailedError(f"run_ranks: {len(failed)} of {size} ranks failed\n{told}", outcomes)
    return outcomes


def _run_rank(rank: int, size: int, store: str, job: bytes, connection: Connection) -> None:
    """The body of one process."""
    torch.set_num_threads(1)
    multiprocessing.set_start_method(None, force=True)  # the usual one, not that of its own start
    try:
        fn, args, environment = pickle.loads(job)
        os.environ.clear()
        os.environ.update(environment)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=60),
        )
        with init() as group:
            outcome = fn(group, *args)
        answer = pickle.dumps(outcome)
    except BaseException as error:
        error.add_note(traceback.format_exc()) if hasattr(error, "add_note") else None
        answer = _pickled_error(error)
    connection.send_bytes(answer)
    connection.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def _pickled_error(error: BaseException) -> bytes:
    try:
        answer = pickle.dumps(error)
        pickle.loads(answer)
    except Exception:  # an exception that does not survive the way: its text does
        answer = pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return answer


def _collect(ranks: list[tuple[Any, Connection]], deadline: float, timeout: float) -> list[Any]:
    """What each rank sent, or the exception it ended with."""
    outcomes: list[Any] = [RanksFailedError(f"not done within {timeout:g} s", []) for _ in ranks]
    waiting = {connection: rank for rank, (_, connection) in enumerate(ranks)}
    while waiting and (left := deadline - time.monotonic()) > 0:
        for connection in wait(list(waiting), timeout=left):
            assert isinstance(connection, Connection)
            rank = waiting.pop(connection)
            try:
                outcomes[rank] = pickle.loads(connection.recv_bytes())
            except EOFError:  # it died before it could answer
                process = ranks[rank][0]
                process.join(5)
                outcomes[rank] = RanksFailedError(f"died, exit code {process.exitcode}", [])
    return outcomes


def _told(error: BaseException) -> str:
    notes = getattr(error, "__notes__", [])
    return "\n".join([f"{type(error).__name__}: {error}", *notes])


def virtual_ranks(
    fn: Callable[..., Any], size: int, device: torch.device | str = "cpu", *, timeout: float = 60.0
) -> list[Any]:
    """Run `fn(group)` for `size` ranks inside this process, one thread each; results in rank order.

    The same native collectives as between processes. On a GPU all ranks are on that one, each with
    a stream of its own, and a collective is one launch for all of them, once every rank has called
    it; so `DataParallel` there needs `overlap=False`, since one thread runs everybody's backward,
    and a CUDA graph captures all ranks or none.

    Args:
        fn: called once a rank, at the same time.
        size: number of ranks, at least 1.
        device: "cpu", or a GPU.
        timeout: seconds a collective waits for a late rank.

    Raises:
        InvalidArgumentError: a device, or a number of ranks, that cannot be had here.
        What fn raised first, by rank.
    """
    device = torch.device(device)
    if device.type not in ("cpu", "cuda") or cpu is None:
        raise InvalidArgumentError(
            "virtual_ranks: device must be cpu or cuda, with the native extensions built; "
            f"got {device}"
        )
    on_gpu = _VirtualGpu(size, device) if device.type == "cuda" else None
    algorithm = os.environ.get("PARALLELKIT_ALGORITHM", "auto")
    segments = _Shared(size, partial(_segment, size))
    outcomes: list[Any] = [None] * size

    def run(rank: int) -> None:
        deadline, cores = timedelta(seconds=timeout), len(usable_cores())
        try:
            host = SharedMemory(
                rank,
                size,
                [0] * size,
                cores,
                segments.mapper(rank),
                deadline,
                ring=algorithm == "ring",
            )
            transport: Transport = host
            where: torch.device = torch.device("cpu")
            ordered: Any = contextlib.nullcontext()
            if on_gpu is not None:
                where, ordered = on_gpu.device, on_gpu.own_stream()
                transport = on_gpu.transport(host, algorithm)
            with ordered, Group._over(rank, size, where, deadline, transport) as group:
                outcomes[rank] = fn(group)
        except BaseException as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if errors:  # not the ones that only say that another rank left
        raise next((e for e in errors if not isinstance(e, PeerLostError)), errors[0])
    return outcomes


class _VirtualGpu:
    """What the ranks on one GPU have in common."""

    def __init__(self, size: int, device: torch.device) -> None:
        native, lacking = load_cuda()
        if native is not None and size > native.max_virtual_ranks:
            lacking = f"at most {native.max_virtual_ranks} ranks fit on one GPU"
        if native is None or lacking:
            raise InvalidArgumentError(
                f"virtual_ranks: {size} ranks on {device} cannot be had: {lacking}"
            )
        self.device = torch.device("cuda", device.index or 0)
        self._native, self._size = native, size
        self._together = native.VirtualRanks(size)
        self._slabs = _Shared(size, self._make_slabs)

    def own_stream(self) -> Any:
        """Lets the calling thread work on a new stream, after what the GPU was given so far."""
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.default_stream(self.device))
        return torch.cuda.stream(stream)

    def _make_slabs(self, nbytes: int) -> list[Any]:
        plain = self._native.Memory.plain
        return [plain(self.device.index, nbytes) for _ in range(self._size)]

    def transport(self, host: SharedMemory, algorithm: str) -> CudaPeer:
        """One rank's."""
        rank, ask = host.rank, self._slabs.mapper(host.rank)

        def mapper(nbytes: int) -> Slab:
            memories = ask(nbytes)
            return Slab([memory.address for memory in memories], rank, nbytes, memories)

        blocks = self._native.max_blocks(self.device.index) // self._size
        return CudaPeer(self._native, host, self.device, blocks, mapper, algorithm, self._together)


class _Shared:
    """Memory that threads share: the first to ask for the k-th piece makes it, for all.

    Args:
        size: number of ranks.
        make: bytes for each rank -> what all of them get.
    """

    def __init__(self, size: int, make: Callable[[int], Any]) -> None:
        self._size, self._make = size, make
        self._lock, self._made = threading.Lock(), list[Any]()

    def mapper(self, rank: int) -> Callable[[int], Any]:
        """What one thread asks with: its k-th call gives the k-th piece, or a MappingError."""
        asked = 0

        def ask(nbytes: int) -> Any:
            nonlocal asked
            with self._lock:
                if asked == len(self._made):
                    try:
                        self._made.append(self._make(nbytes))
                    except (MemoryError, RuntimeError) as error:
                        self._made.append(error)
                made = self._made[asked]
            asked += 1
            if isinstance(made, Exception):
                raise MappingError(f"shared memory: {made} [rank {rank} of {self._size}]")
            return made

        return ask


def _segment(size: int, slab_bytes: int) -> Any:
    assert cpu is not None
    check_available(size * slab_bytes)
    return cpu.Segment.local(size, slab_bytes)

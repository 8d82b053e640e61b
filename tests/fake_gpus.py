"""A stand-in for parallelkit._cuda and for torch.cuda's streams, on the CPU: what runs on the host
around the kernels is real, the kernels are a few lines of float64.

Ranks are threads. `Runtime` is one machine: its GPUs, what each of them can do, and what its
kernels are to find wrong.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

import parallelkit as pk
from parallelkit.adamw import Setting, update_
from parallelkit.ops import _INTERFACES, DTYPE_CODES, cpu
from parallelkit.optimizer_norm import InNorm
from parallelkit.testing import _Shared, virtual_ranks
from parallelkit.transport import Call, cuda_peer
from parallelkit.transport.cuda_peer import CudaPeer
from parallelkit.transport.peer_memory import Slab

DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}
OUTCOMES = (
    "done",
    "mismatch",
    "bad_weight",
    "fault",
    "layouts",
    "peer_lost",
    "timeout",
    "interrupted",
)
SUM, TOTAL = 1, 2


def at(address: int, nbytes: int, dtype: torch.dtype, keep: Any = None) -> torch.Tensor:
    """The memory there, as a tensor that keeps `keep`."""
    if nbytes == 0:
        return torch.empty(0, dtype=dtype)
    kind = type("Bytes", (ctypes.Array,), {"_type_": ctypes.c_uint8, "_length_": nbytes})
    buffer = kind.from_address(address)
    buffer.keep = keep
    return torch.frombuffer(buffer, dtype=dtype)


class Memory:
    """As `parallelkit._cuda.Memory`; what is shareable is a memfd, as descriptors are real."""

    def __init__(self, nbytes: int, fd: int | None = None) -> None:
        self._fd = os.memfd_create("fake") if fd is None else os.dup(fd)
        if fd is None:
            os.ftruncate(self._fd, nbytes)
        self._map = mmap.mmap(self._fd, nbytes)
        self._pin = (ctypes.c_uint8 * nbytes).from_buffer(self._map)
        self.address, self.nbytes = ctypes.addressof(self._pin), nbytes

    def __del__(self) -> None:
        os.close(self._fd)

    def export_fd(self) -> int:
        return os.dup(self._fd)

    def ipc_handle(self) -> bytes:
        return f"/proc/{os.getpid()}/fd/{self._fd}".encode().ljust(64, b"\0")

    def close(self) -> None:
        raise AssertionError("memory ends with its last reference")


class Runtime:
    """The module `parallelkit._cuda` on a machine of the test's choice.

    Attributes:
        uuids: of the GPUs that a process sees.
        broken: names of Memory's functions that fail, on which ranks ("all" for all).
        statuses: by rank, what `status` is to say next: (outcome, rank) pairs.
        calls: what was called on communicators, by rank.
    """

    interface = _INTERFACES["parallelkit._cuda"]
    outcomes = OUTCOMES
    algorithms = ("auto", "one-shot", "direct", "ring")
    max_ranks, max_virtual_ranks = 64, 16

    def __init__(self, gpus: int = 8) -> None:
        self.uuids = [f"{gpu:032x}" for gpu in range(gpus)]
        self.drivers = {}  # by device, where not the usual one
        self.no_access: set[tuple[int, int]] = set()
        self.vmm = True
        self.broken: dict[str, str] = {}
        self.statuses: dict[int, list[tuple[str, int]]] = {}
        self.calls: dict[int, list[str]] = {}
        self.aborted: list[tuple[int, str, int]] = []
        self.capturing = False
        self._current = threading.local()
        self.meetings: dict[Any, _Meeting] = {}
        runtime = self

        class OfRuntime(Memory):
            @classmethod
            def plain(cls, device: int, nbytes: int) -> Memory:
                runtime.try_("plain", device)
                return cls(nbytes)

            @classmethod
            def shareable(cls, device: int, nbytes: int) -> Memory:
                runtime.try_("shareable", device)
                return cls(nbytes)

            @classmethod
            def open_fd(cls, device: int, fd: int, nbytes: int) -> Memory:
                runtime.try_("open_fd", device)
                return cls(nbytes, fd)

            @classmethod
            def open_ipc(cls, device: int, handle: bytes, nbytes: int) -> Memory:
                runtime.try_("open_ipc", device)
                fd = os.open(handle.rstrip(b"\0"), os.O_RDWR)
                try:
                    return cls(nbytes, fd)
                finally:
                    os.close(fd)

        self.Memory = OfRuntime

    def try_(self, function: str, device: int | None) -> None:
        where = self.broken.get(function)
        if where == "all" or where == str(device):
            raise RuntimeError(f"{function}: CUDA says no")

    def device_count(self) -> int:
        return len(self.uuids)

    def unavailable(self) -> str:
        return "" if self.uuids else "CUDA driver version is insufficient"

    def device_facts(self, device: int) -> dict[str, Any]:
        self._current.device = device
        return {"uuid": self.uuids[device], "vmm_fd": int(self.vmm), "capability": 90}

    def versions(self) -> tuple[int, int]:
        return 13000, self.drivers.get(self._current.device, 13010)

    def can_access_peer(self, device: int, peer: int) -> bool:
        return (device, peer) not in self.no_access

    def max_blocks(self, device: int | None) -> int:
        return 264

    def VirtualRanks(self, size: int) -> object:  # noqa: N802
        return object()

    def ShardedStep(  # noqa: N802
        self, communicator: Any, averaged: bool, multicast: bool
    ) -> FakeStep:
        self.multicast = multicast
        return FakeStep(communicator, averaged)

    @property
    def Communicator(self) -> Any:  # noqa: N802
        runtime = self

        class OfRuntime(FakeCommunicator):
            def __init__(self, *args: Any) -> None:
                super().__init__(runtime, *args)

        return OfRuntime


class _Meeting:
    """Where the ranks of one communicator meet, as kernels do."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=20)
        self.said: list[Any] = [None] * size
        self.segments: list[dict[int, tuple[int, ...]]] = [{} for _ in range(size)]


class FakeList:
    """As `parallelkit._cuda.TensorList`."""

    def __init__(self, tensors: Sequence[tuple[int, int, int]]) -> None:
        self.tensors = [at(a, n, DTYPES[code]) for a, n, code in tensors]
        self.table_bytes, self.uploads = 16 * len(tensors), 0

    def upload(self, table: int, stream: int) -> None:
        self.uploads += 1


class FakeStep:
    """As `parallelkit._cuda.ShardedStep`."""

    def __init__(self, communicator: FakeCommunicator, averaged: bool) -> None:
        self.averaged = averaged
        self.parameters: list[Any] = []
        self.pieces: list[Any] = []
        self.sets = self.uploads = 0
        self.table_bytes = 64

    def add_parameter(self, *of: Any) -> None:
        self.parameters.append(of)

    def add_piece(self, *of: Any) -> None:
        assert 0 <= of[0] < len(self.parameters) and of[2] % 256 == 0 and of[3] > 0
        self.pieces.append(of)

    def set(self, rows: Any, settings: Any) -> None:
        assert len(rows) == len(self.parameters)
        self.rows, self.settings = rows, settings
        self.sets += 1

    def upload(self, table: int, stream: int) -> None:
        self.uploads += 1


class FakeCommunicator:
    """As `parallelkit._cuda.Communicator`, with kernels that run at once."""

    def __init__(
        self,
        runtime: Runtime,
        rank: int,
        size: int,
        device: Any,
        controls: Sequence[int],
        blocks: int,
        timeout_seconds: float,
        algorithm: int,
        virtual: Any = None,
    ) -> None:
        assert len(controls) == size and blocks > 0
        self.runtime, self.rank, self.size = runtime, rank, size
        self.meeting = runtime.meetings.setdefault(tuple(controls), _Meeting(size))
        self.found: list[tuple[str, int]] = []
        runtime.calls[rank] = []
        self.closed = False

    @staticmethod
    def control_bytes(size: int, blocks: int) -> int:
        return 4096

    def add_segment(self, addresses: Sequence[int], nbytes: int, multicast: int) -> None:
        self.meeting.segments[self.rank][addresses[self.rank]] = (*addresses, nbytes)

    def remove_segment(self, address: int) -> None:
        del self.meeting.segments[self.rank][address]

    def tensors(self, tensors: Sequence[tuple[int, int, int]]) -> FakeList:
        return FakeList(tensors)

    def _meet(self, said: Any) -> list[Any]:
        assert not self.closed
        meeting = self.meeting
        meeting.said[self.rank] = said
        meeting.barrier.wait()
        heard = list(meeting.said)
        meeting.barrier.wait()
        return heard

    def _open(self, name: str, values: Any, call: Call, stream: int, weight_at: int = 0) -> Any:
        """(everybody's values, coefficients, total), or None where kernels refuse."""
        _, _, weight, scale, reduction, fault = call
        assert stream == STREAM and not fault
        self.runtime.calls[self.rank].append(name)
        if weight_at:
            weight = float(at(weight_at, 8, torch.float64))
        heard = self._meet((values, weight, scale))
        weights = [h[1] for h in heard]
        total = sum(weights)
        if not math.isfinite(total) or min(weights) < 0:
            self.found.append(("bad_weight", -1))
            self._meet(None)
            return None
        factors = []
        for _, w, s in heard:
            part = w if reduction == 0 else 1.0
            share = s if reduction == TOTAL else (s * part / total if total else 0.0)
            factors.append(None if w == 0 and reduction != TOTAL else share)
        return [h[0] for h in heard], factors, total

    def _sums(self, opened: Any) -> list[torch.Tensor]:
        everybody, factors, _ = opened
        sums = [torch.zeros(len(t), dtype=torch.float64) for t in everybody[0]]
        for tensors, factor in zip(everybody, factors, strict=True):
            for total, tensor in zip(sums, tensors, strict=True):
                if factor is not None:
                    total += factor * tensor.double()
        self._meet(None)  # everybody has read
        return sums

    def all_reduce(
        self, tensors: FakeList, call: Call, stream: int, *, weight_at: int = 0, total_at: int
    ) -> None:
        assert tensors.uploads or not tensors.table_bytes
        opened = self._open("all_reduce", tensors.tensors, call, stream, weight_at)
        if opened is None:
            return
        for tensor, total in zip(tensors.tensors, self._sums(opened), strict=True):
            tensor.copy_(total)
        at(total_at, 8, torch.float64).fill_(opened[2])

    def reduce_scatter(
        self,
        tensors: FakeList,
        shard: int,
        unit: int,
        call: Call,
        stream: int,
        *,
        weight_at: int = 0,
        total_at: int,
    ) -> None:
        opened = self._open("reduce_scatter", tensors.tensors, call, stream, weight_at)
        if opened is None:
            return
        (flat,) = tensors.tensors
        start, stop = pk.shard_bounds(len(flat) * flat.itemsize // unit, self.size, self.rank)
        each = unit // flat.itemsize
        mine = self._sums(opened)[0][start * each : stop * each]
        at(shard, len(mine) * flat.itemsize, flat.dtype).copy_(mine)
        at(total_at, 8, torch.float64).fill_(opened[2])

    def all_gather(self, tensors: FakeList, shard: int, unit: int, call: Call, stream: int) -> None:
        (flat,) = tensors.tensors
        each = unit // flat.itemsize
        start, stop = pk.shard_bounds(len(flat) // each, self.size, self.rank)
        mine = at(shard, (stop - start) * unit, flat.dtype).clone()
        everybody, _, _ = self._open("all_gather", mine, call, stream)
        flat.copy_(torch.cat(everybody))
        self._meet(None)

    # -- the optimizer's pass ----------------------------------------------------------------------

    def _peers(self, address: int, shared: bool) -> list[int]:
        """Where each rank has what lies here at `address`."""
        if not shared:
            return [address]
        for own, (*addresses, nbytes) in self.meeting.segments[self.rank].items():
            if own <= address < own + nbytes:
                return [a + address - own for a in addresses]
        raise AssertionError("not in a segment")

    def _gradient(self, step: FakeStep, piece: Any, opened: Any) -> torch.Tensor:
        parameter, _, first, count, *_ = piece
        _, grad, code, _, _ = step.rows[parameter]
        dtype = DTYPES[code]
        shared = step.parameters[parameter][4]
        places = [grad] if step.averaged else self._peers(grad, shared)
        factors = [opened[1][self.rank]] if step.averaged else opened[1]
        total = torch.zeros(count, dtype=torch.float64)
        for place, factor in zip(places, factors, strict=True):
            if factor is not None:
                start = place + first * dtype.itemsize
                total += factor * at(start, count * dtype.itemsize, dtype).double()
        return total

    def gradient_norm(self, step: FakeStep, call: Call, stream: int, *, squares_at: int) -> None:
        opened = self._open("gradient_norm", None, call, stream)
        sums = [0.0, 0.0]
        for piece in step.pieces:
            in_norm = step.parameters[piece[0]][2]
            if step.rows[piece[0]][0] and in_norm != InNorm.ELSEWHERE:
                sums[in_norm] += float(self._gradient(step, piece, opened).square().sum())
        heard = self._meet(sums)
        at(squares_at, 16, torch.float64).copy_(torch.tensor(heard, dtype=torch.float64).sum(0))

    def sharded_step(
        self,
        step: FakeStep,
        call: Call,
        stream: int,
        *,
        squares_at: int = 0,
        max_norm: float,
        skip_nonfinite: bool,
        report_at: int,
    ) -> None:
        assert step.uploads == step.sets
        opened = self._open("sharded_step", None, call, stream)
        norm = float(at(squares_at, 16, torch.float64).sum().sqrt()) if squares_at else math.nan
        skip = skip_nonfinite and not math.isfinite(norm)
        at(report_at, 24, torch.float64).copy_(torch.tensor([norm, float(skip), opened[2]]))
        clip = min(1.0, max_norm / (norm + 1e-6)) if max_norm else 1.0
        written = []
        for piece in [] if skip else step.pieces:
            parameter, _, first, count, master, kind, moments, _ = piece
            address, _, _, number, counted = step.rows[parameter]
            if not address:
                continue
            code, _, _, shared, _ = step.parameters[parameter]
            dtype = DTYPES[code]
            assert kind == 0, "the fake keeps moments as they are computed"
            lr, beta1, beta2, eps, decay, maximize = step.settings[number]
            options = {"lr": lr, "betas": (beta1, beta2), "eps": eps, "weight_decay": decay}
            steps = int(at(counted, 4, torch.float32)) + 1
            setting = Setting.of({**options, "maximize": maximize}, steps)
            gradient = self._gradient(step, piece, opened) * clip
            stored = [at(m, count * 4, torch.float32) if m else None for m in moments]
            wide = [None if m is None else m.double() for m in stored]
            size = dtype.itemsize
            own = at(address + first * size, count * size, dtype)
            value = (at(master, count * 4, torch.float32) if master else own).double()
            update_(value, gradient, wide[0], wide[1], wide[2], setting)
            for store, new in zip(stored, wide, strict=True):
                if store is not None:
                    store.copy_(new)
            if master:
                at(master, count * 4, torch.float32).copy_(value)
            for place in self._peers(address, shared):
                written.append((at(place + first * size, count * size, dtype), value))
        self._meet(None)  # everybody has read
        for out, value in written:
            out.copy_(value)
        for address, _, _, _, counted in step.rows:
            if address and not skip:
                at(counted, 4, torch.float32).add_(1)
        self._meet(None)

    def barrier(self, stream: int) -> None:
        assert stream == STREAM
        self.runtime.calls[self.rank].append("barrier")
        self._meet(None)

    def status(self) -> tuple[int, int]:
        if injected := self.runtime.statuses.get(self.rank):
            outcome, rank = injected.pop(0)
            return OUTCOMES.index(outcome), rank
        outcome, rank = self.found.pop(0) if self.found else ("done", -1)
        return OUTCOMES.index(outcome), rank

    def abort(self, outcome: int, rank: int) -> None:
        self.runtime.aborted.append((self.rank, OUTCOMES[outcome], rank))
        self.meeting.barrier.abort()

    def close(self) -> None:
        self.closed = True


STREAM = 77


class Stream:
    """A stream, whose work is done when it is given."""

    cuda_stream = STREAM

    def __init__(self, device: Any = None) -> None: ...

    def wait_stream(self, other: Stream) -> None: ...

    def wait_event(self, event: Stream) -> None: ...

    def record_event(self) -> Stream:
        return self

    def query(self) -> bool:
        return True

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None: ...


def _tensor_of(slab: Slab, device: torch.device) -> torch.Tensor:
    return at(slab.address, slab.nbytes, torch.uint8, keep=slab)


def install(monkeypatch: Any, runtime: Runtime) -> Runtime:
    """Let torch.cuda's streams be the fake ones."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream())
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: runtime.capturing)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    monkeypatch.setattr(cuda_peer, "as_tensor", _tensor_of)
    return runtime


def peers(
    runtime: Any, fn: Callable[[pk.Group], Any], size: int, timeout: float = 20.0
) -> list[Any]:
    """`virtual_ranks` over the transport of GPUs, on fake ones.

    `runtime` may also be the extension itself where that was compiled with the host as its GPU.
    """
    slabs = _Shared(size, lambda nbytes: [runtime.Memory.plain(0, nbytes) for _ in range(size)])
    together = runtime.VirtualRanks(size)

    def rank(host: pk.Group) -> Any:
        ask = slabs.mapper(host.rank)

        def mapper(nbytes: int) -> Slab:
            memories = ask(nbytes)
            return Slab([m.address for m in memories], host.rank, nbytes, memories)

        here = torch.device("cpu")
        transport = CudaPeer(runtime, host._transport, here, 2, mapper, "auto", together)
        with pk.Group._over(host.rank, size, here, host.timeout, transport) as group:
            return fn(group)

    assert cpu is not None
    return virtual_ranks(rank, size, timeout=timeout)

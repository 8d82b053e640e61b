"""Device memory that every rank of a host reaches, made in the first of these ways that works:

    symmetric memory   torch's own; its module is private to torch, and wrapped here alone
    virtual memory     the driver's, whose file descriptors the ranks hand each other
    CUDA IPC           cudaMalloc, opened by handle

A way that fails on one rank fails on all, for a reason they all know. None of them exports memory
of torch's caching allocator, so that its settings (expandable segments, for one) make no
difference.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .mapping import Gather, MappingError, all_or_none

__all__ = ["PeerMapper", "Slab", "SlabMapper", "as_tensor"]

_HANDOVER_SECONDS = 30.0  # for a descriptor to come from a rank that has said where it listens


class Slab:
    """One rank's memory, and where this rank reaches the same memory of each peer.

    Args:
        addresses: by rank.
        rank: this one.
        nbytes: of each.
        owners: whatever keeps the memory and its mappings while it lives.
        multicast: an address at which the switch between GPUs reaches all of them at once, or 0.
    """

    def __init__(
        self, addresses: Sequence[int], rank: int, nbytes: int, owners: Any, multicast: int = 0
    ) -> None:
        self.addresses, self.nbytes, self.owners = tuple(addresses), nbytes, owners
        self.multicast, self._rank = multicast, rank

    @property
    def address(self) -> int:
        """Of this rank's own."""
        return self.addresses[self._rank]

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """What makes a tensor of it; the tensor keeps the slab."""
        return {
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
        }


SlabMapper = Callable[[int], Slab]  # bytes -> zeroed memory of so many on each rank; collective


class _Facts(NamedTuple):
    """What a rank tells the others of its GPU."""

    uuid: str
    versions: tuple[int, int]  # of CUDA's runtime and driver
    shareable: bool
    unreachable: str  # the first peer among the GPUs that it sees which it cannot reach


class PeerMapper:
    """Maps slabs for the ranks of one host; making one is collective, and so is each call.

    Args:
        native: parallelkit._cuda.
        rank: in the group, which is all on one host.
        device: of this rank.
        gather: every rank's object, by rank.
        process_group: the same ranks; None for this rank alone.

    Raises:
        MappingError: these GPUs cannot reach each other's memory; on every rank.
    """

    def __init__(
        self,
        native: Any,
        rank: int,
        device: torch.device,
        gather: Gather,
        process_group: dist.ProcessGroup | None,
    ) -> None:
        self._native, self._rank, self._device = native, rank, device
        self._gather, self._process_group = gather, process_group
        facts = native.device_facts(device.index)
        uuids = gather(facts["uuid"])
        self._size = len(uuids)
        mine = _Facts(
            facts["uuid"], native.versions(), bool(facts["vmm_fd"]), self._unreachable(uuids)
        )
        self._facts = [_Facts(*theirs) for theirs in gather(tuple(mine))]
        for peer, theirs in enumerate(self._facts):
            if theirs.versions != self._facts[0].versions:
                raise MappingError(
                    f"CUDA differs between ranks, runtime and driver are {theirs.versions} on rank "
                    f"{peer} and {self._facts[0].versions} on rank 0"
                )
            if theirs.unreachable:
                raise MappingError(f"no peer access, {theirs.unreachable} [rank {peer}]")
        self._way: SlabMapper | None = None

    @property
    def shares_gpu(self) -> bool:
        """Whether two of the ranks are on one GPU, and their kernels take turns."""
        return len({facts.uuid for facts in self._facts}) < self._size

    def _unreachable(self, uuids: Sequence[str]) -> str:
        """A GPU this process does not see (CUDA_VISIBLE_DEVICES a rank) is judged by trying."""
        native = self._native
        for index in range(native.device_count()):
            peer = native.device_facts(index)["uuid"]
            if peer in uuids and not native.can_access_peer(self._device.index, index):
                return f"GPU {self._device.index} cannot reach GPU {index}"
        return ""

    def __call__(self, nbytes: int) -> Slab:
        """Zeroed memory of `nbytes` a rank; MappingError on every rank where there is none."""
        if self._size == 1:
            memory = self._native.Memory.plain(self._device.index, nbytes)
            return Slab([memory.address], 0, nbytes, memory)
        if self._way is not None:
            return self._way(nbytes)
        reasons = []
        for way in (self._symmetric, self._virtual, self._ipc):
            try:
                slab = way(nbytes)
            except MappingError as error:
                reasons.append(str(error))
            else:
                self._way = way
                return slab
        raise MappingError("; ".join(reasons))

    # -- the ways ------------------------------------------------------------------------------

    def _symmetric(self, nbytes: int) -> Slab:
        way = "symmetric memory"
        if self.shares_gpu:
            raise MappingError(f"{way}: two ranks are on one GPU")

        def allocate() -> tuple[Any, None]:
            module = importlib.import_module("torch.distributed._symmetric_memory")
            flat = module.empty(nbytes, dtype=torch.uint8, device=self._device).zero_()
            torch.cuda.synchronize(self._device)
            return (module, flat), None

        def meet() -> tuple[Any, None]:
            return module.rendezvous(flat, self._process_group), None

        (module, flat), _ = all_or_none(self._gather, way, allocate)
        handle, _ = all_or_none(self._gather, way, meet)
        # The pointers are those of torch's allocation, in which the tensor may lie anywhere.
        offset = getattr(handle, "offset", 0)
        addresses = [pointer + offset for pointer in handle.buffer_ptrs]
        multicast = handle.multicast_ptr or 0  # which has the offset in it
        return Slab(addresses, self._rank, nbytes, (flat, handle), multicast)

    def _virtual(self, nbytes: int) -> Slab:
        way = "virtual memory"
        for rank, facts in enumerate(self._facts):
            if not facts.shareable:
                raise MappingError(f"{way}: cannot be exported [rank {rank} of {self._size}]")
        native, index = self._native, self._device.index
        with contextlib.ExitStack() as stack:

            def allocate() -> tuple[Any, Any]:
                memory = native.Memory.shareable(index, nbytes)
                descriptor = memory.export_fd()
                stack.callback(os.close, descriptor)
                listener = stack.enter_context(_listener(self._size))
                return (memory, descriptor, listener), listener.getsockname()

            def hand_over() -> tuple[Any, None]:
                peers = {}
                for peer, received in _handed_over(listener, names, self._rank, descriptor):
                    stack.callback(os.close, received)
                    peers[peer] = native.Memory.open_fd(index, received, nbytes)
                return peers, None

            (memory, descriptor, listener), names = all_or_none(self._gather, way, allocate)
            peers, _ = all_or_none(self._gather, way, hand_over)
        return self._slab(memory, peers, nbytes)

    def _ipc(self, nbytes: int) -> Slab:
        way, native, index = "CUDA IPC", self._native, self._device.index

        def allocate() -> tuple[Any, bytes]:
            memory = native.Memory.plain(index, nbytes)
            return memory, memory.ipc_handle()

        def reach() -> tuple[Any, None]:
            return {
                peer: native.Memory.open_ipc(index, handle, nbytes)
                for peer, handle in enumerate(handles)
                if peer != self._rank
            }, None

        memory, handles = all_or_none(self._gather, way, allocate)
        peers, _ = all_or_none(self._gather, way, reach)
        _exported.append(memory)
        return self._slab(memory, peers, nbytes)

    def _slab(self, memory: Any, peers: dict[int, Any], nbytes: int) -> Slab:
        every = {self._rank: memory, **peers}
        addresses = [every[rank].address for rank in range(self._size)]
        return Slab(addresses, self._rank, nbytes, every)


# What was exported by handle must outlive its importers, whose end nobody tells: it stays until
# the process ends.
_exported: list[Any] = []


def _listener(size: int) -> socket.socket:
    """A socket without a file, which peers can connect to before anybody accepts."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(b"\0parallelkit-" + os.urandom(16).hex().encode())
    listener.listen(size)
    listener.settimeout(_HANDOVER_SECONDS)
    return listener


def _handed_over(
    listener: socket.socket, names: Sequence[bytes], rank: int, descriptor: int
) -> Iterator[tuple[int, int]]:
    """Send a descriptor to every peer; (peer, its descriptor) for each, which the caller closes."""
    peers = [peer for peer in range(len(names)) if peer != rank]
    for peer in peers:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sender:
            sender.settimeout(_HANDOVER_SECONDS)
            sender.connect(names[peer])
            socket.send_fds(sender, [rank.to_bytes(4, "little")], [descriptor])
    for _ in peers:
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(_HANDOVER_SECONDS)
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            message, descriptors, _, _ = socket.recv_fds(connection, 4, 1)
            if struct.unpack("3i", credentials)[1] != os.geteuid() or len(descriptors) != 1:
                raise OSError("something that is no peer has sent to this rank")
            yield int.from_bytes(message, "little"), descriptors[0]


def as_tensor(slab: Slab, device: torch.device) -> torch.Tensor:
    """The slab's own bytes as a tensor that keeps it."""
    return torch.as_tensor(slab, device=device)

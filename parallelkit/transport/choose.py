"""Which transport a group gets: decided by what its ranks share, alike on all of them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..errors import InvalidArgumentError
from ..ops import cpu, load_cuda
from . import Transport
from .cuda_peer import CudaPeer
from .hierarchical import Hierarchical
from .mapping import Gather, MappingError
from .peer_memory import PeerMapper
from .process_group import ProcessGroup
from .shared_memory import FileMapper, SharedMemory
from .watch import boot_id, pid_namespace

__all__ = ["choose_transport", "usable_cores"]

ALGORITHMS = ("auto", "ring", "direct", "reference")


def host_identity() -> tuple[str, str, int]:
    """What ranks have in common that can open each other's memory: kernel, process ids and user."""
    return boot_id(), pid_namespace(), os.geteuid() if hasattr(os, "geteuid") else 0


def choose_transport(
    process_group: dist.ProcessGroup | None,
    device: torch.device,
    timeout: timedelta,
    algorithm: str,
    gather: Gather,
) -> Transport:
    """The fastest transport that all ranks can use; collective.

    CPU ranks of one host get shared memory, several hosts with more than one rank somewhere get it
    inside each host. GPUs of one host get each other's memory. Where that cannot be had, with the
    algorithm "reference", without the native extensions and for GPUs of several hosts it is plain
    torch.distributed; a warning says what stood in the way.

    Args:
        process_group: the ranks; None for this one alone.
        device: of the tensors.
        timeout: how long a collective waits.
        algorithm: as in `Group`; "auto" is looked up in PARALLELKIT_ALGORITHM.
        gather: every rank's object, by rank.
    """
    if algorithm == "auto":
        algorithm = os.environ.get("PARALLELKIT_ALGORITHM", "auto")
    on_gpu, lacking = device.type == "cuda", _lacking(device)
    place = host_identity() if on_gpu or not lacking else None
    facts = gather((algorithm, place, os.getpid(), usable_cores(), lacking))
    rank = process_group.rank() if process_group is not None else 0
    algorithms, places, pids, cores, lacks = zip(*facts, strict=True)
    if algorithm not in ALGORITHMS or len(set(algorithms)) > 1:
        raise InvalidArgumentError(
            f"Group: algorithm (or PARALLELKIT_ALGORITHM) must be {' or '.join(ALGORITHMS)} "
            f"and the same on every rank, got {', '.join(algorithms)} on ranks 0 to "
            f"{len(facts) - 1}"
        )
    hosts = _grouped(places)
    members = next(host for host in hosts if rank in host)
    alone = len(hosts) > 1 and len(hosts) == len(facts)
    if algorithm == "reference" or None in places or alone:
        return ProcessGroup(process_group, device, timeout)
    if on_gpu and len(hosts) > 1:  # torch.distributed has its own ways between hosts' GPUs
        return ProcessGroup(process_group, device, timeout)

    def in_shared_memory() -> SharedMemory:
        return SharedMemory(
            members.index(rank),
            len(members),
            [pids[member] for member in members],
            len(set().union(*(cores[member] for member in members))),
            FileMapper(rank, members, gather),
            timeout,
            ring=algorithm == "ring",
        )

    try:
        if on_gpu:
            for peer, lack in enumerate(lacks):
                if lack:
                    raise MappingError(f"{lack} [rank {peer} of {len(lacks)}]")
            return _on_gpus(process_group, device, algorithm, gather, in_shared_memory)
        local = in_shared_memory()
        if len(hosts) == 1:
            return local
        assert process_group is not None
        return Hierarchical(process_group, timeout, hosts, local)
    except MappingError as error:
        if rank == 0:
            warnings.warn(
                f"parallelkit uses torch.distributed between ranks of one host: {error}",
                RuntimeWarning,
                stacklevel=4,
            )
    return ProcessGroup(process_group, device, timeout)


def _lacking(device: torch.device) -> str:
    """What is missing in this process for native collectives on such a device; "" if nothing."""
    if cpu is None:
        return "no CPU extension"
    return load_cuda()[1] if device.type == "cuda" else ""


def _on_gpus(
    process_group: dist.ProcessGroup | None,
    device: torch.device,
    algorithm: str,
    gather: Gather,
    in_shared_memory: Callable[[], SharedMemory],
) -> CudaPeer:
    """The transport of GPUs of one host; MappingError on every rank where they lack memory."""
    native = load_cuda()[0]
    assert native is not None
    rank = process_group.rank() if process_group is not None else 0
    mapper = PeerMapper(native, rank, device, gather, process_group)
    if mapper.shares_gpu and rank == 0:
        warnings.warn(
            "parallelkit: several ranks are on one GPU, where processes take turns; that works, "
            "but slowly (parallelkit.testing.virtual_ranks runs ranks of one GPU together)",
            RuntimeWarning,
            stacklevel=5,
        )
    blocks = gather(native.max_blocks(device.index))
    host = in_shared_memory()
    try:
        return CudaPeer(native, host, device, min(blocks), mapper, algorithm)
    except MappingError:
        host.close()
        raise


def _grouped(places: Sequence[Any]) -> list[list[int]]:
    """Ranks by place, in the order of their first."""
    return [[r for r, p in enumerate(places) if p == place] for place in dict.fromkeys(places)]


def usable_cores() -> set[int]:
    """Numbers of the cores this process may run on; ranks pinned apart count together."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))

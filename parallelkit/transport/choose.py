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
from ..ops import cpu
from . import Transport
from .hierarchical import Hierarchical
from .process_group import ProcessGroup
from .shared_memory import FileMapper, MappingError, SharedMemory
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
    gather: Callable[[Any], list[Any]],
) -> Transport:
    """The fastest transport that all ranks can use; collective.

    Ranks of one host get shared memory, several hosts with more than one rank somewhere get it
    inside each host. Memory that cannot be had, the algorithm "reference", ranks without the native
    extension and other devices mean plain torch.distributed.

    Args:
        process_group: the ranks; None for this one alone.
        device: of the tensors.
        timeout: how long a collective waits.
        algorithm: as in `Group`; "auto" is looked up in PARALLELKIT_ALGORITHM.
        gather: every rank's object, by rank.
    """
    if algorithm == "auto":
        algorithm = os.environ.get("PARALLELKIT_ALGORITHM", "auto")
    native = cpu is not None and device.type == "cpu"
    facts = gather((algorithm, host_identity() if native else None, os.getpid(), usable_cores()))
    rank = process_group.rank() if process_group is not None else 0
    algorithms, places, pids, cores = zip(*facts, strict=True)
    if algorithm not in ALGORITHMS or len(set(algorithms)) > 1:
        raise InvalidArgumentError(
            f"Group: algorithm (or PARALLELKIT_ALGORITHM) must be {' or '.join(ALGORITHMS)} "
            f"and the same on every rank, got {', '.join(algorithms)} on ranks 0 to "
            f"{len(facts) - 1} [rank {rank} of {len(facts)}]"
        )
    hosts = _grouped(places)
    members = next(host for host in hosts if rank in host)
    alone = len(hosts) > 1 and len(hosts) == len(facts)
    if algorithm == "reference" or None in places or alone:
        return ProcessGroup(process_group, device, timeout)
    try:
        local = SharedMemory(
            members.index(rank),
            len(members),
            [pids[member] for member in members],
            len(set().union(*(cores[member] for member in members))),
            FileMapper(rank, members, gather),
            timeout,
            ring=algorithm == "ring",
        )
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


def _grouped(places: Sequence[Any]) -> list[list[int]]:
    """Ranks by place, in the order of their first."""
    return [[r for r, p in enumerate(places) if p == place] for place in dict.fromkeys(places)]


def usable_cores() -> set[int]:
    """Numbers of the cores this process may run on; ranks pinned apart count together."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))

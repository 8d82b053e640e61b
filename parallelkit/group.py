"""Groups: the ranks that take part, and how they reach each other."""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import pickle
import weakref
import zlib
from collections.abc import Iterable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from . import rendezvous
from .agreement import refuse, refuse_instead
from .arguments import as_size
from .errors import InvalidArgumentError, InvalidTypeError, ParallelKitError, UsageError
from .transport import CLOSED, Transport
from .transport.choose import choose_transport
from .transport.cuda_peer import CudaPeer

__all__ = ["Group", "default_group", "group_of_id", "init"]

_DEFAULT_TIMEOUT = timedelta(minutes=5)


class Group:
    """The ranks that take part in a collective, and how they reach each other.

    Making a group is collective over its ranks. It is usable as a context manager, which closes it.

    Args:
        process_group: any torch.distributed process group; default: all ranks, or this process
            alone where torch.distributed does not run.
        device: of the tensors; default: the CPU, or the current GPU for an nccl group.
        timeout: how long a collective waits for a late rank. Default: 5 minutes.
        algorithm: "auto", "ring", "direct" (each rank reads its shard from all) or "reference"
            (plain torch.distributed). PARALLELKIT_ALGORITHM sets what "auto" means. The results of
            all but "reference" are equal to the bit.

    Attributes:
        rank: this process's number in the group, from 0.
        size: the number of ranks.
        device: as given.
        id: a number of its own in this process.
        mesh: the one of `from_mesh`; else None.
        scratch: memory of `empty` that nobody uses now, for parallelkit.nn.
        timeout: as given.
        transport: "single", "shared-memory" (CPU ranks of one host), "cuda-peer" (GPUs of one host
            that reach each other), "hierarchical" (shared memory inside each of several hosts) or
            "process-group".

    Raises:
        InvalidArgumentError, InvalidTypeError: a bad device or timeout, or an algorithm that is
            unknown or differs between ranks; on every rank.
        UsageError: in a forked child of a rank.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        device: torch.device | str | None = None,
        timeout: timedelta | None = None,
        algorithm: str = "auto",
    ) -> None:
        if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
            raise InvalidTypeError(  # on this rank: who the others are is not known
                "Group: process_group must be a torch.distributed.ProcessGroup of which this "
                f"process is a member, got {process_group!r}"
            )
        if process_group is None and dist.is_initialized():
            process_group = dist.group.WORLD
        if _child_of_rank and process_group is not None:
            raise UsageError(
                "Group: torch.distributed belongs to the parent of this forked process; "
                "start processes that take part as ranks of their own, by torchrun"
            )
        self._process_group = process_group
        self.rank = process_group.rank() if process_group is not None else 0
        self.size = process_group.size() if process_group is not None else 1
        self.timeout = _DEFAULT_TIMEOUT if timeout is None else timeout
        fault: ParallelKitError | None = None
        try:
            self.device = _device(device, process_group)
            _check_options(self.timeout, algorithm)
        except ParallelKitError as error:
            fault = error
        for rank, theirs in enumerate(self._gather_objects(fault)):
            if theirs is not None:
                raise type(theirs)(f"Group: {theirs} [rank {rank} of {self.size}]")
        self._set_transport(
            choose_transport(
                process_group, self.device, self.timeout, algorithm, self._gather_objects
            )
        )

    @classmethod
    def from_mesh(
        cls,
        device_mesh: DeviceMesh,
        *,
        device: torch.device | str | None = None,
        timeout: timedelta | None = None,
        algorithm: str = "auto",
    ) -> Group:
        """A group over a one-dimensional DeviceMesh, such as `mesh["dp"]`; else as `Group`.

        Raises:
            As `Group`; InvalidArgumentError also where the mesh has several dimensions.
        """
        if not isinstance(device_mesh, DeviceMesh):
            raise InvalidTypeError(
                "Group.from_mesh: device_mesh must be a DeviceMesh, got "
                f"{type(device_mesh).__name__}"
            )
        if device_mesh.ndim != 1:
            raise InvalidArgumentError(
                f"Group.from_mesh: device_mesh must have one dimension, got {device_mesh.ndim}; "
                'take one of them, for example mesh["dp"]'
            )
        group = device_mesh.get_group()
        made = cls(group, device=device, timeout=timeout, algorithm=algorithm)
        made.mesh = device_mesh
        return made

    @classmethod
    def _over(
        cls, rank: int, size: int, device: torch.device, timeout: timedelta, transport: Transport
    ) -> Group:
        """A group over a transport that there is."""
        group = cls.__new__(cls)
        group._process_group = None
        group.rank, group.size, group.device, group.timeout = rank, size, device, timeout
        group._set_transport(transport)
        return group

    @functools.cached_property
    def _hosts(self) -> Group:
        """The same ranks, for small numbers that no GPU has to wait for: tensors on the CPU."""
        if not isinstance(self._transport, CudaPeer):
            return self
        cpu, transport = torch.device("cpu"), self._transport.host
        return Group._over(self.rank, self.size, cpu, self.timeout, transport)

    def _set_transport(self, transport: Transport) -> None:
        self._transport = transport
        self.transport = transport.name
        self._unusable: str | None = None
        self.mesh: DeviceMesh | None = None
        self.scratch: dict[torch.dtype, list[Any]] = {}
        self.id = next(_ids)
        _alive[self.id] = self

    def _gather_objects(self, mine: Any, *called: str) -> list[Any]:
        """Every rank's object, by rank: over the transport once there is one.

        Args:
            mine: this rank's, to be pickled.
            called: what for, for an error: a call that has a name of its own, and what with.
        """
        if hasattr(self, "_transport"):
            called = called or ("an exchange of objects",)
            subject = zlib.crc32(called[0].encode())
            transport = self._usable()
            reply, messages = transport.exchange(pickle.dumps(mine), subject)
            if reply.outcome != "done":
                raise refuse(transport, self.rank, reply.outcome, called)
            return [pickle.loads(message) for message in messages]
        if self._process_group is None:
            return [mine]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, mine, group=self._process_group)
        return found

    def _usable(self) -> Transport:
        """The transport, or an error that says why there is none."""
        if self._unusable is not None:
            raise UsageError(f"{self._unusable} [rank {self.rank} of {self.size}]")
        return self._transport

    def empty(
        self, *shape: int | Sequence[int], dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """A tensor in memory that every rank of the host reaches directly; collective.

        Collectives on it copy nothing. Its values are undefined, it lives on `device`, and it stays
        valid after `close()`: the mapping ends with its last tensor.

        Args:
            shape: sizes as in torch.empty, `empty(3, 4)` or `empty((3, 4))`; equal on every rank.
            dtype: default float32; equal on every rank.

        Raises:
            CollectiveMismatchError: ranks disagree on shape or dtype. All of these on every rank.
            InvalidArgumentError, InvalidTypeError: a size that is none, or no dtype.
            MappingError: no room for it (a ParallelKitError); on every rank.
        """
        transport = self._usable()
        try:
            sizes = _sizes(shape, dtype)
        except ParallelKitError as fault:
            raise refuse_instead(self, fault) from fault
        wanted = "Group.empty", f"{dtype}{list(sizes)}"
        if self.size > 1 and len(set(self._gather_objects(wanted, *wanted))) > 1:
            raise refuse(transport, self.rank, "mismatch", wanted)
        return transport.empty(sizes, dtype)

    def barrier(self) -> None:
        """Wait until every rank is here; errors as for the collectives."""
        transport = self._usable()
        reply = transport.barrier()
        if reply.outcome != "done":
            raise refuse(transport, self.rank, reply.outcome, ["Group.barrier"])

    def close(self) -> None:
        """Leave the group; a second call does nothing. Peers that wait for this rank raise."""
        if self._unusable is None:
            self._unusable = CLOSED
            self._transport.close()
            self.scratch.clear()

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        """The same group: a copy of a module talks to the same ranks."""
        return self

    def __repr__(self) -> str:
        return f"Group(rank {self.rank} of {self.size}, {self.transport}, {self.device})"


def _check_options(timeout: timedelta, algorithm: str) -> None:
    if not isinstance(timeout, timedelta):
        raise InvalidTypeError(f"timeout must be a timedelta, got {type(timeout).__name__}")
    if timeout <= timedelta(0):
        raise InvalidArgumentError(f"timeout must be above 0, got {timeout}")
    if not isinstance(algorithm, str):
        raise InvalidTypeError(f"algorithm must be a string, got {type(algorithm).__name__}")


_ids = itertools.count()  # numbers of this process: what a compiled graph calls a group by
_alive: weakref.WeakValueDictionary[int, Group] = weakref.WeakValueDictionary()
_mesh_groups: dict[DeviceMesh, Group] = {}
_default: Group | None = None


_child_of_rank = False


def _forget_in_child() -> None:
    """A forked child shares the parent's memory but is no rank: it may read tensors, not talk."""
    global _child_of_rank
    _child_of_rank = dist.is_initialized()
    for group in _alive.values():
        group._unusable = "this group belongs to the parent of this forked process"


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)


def init(device: torch.device | str | None = None, timeout: timedelta = _DEFAULT_TIMEOUT) -> Group:
    """The group of all ranks; a second call gives the same one.

    Reads torchrun's variables (RANK, WORLD_SIZE, ...). Starts torch.distributed if nobody has (gloo
    for the CPU, nccl for CUDA) and uses it if it runs; with none of the variables set, the group
    has size 1. When the group is broken or closed, a new one is made.

    Args:
        device: default: the CPU, or this rank's GPU where CUDA works and torch.distributed does not
            say otherwise. Ranks beyond the number of GPUs share them, over gloo.
        timeout: how long a collective waits for a late rank. Default: 5 minutes.

    Raises:
        InvalidArgumentError, InvalidTypeError: as `Group`; or the group of all ranks exists, on
            another device.
        CollectiveTimeoutError: rank 0 did not come.
    """
    global _default
    wanted = None if device is None else _device(device, None)
    if _default is not None and _default._unusable is None and not _default._transport.broken:
        if wanted is not None and wanted.type != _default.device.type:
            raise InvalidArgumentError(
                f"init: device is {wanted}, but the group of all ranks exists and is on "
                f"{_default.device}; close it first, or make another with pk.Group(device=...)"
            )
        return _default
    if not dist.is_initialized() and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        device = _start(device, timeout)
    _default = Group(device=device, timeout=timeout)
    return _default


def _start(device: torch.device | str | None, timeout: timedelta) -> torch.device | str | None:
    """Start torch.distributed over torchrun's ranks; the device, one GPU where it was any."""
    local, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if gpus and (device is None or torch.device(device) == torch.device("cuda")):
        device = torch.device("cuda", local % gpus)
    on_gpu = device is not None and torch.device(device).type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)  # NCCL's and torch.distributed's own tensors go there
    shared = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > gpus  # which NCCL refuses
    rendezvous.start("nccl" if on_gpu and not shared else "gloo", timeout)
    atexit.register(_leave_at_exit)  # Gloo's threads may not outlive the interpreter
    return device


def _leave_at_exit() -> None:
    """End what `init` started, where the program did not.

    A Gloo thread that still lets go of a tensor when the interpreter ends aborts the process, so
    the last reference to the process group goes first; its end waits for its threads.
    """
    if _default is not None:
        _default.close()
        _default._process_group = None
    if dist.is_initialized():
        dist.destroy_process_group()


def _existing(device: torch.device) -> torch.device:
    """A device that ranks can be on, here and now; of GPUs the current one where none is named."""
    if device.type not in ("cpu", "cuda") or (
        device.type == "cuda" and not torch.cuda.is_available()
    ):
        raise InvalidArgumentError(
            f"device must be cpu, or cuda where CUDA works, got {device}; `parallelkit doctor` "
            "tells what is there"
        )
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def default_group(group: Group | DeviceMesh | None) -> Group:
    """`group`, the one over a 1-D mesh (made once, collective), or what `init` gives."""
    if group is None:
        return init()
    if isinstance(group, Group):
        return group
    if not isinstance(group, DeviceMesh):
        raise InvalidTypeError(
            f"group must be a parallelkit.Group or a DeviceMesh, got {type(group).__name__}; "
            "pk.Group(process_group) makes one"
        )
    made = _mesh_groups.get(group)
    if made is None or made._unusable is not None or made._transport.broken:
        made = _mesh_groups[group] = Group.from_mesh(group)
    return made


def group_of_id(number: int) -> Group:
    """The group whose `id` this is."""
    return _alive[number]


def _device(device: torch.device | str | None, group: dist.ProcessGroup | None) -> torch.device:
    if device is not None:
        try:
            return _existing(torch.device(device))
        except (RuntimeError, TypeError):  # torch's, of a name that is none
            raise InvalidArgumentError(
                f"device must name a device, such as cpu or cuda:0, got {device!r}"
            ) from None
    if group is not None and "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _sizes(shape: tuple[int | Sequence[int], ...], dtype: torch.dtype) -> tuple[int, ...]:
    """The shape that `Group.empty` was given, once it is one."""
    if not isinstance(dtype, torch.dtype):
        raise InvalidTypeError(f"Group.empty: dtype must be a torch.dtype, got {dtype!r}")
    if len(shape) == 1 and isinstance(shape[0], Iterable):
        shape = tuple(shape[0])
    return tuple(as_size("Group.empty", "a size", size) for size in shape)

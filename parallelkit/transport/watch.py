"""Which rank is to blame when a torch.distributed collective does not end.

Gloo reports a socket, not a rank, and a rank that merely waits for a broken neighbour reports
nothing until its timeout. So a waiting rank looks at the processes of its own host, and once
it gives up it says so in the store of the job: who does not answer there is the one.
"""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..errors import CollectiveTimeoutError, PeerLostError

__all__ = ["Watch", "boot_id", "pid_namespace"]

_SLICE = timedelta(seconds=0.2)  # how often a waiting rank looks around
_ANSWER_SECONDS = 0.5  # how long the others have to answer


def boot_id() -> str:
    """What ranks of one running kernel share, whatever their host is called."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return f"{sys.platform}-{os.getpid()}"


def pid_namespace() -> str:
    """What processes that see each other's ids share."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


class Watch:
    """Waits for collectives of one group and names the rank that fails them."""

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta) -> None:
        self._rank, self._size, self._timeout = group.rank(), group.size(), timeout
        self._is_nccl = dist.get_backend(group) == "nccl"
        here = (boot_id(), pid_namespace())
        found: list[Any] = [None] * self._size
        dist.all_gather_object(found, (here, os.getpid()), group=group)
        self._processes = {}  # rank -> pidfd, of this host's other ranks
        if hasattr(os, "pidfd_open"):
            self._processes = {
                rank: os.pidfd_open(pid)
                for rank, (there, pid) in enumerate(found)
                if there == here and rank != self._rank
            }
        # torch has no public way to the store it was started with.
        store = dist.distributed_c10d._get_default_store()
        self._store = dist.distributed_c10d.PrefixStore(f"parallelkit/{group.group_name}/", store)

    def close(self) -> None:
        """Let go of the processes watched."""
        for descriptor in self._processes.values():
            os.close(descriptor)
        self._processes = {}

    def finish(self, work: dist.Work) -> None:
        """Wait for `work`; PeerLostError or CollectiveTimeoutError if it cannot end well."""
        if self._is_nccl:  # orders streams at once; its own watchdog has the deadline
            work.wait()
            return
        deadline = time.monotonic() + self._timeout.total_seconds()
        while True:
            try:
                work.wait(_SLICE)
                return
            except RuntimeError as error:
                if work.is_completed():
                    self._lost(f"torch.distributed: {_first_line(error)}")
            if self._dead() is not None or self._given_up():
                self._lost("its peers gave up")
            if time.monotonic() >= deadline:
                self._late()

    def _dead(self) -> int | None:
        """A rank of this host whose process has ended."""
        for rank, descriptor in self._processes.items():
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            if poll.poll(0):
                return rank
        return None

    def _lost(self, why: str) -> None:
        dead = self._dead()
        rank = dead if dead is not None else self._silent()
        if dead is not None:
            self._silent(wait=False)
        who = f"rank {rank} is gone" if rank >= 0 else "the connection to a peer was lost"
        raise PeerLostError(f"{who} ({why}) {self._whose()}", rank)

    def _late(self) -> None:
        rank = self._silent()
        late = f"rank {rank}" if rank >= 0 else "a peer"
        raise CollectiveTimeoutError(
            f"{late} did not arrive within {self._timeout.total_seconds():g} s {self._whose()}",
            rank,
        )

    def _whose(self) -> str:
        return (
            f"[rank {self._rank} of {self._size}]; the group is broken, "
            "restart the lost rank and call pk.init() on every rank"
        )

    def _given_up(self) -> bool:
        """Whether some rank has said in the store that it gave up."""
        return bool(_within(_ANSWER_SECONDS, lambda: self._store.check(["broken"]), False))

    def _silent(self, wait: bool = True) -> int:
        """Say that this rank gave up; the first rank that does not say so too, or -1."""

        def ask() -> int:
            self._store.set("broken", "1")
            self._store.set(f"gave-up/{self._rank}", "1")
            missing = [rank for rank in range(self._size) if rank != self._rank]
            deadline = time.monotonic() + _ANSWER_SECONDS
            while missing and wait and time.monotonic() < deadline:
                time.sleep(0.05)
                missing = [r for r in missing if not self._store.check([f"gave-up/{r}"])]
            return missing[0] if missing else -1

        # The store does not answer when the process that holds it is the one that stopped; started
        # by hand that is rank 0 (under torchrun it is the agent).
        return int(_within(_ANSWER_SECONDS + 0.3, ask, 0 if self._rank != 0 else -1))


def _within(seconds: float, ask: Any, otherwise: Any) -> Any:
    """ask(), or `otherwise` when it fails or takes too long: a store has no deadline of its own."""
    answers: list[Any] = []

    def run() -> None:
        try:
            answers.append(ask())
        except RuntimeError:
            answers.append(otherwise)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else otherwise


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__

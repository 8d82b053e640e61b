"""Who is to blame when a collective does not end, and how the ranks come to say the same of it.

Gloo reports a socket, not a rank, and a rank that merely waits for a broken neighbour reports
nothing until its timeout. So ranks speak through the store of the job. The first to give up calls;
every rank's listener answers, even while the rank computes; who does not answer is dead or stopped,
and who has begun fewer collectives than the others is late. The first verdict counts.
"""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from ..errors import CollectiveTimeoutError, PeerLostError

__all__ = ["BREAKING", "Watch", "boot_id", "failure", "pid_namespace"]

_SLICE_SECONDS = 0.1  # how often a waiting rank, and a listener, looks around
_ANSWER_SECONDS = 0.35  # how long the others have to answer a call
_STORE_SECONDS = 0.85  # how long the store has for all of it: it may be gone itself

BREAKING = ("timeout", "peer_lost", "interrupted")  # outcomes after which a group is broken

T = TypeVar("T")


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


def failure(
    kind: str, culprit: int, rank: int, size: int, timeout: timedelta
) -> PeerLostError | CollectiveTimeoutError:
    """The error of a broken group, as every transport words it.

    Args:
        kind: one of BREAKING.
        culprit: the rank that broke the group; -1: not known.
        rank: this rank.
        size: of the group.
        timeout: of the group.
    """
    who = f"rank {culprit}" if culprit >= 0 else "a peer"
    what = {
        "timeout": f"{who} did not arrive within {timeout.total_seconds():g} s",
        "peer_lost": f"{who} is gone",
        "interrupted": f"{who} was interrupted",
    }[kind]
    if kind == "timeout" and culprit == rank:
        what = f"this rank was late by more than {timeout.total_seconds():g} s"
    error = CollectiveTimeoutError if kind == "timeout" else PeerLostError
    return error(
        f"{what} [rank {rank} of {size}]; the group is broken, "
        "restart the lost rank and call pk.init() on every rank",
        culprit,
    )


class Watch:
    """Waits for torch.distributed's collectives, and finds out which rank fails them.

    Attributes:
        begun: collectives of the group that this rank has entered; its owner counts them.
        called: why the first rank gave up, where one did: the group is broken.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta) -> None:
        self._rank, self._size, self._timeout = group.rank(), group.size(), timeout
        self._is_nccl = dist.get_backend(group) == "nccl"
        self.begun, self.called = 0, ""
        here = (boot_id(), pid_namespace())
        found: list[Any] = [None] * self._size
        dist.all_gather_object(found, (here, os.getpid()), group=group)
        self._processes: dict[int, int] = {}  # rank -> pidfd, of this host's other ranks
        if hasattr(os, "pidfd_open"):
            for rank, (there, pid) in enumerate(found):
                if there == here and rank != self._rank:
                    with suppress(OSError):  # gone already, or not to be had: connections tell
                        self._processes[rank] = os.pidfd_open(pid)
        # torch has no public way to the store it was started with.
        torch_groups = dist.distributed_c10d
        self._store = torch_groups.PrefixStore(
            f"parallelkit/{group.group_name}/", torch_groups._get_default_store()
        )
        self._closed = threading.Event()
        threading.Thread(target=self._listen, name="parallelkit-watch", daemon=True).start()

    def close(self) -> None:
        """Let go of the processes watched, and listen no more."""
        self._closed.set()
        for descriptor in self._processes.values():
            os.close(descriptor)
        self._processes = {}

    def wait(self, work: dist.Work) -> tuple[str, Exception | None] | None:
        """Wait for `work`: None, or what kind of failure there is, and what torch says of it."""
        if self._is_nccl:  # orders streams at once; its own watchdog has the deadline
            work.wait()
            return None
        deadline = time.monotonic() + self._timeout.total_seconds()
        while not self.called:
            left = deadline - time.monotonic()
            if left <= 0:
                return "timeout", None
            ended = work.is_completed()  # asked first: it may end while the slice runs out
            moment = max(0.01, min(left, _SLICE_SECONDS))  # torch takes 0 ms for no limit at all
            try:
                work.wait(timedelta(seconds=moment))
                return None
            except RuntimeError as error:
                if ended:
                    return "peer_lost", error
            if self._dead() is not None:
                break
        return self.called or "peer_lost", None

    def verdict(self, kind: str, suspects: Sequence[int]) -> PeerLostError | CollectiveTimeoutError:
        """Call the others and agree on who broke the group; the error that says so.

        Args:
            kind: what this rank saw, one of BREAKING; "interrupted": itself.
            suspects: the ranks that it waited for, where it knows them; first in doubt.
        """
        dead = self._dead()
        if kind == "interrupted":
            suspects, sure = [self._rank], True
        elif dead is not None:
            kind, suspects, sure = "peer_lost", [dead], True
        else:
            sure = False
        guess = suspects[0] if suspects else -1
        if self._size > 1 and self._rank != 0 and guess < 0:
            guess = 0  # the store is with rank 0, unless torchrun keeps it
        kind, culprit = _within(
            _STORE_SECONDS, lambda: self._agree(kind, suspects, sure), (kind, guess)
        )
        self.called = kind
        return failure(kind, culprit, self._rank, self._size, self._timeout)

    def _agree(self, kind: str, suspects: Sequence[int], sure: bool) -> tuple[str, int]:
        first = self._store.compare_set("called", "", kind).decode()  # the first to call saw why
        kind = kind if sure else first
        self._answer()
        if not self._store.check(["verdict"]):
            culprit = suspects[0] if sure else self._culprit(kind, suspects)
            self._store.compare_set("verdict", "", f"{kind} {culprit}")
        kind, rank = self._store.get("verdict").decode().split()
        return kind, int(rank)

    def _culprit(self, kind: str, suspects: Sequence[int]) -> int:
        """Who does not answer; of those who all do, who is behind; -1 where nobody is."""
        answers = [f"answer/{rank}" for rank in range(self._size)]
        deadline = time.monotonic() + _ANSWER_SECONDS
        while time.monotonic() < deadline and not self._store.check(["verdict"]):
            if kind == "timeout" and self._store.check(answers):
                break
            time.sleep(0.05)
        silent = [r for r in range(self._size) if not self._store.check([answers[r]])]
        if silent:
            return next((rank for rank in suspects if rank in silent), silent[0])
        begun = [int(self._store.get(answer)) for answer in answers]
        behind = begun.index(min(begun))
        if min(begun) == max(begun):
            return suspects[0] if suspects else -1
        return behind

    def _answer(self) -> None:
        self._store.set(f"answer/{self._rank}", str(self.begun))

    def _listen(self) -> None:
        """Answer the first call, also while this rank computes."""
        try:
            while not self._closed.wait(_SLICE_SECONDS):
                if self._store.check(["called"]):
                    self._answer()
                    self.called = self._store.get("called").decode()
                    return
        except RuntimeError:
            return  # the store is gone, and so is the job

    def _dead(self) -> int | None:
        """A rank of this host whose process has ended."""
        for rank, descriptor in self._processes.items():
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            if any(events & select.POLLIN for _, events in poll.poll(0)):
                return rank
        return None


def _within(seconds: float, ask: Callable[[], T], otherwise: T) -> T:
    """ask(), or `otherwise` when it fails or takes too long: a store has no deadline of its own."""
    answers: list[T] = []

    def run() -> None:
        try:
            answers.append(ask())
        except RuntimeError:
            answers.append(otherwise)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else otherwise

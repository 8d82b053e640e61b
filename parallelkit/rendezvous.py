"""How the ranks of one attempt find each other, whatever earlier attempts have left behind."""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, rendezvous  # type: ignore[attr-defined]

from .errors import CollectiveTimeoutError

__all__ = ["of_this_attempt", "start"]

_ANSWER_S = 0.2  # after which a rank looks whether there is a newer attempt
_POLL_S = 0.002


def start(backend: str, timeout: timedelta) -> None:
    """torch.distributed over the ranks that torchrun's variables name. Collective.

    As torch's own start from the environment, which fails after `torchrun --max-restarts` has
    restarted the ranks: its store is the old one, and has the addresses of ranks that are gone.
    """
    store, rank, size = next(rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    store = of_this_attempt(store, rank, size, timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)


def of_this_attempt(store: Store, rank: int, size: int, timeout: timedelta) -> Store:
    """The part of a store in which only the ranks that run now have written. Collective.

    Rank 0 announces an attempt under a new name. The others sign in to what they find announced,
    and take it for theirs once rank 0 has answered with their own signature, which nobody does any
    more for an attempt of old.
    """
    mine = uuid.uuid4().hex
    if rank == 0:
        store.set("attempt", mine)
        signed = [f"{mine}/{peer}" for peer in range(1, size)]
        if signed:
            store.wait(signed, timeout)
        for name in signed:
            store.set(f"{name}/answer", store.get(name).decode())
        return PrefixStore(mine, store)
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        attempt = store.get("attempt").decode()
        name = f"{attempt}/{rank}"
        store.set(name, mine)
        patience = time.monotonic() + _ANSWER_S
        while time.monotonic() < patience:
            if store.check([f"{name}/answer"]) and store.get(f"{name}/answer").decode() == mine:
                return PrefixStore(attempt, store)
            time.sleep(_POLL_S)
    raise CollectiveTimeoutError(
        f"init: rank 0 did not answer rank {rank} of {size} within {timeout}; some rank has not "
        "been started",
        0,
    )

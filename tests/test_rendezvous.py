"""Ranks find those of their own attempt in a store that earlier ones have used."""

from __future__ import annotations

import contextlib
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

import parallelkit as pk
from parallelkit.rendezvous import of_this_attempt

TIMEOUT = timedelta(seconds=20)


def attempt(
    store: dist.Store, size: int, delays: dict[int, float], ranks: range | None = None
) -> list[str | None]:
    """What each rank finds in its store of what rank 0 wrote there, all at the same time."""
    found: list[str | None] = [None] * size

    def run(rank: int) -> None:
        time.sleep(delays.get(rank, 0.0))
        mine = of_this_attempt(store.clone(), rank, size, TIMEOUT)
        if rank == 0:
            mine.set("address", f"{delays}")
        found[rank] = mine.get("address").decode()

    threads = [threading.Thread(target=run, args=(r,), daemon=True) for r in ranks or range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return found


@pytest.fixture
def store() -> dist.Store:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)


@pytest.mark.parametrize("late", [0, 1, 2])
def test_ranks_meet_in_each_attempt_whoever_comes_last(store: dist.Store, late: int) -> None:
    for number in range(3):
        delays = {late: 0.1 * number}
        assert attempt(store, 3, delays) == [f"{delays}"] * 3


def come_to_nothing(store: dist.Store, rank: int, size: int) -> None:
    with contextlib.suppress(pk.CollectiveTimeoutError, dist.DistStoreError):
        of_this_attempt(store.clone(), rank, size, timedelta(seconds=0.3))


def test_an_attempt_that_came_to_nothing_disturbs_none(store: dist.Store) -> None:
    """Rank 0 had announced it, rank 2 never came; then with fewer ranks and with more."""
    for started, size in ((range(2), 3), (range(1, 2), 2)):
        threads = [
            threading.Thread(target=come_to_nothing, args=(store, rank, size)) for rank in started
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for now in (2, 4):
            assert attempt(store, now, {0: 0.1}) == ["{0: 0.1}"] * now


def test_a_rank_without_rank_0_does_not_wait_for_ever(store: dist.Store) -> None:
    store.set("attempt", "of old")
    with pytest.raises(pk.CollectiveTimeoutError, match="rank 0 did not answer rank 1 of 2"):
        of_this_attempt(store, 1, 2, timedelta(seconds=0.3))

"""Ranks for tests: results in rank order, and errors, deaths and hangs of a rank are told."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time

import pytest
import torch
import torch.distributed as dist
from ranks import NATIVE

import parallelkit as pk
from parallelkit.testing import RanksFailedError, run_ranks, virtual_ranks
from parallelkit.transport.mapping import MappingError


def told(group: pk.Group, *arguments: object) -> tuple[object, ...]:
    assert dist.is_initialized() and dist.get_rank() == group.rank
    assert torch.get_num_threads() == 1
    return group.rank, group.size, os.getpid(), os.environ.get("PK_TEST_WORD"), arguments


def test_run_ranks_returns_what_each_process_returned_in_rank_order(monkeypatch):
    monkeypatch.setenv("PK_TEST_WORD", "here")
    results = run_ranks(told, 3, "a", [torch.ones(2).tolist()])
    assert [r[:2] for r in results] == [(0, 3), (1, 3), (2, 3)]
    assert len({r[2] for r in results} | {os.getpid()}) == 4, "each a process of its own"
    assert all(r[3:] == ("here", ("a", [[1.0, 1.0]])) for r in results)
    monkeypatch.delenv("PK_TEST_WORD")
    assert run_ranks(told, 1)[0][3] is None, "the environment is the caller's, each time"


def one_raises(group: pk.Group) -> str:
    if group.rank == 1:
        raise KeyError("the reason")
    return "fine"


def one_dies(group: pk.Group) -> str:
    if group.rank == 1:
        os._exit(7)
    return "fine"


def one_hangs(group: pk.Group) -> str:
    if group.rank == 1:
        time.sleep(1000)
    return "fine"


class Stubborn(Exception):
    def __init__(self, first: int, second: int) -> None:  # pickles, and does not unpickle
        super().__init__(f"{first} and {second}")


def raises_what_cannot_be_sent(group: pk.Group) -> None:
    raise Stubborn(1, 2)


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (one_raises, ["rank 1", "KeyError", "the reason", "test_testing.py"]),
        (one_dies, ["rank 1", "died", "exit code 7"]),
        (raises_what_cannot_be_sent, ["Stubborn", "1 and 2"]),
    ],
)
def test_a_rank_that_raises_or_dies_is_named_with_its_reason(fn, words):
    with pytest.raises(RanksFailedError) as failure:
        run_ranks(fn, 2)
    for word in words:
        assert word in str(failure.value)
    if fn is one_raises:
        assert failure.value.outcomes[0] == "fine"
        assert isinstance(failure.value.outcomes[1], KeyError)


def test_a_rank_that_hangs_is_ended_at_the_timeout_and_nobody_is_left():
    with pytest.raises(RanksFailedError, match="rank 1.*not done within 3 s"):
        run_ranks(one_hangs, 2, timeout=3.0)  # it would hang for 1000 s
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("size", [0, -1])
def test_there_is_at_least_one_rank(size):
    with pytest.raises(ValueError, match="size must be at least 1"):
        run_ranks(told, size)


@pytest.mark.skipif(not NATIVE, reason="no native extension")
def test_virtual_ranks_are_threads_over_the_native_transport():
    def rank(group: pk.Group) -> tuple[int, int, str]:
        assert group.size == 5 and group.device == torch.device("cpu")
        x = group.empty(1000).fill_(float(group.rank))
        y = torch.full((100_000,), float(group.rank))
        assert pk.weighted_all_reduce_([x, y], 1, group) == 5.0
        assert bool((x == 2.0).all() and (y == 2.0).all())
        return group.rank, threading.get_ident(), group.transport

    results = virtual_ranks(rank, 5)
    assert [r[0] for r in results] == [0, 1, 2, 3, 4]
    assert len({r[1] for r in results}) == 5
    assert {r[2] for r in results} == {"shared-memory"}
    assert virtual_ranks(lambda group: group.transport, 1) == ["single"]


@pytest.mark.skipif(not NATIVE, reason="no native extension")
def test_what_a_virtual_rank_raises_comes_out_and_the_others_end():
    def rank(group: pk.Group) -> None:
        if group.rank == 1:
            raise KeyError("the reason")
        group.barrier()

    start = time.monotonic()
    with pytest.raises(KeyError, match="the reason"):
        virtual_ranks(rank, 3, timeout=30)
    assert time.monotonic() - start < 20


@pytest.mark.skipif(not NATIVE, reason="no native extension")
@pytest.mark.parametrize("numel", [2**45, 2**70])
def test_memory_that_virtual_ranks_cannot_have_is_refused_and_the_group_usable(numel):
    def rank(group: pk.Group) -> str:
        with pytest.raises(MappingError) as refusal:
            group.empty(numel)
        x = group.empty(3).fill_(float(group.rank))
        pk.weighted_all_reduce_(x, 1, group)
        assert x.tolist() == [1.0] * 3
        return str(refusal.value)

    for number, told in enumerate(virtual_ranks(rank, 3)):
        assert "shared memory: " in told and f"rank {number} of 3" in told


def test_virtual_ranks_are_for_the_cpu_or_a_gpu():
    with pytest.raises(ValueError, match="device must be cpu or cuda.*meta"):
        virtual_ranks(lambda group: None, 2, "meta")


def start_method(group: pk.Group) -> str | None:
    return multiprocessing.get_start_method(allow_none=True)


def test_a_rank_starts_processes_of_its_own_in_the_usual_way() -> None:
    assert run_ranks(start_method, 1) == [None]

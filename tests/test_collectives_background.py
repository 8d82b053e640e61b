"""All-reduces in the background and prepared ones."""

from __future__ import annotations

import math
import threading
from datetime import timedelta

import oracle
import pytest
import torch
from ranks import (
    DTYPES,
    adds_in_rank_order,
    laid_out,
    message_of,
    random,
    same,
    small_slots,
    weights_of,
)

import parallelkit as pk
from parallelkit.prepared import PreparedAllReduce
from parallelkit.testing import run_ranks


def background(group: pk.Group, algorithm: str) -> None:
    del group
    small_slots()
    with pk.Group(algorithm=algorithm) as group:
        weights = [r + 1.0 for r in range(group.size)]
        everybody = [
            [random(i, r, (313,), DTYPES[i % 6]) for i in range(12)] for r in range(group.size)
        ]
        expected = [t.clone() for t in everybody[group.rank]]
        for tensor in expected:
            pk.weighted_all_reduce_(tensor, weights[group.rank], group)

        tensors = [t.clone() for t in everybody[group.rank]]
        works = [
            pk.weighted_all_reduce_(t, weights[group.rank], group, async_op=True) for t in tensors
        ]
        between = torch.ones(3)  # takes its turn after those started before
        assert pk.weighted_all_reduce_(between, 1, group) == group.size
        assert all(isinstance(work, pk.Work) for work in works)
        for work in reversed(works):
            assert work.wait() == sum(weights) and work.done()
            assert work.wait() == sum(weights), "waiting twice is harmless"
        for index, tensor in enumerate(tensors):
            assert adds_in_rank_order(group) <= torch.equal(tensor, expected[index])
            oracle.assert_weighted(tensor, [mine[index] for mine in everybody], weights)

        tensor = everybody[group.rank][0].clone()
        called = threading.Event()
        future = pk.weighted_all_reduce_(
            tensor, weights[group.rank], group, async_op=True
        ).get_future()
        after = future.then(lambda done: (called.set(), done.value() + 1)[1])
        assert future.wait() == sum(weights) and after.wait() == sum(weights) + 1
        assert called.is_set()
        oracle.assert_weighted(tensor, [mine[0] for mine in everybody], weights)


@pytest.mark.parametrize("algorithm", ["auto", "reference"])
@pytest.mark.parametrize("size", [1, 3])
def test_works_in_the_background_run_in_order_and_give_the_same(size, algorithm):
    run_ranks(background, size, algorithm)


def background_errors(group: pk.Group) -> list[str]:
    told = []
    x = torch.arange(4.0) if group.rank else torch.arange(5.0)
    work = pk.weighted_all_reduce_(x, 1, group, async_op=True)
    told.append(message_of(pk.CollectiveMismatchError, work.wait))
    assert told[-1] == message_of(pk.CollectiveMismatchError, work.wait), "it raises again"
    work = pk.weighted_all_reduce_(torch.ones(2), -1.0, group, async_op=True)
    told.append(message_of(ValueError, work.wait))
    work = pk.weighted_all_reduce_(torch.ones(2), 1, group, async_op=True, reduction="max")
    told.append(message_of(ValueError, work.wait))
    future = pk.weighted_all_reduce_(x, 1, group, async_op=True).get_future()
    with pytest.raises(Exception, match="called different things"):
        future.wait()
    assert x.tolist() == list(range(len(x)))
    assert pk.weighted_all_reduce_(torch.ones(2), 1, group) == group.size
    return told


def test_an_error_in_the_background_is_raised_by_wait():
    assert same(run_ranks(background_errors, 2))


def one_refused_among_others(group: pk.Group, algorithm: str) -> list[str]:
    """Rank 0 waits for the refused call before the next one, the others after it."""
    del group
    told = []
    with pk.Group(algorithm=algorithm, timeout=timedelta(seconds=20)) as group:
        last = group.rank == group.size - 1
        for by_future in (False, True):
            refused, good, late = (torch.full((n,), 1.0 + group.rank) for n in (3 + last, 5, 7))
            first, second = (
                pk.weighted_all_reduce_(tensor, 1, group, async_op=True)
                for tensor in (refused, good)
            )
            wait = first.get_future().wait if by_future else first.wait
            for turn in range(2):
                if (turn == 0) == (group.rank == 0):
                    with pytest.raises(Exception, match="called different things") as refusal:
                        wait()
                    told.append(str(refusal.value).partition("weighted")[2])
                else:
                    pk.weighted_all_reduce_(late, 1, group)
                    group.barrier()
                    second.wait()
            mean = (1 + group.size) / 2
            assert refused.tolist() == [1.0 + group.rank] * (3 + last)
            assert good.tolist() == [mean] * 5 and late.tolist() == [mean] * 7
    return told


@pytest.mark.parametrize("algorithm", ["auto", "reference"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_refused_call_in_the_background_is_explained_whenever_each_rank_waits(size, algorithm):
    told = run_ranks(one_refused_among_others, size, algorithm)
    assert same(told)
    assert "float32[3] on rank" in told[0][0] and f"float32[4] on rank {size - 1}" in told[0][0]


def prepared_calls(group: pk.Group, algorithm: str) -> None:
    del group
    with pk.Group(algorithm=algorithm) as group:
        shapes = ((4, 3, 5, 6), (67,), ())
        gaps = laid_out(torch.zeros(4, 3, 5, 6), "gaps")
        tensors = [gaps, torch.empty(67, dtype=torch.bfloat16), group.empty(dtype=torch.float64)]
        prepared = PreparedAllReduce(tensors, group)
        for turn in range(6):
            everybody = [
                [random(turn, r, s, t.dtype) for s, t in zip(shapes, tensors, strict=True)]
                for r in range(group.size)
            ]
            weights = weights_of(turn, group.size)
            for tensor, value in zip(tensors, everybody[group.rank], strict=True):
                tensor.copy_(value)
            mine = weights[group.rank]
            total = prepared.start(mine).wait() if turn % 2 else prepared.run(mine)
            assert total.item() == math.fsum(weights)
            for index, tensor in enumerate(tensors):
                ranks = [given[index] for given in everybody]
                oracle.assert_weighted(tensor, ranks, weights, "mean", turn)
            if turn == 2:  # one bad weight does not spoil the calls after it
                for bad, kind in ((-1, ValueError), ("2", TypeError), (math.nan, ValueError)):
                    message_of(kind, lambda bad=bad: prepared.run(bad if group.rank else 1))
        total = PreparedAllReduce(tensors[1].fill_(3.0), group, "total").run(1, scale=0.5)
        assert bool((tensors[1] == 1.5 * group.size).all())


@pytest.mark.parametrize("algorithm", ["auto", "reference"])
def test_a_prepared_call_follows_the_tensors_values_and_survives_bad_weights(algorithm):
    run_ranks(prepared_calls, 2, algorithm)


def waited_for_in_any_order(group: pk.Group) -> None:
    """Ranks whose tensors lie in different orders need no agreement on when each one waits."""
    everybody = [random(1, r, (4, 3, 5, 6), torch.float32) for r in range(group.size)]
    tensor = laid_out(everybody[group.rank], ("row-major", "transposed")[group.rank])
    work = pk.weighted_all_reduce_(tensor, 1, group, async_op=True)
    if group.rank == 0:
        work.wait()
    other = torch.full((7,), float(group.rank))
    pk.weighted_all_reduce_(other, 1, group)
    assert other.tolist() == [0.5] * 7
    work.wait()
    oracle.assert_weighted(tensor, everybody, [1.0] * group.size)


def test_one_rank_may_wait_before_and_another_after_the_next_call():
    run_ranks(waited_for_in_any_order, 2)

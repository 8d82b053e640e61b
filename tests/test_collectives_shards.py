"""Reduce-scatter and all-gather: the shards of the weighted mean, and back."""

from __future__ import annotations

import math

import oracle
import pytest
import torch
from ranks import (
    DTYPES,
    NATIVE,
    SIZES,
    adds_in_rank_order,
    digest,
    random,
    same,
    small_slots,
    weights_of,
)

import parallelkit as pk
from parallelkit.testing import run_ranks


def test_shards_have_the_quotient_rounded_up():
    assert [pk.shard_bounds(5, 4, r) for r in range(4)] == [(0, 2), (2, 4), (4, 5), (5, 5)]
    assert [pk.shard_bounds(0, 2, r) for r in range(2)] == [(0, 0), (0, 0)]
    for numel in (*range(40), 2**31 - 1, 2**31, 2**31 + 8, 10**15):
        for size in (1, 2, 3, 7, 64):
            each, end = math.ceil(numel / size) if numel < 2**50 else -(-numel // size), 0
            for rank in range(size):
                start, stop = pk.shard_bounds(numel, size, rank)
                assert start == end and stop - start == min(each, numel - start)
                end = stop
            assert end == numel
    for bad in ((-1, 2, 0), (4, 0, 0), (4, 2, 2), (4, 2, -1)):
        with pytest.raises(ValueError, match="shard_bounds"):
            pk.shard_bounds(*bad)


def shards(group: pk.Group, algorithm: str) -> str:
    del group
    small_slots()
    digests = []
    with pk.Group(algorithm=algorithm) as group:
        rank, size = group.rank, group.size
        weights = weights_of(4, size)
        for index, dtype in enumerate(DTYPES):
            arena = group.empty(9001, dtype=dtype)
            for numel in (0, 1, 5, 67, 9001):
                start, stop = pk.shard_bounds(numel, size, rank)
                reduction = ("mean", "sum")[(index + numel) % 2]
                what = (numel, dtype, reduction)
                everybody = [random(numel, r, (numel,), dtype) for r in range(size)]
                mine, weight = everybody[rank], weights[rank]

                def scatter(flat, out=None, weight=weight, reduction=reduction):
                    return pk.weighted_reduce_scatter(
                        flat, weight, group, reduction=reduction, out=out
                    )

                for flat in (mine.clone(), arena[:numel].copy_(mine)):
                    out = torch.full((stop - start,), math.nan, dtype=dtype)
                    assert scatter(flat, out) is out
                    oracle.assert_weighted(
                        out, [given[start:stop] for given in everybody], weights, reduction, what
                    )
                    assert oracle.bits(flat) == oracle.bits(mine), "flat stays as it is"
                    part = flat[start:stop]
                    assert scatter(flat, part) is part, "out may be the shard of flat itself"
                    assert oracle.bits(part) == oracle.bits(out)
                assert oracle.bits(scatter(mine)) == oracle.bits(out)

                whole = pk.all_gather_flat(out, numel, group)
                for into in (torch.full((numel,), math.nan, dtype=dtype), arena[:numel]):
                    into[start:stop] = out
                    assert pk.all_gather_flat(into[start:stop], numel, group, out=into) is into
                    assert oracle.bits(into) == oracle.bits(whole)
                oracle.assert_weighted(whole, everybody, weights, reduction, what)
                if adds_in_rank_order(group):
                    full = mine.clone()
                    pk.weighted_all_reduce_(full, weight, group, reduction=reduction)
                    assert oracle.bits(whole) == oracle.bits(full), what
                digests.append(digest([whole]))
    return "".join(digests)


@pytest.mark.parametrize("size", SIZES)
def test_a_reduce_scatter_gives_the_shards_of_the_mean_and_an_all_gather_undoes_it(size):
    algorithms = ("direct", "ring", "reference")[: 3 if size < 8 else 2]
    by_algorithm = {a: run_ranks(shards, size, a) for a in algorithms}
    for digests in by_algorithm.values():
        assert same(digests)
    if NATIVE:
        assert by_algorithm["direct"] == by_algorithm["ring"]


def strided_flats(group: pk.Group) -> None:
    values = [random(1, r, (10,), torch.complex64) for r in range(group.size)]
    start, stop = pk.shard_bounds(10, group.size, group.rank)
    spread = torch.zeros(20, dtype=torch.complex64)[::2].copy_(values[group.rank])
    for flat in (spread, values[group.rank].conj().resolve_conj().conj()):
        shard = pk.weighted_reduce_scatter(flat, 1, group)
        oracle.assert_weighted(shard, [v[start:stop] for v in values], [1.0] * group.size)
        whole = pk.all_gather_flat(flat[start:stop], 10, group)
        assert torch.equal(
            whole,
            torch.cat(
                [values[r][slice(*pk.shard_bounds(10, group.size, r))] for r in range(group.size)]
            ),
        )


def test_flat_tensors_may_have_strides_and_be_lazily_conjugated():
    run_ranks(strided_flats, 3)

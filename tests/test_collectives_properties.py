"""Properties of the collectives that hold whatever the tensors, weights and number of ranks.

Ranks are threads here, over the same native code as between processes: an example takes
milliseconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import oracle
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ranks import DTYPES, NATIVE, random

import parallelkit as pk
from parallelkit.testing import run_ranks, virtual_ranks
from parallelkit.transport import shared_memory

native = pytest.mark.skipif(not NATIVE, reason="virtual ranks need the native extension")


@pytest.fixture(scope="module", autouse=True)
def small_slots():
    """Staging in many steps, also of small tensors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_memory, "_SLOT_BYTES", 2048)
        yield


@dataclass(frozen=True)
class Tensor:
    """One tensor of the list, on every rank in an order of memory of its own."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    exponents: tuple[int, ...]  # by rank: values are scaled by 2**exponent
    order: tuple[int, ...]  # by rank: which permutation of dimensions is dense in memory

    def of(self, seed: int, rank: int) -> torch.Tensor:
        values = random(seed, rank, self.shape, torch.complex128)
        values = values * 2.0 ** self.exponents[rank]
        if self.dtype == torch.float16:
            values = torch.complex(*(part.clamp(-6e4, 6e4) for part in (values.real, values.imag)))
        values = (values if self.dtype.is_complex else values.real).to(self.dtype)
        if not self.shape:
            return values
        turn = self.order[rank] % len(self.shape)
        dims = [*range(turn, len(self.shape)), *range(turn)]
        back = [dims.index(d) for d in range(len(dims))]
        return values.permute(dims).contiguous().permute(back)


Call = tuple[list[float], str, list[Tensor], int]  # weights by rank, reduction, tensors, seed

# Coefficients stay between 2^-90 and 2^90; beyond 2^+-100 sums are in double (test_kernels_cpu.py).
WEIGHTS = st.one_of(
    st.just(0.0),
    st.integers(1, 2**40).map(float),
    st.floats(2.0**-40, 2.0**40),
)
SHAPES = st.one_of(
    st.lists(st.integers(0, 7), max_size=4).map(tuple), st.integers(0, 2000).map(lambda n: (n,))
)


@st.composite
def calls(draw: st.DrawFn) -> Call:
    size = draw(st.integers(1, 8))
    each = {"min_size": size, "max_size": size}
    weights = draw(st.lists(WEIGHTS, **each))
    tensors = st.builds(
        Tensor,
        SHAPES,
        st.sampled_from(DTYPES),
        st.lists(st.integers(-8, 3), **each).map(tuple),
        st.lists(st.integers(0, 3), **each).map(tuple),
    )
    reduction = draw(st.sampled_from(["mean", "sum"]))
    return weights, reduction, draw(st.lists(tensors, max_size=5)), draw(st.integers(0, 10**6))


@native
@settings(max_examples=150)
@given(calls())
def test_every_mean_is_within_the_bound_and_equal_to_the_bit_everywhere(call):
    weights, reduction, tensors, seed = call
    size = len(weights)
    inputs = [[t.of(seed + i, rank) for i, t in enumerate(tensors)] for rank in range(size)]

    def rank(group: pk.Group) -> tuple[float, list[torch.Tensor], list[torch.Tensor]]:
        mine = [t.clone() for t in inputs[group.rank]]
        alone = [t.clone() for t in inputs[group.rank]]
        weight = weights[group.rank]
        total = pk.weighted_all_reduce_(mine, weight, group, reduction=reduction)
        for tensor in alone:
            pk.weighted_all_reduce_(tensor, weight, group, reduction=reduction)
        return total.item(), mine, alone

    for r, (total, mine, alone) in enumerate(virtual_ranks(rank, size)):
        assert total == pytest.approx(math.fsum(weights), rel=2**-52)
        if all(weight.is_integer() for weight in weights):
            assert total == math.fsum(weights)
        for index, result in enumerate(mine):
            everybody = [given[index] for given in inputs]
            assert result.stride() == inputs[r][index].clone().stride()
            oracle.assert_weighted(result, everybody, weights, reduction)
            if oracle.added_in(result.dtype) == torch.float32:
                right = oracle.chain(everybody, weights, reduction)
                assert oracle.bits(result) == oracle.bits(right)
            assert oracle.bits(result) == oracle.bits(alone[index])


@native
@settings(max_examples=100)
@given(
    st.integers(0, 3000),
    st.lists(WEIGHTS, min_size=1, max_size=8),
    st.sampled_from(DTYPES),
    st.booleans(),
)
@example(5, [1.0, 2.0, 0.0, 4.0], torch.float32, True)
def test_a_reduce_scatter_and_an_all_gather_make_the_all_reduce(numel, weights, dtype, shared):
    size = len(weights)
    inputs = [random(1, rank, (numel,), dtype) for rank in range(size)]

    def rank(group: pk.Group) -> tuple[torch.Tensor, torch.Tensor]:
        full, flat = inputs[group.rank].clone(), inputs[group.rank]
        out = torch.full_like(flat, math.nan)
        if shared:
            flat = group.empty(numel, dtype=dtype).copy_(flat)
            out = group.empty(numel, dtype=dtype).fill_(math.nan)
        shard = pk.weighted_reduce_scatter(flat, weights[group.rank], group)
        start, stop = pk.shard_bounds(numel, size, group.rank)
        assert len(shard) == stop - start
        assert oracle.bits(flat) == oracle.bits(inputs[group.rank])
        pk.weighted_all_reduce_(full, weights[group.rank], group)
        return pk.all_gather_flat(shard, numel, group, out=out), full

    for whole, full in virtual_ranks(rank, size):
        oracle.assert_weighted(whole, inputs, weights)
        assert oracle.bits(whole) == oracle.bits(full)


def reference(
    group: pk.Group, cases: list[tuple[list[float], str, list[Tensor], int]]
) -> list[str]:
    results = []
    with pk.Group(algorithm="reference") as group:
        for weights, reduction, tensors, seed in cases:
            weights = [weights[rank % len(weights)] for rank in range(group.size)]
            inputs = [
                [t.of(seed + i, rank % len(t.order)) for i, t in enumerate(tensors)]
                for rank in range(group.size)
            ]
            mine = [t.clone() for t in inputs[group.rank]]
            pk.weighted_all_reduce_(mine, weights[group.rank], group, reduction=reduction)
            for index, result in enumerate(mine):
                everybody = [given[index] for given in inputs]
                oracle.assert_weighted(result, everybody, weights, reduction)
                results.append(oracle.bits(result).hex())
    return results


@settings(max_examples=4)
@given(st.lists(calls(), min_size=1, max_size=12))
def test_the_reference_keeps_the_bound_and_equality_over_ranks(cases):
    first, *others = run_ranks(reference, 3, cases)
    assert all(other == first for other in others)

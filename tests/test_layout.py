"""Tensors of any strides: averaged by position, strides kept, shared elements refused."""

from __future__ import annotations

import itertools

import oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import (
    LAYOUTS,
    adds_in_rank_order,
    digest,
    laid_out,
    message_of,
    random,
    same,
    small_slots,
)

import parallelkit as pk
from parallelkit.layout import COPY, copy_back, flat_view
from parallelkit.testing import run_ranks


def any_strides(group: pk.Group, algorithm: str) -> str:
    del group
    small_slots()
    digests = []
    with pk.Group(algorithm=algorithm) as group:
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.complex64):
            for turn in range(len(LAYOUTS)):
                for differing in (0, 1):  # all ranks alike, or each its own
                    mine = LAYOUTS[(turn + differing * group.rank) % len(LAYOUTS)]
                    everybody = [random(turn, r, (4, 3, 5, 6), dtype) for r in range(group.size)]
                    tensor = laid_out(everybody[group.rank], mine)
                    plain = everybody[group.rank].clone()
                    strides, base = tensor.stride(), tensor._base
                    for background in (False, True):
                        tensor.copy_(everybody[group.rank])
                        pair = [plain.copy_(everybody[group.rank]), tensor]
                        work = pk.weighted_all_reduce_(
                            pair, group.rank + 1, group, async_op=background
                        )
                        total = work.wait() if background else work
                        assert total == group.size * (group.size + 1) / 2
                        assert tensor.stride() == strides
                        if adds_in_rank_order(group):
                            assert oracle.bits(tensor) == oracle.bits(plain), (mine, dtype)
                        weights = [r + 1.0 for r in range(group.size)]
                        oracle.assert_weighted(tensor, everybody, weights, "mean", (mine, dtype))
                    if mine == "gaps":
                        assert base is not None
                        between = base[1::2].real
                        assert bool(between.isnan().all()), "memory between elements is untouched"
                    digests.append(digest([tensor]))
    return "".join(digests)


@pytest.mark.parametrize("algorithm", ["auto", "ring", "reference"])
def test_tensors_of_any_strides_are_averaged_by_position_and_keep_their_strides(algorithm):
    assert same(run_ranks(any_strides, 3, algorithm))


def overlapping(group: pk.Group, algorithm: str) -> list[str]:
    del group
    with pk.Group(algorithm=algorithm) as group:
        told = []
        base = torch.arange(6.0)
        for bad in (
            base[:1].expand(4),
            base.as_strided((3, 3), (1, 1)),
            base.as_strided((2, 3), (1, 2))[:, :2].as_strided((2, 2), (2, 2)),
        ):
            good = torch.arange(float(bad.numel())).view(bad.shape)
            mine = bad if group.rank == group.size - 1 else good
            told.append(message_of(ValueError, lambda x=mine: pk.weighted_all_reduce_(x, 1, group)))
            assert torch.equal(base, torch.arange(6.0))
            assert torch.equal(good.flatten(), torch.arange(float(bad.numel())))
        interleaved = base.as_strided((2, 3), (1, 2))  # columns inside rows: every element its own
        pk.weighted_all_reduce_(interleaved, 1, group)
        assert torch.equal(base, torch.arange(6.0))
        return told


@pytest.mark.parametrize("algorithm", ["auto", "reference"])
def test_elements_that_share_memory_are_refused_on_every_rank(algorithm):
    by_rank = run_ranks(overlapping, 2, algorithm)
    assert same(by_rank)
    for told in by_rank[0]:
        assert "share memory" in told and "rank 1 of 2" in told and ".contiguous()" in told


# -- the view itself -----------------------------------------------------------------------------


CPU = torch.device("cpu")


def test_dense_tensors_are_viewed_and_others_copied():
    values = random(1, 0, (4, 3, 5, 6), torch.float32)
    for layout in LAYOUTS:
        for dtype in (torch.float32, torch.float64, torch.complex64):
            tensor = laid_out(values.to(dtype), layout)
            flat, number = flat_view("x", tensor, CPU)
            assert flat.is_contiguous() and not flat.is_complex() and not flat.is_neg()
            viewed = flat.data_ptr() == tensor.data_ptr() and number != COPY
            lazy = tensor.is_conj() or tensor.is_neg()
            assert viewed == (
                layout in ("row-major", "transposed", "channels_last", "interleaved")
                or (layout in ("conjugate", "negative") and not lazy)
            )
            assert (number == 0) == (tensor.is_contiguous() and not lazy), layout
            kept = tensor.clone()
            flat.mul_(2)
            if number == COPY:
                copy_back(tensor, flat)
            assert torch.equal(tensor, kept * 2), layout


def test_one_number_stands_for_one_order_of_dimensions():
    orders = {}
    for order in itertools.permutations(range(3)):
        back = [order.index(d) for d in range(3)]
        dense = torch.empty([(5, 6, 7)[d] for d in order]).permute(back)
        orders[order] = flat_view("x", dense, CPU)[1]
        assert orders[order] == flat_view("x", torch.empty_like(dense), CPU)[1]
    assert len(set(orders.values())) == 6 and orders[0, 1, 2] == 0


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=4),
)
def test_exactly_the_tensors_whose_elements_share_memory_are_refused(dims):
    shape, strides = [size for size, _ in dims], [stride for _, stride in dims]
    tensor = torch.zeros(500).as_strided(shape, strides)
    places = [
        sum(i * s for i, s in zip(index, strides, strict=True))
        for index in itertools.product(*map(range, shape))
    ]
    if len(set(places)) < len(places):
        with pytest.raises(ValueError, match="share memory"):
            flat_view("x", tensor, CPU)
    else:
        flat, number = flat_view("x", tensor, CPU)
        flat.fill_(1.0)
        if number == COPY:
            copy_back(tensor, flat)
        assert bool((tensor == 1.0).all())
        base = tensor if tensor._base is None else tensor._base
        assert base.sum() == len(places), "exactly its own elements are written"

"""The weighted collectives over every algorithm and 1 to 8 ranks, against extended precision.

Where an algorithm adds in rank order (all but "reference") results are equal to the bit;
"reference" promises equality over ranks and the error bound.
"""

from __future__ import annotations

import itertools
import math
import os
import warnings

import oracle
import pytest
import torch
from ranks import (
    ALGORITHMS,
    DTYPES,
    NATIVE,
    SIZES,
    adds_in_rank_order,
    digest,
    in_shared_memory,
    random,
    same,
    small_slots,
    weights_of,
)

import parallelkit as pk
from parallelkit.prepared import PreparedAllReduce
from parallelkit.testing import run_ranks

# Nothing, one number, odd tails, and enough for many steps through small slots.
SHAPES = ((0,), (), (1,), (3,), (5, 13), (2, 0, 3), (1023,), (7, 11, 31), (9001,))


def inputs(seed: int, rank: int) -> list[torch.Tensor]:
    """A list of all dtypes and shapes."""
    return [
        random(seed + index, rank, shape, dtype)
        for index, (shape, dtype) in enumerate(itertools.product(SHAPES, DTYPES))
    ]


# -- the mean ------------------------------------------------------------------------------------


def mean_everywhere(group: pk.Group, algorithm: str) -> str:
    """A mixed list, as it is, in shared memory, half and half, and one tensor at a time."""
    del group
    small_slots()
    with pk.Group(algorithm=algorithm) as group:
        size, rank = group.size, group.rank
        everybody = [inputs(1, r) for r in range(size)]
        digests = []
        for reduction in ("mean", "sum"):
            weights = weights_of(len(reduction), size)
            turns = {
                "list": [t.clone() for t in everybody[rank]],
                "shared": in_shared_memory(group, everybody[rank]),
                "mixed": [t.clone() for t in everybody[rank]],
                "alone": [t.clone() for t in everybody[rank]],
            }
            turns["mixed"][::2] = in_shared_memory(group, everybody[rank][::2])
            seen = set()
            for turn, tensors in turns.items():
                for call in tensors if turn == "alone" else [tensors]:
                    total = pk.weighted_all_reduce_(call, weights[rank], group, reduction=reduction)
                    assert total.dtype == torch.float64 and total.shape == ()
                    assert total.item() == math.fsum(weights)
                digests.append(digest(tensors))
                if digests[-1] in seen:
                    continue
                seen.add(digests[-1])
                for index, tensor in enumerate(tensors):
                    ranks = [mine[index] for mine in everybody]
                    what = (turn, reduction, tensor.dtype, tuple(tensor.shape))
                    oracle.assert_weighted(tensor, ranks, weights, reduction, what)
                    if adds_in_rank_order(group) and oracle.added_in(tensor.dtype) == torch.float32:
                        right = oracle.chain(ranks, weights, reduction)
                        assert oracle.bits(tensor) == oracle.bits(right), what
            assert not adds_in_rank_order(group) or len(seen) == 1, "memory or list changed a bit"
        return "".join(digests)


@pytest.mark.parametrize("size", SIZES)
def test_a_mean_is_within_the_bound_and_equal_to_the_bit_over_ranks_memory_and_algorithms(size):
    algorithms = ALGORITHMS[: 4 if size < 8 else 3]
    by_algorithm = {a: run_ranks(mean_everywhere, size, a) for a in algorithms}
    for algorithm, digests in by_algorithm.items():
        assert same(digests), algorithm
    if NATIVE and "PARALLELKIT_ALGORITHM" not in os.environ:
        assert same([by_algorithm[a] for a in ("auto", "direct", "ring")])


def known_answers(group: pk.Group) -> None:
    def mean(weight, tensor, **options):
        total = pk.weighted_all_reduce_(tensor, weight, group, **options)
        return total.item(), tensor

    first = group.rank == 0
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for numel in (7, 0, 1, 3, 1023):
            x = torch.full((numel,), 1.0 if first else 5.0, dtype=dtype)
            total, x = mean(1 if first else 3, x)
            assert total == 4.0 and bool((x == 4.0).all()) and len(x) == numel

    # One example of gradient -2 and three of mean 2, w = 1, learning rate 0.1.
    total, gradient = mean(1 if first else 3, torch.tensor([-2.0 if first else 2.0]))
    assert gradient.item() == 1.0
    assert (torch.tensor([1.0]) - 0.1 * gradient).item() == pytest.approx(0.9)

    # As sums over their examples the same gradients give the same mean.
    total, gradient = mean(
        1 if first else 3, torch.tensor([-2.0 if first else 6.0]), reduction="sum"
    )
    assert gradient.item() == 1.0

    z = torch.tensor([1 + 2j if first else 3 + 6j], dtype=torch.complex64)
    assert mean(1 if first else 3, z)[1].item() == 2.5 + 5j

    assert mean(2**40 if first else 1, torch.zeros(1))[0] == 2.0**40 + 1
    assert mean(2.0**53 if first else 0.5, torch.zeros(1))[0] == 2.0**53  # half a unit: to even
    # A token count far above the largest float16 multiplies nothing before it is normalised.
    half = torch.tensor([60000.0], dtype=torch.float16)
    assert mean(100_000_000, half)[1].item() == 60000.0


def test_known_answers_on_two_ranks():
    run_ranks(known_answers, 2)


def three_ranks(group: pk.Group) -> torch.Tensor:
    x = torch.full((5,), float(group.rank + 1))
    pk.weighted_all_reduce_(x, 1.0, group)
    return x


def test_the_mean_is_over_ranks_not_elements():
    for x in run_ranks(three_ranks, 3):
        assert x.tolist() == [2.0] * 5


def weight_zero(group: pk.Group, algorithm: str) -> None:
    del group
    with pk.Group(algorithm=algorithm) as group:
        first = group.rank == 0
        for numel in (1, 7, 5000):
            for dtype in DTYPES:
                for make in (torch.empty, group.empty):
                    for poison in (math.nan, math.inf):
                        x = make((numel,), dtype=dtype).fill_(poison if first else 2.0)
                        total = pk.weighted_all_reduce_(x, 0 if first else 4, group)
                        assert total.item() == 4.0 and bool((x == 2.0).all()), (numel, dtype)
                        x.fill_(math.nan)
                        total = pk.weighted_all_reduce_(x, 0, group)
                        assert total.item() == 0.0
                        assert oracle.bits(x) == bytes(x.nbytes), "zeros, and not negative ones"
                x = torch.full((numel,), math.nan if first else 2.0, dtype=dtype)
                shard = pk.weighted_reduce_scatter(x, 0 if first else 4, group)
                assert bool((shard == 2.0).all())


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_rank_of_weight_zero_is_never_read_and_all_zero_gives_zeros(algorithm):
    run_ranks(weight_zero, 2, algorithm)


def nonfinite(group: pk.Group) -> tuple[str, list[str]]:
    special = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, 3e38]
    x = torch.tensor([special[(i + group.rank * (i // 7)) % 7] for i in range(49)])
    pk.weighted_all_reduce_(x, group.rank + 1, group)
    return digest([x]), ["nan" if math.isnan(v) else "inf" if math.isinf(v) else "" for v in x]


def test_a_value_that_is_not_finite_reaches_every_rank():
    by_rank = run_ranks(nonfinite, 3)
    assert same(by_rank)
    special = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, 3e38]
    for i, kind in enumerate(by_rank[0][1]):
        exact = sum((r + 1) / 6 * special[(i + r * (i // 7)) % 7] for r in range(3))
        assert kind == ("nan" if math.isnan(exact) else "inf" if math.isinf(exact) else "")


def weights_of_all_kinds(group: pk.Group) -> None:
    warnings.simplefilter("error")
    mine = random(3, group.rank, (17,), torch.float32)
    kinds = [
        3 if group.rank else 1,
        3.0 if group.rank else 1.0,
        torch.tensor(3 if group.rank else 1),
        torch.tensor(3.0 if group.rank else 1.0, dtype=torch.bfloat16),
        torch.tensor(3.0 if group.rank else 1.0, requires_grad=True),
    ]
    seen = set()
    for weight in kinds:
        x = mine.clone()
        assert pk.weighted_all_reduce_(x, weight, group).item() == 4.0
        seen.add(digest([x]))
    assert len(seen) == 1
    x = mine.clone()
    pk.weighted_all_reduce_(x, True if group.rank else 0.0, group)
    assert torch.equal(x, random(3, 1, (17,), torch.float32))


def test_an_int_a_float_and_a_0_dim_tensor_are_the_same_weight():
    run_ranks(weights_of_all_kinds, 2)


def extreme_weights(group: pk.Group, algorithm: str) -> None:
    """Ratios that no float32 coefficient can hold."""
    del group
    with pk.Group(algorithm=algorithm) as group:
        for ratio in (2.0**-60, 2.0**-126, 2.0**-140, 2.0**-200, 1e-300):
            weights = [1.0, ratio, 1.0][: group.size]
            for dtype in DTYPES:
                for scale in (1.0, 1.0 if dtype == torch.float16 else 2.0**100):
                    everybody = [random(5, r, (67,), dtype) for r in range(group.size)]
                    everybody[0] /= scale
                    everybody[1] *= scale
                    x = everybody[group.rank].clone()
                    pk.weighted_all_reduce_(x, weights[group.rank], group)
                    oracle.assert_weighted(x, everybody, weights, "mean", (ratio, dtype, scale))
        for unit in (1e-300, 1e300):  # the weights' own size means nothing
            weights = [unit, 3 * unit, unit][: group.size]
            everybody = [random(6, r, (67,), torch.float32) for r in range(group.size)]
            x = everybody[group.rank].clone()
            pk.weighted_all_reduce_(x, weights[group.rank], group)
            oracle.assert_weighted(x, everybody, weights, "mean", unit)


@pytest.mark.parametrize("algorithm", ["auto", "reference"])
def test_huge_and_tiny_weights_keep_the_bound(algorithm):
    run_ranks(extreme_weights, 3, algorithm)


def repeated(group: pk.Group) -> list[str]:
    digests = []
    for _ in range(5):
        tensors = inputs(8, group.rank)
        pk.weighted_all_reduce_(tensors, group.rank + 0.3, group)
        digests.append(digest(tensors))
    return digests


def test_a_result_is_the_same_to_the_bit_in_every_run():
    first, second = run_ranks(repeated, 3), run_ranks(repeated, 3)
    if NATIVE and os.environ.get("PARALLELKIT_ALGORITHM") != "reference":
        assert same([d for by_rank in (first, second) for digests in by_rank for d in digests])
    else:
        assert same(first)


def nothing(group: pk.Group) -> None:
    assert pk.weighted_all_reduce_([], 2, group).item() == 2.0 * group.size
    assert pk.weighted_all_reduce_((), 0, group).item() == 0.0
    assert pk.weighted_all_reduce_([torch.empty(0), torch.empty(3, 0)], 1, group) == group.size
    frozen = torch.nn.Linear(3, 2).requires_grad_(False)
    gradients = [p.grad for p in frozen.parameters() if p.grad is not None]
    assert pk.weighted_all_reduce_(gradients, 1, group) == group.size


@pytest.mark.parametrize("size", [1, 3])
def test_an_empty_list_and_empty_tensors_are_a_no_op_that_counts_the_weights(size):
    run_ranks(nothing, size)


def autograd(group: pk.Group) -> None:
    w = torch.ones(4, requires_grad=True)
    loss = (w * w).sum()
    pk.weighted_all_reduce_(w, 1, group)  # as torch.distributed: without a trace in the graph
    assert w.requires_grad and w.grad_fn is None
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_tensor_that_was_saved_for_backward_counts_as_modified():
    run_ranks(autograd, 2)


# -- 10^5 tiny calls ---------------------------------------------------------------------------


def tiny_calls(group: pk.Group, calls: int, pinned: bool) -> None:
    if pinned:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with pk.Group() as group:
        prepared = []
        for numel in range(1, 66):
            x = torch.empty(numel)
            prepared.append((x, x.numpy(), PreparedAllReduce(x, group)))
        step = float(group.rank + 1)
        half = (group.size + 1) / 2
        for call in range(calls):
            tensor, array, reduce = prepared[call * 31 % 65]
            array.fill(call % 1000 + step)
            reduce.run(1)
            mean = call % 1000 + half
            assert array[0] == mean and array[-1] == mean and (array == mean).all(), call
        del tensor


@pytest.mark.parametrize("pinned", [False, True], ids=["free", "pinned"])
@pytest.mark.slow
def test_100_000_tiny_all_reduces_are_all_right(pinned):
    reference = os.environ.get("PARALLELKIT_ALGORITHM") == "reference" or not NATIVE
    run_ranks(tiny_calls, 2, 500 if reference else 100_000, pinned)

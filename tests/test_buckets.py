"""Where gradients lie, and what a sum of them is relative to."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import parallelkit as pk
from parallelkit.buckets import GradientBuckets, Spec, next_reference
from parallelkit.testing import run_ranks

COUNTS = st.one_of(
    st.integers(1, 2**40).map(float), st.floats(2.0**-40, 2.0**40), st.sampled_from([1.0, 4096.0])
)


def references(weights, units, exact):
    reference, total, found = 0.0, 0.0, []
    for weight, unit in zip(weights, units, strict=True):
        total += weight
        following = next_reference(reference, weight, unit, total, exact)
        found.append((reference, following, total, unit))
        reference = following
    return found


@given(st.lists(st.tuples(COUNTS, st.booleans()), min_size=1, max_size=12), st.booleans())
def test_no_factor_is_a_count(steps, exact):
    """A mean of items comes in times at most 1, and what was there at most doubles."""
    units = [weight if mean else 1.0 for weight, mean in steps]
    for (before, after, _, _), (weight, _) in zip(
        references([w for w, _ in steps], units, exact), steps, strict=True
    ):
        assert weight <= after  # the factor unit / after
        assert before / after <= 2


@given(st.lists(st.tuples(COUNTS, st.booleans()), min_size=1, max_size=12))
def test_for_few_bits_the_factor_is_a_power_of_two_and_the_sum_a_running_mean(steps):
    units = [weight if mean else 1.0 for weight, mean in steps]
    for _, after, total, unit in references([w for w, _ in steps], units, True):
        assert math.frexp(unit / after)[0] == 0.5
        assert total <= after  # |sum| <= largest |gradient|: nothing overflows
        assert after < 2 * max(total, unit)


@pytest.mark.parametrize("exact", [False, True])
def test_equal_weights_need_few_passes_over_the_sum(exact):
    found = references([3.0] * 16, [3.0] * 16, exact)
    passes = sum(before not in (0.0, after) for before, after, _, _ in found)
    assert passes == (4 if exact else 0)


def place(group):
    buckets = GradientBuckets(group, 1000, torch.float32)
    shapes = [(3,), (7, 5), (2, 0), (), (300,), (4, 4)]
    dtypes = [torch.float32, torch.bfloat16, torch.float32, torch.bfloat16, torch.float32] + [
        torch.float64
    ]
    parameters = [
        nn.Parameter(torch.randn(s, dtype=d)) for s, d in zip(shapes, dtypes, strict=True)
    ]
    parameters[1].data = parameters[1].data.t().contiguous().t()
    buckets.append([(Spec.of(str(i), p), p) for i, p in enumerate(parameters)])
    found = []
    for bucket in buckets:
        for slot in bucket.slots:
            assert slot.view.stride() == slot.parameter.stride()
            assert slot.view.shape == slot.parameter.shape
            assert slot.numel == 0 or slot.view.data_ptr() % 64 == 0
            assert slot.view.data_ptr() == bucket.flat[slot.offset :].data_ptr() or not slot.numel
            slot.view.fill_(math.nan)
        assert bucket.flat.nan_to_num().eq(0).all()  # the padding is zero
        found.append((bucket.flat.dtype, [slot.name for slot in bucket.slots]))
    return found


def test_buckets_hold_one_dtype_in_reverse_order_on_lines_of_their_own():
    fp32, fp64 = torch.float32, torch.float64
    assert (
        run_ranks(place, 2)
        == [[(fp32, ["4"]), (fp64, ["5"]), (fp32, ["3", "1"]), (fp32, ["2", "0"])]] * 2
    )


def private(group):
    """The contract of an optimizer that reduces gradients itself."""
    torch.manual_seed(0)
    model = pk.DataParallel(nn.Linear(3, 2, bias=False), group, grad_dtype=torch.float32)
    buckets = model.take_gradients()
    inputs = [torch.randn(4, 3) for _ in range(3)]
    for x, n in zip(inputs, (2, 6, 1), strict=True):
        if group.rank == 0:
            model.backward(model(x).sum(), n)
        assert model.weight.grad is None
    buckets.settle()
    [bucket] = buckets
    [slot] = bucket.slots
    found = slot.used, buckets.weight, (slot.view * buckets.reference).clone()
    expected = sum(x.sum(0).expand(2, 3) * n for x, n in zip(inputs, (2, 6, 1), strict=True))
    model.zero_grad()
    again = slot.used, buckets.weight, buckets.reference
    return found, expected, again


def test_private_gradients_stay_local_sums_until_reset():
    (found, expected, again), (idle, _, _) = run_ranks(private, 2)
    used, weight, total = found
    assert (used, weight) == (True, 9.0)
    torch.testing.assert_close(total, expected)
    assert again == (False, 0.0, 1.0)
    assert idle[:2] == (False, 0.0) and not idle[2].any()

"""Which steps a gradient that is not finite costs, when the gradients come from DataParallel."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import ranks
import torch
from torch import nn

import parallelkit as pk
from parallelkit.ops import cpu
from parallelkit.testing import virtual_ranks

NAN, INF, BIG = math.nan, math.inf, 3e38

# Of each rank the micro-batches: (parameter, factor of its gradient, weight). The gradient of a
# factor f has one element f among ones.
CASES: dict[str, tuple[list[list[tuple[int, float, float]]], bool]] = {
    "all finite": ([[(0, 2.0, 1.0)], [(0, 3.0, 2.0)]], False),
    "nan in the first of two": ([[(0, NAN, 1.0), (0, 1.0, 1.0)], [(0, 1.0, 1.0)]], True),
    "nan in the last of two": ([[(0, 1.0, 1.0), (0, NAN, 1.0)], [(0, 1.0, 1.0)]], True),
    "nan first, then larger weight": ([[(0, NAN, 1.0), (1, 1.0, 5.0)], [(1, 1.0, 1.0)]], True),
    "inf on one rank": ([[(0, 1.0, 1.0)], [(0, INF, 3.0)]], True),
    "-inf on one rank": ([[(0, -INF, 1.0)], [(0, 1.0, 3.0)]], True),
    "nan where only one rank has any": ([[(0, 1.0, 1.0)], [(1, NAN, 1.0)]], True),
    "nan without weight": ([[(0, 1.0, 1.0)], [(0, NAN, 0.0)]], False),
    "nobody but one": ([[(0, 1.0, 1.0)], []], False),
    "too large once weighted": ([[(0, BIG, 0.25)], [(0, BIG, 0.25)]], True),
    "too large over a small weight": (
        [[(0, BIG * 2.0**-39, 1.5 * 2.0**-40)], [(0, BIG * 2.0**-39, 1.5 * 2.0**-40)]],
        True,
    ),
    "large": ([[(0, 1e35, 1.0)], [(0, 1.0, 1.0)]], False),
}
DTYPES = [
    (torch.float32, None),
    (torch.float64, None),
    (torch.bfloat16, None),
    (torch.bfloat16, torch.float32),
]


@pytest.mark.filterwarnings("ignore:ShardedAdamW. a gradient is not finite")
@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda d: f"{d[0]}-{d[1]}".replace("torch.", ""))
@pytest.mark.parametrize("case", CASES)
def test_a_step_is_skipped_where_the_mean_is_not_finite_and_no_other(
    case: str, dtypes: tuple[torch.dtype, torch.dtype | None]
) -> None:
    micros, skips = CASES[case]
    skips = skips and not (case.startswith("too large") and dtypes[0] == torch.float64)
    outcomes = virtual_ranks(lambda g: step_on(g, micros[g.rank], *dtypes), 2)
    for skipped, before, after, later in outcomes:
        assert skipped == int(skips)
        assert (before == after) == skips
        assert later != after, "the next step moves"
    assert ranks.same([outcome[1:] for outcome in outcomes])


def make(
    group: pk.Group, dtype: torch.dtype, grad_dtype: torch.dtype | None
) -> tuple[list[nn.Parameter], pk.DataParallel, pk.ShardedAdamW]:
    parameters = [nn.Parameter(torch.ones(n, dtype=dtype)) for n in (700, 33, 5)]
    model = pk.DataParallel(nn.ParameterList(parameters), group, grad_dtype=grad_dtype)
    return parameters, model, pk.ShardedAdamW(parameters, lr=0.1, data_parallel=model)


def add(model: pk.DataParallel, parameter: nn.Parameter, factor: float, weight: float) -> None:
    """A micro-batch whose gradient is ones but for one `factor`."""
    gradient = torch.ones_like(parameter)
    gradient[17] = factor
    model.backward((parameter * gradient).sum(), weight, reduction="sum")


def step_on(
    group: pk.Group,
    micros: list[tuple[int, float, float]],
    dtype: torch.dtype,
    grad_dtype: torch.dtype | None,
) -> tuple[int, str, str, str]:
    parameters, model, optimizer = make(group, dtype, grad_dtype)
    found = [ranks.digest(p.detach() for p in parameters)]
    if not micros:
        for bucket in model._buckets:
            bucket.flat.fill_(torch.nan)
    for index, factor, weight in micros:
        add(model, parameters[index], factor, weight)
    optimizer.step()
    skipped = optimizer.skipped_steps
    found.append(ranks.digest(p.detach() for p in parameters))
    add(model, parameters[0], 1.0, 1.0)
    optimizer.step()
    found.append(ranks.digest(p.detach() for p in parameters))
    return skipped, found[0], found[1], found[2]


@pytest.mark.parametrize(("scale", "skipped"), [(2.0**-10, 0), (2.0**-40, 1)])
def test_finite_gradients_whose_mean_is_not_are_skipped_too(scale: float, skipped: int) -> None:
    def step(group: pk.Group) -> int:
        parameters, model, optimizer = make(group, torch.float32, None)
        add(model, parameters[0], 1e30, 1.0)
        optimizer._step_scaled(scale)
        return optimizer.skipped_steps

    assert virtual_ranks(step, 2) == [skipped] * 2


def test_one_warning_is_said_also_where_state_is_loaded_in_between() -> None:
    with pytest.warns(RuntimeWarning, match="not finite") as heard:
        assert virtual_ranks(skip_twice, 1) == [2]
    assert len(heard) == 1


def skip_twice(group: pk.Group) -> int:
    parameters, model, optimizer = make(group, torch.float32, None)
    for _ in range(2):
        add(model, parameters[0], NAN, 1.0)
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
    return optimizer.skipped_steps


@pytest.mark.skipif(cpu is None, reason="plain PyTorch copies gradients without looking")
def test_gradients_that_come_once_are_not_read_again_to_judge_them() -> None:
    assert virtual_ranks(count_reads, 2) == [[0, 1, 1]] * 2


def count_reads(group: pk.Group) -> list[int]:
    """Of a step on one micro-batch, of one on two, and of a clipped one."""
    parameters, model, optimizer = make(group, torch.float32, None)
    found = []
    for micros, norm in ((1, None), (2, None), (1, 1.0)):
        optimizer.max_grad_norm = norm
        for _ in range(micros):
            add(model, parameters[0], 2.0, 1.0)
        optimizer._step = optimizer._step or optimizer._prepare()
        passes: Any = optimizer._step.passes
        with mock.patch.object(passes, "measure", wraps=passes.measure) as measure:
            optimizer.step()
        found.append(measure.call_count)
        assert (optimizer.last_grad_norm is None) == (measure.call_count == 0)
    return found


@pytest.mark.skipif(cpu is None, reason="needs the native extension")
@pytest.mark.parametrize("dtype", ranks.DTYPES[:4])
@pytest.mark.parametrize("count", [1, 31, 100, (1 << 20) + 77])
@pytest.mark.parametrize("stream", [False, True], ids=["cached", "streamed"])
def test_a_copied_gradient_is_the_same_and_its_largest_is_known(
    stream: bool, count: int, dtype: torch.dtype
) -> None:
    from parallelkit.buckets import _copy

    gradient = ranks.random(1, 0, (count,), torch.float64).to(dtype)
    for place in {0, count // 2, count - 1}:
        for value in (-1000.0, -INF, INF, NAN, -NAN):
            gradient[place] = value
            for before in (0, 1):  # to where a line begins, and to where none does
                copied = torch.full((before + count,), NAN, dtype=dtype)[before:]
                largest = _copy(copied, gradient, stream)
                assert torch.equal(copied.view(torch.uint8), gradient.view(torch.uint8))
                assert largest == (1000.0 if value == -1000.0 else INF)
        gradient[place] = 0.0

"""What users do to an optimizer's parameters, groups, gradients and state between steps: the step
follows it as torch's does, or refuses it on every rank; it never goes on with what was.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
from torch import nn

import parallelkit as pk
from parallelkit.testing import run_ranks, virtual_ranks


def replace_entry(optimizer: pk.ShardedAdamW, p: nn.Parameter) -> None:
    optimizer.state[p]["exp_avg"] = torch.zeros(3)


def replace_state(optimizer: pk.ShardedAdamW, p: nn.Parameter) -> None:
    optimizer.state[p] = {name: entry.clone() for name, entry in optimizer.state[p].items()}


def clear_state(optimizer: pk.ShardedAdamW, p: nn.Parameter) -> None:
    optimizer.state.clear()


def switch_amsgrad(optimizer: pk.ShardedAdamW, p: nn.Parameter) -> None:
    optimizer.param_groups[0]["amsgrad"] = True


def copy_state(optimizer: pk.ShardedAdamW, p: nn.Parameter) -> None:
    optimizer.state[p] = dict(optimizer.state[p])


@pytest.mark.parametrize("touch", [replace_state, clear_state, switch_amsgrad])
def test_state_that_was_replaced_is_refused_and_may_be_loaded(touch: Callable[..., None]) -> None:
    def rank(group: pk.Group) -> str:
        p = nn.Parameter(torch.ones(300))
        optimizer = pk.ShardedAdamW([p], group=group)
        p.grad = torch.ones(300)
        optimizer.step()
        saved = optimizer.state_dict()
        if group.rank == group.size - 1:
            touch(optimizer, p)
        before = p.detach().clone()
        told = ranks.message_of(RuntimeError, optimizer.step)
        assert torch.equal(p, before)
        optimizer.load_state_dict(saved)
        optimizer.step()
        assert not torch.equal(p, before)
        return told

    told = virtual_ranks(rank, 2)
    assert ranks.same(told)
    assert "[rank 1 of 2]" in told[0]
    assert "load_state_dict" in told[0]


def test_an_entry_of_the_state_cannot_be_replaced_and_a_copied_dict_is_none_the_less_the_state():
    p = nn.Parameter(torch.ones(3))
    optimizer = pk.ShardedAdamW([p])
    with pytest.raises(TypeError):
        replace_entry(optimizer, p)
    copy_state(optimizer, p)
    p.grad = torch.ones(3)
    optimizer.step()
    assert optimizer.state[p]["step"] == 1


@pytest.mark.parametrize("size", [1, 2])
def test_parameter_groups_are_those_of_the_moment(size: int) -> None:
    """A group is replaced by another dict, and one is taken out; torch beside it."""

    def steps(optimizer: Any, parameters: list[nn.Parameter]) -> None:
        for step in range(3):
            for p in parameters:
                p.grad = torch.full_like(p, 0.5 + step)
            if step == 1:
                optimizer.param_groups[0] = {**optimizer.param_groups[0], "lr": 0.3}
            if step == 2:
                optimizer.param_groups.pop()
            optimizer.step()

    def made() -> list[nn.Parameter]:
        return [nn.Parameter(torch.linspace(1, 2, 300)) for _ in range(2)]

    def rank(group: pk.Group) -> list[torch.Tensor]:
        ours = made()
        steps(pk.ShardedAdamW([{"params": [p]} for p in ours], lr=0.1, group=group), ours)
        return [p.detach() for p in ours]

    theirs = made()
    steps(torch.optim.AdamW([{"params": [p]} for p in theirs], lr=0.1), theirs)
    for found in virtual_ranks(rank, size):
        for p, q in zip(found, theirs, strict=True):
            torch.testing.assert_close(p, q.detach(), rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_gradients_that_a_step_cannot_read_are_refused(dtype: torch.dtype) -> None:
    model = pk.DataParallel(nn.Linear(3, 2, dtype=dtype), grad_dtype=torch.float64)
    with pytest.raises(ValueError, match="data_parallel has grad_dtype=torch.float64"):
        pk.ShardedAdamW(model.parameters(), data_parallel=model)
    model.backward(model(torch.ones(1, 3, dtype=dtype)).sum(), 1)  # nobody has taken the gradients
    assert model.module.bias.grad is not None


def other_group(group: pk.Group) -> str:
    model = pk.DataParallel(nn.Linear(3, 2), group)
    with pk.Group() as other:
        return ranks.message_of(
            ValueError,
            lambda: pk.ShardedAdamW(model.parameters(), data_parallel=model, group=other),
        )


def test_the_group_must_be_that_of_data_parallel() -> None:
    for told in run_ranks(other_group, 2):
        assert "group must be that of data_parallel" in told


def test_a_gradient_with_the_negative_bit_has_its_sign() -> None:
    p = nn.Parameter(torch.ones(1))
    optimizer = pk.ShardedAdamW([p], lr=0.1, weight_decay=0.0)
    torch.complex(torch.ones(1), p).conj().imag.sum().backward()
    assert p.grad is not None and p.grad == -1.0
    p.grad = torch.imag(torch.complex(torch.ones(1), torch.ones(1)).conj())
    assert p.grad.is_neg()
    optimizer.step()
    assert p.item() == pytest.approx(1.1)


def test_another_order_of_memory_is_refused_where_no_other_rank_needs_it() -> None:
    p = nn.Parameter(torch.randn(4, 3, 2, 2))
    optimizer = pk.ShardedAdamW([p])
    p.data = p.detach().to(memory_format=torch.channels_last)
    p.grad = torch.randn_like(p)
    with pytest.raises(RuntimeError, match="in another order of memory"):
        optimizer.step()


def test_a_parameter_listed_twice_keeps_its_state_as_in_torch() -> None:
    a, b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    with pytest.warns(UserWarning, match="duplicate"):
        optimizer = pk.ShardedAdamW([a, a, b])
        theirs = torch.optim.AdamW([a, a, b])
    a.grad, b.grad = torch.ones(3), torch.full((3,), 2.0)
    optimizer.step()
    theirs.step()
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["params"] == theirs.state_dict()["param_groups"][0]["params"]
    optimizer.load_state_dict(saved)
    assert torch.equal(optimizer.state[a]["exp_avg"] * 2, optimizer.state[b]["exp_avg"])


def one_works(group: pk.Group) -> list[float]:
    """The first scaled step, and only rank 0 has anything for it."""
    module = nn.Linear(2, 1, bias=False)
    nn.init.ones_(module.weight)
    model = pk.DataParallel(module, group)
    optimizer = pk.ShardedAdamW(model.parameters(), lr=0.1, data_parallel=model)
    scaler = pk.GradScaler(group=group)
    if group.rank == 0:
        model.backward(scaler.scale(model(torch.ones(1, 2)).sum()), 1)
    else:
        model.backward(None, 0)
    scaler.step(optimizer)
    scaler.update()
    return [*module.weight.flatten().tolist(), scaler.get_scale()]


def test_a_rank_without_work_takes_part_in_a_scaled_step() -> None:
    found = run_ranks(one_works, 2)
    assert ranks.same(found)
    assert found[0][0] == pytest.approx(0.899)


def plain_backwards(group: pk.Group) -> list[float]:
    """Two plain loss.backward() on each rank, then a step in one pass."""
    module = nn.Linear(1, 1, bias=False)
    nn.init.ones_(module.weight)
    model = pk.DataParallel(module, group)
    optimizer = pk.ShardedAdamW(
        model.parameters(), lr=0.1, data_parallel=model, max_grad_norm=math.inf
    )
    for factor in (1.0, 5.0):
        model(torch.full((1, 1), factor * (group.rank + 1))).sum().backward()
    optimizer.step()
    assert optimizer.last_grad_norm is not None
    return [float(optimizer.last_grad_norm), module.weight.item()]


def test_plain_backward_passes_add_up_to_the_mean_of_all() -> None:
    found = run_ranks(plain_backwards, 2)
    assert ranks.same(found)
    assert found[0] == pytest.approx([(1.0 + 5.0 + 2.0 + 10.0) / 4, 0.899])


def scales_by_rank(group: pk.Group) -> int:
    """A loss scale on rank 1 alone, and an infinite gradient: every rank comes out of the step."""
    model = pk.DataParallel(nn.Linear(1, 1, bias=False), group)
    optimizer = pk.ShardedAdamW(model.parameters(), data_parallel=model)
    model.backward(model(torch.full((1, 1), math.inf)).sum(), 1)
    optimizer._step_scaled(1.0 + group.rank)
    group.barrier()
    return optimizer.skipped_steps


def test_whether_a_skipped_step_is_told_of_is_agreed() -> None:
    assert run_ranks(scales_by_rank, 2, timeout=30.0) == [1, 1]

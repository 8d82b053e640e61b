"""ShardedAdamW beside tensor parallelism, fully_shard and torch DDP."""

from __future__ import annotations

import warnings

import pytest
import ranks
import torch
from test_optimizer import LR, assert_close, backward_of, batch_of, loss_of, model_of
from torch import nn

import parallelkit as pk
from parallelkit.testing import run_ranks


def test_norm_counts_split_parameters_once_each_and_whole_ones_once() -> None:
    for norm, whole, split in run_ranks(clip_tensor_parallel, 2):
        assert norm == 13.0
        assert whole == pytest.approx(6.0, rel=1e-6)
        assert split in (pytest.approx(1.5, rel=1e-6), pytest.approx(2.0, rel=1e-6))


def clip_tensor_parallel(group: pk.Group) -> tuple[float, float, float]:
    """betas 0 and a large eps make a step lr * gradient / eps."""
    alone = [torch.distributed.new_group([r]) for r in range(2)][group.rank]
    whole, split = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    split.tp_group, split.tp_split_dim = group, 0  # type: ignore[attr-defined]
    optimizer = pk.ShardedAdamW(
        [whole, split],
        lr=2.0**30,
        betas=(0.0, 0.0),
        eps=2.0**30,
        weight_decay=0.0,
        group=pk.Group(alone),
        max_grad_norm=6.5,
    )
    whole.grad, split.grad = torch.full((1,), 12.0), torch.full((1,), 3.0 + group.rank)
    optimizer.step()
    assert optimizer.last_grad_norm is not None
    return optimizer.last_grad_norm.item(), -whole.item(), -split.item()


def test_what_is_not_finite_on_one_tensor_parallel_rank_is_skipped_on_all() -> None:
    """Though each is alone in its data parallel group, and its own gradients are finite."""
    for skipped, values in run_ranks(skip_tensor_parallel, 2):
        assert skipped == 1
        assert values == [0.0, 0.0]


def skip_tensor_parallel(group: pk.Group) -> tuple[int, list[float]]:
    alone = pk.Group([torch.distributed.new_group([r]) for r in range(2)][group.rank])
    whole, split = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    split.tp_group, split.tp_split_dim = group, 0  # type: ignore[attr-defined]
    model = pk.DataParallel(nn.ParameterList([whole, split]), alone)
    optimizer = pk.ShardedAdamW([whole, split], data_parallel=model)
    factor = torch.inf if group.rank == 1 else 1.0
    model.backward((whole + factor * split).sum())
    with warnings.catch_warnings(record=True):
        optimizer.step()
    return optimizer.skipped_steps, [whole.item(), split.item()]


def test_parameters_without_gradient_or_elements_do_not_disturb_the_norm() -> None:
    parameters = [nn.Parameter(torch.zeros(n)) for n in (4, 0, 2)]
    optimizer = pk.ShardedAdamW(
        parameters, lr=1e6, betas=(0.0, 0.0), eps=1e6, weight_decay=0.0, max_grad_norm=1.0
    )
    parameters[0].grad, parameters[1].grad = torch.full((4,), 6.0), torch.zeros(0)
    optimizer.step()
    assert optimizer.last_grad_norm == 12.0
    assert parameters[0].detach().norm().item() == pytest.approx(1.0, rel=1e-4)


def after_plain_means() -> nn.Module:
    """One process, float64, torch.optim.AdamW on the mean of the two ranks' gradients."""
    model = model_of(3, torch.float64)[0:5]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(2):
            (loss_of(model, batch_of(step, rank)) / 2).backward()
        optimizer.step()
    return model


def test_it_steps_the_local_shards_of_fully_sharded_parameters() -> None:
    wanted = after_plain_means()
    for state in run_ranks(step_fsdp, 2):
        assert_close(state, wanted)


def step_fsdp(group: pk.Group) -> dict[str, torch.Tensor]:
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(model_of(3)[0:5])
    optimizer = pk.ShardedAdamW(model.parameters(), lr=LR, max_grad_norm=1e6)
    for step in range(3):
        optimizer.zero_grad()
        backward_of(model, batch_of(step, group.rank))
        optimizer.step()
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()]).full_tensor()
    torch.testing.assert_close(optimizer.last_grad_norm.float(), norm, rtol=1e-5, atol=0)
    state = optimizer.state_dict()["state"]
    assert all(
        entry["exp_avg"].shape == p.shape
        for entry, p in zip(state.values(), model.parameters(), strict=True)
    )
    return {name: p.full_tensor().detach() for name, p in model.named_parameters()}


def test_it_works_beside_torch_ddp() -> None:
    states = run_ranks(step_ddp, 2)
    assert_close(states[0], after_plain_means())
    assert ranks.same([ranks.digest(s.values()) for s in states])


def step_ddp(group: pk.Group) -> dict[str, torch.Tensor]:
    model = nn.parallel.DistributedDataParallel(model_of(3)[0:5])
    optimizer = pk.ShardedAdamW(model.parameters(), lr=LR)
    for step in range(3):
        optimizer.zero_grad()
        backward_of(model, batch_of(step, group.rank))
        optimizer.step()
    return {k: v.clone() for k, v in model.module.state_dict().items()}

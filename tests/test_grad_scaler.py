"""pk.GradScaler: one scale on all ranks, whoever finds what is not finite."""

from __future__ import annotations

import pytest
import ranks
import torch
from torch import nn

import parallelkit as pk
from parallelkit.testing import run_ranks, virtual_ranks


def one_step(group: pk.Group, fused: bool, bad_rank: int | None) -> tuple[float, float, int]:
    """(scale, parameter, skipped) after a step from 0 of gradient 2 on rank 0 and 4 on rank 1."""
    parameter = nn.Parameter(torch.zeros(3))
    model = pk.DataParallel(nn.ParameterList([parameter]), group)
    options = {"lr": 1.0, "betas": (0.0, 0.0), "eps": 1e6, "weight_decay": 0.0}
    optimizer: torch.optim.Optimizer
    if fused:
        optimizer = pk.ShardedAdamW([parameter], data_parallel=model, **options)
    else:
        optimizer = torch.optim.AdamW([parameter], **options)  # averages nothing: each its own
    scaler = pk.GradScaler(init_scale=1024.0, group=group)
    loss = parameter.sum() * (2.0 + 2.0 * group.rank)
    if group.rank == bad_rank:
        loss = loss * torch.inf
    if fused:
        model.backward(scaler.scale(loss))
    else:
        with model.no_sync():
            scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return (
        scaler.get_scale(),
        1e6 * parameter.detach()[0].item(),
        getattr(optimizer, "skipped_steps", 0),
    )


def both(group: pk.Group, bad_rank: int | None) -> list[tuple[float, float, int]]:
    return [one_step(group, fused, bad_rank) for fused in (True, False)]


def test_the_step_takes_the_scale_out_of_the_mean_gradient() -> None:
    for rank, (fused, local) in enumerate(run_ranks(both, 2, None)):
        assert fused == (1024.0, pytest.approx(-3.0, rel=1e-4), 0)
        assert local[1] == pytest.approx(-2.0 - 2.0 * rank, rel=1e-4)


def test_what_one_rank_finds_lowers_the_scale_of_all() -> None:
    for fused, local in run_ranks(both, 2, 1):
        assert fused == (512.0, 0.0, 1)
        assert local == (512.0, 0.0, 0)


def test_torchs_scaler_is_refused_where_gradients_are_local() -> None:
    for message, hint in virtual_ranks(refused, 1):
        assert "parallelkit.GradScaler" in message
        assert "max_grad_norm" in hint


def refused(group: pk.Group) -> tuple[str, str]:
    model = pk.DataParallel(nn.Linear(2, 1), group)
    optimizer = pk.ShardedAdamW(model.parameters(), data_parallel=model)
    scaler = torch.amp.GradScaler("cpu")
    model.backward(scaler.scale(model(torch.ones(1, 2)).sum()))
    message = ranks.message_of(RuntimeError, lambda: scaler.step(optimizer))
    ours = pk.GradScaler(group=group)
    ours.scale(torch.ones(()))
    return message, ranks.message_of(RuntimeError, lambda: ours.unscale_(optimizer))


def test_a_second_step_before_update_is_refused() -> None:
    assert all(message == SECOND for (message,) in virtual_ranks(step_twice, 2))


SECOND = "GradScaler.step: called twice since the last update()"


def step_twice(group: pk.Group) -> list[str]:
    model = pk.DataParallel(nn.Linear(2, 1), group)
    optimizer = pk.ShardedAdamW(model.parameters(), data_parallel=model)
    scaler = pk.GradScaler(group=group)
    for _ in range(2):
        model.backward(scaler.scale(model(torch.ones(1, 2)).sum()))
        scaler.step(optimizer)
        scaler.update()
    model.backward(scaler.scale(model(torch.ones(1, 2)).sum()))
    scaler.step(optimizer)
    return [ranks.message_of(RuntimeError, lambda: scaler.step(optimizer))]


def test_a_step_before_any_loss_was_scaled_is_refused() -> None:
    [message] = virtual_ranks(step_unscaled, 1)
    assert "GradScaler.step: no loss was scaled yet" in message


def step_unscaled(group: pk.Group) -> str:
    model = pk.DataParallel(nn.Linear(2, 1), group)
    optimizer = pk.ShardedAdamW(model.parameters(), data_parallel=model)
    model.backward(model(torch.ones(1, 2)).sum())
    return ranks.message_of(pk.ParallelKitError, lambda: pk.GradScaler(group=group).step(optimizer))


def test_torchs_scaler_works_where_gradients_are_averaged() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = pk.ShardedAdamW([parameter], lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    torch.testing.assert_close(parameter.detach(), torch.full((3,), 0.899))
    assert optimizer.last_grad_norm.item() == pytest.approx(3**0.5)

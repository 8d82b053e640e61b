"""Parameters that some ranks do not use, or do not train, or not yet."""

from __future__ import annotations

import pytest
import torch
from ranks import digest, same
from torch import nn
from training import accumulate, gradients, items, mean_square, mlp, one_process, worst

import parallelkit as pk
from parallelkit.testing import run_ranks

CLOSE = 1e-6


def different_sets(group):
    """Which layers run differs by rank and step; each must get the mean over all items."""

    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList([nn.Linear(5, 3) for _ in range(4)])

        def forward(self, x, choice):
            return sum(self.experts[c](x) for c in choice)

    torch.manual_seed(0)
    model, errors = pk.DataParallel(Routed(), group, bucket_mb=1e-4), []
    choices = [[(0,), (1, 2)], [(3, 0), (3,)], [(2,), (2,)], [(0, 1, 2, 3), (1,)]]
    for step, chosen in enumerate(choices):
        model.zero_grad()
        batches = [((x, c), n) for (x, n), c in zip(items([3, 5], seed=step), chosen, strict=True)]

        def loss_of(m, batch):
            return m(batch[0].to(m.experts[0].weight.dtype), batch[1]).square().mean()

        accumulate(model, [batches[group.rank]], loss_of)
        errors.append(worst(gradients(model), one_process(model.module, batches, loss_of)))
    return errors


def test_ranks_and_steps_use_different_parameters():
    for errors in run_ranks(different_sets, 2):
        assert max(errors) <= CLOSE


def thaw(group):
    model = pk.DataParallel(mlp().requires_grad_(False), group)
    model.module[2].bias.requires_grad_(True)
    found = []
    for frozen in ((), ("0.weight",), ("0.weight", "2.bias"), ()):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in frozen)
        model.zero_grad()
        batches = items([3, 4], seed=len(found))
        accumulate(model, [batches[group.rank]])
        found.append(worst(gradients(model), one_process(model.module, batches)))
    return found


def test_parameters_are_frozen_and_thawed_between_steps():
    for errors in run_ranks(thaw, 2):
        assert max(errors) <= CLOSE


def thaw_alone(group, plain, everywhere):
    """Only what was frozen trains now, on one rank or all, over micro-batches of odd weights."""
    model = pk.DataParallel(mlp().requires_grad_(False), group)
    found = []
    for step in range(2):
        model.module[0].requires_grad_(everywhere or group.rank == 1)
        model.zero_grad()
        batches = items([2, 2] if plain else [2, 3, 1, 7], seed=step)
        mine = batches[group.rank :: 2]
        if plain:
            mean_square(model, mine[0][0]).backward()
        elif model.module[0].weight.requires_grad:
            accumulate(model, mine)
        else:  # its items count, though it computes no gradient of them
            accumulate(model, [(0, sum(n for _, n in mine))], lambda m, _: no_gradient())
        working = batches if everywhere else batches[1::2]
        expected = one_process(mlp().requires_grad_(True), working)
        expected = {n: g if n[0] == "0" else None for n, g in expected.items()}
        if not everywhere:
            share = sum(n for _, n in working) / sum(n for _, n in batches)
            expected = {n: g if g is None else g * share for n, g in expected.items()}
        found.append(worst(gradients(model), expected))
    return found


def no_gradient():
    return torch.zeros((), requires_grad=True) * 1.0


@pytest.mark.parametrize(("plain", "everywhere"), [(False, True), (True, True), (False, False)])
def test_parameters_thaw_when_nothing_else_trains_also_on_one_rank_alone(plain, everywhere):
    for errors in run_ranks(thaw_alone, 2, plain, everywhere):
        assert max(errors) <= 2e-6


def trainable_on_one_rank(group):
    module = mlp()
    module[0].requires_grad_(group.rank == 1)
    model, batches = pk.DataParallel(module, group), items([3, 4])
    accumulate(model, [batches[group.rank]])
    # Rank 0's items have no gradient there, and count.
    return model.module[0].weight.grad, one_process(mlp(), [batches[1]])["0.weight"] * 4 / 7


def test_a_parameter_frozen_on_one_rank_counts_zeros_there():
    for found, expected in run_ranks(trainable_on_one_rank, 2):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


def frozen_and_stepped(group, later):
    module = mlp()
    module[0].requires_grad_(later or group.rank == 1)
    model = pk.DataParallel(module, group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        module[0].requires_grad_(group.rank == 1)
        optimizer.zero_grad()
        accumulate(model, [items([3, 4], seed=step)[group.rank]])
        optimizer.step()
    return digest(model.parameters())


@pytest.mark.parametrize("later", [False, True])
def test_replicas_stay_equal_where_a_parameter_is_frozen_on_one_rank(later):
    assert same(run_ranks(frozen_and_stepped, 2, later))

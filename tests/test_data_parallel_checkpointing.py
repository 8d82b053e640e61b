"""Activation checkpointing inside a DataParallel, and around it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import accumulate, gradients, items, mean_square, mlp, one_process, worst

import parallelkit as pk
from parallelkit.testing import run_ranks

CLOSE = 1e-6


class Checkpointed(nn.Module):
    """Blocks that are run again in backward; one is used twice, and outside as well."""

    def __init__(self, mode):
        super().__init__()
        self.mode = mode
        self.blocks = nn.ModuleList([nn.Linear(5, 5) for _ in range(4)])
        self.head = nn.Linear(5, 5)

    def forward(self, x):
        x = self.head(x)  # also used last: the first gradient to come is not its only one
        for block in [*self.blocks, self.blocks[0], self.head]:
            if self.mode == "none":
                x = torch.tanh(block(x))
            else:
                x = checkpoint(
                    lambda y, block=block: torch.tanh(block(y)),
                    x,
                    use_reentrant=self.mode == "reentrant",
                )
        return self.head(x)


def checkpointed(group, mode, plain):
    torch.manual_seed(0)
    model = pk.DataParallel(Checkpointed(mode), group, bucket_mb=1e-4)
    reference = Checkpointed("none")
    reference.load_state_dict(model.state_dict())
    errors = []
    for step in range(3):
        model.zero_grad()
        batches = items([2, 2] if plain else [3, 4], seed=step)
        if plain:
            mean_square(model, batches[group.rank][0]).backward()
        else:
            accumulate(model, batches[group.rank :][:1])
        errors.append(worst(gradients(model), one_process(reference, batches)))
    return errors


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("mode", ["reentrant", "non-reentrant"])
def test_activation_checkpointing_also_of_parameters_used_several_times(mode, plain):
    for errors in run_ranks(checkpointed, 2, mode, plain):
        assert max(errors) <= 2e-6


def checkpointed_whole(group, reentrant, plain):
    model, batches = pk.DataParallel(mlp(), group), items([4, 4])
    x = batches[group.rank][0].float().requires_grad_()
    loss = checkpoint(model, x, use_reentrant=reentrant).square().sum(-1).mean()
    if plain:
        loss.backward()
    else:
        model.backward(loss, 4)
    return worst(gradients(model), one_process(model.module, batches))


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_the_wrapper_itself_under_activation_checkpointing(reentrant, plain):
    assert max(run_ranks(checkpointed_whole, 2, reentrant, plain)) <= CLOSE

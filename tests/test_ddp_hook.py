"""The communication hook gives torch's own DDP the weighted mean."""

from __future__ import annotations

import math

import pytest
import torch
from ranks import digest, message_of, same
from torch.nn.parallel import DistributedDataParallel
from training import Leaf, gradients, items, mean_square, mlp, one_process, worst

import parallelkit as pk
from parallelkit.testing import run_ranks


def wrap(module, group, **options):
    model = DistributedDataParallel(module, **options)
    state, hook = pk.ddp_comm_hook(group)
    model.register_comm_hook(state, hook)
    return model, state


def weighted_steps(group, dtype):
    model, state = wrap(mlp(dtype=dtype), group, bucket_cap_mb=1e-4)
    errors = []
    for step in range(3):
        model.zero_grad()
        batches = items([1 + step, 4, 2], seed=step)
        batch, state.weight = batches[group.rank]
        mean_square(model, batch).backward()
        errors.append(worst(gradients(model.module), one_process(model.module, batches)))
    return errors, digest(gradients(model.module).values())


@pytest.mark.parametrize("algorithm", ["auto", "reference"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
def test_ddp_gradients_are_means_over_items(monkeypatch, algorithm, dtype, bound):
    monkeypatch.setenv("PARALLELKIT_ALGORITHM", algorithm)
    found = run_ranks(weighted_steps, 3, dtype)
    for errors, _ in found:
        assert max(errors) <= bound
    assert same([grads for _, grads in found])


def unweighted(group):
    model, _ = wrap(mlp(), group)
    batches = items([1, 4])
    mean_square(model, batches[group.rank][0]).backward()
    return worst(gradients(model.module), one_process(model.module, [(x, 1.0) for x, _ in batches]))


def test_the_default_weight_is_ddps_mean_of_means():
    assert max(run_ranks(unweighted, 2)) <= 1e-6


def idle_rank(group):
    model, state = wrap(Leaf(3), group)
    state.weight = [0, 4][group.rank]
    model([math.nan, 2.0][group.rank]).backward()
    return model.module.p.grad.tolist()


def test_a_rank_of_weight_0_spreads_no_nan():
    assert run_ranks(idle_rank, 2) == [[2.0] * 3] * 2


def bad_weight(group):
    model, state = wrap(mlp(), group, bucket_cap_mb=1e-4)
    texts, errors = [], []
    batches = items([3, 4])
    batch, weight = batches[group.rank]
    for kind, wrong in ((ValueError, -1), (TypeError, "3")):
        state.weight = [3, wrong][group.rank]
        texts.append(message_of(kind, lambda: mean_square(model, batch).backward()))
        model.zero_grad()
        state.weight = weight
        mean_square(model, batch).backward()
        errors.append(worst(gradients(model.module), one_process(model.module, batches)))
        model.zero_grad()
    return texts, errors


def test_a_bad_weight_raises_on_every_rank_and_the_next_backward_works():
    for (number, kind), errors in run_ranks(bad_weight, 2):
        assert "-1.0 on rank 1" in number
        assert "got str [rank 1 of 2]" in kind
        assert max(errors) <= 1e-6

"""On a GPU: the optimizer's pass over virtual ranks, against float64, torch and the CPU."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
from gpu import DEVICE, SIZES, on_device, only_on_a_gpu
from ranks import digest, random, same, weights_of
from torch import nn
from training import Leaf, items, mean_square, mlp

import parallelkit as pk
from parallelkit.nn.functional import linear
from parallelkit.testing import virtual_ranks

pytestmark = pytest.mark.gpu


class Leaves(nn.Module):
    """Parameters of odd sizes whose gradients are given."""

    SHAPES = ((257,), (1000, 3), (5,), (70001,), (0,), ())

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        drawn = [random(99, i, shape, torch.float32) for i, shape in enumerate(self.SHAPES)]
        values = [(value / 100).to(device, dtype) for value in drawn]
        self.leaves = nn.ParameterList([nn.Parameter(value) for value in values])

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        pairs = zip(self.leaves, gradients, strict=True)
        return sum((p * g.to(p.device, p.dtype)).sum() for p, g in pairs)


def gradients(step: int, rank: int) -> list[torch.Tensor]:
    return [random(step * 16 + i, rank, shape, torch.float32) for i, shape in enumerate(
        Leaves.SHAPES
    )]  # fmt: skip


def trained(group, dtype, device, steps, weights, **options):
    model = pk.DataParallel(Leaves(dtype, device), group, overlap=False)
    optimizer = pk.ShardedAdamW(model.parameters(), group=group, data_parallel=model, **options)
    for step in range(steps):
        given = gradients(step, group.rank)
        if weights[group.rank] == 0:
            given = [g.fill_(math.nan) for g in given]
        model.backward(model(given), weights[group.rank])
        optimizer.step()
    norm = optimizer.last_grad_norm
    parameters = [p.detach().cpu() for p in model.parameters()]
    return parameters, optimizer.state_dict()["state"], None if norm is None else norm.item()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("norm", [None, 0.5], ids=["plain", "clipped"])
def test_fp32_steps_are_those_of_float64(size, norm):
    weights, options = weights_of(size, size), {"lr": 0.01, "weight_decay": 0.1}
    wanted = Leaves(torch.float64, "cpu")
    with torch.no_grad():
        for p, q in zip(wanted.leaves, Leaves(torch.float32, "cpu").leaves, strict=True):
            p.copy_(q)
    exact = torch.optim.AdamW(wanted.parameters(), **options)
    norms = []
    for step in range(3):
        everybody = [gradients(step, rank) for rank in range(size)]
        for index, p in enumerate(wanted.leaves):
            parts = [
                g[index].double() * (w / sum(weights))
                for g, w in zip(everybody, weights, strict=True)
                if w > 0
            ]
            p.grad = torch.stack(parts).sum(0)
        if norm is not None:
            norms.append(nn.utils.clip_grad_norm_(wanted.parameters(), norm).item())
        exact.step()

    def rank(group):
        return trained(group, torch.float32, DEVICE, 3, weights, max_grad_norm=norm, **options)

    ranks = on_device(rank, size)
    assert same([digest(parameters) for parameters, _, _ in ranks])
    parameters, state, measured = ranks[0]
    if norm is not None:
        assert measured == pytest.approx(norms[-1], rel=1e-6)
    for index, (found, p) in enumerate(zip(parameters, wanted.leaves, strict=True)):
        if p.numel():
            assert (found - p).abs().max() <= 3e-6 * (p.abs().max() + 1), index
            kept = exact.state[p]
            for name in ("exp_avg", "exp_avg_sq"):
                error = (state[index][name] - kept[name]).abs().max()
                assert error <= 1e-5 * kept[name].abs().max(), (index, name)
            assert state[index]["step"] == 3


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, "int8"])
@pytest.mark.parametrize("master", [True, False])
def test_every_format_gives_what_the_cpu_gives(size, dtype, state_dtype, master):
    if dtype == torch.float16 and not master and size > 1:
        pytest.skip("as with masters")
    weights = weights_of(size + 1, size)
    options = {"lr": 0.01, "state_dtype": state_dtype, "master_weights": master, "amsgrad": True}
    here = on_device(lambda group: trained(group, dtype, DEVICE, 3, weights, **options), size)
    there = virtual_ranks(lambda group: trained(group, dtype, "cpu", 3, weights, **options), size)
    assert same([digest(parameters) for parameters, _, _ in here])
    for found, wanted in zip(here[0][0], there[0][0], strict=True):
        if found.numel():
            # The same arithmetic; only 1/(1 - beta^t) may differ in its last bit before rounding,
            # and with it where a value falls between two codes or two bfloat16 numbers.
            unequal = (found != wanted).float().mean()
            assert unequal <= 0.02, unequal
            scale = wanted.float().abs() + 0.02
            assert ((found - wanted).float().abs() <= 0.02 * scale).all()


def test_a_gradient_that_is_not_finite_moves_nothing_and_is_counted():
    def rank(group):
        model = pk.DataParallel(Leaf(5000).to(DEVICE), group, overlap=False)
        optimizer = pk.ShardedAdamW(model.parameters(), group=group, data_parallel=model)
        steps = []
        for value in (1.0, math.nan, math.inf, 1.0):
            before = model.p.detach().clone()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model.backward(model(torch.full((5000,), value, device=DEVICE)), 1 + group.rank)
                optimizer.step()
            steps.append(not torch.equal(before, model.p))
        return steps, optimizer.skipped_steps, optimizer.state_dict()["state"][0]["step"].item()

    assert on_device(rank, 2) == [([True, False, False, True], 2, 2)] * 2


def test_steps_on_averaged_gradients_are_torchs():
    module = mlp().to(DEVICE)
    wanted = copy.deepcopy(module).double()
    exact = torch.optim.AdamW(wanted.parameters(), lr=0.02)

    def rank(group):
        model = pk.DataParallel(copy.deepcopy(module), group, overlap=False)
        optimizer = pk.ShardedAdamW(model.parameters(), lr=0.02, group=group)
        for step in range(3):
            model.zero_grad()
            (x, weight) = items([2, 3], seed=step)[group.rank]
            model.backward(mean_square(model, x.to(DEVICE)), weight)
            optimizer.step()
        return [p.detach().double() for p in model.parameters()]

    for step in range(3):
        exact.zero_grad()
        for x, weight in items([2, 3], seed=step):
            (mean_square(wanted, x.to(DEVICE)) * (weight / 5)).backward()
        exact.step()
    for found in on_device(rank, 2):
        for a, b in zip(found, wanted.parameters(), strict=True):
            torch.testing.assert_close(a, b.detach(), rtol=1e-4, atol=1e-5)


@only_on_a_gpu
def test_weight_gradients_are_added_in_place_on_the_callers_stream():
    torch.manual_seed(0)
    x = torch.randn(64, 128, device=DEVICE, dtype=torch.bfloat16)
    w = torch.randn(96, 128, device=DEVICE, dtype=torch.bfloat16)
    with pk.Group(device=DEVICE) as group:
        module = nn.Linear(128, 96, bias=False).to(DEVICE, torch.bfloat16)
        module.weight.data.copy_(w)
        module.forward = lambda x: linear(x, module.weight)
        model = pk.DataParallel(module, group, grad_dtype=torch.float32)
        for turn in range(4):
            model.backward(model(x).float().sum() / 64, 1, sync=turn == 3)
        wanted = torch.ones(64, 96, device=DEVICE).double().T @ x.double() / 64
        error = (module.weight.grad.double() - wanted).abs().max() / wanted.abs().max()
        assert error < 2e-2

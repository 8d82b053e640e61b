"""Whatever the options, groups, schedules and weights, each step is torch.optim.AdamW's.

The reference starts every step from the state of ours, in float64, so that the bound is that of one
step: the roundings of the update, and what those of the mean gradient do to it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import ranks
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, OneCycleLR

import parallelkit as pk
from parallelkit.testing import virtual_ranks

SHAPES = [(5,), (300,), (7, 33), (), (0,), (520,), (3, 2)]
STEPS = 3
UNIT = {torch.float64: 2.0**-53}  # of the others it is float32's, in which they are added
SCHEDULES: dict[str, Any] = {
    "none": lambda o: LambdaLR(o, lambda step: 1.0),
    "by group": lambda o: LambdaLR(o, [lambda s, g=g: 1.0 / (1 + s + g) for g in range(3)]),
    "exponential": lambda o: ExponentialLR(o, 0.7),
    "one cycle": lambda o: OneCycleLR(o, [0.02, 0.1, 0.01], total_steps=STEPS + 1),
}
BETAS = st.one_of(st.sampled_from([0.0, 0.9, 0.999]), st.floats(0.0, 0.999))
GROUP = st.fixed_dictionaries(
    {
        "lr": st.floats(-5.0, 0.0).map(lambda x: 10.0**x),
        "betas": st.tuples(BETAS, BETAS),
        "eps": st.floats(-10.0, -2.0).map(lambda x: 10.0**x),
        "weight_decay": st.floats(0.0, 0.5),
        "amsgrad": st.booleans(),
        "maximize": st.booleans(),
    }
)
RUN = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 10**6),
        "dtype": st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
        "fused": st.booleans(),
        "schedule": st.sampled_from(list(SCHEDULES)),
        "tensor_lr": st.booleans(),
        "groups": st.tuples(GROUP, GROUP),
        "max_grad_norm": st.sampled_from([None, 0.5, 1e9]),
    }
)


@pytest.mark.skipif(not ranks.NATIVE, reason="virtual ranks need the native extension")
@settings(max_examples=60)
@given(size=st.integers(1, 4), run=RUN)
def test_every_step_is_torchs_on_the_mean_gradient(size: int, run: dict[str, Any]) -> None:
    digests = virtual_ranks(lambda group: train(group, run), size)
    assert ranks.same(digests), "replicas are equal to the bit after every step"


def groups_of(parameters: list[nn.Parameter], run: dict[str, Any]) -> list[dict[str, Any]]:
    """Two groups, interleaved in every bucket, and one without parameters."""
    groups = []
    for options, part in zip(run["groups"], (parameters[::2], parameters[1::2]), strict=True):
        lr = torch.tensor(options["lr"], dtype=torch.float64) if run["tensor_lr"] else options["lr"]
        groups.append({**options, "lr": lr, "params": part})
    return [*groups, {**groups[0], "params": []}]


def given_gradients(run: dict[str, Any], step: int, size: int) -> list[list[torch.Tensor | None]]:
    """Of each rank and parameter; None where the rank does not use it. The last one nobody does."""
    generator = torch.Generator().manual_seed(run["seed"] + step)
    rows = []
    for rank in range(size):
        row: list[torch.Tensor | None] = []
        for index, shape in enumerate(SHAPES[:-1]):
            used = size == 1 or float(torch.rand((), generator=generator)) < 0.7
            seed = run["seed"] + 100 * step + index
            row.append(ranks.random(seed, rank, shape, run["dtype"]) if used else None)
        rows.append([*row, None])
    return rows


class Mean(NamedTuple):
    """A mean gradient and the bound of its error."""

    value: torch.Tensor
    error: torch.Tensor


def mean_of(rows: list[list[torch.Tensor | None]], weights: list[float], index: int) -> Mean | None:
    """Of one parameter; None where nobody used it."""
    used = [(w, row[index]) for w, row in zip(weights, rows, strict=True) if w > 0]
    shares = [w / math.fsum(weights) * g.double() for w, g in used if g is not None]
    if not shares:
        return None
    mean, size = sum(shares), sum(share.abs() for share in shares)
    unit = unit_of(next(g for _, g in used if g is not None).dtype)
    return Mean(mean, unit * (mean.abs() + (len(weights) + 2) * size))


def unit_of(dtype: torch.dtype) -> float:
    """Of what a parameter of that dtype is updated in; twice in float64, as is the reference."""
    return 2 * 2.0**-53 if dtype == torch.float64 else 2.0**-24


def clipped(means: list[Mean | None], most: float | None, unit: float) -> list[Mean | None]:
    """By the norm of all; what is known of that is known of it with the error of all."""
    if most is None:
        return means
    known = [mean for mean in means if mean is not None]
    norm, error = (
        math.sqrt(sum(float(t.square().sum()) for t in ts))
        for ts in ([m.value for m in known], [m.error for m in known])
    )
    clip = min(1.0, most / (norm + 1e-6))
    relative = (error / norm if clip < 1.0 else 0.0) + 2 * unit
    return [m and Mean(clip * m.value, clip * (m.error + relative * m.value.abs())) for m in means]


MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


def values(optimizer: pk.ShardedAdamW) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
    """The step, the moments and the value of each parameter, which is its master if it has one."""
    state = optimizer.state_dict()["state"]
    found = {}
    for index, p in enumerate(optimizer.parameters()):
        entry = state.get(index, {})
        if p.dtype in (torch.bfloat16, torch.float16) and entry:
            assert torch.equal(p, entry["master_param"].to(p.dtype)), "its master rounded"
        found[p] = {
            "step": entry.get("step", torch.tensor(0.0)),
            "value": entry.get("master_param", p.detach()).double(),
            **{name: entry.get(name, torch.zeros_like(p)).detach().double() for name in MOMENTS},
        }
    return found


def step_from(
    reference: torch.optim.AdamW,
    before: dict[torch.Tensor, torch.Tensor],
    exact: nn.Parameter,
    mean: Mean | None,
) -> None:
    """Give the reference the state that ours had."""
    with torch.no_grad():
        exact.copy_(before["value"])
    exact.grad = None if mean is None else mean.value
    reference.state[exact] = {name: before[name].clone() for name in ("step", *MOMENTS)}


def assert_close(
    found: dict[str, torch.Tensor],
    before: dict[str, torch.Tensor],
    wanted: dict[str, torch.Tensor],
    mean: Mean,
    options: dict[str, Any],
    dtype: torch.dtype,
) -> None:
    """The bound of INTERFACE and what the error of the gradient does to numerator and root."""
    unit, tiny = unit_of(dtype), float(torch.finfo(dtype).tiny)
    g, delta = mean.value.abs(), mean.error
    count = float(wanted["step"])
    beta1, beta2 = options["betas"]
    bias1, bias2 = 1 - beta1**count, 1 - beta2**count
    rate = float(options["lr"]) / bias1
    slope = math.sqrt((1 - beta2) / bias2)  # of the root; at most, by the gradient
    largest = wanted["max_exp_avg_sq" if options["amsgrad"] else "exp_avg_sq"]
    denominator = (largest / bias2).sqrt() + options["eps"]
    lowest = (denominator - slope * delta).clamp(min=options["eps"])
    held = before["exp_avg"].abs()
    size = beta1 * held + (1 - beta1) * g
    # torch's lerp multiplies the difference from what was held by 1 - beta1, which is rounded.
    lerp = 2 * unit * (held + g)
    moved = rate * delta * ((1 - beta1) / lowest + (size + delta) * slope / lowest**2)
    bounds = {
        "value": 8 * unit * (before["value"].abs() + rate * size / denominator)
        + rate * lerp / denominator
        + moved,
        "exp_avg": 4 * unit * size + lerp + (1 - beta1) * delta,
        "exp_avg_sq": 6 * unit * wanted["exp_avg_sq"] + (1 - beta2) * (2 * g + delta) * delta,
    }
    for name, bound in bounds.items():
        assert bool(((found[name] - wanted[name]).abs() <= bound + tiny).all()), name
    assert found["step"] == count


def train(group: pk.Group, run: dict[str, Any]) -> list[str]:
    """The hashes of the parameters after each step."""
    dtype, fused = run["dtype"], run["fused"]
    starts = [ranks.random(run["seed"] + i, 9, s, dtype) for i, s in enumerate(SHAPES)]
    parameters = [nn.Parameter(start.clone()) for start in starts]
    model = pk.DataParallel(nn.ParameterList(parameters), group, bucket_mb=1e-3)
    ours = pk.ShardedAdamW(
        groups_of(parameters, run),
        group=group,
        data_parallel=model if fused else None,
        max_grad_norm=run["max_grad_norm"],
    )
    exact = [nn.Parameter(start.double()) for start in starts]
    reference = torch.optim.AdamW(groups_of(exact, run))
    options = {q: g for g in reference.param_groups for q in g["params"]}
    schedules = [SCHEDULES[run["schedule"]](optimizer) for optimizer in (ours, reference)]
    weights = ranks.weights_of(run["seed"], group.size) if fused else [1.0]
    digests = []
    for step in range(STEPS):
        rows = given_gradients(run, step, len(weights))
        means = [mean_of(rows, weights, i) for i in range(len(SHAPES))]
        means = clipped(means, run["max_grad_norm"], unit_of(dtype))
        before = values(ours)
        for p, q, mean in zip(parameters, exact, means, strict=True):
            step_from(reference, before[p], q, mean)
        give(model, parameters, rows[group.rank if fused else 0], weights, fused)
        ours.step()
        reference.step()
        after = values(ours)
        for p, q, mean in zip(parameters, exact, means, strict=True):
            if mean is None:
                assert all(torch.equal(t, after[p][name]) for name, t in before[p].items())
            else:
                wanted = {"value": q.detach(), **reference.state[q]}
                assert_close(after[p], before[p], wanted, mean, options[q], dtype)
        for schedule in schedules:
            schedule.step()
        digests.append(ranks.digest(p.detach() for p in parameters))
    return digests


def give(
    model: pk.DataParallel,
    parameters: list[nn.Parameter],
    gradients: list[torch.Tensor | None],
    weights: list[float],
    fused: bool,
) -> None:
    """This rank's gradients: through a backward pass, or as the mean that they are already."""
    pairs = list(zip(parameters, gradients, strict=True))
    if not fused:
        for p, g in pairs:
            p.grad = g
    elif weights[model.group.rank] > 0:
        nothing = torch.zeros((), requires_grad=True)
        loss = sum(((p * g).sum() for p, g in pairs if g is not None), start=nothing)
        model.backward(loss, weights[model.group.rank])

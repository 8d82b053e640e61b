"""One step of the kernel: against float64, across instruction sets, and in fewer bits."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import ranks
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import parallelkit as pk
from parallelkit.adamw import MOMENTS, _random_bits
from parallelkit.testing import virtual_ranks

UNIT = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}
SIZES = [1, 7, 16, 255, 256, 257, 1000]  # of the parameters: whole vectors, blocks, and tails


def exact_step(
    p: Any, g: Any, m: Any, v: Any, x: Any, count: int, options: dict[str, Any]
) -> tuple[Any, Any]:
    """The parameter after the step in extended precision, and what the error is measured by.

    The bias corrections alone are float64, as in torch: 1 - beta^t cancels, and is part of it.
    """
    bias1, bias2 = (1 - b**count for b in options["betas"])
    beta1, beta2 = (np.longdouble(b) for b in options["betas"])
    lr, eps = np.longdouble(options["lr"]), np.longdouble(options["eps"])
    p, g, m, v, x = (t.double().numpy().astype(np.longdouble) for t in (p, g, m, v, x))
    g = -g if options["maximize"] else g
    scale = beta1 * abs(m) + (1 - beta1) * abs(g)
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    v = np.maximum(v, x) if options["amsgrad"] else v
    denominator = np.sqrt(v / bias2) + eps
    rate = lr / bias1
    new = p * (1 - lr * np.longdouble(options["weight_decay"])) - rate * m / denominator
    return new, abs(p) + rate * scale / denominator


BETAS = st.one_of(st.sampled_from([0.0, 0.9, 0.95, 0.99, 0.999]), st.floats(0.0, 0.9999))
OPTIONS = st.fixed_dictionaries(
    {
        "lr": st.floats(-6.0, 0.0).map(lambda x: 10.0**x),
        "betas": st.tuples(BETAS, BETAS),
        "eps": st.floats(1e-12, 1e-2),
        "weight_decay": st.floats(0.0, 0.5),
        "amsgrad": st.booleans(),
        "maximize": st.booleans(),
    }
)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    options=OPTIONS,
    seed=st.integers(0, 10**6),
    done=st.integers(0, 1000),
    size=st.integers(1, 3),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_step_is_within_eight_roundings_of_float64(
    options: dict[str, Any], seed: int, done: int, size: int, dtype: torch.dtype
) -> None:
    start = state_of(seed, dtype)
    outcomes = virtual_ranks(lambda g: one_step(g, start, done, options), size)
    for after in outcomes:
        for (p, g, m, v, x), found in zip(start, after, strict=True):
            wanted, scale = exact_step(p, g, m, v, x, done + 1, options)
            error = abs(found.double().numpy().astype(np.longdouble) - wanted)
            tiny = float(torch.finfo(dtype).tiny)
            assert np.all(error <= 8 * UNIT[dtype] * scale + tiny), options
    assert ranks.same([ranks.digest(after) for after in outcomes])


Start = list[tuple[torch.Tensor, ...]]


def state_of(seed: int, dtype: torch.dtype) -> Start:
    """Parameter, gradient and moments of each size, of very different magnitudes."""
    state = []
    for index, size in enumerate(SIZES):
        p, g, m, v, x = (
            ranks.random(seed * 7 + index, draw, (size,), torch.float64) for draw in range(5)
        )
        p[::2] = 0.0  # where nothing hides the error of the update
        state.append(tuple(t.to(dtype) for t in (p, g, m, v.square(), x.square())))
    return state


def one_step(
    group: pk.Group, start: Start, done: int, options: dict[str, Any], **more: Any
) -> list[torch.Tensor]:
    parameters = [nn.Parameter(p.clone()) for p, *_ in start]
    optimizer = pk.ShardedAdamW(parameters, group=group, **options, **more)
    entries = {}
    for index, (_, _, m, v, x) in enumerate(start):
        entries[index] = {"step": torch.tensor(float(done)), "exp_avg": m, "exp_avg_sq": v}
        if options["amsgrad"]:
            entries[index]["max_exp_avg_sq"] = x
    packed = torch.optim.AdamW(parameters, **options).state_dict()
    optimizer.load_state_dict({**packed, "state": entries})
    for parameter, (_, g, *_) in zip(parameters, start, strict=True):
        parameter.grad = g.clone()
    optimizer.step()
    return [p.detach().clone() for p in parameters]


def test_the_exact_step_is_torchs() -> None:
    """The oracle above against torch.optim.AdamW in float64."""
    options = {
        "lr": 0.01,
        "betas": (0.8, 0.95),
        "eps": 1e-6,
        "weight_decay": 0.1,
        "amsgrad": True,
        "maximize": True,
    }
    parameter = nn.Parameter(torch.randn(50, dtype=torch.float64))
    optimizer = torch.optim.AdamW([parameter], **options)
    for step in range(1, 4):
        old = optimizer.state.get(parameter)
        zeros = torch.zeros(50)
        moments = [old[k].clone() if old else zeros for k in ("exp_avg", "exp_avg_sq")]
        most = old["max_exp_avg_sq"].clone() if old else zeros
        parameter.grad = torch.randn(50, dtype=torch.float64)
        wanted, scale = exact_step(
            parameter.detach().clone(), parameter.grad, *moments, most, step, options
        )
        optimizer.step()
        assert np.all(abs(parameter.detach().numpy() - wanted) <= 20 * 2.0**-53 * scale)


PATHS = """
import sys; sys.path.insert(0, {tests!r})
import torch, ranks, test_adam
import parallelkit as pk
from parallelkit.ops import cpu
from parallelkit.testing import virtual_ranks
options = dict(lr=.01, betas=(.9, .99), eps=1e-8, weight_decay=.1, amsgrad=True, maximize=False)
digests = [cpu.kernels()]
for dtype in ranks.DTYPES[:4]:
    for kind in (torch.float32, torch.bfloat16, "int8"):
        for masters in (True, False):
            with pk.Group() as group:
                more = dict(state_dtype=kind, master_weights=masters, max_grad_norm=1.0)
                start = test_adam.state_of(1, dtype)
                start += [tuple(t.repeat(5) for t in start[-1])]
                digests.append(ranks.digest(test_adam.one_step(group, start, 3, options, **more)))

# Two ranks from 4.2 million elements on, and one with masters from 2.1 million on, write parameters
# past the caches; where they do not begin on a line, they do not.
for dtype in ranks.DTYPES[:4]:
    start = test_adam.state_of(1, dtype)
    large = [*start, tuple(t.repeat(4300) for t in start[-1])]
    def step(group, state):
        return test_adam.one_step(group, state, 3, options, master_weights=dtype != torch.bfloat16)
    alone = ranks.digest(virtual_ranks(lambda g: step(g, start), 2)[0])
    for after in virtual_ranks(lambda g: step(g, large), 2):
        assert ranks.digest(after[:-1]) == alone, dtype
        digests.append(ranks.digest(after))
found = []
for offset in (0, 3):
    parameter = torch.nn.Parameter(torch.ones(2**22 + offset, dtype=torch.bfloat16)[offset:])
    with pk.Group() as group:
        optimizer = pk.ShardedAdamW([parameter], group=group)
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    found.append(parameter.detach())
assert torch.equal(*found)
print(*digests)
"""


def test_every_instruction_set_gives_the_same_bits() -> None:
    code = PATHS.format(tests=os.path.dirname(__file__))
    found = {}
    for name in ("portable", "avx2", "avx512"):
        ended = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PARALLELKIT_ISA": name},
            capture_output=True,
            text=True,
            check=False,
        )
        if ended.returncode == 0:
            used, *digests = ended.stdout.split()
            assert used == name
            found[name] = digests
        else:
            assert "no such path" in ended.stderr, (ended.returncode, ended.stderr)
    assert "portable" in found
    assert ranks.same(list(found.values()))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", [torch.bfloat16, "int8"])
def test_fewer_bits_give_the_same_numbers_at_any_world_size(kind: Any, fused: bool) -> None:
    runs = [virtual_ranks(lambda g: some_steps(g, kind, fused), size) for size in (1, 2, 3)]
    assert ranks.same([digest for run in runs for digest in run])


def some_steps(group: pk.Group, kind: Any, fused: bool) -> str:
    """On gradients that are the mean at any world size; in the fused mode rank 0 has all of it."""
    generator = torch.Generator().manual_seed(0)
    sizes = (9001, 300, 5000)
    parameters = [
        nn.Parameter(torch.randn(n, generator=generator).to(dtype))
        for n in sizes
        for dtype in (torch.float32, torch.bfloat16)
    ]
    model = pk.DataParallel(nn.ParameterList(parameters), group, bucket_mb=0.03) if fused else None
    optimizer = pk.ShardedAdamW(
        parameters,
        group=group,
        data_parallel=model,
        state_dtype=kind,
        master_weights=False,
        lr=0.01,
    )
    for _ in range(3):
        gradients = [torch.randn(p.shape, generator=generator).to(p.dtype) for p in parameters]
        if model is None:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
        elif group.rank == 0:
            pairs = zip(parameters, gradients, strict=True)
            model.backward(torch.stack([(p * g).float().sum() for p, g in pairs]).sum())
        optimizer.step()
    entries = [e for entry in optimizer.state_dict()["state"].values() for e in entry.values()]
    return ranks.digest([p.detach() for p in parameters] + entries)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", [torch.bfloat16, "int8"])
def test_each_step_and_each_parameter_draws_its_own_bits(kind: Any, fused: bool) -> None:
    """Of equal parameters, each in a bucket of its own, on the same gradient twice."""
    parameters = [nn.Parameter(torch.zeros(5000)) for _ in range(3)]
    gradient = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    model = pk.DataParallel(nn.ParameterList(parameters), bucket_mb=0.01)
    optimizer = pk.ShardedAdamW(
        parameters, betas=(0.0, 0.0), state_dtype=kind, data_parallel=model if fused else None
    )
    found = []
    for _ in range(2):
        if fused:
            model.backward(torch.stack([(p * gradient).sum() for p in parameters]).sum())
        else:
            for p in parameters:
                p.grad = gradient
        optimizer.step()
        state = optimizer.state_dict()["state"].values()
        found += [entry[name] for entry in state for name in MOMENTS[:2]]
    for name, places in (("exp_avg", found[::2]), ("exp_avg_sq", found[1::2])):
        for i, one in enumerate(places):
            for other in places[:i]:
                assert float((one != other).float().mean()) > 0.1, name


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, "int8"])
def test_threads_that_share_a_step_do_not_change_it(kind: Any) -> None:
    threads, found = torch.get_num_threads(), []
    for count in (1, 3, 5):
        torch.set_num_threads(count)
        found.append(some_large_steps(kind))
    torch.set_num_threads(threads)
    assert ranks.same([digest for digest, _ in found])
    norms = torch.tensor([norm for _, norm in found], dtype=torch.float64)
    torch.testing.assert_close(norms, norms[:1].expand(3), rtol=1e-12, atol=0)


def some_large_steps(kind: Any) -> tuple[str, float]:
    """The hash of everything, and the norm of the last gradient.

    So many elements, not all of which move, that several threads are worth starting.
    """
    generator = torch.Generator().manual_seed(0)
    parameters = [
        nn.Parameter(torch.randn(n, generator=generator)) for n in (450_001, 50_000, 199_999)
    ]
    with pk.Group() as group:
        optimizer = pk.ShardedAdamW(
            parameters, group=group, state_dtype=kind, max_grad_norm=float("inf")
        )
        for step in range(3):
            for index, parameter in enumerate(parameters):
                gradient = torch.randn(parameter.shape, generator=generator)
                parameter.grad = None if (step, index) == (2, 1) else gradient
            optimizer.step()
        assert optimizer.last_grad_norm is not None
        entries = [e for s in optimizer.state_dict()["state"].values() for e in s.values()]
        digest = ranks.digest([p.detach() for p in parameters] + entries)
        return digest, optimizer.last_grad_norm.item()


@contextlib.contextmanager
def stepping(way: str) -> Iterator[pk.Group]:
    """A group whose steps are the kernel's, or plain PyTorch's."""
    if way == "native":
        with pk.Group() as group:
            yield group
    else:
        with (
            pk.Group(algorithm="reference") as group,
            mock.patch("parallelkit.distributed_step.cpu", None),
        ):
            yield group


@pytest.mark.parametrize("way", ["native", "plain"])
@pytest.mark.parametrize(("kind", "tolerance"), [(torch.bfloat16, 0.008), ("int8", 0.1)])
def test_rounded_moments_are_near_and_right_on_average(
    kind: Any, tolerance: float, way: str
) -> None:
    """betas 1/2: the first step's moments are g/2 and g²/2."""
    g = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0)) + 0.5
    parameter = nn.Parameter(torch.zeros_like(g))
    with stepping(way) as group:
        optimizer = pk.ShardedAdamW([parameter], betas=(0.5, 0.5), state_dtype=kind, group=group)
        parameter.grad = g.clone()
        optimizer.step()
    entry = optimizer.state_dict()["state"][0]
    for name, exact in (("exp_avg", g.double() / 2), ("exp_avg_sq", g.double().square() / 2)):
        error = entry[name].double() - exact
        blocks = exact.abs().view(-1, 256).amax(1).repeat_interleave(256)
        bound = exact.abs() if kind == torch.bfloat16 else (exact.abs() * blocks).sqrt()
        assert float(error.abs().max()) > 0, "it rounds"
        assert bool((error.abs() <= tolerance * bound + 1e-3 * blocks).all())
        assert abs(float(error.mean())) < 4 * float(error.std()) / len(g) ** 0.5
    assert optimizer.state_bytes() < (4.1 if kind == torch.bfloat16 else 2.1) * len(g)


@pytest.mark.parametrize("way", ["native", "plain"])
def test_a_small_square_beside_a_large_one_is_never_rounded_to_zero(way: str) -> None:
    """A step divides by its root: by eps alone it would be a thousand times too large."""
    parameter = nn.Parameter(torch.zeros(4096))
    with stepping(way) as group:
        optimizer = pk.ShardedAdamW(
            [parameter], lr=1.0, betas=(0.9, 0.9), state_dtype="int8", group=group
        )
        for _ in range(20):
            parameter.grad = torch.full_like(parameter, 1e-4)
            parameter.grad[::256] = 1e3
            optimizer.step()
    assert bool((optimizer.state_dict()["state"][0]["exp_avg_sq"] > 0).all())
    assert float(parameter.detach().abs().max()) < 10 * 20


@pytest.mark.parametrize("way", ["native", "plain"])
def test_bfloat16_without_masters_moves_on_average_by_the_whole_step(way: str) -> None:
    """One step of 1e-4 from 1.0: to nearest it would be lost, here 1 in 39 elements takes it."""
    parameter = nn.Parameter(torch.ones(1 << 16, dtype=torch.bfloat16))
    with stepping(way) as group:
        optimizer = pk.ShardedAdamW(
            [parameter], lr=1e-4, weight_decay=0.0, master_weights=False, group=group
        )
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    values = parameter.detach().double()
    assert set(values.unique().tolist()) == {1.0, 1.0 - 2.0**-8}
    assert float(values.mean()) == pytest.approx(1 - 1e-4, abs=1e-5)
    assert "master_param" not in optimizer.state_dict()["state"][0]


@pytest.mark.parametrize("kind", [torch.bfloat16, "int8"])
def test_plain_pytorch_draws_the_bits_of_the_kernel(kind: Any) -> None:
    """A step without a rounding of its own: the same random bits, the same codes, also of tails."""
    found = []
    for way in ("native", "plain"):
        generator = torch.Generator().manual_seed(0)
        dtypes = itertools.cycle(
            (torch.bfloat16, torch.float32)
        )  # apart, but numbered as they come
        parameters = [
            nn.Parameter(torch.randn(n, generator=generator).bfloat16().to(dtype))
            for n, dtype in zip((5000, 4097, *SIZES), dtypes, strict=False)
        ]
        with stepping(way) as group:
            optimizer = pk.ShardedAdamW(
                parameters,
                betas=(0.0, 0.0),
                lr=2.0**-12,
                weight_decay=0.0,
                eps=0.0,
                amsgrad=True,
                state_dtype=kind,
                master_weights=False,
                group=group,
            )
            for parameter in parameters:
                gradient = torch.randn(parameter.shape, generator=generator).bfloat16()
                parameter.grad = gradient.to(parameter.dtype)
            optimizer.step()
        state = optimizer.state_dict()["state"].values()
        moments = [entry[name] for entry in state for name in MOMENTS]
        found.append([*(p.detach() for p in parameters), *moments])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_random_bits_are_uniform_and_independent_of_each_other() -> None:
    """Those of one element in two, of neighbours, of blocks, of steps and of parameters."""
    count, steps = 1 << 16, range(1, 9)

    def bits(name: str, parameter: int = 3, step: int = 0, place: int = 0) -> torch.Tensor:
        drawn = [
            _random_bits(name, s + step, parameter, 0, count + 256, torch.device("cpu"))
            for s in steps
        ]
        return torch.stack(drawn)[:, place : place + count].reshape(-1)

    draws = {name: bits(name) for name in ("exp_avg", "exp_avg_sq", "param")}
    others = {
        **{f"{name} beside": drawn for name, drawn in draws.items()},
        **{
            f"{name} {at}": bits(name, **at)
            for name in draws
            for at in (
                *({"place": place} for place in (1, 2, 3, 4, 8, 16, 32, 256)),
                {"step": 1},
                {"parameter": 4},
            )
        },
    }
    cells = 16
    for name, drawn in draws.items():
        assert int(drawn.min()) >= 0 and int(drawn.max()) < 1 << 16
        for other, beside in others.items():
            if other == f"{name} beside":
                beside = (drawn & 15) << 12  # its lowest bits beside its highest
            table = torch.bincount((drawn >> 12) * cells + (beside >> 12), minlength=cells**2)
            expected = len(drawn) / cells**2
            chi = float(((table - expected).square() / expected).sum())
            free = cells**2 - 1
            assert abs(chi - free) < 6 * (2 * free) ** 0.5, (name, other, chi)


def test_every_nan_stays_one_when_rounded() -> None:
    """A gradient's, in the parameter and both moments, where the step is told not to look."""
    patterns = torch.arange(0x7F81, 0x8000, dtype=torch.int32)
    patterns = torch.cat([patterns, patterns - 0x8000]).to(torch.int16)
    parameter = nn.Parameter(torch.ones(len(patterns), dtype=torch.bfloat16))
    optimizer = pk.ShardedAdamW(
        [parameter], state_dtype=torch.bfloat16, master_weights=False, skip_nonfinite=False
    )
    parameter.grad = patterns.view(torch.bfloat16)
    optimizer.step()
    state = optimizer.state[parameter]
    for tensor in (parameter.detach(), state["exp_avg"], state["exp_avg_sq"]):
        assert bool(tensor.isnan().all())


def test_the_largest_square_stays_the_largest_when_rounded() -> None:
    parameter = nn.Parameter(torch.zeros(5000))
    optimizer = pk.ShardedAdamW([parameter], amsgrad=True, state_dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    entry = optimizer.state_dict()["state"][0]
    assert bool((entry["max_exp_avg_sq"] >= entry["exp_avg_sq"]).all())
    assert bool((entry["max_exp_avg_sq"] > entry["exp_avg_sq"]).any())


@pytest.mark.parametrize("scale", [2.0**-110, 2.0**-140])
def test_extreme_scales_add_in_double(scale: float) -> None:
    """The factor that such a loss scale asks for may be beyond the range of float."""
    parameter = nn.Parameter(torch.zeros(300))
    model = pk.DataParallel(nn.ParameterList([parameter]))
    optimizer = pk.ShardedAdamW(
        model.parameters(), lr=1.0, data_parallel=model, betas=(0.0, 0.0), eps=1.0, weight_decay=0.0
    )
    model.backward((parameter * scale).sum())
    optimizer._step_scaled(scale)
    torch.testing.assert_close(parameter.detach(), torch.full((300,), -0.5))

"""The step in one pass: how much it moves, and what counts as a gradient for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
from torch import nn

import parallelkit as pk
from parallelkit.testing import virtual_ranks

pytestmark = pytest.mark.skipif(not ranks.NATIVE, reason="needs the native extension")

SHAPES = [(1000,), (70, 31), (3,)]


def made(
    group: pk.Group, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[pk.DataParallel, pk.ShardedAdamW]:
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SHAPES]
    model = pk.DataParallel(nn.ParameterList(parameters), group)
    return model, pk.ShardedAdamW(parameters, data_parallel=model, **options)


def loss_of(model: pk.DataParallel, step: int) -> torch.Tensor:
    """Its gradient is random, another on each rank."""
    pairs = [
        (p, ranks.random(10 * step + i, model.group.rank, p.shape, p.dtype))
        for i, p in enumerate(model.parameters())
    ]
    return torch.stack([(p * g).sum() for p, g in pairs]).sum()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_number_is_moved_once_and_clipping_reads_the_gradients_once_more(size: int) -> None:
    """Bytes of all ranks, a parameter: R gradients, the parameter, two moments both ways, R copies.

    Float32 and, with a master both ways, bfloat16.
    """
    for dtype, value, least in ((torch.float32, 4, 4), (torch.bfloat16, 2, 8)):
        plain = size * value + least + 16 + size * value
        if dtype == torch.float32:
            assert size != 2 or plain == 36
        for norm, wanted in ((None, plain), (1.0, plain + size * value)):
            counted = virtual_ranks(lambda g, d=dtype, n=norm: bytes_moved(g, d, n), size)
            assert sum(counted) == wanted * sum(torch.Size(s).numel() for s in SHAPES)


def bytes_moved(group: pk.Group, dtype: torch.dtype, norm: float | None) -> int:
    """Of one step, by this rank."""
    model, optimizer = made(group, dtype, max_grad_norm=norm)
    optimizer._step = optimizer._prepare()
    passes: Any = optimizer._step.passes
    model.backward(loss_of(model, 0))
    optimizer.step()
    return sum(passes.native.traffic)


FORGETTING: dict[str, Callable[[pk.DataParallel, pk.ShardedAdamW], None]] = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "optimizer, to zeros": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model": lambda model, optimizer: model.zero_grad(),
    "model, to zeros": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "a step": lambda model, optimizer: optimizer.step(),
}


def step_on(group: pk.Group, number: int) -> str:
    model, optimizer = made(group)
    model.backward(loss_of(model, number), 2.0)
    optimizer.step()
    return ranks.digest(p.detach() for p in model.parameters())


@pytest.mark.parametrize("way", FORGETTING)
def test_what_was_accumulated_is_forgotten(way: str) -> None:
    def forget(group: pk.Group) -> str:
        model, optimizer = made(group)
        start = [p.detach().clone() for p in model.parameters()]
        model.backward(loss_of(model, 1), 7.0)
        FORGETTING[way](model, optimizer)
        if way == "a step":  # begin anew but for what it may have left in the buckets
            with torch.no_grad():
                for p, value in zip(model.parameters(), start, strict=True):
                    p.copy_(value)
            optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})
        model.backward(loss_of(model, 2), 2.0)
        optimizer.step()
        return ranks.digest(p.detach() for p in model.parameters())

    assert virtual_ranks(forget, 2) == virtual_ranks(lambda g: step_on(g, 2), 2)


def test_a_closure_may_clear_run_and_return_the_loss() -> None:
    """The order of Lightning: everything but the step happens inside of it."""

    def by_closure(group: pk.Group) -> tuple[float, str]:
        model, optimizer = made(group)

        def closure() -> torch.Tensor:
            assert torch.is_grad_enabled()
            optimizer.zero_grad()
            loss = loss_of(model, 2)
            model.backward(loss, 2.0)
            return loss.detach()

        loss = optimizer.step(closure)
        assert model.total_weight == 2.0 * group.size
        return loss.item(), ranks.digest(p.detach() for p in model.parameters())

    found = virtual_ranks(by_closure, 2)
    assert [digest for _, digest in found] == virtual_ranks(lambda g: step_on(g, 2), 2)
    assert found[0][0] != found[1][0], "each rank has its own loss back"

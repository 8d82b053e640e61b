"""For the tests of data parallelism: the same objective, computed by one process in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import parallelkit as pk

Item = tuple[Any, float]  # a micro-batch and its weight
LossOf = Callable[[nn.Module, Any], torch.Tensor]
Gradients = dict[str, torch.Tensor | None]


class Leaf(nn.Module):
    """One parameter whose gradient is what forward is given (its conjugate, where complex)."""

    def __init__(self, *shape: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.zeros(shape, dtype=dtype))

    def forward(self, gradient: torch.Tensor | float) -> torch.Tensor:
        if not isinstance(gradient, torch.Tensor):
            gradient = torch.full(self.p.shape, gradient, dtype=self.p.dtype)
        return (self.p * gradient).sum()


def mlp(seed: int = 0, dtype: torch.dtype = torch.float32, inputs: int = 5) -> nn.Sequential:
    """Odd sizes, the same on every rank."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(inputs, 7), nn.GELU(), nn.Linear(7, 3)).to(dtype)


def items(counts: Sequence[int], seed: int = 1, inputs: int = 5) -> list[Item]:
    """Micro-batches of so many samples each, in float64, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(count, inputs, generator=generator, dtype=torch.float64), float(count))
        for count in counts
    ]


def mean_square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A mean over samples, in the dtype of the parameters."""
    return model(x.to(next(model.parameters()).dtype)).square().sum(-1).mean()


def one_process(
    module: nn.Module, batches: Sequence[Item], loss_of: LossOf = mean_square
) -> Gradients:
    """The gradients of sum w L / sum w, in float64; `module` stays as it is."""
    whole = copy.deepcopy(module).double()
    whole.zero_grad()
    total = sum(weight for _, weight in batches)
    for batch, weight in batches:
        if weight > 0:
            (loss_of(whole, batch) * (weight / total)).backward()
    return {name: parameter.grad for name, parameter in whole.named_parameters()}


def accumulate(model: pk.DataParallel, mine: Sequence[Item], loss_of: LossOf = mean_square) -> None:
    """A step's backward passes over this rank's micro-batches, synced at the last."""
    if not mine:
        model.backward(None, weight=0)
    for index, (batch, weight) in enumerate(mine, start=1):
        model.backward(loss_of(model, batch), weight, sync=index == len(mine))


def gradients(model: nn.Module) -> Gradients:
    """Copies of what is in `.grad`."""
    return {
        name: None if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }


def worst(found: Gradients, expected: Gradients) -> float:
    """The largest relative error over all gradients; infinite where only one of the two is None."""
    assert found.keys() == expected.keys()
    errors = [0.0]
    for name, wanted in expected.items():
        got = found[name]
        if got is None or wanted is None:
            errors.append(0.0 if got is wanted else float("inf"))
        elif wanted.numel():
            wide = torch.complex128 if wanted.is_complex() else torch.float64
            error = (got.to(wide) - wanted.to(wide)).abs().max() / wanted.abs().max()
            errors.append(float(error) if bool(error.isfinite()) else float("inf"))
    return max(errors)

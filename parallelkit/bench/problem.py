"""What every optimizer in a benchmark gets, and what has to come of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..errors import ParallelKitError
from ..group import Group
from .collectives import gpt_cuts

__all__ = ["OPTIONS", "Problem"]

OPTIONS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.01}


class Problem:
    """Parameters, gradients and weights that every candidate gets."""

    def __init__(self, group: Group, numel: int) -> None:
        self.group, self.numel, self.cuts = group, numel, gpt_cuts(numel)
        self.weight, self.total = float(group.rank + 1), sum(range(1, group.size + 1))
        self.start = torch.randn(numel, generator=torch.Generator().manual_seed(99))
        self.gradients = [
            torch.randn(numel, generator=torch.Generator().manual_seed(r))
            for r in range(group.size)
        ]
        self.gradient = self.gradients[group.rank]

    def parameters(self, cuts: list[tuple[int, int]]) -> list[nn.Parameter]:
        """New ones."""
        return [nn.Parameter(self.start[a:b].clone()) for a, b in cuts]

    def check(
        self, name: str, parameters: Sequence[torch.Tensor], cuts: list[tuple[int, int]]
    ) -> None:
        """Compare the first and the last tensor with one step in float64.

        An element may be off by some roundings of itself, and by what the rounding of its mean
        gradient does to the first step lr g / (|g| + eps), which is a lot only where g is nearly 0.
        """
        u, lr, eps = 2.0**-24, OPTIONS["lr"], OPTIONS["eps"]
        for index in (0, -1):
            part = slice(*cuts[index])
            shares = [(r + 1) / self.total * g[part].double() for r, g in enumerate(self.gradients)]
            mean = torch.stack(shares).sum(0)
            exact = nn.Parameter(self.start[part].double())
            exact.grad = mean
            torch.optim.AdamW([exact], **OPTIONS).step()
            rounding = (self.group.size + 2) * u * torch.stack(shares).abs().sum(0)
            least = (mean.abs() - rounding).clamp(min=0) + eps
            bound = 8 * u * (exact.detach().abs() + lr) + lr * (rounding * eps / least**2).clamp(
                max=2
            )
            error = (parameters[index].detach().double() - exact.detach()).abs()
            if not bool((error <= bound).all()):
                worst = float((error / bound).max())
                raise ParallelKitError(f"bench optimizer: {name} is wrong by {worst:g} bounds")

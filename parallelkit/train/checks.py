"""What the demonstration claims, measured: the gradients are one process's, the replicas equal.

The gradients are held against float64, where how a batch is cut no longer shows. The bound takes
one process in fp32 as its measure: with every parameter moved by one rounding, it is off by delta
(inputs and arithmetic together, for each tensor by norm). Sums over n tokens round n times, which
in any other order comes to about sqrt(n) roundings (Higham and Mary 2019, A New Approach to
Probabilistic Rounding Error Analysis), so a right gradient lies within sqrt(n) · delta.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .data import MicroBatch
from .one_process import backward, mean_of_means, mean_over_tokens

Gradients = dict[str, Tensor]  # by parameter name, float64


@dataclass(frozen=True)
class GradientCheck:
    """The parameter whose gradient came closest to its bound at one step.

    Errors and bound are norms relative to the norm of that gradient in float64.
    """

    step: int
    parameter: str
    error: float
    bound: float
    plain_error: float  # of the plain mean of means

    @property
    def ok(self) -> bool:
        """Whether every gradient lies within its bound; one with a NaN does not."""
        return self.error <= self.bound


class GradientChecker:
    """Computes a model's gradients again, in one process and in float64.

    Args:
        model: gives the shape; its parameters are read anew at every check.
        seed: draws, with the step, the directions of the one rounding.
    """

    def __init__(self, model: nn.Module, seed: int) -> None:
        self._double = copy.deepcopy(model).double()
        self._single = copy.deepcopy(model)
        self._seed = seed

    def check(
        self,
        model: nn.Module,
        step: int,
        whole: Sequence[MicroBatch],
        shares: Sequence[Sequence[MicroBatch]],
    ) -> GradientCheck:
        """Compare the gradients model has with those of one process at the same parameters.

        Args:
            whole: the global batch, cut without regard to ranks.
            shares: the same batch as the ranks cut it, for the plain mean of means.
        """
        self._double.load_state_dict(model.state_dict())
        self._single.load_state_dict(model.state_dict())
        backward(self._double, mean_over_tokens(whole))
        exact = gradients(self._double)
        backward(self._single, mean_of_means(shares))
        plain = gradients(self._single)
        generator = torch.Generator().manual_seed(self._seed + step)
        move_by_one_rounding(self._single, generator)
        backward(self._single, mean_over_tokens(whole))
        moved = gradients(self._single)

        error, plain_error, delta = (
            {name: ((other[name] - g).norm() / g.norm()).item() for name, g in exact.items()}
            for other in (gradients(model), plain, moved)
        )
        roundings = math.sqrt(sum(batch.tokens for batch in whole))
        rows = [
            GradientCheck(step, name, error[name], roundings * delta[name], plain_error[name])
            for name in exact
        ]
        return closest(rows)


def closest(checks: Iterable[GradientCheck]) -> GradientCheck:
    """The one that came closest to its bound; before all, one that is beyond it or has a NaN."""
    return max(checks, key=lambda check: (not check.ok, check.error / check.bound))


def gradients(model: nn.Module) -> Gradients:
    """A copy of the gradients a model has now; zeros where it has none."""
    return {
        name: torch.zeros_like(p, dtype=torch.float64) if p.grad is None else p.grad.double()
        for name, p in model.named_parameters()
    }


def move_by_one_rounding(model: nn.Module, generator: torch.Generator) -> None:
    """Replace every parameter by the next number above or below it, at random."""
    with torch.no_grad():
        for parameter in model.parameters():
            up = torch.rand(parameter.shape, generator=generator) < 0.5
            direction = torch.where(up, math.inf, -math.inf).to(parameter)
            parameter.copy_(torch.nextafter(parameter, direction))


def digest(model: nn.Module) -> str:
    """The SHA-256 of all parameters and buffers, to compare replicas to the bit."""
    sha = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        sha.update(name.encode())
        sha.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return sha.hexdigest()

"""Whole training steps under what shards the optimizer: ours, FSDP2 and DeepSpeed's ZeRO.

The loss has given gradients and costs no more than a copy of them, so that what is timed beyond it
is what a sharded optimizer adds to a model: collecting gradients, averaging them, AdamW, equal
parameters again.
The libraries other than ours get gradients that are weighted already.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ..data_parallel import DataParallel
from ..optimizer import ShardedAdamW
from .measure import Candidate
from .problem import OPTIONS, Problem

__all__ = ["LOSS", "OURS", "whole_steps"]

LOSS = "the loss alone"
OURS = "DataParallel + ShardedAdamW"
_BLOCKS = 12  # FSDP2 gathers and scatters block by block, as its users have it do for layers

Cuts = list[tuple[int, int]]
Parameters = Callable[[], Sequence[torch.Tensor]]  # as they are now, each whole


class _Given(torch.autograd.Function):
    """A loss of 0 whose gradient is given."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.gradient = gradient
        return parameter.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.gradient, None


_given: Any = _Given.apply  # untyped in torch


class _Block(nn.Module):
    def __init__(self, parameters: list[nn.Parameter], gradients: list[torch.Tensor]) -> None:
        super().__init__()
        self.parameters_ = nn.ParameterList(parameters)
        self.gradients = gradients

    def forward(self) -> torch.Tensor:
        pairs = zip(self.parameters_, self.gradients, strict=True)
        return torch.stack([_given(p, g) for p, g in pairs]).sum()


class _Model(nn.Module):
    def __init__(self, start: torch.Tensor, gradient: torch.Tensor, cuts: Cuts) -> None:
        super().__init__()
        each = -(-len(cuts) // _BLOCKS)
        self.blocks = nn.ModuleList(
            _Block(
                [nn.Parameter(start[a:b].clone()) for a, b in part],
                [gradient[a:b] for a, b in part],
            )
            for part in (cuts[i : i + each] for i in range(0, len(cuts), each))
        )

    def forward(self) -> torch.Tensor:
        return torch.stack([block() for block in self.blocks]).sum()


def whole_steps(problem: Problem) -> dict[str, Candidate]:
    """One call each: loss, backward and step. Their first step is checked."""
    local = _model(problem, problem.gradient)

    def step_loss() -> None:
        local().backward()
        local.zero_grad()

    candidates: dict[str, Candidate] = {LOSS: step_loss}
    candidates[OURS] = _checked(problem, OURS, *_ours(problem))
    name = "FSDP2, torch fused AdamW"
    candidates[name] = _checked(problem, name, *_fsdp(problem))
    if importlib.util.find_spec("deepspeed") is not None:
        for stage in (1, 2):
            name = f"DeepSpeed ZeRO-{stage}, torch fused AdamW"
            candidates[name] = _checked(problem, name, *_deepspeed(problem, stage))
    return candidates


def _model(problem: Problem, gradient: torch.Tensor) -> _Model:
    return _Model(problem.start, gradient, problem.cuts)


def _weighted(problem: Problem) -> _Model:
    """The model for those who average over ranks."""
    return _model(problem, problem.gradient * (problem.weight / problem.total * problem.group.size))


def _checked(problem: Problem, name: str, step: Candidate, parameters: Parameters) -> Candidate:
    """The step, once its first call was right."""
    step()
    problem.check(name, parameters(), problem.cuts)
    return step


def _ours(problem: Problem) -> tuple[Candidate, Parameters]:
    model = DataParallel(_model(problem, problem.gradient), problem.group)
    optimizer = ShardedAdamW(
        model.parameters(), data_parallel=model, skip_nonfinite=False, **OPTIONS
    )

    def step() -> None:
        model.backward(model(), problem.weight)
        optimizer.step()

    return step, lambda: list(model.parameters())


def _fsdp(problem: Problem) -> tuple[Candidate, Parameters]:
    model = _weighted(problem)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **OPTIONS)

    def step() -> None:
        model().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, lambda: [cast(DTensor, p).full_tensor() for p in model.parameters()]


def _deepspeed(problem: Problem, stage: int) -> tuple[Candidate, Parameters]:
    """An engine over the process group that runs already."""
    group, model = problem.group, _weighted(problem)
    launcher = {"RANK": group.rank, "LOCAL_RANK": group.rank, "WORLD_SIZE": group.size}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}  # asked for, not used
    os.environ.update({name: str(value) for name, value in (launcher | address).items()})
    deepspeed = importlib.import_module("deepspeed")
    deepspeed.utils.logger.setLevel("ERROR")
    configuration = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,  # it clips at 1 unless told not to
    }
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **OPTIONS)
    engine = deepspeed.initialize(
        model=model, optimizer=optimizer, config=configuration, dist_init_required=False
    )[0]

    def step() -> None:
        engine.backward(engine())
        engine.step()

    return step, lambda: list(engine.module.parameters())

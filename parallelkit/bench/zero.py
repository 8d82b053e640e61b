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
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ..data_parallel import DataParallel
from ..group import Group
from ..optimizer import ShardedAdamW
from .measure import Candidate

__all__ = ["LOSS", "OURS", "whole_steps"]

LOSS = "the loss alone"
OURS = "DataParallel + ShardedAdamW"
_BLOCKS = 12  # FSDP2 gathers and scatters block by block, as its users have it do for layers

Cuts = list[tuple[int, int]]
Check = Callable[[str, list[torch.Tensor]], None]


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


def whole_steps(
    group: Group,
    start: torch.Tensor,
    gradient: torch.Tensor,
    weight: float,
    total: float,
    cuts: Cuts,
    options: dict[str, Any],
    check: Check,
) -> dict[str, Candidate]:
    """One call each: loss, backward and step. Their first step is checked.

    Args:
        group: the ranks.
        start: the parameters, [n].
        gradient: of this rank's loss, [n].
        weight: of this rank's loss.
        total: of all weights.
        cuts: where each parameter begins and ends in them.
        options: of AdamW.
        check: raises unless the parameters, one after another, are those after one step.
    """
    scaled = gradient * (weight / total * group.size)  # the others average over ranks
    local = _Model(start, gradient, cuts)

    def step_loss() -> None:
        local().backward()
        local.zero_grad()

    candidates: dict[str, Candidate] = {LOSS: step_loss}

    model = DataParallel(_Model(start, gradient, cuts), group)
    ours = ShardedAdamW(model.parameters(), data_parallel=model, skip_nonfinite=False, **options)

    def step_ours() -> None:
        model.backward(model(), weight)
        ours.step()

    step_ours()
    check(OURS, [p.detach() for p in model.parameters()])
    candidates[OURS] = step_ours

    sharded = _Model(start, scaled, cuts)
    for block in sharded.blocks:
        fully_shard(block)
    fully_shard(sharded)
    torch_adamw = torch.optim.AdamW(sharded.parameters(), fused=True, **options)

    def step_fsdp() -> None:
        sharded().backward()
        torch_adamw.step()
        torch_adamw.zero_grad()

    step_fsdp()
    check("FSDP2", [cast(DTensor, p).full_tensor() for p in sharded.parameters()])
    candidates["FSDP2, torch fused AdamW"] = step_fsdp

    if importlib.util.find_spec("deepspeed") is not None:
        for stage in (1, 2):
            engine = _deepspeed(group, _Model(start, scaled, cuts), stage, options)

            def step_deepspeed(engine: Any = engine) -> None:
                engine.backward(engine())
                engine.step()

            name = f"DeepSpeed ZeRO-{stage}, torch fused AdamW"
            step_deepspeed()
            check(name, [p.detach() for p in engine.module.parameters()])
            candidates[name] = step_deepspeed
    return candidates


def _deepspeed(group: Group, model: nn.Module, stage: int, options: dict[str, Any]) -> Any:
    """An engine over the process group that runs already."""
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
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **options)
    return deepspeed.initialize(
        model=model, optimizer=optimizer, config=configuration, dist_init_required=False
    )[0]

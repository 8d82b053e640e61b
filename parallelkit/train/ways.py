"""The ways in which the demonstration trains its model.

parallel     all ranks, through parallelkit
one process  plain PyTorch on the whole batch
plain mean   plain PyTorch, the means of the ranks' micro-batches averaged without weights
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import parallelkit as pk

from .data import MicroBatch
from .model import PLAN
from .one_process import Weighted, backward


class ParallelRun:
    """Training by all ranks, through parallelkit.

    Args:
        module: whole; split in place over `tensor_group`, if there is one.
        group: ranks with different parts of a batch.
    """

    def __init__(
        self, module: nn.Module, group: pk.Group, tensor_group: pk.Group | None, lr: float
    ) -> None:
        self.group = group
        self._whole = copy.deepcopy(module)
        if tensor_group is not None:
            pk.tensor_parallel(module, tensor_group, PLAN)
        self.model = pk.DataParallel(module, group)
        self.optimizer = pk.ShardedAdamW(self.model.parameters(), lr=lr, group=group)

    def backward(self, share: Sequence[MicroBatch]) -> float:
        """Set the gradients of the global batch, this rank having a share; return its loss."""
        self.optimizer.zero_grad()
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.group.device)
        for index, batch in enumerate(share, 1):
            loss = self.model(batch.inputs, batch.targets)
            self.model.backward(loss, weight=batch.tokens, sync=index == len(share))
            loss_sum += loss.detach() * batch.tokens
        tokens = sum(batch.tokens for batch in share)
        pk.weighted_all_reduce_([loss_sum], tokens, self.group, reduction="sum")
        return loss_sum.item()

    def whole(self) -> nn.Module:
        """The model, unsplit, with the parameters and gradients of now; collective."""
        self._whole.load_state_dict(pk.gather_state_dict(self.model.module))
        gradients = pk.gather_gradients(self.model.module)
        for name, parameter in self._whole.named_parameters():
            parameter.grad = gradients.get(name)
        return self._whole


class OneProcessRun(nn.Module):
    """Training in one process, in plain PyTorch."""

    def __init__(self, module: nn.Module, lr: float) -> None:
        super().__init__()
        self.model = copy.deepcopy(module)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        for index, parameter in enumerate(self.model.parameters()):
            # What the first step would make; a checkpoint has to find it.
            state = {"step": torch.tensor(0.0)}
            state |= {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[parameter] = state
            for name, tensor in state.items():
                self.register_buffer(f"{name}_{index}", tensor)

    def step(self, weighted: Weighted) -> float:
        """Train on one batch; its loss."""
        loss = backward(self.model, weighted)
        self.optimizer.step()
        return loss


def split_ranks(group: pk.Group, tp: int) -> tuple[pk.Group, pk.Group | None]:
    """The ranks with other data, and those that hold the model together with this one."""
    if tp == 1:
        return group, None
    shape = (group.size // tp, tp)
    mesh = init_device_mesh(group.device.type, shape, mesh_dim_names=("dp", "tp"))
    return pk.Group.from_mesh(mesh["dp"]), pk.Group.from_mesh(mesh["tp"])

"""Split weights as torch's DTensors, for what works with those."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallelkit.errors import InvalidArgumentError
from parallelkit.group import Group
from parallelkit.nn.split import split_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["as_dtensor", "install_dtensors"]


def as_dtensor(module: nn.Module) -> dict[str, DTensor]:
    """A module's state as DTensors that share memory with it: split or replicated, by name.

    What torch.distributed.checkpoint saves, and loads into in place, at any number of ranks.

    Args:
        module: with parameters split by this package over one group of processes.
    Returns:
        Names as in `state_dict()`; parameters and buffers that are not split are replicated.
    Raises:
        InvalidArgumentError: nothing is split, several groups are in use, the group has no
            processes, or fused blocks are split for themselves or several ranks have one part,
            which no placement describes.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard  # half a second, seldom needed

    state = module.state_dict(keep_vars=True)
    splits = {name: split_of(tensor) for name, tensor in state.items()}
    groups = {split.group for split in splits.values() if split is not None}
    if len(groups) != 1:
        raise InvalidArgumentError(
            f"as_dtensor: the parameters must be split over one group, found {len(groups)}"
        )
    mesh = _mesh_of(groups.pop())
    views = {}
    for name, tensor in state.items():
        split = splits[name]
        if split is None:
            views[name] = DTensor.from_local(tensor.detach(), mesh, [Replicate()], run_check=False)
            continue
        if split.blocks > 1 or split.copies > 1:
            raise InvalidArgumentError(
                f"as_dtensor: {name} is {split.blocks} fused blocks, each split for itself, "
                f"with {split.copies} ranks for each part; use pk.gather_state_dict"
            )
        shape = split.whole_shape(tensor)
        stride = torch.empty(shape, device="meta").stride()
        views[name] = DTensor.from_local(
            tensor.detach(), mesh, [Shard(split.dim)], run_check=False,
            shape=shape, stride=stride,
        )  # fmt: skip
    return views


def install_dtensors(module: nn.Module) -> None:
    """Let a module's split parameters be DTensors, so that torch's own wrappers know the split.

    For `torch.distributed.fsdp.fully_shard` over the other dimension of a mesh, after
    `pk.tensor_parallel` over a group made from this one. Whole parameters stay as they are. From
    then on the model's state is torch's to gather and save (torch.distributed.checkpoint), not
    `pk.gather_state_dict`'s.

    Raises:
        InvalidArgumentError: as `as_dtensor`, with nothing changed; or gradients that are summed by
            hooks (`sum_gradients`), which a wrapper that replaces parameters would lose.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    hooked = [name for name, p in parameters.items() if hasattr(p, "tp_summed_over")]
    if hooked:
        raise InvalidArgumentError(
            f"install_dtensors: the gradient of {hooked[0]} is summed over the ranks by a hook of "
            "its parameter, which would be lost; split without sequence_parallel"
        )
    made: dict[int, nn.Parameter] = {}  # tied parameters stay one
    for name, view in as_dtensor(module).items():
        parameter = parameters.get(name)
        if parameter is not None and split_of(parameter) is not None:
            parent, _, child = name.rpartition(".")
            new = made.setdefault(id(parameter), nn.Parameter(view, parameter.requires_grad))
            module.get_submodule(parent)._parameters[child] = new


def _mesh_of(group: Group) -> DeviceMesh:
    if group.mesh is not None:
        return group.mesh
    if group._process_group is None:
        raise InvalidArgumentError(
            "as_dtensor: the group must be one of torch.distributed; start it before pk.init()"
        )
    return DeviceMesh.from_group(group._process_group, group.device.type)

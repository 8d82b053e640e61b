"""The optimizer's part of a checkpoint: its state as tensors, all else as what JSON holds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from .adamw import MOMENTS, decode
from .checkpoint_files import CheckpointError
from .checkpoint_tensors import Stored, owned_parts, whole_shape
from .ops import wide_dtype
from .optimizer import ShardedAdamW
from .optimizer_layout import Member
from .optimizer_state import ENTRIES, refresh_master

__all__ = [
    "Room",
    "check_fit",
    "optimizer_tensors",
    "room_for",
    "settings",
    "shapes",
    "take_over",
    "tensor_name",
]

Room = dict[Member, dict[str, torch.Tensor]]  # where entries are read to, [n] of what is owned


def tensor_name(index: int, entry: str) -> str:
    """What an entry of the parameter of that index in `state_dict` is called in the files."""
    return f"optimizer.{index}.{entry}"


def _members(optimizer: ShardedAdamW) -> Iterator[tuple[int, Member]]:
    """(index, member) of each parameter that has state; the index is that of `state_dict`."""
    for index, parameter in enumerate(optimizer.parameters()):
        if parameter in optimizer.members:
            yield index, optimizer.members[parameter]


def optimizer_tensors(optimizer: ShardedAdamW) -> dict[str, Stored]:
    """What this rank owns of the state, by name."""
    found = {}
    for index, member in _members(optimizer):
        refresh_master(member)
        for key in ENTRIES:
            if key in member.state:
                owned = decode(key, member.state)
                found[tensor_name(index, key)] = owned_parts(member, owned)
    return found


def settings(optimizer: ShardedAdamW | None) -> dict[str, Any]:
    """What is no tensor."""
    if optimizer is None:
        return {"groups": None, "shapes": None, "steps": None, "skipped_steps": 0}
    steps: list[Any] = [None] * sum(1 for _ in optimizer.parameters())
    for index, member in _members(optimizer):
        state = member.state
        steps[index] = {"step": float(state["step"]), "master": "master_param" in state}
    groups = [
        {k: _plain(v) for k, v in group.items() if k not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]
    return {
        "groups": groups,
        "shapes": shapes(optimizer),
        "steps": steps,
        "skipped_steps": optimizer.skipped_steps,
    }


def shapes(optimizer: ShardedAdamW) -> list[list[str]]:
    """Of the parameters, group by group."""
    return [
        [str(list(whole_shape(parameter))) for parameter in group["params"]]
        for group in optimizer.param_groups
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple) else value


def check_fit(folder: Path, optimizer: ShardedAdamW, manifest: dict[str, Any]) -> None:
    """CheckpointError where the manifest is of another optimizer."""
    if manifest["steps"] is None:
        raise CheckpointError(f"{folder}: it was saved without an optimizer; nothing was loaded")
    if shapes(optimizer) != manifest["shapes"]:
        raise CheckpointError(
            f"{folder}: the optimizer must have parameter groups {manifest['shapes']}, "
            f"got {shapes(optimizer)}; nothing was loaded"
        )


def room_for(optimizer: ShardedAdamW, manifest: dict[str, Any]) -> tuple[Room, dict[str, Stored]]:
    """Memory for what this rank owns of the entries, and the same by name."""
    amsgrad = [
        options["amsgrad"]
        for group, options in zip(optimizer.param_groups, manifest["groups"], strict=True)
        for _ in group["params"]
    ]
    room: Room = {}
    tensors = {}
    for index, member in _members(optimizer):
        known = manifest["steps"][index]
        keys = list(MOMENTS[: 3 if amsgrad[index] else 2]) if known else []
        if known and known["master"] and "master_param" in member.state:
            keys.append("master_param")
        dtype = wide_dtype(member.parameter.dtype)
        room[member] = {}
        for key in keys:
            owned = torch.empty(member.stop - member.start, dtype=dtype, device=member.local.device)
            room[member][key] = owned
            tensors[tensor_name(index, key)] = owned_parts(member, owned)
    return room, tensors


def take_over(optimizer: ShardedAdamW, manifest: dict[str, Any], room: Room) -> None:
    """Make what was read the optimizer's state."""
    for group, options in zip(optimizer.param_groups, manifest["groups"], strict=True):
        group.update({**options, "betas": tuple(options["betas"])})
    steps = [known["step"] if known else 0.0 for known in manifest["steps"]]
    optimizer.fill((member, steps[i], room.pop(member)) for i, member in _members(optimizer))
    optimizer.skipped_steps = manifest["skipped_steps"]

"""The optimizer's part of a checkpoint: its state as tensors, all else as what JSON holds.

A parameter goes by its name in the model; where it stands in its group is no part of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .adamw import MOMENTS, decode
from .checkpoint_files import CheckpointError
from .checkpoint_tensors import Stored, owned_parts
from .errors import InvalidArgumentError
from .ops import wide_dtype
from .optimizer import ShardedAdamW
from .optimizer_checks import names_in_errors
from .optimizer_layout import Member
from .optimizer_state import ENTRIES, refresh_master

__all__ = [
    "Names",
    "Room",
    "check_fit",
    "in_words",
    "names_of",
    "optimizer_tensors",
    "room_for",
    "settings",
    "take_over",
]

Names = dict[torch.Tensor, str]  # of the optimizer's parameters, group by group
Room = dict[Member, dict[str, torch.Tensor]]  # where entries are read to, [n] of what is owned


def names_of(optimizer: ShardedAdamW | None, state: Mapping[str, torch.Tensor]) -> Names:
    """The name of each parameter in the model, of a tied one the first of the alphabet.

    Args:
        optimizer: of the parameters.
        state: the model's, parameters as they are.
    """
    if optimizer is None:
        return {}
    known = {state[name]: name for name in sorted(state, reverse=True)}
    for parameter, name in names_in_errors(optimizer.param_groups).items():
        if parameter not in known:
            raise InvalidArgumentError(
                f"checkpoint: the optimizer's {name} must be in the model's state_dict(); a "
                "checkpoint has an optimizer's state by the names in the model"
            )
    return {parameter: known[parameter] for parameter in optimizer.parameters()}


def _places(optimizer: ShardedAdamW, names: Names) -> dict[str, int]:
    """The group of each parameter, by name."""
    return {names[p]: g for g, group in enumerate(optimizer.param_groups) for p in group["params"]}


def in_words(optimizer: ShardedAdamW | None, names: Names) -> list[str]:
    """What optimizers of all ranks must have in common."""
    if optimizer is None:
        return ["no optimizer"]
    places = _places(optimizer, names)
    return [
        f"an optimizer of {len(optimizer.param_groups)} groups",
        *(f"{name} in parameter group {place}" for name, place in places.items()),
    ]


def _tensor_name(name: str, entry: str) -> str:
    """What an entry of a parameter's state is called in the files."""
    return f"optimizer.{name}.{entry}"


def optimizer_tensors(optimizer: ShardedAdamW | None, names: Names) -> dict[str, Stored]:
    """What this rank owns of the state, by name."""
    found: dict[str, Stored] = {}
    for parameter, member in optimizer.members.items() if optimizer else ():
        refresh_master(member)
        for key in ENTRIES:
            if key in member.state:
                owned = decode(key, member.state)
                found[_tensor_name(names[parameter], key)] = owned_parts(member, owned)
    return found


def settings(optimizer: ShardedAdamW | None, names: Names) -> dict[str, Any]:
    """What is no tensor."""
    if optimizer is None:
        return {"groups": None, "parameters": None, "skipped_steps": 0}
    groups = [
        {k: _plain(v) for k, v in group.items() if k not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]
    parameters: dict[str, dict[str, Any]] = {
        name: {"group": place, "step": None, "master": False}  # frozen so far
        for name, place in _places(optimizer, names).items()
    }
    for parameter, member in optimizer.members.items():
        parameters[names[parameter]] |= {
            "step": float(member.state["step"]),
            "master": "master_param" in member.state,
        }
    return {
        "groups": groups,
        "parameters": parameters,
        "skipped_steps": optimizer.skipped_steps,
    }


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple) else value


def check_fit(
    folder: Path, optimizer: ShardedAdamW, names: Names, manifest: dict[str, Any]
) -> None:
    """CheckpointError where the manifest is of another optimizer."""
    if manifest["parameters"] is None:
        raise CheckpointError(f"{folder}: it was saved without an optimizer; nothing was loaded")
    saved = {name: known["group"] for name, known in manifest["parameters"].items()}
    here = _places(optimizer, names)
    for name in (*here, *saved):
        if saved.get(name) != here.get(name):
            wanted, found = (
                f"in parameter group {groups[name]}" if name in groups else "in no parameter group"
                for groups in (saved, here)
            )
            raise CheckpointError(
                f"{folder}: the optimizer must have {name} {wanted}, got it {found}; "
                "nothing was loaded"
            )
    having = {names[parameter] for parameter in optimizer.members}
    for name, known in manifest["parameters"].items():
        if known["step"] and name not in having:
            raise CheckpointError(
                f"{folder}: it has state of {name}, which is frozen here; let it train before the "
                "load. Nothing was loaded"
            )
    if len(optimizer.param_groups) != len(manifest["groups"]):
        raise CheckpointError(
            f"{folder}: the optimizer must have {len(manifest['groups'])} parameter groups, "
            f"got {len(optimizer.param_groups)}; nothing was loaded"
        )


def room_for(
    optimizer: ShardedAdamW, names: Names, manifest: dict[str, Any]
) -> tuple[Room, dict[str, Stored]]:
    """Memory for what this rank owns of the entries, and the same by name."""
    room: Room = {}
    tensors: dict[str, Stored] = {}
    for parameter, member in optimizer.members.items():
        name = names[parameter]
        known = manifest["parameters"][name]
        amsgrad = manifest["groups"][known["group"]]["amsgrad"]
        keys = [] if known["step"] is None else list(MOMENTS[: 3 if amsgrad else 2])
        if known["master"] and "master_param" in member.state:
            keys.append("master_param")
        dtype = wide_dtype(parameter.dtype)
        room[member] = {}
        for key in keys:
            owned = torch.empty(member.stop - member.start, dtype=dtype, device=member.local.device)
            room[member][key] = owned
            tensors[_tensor_name(name, key)] = owned_parts(member, owned)
    return room, tensors


def take_over(optimizer: ShardedAdamW, names: Names, manifest: dict[str, Any], room: Room) -> None:
    """Make what was read the optimizer's state."""
    for group, options in zip(optimizer.param_groups, manifest["groups"], strict=True):
        group.update({**options, "betas": tuple(options["betas"])})
    saved = manifest["parameters"]
    optimizer.fill(
        (member, saved[names[parameter]]["step"] or 0.0, room.pop(member))
        for parameter, member in optimizer.members.items()
    )
    optimizer.skipped_steps = manifest["skipped_steps"]

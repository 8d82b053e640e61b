"""The state of the sharded optimizer: each rank's part, the whole, and the way between them.

In a member's `.state` everything is flat, in the parameter's order of memory, and of the owned
elements alone; in a state dict it has the parameter's shape, and is float32 or wider.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .adamw import BLOCK, MOMENTS, decode, encode
from .collectives import all_gather_flat
from .errors import InvalidArgumentError
from .group import Group
from .ops import wide_dtype
from .optimizer_layout import Buffer, Member, local_of

__all__ = [
    "ENTRIES",
    "StateFormat",
    "checked_entries",
    "like",
    "owned_entry",
    "pack",
    "refresh_master",
    "whole",
]

ENTRIES = (*MOMENTS, "master_param")

_SMALL = 4096  # parameters with fewer elements keep float32 moments where the others have int8
_WINDOW = 1 << 20  # elements of each rank that travel at a time when state is gathered


class StateFormat:
    """How state is kept.

    Args:
        moments: dtype of the moments; a float64 parameter's are float64.
        masters: keep float32 copies of bfloat16 and float16 parameters.
    """

    def __init__(self, moments: torch.dtype, masters: bool) -> None:
        self._moments, self._masters = moments, masters

    def fill(
        self, member: Member, step: float, entries: Mapping[str, torch.Tensor], amsgrad: bool
    ) -> None:
        """Replace the state of what this rank owns of a parameter.

        Args:
            member: whose parameter has its new value already.
            step: count of steps done.
            entries: some of ENTRIES, [n]. Moments that are absent become zero, and a master is made
                from the parameter.
            amsgrad: keep the largest second moment too.
        """
        parameter = member.local
        count, device = member.stop - member.start, parameter.device
        kind = self._moments
        if parameter.dtype == torch.float64:
            kind = torch.float64
        elif kind == torch.int8 and parameter.numel() < _SMALL:
            kind = torch.float32
        state: dict[str, Any] = {"step": torch.tensor(step, dtype=torch.float32)}
        for name in MOMENTS[: 3 if amsgrad else 2]:
            unsigned = kind == torch.int8 and name != "exp_avg"
            state[name] = torch.zeros(count, dtype=torch.uint8 if unsigned else kind, device=device)
            if kind == torch.int8:
                state[f"{name}_scale"] = torch.zeros(math.ceil(count / BLOCK), device=device)
            if name in entries:
                encode(name, entries[name], state)
        if self._masters and parameter.dtype in (torch.bfloat16, torch.float16):
            own = member.owned(parameter)
            state["master_param"] = entries.get("master_param", own).to(torch.float32, copy=True)
        member.state = state
        given = "master_param" in entries  # of parameters that may be loaded yet
        member.version = -1 if given else member.parameter._version


def refresh_master(member: Member) -> None:
    """Where somebody else wrote to the parameter, its elements win over their masters.

    Not where the parameter is its master rounded: nobody wrote to that element. To be called before
    masters are read.
    """
    if "master_param" in member.state and member.parameter._version != member.version:
        now = member.owned(member.local)
        master = member.state["master_param"]
        changed = master.to(now.dtype) != now
        master.copy_(torch.where(changed, now.float(), master))
        member.version = member.parameter._version


# -- the whole state -------------------------------------------------------------------------------


def whole(
    buffers: Sequence[Buffer], group: Group, keep: bool
) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
    """The entries of every parameter, in its shape; nothing where not kept. Collective."""
    found: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
    for buffer in buffers:
        for key in ENTRIES:
            for member, flat in _gathered(buffer, key, group, keep).items():
                local = member.local
                entry = flat.as_strided(local.shape, local.stride())
                found.setdefault(member.parameter, {})[key] = like(entry, member.parameter)
    return found


def pack(
    param_groups: Sequence[Mapping[str, Any]],
    members: Mapping[torch.Tensor, Member],
    entries: Mapping[torch.Tensor, Mapping[str, torch.Tensor]],
) -> dict[str, Any]:
    """The state dict of the whole entries.

    Parameters that never stepped have none there, as in torch; but where no parameter has, all
    have: torch.distributed.checkpoint reads into what a new optimizer's dict holds.
    """
    new = all(member.state["step"] == 0 for member in members.values())
    # Of one that is listed twice torch takes the last place, and warns.
    everyone = (p for group in param_groups for p in group["params"])
    numbers = {p: index for index, p in enumerate(everyone)}
    state = {}
    for p, index in numbers.items():
        if p in entries and (new or members[p].state["step"] > 0):
            state[index] = {"step": members[p].state["step"].to("cpu", copy=True), **entries[p]}
    groups = [{**g, "params": [numbers[p] for p in g["params"]]} for g in param_groups]
    return {"state": state, "param_groups": groups}


def like(entry: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of an entry, as a DTensor where the parameter is one."""
    if not isinstance(parameter, DTensor):
        return entry
    return DTensor.from_local(
        entry,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _gathered(buffer: Buffer, key: str, group: Group, keep: bool) -> dict[Member, torch.Tensor]:
    """One entry of all elements: [numel] for each member that has it.

    It travels in windows, so that a rank that does not keep the result needs little memory.
    """
    members = [m for m in buffer.members if key in m.state]
    if buffer.size == 1 or not members:
        return {m: decode(key, m.state).clone() for m in members if keep}
    chosen = set(members)
    dtype = wide_dtype(members[0].parameter.dtype)
    device = members[0].local.device
    owned = [[p for p in buffer.pieces(r) if p[0] in chosen] for r in range(group.size)]
    longest = max(sum(stop - start for _, start, stop in pieces) for pieces in owned)
    full = {m: torch.empty(m.numel, dtype=dtype, device=device) for m in members if keep}
    window = min(_WINDOW, max(longest, 1))
    mine = torch.zeros(window, dtype=dtype, device=device)
    everybody = torch.empty(window * group.size, dtype=dtype, device=device)
    for at in range(0, longest, window):
        for member, start, stop, place in _within(owned[group.rank], at, window):
            part = _part(member.state, key, start - member.start, stop - member.start)
            mine[place : place + stop - start] = part
        all_gather_flat(mine, len(everybody), group, out=everybody)
        for rank in range(group.size if keep else 0):
            for member, start, stop, place in _within(owned[rank], at, window):
                begin = rank * window + place
                full[member][start:stop] = everybody[begin : begin + stop - start]
    return full


def _within(
    pieces: Sequence[tuple[Member, int, int]], at: int, window: int
) -> Iterator[tuple[Member, int, int, int]]:
    """What [at, at + window) of pieces laid end to end covers: (member, start, stop, place)."""
    begin = 0
    for member, start, stop in pieces:
        low, high = max(at, begin), min(at + window, begin + stop - start)
        if low < high:
            yield member, start + low - begin, start + high - begin, low - at
        begin += stop - start


def _part(state: dict[str, Any], key: str, start: int, stop: int) -> torch.Tensor:
    """Elements [start, stop) of an entry, as floats."""
    scale = state.get(f"{key}_scale")
    if scale is None:
        entry: torch.Tensor = state[key]
        return entry[start:stop]
    first = start // BLOCK * BLOCK  # whole blocks, so that scales and elements fit
    scales = scale[first // BLOCK : math.ceil(stop / BLOCK)]
    return decode(key, {key: state[key][first:stop], f"{key}_scale": scales})[start - first :]


def checked_entries(
    state_dict: Mapping[str, Any],
    param_groups: Sequence[Mapping[str, Any]],
    members: Mapping[torch.Tensor, Member],
) -> dict[torch.Tensor, Mapping[str, Any]]:
    """The entry of each parameter, once everything fits; else InvalidArgumentError."""
    call = "ShardedAdamW.load_state_dict"
    theirs = state_dict.get("param_groups")
    if theirs is None or "state" not in state_dict:
        raise InvalidArgumentError(
            f'{call}: wanted a dict with "state" and "param_groups", got {sorted(state_dict)}; '
            "every rank needs the whole of it"
        )
    ours, found_sizes = ([len(g["params"]) for g in groups] for groups in (param_groups, theirs))
    if ours != found_sizes:
        raise InvalidArgumentError(
            f"{call}: wanted parameter groups of {ours} parameters, got {found_sizes}"
        )
    found: dict[torch.Tensor, Mapping[str, Any]] = {}
    for group, their in zip(param_groups, theirs, strict=True):
        required = ("step", *MOMENTS[: 3 if their.get("amsgrad", group["amsgrad"]) else 2])
        for p, index in zip(group["params"], their["params"], strict=True):
            entry = state_dict["state"].get(index)
            if entry is None:
                continue
            whose = f"state[{index}] ({members[p].name if p in members else 'frozen here'})"
            missing = [key for key in required if key not in entry]
            if missing or p not in members:
                raise InvalidArgumentError(
                    f"{call}: {whose} has no {', '.join(map(repr, missing)) or 'place'}; "
                    "nothing was loaded"
                )
            for key in ENTRIES:
                if key not in entry:
                    continue
                wanted, got = p.shape, entry[key].shape
                if wanted == got:
                    wanted, got = local_of(p).shape, local_of(entry[key]).shape
                if wanted != got:
                    raise InvalidArgumentError(
                        f"{call}: {key!r} of {whose} must have shape {list(wanted)}, "
                        f"got {list(got)}; nothing was loaded"
                    )
            found[p] = entry
    return found


def owned_entry(member: Member, entry: Mapping[str, Any]) -> tuple[float, dict[str, torch.Tensor]]:
    """Of a parameter's entry in a whole state dict: its step, and what this rank owns of the rest.

    An empty entry is that of no step yet.
    """
    local = member.local
    owned = {}
    for name in ENTRIES:
        if name in entry:
            ordered = torch.empty_like(local, dtype=wide_dtype(local.dtype))
            ordered.copy_(local_of(entry[name]))
            owned[name] = member.owned(ordered)
    return float(entry.get("step", 0.0)), owned

"""How the squares of each parameter's gradient count in the norm of the whole.

Every element counts once, though several ranks may have it, as replicas of a DTensor, and though
ranks that the optimizer does not know, the tensor-parallel ones, may have other parts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from .errors import InvalidArgumentError
from .group import Group, default_group

__all__ = ["InNorm", "Part", "parts_of"]


class InNorm(IntEnum):
    """Where a rank's squares of a parameter go. csrc/adam.h has the same numbers."""

    WHOLE = 0  # the ranks of the group have all of it
    SPLIT = 1  # ranks outside the group have other parts
    # Another rank counts the same elements. Replicas are equal, so that rank also sees what is not
    # finite here, and tells all.
    ELSEWHERE = 2


class Part(NamedTuple):
    """What this rank has of a parameter, as the norm sees it."""

    in_norm: InNorm
    others: Group | None  # the ranks that have other parts, one of each group; None where nobody


_Shard = tuple[int, ...] | None  # coordinates where a DTensor is not replicated; None: not in it


def parts_of(names: Mapping[torch.Tensor, str], group: Group) -> list[Part]:
    """For each parameter, what this rank has of it. Collective where there are DTensors.

    Args:
        names: of the parameters.
        group: the optimizer's ranks.

    Raises:
        InvalidArgumentError: a DTensor has shards that neither these ranks have nor those of the
            one dimension of the mesh that these lack; on every rank.
    """
    dtensors = {p: name for p, name in names.items() if isinstance(p, DTensor)}
    found: dict[torch.Tensor, Part] = {}
    if dtensors:
        mine = dist.get_rank(), [_shard_of(p) for p in dtensors]
        ranks, shards = zip(*group._gather_objects(mine, "ShardedAdamW: shards"), strict=True)
        for (p, name), of_ranks in zip(dtensors.items(), zip(*shards, strict=True), strict=True):
            others = _others(name, p, of_ranks, ranks)
            # Ranks of different meshes have the same shard too, as replicas that know no mesh do.
            first = of_ranks.index(of_ranks[group.rank]) == group.rank
            here = InNorm.WHOLE if others is None else InNorm.SPLIT
            found[p] = Part(here if first else InNorm.ELSEWHERE, others)
        if len({part.others for part in found.values() if part.others is not None}) > 1:
            raise InvalidArgumentError(
                "ShardedAdamW: the parameters are split over several dimensions of a mesh that the "
                f"group's ranks {list(ranks)} do not have; leave group out, or give the group of "
                "all ranks of the mesh"
            )
    return [found[p] if p in found else _part_of_plain(p) for p in names]


def _part_of_plain(parameter: torch.Tensor) -> Part:
    group = getattr(parameter, "tp_group", None)
    if group is not None:
        return Part(InNorm.SPLIT, group)
    split = getattr(parameter, "tp_split", None)  # without a group: a copy of a neighbour's part
    return Part(InNorm.WHOLE, None) if split is None else Part(InNorm.ELSEWHERE, split.group)


def _split_dims(parameter: DTensor) -> list[int]:
    """The dimensions of its mesh along which it is not replicated."""
    return [dim for dim, at in enumerate(parameter.placements) if not at.is_replicate()]


def _shard_of(parameter: DTensor) -> _Shard:
    at = parameter.device_mesh.get_coordinate()
    return None if at is None else tuple(at[dim] for dim in _split_dims(parameter))


def _others(
    name: str, parameter: DTensor, shards: Sequence[_Shard], ranks: Sequence[int]
) -> Group | None:
    """The ranks that have the other shards; None where those of the optimizer's group have all.

    They are a dimension of the mesh, as where FSDP2 takes one of a tensor-parallel model's two and
    the optimizer's group is that one.

    Args:
        name, parameter: whose shards.
        shards: by rank of the group.
        ranks: numbers of those ranks among all.
    """
    mesh, dims = parameter.device_mesh, _split_dims(parameter)
    sizes = [mesh.size(dim) for dim in dims]
    known = {shard for shard in shards if shard is not None}
    if len(known) == math.prod(sizes):
        return None
    along = [len(set(places)) for places in zip(*known, strict=True)]  # how many places are known
    lacking = [d for d, n, size in zip(dims, along, sizes, strict=False) if n == 1 < size]
    dim_names = mesh.mesh_dim_names
    if len(lacking) == 1 < len(dims) and dim_names:
        (lacked,) = lacking
        if len(known) * mesh.size(lacked) == math.prod(sizes):
            return default_group(mesh[dim_names[lacked]])
    over = " and ".join(repr(dim_names[d]) if dim_names else str(d) for d in dims)
    raise InvalidArgumentError(
        f"ShardedAdamW: {name} is split over dimension {over} of a mesh of the ranks "
        f"{mesh.mesh.tolist()}, and the group's ranks {list(ranks)} do not have all its shards, so "
        "that no rank would know the norm, nor when to skip. Leave group out, or give the group of "
        "all ranks of the mesh, or of what it is split over"
    )

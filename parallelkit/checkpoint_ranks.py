"""The ranks of a checkpoint: who takes part, what they agree on, how they fail together."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .arguments import described
from .checkpoint_files import CheckpointError
from .checkpoint_tensors import Parts, Stored
from .errors import (
    CollectiveMismatchError,
    InvalidArgumentError,
    InvalidTypeError,
    ParallelKitError,
)
from .group import Group, default_group
from .optimizer import ShardedAdamW
from .together import together

__all__ = [
    "Held",
    "by_torch",
    "check_arguments",
    "check_whole",
    "group_of",
    "held",
    "share_of",
    "together_at",
]

T = TypeVar("T")


class Held(NamedTuple):
    """What a rank has of a tensor."""

    whole: str  # dtype and shape
    numel: int  # of the whole
    boxes: dict[tuple[int, ...], int]  # elements of each, by where it begins; (): of the whole


def group_of(
    group: Group | DeviceMesh | None, model: nn.Module, optimizer: ShardedAdamW | None
) -> Group:
    """The ranks; of bad arguments those that good ones most likely have.

    Where the optimizer is every rank's, that is the default group and not the optimizer's own: a
    rank whose optimizer is none can find the others there.
    """
    if group is not None or not isinstance(optimizer, ShardedAdamW):
        return default_group(group)
    if dist.is_initialized() and optimizer.group.size == dist.get_world_size():
        return default_group(None)
    if not isinstance(model, nn.Module):
        return optimizer.group
    size = optimizer.group.size
    beyond = any(  # other ranks than the optimizer's hold other parts
        hasattr(p, "tp_split") or (isinstance(p, DTensor) and p.device_mesh.size() > size)
        for p in model.parameters()
    )
    return default_group(None) if beyond else optimizer.group


def check_arguments(call: str, path: object, model: object, optimizer: object) -> Path:
    """The folder, once all of them are what they should be."""
    if not isinstance(path, (str, os.PathLike)):
        raise InvalidTypeError(
            f"{call}: path must be a str or os.PathLike, got {type(path).__name__}"
        )
    if not isinstance(model, nn.Module):
        raise InvalidTypeError(
            f"{call}: model must be a torch.nn.Module, got {type(model).__name__}"
        )
    if optimizer is not None and not isinstance(optimizer, ShardedAdamW):
        raise InvalidTypeError(
            f"{call}: optimizer must be a parallelkit.ShardedAdamW or None, got "
            f"{type(optimizer).__name__}; another's state_dict() goes through torch.save"
        )
    return Path(path)


def held(value: Stored) -> Held:
    """What this rank has of a tensor."""
    if not isinstance(value, Parts):
        return Held(described(value), value.numel(), {(): value.numel()})
    whole = torch.empty(value.shape, dtype=value.dtype, device="meta")
    boxes = {tuple(offset): box.numel() for offset, box in value.boxes.items()}
    return Held(described(whole), value.numel, boxes)


def check_whole(told: list[dict[str, Held]]) -> None:
    """Refuse tensors that ranks know by one name and are not one, or not whole on all together."""
    for name in dict.fromkeys(name for parts in told for name in parts):
        having = {rank: parts[name] for rank, parts in enumerate(told) if name in parts}
        first = min(having)
        boxes: dict[tuple[int, ...], int] = {}
        for rank, part in having.items():
            if part.whole != having[first].whole:
                raise CollectiveMismatchError(
                    f"checkpoint.save: {name} is {having[first].whole} on rank {first} and "
                    f"{part.whole} on rank {rank}; save different models under different paths. "
                    "Nothing was written"
                )
            boxes.update(part.boxes)
        if having[first].numel not in (boxes.get(()), sum(boxes.values())):
            raise InvalidArgumentError(
                f"checkpoint.save: the {len(told)} ranks of the group hold {sum(boxes.values())} "
                f"of the {having[first].numel} elements of {name}; the group must be of all ranks "
                "that hold parts of the model. Nothing was written"
            )


def share_of(group: Group, files: list[Any]) -> list[Any]:
    """The files that this rank has to hash."""
    return files[group.rank :: group.size]


# -- work that fails on all ranks ------------------------------------------------------------------


def together_at(group: Group, folder: object, work: Callable[[], T]) -> list[T]:
    """`together`, where an error that is not ours becomes one that names the folder. Collective."""

    def named() -> T:
        try:
            return work()
        except ParallelKitError:
            raise
        except Exception as error:
            # The lines after the first are a stack of C++ where torch wrote the file.
            text = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise CheckpointError(f"{folder}: {text}") from error

    return together(group, named, "checkpoint")


def by_torch(group: Group, work: Callable[..., object], *args: object, **kwargs: object) -> None:
    """Run `work` of torch.distributed.checkpoint, and raise what failed on this rank. Collective.

    Its exception has the failures of all ranks, and every rank gets it. Each raises its own here,
    for `together` to tell the others; a rank without one returns.
    """
    if group._process_group is not None:
        kwargs["process_group"] = group._process_group
    elif group.size == 1:
        kwargs["no_dist"] = True
    else:
        raise InvalidArgumentError("checkpoint: the ranks must be processes of their own")
    with warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            work(*args, **kwargs)
        except CheckpointException as failed:  # no Exception
            if group.rank in failed.failures:
                error, _ = failed.failures[group.rank]
                raise error from None

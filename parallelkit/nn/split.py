"""How one tensor is cut over a group, and initial values that do not depend on the cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from parallelkit.arguments import as_size
from parallelkit.collectives import shard_bounds
from parallelkit.errors import InvalidArgumentError, InvalidTypeError
from parallelkit.group import Group
from parallelkit.nn import exchange

__all__ = ["Split", "check_layer", "draw_shard", "local_part", "split_of"]

Tensor = torch.Tensor

# Drawn at a time: little beside any shard, and a multiple of what torch's generators do in one go.
_CHUNK_ELEMENTS = 1 << 20
_CHUNK_ROWS = 16


def check_layer(
    call: str,
    sizes: Mapping[str, object],
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> None:
    """Raise for sizes, a device or a dtype that no layer can have."""
    for name, size in sizes.items():
        as_size(call, name, size)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise InvalidTypeError(f"{call}: dtype must be a floating-point dtype, got {dtype!r}")
    if device is not None:
        try:
            torch.device(device)
        except (RuntimeError, TypeError):
            raise InvalidArgumentError(
                f"{call}: device must name a device, such as cpu or cuda:0, got {device!r}"
            ) from None


@dataclass(frozen=True)
class Split:
    """A tensor cut along `dim` as `shard_bounds` does; with `blocks`, each of them for itself.

    Fused projections [q | k | v] are three blocks: every rank has its part of each.

    With `copies`, that many neighbouring ranks have the same shard, as where there are fewer
    key-value heads than ranks. Each uses it for its own part of the work: `shared` lets it take
    part in that with a gradient that is the sum over the copies.
    """

    group: Group
    dim: int
    length: int
    blocks: int = 1
    copies: int = 1  # divides the number of ranks

    @property
    def shards(self) -> int:
        """How many different shards there are."""
        return self.group.size // self.copies

    @property
    def index(self) -> int:
        """Which of them this rank has."""
        return self.group.rank // self.copies

    def ranges(self) -> list[tuple[int, int]]:
        """This rank's parts of the whole."""
        each = self.length // self.blocks
        start, stop = shard_bounds(each, self.shards, self.index)
        return [(block * each + start, block * each + stop) for block in range(self.blocks)]

    def whole_shape(self, shard: Tensor) -> torch.Size:
        """The shape of the tensor of which this is a shard."""
        return torch.Size([*shard.shape[: self.dim], self.length, *shard.shape[self.dim + 1 :]])

    def take(self, whole: Tensor) -> Tensor:
        """This rank's shard of a whole tensor, as a copy."""
        parts = [whole.narrow(self.dim, start, stop - start) for start, stop in self.ranges()]
        return (
            torch.cat(parts, self.dim)
            if len(parts) > 1
            else parts[0].clone(memory_format=torch.contiguous_format)
        )

    def gather(self, shard: Tensor) -> Tensor:
        """The whole tensor of every rank's shard; collective."""
        each = self.length // self.blocks
        parts = [
            exchange.all_gather(part, self.dim, each * self.copies, self.group)
            for part in shard.detach().tensor_split(self.blocks, self.dim)
        ]
        if self.copies > 1:
            parts = [self._first_copies(part) for part in parts]
        return torch.cat(parts, self.dim) if len(parts) > 1 else parts[0]

    def _first_copies(self, gathered: Tensor) -> Tensor:
        alike: Tensor = gathered.unflatten(self.dim, (self.shards, self.copies, -1))
        return alike.select(self.dim + 1, 0).flatten(self.dim, self.dim + 1)

    def shared(self, shard: Tensor) -> Tensor:
        """The shard, its gradient summed over the ranks that have the same."""
        if self.copies > 1:
            shard = _Shared.apply(shard, self)  # type: ignore[no-untyped-call]
        return shard

    def mark(self, parameter: Tensor) -> None:
        """Let optimizers, checkpoints and gathering know that the parameter is a shard."""
        parameter.tp_split = self  # type: ignore[attr-defined]
        parameter.tp_split_dim = self.dim  # type: ignore[attr-defined]
        if self.group.rank % self.copies == 0:  # a norm over the group counts one copy
            parameter.tp_group = self.group  # type: ignore[attr-defined]


class _Shared(Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, split: Split) -> Tensor:
        ctx.split = split
        return shard.view_as(shard)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # One sum over all ranks, in which each shard has its place.
        split = ctx.split
        places = gradient.new_zeros(split.shards, *gradient.shape)
        places[split.index] = gradient
        return exchange.all_reduce(places, split.group)[split.index].clone(), None


def local_part(parameter: Tensor) -> Tensor:
    """A rank's own part of a parameter that may have been made a DTensor."""
    if hasattr(type(parameter), "to_local"):
        parameter = parameter.to_local()  # type: ignore[attr-defined]
    return parameter


def split_of(parameter: Tensor) -> Split | None:
    """How a parameter is cut; None where every rank has all of it."""
    return getattr(parameter, "tp_split", None)


def draw_shard(shard: Tensor, split: Split, fill: Callable[[Tensor], object]) -> None:
    """Fill a shard of a matrix with its part of what `fill` draws for the whole.

    The random numbers are drawn as for the whole, chunk by chunk on a CPU, so the gathered tensor
    is the same at any number of ranks, and the generators stay alike on all of them.
    """
    rows, columns = split.whole_shape(shard)
    with torch.no_grad():
        for start, stop in _chunks(rows, columns, whole=shard.device.type != "cpu"):
            drawn = shard.new_empty(stop - start, columns)
            fill(drawn)
            at = 0  # rows or columns of the shard that earlier ranges have
            for first, last in split.ranges():
                if split.dim == 1:
                    shard[start:stop, at : at + last - first] = drawn[:, first:last]
                elif first < stop and last > start:
                    low, high = max(first, start), min(last, stop)
                    here = at + low - first
                    shard[here : here + high - low] = drawn[low - start : high - start]
                at += last - first


def _chunks(rows: int, columns: int, whole: bool) -> Iterator[tuple[int, int]]:
    """Ranges of rows; each begins at a multiple of 16 elements and has at least as many."""
    step = max(1, _CHUNK_ELEMENTS // max(1, columns) // _CHUNK_ROWS) * _CHUNK_ROWS
    start = 0
    while start < rows:
        stop = start + step
        if whole or rows - stop < _CHUNK_ROWS:
            stop = rows
        yield start, stop
        start = stop

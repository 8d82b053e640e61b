"""Sums over a group, formed in memory that all ranks of a host reach.

Each group keeps a pool of it, and every rank takes from its pool and gives back in the same order,
so the places agree without a word. What a sum of one shape needs is looked up once for each place.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from parallelkit.agreement import refuse, refuse_instead, tell
from parallelkit.arguments import described, signature_of
from parallelkit.collectives import shard_bounds
from parallelkit.errors import InvalidTypeError, ParallelKitError
from parallelkit.group import Group
from parallelkit.ops import DTYPE_CODES
from parallelkit.transport import REDUCTIONS, Call, Pending, Reply

__all__ = ["Term", "check_dtype", "check_reply", "total_of"]

Tensor = torch.Tensor

_MAX_USES = 64  # shapes remembered of one place; sequences of ever new lengths must not add up


class _Use(NamedTuple):
    """A place as a tensor of one shape."""

    tensor: Tensor
    prepared: Any  # [rows, features], by the transport
    call: Call


class _Place:
    """A stretch of a pool, and its uses so far."""

    def __init__(self, group: Group, numel: int, dtype: torch.dtype) -> None:
        # Up to a quarter more, so that slowly growing sizes seldom ask for new memory.
        step = max(4096, 1 << max(0, numel.bit_length() - 3))
        self.flat = group.empty(max(1, -(-numel // step)) * step, dtype=dtype)
        self.uses: dict[tuple[int, ...], _Use] = {}

    def use(self, group: Group, shape: tuple[int, ...]) -> _Use:
        """Itself as a tensor of this shape, which fits."""
        tensor = self.flat[: math.prod(shape)].view(shape)
        rows = tensor.view(shape[0] if shape else 1, math.prod(shape[1:]))
        if len(self.uses) == _MAX_USES:
            self.uses.clear()
        made = self.uses[shape] = _Use(tensor, group._usable().prepare([rows]), total_of(rows))
        return made


def total_of(tensor: Tensor) -> Call:
    """What a rank says when it enters a plain sum, or a gathering."""
    return Call(signature_of([tensor]), 0, 1.0, 1.0, REDUCTIONS["total"], False)


def check_dtype(name: str, dtype: torch.dtype, group: Group) -> None:
    """Raise, the same on every rank, for what can be neither added nor gathered."""
    if dtype not in DTYPE_CODES:
        fault = InvalidTypeError(
            f"tensor-parallel {name}: wanted float32, float64, bfloat16 or float16, got {dtype}"
        )
        raise refuse_instead(group, fault) from fault


def check_reply(
    reply: Reply,
    group: Group,
    name: str,
    tensor: Tensor,
    fault: ParallelKitError | None = None,
) -> None:
    """Raise, the same on every rank, unless all went well."""
    if reply.outcome != "done":
        called = _called(name, tensor)
        raise refuse(
            group._usable(), group.rank, reply.outcome, called, fault=fault, heard=reply.heard
        )


def _called(name: str, tensor: Tensor) -> tuple[str, str]:
    return f"tensor-parallel {name}", described(tensor)


class Term:
    """One rank's term of a sum over the group: write `tensor`, then sum. Used once; collective.

    A sum that is refused gives the memory back too: ranks that never came to it have theirs still.

    Args:
        group: whose ranks add.
        shape: of the term, the same on every rank.
        dtype: of the term, the same on every rank.
    """

    __slots__ = ("_free", "_group", "_pending", "_place", "_shard", "_transport", "_use", "tensor")

    def __init__(self, group: Group, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._group, self._transport = group, group._usable()
        free = group.scratch.get(dtype)
        if free is None:
            check_dtype("sum", dtype, group)
            free = group.scratch[dtype] = []
        place: _Place | None = free[-1] if free else None
        use = None if place is None else place.uses.get(shape)
        if place is None or use is None:
            numel = math.prod(shape)
            if place is None or place.flat.numel() < numel:
                place = _Place(group, numel, dtype)
            use = place.use(group, shape)
        if free:
            free.pop()
        self._free, self._place, self._use = free, place, use
        self.tensor = use.tensor
        self._pending: Pending | None = None
        self._shard: Tensor | None = None

    def start(self, scatter: bool = False) -> None:
        """Begin `reduce`, or `scatter`, in the background; that then waits for it."""
        tensor, prepared, call = self._use
        told = tell(_called("reduce-scatter" if scatter else "sum", tensor))
        if not scatter:
            self._pending = self._transport.start_all_reduce(prepared, call, told)
        elif tensor.numel() > 0:
            self._shard, rows = self._new_shard()
            self._pending = self._transport.start_reduce_scatter(prepared, rows, call, told)

    def reduce(self) -> Tensor:
        """Replace `tensor` by the sum; valid until `release`."""
        tensor, prepared, call = self._use
        pending = self._pending
        reply = pending.wait() if pending else self._transport.all_reduce(prepared, call)
        self._check(reply, "sum")
        return tensor

    def finish(self, dtype: torch.dtype) -> Tensor:
        """The sum as a new tensor; gives the memory back."""
        total = self.reduce().to(dtype, copy=True)
        self.release()
        return total

    def scatter(self) -> Tensor:
        """This rank's rows of the sum, cut along dimension 0; gives the memory back."""
        tensor, prepared, call = self._use
        shard = self._shard
        if self._pending is not None:
            self._check(self._pending.wait(), "reduce-scatter")
        elif shard is None:
            shard, rows = self._new_shard()
            if tensor.numel() > 0:
                reply = self._transport.reduce_scatter(prepared, rows, call)
                self._check(reply, "reduce-scatter")
        self.release()
        assert shard is not None
        return shard

    def release(self) -> None:
        """Give the memory back; `tensor` must not be used any more."""
        self._free.append(self._place)

    def _check(self, reply: Reply, name: str) -> None:
        if reply.outcome != "done":
            self.release()
            check_reply(reply, self._group, name, self.tensor)

    def _new_shard(self) -> tuple[Tensor, Tensor]:
        """Room for this rank's rows, and the same as [rows, features]."""
        rows, *rest = self.tensor.shape
        start, stop = shard_bounds(rows, self._group.size, self._group.rank)
        shard = self.tensor.new_empty(stop - start, *rest)
        return shard, shard.view(stop - start, math.prod(rest))

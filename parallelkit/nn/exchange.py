"""What the layers of a group send each other: plain sums, and shards gathered and scattered.

Sums are formed in memory that all ranks of a host reach. Each group keeps a pool of it, and every
rank takes from its pool and gives back in the same order, so the places agree without a word. For
torch.compile the same three exchanges are operators that name a group by its number.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import torch

from parallelkit.agreement import refuse, tell
from parallelkit.collectives import shard_bounds
from parallelkit.errors import InvalidArgumentError, InvalidTypeError
from parallelkit.group import Group, group_of_id
from parallelkit.ops import DTYPE_CODES
from parallelkit.transport import REDUCTIONS, Call, Pending, Reply

__all__ = ["Term", "all_gather", "all_reduce", "reduce_scatter", "whole_length"]

Tensor = torch.Tensor


class _Memory:
    """A stretch of a pool, and what the transport prepared for its uses so far."""

    def __init__(self, flat: Tensor) -> None:
        self.flat = flat
        self.prepared: dict[tuple[int, ...], Any] = {}


# The memory not in use, by group and dtype; the last one given back is the next one taken.
_pools: weakref.WeakKeyDictionary[Group, dict[torch.dtype, list[_Memory]]] = (
    weakref.WeakKeyDictionary()
)


class Term:
    """One rank's term of a sum over the group: write `tensor`, then sum. Used once; collective.

    Args:
        group: whose ranks add.
        shape: of the term, the same on every rank.
        dtype: of the term, the same on every rank.
    """

    def __init__(self, group: Group, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        if dtype not in DTYPE_CODES:
            raise InvalidTypeError(
                f"tensor-parallel sum: wanted float32, float64, bfloat16 or float16, got {dtype}"
            )
        self._group, self._transport = group, group._usable()
        self._free = _pools.setdefault(group, {}).setdefault(dtype, [])
        numel = math.prod(shape)
        memory = self._free.pop() if self._free else None
        if memory is None or memory.flat.numel() < numel:
            memory = _Memory(group.empty(_rounded(numel), dtype=dtype))
        self._memory = memory
        self.tensor = memory.flat[:numel].view(shape)
        self._pending: Pending | None = None

    def _prepared(self, shape: tuple[int, ...]) -> Any:
        found = self._memory.prepared.get(shape)
        if found is None:
            found = self._transport.prepare([self._memory.flat[: math.prod(shape)].view(shape)])
            self._memory.prepared[shape] = found
        return found

    def reduce(self) -> Tensor:
        """Replace `tensor` by the sum; valid until `release`."""
        numel = self.tensor.numel()
        reply = self._transport.all_reduce(self._prepared((numel,)), _call(self.tensor, (numel,)))
        self._check(reply, "sum")
        return self.tensor

    def start(self) -> None:
        """Begin `reduce` in the background; `finish` waits for it."""
        numel = self.tensor.numel()
        self._pending = self._transport.start_all_reduce(
            self._prepared((numel,)),
            _call(self.tensor, (numel,)),
            tell(_called("sum", self.tensor)),
        )

    def finish(self, dtype: torch.dtype) -> Tensor:
        """The sum as a new tensor; gives the memory back."""
        if self._pending is None:
            self.reduce()
        else:
            self._check(self._pending.wait(), "sum")
        total = self.tensor.to(dtype, copy=True)
        self.release()
        return total

    def scatter(self) -> Tensor:
        """This rank's rows of the sum, cut along dimension 0; gives the memory back."""
        rows, *rest = self.tensor.shape
        start, stop = shard_bounds(rows, self._group.size, self._group.rank)
        shard = self.tensor.new_empty(stop - start, *rest)
        shape = (rows, math.prod(rest))
        if self.tensor.numel() > 0:
            reply = self._transport.reduce_scatter(
                self._prepared(shape), shard.view(stop - start, shape[1]), _call(self.tensor, shape)
            )
            self._check(reply, "reduce-scatter")
        self.release()
        return shard

    def release(self) -> None:
        """Give the memory back; `tensor` must not be used any more."""
        self._free.append(self._memory)

    def _check(self, reply: Reply, name: str) -> None:
        _check(reply, self._group, name, self.tensor)


def _rounded(numel: int) -> int:
    """Up to a quarter more, so that slowly growing sizes seldom ask for new memory."""
    step = max(4096, 1 << max(0, numel.bit_length() - 3))
    return max(1, -(-numel // step)) * step


def _call(tensor: Tensor, shape: tuple[int, ...]) -> Call:
    signature = hash((DTYPE_CODES[tensor.dtype], *shape)) & (1 << 63) - 1
    return Call(signature, 0, 1.0, 1.0, REDUCTIONS["total"], False)


def _check(reply: Reply, group: Group, name: str, tensor: Tensor) -> None:
    if reply.outcome != "done":
        called = _called(name, tensor)
        raise refuse(group._usable(), group.rank, reply.outcome, called, heard=reply.heard)


def _called(name: str, tensor: Tensor) -> tuple[str, str]:
    return f"tensor-parallel {name}", f"{tensor.dtype}{list(tensor.shape)}".removeprefix("torch.")


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """The sum of every rank's x."""
    if torch.compiler.is_compiling():
        return _all_reduce_op(x, group.id)  # type: ignore[no-any-return]
    term = Term(group, x.shape, x.dtype)
    term.tensor.copy_(x)
    return term.finish(x.dtype)


def reduce_scatter(x: Tensor, dim: int, group: Group) -> Tensor:
    """This rank's shard along `dim`, as `shard_bounds` cuts it, of the sum of every rank's x."""
    if torch.compiler.is_compiling():
        return _reduce_scatter_op(x, dim, group.id)  # type: ignore[no-any-return]
    moved = x.movedim(dim, 0)
    term = Term(group, moved.shape, x.dtype)
    term.tensor.copy_(moved)
    return term.scatter().movedim(0, dim).contiguous()


def all_gather(x: Tensor, dim: int, length: int, group: Group) -> Tensor:
    """The tensor of which every rank holds a shard along `dim`, `length` long there in all."""
    if torch.compiler.is_compiling():
        return _all_gather_op(x, dim, length, group.id)  # type: ignore[no-any-return]
    shard = x.detach().movedim(dim, 0).contiguous()
    whole = shard.new_empty(length, *shard.shape[1:])
    if whole.numel() > 0:
        flat, transport = whole.view(length, -1), group._usable()
        mine = shard.view(len(shard), flat.shape[1])
        reply = transport.all_gather(transport.prepare([flat]), mine, _call(flat, flat.shape))
        _check(reply, group, "all-gather", whole)
    return whole.movedim(0, dim).contiguous()


def whole_length(x: Tensor, dim: int, group: Group) -> int:
    """How long the tensor is of which the ranks' x are the shards along `dim`; collective.

    A compiled graph cannot ask its peers: there the shards must be of one length.

    Raises:
        InvalidArgumentError: they are no such shards; on every rank.
    """
    mine = x.shape[dim]
    if torch.compiler.is_compiling():
        return mine * group.size
    lengths: list[int] = group._gather_objects(mine, *_called("all-gather", x))
    total = sum(lengths)
    bounds = [shard_bounds(total, group.size, rank) for rank in range(group.size)]
    if lengths != [stop - start for start, stop in bounds]:
        raise InvalidArgumentError(
            f"tensor-parallel all-gather: along dimension {dim} the ranks hold {lengths}, which is "
            f"not how pk.shard_bounds({total}, {group.size}, rank) cuts; "
            "pk.nn.functional.scatter_to_group makes such shards"
        )
    return total


# -- operators for torch.compile ------------------------------------------------------------------

_NAMESPACE = "parallelkit_exchange"
_library = torch.library.Library(_NAMESPACE, "DEF")  # noqa: TOR901


def _define(schema: str, run: Callable[..., Tensor], shape: Callable[..., Tensor]) -> Any:
    name = schema.partition("(")[0]
    _library.define(schema)
    for device in ("CPU", "CUDA"):
        _library.impl(name, run, device)
    torch.library.register_fake(f"{_NAMESPACE}::{name}", shape, lib=_library)
    return getattr(getattr(torch.ops, _NAMESPACE), name).default


def _resized(x: Tensor, dim: int, length: Any) -> Tensor:
    return x.new_empty(*x.shape[:dim], length, *x.shape[dim:][1:])


def _scattered(x: Tensor, dim: int, group: int) -> Tensor:
    start, stop = shard_bounds(x.shape[dim], group_of_id(group).size, group_of_id(group).rank)
    return _resized(x, dim % x.ndim, stop - start)


_all_reduce_op = _define(
    "all_reduce(Tensor x, int group) -> Tensor",
    lambda x, group: all_reduce(x, group_of_id(group)),
    lambda x, group: x.new_empty(x.shape),
)
_reduce_scatter_op = _define(
    "reduce_scatter(Tensor x, int dim, int group) -> Tensor",
    lambda x, dim, group: reduce_scatter(x, dim, group_of_id(group)),
    _scattered,
)
_all_gather_op = _define(
    "all_gather(Tensor x, int dim, SymInt length, int group) -> Tensor",
    lambda x, dim, length, group: all_gather(x, dim, length, group_of_id(group)),
    lambda x, dim, length, group: _resized(x, dim % x.ndim, length),
)

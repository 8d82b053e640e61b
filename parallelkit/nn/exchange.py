"""What the layers of a group send each other: plain sums, and shards gathered and scattered.

For torch.compile the same exchanges are operators that name a group by its number.
"""

from __future__ import annotations

from typing import Any

import torch

from parallelkit.agreement import refuse
from parallelkit.arguments import described
from parallelkit.collectives import shard_bounds
from parallelkit.errors import InvalidArgumentError
from parallelkit.group import Group, group_of_id
from parallelkit.nn.operators import Operators
from parallelkit.nn.term import Term, check_dtype, check_reply, total_of
from parallelkit.together import check_alike

__all__ = ["agreed", "all_gather", "all_reduce", "reduce_scatter", "whole_length"]

Tensor = torch.Tensor


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
    moved = _first(x, dim)
    term = Term(group, moved.shape, x.dtype)
    term.tensor.copy_(moved)
    return _back(term.scatter(), dim)


def all_gather(x: Tensor, dim: int, length: int, group: Group) -> Tensor:
    """The tensor of which every rank holds a shard along `dim`, `length` long there in all."""
    if torch.compiler.is_compiling():
        return _all_gather_op(x, dim, length, group.id)  # type: ignore[no-any-return]
    shard = _first(x.detach(), dim).contiguous()
    whole = shard.new_empty(length, *shard.shape[1:])
    if whole.numel() > 0:
        check_dtype("all-gather", x.dtype, group)
        flat, transport = whole.view(length, -1), group._usable()
        mine = shard.view(len(shard), flat.shape[1])
        start, stop = shard_bounds(length, group.size, group.rank)
        call, fault = total_of(flat), None
        if len(shard) != stop - start:
            call = call._replace(fault=True)
            fault = InvalidArgumentError(
                f"tensor-parallel all-gather: a shard of {length} along dimension {dim} must be "
                f"{stop - start} long, got {len(shard)}"
            )
        reply = transport.all_gather(transport.prepare([flat]), mine, call)
        check_reply(reply, group, "all-gather", whole, fault)
    return _back(whole, dim)


def _first(x: Tensor, dim: int) -> Tensor:
    """x with this dimension in front."""
    return x.movedim(dim, 0) if dim else x


def _back(x: Tensor, dim: int) -> Tensor:
    """x with its first dimension at this place again, contiguous."""
    return x.movedim(0, dim).contiguous() if dim else x


def whole_length(call: str, x: Tensor, dim: int, group: Group, **alike: object) -> int:
    """How long the tensor is of which the ranks' x are the shards along `dim`; collective.

    A compiled graph cannot ask its peers: there the shards must be of one length.

    Args:
        call: what asks, for errors.
        x: this rank's shard.
        dim: at least 0.
        group: the ranks.
        alike: what else is the same on every rank, by name.

    Raises:
        CollectiveMismatchError: it is not, or `dim` is not; on every rank.
        InvalidArgumentError: they are no such shards; on every rank.
    """
    mine = x.shape[dim]
    if torch.compiler.is_compiling():
        return mine * group.size
    told = [f"{name}={value!r}" for name, value in {"dim": dim, **alike}.items()]
    heard = group._gather_objects((mine, told), call, described(x))
    check_alike(call, [theirs for _, theirs in heard])
    lengths: list[int] = [length for length, _ in heard]
    total = sum(lengths)
    bounds = [shard_bounds(total, group.size, rank) for rank in range(group.size)]
    if lengths != [stop - start for start, stop in bounds]:
        raise InvalidArgumentError(
            f"{call}: along dimension {dim} the ranks hold {lengths}, which is not how "
            f"pk.shard_bounds({total}, {group.size}, rank) cuts; "
            "pk.nn.functional.scatter_to_group makes such shards"
        )
    return total


def agreed(x: Tensor, number: int, group: Group) -> Tensor:
    """x, once all ranks have named the same number: in a compiled graph, which takes shards for
    equally long, what makes sure that they were.

    Raises:
        CollectiveMismatchError: they have not; on every rank.
    """
    if torch.compiler.is_compiling():
        return _agreed_op(x, number, group.id)  # type: ignore[no-any-return]
    called = "tensor-parallel shards of a whole", f"{number} long"
    if len(set(group._gather_objects(called, *called))) > 1:
        raise refuse(group._usable(), group.rank, "mismatch", called)
    return x.clone()


# -- operators for torch.compile ------------------------------------------------------------------

_define = Operators("parallelkit_exchange").define


def _resized(x: Tensor, dim: int, length: Any) -> Tensor:
    return x.new_empty(*x.shape[:dim], length, *x.shape[dim:][1:])


def _scattered(x: Tensor, dim: int, group: int) -> Tensor:
    start, stop = shard_bounds(x.shape[dim], group_of_id(group).size, group_of_id(group).rank)
    return _resized(x, dim % x.ndim, stop - start)


_agreed_op = _define(
    "agreed(Tensor x, SymInt number, int group) -> Tensor",
    lambda x, number, group: agreed(x, number, group_of_id(group)),
    lambda x, number, group: x.new_empty(x.shape),
)
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

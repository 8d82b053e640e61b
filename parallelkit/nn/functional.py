"""Functions of tensor parallelism: each exchange of activations with its conjugate as gradient.

    forward                   backward
    copy_to_group             identity          sum
    reduce_from_group         sum               identity
    gather_from_group         gather            slice, or reduce-scatter with grad="partial"
    scatter_to_group          slice             gather
    reduce_scatter_to_group   reduce-scatter    gather

Where the forward pass communicates, a bad argument on one rank is raised on every rank, in place of
that exchange. `copy_to_group`, `scatter_to_group` and the products do not, and raise where they are
called wrongly: to ask the peers would cost each call a round trip.

Source: Shoeybi et al. 2019, "Megatron-LM" (the functions f and g); Korthikanti et al. 2022,
"Reducing activation recomputation in large transformer models" (the sequence-parallel pairs).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from parallelkit.agreement import refuse_instead
from parallelkit.arguments import as_size, check_tensor
from parallelkit.collectives import shard_bounds
from parallelkit.errors import InvalidArgumentError, InvalidTypeError, ParallelKitError
from parallelkit.group import Group, default_group
from parallelkit.nn import exchange
from parallelkit.nn.linear_op import gated_linear, linear, linear_into
from parallelkit.nn.loss import vocab_parallel_cross_entropy
from parallelkit.nn.mlp_op import mlp

__all__ = [
    "copy_to_group",
    "gated_linear",
    "gather_from_group",
    "linear",
    "linear_into",
    "mlp",
    "reduce_from_group",
    "reduce_scatter_to_group",
    "scatter_to_group",
    "vocab_parallel_cross_entropy",
]

Tensor = torch.Tensor
AnyGroup = Group | DeviceMesh | None


def copy_to_group(x: Tensor, group: AnyGroup = None) -> Tensor:
    """x itself; its gradient is the sum of every rank's. Where a split computation begins.

    Args:
        x: equal on every rank.
        group: a Group or one-dimensional DeviceMesh. Default: all ranks.
    Raises:
        InvalidTypeError: x is no tensor.
    """
    check_tensor("copy_to_group", "x", x)
    return _Copy.apply(x, default_group(group))  # type: ignore[no-untyped-call, no-any-return]


def reduce_from_group(x: Tensor, group: AnyGroup = None) -> Tensor:
    """The sum of every rank's x; gradients pass as they are. Where a split computation ends.

    Args:
        x: this rank's term, of one shape and dtype on every rank.
        group: as in `copy_to_group`.
    Raises:
        InvalidTypeError: integers, or no tensor; on every rank, as is the next.
        CollectiveMismatchError: the ranks' terms differ in shape or dtype.
    """
    group = default_group(group)
    try:
        check_tensor("reduce_from_group", "x", x)
    except ParallelKitError as fault:
        raise refuse_instead(group, fault) from fault
    return _Reduce.apply(x, group)  # type: ignore[no-untyped-call, no-any-return]


def gather_from_group(
    x: Tensor,
    group: AnyGroup = None,
    dim: int = -1,
    *,
    grad: str = "replicated",
    length: int | None = None,
) -> Tensor:
    """The tensor of which every rank has a shard.

    Args:
        x: this rank's shard along `dim`, cut as by `shard_bounds`.
        group: as in `copy_to_group`.
        dim: where the shards meet. Default: -1.
        grad: "replicated" where all ranks do the same with the result, so each has the whole
            gradient and keeps its slice; "partial" where what follows differs by rank, so the
            gradients are terms of a sum: they are reduce-scattered.
        length: how long the whole is along `dim`, equal on every rank. Default: the ranks ask each
            other, or in a graph of torch.compile take their shards for equally long.
    Raises:
        InvalidArgumentError: a bad `dim`, `grad` or `length`, or shards cut otherwise; on every
            rank, as are the next.
        InvalidTypeError: integers, or no tensor.
        CollectiveMismatchError: ranks disagree on `dim`, shapes or dtypes.
    """
    group = default_group(group)
    name = "gather_from_group"
    try:
        if grad not in ("replicated", "partial"):
            raise InvalidArgumentError(
                f'{name}: grad must be "replicated" or "partial", got {grad!r}'
            )
        dim = _dimension(name, x, dim)
        if length is not None:
            length = as_size(name, "length", length)
    except ParallelKitError as fault:
        raise refuse_instead(group, fault) from fault
    if length is None:
        length = exchange.whole_length(name, x, dim, group, grad=grad)
    return _Gather.apply(x, group, dim, length, grad == "partial")  # type: ignore[no-untyped-call, no-any-return]


def scatter_to_group(x: Tensor, group: AnyGroup = None, dim: int = -1) -> Tensor:
    """This rank's shard of x along `dim`, as `shard_bounds` cuts it; gradients are gathered.

    Args:
        x: equal on every rank.
        group, dim: as in `gather_from_group`.
    Raises:
        InvalidArgumentError, InvalidTypeError: a bad `dim`, or no tensor.
    """
    return _Scatter.apply(  # type: ignore[no-untyped-call, no-any-return]
        x, default_group(group), _dimension("scatter_to_group", x, dim)
    )


def reduce_scatter_to_group(x: Tensor, group: AnyGroup = None, dim: int = -1) -> Tensor:
    """This rank's shard along `dim` of the sum of every rank's x; gradients are gathered.

    Args:
        x: this rank's term, of one shape and dtype on every rank.
        group, dim: as in `gather_from_group`.
    Raises:
        InvalidArgumentError, InvalidTypeError: a bad `dim`, integers, or no tensor; on every rank,
            as is the next.
        CollectiveMismatchError: the ranks' terms differ in shape or dtype.
    """
    group = default_group(group)
    try:
        dim = _dimension("reduce_scatter_to_group", x, dim)
    except ParallelKitError as fault:
        raise refuse_instead(group, fault) from fault
    return _ReduceScatter.apply(x, group, dim)  # type: ignore[no-untyped-call, no-any-return]


def _dimension(call: str, x: Tensor, dim: int) -> int:
    """`dim` of x, counted from the front."""
    check_tensor(call, "x", x)
    if not isinstance(dim, int):
        raise InvalidTypeError(f"{call}: dim must be an int, got {type(dim).__name__}")
    if not -x.ndim <= dim < x.ndim:
        raise InvalidArgumentError(
            f"{call}: dim must be in [{-x.ndim}, {x.ndim}) for a tensor of shape {list(x.shape)}, "
            f"got {dim}"
        )
    return dim % x.ndim


def own_slice(x: Tensor, group: Group, dim: int) -> Tensor:
    """This rank's shard of x."""
    start, stop = shard_bounds(x.shape[dim], group.size, group.rank)
    return x.narrow(dim, start, stop - start)


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return exchange.all_reduce(dy, ctx.group), None


class _Reduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return exchange.all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int, length: int, partial: bool) -> Tensor:
        ctx.group, ctx.dim, ctx.partial = group, dim, partial
        return exchange.all_gather(x, dim, length, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None, None]:
        give = exchange.reduce_scatter if ctx.partial else _contiguous_slice
        return give(dy, ctx.dim, ctx.group), None, None, None, None


class _Scatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim, ctx.length = group, dim, x.shape[dim]
        return _contiguous_slice(x, dim, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return exchange.all_gather(dy, ctx.dim, ctx.length, ctx.group), None, None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim, ctx.length = group, dim, x.shape[dim]
        return exchange.reduce_scatter(x, dim, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return exchange.all_gather(dy, ctx.dim, ctx.length, ctx.group), None, None


def _contiguous_slice(x: Tensor, dim: int, group: Group) -> Tensor:
    return own_slice(x, group, dim).clone(memory_format=torch.contiguous_format)

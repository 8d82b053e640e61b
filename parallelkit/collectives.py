"""The weighted collectives: an exact mean over the items of all ranks, however they are spread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, overload

import torch
from torch.distributed.device_mesh import DeviceMesh

from .agreement import refuse
from .arguments import Weight, described, reduction_name, reduction_number, signature_of
from .errors import InvalidArgumentError, InvalidTypeError, ParallelKitError
from .group import Group, default_group
from .layout import flat_view
from .prepared import PreparedAllReduce, Work, weight_for
from .transport import REDUCTIONS, Call

__all__ = [
    "Work",
    "all_gather_flat",
    "shard_bounds",
    "weighted_all_reduce_",
    "weighted_reduce_scatter",
]


@overload
def weighted_all_reduce_(
    tensors: torch.Tensor | Sequence[torch.Tensor],
    weight: Weight = ...,
    group: Group | DeviceMesh | None = ...,
    *,
    reduction: str = ...,
    async_op: Literal[False] = ...,
) -> torch.Tensor: ...
@overload
def weighted_all_reduce_(
    tensors: torch.Tensor | Sequence[torch.Tensor],
    weight: Weight = ...,
    group: Group | DeviceMesh | None = ...,
    *,
    reduction: str = ...,
    async_op: Literal[True],
) -> Work: ...
def weighted_all_reduce_(
    tensors: torch.Tensor | Sequence[torch.Tensor],
    weight: Weight = 1.0,
    group: Group | DeviceMesh | None = None,
    *,
    reduction: str = "mean",
    async_op: bool = False,
) -> torch.Tensor | Work:
    """Average tensors in place over all ranks, each rank counted by its weight.

        R ranks, w_i and x_i weight and tensor of rank i
        "mean"   x_i <- sum_i w_i x_i / sum_i w_i
        "sum"    x_i <- sum_i x_i / sum_i w_i
        "total"  x_i <- sum_i x_i

    Args:
        tensors: one tensor or a sequence; the same count, shapes and dtypes on every rank. float32,
            float64, bfloat16, float16 or complex, any strides; overwritten with the result.
        weight: number of items (examples, tokens) that this rank's tensors are a mean over; an int,
            float or 0-dim tensor, finite, at least 0. A rank of weight 0 takes part, and its values
            are never read. If all weights are 0, the tensors become 0. Default: 1.
        group: the ranks, a Group or one dimension of a DeviceMesh. Default: all (`pk.init()`).
        reduction: "mean" where tensors are means over the rank's items, "sum" where they are sums;
            "total" for a plain sum, to which weights do not matter. Default: "mean".
        async_op: return at once with a `Work`; the tensors must not be touched before its `wait`.

    Returns:
        The sum of the weights, 0-dim float64; with `async_op` a `Work` whose `wait` returns it.

    Raises:
        InvalidArgumentError: (a ValueError) a bad weight or reduction, or elements that overlap.
        InvalidTypeError: (a TypeError) integers, or no tensors. These two and the next are raised
            on every rank, with no tensor changed and the group still usable.
        CollectiveMismatchError: ranks disagree on count, shapes, dtypes or reduction.
        PeerLostError, CollectiveTimeoutError: a rank died or is late; they break the group.

    Accuracy: with S = sum w_i |x_i| / sum w_i, float32 |out - exact| <= 2^-24 (|exact| + (R+1) S),
    float64 the same with 2^-53; bfloat16 and float16 are the float32 sum rounded once, to nearest
    even. Weights are normalised in float64 first; fused multiply-adds follow in rank order.
    """
    prepared = PreparedAllReduce(tensors, default_group(group), reduction)
    return prepared.start(weight) if async_op else prepared.run(weight)


def shard_bounds(numel: int, size: int, rank: int) -> tuple[int, int]:
    """The shard [start, stop) of a flat buffer that a rank owns: ceil(numel / size) elements.

    The last ones have what is left: of 5 elements over 4 ranks they own 2, 2, 1 and 0.

    Args:
        numel: elements of the buffer, at least 0.
        size: number of ranks, at least 1.
        rank: in [0, size).

    Raises:
        InvalidArgumentError: (a ValueError) one of them is beyond its bounds.
    """
    if numel < 0 or size < 1 or not 0 <= rank < size:
        raise InvalidArgumentError(
            f"shard_bounds: wanted numel >= 0, size >= 1 and 0 <= rank < size, "
            f"got numel={numel}, size={size}, rank={rank}"
        )
    each = -(-numel // size)
    return min(numel, each * rank), min(numel, each * (rank + 1))


def weighted_reduce_scatter(
    flat: torch.Tensor,
    weight: Weight = 1.0,
    group: Group | DeviceMesh | None = None,
    *,
    reduction: str = "mean",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """This rank's shard of the weighted mean of a 1-D tensor; `flat` stays as it is.

    Args:
        flat: [n], as in `weighted_all_reduce_`.
        weight, group, reduction: as there.
        out: where the shard goes: `shard_bounds(n, size, rank)` long, contiguous, of flat's dtype.
            It may be that part of `flat` itself. Default: a new tensor.

    Returns:
        The shard, [stop - start].

    Raises:
        As `weighted_all_reduce_`; InvalidArgumentError also where `flat` is not 1-D or `out` does
        not fit.
    """
    group = default_group(group)
    name = "weighted_reduce_scatter"

    def check() -> _Flat:
        whole = _flat_argument(f"{name}: flat", flat, group)
        start, stop = shard_bounds(len(flat), group.size, group.rank)
        shard = _output(f"{name}: out", out, stop - start, whole)
        number = reduction_number(name, reduction)
        return _Flat(whole, shard, weight_for(name, weight, group), number)

    return _run_flat(name, "reduce_scatter", group, check).shard


def all_gather_flat(
    shard: torch.Tensor,
    numel: int,
    group: Group | DeviceMesh | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The whole 1-D tensor of which each rank holds a shard; undoes `weighted_reduce_scatter`.

    Args:
        shard: this rank's part, `shard_bounds(numel, size, rank)` long.
        numel: length of the whole.
        group: as in `weighted_all_reduce_`.
        out: [numel], contiguous, of shard's dtype; `shard` may be its own part of it. Default: new.

    Returns:
        [numel].

    Raises:
        As `weighted_all_reduce_`; InvalidArgumentError also where `shard` or `out` does not fit.
    """
    group = default_group(group)
    name = "all_gather_flat"

    def check() -> _Flat:
        if not isinstance(numel, int):
            raise InvalidTypeError(f"{name}: numel must be an int, got {type(numel).__name__}")
        start, stop = shard_bounds(numel, group.size, group.rank)
        mine = _flat_argument(f"{name}: shard", shard, group)
        if len(mine) != stop - start:
            raise InvalidArgumentError(
                f"{name}: shard must be [{stop - start}], as shard_bounds cuts {numel} elements, "
                f"got {described(shard)}"
            )
        return _Flat(_output(f"{name}: out", out, numel, mine), mine, 1.0, REDUCTIONS["mean"])

    return _run_flat(name, "all_gather", group, check).whole


class _Flat(NamedTuple):
    """A checked call on a 1-D tensor and its shards."""

    whole: torch.Tensor
    shard: torch.Tensor
    weight: float | torch.Tensor
    reduction: int


def _run_flat(name: str, operation: str, group: Group, check: Callable[[], _Flat]) -> _Flat:
    """One collective over what `check` returns; what it raises is raised on every rank."""
    transport = group._usable()
    fault = None
    try:
        flat = check()
    except ParallelKitError as error:
        nothing = torch.empty(0, device=group.device)
        fault, flat = error, _Flat(nothing, nothing, 1.0, 0)
    whole, shard = (
        torch.view_as_real(t) if t.is_complex() else t
        for t in (flat.whole.detach(), flat.shard.detach())
    )
    call = Call(signature_of([flat.whole]), 0, flat.weight, 1.0, flat.reduction, fault is not None)
    collective = transport.reduce_scatter if operation == "reduce_scatter" else transport.all_gather
    reply = collective(transport.prepare([whole]), shard, call)
    if reply.outcome != "done":
        called = [name, reduction_name(flat.reduction), described(flat.whole)]
        raise refuse(transport, group.rank, reply.outcome, called, flat.weight, fault)
    return flat


def _flat_argument(name: str, tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """A 1-D tensor of a dtype that has a mean, contiguous."""
    flat_view(name, tensor, group.device)
    if tensor.dim() != 1:
        raise InvalidArgumentError(f"{name} must be 1-D, got shape {list(tensor.shape)}")
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _output(name: str, out: torch.Tensor | None, numel: int, like: torch.Tensor) -> torch.Tensor:
    """Where a result of `numel` elements of like's dtype goes: `out`, if it fits, or new memory."""
    if out is None:
        return like.new_empty(numel)
    if (
        not isinstance(out, torch.Tensor)
        or (out.shape, out.dtype, out.device) != ((numel,), like.dtype, like.device)
        or not out.is_contiguous()
        or out.is_conj()
        or out.is_neg()
    ):
        got = type(out).__name__
        if isinstance(out, torch.Tensor):
            got = f"{described(out)} with strides {list(out.stride())} on {out.device}"
        raise InvalidArgumentError(
            f"{name} must be a contiguous {like.dtype} tensor [{numel}] on {like.device}, got {got}"
        )
    return out

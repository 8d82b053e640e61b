"""The weighted collectives: an exact mean over the items of all ranks, however they are spread."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from .agreement import refuse, tell
from .errors import InvalidArgumentError, InvalidTypeError, ParallelKitError
from .group import Group, default_group
from .layout import COPY, copy_back, flat_view, is_flat
from .ops import DTYPE_CODES
from .transport import REDUCTIONS, Call, Pending, Reply

__all__ = [
    "PreparedAllReduce",
    "Weight",
    "Work",
    "all_gather_flat",
    "as_number",
    "shard_bounds",
    "weighted_all_reduce_",
    "weighted_reduce_scatter",
]

Weight = int | float | torch.Tensor

_INT64 = (1 << 63) - 1
_REDUCTION_NAMES = {number: f"reduction {name}" for name, number in REDUCTIONS.items()}


class Work:
    """A collective under way. Its tensors must not be touched before `wait` returns."""

    def __init__(self, pending: Pending, finish: Callable[[Reply], torch.Tensor]) -> None:
        self._pending, self._finish = pending, finish
        self._total: torch.Tensor | None = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._pending.done()

    def wait(self) -> torch.Tensor:
        """Wait for the end; the total weight, 0-dim float64. Raises as the direct call does."""
        if self._error is not None:
            raise self._error
        if self._total is None:
            try:
                self._total = self._finish(self._pending.wait())
            except BaseException as error:
                self._error = error
                raise
        return self._total

    def get_future(self) -> torch.futures.Future[torch.Tensor]:
        """A future of what `wait` returns."""
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()

        def complete() -> None:
            try:
                future.set_result(self.wait())
            except Exception as error:
                future.set_exception(error)  # type: ignore[arg-type]  # torch's annotation is wrong

        threading.Thread(target=complete, daemon=True).start()
        return future


class PreparedAllReduce:
    """`weighted_all_reduce_` for tensors that come again: checks and addresses are kept.

    Arguments and errors as there, but bad tensors are refused by `run` and `start`, on every rank.
    The tensors' memory must stay where it is.
    """

    name = "weighted_all_reduce_"

    def __init__(
        self,
        tensors: torch.Tensor | Sequence[torch.Tensor],
        group: Group,
        reduction: str = "mean",
    ) -> None:
        self._group = group
        self._transport = group._usable()
        self._tensors: Sequence[torch.Tensor] = ()
        self._copies: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
        self._layout = self._signature = self._reduction = 0
        self._fault: ParallelKitError | None = None
        try:
            self._reduction = _reduction(self.name, reduction)
            self._tensors = _listed(self.name, tensors)
            self._prepare(dense=True)
        except ParallelKitError as fault:  # take part, but only to say what is wrong here
            self._fault, self._native = fault, self._transport.prepare(())

    def _prepare(self, dense: bool) -> None:
        """Find each tensor's flat view; without `dense`, row-major copies of other orders."""
        device = self._group.device
        views, layouts, shapes, copies = [], [], [], []
        for index, tensor in enumerate(self._tensors):
            if is_flat(tensor, device):
                view, layout = tensor, 0
            else:
                view, layout = flat_view(f"{self.name}: tensors[{index}]", tensor, device)
                if layout > 0 and not dense:
                    view, layout = flat_view("", tensor.contiguous(), device)[0], COPY
                if layout == COPY:
                    copies.append((tensor, view))
                    layout = 0
            views.append(view)
            layouts.append(layout)
            shapes.append((DTYPE_CODES[view.dtype], *tensor.shape, tensor.is_complex()))
        if len(views) > 1:
            places = sorted((v.data_ptr(), v.data_ptr() + v.nbytes) for v in views if v.numel())
            if any(end > begin for (_, end), (begin, _) in pairwise(places)):
                raise InvalidArgumentError(
                    f"{self.name}: two tensors of the list share memory; pass each memory once"
                )
        self._copies = copies
        self._signature = hash(tuple(shapes)) & _INT64
        self._layout = hash(tuple(layouts)) & _INT64 if any(layouts) else 0
        self._native = self._transport.prepare(views)

    def _call(
        self, weight: Weight, scale: float, layout: int
    ) -> tuple[Call, ParallelKitError | None]:
        """What this rank says, and what is wrong with its arguments."""
        fault, number = self._fault, 1.0
        try:
            number = as_number(self.name, weight)
        except ParallelKitError as error:
            fault = fault or error
        return Call(
            self._signature, layout, number, scale, self._reduction, fault is not None
        ), fault

    def run(self, weight: Weight = 1.0, scale: float = 1.0) -> torch.Tensor:
        """One all-reduce now, of `scale` times the tensors; the total weight."""
        transport = self._group._usable()
        if self._copies:
            self._prepare(dense=True)
        call, fault = self._call(weight, scale, self._layout)
        reply = transport.all_reduce(self._native, call)
        if reply.outcome == "layouts":  # equal shapes in another order: go through copies
            self._prepare(dense=False)
            call = call._replace(layout=0)
            reply = transport.all_reduce(self._native, call)
        return self._finish(reply, call, fault)

    def native(self, weight: float, scale: float = 1.0) -> Reply:
        """As `run`, for tensors without copies, without the checks around it: for measuring."""
        call = Call(self._signature, self._layout, weight, scale, self._reduction, False)
        return self._transport.all_reduce(self._native, call)

    def start(
        self, weight: Weight = 1.0, scale: float = 1.0, fault: ParallelKitError | None = None
    ) -> Work:
        """One all-reduce in the background, after those started before.

        With `fault` this rank takes part only to have it raised on every rank.
        """
        transport = self._group._usable()
        if self._copies or self._layout:  # in row-major order: there is no second try from here
            self._prepare(dense=False)
        call, wrong = self._call(weight, scale, self._layout)
        fault = fault or wrong
        call = call._replace(fault=fault is not None)
        told = tell(self._described(), call.weight, fault)
        pending = transport.start_all_reduce(self._native, call, told)
        return Work(pending, lambda reply: self._finish(reply, call, fault))

    def _described(self) -> list[str]:
        names = map(_described, self._tensors)
        return [self.name, _REDUCTION_NAMES[self._reduction], *names]

    def _finish(self, reply: Reply, call: Call, fault: ParallelKitError | None) -> torch.Tensor:
        if reply.outcome != "done":
            raise refuse(
                self._transport,
                self._group.rank,
                reply.outcome,
                self._described(),
                call.weight,
                fault,
                reply.heard,
            )
        for tensor, copy in self._copies:
            copy_back(tensor, copy)
        torch.autograd.graph.increment_version(self._tensors)
        return torch.scalar_tensor(reply.total, dtype=torch.float64, device=self._group.device)


def weighted_all_reduce_(
    tensors: torch.Tensor | Sequence[torch.Tensor],
    weight: Weight = 1.0,
    group: Group | None = None,
    *,
    reduction: str = "mean",
    async_op: bool = False,
) -> Any:
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
        group: default: the group of all ranks (`pk.init()`).
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
    """The part [start, stop) of a flat buffer that a rank owns: chunks of ceil(numel / size).

    Of 5 elements over 4 ranks they own 2, 2, 1 and 0.
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
    group: Group | None = None,
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
        return _Flat(whole, shard, as_number(name, weight), _reduction(name, reduction))

    return _run_flat(name, "reduce_scatter", group, check).shard


def all_gather_flat(
    shard: torch.Tensor,
    numel: int,
    group: Group | None = None,
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
                f"got {_described(shard)}"
            )
        return _Flat(_output(f"{name}: out", out, numel, mine), mine, 1.0, REDUCTIONS["mean"])

    return _run_flat(name, "all_gather", group, check).whole


class _Flat(NamedTuple):
    """A checked call on a 1-D tensor and its shards."""

    whole: torch.Tensor
    shard: torch.Tensor
    weight: float
    reduction: int


def _run_flat(name: str, operation: str, group: Group, check: Callable[[], _Flat]) -> _Flat:
    """One collective over what `check` returns; what it raises is raised on every rank."""
    transport = group._usable()
    fault = None
    try:
        flat = check()
    except ParallelKitError as error:
        nothing = torch.empty(0)
        fault, flat = error, _Flat(nothing, nothing, 1.0, 0)
    whole, shard = (
        torch.view_as_real(t) if t.is_complex() else t
        for t in (flat.whole.detach(), flat.shard.detach())
    )
    signature = hash((DTYPE_CODES[whole.dtype], *whole.shape)) & _INT64
    call = Call(signature, 0, flat.weight, 1.0, flat.reduction, fault is not None)
    collective = transport.reduce_scatter if operation == "reduce_scatter" else transport.all_gather
    reply = collective(transport.prepare([whole]), shard, call)
    if reply.outcome != "done":
        called = [name, _REDUCTION_NAMES[flat.reduction], _described(flat.whole)]
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
            got = f"{_described(out)} with strides {list(out.stride())} on {out.device}"
        raise InvalidArgumentError(
            f"{name} must be a contiguous {like.dtype} tensor [{numel}] on {like.device}, got {got}"
        )
    return out


def _listed(name: str, tensors: torch.Tensor | Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        return (tensors,)
    try:
        return tuple(tensors)
    except TypeError:
        raise InvalidTypeError(
            f"{name}: tensors must be a tensor or a sequence of them, got {type(tensors).__name__}"
        ) from None


def as_number(name: str, weight: Weight) -> float:
    """A weight as a float; InvalidTypeError, in the name of the call, where it is no number."""
    if isinstance(weight, torch.Tensor) and weight.dim() == 0 and not weight.is_complex():
        return float(weight.detach())
    if isinstance(weight, (int, float)):
        try:
            return float(weight)
        except OverflowError:
            return math.inf  # refused with every other weight that is not finite
    raise InvalidTypeError(
        f"{name}: weight must be an int, a float or a 0-dim tensor, got {type(weight).__name__}"
        + (f" of shape {list(weight.shape)}" if isinstance(weight, torch.Tensor) else "")
    )


def _reduction(name: str, reduction: str) -> int:
    if reduction not in REDUCTIONS:
        raise InvalidArgumentError(
            f'{name}: reduction must be "mean", "sum" or "total", got {reduction!r}'
        )
    return REDUCTIONS[reduction]


def _described(given: object) -> str:
    if not isinstance(given, torch.Tensor):  # refused; this rank's part of a mismatch elsewhere
        return type(given).__name__
    return f"{given.dtype}{list(given.shape)}".removeprefix("torch.")

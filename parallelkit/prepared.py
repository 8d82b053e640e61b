"""All-reduces whose tensors are checked and located once, now or in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch.autograd.graph import increment_version

from .agreement import refuse, tell
from .arguments import (
    Weight,
    as_number,
    described,
    reduction_name,
    reduction_number,
    signature_of,
)
from .errors import InvalidArgumentError, InvalidTypeError, ParallelKitError
from .group import Group
from .layout import COPY, copy_back, flat_view, is_flat
from .transport import Call, Pending, Reply
from .transport.cuda_peer import CudaPeer

__all__ = ["PreparedAllReduce", "Work", "weight_for"]


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
        devices: list[int | str | torch.device] = list(self._pending.devices)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)

        if devices:  # `wait` only orders the current stream: here one that nobody else uses
            with torch.cuda.stream(torch.cuda.Stream(devices[0])):
                _fulfil(future, self.wait)
        else:
            threading.Thread(target=_fulfil, args=(future, self.wait), daemon=True).start()
        return future


def _fulfil(
    future: torch.futures.Future[torch.Tensor], promised: Callable[[], torch.Tensor]
) -> None:
    """Give a future what was promised, or the error that came instead."""
    try:
        future.set_result(promised())
    except Exception as error:
        future.set_exception(error)  # type: ignore[arg-type]  # torch's annotation is wrong


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
        self._fault: ParallelKitError | None = None
        try:
            self._reduction = reduction_number(self.name, reduction)
            self._tensors = _listed(self.name, tensors)
            self._prepare(dense=True)
        except ParallelKitError as fault:  # take part, but only to say what is wrong here
            self._reduction, self._tensors, self._fault = 0, (), fault
            self._prepare(dense=True)

    def _prepare(self, dense: bool) -> None:
        """Find each tensor's flat view; without `dense`, row-major copies of other orders."""
        device = self._group.device
        views, layouts, copies = list(self._tensors), None, []
        for index, tensor in enumerate(self._tensors):
            if is_flat(tensor, device):
                continue
            view, layout = flat_view(f"{self.name}: tensors[{index}]", tensor, device)
            if layout > 0 and not dense:
                view, layout = flat_view("", tensor.contiguous(), device)[0], COPY
            if layout == COPY:
                copies.append((tensor, view))
            elif layout:
                layouts = layouts or [0] * len(views)
                layouts[index] = layout
            views[index] = view
        if len(views) > 1:
            places = sorted((v.data_ptr(), v.data_ptr() + v.nbytes) for v in views if v.numel())
            if any(end > begin for (_, end), (begin, _) in pairwise(places)):
                raise InvalidArgumentError(
                    f"{self.name}: two tensors of the list share memory; pass each memory once"
                )
        self._copies = copies
        self._signature = signature_of(self._tensors)
        self._layout = hash(tuple(layouts)) & (1 << 63) - 1 if layouts else 0
        self._native = self._transport.prepare(views)

    def _call(
        self, weight: Weight, scale: float, layout: int
    ) -> tuple[Call, ParallelKitError | None]:
        """What this rank says, and what is wrong with its arguments."""
        fault: ParallelKitError | None = self._fault
        number: float | torch.Tensor = 1.0
        try:
            number = weight_for(self.name, weight, self._group)
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
        return [self.name, reduction_name(self._reduction), *map(described, self._tensors)]

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
        increment_version(self._tensors)
        total = reply.total
        if isinstance(total, float):
            total = torch.scalar_tensor(total, dtype=torch.float64, device=self._group.device)
        return total


def _listed(name: str, tensors: torch.Tensor | Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        return (tensors,)
    try:
        return tuple(tensors)
    except TypeError:
        raise InvalidTypeError(
            f"{name}: tensors must be a tensor or a sequence of them, got {type(tensors).__name__}"
        ) from None


def weight_for(name: str, weight: Weight, group: Group) -> float | torch.Tensor:
    """A weight as a float; one that lies on a GPU stays there where the GPU itself can take it."""
    if (
        not isinstance(weight, (int, float))
        and isinstance(weight, torch.Tensor)
        and weight.is_cuda
        and weight.dim() == 0
        and not weight.is_complex()
        and isinstance(group._transport, CudaPeer)
    ):
        return weight.detach()
    return as_number(name, weight)

"""How gradients become means: what happens around one run of autograd, on every rank alike."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from .arguments import Weight, as_number
from .broadcast import broadcast
from .buckets import GradientBuckets, Slot, Spec
from .errors import InvalidArgumentError, InvalidTypeError, ParallelKitError, UsageError
from .gradient_hooks import GradientHooks
from .group import Group
from .in_place import gradients_in_place
from .prepared import PreparedAllReduce, Work

__all__ = ["GradientSync"]

_NO_TASK = -1  # what autograd calls its task outside of a backward pass
_BACKWARD = "DataParallel.backward"


class _Pass:
    """One run of autograd, and what has come of it so far."""

    def __init__(self, sync: bool, task: int | None, plain: bool) -> None:
        self.sync = sync
        self.task = task  # autograd's number for it; reentrant checkpoints run others inside it
        self.plain = plain  # loss.backward(), not DataParallel.backward
        self.received = False  # a gradient has come
        self.works: list[Work] = []  # of the buckets that left, in order
        self.streams: set[torch.cuda.Stream] = set()  # on which gradients were written


class _Told(NamedTuple):
    """What the ranks tell each other with each sync."""

    used: list[bool]  # of each slot: some rank used the parameter
    working: list[int]  # the ranks that had work
    thawed: list[str]  # parameters outside of buckets that are trainable on some rank


class GradientSync:
    """Brings the gradients of a module's parameters into buckets, and the buckets to their mean.

    A pass begins with `backward`, or when autograd reaches an output of the module in a plain
    loss.backward(). Each gradient that autograd writes is folded into its bucket. In a pass that
    syncs the buckets travel in their fixed order, as early as they are complete; last of all the
    ranks tell each other which parameters they used. Every rank takes part in each of these
    collectives once a synced pass, whatever happens to it: one that failed does so with a fault.

    Args:
        module: its parameters get hooks; they are gone with this object.
        group: the ranks.
        buckets: where the gradients go; without parameters yet.
        overlap: whether buckets may travel while autograd runs.
        broadcast_buffers: with each sync, buffers become those of the first rank that had work.
    """

    def __init__(
        self,
        module: nn.Module,
        group: Group,
        buckets: GradientBuckets,
        overlap: bool,
        broadcast_buffers: bool,
    ) -> None:
        self.enabled = True  # False within no_sync
        self._module, self._group, self._buckets = module, group, buckets
        self._where = f"[rank {group.rank} of {group.size}]"
        self._broadcast_buffers = broadcast_buffers
        self._waiting = dict(module.named_parameters())  # in no bucket: frozen on every rank
        self._hooks = GradientHooks(module.parameters(), self, GradientSync._receive)
        trainable = [p.requires_grad for p in self._waiting.values()]
        heard = group._gather_objects(trainable, "DataParallel")
        self._place([name for name, *some in zip(self._waiting, *heard, strict=True) if any(some)])
        self._pass: _Pass | None = None
        self._reduced = False  # the gradients are a mean that nobody has cleared
        self._overlap = overlap
        self._has_synced = False  # the first pass shows whether each gradient comes once

    def _place(self, names: Sequence[str]) -> None:
        """Give parameters a bucket, in the strides they have on rank 0. Collective."""
        parameters = [self._waiting.pop(name) for name in names]
        mine = [Spec.of(name, p) for name, p in zip(names, parameters, strict=True)]
        specs = self._group._gather_objects(mine, "DataParallel")[0]
        self._buckets.append(list(zip(specs, parameters, strict=True)))
        flags = len(self._buckets.slot_of) + self._group.size + len(self._waiting)
        # Who used which parameter, had work, has thawed what. A weight of 2^40 leaves 2^-40 of it.
        self._flags = self._group._hosts.empty(flags, dtype=torch.float64).zero_()
        self._flags_reduction = PreparedAllReduce(self._flags, self._group._hosts, "sum")

    def watch(self, output: Any) -> None:
        """Notice a plain loss.backward() that begins at what the module gave."""
        enter = partial(self._enter, self.enabled)
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(enter)

    def backward(
        self, loss: torch.Tensor | None, weight: Weight, reduction: str, sync: bool
    ) -> None:
        """`DataParallel.backward`."""
        self._finish_leftover()
        this = _Pass(sync and self.enabled and not self._buckets.private, None, plain=False)
        self._pass = this
        if self._group.device.type == "cuda":  # where layers write gradients in place
            this.streams.add(torch.cuda.current_stream(self._group.device))
        try:
            self._see_changes()
            items = self._checked(loss, weight, reduction)
            self._begin()
            self._refuse_second_mean(this)
            if loss is not None and items > 0:
                thawed = [p.grad for p in self._waiting.values() if p.grad is not None]
                factor = self._buckets.open(items, reduction, loss.dtype, thawed)
                part = loss * factor
                part.register_hook(self._note_task)
                with self._buckets.in_sight(), gradients_in_place():
                    part.backward()
            self._end(this)
        except Exception as error:
            self._abandon(error)
            raise
        finally:
            self._pass = None

    def _checked(self, loss: Any, weight: Weight, reduction: str) -> float:
        """The weight as a number, once all arguments of `backward` make sense."""
        try:
            items = as_number(_BACKWARD, weight)
            _check(loss, items, reduction)
        except ParallelKitError as error:
            raise type(error)(f"{error} {self._where}") from None
        return items

    def get_ready(self) -> None:
        """Before a forward pass: see what changed."""
        if torch._C._current_graph_task_id() != _NO_TASK:  # a checkpoint runs it once more
            return
        self._finish_leftover()
        try:
            self._see_changes()
        except UsageError as error:
            if torch.is_grad_enabled():  # the others will sync
                self._pass = _Pass(not self._buckets.private, None, plain=False)
                self._abandon(error)
                self._pass = None
            raise

    def forget(self) -> None:
        """Drop what was accumulated, and all gradients."""
        self._buckets.reset()
        self._reduced = False
        for parameter in (*self._buckets.slot_of, *self._waiting.values()):
            parameter.grad = None

    def _finish_leftover(self) -> None:
        """End a plain loss.backward() that raised: now is the first chance to tell the others."""
        if self._pass is not None:
            self._abandon(UsageError("DataParallel: loss.backward() did not come to its end"))
            self._pass = None

    def _see_changes(self) -> None:
        if self._hooks.retired:
            raise UsageError(
                "DataParallel: another DataParallel has wrapped these parameters; use that one"
            )
        for parameter, slot in self._buckets.slot_of.items():
            if parameter.dtype != slot.dtype or parameter.device.type != self._group.device.type:
                raise UsageError(
                    f"DataParallel: {slot.name} was {slot.dtype} on {self._group.device} when it "
                    f"was wrapped and is {parameter.dtype} on {parameter.device} now; call "
                    f".to(...) before wrapping {self._where}"
                )
            if not slot.in_place():
                raise UsageError(
                    f"DataParallel: {slot.name}'s gradient has left its bucket, as with a module "
                    f"that was cast and cast back; wrap the module anew {self._where}"
                )
        if self._buckets.private and any(p.requires_grad for p in self._waiting.values()):
            raise UsageError(
                "DataParallel: a parameter became trainable after an optimizer had taken the "
                "gradients; wrap the module while all that shall ever train is trainable"
            )

    def _begin(self, besides: Slot | None = None) -> None:
        """Before the first gradient comes; the one of `besides` has come already."""
        self._group._usable()  # a forked child would write into its parent's gradients
        buckets = self._buckets
        thawed = any(parameter.grad is not None for parameter in self._waiting.values())
        started = self._reduced or buckets.weight
        if started and not thawed and buckets.cleared(self._reduced, besides):
            buckets.reset()
            self._reduced = False
        for bucket in buckets:
            bucket.missing = sum(slot.parameter.requires_grad for slot in bucket.slots)

    def _refuse_second_mean(self, this: _Pass) -> None:
        if this.sync and self._reduced:
            raise UsageError(
                f"{_BACKWARD}: gradients already hold the mean of the last synced backward; call "
                "zero_grad() after each step, and sync=False (or no_sync) for all micro-batches "
                f"but the last {self._where}"
            )

    def _enter(self, sync: bool, gradient: torch.Tensor) -> None:
        """Autograd has reached an output of the module: a plain loss.backward() may have begun."""
        if self._pass is None:
            self._enter_plain(sync)

    def _enter_plain(self, sync: bool, besides: Slot | None = None) -> _Pass:
        task = torch._C._current_graph_task_id()
        self._pass = _Pass(sync and not self._buckets.private, task, plain=True)
        torch.autograd.Variable._execution_engine.queue_callback(self._end_plain)
        self._begin(besides)
        return self._pass

    def _note_task(self, gradient: torch.Tensor) -> None:
        assert self._pass is not None
        self._pass.task = torch._C._current_graph_task_id()

    def _receive(self, parameter: torch.Tensor) -> None:
        """Autograd has written a gradient."""
        slot = self._buckets.slot_of.get(parameter)
        this = self._pass or self._enter_plain(self.enabled, slot)
        if not this.received:
            this.received = True
            if this.plain:
                self._refuse_second_mean(this)
                self._buckets.open_plain()
        if slot is None:
            return  # thawed: it has no place before the end of the next sync
        if slot.bucket < len(this.works):
            self._overlap = False
            raise UsageError(
                f"{_BACKWARD}: a second gradient came for {slot.name} when its bucket had "
                "left: it is shared with a part under reentrant checkpointing. Use "
                f"use_reentrant=False or DataParallel(overlap=False) {self._where}"
            )
        slot.fold(self._buckets.private)
        if slot.view.is_cuda:
            this.streams.add(torch.cuda.current_stream(slot.view.device))
        if torch._C._current_graph_task_id() != this.task:
            self._overlap = False  # a reentrant checkpoint: another such may add to this one yet
        self._buckets[slot.bucket].missing -= 1
        if this.sync and self._overlap and self._has_synced:
            while (
                len(this.works) < len(self._buckets) and not self._buckets[len(this.works)].missing
            ):
                self._start_next(this)

    def _start_next(self, this: _Pass, fault: ParallelKitError | None = None) -> None:
        """Let the next bucket travel; after the last one, who used what."""
        buckets, index = self._buckets, len(this.works)
        for stream in this.streams:
            torch.cuda.current_stream(stream.device).wait_stream(stream)
        if index < len(buckets):
            bucket = buckets[index]
            if fault is None:
                bucket.settle(buckets.private)
            work = bucket.reduction.start(buckets.weight, buckets.reference, fault)
        else:
            used = [slot.used for slot in buckets.slot_of.values()]
            working = [rank == self._group.rank for rank in range(self._group.size)]
            thawed = [parameter.requires_grad for parameter in self._waiting.values()]
            self._flags.copy_(torch.tensor([*used, *working, *thawed]))  # not read of weight 0
            work = self._flags_reduction.start(buckets.weight, 1.0, fault)
        this.works.append(work)

    def _end_plain(self) -> None:
        """Autograd has ended a plain loss.backward(), or an autograd.grad() that left nothing."""
        this = self._pass
        if this is None or not this.plain:
            return
        try:
            if this.received:
                self._end(this)
        except Exception as error:
            self._abandon(error)
            raise
        finally:
            self._pass = None

    def _end(self, this: _Pass) -> None:
        """All gradients of the pass are there. Collective if it syncs."""
        if this.sync:
            total, told = self._reduce(this)
            if told.thawed:
                this.works.pop()  # the flags'; the new buckets follow the old ones
                self._place(told.thawed)
                total, told = self._reduce(this)
            this.sync = False  # from here on there is nothing left that others wait for
            self._show_means(total, told)
        for bucket in self._buckets:
            bucket.version = bucket.flat._version

    def _reduce(self, this: _Pass) -> tuple[torch.Tensor, _Told]:
        """Let every bucket travel that has not yet, and wait for all; the total weight."""
        while len(this.works) <= len(self._buckets):
            self._start_next(this)
        totals, errors = [], []
        for work in this.works:
            try:
                totals.append(work.wait())
            except ParallelKitError as error:
                errors.append(error)
        if errors:
            this.sync = False
            self.forget()
            raise errors[0]
        flags = iter(self._flags.gt(0).tolist())
        return totals[0], _Told(
            used=[next(flags) for _ in self._buckets.slot_of],
            working=[rank for rank in range(self._group.size) if next(flags)],
            thawed=[name for name in self._waiting if next(flags)],
        )

    def _show_means(self, total: torch.Tensor, told: _Told) -> None:
        used = iter(told.used)
        for bucket in self._buckets:
            bucket.show_mean([next(used) for _ in bucket.slots])
        if self._broadcast_buffers and told.working:
            broadcast(list(self._module.buffers()), told.working[0], self._group)
        self._buckets.reset()
        self._buckets.total_weight = total
        self._reduced = self._has_synced = True

    def _abandon(self, error: Exception) -> None:
        """After a failure: take part in what is left of the sync, so that every rank raises."""
        this = self._pass
        assert this is not None
        if this.sync and (this.received or not this.plain):
            fault: ParallelKitError = UsageError(f"{_BACKWARD}: {type(error).__name__}: {error}")
            if isinstance(error, (InvalidArgumentError, InvalidTypeError, UsageError)):
                fault = error
            with contextlib.suppress(ParallelKitError):
                while len(this.works) <= len(self._buckets):
                    self._start_next(this, fault)
            for work in this.works:
                with contextlib.suppress(ParallelKitError):
                    work.wait()
        if not self._reduced:
            self.forget()


def _check(loss: Any, items: float, reduction: str) -> None:
    """Raise unless all arguments of `backward` make sense, `items` being the weight."""
    if not 0 <= items < math.inf:
        raise InvalidArgumentError(
            f"{_BACKWARD}: weight must be finite and at least 0, got {items!r}; a rank with "
            "nothing to add calls backward(None, weight=0)"
        )
    if reduction not in ("mean", "sum"):
        raise InvalidArgumentError(
            f'{_BACKWARD}: reduction must be "mean" or "sum", got {reduction!r}'
        )
    if loss is None:
        if items > 0:
            raise InvalidArgumentError(
                f"{_BACKWARD}: loss may be None only with weight=0, got weight={items!r}"
            )
    elif not isinstance(loss, torch.Tensor):
        raise InvalidTypeError(
            f"{_BACKWARD}: loss must be a tensor or None, got {type(loss).__name__}"
        )
    elif loss.numel() != 1:
        raise InvalidArgumentError(
            f"{_BACKWARD}: loss must have one element, got shape {list(loss.shape)}; reduce it, "
            "for example to loss.mean() with weight=loss.numel()"
        )
    elif not loss.requires_grad and items > 0:
        raise UsageError(
            f"{_BACKWARD}: the loss does not require grad, it must depend on the parameters; a "
            "rank with nothing to add calls backward(None, weight=0)"
        )

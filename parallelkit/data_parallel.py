"""Data parallelism: every rank runs the same module, gradients are means over all ranks' items."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy

from .arguments import Weight
from .broadcast import broadcast
from .buckets import GradientBuckets
from .errors import InvalidArgumentError, InvalidTypeError, UsageError
from .gradient_sync import GradientSync
from .group import Group, default_group
from .together import check_alike, together

__all__ = ["DataParallel"]


class DataParallel(nn.Module):
    """Wraps a module so that each gradient is the exact mean over all items of all ranks.

    The life of a gradient: autograd's result goes into a bucket, a flat buffer that every rank of
    the host reaches, and `.grad` becomes a view of it; a complete bucket travels, while backward
    still runs; after `backward`, `.grad` is the mean.

    Making one is collective, and so is `backward` with `sync=True`: every rank calls it equally
    often, one without work as `backward(None, weight=0)`. With `sync=False` ranks need not agree.
    `state_dict`, `named_parameters` and attributes are those of the module, without prefix.

    A parameter that some ranks have frozen, or do not use, counts as zeros there and gets the mean
    as its gradient like everywhere; an optimizer of the same parameters on every rank keeps
    replicas equal then too.

    Args:
        module: any module, already where it belongs (`.to(...)` comes before); its parameters and
            buffers become those of rank 0.
        group: the ranks, a Group or one dimension of a DeviceMesh. Default: all (`pk.init()`).
        bucket_mb: MiB in a bucket, about. Smaller ones leave earlier, larger ones cost less in all.
        grad_dtype: sums gradients in this dtype where it is wider than the parameter's. They are
            rounded once after the sync, unless a `ShardedAdamW` takes them. Default: as parameters.
        overlap: let buckets travel while backward runs. It starts with the second synced backward.
        broadcast_buffers: with each sync, buffers become those of the first rank that had work.

    Attributes:
        module: the wrapped module.
        group: the ranks.

    Raises:
        InvalidArgumentError, InvalidTypeError: a bad argument, or a parameter on another device
            than the group. These and the next are raised on every rank.
        CollectiveMismatchError: ranks differ in names, shapes or dtypes of parameters or buffers.
    """

    def __init__(
        self,
        module: nn.Module,
        group: Group | DeviceMesh | None = None,
        *,
        bucket_mb: float = 25.0,
        grad_dtype: torch.dtype | None = None,
        overlap: bool = True,
        broadcast_buffers: bool = True,
    ) -> None:
        super().__init__()
        self.module = module
        self.group = default_group(group)
        self._agree(bucket_mb, grad_dtype, broadcast_buffers)
        broadcast([*module.parameters(), *module.buffers()], 0, self.group)
        self._buckets = GradientBuckets(self.group, int(bucket_mb * 2**20), grad_dtype)
        self._sync = GradientSync(module, self.group, self._buckets, overlap, broadcast_buffers)
        self.register_load_state_dict_pre_hook(_with_prefix)  # type: ignore[no-untyped-call]

    def _agree(
        self, bucket_mb: float, grad_dtype: torch.dtype | None, broadcast_buffers: bool
    ) -> None:
        """Refuse what cannot work, or differs between ranks, on every rank alike."""

        def describe() -> list[str]:
            self._check(bucket_mb, grad_dtype)
            tensors = (*self.module.named_parameters(), *self.module.named_buffers())
            return [
                f"bucket_mb {bucket_mb}, grad_dtype {grad_dtype}",
                f"broadcast_buffers {broadcast_buffers}",
                *(f"{name} {tensor.dtype}{list(tensor.shape)}" for name, tensor in tensors),
            ]

        check_alike("DataParallel", together(self.group, describe, "DataParallel"))

    def _check(self, bucket_mb: float, grad_dtype: torch.dtype | None) -> None:
        """Raise unless the arguments of the constructor make sense on this rank."""
        if not isinstance(self.module, nn.Module):
            raise InvalidTypeError(
                f"DataParallel: module must be a torch.nn.Module, got {type(self.module).__name__}"
            )
        if not isinstance(bucket_mb, (int, float)) or not 0 < bucket_mb < math.inf:
            raise InvalidArgumentError(
                f"DataParallel: bucket_mb must be a finite number above 0, got {bucket_mb!r}"
            )
        if grad_dtype is not None and not (
            isinstance(grad_dtype, torch.dtype) and grad_dtype.is_floating_point
        ):
            raise InvalidArgumentError(
                f"DataParallel: grad_dtype must be a floating-point dtype, got {grad_dtype!r}"
            )
        for name, tensor in (*self.module.named_parameters(), *self.module.named_buffers()):
            if is_lazy(tensor):
                raise InvalidArgumentError(
                    f"DataParallel: {name} has no shape before the module has run; run it once on "
                    "some input before wrapping it"
                )
            if tensor.device.type != self.group.device.type:
                raise InvalidArgumentError(
                    f"DataParallel: {name} must be on the group's device {self.group.device}, got "
                    f"{tensor.device}; move the module before wrapping it"
                )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward."""
        if torch.compiler.is_compiling():
            return self.module(*args, **kwargs)
        self._sync.get_ready()
        output = self.module(*args, **kwargs)
        if torch.is_grad_enabled():
            self._sync.watch(output)
        return output

    def backward(
        self,
        loss: torch.Tensor | None,
        weight: Weight = 1.0,
        *,
        reduction: str = "mean",
        sync: bool = True,
    ) -> None:
        """Backward of one micro-batch, and with `sync` the mean over all of them on all ranks.

            i micro-batches of all ranks since zero_grad, w_i their weights, L_i their losses
            "mean"   .grad <- gradient of sum_i w_i L_i / sum_i w_i
            "sum"    .grad <- gradient of sum_i L_i / sum_i w_i

        Args:
            loss: scalar; None where a rank has nothing to add, with weight 0.
            weight: number of items (examples, tokens) that the loss is a mean of, or the sum over;
                int, float or 0-dim tensor, at least 0. With 0 autograd does not run. Default: 1.
            reduction: "mean" or "sum", what the loss is over its items.
            sync: False only accumulates; ranks may do that any number of times.

        A parameter that no rank used since zero_grad keeps `grad is None`. Plain `loss.backward()`
        is this with weight 1.

        Raises:
            InvalidArgumentError, InvalidTypeError: a bad weight, loss or reduction.
            UsageError: (a RuntimeError) the gradients are a mean already and were not cleared
                since, the module was moved, or another rank failed. With `sync` every rank raises
                where one does, also for reasons of its own; what was accumulated is dropped then,
                and the next step works.
            PeerLostError, CollectiveTimeoutError: as for the collectives.
        """
        self._sync.backward(loss, weight, reduction, sync)

    @property
    def total_weight(self) -> torch.Tensor:
        """The weight of all ranks' micro-batches in the last sync, 0-dim float64."""
        return self._buckets.total_weight

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Passes whose forward runs inside only accumulate; so does `backward` called inside."""
        before, self._sync.enabled = self._sync.enabled, False
        try:
            yield
        finally:
            self._sync.enabled = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The module's; it also forgets what was accumulated."""
        self.module.zero_grad(set_to_none)
        if self._buckets.private:
            self._buckets.reset()

    def take_gradients(self) -> GradientBuckets:
        """For an optimizer that reduces gradients itself: from now on they stay in the buckets.

        What it does with them is written in parallelkit/buckets.py.
        """
        if self._buckets.private:
            raise UsageError(
                "DataParallel: an optimizer has these gradients already; give one ShardedAdamW all "
                "parameters, in as many groups as needed"
            )
        self._sync.forget()
        self._buckets.private = True
        return self._buckets

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """The module's; with `assign` parameters would leave their buckets, so it is refused."""
        if assign:
            raise InvalidArgumentError(
                "DataParallel.load_state_dict: assign=True would replace the wrapped parameters; "
                "load into the module before wrapping it, or use assign=False"
            )
        return self.module.load_state_dict(state_dict, strict)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """The module's."""
        yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The module's."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The module's."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def _fqn_modifiers(self) -> dict[str, str]:
        """torch.distributed.checkpoint asks which children are no part of names."""
        return {"module": "module"}

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise UsageError(f"DataParallel cannot be copied: {_OWN_THE_MODULE}")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(f"DataParallel cannot be pickled: {_OWN_THE_MODULE}")


_OWN_THE_MODULE = (
    "it belongs to the group's running ranks; copy or save model.module, or model.state_dict()"
)


def _with_prefix(
    model: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
) -> None:
    """Where a module around ours loads: our names have no "module." in them, torch wants it."""
    for name in [name for name in state_dict if name.startswith(prefix)]:
        state_dict[f"{prefix}module.{name[len(prefix) :]}"] = state_dict.pop(name)

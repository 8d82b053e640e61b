"""Gradient buckets: flat buffers in memory that every rank reaches, and the sums they hold.

A bucket is one flat buffer for the gradients of several parameters of one dtype; each parameter's
gradient is a view of it that starts on its own cache line and has the parameter's strides where
those are dense. Padding between views stays zero.

What the buckets hold, of the micro-batches i since the last reset, each with a weight w_i:

    flat = sum_i (w_i / reference) * gradient_i          weight = sum_i w_i

`reference` is chosen so that no count ever multiplies a gradient up (`next_reference`). The mean
over all ranks r is sum_r reference_r * flat_r / sum_r weight_r: a collective with weight=weight,
scale=reference and reduction "sum" gives it.

Private gradients, for an optimizer that reduces and steps in one pass:

    buckets = model.take_gradients()    from now on backward never communicates, and `.grad` is
                                        None once it returns; the local sums stay here
    for bucket in buckets: ...          in this order, equal on every rank; buckets are only ever
                                        appended (when a frozen parameter became trainable)
    buckets.settle()                    before reading: zeroes what no micro-batch wrote
    bucket.flat                         [n] the sums above, made by `Group.empty`
    bucket.slots                        one a parameter: .parameter .offset .numel .used, where
                                        `used` says that some micro-batch of THIS rank wrote it
    buckets.weight, buckets.reference   as above; 0.0 and 1.0 where nothing was accumulated. A rank
                                        of weight 0 used nothing, and its flats are not to be read
    buckets.total_weight = ...          after the step: of all ranks, for `model.total_weight`
    buckets.reset()                     after the step, and for zero_grad: forget the sums
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .errors import UsageError
from .group import Group
from .ops import DTYPE_CODES, cpu
from .prepared import PreparedAllReduce

__all__ = ["LINE_BYTES", "Bucket", "GradientBuckets", "Slot", "Spec", "next_reference"]

LINE_BYTES = 64  # a cache line: every parameter and gradient begins on one

_LARGE = 16 << 20  # bytes of a bucket; measured: to copy past the caches wins from 8 MiB on


class Spec(NamedTuple):
    """What places a parameter's gradient; equal on every rank."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, name: str, parameter: torch.Tensor) -> Spec:
        """The place for `parameter`: in its own strides, or row-major where those are not dense."""
        dense = torch.ops.aten.is_non_overlapping_and_dense(parameter)
        stride = (
            parameter.stride() if dense else torch.empty(parameter.shape, device="meta").stride()
        )
        return cls(name, tuple(parameter.shape), tuple(stride), parameter.dtype)


@dataclass(eq=False)
class Slot:
    """The place of one parameter's gradient in a bucket."""

    name: str
    parameter: torch.Tensor
    bucket: int  # number of the bucket
    offset: int  # in elements of it
    numel: int
    view: torch.Tensor
    rounded: torch.Tensor | None  # the mean in the parameter's dtype, where the bucket is wider
    dtype: torch.dtype  # of the parameter
    large: bool  # the bucket is, so that what is copied here is in no cache when it is read
    used: bool = False
    largest: float = math.inf  # no element of `view` is larger in magnitude, if this is finite

    def __post_init__(self) -> None:
        shown = [tensor for tensor in (self.view, self.rounded) if tensor is not None]
        self._places = [(tensor, tensor.data_ptr()) for tensor in shown]

    def in_place(self) -> bool:
        """Whether what is shown as gradient still lies in the bucket.

        `module.to(dtype)` moves gradients too, by giving their tensors other memory.
        """
        return all(tensor.data_ptr() == place for tensor, place in self._places)

    def fold(self, private: bool) -> None:
        """Bring what lies in `.grad` into the bucket; `.grad` is then the view, or None if private.

        Autograd leaves the buffer there that an operator wrote. To copy it here moves less memory
        than to let autograd add it to a zeroed view.
        """
        gradient = self.parameter.grad
        if gradient is None or gradient is self.view:
            return
        gradient = gradient.detach()
        if gradient.layout != torch.strided:
            gradient = gradient.to_dense()
        self.largest = math.inf
        if private and self.used:
            self.view.add_(gradient)
        else:
            self.largest = _copy(self.view, gradient, self.large)
        self.used = True
        self.show(None if private else self.view)

    def show(self, gradient: torch.Tensor | None) -> None:
        """Make it the parameter's `.grad`."""
        parameter = self.parameter
        if gradient is not None and gradient.dtype != parameter.grad_dtype:
            parameter.grad = None
            parameter.grad_dtype = gradient.dtype
        parameter.grad = gradient


@dataclass(eq=False)
class Bucket:
    """A flat buffer and the gradients in it, all of parameters of one dtype."""

    flat: torch.Tensor
    slots: list[Slot]
    narrow: torch.Tensor | None  # as `flat`, in the parameters' dtype, where `flat` is wider
    reduction: PreparedAllReduce
    missing: int = 0  # gradients that the running backward has yet to bring
    version: int = -1  # of `flat`, after what we wrote last

    @classmethod
    def make(
        cls,
        number: int,
        members: Sequence[tuple[Spec, torch.Tensor]],
        dtype: torch.dtype,
        group: Group,
    ) -> Bucket:
        """The bucket of this number, of `dtype`, for the members. Collective."""
        line = max(1, LINE_BYTES // dtype.itemsize)
        offsets, end = [], 0
        for spec, _ in members:
            offsets.append(end)
            end += -(-math.prod(spec.shape) // line) * line
        flat = group.empty(end, dtype=dtype).zero_()
        own = members[0][0].dtype
        narrow = None if own == dtype else torch.zeros_like(flat, dtype=own)
        slots = []
        for (spec, parameter), offset in zip(members, offsets, strict=True):
            view = flat.as_strided(spec.shape, spec.stride, offset)
            rounded = None if narrow is None else narrow.as_strided(spec.shape, spec.stride, offset)
            place = number, offset, math.prod(spec.shape)
            large = flat.nbytes >= _LARGE
            slots.append(Slot(spec.name, parameter, *place, view, rounded, parameter.dtype, large))
        return cls(flat, slots, narrow, PreparedAllReduce(flat, group, "sum"))

    def settle(self, private: bool) -> None:
        """Fold gradients that somebody put in `.grad` by hand, and zero the unused ones."""
        for slot in self.slots:
            if not private:
                slot.fold(private)
                slot.used = slot.parameter.grad is not None
            if not slot.used:
                slot.view.zero_()

    def show_mean(self, used: Iterable[bool]) -> None:
        """After the reduction: make each gradient visible that some rank used, and no other."""
        if self.narrow is not None:
            self.narrow.copy_(self.flat)
        for slot, some in zip(self.slots, used, strict=True):
            mean = slot.view if slot.rounded is None else slot.rounded
            slot.show(mean if some else None)


class GradientBuckets:
    """The buckets of a model, in the order in which they travel, and the sums in them.

    Args:
        group: the ranks that average.
        bucket_bytes: about how large a bucket is; a larger parameter has its own.
        grad_dtype: wider dtype for the sums; default: each parameter's own.
    """

    def __init__(self, group: Group, bucket_bytes: int, grad_dtype: torch.dtype | None) -> None:
        self._group, self._bucket_bytes, self._grad_dtype = group, bucket_bytes, grad_dtype
        self._buckets: list[Bucket] = []
        self.slot_of: dict[torch.Tensor, Slot] = {}  # by parameter, bucket by bucket
        self.private = False  # nobody but an optimizer sees the gradients, and `.grad` is None
        self.weight, self.reference = 0.0, 1.0
        self.total_weight = torch.zeros((), dtype=torch.float64, device=group.device)

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self._buckets)

    def __len__(self) -> int:
        return len(self._buckets)

    def __getitem__(self, index: int) -> Bucket:
        return self._buckets[index]

    def append(self, members: Sequence[tuple[Spec, torch.Tensor]]) -> None:
        """Place more parameters, the last first, as backward brings them. Collective."""
        filling: dict[torch.dtype, list[tuple[Spec, torch.Tensor]]] = {}
        filled: dict[torch.dtype, int] = {}
        parts = []
        for spec, parameter in reversed(members):
            size = math.prod(spec.shape) * self._sum_dtype(spec.dtype).itemsize
            if filled.get(spec.dtype, 0) + size > self._bucket_bytes and spec.dtype in filling:
                parts.append(filling.pop(spec.dtype))
                filled[spec.dtype] = 0
            filling.setdefault(spec.dtype, []).append((spec, parameter))
            filled[spec.dtype] = filled.get(spec.dtype, 0) + size
        for part in [*parts, *filling.values()]:
            dtype = self._sum_dtype(part[0][0].dtype)
            bucket = Bucket.make(len(self._buckets), part, dtype, self._group)
            self._buckets.append(bucket)
            self.slot_of |= {slot.parameter: slot for slot in bucket.slots}

    def _sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.promote_types(dtype, self._grad_dtype) if self._grad_dtype else dtype

    def open(
        self,
        weight: float,
        reduction: str,
        dtype: torch.dtype,
        outside: Sequence[torch.Tensor] = (),
    ) -> float:
        """Make room for one more micro-batch; the factor its loss needs.

        Args:
            weight: of the micro-batch, above 0.
            reduction: "mean" or "sum", what its loss is.
            dtype: of its loss, which the factor has to fit.
            outside: gradients of the same sum that have no bucket yet.
        """
        halves = (torch.float16, torch.bfloat16)
        exact = dtype in halves or any(b.flat.dtype == torch.float16 for b in self._buckets)
        unit = weight if reduction == "mean" else 1.0
        total = self.weight + weight
        reference = self.reference if self.weight else 0.0
        following = next_reference(reference, weight, unit, total, exact)
        if reference not in (0.0, following):
            self.settle()
            for part in (*(bucket.flat for bucket in self._buckets), *outside):
                part.mul_(reference / following)
            for slot in self.slot_of.values():
                slot.largest = math.inf
        self.weight, self.reference = total, following
        return unit / following

    @contextlib.contextmanager
    def in_sight(self) -> Iterator[None]:
        """Let a backward pass see sums that are private, and so add to them in place."""
        seen = [
            s for s in self.slot_of.values() if self.private and s.used and s.parameter.grad is None
        ]
        for slot in seen:
            slot.largest = math.inf
            slot.show(slot.view)
        try:
            yield
        finally:
            for slot in seen:
                slot.show(None)

    def settle(self) -> None:
        """Make every flat buffer what the sums say, whatever was done to `.grad` meanwhile."""
        for bucket in self._buckets:
            bucket.settle(self.private)

    def open_plain(self) -> None:
        """Count a micro-batch whose loss was not multiplied by anything: of weight 1, as a mean."""
        if self.weight and self.reference != 1.0:
            raise UsageError(
                "DataParallel: a plain loss.backward() came after backward(loss, weight=...) in "
                "one accumulation; use model.backward for all of its micro-batches"
            )
        self.weight, self.reference = self.weight + 1.0, 1.0

    def cleared(self, reduced: bool, besides: Slot | None = None) -> bool:
        """Whether every gradient is None or zero because somebody cleared it.

        Zeros of our own making do not count: a micro-batch of zero gradient still has its weight.

        Args:
            reduced: the gradients are a mean already, of which zeros need no closer look.
            besides: do not look at this one.
        """
        if self.private:
            return False
        for bucket in self._buckets:
            for slot in bucket.slots:
                gradient = slot.parameter.grad
                if gradient is None or slot is besides:
                    continue
                ours = gradient is slot.view and bucket.flat._version == bucket.version
                if (ours and not reduced) or bool(gradient.any()):
                    return False
        return True

    def largest(self) -> float:
        """No element of the sums is larger in magnitude; infinity where that is not known.

        Known it is, at no cost, where each gradient was copied here once.
        """
        return max((slot.largest for slot in self.slot_of.values() if slot.used), default=0.0)

    def reset(self) -> None:
        """Forget the sums."""
        self.weight, self.reference = 0.0, 1.0
        for slot in self.slot_of.values():
            slot.used, slot.largest = False, math.inf


def _copy(view: torch.Tensor, gradient: torch.Tensor, stream: bool) -> float:
    """Copy a gradient to its place; the largest magnitude, infinity where that is not known.

    Args:
        stream: past the caches: lines that are to be overwritten are not read first.
    """
    if (
        cpu is None
        or type(gradient) is not torch.Tensor
        or (gradient.dtype, gradient.device) != (view.dtype, view.device)
        or gradient.dtype not in DTYPE_CODES
        or gradient.device.type != "cpu"
        or not (
            gradient.stride() == view.stride()  # which is dense
            or (gradient.is_contiguous() and view.is_contiguous())
        )
        or gradient.is_neg()
    ):
        view.copy_(gradient)
        return math.inf
    threads = torch.get_num_threads()
    addresses = view.data_ptr(), gradient.data_ptr()
    code = DTYPE_CODES[view.dtype]
    return float(cpu.copy_gradient(*addresses, view.numel(), code, threads, stream))


def next_reference(
    reference: float, weight: float, unit: float, total: float, exact: bool
) -> float:
    """The reference weight of a sum of gradients that takes in one more.

    The gradient comes in times unit / reference, what was there is multiplied by old / new. Neither
    factor is a count: the first is at most 1, the second at most 2.

    Args:
        reference: the present one; 0 where there is no sum yet.
        weight: of the micro-batch.
        unit: what its loss is to be multiplied by to be a sum over its items: weight where it is a
            mean, 1 where it is a sum already.
        total: of the weights with this one.
        exact: the factor unit / reference has to be a power of two, and the sum must stay within
            the range of the gradients themselves, because they or the loss have few bits.

    Returns:
        Without `exact`, the largest weight so far, so that equal ones need no second pass over the
        sum. With it unit * 2^k, at least total: a running mean.
    """
    if not exact and weight <= reference:
        return reference
    mantissa, exponent = math.frexp((total if exact else weight) / unit)
    return math.ldexp(unit, exponent - 1 if mantissa == 0.5 else exponent)

"""One entry into the group for sibling column layers that read the same activation.

    q, k, v = x·Qᵀ, x·Kᵀ, x·Vᵀ     dx = Σ over ranks and siblings of dz·W

The siblings' weights enter with x. Backward each sibling adds to the gradient of x; when all have,
its sum over the ranks travels while the gradients of their weights are computed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from parallelkit.group import Group
from parallelkit.nn import exchange
from parallelkit.nn import product_ops as ops
from parallelkit.nn.column_op import InputGradient, output_gradient, product
from parallelkit.nn.linear_op import parameter_gradients, rows

if TYPE_CHECKING:
    from parallelkit.nn.linear import ColumnParallelLinear

__all__ = ["Entry", "SharedInput"]

Tensor = torch.Tensor
# What a sibling's backward leaves to do for its weight: its number, dz [M, N_r], x [M, K], kernels.
Left = list[tuple[int, Tensor, Tensor, str]]


class Entry(NamedTuple):
    """An activation that has entered the group for several layers."""

    x: Tensor  # whole
    left: Left  # by the backward pass that is under way

    @classmethod
    def of(cls, x: Tensor, layers: Sequence[ColumnParallelLinear]) -> Entry:
        """Let x enter for these layers, as the first of them takes it."""
        left: Left = []
        operands = [operand for layer in layers for operand in layer.operands()]
        tokens = layers[0].whole_tokens(x)
        entered = _Enter.apply(x, left, layers[0].group, tokens, *operands)  # type: ignore[no-untyped-call]
        return cls(entered, left)

    def linear(
        self, number: int, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
    ) -> Tensor:
        """act(x·Wᵀ + b) of the layer of this number; operands as under autocast."""
        weight, bias = weight.detach(), None if bias is None else bias.detach()
        return _Sibling.apply(  # type: ignore[no-untyped-call, no-any-return]
            x, weight, bias, activation, self.left, number
        )


class SharedInput:
    """What q, k and v, or gate and up, read: entered once, by whichever of them comes first.

    This is what makes a transformer block cost two all-reduces each way however many column layers
    it has. Only the identity of tensors counts: a sibling that reads something else enters that for
    itself.

    Args:
        layers: the siblings.
    """

    def __init__(self, layers: Sequence[ColumnParallelLinear]) -> None:
        self.layers = layers
        self.early = False  # the module around the layers lets it enter, before any of them
        self._unread = 0
        self._entry: Entry | None = None
        self._source: Callable[[], Tensor | None] = lambda: None
        self._state: object = None

    def enter(self, x: Tensor) -> Entry:
        """The entry of x, new where this x, or what it entered as, has not just been here."""
        state = x._version, torch.is_grad_enabled()
        entry = self._entry
        if entry is not None and (x is entry.x or (x is self._source() and state == self._state)):
            self._unread -= 1
        else:
            entry = self._entry = Entry.of(x, self.layers)
            self._source, self._state = weakref.ref(x), state
            self._unread = len(self.layers) + self.early - 1
        if self._unread == 0:
            self._entry = None  # keeps nothing alive
        return entry


class _Enter(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        left: Left,
        group: Group,
        whole_tokens: int | None,
        *operands: Tensor | None,
    ) -> Tensor:
        ctx.left, ctx.group, ctx.sequence = left, group, whole_tokens is not None
        ctx.save_for_backward(*operands)
        if whole_tokens is None:
            return x.view_as(x)
        return exchange.all_gather(x, x.ndim - 2, whole_tokens, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:
        operands = ctx.saved_tensors
        needs_x, _, _, _, *needed = ctx.needs_input_grad
        started = None
        if needs_x:
            started = InputGradient(dx, ctx.group, ctx.sequence)
            started.tensor.copy_(started.moved(dx))
            started.start()
        gradients: list[Tensor | None] = [None] * len(operands)
        for number, dz, x, kernels in ctx.left:
            both = slice(2 * number, 2 * number + 2)
            weight, bias = operands[both]
            needs_weight, needs_bias = needed[both]
            found = parameter_gradients(dz, x, weight, bias, needs_weight, needs_bias, kernels)
            gradients[both] = [
                old if new is None else new if old is None else old + new
                for old, new in zip(gradients[both], found, strict=True)
            ]
        ctx.left.clear()
        total = None if started is None else started.finish()
        return total, None, None, None, *gradients


class _Sibling(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str | None,
        left: Left,
        number: int,
    ) -> Tensor:
        ctx.left, ctx.number = left, number
        return product(ctx, x, weight, bias, activation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, _, _ = ctx.saved_tensors
        dz = output_gradient(ctx, dy)
        ctx.left.append((ctx.number, dz, rows(x), ctx.kernels))
        dx = ops.input_gradient(dz, weight, None, None, False, ctx.kernels).view(x.shape)
        return dx, None, None, None, None, None

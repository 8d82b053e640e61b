"""The column layer as a function with its derivative.

    y_r = act(x·W_rᵀ + b_r)     dx = Σ_r dz_r·W_r     dW_r = dz_rᵀ·x

x enters the group first: whole on every rank, or gathered from shards of its tokens. Backward, its
gradient is a sum over the ranks, of which each then keeps its tokens where x was a shard. That sum
travels while the weights' gradients are computed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from parallelkit.group import Group
from parallelkit.nn import exchange
from parallelkit.nn import product_ops as ops
from parallelkit.nn.kernel_choice import current_kernels
from parallelkit.nn.linear_op import linear_into, parameter_gradients, rows
from parallelkit.nn.term import Term
from parallelkit.ops import wide_dtype

__all__ = ["InputGradient", "column_linear", "output_gradient", "product"]

Tensor = torch.Tensor

# From here on a sum is worth a thread of its own beside the weight's gradient; an estimate.
_OVERLAP_BYTES = 1 << 20


class InputGradient:
    """Σ_r dx_r in the making; with `sequence`, of which this rank gets its tokens.

    Args:
        x: what the ranks differentiate by, [..., K]; its shape and dtype count.
    """

    def __init__(self, x: Tensor, group: Group, sequence: bool) -> None:
        self._sequence, self._dtype = sequence, x.dtype
        self._term = Term(group, self.moved(x).shape, wide_dtype(x.dtype))
        self.tensor = self._term.tensor

    def moved(self, x: Tensor) -> Tensor:
        """[..., K] in the order of `tensor`: what is cut comes first."""
        return x.movedim(-2, 0) if self._sequence else x

    def start(self) -> None:
        """Let it travel, once this rank's term is in `tensor`."""
        if self.tensor.nbytes >= _OVERLAP_BYTES:
            self._term.start(scatter=self._sequence)

    def finish(self) -> Tensor:
        """The sum."""
        if not self._sequence:
            return self._term.finish(self._dtype)
        shard = self._term.scatter().movedim(0, -2)
        return shard.to(self._dtype, memory_format=torch.contiguous_format)


def column_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    group: Group,
    whole_tokens: int | None,
) -> Tensor:
    """act(x·W_rᵀ + b_r).

        x [..., K]     W_r [N_r, K]     b_r [N_r]     y_r [..., N_r]

    Args:
        x: equal on every rank; with `whole_tokens`, this rank's shard along dimension -2.
        weight, bias, activation: as for `linear`; this rank's outputs.
        group: the ranks.
        whole_tokens: how long dimension -2 is in all; None where x is whole.
    """
    return _ColumnLinear.apply(  # type: ignore[no-untyped-call, no-any-return]
        x, weight, bias, activation, group, whole_tokens
    )


class _ColumnLinear(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str | None,
        group: Group,
        whole_tokens: int | None,
    ) -> Tensor:
        if whole_tokens is not None:
            x = exchange.all_gather(x, x.ndim - 2, whole_tokens, group)
        ctx.group, ctx.sequence = group, whole_tokens is not None
        return product(ctx, x, weight, bias, activation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, _ = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dz = output_gradient(ctx, dy)
        dx, started = None, None
        if needs_x and torch.compiler.is_compiling():
            dx = ops.input_gradient(dz, weight, None, None, False, ctx.kernels).view(x.shape)
            if ctx.sequence:
                dx = exchange.reduce_scatter(dx, x.ndim - 2, ctx.group)
            else:
                dx = exchange.all_reduce(dx, ctx.group)
        elif needs_x:
            started = InputGradient(x, ctx.group, ctx.sequence)
            of_tokens = started.moved(dz.view(*x.shape[:-1], dz.shape[1]))
            linear_into(started.tensor, of_tokens, weight.T)
            started.start()
        dweight, dbias = parameter_gradients(
            dz, rows(x), weight, bias, needs_weight, needs_bias, ctx.kernels
        )
        if started is not None:
            dx = started.finish()
        return dx, dweight, dbias, None, None, None


def product(
    ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> Tensor:
    """act(x·Wᵀ + b), with what `output_gradient` needs kept in ctx."""
    kernels, keep = current_kernels(), activation is not None
    y, pre = ops.forward(rows(x), weight, bias, None, activation, False, keep, kernels)
    ctx.save_for_backward(x, weight, bias, pre)
    ctx.activation, ctx.kernels = activation, kernels
    return y.view(*x.shape[:-1], y.shape[1])  # type: ignore[no-any-return]


def output_gradient(ctx: Any, dy: Tensor) -> Tensor:
    """dz [M, N_r], the gradient of x·Wᵀ + b."""
    dz = rows(dy)
    if ctx.activation is None:
        return dz
    pre = ctx.saved_tensors[3]
    return ops.activation_gradient(dz, pre, ctx.activation, False, ctx.kernels)  # type: ignore[no-any-return]

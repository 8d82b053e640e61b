"""Two linear layers with an activation between them, as one operator with one derivative."""

from __future__ import annotations

from typing import Any

import torch

from parallelkit.errors import InvalidArgumentError
from parallelkit.nn import product_ops as ops
from parallelkit.nn.kernel_choice import current_kernels
from parallelkit.nn.linear_op import (
    cast_for_autocast,
    check,
    check_operands,
    composed,
    differentiates,
    is_plain,
    parameter_gradients,
    rows,
)

__all__ = ["mlp"]

Tensor = torch.Tensor


def mlp(
    x: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "gelu",
    residual: Tensor | None = None,
    *,
    gated: bool = False,
) -> Tensor:
    """h·W₂ᵀ + b₂ + residual with h = act(x·W₁ᵀ + b₁).

        x [..., K]     W₁ [F, K], gated [2F, K]     h [..., F]     W₂ [N, F]     y [..., N]

    What two calls of `linear` cannot do: in the backward pass act' is applied where the gradient of
    h is made, in the epilogue of dy·W₂; that gradient itself is never stored. With column-split W₁
    and row-split W₂ it gives a rank's share of the sum.

    Args:
        x: float tensor of any strides.
        up: W₁; gated, the gate's rows first.
        down: W₂.
        up_bias: b₁, or None.
        down_bias: b₂, or None.
        activation: "relu", "gelu", "gelu_tanh" or "silu".
        residual: [..., N], added last, or None.
        gated: h = act(first half) ⊙ second half of x·W₁ᵀ + b₁.
    Returns:
        y.
    Raises:
        InvalidArgumentError: shapes that do not fit, or an unknown activation.
        InvalidTypeError: operands of different or non-float dtypes.
        UsageError: a second derivative was asked for where the operator is fused.
    """
    check_operands(
        "mlp", x=x, up=up, down=down, up_bias=up_bias, down_bias=down_bias, residual=residual
    )
    x, up, down, up_bias, down_bias = cast_for_autocast(x, up, down, up_bias, down_bias)
    if activation is None:
        raise InvalidArgumentError("mlp: activation must not be None; that is one linear layer")
    check("mlp: up", x, x.shape, up, up_bias, activation, None, gated)
    features = up.shape[0] // 2 if gated else up.shape[0]
    check("mlp: down", x, (*x.shape[:-1], features), down, down_bias, None, residual, False)
    kernels = current_kernels()
    if is_plain(x, kernels):
        h = composed(x, up, up_bias, activation, None, gated)
        return composed(h, down, down_bias, None, residual, False)
    keep = differentiates(x, up, down, up_bias, down_bias)
    flat_residual = None if residual is None else rows(residual)
    y, _, _ = _mlp(
        rows(x), up, down, up_bias, down_bias, flat_residual, activation, gated, keep, kernels
    )
    return y.view(*x.shape[:-1], y.shape[1])  # type: ignore[no-any-return]


def _forward(
    x: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    gated: bool,
    keep: bool,
    kernels: str,
) -> tuple[Tensor, Tensor, Tensor]:
    h, pre = ops.forward(x, up, up_bias, None, activation, gated, keep, kernels)
    y, _ = ops.forward(h, down, down_bias, residual, None, False, False, kernels)
    return y, h, pre


def _shapes(
    x: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    gated: bool,
    keep: bool,
    kernels: str,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    y = x.new_empty((x.shape[0], down.shape[0]), dtype=dtype)
    h = x.new_empty((x.shape[0], down.shape[1]))
    return y, h, x.new_empty((x.shape[0], up.shape[0]) if keep else (0,))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, up, down, up_bias, down_bias, _, activation, gated, _, kernels = inputs
    _, h, pre = output
    ctx.mark_non_differentiable(h, pre)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, up, down, up_bias, down_bias, h, pre)
    ctx.activation, ctx.gated, ctx.kernels = activation, gated, kernels


def _backward(ctx: Any, dy: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 10
    x, up, down, up_bias, down_bias, h, pre = ctx.saved_tensors
    kernels = ctx.kernels
    needs_x, needs_up, needs_down, needs_up_bias, needs_down_bias, needs_residual = (
        ctx.needs_input_grad[:6]
    )
    dy_narrow = dy.to(x.dtype)
    dx = dup = dup_bias = None
    if needs_x or needs_up or needs_up_bias:
        dz = ops.input_gradient(dy_narrow, down, pre, ctx.activation, ctx.gated, kernels)
        dx = ops.input_gradient(dz, up, None, None, False, kernels) if needs_x else None
        dup, dup_bias = parameter_gradients(dz, x, up, up_bias, needs_up, needs_up_bias, kernels)
    ddown, ddown_bias = parameter_gradients(
        dy_narrow, h, down, down_bias, needs_down, needs_down_bias, kernels
    )
    dresidual = dy if needs_residual else None
    return dx, dup, ddown, dup_bias, ddown_bias, dresidual, None, None, None, None


_mlp = ops.define(
    "mlp(Tensor x, Tensor up, Tensor down, Tensor? up_bias, Tensor? down_bias, Tensor? residual,"
    " str activation, bool gated, bool keep, str kernels) -> (Tensor, Tensor, Tensor)",
    _forward,
    _shapes,
)
ops.set_gradient(_mlp, _save, _backward)
